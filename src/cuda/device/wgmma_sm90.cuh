// Hopper's matrix products of a warpgroup (128 threads): D [64,256] fp32 in registers (+)= A [64,16] B [256,16]^T,
// both in shared memory, 16-bit elements, hidden dimension adjacent, rows of 128 bytes under the 128-byte swizzle.
// Thread t = 32 w + 4 g + q holds of rows 16 w + g and + 8 the columns 8 j + 2 q and + 1: d[4 j], d[4 j + 1] of the
// first, d[4 j + 2], d[4 j + 3] of the second. The compiler drops a product whose accumulators nobody reads.
#pragma once

#include <cstdint>

namespace logitless::cuda::device {

// Of a tile whose groups of 8 rows are 1024 bytes apart. 16 further elements along the rows: add 2.
__device__ __forceinline__ std::uint64_t wgmma_operand(std::uint32_t address) {
  constexpr std::uint64_t leading = 16 >> 4, stride = 1024 >> 4, swizzle_128 = 1;
  return static_cast<std::uint64_t>((address & 0x3ffffU) >> 4) | leading << 16 | stride << 32 | swizzle_128 << 62;
}
// Before the first product of a batch: the registers were written by ordinary instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define LL_REGISTERS                                                                               \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"    \
  "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"   \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,"   \
  "%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,"   \
  "%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113," \
  "%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}"
#define LL_EIGHT(i)                                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define LL_ALL                                                                                                  \
  LL_EIGHT(0), LL_EIGHT(8), LL_EIGHT(16), LL_EIGHT(24), LL_EIGHT(32), LL_EIGHT(40), LL_EIGHT(48), LL_EIGHT(56), \
      LL_EIGHT(64), LL_EIGHT(72), LL_EIGHT(80), LL_EIGHT(88), LL_EIGHT(96), LL_EIGHT(104), LL_EIGHT(112),       \
      LL_EIGHT(120)
#define LL_WGMMA(type)                                                                                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type \
               " " LL_REGISTERS ", %128, %129, p, 1, 1, 0, 0;\n}"                                                      \
               : LL_ALL                                                                                                \
               : "l"(a), "l"(b), "r"(accumulate))

// accumulate 0: D is overwritten. Runs asynchronously: commit, then wait before D is read or the operands overwritten.
template <bool kHalf>
__device__ __forceinline__ void wgmma_64x256x16(float (&d)[128], std::uint64_t a, std::uint64_t b, int accumulate) {
  if constexpr (kHalf) {
    LL_WGMMA("f16");
  } else {
    LL_WGMMA("bf16");
  }
}

#undef LL_WGMMA
#undef LL_ALL
#undef LL_EIGHT
#undef LL_REGISTERS

}  // namespace logitless::cuda::device
