// Instantiates dense_kernels.inc per instruction set, and the two bf16 tiles that need intrinsics. Compiled for the
// baseline: each set is switched on for its own functions only, and nothing from the standard library is inside.
#include "bench/dense_kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#define LL_UNROLL _Pragma("clang loop unroll(full)")
#else
#define LL_UNROLL _Pragma("GCC unroll 16")
#endif

namespace logitless::bench {

namespace sse2 {
#define LANES 4
#define TILE_ROWS 6
#include "bench/dense_kernels.inc"
#undef LANES
#undef TILE_ROWS
}  // namespace sse2

const DenseKernels& dense_kernels_sse2() { return sse2::kernels; }

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#define LANES 8
#define TILE_ROWS 6
#include "bench/dense_kernels.inc"
#undef LANES
#undef TILE_ROWS
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif
namespace avx512 {
#define LANES 16
#define TILE_ROWS 14
#include "bench/dense_kernels.inc"
#undef LANES
#undef TILE_ROWS
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const DenseKernels& dense_kernels_avx2() { return avx2::kernels; }
const DenseKernels& dense_kernels_avx512() { return avx512::kernels; }

const DenseKernels& dense_kernels() {
  if (__builtin_cpu_supports("avx512f")) return avx512::kernels;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::kernels;
  return sse2::kernels;
}

__attribute__((target("avx512f,avx512bf16"))) void tile_dot_bf16(std::int64_t k, const void* packed_a,
                                                                 const void* packed_b, float* c, std::int64_t ldc) {
  const auto* a = static_cast<const std::int32_t*>(packed_a);
  const auto* b = static_cast<const char*>(packed_b);
  __m512 sum[14][2];
  LL_UNROLL
  for (int i = 0; i < 14; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
  for (; k > 0; --k, a += 14, b += 128) {
    const auto b0 = (__m512bh)_mm512_loadu_si512(b), b1 = (__m512bh)_mm512_loadu_si512(b + 64);
    LL_UNROLL
    for (int i = 0; i < 14; ++i) {
      const auto pair = (__m512bh)_mm512_set1_epi32(a[i]);
      sum[i][0] = _mm512_dpbf16_ps(sum[i][0], pair, b0);
      sum[i][1] = _mm512_dpbf16_ps(sum[i][1], pair, b1);
    }
  }
  LL_UNROLL
  for (int i = 0; i < 14; ++i, c += ldc) {
    _mm512_storeu_ps(c, _mm512_add_ps(_mm512_loadu_ps(c), sum[i][0]));
    _mm512_storeu_ps(c + 16, _mm512_add_ps(_mm512_loadu_ps(c + 16), sum[i][1]));
  }
}

// GCC 12 does not know that tile loads read memory: the empty asms keep the stores before them.
__attribute__((target("amx-tile,amx-bf16"))) void tile_amx(std::int64_t k, const void* packed_a, const void* packed_b,
                                                           float* c, std::int64_t ldc) {
  const auto* a = static_cast<const char*>(packed_a);
  const auto* b = static_cast<const char*>(packed_b);
  float* const lower = c + 16 * ldc;
  asm volatile("" ::: "memory");
  _tile_loadd(0, c, ldc * 4);
  _tile_loadd(1, c + 16, ldc * 4);
  _tile_loadd(2, lower, ldc * 4);
  _tile_loadd(3, lower + 16, ldc * 4);
  for (; k > 0; --k, a += 2048, b += 2048) {
    for (int i = 0; i < 2048; i += 64) _mm_prefetch(a + 4096 + i, _MM_HINT_T0);  // a streams from L2
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + 1024, 64);
    _tile_loadd(5, a + 1024, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, ldc * 4);
  _tile_stored(1, c + 16, ldc * 4);
  _tile_stored(2, lower, ldc * 4);
  _tile_stored(3, lower + 16, ldc * 4);
  asm volatile("" ::: "memory");
}

__attribute__((target("amx-tile"))) void configure_amx() {
  struct alignas(64) {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t bytes_per_row[16] = {};
    std::uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) {
    config.bytes_per_row[i] = 64;
    config.rows[i] = 16;
  }
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

__attribute__((target("amx-tile"))) void release_amx() { _tile_release(); }

#else

const DenseKernels& dense_kernels_avx2() { return sse2::kernels; }
const DenseKernels& dense_kernels_avx512() { return sse2::kernels; }
const DenseKernels& dense_kernels() { return sse2::kernels; }

#endif

}  // namespace logitless::bench
