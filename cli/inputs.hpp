// What loss and check work on: hidden [R,H], weight [V,H] and targets [R], or logits [R,V] and targets, from files,
// with ranks, dtypes and extents checked against each other before anything is computed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "command.hpp"
#include "logitless/logitless.hpp"

namespace logitless::cli {

struct InputFlags {
  std::string hidden, weight, logits, targets;  // FILE[:NAME], "" not given
  DType dtype = DType::none;                    // convert hidden, weight and logits to it first
  bool npy_bf16 = false;

  bool any() const { return !(hidden.empty() && weight.empty() && logits.empty() && targets.empty()); }
  // The files behind the specs that are given.
  std::vector<std::string> paths() const;
};
void add_input_flags(CLI::App& app, InputFlags& flags);

struct Inputs {
  Kind kind = Kind::linear;
  std::int64_t rows = 0, hidden = 0, vocab = 0;
  ConstTensor x, w, z, y;
  std::vector<std::shared_ptr<const void>> owners;  // what keeps the views' bytes

  // The problem with gradients in the inputs' dtypes (or fp32), or without any.
  Problem problem(bool grad_hidden, bool grad_weight, bool grad_logits, bool grad_f32) const;
  Arguments arguments() const;
  // "bf16", or "bf16, weight f32".
  std::string dtype_text() const;
};
Inputs load(const InputFlags& flags);

}  // namespace logitless::cli
