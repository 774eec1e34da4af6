// Given logits, one row at a time: leaf statistics straight from the stored logits, the same merge tree over leaves,
// and the row of D from the kept exponentials (one exponential an element) or from the logits again. The row is read
// from memory once; its exponentials stay in the L2 cache (fp32, V * 4 bytes).
#pragma once

namespace logitless::cpu::LL_ISA {

// Ahead of the leaf in hand: 1, 2, 6 and 12 KiB measured slower than 4 (Xeon, two threads).
constexpr std::int64_t prefetch_bytes = 4096;

inline float logits_row(const void* z, contract::DType dtype, std::int64_t vocab, std::int64_t target, bool want_k,
                        float* m, float* r, float* k, float* e) {
  float z_y = 0.0F;
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    auto const* s = static_cast<const T*>(z);
    alignas(64) float buffer[leaf_columns];
    for (std::int64_t j0 = 0, l = 0; j0 < vocab; j0 += leaf_columns, ++l) {
      std::int64_t const n = std::min(leaf_columns, vocab - j0);
      const char* const ahead = reinterpret_cast<const char*>(s + j0) + prefetch_bytes;
      for (std::size_t i = 0; i < leaf_columns * sizeof(T); i += 64) __builtin_prefetch(ahead + i);
      std::int64_t const here = target - j0;
      bool const mine = here >= 0 && here < n;
      if (n == leaf_columns && !mine) {
        // Most leaves: from the stored logits straight to exponentials where they are kept.
        m[l] = largest_of(s + j0, n);
        float const reference = reference_of(m[l]);
        k[l] = want_k ? sum_differences(s + j0, n, reference) : 0.0F;
        r[l] = e != nullptr ? sum_exponentials<true>(s + j0, n, reference, e + j0)
                            : sum_exponentials<false>(s + j0, n, reference, e);
        continue;
      }
      for_lanes(n, [&](std::int64_t i, int count) { load_some(s + j0 + i, count).store(buffer + i); });
      LeafResult const result = leaf(buffer, n, mine ? here : -1, want_k);
      if (mine) z_y = result.z_y;
      m[l] = result.m;
      r[l] = result.r;
      k[l] = result.k;
      if (e != nullptr) std::memcpy(e + j0, buffer, static_cast<std::size_t>(n) * sizeof(float));
    }
  });
  return z_y;
}

// The result is entry 0 of every array; arrays that are not wanted are null.
inline void merge_leaves(const LeafArrays& in, std::int64_t leaves) {
  for (std::int64_t count = leaves; count > 1; count = (count + 1) / 2) {
    std::int64_t const half = (count + 1) / 2;
    for (std::int64_t l = 0; l + half < count; l += F32::lanes) {
      int const some = static_cast<int>(std::min<std::int64_t>(F32::lanes, count - half - l));
      auto load = [&](std::int64_t at) {
        auto of = [&](const float* array, float fill) {
          return array != nullptr ? load_some(array + at, some, fill) : F32(0.0F);
        };
        return contract::RowStatistics<F32>{of(in.m, -INFINITY), of(in.r, 0.0F), of(in.k, 0.0F), of(in.n, 0.0F),
                                            of(in.t, 0.0F),      of(in.g, 0.0F), of(in.u, 0.0F), of(in.c, 0.0F)};
      };
      auto const both = contract::merge(load(l), load(l + half));
      auto put = [&](F32 x, float* array) {
        if (array != nullptr) store_some(x, array + l, some);
      };
      put(both.m, in.m);
      put(both.r, in.r);
      put(both.k, in.k);
      put(both.n, in.n);
      put(both.t, in.t);
      put(both.g, in.g);
      put(both.u, in.u);
      put(both.c, in.c);
    }
  }
}

inline void logits_gradient(const float* e, const float* leaf_m, std::int64_t vocab, float m, float a_over_s, float c,
                            void* d, contract::DType dtype, const char* next, std::int64_t next_bytes) {
  with_storage(dtype, [&](auto tag) {
    auto* out = static_cast<decltype(tag)*>(d);
    F32 const shift(c);
    for (std::int64_t j0 = 0, l = 0; j0 < vocab; j0 += leaf_columns, ++l) {
      std::int64_t const n = std::min(leaf_columns, vocab - j0);
      if (next != nullptr)
        for (std::int64_t at = j0 * next_bytes; at < (j0 + n) * next_bytes; at += 64)
          __builtin_prefetch(next + at, 0, 2);
      F32 const scale(a_over_s * contract::exp2_of(contract::exponent(leaf_m[l], m)));
      for_lanes(n, [&](std::int64_t i, int count) {
        store_some(contract::element(load_some(e + j0 + i, count, 0.0F), scale, shift), out + j0 + i, count);
      });
    }
  });
}

inline void logits_gradient_again(const void* z, contract::DType z_dtype, std::int64_t vocab, float m, float a_over_s,
                                  float c, void* d, contract::DType dtype) {
  F32 const reference(m), scale(a_over_s), shift(c);
  with_storage(z_dtype, [&](auto z_tag) {
    auto const* s = static_cast<const decltype(z_tag)*>(z);
    with_storage(dtype, [&](auto d_tag) {
      auto* out = static_cast<decltype(d_tag)*>(d);
      for_lanes(vocab, [&](std::int64_t i, int count) {
        F32 const e = exp2_of(contract::exponent(load_some(s + i, count, 0.0F), reference));
        store_some(contract::element(e, scale, shift), out + i, count);
      });
    });
  });
}

}  // namespace logitless::cpu::LL_ISA
