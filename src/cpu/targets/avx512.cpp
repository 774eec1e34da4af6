// Target `avx512`: AVX-512 F, BW, VL, DQ (Skylake server and later, Zen 4 and later). Register tile 6 x 64: 24
// accumulators, four loads and six broadcasts for 24 FMAs. bf16 and fp16 operands are raised to fp32 when packed.
#define LL_ISA avx512
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/kernels/table.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
#endif

#include "contract/coefficients.hpp"
#include "contract/pair.hpp"

#define LL_OP [[gnu::always_inline]] inline

// The vector comes first: the kernels are written on it.
// clang-format off
#include "cpu/targets/avx512_vector.hpp"
#include "cpu/kernels/all.hpp"
// clang-format on

namespace logitless::cpu {
extern const Target avx512_target;
const Target avx512_target = {
    "avx512", avx512::row_kernels(), avx512::product_kernels<avx512::FmaProduct<6, 4>>(), {}, nullptr, nullptr};
}  // namespace logitless::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace logitless::cpu {
extern const Target avx512_target;
const Target avx512_target = {"avx512", {}, {}, {}, nullptr, nullptr};
}  // namespace logitless::cpu
#endif
