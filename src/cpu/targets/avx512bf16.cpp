// Target `avx512bf16`: AVX-512 with VDPBF16PS for bf16 products (Zen 4 and later, where it runs at twice the fp32
// rate). Register tile 6 x 64 in pairs of K; everything else as target avx512.
#define LL_ISA avx512bf16
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/kernels/table.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#endif

#include "contract/coefficients.hpp"
#include "contract/pair.hpp"

#define LL_OP [[gnu::always_inline]] inline
#define LL_BF16_CONVERT

// The vector comes first: the kernels are written on it.
// clang-format off
#include "cpu/targets/avx512_vector.hpp"
#include "cpu/kernels/all.hpp"
// clang-format on

namespace logitless::cpu::avx512bf16 {

// K in pairs: a word of A (two bf16 of a row) meets 16 words of B (the same two rows of K, 16 columns).
struct DotProduct {
  using Operand = bf16;
  static constexpr int mr = 6, nr = 64, ks = 32, k_block = 16;
  static constexpr int dense_from = 4;
  static constexpr bool a_stays = false;
  static constexpr std::int64_t word(int k, int g) { return k * nr + g; }

  static inline F32 add_word(F32 sum, std::uint32_t word, const char* b) {
    return F32(_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_set1_epi32(static_cast<std::int32_t>(word)),
                                (__m512bh)_mm512_loadu_si512(b)));
  }

  static inline void tile(const char* a, const char* b, std::int64_t steps, float* c, bool add) {
    __m512 sum[mr][4];
#pragma GCC unroll 8
    for (int i = 0; i < mr; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sum[i][v] = _mm512_setzero_ps();
    for (std::int64_t s = 0; s < steps; ++s, a += mr * segment_bytes, b += nr * segment_bytes) {
#pragma GCC unroll 16
      for (int k = 0; k < 16; ++k) {
        __m512bh row[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) row[v] = (__m512bh)_mm512_loadu_si512(b + (k * nr + v * 16) * 4);
#pragma GCC unroll 8
        for (int i = 0; i < mr; ++i) {
          std::int32_t pair;
          std::memcpy(&pair, a + i * segment_bytes + k * 4, 4);
          __m512bh const x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) sum[i][v] = _mm512_dpbf16_ps(sum[i][v], x, row[v]);
        }
      }
    }
    if (add) {
#pragma GCC unroll 8
      for (int i = 0; i < mr; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v)
          sum[i][v] = _mm512_add_ps(_mm512_loadu_ps(c + i * leaf_columns + v * 16), sum[i][v]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < mr; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) _mm512_storeu_ps(c + i * leaf_columns + v * 16, sum[i][v]);
  }
};

}  // namespace logitless::cpu::avx512bf16

namespace logitless::cpu {
extern const Target avx512bf16_target;
const Target avx512bf16_target = {"avx512bf16",
                                  avx512bf16::row_kernels(),
                                  avx512bf16::product_kernels<avx512bf16::FmaProduct<6, 4>>(),
                                  avx512bf16::product_kernels<avx512bf16::DotProduct>(),
                                  nullptr,
                                  nullptr};
}  // namespace logitless::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace logitless::cpu {
extern const Target avx512bf16_target;
const Target avx512bf16_target = {"avx512bf16", {}, {}, {}, nullptr, nullptr};
}  // namespace logitless::cpu
#endif
