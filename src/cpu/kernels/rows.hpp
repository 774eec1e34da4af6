// Work on rows of fp32: leaf statistics with exponentials in place, storing and decoding kept exponentials, the merge
// of leaves in a fixed tree, and the writing of gradients. Written once on F32, the target's vector (LL_ISA names it).
// One exponential an element; a leaf is 1 KiB, so its three passes stay in the L1 cache.
#pragma once

namespace logitless::cpu::LL_ISA {

// Calls body(i, n): n = lanes for whole vectors, fewer for the tail.
template <class Body>
inline void for_lanes(std::int64_t n, Body body) {
  std::int64_t i = 0;
  for (; i + F32::lanes <= n; i += F32::lanes) body(i, F32::lanes);
  if (i < n) body(i, static_cast<int>(n - i));
}

template <class T>
inline F32 load_some(const T* p, int n, float fill = 0.0F) {
  if (n >= F32::lanes) return F32::load(p);
  alignas(64) float buffer[F32::lanes];
  alignas(64) T raw[F32::lanes] = {};
  std::memcpy(raw, p, static_cast<std::size_t>(n) * sizeof(T));
  F32::load(raw).store(buffer);
  for (int i = n; i < F32::lanes; ++i) buffer[i] = fill;
  return F32::load(buffer);
}

template <class T>
inline void store_some(F32 x, T* p, int n) {
  if (n >= F32::lanes) return x.store(p);
  alignas(64) T raw[F32::lanes];
  x.store(raw);
  std::memcpy(p, raw, static_cast<std::size_t>(n) * sizeof(T));
}

// Resolves a storage type once, outside every loop.
template <class Body>
inline void with_storage(contract::DType dtype, Body body) {
  switch (dtype) {
    case contract::DType::bf16: return body(bf16{});
    case contract::DType::f16: return body(f16{});
    default: return body(float{});
  }
}

inline void pad(float* z, std::int64_t n, float fill) {
  for (std::int64_t i = n; i % 64 != 0; ++i) z[i] = fill;
}

// Of n numbers, n a multiple of four vectors.
template <class T>
inline float largest_of(const T* z, std::int64_t n) {
  constexpr int lanes = F32::lanes, step = 4 * lanes;
  F32 top0(-INFINITY), top1 = top0, top2 = top0, top3 = top0;
  for (std::int64_t i = 0; i < n; i += step) {
    top0 = maximum(F32::load(z + i), top0);
    top1 = maximum(F32::load(z + i + lanes), top1);
    top2 = maximum(F32::load(z + i + 2 * lanes), top2);
    top3 = maximum(F32::load(z + i + 3 * lanes), top3);
  }
  return max_of(maximum(maximum(top0, top1), maximum(top2, top3)));
}

// Any reference gives exponentials of 0 to a leaf without a finite logit.
inline float reference_of(float largest) { return largest == -INFINITY ? 0.0F : largest; }

// Sum of exp(z - m) over n numbers, n a multiple of four vectors; each goes to e when keep (e may be z).
template <bool keep, class T>
inline float sum_exponentials(const T* z, std::int64_t n, float m, float* e) {
  constexpr int lanes = F32::lanes, step = 4 * lanes;
  F32 const reference(m);
  F32 sum0(0.0F), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  auto exponential = [&](std::int64_t i) {
    F32 const x = exp2_of(contract::exponent(F32::load(z + i), reference));
    if constexpr (keep) x.store(e + i);
    return x;
  };
  for (std::int64_t i = 0; i < n; i += step) {
    sum0 = sum0 + exponential(i);
    sum1 = sum1 + exponential(i + lanes);
    sum2 = sum2 + exponential(i + 2 * lanes);
    sum3 = sum3 + exponential(i + 3 * lanes);
  }
  return sum_of((sum0 + sum1) + (sum2 + sum3));
}

// Sum of z - m; masked classes give -inf.
template <class T>
inline float sum_differences(const T* z, std::int64_t n, float m) {
  F32 sum(0.0F);
  F32 const reference(m);
  for_lanes(n, [&](std::int64_t i, int count) { sum = sum + (load_some(z + i, count, m) - reference); });
  return sum_of(sum);
}

// z[0, n) -> exp(z - m), 0 at the target; see table.hpp. Padding holds 0 afterwards.
inline LeafResult leaf(float* z, std::int64_t n, std::int64_t target, bool want_k) {
  if (n % 64 != 0) pad(z, n, -INFINITY);
  std::int64_t const padded = (n + 63) / 64 * 64;
  LeafResult out{largest_of(z, padded), 0.0F, 0.0F, 0.0F};
  float const m = reference_of(out.m);
  if (want_k) out.k = sum_differences(z, n, m);
  if (target >= 0) {
    out.z_y = z[target];
    z[target] = -INFINITY;
  }
  out.r = sum_exponentials<true>(z, padded, m, z);
  return out;
}

inline void store(const float* e, std::int64_t n, float factor, void* dst, contract::DType dtype) {
  with_storage(dtype, [&](auto tag) {
    auto* d = static_cast<decltype(tag)*>(dst);
    F32 const f(factor);
    for_lanes(n, [&](std::int64_t i, int count) { store_some(load_some(e + i, count) * f, d + i, count); });
  });
}

inline void decode(const void* e, contract::DType dtype, std::int64_t n, float scale, float c, float* d) {
  with_storage(dtype, [&](auto tag) {
    auto const* s = static_cast<const decltype(tag)*>(e);
    F32 const f(scale), shift(c);
    for_lanes(n, [&](std::int64_t i, int count) {
      store_some(contract::element(load_some(s + i, count), f, shift), d + i, count);
    });
  });
}

inline void recompute(float* z, std::int64_t n, float m, float scale, float c) {
  F32 const reference(m), f(scale), shift(c);
  for_lanes(n, [&](std::int64_t i, int count) {
    F32 const e = exp2_of(contract::exponent(load_some(z + i, count), reference));
    store_some(contract::element(e, f, shift), z + i, count);
  });
}

inline void accumulate(float* acc, const float* x, std::int64_t n, float factor, bool add) {
  F32 const f(factor);
  if (add) {
    for_lanes(n, [&](std::int64_t i, int count) {
      store_some(fma(load_some(x + i, count), f, load_some(acc + i, count)), acc + i, count);
    });
  } else {
    for_lanes(n, [&](std::int64_t i, int count) { store_some(load_some(x + i, count) * f, acc + i, count); });
  }
}

inline void write(void* dst, contract::DType dtype, const float* x, std::int64_t n, bool add, float shift,
                  const float* y) {
  with_storage(dtype, [&](auto tag) {
    auto* d = static_cast<decltype(tag)*>(dst);
    F32 const minus(-shift);
    for_lanes(n, [&](std::int64_t i, int count) {
      F32 value = load_some(x + i, count);
      if (y != nullptr) value = fma(minus, load_some(y + i, count), value);
      if (add) value = load_some(d + i, count) + value;
      store_some(value, d + i, count);
    });
  });
}

inline void add_source(float* acc, const void* x, contract::DType dtype, std::int64_t n, float factor) {
  with_storage(dtype, [&](auto tag) {
    auto const* s = static_cast<const decltype(tag)*>(x);
    F32 const f(factor);
    for_lanes(n, [&](std::int64_t i, int count) {
      store_some(fma(load_some(s + i, count), f, load_some(acc + i, count)), acc + i, count);
    });
  });
}

using VectorStatistics = contract::RowStatistics<F32>;

// One level of the tree pairs entry i with entry i + half: the same order whatever is done in lanes.
template <int fields>
inline void merge_rows_of(const LeafArrays& in, std::int64_t leaves, std::int64_t stride, std::int64_t vocab,
                          std::int64_t i0, std::int64_t i1, const LeafArrays& out, float* scratch) {
  constexpr int lanes = F32::lanes;
  auto entry = [&](std::int64_t l) { return scratch + l * fields * lanes; };
  auto load = [&](std::int64_t l) {
    const float* e = entry(l);
    VectorStatistics s{F32::load(e),
                       F32::load(e + lanes),
                       F32::load(e + 2 * lanes),
                       F32::load(e + 3 * lanes),
                       F32(0.0F),
                       F32(0.0F),
                       F32(0.0F),
                       F32(0.0F)};
    if constexpr (fields == 8) {
      s.t = F32::load(e + 4 * lanes);
      s.g = F32::load(e + 5 * lanes);
      s.u = F32::load(e + 6 * lanes);
      s.c = F32::load(e + 7 * lanes);
    }
    return s;
  };
  auto save = [&](std::int64_t l, VectorStatistics const& s) {
    float* e = entry(l);
    s.m.store(e);
    s.r.store(e + lanes);
    s.k.store(e + 2 * lanes);
    s.n.store(e + 3 * lanes);
    if constexpr (fields == 8) {
      s.t.store(e + 4 * lanes);
      s.g.store(e + 5 * lanes);
      s.u.store(e + 6 * lanes);
      s.c.store(e + 7 * lanes);
    }
  };
  for (std::int64_t i = i0; i < i1; i += lanes) {
    int const count = static_cast<int>(std::min<std::int64_t>(lanes, i1 - i));
    for (std::int64_t l = 0; l < leaves; ++l) {
      auto const columns = static_cast<float>(std::min(leaf_columns, vocab - l * leaf_columns));
      auto at = [&](const float* array) {
        return array != nullptr ? load_some(array + l * stride + i, count) : F32(0.0F);
      };
      VectorStatistics s{
          at(in.m), at(in.r), at(in.k), in.n != nullptr ? at(in.n) : F32(in.k != nullptr ? columns : 0.0F),
          at(in.t), at(in.g), at(in.u), at(in.c)};
      save(l, s);
    }
    for (std::int64_t n = leaves; n > 1; n = (n + 1) / 2) {
      std::int64_t const half = (n + 1) / 2;
      for (std::int64_t l = 0; l + half < n; ++l) save(l, contract::merge(load(l), load(l + half)));
    }
    VectorStatistics const all = load(0);
    auto put = [&](F32 x, float* array) {
      if (array != nullptr) store_some(x, array + i, count);
    };
    put(all.m, out.m);
    put(all.r, out.r);
    put(all.k, out.k);
    put(all.n, out.n);
    put(all.t, out.t);
    put(all.g, out.g);
    put(all.u, out.u);
    put(all.c, out.c);
  }
}
inline void merge_rows(const LeafArrays& in, std::int64_t leaves, std::int64_t stride, std::int64_t vocab,
                       std::int64_t i0, std::int64_t i1, const LeafArrays& out, float* scratch) {
  if (in.full())
    merge_rows_of<8>(in, leaves, stride, vocab, i0, i1, out, scratch);
  else
    merge_rows_of<4>(in, leaves, stride, vocab, i0, i1, out, scratch);
}

}  // namespace logitless::cpu::LL_ISA
