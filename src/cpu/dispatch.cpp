// The one place where CPU targets are listed, tested against the machine, and chosen; with their tuning as data.
//
// The choice is by features and family, never by a probe, so that bits do not depend on noise. VDPBF16PS runs at twice
// the fp32 rate on Zen 4 and 5 but below it on Intel (../shared/notes_cpu.md: 130 against 240 GFLOP/s), so avx512bf16
// is chosen on AMD alone; Intel without AMX takes avx512.
#include <cstring>

#include "cpu/cpu.hpp"
#include "cpu/kernels/table.hpp"
#include "cpu/machine.hpp"

namespace logitless::cpu {

extern const Target scalar_target, avx2_target, avx512_target, avx512bf16_target, amx_target;

namespace {

const Target* const targets[] = {&scalar_target, &avx2_target, &avx512_target, &avx512bf16_target, &amx_target};
constexpr int target_count = 5;

// Rates of one thread that rank plans, from `logitless bench` (docs/performance.md); macro_rows a multiple of every
// register tile's rows and of 32.
struct Tuning {
  const Target* target;
  double f32_gflops, bf16_gflops;
  std::int64_t macro_rows;
};
constexpr Tuning tunings[] = {
    {&scalar_target, 8, 0, 96},         {&avx2_target, 70, 0, 96},   {&avx512_target, 120, 0, 96},
    {&avx512bf16_target, 200, 450, 96}, {&amx_target, 120, 500, 96},
};

}  // namespace

const Target* const* all_targets(int* count) {
  *count = target_count;
  return targets;
}

const char* target_name(const Target& target) { return target.name; }

bool target_supported(const Target& target, const char** why) {
  Features const& f = machine();
  *why = "";
  if (&target == &scalar_target) return true;
  if (target.rows.leaf == nullptr) {
    *why = "this build is not for x86-64";
  } else if (!f.avx2) {
    *why = "this machine lacks avx2, fma or f16c";
  } else if (&target == &avx2_target) {
    return true;
  } else if (!f.avx512) {
    *why = "this machine lacks avx512f, avx512bw, avx512vl or avx512dq";
  } else if (&target == &avx512_target) {
    return true;
  } else if (!f.avx512bf16) {
    *why = "this machine lacks avx512_bf16";
  } else if (&target == &avx512bf16_target) {
    return true;
  } else if (!f.amx_bf16) {
    *why = "this machine lacks amx_tile or amx_bf16, or the kernel refuses its state";
  } else {
    return true;
  }
  return false;
}

const Target* find_target(const char* name) {
  for (const Target* t : targets)
    if (std::strcmp(t->name, name) == 0) return t;
  return nullptr;
}

const Target& best_target() {
  const char* why;
  for (const Target* t : {&amx_target, &avx512bf16_target, &avx512_target, &avx2_target}) {
    if (t == &avx512bf16_target && !machine().amd) continue;
    if (target_supported(*t, &why)) return *t;
  }
  return scalar_target;
}

std::string describe_machine() {
  Features const& f = machine();
  std::string out = f.name.empty() ? "unknown processor" : f.name;
  out += " (family " + std::to_string(f.family) + ", model " + std::to_string(f.model) + ";";
  if (f.avx2) out += " avx2 fma f16c";
  if (f.avx512) out += " avx512f/bw/vl/dq";
  if (f.avx512bf16) out += " avx512_bf16";
  if (f.amx_bf16) out += " amx_bf16";
  return out + ")";
}

plan::Machine machine_of(const Target& target, int threads) {
  plan::Machine m;
  m.target = target.name;
  m.threads = threads;
  m.leaf = leaf_columns;
  m.tile_rows = target.f32.mr;
  m.tile_columns = target.f32.nr;
  m.bf16_tile_rows = target.bf16.mr;
  m.bf16_tile_columns = target.bf16.nr;
  m.k_step = target.f32.ks;
  m.bf16_products = target.bf16.mr != 0;
  for (Tuning const& t : tunings) {
    if (t.target != &target) continue;
    m.macro_rows = t.macro_rows;
    m.f32_gflops = t.f32_gflops;
    m.bf16_gflops = t.bf16_gflops;
  }
  return m;
}

}  // namespace logitless::cpu
