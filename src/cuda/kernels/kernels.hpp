// Every row kernel's launch, for the drivers: they only enqueue on `stream`. One kernel per .cu file or close family.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/kernels/state.hpp"

namespace logitless::cuda {

// ---- prepare_sm80.cu: which rows are kept, their divisor, top-k targets ----------------------------------------------

// Fills index, slot_of, target, flag and the scalars. One block walks all R targets in order.
void prepare_rows(const RowCall& call, const Rows& rows, cudaStream_t stream);
// Values of top-k targets into call.topk's buffers.
void prepare_topk(const RowCall& call, std::int64_t* ids, float* values, float* other, const Rows& rows,
                  cudaStream_t stream);

// ---- statistics_sm80.cu: pass 1 over a block of logits ---------------------------------------------------------------

struct Exponentials {
  void* e;  // bf16 [rows, columns]; null: not stored
  std::int64_t stride;
};
// Merges the block's statistics into those of its slots (first: starts them, and sets their reference). store_shaped:
// transformed logits are left in z, which is then fp32.
void row_statistics(const RowCall& call, const Rows& rows, const Block& block, bool first, bool store_shaped,
                    Exponentials out, cudaStream_t stream);
// The same for a student's and a teacher's logits together.
void pair_statistics(const RowCall& call, const Rows& rows, const Block& block, bool first, cudaStream_t stream);
// JSD's third walk: adds the block's sums.
void pair_mixture(const RowCall& call, const Rows& rows, const Block& block, bool first, cudaStream_t stream);

// ---- repair_sm80.cu ---------------------------------------------------------------------------------------------------

// A matrix of the operands' dtype whose columns are adjacent.
struct Dense {
  const void* data;
  std::int64_t stride;  // elements between rows
};
// E of a kept block for rows far above their reference, whose reference becomes their maximum in finish_rows.
void repair_exponentials(const RowCall& call, const Rows& rows, const Dense& x, const Dense& w, std::int64_t column0,
                         std::int64_t columns, void* e, std::int64_t stride, cudaStream_t stream);

// ---- leaves_sm80.cu: after the first product's own epilogue -----------------------------------------------------------

// Arrays [count][stride] by slot; null: not wanted.
struct Leaves {
  const float *r, *u, *t, *g, *top;
  const std::int32_t* argmax;
  float* row_top;  // [slots] largest logit so far, with argmax
  std::int64_t count, stride;
};
// Merges a block's leaves into the rows' statistics; first: starts them.
void merge_leaf_statistics(const RowCall& call, const Rows& rows, const Leaves& leaves, std::int64_t column0,
                           std::int64_t columns, bool first, cudaStream_t stream);
// Rows whose statistics cannot be told from sums at their reference get them anew; targets above it become it.
void settle_statistics(const RowCall& call, const Rows& rows, const Dense& x, const Dense& w, cudaStream_t stream);
// A number of each slot from a column of the caller's rows.
void gather_floats(const View& from, const Rows& rows, float otherwise, float* out, cudaStream_t stream);

// ---- finish_sm80.cu: between the passes ------------------------------------------------------------------------------

// exponentials: gradients start from E; half_d: D is stored in fp16, times 2^exponent.
struct FinishMode {
  bool gradient, exponentials, half_d;
};
void finish_pairs(const RowCall& call, const Rows& rows, cudaStream_t stream);
void finish_rows(const RowCall& call, const Rows& rows, FinishMode mode, cudaStream_t stream);
// Sums over slots in order, the reduced loss, counts; writes what the caller gave room for.
struct Results {
  void* loss;
  contract::DType loss_dtype;
  std::int64_t *kept, *bad, *correct;
  double *filter_kept, *filter_variance;
};
void reduce_rows(const RowCall& call, const Rows& rows, const Results& results, bool filtered, cudaStream_t stream);

// ---- gradient_sm80.cu: pass 2 over a block of logits or exponentials -------------------------------------------------

// D of the block, [rows, columns] of d_dtype; d may be z where both are fp32.
void row_gradients(const RowCall& call, const Rows& rows, const Block& block, void* d, contract::DType d_dtype,
                   std::int64_t d_stride, cudaStream_t stream);
// The target's entries of E, and zeros in rows that leave no trace.
void patch_exponentials(const Rows& rows, std::int64_t slot0, std::int64_t count, std::int64_t column0,
                        std::int64_t columns, void* e, std::int64_t stride, cudaStream_t stream);
// Column sums of D or of scale E - shift into sums [columns] fp32, in segments whose partial sums lie in `room`.
inline constexpr std::int64_t kSumSegments = 64;
void sum_columns(const Rows& rows, std::int64_t slot0, std::int64_t count, std::int64_t columns, const void* d,
                 contract::DType d_dtype, std::int64_t stride, bool exponentials, bool add, float* room, float* sums,
                 cudaStream_t stream);

// ---- plain_rows_sm80.cu: given logits without options that shape them -------------------------------------------------

// z is read once and D written once. forward_backward and forward finish their rows; backward takes what finish_rows
// left. d null: loss only.
struct PlainRows {
  const void* z;
  void* d;
  contract::DType z_dtype, d_dtype;
  std::int64_t z_stride, d_stride;
  int multiprocessors, major;
};
bool plain_rows_serve(const contract::Problem& problem);
void plain_rows(const RowCall& call, const Rows& rows, const PlainRows& shape, cudaStream_t stream);

// ---- scale_sm80.cu ----------------------------------------------------------------------------------------------------

// values [R,H] *= factor (f32 or f64); untouched where it is 1.
void scale_by(const View& factor, const View& values, int multiprocessors, cudaStream_t stream);

// ---- operands_sm80.cu: what products read, and what they leave -------------------------------------------------------

// X or a teacher's X of the slots, [slots, hidden] in `out`; zeros where a slot is empty.
void gather_rows(const View& x, const Rows& rows, void* out, contract::DType dtype, std::int64_t stride,
                 cudaStream_t stream);
// The same for dW: rows that leave no trace are zeros whatever X holds; by_scale: times the row's scale; by_exponent:
// times 2^(least exponent - the row's).
void column_operand(const View& x, const Rows& rows, const Scalars* scalars, bool by_scale, bool by_exponent, void* out,
                    contract::DType dtype, std::int64_t stride, cudaStream_t stream);
// rows of a matrix in another dtype, [rows, columns].
void convert_rows(const View& from, std::int64_t row0, std::int64_t rows, void* out, contract::DType dtype,
                  std::int64_t stride, cudaStream_t stream);
// out = (add ? out : 0) + x, rounded once.
void write_rows(const float* x, std::int64_t x_stride, std::int64_t rows, std::int64_t columns, void* out,
                contract::DType dtype, std::int64_t stride, bool add, cudaStream_t stream);
// dX of all R rows from the sums of their slots: (scale) sum - shift w_sum, or sum 2^-exponent. w_sum may be null.
void write_hidden_gradient(const RowCall& call, const Rows& rows, const float* sums, bool by_scale, bool by_exponent,
                           const float* w_sum, cudaStream_t stream);
// sums [columns] = sum over rows of factor_i x_ij, factor null: 1; room [kSumSegments, columns].
void sum_rows(const View& x, const std::int64_t* index, const std::uint8_t* flag, const float* factor,
              std::int64_t rows, float* room, float* sums, cudaStream_t stream);
// Three rows of bf16 that add up to -x: what a rank-one correction adds to the operand of dW; ones: rows of E for them.
void split_row(const float* x, std::int64_t columns, void* out, std::int64_t stride, std::int64_t extra,
               cudaStream_t stream);
void ones_rows(void* out, std::int64_t columns, std::int64_t stride, std::int64_t extra, cudaStream_t stream);
// sums [slots, columns] *= scale of the slot.
void scale_rows(const Rows& rows, float* sums, std::int64_t columns, cudaStream_t stream);

}  // namespace logitless::cuda
