// Primitives of AVX-512 F, BW, VL, DQ for the targets avx512, avx512bf16 and amx: F32 (16 floats), exp2, and the 16 x
// 16 transpose of words. bf16 is rounded by integer arithmetic, so that its subnormals are kept as every target keeps
// them.
#pragma once

namespace logitless::cpu::LL_ISA {

struct F32 {
  static constexpr int lanes = 16;
  __m512 v;

  F32() = default;
  LL_OP explicit F32(__m512 raw) : v(raw) {}
  LL_OP explicit F32(float x) : v(_mm512_set1_ps(x)) {}
  LL_OP static F32 load(const float* p) { return F32(_mm512_loadu_ps(p)); }
  LL_OP static F32 load(const bf16* p) {
    __m256i const half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return F32(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)));
  }
  LL_OP static F32 load(const f16* p) {
    return F32(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  }
  LL_OP void store(float* p) const { _mm512_storeu_ps(p, v); }
  LL_OP void store(bf16* p) const {
#if defined(LL_BF16_CONVERT)
    // To nearest even; subnormals of bf16 (below 1.2e-38) become 0.
    __m256bh const half = _mm512_cvtneps_pbh(v);
    std::memcpy(p, &half, sizeof half);
#else
    __m512i const u = _mm512_castps_si512(v);
    __m512i const high = _mm512_srli_epi32(u, 16);
    __m512i const bias = _mm512_add_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
    __m512i const rounded = _mm512_srli_epi32(_mm512_add_epi32(u, bias), 16);
    __mmask16 const nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    __m512i const words = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(words));
#endif
  }
  LL_OP void store(f16* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

LL_OP F32 operator+(F32 a, F32 b) { return F32(_mm512_add_ps(a.v, b.v)); }
LL_OP F32 operator-(F32 a, F32 b) { return F32(_mm512_sub_ps(a.v, b.v)); }
LL_OP F32 operator*(F32 a, F32 b) { return F32(_mm512_mul_ps(a.v, b.v)); }
LL_OP F32 operator/(F32 a, F32 b) { return F32(_mm512_div_ps(a.v, b.v)); }
LL_OP F32 if_less(F32 a, F32 b, F32 less, F32 other) {
  return F32(_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), other.v, less.v));
}
LL_OP F32 fma(F32 a, F32 b, F32 c) { return F32(_mm512_fmadd_ps(a.v, b.v, c.v)); }
LL_OP F32 maximum(F32 a, F32 b) { return F32(_mm512_max_ps(a.v, b.v)); }
LL_OP F32 if_equal(F32 a, F32 b, F32 equal, F32 other) {
  return F32(_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ), other.v, equal.v));
}
LL_OP float max_of(F32 a) { return _mm512_reduce_max_ps(a.v); }
// Halves, then quarters: an order of our own, the same under every compiler.
LL_OP float sum_of(F32 a) {
  __m256 const y = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}

// 2^x for x <= 127; 0 below -126; NaN stays (max returns its second operand, and "not less" is true). Lanes that would
// underflow are left out: each such result takes an assist of the microcode, some 150 cycles, and masks are full of
// them.
LL_OP F32 exp2_of(F32 x) {
  __mmask16 const normal = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.0F), _CMP_NLT_UQ);
  F32 const t(_mm512_max_ps(_mm512_set1_ps(-200.0F), x.v));
  F32 const n(_mm512_roundscale_ps(t.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  return F32(_mm512_maskz_scalef_ps(normal, contract::exp2_polynomial(t - n).v, n.v));
}

// dst[k][i] = src[i][k], 16 x 16 words of 32 bits.
LL_OP void transpose16(const void* src, std::int64_t src_bytes, std::uint32_t* dst, std::int64_t dst_stride) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(static_cast<const char*>(src) + i * src_bytes);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // a[4q + j] holds columns j, 4 + j, 8 + j, 12 + j of rows 4q..4q+3, one to a 128-bit lane.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    __m512i const lo0 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), hi0 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
    __m512i const lo1 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    __m512i const hi1 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
    _mm512_storeu_si512(dst + j * dst_stride, _mm512_shuffle_i32x4(lo0, lo1, 0x88));
    _mm512_storeu_si512(dst + (8 + j) * dst_stride, _mm512_shuffle_i32x4(lo0, lo1, 0xdd));
    _mm512_storeu_si512(dst + (4 + j) * dst_stride, _mm512_shuffle_i32x4(hi0, hi1, 0x88));
    _mm512_storeu_si512(dst + (12 + j) * dst_stride, _mm512_shuffle_i32x4(hi0, hi1, 0xdd));
  }
}
// dst[i] = lo[i] | hi[i] << 16.
LL_OP void interleave16(const bf16* lo, const bf16* hi, std::uint32_t* dst) {
  __m512i const l = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(lo)));
  __m512i const h = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(hi)));
  _mm512_storeu_si512(dst, _mm512_or_si512(l, _mm512_slli_epi32(h, 16)));
}
// Bit k: whether word k of 16 has one of `bits`.
LL_OP std::uint16_t nonzero16(const char* words, std::uint32_t bits) {
  return _mm512_test_epi32_mask(_mm512_loadu_si512(words), _mm512_set1_epi32(static_cast<std::int32_t>(bits)));
}

}  // namespace logitless::cpu::LL_ISA
