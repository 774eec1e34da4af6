// The oracle's options: every row output against a definition written out here in long double, every gradient against
// central differences of the oracle's own outputs, edges by closed forms, and parts of a vocabulary merged by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "logitless/logitless.h"
#include "reference/reference.hpp"
#include "support/options.hpp"

namespace logitless::test {
namespace {

using Real = long double;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr Real kLongInf = std::numeric_limits<Real>::infinity();

struct Results {
  Tensor loss, lse, logprob, entropy, zloss, mean_logit, log_sum_p2, argmax, correct, stats, dx, dw, dz, db;
  Outcome outcome;
  std::string error;
  int status = LL_OK;
};

// stats: what a backward starts from.
Results run(const Sample& s, const Tensor* stats = nullptr) {
  Results r;
  const std::int64_t rows = s.p.rows;
  for (Tensor* t : {&r.loss, &r.lse, &r.logprob, &r.entropy, &r.zloss, &r.mean_logit, &r.log_sum_p2}) {
    *t = Tensor(DType::f64, rows, 1);
  }
  r.argmax = Tensor(DType::i64, rows, 1), r.correct = Tensor(DType::u8, rows, 1);
  r.stats = Tensor(DType::f64, rows, s.p.statistics());
  Operands o = s.operands();
  o.row_loss = r.loss.view(), o.row_lse = r.lse.view(), o.row_logprob = r.logprob.view();
  o.row_entropy = r.entropy.view(), o.row_zloss = r.zloss.view(), o.row_mean_logit = r.mean_logit.view();
  o.row_log_sum_p2 = r.log_sum_p2.view(), o.row_argmax = r.argmax.view(), o.row_correct = r.correct.view();
  o.stats = stats != nullptr ? stats->view() : r.stats.view();
  if (s.p.dx != DType::none) r.dx = Tensor(s.p.dx, rows, s.p.hidden), o.dx = r.dx.view();
  if (s.p.dw != DType::none) r.dw = Tensor(s.p.dw, s.p.vocab, s.p.hidden), o.dw = r.dw.view();
  if (s.p.dz != DType::none) r.dz = Tensor(s.p.dz, rows, s.p.vocab), o.dz = r.dz.view();
  if (s.p.db != DType::none) r.db = Tensor(s.p.db, s.p.vocab, 1), o.db = r.db.view();
  r.error = reference::run(s.p, o, &r.outcome, &r.status);
  return r;
}

double correct_at(const Results& r, std::int64_t i) {
  return static_cast<double>(reference::load_integer(r.correct.view(), i));
}

// Logits, hard targets, reduction sum; nothing else.
Sample of_logits(const std::vector<std::vector<double>>& z, const std::vector<std::int64_t>& targets) {
  Sample s;
  s.p.kind = Kind::logits, s.p.rows = static_cast<std::int64_t>(z.size());
  s.p.vocab = static_cast<std::int64_t>(z[0].size());
  s.p.z = s.p.dz = s.p.db = DType::f64;
  s.p.entropy = s.p.argmax = s.p.mean_logit = s.p.sum_p2 = true;
  s.p.loss.reduction = Reduction::sum;
  s.z = Tensor(DType::f64, s.p.rows, s.p.vocab), s.y = Tensor(DType::i64, s.p.rows, 1);
  for (std::int64_t i = 0; i < s.p.rows; ++i) {
    s.y.set_integer(i, targets[static_cast<std::size_t>(i)]);
    for (std::int64_t j = 0; j < s.p.vocab; ++j) {
      s.z.set(i, j, z[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)]);
    }
  }
  return s;
}

void give_topk(Sample* s, std::int64_t k, const std::vector<std::int64_t>& ids, const std::vector<double>& probs) {
  s->p.loss.targets = Targets::topk, s->p.topk = k, s->ids = ids;
  s->probs = filled(s->p.rows, k, probs);
}

// ---- the definition -----------------------------------------------------------------------------------------------

Real sum_of(const std::vector<Real>& v) {
  Real sum = 0;
  for (Real x : v) sum += x;
  return sum;
}

std::vector<Real> softmax_of(const std::vector<Real>& z) {
  const Real top = *std::max_element(z.begin(), z.end());
  std::vector<Real> p;
  for (Real value : z) p.push_back(std::exp(value - top));
  const Real sum = sum_of(p);
  for (Real& value : p) value /= sum;
  return p;
}

Real kl(const std::vector<Real>& a, const std::vector<Real>& b) {
  Real sum = 0;
  for (std::size_t j = 0; j < a.size(); ++j)
    if (a[j] > 0) sum += a[j] * std::log(a[j] / b[j]);
  return sum;
}

struct Truth {
  Real loss = 0, lse = 0, logprob = 0, entropy = 0, zloss = 0, mean_logit = 0, log_sum_p2 = 0;
  Real weight = 0;  // in the mean's divisor
};

// Every output of row i as the options' semantics say it, from probabilities themselves.
Truth define(const Sample& s, std::int64_t i) {
  const contract::Loss& loss = s.p.loss;
  const auto vocab = static_cast<std::size_t>(s.p.vocab);
  const bool distils = loss.targets == Targets::teacher || s.p.topk_log;
  const bool hard = distils ? loss.distillation.hard_share > 0 : loss.targets == Targets::hard;
  const auto y = static_cast<std::size_t>(hard ? s.target(i) : 0);

  std::vector<Real> z(vocab), weight(vocab, 1);
  std::vector<bool> kept(vocab, true);
  Real n = 0, logits = 0;
  for (std::size_t j = 0; j < vocab; ++j) {
    const auto col = static_cast<std::int64_t>(j);
    Real value = s.bias ? s.bias.at(col) : 0;
    if (s.p.kind == Kind::logits) {
      value += s.z.at(i, col);
    } else {
      for (std::int64_t k = 0; k < s.p.hidden; ++k) value += static_cast<Real>(s.x.at(i, k)) * s.w.at(col, k);
    }
    value *= loss.logit_scale;
    if (loss.softcap > 0 && value > -kLongInf) value = loss.softcap * std::tanh(value / loss.softcap);
    z[j] = value / (s.row_temperature ? s.row_temperature.at(i) : loss.temperature);
    if (s.floor && z[j] < s.floor.at(i)) kept[j] = false;
    if (s.p.keep_mask && !s.keeps(i, col)) kept[j] = false;
    if (hard && j == y) kept[j] = true;
    if (kept[j]) n += 1, logits += z[j];
    if (!kept[j]) z[j] = -kLongInf;
    if (s.class_weight) weight[j] = s.class_weight.at(col);
  }
  const std::vector<Real> p = softmax_of(z);
  const Real top = *std::max_element(z.begin(), z.end());
  Truth out;
  Real exponentials = 0, squares = 0;
  for (std::size_t j = 0; j < vocab; ++j) {
    exponentials += std::exp(z[j] - top), squares += p[j] * p[j];
    if (p[j] > 0) out.entropy -= p[j] * std::log(p[j]);
  }
  out.lse = top + std::log(exponentials);
  out.mean_logit = logits / n, out.log_sum_p2 = std::log(squares);
  if (hard) out.logprob = z[y] - out.lse;
  out.weight = loss.targets == Targets::hard ? weight[y] : 1;

  const Real a = loss.smoothing, over = s.p.restricts() ? n : static_cast<Real>(vocab);
  std::vector<Real> t(vocab, 0), given(vocab, 0);
  for (std::size_t j = 0; j < vocab; ++j) {
    if (kept[j]) t[j] = a / over * weight[j] + (hard && j == y ? (1 - a) * weight[j] : 0);
  }
  if (loss.targets == Targets::soft || loss.targets == Targets::topk) {
    std::vector<bool> named(vocab, false);
    Real sum = 0;
    for (std::int64_t c = 0; c < s.p.topk; ++c) {
      const auto j = static_cast<std::size_t>(s.ids[static_cast<std::size_t>(i * s.p.topk + c)]);
      named[j] = true;
      given[j] = s.p.topk_log ? std::exp(static_cast<Real>(s.probs.at(i, c))) : s.probs.at(i, c);
      sum += given[j];
    }
    for (std::size_t j = 0; j < vocab; ++j) {
      if (loss.targets == Targets::soft) given[j] = s.soft.at(i, static_cast<std::int64_t>(j));
      if (loss.targets == Targets::topk && loss.rest == Rest::renormalised) given[j] /= sum;
      if (loss.targets == Targets::topk && loss.rest == Rest::spread && !named[j]) {
        given[j] = std::max<Real>(0, 1 - sum) / static_cast<Real>(s.p.vocab - s.p.topk);
      }
      given[j] = kept[j] ? weight[j] * ((1 - a) * given[j] + a / over) : 0;
    }
    if (!distils) t = given;
  }
  Real ce = 0;
  for (std::size_t j = 0; j < vocab; ++j)
    if (t[j] != 0) ce -= t[j] * (z[j] - out.lse);
  Real own = ce;
  if (loss.policy.on) {
    const Real ratio = std::exp(out.logprob - s.old_logprob.at(i)), advantage = s.advantage.at(i);
    const Real clipped = std::min<Real>(std::max<Real>(ratio, 1 - loss.policy.clip_low), 1 + loss.policy.clip_high);
    own = -std::min(ratio * advantage, clipped * advantage) - loss.policy.entropy_coef * out.entropy;
    if (s.ref_logprob) {
      const Real d = s.ref_logprob.at(i) - out.logprob;
      own += loss.policy.kl_coef * (std::exp(d) - d - 1);
    }
  }
  if (distils) {
    const Real tau = loss.distillation.tau, share = loss.distillation.hard_share, beta = loss.distillation.beta;
    std::vector<Real> tempered = z;
    for (Real& value : tempered) value /= tau;
    const std::vector<Real> student = softmax_of(tempered);
    Real divergence = 0;
    if (s.p.topk_log) {
      divergence = kl(given, student);
    } else {
      std::vector<Real> u(vocab), mix(vocab);
      for (std::size_t j = 0; j < vocab; ++j) {
        const auto col = static_cast<std::int64_t>(j);
        u[j] = s.teacher_bias ? s.teacher_bias.at(col) : 0;
        for (std::int64_t k = 0; k < s.p.teacher_hidden; ++k) {
          u[j] += static_cast<Real>(s.teacher_x.at(i, k)) * s.teacher_w.at(col, k);
        }
        u[j] /= tau;
      }
      const std::vector<Real> q = softmax_of(u);
      for (std::size_t j = 0; j < vocab; ++j) mix[j] = beta * q[j] + (1 - beta) * student[j];
      switch (loss.distillation.divergence) {
        case Divergence::forward_kl: divergence = kl(q, student); break;
        case Divergence::reverse_kl: divergence = kl(student, q); break;
        case Divergence::jsd: divergence = beta * kl(q, mix) + (1 - beta) * kl(student, mix); break;
      }
    }
    own = (share > 0 ? share * ce : 0) + (1 - share) * (loss.distillation.square ? tau * tau : 1) * divergence;
  }
  const Real u = s.row_weight ? s.row_weight.at(i) : 1;
  out.zloss = u * loss.z_loss * out.lse * out.lse;
  out.loss = u * own + out.zloss;
  return out;
}

void expect_truth(const Sample& s, const Results& r, const std::string& what) {
  ASSERT_EQ(r.error, "") << what;
  Real total = 0, divisor = 0;
  for (std::int64_t i = 0; i < s.p.rows; ++i) {
    if (s.ignored(i)) {
      for (const Tensor* t : {&r.loss, &r.lse, &r.logprob, &r.entropy, &r.zloss, &r.mean_logit, &r.log_sum_p2}) {
        ASSERT_EQ(t->at(i), 0.0) << what;
      }
      ASSERT_EQ(r.argmax.at(i), -1.0) << what;
      continue;
    }
    const Truth t = define(s, i);
    auto near = [&](const Tensor& got, Real want, const char* name) {
      ASSERT_NEAR(got.at(i), static_cast<double>(want), 2e-13 * (1.0 + std::abs(static_cast<double>(want))))
          << name << ' ' << i << ' ' << what;
    };
    near(r.loss, t.loss, "loss"), near(r.lse, t.lse, "lse"), near(r.logprob, t.logprob, "logprob");
    near(r.entropy, t.entropy, "entropy"), near(r.zloss, t.zloss, "zloss");
    near(r.mean_logit, t.mean_logit, "mean_logit"), near(r.log_sum_p2, t.log_sum_p2, "log_sum_p2");
    total += t.loss, divisor += t.weight;
  }
  if (s.p.loss.normalizer > 0) divisor = s.p.loss.normalizer;
  if (s.normalizer) divisor = s.normalizer.at(0);
  if (s.p.loss.reduction == Reduction::mean) total /= divisor;
  if (s.p.loss.reduction == Reduction::none) total = 0;
  ASSERT_NEAR(r.outcome.loss, static_cast<double>(total), 1e-12 * (1.0 + std::abs(static_cast<double>(total)))) << what;
}

// ---- gradients by central differences -------------------------------------------------------------------------------

// The number whose gradient the upstream gradients describe.
double objective(const Sample& s) {
  Sample forward = s;
  forward.p.call = Call::forward;
  forward.p.dx = forward.p.dw = forward.p.dz = forward.p.db = DType::none;
  const Results r = run(forward);
  EXPECT_EQ(r.error, "");
  const bool none = s.p.loss.reduction == Reduction::none;
  double total = none ? 0.0 : s.grad_loss * r.outcome.loss;
  for (std::int64_t i = 0; i < s.p.rows; ++i) {
    total += (s.up_loss ? s.up_loss.at(i) : (none ? 1.0 : 0.0)) * r.loss.at(i);
    if (s.up_lse) total += s.up_lse.at(i) * r.lse.at(i);
    if (s.up_logprob) total += s.up_logprob.at(i) * r.logprob.at(i);
    if (s.up_entropy) total += s.up_entropy.at(i) * r.entropy.at(i);
  }
  return total;
}

void expect_derivative(Sample* s, Tensor Sample::* input, const Tensor& gradient, const std::string& what,
                       double h = 1e-5, double tolerance = 1e-7) {
  Tensor& at = s->*input;
  for (std::int64_t i = 0; i < at.rows(); ++i) {
    for (std::int64_t j = 0; j < at.cols(); ++j) {
      const double x = at.at(i, j);
      at.set(i, j, x + h);
      const double above = objective(*s);
      at.set(i, j, x - h);
      const double below = objective(*s);
      at.set(i, j, x);
      const double slope = (above - below) / (2.0 * h);
      ASSERT_NEAR(gradient.at(i, j), slope, tolerance * (1.0 + std::abs(slope))) << what << " at " << i << ' ' << j;
    }
  }
}

void expect_right(Kind kind, const Judge& judge, unsigned options, Reduction reduction, std::uint64_t seed) {
  Sample s = make(kind, judge, options, reduction, seed);
  const std::string what = std::string(judge.name) + " options " + std::to_string(options) + " kind " +
                           std::to_string(static_cast<int>(kind)) + " reduction " +
                           std::to_string(static_cast<int>(reduction)) + " seed " + std::to_string(seed);
  const Results r = run(s);
  ASSERT_NO_FATAL_FAILURE(expect_truth(s, r, what));
  if (kind == Kind::linear) {
    ASSERT_NO_FATAL_FAILURE(expect_derivative(&s, &Sample::x, r.dx, "dX " + what));
    ASSERT_NO_FATAL_FAILURE(expect_derivative(&s, &Sample::w, r.dw, "dW " + what));
  } else {
    ASSERT_NO_FATAL_FAILURE(expect_derivative(&s, &Sample::z, r.dz, "dz " + what));
  }
  if (s.bias) {
    ASSERT_NO_FATAL_FAILURE(expect_derivative(&s, &Sample::bias, r.db, "db " + what));
  }
  // A backward from these statistics gives the same.
  s.p.call = Call::backward;
  const Results again = run(s, &r.stats);
  for (const auto& [got, want] : {std::pair{&again.dx, &r.dx}, {&again.dw, &r.dw}, {&again.dz, &r.dz}}) {
    for (std::int64_t i = 0; i < want->rows(); ++i)
      for (std::int64_t j = 0; j < want->cols(); ++j) ASSERT_NEAR(got->at(i, j), want->at(i, j), 1e-12) << what;
  }
}

TEST(ReferenceOptions, EachAlone) {
  for (Kind kind : {Kind::linear, Kind::logits}) {
    for (const Judge& judge : kJudges) {
      for (unsigned option = 0; option <= kOptions; ++option) {
        const unsigned options = option == kOptions ? 0 : 1u << option;
        if (!allowed(judge, options)) continue;
        ASSERT_NO_FATAL_FAILURE(expect_right(kind, judge, options, Reduction::mean, option + 1));
      }
    }
  }
}

TEST(ReferenceOptions, SeveralTogether) {
  Random rng(20);
  int cases = 0;
  for (std::uint64_t seed = 1; cases < 400; ++seed) {
    const auto options = static_cast<unsigned>(rng.uniform() * (1u << kOptions));
    const Judge& judge = kJudges[static_cast<std::size_t>(rng.uniform() * std::size(kJudges))];
    if (!allowed(judge, options)) continue;
    const Reduction reductions[] = {Reduction::mean, Reduction::sum, Reduction::none};
    ASSERT_NO_FATAL_FAILURE(
        expect_right(cases % 2 == 0 ? Kind::linear : Kind::logits, judge, options, reductions[cases % 3], seed));
    ++cases;
  }
}

// More rows than a tile and more classes than a block: the same D as of given logits, multiplied out here.
TEST(ReferenceOptions, TilesAndBlocks) {
  const unsigned sets[] = {kBias | kSmoothing | kIgnored | kUpEntropy | kUpLse,
                           kBias | kSoftcap | kRowTemperature | kClassWeight | kRowWeight | kUpLoss,
                           kBias | kKeep | kFloor | kScale | kZLoss};
  int cases = 0;
  for (const Judge& judge : kJudges) {
    for (const unsigned options : sets) {
      if (!allowed(judge, options)) continue;
      const auto seed = static_cast<std::uint64_t>(++cases);
      const Sample linear = make(Kind::linear, judge, options, Reduction::mean, seed, 37, 150);
      Sample logits = linear;
      logits.p.kind = Kind::logits, logits.p.hidden = 0;
      logits.p.x = logits.p.w = logits.p.dx = logits.p.dw = DType::none;
      logits.p.z = logits.p.dz = DType::f64, logits.x = logits.w = Tensor();
      logits.z = Tensor(DType::f64, 37, 150);
      for (std::int64_t i = 0; i < 37; ++i) {
        for (std::int64_t j = 0; j < 150; ++j) {
          double sum = 0.0;
          for (std::int64_t k = 0; k < 3; ++k) sum += linear.x.at(i, k) * linear.w.at(j, k);
          logits.z.set(i, j, sum);
        }
      }
      const Results a = run(linear), b = run(logits);
      expect_truth(linear, a, judge.name);
      EXPECT_EQ(a.outcome.loss, b.outcome.loss);
      EXPECT_EQ(a.outcome.correct, b.outcome.correct);
      Tensor dx(DType::f64, 37, 3), dw(DType::f64, 150, 3), db(DType::f64, 150, 1);
      dx.fill(0.0), dw.fill(0.0), db.fill(0.0);
      for (std::int64_t i = 0; i < 37; ++i) {
        for (std::int64_t j = 0; j < 150; ++j) {
          const double d = b.dz.at(i, j);
          db.set(j, 0, db.at(j) + d);
          for (std::int64_t k = 0; k < 3; ++k) {
            dx.set(i, k, dx.at(i, k) + d * linear.w.at(j, k));
            dw.set(j, k, dw.at(j, k) + d * linear.x.at(i, k));
          }
        }
      }
      for (const auto& [got, want] : {std::pair{&a.dx, &dx}, {&a.dw, &dw}, {&a.db, &db}, {&b.db, &db}}) {
        for (std::int64_t i = 0; i < want->rows(); ++i)
          for (std::int64_t k = 0; k < want->cols(); ++k)
            ASSERT_NEAR(got->at(i, k), want->at(i, k), 1e-13) << judge.name;
      }
    }
  }
}

// ---- edges -----------------------------------------------------------------------------------------------------------

TEST(ReferenceOptions, OneClass) {
  for (const Judge& judge : kJudges) {
    Sample s = of_logits({{7.5}}, {0});
    s.p.loss.targets = judge.targets, s.p.loss.distillation.divergence = judge.divergence;
    s.p.loss.smoothing = judge.policy ? 0.0 : 0.3;
    if (judge.targets == Targets::soft) s.soft = filled(1, 1, {1.0});
    if (judge.targets == Targets::topk) give_topk(&s, 1, {0}, {1.0});
    if (judge.targets == Targets::teacher) {
      s.p.teacher_hidden = 1, s.teacher_x = filled(1, 1, {2.0}), s.teacher_w = filled(1, 1, {3.0});
    }
    const Results r = run(s);
    EXPECT_EQ(r.error, "");
    EXPECT_EQ(r.loss.at(0), 0.0) << judge.name;
    EXPECT_EQ(r.entropy.at(0), 0.0);
    EXPECT_FALSE(std::signbit(r.entropy.at(0)));
    EXPECT_EQ(r.log_sum_p2.at(0), 0.0);
    EXPECT_EQ(r.lse.at(0), 7.5);
    EXPECT_EQ(r.dz.at(0, 0), 0.0) << judge.name;
    EXPECT_EQ(r.argmax.at(0), 0.0);
  }
}

TEST(ReferenceOptions, AllMassSmoothed) {
  Sample s = of_logits({{0.3, -1.0, 2.0}}, {0});
  s.p.loss.smoothing = 1.0;
  expect_truth(s, run(s), "alpha 1");
  s.p.class_weight = true, s.class_weight = filled(3, 1, {0.5, 2.0, 0.0});
  const Results r = run(s);
  expect_truth(s, r, "alpha 1 with weights");
  expect_derivative(&s, &Sample::z, r.dz, "alpha 1 with weights");
  // A class of weight 0 may be masked: 0 * inf = 0.
  s.z.set(0, 2, -kInf);
  EXPECT_TRUE(std::isfinite(run(s).loss.at(0)));
  s.class_weight.set(2, 0, 1.0);
  EXPECT_EQ(run(s).loss.at(0), kInf);
}

TEST(ReferenceOptions, EmptyDivisors) {
  Sample s = of_logits({{1.0, 2.0, 0.0}, {0.0, 0.0, 1.0}}, {1, 1});
  s.p.loss.reduction = Reduction::mean, s.p.loss.z_loss = 0.1, s.p.loss.smoothing = 0.1;
  s.p.class_weight = true, s.class_weight = filled(3, 1, {1.0, 0.0, 1.0});
  Results r = run(s);
  EXPECT_EQ(r.status, LL_ERROR_EMPTY);
  EXPECT_NE(r.error.find("class_weight"), std::string::npos) << r.error;
  EXPECT_TRUE(r.loss.all_poison() && r.dz.all_poison() && r.db.all_poison());
  for (OnEmpty on_empty : {OnEmpty::zero, OnEmpty::nan}) {
    s.p.loss.on_empty = on_empty;
    r = run(s);
    EXPECT_EQ(r.error, "");
    EXPECT_TRUE(on_empty == OnEmpty::zero ? r.outcome.loss == 0.0 : std::isnan(r.outcome.loss));
    for (std::int64_t j = 0; j < 3; ++j) EXPECT_TRUE(r.dz.at(0, j) == 0.0 && r.db.at(j) == 0.0);
    EXPECT_NEAR(r.lse.at(0), std::log(1.0 + std::exp(1.0) + std::exp(2.0)), 1e-15);
  }
  s.normalizer = filled(1, 1, {0.0}), s.p.loss.normalizer = 3.0, s.p.loss.on_empty = OnEmpty::error;
  r = run(s);
  EXPECT_EQ(r.status, LL_ERROR_EMPTY);
  EXPECT_NE(r.error.find("normalizer"), std::string::npos) << r.error;
}

TEST(ReferenceOptions, RowsOfWeightZeroKeepTheirOutputs) {
  Sample s = of_logits({{1.0, 2.0}, {0.0, -kInf}}, {0, 1});
  s.p.row_weight = true, s.row_weight = filled(2, 1, {-2.0, 0.0});
  const Results r = run(s);
  EXPECT_NEAR(r.loss.at(0), -2.0 * std::log1p(std::exp(1.0)), 1e-15);
  EXPECT_EQ(r.loss.at(1), 0.0);  // though its target is masked
  EXPECT_EQ(r.logprob.at(1), -kInf);
  EXPECT_EQ(r.lse.at(1), 0.0);
  EXPECT_EQ(r.dz.at(1, 0), 0.0);
  EXPECT_NEAR(r.dz.at(0, 0), 2.0 / (1.0 + std::exp(-1.0)), 1e-15);
}

TEST(ReferenceOptions, TemperaturesFarApart) {
  const double temperatures[] = {0.01, 0.1, 1.0, 10.0, 100.0};
  Random rng(7);
  Sample s = of_logits(std::vector<std::vector<double>>(5, std::vector<double>(9, 0.0)), {0, 1, 2, 3, 4});
  s.z = numbers(rng, 5, 9, -1.0, 1.0);
  s.p.row_temperature = true, s.row_temperature = filled(5, 1, {0.01, 0.1, 1.0, 10.0, 100.0});
  s.p.loss.z_loss = 1e-3, s.p.loss.smoothing = 0.1;
  const Results all = run(s);
  expect_truth(s, all, "temperatures");
  for (std::int64_t i = 0; i < 5; ++i) {  // a row at a time, with steps that suit its temperature
    const double t = temperatures[i];
    Sample one = of_logits({std::vector<double>(9, 0.0)}, {i});
    for (std::int64_t j = 0; j < 9; ++j) one.z.set(0, j, s.z.at(i, j));
    one.p.loss = s.p.loss, one.p.loss.temperature = t;
    const Results r = run(one);
    EXPECT_EQ(r.loss.at(0), all.loss.at(i));
    expect_derivative(&one, &Sample::z, r.dz, "temperature " + std::to_string(t), 1e-5 * t, 1e-9 + 1e-8 / t);
  }
}

TEST(ReferenceOptions, SoftcapOfHugeLogits) {
  Sample s = of_logits({{1e4, -1e4, 1e4, 3.0, -kInf}}, {2});
  s.p.loss.softcap = 30.0;
  Results r = run(s);
  EXPECT_NEAR(r.loss.at(0), std::log(2.0), 1e-11);  // of 30, -30, 30, 3 and a masked class
  EXPECT_LT(std::abs(r.dz.at(0, 0)), 1e-280);       // flat
  EXPECT_EQ(r.dz.at(0, 4), 0.0);
  EXPECT_EQ(r.mean_logit.at(0), -kInf);
  EXPECT_GT(r.dz.at(0, 3), 0.0);
  EXPECT_EQ(r.argmax.at(0), 0.0);  // ties go to the lowest
  EXPECT_EQ(correct_at(r, 0), 0.0);
  s.z.set(0, 1, kInf);  // classified before softcap
  r = run(s);
  EXPECT_TRUE(std::isnan(r.loss.at(0)) && std::isnan(r.dz.at(0, 3)) && std::isnan(r.entropy.at(0)));
  EXPECT_TRUE(std::isnan(r.stats.at(0, 7)));
  EXPECT_EQ(r.argmax.at(0), -1.0);
  EXPECT_EQ(r.db.at(3), 0.0);
  EXPECT_EQ(r.outcome.bad, 1);
}

TEST(ReferenceOptions, NearlyCertainRows) {
  for (const double gap : {std::log(1e6), 60.0}) {  // 1 - p_y of 1e-6 and 1e-26
    const Sample s = of_logits({{0.0, -gap}}, {0});
    const Results r = run(s);
    const double rest = std::exp(-gap) / (1.0 + std::exp(-gap));
    EXPECT_NEAR(r.loss.at(0), std::log1p(std::exp(-gap)), 1e-15 * rest);
    EXPECT_NEAR(r.dz.at(0, 0), -rest, 1e-15 * rest);
    EXPECT_NEAR(r.entropy.at(0), std::log1p(std::exp(-gap)) + gap * rest, 1e-14 * gap * rest);
    EXPECT_NEAR(r.logprob.at(0), -std::log1p(std::exp(-gap)), 1e-15 * rest);
  }
}

TEST(ReferenceOptions, EntropyOfOneHotAndUniformRows) {
  const Sample s = of_logits({{5.0, -kInf, -kInf}, {1e16, 1e16, 1e16}, {2000.0, 0.0, 0.0}}, {0, 1, 0});
  const Results r = run(s);
  for (std::int64_t i : {0, 2}) {
    EXPECT_EQ(r.entropy.at(i), 0.0);
    EXPECT_FALSE(std::signbit(r.entropy.at(i)));
    EXPECT_EQ(correct_at(r, i), 1.0);
  }
  EXPECT_NEAR(r.entropy.at(1), std::log(3.0), 1e-15);
  EXPECT_NEAR(r.log_sum_p2.at(1), -std::log(3.0), 1e-15);
  EXPECT_EQ(r.argmax.at(1), 0.0);
  EXPECT_EQ(r.outcome.correct, 2);
  EXPECT_EQ(r.mean_logit.at(1), 1e16);
}

TEST(ReferenceOptions, TopKOfOneAndOfAll) {
  for (Rest rest : {Rest::dropped, Rest::renormalised, Rest::spread}) {
    Sample s = of_logits({{0.3, -1.0, 2.0}}, {-7});  // the target is not read
    s.p.loss.rest = rest;
    give_topk(&s, 1, {2}, {0.6});
    Results r = run(s);
    expect_truth(s, r, "k = 1");
    expect_derivative(&s, &Sample::z, r.dz, "k = 1");
    EXPECT_EQ(r.logprob.at(0), 0.0);
    give_topk(&s, 3, {2, 0, 1}, {0.6, 0.3, 0.05});
    r = run(s);
    expect_truth(s, r, "k = V");
    expect_derivative(&s, &Sample::z, r.dz, "k = V");
    give_topk(&s, 2, {2, 0}, {0.8, 0.4});  // more than all mass leaves nothing to spread
    expect_truth(s, run(s), "more than 1");
  }
}

TEST(ReferenceOptions, TopKIdsAreChecked) {
  Sample s = of_logits({{0.3, -1.0, 2.0}, {0.0, 0.0, 0.0}}, {-100, 0});
  give_topk(&s, 2, {9, 9, 0, 1}, {0.5, 0.5, 0.5, 0.5});  // those of an ignored row are not read
  EXPECT_EQ(run(s).error, "");
  struct Wrong {
    std::int64_t a, b;
    const char* text;
  };
  for (const Wrong& wrong :
       {Wrong{1, 1, "topk_ids[1] holds 1"}, Wrong{0, 3, "topk_ids[1, 1] = 3"}, Wrong{-1, 0, "topk_ids[1, 0] = -1"}}) {
    give_topk(&s, 2, {0, 1, wrong.a, wrong.b}, {0.5, 0.5, 0.5, 0.5});
    const Results r = run(s);
    EXPECT_EQ(r.status, LL_ERROR_TARGET_RANGE);
    EXPECT_NE(r.error.find(wrong.text), std::string::npos) << r.error;
    EXPECT_TRUE(r.loss.all_poison() && r.dz.all_poison());
  }
  s.p.loss.targets = Targets::hard, s.y.set_integer(1, 3);
  EXPECT_EQ(run(s).status, LL_ERROR_TARGET_RANGE);
}

TEST(ReferenceOptions, SoftTargetsMayBeHardOnes) {
  Sample hard = of_logits({{0.3, -1.0, 2.0}, {1.0, 0.0, 0.5}}, {2, 0});
  hard.p.loss.smoothing = 0.2;
  Sample soft = hard;
  soft.p.loss.targets = Targets::soft, soft.soft = filled(2, 3, {0, 0, 1, 1, 0, 0}), soft.y = Tensor();
  const Results a = run(hard), b = run(soft);
  for (std::int64_t i = 0; i < 2; ++i) {
    EXPECT_NEAR(a.loss.at(i), b.loss.at(i), 1e-15);
    for (std::int64_t j = 0; j < 3; ++j) EXPECT_NEAR(a.dz.at(i, j), b.dz.at(i, j), 1e-15);
  }
}

TEST(ReferenceOptions, TeacherThatMasksAClass) {
  for (Divergence divergence : {Divergence::forward_kl, Divergence::reverse_kl, Divergence::jsd}) {
    Sample s = of_logits({{0.3, -1.0, 2.0}}, {0});
    s.y = Tensor();
    s.p.loss.targets = Targets::teacher, s.p.loss.distillation.divergence = divergence;
    s.p.teacher_hidden = 1, s.teacher_x = filled(1, 1, {1.0}), s.teacher_w = filled(3, 1, {1.0, -kInf, 0.0});
    Results r = run(s);
    if (divergence == Divergence::reverse_kl) {
      EXPECT_EQ(r.loss.at(0), kInf);
    } else {
      expect_truth(s, r, "teacher with -inf");
      expect_derivative(&s, &Sample::z, r.dz, "teacher with -inf");
    }
    for (std::int64_t j = 0; j < 3; ++j) EXPECT_TRUE(std::isfinite(r.dz.at(0, j)));
    s.z.set(0, 1, -kInf);  // and the student does, too
    r = run(s);
    EXPECT_TRUE(std::isfinite(r.loss.at(0)));
    EXPECT_EQ(r.dz.at(0, 1), 0.0);
    s.teacher_w.set(2, 0, std::nan(""));
    r = run(s);
    EXPECT_TRUE(std::isnan(r.loss.at(0)) && std::isnan(r.dz.at(0, 0)));
    EXPECT_EQ(r.outcome.bad, 1);
    EXPECT_EQ(r.db.at(0), 0.0);
  }
}

TEST(ReferenceOptions, DroppedClassesHaveNoGradient) {
  Sample s = of_logits({{0.3, -1.0, 2.0}}, {0});
  s.p.keep_mask = true, s.keep = {0b101};
  s.p.loss.targets = Targets::teacher;  // which does not drop the class
  s.p.teacher_hidden = 1, s.teacher_x = filled(1, 1, {1.0}), s.teacher_w = filled(3, 1, {1.0, 0.5, 0.0});
  const Results r = run(s);
  EXPECT_EQ(r.loss.at(0), kInf);
  EXPECT_EQ(r.dz.at(0, 1), 0.0);
  EXPECT_TRUE(std::isfinite(r.dz.at(0, 0)));
}

TEST(ReferenceOptions, MaskOfAllButTheTarget) {
  Sample s = of_logits({{0.3, -1.0, 2.0}}, {1});
  s.p.keep_mask = true, s.keep = {0};
  s.p.loss.smoothing = 0.3;
  Results r = run(s);
  for (const Tensor* t : {&r.loss, &r.logprob, &r.entropy, &r.log_sum_p2}) EXPECT_EQ(t->at(0), 0.0);
  for (std::int64_t j = 0; j < 3; ++j) EXPECT_EQ(r.dz.at(0, j), 0.0);
  EXPECT_EQ(r.mean_logit.at(0), -1.0);
  EXPECT_EQ(r.argmax.at(0), 1.0);
  s.p.keep_mask = false, s.p.logit_floor = true, s.floor = filled(1, 1, {50.0});
  r = run(s);
  EXPECT_EQ(r.logprob.at(0), 0.0);
  s.z.set(0, 2, std::nan(""));  // a class may be dropped, its NaN is not
  EXPECT_TRUE(std::isnan(run(s).loss.at(0)));
}

TEST(ReferenceOptions, PolicyBranches) {
  Sample s = of_logits({{0.0, 0.0}, {0.0, 0.0}, {0.0, 0.0}, {0.0, 0.0}}, {0, 0, 0, 0});
  s.p.loss.policy.on = true, s.p.loss.policy.clip_low = 0.2, s.p.loss.policy.clip_high = 0.3;
  const double log_p = -std::log(2.0);
  s.old_logprob = filled(4, 1, {log_p - std::log(2.0), log_p - std::log(2.0), log_p + std::log(2.0), log_p});
  s.advantage = filled(4, 1, {1.0, -1.0, -1.0, 3.0});
  const Results r = run(s);
  const double loss[] = {-1.3, 2.0, 0.8, -3.0}, slope[] = {0.0, 2.0, 0.0, -3.0};  // w = 2, 2, 1/2, 1
  for (std::int64_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(r.loss.at(i), loss[i], 1e-15);
    EXPECT_NEAR(r.dz.at(i, 0), 0.5 * slope[i], 1e-15);
    EXPECT_NEAR(r.dz.at(i, 1), -0.5 * slope[i], 1e-15);
  }
}

// ---- parts of a vocabulary ---------------------------------------------------------------------------------------------

Tensor slice(const Tensor& t, std::int64_t first, std::int64_t count, bool columns) {
  if (!t) return {};
  Tensor out(t.dtype(), columns ? t.rows() : count, columns ? count : t.cols());
  for (std::int64_t i = 0; i < out.rows(); ++i)
    for (std::int64_t j = 0; j < out.cols(); ++j) out.set(i, j, t.at(columns ? i : first + i, columns ? first + j : j));
  return out;
}

Sample part_of(const Sample& whole, std::int64_t first, std::int64_t count) {
  Sample s = whole;
  s.p.first_column = first, s.p.total_vocab = whole.p.vocab, s.p.vocab = count;
  s.w = slice(whole.w, first, count, false), s.bias = slice(whole.bias, first, count, false);
  s.z = slice(whole.z, first, count, true), s.soft = slice(whole.soft, first, count, true);
  if (s.p.keep_mask) {
    s.keep.assign(static_cast<std::size_t>(s.p.rows * ((count + 7) / 8)), 0);
    for (std::int64_t i = 0; i < s.p.rows; ++i)
      for (std::int64_t j = 0; j < count; ++j) s.set_keep(i, j, whole.keeps(i, first + j));
  }
  return s;
}

// Moves a row's sums to the reference m, then adds.
void merge_row(Tensor* into, const Tensor& from, std::int64_t i) {
  const double m = std::max(into->at(i, 0), from.at(i, 0));
  double sums[8] = {};
  for (const Tensor* t : {static_cast<const Tensor*>(into), &from}) {
    if (t->at(i, 0) == -kInf) continue;
    const double d = t->at(i, 0) - m, e = std::exp(d);
    sums[1] += t->at(i, 1) * e;
    sums[3] += t->at(i, 3) + t->at(i, 5) * d;
    sums[4] += e * (t->at(i, 4) + t->at(i, 1) * d);
    sums[5] += t->at(i, 5), sums[6] += t->at(i, 6);
  }
  sums[0] = m, sums[2] = std::max(into->at(i, 2), from.at(i, 2));
  for (std::int64_t c = 0; c < 8; ++c) into->set(i, c, sums[c]);
}

TEST(ReferenceOptions, PartsMergeToTheWhole) {
  const unsigned transforms = kBias | kScale | kSoftcap | kRowTemperature;
  const unsigned upstream = kUpLoss | kUpLse | kUpEntropy | kIgnored | kRowWeight | kZLoss;
  const unsigned sets[] = {0u,
                           kSmoothing,
                           kSmoothing | kClassWeight,
                           transforms | upstream | kUpLogprob | kSmoothing,
                           kKeep | kFloor | kSmoothing | kUpEntropy,
                           kKeep | kSmoothing | kClassWeight | transforms,
                           transforms | upstream | kClassWeight,
                           kUpEntropy};
  int cases = 0;
  for (Kind kind : {Kind::linear, Kind::logits}) {
    for (const Judge& judge : kJudges) {
      if (judge.targets == Targets::teacher || judge.topk_log) continue;
      for (const unsigned options : sets) {
        // n of given targets counts target mass, so that a range cannot know how many classes another keeps.
        if (judge.targets != Targets::hard && (options & (kKeep | kFloor)) != 0) continue;
        if (!allowed(judge, options)) continue;
        const Sample whole = make(kind, judge, options, Reduction::mean, static_cast<std::uint64_t>(++cases));
        const Results want = run(whole);
        ASSERT_EQ(want.error, "");
        const std::int64_t cuts[] = {0, 3, 4, 11};
        Tensor merged;
        for (int c = 0; c < 3; ++c) {
          Sample s = part_of(whole, cuts[c], cuts[c + 1] - cuts[c]);
          s.p.call = Call::forward;
          const Results r = run(s);
          ASSERT_EQ(r.error, "");
          EXPECT_TRUE(r.loss.all_poison());  // statistics alone
          if (c == 0) merged = r.stats;
          for (std::int64_t i = 0; c > 0 && i < s.p.rows; ++i) merge_row(&merged, r.stats, i);
        }
        for (std::int64_t i = 0; i < whole.p.rows; ++i) {
          if (whole.ignored(i)) continue;
          const double m = merged.at(i, 0), z_y = merged.at(i, 2);
          EXPECT_NEAR(m + std::log(merged.at(i, 1) + std::exp(z_y - m)), want.lse.at(i), 1e-13);
          if (want.stats.cols() != 8) continue;
          EXPECT_EQ(m, want.stats.at(i, 0));
          EXPECT_EQ(z_y, want.stats.at(i, 2));
          for (std::int64_t c : {1, 3, 4, 5}) EXPECT_NEAR(merged.at(i, c), want.stats.at(i, c), 1e-12) << c;
        }
        for (std::int64_t i = 0; i < whole.p.rows; ++i) {  // any reference will do, one below the target's logit too
          const double d = cases % 2 == 0 ? 0.0 : 4.0, e = std::exp(d), r = merged.at(i, 1);
          merged.set(i, 0, merged.at(i, 0) - d), merged.set(i, 1, r * e);
          merged.set(i, 3, merged.at(i, 3) + merged.at(i, 5) * d), merged.set(i, 4, e * (merged.at(i, 4) + r * d));
        }
        Tensor dx(DType::f64, whole.p.rows, std::max<std::int64_t>(whole.p.hidden, 1));
        dx.fill(0.0);
        for (int c = 0; c < 3; ++c) {
          Sample s = part_of(whole, cuts[c], cuts[c + 1] - cuts[c]);
          s.p.call = Call::backward;
          const Results r = run(s, &merged);
          ASSERT_EQ(r.error, "");
          for (std::int64_t j = 0; j < s.p.vocab; ++j) {
            if (s.bias) {
              EXPECT_NEAR(r.db.at(j), want.db.at(cuts[c] + j), 1e-13);
            }
            for (std::int64_t k = 0; k < s.p.hidden; ++k) {
              EXPECT_NEAR(r.dw.at(j, k), want.dw.at(cuts[c] + j, k), 1e-13) << judge.name << ' ' << options;
            }
            for (std::int64_t i = 0; r.dz && i < s.p.rows; ++i) {
              EXPECT_NEAR(r.dz.at(i, j), want.dz.at(i, cuts[c] + j), 1e-13) << judge.name << ' ' << options;
            }
          }
          for (std::int64_t i = 0; r.dx && i < s.p.rows; ++i)
            for (std::int64_t k = 0; k < s.p.hidden; ++k) dx.set(i, k, dx.at(i, k) + r.dx.at(i, k));
        }
        for (std::int64_t i = 0; want.dx && i < whole.p.rows; ++i)
          for (std::int64_t k = 0; k < whole.p.hidden; ++k) EXPECT_NEAR(dx.at(i, k), want.dx.at(i, k), 1e-13);
      }
    }
  }
}

TEST(ReferenceOptions, PartWithoutAnyClassLeft) {
  Sample whole = of_logits({{-kInf, -kInf, 1.0, 2.0}}, {3});
  Sample left = part_of(whole, 0, 2), right = part_of(whole, 2, 2);
  left.p.call = right.p.call = Call::forward;
  const Results a = run(left), b = run(right);
  EXPECT_EQ(a.outcome.bad, 0);
  EXPECT_EQ(a.stats.at(0, 0), -kInf);
  EXPECT_EQ(a.stats.at(0, 1), 0.0);
  EXPECT_EQ(a.stats.at(0, 2), -kInf);
  Tensor merged = a.stats;
  merge_row(&merged, b.stats, 0);
  left.p.call = Call::backward;
  EXPECT_EQ(run(left, &merged).dz.at(0, 0), 0.0);
}

}  // namespace
}  // namespace logitless::test
