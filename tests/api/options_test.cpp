// Options through the C ABI: pairs without a meaning are refused by name, arguments match the problem, a few results
// stand against the definition on the reference backend, and the helpers (next-token targets, merged statistics).
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "small_problem.hpp"

namespace faces {
namespace {

void expect_refused(const std::function<void(SmallProblem&)>& spoil, const std::vector<std::string>& pieces,
                    ll_call call = LL_FORWARD_BACKWARD, ll_status status = LL_ERROR_INVALID_ARGUMENT) {
  const ContextPointer context = make_context(LL_BACKEND_REFERENCE);
  SmallProblem s(LL_LINEAR, call);
  spoil(s);
  ll_plan* plan = nullptr;
  EXPECT_TRUE(refused(ll_plan_create(context.get(), &s.problem, &s.options, &plan), status, pieces));
  EXPECT_EQ(plan, nullptr);
}

TEST(Options, WithoutMeaningAreRefusedByName) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  expect_refused([](auto& s) { s.options.softcap = -1.0; }, {"softcap: -1", "above 0"});
  expect_refused([&](auto& s) { s.options.temperature = nan; }, {"temperature: nan"});
  expect_refused([](auto& s) { s.options.logit_scale = -2.0; }, {"logit_scale: -2"});
  expect_refused([](auto& s) { s.options.filter = 0.3; }, {"filter: 0.3", "power of two"});
  expect_refused([](auto& s) { s.options.filter = 0.25; }, {"filter: 0.25", "LL_FORWARD"}, LL_FORWARD);
  expect_refused([](auto& s) { s.options.hard_share = 0.5; }, {"hard_share: 0.5", "teacher"});
  expect_refused([](auto& s) { s.options.kl_coef = 0.5; }, {"kl_coef: 0.5", "LL_RULE_POLICY"});
  expect_refused([](auto& s) { s.problem.inputs = LL_TOPK_LOG; }, {"LL_TOPK_LOG", "LL_TARGETS_HARD"});
  expect_refused([](auto& s) { s.problem.inputs = 1024; }, {"inputs: 1024"});
  expect_refused([](auto& s) { s.problem.grad_bias_dtype = LL_F32; }, {"grad_bias_dtype: f32", "no bias"});
  expect_refused(
      [](auto& s) {
        s.options.rule = LL_RULE_POLICY;
        s.options.label_smoothing = 0.1;
      },
      {"label_smoothing: 0.1", "LL_RULE_POLICY"});
  expect_refused(
      [](auto& s) {
        s.options.targets = LL_TARGETS_SOFT;
        s.problem.soft_dtype = LL_F32;
        s.problem.inputs = LL_KEEP_MASK;
      },
      {"LL_KEEP_MASK", "LL_TARGETS_SOFT"});
  expect_refused([](auto& s) { s.problem.total_vocab = 14; }, {"total_vocab: 14", "LL_FORWARD_BACKWARD"});
}

void give_topk_of_a_teacher(SmallProblem& s) {
  s.options.targets = LL_TARGETS_TOPK;
  s.problem.topk = 2;
  s.problem.inputs = LL_TOPK_LOG;
}

void give_teacher(SmallProblem& s) {
  s.options.targets = LL_TARGETS_TEACHER;
  s.problem.teacher_hidden = 3;
  s.problem.teacher_hidden_dtype = s.problem.teacher_weight_dtype = LL_F32;
}

TEST(Options, PairsThatAreNotOfferedAreRefusedByName) {
  expect_refused(
      [](auto& s) {
        give_topk_of_a_teacher(s);
        s.options.distill_temperature = 2.0;
        s.options.filter = 0.125;
      },
      {"filter: 0.125", "LL_TOPK_LOG", "distill_temperature 2"});
  expect_refused([](auto& s) { s.problem.saved_bytes = 64; }, {"saved_bytes: 64", "LL_FORWARD_BACKWARD"});
  expect_refused(
      [](auto& s) {
        give_topk_of_a_teacher(s);
        s.options.label_smoothing = 0.25;
      },
      {"label_smoothing: 0.25", "LL_TOPK_LOG", "must be 0"});
  expect_refused(
      [](auto& s) {
        give_topk_of_a_teacher(s);
        s.problem.inputs |= LL_CLASS_WEIGHT;
      },
      {"LL_CLASS_WEIGHT", "LL_TOPK_LOG"});
  for (const ll_problem_inputs restriction : {LL_KEEP_MASK, LL_LOGIT_FLOOR}) {
    const std::string name = restriction == LL_KEEP_MASK ? "LL_KEEP_MASK" : "LL_LOGIT_FLOOR";
    expect_refused(
        [&](auto& s) {
          give_topk_of_a_teacher(s);
          s.problem.inputs |= restriction;
        },
        {name, "LL_TARGETS_TOPK"});
    expect_refused(
        [&](auto& s) {
          give_teacher(s);
          s.problem.inputs |= restriction;
        },
        {name, "LL_TARGETS_TEACHER"});
  }
  expect_refused(
      [](auto& s) {
        give_teacher(s);
        s.problem.inputs = LL_ENTROPY_GRADIENT;
      },
      {"LL_ENTROPY_GRADIENT", "LL_TARGETS_TEACHER"});
  expect_refused(
      [](auto& s) {
        give_teacher(s);
        s.options.filter = 0.25;
      },
      {"filter: 0.25", "LL_TARGETS_TEACHER"});
  expect_refused(
      [](auto& s) {
        s.problem.total_vocab = 14;
        s.options.filter = 0.25;
      },
      {"filter: 0.25", "total_vocab"}, LL_BACKWARD);
  const ContextPointer context = make_context(LL_BACKEND_REFERENCE);
  SmallProblem logits(LL_LOGITS);
  logits.problem.bias_dtype = logits.problem.grad_bias_dtype = LL_F32;
  ll_plan* plan = nullptr;
  EXPECT_TRUE(refused(ll_plan_create(context.get(), &logits.problem, &logits.options, &plan), LL_ERROR_INVALID_ARGUMENT,
                      {"grad_bias_dtype: f32", "LL_LOGITS", "sum grad_logits"}));
}

TEST(Options, FilterReportsNeedAFilter) {
  const ContextPointer context = make_context(LL_BACKEND_REFERENCE);
  SmallProblem s;
  double kept = -1.0;
  s.arguments.filter_kept = &kept;
  EXPECT_TRUE(refused(s.run(context.get()), LL_ERROR_INVALID_ARGUMENT, {"filter_kept: given", "filter"}));
  EXPECT_TRUE(s.untouched());
}

TEST(Options, ZeroMeansAsBefore) {
  const ContextPointer context = make_context(LL_BACKEND_REFERENCE);
  SmallProblem want, zero;
  std::memset(reinterpret_cast<char*>(&zero.options) + 48, 0, sizeof zero.options - 48);
  ASSERT_EQ(want.run(context.get()), LL_OK) << ll_last_error();
  ASSERT_EQ(zero.run(context.get()), LL_OK) << ll_last_error();
  EXPECT_EQ(zero.loss, want.loss);
  EXPECT_EQ(zero.dw, want.dw);
}

TEST(Options, ArgumentsMatchTheProblem) {
  const ContextPointer context = make_context(LL_BACKEND_REFERENCE);
  SmallProblem s;
  std::vector<float> rows(SmallProblem::R, 1.0f);
  const ll_tensor view = tensor(rows.data(), LL_F32, {SmallProblem::R});
  s.arguments.row_weight = &view;
  EXPECT_TRUE(refused(s.run(context.get()), LL_ERROR_INVALID_ARGUMENT, {"row_weight: given", "LL_ROW_WEIGHT"}));
  s.arguments.row_weight = nullptr;
  s.arguments.row_entropy = &view;
  EXPECT_TRUE(refused(s.run(context.get()), LL_ERROR_INVALID_ARGUMENT, {"row_entropy: given", "LL_ENTROPY"}));
  s.arguments.row_entropy = nullptr;
  s.problem.inputs = LL_ROW_WEIGHT;
  EXPECT_TRUE(refused(s.run(context.get()), LL_ERROR_INVALID_ARGUMENT, {"row_weight: null", "LL_ROW_WEIGHT"}));
  EXPECT_TRUE(s.untouched());
}

TEST(Options, ScaleTemperatureAndBiasAreThoseOfTheLogits) {
  const ContextPointer context = make_context(LL_BACKEND_REFERENCE);
  SmallProblem s;
  std::vector<float> bias(SmallProblem::V), db(SmallProblem::V, kSentinel);
  std::vector<double> z = s.exact_logits(), want_db(SmallProblem::V, 0.0);
  for (std::size_t j = 0; j < bias.size(); ++j) bias[j] = 0.25f * static_cast<float>(j);
  for (std::size_t n = 0; n < z.size(); ++n) z[n] = (z[n] + double{bias[n % bias.size()]}) * 3.0 / 2.0;
  const ll_tensor bias_view = tensor(bias.data(), LL_F32, {SmallProblem::V});
  const ll_tensor db_view = tensor(db.data(), LL_F32, {SmallProblem::V});
  s.problem.bias_dtype = s.problem.grad_bias_dtype = LL_F32;
  s.options.logit_scale = 3.0;
  s.options.temperature = 2.0;
  s.arguments.bias = &bias_view;
  s.arguments.grad_bias = &db_view;
  ASSERT_EQ(s.run(context.get()), LL_OK) << ll_last_error();
  const Expected want(z, s.y, SmallProblem::V, 0.0, -100);
  for (std::size_t n = 0; n < z.size(); ++n) want_db[n % bias.size()] += want.d[n] * 1.5;
  expect_near(s.row_loss, want.row_loss, "row_loss");
  expect_near(db, want_db, "grad_bias");
}

TEST(NextTokenTargets, EndAtSequences) {
  std::vector<std::int64_t> ids = {5, 6, 7, 8, 9}, targets(5, 0), ends = {0, 2, 2, 5};
  const ll_tensor from = tensor(ids.data(), LL_I64, {5}), to = tensor(targets.data(), LL_I64, {5}),
                  cu = tensor(ends.data(), LL_I64, {4});
  ASSERT_EQ(ll_next_token_targets(&from, nullptr, nullptr, -100, &to), LL_OK) << ll_last_error();
  EXPECT_EQ(targets, (std::vector<std::int64_t>{6, 7, 8, 9, -100}));
  ASSERT_EQ(ll_next_token_targets(&from, &cu, nullptr, -1, &to), LL_OK) << ll_last_error();
  EXPECT_EQ(targets, (std::vector<std::int64_t>{6, -1, 8, 9, -1}));
  ends[3] = 4;
  EXPECT_TRUE(refused(ll_next_token_targets(&from, &cu, nullptr, -1, &to), LL_ERROR_INVALID_ARGUMENT,
                      {"cu_seqlens[3]: 4", "number of ids, 5"}));
}

TEST(MergeStatistics, JoinsTheParts) {
  const float none = -std::numeric_limits<float>::infinity();
  std::vector<float> a = {1.0f, 2.0f, 0.5f, 0.0f}, b = {3.0f, 1.0f, none, 0.0f}, out(4, kSentinel);
  const ll_tensor av = tensor(a.data(), LL_F32, {1, 4}), bv = tensor(b.data(), LL_F32, {1, 4}),
                  to = tensor(out.data(), LL_F32, {1, 4});
  const ll_tensor* parts[] = {&av, &bv};
  ASSERT_EQ(ll_merge_statistics(parts, 2, &to), LL_OK) << ll_last_error();
  EXPECT_EQ(out[0], 3.0f);
  EXPECT_NEAR(static_cast<double>(out[1]), 1.0 + 2.0 * std::exp(-2.0), 1e-6);
  EXPECT_EQ(out[2], 0.5f);
}

TEST(ClassOrder, IsStableAndDescending) {
  std::vector<float> mean = {0.1f, 0.3f, 0.0f, 0.3f, -0.0f, 0.2f};
  std::vector<std::int32_t> order(6, -5);
  std::vector<std::int64_t> wide(12, -5);
  const ll_tensor from = tensor(mean.data(), LL_F32, {6}), to = tensor(order.data(), LL_I32, {6});
  ASSERT_EQ(ll_class_order(&from, &to), LL_OK) << ll_last_error();
  EXPECT_EQ(order, (std::vector<std::int32_t>{1, 3, 5, 0, 2, 4}));
  // Strides, and backwards.
  ll_tensor backwards = tensor(mean.data() + 5, LL_F32, {6}), spread = tensor(wide.data(), LL_I64, {6});
  backwards.stride[0] = -1;
  spread.stride[0] = 2;
  ASSERT_EQ(ll_class_order(&backwards, &spread), LL_OK) << ll_last_error();
  EXPECT_EQ(wide, (std::vector<std::int64_t>{2, -5, 4, -5, 0, -5, 5, -5, 1, -5, 3, -5}));

  const auto refusal = [&](const ll_tensor* probability, const ll_tensor* out, std::vector<std::string> parts) {
    EXPECT_TRUE(refused(ll_class_order(probability, out), LL_ERROR_INVALID_ARGUMENT, parts));
  };
  const ll_tensor few = tensor(order.data(), LL_I32, {5}), over = tensor(mean.data(), LL_I32, {6});
  refusal(nullptr, &to, {"mean_probability: null"});
  refusal(&from, nullptr, {"order: null"});
  refusal(&to, &to, {"mean_probability", "i32"});
  refusal(&from, &from, {"order", "f32"});
  refusal(&from, &few, {"order: shape [5]", "[6]"});
  refusal(&from, &over, {"order", "mean_probability"});
  mean[4] = std::nanf("");
  order.assign(6, -5);
  refusal(&from, &to, {"mean_probability[4]: NaN"});
  EXPECT_EQ(order, std::vector<std::int32_t>(6, -5)) << "a refusal writes nothing";
  const ll_tensor none = tensor(mean.data(), LL_F32, {0}), nothing = tensor(order.data(), LL_I32, {0});
  EXPECT_EQ(ll_class_order(&none, &nothing), LL_OK) << ll_last_error();
}

// As the header says: grad_bias with grad_loss 0 and 1/n for every lse is the mean of p over the n kept rows.
TEST(ClassOrder, MeanProbabilitiesAreAGradientOfTheBias) {
  const ContextPointer context = make_context(LL_BACKEND_CPU);
  SmallProblem s;
  std::int64_t kept = 0;
  for (const std::int64_t y : s.y) kept += y != -100 ? 1 : 0;
  float zero = 0.0f, share = 1.0f / static_cast<float>(kept);
  std::vector<float> mean(SmallProblem::V, kSentinel);
  ll_tensor bias = tensor(&zero, LL_F32, {SmallProblem::V}), upstream = tensor(&share, LL_F32, {SmallProblem::R});
  const ll_tensor db = tensor(mean.data(), LL_F32, {SmallProblem::V});
  bias.stride[0] = upstream.stride[0] = 0;
  s.problem.bias_dtype = s.problem.grad_bias_dtype = LL_F32;
  s.problem.grad_hidden_dtype = s.problem.grad_weight_dtype = LL_NONE;
  s.arguments.grad_hidden = s.arguments.grad_weight = nullptr;
  s.arguments.bias = &bias;
  s.arguments.grad_bias = &db;
  s.arguments.grad_loss = 0.0;
  s.arguments.grad_row_lse = &upstream;
  ASSERT_EQ(s.run(context.get()), LL_OK) << ll_last_error();
  // Expected's D is (p - [j = y]) / kept.
  const std::vector<double> z = s.exact_logits();
  const Expected expected(z, s.y, SmallProblem::V, 0.0, -100);
  std::vector<double> want(SmallProblem::V, 0.0);
  for (std::size_t n = 0; n < z.size(); ++n) want[n % want.size()] += expected.d[n];
  for (const std::int64_t y : s.y)
    if (y != -100) want[static_cast<std::size_t>(y)] += 1.0 / static_cast<double>(kept);
  expect_near(mean, want, "mean probabilities");
}

}  // namespace
}  // namespace faces
