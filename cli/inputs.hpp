// What loss and check work on: hidden [R,H], weight [V,H] and targets [R], or logits [R,V] and targets, and the tensors
// of options, from files, with ranks and dtypes checked before anything is computed; extents of the first four against
// each other here, those of the others by the library.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

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
// Those alone that keep to hard targets of every class: bias and weights.
void add_plain_option_inputs(CLI::App& app, InputFlags& flags);

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
  // The options with what follows from the tensors that are given: the kind of targets, the policy rule.
  Options with_inputs(Options given) const;
  // "bf16", or "bf16, weight f32".
  std::string dtype_text() const;
};
// The tensors of options alone, from their files.
void load_options(const InputFlags& flags, Inputs& inputs);
// ignore_index: for the last tokens of sequences, with flags.shift.
Inputs load(const InputFlags& flags, std::int64_t ignore_index);

}  // namespace logitless::cli
