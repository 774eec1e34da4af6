// The conformance suite judged by itself: the plain pipeline passes it, and pipelines with one small fault do not.
// Also the pairwise cover: every pair of levels occurs.
#include <gtest/gtest.h>

#include "support/cases.hpp"
#include "support/check.hpp"

namespace logitless::test {
namespace {

// The plain pipeline with one output off by a relative amount.
class FaultyBackend final : public Backend {
 public:
  enum class Fault { row_loss, row_lse, row_logprob, stats, dx, dw, dz, loss, stray_write, ignored_row };
  FaultyBackend(Fault fault, double size) : fault_(fault), size_(size) {}
  std::string name() const override { return "faulty"; }
  Storage storage(const Problem& p) override { return plain_.storage(p); }
  std::string run(const Problem& p, const Operands& o, Outcome* outcome, int* status) override {
    std::string error = plain_.run(p, o, outcome, status);
    const View* outputs[] = {&o.row_loss, &o.row_lse, &o.row_logprob, &o.stats, &o.dx, &o.dw, &o.dz};
    if (fault_ == Fault::loss) outcome->loss *= 1.0 + size_;
    if (fault_ <= Fault::dz) {
      const View& v = *outputs[static_cast<int>(fault_)];
      for (std::int64_t i = 0; i < v.rows && v; ++i)
        for (std::int64_t j = 0; j < v.cols; ++j) reference::store(v, i, j, reference::load(v, i, j) * (1.0 + size_));
    }
    if (fault_ == Fault::stray_write && o.row_loss) {
      static_cast<float*>(o.row_loss.data)[o.row_loss.rows * o.row_loss.row_stride] = 1.0f;
    }
    for (std::int64_t i = 0; i < p.rows && fault_ == Fault::ignored_row && o.dx; ++i) {
      if (reference::load_integer(o.targets, i) == p.loss.ignore_index) reference::store(o.dx, i, 0, 1e-30);
    }
    return error;
  }

 private:
  PlainBackend plain_;
  Fault fault_;
  double size_;
};

Case small_case(Kind kind) {
  Case c;
  c.kind = kind;
  c.rows = 19, c.hidden = 24, c.vocab = 130;
  c.dx = c.dw = c.dz = DType::f32;
  c.ignored = Ignored::half;
  c.alpha = 0.1;
  c.out_layout = Layout::padded;
  return c;
}

TEST(Suite, PlainPipelinePasses) {
  PlainBackend plain;
  int run = 0;
  const std::size_t one_of = scope() == Scope::reduced ? 29 : 9;
  for (std::size_t m = 0; m < kMixtures.size(); ++m) {
    for (const SuiteCase& one : thinned(linear_cases(kMixtures[m], 300 + m), one_of)) {
      const std::string error = check_case(one.c, plain, &RatioTable::instance());
      ASSERT_EQ(error, "");
      ++run;
    }
  }
  for (DType z : {DType::f32, DType::bf16, DType::f16}) {
    for (const SuiteCase& one : thinned(logits_cases(z, 400 + static_cast<std::uint64_t>(z)), one_of)) {
      ASSERT_EQ(check_case(one.c, plain, &RatioTable::instance()), "");
      ++run;
    }
  }
  EXPECT_GT(run, 30);
}

TEST(Suite, FaultsAreSeen) {
  using Fault = FaultyBackend::Fault;
  for (Fault fault : {Fault::row_loss, Fault::row_lse, Fault::row_logprob, Fault::stats, Fault::dx, Fault::dw,
                      Fault::loss, Fault::stray_write, Fault::ignored_row}) {
    FaultyBackend right(fault, 0.0), wrong(fault, 1e-3);
    const bool sized = fault != Fault::stray_write && fault != Fault::ignored_row;
    if (sized) {
      EXPECT_EQ(check_case(small_case(Kind::linear), right, nullptr), "") << static_cast<int>(fault);
    }
    EXPECT_NE(check_case(small_case(Kind::linear), wrong, nullptr), "") << static_cast<int>(fault);
  }
  FaultyBackend right(Fault::dz, 0.0), wrong(Fault::dz, 1e-4);
  EXPECT_EQ(check_case(small_case(Kind::logits), right, nullptr), "");
  EXPECT_NE(check_case(small_case(Kind::logits), wrong, nullptr), "");
}

TEST(Suite, CoverHoldsEveryPair) {
  const std::vector<int> levels = {5, 2, 3, 7, 2, 4};
  const std::vector<Row> rows = pairwise_cover(levels, 5);
  EXPECT_LE(rows.size(), 70u);
  for (std::size_t f = 0; f < levels.size(); ++f) {
    for (std::size_t g = f + 1; g < levels.size(); ++g) {
      for (int a = 0; a < levels[f]; ++a) {
        for (int b = 0; b < levels[g]; ++b) {
          bool found = false;
          for (const Row& row : rows) found = found || (row[f] == a && row[g] == b);
          EXPECT_TRUE(found) << f << '=' << a << ' ' << g << '=' << b;
        }
      }
    }
  }
}

}  // namespace
}  // namespace logitless::test
