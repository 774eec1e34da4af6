// The options beyond the plain loss, on the 256 columns of a leaf at a time: transforms of the logits, restrictions,
// statistics with target weights, entropy and argmax, and D from the logits themselves. A leaf is 1 KiB, so each pass
// over it stays in the L1 cache.
#pragma once

namespace logitless::cpu::LL_ISA {

inline void transform(float* z, std::int64_t n, const Transform& by) {
  F32 const scale(by.scale * (by.cap > 0.0F ? by.inverse_cap : by.inverse_temperature)),
      out(by.cap * by.inverse_temperature);
  auto const each = [&](auto capped) {
    for_lanes(n, [&](std::int64_t i, int count) {
      F32 x = load_some(z + i, count);
      if (by.bias != nullptr) x = x + load_some(by.bias + i, count);
      x = x * scale;
      if constexpr (decltype(capped)::value) {
        F32 const y = out * contract::tanh_of(x);
        // Infinities are classified before the cap.
        x = if_equal(x, F32(-INFINITY), x, if_equal(x, F32(INFINITY), x, y));
      }
      store_some(x, z + i, count);
    });
  };
  if (by.cap > 0.0F)
    each(std::true_type{});
  else
    each(std::false_type{});
}

// What a byte of a keep mask adds to its eight logits: 0, or -inf where its bit is 0.
struct DroppedBy {
  float add[8];
};
struct DroppedTable {
  DroppedBy of[256];
  constexpr DroppedTable() : of{} {
    for (int bits = 0; bits < 256; ++bits)
      for (int j = 0; j < 8; ++j) of[bits].add[j] = (bits >> j & 1) != 0 ? 0.0F : -INFINITY;
  }
  constexpr const DroppedBy& operator[](std::uint8_t bits) const { return of[bits]; }
};
inline constexpr DroppedTable dropped_by;

inline void restrict_to(float* z, std::int64_t n, const std::uint8_t* mask, float floor, std::int64_t target) {
  bool const mine = target >= 0 && target < n;
  float const spared = mine ? z[target] : 0.0F;
  F32 const least(floor), masked(-INFINITY);
  if (floor > -INFINITY)
    for_lanes(n, [&](std::int64_t i, int count) {
      F32 const x = load_some(z + i, count);
      store_some(if_less(x, least, masked, x), z + i, count);
    });
  if (mask != nullptr) {
    // Adding -inf drops a class, and leaves NaN where NaN or +inf was: such a row is bad, whatever is dropped.
    alignas(64) float add[leaf_columns];
    for (std::int64_t i = 0; i < n; i += 8) std::memcpy(add + i, dropped_by[mask[i / 8]].add, sizeof dropped_by[0].add);
    for_lanes(n, [&](std::int64_t i, int count) {
      store_some(load_some(z + i, count) + load_some(add + i, count), z + i, count);
    });
  }
  if (mine) z[target] = spared;
}

// weight * x, 0 where the weight is 0 whatever x is.
inline F32 weighted(F32 weight, F32 x) { return if_equal(weight, F32(0.0F), F32(0.0F), weight * x); }

// 1, or 0 for a class that a restriction dropped.
inline F32 counted(F32 z, bool dropped) {
  return dropped ? if_equal(z, F32(-INFINITY), F32(0.0F), F32(1.0F)) : F32(1.0F);
}

inline LeafNumbers leaf_full(float* z, std::int64_t n, std::int64_t target, const LeafWants& wants) {
  if (n % 64 != 0) pad(z, n, -INFINITY);
  std::int64_t const padded = (n + 63) / 64 * 64;
  LeafNumbers out{};
  out.m = largest_of(z, padded);
  float const m = reference_of(out.m);
  F32 const reference(m);
  if (wants.argmax) {
    std::int64_t j = 0;
    while (j + 1 < n && !(z[j] == out.m)) ++j;
    out.argmax = static_cast<std::int32_t>(j);
  }
  if (wants.k || wants.u) {
    F32 k(0.0F), w(0.0F), u(0.0F), c(0.0F);
    for_lanes(n, [&](std::int64_t i, int count) {
      F32 const x = load_some(z + i, count, m), gap = x - reference;
      F32 one = counted(x, wants.dropped);
      if (count < F32::lanes) {
        alignas(64) float ones[F32::lanes];
        one.store(ones);
        for (int j = count; j < F32::lanes; ++j) ones[j] = 0.0F;
        one = F32::load(ones);
      }
      if (wants.kept != nullptr) one = one * load_some(wants.kept + i, count, 0.0F);
      u = u + weighted(one, gap);
      c = c + one;
      F32 kappa = one;
      if (wants.kappa != nullptr) kappa = weighted(one, load_some(wants.kappa + i, count));
      k = k + weighted(kappa, gap);
      w = w + kappa;
    });
    out.k = sum_of(k);
    out.n = sum_of(w);
    out.u = sum_of(u);
    out.c = sum_of(c);
  }
  if (target >= 0) {
    out.z_y = z[target];
    z[target] = -INFINITY;
  }
  if (!wants.t && !wants.g) {
    out.r = sum_exponentials<true>(z, padded, m, z);
    return out;
  }
  F32 r0(0.0F), r1 = r0, t0 = r0, t1 = r0, g0 = r0, g1 = r0;
  F32 const floor(-200.0F);  // e is 0 there, and e (z - m) must be, too
  auto one = [&](std::int64_t i, F32& r, F32& t, F32& g) {
    F32 const gap = F32::load(z + i) - reference;
    F32 const e = exp2_of(gap * F32(contract::log2e<float>()));
    e.store(z + i);
    r = r + e;
    t = fma(e, maximum(floor, gap), t);
    g = fma(e, e, g);
  };
  for (std::int64_t i = 0; i < padded; i += 2 * F32::lanes) {
    one(i, r0, t0, g0);
    one(i + F32::lanes, r1, t1, g1);
  }
  out.r = sum_of(r0 + r1);
  out.t = sum_of(t0 + t1);
  out.g = sum_of(g0 + g1);
  return out;
}

// Replaces p[0, n) by its filtered values, but for the target's; returns how many are not 0. Columns [column0, column0
// + n) lie in one range of 2^32.
inline std::int64_t filter(float* p, std::int64_t n, const GradientRow& row, double* variance) {
  using U32 = std::uint32_t __attribute__((vector_size(4 * F32::lanes)));
  using I32 = std::int32_t __attribute__((vector_size(4 * F32::lanes)));
  using Numbers = float __attribute__((vector_size(4 * F32::lanes)));
  auto const column0 = static_cast<std::uint64_t>(row.column0);
  contract::FilterKey const key = contract::filter_key(row.seed, row.row, column0);
  // A number that no filter changes, and that counts as one left. D at the target does not read it.
  if (row.target >= 0) p[row.target] = 1.0F;
  U32 columns;
  for (int i = 0; i < F32::lanes; ++i) columns[i] = static_cast<std::uint32_t>(column0) + static_cast<std::uint32_t>(i);
  F32 const eps(row.filter), unit(row.filter * 5.9604644775390625e-8F), zero(0.0F), one(1.0F);
  F32 left = zero, bound = zero;
  for_lanes(n, [&](std::int64_t i, int count) {
    U32 hash = columns;
    contract::filter_hash(hash, key);
    // Through signed words, which every instruction set converts.
    Numbers const numbers = __builtin_convertvector(reinterpret_cast<I32>(hash), Numbers);
    F32 uniform;
    std::memcpy(&uniform, &numbers, sizeof uniform);
    F32 const x = load_some(p + i, count), y = contract::filtered(x, eps, uniform, unit);
    left = left + if_equal(y, zero, zero, one);
    bound = bound + if_less(x, eps, x * (eps - x), zero);
    store_some(y, p + i, count);
    columns += static_cast<std::uint32_t>(F32::lanes);
  });
  *variance += static_cast<double>(sum_of(bound));
  return static_cast<std::int64_t>(sum_of(left));
}

template <bool capped, bool weighs>
inline std::int64_t gradient_of(float* z, std::int64_t n, const GradientRow& row, double* variance) {
  alignas(64) float p[leaf_columns];
  F32 const m(row.m), inverse_s(row.inverse_s);
  for_lanes(n, [&](std::int64_t i, int count) {
    store_some(exp2_of(contract::exponent(load_some(z + i, count), m)) * inverse_s, p + i, count);
  });
  std::int64_t const left = row.filter > 0.0F ? filter(p, n, row, variance) : n;
  F32 const a(row.a), e(row.e), h0(row.h0), c(row.c), slope(row.slope), floor(-200.0F), masked(-INFINITY);
  for_lanes(n, [&](std::int64_t i, int count) {
    F32 const x = load_some(z + i, count), gap = maximum(floor, x - m);
    F32 d = contract::element_with_entropy(load_some(p + i, count), gap, a, e, h0);
    if constexpr (weighs) {
      F32 kappa = load_some(row.kappa + i, count);
      if (row.dropped) kappa = if_equal(x, masked, F32(0.0F), kappa);
      d = d - c * kappa;
    }
    // A masked class lies at no finite place of the cap: slope 0.
    if constexpr (capped) d = if_equal(x, masked, F32(0.0F), d * contract::softcap_slope(x, slope));
    store_some(d, z + i, count);
  });
  if (row.target >= 0) {
    float const kappa = weighs ? row.kappa[row.target] : 0.0F;
    z[row.target] = (row.at_target - row.c * kappa) * row.slope_y;
  }
  return left;
}

inline std::int64_t gradient(float* z, std::int64_t n, const GradientRow& row, double* variance) {
  bool const weighs = row.kappa != nullptr;
  if (row.slope != 0.0F)
    return weighs ? gradient_of<true, true>(z, n, row, variance) : gradient_of<true, false>(z, n, row, variance);
  return weighs ? gradient_of<false, true>(z, n, row, variance) : gradient_of<false, false>(z, n, row, variance);
}

}  // namespace logitless::cpu::LL_ISA
