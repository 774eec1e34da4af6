// The instructions behind the row kernels, one a function: exponential, NaN-keeping maxima, 16-byte accesses with cache
// hints, and (Hopper) memory barriers, bulk copies and stores into the shared memory of another CTA of the cluster.
// Shared memory is addressed by its 32-bit window address throughout.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace logitless::cuda::rows {

// MUFU.EX2 alone (2 ulp): without .ftz the compiler scales before and after it to save results below 2^-126.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// fmaxf drops NaN; a row that holds one must end with m = NaN.
__device__ inline float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ inline std::uint32_t max_nan_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t y;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ inline std::uint32_t max_nan_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t y;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// Two numbers rounded to nearest and packed in one instruction; the PTX operand order is high, low.
__device__ inline std::uint32_t pack_bf16x2(float low, float high) {
  std::uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
__device__ inline std::uint32_t pack_f16x2(float low, float high) {
  std::uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
__device__ inline float widen_f16(std::uint16_t h) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(h));
  return y;
}

// z is read once (or, second time, from L2): nothing of it stays in L1. Not .nc: D may be written over z.
__device__ inline uint4 load_16(void const* p) {
  uint4 q;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w)
               : "l"(p)
               : "memory");
  return q;
}

// D is not read again here: streaming stores leave L2 to z.
__device__ inline void store_16(void* p, uint4 q) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(q.x), "r"(q.y), "r"(q.z), "r"(q.w)
               : "memory");
}

__device__ inline uint4 load_shared_16(std::uint32_t p) {
  uint4 q;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w)
               : "r"(p)
               : "memory");
  return q;
}

__device__ inline std::uint32_t shared_address(void const* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// Some of the CTA's threads meet, and no others: the producer warp never comes.
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ inline void barrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine and to the other CTAs of the cluster.
__device__ inline void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_arrive_expecting(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Suspends for a while in hardware before it answers false.
__device__ inline bool barrier_try_wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}
__device__ inline void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  while (!barrier_try_wait(barrier, parity)) {
  }
}
// The same for bytes that came from another CTA: what they carry is visible at cluster scope.
__device__ inline bool barrier_try_wait_cluster(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ inline void barrier_wait_cluster(std::uint32_t barrier, std::uint32_t parity) {
  while (!barrier_try_wait_cluster(barrier, parity)) {
  }
}

__device__ inline std::uint64_t evict_first_policy() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// `bytes` (a multiple of 16, both addresses too) arrive in shared memory and are counted at `barrier`.
__device__ inline void bulk_load(std::uint32_t to, void const* from, std::uint32_t bytes, std::uint32_t barrier,
                                 std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ inline std::uint32_t cluster_rank() {
  std::uint32_t y;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(y));
  return y;
}
__device__ inline std::uint32_t cluster_size() {
  std::uint32_t y;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(y));
  return y;
}
// The address of the same variable in CTA `rank` of the cluster.
__device__ inline std::uint32_t in_rank(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t y;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(y) : "r"(address), "r"(rank));
  return y;
}
// 16 bytes for another CTA, counted at its barrier: no fence, so that outstanding stores of D are not waited for.
__device__ inline void store_remote_16(std::uint32_t to, float4 v, std::uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}
__device__ inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

#endif

}  // namespace logitless::cuda::rows
