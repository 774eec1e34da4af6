// The macro product C [rows, 256] = A B on packed panels, and the register tile in fp32. Every product of the library
// runs here: X W^T (columns = classes), D W (columns = hidden), D^T X. Each element of C sums over K in order,
// in blocks that are fixed per target, so its bits do not depend on rows, columns, blocks or threads.
#pragma once

namespace logitless::cpu::LL_ISA {

// A panel of A stays in the L1 cache while the panels of B pass (a_stays), or the other way round.
template <class P>
inline void multiply(const char* a, const char* b, std::int64_t k_steps, std::int64_t rows, std::int64_t n, float* c) {
  std::int64_t const a_panel = k_steps * P::mr * segment_bytes;
  std::int64_t const b_panel = k_steps * P::nr * segment_bytes;
  for (std::int64_t k0 = 0; k0 < k_steps; k0 += P::k_block) {
    std::int64_t const steps = std::min<std::int64_t>(P::k_block, k_steps - k0);
    auto tile = [&](std::int64_t i, std::int64_t j) {
      P::tile(a + i / P::mr * a_panel + k0 * P::mr * segment_bytes,
              b + j / P::nr * b_panel + k0 * P::nr * segment_bytes, steps, c + i * leaf_columns + j, k0 > 0);
    };
    if constexpr (P::a_stays) {
      for (std::int64_t i = 0; i < rows; i += P::mr)
        for (std::int64_t j = 0; j < n; j += P::nr) tile(i, j);
    } else {
      for (std::int64_t j = 0; j < n; j += P::nr)
        for (std::int64_t i = 0; i < rows; i += P::mr) tile(i, j);
    }
  }
}

// mr_ rows x (vectors * lanes) columns of fp32.
template <int mr_, int vectors>
struct FmaProduct {
  using Operand = float;
  static constexpr int mr = mr_, nr = vectors * F32::lanes < 16 ? 16 : vectors * F32::lanes, ks = 16;
  static constexpr int held = nr / F32::lanes;  // vectors of a row
  static constexpr int k_block = 16;            // 256 elements of K
  static constexpr bool a_stays = false;
  static constexpr int dense_from = 4;  // sparse.hpp: a block of A is sparse up to one word in four
  // Where word k (of 16) of column group g lies in a step of a B panel.
  static constexpr std::int64_t word(int k, int g) { return k * nr + g; }

  static inline F32 add_word(F32 sum, std::uint32_t word, const char* b) {
    return fma(F32(contract::float_of(word)), F32::load(reinterpret_cast<const float*>(b)), sum);
  }

  static inline void tile(const char* a, const char* b, std::int64_t steps, float* c, bool add) {
    auto const* x = reinterpret_cast<const float*>(a);
    auto const* w = reinterpret_cast<const float*>(b);
    F32 sum[mr][held];
#pragma GCC unroll 16
    for (int i = 0; i < mr; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < held; ++v) sum[i][v] = F32(0.0F);
    for (std::int64_t s = 0; s < steps; ++s, x += mr * ks, w += nr * ks) {
#pragma GCC unroll 16
      for (int k = 0; k < ks; ++k) {
        F32 row[held];
#pragma GCC unroll 4
        for (int v = 0; v < held; ++v) row[v] = F32::load(w + k * nr + v * F32::lanes);
#pragma GCC unroll 16
        for (int i = 0; i < mr; ++i) {
          F32 const xi(x[i * ks + k]);
#pragma GCC unroll 4
          for (int v = 0; v < held; ++v) sum[i][v] = fma(xi, row[v], sum[i][v]);
        }
      }
    }
    // A block of K is summed by itself and added once: over long K the error grows with the block and the number of
    // blocks, not with K.
    if (add) {
#pragma GCC unroll 16
      for (int i = 0; i < mr; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < held; ++v) sum[i][v] = F32::load(c + i * leaf_columns + v * F32::lanes) + sum[i][v];
    }
#pragma GCC unroll 16
    for (int i = 0; i < mr; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < held; ++v) sum[i][v].store(c + i * leaf_columns + v * F32::lanes);
  }
};

}  // namespace logitless::cpu::LL_ISA
