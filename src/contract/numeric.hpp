// Numeric types and the exponential, host and device: bf16 and fp16 as bits with one rounding rule (to nearest, ties
// to even; NaN stays NaN and quiet), and exp2 by range reduction and a polynomial. Nothing here allocates or does I/O.
// Included by each CPU target within its own instruction set: LL_ISA names an inline namespace, so that no function
// compiled for a newer machine can be linked in place of the baseline's.
#pragma once

#include <cmath>
#include <cstdint>

#include "contract/mutate.hpp"

#if defined(__CUDACC__)
#define LL_HD __host__ __device__
#else
#define LL_HD
#endif

#if !defined(LL_ISA)
#define LL_ISA baseline
#endif

namespace logitless::contract {
inline namespace LL_ISA {

LL_HD inline std::uint32_t bits_of(float x) {
  std::uint32_t u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
}
LL_HD inline float float_of(std::uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, sizeof x);
  return x;
}

LL_HD inline float bf16_to_float(std::uint16_t b) { return float_of(static_cast<std::uint32_t>(b) << 16); }

LL_HD inline std::uint16_t float_to_bf16(float x) {
  std::uint32_t const u = bits_of(x);
  if ((u & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((u >> 16) | 0x40U);
  return static_cast<std::uint16_t>((u + 0x7fffU + ((u >> 16) & 1U)) >> 16);
}

LL_HD inline float f16_to_float(std::uint16_t h) {
  std::uint32_t const sign = static_cast<std::uint32_t>(h & 0x8000U) << 16;
  std::uint32_t const body = h & 0x7fffU;
  if (body >= 0x7c00U)
    return float_of(sign | 0x7f800000U | ((body & 0x3ffU) << 13) | (body > 0x7c00U ? 0x400000U : 0U));
  if (body >= 0x400U) return float_of(sign | ((body << 13) + 0x38000000U));
  // Subnormal: body * 2^-24, exact in fp32.
  float const magnitude = static_cast<float>(body) * 5.9604644775390625e-8F;
  return float_of(sign | bits_of(magnitude));
}

LL_HD inline std::uint16_t float_to_f16(float x) {
  std::uint32_t const u = bits_of(x);
  std::uint32_t const sign = (u >> 16) & 0x8000U;
  std::uint32_t const body = u & 0x7fffffffU;
  if (body > 0x7f800000U) return static_cast<std::uint16_t>(sign | 0x7e00U | ((body >> 13) & 0x3ffU));
  if (body >= 0x47800000U) return static_cast<std::uint16_t>(sign | 0x7c00U);  // 65536 and above
  if (body < 0x38800000U) {
    // Below 2^-14: adding 0.5 makes the FPU round at 2^-24 by its own rule (to nearest, ties to even).
    std::uint32_t const rounded = bits_of(float_of(body) + 0.5F) - 0x3f000000U;
    return static_cast<std::uint16_t>(sign | rounded);
  }
  std::uint32_t const rounded = body + 0xfffU + ((body >> 13) & 1U);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

// log2 e as precise as F is; a vector of floats takes the float.
template <class F>
LL_HD inline F log2e() {
  return F(1.44269504088896340736F);
}
template <>
LL_HD inline double log2e<double>() {
  return 1.44269504088896340736;
}

// Before the templates below: of plain numbers they are not found by argument.
LL_HD inline double exp2_of(double x) { return std::exp2(x); }
LL_HD inline float exp2_of(float x) { return std::exp2(x); }
LL_HD inline double maximum(double a, double b) { return a > b ? a : b; }
LL_HD inline float maximum(float a, float b) { return a > b ? a : b; }
// a == b ? equal : other.
LL_HD inline double if_equal(double a, double b, double equal, double other) { return a == b ? equal : other; }
LL_HD inline float if_equal(float a, float b, float equal, float other) { return a == b ? equal : other; }
// a < b ? less : other.
LL_HD inline float if_less(float a, float b, float less, float other) { return a < b ? less : other; }

// 2^f for |f| <= 1/2: relative minimax under p(0) = 1 (so that a leaf's largest logit counts exactly 1 and merging with
// the identity changes no bit); error 1.1e-7, with fp32's rounding 1.7e-7, mean -2e-8. F is a float or a vector of
// floats with fma(a, b, c) found by argument.
template <class F>
LL_HD inline F exp2_polynomial(F f) {
  F p = F(0.00132646528F);
  p = fma(p, f, F(0.00967151113F));
  p = fma(p, f, F(0.0555073395F));
  p = fma(p, f, F(0.240222424F));
  p = fma(p, f, F(0.693147004F));
  return fma(p, f, F(1.0F));
}

// tanh x = E / (E + 2) with E = e^2x - 1 = 2^n (2^f - 1) + (2^n - 1): the polynomial's constant 1 drops out, so small x
// keep their relative accuracy (3e-7). NaN stays. F as above, with maximum, exp2_of and division.
template <class F>
LL_HD inline F tanh_of(F x) {
  F const limit(-60.0F), magic(12582912.0F);  // adding 1.5 * 2^23 rounds to an integer
  F y = x * F(2.0F * 1.44269504F);
  y = maximum(limit, y);
  y = F(0.0F) - maximum(limit, F(0.0F) - y);
  F const n = (y + magic) - magic, f = y - n;
  F q = F(0.00132646528F);
  q = fma(q, f, F(0.00967151113F));
  q = fma(q, f, F(0.0555073395F));
  q = fma(q, f, F(0.240222424F));
  q = fma(q, f, F(0.693147004F));
  F const two_n = exp2_of(n);
  F const e = fma(two_n, f * q, two_n - F(1.0F));
  return e / (e + F(2.0F));
}

template <class U>
LL_HD inline void scramble(U& h) {  // MurmurHash3's finaliser
  h ^= h >> 16;
  h *= 0x85ebca6bU;
  h ^= h >> 13;
  h *= 0xc2b2ae35U;
  h ^= h >> 16;
}

// The filter's hash of (seed, row, column): two words of a row (and of each 2^32 columns), which two rounds mix into a
// column's. The same numbers on every backend, whatever the tiles and threads.
struct FilterKey {
  std::uint32_t first, second;
};
LL_HD inline FilterKey filter_key(std::uint64_t seed, std::uint64_t row, std::uint64_t column) {
  std::uint64_t h = seed ^ (row * 0x9e3779b97f4a7c15ULL);
  for (int round = 0; round < 2; ++round) {  // its 64-bit finaliser
    h ^= h >> 33;
    h *= 0xff51afd7ed558ccdULL;
    h ^= h >> 33;
    h *= 0xc4ceb9fe1a85ec53ULL;
    h ^= h >> 33;
    if (round == 0) h += (column >> 32) * 0xbf58476d1ce4e5b9ULL;
  }
  return {static_cast<std::uint32_t>(h), static_cast<std::uint32_t>(h >> 32)};
}
// h: the low 32 bits of columns, one number or a vector; becomes uniform in [0, 2^24).
template <class U>
LL_HD inline void filter_hash(U& h, FilterKey key) {
  h ^= key.first;
  scramble(h);
  h += key.second;
  scramble(h);
  h = h >> 8;
}

// The unbiased filter: p below eps becomes eps with probability p / eps, else 0, for `uniform` in [0, 2^24) and unit =
// eps 2^-24. F as above, with if_less.
template <class F>
LL_HD inline F filtered(F p, F eps, F uniform, F unit) {
  return if_less(p, eps, if_less(LL_MUTATE(44, uniform * unit, uniform * F(5.9604644775390625e-8F)), p, eps, F(0.0F)),
                 p);
}

// The exponent of exp(z - m) for exp2: the difference first, so that a common offset of 1e16 cancels exactly.
template <class F>
LL_HD inline F exponent(F z, F m) {
  return LL_MUTATE(21, (z - m) * log2e<F>(), z * log2e<F>() - m * log2e<F>());
}

}  // namespace LL_ISA
}  // namespace logitless::contract
