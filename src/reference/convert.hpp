// Numbers in memory as doubles, and doubles rounded once into memory: f32, bf16, f16, f64, u8, i32, i64.
//
// The reference's own, on purpose independent of src/contract: rounding is defined here by a quantum and one
// round-to-nearest-even (std::nearbyint), not by bit tricks, so that a shared mistake is unlikely.
// Cost: a few nanoseconds an element on the way out, less on the way in; only the oracle uses it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "contract/problem.hpp"
#include "plan/operands.hpp"

namespace logitless::reference {

// A binary format: digits of the significand (the hidden one too), exponent of the smallest normal number, bits of the
// exponent field.
struct Format {
  int digits;
  int min_exponent;
  int exponent_bits;
};
inline constexpr Format kBf16{8, -126, 8};
inline constexpr Format kF16{11, -14, 5};

// 2^k as a double, for exponents of normal numbers.
inline double power_of_two(int k) { return std::bit_cast<double>(static_cast<std::uint64_t>(k + 1023) << 52); }

// The number of the format nearest to x, ties to even; beyond the largest finite number by half a unit: infinity.
inline double round_to(double x, Format f) {
  if (!std::isfinite(x) || x == 0.0) return x;
  if (std::abs(x) < 0x1p-1000) return std::copysign(0.0, x);  // far below any of these formats
  const int exponent = std::max(std::ilogb(x), f.min_exponent);
  const int quantum = exponent - (f.digits - 1);
  const double rounded = std::nearbyint(x * power_of_two(-quantum)) * power_of_two(quantum);
  const int max_exponent = (1 << (f.exponent_bits - 1)) - 1;
  if (std::abs(rounded) >= power_of_two(max_exponent + 1)) {
    return std::copysign(std::numeric_limits<double>::infinity(), x);
  }
  return rounded;
}

// Bits of a 16-bit number that holds x, which must already be rounded to the format.
inline std::uint16_t encode(double x, Format f) {
  const int mantissa_bits = f.digits - 1;
  const auto sign = static_cast<std::uint16_t>(std::signbit(x) ? 0x8000u : 0u);
  const auto infinity = static_cast<std::uint16_t>(((1 << f.exponent_bits) - 1) << mantissa_bits);
  if (std::isnan(x)) return static_cast<std::uint16_t>(sign | infinity | (1u << (mantissa_bits - 1)));
  if (std::isinf(x)) return static_cast<std::uint16_t>(sign | infinity);
  if (x == 0.0) return sign;
  const int exponent = std::max(std::ilogb(x), f.min_exponent);
  // Units of the last place. A normal number has the hidden bit set, which raises the exponent field by one: so the
  // field of its exponent starts one lower, and subnormal numbers need no case of their own.
  const auto units = static_cast<std::uint32_t>(std::abs(x) * power_of_two(mantissa_bits - exponent));
  const auto field = static_cast<std::uint32_t>(exponent - f.min_exponent) << mantissa_bits;
  return static_cast<std::uint16_t>(sign | (field + units));
}

inline double decode(std::uint16_t bits, Format f) {
  const int mantissa_bits = f.digits - 1;
  const int max_field = (1 << f.exponent_bits) - 1;
  const int field = (bits >> mantissa_bits) & max_field;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const auto sign = static_cast<std::uint64_t>(bits >> 15) << 63;
  if (field == 0) {  // subnormal: the quantum is that of the smallest normal number
    return (sign ? -1.0 : 1.0) * (mantissa * power_of_two(f.min_exponent - mantissa_bits));
  }
  // f64 has the same layout with wider fields; a field of ones (infinity and NaN) stays a field of ones.
  const std::uint64_t wide = field == max_field ? 2047u : static_cast<std::uint64_t>(field - 1 + f.min_exponent + 1023);
  return std::bit_cast<double>(sign | (wide << 52) | (static_cast<std::uint64_t>(mantissa) << (52 - mantissa_bits)));
}

inline std::uint16_t to_bf16(double x) { return encode(round_to(x, kBf16), kBf16); }
inline std::uint16_t to_f16(double x) { return encode(round_to(x, kF16), kF16); }

// x as it would be read back after being stored as t.
inline double rounded(double x, contract::DType t) {
  switch (t) {
    case contract::DType::f32: return static_cast<float>(x);
    case contract::DType::bf16: return round_to(x, kBf16);
    case contract::DType::f16: return round_to(x, kF16);
    default: return x;
  }
}

inline std::int64_t offset(const View& v, std::int64_t i, std::int64_t j) {
  return i * v.row_stride + j * v.col_stride;
}

inline double load(const View& v, std::int64_t i, std::int64_t j = 0) {
  const std::int64_t at = offset(v, i, j);
  switch (v.dtype) {
    case contract::DType::f32: return static_cast<const float*>(v.data)[at];
    case contract::DType::bf16: return decode(static_cast<const std::uint16_t*>(v.data)[at], kBf16);
    case contract::DType::f16: return decode(static_cast<const std::uint16_t*>(v.data)[at], kF16);
    case contract::DType::f64: return static_cast<const double*>(v.data)[at];
    default: return std::numeric_limits<double>::quiet_NaN();
  }
}

inline void store(const View& v, std::int64_t i, std::int64_t j, double x) {
  const std::int64_t at = offset(v, i, j);
  switch (v.dtype) {
    case contract::DType::f32: static_cast<float*>(v.data)[at] = static_cast<float>(x); break;
    case contract::DType::bf16: static_cast<std::uint16_t*>(v.data)[at] = to_bf16(x); break;
    case contract::DType::f16: static_cast<std::uint16_t*>(v.data)[at] = to_f16(x); break;
    case contract::DType::f64: static_cast<double*>(v.data)[at] = x; break;
    default: break;
  }
}

inline std::int64_t load_integer(const View& v, std::int64_t i, std::int64_t j = 0) {
  const std::int64_t at = offset(v, i, j);
  switch (v.dtype) {
    case contract::DType::u8: return static_cast<const std::uint8_t*>(v.data)[at];
    case contract::DType::i32: return static_cast<const std::int32_t*>(v.data)[at];
    default: return static_cast<const std::int64_t*>(v.data)[at];
  }
}

inline void store_integer(const View& v, std::int64_t i, std::int64_t x) {
  const std::int64_t at = offset(v, i, 0);
  switch (v.dtype) {
    case contract::DType::u8: static_cast<std::uint8_t*>(v.data)[at] = static_cast<std::uint8_t>(x); break;
    case contract::DType::i32: static_cast<std::int32_t*>(v.data)[at] = static_cast<std::int32_t>(x); break;
    case contract::DType::i64: static_cast<std::int64_t*>(v.data)[at] = x; break;
    default: break;
  }
}

// Elements [first, first + count) of row i.
inline void load_row(const View& v, std::int64_t i, std::int64_t first, std::int64_t count, double* out) {
  for (std::int64_t j = 0; j < count; ++j) out[j] = load(v, i, first + j);
}

}  // namespace logitless::reference
