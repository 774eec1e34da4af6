// A CPU target of the tests: the kernels on sixteen floats in plain C++, as wide as AVX-512, and with bf16 products by
// an emulated dot product of pairs. So the drivers' 16-bit path and the tails of wide vectors are proved on every
// machine; what only real instructions can show is left to their own targets. Register tiles of 3 rows and K blocks of
// 2 steps, which no real target has, so that nothing leans on a power of two.
// Included by one source of an executable, before anything else of the project: it names its own LL_ISA.
#pragma once

#define LL_ISA emulated
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "contract/coefficients.hpp"
#include "contract/pair.hpp"
#include "cpu/kernels/table.hpp"

namespace logitless::cpu::emulated {

struct F32 {
  static constexpr int lanes = 16;
  float v[lanes];

  F32() = default;
  explicit F32(float x) {
    for (float& lane : v) lane = x;
  }
  static F32 load(const float* p) {
    F32 out;
    std::memcpy(out.v, p, sizeof out.v);
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
  void store(float* p) const { std::memcpy(p, v, sizeof v); }
  void store(bf16* p) const {
    for (int i = 0; i < lanes; ++i) p[i].bits = contract::float_to_bf16(v[i]);
  }
  void store(f16* p) const {
    for (int i = 0; i < lanes; ++i) p[i].bits = contract::float_to_f16(v[i]);
  }
};

template <class Body>
inline F32 each(Body body) {
  F32 out;
  for (int i = 0; i < F32::lanes; ++i) out.v[i] = body(i);
  return out;
}
inline F32 operator+(F32 a, F32 b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline F32 operator-(F32 a, F32 b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline F32 operator*(F32 a, F32 b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline F32 operator/(F32 a, F32 b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline F32 if_less(F32 a, F32 b, F32 less, F32 other) {
  return each([&](int i) { return a.v[i] < b.v[i] ? less.v[i] : other.v[i]; });
}
inline F32 fma(F32 a, F32 b, F32 c) {
  return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline F32 maximum(F32 a, F32 b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F32 if_equal(F32 a, F32 b, F32 equal, F32 other) {
  return each([&](int i) { return a.v[i] == b.v[i] ? equal.v[i] : other.v[i]; });
}
inline float max_of(F32 a) { return *std::max_element(a.v, a.v + F32::lanes); }
inline float sum_of(F32 a) {
  for (int width = F32::lanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
  return a.v[0];
}
inline F32 exp2_of(F32 x) {
  return each([&](int i) { return std::exp2(x.v[i]); });
}

inline void transpose16(const void* src, std::int64_t src_bytes, std::uint32_t* dst, std::int64_t dst_stride) {
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k)
      std::memcpy(dst + k * dst_stride + i, static_cast<const char*>(src) + i * src_bytes + k * 4, 4);
}
inline void interleave16(const bf16* lo, const bf16* hi, std::uint32_t* dst) {
  for (int i = 0; i < 16; ++i) dst[i] = lo[i].bits | static_cast<std::uint32_t>(hi[i].bits) << 16;
}

inline std::uint16_t nonzero16(const char* words, std::uint32_t bits) {
  std::uint32_t out = 0;
  for (int k = 0; k < 16; ++k) {
    std::uint32_t word;
    std::memcpy(&word, words + k * 4, 4);
    out |= static_cast<std::uint32_t>((word & bits) != 0) << k;
  }
  return static_cast<std::uint16_t>(out);
}

}  // namespace logitless::cpu::emulated

#include "cpu/kernels/all.hpp"

namespace logitless::cpu::emulated {

// Words of two bf16 adjacent in K, accumulated in fp32 in the order of K.
struct PairProduct {
  using Operand = bf16;
  static constexpr int mr = 3, nr = 16, ks = 32, k_block = 2, dense_from = 4;
  static constexpr bool a_stays = false;
  static constexpr std::int64_t word(int k, int g) { return k * nr + g; }

  static F32 add_word(F32 sum, std::uint32_t word, const char* b) {
    for (int j = 0; j < nr; ++j) {
      bf16 w[2];
      std::memcpy(w, b + j * 4, sizeof w);
      sum.v[j] += contract::bf16_to_float(static_cast<std::uint16_t>(word)) * contract::bf16_to_float(w[0].bits);
      sum.v[j] += contract::bf16_to_float(static_cast<std::uint16_t>(word >> 16)) * contract::bf16_to_float(w[1].bits);
    }
    return sum;
  }

  static void tile(const char* a, const char* b, std::int64_t steps, float* c, bool add) {
    float sum[mr][nr];
    for (int i = 0; i < mr; ++i)
      for (int j = 0; j < nr; ++j) sum[i][j] = add ? c[i * leaf_columns + j] : 0.0F;
    for (std::int64_t s = 0; s < steps; ++s, a += mr * segment_bytes, b += nr * segment_bytes) {
      for (int k = 0; k < 16; ++k) {
        for (int i = 0; i < mr; ++i) {
          bf16 x[2];
          std::memcpy(x, a + i * segment_bytes + k * 4, sizeof x);
          float const x0 = contract::bf16_to_float(x[0].bits), x1 = contract::bf16_to_float(x[1].bits);
          for (int j = 0; j < nr; ++j) {
            bf16 w[2];
            std::memcpy(w, b + word(k, j) * 4, sizeof w);
            sum[i][j] += x0 * contract::bf16_to_float(w[0].bits);
            sum[i][j] += x1 * contract::bf16_to_float(w[1].bits);
          }
        }
      }
    }
    for (int i = 0; i < mr; ++i)
      for (int j = 0; j < nr; ++j) c[i * leaf_columns + j] = sum[i][j];
  }
};

}  // namespace logitless::cpu::emulated

namespace logitless::test {
extern const cpu::Target emulated_target;
const cpu::Target emulated_target = {"emulated",
                                     cpu::emulated::row_kernels(),
                                     cpu::emulated::product_kernels<cpu::emulated::FmaProduct<3, 1>>(),
                                     cpu::emulated::product_kernels<cpu::emulated::PairProduct>(),
                                     nullptr,
                                     nullptr};
}  // namespace logitless::test
