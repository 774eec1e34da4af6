// What a random cover would seldom meet, on every target: targets out of range, masked classes and rows without a
// distribution, p_y near 1, common offsets of 1e16, empty batches, more rows than 65535, layouts that must be refused.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "support/check.hpp"
#include "support/masked.hpp"
#include "support/targets.hpp"

namespace logitless::test {
namespace {

class Edges : public OnTarget {
 protected:
  const cpu::Target& target() const { return *GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Conformance, Edges, ::testing::ValuesIn(all_targets()), target_parameter_name);

// Places of kept exponentials, each with a plan that uses it for shapes of a few leaves.
std::vector<plan::Dials> keeps() {
  std::vector<plan::Dials> out(3);
  out[0].keep = static_cast<int>(plan::Keep::none);
  out[1].keep = static_cast<int>(plan::Keep::workspace);
  out[2].keep = static_cast<int>(plan::Keep::inside_dw);
  for (plan::Dials& dials : out) dials.block = 256;
  return out;
}

Case linear_case(DType dtype) {
  Case c;
  c.rows = 13, c.hidden = 24, c.vocab = 700;
  c.x = c.w = c.dx = c.dw = dtype;
  c.reduction = Reduction::sum;
  return c;
}

Case logits_case(DType dtype) {
  Case c;
  c.kind = Kind::logits;
  c.rows = 13, c.vocab = 700;
  c.z = c.dz = dtype;
  c.reduction = Reduction::sum;
  return c;
}

// Every call and, for gradients of logits, in place too.
std::vector<Case> calls_of(Case c) {
  std::vector<Case> out;
  for (Call call : {Call::forward, Call::forward_backward, Call::backward}) {
    c.call = call;
    out.push_back(c);
    if (c.kind == Kind::logits && call != Call::forward) {
      out.push_back(c);
      out.back().in_place = true;
    }
  }
  return out;
}

TEST_P(Edges, TargetsOutOfRangeAreRefusedBeforeAnyWrite) {
  ThreadExecutor executor(2);
  TargetBackend backend(target(), executor);
  for (const Case& base : {linear_case(DType::f32), linear_case(DType::bf16), logits_case(DType::f32)}) {
    for (const Case& c : calls_of(base)) {
      for (const std::int64_t wrong : {std::int64_t{700}, std::int64_t{-1}, std::int64_t{-101}, std::int64_t{1} << 30,
                                       -(std::int64_t{1} << 31), (std::int64_t{1} << 32) + 5}) {
        for (const DType y : {DType::i32, DType::i64}) {
          if (y == DType::i32 && wrong != static_cast<std::int32_t>(wrong)) continue;
          Case narrow = c;
          narrow.y = y;
          Data data(narrow);
          data.y.set_integer(11, wrong);
          EXPECT_EQ(CaseCheck(narrow, data, backend, nullptr).run(), "") << wrong;
          // The message names row, value and V.
          Outputs got = Outputs::of(narrow, DType::f32, narrow.dx, narrow.dw, narrow.dz, Layout::contiguous);
          Tensor stats(DType::f32, narrow.rows, 4);
          stats.fill(0.0);
          Operands o = data.operands();
          got.into(o);
          if (narrow.call == Call::backward) o.stats = stats.view();
          Outcome outcome;
          int status = LL_OK;
          const std::string text = backend.run(narrow.problem(0.0), o, &outcome, &status);
          EXPECT_EQ(status, LL_ERROR_TARGET_RANGE);
          for (const std::string& part : {std::string("11"), std::to_string(wrong), std::string("700")}) {
            EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
          }
        }
      }
    }
  }
}

TEST_P(Edges, AllRowsIgnoredAndNoRows) {
  ThreadExecutor executor(2);
  TargetBackend backend(target(), executor);
  for (Case base : {linear_case(DType::f32), linear_case(DType::bf16), logits_case(DType::f32)}) {
    for (const std::int64_t rows : {0, 9}) {
      base.rows = rows;
      base.ignored = Ignored::all;
      for (Case c : calls_of(base)) {
        for (Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none}) {
          for (OnEmpty on_empty : {OnEmpty::error, OnEmpty::nan, OnEmpty::zero}) {
            for (const double normalizer : {0.0, 8.0}) {
              c.reduction = reduction, c.on_empty = on_empty, c.normalizer = normalizer;
              c.accumulate_dx = c.accumulate_dw = false;
              EXPECT_EQ(check_case(c, backend, nullptr), "");
              c.accumulate_dw = c.kind == Kind::linear;
              c.accumulate_dx = c.kind == Kind::linear && c.x == DType::f32;
              EXPECT_EQ(check_case(c, backend, nullptr), "");
            }
          }
        }
      }
    }
  }
}

TEST_P(Edges, MaskedClassesAndBadRowsInLogits) {
  ThreadExecutor executor(2);
  TargetBackend backend(target(), executor);
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (Case c : calls_of(logits_case(dtype))) {
      for (const double alpha : {0.0, 0.1, 1.0}) {
        for (Saved saved : {Saved::own, Saved::reference, Saved::lse}) {
          if (c.call != Call::backward && saved != Saved::own) continue;
          c.alpha = alpha, c.saved = saved;
          EXPECT_EQ(CaseCheck(c, masked_logits(c), backend, nullptr).run(), "");
          c.reduction = Reduction::none;
          EXPECT_EQ(CaseCheck(c, masked_logits(c), backend, nullptr).run(), "");
          c.reduction = Reduction::sum;
        }
      }
    }
  }
}

TEST_P(Edges, MaskedClassesAndBadRowsInLinear) {
  ThreadExecutor executor(2);
  for (const plan::Dials& dials : keeps()) {
    TargetBackend backend(target(), executor);
    backend.dials = dials;
    for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const int masked : {0, 1, 256, 600}) {  // classes from 0 on: none, one, the whole first leaf, and more
        for (Case c : calls_of(linear_case(dtype))) {
          for (const double alpha : {0.0, 0.1}) {
            c.alpha = alpha;
            const Data data = masked_linear(c, masked);
            CaseCheck check(c, data, backend, nullptr);
            check.free_dx_column = masked > 0 ? 0 : -1;
            EXPECT_EQ(check.run(), "") << masked << " masked classes";
          }
        }
      }
    }
  }
}

// p_y = 1 - 1e-6: 1 - p_y must be right to 1e-5 relative wherever the target stands; likewise the loss.
void near_one(std::int64_t vocab, std::int64_t target, std::vector<float>* z, double* one_minus_p) {
  Random random(static_cast<std::uint64_t>(vocab * 1000 + target));
  z->assign(static_cast<std::size_t>(vocab), 0.0f);
  const double each = std::log(1e-6 / static_cast<double>(vocab - 1));
  double others = 0.0;
  for (std::int64_t j = 0; j < vocab; ++j) {
    float& value = (*z)[static_cast<std::size_t>(j)];
    value = j == target ? 3.0f : static_cast<float>(3.0 + each + random.uniform(-1.0, 1.0));
    if (j != target) others += std::exp(static_cast<double>(value) - 3.0);
  }
  *one_minus_p = others / (1.0 + others);
}

struct Place {
  std::int64_t vocab, target;
};
constexpr Place kPlaces[] = {{2, 0},      {2, 1},      {7, 3},      {256, 0},    {256, 255},   {257, 256},    {257, 0},
                             {1000, 255}, {1000, 256}, {1000, 511}, {1000, 999}, {50257, 777}, {50257, 50256}};

TEST_P(Edges, TargetNearOneInLogits) {
  ThreadExecutor executor(2);
  TargetBackend backend(target(), executor);
  for (const Place& place : kPlaces) {
    std::vector<float> values;
    double q = 0.0;
    near_one(place.vocab, place.target, &values, &q);
    Case c = logits_case(DType::f32);
    c.rows = 1, c.vocab = place.vocab;
    Data data(c);
    data.y.set_integer(0, place.target);
    for (std::int64_t j = 0; j < place.vocab; ++j) data.z.set(0, j, values[static_cast<std::size_t>(j)]);
    for (Call call : {Call::forward_backward, Call::backward}) {
      Operands o = data.operands();
      Tensor stats(DType::f32, 1, 4), loss(DType::f32, 1, 1), d(DType::f32, 1, place.vocab);
      o.stats = stats.view(), o.row_loss = loss.view();
      Outcome outcome;
      int status = LL_OK;
      if (call == Call::backward) {
        c.call = Call::forward;
        ASSERT_EQ(backend.run(c.problem(0.0), o, &outcome, &status), "");
      }
      c.call = call;
      o.dz = d.view();
      ASSERT_EQ(backend.run(c.problem(0.0), o, &outcome, &status), "");
      EXPECT_NEAR(d.at(0, place.target) / -q, 1.0, 1e-5) << "V " << place.vocab << " target " << place.target;
      EXPECT_NEAR(loss.at(0) / -std::log1p(-q), 1.0, 1e-5) << "V " << place.vocab << " target " << place.target;
      const double s = stats.at(0, 1) + std::exp(stats.at(0, 2) - stats.at(0, 0));
      EXPECT_NEAR(stats.at(0, 1) / s / q, 1.0, 1e-5);
    }
  }
}

// X = (1, 0) and W_j = (z_j, [j = y]) make dX_1 = D_y; with dW_j0 = D_j.
TEST_P(Edges, TargetNearOneInLinear) {
  ThreadExecutor executor(2);
  for (const plan::Dials& dials : keeps()) {
    TargetBackend backend(target(), executor);
    backend.dials = dials;
    for (const Place& place : kPlaces) {
      std::vector<float> values;
      double q = 0.0;
      near_one(place.vocab, place.target, &values, &q);
      Case c = linear_case(DType::f32);
      c.rows = 1, c.hidden = 2, c.vocab = place.vocab;
      Data data(c);
      data.y.set_integer(0, place.target);
      data.x.set(0, 0, 1.0), data.x.set(0, 1, 0.0);
      for (std::int64_t j = 0; j < place.vocab; ++j) {
        data.w.set(j, 0, values[static_cast<std::size_t>(j)]);
        data.w.set(j, 1, j == place.target ? 1.0 : 0.0);
      }
      for (Call call : {Call::forward_backward, Call::backward}) {
        Operands o = data.operands();
        Tensor stats(DType::f32, 1, 4), loss(DType::f32, 1, 1), dx(DType::f32, 1, 2), dw(DType::f32, place.vocab, 2);
        o.stats = stats.view(), o.row_loss = loss.view();
        Outcome outcome;
        int status = LL_OK;
        if (call == Call::backward) {
          c.call = Call::forward;
          ASSERT_EQ(backend.run(c.problem(0.0), o, &outcome, &status), "");
        }
        c.call = call;
        o.dx = dx.view(), o.dw = dw.view();
        ASSERT_EQ(backend.run(c.problem(0.0), o, &outcome, &status), "");
        EXPECT_NEAR(dx.at(0, 1) / -q, 1.0, 1e-5) << "V " << place.vocab << " target " << place.target;
        EXPECT_NEAR(dw.at(place.target, 0) / -q, 1.0, 1e-5) << "V " << place.vocab << " target " << place.target;
        EXPECT_NEAR(loss.at(0) / -std::log1p(-q), 1.0, 1e-5) << "V " << place.vocab << " target " << place.target;
      }
    }
  }
}

// Logits that are all 1e16 have loss log V and D = 1/V - [j = y], whatever fp32 makes of 1e16 + log V.
TEST_P(Edges, OffsetOfTenToTheSixteenth) {
  ThreadExecutor executor(2);
  for (const std::int64_t vocab : {1, 2, 255, 257, 5000}) {
    const double v = static_cast<double>(vocab);
    for (const double alpha : {0.0, 0.1}) {
      Case c = logits_case(DType::f32);
      c.rows = 3, c.vocab = vocab, c.alpha = alpha;
      Data data(c);
      data.z.fill(1e16);
      TargetBackend backend(target(), executor);
      Tensor loss(DType::f32, 3, 1), logprob(DType::f32, 3, 1), d(DType::f32, 3, vocab);
      Operands o = data.operands();
      o.row_loss = loss.view(), o.row_logprob = logprob.view(), o.dz = d.view();
      Outcome outcome;
      int status = LL_OK;
      ASSERT_EQ(backend.run(c.problem(alpha), o, &outcome, &status), "");
      for (std::int64_t i = 0; i < 3; ++i) {
        EXPECT_NEAR(loss.at(i), std::log(v), 2e-6);
        EXPECT_NEAR(logprob.at(i), -std::log(v), 2e-6);
        const std::int64_t y = reference::load_integer(data.y.view(), i);
        for (std::int64_t j = 0; j < vocab; ++j) {
          EXPECT_NEAR(d.at(i, j), j == y ? (1.0 / v - alpha / v - (1.0 - alpha)) : (1.0 - alpha) / v, 1e-6);
        }
      }
    }
    for (const plan::Dials& dials : keeps()) {
      for (DType dtype : {DType::f32, DType::bf16}) {
        Case c = linear_case(dtype);
        c.rows = 3, c.hidden = 1, c.vocab = vocab, c.dw = DType::f32, c.dx = DType::none;
        Data data(c);
        data.x.fill(1e8), data.w.fill(1e8);
        TargetBackend backend(target(), executor);
        backend.dials = dials;
        Tensor loss(DType::f32, 3, 1), dw(DType::f32, vocab, 1);
        Operands o = data.operands();
        o.row_loss = loss.view(), o.dw = dw.view();
        Outcome outcome;
        int status = LL_OK;
        ASSERT_EQ(backend.run(c.problem(0.0), o, &outcome, &status), "");
        const double x = data.x.at(0, 0);
        for (std::int64_t i = 0; i < 3; ++i) EXPECT_NEAR(loss.at(i), std::log(v), 2e-6);
        for (std::int64_t j = 0; j < vocab; ++j) {
          double want = 3.0 / v;
          for (std::int64_t i = 0; i < 3; ++i) want -= reference::load_integer(data.y.view(), i) == j ? 1.0 : 0.0;
          EXPECT_NEAR(dw.at(j, 0) / x, want, dtype == DType::f32 ? 3e-6 : 3.0 * 0x1p-7);
        }
      }
    }
  }
}

// A row far above its first leaf: references of kept exponentials must be repaired, not overflow.
TEST_P(Edges, RowsFarAboveTheirFirstLeaf) {
  ThreadExecutor executor(2);
  for (const plan::Dials& dials : keeps()) {
    TargetBackend backend(target(), executor);
    backend.dials = dials;
    for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const double lift : {30.0, 39.0, 41.0, 90.0, 200.0, -30.0, -90.0, -200.0}) {
        for (Case c : calls_of(linear_case(dtype))) {
          for (const double alpha : {0.0, 0.1}) {
            c.alpha = alpha;
            Data data(c);
            // Only some rows, so that repaired and other rows stand beside each other.
            for (std::int64_t i = 0; i < c.rows; ++i) data.x.set(i, 0, i % 3 == 1 ? 0.25 : 1.0);
            for (std::int64_t j = 0; j < c.vocab; ++j) data.w.set(j, 0, j >= 300 ? lift : 0.0);
            EXPECT_EQ(CaseCheck(c, data, backend, nullptr).run(), "") << "lift " << lift;
          }
        }
      }
    }
  }
}

TEST_P(Edges, MoreRowsThanSixteenBitsCount) {
  ThreadExecutor executor(2);
  TargetBackend backend(target(), executor);
  Case c;
  c.rows = 66000, c.hidden = 3, c.vocab = 5;
  c.dx = c.dw = DType::f32;
  c.ignored = Ignored::some;
  EXPECT_EQ(check_case(c, backend, nullptr), "");
  backend.dials.chunk = 1000;
  EXPECT_EQ(check_case(c, backend, nullptr), "");
  c.kind = Kind::logits;
  c.dz = DType::f32;
  EXPECT_EQ(check_case(c, backend, nullptr), "");
}

TEST_P(Edges, LogitsWithClassesApartAreRefused) {
  ThreadExecutor executor(1);
  TargetBackend backend(target(), executor);
  for (Layout layout : {Layout::transposed, Layout::column_gap, Layout::reversed, Layout::shared_column}) {
    for (Case c : calls_of(logits_case(DType::f32))) {
      if (c.in_place) continue;
      c.x_layout = layout;
      const Data data(c);
      Outputs got = Outputs::of(c, DType::f32, c.dx, c.dw, c.dz, Layout::contiguous);
      Tensor stats(DType::f32, c.rows, 4);
      stats.fill(0.0);
      Operands o = data.operands();
      got.into(o);
      if (c.call == Call::backward) o.stats = stats.view();
      Outcome outcome;
      int status = LL_OK;
      const std::string text = backend.run(c.problem(0.0), o, &outcome, &status);
      EXPECT_EQ(status, LL_ERROR_INVALID_ARGUMENT);
      EXPECT_NE(text.find("stride"), std::string::npos) << text;
      for (const Tensor* t : got.all()) EXPECT_TRUE(!*t || t->all_poison());
    }
  }
}

}  // namespace
}  // namespace logitless::test
