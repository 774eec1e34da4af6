// Target `amx`: AMX tiles for bf16 products (Sapphire Rapids and later), AVX-512 for everything else. Register tile 32
// x 32: 2 x 2 tiles of 16 x 16 fp32, K steps of 32. A step loads 4 KiB for 65536 flops.
#define LL_ISA amx
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/kernels/table.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>

#if defined(__clang__)
#pragma clang attribute push(                                                                                 \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")
#endif

#include "contract/coefficients.hpp"
#include "contract/pair.hpp"

#define LL_OP [[gnu::always_inline]] inline
#define LL_BF16_CONVERT

// The vector comes first: the kernels are written on it.
// clang-format off
#include "cpu/targets/avx512_vector.hpp"
#include "cpu/kernels/all.hpp"
// clang-format on

namespace logitless::cpu::amx {

// All eight tiles: 16 rows of 64 bytes.
struct alignas(64) TileConfiguration {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline void configure() {
  TileConfiguration const configuration;
  // GCC 12 does not know that the instruction reads memory.
  __asm__ volatile("" ::"r"(&configuration) : "memory");
  _tile_loadconfig(&configuration);
}
inline void release() { _tile_release(); }

struct TileProduct {
  using Operand = bf16;
  static constexpr int mr = 32, nr = 32, ks = 32;
  static constexpr int k_block = 1 << 20;
  static constexpr int dense_from = 32;
  static constexpr bool a_stays = false;
  // A step of B is two tiles of [16 pairs of K][16 columns] words.
  static constexpr std::int64_t word(int k, int g) { return g * 16 + k * 16; }

  static inline F32 add_word(F32 sum, std::uint32_t word, const char* b) {
    return F32(_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_set1_epi32(static_cast<std::int32_t>(word)),
                                (__m512bh)_mm512_loadu_si512(b)));
  }

  static inline void tile(const char* a, const char* b, std::int64_t steps, float* c, bool add) {
    constexpr int row_bytes = static_cast<int>(leaf_columns) * 4;
    float* const lower = c + 16 * leaf_columns;
    __asm__ volatile("" ::: "memory");
    if (add) {
      _tile_loadd(0, c, row_bytes);
      _tile_loadd(1, c + 16, row_bytes);
      _tile_loadd(2, lower, row_bytes);
      _tile_loadd(3, lower + 16, row_bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (std::int64_t s = 0; s < steps; ++s, a += 2048, b += 2048) {
      _tile_loadd(4, a, 64);
      _tile_loadd(6, b, 64);
      _tile_loadd(7, b + 1024, 64);
      _tile_loadd(5, a + 1024, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, row_bytes);
    _tile_stored(1, c + 16, row_bytes);
    _tile_stored(2, lower, row_bytes);
    _tile_stored(3, lower + 16, row_bytes);
    __asm__ volatile("" ::: "memory");
  }
};

}  // namespace logitless::cpu::amx

namespace logitless::cpu {
extern const Target amx_target;
const Target amx_target = {"amx",
                           amx::row_kernels(),
                           amx::product_kernels<amx::FmaProduct<6, 4>>(),
                           amx::product_kernels<amx::TileProduct>(),
                           amx::configure,
                           amx::release};
}  // namespace logitless::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace logitless::cpu {
extern const Target amx_target;
const Target amx_target = {"amx", {}, {}, {}, nullptr, nullptr};
}  // namespace logitless::cpu
#endif
