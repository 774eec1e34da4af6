// The targets as test parameters: the library's, and the tests' own emulated one, which runs everywhere. The one reason
// for which a test may skip: this machine lacks the target.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cpu/cpu.hpp"
#include "cpu/kernels/table.hpp"
#include "support/backend.hpp"

namespace logitless::test {

extern const cpu::Target emulated_target;  // emulated_target.hpp

#if defined(LOGITLESS_TEST_CUDA)
// Stands for the device among targets.
inline const cpu::Target cuda_target{
    .name = "cuda", .rows = {}, .f32 = {}, .bf16 = {}, .enter = nullptr, .leave = nullptr};

inline bool supported(const cpu::Target&, const char** why) {
  static const std::string text = "needs a GPU: " + CudaFixture::instance().why();
  *why = text.c_str();
  return CudaFixture::instance().device() != nullptr;
}
inline std::vector<const cpu::Target*> all_targets() { return {&cuda_target}; }
#else
inline bool supported(const cpu::Target& target, const char** why) {
  if (&target != &emulated_target) return cpu::target_supported(target, why);
  *why = "";
  return true;
}

inline std::vector<const cpu::Target*> all_targets() {
  int count = 0;
  const cpu::Target* const* targets = cpu::all_targets(&count);
  std::vector<const cpu::Target*> out(targets, targets + count);
  out.push_back(&emulated_target);
  return out;
}
#endif

inline std::string target_parameter_name(const ::testing::TestParamInfo<const cpu::Target*>& parameter) {
  return cpu::target_name(*parameter.param);
}

// Base of suites with a target as their parameter.
class OnTarget : public ::testing::TestWithParam<const cpu::Target*> {
 protected:
  void SetUp() override {
    const char* why = nullptr;
    if (!supported(*GetParam(), &why)) GTEST_SKIP() << cpu::target_name(*GetParam()) << ": " << why;
  }
};

}  // namespace logitless::test

// A macro because GTEST_SKIP returns from the test that it stands in.
#define LOGITLESS_SKIP_UNSUPPORTED(target)                                              \
  do {                                                                                  \
    const char* why_unsupported = nullptr;                                              \
    if (!::logitless::test::supported(target, &why_unsupported)) {                      \
      GTEST_SKIP() << ::logitless::cpu::target_name(target) << ": " << why_unsupported; \
    }                                                                                   \
  } while (false)
