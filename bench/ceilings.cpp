// Probes of the machine: see ceilings.hpp. One function per instruction set behind a function-level target attribute;
// the file is compiled for the baseline, and cpuid is asked before anything newer runs.
//
// fp32 and vdpbf16ps: independent accumulators, enough to hide the latency, in registers alone. Each step is undone by
// the next (x -> b - x; + a·b, then + a·(-b)), so that values stay random and bounded for ever. AMX: a 2x2 block of
// 16x16 tiles, K step 32; "L1" runs 8 steps over 32 KiB and stores its 4 KiB, as a kernel's inner loop would.
#include "bench/ceilings.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#endif

namespace logitless::bench {

namespace {

constexpr std::array<CeilingInfo, ceiling_count> infos{{
    {"fma_sse2", "fp32 multiply and add, sse2", "GFLOP/s"},
    {"fma_avx2", "fp32 FMA, avx2", "GFLOP/s"},
    {"fma_avx512", "fp32 FMA, avx512", "GFLOP/s"},
    {"dot_bf16", "bf16 vdpbf16ps, avx512", "GFLOP/s"},
    {"amx_registers", "bf16 AMX, registers", "GFLOP/s"},
    {"amx_l1", "bf16 AMX, operands in L1", "GFLOP/s"},
    {"amx_l2", "bf16 AMX, operands in L2", "GFLOP/s"},
    {"dram_read", "DRAM read", "GB/s"},
    {"dram_copy", "DRAM copy, read + written", "GB/s"},
}};

// A kernel does `iterations` times a fixed number of flops; its scratch holds random bf16 numbers.
using Kernel = void (*)(std::int64_t iterations, char* scratch);
constexpr std::size_t scratch_bytes = std::size_t{4} << 20;

#if defined(__x86_64__)

// Keeps a value alive without storing it.
template <class V>
inline __attribute__((always_inline)) void keep(V& value) {
  asm volatile("" : "+x"(value));
}

constexpr double flops_sse2 = 12 * 4 * 2;
void fma_sse2(std::int64_t iterations, char* scratch) {
  const float* seed = reinterpret_cast<const float*>(scratch);
  __m128 sum[12];
#pragma GCC unroll 12
  for (int i = 0; i < 12; ++i) sum[i] = _mm_loadu_ps(seed + 4 * i);
  const __m128 b = _mm_loadu_ps(seed + 64);
  __m128 a = _mm_set1_ps(-1.0f);
  keep(a);  // or the compiler subtracts instead of multiplying and adding
  for (std::int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) sum[i] = _mm_add_ps(_mm_mul_ps(sum[i], a), b);
  }
#pragma GCC unroll 12
  for (int i = 0; i < 12; ++i) keep(sum[i]);
}

constexpr double flops_avx2 = 12 * 8 * 2;
__attribute__((target("avx2,fma"))) void fma_avx2(std::int64_t iterations, char* scratch) {
  const float* seed = reinterpret_cast<const float*>(scratch);
  __m256 sum[12];
#pragma GCC unroll 12
  for (int i = 0; i < 12; ++i) sum[i] = _mm256_loadu_ps(seed + 8 * i);
  const __m256 b = _mm256_loadu_ps(seed + 128);
  __m256 a = _mm256_set1_ps(-1.0f);
  asm volatile("" : "+x"(a));
  for (std::int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) sum[i] = _mm256_fmadd_ps(sum[i], a, b);
  }
#pragma GCC unroll 12
  for (int i = 0; i < 12; ++i) asm volatile("" : "+x"(sum[i]));
}

constexpr double flops_avx512 = 24 * 16 * 2;
__attribute__((target("avx512f"))) void fma_avx512(std::int64_t iterations, char* scratch) {
  const float* seed = reinterpret_cast<const float*>(scratch);
  __m512 sum[24];
#pragma GCC unroll 24
  for (int i = 0; i < 24; ++i) sum[i] = _mm512_loadu_ps(seed + 16 * i);
  const __m512 b = _mm512_loadu_ps(seed + 512);
  __m512 a = _mm512_set1_ps(-1.0f);
  asm volatile("" : "+v"(a));
  for (std::int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) sum[i] = _mm512_fmadd_ps(sum[i], a, b);
  }
#pragma GCC unroll 24
  for (int i = 0; i < 24; ++i) asm volatile("" : "+v"(sum[i]));
}

constexpr double flops_dot = 2 * 24 * 32 * 2;
__attribute__((target("avx512f,avx512bf16"))) void dot_bf16(std::int64_t iterations, char* scratch) {
  const float* seed = reinterpret_cast<const float*>(scratch);
  __m512 sum[24];
#pragma GCC unroll 24
  for (int i = 0; i < 24; ++i) sum[i] = _mm512_loadu_ps(seed + 16 * i);
  const __m512i bits = _mm512_loadu_si512(scratch + 4096);
  const __m512i negated = _mm512_xor_si512(bits, _mm512_set1_epi16(static_cast<short>(0x8000)));
  const auto a = (__m512bh)_mm512_loadu_si512(scratch + 8192);
  const auto b = (__m512bh)bits;
  const auto minus_b = (__m512bh)negated;
  for (std::int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) sum[i] = _mm512_dpbf16_ps(sum[i], a, b);
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) sum[i] = _mm512_dpbf16_ps(sum[i], a, minus_b);
  }
#pragma GCC unroll 24
  for (int i = 0; i < 24; ++i) asm volatile("" : "+v"(sum[i]));
}

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t bytes_per_row[16] = {};
  std::uint8_t rows[16] = {};
};

constexpr double flops_tile = 2.0 * 16 * 16 * 32;

// GCC 12 does not know that loading tiles and their configuration reads memory: the empty asm tells it.
__attribute__((target("amx-tile"))) inline void configure_tiles(TileConfig& config) {
  for (int i = 0; i < 8; ++i) {
    config.bytes_per_row[i] = 64;
    config.rows[i] = 16;
  }
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

constexpr double flops_amx_registers = 8 * flops_tile;
__attribute__((target("amx-tile,amx-bf16"))) void amx_registers(std::int64_t iterations, char* scratch) {
  TileConfig config;
  configure_tiles(config);
  std::uint16_t minus[512];  // tile 7 = - tile 6: what one product adds the next takes away
  std::memcpy(minus, scratch + 2048, sizeof minus);
  for (std::uint16_t& x : minus) x = static_cast<std::uint16_t>(x ^ 0x8000u);
  asm volatile("" ::"r"(minus) : "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, scratch, 64);
  _tile_loadd(5, scratch + 1024, 64);
  _tile_loadd(6, scratch + 2048, 64);
  _tile_loadd(7, minus, 64);
  for (std::int64_t n = 0; n < iterations; ++n) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _tile_dpbf16ps(0, 4, 7);
    _tile_dpbf16ps(1, 4, 6);
    _tile_dpbf16ps(2, 5, 7);
    _tile_dpbf16ps(3, 5, 6);
  }
  _tile_release();
}

// a, b: `steps` K steps of 2 KiB (two tiles each); c: 4 KiB.
__attribute__((target("amx-tile,amx-bf16"))) inline void amx_block(const char* a, const char* b, int steps, char* c) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  asm("" : "+r"(steps));  // a loop, as in a kernel, not straight code that spills addresses
  for (int k = 0; k < steps; ++k, a += 2048, b += 2048) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + 1024, 64);
    _tile_loadd(5, a + 1024, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, 64);
  _tile_stored(1, c + 1024, 64);
  _tile_stored(2, c + 2048, 64);
  _tile_stored(3, c + 3072, 64);
}

constexpr double flops_amx_l1 = 8 * 4 * flops_tile;
__attribute__((target("amx-tile,amx-bf16"))) void amx_l1(std::int64_t iterations, char* scratch) {
  TileConfig config;
  configure_tiles(config);
  for (std::int64_t n = 0; n < iterations; ++n) {
    asm volatile("" ::: "memory");
    amx_block(scratch, scratch + (16 << 10), 8, scratch + (3 << 20));
  }
  _tile_release();
}

constexpr double flops_amx_l2 = 128 * 4 * flops_tile;
__attribute__((target("amx-tile,amx-bf16"))) void amx_l2(std::int64_t iterations, char* scratch) {
  TileConfig config;
  configure_tiles(config);
  for (std::int64_t n = 0; n < iterations; ++n) {
    asm volatile("" ::: "memory");
    amx_block(scratch, scratch + (256 << 10), 128, scratch + (3 << 20));
  }
  _tile_release();
}

bool cpu_has_amx_bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  return (d >> 22 & 1u) != 0 && (d >> 24 & 1u) != 0;
}

// Linux hands out tile state on request, once per process, before the first use.
bool os_permits_amx() {
  constexpr long request_permission = 0x1023, tile_data = 18;
  return ::syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

constexpr std::size_t prefetch_ahead = 4096;

__attribute__((target("avx2"))) void read_avx2(const char* data, std::size_t bytes) {
  __m256i sum[8] = {};
  std::size_t at = 0;
  for (; at + 256 <= bytes; at += 256) {
    for (int i = 0; i < 4; ++i) _mm_prefetch(data + at + prefetch_ahead + 64 * i, _MM_HINT_T0);
    for (int i = 0; i < 8; ++i) {
      sum[i] = _mm256_xor_si256(sum[i], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + at + 32 * i)));
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) asm volatile("" : "+x"(sum[i]));
}

__attribute__((target("avx512f"))) void read_avx512(const char* data, std::size_t bytes) {
  __m512i sum[8] = {};
  std::size_t at = 0;
  for (; at + 512 <= bytes; at += 512) {
    for (int i = 0; i < 8; ++i) _mm_prefetch(data + at + prefetch_ahead + 64 * i, _MM_HINT_T0);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sum[i] = _mm512_xor_si512(sum[i], _mm512_loadu_si512(data + at + 64 * i));
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) asm volatile("" : "+v"(sum[i]));
}

__attribute__((target("avx2"))) void scale_f32_avx2(float* x, std::size_t elements, float factor) {
  const __m256 f = _mm256_set1_ps(factor);
  std::size_t at = 0;
  for (; at + 32 <= elements; at += 32) {
    _mm_prefetch(reinterpret_cast<const char*>(x + at) + prefetch_ahead, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(x + at) + prefetch_ahead + 64, _MM_HINT_T0);
    for (std::size_t i = 0; i < 32; i += 8) {
      _mm256_storeu_ps(x + at + i, _mm256_mul_ps(_mm256_loadu_ps(x + at + i), f));
    }
  }
  for (; at < elements; ++at) x[at] *= factor;
}

__attribute__((target("avx512f"))) void scale_f32_avx512(float* x, std::size_t elements, float factor) {
  const __m512 f = _mm512_set1_ps(factor);
  std::size_t at = 0;
  for (; at + 32 <= elements; at += 32) {
    _mm_prefetch(reinterpret_cast<const char*>(x + at) + prefetch_ahead, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(x + at) + prefetch_ahead + 64, _MM_HINT_T0);
    for (std::size_t i = 0; i < 32; i += 16) {
      _mm512_storeu_ps(x + at + i, _mm512_mul_ps(_mm512_loadu_ps(x + at + i), f));
    }
  }
  for (; at < elements; ++at) x[at] *= factor;
}

// Even and odd elements apart, so that nothing crosses lanes; half a unit is added before the lower bits are cut, which
// costs less than ties to even and makes no difference to a memory probe.
__attribute__((target("avx2"))) void scale_bf16_avx2(std::uint16_t* x, std::size_t elements, float factor) {
  const __m256 f = _mm256_set1_ps(factor);
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u)), half = _mm256_set1_epi32(0x8000);
  for (std::size_t at = 0; at + 32 <= elements; at += 32) {
    _mm_prefetch(reinterpret_cast<const char*>(x + at) + prefetch_ahead, _MM_HINT_T0);
    for (std::size_t i = 0; i < 32; i += 16) {
      auto* const where = reinterpret_cast<__m256i*>(x + at + i);
      const __m256i both = _mm256_loadu_si256(where);
      __m256i even = _mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), f));
      __m256i odd = _mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(both, high)), f));
      even = _mm256_srli_epi32(_mm256_add_epi32(even, half), 16);
      odd = _mm256_and_si256(_mm256_add_epi32(odd, half), high);
      _mm256_storeu_si256(where, _mm256_or_si256(even, odd));
    }
  }
}

__attribute__((target("avx512f"))) void scale_bf16_avx512(std::uint16_t* x, std::size_t elements, float factor) {
  const __mmask16 all = 0xffff;  // GCC 12 warns inside its own header about the unmasked shifts
  const __m512 f = _mm512_set1_ps(factor);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u)), half = _mm512_set1_epi32(0x8000);
  for (std::size_t at = 0; at + 32 <= elements; at += 32) {
    _mm_prefetch(reinterpret_cast<const char*>(x + at) + prefetch_ahead, _MM_HINT_T0);
    const __m512i both = _mm512_loadu_si512(x + at);
    __m512i even = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_maskz_slli_epi32(all, both, 16)), f));
    __m512i odd = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(both, high)), f));
    even = _mm512_maskz_srli_epi32(all, _mm512_add_epi32(even, half), 16);
    odd = _mm512_and_si512(_mm512_add_epi32(odd, half), high);
    _mm512_storeu_si512(x + at, _mm512_or_si512(even, odd));
  }
}

#endif  // __x86_64__

void read_plain(const char* data, std::size_t bytes) {
  std::uint64_t sum[4] = {};
  for (std::size_t at = 0; at + 32 <= bytes; at += 32) {
    for (std::size_t i = 0; i < 4; ++i) {
      std::uint64_t word = 0;
      std::memcpy(&word, data + at + 8 * i, 8);
      sum[i] ^= word;
    }
  }
  std::uint64_t all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
  asm volatile("" : "+r"(all));
}

void scale_f32_plain(float* x, std::size_t elements, float factor) {
  for (std::size_t i = 0; i < elements; ++i) x[i] *= factor;
}

void scale_bf16_plain(std::uint16_t* x, std::size_t elements, float factor) {
  for (std::size_t i = 0; i < elements; ++i) {
    const std::uint32_t raised = std::uint32_t{x[i]} << 16;
    float value = 0;
    std::memcpy(&value, &raised, 4);
    value *= factor;
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    x[i] = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
  }
}

struct MemoryKernels {
  void (*read)(const char*, std::size_t) = read_plain;
  void (*scale_f32)(float*, std::size_t, float) = scale_f32_plain;
  void (*scale_bf16)(std::uint16_t*, std::size_t, float) = scale_bf16_plain;
};

MemoryKernels memory_kernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {read_avx512, scale_f32_avx512, scale_bf16_avx512};
  if (__builtin_cpu_supports("avx2")) return {read_avx2, scale_f32_avx2, scale_bf16_avx2};
#endif
  return {};
}

// Member i's share of `count` things in units of `unit`.
std::pair<std::size_t, std::size_t> share_of(std::size_t count, std::size_t unit, int member, int members) {
  const std::size_t units = count / unit;
  const auto i = static_cast<std::size_t>(member), n = static_cast<std::size_t>(members);
  const std::size_t first = units * i / n * unit;
  const std::size_t last = i + 1 == n ? count : units * (i + 1) / n * unit;
  return {first, last - first};
}

std::int64_t number_in_file(const char* path) {
  std::ifstream file(path);
  std::int64_t value = -1;
  return file >> value ? value : -1;
}

std::int64_t cache_bytes(int name) { return std::max<std::int64_t>(0, ::sysconf(name)); }

// "key:   value kB" of /proc/meminfo, in bytes.
std::int64_t meminfo(const std::string& key) {
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    if (word == key + ":") {
      std::int64_t kib = 0;
      return file >> kib ? kib * 1024 : -1;
    }
  }
  return -1;
}

}  // namespace

const CeilingInfo& info_of(Ceiling ceiling) { return infos[static_cast<std::size_t>(ceiling)]; }

double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

MemoryProbe::MemoryProbe(Team& team) : team_(team) {}

double MemoryProbe::read(const void* data, std::size_t bytes) const {
  const MemoryKernels kernels = memory_kernels();
  const double start = now();
  team_.run([&](int member) {
    const auto [first, count] = share_of(bytes, 4096, member, team_.size());
    kernels.read(static_cast<const char*>(data) + first, count);
  });
  return now() - start;
}

double MemoryProbe::copy(void* to, const void* from, std::size_t bytes) const {
  const double start = now();
  team_.run([&](int member) {
    const auto [first, count] = share_of(bytes, 4096, member, team_.size());
    std::memcpy(static_cast<char*>(to) + first, static_cast<const char*>(from) + first, count);
  });
  return now() - start;
}

double MemoryProbe::scale_in_place(void* data, std::size_t elements, bool bf16) const {
  const MemoryKernels kernels = memory_kernels();
  // Read at run time: a factor known to be 1 would be no work at all.
  const volatile float one = 1.0f;
  const float factor = one;
  const double start = now();
  team_.run([&](int member) {
    const auto [first, count] = share_of(elements, 1024, member, team_.size());
    if (bf16) {
      kernels.scale_bf16(static_cast<std::uint16_t*>(data) + first, count, factor);
    } else {
      kernels.scale_f32(static_cast<float*>(data) + first, count, factor);
    }
  });
  return now() - start;
}

struct Ceilings::State {
  struct Entry {
    Kernel kernel = nullptr;
    double flops = 0;             // of one iteration
    std::int64_t iterations = 0;  // of a slice, found at the first probe
    std::string why_not;
    std::vector<double> samples;
  };

  Team& team;
  double slice_seconds;
  std::array<Entry, ceiling_count> entries;
  std::vector<Array> scratch;  // per member
  Array dram, dram_to;

  State(Team& members, bool small) : team(members), slice_seconds(small ? 1e-3 : 10e-3) {}
  Entry& at(Ceiling ceiling) { return entries[static_cast<std::size_t>(ceiling)]; }
};

Ceilings::Ceilings(Team& team, bool small) : state_(std::make_unique<State>(team, small)) {
  State& s = *state_;
  for (int i = 0; i < team.size(); ++i) s.scratch.emplace_back(scratch_bytes);
  team.run([&](int member) {
    // bf16 numbers in [-1, 1): read as fp32 they are of the same size.
    std::minstd_rand random(static_cast<unsigned>(member) + 1);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    auto* out = s.scratch[static_cast<std::size_t>(member)].as<std::uint16_t>();
    for (std::size_t i = 0; i < scratch_bytes / 2; ++i) {
      const float value = uniform(random);
      std::uint32_t bits = 0;
      std::memcpy(&bits, &value, 4);
      out[i] = static_cast<std::uint16_t>(bits >> 16);
    }
  });

#if defined(__x86_64__)
  const auto offer = [&](Ceiling ceiling, bool supported, const char* feature, Kernel kernel, double flops) {
    State::Entry& entry = s.at(ceiling);
    entry.kernel = supported ? kernel : nullptr;
    entry.flops = flops;
    if (!supported) entry.why_not = std::string("this processor has no ") + feature;
  };
  const bool avx512 = __builtin_cpu_supports("avx512f") != 0;
  offer(Ceiling::fma_sse2, true, "sse2", fma_sse2, flops_sse2);
  offer(Ceiling::fma_avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), "avx2", fma_avx2,
        flops_avx2);
  offer(Ceiling::fma_avx512, avx512, "avx512f", fma_avx512, flops_avx512);
  offer(Ceiling::dot_bf16, avx512 && __builtin_cpu_supports("avx512bf16"), "avx512bf16", dot_bf16, flops_dot);
  const bool has_amx = cpu_has_amx_bf16();
  const bool amx = has_amx && os_permits_amx();
  offer(Ceiling::amx_registers, amx, "amx-bf16", amx_registers, flops_amx_registers);
  offer(Ceiling::amx_l1, amx, "amx-bf16", amx_l1, flops_amx_l1);
  offer(Ceiling::amx_l2, amx, "amx-bf16", amx_l2, flops_amx_l2);
  if (has_amx && !amx) {
    for (const Ceiling ceiling : {Ceiling::amx_registers, Ceiling::amx_l1, Ceiling::amx_l2}) {
      s.at(ceiling).why_not = "the operating system does not permit AMX";
    }
  }
#else
  for (State::Entry& entry : s.entries) entry.why_not = "this processor is not x86-64";
  s.at(Ceiling::dram_read).why_not.clear();
  s.at(Ceiling::dram_copy).why_not.clear();
#endif

  // Four times L3, so that what stays in it does not count; but guests may report a whole server's L3.
  std::size_t bytes = std::size_t{8} << 20;
  if (!small) {
    const auto l3 = static_cast<std::size_t>(cache_bytes(_SC_LEVEL3_CACHE_SIZE));
    bytes = std::clamp(4 * l3, std::size_t{256} << 20, std::size_t{1} << 30);
    bytes = std::min(bytes, static_cast<std::size_t>(std::max<std::int64_t>(available_memory() / 8, 32 << 20)));
  }
  s.dram = Array(bytes);
  s.dram_to = Array(bytes / 2);
  team.run([&](int member) {
    const auto fill = [&](Array& array) {
      const auto [first, count] = share_of(array.bytes(), 4096, member, team.size());
      for (std::size_t at = 0; at < count; at += scratch_bytes / 2) {
        std::memcpy(array.as<char>() + first + at, s.scratch[static_cast<std::size_t>(member)].data(),
                    std::min(scratch_bytes / 2, count - at));
      }
    };
    fill(s.dram);
    fill(s.dram_to);
  });
}

Ceilings::~Ceilings() = default;

bool Ceilings::available(Ceiling ceiling) const { return state_->at(ceiling).why_not.empty(); }
std::string Ceilings::why_not(Ceiling ceiling) const { return state_->at(ceiling).why_not; }
const std::vector<double>& Ceilings::samples(Ceiling ceiling) const { return state_->at(ceiling).samples; }
std::size_t Ceilings::dram_bytes() const { return state_->dram.bytes(); }

double Ceilings::probe(Ceiling ceiling) {
  State& s = *state_;
  State::Entry& entry = s.at(ceiling);
  if (!entry.why_not.empty()) return 0.0;
  double rate = 0.0;
  const MemoryProbe memory(s.team);
  if (ceiling == Ceiling::dram_read) {
    rate = static_cast<double>(s.dram.bytes()) / memory.read(s.dram.data(), s.dram.bytes()) / 1e9;
  } else if (ceiling == Ceiling::dram_copy) {
    const std::size_t bytes = s.dram_to.bytes();
    rate = 2.0 * static_cast<double>(bytes) / memory.copy(s.dram_to.data(), s.dram.data(), bytes) / 1e9;
  } else {
    const auto slice = [&](std::int64_t iterations) {
      const double start = now();
      s.team.run([&](int member) { entry.kernel(iterations, s.scratch[static_cast<std::size_t>(member)].as<char>()); });
      return now() - start;
    };
    if (entry.iterations == 0) {
      // Grow until a slice is long enough for its wake-up not to count; this also warms the unit up. The best of three
      // decides, and nothing below 1 GFLOP/s is believed: on a busy machine a mere wake-up can last a whole slice.
      auto iterations = static_cast<std::int64_t>(s.slice_seconds * 1e9 / entry.flops) + 1;
      const auto best_of_three = [&] { return std::min({slice(iterations), slice(iterations), slice(iterations)}); };
      for (double seconds = best_of_three(); seconds < s.slice_seconds; seconds = best_of_three()) {
        const double factor = std::min(4.0, 1.1 * s.slice_seconds / seconds);
        iterations = static_cast<std::int64_t>(factor * static_cast<double>(iterations)) + 1;
      }
      entry.iterations = iterations;
    }
    const double seconds = slice(entry.iterations);
    rate = entry.flops * static_cast<double>(entry.iterations) * s.team.size() / seconds / 1e9;
  }
  entry.samples.push_back(rate);
  return rate;
}

Ceiling ceiling_of_products(const std::string& cpu_target, bool bf16_operands) {
  if (bf16_operands && cpu_target == "amx") return Ceiling::amx_l1;
  if (bf16_operands && cpu_target == "avx512bf16") return Ceiling::dot_bf16;
  if (cpu_target == "amx" || cpu_target == "avx512bf16" || cpu_target == "avx512") return Ceiling::fma_avx512;
  if (cpu_target == "avx2") return Ceiling::fma_avx2;
  return Ceiling::fma_sse2;
}

MachineInfo describe_machine() {
  MachineInfo machine;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      machine.cpu = line.substr(colon + 2);
      break;
    }
  }
  machine.cpus = static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
  machine.l1d = cache_bytes(_SC_LEVEL1_DCACHE_SIZE);
  machine.l2 = cache_bytes(_SC_LEVEL2_CACHE_SIZE);
  machine.l3 = cache_bytes(_SC_LEVEL3_CACHE_SIZE);
  machine.memory = std::max<std::int64_t>(0, meminfo("MemTotal"));
  return machine;
}

std::int64_t available_memory() {
  std::int64_t available = meminfo("MemAvailable");
  if (available < 0) available = std::numeric_limits<std::int64_t>::max();
  // A container's own limit (cgroup v2), where there is one.
  const std::int64_t limit = number_in_file("/sys/fs/cgroup/memory.max");
  const std::int64_t used = number_in_file("/sys/fs/cgroup/memory.current");
  if (limit > 0 && used >= 0) available = std::min(available, std::max<std::int64_t>(0, limit - used));
  return available;
}

}  // namespace logitless::bench
