// One case of the options' conformance, by gtest assertions: what a target makes of it against the double reference.
// Inputs are rounded to their dtypes first; the oracle then reads the same numbers. Tolerances: statistics and losses
// within rounding of fp32 sums; a row of dX (of dW) within c u sum_j |D_ij| |W_j|, u the unit of what products take or
// passes keep, and the output's own rounding.
#pragma once

#include <gtest/gtest.h>

#include <cmath>

#include "logitless/logitless.h"
#include "reference/reference.hpp"
#include "support/backend.hpp"
#include "support/bounds.hpp"
#include "support/cases.hpp"
#include "support/options.hpp"

namespace logitless::test {
inline constexpr double kEps = 0x1p-23;

inline Tensor as(const Tensor& from, DType dtype, Layout layout = Layout::contiguous) {
  if (!from) return {};
  Tensor out(dtype, from.rows(), from.cols(), layout);
  for (std::int64_t i = 0; i < from.rows(); ++i)
    for (std::int64_t j = 0; j < from.cols(); ++j) out.set(i, j, from.at(i, j));
  return out;
}

// The sample in the dtypes that kernels take.
inline Sample stored(const Sample& s, DType x, DType w) {
  Sample out = s;
  Problem& p = out.p;
  if (p.kind == Kind::linear) {
    p.x = x, p.w = w;
    out.x = as(s.x, x), out.w = as(s.w, w);
    p.dx = x, p.dw = w;
  } else {
    p.z = x, p.dz = x;
    out.z = as(s.z, x);
  }
  if (s.bias) out.bias = as(s.bias, x), p.bias = p.db = x;
  if (p.kind == Kind::logits) p.db = DType::none;
  if (s.soft) out.soft = as(s.soft, w), p.soft = w;
  if (s.teacher_x) {
    out.teacher_x = as(s.teacher_x, w), out.teacher_w = as(s.teacher_w, w), out.teacher_bias = as(s.teacher_bias, x);
    p.teacher_x = p.teacher_w = w, p.teacher_bias = x;
  }
  for (Tensor Sample::* t : {&Sample::class_weight, &Sample::row_weight, &Sample::row_temperature, &Sample::floor,
                             &Sample::probs, &Sample::old_logprob, &Sample::advantage, &Sample::ref_logprob,
                             &Sample::up_loss, &Sample::up_lse, &Sample::up_logprob, &Sample::up_entropy})
    out.*t = as(s.*t, DType::f32);
  return out;
}

struct Answer {
  Tensor loss, lse, logprob, entropy, zloss, mean_logit, log_sum_p2, argmax, correct, stats, dx, dw, dz, db;
  Outcome outcome;
  std::string error;
  int status = LL_OK;

  // exact: outputs in double. Statistics come from `from` in a backward.
  Answer(const Sample& s, bool exact, const Answer* from = nullptr) {
    auto type = [&](DType t) { return t == DType::none || !exact ? t : DType::f64; };
    DType const row = exact ? DType::f64 : DType::f32;
    const Problem& p = s.p;
    for (Tensor* t : {&loss, &lse, &logprob, &entropy, &zloss, &mean_logit, &log_sum_p2}) *t = Tensor(row, p.rows, 1);
    argmax = Tensor(DType::i64, p.rows, 1), correct = Tensor(DType::u8, p.rows, 1);
    stats = from != nullptr ? from->stats : Tensor(row, p.rows, p.statistics());
    if (p.dx != DType::none) dx = Tensor(type(p.dx), p.rows, p.hidden);
    if (p.dw != DType::none) dw = Tensor(type(p.dw), p.vocab, p.hidden);
    if (p.dz != DType::none) dz = Tensor(type(p.dz), p.rows, p.vocab);
    if (p.db != DType::none) db = Tensor(type(p.db), p.vocab, 1);
  }
  void into(Operands& o, bool rows) const {
    if (rows) {
      o.row_loss = loss.view(), o.row_lse = lse.view(), o.row_logprob = logprob.view();
      o.row_entropy = entropy.view(), o.row_zloss = zloss.view(), o.row_mean_logit = mean_logit.view();
      o.row_log_sum_p2 = log_sum_p2.view(), o.row_argmax = argmax.view(), o.row_correct = correct.view();
    }
    o.stats = stats.view(), o.dx = dx.view(), o.dw = dw.view(), o.dz = dz.view(), o.db = db.view();
  }
};

inline Answer ask_reference(Sample s) {
  for (DType* t : {&s.p.dx, &s.p.dw, &s.p.dz, &s.p.db})
    if (*t != DType::none) *t = DType::f64;
  Answer out(s, true);
  Operands o = s.operands();
  out.into(o, true);
  out.error = reference::run(s.p, o, &out.outcome, &out.status);
  return out;
}

inline Answer ask(TargetBackend& backend, const Sample& s, const Answer* from = nullptr) {
  Answer out(s, false, from);
  Operands o = s.operands();
  out.into(o, from == nullptr);
  out.error = backend.run(s.p, o, &out.outcome, &out.status);
  return out;
}

inline double norm_of_row(const Tensor& t, std::int64_t i) {
  double square = 0.0;
  for (std::int64_t j = 0; j < t.cols(); ++j) square += t.at(i, j) * t.at(i, j);
  return std::sqrt(square);
}

// |D| as the oracle has it for the same logits, with a floor for what cancels in an element but not in its error.
struct Weights {
  Tensor d;

  explicit Weights(const Sample& s) {
    Sample twin = s;
    if (s.p.kind == Kind::linear && s.p.distils()) {
      // No logits twin of two heads: D has at most this size anywhere.
      d = Tensor(DType::f64, s.p.rows, s.p.vocab);
      for (std::int64_t i = 0; i < s.p.rows; ++i)
        for (std::int64_t j = 0; j < s.p.vocab; ++j)
          d.set(i, j, 4.0 * (std::abs(s.grad_loss) + 1.0) / static_cast<double>(std::min<std::int64_t>(s.p.vocab, 32)));
      return;
    }
    if (s.p.kind == Kind::linear) {
      twin.p.kind = Kind::logits, twin.p.hidden = 0;
      twin.p.x = twin.p.w = twin.p.dx = twin.p.dw = twin.p.db = DType::none;
      twin.p.z = twin.p.dz = DType::f64, twin.x = twin.w = Tensor();
      twin.z = Tensor(DType::f64, s.p.rows, s.p.vocab);
      for (std::int64_t i = 0; i < s.p.rows; ++i)
        for (std::int64_t j = 0; j < s.p.vocab; ++j) {
          double sum = 0.0;
          for (std::int64_t k = 0; k < s.p.hidden; ++k) sum += s.x.at(i, k) * s.w.at(j, k);
          twin.z.set(i, j, sum);
        }
    }
    d = std::move(ask_reference(twin).dz);
    for (std::int64_t i = 0; i < d.rows(); ++i) {
      double most = 0.0;
      for (std::int64_t j = 0; j < d.cols(); ++j) most = std::max(most, std::abs(d.at(i, j)));
      for (std::int64_t j = 0; j < d.cols(); ++j) d.set(i, j, std::abs(d.at(i, j)) + 0.03 * most);
    }
  }
};

inline void expect_rows(const char* name, const Tensor& got, const Tensor& want, const std::string& what,
                        auto tolerance) {
  if (!want) return;
  for (std::int64_t i = 0; i < want.rows(); ++i) {
    double square = 0.0;
    for (std::int64_t j = 0; j < want.cols(); ++j) {
      ASSERT_EQ(std::isnan(got.at(i, j)), std::isnan(want.at(i, j))) << name << ' ' << i << ' ' << j << ' ' << what;
      const double e = got.at(i, j) - want.at(i, j);
      square += e * e;
    }
    const double allowed = tolerance(i) + 2.0 * unit_of(got.dtype()) * norm_of_row(want, i) +
                           2.0 * underflow_of(got.dtype()) * std::sqrt(static_cast<double>(want.cols()));
    ASSERT_LE(std::sqrt(square), allowed)
        << name << " row " << i << " first " << got.at(i, 0) << " for " << want.at(i, 0) << ' ' << what;
  }
}

// unit: of products' operands and kept exponentials.
inline void expect_gradients(const Sample& s, const Answer& got, const Answer& want, double unit,
                             const std::string& what) {
  const Weights weights(s);
  const double c = 3.0 * unit + 60.0 * kEps;
  const auto& d = weights.d;
  if (s.p.kind == Kind::logits) {
    expect_rows("dz", got.dz, want.dz, what, [&](std::int64_t i) { return 60.0 * kEps * norm_of_row(d, i); });
    return;
  }
  std::vector<double> x_norm, w_norm;
  for (std::int64_t i = 0; i < s.p.rows; ++i) x_norm.push_back(norm_of_row(s.x, i));
  for (std::int64_t j = 0; j < s.p.vocab; ++j) w_norm.push_back(norm_of_row(s.w, j));
  auto of = [](const std::vector<double>& v, std::int64_t i) { return v[static_cast<std::size_t>(i)]; };
  ASSERT_NO_FATAL_FAILURE(expect_rows("dX", got.dx, want.dx, what, [&](std::int64_t i) {
    double sum = 0.0;
    for (std::int64_t j = 0; j < s.p.vocab; ++j) sum += d.at(i, j) * of(w_norm, j);
    return c * sum;
  }));
  ASSERT_NO_FATAL_FAILURE(expect_rows("dW", got.dw, want.dw, what, [&](std::int64_t j) {
    double sum = 0.0;
    for (std::int64_t i = 0; i < s.p.rows; ++i)
      if (!s.ignored(i)) sum += d.at(i, j) * of(x_norm, i);
    return c * sum;
  }));
  expect_rows("db", got.db, want.db, what, [&](std::int64_t j) {
    double sum = 0.0;
    for (std::int64_t i = 0; i < s.p.rows; ++i)
      if (!s.ignored(i)) sum += d.at(i, j);
    return c * sum;
  });
}

inline void expect_outputs(const Sample& s, const Answer& got, const Answer& want, const std::string& what) {
  auto near = [&](const char* name, const Tensor& a, const Tensor& b, double scale) {
    for (std::int64_t i = 0; i < s.p.rows; ++i) {
      const double t = 40.0 * kEps * (scale + std::abs(b.at(i)));
      ASSERT_NEAR(a.at(i), b.at(i), t) << name << ' ' << i << ' ' << what;
    }
  };
  // Weighted sums of logits of a few units each.
  const double spread = 30.0 * (1.0 + s.p.loss.distillation.tau);
  near("loss", got.loss, want.loss, spread);
  near("lse", got.lse, want.lse, 10.0);
  near("logprob", got.logprob, want.logprob, 10.0);
  near("entropy", got.entropy, want.entropy, 10.0);
  near("zloss", got.zloss, want.zloss, 10.0);
  near("mean_logit", got.mean_logit, want.mean_logit, 10.0);
  near("log_sum_p2", got.log_sum_p2, want.log_sum_p2, 20.0);
  for (std::int64_t i = 0; i < s.p.rows; ++i) {
    ASSERT_EQ(got.argmax.at(i), want.argmax.at(i)) << i << ' ' << what;
    ASSERT_EQ(reference::load_integer(got.correct.view(), i), reference::load_integer(want.correct.view(), i)) << what;
  }
  ASSERT_EQ(got.outcome.kept, want.outcome.kept) << what;
  ASSERT_EQ(got.outcome.bad, want.outcome.bad) << what;
  ASSERT_EQ(got.outcome.correct, want.outcome.correct) << what;
  const double rows = static_cast<double>(s.p.rows);
  ASSERT_NEAR(got.outcome.loss, want.outcome.loss, 40.0 * kEps * rows * (spread + std::abs(want.outcome.loss))) << what;
}

struct Shape {
  std::int64_t rows, vocab, hidden;
};
inline constexpr Shape kShapes[] = {{7, 300, 20}, {37, 261, 33}, {100, 37, 8}, {5, 530, 64}};

inline void check_options(TargetBackend& backend, Kind kind, const Judge& judge, unsigned options, Mixture mixture,
                          std::uint64_t seed) {
  const Shape shape = kShapes[seed % std::size(kShapes)];
  const Reduction reductions[] = {Reduction::mean, Reduction::sum, Reduction::none};
  Sample made = make(kind, judge, options, reductions[seed % 3], seed, shape.rows, shape.vocab, shape.hidden);
  for (std::int64_t j = 0; j < made.w.rows(); ++j)  // logits of a few units, whatever H is
    for (std::int64_t k = 0; k < made.w.cols(); ++k)
      made.w.set(j, k, made.w.at(j, k) * std::sqrt(3.0 / static_cast<double>(shape.hidden)));
  Sample s = stored(made, mixture.x, mixture.w);
  if (judge.policy) {
    // Ratios on both sides of both clips.
    const Answer first = ask_reference(s);
    for (std::int64_t i = 0; i < s.p.rows; ++i) {
      s.old_logprob.set(i, 0, first.logprob.at(i) + 0.45 * static_cast<double>(i % 3 - 1) + 0.01);
      s.ref_logprob.set(i, 0, first.logprob.at(i) + 0.3 * static_cast<double>(i % 4) - 0.5);
    }
  }
  const std::string what = std::string(judge.name) + " options " + std::to_string(options) +
                           (kind == Kind::linear ? " linear " : " logits ") + contract::name_of(mixture.x) + ' ' +
                           contract::name_of(mixture.w) + " R=" + std::to_string(shape.rows) +
                           " V=" + std::to_string(shape.vocab) + " seed " + std::to_string(seed) + ' ' +
                           (kind == Kind::linear ? backend.describe(s.p) : "");
  const Answer want = ask_reference(s), got = ask(backend, s);
  ASSERT_EQ(want.error, "") << what;
  ASSERT_EQ(got.error, "") << what;
  ASSERT_NO_FATAL_FAILURE(expect_outputs(s, got, want, what));
  const double unit = kind == Kind::linear ? std::max(unit_of(mixture.x), unit_of(mixture.w)) : 0.0;
  ASSERT_NO_FATAL_FAILURE(expect_gradients(s, got, want, unit, what));
  // From the statistics, twice, and with the same bits.
  Sample b = s;
  b.p.call = Call::backward;
  const Answer again = ask(backend, b, &got), third = ask(backend, b, &got);
  ASSERT_EQ(again.error, "") << what;
  ASSERT_NO_FATAL_FAILURE(expect_gradients(s, again, want, unit, "backward " + what));
  if (kind == Kind::linear && !s.p.distils()) {
    // And with what forward saved in a buffer for nothing, some or all of the classes.
    const std::uint64_t sizes[] = {64, 20000, 100000, 1 << 22};
    std::vector<std::uint8_t> memory((1 << 22) + 64);
    Sample f = s;
    f.p.call = Call::forward;
    f.p.dx = f.p.dw = f.p.db = DType::none;
    f.p.saved = b.p.saved = sizes[seed % 4];
    std::uint8_t* const buffer = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
    const View saved{buffer, DType::u8, static_cast<std::int64_t>(b.p.saved), 1, 1, 1};
    Answer first(f, false);
    Operands o = f.operands();
    first.into(o, true);
    o.saved = saved;
    ASSERT_EQ(backend.run(f.p, o, &first.outcome, &first.status), "") << what;
    ASSERT_NO_FATAL_FAILURE(expect_outputs(s, first, want, "forward that saves, " + what));
    const Answer last(b, false, &first);
    Outcome outcome;
    int status = LL_OK;
    o = b.operands();
    last.into(o, false);
    o.saved = saved;
    ASSERT_EQ(backend.run(b.p, o, &outcome, &status), "") << what;
    ASSERT_NO_FATAL_FAILURE(expect_gradients(s, last, want, unit, "backward from what was saved, " + what));
  }
  for (auto [a, c] :
       {std::pair{&again.dx, &third.dx}, {&again.dw, &third.dw}, {&again.dz, &third.dz}, {&again.db, &third.db}}) {
    if (*a) {
      ASSERT_EQ(a->bytes(), c->bytes()) << what;
    }
  }
}
inline bool makes_sense(Kind kind, const Judge& judge, unsigned options) {
  const bool restricts = (options & (kKeep | kFloor)) != 0;
  if (kind == Kind::logits && judge.targets == Targets::teacher) return false;
  if (restricts && judge.targets != Targets::hard) return false;
  if (judge.topk_log && (options & (kSmoothing | kClassWeight)) != 0) return false;
  if (judge.targets == Targets::teacher && (options & kUpEntropy) != 0) return false;
  return allowed(judge, options);
}
inline void turn_dials(TargetBackend& backend, std::uint64_t n) {
  const std::int64_t chunks[] = {0, 16, 0, 64}, blocks[] = {0, 256, 512, 0};
  backend.dials = {};
  backend.dials.chunk = chunks[n % 4];
  backend.dials.block = blocks[n / 4 % 4];
  backend.dials.kept_blocks = n % 3 == 0 ? 0 : n % 3 == 1 ? -1 : 1;
  backend.least_budget = n % 11 == 10;
}

// The unbiased filter on given logits: over many seeds each element's mean is the unfiltered one within six standard
// errors of the stated variance, the target's and the large ones are untouched, and a small one is 0 or +-eps a.
inline void check_filter(TargetBackend& backend) {
  constexpr int seeds = 600;
  constexpr double eps = 0x1p-6;
  Sample s = stored(make(Kind::logits, kJudges[0], kRowWeight | kTemperature, Reduction::none, 5, 4, 300), DType::f32,
                    DType::f32);
  const Answer exact = ask(backend, s);
  ASSERT_EQ(exact.error, "");
  Tensor sum(DType::f64, s.p.rows, s.p.vocab);
  sum.fill(0.0);
  double kept = 0.0;
  s.p.loss.filter = eps;
  for (int seed = 0; seed < seeds; ++seed) {
    s.p.loss.filter_seed = static_cast<std::uint64_t>(seed) * 77;
    const Answer got = ask(backend, s);
    ASSERT_EQ(got.error, "");
    ASSERT_EQ(got.outcome.loss, exact.outcome.loss);
    kept += got.outcome.filter_kept / seeds;
    for (std::int64_t i = 0; i < s.p.rows; ++i)
      for (std::int64_t j = 0; j < s.p.vocab; ++j) {
        const double a = s.row_weight.at(i) / s.p.loss.temperature, d = got.dz.at(i, j), want = exact.dz.at(i, j);
        sum.set(i, j, sum.at(i, j) + d / seeds);
        if (j == s.target(i) || std::abs(want) >= eps * std::abs(a) * (1 + 1e-6)) {
          ASSERT_NEAR(d, want, 1e-6 * std::abs(want)) << i << ' ' << j;
        } else if (d != 0.0) {
          ASSERT_NEAR(d, eps * a, 1e-5 * std::abs(a)) << i << ' ' << j;
        }
      }
  }
  double share = 0.0, variance = 0.0;
  for (std::int64_t i = 0; i < s.p.rows; ++i)
    for (std::int64_t j = 0; j < s.p.vocab; ++j) {
      const double a = s.row_weight.at(i) / s.p.loss.temperature, p = std::abs(exact.dz.at(i, j) / a);
      const bool small = j != s.target(i) && p < eps;
      share += (small ? p / eps : 1.0) / static_cast<double>(s.p.rows * s.p.vocab);
      if (!small) continue;
      variance += p * (eps - p);
      ASSERT_NEAR(sum.at(i, j), exact.dz.at(i, j), std::abs(a) * (6.0 * std::sqrt(p * (eps - p) / seeds) + 1e-6))
          << i << ' ' << j;
    }
  ASSERT_NEAR(kept, share, 0.02);
  const Answer got = ask(backend, s);
  ASSERT_NEAR(got.outcome.filter_variance, variance, 1e-4 * variance);
}

}  // namespace logitless::test
