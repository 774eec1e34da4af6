// What one compute call reads and writes: plain views, already checked against the plan's problem by the caller.
// Every backend (cpu, reference, cuda) takes these and nothing else, so that faces cannot differ between backends.
#pragma once

#include <cstdint>

#include "contract/problem.hpp"

namespace logitless {

// A strided matrix or vector; strides in elements, may be 0 or negative for inputs.
struct View {
  void* data = nullptr;
  contract::DType dtype = contract::DType::none;
  std::int64_t rows = 0, cols = 1;
  std::int64_t row_stride = 0, col_stride = 1;

  explicit operator bool() const { return dtype != contract::DType::none; }
};

struct Operands {
  View x, w, z, targets;
  // Per-row outputs [R] (dtype none: not wanted); stats is [R,4]: m, r, z_y, and with smoothing sum_j (z_j - m), else
  // 0.
  View row_loss, row_lse, row_logprob, stats;
  View dx, dw, dz;  // col_stride 1
  double grad_loss = 1.0;
  View grad_row_loss;  // [R] f32, may have stride 0
  View lse;            // backward of logits without stats
};

// What a call reports beside its outputs.
struct Outcome {
  double loss = 0.0;  // mean or sum; with reduction none: 0
  std::int64_t kept = 0;
  std::int64_t bad = 0;  // kept rows that are all -inf or hold +inf or NaN
};

}  // namespace logitless
