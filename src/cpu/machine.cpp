// CPUID and XCR0; see machine.hpp.
#include "cpu/machine.hpp"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace logitless::cpu {
namespace {

#if defined(__x86_64__)
std::uint64_t enabled_state() {
  std::uint32_t lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return static_cast<std::uint64_t>(hi) << 32 | lo;
}

// Linux gives the 8 KiB of tile state to a process that asks (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
bool ask_for_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

Features detect() {
  Features f;
  std::uint32_t a, b, c, d;
  if (__get_cpuid(0, &a, &b, &c, &d) == 0) return f;
  std::uint32_t const highest = a;
  char vendor[13] = {};
  std::memcpy(vendor, &b, 4);
  std::memcpy(vendor + 4, &d, 4);
  std::memcpy(vendor + 8, &c, 4);
  f.intel = std::strcmp(vendor, "GenuineIntel") == 0;
  f.amd = std::strcmp(vendor, "AuthenticAMD") == 0;
  __get_cpuid(1, &a, &b, &c, &d);
  f.family = static_cast<int>((a >> 8 & 0xf) == 0xf ? 0xf + (a >> 20 & 0xff) : a >> 8 & 0xf);
  f.model = static_cast<int>((a >> 4 & 0xf) | (a >> 12 & 0xf0));
  bool const saves = (c >> 27 & 1) != 0;
  bool const fma = (c >> 12 & 1) != 0, f16c = (c >> 29 & 1) != 0;
  std::uint64_t const state = saves ? enabled_state() : 0;
  bool const ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tiles = (state & 0x60000) == 0x60000;
  char name[49] = {};
  std::uint32_t extended;
  if (__get_cpuid(0x80000000U, &extended, &b, &c, &d) != 0 && extended >= 0x80000004U) {
    for (std::uint32_t i = 0; i < 3; ++i) {
      std::uint32_t words[4];
      __get_cpuid(0x80000002U + i, &words[0], &words[1], &words[2], &words[3]);
      std::memcpy(name + std::size_t{16} * i, words, 16);
    }
  }
  f.name = name;
  f.name.erase(0, f.name.find_first_not_of(' '));
  f.name.erase(f.name.find_last_not_of(' ') + 1);
  if (highest < 7) return f;
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  std::uint32_t const sub_leaves = a;
  f.avx2 = ymm && fma && f16c && (b >> 5 & 1) != 0;
  bool const avx512 = (b >> 16 & 1) != 0 && (b >> 17 & 1) != 0 && (b >> 30 & 1) != 0 && (b >> 31 & 1) != 0;
  f.avx512 = zmm && f.avx2 && avx512;
  bool const amx = (d >> 24 & 1) != 0 && (d >> 22 & 1) != 0;
  if (sub_leaves >= 1) {
    __get_cpuid_count(7, 1, &a, &b, &c, &d);
    f.avx512bf16 = f.avx512 && (a >> 5 & 1) != 0;
  }
  f.amx_bf16 = f.avx512bf16 && tiles && amx && ask_for_tiles();
  return f;
}
#else
Features detect() { return {}; }
#endif

}  // namespace

const Features& machine() {
  static Features const features = detect();
  return features;
}

}  // namespace logitless::cpu
