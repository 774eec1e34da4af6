// One logit at a time, as the row kernels see it: loaded, transformed and restricted; the weight kappa of its class; a
// row's numbers that these need, read once. Formulas are the contract's.
#pragma once

#include "contract/pair.hpp"
#include "cuda/device/types.cuh"
#include "cuda/kernels/state.hpp"

namespace logitless::cuda {

// exp2 as fast as the machine has it: two units in the last place, results below 2^-126 are 0.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

// exp(z - m); the difference first, so that a common offset of 1e16 cancels.
__device__ __forceinline__ float exp_gap(float z, float m) { return fast_exp2(contract::exponent(z, m)); }

// An element of a matrix of floats in storage.
__device__ __forceinline__ float load_view(const View& v, std::int64_t i, std::int64_t j) {
  const char* const at = row::row_of(v, i) + j * v.col_stride * contract::size_of(v.dtype);
  switch (v.dtype) {
    case contract::DType::bf16: return to_float(*reinterpret_cast<const bf16*>(at));
    case contract::DType::f16: return to_float(*reinterpret_cast<const f16*>(at));
    default: return *reinterpret_cast<const float*>(at);
  }
}

// What transforms and restricts a row's logits.
struct Shape {
  const RowCall& call;
  std::int64_t row;     // original
  std::int64_t target;  // column, or -1
  float scale, out, cap;
  const std::uint8_t* mask;
  float floor;
  bool transforms, restricts;

  __device__ Shape(const RowCall& c, std::int64_t i, std::int64_t y) : call(c), row(i), target(y) {
    contract::Problem const& p = c.p;
    transforms = p.transforms();
    restricts = p.restricts();
    float const temperature =
        p.row_temperature ? row::float_at(c.o.row_temperature, i) : static_cast<float>(p.loss.temperature);
    float const inverse = 1.0F / temperature;
    cap = static_cast<float>(p.loss.softcap);
    scale = static_cast<float>(p.loss.logit_scale) * (cap > 0.0F ? static_cast<float>(1.0 / p.loss.softcap) : inverse);
    out = cap * inverse;
    mask = p.keep_mask ? reinterpret_cast<const std::uint8_t*>(row::row_of(c.o.keep_mask, i)) : nullptr;
    floor = p.logit_floor ? row::float_at(c.o.logit_floor, i) : -INFINITY;
  }
  __device__ float operator()(float z, std::int64_t j) const {
    if (transforms) {
      if (call.p.bias != contract::DType::none) z += load_view(call.o.bias, j, 0);
      z *= scale;
      if (cap > 0.0F && z > -INFINITY && z < INFINITY) z = out * contract::tanh_of(z);
    }
    if (restricts && j != target) {
      if (z < floor) z = -INFINITY;
      // Adding -inf drops a class, and leaves NaN where NaN or +inf was: such a row is bad, whatever is dropped.
      if (mask != nullptr && (mask[j / 8] >> (j % 8) & 1) == 0) z += -INFINITY;
    }
    return z;
  }
  // 1 for a class that no restriction dropped, else 0.
  __device__ float counted(float z, std::int64_t j) const {
    if (floor > -INFINITY && z == -INFINITY) return 0.0F;
    if (mask != nullptr && j != target && (mask[j / 8] >> (j % 8) & 1) == 0) return 0.0F;
    return 1.0F;
  }
};

// Columns of a tile whose top-k entries lie scattered in shared memory, the rest at `other`.
struct Scattered {
  float* tile;  // shared [columns]

  // All threads of the block. Ends with a barrier.
  __device__ void fill(const RowCall& call, std::int64_t row, std::int64_t j0, std::int64_t columns) const {
    __syncthreads();
    float const other = call.topk.other[row];
    for (std::int64_t j = threadIdx.x; j < columns; j += blockDim.x) tile[j] = other;
    __syncthreads();
    for (std::int64_t at = threadIdx.x; at < call.p.topk; at += blockDim.x) {
      std::int64_t const id = call.topk.ids[row * call.p.topk + at] - j0;
      if (id >= 0 && id < columns) tile[id] = call.topk.values[row * call.p.topk + at];
    }
    __syncthreads();
  }
};

// kappa of column j: target weights times class weights, smoothing mixed in. scattered: the tile's column of j.
__device__ __forceinline__ float kappa_of(const RowCall& call, std::int64_t row, std::int64_t j,
                                          const float* scattered) {
  contract::Problem const& p = call.p;
  float const w = p.class_weight ? row::float_at(call.o.class_weight, p.first_column + j) : 1.0F;
  if (p.loss.targets == contract::Targets::hard || p.pairs()) return w;
  auto const alpha = static_cast<float>(p.loss.smoothing);
  float const share = alpha / static_cast<float>(p.vocab), keep = 1.0F - alpha;
  float const t = p.loss.targets == contract::Targets::soft ? load_view(call.o.soft, row, j) : *scattered;
  return (keep * t + share) * w;
}

// e^40 = 2^58 leaves fp32 sums far from overflow.
inline constexpr float kRepairAbove = 40.0F;
__device__ __forceinline__ bool stands_above(const Rows& rows, std::int64_t slot) {
  float const above = rows.m[slot] - rows.reference[slot];
  return above > kRepairAbove && above < INFINITY;
}

// weight * x, 0 where the weight is 0 whatever x is.
__device__ __forceinline__ float weighted(float weight, float x) { return weight == 0.0F ? 0.0F : weight * x; }

}  // namespace logitless::cuda
