// What a CPU target offers to the drivers: a table of kernels resolved once, when a plan is made. Plain pointers and
// structs; compiled at the baseline. Geometry: products take packed panels; a panel holds `mr` rows (operand A) or `nr`
// columns (operand B); K is cut into steps of 64 bytes (`ks` elements).
//   A panels  [rows / mr][K / ks][mr][ks]     rows of 64-byte segments: an A row is copied, never transposed
//   B panels  [columns / nr][K / ks][...]     the target's own order within a step
// A macro tile is `macro_rows` x 256: C [macro_rows, 256] fp32, kept in the L2 cache between product and epilogue.
#pragma once

#include <cstdint>

#include "contract/problem.hpp"
#include "plan/gradient_row.hpp"

namespace logitless::cpu {

inline constexpr std::int64_t leaf_columns = 256;  // columns of a statistics leaf and of a macro tile
inline constexpr int segment_bytes = 64;

// Storage types; arithmetic is always fp32.
struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

// Rows of a source matrix, gathered through `index` when it is not null. Strides in bytes.
struct Source {
  const char* data;
  contract::DType dtype;
  std::int64_t row_stride, col_stride;
  const std::int64_t* index;

  const char* row(std::int64_t i) const { return data + (index ? index[i] : i) * row_stride; }
};

// Statistics of one leaf of one row.
struct LeafResult {
  float m, r, k, z_y;
};

// z0 -> z: cap(scale (z0 + bias)) / temperature. cap 0: none; bias [n] may be null.
struct Transform {
  const float* bias;
  float scale, cap, inverse_cap, inverse_temperature;
};

// What leaf_full sums beside m and r.
struct LeafWants {
  const float* kappa;  // weights of k and n; null: 1 for every class that is not dropped
  const float* kept;   // 0 for a class that a mask dropped, else 1; null: no mask
  bool k, t, g, u;
  bool dropped;  // a floor was applied: classes of z = -inf count neither in k, n nor in u, c
  bool argmax;
};
struct LeafNumbers {
  float m, r, k, n, t, g, u, c, z_y;
  std::int32_t argmax;  // lowest index of the largest logit
};

// Arrays of partial statistics [leaves][stride] (contract/statistics.hpp names them); m and r are always there, a null
// k, t, g, u is not wanted. n null: a leaf's columns where k is given.
struct LeafArrays {
  float *m, *r, *k, *n, *t, *g, *u, *c;

  bool full() const { return t != nullptr || g != nullptr || u != nullptr || n != nullptr; }
};

using row::GradientRow;
using row::PairRow;

// A leaf of two heads' logits; contract/pair.hpp names the sums.
struct PairNumbers {
  float ms, ss, ts, cs, mt, st, tt, ct;
};
// Products of one operand type.
struct ProductKernels {
  int mr, nr, ks, operand_bytes;
  // rows [r0, r0+rows) x K columns from c0 -> A panels, tails zero.
  void (*pack_a)(const Source& src, std::int64_t r0, std::int64_t rows, std::int64_t c0, std::int64_t k, char* dst);
  // n source rows (the product's columns) x K adjacent elements -> B panels (W for X W^T).
  void (*pack_b_rows)(const Source& src, std::int64_t r0, std::int64_t n, std::int64_t k, char* dst);
  // K source rows x n columns -> B panels (W for D W, X for D^T X). Row i is scaled by scale[i] and is zero, whatever
  // it holds, where skip[i] is not 0; either may be null.
  void (*pack_b_cols)(const Source& src, std::int64_t r0, std::int64_t k, std::int64_t c0, std::int64_t n,
                      const float* scale, const float* skip, char* dst);
  // C [rows, 256] = A B over k_steps steps; n columns, rows and n rounded up to panels.
  void (*multiply)(const char* a, const char* b, std::int64_t k_steps, std::int64_t rows, std::int64_t n, float* c);
  // The same where most of A is 0: words of A that are 0 are left out.
  void (*multiply_sparse)(const char* a, const char* b, std::int64_t k_steps, std::int64_t rows, std::int64_t n,
                          float* c);
  // C [rows, cols] fp32 (ld 256) -> operand panels of D and of D^T: da rows t0.., columns j0..; either may be null.
  // Steps of D^T run over rows: t0 is a multiple of ks, and rows beyond `rows` up to the next multiple are zero.
  void (*scatter)(const float* c, std::int64_t rows, std::int64_t cols, std::int64_t t0, std::int64_t j0,
                  std::int64_t da_k_steps, std::int64_t dt_k_steps, char* da, char* dt);
};

// Work on rows of fp32.
struct RowKernels {
  // One leaf: z[0, n) (n <= 256, room to the next multiple of 64) becomes exp(z - m_leaf), 0 at the target (index or
  // -1). want_k: also sum (z - m).
  LeafResult (*leaf)(float* z, std::int64_t n, std::int64_t target, bool want_k);
  // dst[0, n) = e * factor, rounded once.
  void (*store)(const float* e, std::int64_t n, float factor, void* dst, contract::DType dtype);
  // d[0, n) = e * scale - c, e stored in `dtype`.
  void (*decode)(const void* e, contract::DType dtype, std::int64_t n, float scale, float c, float* d);
  // z[0, n) becomes exp(z - m) * scale - c.
  void (*recompute)(float* z, std::int64_t n, float m, float scale, float c);
  // acc[0, n) (+)= factor * x.
  void (*accumulate)(float* acc, const float* x, std::int64_t n, float factor, bool add);
  // dst[0, n) = (add ? dst : 0) + x - shift * y, rounded once; y may be null.
  void (*write)(void* dst, contract::DType dtype, const float* x, std::int64_t n, bool add, float shift,
                const float* y);
  // acc[0, n) += factor * x, x in `dtype`.
  void (*add_source)(float* acc, const void* x, contract::DType dtype, std::int64_t n, float factor);
  // Merges `leaves` partial statistics in a fixed tree, for rows [i0, i1), to out (arrays of rows). scratch holds
  // leaves * 16 floats for each of 4 statistics, or of 8 where the arrays are full().
  void (*merge_rows)(const LeafArrays& in, std::int64_t leaves, std::int64_t stride, std::int64_t vocab,
                     std::int64_t i0, std::int64_t i1, const LeafArrays& out, float* scratch);
  // Given logits, one row: leaf statistics in m, r, k, n [leaves]; exponentials relative to each leaf's m to e
  // (null: not kept). Returns z_y. Then the same tree over leaves, in place: the result is element 0.
  float (*logits_row)(const void* z, contract::DType dtype, std::int64_t vocab, std::int64_t target, bool want_k,
                      float* m, float* r, float* k, float* e);
  void (*merge_leaves)(const LeafArrays& in, std::int64_t leaves);
  // D row from kept exponentials: d_j = e_j * exp(m_leaf - m) a/s - c. Meanwhile `next`, the row of logits that comes
  // next (next_bytes an element; null: none), is fetched into the L2 cache, so that memory is not idle.
  void (*logits_gradient)(const float* e, const float* leaf_m, std::int64_t vocab, float m, float a_over_s, float c,
                          void* d, contract::DType dtype, const char* next, std::int64_t next_bytes);
  // D row from logits: d_j = exp(z_j - m) a/s - c; z may be d.
  void (*logits_gradient_again)(const void* z, contract::DType z_dtype, std::int64_t vocab, float m, float a_over_s,
                                float c, void* d, contract::DType dtype);
  // The options beyond the plain loss, on n <= 256 elements with room to the next multiple of 64.
  void (*transform)(float* z, std::int64_t n, const Transform& by);
  // z = -inf where the mask's bit is 0 (null: no mask) or z < floor, except at the target.
  void (*restrict_to)(float* z, std::int64_t n, const std::uint8_t* mask, float floor, std::int64_t target);
  LeafNumbers (*leaf_full)(float* z, std::int64_t n, std::int64_t target, const LeafWants& wants);
  // z becomes D; returns how many elements the filter left other than 0, and adds its variance bound to *variance.
  std::int64_t (*gradient)(float* z, std::int64_t n, const GradientRow& row, double* variance);
  // Two heads: z the student's and u the teacher's logits of n classes, both divided by tau here.
  PairNumbers (*pair_leaf)(const float* z, const float* u, std::int64_t n, float inverse_tau);
  // Sums p log(p / mix) and q log(q / mix).
  void (*pair_mixture)(const float* z, const float* u, std::int64_t n, const PairRow& row, float* p_sum, float* q_sum);
  // d += the divergence's gradient.
  void (*pair_gradient)(const float* z, const float* u, std::int64_t n, const PairRow& row, float* d);
};

struct Target {
  const char* name;
  RowKernels rows;
  ProductKernels f32;
  ProductKernels bf16;  // mr == 0: none, bf16 operands are raised to fp32
  void (*enter)();      // per thread, before bf16 products (AMX tile configuration); may be null
  void (*leave)();
};

}  // namespace logitless::cpu
