// fp32 arithmetic as the GPU has it in one instruction or two: 2^x to 2 ulp (results below 2^-126 become 0), division
// to 2 ulp, and a number type that runs the contract's formulas on them.
#pragma once

#include <cstdint>

#include "contract/numeric.hpp"

namespace logitless::cuda::device {

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Of a normal number.
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// NaN if one is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// Two floats as 16-bit ones, rounded to nearest even; the first is the lower half.
template <bool kHalf>
__device__ __forceinline__ std::uint32_t pack_16(float lower, float upper) {
  std::uint32_t y;
  if constexpr (kHalf)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(upper), "f"(lower));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(upper), "f"(lower));
  return y;
}

// A float whose exp2 and division are the fast ones.
struct FastFloat {
  float v;

  __device__ __forceinline__ explicit FastFloat(float x) : v(x) {}
  friend __device__ __forceinline__ FastFloat operator+(FastFloat a, FastFloat b) { return FastFloat(a.v + b.v); }
  friend __device__ __forceinline__ FastFloat operator-(FastFloat a, FastFloat b) { return FastFloat(a.v - b.v); }
  friend __device__ __forceinline__ FastFloat operator*(FastFloat a, FastFloat b) { return FastFloat(a.v * b.v); }
  friend __device__ __forceinline__ FastFloat operator/(FastFloat a, FastFloat b) {
    return FastFloat(a.v * reciprocal_fast(b.v));
  }
  friend __device__ __forceinline__ FastFloat fma(FastFloat a, FastFloat b, FastFloat c) {
    return FastFloat(__fmaf_rn(a.v, b.v, c.v));
  }
  friend __device__ __forceinline__ FastFloat maximum(FastFloat a, FastFloat b) {
    return FastFloat(max_or_nan(a.v, b.v));
  }
  friend __device__ __forceinline__ FastFloat exp2_of(FastFloat x) { return FastFloat(exp2_fast(x.v)); }
};

__device__ __forceinline__ float tanh_fast(float x) { return contract::tanh_of(FastFloat(x)).v; }

}  // namespace logitless::cuda::device
