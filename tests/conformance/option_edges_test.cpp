// Edges of the options on every target, each against the double reference or a closed form: extreme weights,
// temperatures, caps and masks, certain rows, refused ids, and the parts of a vocabulary merged again.
#include <gtest/gtest.h>

#include "contract/statistics.hpp"
#include "support/option_check.hpp"
#include "support/targets.hpp"

namespace logitless::test {
namespace {

class OptionEdges : public OnTarget {
 protected:
  ThreadExecutor executor{2};
  TargetBackend backend{*GetParam(), executor};

  // Every number of the answer, NaN and infinities included, within a few roundings of the oracle's. ties: classes that
  // differ in double are equal in fp32, so either may be the largest.
  void expect_same(const Sample& s, double relative = 1e-5, bool ties = false) {
    const Answer want = ask_reference(s), got = ask(backend, s);
    ASSERT_EQ(want.error, "");
    ASSERT_EQ(got.error, "");
    auto near = [&](const char* name, const Tensor& a, const Tensor& b) {
      if (!b) return;
      double most = 0.0;
      for (std::int64_t i = 0; i < b.rows(); ++i)
        for (std::int64_t j = 0; j < b.cols(); ++j)
          if (std::isfinite(b.at(i, j))) most = std::max(most, std::abs(b.at(i, j)));
      for (std::int64_t i = 0; i < b.rows(); ++i)
        for (std::int64_t j = 0; j < b.cols(); ++j) {
          const double g = a.at(i, j), w = b.at(i, j);
          if (std::isnan(w)) {
            ASSERT_TRUE(std::isnan(g)) << name << ' ' << i << ' ' << j << ' ' << g;
          } else if (std::isinf(w)) {
            ASSERT_EQ(g, w) << name << ' ' << i << ' ' << j;
          } else {
            ASSERT_NEAR(g, w, relative * (most + 1e-30)) << name << ' ' << i << ' ' << j;
          }
        }
    };
    near("loss", got.loss, want.loss), near("lse", got.lse, want.lse), near("logprob", got.logprob, want.logprob);
    near("entropy", got.entropy, want.entropy), near("zloss", got.zloss, want.zloss);
    if (!ties) near("argmax", got.argmax, want.argmax);
    near("dx", got.dx, want.dx), near("dw", got.dw, want.dw), near("dz", got.dz, want.dz), near("db", got.db, want.db);
    if (std::isfinite(want.outcome.loss)) {
      ASSERT_NEAR(got.outcome.loss, want.outcome.loss, relative * (std::abs(want.outcome.loss) + 1e-30));
    } else {
      ASSERT_EQ(std::isnan(got.outcome.loss), std::isnan(want.outcome.loss));
    }
    ASSERT_EQ(got.outcome.bad, want.outcome.bad);
  }

  static Sample plain(Kind kind, unsigned options = 0, const Judge& judge = kJudges[0], std::int64_t rows = 6,
                      std::int64_t vocab = 300) {
    return stored(make(kind, judge, options, Reduction::sum, 11, rows, vocab, 16), DType::f32, DType::f32);
  }
};

constexpr Kind kKinds[] = {Kind::linear, Kind::logits};

TEST_P(OptionEdges, AllMassSmoothed) {
  for (const Kind kind : kKinds)
    for (const unsigned options : {0u, unsigned{kClassWeight}, unsigned{kKeep}}) {
      Sample s = plain(kind, options);
      s.p.loss.smoothing = 1.0;
      expect_same(s);
    }
}

TEST_P(OptionEdges, OneClass) {
  for (const Kind kind : kKinds)
    for (const unsigned options : {0u, unsigned{kSmoothing}, unsigned{kZLoss | kSoftcap}, unsigned{kKeep}}) {
      Sample s = plain(kind, options, kJudges[0], 6, 1);
      for (std::int64_t i = 0; i < 6; ++i) s.y.set_integer(i, 0);
      expect_same(s);
      const Answer got = ask(backend, s);
      EXPECT_EQ(got.entropy.at(0), 0.0);
      EXPECT_FALSE(std::signbit(got.entropy.at(0)));
    }
}

TEST_P(OptionEdges, ClassWeightsOfZeroAreAnEmptyMean) {
  for (const Kind kind : kKinds) {
    Sample s = plain(kind, kClassWeight);
    s.p.loss.reduction = Reduction::mean;
    for (std::int64_t i = 0; i < s.p.rows; ++i) s.class_weight.set(s.target(i), 0, 0.0);
    const Answer refused = ask(backend, s);
    EXPECT_EQ(refused.status, LL_ERROR_EMPTY);
    EXPECT_EQ(refused.loss.all_poison(), backend.refuses_before_writing());
    for (const OnEmpty rule : {OnEmpty::nan, OnEmpty::zero}) {
      s.p.loss.on_empty = rule;
      expect_same(s);
    }
  }
}

TEST_P(OptionEdges, RowWeightsOfAnySignAndZero) {
  for (const Kind kind : kKinds)
    for (const bool outputs : {true, false}) {
      Sample s = plain(kind, kRowWeight | kBias, kJudges[0], 40);
      for (std::int64_t i = 0; i < 40; ++i) s.row_weight.set(i, 0, static_cast<double>(i % 3 - 1) * 1.5);
      if (outputs) {
        expect_same(s);
        continue;
      }
      // With nothing to write of them, rows of weight 0 are left out.
      Answer got(s, false), want = ask_reference(s);
      Operands o = s.operands();
      o.dx = got.dx.view(), o.dw = got.dw.view(), o.dz = got.dz.view(), o.db = got.db.view();
      Problem p = s.p;
      p.argmax = false;
      EXPECT_EQ(backend.run(p, o, &got.outcome, &got.status), "");
      EXPECT_NEAR(got.outcome.loss, want.outcome.loss, 1e-4);
      EXPECT_EQ(got.outcome.kept, 40);
      expect_gradients(s, got, want, 0.0, "rows left out");
    }
  // All of them: no gradient at all.
  Sample s = plain(Kind::linear, kRowWeight | kBias);
  s.row_weight.fill(0.0);
  expect_same(s);
}

// A row of weight 0 leaves nothing in loss or gradients, not even of logits that are NaN or infinite.
TEST_P(OptionEdges, BadRowsOfWeightZeroLeaveNothing) {
  for (const Kind kind : kKinds)
    for (const unsigned options : {unsigned{kRowWeight | kZLoss}, unsigned{kRowWeight | kSoftcap}}) {
      Sample s = plain(kind, options);
      for (const std::int64_t i : {1, 4}) {
        s.row_weight.set(i, 0, 0.0);
        const double wrong = i == 1 ? std::nan("") : std::numeric_limits<double>::infinity();
        if (kind == Kind::linear) {
          s.x.set(i, 0, wrong);
        } else {
          s.z.set(i, 3, wrong);
        }
      }
      expect_same(s);
      EXPECT_TRUE(std::isfinite(ask(backend, s).outcome.loss));
    }
}

TEST_P(OptionEdges, TemperaturesFarApart) {
  for (const Kind kind : kKinds) {
    Sample s = plain(kind, kRowTemperature | kUpEntropy);
    const double temperatures[] = {0.01, 0.1, 1.0, 10.0, 50.0, 100.0};
    for (std::int64_t i = 0; i < 6; ++i) s.row_temperature.set(i, 0, temperatures[i]);
    // A logit of 5 at 0.01 is 500: its rounding shows in what is left.
    expect_same(s, 2e-4);
  }
}

TEST_P(OptionEdges, SoftcapOfHugeLogits) {
  Sample s = plain(Kind::logits, kSoftcap | kSmoothing);
  s.p.loss.softcap = 30.0;
  for (std::int64_t i = 0; i < s.p.rows; ++i)
    for (std::int64_t j = 0; j < s.p.vocab; ++j) s.z.set(i, j, s.z.at(i, j) * (j % 7 == 0 ? 1e4 : 10.0));
  expect_same(s, 1e-5, true);
}

TEST_P(OptionEdges, MaskedClassesStayMaskedThroughSoftcapAndBias) {
  for (const Kind kind : kKinds)
    for (const unsigned options : {unsigned{kBias}, unsigned{kBias | kSoftcap | kTemperature}}) {
      Sample s = plain(kind, options);
      for (const std::int64_t j : {1, 5, 270, 299}) s.bias.set(j, 0, -std::numeric_limits<double>::infinity());
      expect_same(s);
      s.bias.set(s.target(2), 0, -std::numeric_limits<double>::infinity());  // a masked target
      expect_same(s);
      s.bias.set(17, 0, std::numeric_limits<double>::infinity());  // every row is bad
      const Answer got = ask(backend, s);
      EXPECT_EQ(got.outcome.bad, s.p.rows);
    }
}

TEST_P(OptionEdges, NearlyCertainRowsInBf16) {
  for (const unsigned options : {0u, unsigned{kUpEntropy}, unsigned{kSoftcap}, unsigned{kSmoothing}}) {
    Sample s = make(Kind::linear, kJudges[0], options, Reduction::sum, 3, 8, 400, 8);
    // Row i is 24 times W's row of its target, a unit vector apart from noise: p_y near 1 - 1e-6.
    for (std::int64_t j = 0; j < 400; ++j)
      for (std::int64_t k = 0; k < 8; ++k) s.w.set(j, k, s.w.at(j, k) * 0.05);
    for (std::int64_t i = 0; i < 8; ++i) {
      s.y.set_integer(i, i * 40);
      for (std::int64_t k = 0; k < 8; ++k) {
        s.w.set(i * 40, k, k == i ? 1.0 : 0.0);
        s.x.set(i, k, k == i ? 20.0 : 0.25);
      }
    }
    s.p.loss.softcap = options == kSoftcap ? 50.0 : 0.0;
    const Sample half = stored(s, DType::bf16, DType::bf16);
    const Answer want = ask_reference(half), got = ask(backend, half);
    ASSERT_EQ(got.error, "");
    for (std::int64_t i = 0; i < 8; ++i) {
      ASSERT_LT(want.logprob.at(i) * -1.0, 1e-3);
      EXPECT_NEAR(got.logprob.at(i) / want.logprob.at(i), 1.0, 1e-4);
      EXPECT_NEAR(got.entropy.at(i) / want.entropy.at(i), 1.0, 1e-3);
    }
    expect_gradients(half, got, want, unit_of(DType::bf16), "certain");
  }
}

TEST_P(OptionEdges, EntropyOfOneHotAndUniformRows) {
  for (const DType type : {DType::f32, DType::bf16}) {
    Sample s = stored(make(Kind::logits, kJudges[0], 0, Reduction::sum, 1, 3, 1000), type, type);
    for (std::int64_t j = 0; j < 1000; ++j) {
      s.z.set(0, j, j == 7 ? 0.0 : -std::numeric_limits<double>::infinity());
      s.z.set(1, j, 2.5);
      s.z.set(2, j, j == 999 ? 200.0 : 0.0);
    }
    s.y.set_integer(0, 7);
    const Answer got = ask(backend, s);
    EXPECT_EQ(got.entropy.at(0), 0.0);
    EXPECT_FALSE(std::signbit(got.entropy.at(0)));
    EXPECT_NEAR(got.entropy.at(1), std::log(1000.0), 1e-5);
    EXPECT_GE(got.entropy.at(2), 0.0);
    EXPECT_LT(got.entropy.at(2), 1e-30);
    EXPECT_NEAR(got.log_sum_p2.at(1), -std::log(1000.0), 1e-5);
    EXPECT_EQ(got.argmax.at(1), 0.0);  // ties go to the lowest index
  }
}

TEST_P(OptionEdges, TopKOfOneAndOfAllAndRefusedIds) {
  for (const Kind kind : kKinds)
    for (const std::int64_t k : {std::int64_t{1}, std::int64_t{300}})
      for (const Rest rest : {Rest::dropped, Rest::renormalised, Rest::spread}) {
        Judge judge = kJudges[3];
        judge.rest = rest;
        Sample s = plain(kind, 0, judge);
        s.p.topk = k;
        s.ids.clear();
        s.probs = Tensor(DType::f32, 6, k);
        for (std::int64_t i = 0; i < 6; ++i)
          for (std::int64_t c = 0; c < k; ++c) {
            s.ids.push_back((i * 13 + c * 7 + 5) % 300);
            s.probs.set(i, c, 0.9 / static_cast<double>(k) * (1.0 + 0.05 * static_cast<double>(c % 2)));
          }
        expect_same(s);
        for (const std::int64_t wrong : {std::int64_t{-1}, std::int64_t{300}, k > 1 ? s.ids[0] : std::int64_t{-7}}) {
          Sample bad = s;
          bad.ids.back() = k > 1 && wrong == s.ids[0] ? bad.ids[bad.ids.size() - 2] : wrong;
          const Answer got = ask(backend, bad);
          EXPECT_EQ(got.status, LL_ERROR_TARGET_RANGE);
          EXPECT_NE(got.error, "");
          EXPECT_EQ(got.loss.all_poison(), backend.refuses_before_writing());
        }
      }
}

// Two softmaxes and a top-k teacher: one class and all of them, classes of no probability (log -inf), rows of no mass,
// a student that masks a class of the teacher's (the loss is +inf), a log-probability far below fp32's.
TEST_P(OptionEdges, TopKOfATeacherAtAnotherTemperature) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  for (const Kind kind : kKinds)
    for (const std::int64_t k : {std::int64_t{1}, std::int64_t{300}})
      for (const Rest rest : {Rest::dropped, Rest::renormalised, Rest::spread})
        for (const double share : {0.0, 0.5}) {
          const Judge judge{"", Targets::topk, rest, true, false, Divergence::forward_kl, 2.0, share};
          Sample s = plain(kind, kBias, judge);
          s.p.topk = k;
          s.ids.clear();
          s.probs = Tensor(DType::f32, 6, k);
          for (std::int64_t i = 0; i < 6; ++i)
            for (std::int64_t c = 0; c < k; ++c) {
              s.ids.push_back((i * 13 + c * 7 + 5) % 300);
              const double p = 0.9 / static_cast<double>(k) * (1.0 + 0.05 * static_cast<double>(c % 2));
              s.probs.set(i, c, i == 1 || (i == 2 && c % 3 == 1) ? -inf : i == 3 && c == 2 ? -200.0 : std::log(p));
            }
          expect_same(s, 2e-5);
          s.bias.set(static_cast<std::int64_t>(s.ids[0]), 0, -inf);
          expect_same(s, 2e-5);
        }
}

TEST_P(OptionEdges, TeacherThatMasksAClass) {
  for (const Judge& judge : kJudges) {
    if (judge.targets != Targets::teacher) continue;
    Sample s = plain(Kind::linear, 0, judge);
    s.teacher_bias.set(3, 0, -std::numeric_limits<double>::infinity());
    s.teacher_bias.set(280, 0, -std::numeric_limits<double>::infinity());
    expect_same(s, 1e-4);
  }
}

TEST_P(OptionEdges, MaskOfAllButTheTarget) {
  for (const Kind kind : kKinds)
    for (const unsigned options : {unsigned{kKeep}, unsigned{kKeep | kSoftcap}, unsigned{kKeep | kUpEntropy}}) {
      Sample s = plain(kind, options);
      for (std::uint8_t& byte : s.keep) byte = 0;
      const Answer got = ask(backend, s);
      ASSERT_EQ(got.error, "");
      for (std::int64_t i = 0; i < s.p.rows; ++i) {
        EXPECT_EQ(got.logprob.at(i), 0.0);
        EXPECT_EQ(got.entropy.at(i), 0.0);
        const Tensor& d = kind == Kind::linear ? got.dx : got.dz;
        for (std::int64_t j = 0; j < d.cols(); ++j) EXPECT_EQ(d.at(i, j), 0.0);
      }
    }
}

// Any split of the classes into uneven ranges equals the whole: statistics merged, and each range's own backward.
TEST_P(OptionEdges, PartsEqualTheWhole) {
  for (const unsigned options : {0u, unsigned{kBias | kSmoothing}, unsigned{kSmoothing | kClassWeight | kZLoss},
                                 unsigned{kSoftcap | kTemperature}, unsigned{kUpEntropy | kUpLse}}) {
    const Sample whole = plain(Kind::linear, options, kJudges[0], 20, 700);
    const Answer want = ask_reference(whole);
    const std::int64_t cuts[] = {0, 1, 257, 600, 700};
    struct Range {
      Sample s;
      Answer forward;
    };
    std::vector<Range> ranges;
    for (int n = 0; n < 4; ++n) {
      Sample s = whole;
      const std::int64_t first = cuts[n], count = cuts[n + 1] - first;
      s.p.vocab = count, s.p.first_column = first, s.p.total_vocab = 700;
      s.p.entropy = (options & kUpEntropy) != 0, s.p.argmax = s.p.mean_logit = s.p.sum_p2 = false;
      s.w = Tensor(DType::f32, count, 16);
      for (std::int64_t j = 0; j < count; ++j)
        for (std::int64_t k = 0; k < 16; ++k) s.w.set(j, k, whole.w.at(first + j, k));
      if (whole.bias) {
        s.bias = Tensor(DType::f32, count, 1);
        for (std::int64_t j = 0; j < count; ++j) s.bias.set(j, 0, whole.bias.at(first + j));
      }
      Sample f = s;
      f.p.call = Call::forward;
      f.p.dx = f.p.dw = f.p.db = DType::none;
      Answer a(f, false);
      Operands o = f.operands();
      o.stats = a.stats.view();
      o.grad_row_lse = o.grad_row_entropy = View{};
      ASSERT_EQ(backend.run(f.p, o, &a.outcome, &a.status), "");
      ranges.push_back({std::move(s), std::move(a)});
    }
    Tensor merged(DType::f32, 20, 8);
    for (std::int64_t i = 0; i < 20; ++i) {
      auto sum = contract::RowStatistics<double>::identity();
      double z_y = -std::numeric_limits<double>::infinity();
      for (const Range& range : ranges) {
        const Tensor& t = range.forward.stats;
        sum = contract::merge(sum, {t.at(i, 0), t.at(i, 1), t.at(i, 3), t.at(i, 5), t.at(i, 4), 0, 0, 0});
        z_y = std::max(z_y, t.at(i, 2));
      }
      const double values[8] = {sum.m, sum.r, z_y, sum.k, sum.t, sum.n, 0, 0};
      for (std::int64_t c = 0; c < 8; ++c) merged.set(i, c, values[c]);
      const double lse = sum.m + std::log(sum.r + std::exp(z_y - sum.m));
      ASSERT_NEAR(lse, want.lse.at(i), 1e-5);
    }
    Tensor dx(DType::f64, 20, 16);
    dx.fill(0.0);
    for (Range& range : ranges) {
      Sample b = range.s;
      b.p.call = Call::backward;
      Answer a(b, false);
      Operands o = b.operands();
      o.stats = merged.view(), o.dx = a.dx.view(), o.dw = a.dw.view(), o.db = a.db.view();
      ASSERT_EQ(backend.run(b.p, o, &a.outcome, &a.status), "");
      for (std::int64_t i = 0; i < 20; ++i)
        for (std::int64_t k = 0; k < 16; ++k) dx.set(i, k, dx.at(i, k) + a.dx.at(i, k));
      for (std::int64_t j = 0; j < b.p.vocab; ++j)
        for (std::int64_t k = 0; k < 16; ++k)
          ASSERT_NEAR(a.dw.at(j, k), want.dw.at(b.p.first_column + j, k), 2e-5) << options << ' ' << j;
    }
    for (std::int64_t i = 0; i < 20; ++i)
      for (std::int64_t k = 0; k < 16; ++k) ASSERT_NEAR(dx.at(i, k), want.dx.at(i, k), 2e-5) << options;
  }
}

INSTANTIATE_TEST_SUITE_P(Conformance, OptionEdges, ::testing::ValuesIn(all_targets()), target_parameter_name);

}  // namespace
}  // namespace logitless::test
