// Target `avx2`: AVX2, FMA and F16C (Haswell, Zen and later). Register tile 6 x 16: 12 accumulators, two loads and six
// broadcasts for 12 FMAs. bf16 and fp16 operands are raised to fp32 when packed.
#define LL_ISA avx2
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/kernels/table.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "contract/coefficients.hpp"
#include "contract/pair.hpp"

#define LL_OP [[gnu::always_inline]] inline

namespace logitless::cpu::avx2 {

struct F32 {
  static constexpr int lanes = 8;
  __m256 v;

  F32() = default;
  LL_OP explicit F32(__m256 raw) : v(raw) {}
  LL_OP explicit F32(float x) : v(_mm256_set1_ps(x)) {}
  LL_OP static F32 load(const float* p) { return F32(_mm256_loadu_ps(p)); }
  LL_OP static F32 load(const bf16* p) {
    __m128i const half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return F32(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)));
  }
  LL_OP static F32 load(const f16* p) {
    return F32(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  LL_OP void store(float* p) const { _mm256_storeu_ps(p, v); }
  LL_OP void store(bf16* p) const {
    __m256i const u = _mm256_castps_si256(v);
    __m256i const odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i const rounded =
        _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i const quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
    __m256i const nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    __m256i const words = _mm256_blendv_epi8(rounded, quiet, nan);
    __m256i const packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  LL_OP void store(f16* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
};

LL_OP F32 operator+(F32 a, F32 b) { return F32(_mm256_add_ps(a.v, b.v)); }
LL_OP F32 operator-(F32 a, F32 b) { return F32(_mm256_sub_ps(a.v, b.v)); }
LL_OP F32 operator*(F32 a, F32 b) { return F32(_mm256_mul_ps(a.v, b.v)); }
LL_OP F32 operator/(F32 a, F32 b) { return F32(_mm256_div_ps(a.v, b.v)); }
LL_OP F32 if_less(F32 a, F32 b, F32 less, F32 other) {
  return F32(_mm256_blendv_ps(other.v, less.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)));
}
LL_OP F32 fma(F32 a, F32 b, F32 c) { return F32(_mm256_fmadd_ps(a.v, b.v, c.v)); }
LL_OP F32 maximum(F32 a, F32 b) { return F32(_mm256_max_ps(a.v, b.v)); }
LL_OP F32 if_equal(F32 a, F32 b, F32 equal, F32 other) {
  return F32(_mm256_blendv_ps(other.v, equal.v, _mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)));
}
LL_OP float max_of(F32 a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
LL_OP float sum_of(F32 a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}

// 2^x for x <= 127; 0 from -127 down; NaN stays (max returns its second operand).
LL_OP F32 exp2_of(F32 x) {
  F32 const t(_mm256_max_ps(_mm256_set1_ps(-127.0F), x.v));
  F32 const n(_mm256_round_ps(t.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  F32 const p = contract::exp2_polynomial(t - n);
  __m256i const biased = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return p * F32(_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}

// 8 x 8 words of 32 bits: dst[k][i] = src[i][k].
LL_OP void transpose8(const char* src, std::int64_t src_bytes, float* dst, std::int64_t dst_stride) {
  __m256 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    __m256 const lo = _mm256_loadu_ps(reinterpret_cast<const float*>(src + (2 * i) * src_bytes));
    __m256 const hi = _mm256_loadu_ps(reinterpret_cast<const float*>(src + (2 * i + 1) * src_bytes));
    a[2 * i] = _mm256_unpacklo_ps(lo, hi);
    a[2 * i + 1] = _mm256_unpackhi_ps(lo, hi);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
    b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
    b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(dst + i * dst_stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
    _mm256_storeu_ps(dst + (i + 4) * dst_stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
  }
}
// dst[k][i] = src[i][k], 16 x 16 words of 32 bits (moved as floats: no arithmetic touches them).
LL_OP void transpose16(const void* src, std::int64_t src_bytes, std::uint32_t* dst, std::int64_t dst_stride) {
  auto const* s = static_cast<const char*>(src);
  auto* d = reinterpret_cast<float*>(dst);
  for (int i = 0; i < 16; i += 8)
    for (int k = 0; k < 16; k += 8)
      transpose8(s + i * src_bytes + k * 4, src_bytes, d + k * dst_stride + i, dst_stride);
}
LL_OP void interleave16(const bf16* lo, const bf16* hi, std::uint32_t* dst) {
  for (int i = 0; i < 16; ++i) dst[i] = lo[i].bits | static_cast<std::uint32_t>(hi[i].bits) << 16;
}

// Bit k: whether word k of 16 has one of `bits`.
LL_OP std::uint16_t nonzero16(const char* words, std::uint32_t bits) {
  __m256i const wanted = _mm256_set1_epi32(static_cast<std::int32_t>(bits)), zero = _mm256_setzero_si256();
  auto const zeros = [&](int i) {
    __m256i const x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + i * 4));
    return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(x, wanted), zero)));
  };
  return static_cast<std::uint16_t>(~(zeros(0) | zeros(8) << 8));
}

}  // namespace logitless::cpu::avx2

#include "cpu/kernels/all.hpp"

namespace logitless::cpu {
extern const Target avx2_target;
const Target avx2_target = {"avx2", avx2::row_kernels(), avx2::product_kernels<avx2::FmaProduct<6, 2>>(), {}, nullptr,
                            nullptr};
}  // namespace logitless::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace logitless::cpu {
extern const Target avx2_target;
const Target avx2_target = {"avx2", {}, {}, {}, nullptr, nullptr};
}  // namespace logitless::cpu
#endif
