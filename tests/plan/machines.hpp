// Machines for which plans are made: those of targets that run here, and of those that do not.
#pragma once

#include <vector>

#include "plan/plan.hpp"
#include "support/targets.hpp"

namespace logitless::test {

// As a target's machine is made; a target of the tests has no tuning, so its rates are given here.
inline plan::Machine machine_for(const cpu::Target& target, int threads) {
  plan::Machine m = cpu::machine_of(target, threads);
  if (m.bf16_products && m.bf16_gflops == 0.0) m.bf16_gflops = 2.0 * m.f32_gflops;
  return m;
}

// Every target with a few counts of threads.
inline std::vector<plan::Machine> machines() {
  std::vector<plan::Machine> out;
  for (const cpu::Target* target : all_targets()) {
    for (const int threads : {1, 2, 7, 64}) {
      const plan::Machine m = machine_for(*target, threads);
      if (m.tile_rows > 0) out.push_back(m);  // else the target is empty on this architecture
    }
  }
  return out;
}

}  // namespace logitless::test
