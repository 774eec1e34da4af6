// Does the conformance suite notice? Built with LOGITLESS_MUTATIONS, the contract can break one formula at a time (each
// LL_MUTATE in src/contract). With none broken a reduced suite passes on the scalar target; with any one it must fail.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "contract/coefficients.hpp"
#include "support/cases.hpp"
#include "support/check.hpp"
#include "support/dials.hpp"
#include "support/masked.hpp"
#include "support/option_check.hpp"
#include "support/targets.hpp"

#if !defined(LOGITLESS_MUTATIONS)
#error "this test needs a library built with LOGITLESS_MUTATIONS"
#endif

namespace logitless::test {
namespace {

// The first disagreement of a reduced conformance suite: fp32 and bf16, X and W and given logits, and masked classes.
std::string first_failure(const cpu::Target& target) {
  ThreadExecutor executor(1);
  for (const int call : {1, 2, 3}) {
    Case c;
    c.kind = Kind::logits;
    c.rows = 13, c.vocab = 700, c.z = c.dz = DType::f32, c.reduction = Reduction::none;
    c.call = static_cast<Call>(call);
    for (const double alpha : {0.0, 0.1}) {
      c.alpha = alpha;
      TargetBackend backend(target, executor);
      std::string error = CaseCheck(c, masked_logits(c), backend, nullptr).run();
      if (!error.empty()) return error;
      Case offset = c;
      offset.values = Values::offset;
      error = check_case(offset, backend, nullptr);
      if (!error.empty()) return error;
    }
  }
  std::vector<SuiteCase> cases = thinned(linear_cases(kMixtures[0], 500), 4);
  const std::vector<SuiteCase> logits = thinned(logits_cases(DType::f32, 501), 4),
                               half = thinned(linear_cases(kMixtures[1], 502), 8);
  cases.insert(cases.end(), logits.begin(), logits.end());
  cases.insert(cases.end(), half.begin(), half.end());
  for (const SuiteCase& one : cases) {
    TargetBackend backend(target, executor);
    apply(one, backend);
    const std::string error = check_case(one.c, backend, nullptr);
    if (!error.empty()) return error;
  }
  // The options, each alone and in some mixtures.
  ::testing::TestPartResultArray results;
  const ::testing::ScopedFakeTestPartResultReporter collect(
      ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS, &results);
  TargetBackend backend(target, executor);
  std::uint64_t n = 0;
  for (const Kind kind : {Kind::linear, Kind::logits})
    for (const Judge& judge : kJudges)
      for (unsigned option = 0; option <= kOptions; ++option) {
        const unsigned options = option == kOptions ? 0 : 1u << option;
        if (!makes_sense(kind, judge, options)) continue;
        check_options(backend, kind, judge, options, kMixtures[0], ++n);
        if (results.size() > 0) return results.GetTestPartResult(0).message();
      }
  check_filter(backend);
  if (results.size() > 0) return results.GetTestPartResult(0).message();
  Random random(32);
  for (int done = 0; done < 60; ++n) {
    const auto options = static_cast<unsigned>(random.uniform() * (1u << kOptions));
    const Judge& judge = kJudges[static_cast<std::size_t>(random.uniform() * std::size(kJudges))];
    if (!makes_sense(Kind::linear, judge, options)) continue;
    ++done;
    check_options(backend, Kind::linear, judge, options, kMixtures[0], n);
    if (results.size() > 0) return results.GetTestPartResult(0).message();
  }
  return {};
}

class Mutation : public ::testing::TestWithParam<int> {
 protected:
  void TearDown() override { contract::mutation = 0; }
};

TEST_P(Mutation, IsNoticed) {
  contract::mutation = GetParam();
  const std::string error = first_failure(*cpu::find_target("scalar"));
  EXPECT_NE(error, "") << "formula " << GetParam() << " may be wrong and nobody notices";
  RecordProperty("first_failure", error);
}

INSTANTIATE_TEST_SUITE_P(Contract, Mutation, ::testing::Range(1, contract::mutations + 1));

TEST(Unbroken, PassesOnScalarAndEmulated) {
  EXPECT_EQ(contract::mutation, 0);
  EXPECT_EQ(first_failure(*cpu::find_target("scalar")), "");
  EXPECT_EQ(first_failure(emulated_target), "");
}

// Every id from 1 to `mutations` stands in the sources, once.
TEST(Unbroken, EveryFormulaHasItsTwin) {
  std::string text;
  for (const auto& entry : std::filesystem::directory_iterator(LOGITLESS_SOURCE_DIR "/src/contract")) {
    if (entry.path().filename() == "mutate.hpp") continue;
    std::stringstream all;
    all << std::ifstream(entry.path()).rdbuf();
    text += all.str();
  }
  std::vector<int> ids;
  const std::string name = "LL_MUTATE(";
  for (std::size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) {
    ids.push_back(std::stoi(text.substr(at + name.size())));
  }
  std::sort(ids.begin(), ids.end());
  ASSERT_EQ(ids.size(), static_cast<std::size_t>(contract::mutations));
  for (std::size_t n = 0; n < ids.size(); ++n) EXPECT_EQ(ids[n], static_cast<int>(n) + 1);
}

}  // namespace
}  // namespace logitless::test
