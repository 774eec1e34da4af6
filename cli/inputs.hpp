// What loss and check work on: hidden [R,H], weight [V,H] and targets [R], or logits [R,V] and targets, and the tensors
// of options, from files, with ranks and dtypes checked before anything is computed; extents of the first four against
// each other here, those of the others by the library.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "command.hpp"
#include "logitless/logitless.hpp"

namespace logitless::cli {

// Tensors of options; the table in inputs.cpp is in this order.
inline constexpr std::size_t option_inputs = 17;

struct InputFlags {
  std::string hidden, weight, logits, targets;  // FILE[:NAME], "" not given
  DType dtype = DType::none;                    // convert hidden, weight and logits to it first
  bool npy_bf16 = false;
  std::array<std::string, option_inputs> options;  // FILE[:NAME] in the table's order, "" not given
  std::string row_temperature;
  bool shift = false;  // targets are token ids, of the sequences that cu_seqlens says
  std::string cu_seqlens;

  bool any() const { return !(hidden.empty() && weight.empty() && logits.empty() && targets.empty()); }
  // The files behind the specs that are given.
  std::vector<std::string> paths() const;
};
void add_input_flags(CLI::App& app, InputFlags& flags);
// The files of options, and --shift.
void add_option_inputs(CLI::App& app, InputFlags& flags);

struct Inputs {
  Kind kind = Kind::linear;
  std::int64_t rows = 0, hidden = 0, vocab = 0;
  ConstTensor x, w, z, y;
  Arguments options;                                // the tensors of options alone
  bool topk_log = false;                            // options.topk_probs are log-probabilities
  std::vector<std::shared_ptr<const void>> owners;  // what keeps the views' bytes

  // The problem with gradients in the inputs' dtypes (or fp32), or without any.
  Problem problem(bool grad_hidden, bool grad_weight, bool grad_logits, bool grad_f32) const;
  Arguments arguments() const;
  // Rows that are not ignored.
  std::int64_t kept(std::int64_t ignore_index) const {
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < rows; ++i) count += ignored(i, ignore_index) ? 0 : 1;
    return count;
  }
  bool ignored(std::int64_t row, std::int64_t ignore_index) const { return y && target_at(y, row) == ignore_index; }
  // The options with what follows from the tensors that are given: the kind of targets, the policy rule.
  Options with_inputs(Options given) const;
  // These rows alone, in this order: copies of all that has a row for each.
  Inputs at_rows(const std::vector<std::int64_t>& rows) const;
  // "bf16", or "bf16, weight f32".
  std::string dtype_text() const;
};
// ignore_index: for the last tokens of sequences, with flags.shift.
Inputs load(const InputFlags& flags, std::int64_t ignore_index);

// Inputs made up from a seed: hidden, weight or logits, and targets of these extents. A tensor of an option is one from
// its file, or made up too where the flag says `random`.
struct MadeUp {
  std::int64_t rows = 0, hidden = 0, vocab = 0;
  DType dtype = DType::bf16;
  Kind kind = Kind::linear;
  std::uint64_t seed = 1;
};
Inputs make_up(const MadeUp& extents, const InputFlags& flags, std::int64_t ignore_index);

// ---- what the two share ---------------------------------------------------------------------------------------------

// An option's tensor by its flag; `count`: of `random:N`, 0 not given.
using Maker = std::function<Array(const std::string& flag, std::int64_t count)>;
// The tensors of options alone: from their files, and where there is a maker those that say `random` from it.
void load_options(const InputFlags& flags, Inputs& inputs, const Maker& maker = {});
// With flags.shift: inputs.y are token ids; makes them the targets of the next ones.
void shift_targets(const InputFlags& flags, std::int64_t ignore_index, Inputs& inputs);

}  // namespace logitless::cli
