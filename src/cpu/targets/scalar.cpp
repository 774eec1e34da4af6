// Target `scalar`: the kernels on groups of four floats in plain C++ (the compiler's baseline vectors, no fused
// multiply-add). Runs everywhere; the plainest statement of what the other targets must compute.
#define LL_ISA scalar
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "contract/coefficients.hpp"
#include "contract/pair.hpp"
#include "cpu/kernels/table.hpp"

namespace logitless::cpu::scalar {

struct F32 {
  static constexpr int lanes = 4;
  using Raw = float __attribute__((vector_size(16)));
  Raw v;

  F32() = default;
  explicit F32(Raw raw) : v(raw) {}
  explicit F32(float x) : v{x, x, x, x} {}
  static F32 load(const float* p) {
    F32 out;
    std::memcpy(&out.v, p, sizeof out.v);
    return out;
  }
  static F32 load(const bf16* p) {
    F32 out;
    for (int i = 0; i < lanes; ++i) out.v[i] = contract::bf16_to_float(p[i].bits);
    return out;
  }
  static F32 load(const f16* p) {
    F32 out;
    for (int i = 0; i < lanes; ++i) out.v[i] = contract::f16_to_float(p[i].bits);
    return out;
  }
  void store(float* p) const { std::memcpy(p, &v, sizeof v); }
  void store(bf16* p) const {
    for (int i = 0; i < lanes; ++i) p[i].bits = contract::float_to_bf16(v[i]);
  }
  void store(f16* p) const {
    for (int i = 0; i < lanes; ++i) p[i].bits = contract::float_to_f16(v[i]);
  }
};

inline F32 operator+(F32 a, F32 b) { return F32(a.v + b.v); }
inline F32 operator-(F32 a, F32 b) { return F32(a.v - b.v); }
inline F32 operator*(F32 a, F32 b) { return F32(a.v * b.v); }
inline F32 operator/(F32 a, F32 b) { return F32(a.v / b.v); }
inline F32 if_less(F32 a, F32 b, F32 less, F32 other) { return F32(a.v < b.v ? less.v : other.v); }
inline F32 fma(F32 a, F32 b, F32 c) { return F32(a.v * b.v + c.v); }
inline F32 maximum(F32 a, F32 b) { return F32(a.v > b.v ? a.v : b.v); }
inline F32 if_equal(F32 a, F32 b, F32 equal, F32 other) { return F32(a.v == b.v ? equal.v : other.v); }
inline float max_of(F32 a) { return std::max(std::max(a.v[0], a.v[1]), std::max(a.v[2], a.v[3])); }
inline float sum_of(F32 a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }

// 2^x for x <= 127; 0 from -127 down; NaN stays.
inline F32 exp2_of(F32 x) {
  F32 const t(x.v < -127.0F ? F32(-127.0F).v : x.v);
  F32 const magic(12582912.0F);  // 1.5 * 2^23: adding it rounds to an integer
  F32 const n = (t + magic) - magic;
  F32 p = contract::exp2_polynomial(t - n);
  for (int i = 0; i < F32::lanes; ++i) {
    std::int32_t const e = n.v[i] >= -127.0F ? static_cast<std::int32_t>(n.v[i]) : 0;
    p.v[i] *= contract::float_of(static_cast<std::uint32_t>(e + 127) << 23);
  }
  return p;
}

// dst[k][i] = src[i][k], 16 x 16 words of 32 bits.
inline void transpose16(const void* src, std::int64_t src_bytes, std::uint32_t* dst, std::int64_t dst_stride) {
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k)
      std::memcpy(dst + k * dst_stride + i, static_cast<const char*>(src) + i * src_bytes + k * 4, 4);
}
// dst[i] = lo[i] | hi[i] << 16.
inline void interleave16(const bf16* lo, const bf16* hi, std::uint32_t* dst) {
  for (int i = 0; i < 16; ++i) dst[i] = lo[i].bits | static_cast<std::uint32_t>(hi[i].bits) << 16;
}

// Bit k: whether word k of 16 has one of `bits`.
inline std::uint16_t nonzero16(const char* words, std::uint32_t bits) {
  std::uint32_t out = 0;
  for (int k = 0; k < 16; ++k) {
    std::uint32_t word;
    std::memcpy(&word, words + k * 4, 4);
    out |= static_cast<std::uint32_t>((word & bits) != 0) << k;
  }
  return static_cast<std::uint16_t>(out);
}

}  // namespace logitless::cpu::scalar

#include "cpu/kernels/all.hpp"

namespace logitless::cpu {
extern const Target scalar_target;
const Target scalar_target = {
    "scalar", scalar::row_kernels(), scalar::product_kernels<scalar::FmaProduct<2, 4>>(), {}, nullptr, nullptr};
}  // namespace logitless::cpu
