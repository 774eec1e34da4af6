// The oracle itself, against what needs no oracle: closed forms, central differences of its own losses in double, its
// identities, and a definition of rounding by search. src/reference must be right before it may judge.
#include "reference/reference.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "logitless/logitless.h"
#include "reference/convert.hpp"
#include "support/case.hpp"
#include "support/check.hpp"

namespace logitless::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// ---- rounding ----------------------------------------------------------------------------------------------------

// All finite numbers of a 16-bit format in ascending order, with their bits.
std::vector<std::pair<double, std::uint16_t>> finite_numbers(reference::Format f) {
  std::vector<std::pair<double, std::uint16_t>> out;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const double value = reference::decode(static_cast<std::uint16_t>(bits), f);
    if (std::isfinite(value) && bits != 0x8000) out.emplace_back(value, static_cast<std::uint16_t>(bits));
  }
  std::sort(out.begin(), out.end());
  return out;
}

TEST(Rounding, DecodesByTheFormatsDefinition) {
  // By hand, field by field.
  EXPECT_EQ(reference::decode(0x3f80, reference::kBf16), 1.0);
  EXPECT_EQ(reference::decode(0xc049, reference::kBf16), -3.140625);
  EXPECT_EQ(reference::decode(0x7f7f, reference::kBf16), 255.0 / 128.0 * 0x1p127);
  EXPECT_EQ(reference::decode(0x0001, reference::kBf16), 0x1p-133);
  EXPECT_EQ(reference::decode(0x3c00, reference::kF16), 1.0);
  EXPECT_EQ(reference::decode(0xc248, reference::kF16), -3.140625);
  EXPECT_EQ(reference::decode(0x7bff, reference::kF16), 65504.0);
  EXPECT_EQ(reference::decode(0x0001, reference::kF16), 0x1p-24);
  EXPECT_EQ(reference::decode(0x03ff, reference::kF16), 1023.0 * 0x1p-24);
  EXPECT_EQ(reference::decode(0x7c00, reference::kF16), kInf);
  EXPECT_EQ(reference::decode(0xff80, reference::kBf16), -kInf);
  EXPECT_TRUE(std::isnan(reference::decode(0x7e01, reference::kF16)));
  EXPECT_TRUE(std::signbit(reference::decode(0x8000, reference::kF16)));
}

TEST(Rounding, NearestWithTiesToEvenForEveryNumber) {
  for (reference::Format f : {reference::kBf16, reference::kF16}) {
    const auto numbers = finite_numbers(f);
    ASSERT_EQ(numbers.size(), f.digits == 8 ? 0x10000u - 2 * 128 - 1 : 0x10000u - 2 * 1024 - 1);
    for (std::size_t n = 0; n < numbers.size(); ++n) {
      const auto [value, bits] = numbers[n];
      ASSERT_EQ(reference::encode(reference::round_to(value, f), f), bits);
      if (n + 1 == numbers.size()) continue;
      const auto [next, next_bits] = numbers[n + 1];
      const double middle = value / 2.0 + next / 2.0;
      // The even one of two neighbours has a last bit of 0.
      const double even = (bits & 1) == 0 ? value : next;
      ASSERT_EQ(reference::round_to(middle, f), even) << value;
      ASSERT_EQ(reference::round_to(std::nextafter(middle, -kInf), f), value) << value;
      ASSERT_EQ(reference::round_to(std::nextafter(middle, kInf), f), next) << value;
    }
    const double largest = numbers.back().first;
    const double beyond = largest + (largest - numbers[numbers.size() - 2].first) / 2.0;
    EXPECT_EQ(reference::round_to(std::nextafter(beyond, 0.0), f), largest);
    EXPECT_EQ(reference::round_to(beyond, f), kInf);
    EXPECT_EQ(reference::round_to(-beyond, f), -kInf);
    EXPECT_EQ(reference::encode(-0.0, f), 0x8000);
    EXPECT_TRUE(std::isnan(reference::decode(reference::encode(std::nan(""), f), f)));
  }
}

// ---- closed forms ------------------------------------------------------------------------------------------------

struct LogitsResult {
  Tensor loss, lse, logprob, stats, dz;
  Outcome outcome;
  std::string error;
  int status = LL_OK;
};

LogitsResult run_logits(const std::vector<std::vector<double>>& z, const std::vector<std::int64_t>& targets,
                        contract::Loss loss, double grad_loss = 1.0) {
  const auto rows = static_cast<std::int64_t>(z.size());
  const auto vocab = static_cast<std::int64_t>(z[0].size());
  Tensor logits(DType::f64, rows, vocab), y(DType::i64, rows, 1);
  for (std::int64_t i = 0; i < rows; ++i) {
    y.set_integer(i, targets[static_cast<std::size_t>(i)]);
    for (std::int64_t j = 0; j < vocab; ++j) {
      logits.set(i, j, z[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)]);
    }
  }
  Problem p;
  p.kind = Kind::logits, p.rows = rows, p.vocab = vocab, p.z = p.dz = DType::f64;
  p.loss = loss;
  LogitsResult out;
  out.loss = Tensor(DType::f64, rows, 1), out.lse = Tensor(DType::f64, rows, 1);
  out.logprob = Tensor(DType::f64, rows, 1), out.stats = Tensor(DType::f64, rows, 4);
  out.dz = Tensor(DType::f64, rows, vocab);
  Operands o;
  o.z = logits.view(), o.targets = y.view(), o.grad_loss = grad_loss;
  o.row_loss = out.loss.view(), o.row_lse = out.lse.view(), o.row_logprob = out.logprob.view();
  o.stats = out.stats.view(), o.dz = out.dz.view();
  out.error = reference::run(p, o, &out.outcome, &out.status);
  return out;
}

TEST(Reference, OneClassHasNoLoss) {
  const LogitsResult r = run_logits({{7.5}}, {0}, {});
  EXPECT_EQ(r.outcome.loss, 0.0);
  EXPECT_EQ(r.lse.at(0), 7.5);
  EXPECT_EQ(r.dz.at(0, 0), 0.0);
}

TEST(Reference, TwoClassesAreTheLogisticFunction) {
  const LogitsResult r = run_logits({{1.25, -0.5}}, {1}, {}, 3.0);
  const double p = 1.0 / (1.0 + std::exp(-1.75));  // of class 0
  EXPECT_NEAR(r.outcome.loss, std::log1p(std::exp(1.75)), 1e-15);
  EXPECT_NEAR(r.dz.at(0, 0), 3.0 * p, 1e-15);
  EXPECT_NEAR(r.dz.at(0, 1), -3.0 * p, 1e-15);
  EXPECT_NEAR(r.logprob.at(0), -std::log1p(std::exp(1.75)), 1e-15);
  EXPECT_NEAR(r.lse.at(0), std::log(std::exp(1.25) + std::exp(-0.5)), 1e-15);
}

TEST(Reference, EqualLogitsGiveLogOfTheirNumberAtAnyOffset) {
  for (const double offset : {0.0, -1e4, 1e16}) {
    const LogitsResult r = run_logits({std::vector<double>(10, offset)}, {4}, {});
    EXPECT_NEAR(r.outcome.loss, std::log(10.0), 1e-15);
    EXPECT_NEAR(r.dz.at(0, 0), 0.1, 1e-16);
    EXPECT_NEAR(r.dz.at(0, 4), -0.9, 1e-15);
  }
}

TEST(Reference, SmoothingIsTheExplicitDistribution) {
  const std::vector<double> z = {0.3, -1.0, 2.0};
  double s = 0.0;
  for (double value : z) s += std::exp(value);
  contract::Loss loss;
  loss.smoothing = 0.3;
  const LogitsResult r = run_logits({z}, {0}, loss);
  const double q[3] = {0.8, 0.1, 0.1};
  double want = 0.0;
  for (std::size_t j = 0; j < 3; ++j) want -= q[j] * (z[j] - std::log(s));
  EXPECT_NEAR(r.outcome.loss, want, 1e-15);
  for (std::size_t j = 0; j < 3; ++j) {
    EXPECT_NEAR(r.dz.at(0, static_cast<std::int64_t>(j)), std::exp(z[j]) / s - q[j], 1e-15);
  }
  // The other convention: all of alpha on the other classes. alpha = 1 takes all from the target.
  loss.smoothing = 1.0 * 3.0 / 2.0;
  const LogitsResult others = run_logits({z}, {0}, loss);
  EXPECT_NEAR(others.outcome.loss, -0.5 * (z[1] + z[2]) + std::log(s), 1e-15);
}

TEST(Reference, MaskedClassesAndRowsWithoutDistribution) {
  contract::Loss loss;
  loss.reduction = Reduction::sum;
  const LogitsResult r = run_logits({{1.0, -kInf, 1.0},
                                     {-kInf, 0.0, 0.0},
                                     {-kInf, -kInf, -kInf},
                                     {0.0, kInf, 0.0},
                                     {0.0, 0.0, std::nan("")},
                                     {0.0, 0.0, -kInf}},
                                    {0, 0, 1, 0, 1, 1}, loss);
  EXPECT_NEAR(r.loss.at(0), std::log(2.0), 1e-15);
  EXPECT_EQ(r.dz.at(0, 1), 0.0);
  EXPECT_EQ(r.loss.at(1), kInf);  // a masked target
  EXPECT_EQ(r.logprob.at(1), -kInf);
  EXPECT_EQ(r.dz.at(1, 0), -1.0);
  for (std::int64_t bad : {2, 3, 4}) {
    EXPECT_TRUE(std::isnan(r.loss.at(bad)) && std::isnan(r.lse.at(bad)) && std::isnan(r.logprob.at(bad)));
    for (std::int64_t j = 0; j < 3; ++j) EXPECT_TRUE(std::isnan(r.dz.at(bad, j)));
  }
  EXPECT_EQ(r.outcome.bad, 3);
  EXPECT_EQ(r.outcome.kept, 6);
  EXPECT_TRUE(std::isnan(r.outcome.loss));
  loss.smoothing = 0.1;
  EXPECT_EQ(run_logits({{0.0, 0.0, -kInf}}, {1}, loss).loss.at(0), kInf);
}

TEST(Reference, EmptyBatches) {
  contract::Loss loss;
  const std::vector<std::vector<double>> z = {{1.0, 2.0}, {0.0, 0.0}};
  LogitsResult r = run_logits(z, {-100, -100}, loss);
  EXPECT_EQ(r.status, LL_ERROR_EMPTY);
  EXPECT_TRUE(r.dz.all_poison() && r.loss.all_poison());
  loss.on_empty = OnEmpty::nan;
  r = run_logits(z, {-100, -100}, loss);
  EXPECT_TRUE(r.error.empty() && std::isnan(r.outcome.loss));
  EXPECT_EQ(r.dz.at(0, 0), 0.0);
  loss.on_empty = OnEmpty::zero;
  EXPECT_EQ(run_logits(z, {-100, -100}, loss).outcome.loss, 0.0);
  loss.on_empty = OnEmpty::error, loss.normalizer = 4.0;
  EXPECT_EQ(run_logits(z, {-100, -100}, loss).outcome.loss, 0.0);
  loss.reduction = Reduction::sum;
  EXPECT_EQ(run_logits(z, {-100, -100}, loss).outcome.loss, 0.0);
}

TEST(Reference, TargetsOutOfRangeAreRefused) {
  contract::Loss loss;
  loss.ignore_index = 1;  // a class may be the ignored one
  EXPECT_EQ(run_logits({{1.0, 2.0}, {0.0, 0.0}}, {1, 0}, loss).outcome.kept, 1);
  for (const std::int64_t wrong : {2, -1, -100}) {
    const LogitsResult r = run_logits({{1.0, 2.0}, {0.0, 0.0}}, {0, wrong}, loss);
    EXPECT_EQ(r.status, LL_ERROR_TARGET_RANGE);
    EXPECT_NE(r.error.find("targets[1] = " + std::to_string(wrong)), std::string::npos) << r.error;
    EXPECT_TRUE(r.dz.all_poison() && r.loss.all_poison());
  }
}

// ---- gradients by central differences ------------------------------------------------------------------------------

// The number whose gradient the upstream gradients describe: grad_loss * loss + sum_i grad_row_i * row_loss_i.
double objective(const Case& c, const Data& data) {
  Problem p = c.problem(c.uniform_alpha());
  p.call = Call::forward, p.dx = p.dw = p.dz = DType::none;
  Tensor rows(DType::f64, c.rows, 1);
  Operands o = data.operands();
  o.row_loss = rows.view();
  Outcome outcome;
  int status = LL_OK;
  EXPECT_EQ(reference::run(p, o, &outcome, &status), "");
  double total = c.reduction == Reduction::none ? 0.0 : data.grad_loss * outcome.loss;
  for (std::int64_t i = 0; i < c.rows; ++i) {
    const double weight = data.upstream ? data.upstream.at(i) : (c.reduction == Reduction::none ? 1.0 : 0.0);
    total += weight * rows.at(i);
  }
  return total;
}

// h = 1e-5 on numbers of about 1: the truncation is h^2 times a third derivative, the rounding 1e-16 / h.
void expect_derivative(const Case& c, Data& data, Tensor& input, const Tensor& gradient, const char* what) {
  constexpr double h = 1e-5;
  for (std::int64_t i = 0; i < input.rows(); ++i) {
    for (std::int64_t k = 0; k < input.cols(); ++k) {
      const double at = input.at(i, k);
      input.set(i, k, at + h);
      const double above = objective(c, data);
      input.set(i, k, at - h);
      const double below = objective(c, data);
      input.set(i, k, at);
      const double slope = (above - below) / (2.0 * h);
      ASSERT_NEAR(gradient.at(i, k), slope, 2e-8 * (1.0 + std::abs(slope)))
          << what << '[' << i << ',' << k << "] " << c.text();
    }
  }
}

TEST(Reference, GradientsAreDerivatives) {
  int cases = 0;
  for (Kind kind : {Kind::linear, Kind::logits}) {
    for (Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none}) {
      for (Upstream upstream : {Upstream::one, Upstream::scalar, Upstream::rows, Upstream::shared_row}) {
        for (const double alpha : {0.0, 0.1, 1.0}) {
          for (Ignored ignored : {Ignored::none, Ignored::half}) {
            Case c;
            c.kind = kind;
            c.rows = 5, c.hidden = 3, c.vocab = 6;
            c.x = c.w = c.z = c.dx = c.dw = c.dz = DType::f64;
            c.reduction = reduction, c.upstream = upstream, c.alpha = alpha, c.ignored = ignored;
            c.others = cases % 3 == 1, c.normalizer = cases % 4 == 2 ? 3.5 : 0.0, c.class_ignored = cases % 5 == 3;
            c.on_empty = OnEmpty::zero;
            c.seed = static_cast<std::uint64_t>(++cases);
            Data data(c);
            Outputs out = Outputs::of(c, DType::f64, c.dx, c.dw, c.dz, Layout::contiguous);
            Operands o = data.operands();
            out.into(o);
            Outcome outcome;
            int status = LL_OK;
            ASSERT_EQ(reference::run(c.problem(c.uniform_alpha()), o, &outcome, &status), "");
            if (kind == Kind::linear) {
              expect_derivative(c, data, data.x, out.dx, "dX");
              expect_derivative(c, data, data.w, out.dw, "dW");
            } else {
              expect_derivative(c, data, data.z, out.dz, "dz");
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(cases, 144);
}

// ---- what a call may look like ---------------------------------------------------------------------------------------

Case some_case(Kind kind) {
  Case c;
  c.kind = kind;
  c.rows = 37, c.hidden = 9, c.vocab = 131;
  c.x = c.w = c.z = c.dx = c.dw = c.dz = DType::f64;
  c.alpha = 0.1, c.ignored = Ignored::some, c.upstream = Upstream::rows;
  return c;
}

Outputs run_case(const Case& c, const Data& data, DType rows) {
  Outputs out = Outputs::of(c, rows, c.dx, c.dw, c.dz, c.out_layout);
  Operands o = data.operands();
  out.into(o);
  Outcome outcome;
  int status = LL_OK;
  EXPECT_EQ(reference::run(c.problem(c.uniform_alpha()), o, &outcome, &status), "");
  EXPECT_TRUE(out.row_loss.surroundings_intact());
  return out;
}

void expect_near(const Tensor& a, const Tensor& b, double tolerance) {
  for (std::int64_t i = 0; i < a.rows(); ++i)
    for (std::int64_t j = 0; j < a.cols(); ++j) ASSERT_NEAR(a.at(i, j), b.at(i, j), tolerance) << i << ' ' << j;
}

TEST(Reference, BackwardFromStatisticsOrLseIsTheSameGradient) {
  for (Kind kind : {Kind::linear, Kind::logits}) {
    Case c = some_case(kind);
    const Data data(c);
    const Outputs whole = run_case(c, data, DType::f64);
    for (Saved saved : {Saved::own, Saved::lse}) {
      if (kind == Kind::linear && saved == Saved::lse) continue;
      c.call = Call::backward;
      Outputs out = Outputs::of(c, DType::f64, c.dx, c.dw, c.dz, Layout::padded);
      Operands o = data.operands();
      out.into(o);
      // Another reference than the maximum: m + 2 scales r by exp(-2).
      Tensor moved = whole.stats;
      for (std::int64_t i = 0; i < c.rows; ++i) {
        moved.set(i, 0, whole.stats.at(i, 0) + 2.0);
        moved.set(i, 1, whole.stats.at(i, 1) * std::exp(-2.0));
      }
      (saved == Saved::lse ? o.lse : o.stats) = (saved == Saved::lse ? whole.row_lse : moved).view();
      Outcome outcome;
      int status = LL_OK;
      ASSERT_EQ(reference::run(c.problem(c.uniform_alpha()), o, &outcome, &status), "");
      for (const auto& [got, want] : {std::pair{&out.dx, &whole.dx}, {&out.dw, &whole.dw}, {&out.dz, &whole.dz}}) {
        if (*got) expect_near(*got, *want, 1e-13);
      }
    }
  }
}

TEST(Reference, LayoutsDoNotMatter) {
  Case c = some_case(Kind::linear);
  const Data data(c);
  const Outputs want = run_case(c, data, DType::f64);
  for (Layout layout :
       {Layout::padded, Layout::transposed, Layout::column_gap, Layout::reversed_rows, Layout::reversed}) {
    Data other = data;
    other.x = Tensor(DType::f64, c.rows, c.hidden, layout), other.w = Tensor(DType::f64, c.vocab, c.hidden, layout);
    for (std::int64_t i = 0; i < c.rows; ++i)
      for (std::int64_t k = 0; k < c.hidden; ++k) other.x.set(i, k, data.x.at(i, k));
    for (std::int64_t j = 0; j < c.vocab; ++j)
      for (std::int64_t k = 0; k < c.hidden; ++k) other.w.set(j, k, data.w.at(j, k));
    c.out_layout = Layout::padded;
    const Outputs got = run_case(c, other, DType::f64);
    EXPECT_TRUE(got.dx.bytes() == want.dx.bytes() && got.dw.bytes() == want.dw.bytes());
    EXPECT_TRUE(got.row_loss.bytes() == want.row_loss.bytes());
  }
}

TEST(Reference, OutputsAreRoundedOnceAndAddedInDouble) {
  const Case exact_case = some_case(Kind::linear);
  const Data data(exact_case);
  const Outputs exact = run_case(exact_case, data, DType::f64);
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const bool accumulate : {false, true}) {
      Case c = exact_case;
      c.dx = c.dw = dtype;
      c.accumulate_dx = c.accumulate_dw = accumulate;
      Outputs out = Outputs::of(c, DType::f64, dtype, dtype, DType::none, Layout::contiguous);
      if (accumulate) out.dx.fill(0.3), out.dw.fill(-1.7);
      const double dx_old = accumulate ? out.dx.at(0, 0) : 0.0, dw_old = accumulate ? out.dw.at(0, 0) : 0.0;
      Operands o = data.operands();
      out.into(o);
      Outcome outcome;
      int status = LL_OK;
      ASSERT_EQ(reference::run(c.problem(c.alpha), o, &outcome, &status), "");
      for (std::int64_t k = 0; k < c.hidden; ++k) {
        for (std::int64_t i = 0; i < c.rows; ++i) {
          ASSERT_EQ(out.dx.at(i, k), reference::rounded(dx_old + exact.dx.at(i, k), dtype));
        }
        for (std::int64_t j = 0; j < c.vocab; ++j) {
          ASSERT_EQ(out.dw.at(j, k), reference::rounded(dw_old + exact.dw.at(j, k), dtype));
        }
      }
    }
  }
}

TEST(Reference, GradientOfLogitsMayLieOverThem) {
  Case c = some_case(Kind::logits);
  Data data(c);
  const Outputs want = run_case(c, data, DType::f64);
  Operands o = data.operands();
  o.dz = o.z;
  Problem p = c.problem(c.alpha);
  p.in_place = true;
  Outcome outcome;
  int status = LL_OK;
  ASSERT_EQ(reference::run(p, o, &outcome, &status), "");
  EXPECT_TRUE(data.z.bytes() == want.dz.bytes());
}

TEST(Reference, BadRowsLeaveNoTraceInTheWeightGradient) {
  Case c = some_case(Kind::linear);
  c.reduction = Reduction::sum;
  Data with(c), without(c);
  with.x.set(4, 2, std::nan(""));
  with.x.set(9, 0, kInf);
  for (Data* data : {&with, &without}) {
    for (std::int64_t i : {4, 9}) data->y.set_integer(i, data == &with ? 7 : -100);
  }
  const Outputs bad = run_case(c, with, DType::f64), good = run_case(c, without, DType::f64);
  EXPECT_TRUE(bad.dw.bytes() == good.dw.bytes());
  for (std::int64_t i : {4, 9}) {
    for (std::int64_t k = 0; k < c.hidden; ++k) EXPECT_TRUE(std::isnan(bad.dx.at(i, k)));
  }
  EXPECT_TRUE(bad.dx.row_bytes(5) == good.dx.row_bytes(5));
}

}  // namespace
}  // namespace logitless::test
