// Every line with which ll_plan_create refuses a problem or its options: the argument, its value, what would be right.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "small_problem.hpp"

namespace faces {
namespace {

struct Case {
  const char* name;
  ll_kind kind;
  ll_call call;
  std::function<void(SmallProblem&)> spoil;
  std::vector<std::string> pieces;
  ll_status status = LL_ERROR_INVALID_ARGUMENT;
  ll_backend backend = LL_BACKEND_CPU;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class RefusedProblem : public testing::TestWithParam<Case> {};

TEST_P(RefusedProblem, NamesArgumentAndValue) {
  const Case& c = GetParam();
  const ContextPointer context = make_context(c.backend);
  SmallProblem small(c.kind, c.call);
  ASSERT_NE(small.plan(context.get()), nullptr) << "the case must be right before it is spoilt";
  c.spoil(small);
  int somewhere = 0;
  auto* plan = reinterpret_cast<ll_plan*>(&somewhere);
  EXPECT_TRUE(refused(ll_plan_create(context.get(), &small.problem, &small.options, &plan), c.status, c.pieces));
  EXPECT_EQ(plan, nullptr);
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr ll_call F = LL_FORWARD, FB = LL_FORWARD_BACKWARD, B = LL_BACKWARD;

const Case kCases[] = {
    {"Kind", LL_LINEAR, FB, [](auto& s) { s.problem.kind = 7; }, {"kind: 7", "LL_LINEAR (1)", "LL_LOGITS (2)"}},
    {"Call", LL_LINEAR, FB, [](auto& s) { s.problem.call = 0; }, {"call: 0", "LL_FORWARD (1)", "LL_BACKWARD (3)"}},
    {"NegativeRows", LL_LINEAR, FB, [](auto& s) { s.problem.rows = -1; }, {"rows: -1", "at least 0"}},
    {"NoHidden", LL_LINEAR, FB, [](auto& s) { s.problem.hidden = 0; }, {"hidden: 0", "at least 1"}},
    {"NegativeHidden", LL_LINEAR, FB, [](auto& s) { s.problem.hidden = -5; }, {"hidden: -5", "at least 1"}},
    {"NoVocab", LL_LINEAR, FB, [](auto& s) { s.problem.vocab = 0; }, {"vocab: 0", "at least 1"}},
    {"NegativeVocab", LL_LOGITS, FB, [](auto& s) { s.problem.vocab = -9; }, {"vocab: -9", "at least 1"}},
    {"HugeVocab",
     LL_LINEAR,
     FB,
     [](auto& s) { s.problem.vocab = std::numeric_limits<std::int64_t>::max(); },
     {"vocab: 9223372036854775807", "2^40"}},
    {"LogitsOverflow",
     LL_LOGITS,
     FB,
     [](auto& s) { s.problem.rows = s.problem.vocab = std::int64_t{1} << 32; },
     {"rows, vocab: 4294967296 x 4294967296 x 4 bytes", "2^56"}},
    {"WeightOverflow",
     LL_LINEAR,
     FB,
     [](auto& s) {
       s.problem.rows = 1;
       s.problem.vocab = s.problem.hidden = std::int64_t{1} << 30;
     },
     {"vocab, hidden: 1073741824 x 1073741824 x 4 bytes", "2^56"}},
    {"HiddenOverflow",
     LL_LINEAR,
     FB,
     [](auto& s) {
       s.problem.vocab = 1;
       s.problem.rows = s.problem.hidden = std::int64_t{1} << 40;
     },
     {"rows, hidden: 1099511627776 x 1099511627776 x 4 bytes", "2^56"}},

    {"HiddenDtype", LL_LINEAR, FB, [](auto& s) { s.problem.hidden_dtype = LL_I32; }, {"hidden_dtype: i32", "bf16"}},
    {"HiddenDtypeMissing", LL_LINEAR, F, [](auto& s) { s.problem.hidden_dtype = LL_NONE; }, {"hidden_dtype: none"}},
    {"HiddenDtypeUnknown", LL_LINEAR, F, [](auto& s) { s.problem.hidden_dtype = 17; }, {"hidden_dtype: 17", "f32"}},
    {"WeightDtype", LL_LINEAR, FB, [](auto& s) { s.problem.weight_dtype = LL_I64; }, {"weight_dtype: i64", "f16"}},
    {"LogitsDtype", LL_LOGITS, FB, [](auto& s) { s.problem.logits_dtype = -2; }, {"logits_dtype: -2", "f32"}},
    {"DoubleHiddenOnCpu",
     LL_LINEAR,
     F,
     [](auto& s) { s.problem.hidden_dtype = LL_F64; },
     {"hidden_dtype: f64", "LL_BACKEND_REFERENCE"},
     LL_ERROR_UNSUPPORTED},
    {"DoubleWeightOnCpu",
     LL_LINEAR,
     F,
     [](auto& s) { s.problem.weight_dtype = LL_F64; },
     {"weight_dtype: f64", "LL_BACKEND_REFERENCE"},
     LL_ERROR_UNSUPPORTED},
    {"DoubleLogitsOnCpu",
     LL_LOGITS,
     F,
     [](auto& s) { s.problem.logits_dtype = LL_F64; },
     {"logits_dtype: f64", "LL_BACKEND_REFERENCE"},
     LL_ERROR_UNSUPPORTED},
    {"LinearWithLogits",
     LL_LINEAR,
     FB,
     [](auto& s) { s.problem.logits_dtype = LL_F32; },
     {"logits_dtype: f32", "kind linear", "LL_NONE"}},
    {"LinearWithGradLogits",
     LL_LINEAR,
     FB,
     [](auto& s) { s.problem.grad_logits_dtype = LL_F32; },
     {"grad_logits_dtype: f32", "kind linear", "LL_NONE"}},
    {"LogitsWithHiddenSize", LL_LOGITS, FB, [](auto& s) { s.problem.hidden = 64; }, {"hidden: 64", "must be 0"}},
    {"LogitsWithHidden",
     LL_LOGITS,
     FB,
     [](auto& s) { s.problem.hidden_dtype = LL_BF16; },
     {"hidden_dtype: bf16", "kind logits", "LL_NONE"}},
    {"LogitsWithWeight",
     LL_LOGITS,
     FB,
     [](auto& s) { s.problem.weight_dtype = LL_F16; },
     {"weight_dtype: f16", "kind logits", "LL_NONE"}},
    {"LogitsWithGradHidden",
     LL_LOGITS,
     FB,
     [](auto& s) { s.problem.grad_hidden_dtype = LL_F32; },
     {"grad_hidden_dtype: f32", "kind logits", "LL_NONE"}},
    {"LogitsWithGradWeight",
     LL_LOGITS,
     FB,
     [](auto& s) { s.problem.grad_weight_dtype = LL_F32; },
     {"grad_weight_dtype: f32", "kind logits", "LL_NONE"}},
    {"ForwardWithGradHidden",
     LL_LINEAR,
     F,
     [](auto& s) { s.problem.grad_hidden_dtype = LL_F32; },
     {"grad_hidden_dtype: f32", "forward computes no gradient"}},
    {"ForwardWithGradLogits",
     LL_LOGITS,
     F,
     [](auto& s) { s.problem.grad_logits_dtype = LL_F32; },
     {"grad_logits_dtype: f32", "forward computes no gradient"}},
    {"GradHiddenDtype",
     LL_LINEAR,
     FB,
     [](auto& s) {
       s.problem.hidden_dtype = LL_BF16;
       s.problem.grad_hidden_dtype = LL_F16;
     },
     {"grad_hidden_dtype: f16", "must be bf16 or f32"}},
    {"GradWeightDtype",
     LL_LINEAR,
     FB,
     [](auto& s) { s.problem.grad_weight_dtype = LL_BF16; },
     {"grad_weight_dtype: bf16", "must be f32"}},
    {"GradLogitsDtype",
     LL_LOGITS,
     FB,
     [](auto& s) { s.problem.grad_logits_dtype = LL_I32; },
     {"grad_logits_dtype: i32", "must be f32"}},
    {"NoGradient",
     LL_LINEAR,
     FB,
     [](auto& s) { s.problem.grad_hidden_dtype = s.problem.grad_weight_dtype = LL_NONE; },
     {"call: LL_FORWARD_BACKWARD", "without a gradient", "LL_FORWARD"}},
    {"NoGradientBackward",
     LL_LOGITS,
     B,
     [](auto& s) { s.problem.grad_logits_dtype = LL_NONE; },
     {"call: LL_BACKWARD", "without a gradient", "grad_logits_dtype"}},

    {"UnknownFlag", LL_LINEAR, FB, [](auto& s) { s.problem.flags = 16; }, {"flags: 16", "known"}},
    {"AccumulateNoGradHidden",
     LL_LINEAR,
     FB,
     [](auto& s) {
       s.problem.flags = LL_ACCUMULATE_GRAD_HIDDEN;
       s.problem.grad_hidden_dtype = LL_NONE;
     },
     {"flags: LL_ACCUMULATE_GRAD_HIDDEN", "grad_hidden_dtype"}},
    {"AccumulateNoGradWeight",
     LL_LINEAR,
     FB,
     [](auto& s) {
       s.problem.flags = LL_ACCUMULATE_GRAD_WEIGHT;
       s.problem.grad_weight_dtype = LL_NONE;
     },
     {"flags: LL_ACCUMULATE_GRAD_WEIGHT", "grad_weight_dtype"}},
    {"StridedNoGradWeight",
     LL_LOGITS,
     FB,
     [](auto& s) { s.problem.flags = LL_GRAD_WEIGHT_STRIDED; },
     {"flags: LL_GRAD_WEIGHT_STRIDED", "grad_weight_dtype"}},
    {"InPlaceNoGradLogits",
     LL_LINEAR,
     FB,
     [](auto& s) { s.problem.flags = LL_IN_PLACE; },
     {"flags: LL_IN_PLACE", "grad_logits_dtype"}},
    {"InPlaceOtherDtype",
     LL_LOGITS,
     FB,
     [](auto& s) {
       s.problem.flags = LL_IN_PLACE;
       s.problem.logits_dtype = LL_BF16;
     },
     {"grad_logits_dtype: f32", "LL_IN_PLACE", "must be bf16"}},

    {"Reduction",
     LL_LINEAR,
     F,
     [](auto& s) { s.options.reduction = 4; },
     {"reduction: 4", "LL_MEAN (1)", "LL_PER_ROW"}},
    {"Smoothing", LL_LINEAR, F, [](auto& s) { s.options.smoothing = 0; }, {"smoothing: 0", "LL_SMOOTHING_UNIFORM (1)"}},
    {"OnEmpty", LL_LINEAR, F, [](auto& s) { s.options.on_empty = 9; }, {"on_empty: 9", "LL_EMPTY_ERROR (1)"}},
    {"AlphaAbove", LL_LINEAR, F, [](auto& s) { s.options.label_smoothing = 1.5; }, {"label_smoothing: 1.5", "[0, 1]"}},
    {"AlphaBelow",
     LL_LINEAR,
     F,
     [](auto& s) { s.options.label_smoothing = -0.1; },
     {"label_smoothing: -0.1", "[0, 1]"}},
    {"AlphaNan", LL_LINEAR, F, [](auto& s) { s.options.label_smoothing = kNan; }, {"label_smoothing: nan", "[0, 1]"}},
    {"AlphaInfinite", LL_LINEAR, F, [](auto& s) { s.options.label_smoothing = kInf; }, {"label_smoothing: inf"}},
    {"NormalizerNan", LL_LINEAR, F, [](auto& s) { s.options.normalizer = kNan; }, {"normalizer: nan", "above 0"}},
    {"NormalizerBelow", LL_LINEAR, F, [](auto& s) { s.options.normalizer = -2.0; }, {"normalizer: -2", "above 0"}},
    {"NormalizerInfinite", LL_LINEAR, F, [](auto& s) { s.options.normalizer = kInf; }, {"normalizer: inf", "finite"}},
    {"NormalizerOfASum",
     LL_LINEAR,
     F,
     [](auto& s) {
       s.options.normalizer = 8.0;
       s.options.reduction = LL_SUM;
     },
     {"normalizer: 8", "LL_SUM", "only LL_MEAN divides"}},
    {"NormalizerPerRow",
     LL_LINEAR,
     F,
     [](auto& s) {
       s.options.normalizer = 8.0;
       s.options.reduction = LL_PER_ROW;
     },
     {"normalizer: 8", "LL_PER_ROW", "only LL_MEAN divides"}},
    {"Reserved", LL_LINEAR, F, [](auto& s) { s.options.reserved = 3; }, {"reserved: 3", "must be 0"}},
    {"OthersOfOneClass",
     LL_LINEAR,
     F,
     [](auto& s) {
       s.problem.vocab = 1;
       s.options.smoothing = LL_SMOOTHING_OTHERS;
       s.options.label_smoothing = 0.1;
     },
     {"label_smoothing: 0.1", "LL_SMOOTHING_OTHERS", "vocab 1", "must be 0"}},
};

INSTANTIATE_TEST_SUITE_P(Each, RefusedProblem, testing::ValuesIn(kCases),
                         [](const auto& each) { return std::string(each.param.name); });

TEST(Plan, NullPointersAreRefused) {
  const ContextPointer context = make_context(LL_BACKEND_CPU);
  SmallProblem s;
  ll_plan* plan = nullptr;
  EXPECT_TRUE(
      refused(ll_plan_create(nullptr, &s.problem, &s.options, &plan), LL_ERROR_INVALID_ARGUMENT, {"context: null"}));
  EXPECT_TRUE(refused(ll_plan_create(context.get(), nullptr, &s.options, &plan), LL_ERROR_INVALID_ARGUMENT,
                      {"problem: null", "ll_problem"}));
  EXPECT_EQ(ll_plan_create(context.get(), &s.problem, nullptr, &plan), LL_OK) << "the defaults";
  ll_plan_destroy(plan);
  EXPECT_TRUE(refused(ll_plan_create(context.get(), &s.problem, &s.options, nullptr), LL_ERROR_INVALID_ARGUMENT,
                      {"plan: null"}));
  std::size_t length = 0;
  EXPECT_TRUE(
      refused(ll_plan_describe(nullptr, LL_TEXT, nullptr, 0, &length), LL_ERROR_INVALID_ARGUMENT, {"plan: null"}));
  EXPECT_EQ(ll_plan_workspace_bytes(nullptr), 0u);
  ll_plan_destroy(nullptr);
  ll_problem_init(nullptr);
  ll_options_init(nullptr);
  ll_arguments_init(nullptr);
  ll_context_options_init(nullptr);
}

// What stands at the edge of a rule is allowed.
TEST(Plan, EdgesAreAllowed) {
  const ContextPointer context = make_context(LL_BACKEND_CPU);
  const auto allowed = [&](const std::function<void(SmallProblem&)>& change) {
    SmallProblem s;
    change(s);
    ll_plan* raw = nullptr;
    EXPECT_EQ(ll_plan_create(context.get(), &s.problem, &s.options, &raw), LL_OK) << ll_last_error();
    ll_plan_destroy(raw);
  };
  allowed([](auto& s) { s.problem.rows = 0; });
  allowed([](auto& s) { s.problem.vocab = 1; });
  allowed([](auto& s) { s.problem.hidden = 1; });
  allowed([](auto& s) { s.options.label_smoothing = 1.0; });
  allowed([](auto& s) { s.options.smoothing = LL_SMOOTHING_OTHERS; });
  allowed([](auto& s) { s.options.ignore_index = 3; });
  allowed([](auto& s) { s.options.ignore_index = std::numeric_limits<std::int64_t>::min(); });
  allowed([](auto& s) { s.options.normalizer = 1e-30; });
  allowed([](auto& s) {
    s.problem.vocab = 1;
    s.options.smoothing = LL_SMOOTHING_OTHERS;  // without smoothing there is nothing to spread
  });
  allowed([](auto& s) {
    s.problem.hidden_dtype = LL_BF16;
    s.problem.grad_hidden_dtype = LL_F32;
    s.problem.flags = LL_ACCUMULATE_GRAD_HIDDEN | LL_ACCUMULATE_GRAD_WEIGHT | LL_GRAD_WEIGHT_STRIDED;
  });
}

// The message of a refused budget is itself a budget that works, and one byte less does not.
TEST(Plan, BudgetBelowTheLeastNamesTheLeast) {
  const ContextPointer context = make_context(LL_BACKEND_CPU);
  for (const ll_kind kind : {LL_LINEAR, LL_LOGITS}) {
    SmallProblem s(kind);
    s.problem.memory_budget = 1;
    ll_plan* plan = nullptr;
    EXPECT_TRUE(refused(ll_plan_create(context.get(), &s.problem, &s.options, &plan), LL_ERROR_BUDGET,
                        {"memory_budget: 1 bytes", "at least "}));
    const std::string text = ll_last_error();
    const std::uint64_t least = std::stoull(text.substr(text.find("at least ") + 9));
    s.problem.memory_budget = least - 1;
    EXPECT_TRUE(refused(ll_plan_create(context.get(), &s.problem, &s.options, &plan), LL_ERROR_BUDGET,
                        {"memory_budget: " + std::to_string(least - 1), "at least " + std::to_string(least)}));
    s.problem.memory_budget = least;
    const PlanPointer fits = s.plan(context.get());
    ASSERT_NE(fits, nullptr);
    EXPECT_LE(ll_plan_workspace_bytes(fits.get()), least);
  }
}

TEST(Plan, DescribesItself) {
  for (const ll_backend backend : {LL_BACKEND_CPU, LL_BACKEND_REFERENCE}) {
    const ContextPointer context = make_context(backend);
    for (const ll_kind kind : {LL_LINEAR, LL_LOGITS}) {
      SmallProblem s(kind);
      const PlanPointer plan = s.plan(context.get());
      std::size_t length = 0;
      ASSERT_EQ(ll_plan_describe(plan.get(), LL_JSON, nullptr, 0, &length), LL_OK);
      std::string text(length + 1, '?');
      ASSERT_EQ(ll_plan_describe(plan.get(), LL_JSON, text.data(), text.size(), &length), LL_OK);
      text.pop_back();
      const auto json = nlohmann::json::parse(text);
      EXPECT_EQ(json.at("workspace_bytes").get<std::size_t>(), ll_plan_workspace_bytes(plan.get()));
      EXPECT_EQ(json.at("kind"), kind == LL_LINEAR ? "linear" : "logits");
      EXPECT_EQ(json.at("call"), "forward_backward");
      EXPECT_EQ(json.at("rows"), SmallProblem::R);
      EXPECT_EQ(json.at("vocab"), SmallProblem::V);
      EXPECT_TRUE(json.at("ledger").is_array());
      EXPECT_TRUE(json.at("rejected").is_array());
      ASSERT_EQ(ll_plan_describe(plan.get(), LL_TEXT, nullptr, 0, &length), LL_OK);
      EXPECT_GT(length, 40u);
      char little[4];
      EXPECT_TRUE(refused(ll_plan_describe(plan.get(), 0, little, 4, &length), LL_ERROR_INVALID_ARGUMENT,
                          {"format: 0", "LL_JSON"}));
      if (backend == LL_BACKEND_REFERENCE) {
        EXPECT_EQ(ll_plan_workspace_bytes(plan.get()), 0u);
      }
    }
  }
}

TEST(Plan, DoubleRunsOnTheReference) {
  const ContextPointer context = make_context(LL_BACKEND_REFERENCE);
  SmallProblem s(LL_LOGITS);
  s.problem.logits_dtype = s.problem.grad_logits_dtype = LL_F64;
  EXPECT_NE(s.plan(context.get()), nullptr);
  s.problem.grad_logits_dtype = LL_F32;
  EXPECT_NE(s.plan(context.get()), nullptr);
}

}  // namespace
}  // namespace faces
