// The macro product C [rows, 256] = A B where most of A is 0 (a filtered D, whose operands lie as any other's): in each
// block of K a row's words that are not 0 are listed, and rows of B are added for those alone, so that the cost is that
// of what is left (and one look at each word of A). A block in which much is left is multiplied whole. Same blocks,
// same order within them: for finite B in fp32 no bit differs from product.hpp's. A word that is 0 never meets an
// infinity of B here, so 0 * inf = 0 where a block is not multiplied whole.
#pragma once

namespace logitless::cpu::LL_ISA {

// A word of A that is not 0, and where its row of B begins in the block, in bytes.
struct Word {
  std::uint32_t bits, at;
};

// C row [panels * nr] (+)= sum over the listed words.
template <class P, int panels>
inline void add_words(const Word* words, int count, const char* b, std::int64_t b_panel, float* c, bool add) {
  constexpr int held = P::nr / F32::lanes;
  F32 sum[panels][held];
#pragma GCC unroll 16
  for (int q = 0; q < panels; ++q)
#pragma GCC unroll 16
    for (int v = 0; v < held; ++v) sum[q][v] = F32(0.0F);
  for (int n = 0; n < count; ++n) {
    const char* const row = b + words[n].at;
#pragma GCC unroll 16
    for (int q = 0; q < panels; ++q)
#pragma GCC unroll 16
      for (int v = 0; v < held; ++v) {
        // Columns come in groups of 16.
        std::int64_t const at = P::word(0, v * F32::lanes / 16 * 16) + v * F32::lanes % 16;
        sum[q][v] = P::add_word(sum[q][v], words[n].bits, row + q * b_panel + at * 4);
      }
  }
#pragma GCC unroll 16
  for (int q = 0; q < panels; ++q)
#pragma GCC unroll 16
    for (int v = 0; v < held; ++v) {
      float* const to = c + q * P::nr + v * F32::lanes;
      (add ? F32::load(to) + sum[q][v] : sum[q][v]).store(to);
    }
}

template <class P>
inline void multiply_sparse(const char* a, const char* b, std::int64_t k_steps, std::int64_t rows, std::int64_t n,
                            float* c) {
  constexpr std::int64_t block = std::min(P::k_block, 16);
  // Accumulators of a row: what a register file of 16 or 32 vectors holds beside a factor.
  constexpr int panels = std::max(1, (F32::lanes == 16 ? 16 : 8) * F32::lanes / P::nr);
  constexpr std::uint32_t but_signs = sizeof(typename P::Operand) == 2 ? 0x7fff7fffU : 0x7fffffffU;
  std::int64_t const a_panel = k_steps * P::mr * segment_bytes, b_panel = k_steps * P::nr * segment_bytes;
  for (std::int64_t k0 = 0; k0 < k_steps; k0 += block) {
    std::int64_t const steps = std::min(block, k_steps - k0);
    const char* const b_block = b + k0 * P::nr * segment_bytes;
    for (std::int64_t i = 0; i < rows; i += P::mr) {
      const char* const panel = a + i / P::mr * a_panel + k0 * P::mr * segment_bytes;
      std::uint16_t left[P::mr][block];
      int total = 0;
      // Panels lie far apart: the hardware does not fetch the next one by itself.
      const char* const ahead = i + P::mr < rows ? panel + a_panel : panel;
      for (std::int64_t s = 0; s < steps; ++s)
        for (int r = 0; r < P::mr; ++r) {
          std::int64_t const at = (s * P::mr + r) * segment_bytes;
          __builtin_prefetch(ahead + at);
          left[r][s] = nonzero16(panel + at, but_signs);
          total += __builtin_popcount(left[r][s]);
        }
      if (std::int64_t{total} * P::dense_from > steps * 16 * P::mr) {
        for (std::int64_t j = 0; j < n; j += P::nr)
          P::tile(panel, b_block + j / P::nr * b_panel, steps, c + i * leaf_columns + j, k0 > 0);
        continue;
      }
      for (std::int64_t r = 0; r < std::min<std::int64_t>(P::mr, rows - i); ++r) {
        Word words[block * 16];
        int count = 0;
        for (std::int64_t s = 0; s < steps; ++s)
          for (std::uint32_t bits = left[r][s], low = 0; bits != 0; bits ^= low) {
            // By the baseline's bsr; what compilers make of "trailing zeros" is an instruction of BMI.
            low = bits & (0U - bits);
            int const k = 31 - __builtin_clz(low);
            Word& word = words[count++];
            std::memcpy(&word.bits, panel + (s * P::mr + r) * segment_bytes + k * 4, 4);
            word.at = static_cast<std::uint32_t>(s * P::nr * segment_bytes + P::word(k, 0) * 4);
          }
        if (count == 0 && k0 > 0) continue;
        float* const to = c + (i + r) * leaf_columns;
        std::int64_t j = 0;
        for (; j + panels * P::nr <= (n + P::nr - 1) / P::nr * P::nr; j += panels * P::nr)
          add_words<P, panels>(words, count, b_block + j / P::nr * b_panel, b_panel, to + j, k0 > 0);
        for (; j < n; j += P::nr) add_words<P, 1>(words, count, b_block + j / P::nr * b_panel, b_panel, to + j, k0 > 0);
      }
    }
  }
}

}  // namespace logitless::cpu::LL_ISA
