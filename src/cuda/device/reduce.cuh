// Sums and maxima over a warp and over a block, by trees of fixed shape: equal inputs give equal bits.
#pragma once

#include <cstdint>

namespace logitless::cuda {

inline constexpr int kWarp = 32;

__device__ __forceinline__ float warp_max(float x) {
  for (int d = kWarp / 2; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
  for (int d = kWarp / 2; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// All threads of a block of kThreads call these and get the result. `room` [kThreads / 32] is shared; it may be used
// again after the call without a barrier, by the same function.
template <int kThreads>
__device__ __forceinline__ float block_max(float x, float* room) {
  constexpr int warps = kThreads / kWarp;
  x = warp_max(x);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = x;
  __syncthreads();
  float out = room[0];
  for (int w = 1; w < warps; ++w) out = fmaxf(out, room[w]);
  return out;
}
template <int kThreads, class T>
__device__ __forceinline__ T block_sum(T x, T* room) {
  constexpr int warps = kThreads / kWarp;
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = x;
  __syncthreads();
  T out = room[0];
  for (int w = 1; w < warps; ++w) out += room[w];
  return out;
}
// kCount numbers at once; room [kThreads / 32][kCount].
template <int kThreads, int kCount>
__device__ __forceinline__ void block_sums(float (&x)[kCount], float* room) {
  constexpr int warps = kThreads / kWarp;
  for (int n = 0; n < kCount; ++n) x[n] = warp_sum(x[n]);
  __syncthreads();
  if (threadIdx.x % kWarp == 0)
    for (int n = 0; n < kCount; ++n) room[threadIdx.x / kWarp * kCount + n] = x[n];
  __syncthreads();
  for (int n = 0; n < kCount; ++n) {
    x[n] = room[n];
    for (int w = 1; w < warps; ++w) x[n] += room[w * kCount + n];
  }
}

}  // namespace logitless::cuda
