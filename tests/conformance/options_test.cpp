// Every option on every target against the double reference: what a row is compared with (hard, policy, soft, top-k,
// two heads) times each option alone and seeded mixtures of several, in every mixture of dtypes, with the dials and
// threads turned. support/option_check.hpp has one case's judgement.
#include <gtest/gtest.h>

#include "support/option_check.hpp"
#include "support/targets.hpp"

namespace logitless::test {
namespace {

class Options : public OnTarget {};

TEST_P(Options, EachAloneAgreesWithTheReference) {
  ThreadExecutor executor(2);
  TargetBackend backend(*GetParam(), executor);
  std::uint64_t n = 0;
  for (Kind kind : {Kind::linear, Kind::logits})
    for (const Judge& judge : kJudges)
      for (unsigned option = 0; option <= kOptions; ++option) {
        const unsigned options = option == kOptions ? 0 : 1u << option;
        if (!makes_sense(kind, judge, options)) continue;
        if (scope() == Scope::reduced && ++n % 3 != 0) continue;
        const Mixture mixture = kMixtures[n++ % kMixtures.size()];
        turn_dials(backend, n);
        ASSERT_NO_FATAL_FAILURE(check_options(backend, kind, judge, options, mixture, n));
      }
}

TEST_P(Options, SeveralTogetherAgreeWithTheReference) {
  ThreadExecutor executor(3);
  TargetBackend backend(*GetParam(), executor);
  Random random(31);
  const int cases = scope() == Scope::full ? 1500 : scope() == Scope::reduced ? 60 : 250;
  std::uint64_t n = 1000;
  for (int done = 0; done < cases; ++n) {
    const auto options = static_cast<unsigned>(random.uniform() * (1u << kOptions));
    const Judge& judge = kJudges[static_cast<std::size_t>(random.uniform() * std::size(kJudges))];
    const Kind kind = n % 3 == 0 ? Kind::logits : Kind::linear;
    if (!makes_sense(kind, judge, options)) continue;
    ++done;
    turn_dials(backend, n / 2);
    ASSERT_NO_FATAL_FAILURE(check_options(backend, kind, judge, options, kMixtures[n % kMixtures.size()], n));
  }
}

TEST_P(Options, FilterIsUnbiased) {
  ThreadExecutor executor(1);
  TargetBackend backend(*GetParam(), executor);
  check_filter(backend);
}

// cuBLASLt's sums differ with a product's shape: on CUDA equal bits belong to equal plans.
#if !defined(LOGITLESS_TEST_CUDA)
// The filter's choices belong to (seed, row, column): neither tiles, nor chunks, nor threads change a bit of D's
// pattern.
TEST_P(Options, FilterDoesNotDependOnTilesOrThreads) {
  Sample s = stored(make(Kind::linear, kJudges[0], kBias, Reduction::sum, 9, 130, 700, 24), DType::f32, DType::f32);
  s.p.loss.filter = 0x1p-9, s.p.loss.filter_seed = 4;
  std::vector<std::uint8_t> bits;
  for (const int threads : {1, 3})
    for (const std::int64_t block : {0, 256, 512}) {
      ThreadExecutor executor(threads);
      TargetBackend backend(*GetParam(), executor);
      backend.dials.block = block, backend.dials.chunk = 130;
      const Answer got = ask(backend, s);
      ASSERT_EQ(got.error, "");
      if (bits.empty()) bits = got.dw.bytes();
      EXPECT_EQ(got.dw.bytes(), bits) << threads << ' ' << block;
    }
}

// Rows of a batch keep their bits whatever else is in it, with every output asked for.
TEST_P(Options, RowsKeepTheirBits) {
  const Sample whole = stored(make(Kind::linear, kJudges[0], kSoftcap | kRowTemperature | kSmoothing | kClassWeight,
                                   Reduction::none, 3, 70, 600, 40),
                              DType::bf16, DType::bf16);
  ThreadExecutor executor(2);
  TargetBackend backend(*GetParam(), executor);
  const Answer all = ask(backend, whole);
  Sample few = whole;
  few.p.rows = 9;
  for (const auto& [chunk, threads] : {std::pair{0, 1}, {16, 3}}) {
    ThreadExecutor other(threads);
    TargetBackend again(*GetParam(), other);
    again.dials.chunk = chunk;
    const Answer part = ask(again, few);
    ASSERT_EQ(part.error, "");
    for (std::int64_t i = 0; i < 9; ++i)
      for (const auto& [a, b] : {std::pair{&all.loss, &part.loss},
                                 {&all.entropy, &part.entropy},
                                 {&all.lse, &part.lse},
                                 {&all.log_sum_p2, &part.log_sum_p2},
                                 {&all.dx, &part.dx}})
        EXPECT_EQ(a->row_bytes(i), b->row_bytes(i)) << i;
  }
}

#endif

INSTANTIATE_TEST_SUITE_P(Conformance, Options, ::testing::ValuesIn(all_targets()), target_parameter_name);

}  // namespace
}  // namespace logitless::test
