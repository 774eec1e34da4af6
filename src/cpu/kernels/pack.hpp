// Packing of operands into panels (table.hpp says how they lie), conversion included: rows become 64-byte segments (A),
// columns are transposed in 16 x 16 words of 32 bits (B from rows) or copied (B from columns). A word is one fp32, or a
// pair of bf16 adjacent in K. Tails are zero. Cost: about one load, conversion and store an element, once a block.
#pragma once

namespace logitless::cpu::LL_ISA {

// Calls body with a pointer tag of the source's storage type; operands of bf16 come from bf16 only.
template <class P, class Body>
inline void with_source(const Source& src, Body body) {
  if constexpr (sizeof(typename P::Operand) == 2)
    body(bf16{});
  else
    with_storage(src.dtype, body);
}

// n elements of a row from column c0: where they lie, or gathered into `buffer` when columns are not adjacent.
template <class T>
inline const T* elements(const Source& src, const char* row, std::int64_t c0, std::int64_t n, T* buffer) {
  const char* p = row + c0 * src.col_stride;
  if (src.col_stride == static_cast<std::int64_t>(sizeof(T))) return reinterpret_cast<const T*>(p);
  for (std::int64_t i = 0; i < n; ++i) std::memcpy(buffer + i, p + i * src.col_stride, sizeof(T));
  return buffer;
}

// One segment (64 bytes of operands) from n <= ks elements; the rest zero.
template <class T>
inline void segment(float* dst, const T* src, std::int64_t n) {
  for (int i = 0; i < 16; i += F32::lanes) {
    std::int64_t const left = n - i;
    F32 const x = left >= F32::lanes ? F32::load(src + i)
                  : left > 0         ? load_some(src + i, static_cast<int>(left))
                                     : F32(0.0F);
    x.store(dst + i);
  }
}
inline void segment(bf16* dst, const bf16* src, std::int64_t n) {
  if (n >= 32) {
    std::memcpy(dst, src, 64);
  } else {
    std::memset(dst, 0, 64);
    if (n > 0) std::memcpy(dst, src, static_cast<std::size_t>(n) * 2);
  }
}

template <class P>
inline void pack_a(const Source& src, std::int64_t r0, std::int64_t rows, std::int64_t c0, std::int64_t k, char* dst) {
  using Operand = typename P::Operand;
  with_source<P>(src, [&](auto tag) {
    using T = decltype(tag);
    T gathered[P::ks];
    std::int64_t const steps = (k + P::ks - 1) / P::ks;
    for (std::int64_t p = 0; p < rows; p += P::mr) {
      for (int i = 0; i < P::mr; ++i) {
        auto* d = reinterpret_cast<Operand*>(dst) + i * P::ks;
        const char* row = p + i < rows ? src.row(r0 + p + i) : nullptr;
        for (std::int64_t s = 0; s < steps; ++s, d += P::mr * P::ks) {
          if (row == nullptr) {
            std::memset(d, 0, segment_bytes);
            continue;
          }
          std::int64_t const n = std::min<std::int64_t>(P::ks, k - s * P::ks);
          segment(d, elements(src, row, c0 + s * P::ks, n, gathered), n);
        }
      }
      dst += steps * P::mr * segment_bytes;
    }
  });
}

template <class P>
inline void pack_b_rows(const Source& src, std::int64_t r0, std::int64_t n, std::int64_t k, char* dst) {
  using Operand = typename P::Operand;
  with_source<P>(src, [&](auto tag) {
    using T = decltype(tag);
    T gathered[P::ks];
    alignas(64) Operand rows[16][P::ks];
    std::int64_t const steps = (k + P::ks - 1) / P::ks;
    std::int64_t const stride = P::word(1, 0) - P::word(0, 0);
    // Rows that are operands already are turned where they lie.
    bool const plain =
        std::is_same_v<T, Operand> && src.col_stride == static_cast<std::int64_t>(sizeof(T)) && src.index == nullptr;
    for (std::int64_t p = 0; p < n; p += P::nr, dst += steps * P::nr * segment_bytes) {
      for (int g = 0; g < P::nr; g += 16) {
        bool const whole = plain && p + g + 16 <= n;
        for (std::int64_t s = 0; s < steps; ++s) {
          auto* d = reinterpret_cast<std::uint32_t*>(dst + s * P::nr * segment_bytes) + P::word(0, g);
          std::int64_t const count = std::min<std::int64_t>(P::ks, k - s * P::ks);
          if (whole && count == P::ks) {
            const char* from = src.row(r0 + p + g) + s * segment_bytes;
            if (s + 4 < steps)
              for (int i = 0; i < 16; ++i) __builtin_prefetch(from + i * src.row_stride + 4 * segment_bytes);
            transpose16(from, src.row_stride, d, stride);
            continue;
          }
          for (int i = 0; i < 16; ++i) {
            std::int64_t const column = p + g + i;
            if (column < n)
              segment(rows[i], elements(src, src.row(r0 + column), s * P::ks, count, gathered), count);
            else
              std::memset(rows[i], 0, segment_bytes);
          }
          transpose16(rows, segment_bytes, d, stride);
        }
      }
    }
  });
}

// 16 columns of a row from c, scaled, as operands; columns from `n` on are zero.
template <class T>
inline void columns16(float* dst, const T* src, std::int64_t n, float scale) {
  segment(dst, src, n);
  if (scale != 1.0F)
    for (int i = 0; i < 16; i += F32::lanes) (F32::load(dst + i) * F32(scale)).store(dst + i);
}
inline void columns16(bf16* dst, const bf16* src, std::int64_t n, float scale) {
  if (n <= 0) {
    std::memset(dst, 0, 32);
    return;
  }
  for (int i = 0; i < 16; i += F32::lanes) {
    std::int64_t const left = std::clamp<std::int64_t>(n - i, 0, F32::lanes);
    F32 const x = left > 0 ? load_some(src + i, static_cast<int>(left)) : F32(0.0F);
    (x * F32(scale)).store(dst + i);
  }
}

template <class P>
inline void pack_b_cols(const Source& src, std::int64_t r0, std::int64_t k, std::int64_t c0, std::int64_t n,
                        const float* scale, const float* skip, char* dst) {
  using Operand = typename P::Operand;
  constexpr int pair = static_cast<int>(4 / sizeof(Operand));  // rows in a word
  with_source<P>(src, [&](auto tag) {
    using T = decltype(tag);
    T gathered[16];
    alignas(64) Operand columns[2][16];
    std::int64_t const steps = (k + P::ks - 1) / P::ks;
    std::int64_t const panel = steps * P::nr * segment_bytes;
    // Rows outermost: each source row is read once, in order.
    for (std::int64_t row = 0; row < steps * P::ks; row += pair) {
      auto* step = reinterpret_cast<std::uint32_t*>(dst + row / P::ks * P::nr * segment_bytes);
      int const word_row = static_cast<int>(row % P::ks) / pair;
      // Rows lie pages apart: the hardware does not fetch the next one by itself.
      constexpr std::int64_t ahead = 16;
      if (row + ahead < k) {
        const char* next = src.row(r0 + row + ahead) + c0 * src.col_stride;
        for (std::int64_t at = 0; at < n * src.col_stride; at += 64) __builtin_prefetch(next + at);
        if constexpr (pair == 2) {
          if (row + ahead + 1 < k) {
            next = src.row(r0 + row + ahead + 1) + c0 * src.col_stride;
            for (std::int64_t at = 0; at < n * src.col_stride; at += 64) __builtin_prefetch(next + at);
          }
        }
      }
      for (std::int64_t c = 0; c < n; c += 16) {
        auto* d = reinterpret_cast<std::uint32_t*>(reinterpret_cast<char*>(step) + c / P::nr * panel) +
                  P::word(word_row, static_cast<int>(c % P::nr));
        if constexpr (pair == 2) {
          // Whole pairs of unscaled rows are interleaved where they lie.
          if (scale == nullptr && skip == nullptr && src.col_stride == 2 && row + 1 < k && c + 16 <= n) {
            interleave16(reinterpret_cast<const bf16*>(src.row(r0 + row)) + c0 + c,
                         reinterpret_cast<const bf16*>(src.row(r0 + row + 1)) + c0 + c, d);
            continue;
          }
        }
        for (int half = 0; half < pair; ++half) {
          auto* out = pair == 1 ? reinterpret_cast<Operand*>(d) : columns[half];
          if (row + half >= k || (skip != nullptr && skip[row + half] != 0.0F)) {
            std::memset(out, 0, 16 * sizeof(Operand));
            continue;
          }
          std::int64_t const count = std::min<std::int64_t>(16, n - c);
          columns16(out, elements(src, src.row(r0 + row + half), c0 + c, count, gathered), count,
                    scale != nullptr ? scale[row + half] : 1.0F);
        }
        if constexpr (pair == 2) interleave16(columns[0], columns[1], d);
      }
      // Columns up to the panel's end.
      for (std::int64_t c = (n + 15) / 16 * 16; c % P::nr != 0; c += 16)
        std::memset(reinterpret_cast<std::uint32_t*>(reinterpret_cast<char*>(step) + c / P::nr * panel) +
                        P::word(word_row, static_cast<int>(c % P::nr)),
                    0, segment_bytes);
    }
  });
}

// D tile [rows, cols] fp32 -> segments of D (rows of da panels) and of its transpose (rows of dt panels).
template <class P>
inline void scatter(const float* c, std::int64_t rows, std::int64_t cols, std::int64_t t0, std::int64_t j0,
                    std::int64_t da_k_steps, std::int64_t dt_k_steps, char* da, char* dt) {
  using Operand = typename P::Operand;
  if (da != nullptr) {
    for (std::int64_t i = 0; i < rows; ++i) {
      std::int64_t const t = t0 + i;
      char* panel = da + (t / P::mr * da_k_steps * P::mr + t % P::mr) * segment_bytes;
      for (std::int64_t j = 0; j < cols; j += P::ks) {
        auto* d = reinterpret_cast<Operand*>(panel + (j0 + j) / P::ks * P::mr * segment_bytes);
        for (int u = 0; u < P::ks; u += F32::lanes) {
          std::int64_t const left = cols - j - u;
          F32 const x = left >= F32::lanes ? F32::load(c + i * leaf_columns + j + u)
                        : left > 0         ? load_some(c + i * leaf_columns + j + u, static_cast<int>(left))
                                           : F32(0.0F);
          x.store(d + u);
        }
      }
    }
  }
  if (dt == nullptr) return;
  constexpr int pair = static_cast<int>(4 / sizeof(Operand));
  alignas(64) std::uint32_t words[16][16];
  alignas(64) std::uint32_t turned[16][16];
  for (std::int64_t i = 0; i < rows; i += P::ks) {
    for (std::int64_t j = 0; j < cols; j += 16) {
      for (int w = 0; w < 16; ++w) {
        alignas(64) Operand half[2][16];
        for (int h = 0; h < pair; ++h) {
          auto* out = pair == 1 ? reinterpret_cast<Operand*>(words[w]) : half[h];
          std::int64_t const row = i + w * pair + h;
          for (int u = 0; u < 16; u += F32::lanes) {
            std::int64_t const left = row < rows ? cols - j - u : 0;
            F32 const x = left >= F32::lanes ? F32::load(c + row * leaf_columns + j + u)
                          : left > 0         ? load_some(c + row * leaf_columns + j + u, static_cast<int>(left))
                                             : F32(0.0F);
            x.store(out + u);
          }
        }
        if constexpr (pair == 2) interleave16(half[0], half[1], words[w]);
      }
      transpose16(words, segment_bytes, &turned[0][0], 16);
      std::int64_t const step = (t0 + i) / P::ks;
      for (std::int64_t u = 0; u < std::min<std::int64_t>(16, cols - j); ++u) {
        std::int64_t const row = j0 + j + u;
        std::memcpy(dt + ((row / P::mr * dt_k_steps + step) * P::mr + row % P::mr) * segment_bytes, turned[u],
                    segment_bytes);
      }
    }
  }
}

}  // namespace logitless::cpu::LL_ISA
