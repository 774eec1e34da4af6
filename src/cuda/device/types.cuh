// Storage types and their conversions; arithmetic is always fp32. Fused operations are asked for by name, so that the
// number of roundings is the code's and not the compiler's (nvcc -fmad=false).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "contract/problem.hpp"

namespace logitless::cuda {

using bf16 = __nv_bfloat16;
using f16 = __half;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float x) {
  return __float2half_rn(x);
}

// Resolves a storage type once, on the host.
template <class Body>
void with_storage(contract::DType dtype, Body body) {
  switch (dtype) {
    case contract::DType::bf16: return body(bf16{});
    case contract::DType::f16: return body(f16{});
    default: return body(float{});
  }
}

}  // namespace logitless::cuda
