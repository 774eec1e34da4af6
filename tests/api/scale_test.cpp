// What makes gradients for one upstream gradient those for another: ll_scale afterwards, grad_loss_factor before.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "logitless/logitless.hpp"
#include "small_problem.hpp"

namespace faces {
namespace {

template <class T>
std::vector<T> ramp(std::size_t count) {
  std::vector<T> values;
  for (std::size_t n = 0; n < count; ++n) {
    values.push_back(static_cast<T>(0.375f * static_cast<float>(static_cast<int>(n * 7 % 23) - 11)));
  }
  return values;
}

// Rounded once from the exact product, whatever the dtype.
template <class T>
void expect_scaled(ll_context* context, ll_dtype dtype, std::size_t count) {
  const double factor = 0.3;
  const std::vector<T> before = ramp<T>(count);
  std::vector<T> values = before;
  const ll_tensor view = tensor(values.data(), dtype, {static_cast<std::int64_t>(count)}),
                  by = tensor(&factor, LL_F64, {});
  ASSERT_EQ(ll_scale(context, &by, &view, nullptr), LL_OK) << ll_last_error();
  for (std::size_t n = 0; n < count; ++n) {
    const double exact = static_cast<double>(before[n]) * factor;
    if constexpr (sizeof(T) == 2) {
      ASSERT_EQ(values[n].bits, T(static_cast<float>(exact)).bits) << n;
    } else {
      ASSERT_EQ(values[n], static_cast<T>(exact)) << n;
    }
  }
}

class Scale : public testing::TestWithParam<ll_backend> {
 protected:
  ContextPointer context = make_context(GetParam());
};

TEST_P(Scale, EveryDtype) {
  // Beyond one task's piece of a row, and with a rest.
  for (const std::size_t count : {std::size_t{1}, std::size_t{13}, std::size_t{200'003}}) {
    expect_scaled<float>(context.get(), LL_F32, count);
    expect_scaled<double>(context.get(), LL_F64, count);
    expect_scaled<logitless::bfloat16>(context.get(), LL_BF16, count);
    expect_scaled<logitless::float16>(context.get(), LL_F16, count);
  }
}

TEST_P(Scale, RowsApartLeaveWhatLiesBetween) {
  std::vector<float> values(5 * 8, kSentinel);
  for (std::size_t i = 0; i < 5; ++i) {
    for (std::size_t j = 0; j < 3; ++j) values[8 * i + j] = static_cast<float>(10 * i + j);
  }
  const float factor = -2.0f;
  const ll_tensor by = tensor(&factor, LL_F32, {1});
  // The rows from the last to the first.
  const ll_tensor view = tensor(values.data() + 32, LL_F32, {5, 3}, {-8, 1});
  ASSERT_EQ(ll_scale(context.get(), &by, &view, nullptr), LL_OK) << ll_last_error();
  for (std::size_t n = 0; n < values.size(); ++n) {
    const auto i = n / 8, j = n % 8;
    EXPECT_EQ(values[n], j < 3 ? -2.0f * static_cast<float>(10 * i + j) : kSentinel) << n;
  }
}

TEST_P(Scale, ByOneAndOfNothing) {
  const double one = 1.0, nan = std::numeric_limits<double>::quiet_NaN();
  const ll_tensor by = tensor(&one, LL_F64, {}), by_nan = tensor(&nan, LL_F64, {});
  const float inf = std::numeric_limits<float>::infinity();
  std::vector<float> values = {1.0f, -0.0f, inf, std::nanf("")};
  const std::vector<float> before = values;
  const ll_tensor view = tensor(values.data(), LL_F32, {4}), empty = tensor(nullptr, LL_F32, {0}),
                  no_rows = tensor(nullptr, LL_BF16, {0, 7}), no_columns = tensor(nullptr, LL_F16, {7, 0});
  ASSERT_EQ(ll_scale(context.get(), &by, &view, nullptr), LL_OK) << ll_last_error();
  EXPECT_EQ(std::memcmp(values.data(), before.data(), 4 * sizeof(float)), 0);
  for (const ll_tensor* each : {&empty, &no_rows, &no_columns}) {
    EXPECT_EQ(ll_scale(context.get(), &by_nan, each, nullptr), LL_OK) << ll_last_error();
  }
  ASSERT_EQ(ll_scale(context.get(), &by_nan, &view, nullptr), LL_OK) << ll_last_error();
  for (const float each : values) EXPECT_TRUE(std::isnan(each));
}

TEST_P(Scale, Refusals) {
  const float factor = 2.0f;
  const std::vector<float> before = ramp<float>(12);
  std::vector<float> values = before;
  const ll_tensor by = tensor(&factor, LL_F32, {}), view = tensor(values.data(), LL_F32, {12});
  const auto refusal = [&](const ll_tensor* f, const ll_tensor* v, const std::vector<std::string>& pieces) {
    EXPECT_TRUE(refused(ll_scale(context.get(), f, v, nullptr), LL_ERROR_INVALID_ARGUMENT, pieces));
  };
  EXPECT_TRUE(refused(ll_scale(nullptr, &by, &view, nullptr), LL_ERROR_INVALID_ARGUMENT, {"context: null"}));
  int somewhere = 0;
  EXPECT_TRUE(
      refused(ll_scale(context.get(), &by, &view, &somewhere), LL_ERROR_INVALID_ARGUMENT, {"stream: ", "null"}));
  refusal(nullptr, &view, {"factor: null"});
  refusal(&by, nullptr, {"values: null"});
  const ll_tensor two = tensor(values.data(), LL_F32, {2}), integer = tensor(values.data(), LL_I32, {12});
  refusal(&two, &view, {"factor: shape [2]", "[] or [1]"});
  const ll_tensor half = tensor(&factor, LL_F16, {});
  refusal(&half, &view, {"factor: dtype f16", "f32 or f64"});
  refusal(&by, &integer, {"values: dtype i32"});
  const ll_tensor scalar = tensor(values.data(), LL_F32, {}), cube = tensor(values.data(), LL_F32, {2, 2, 3});
  refusal(&by, &scalar, {"values: rank 0"});
  refusal(&by, &cube, {"values: rank 3"});
  const ll_tensor spread = tensor(values.data(), LL_F32, {6}, {2}),
                  columns = tensor(values.data(), LL_F32, {3, 4}, {1, 3}),
                  twice = tensor(values.data(), LL_F32, {3, 4}, {2, 1});
  refusal(&by, &spread, {"values: stride 2", "must be 1"});
  refusal(&by, &columns, {"values: column stride 3"});
  refusal(&by, &twice, {"values: row stride 2", "at least 4"});
  const ll_tensor inside = tensor(values.data() + 5, LL_F32, {});
  refusal(&inside, &view, {"values: its bytes", "factor"});
  ll_tensor elsewhere = view;
  elsewhere.device_type = LL_DEVICE_CUDA;
  refusal(&by, &elsewhere, {"values: device_type 2", "LL_DEVICE_CPU"});
  EXPECT_EQ(values, before) << "a refusal writes nothing";
}

// The factor times grad_loss is what grad_loss alone would be, beside upstream gradients of rows too.
TEST_P(Scale, FactorOfTheUpstreamGradient) {
  for (const ll_kind kind : {LL_LINEAR, LL_LOGITS}) {
    for (const bool rows : {false, true}) {
      for (const double factor : {-3.0, 0.25, 0.0}) {
        SmallProblem want(kind), got(kind), f64(kind);
        const float as_float = static_cast<float>(factor);
        const ll_tensor by = tensor(&as_float, LL_F32, {1}), by_double = tensor(&factor, LL_F64, {});
        for (SmallProblem* each : {&want, &got, &f64}) {
          each->grad_row = {0.5f, -1.0f, 7.0f, 0.125f};
          if (rows) each->arguments.grad_row_loss = &each->grad_row_view;
          each->arguments.grad_loss = 2.0;
        }
        want.arguments.grad_loss = 2.0 * factor;
        got.arguments.grad_loss_factor = &by;
        f64.arguments.grad_loss_factor = &by_double;
        for (SmallProblem* each : {&want, &got, &f64}) ASSERT_EQ(each->run(context.get()), LL_OK) << ll_last_error();
        EXPECT_EQ(got.loss, want.loss) << "the loss itself is not multiplied";
        for (const SmallProblem* each : {&got, &f64}) {
          EXPECT_EQ(each->dx, want.dx);
          EXPECT_EQ(each->dw, want.dw);
          EXPECT_EQ(each->dz, want.dz);
        }
      }
    }
  }
}

TEST_P(Scale, FactorInBackward) {
  SmallProblem forward(LL_LINEAR, LL_FORWARD);
  ASSERT_EQ(forward.run(context.get()), LL_OK) << ll_last_error();
  SmallProblem want(LL_LINEAR, LL_BACKWARD), got(LL_LINEAR, LL_BACKWARD);
  const double factor = 0.75;
  const ll_tensor by = tensor(&factor, LL_F64, {});
  want.arguments.grad_loss = 0.75;
  got.arguments.grad_loss_factor = &by;
  for (SmallProblem* each : {&want, &got}) {
    each->stats = forward.stats;
    ASSERT_EQ(each->run(context.get()), LL_OK) << ll_last_error();
  }
  EXPECT_EQ(got.dx, want.dx);
  EXPECT_EQ(got.dw, want.dw);
}

TEST_P(Scale, FactorIsRefusedWhereItMultipliesNothing) {
  const double factor = 2.0;
  const ll_tensor by = tensor(&factor, LL_F64, {}), pair = tensor(&factor, LL_F64, {2}),
                  half = tensor(&factor, LL_BF16, {});
  SmallProblem forward(LL_LINEAR, LL_FORWARD), per_row, shape, dtype, over;
  forward.arguments.grad_loss_factor = per_row.arguments.grad_loss_factor = &by;
  EXPECT_TRUE(refused(forward.run(context.get()), LL_ERROR_INVALID_ARGUMENT, {"grad_loss_factor: given", "forward"}));
  per_row.options.reduction = LL_PER_ROW;
  per_row.arguments.loss = nullptr;
  EXPECT_TRUE(
      refused(per_row.run(context.get()), LL_ERROR_INVALID_ARGUMENT, {"grad_loss_factor: given", "grad_row_loss"}));
  shape.arguments.grad_loss_factor = &pair;
  EXPECT_TRUE(refused(shape.run(context.get()), LL_ERROR_INVALID_ARGUMENT, {"grad_loss_factor: shape [2]"}));
  dtype.arguments.grad_loss_factor = &half;
  EXPECT_TRUE(refused(dtype.run(context.get()), LL_ERROR_INVALID_ARGUMENT, {"grad_loss_factor: dtype bf16"}));
  const ll_tensor inside = tensor(over.dw.data(), LL_F32, {});
  over.arguments.grad_loss_factor = &inside;
  EXPECT_TRUE(refused(over.run(context.get()), LL_ERROR_INVALID_ARGUMENT, {"grad_loss_factor", "grad_weight"}));
  for (const SmallProblem* each : {&forward, &per_row, &shape, &dtype, &over}) EXPECT_TRUE(each->untouched());
}

INSTANTIATE_TEST_SUITE_P(Backends, Scale, testing::Values(LL_BACKEND_CPU, LL_BACKEND_REFERENCE),
                         [](const auto& test) { return test.param == LL_BACKEND_CPU ? "cpu" : "reference"; });

}  // namespace
}  // namespace faces
