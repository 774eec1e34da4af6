// Hopper's copy engine: boxes of 2-D tensors between device and shared memory, outside a tensor zeros on loads and
// nothing on stores. x is the coordinate along adjacent elements. One instruction a function.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace logitless::cuda::device {

__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void tma_load(std::uint32_t to, const CUtensorMap* map, std::uint32_t bar, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(bar), "r"(x), "r"(y)
      : "memory");
}
// To the same place of every CTA in the mask; each one's own barrier counts the bytes.
__device__ __forceinline__ void tma_load_multicast(std::uint32_t to, const CUtensorMap* map, std::uint32_t bar, int x,
                                                   int y, std::uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(bar), "r"(x), "r"(y), "h"(ctas)
      : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* map, std::uint32_t from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most kPending committed groups of this thread still read shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
// Shared memory that this thread wrote by ordinary stores becomes visible to the copy engine and to wgmma.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8x8 matrices of 16-bit elements, one address a lane: the accumulators' layout becomes rows of 16 bytes.
__device__ __forceinline__ void store_matrix(std::uint32_t to, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                             std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

}  // namespace logitless::cuda::device
