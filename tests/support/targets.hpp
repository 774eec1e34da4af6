// The CPU targets as test parameters, and the one reason for which a test may skip: this machine lacks the target.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "cpu/cpu.hpp"

namespace logitless::test {

inline std::vector<const cpu::Target*> all_cpu_targets() {
  int count = 0;
  const cpu::Target* const* targets = cpu::all_targets(&count);
  return {targets, targets + count};
}

// Those that this machine runs.
inline std::vector<const cpu::Target*> supported_cpu_targets() {
  std::vector<const cpu::Target*> out;
  for (const cpu::Target* target : all_cpu_targets()) {
    const char* why = nullptr;
    if (cpu::target_supported(*target, &why)) out.push_back(target);
  }
  return out;
}

}  // namespace logitless::test

// A macro because GTEST_SKIP returns from the test that it stands in.
#define LOGITLESS_SKIP_UNSUPPORTED(target)                                                  \
  do {                                                                                      \
    const char* why_unsupported = nullptr;                                                  \
    if (!::logitless::cpu::target_supported(target, &why_unsupported)) {                    \
      GTEST_SKIP() << ::logitless::cpu::target_name(target) << ": " << why_unsupported;     \
    }                                                                                       \
  } while (false)
