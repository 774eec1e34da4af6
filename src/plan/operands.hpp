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

  constexpr explicit operator bool() const { return dtype != contract::DType::none; }
};

struct Operands {
  View x, w, z, targets;
  // Per-row outputs [R] (dtype none: not wanted). stats [R,4]: m, r, z_y, k; or with t, n and more [R,8], and [R,12]
  // with a teacher (Problem::statistics); 0 where nothing asks for them.
  View row_loss, row_lse, row_logprob, stats;
  View row_entropy, row_zloss, row_mean_logit, row_log_sum_p2;
  View row_argmax;   // i32 or i64; -1 for ignored and bad rows
  View row_correct;  // u8: the target is the argmax
  View dx, dw, dz;   // col_stride 1
  View db;           // [V]
  double grad_loss = 1.0;
  View grad_row_loss, grad_row_lse, grad_row_logprob, grad_row_entropy;  // [R] f32, may have stride 0
  View lse;                                                              // backward of logits without stats
  View bias;                                                             // [V] f32, bf16 or f16
  View class_weight;                                                     // [V] f32; of a part: all classes'
  View row_weight, row_temperature, logit_floor;                         // [R] f32
  View keep_mask;                                                        // [R, ceil(V/8)] u8, lowest bit first
  View soft;                                                             // [R,V]
  View topk_ids, topk_probs;                                             // [R,k] i32 or i64; f32
  View teacher_x, teacher_w, teacher_bias;                               // [R,Ht], [V,Ht], [V]
  View old_logprob, advantage, ref_logprob;                              // [R] f32
  View saved;                                                            // [Problem::saved] u8, 64-byte aligned
  View normalizer;                                                       // one f32 or f64
  View grad_loss_factor;                                                 // likewise; multiplies grad_loss
};

// What a call reports beside its outputs.
struct Outcome {
  double loss = 0.0;  // mean or sum; with reduction none: 0
  std::int64_t kept = 0;
  std::int64_t bad = 0;          // kept rows that are all -inf or hold +inf or NaN
  std::int64_t correct = 0;      // kept rows whose target is the argmax, where argmax is asked for
  double filter_kept = 1.0;      // share of the elements of D that a filter left as they are or made +-eps
  double filter_variance = 0.0;  // bound of the variance that it adds to an element of |a p|, summed over D
};

}  // namespace logitless
