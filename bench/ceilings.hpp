// What this machine can do at most, probed in slices of about 10 ms that callers interleave with what they judge.
//
// Arithmetic: fp32 FMA per instruction set, vdpbf16ps, AMX from registers and with operands in L1 and L2. Memory:
// reading and copying arrays far beyond L3, and reading, copying and scaling in place an array of the caller's.
// Operands are random and never settle (sums that stop changing draw less power and let the clock rise).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/team.hpp"

namespace logitless::bench {

enum class Ceiling : std::int32_t {
  fma_sse2 = 0,
  fma_avx2,
  fma_avx512,
  dot_bf16,
  amx_registers,
  amx_l1,
  amx_l2,
  dram_read,
  dram_copy,
};
inline constexpr int ceiling_count = 9;

struct CeilingInfo {
  const char* key;   // JSON: "fma_avx2"
  const char* text;  // "fp32 FMA, avx2"
  const char* unit;  // GFLOP/s or GB/s
};
const CeilingInfo& info_of(Ceiling ceiling);

double median(std::vector<double> values);

// Passes over an array of the caller's, by all members; each returns its seconds.
class MemoryProbe {
 public:
  explicit MemoryProbe(Team& team);
  double read(const void* data, std::size_t bytes) const;                    // one read of each byte
  double copy(void* to, const void* from, std::size_t bytes) const;          // one read, one write
  double scale_in_place(void* data, std::size_t elements, bool bf16) const;  // x *= s, s = 1: data stays as it was
 private:
  Team& team_;
};

class Ceilings {
 public:
  // `small` shrinks arrays and slices, for tests of this code.
  Ceilings(Team& team, bool small);
  ~Ceilings();

  bool available(Ceiling ceiling) const;
  // Why not, or "".
  std::string why_not(Ceiling ceiling) const;
  // One slice; the rate is kept among the samples.
  double probe(Ceiling ceiling);
  const std::vector<double>& samples(Ceiling ceiling) const;
  std::size_t dram_bytes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// What bounds products of a CPU target (its name in the library) on operands of 16 bits or of fp32. With AMX: the
// probe with operands in L1, since no kernel can keep a whole product in registers.
Ceiling ceiling_of_products(const std::string& cpu_target, bool bf16_operands);

// Facts of the machine for the report.
struct MachineInfo {
  std::string cpu;
  int cpus = 0;
  std::int64_t l1d = 0, l2 = 0, l3 = 0, memory = 0;
};
MachineInfo describe_machine();
std::int64_t available_memory();

}  // namespace logitless::bench
