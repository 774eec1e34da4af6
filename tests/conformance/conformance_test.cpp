// Every CPU target against the double reference: a seeded pairwise cover of dtype mixtures, calls, dials, options,
// layouts, ignored rows, upstream gradients and threads; for X and W, and for given logits. Tolerances are derived
// (support/bounds.hpp) plus twice the plain pipeline's error. The table of true error ratios is printed at the end.
// LOGITLESS_TEST_SCOPE=full: three covers; reduced: every fifth case.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <string>

#include "support/cases.hpp"
#include "support/check.hpp"
#include "support/dials.hpp"
#include "support/targets.hpp"

namespace logitless::test {
namespace {

class PrintRatios final : public ::testing::Environment {
 public:
  void TearDown() override { RatioTable::instance().print(); }
};
const auto* const kPrintRatios = ::testing::AddGlobalTestEnvironment(new PrintRatios);

int covers() { return scope() == Scope::full ? 3 : 1; }
// LOGITLESS_TEST_THIN=n: every nth case, for tools under which each costs a hundred times more.
std::size_t keep_one_of() {
  const char* const thin = std::getenv("LOGITLESS_TEST_THIN");
  if (thin != nullptr) return static_cast<std::size_t>(std::max(1, std::atoi(thin)));
  return scope() == Scope::reduced ? 5 : 1;
}

// The cases of one target and mixture. Stops at the tenth disagreement, as the rest would say the same.
void run_cases(const cpu::Target& target, const std::vector<SuiteCase>& cases, std::set<plan::Keep>* keeps) {
  std::map<int, std::unique_ptr<ThreadExecutor>> executors;
  int failures = 0;
  for (const SuiteCase& one : cases) {
    std::unique_ptr<ThreadExecutor>& executor = executors[one.dials.threads];
    if (!executor) executor = std::make_unique<ThreadExecutor>(one.dials.threads);
    TargetBackend backend(target, *executor);
    apply(one, backend);
    if (keeps != nullptr) {
      backend.on_plan = [keeps](const plan::Plan& plan) { keeps->insert(plan.keep); };
    }
    const std::string error = check_case(one.c, backend, &RatioTable::instance());
    if (error.empty()) continue;
    ADD_FAILURE() << error;
    if (++failures == 10) return;
  }
}

class Linear : public ::testing::TestWithParam<std::tuple<const cpu::Target*, int>> {};

TEST_P(Linear, AgreesWithReference) {
  const auto [target, mixture] = GetParam();
  LOGITLESS_SKIP_UNSUPPORTED(*target);
  std::set<plan::Keep> keeps;
  for (int cover = 0; cover < covers(); ++cover) {
    const std::uint64_t seed = 100 + static_cast<std::uint64_t>(mixture) + 10 * static_cast<std::uint64_t>(cover);
    run_cases(*target, thinned(linear_cases(kMixtures[static_cast<std::size_t>(mixture)], seed), keep_one_of()),
              &keeps);
  }
  // The dials are wishes; that each place of kept exponentials was really used is part of the claim.
  if (scope() != Scope::reduced && keep_one_of() == 1) {
    EXPECT_EQ(keeps.size(), TargetBackend::places_of_exponentials(kMixtures[static_cast<std::size_t>(mixture)]));
  }
}

INSTANTIATE_TEST_SUITE_P(Conformance, Linear,
                         ::testing::Combine(::testing::ValuesIn(all_targets()),
                                            ::testing::Range(0, static_cast<int>(kMixtures.size()))),
                         [](const auto& parameter) {
                           const Mixture m = kMixtures[static_cast<std::size_t>(std::get<1>(parameter.param))];
                           return std::string(cpu::target_name(*std::get<0>(parameter.param))) + "_" +
                                  contract::name_of(m.x) + "_" + contract::name_of(m.w);
                         });

class Logits : public ::testing::TestWithParam<std::tuple<const cpu::Target*, DType>> {};

TEST_P(Logits, AgreesWithReference) {
  const auto [target, dtype] = GetParam();
  LOGITLESS_SKIP_UNSUPPORTED(*target);
  for (int cover = 0; cover < covers(); ++cover) {
    const std::uint64_t seed = 200 + static_cast<std::uint64_t>(dtype) + 10 * static_cast<std::uint64_t>(cover);
    run_cases(*target, thinned(logits_cases(dtype, seed), keep_one_of()), nullptr);
  }
}

INSTANTIATE_TEST_SUITE_P(Conformance, Logits,
                         ::testing::Combine(::testing::ValuesIn(all_targets()),
                                            ::testing::Values(DType::f32, DType::bf16, DType::f16)),
                         [](const auto& parameter) {
                           return std::string(cpu::target_name(*std::get<0>(parameter.param))) + "_" +
                                  contract::name_of(std::get<1>(parameter.param));
                         });

}  // namespace
}  // namespace logitless::test
