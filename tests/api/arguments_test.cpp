// Every line with which a compute call refuses its arguments, on both backends, and that nothing is written then.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
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
  std::function<void(SmallProblem&)> prepare = [](SmallProblem&) {};  // before the plan is made
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class RefusedArguments : public testing::TestWithParam<Case> {};

TEST_P(RefusedArguments, NamesArgumentAndValueAndWritesNothing) {
  const Case& c = GetParam();
  for (const ll_backend backend : {LL_BACKEND_REFERENCE, LL_BACKEND_CPU}) {
    const ContextPointer context = make_context(backend);
    SmallProblem small(c.kind, c.call);
    c.prepare(small);
    const PlanPointer plan = small.plan(context.get());
    ASSERT_NE(plan, nullptr);
    c.spoil(small);
    EXPECT_TRUE(refused(small.run(plan.get()), LL_ERROR_INVALID_ARGUMENT, c.pieces));
    EXPECT_TRUE(small.untouched());
  }
}

constexpr ll_call F = LL_FORWARD, FB = LL_FORWARD_BACKWARD, B = LL_BACKWARD;
constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max() / 2;

const Case kCases[] = {
    // What is needed, and what has no meaning.
    {"HiddenMissing", LL_LINEAR, FB, [](auto& s) { s.arguments.hidden = nullptr; }, {"hidden: null", "kind linear"}},
    {"WeightMissing", LL_LINEAR, F, [](auto& s) { s.arguments.weight = nullptr; }, {"weight: null", "kind linear"}},
    {"TargetsMissing", LL_LINEAR, F, [](auto& s) { s.arguments.targets = nullptr; }, {"targets: null"}},
    {"LogitsMissing", LL_LOGITS, F, [](auto& s) { s.arguments.logits = nullptr; }, {"logits: null", "kind logits"}},
    {"LogitsOfLinear",
     LL_LINEAR,
     F,
     [](auto& s) { s.arguments.logits = &s.z_view; },
     {"logits: given", "kind linear", "must be null"}},
    {"HiddenOfLogits",
     LL_LOGITS,
     F,
     [](auto& s) { s.arguments.hidden = &s.x_view; },
     {"hidden: given", "kind logits", "must be null"}},
    {"WeightOfLogits",
     LL_LOGITS,
     F,
     [](auto& s) { s.arguments.weight = &s.w_view; },
     {"weight: given", "kind logits", "must be null"}},
    {"GradHiddenMissing",
     LL_LINEAR,
     FB,
     [](auto& s) { s.arguments.grad_hidden = nullptr; },
     {"grad_hidden: null", "f32"}},
    {"GradWeightMissing",
     LL_LINEAR,
     FB,
     [](auto& s) { s.arguments.grad_weight = nullptr; },
     {"grad_weight: null", "f32"}},
    {"GradLogitsMissing",
     LL_LOGITS,
     FB,
     [](auto& s) { s.arguments.grad_logits = nullptr; },
     {"grad_logits: null", "f32"}},
    {"GradHiddenNotPlanned",
     LL_LINEAR,
     F,
     [](auto& s) { s.arguments.grad_hidden = &s.dx_view; },
     {"grad_hidden: given", "grad_hidden_dtype LL_NONE"}},
    {"GradWeightNotPlanned",
     LL_LINEAR,
     FB,
     [](auto& s) { s.arguments.grad_weight = &s.dw_view; },
     {"grad_weight: given", "grad_weight_dtype LL_NONE"},
     [](auto& s) { s.problem.grad_weight_dtype = LL_NONE; }},
    {"GradLogitsNotPlanned",
     LL_LINEAR,
     FB,
     [](auto& s) { s.arguments.grad_logits = &s.dz_view; },
     {"grad_logits: given", "grad_logits_dtype LL_NONE"}},
    {"LossOfBackward", LL_LINEAR, B, [](auto& s) { s.arguments.loss = &s.loss_view; }, {"loss: given", "backward"}},
    {"RowLossOfBackward",
     LL_LOGITS,
     B,
     [](auto& s) { s.arguments.row_loss = &s.row_loss_view; },
     {"row_loss: given", "backward"}},
    {"RowLseOfBackward",
     LL_LOGITS,
     B,
     [](auto& s) { s.arguments.row_lse = &s.row_lse_view; },
     {"row_lse: given", "backward"}},
    {"RowLogprobOfBackward",
     LL_LINEAR,
     B,
     [](auto& s) { s.arguments.row_logprob = &s.row_logprob_view; },
     {"row_logprob: given", "backward"}},
    {"BackwardWithoutStats",
     LL_LINEAR,
     B,
     [](auto& s) { s.arguments.stats = nullptr; },
     {"stats: null", "forward wrote"}},
    {"BackwardWithoutStatsOrLse",
     LL_LOGITS,
     B,
     [](auto& s) { s.arguments.stats = nullptr; },
     {"lse: null", "stats or lse"}},
    {"LseBesideStats", LL_LOGITS, B, [](auto& s) { s.arguments.lse = &s.lse_view; }, {"lse: given", "stats"}},
    {"LseOfLinear", LL_LINEAR, B, [](auto& s) { s.arguments.lse = &s.lse_view; }, {"lse: given", "kind logits"}},
    {"LseOfForward", LL_LOGITS, FB, [](auto& s) { s.arguments.lse = &s.lse_view; }, {"lse: given", "backward"}},
    {"GradRowLossOfForward",
     LL_LINEAR,
     F,
     [](auto& s) { s.arguments.grad_row_loss = &s.grad_row_view; },
     {"grad_row_loss: given", "forward computes no gradient"}},
    {"LossPerRow",
     LL_LINEAR,
     F,
     [](auto&) {},
     {"loss: given", "LL_PER_ROW", "row_loss"},
     [](auto& s) { s.options.reduction = LL_PER_ROW; }},

    // One tensor by itself.
    {"HiddenDtype", LL_LINEAR, FB, [](auto& s) { s.x_view.dtype = LL_BF16; }, {"hidden: dtype bf16", "must be f32"}},
    {"WeightDtype", LL_LINEAR, FB, [](auto& s) { s.w_view.dtype = LL_F64; }, {"weight: dtype f64", "must be f32"}},
    {"LogitsDtype", LL_LOGITS, F, [](auto& s) { s.z_view.dtype = LL_F16; }, {"logits: dtype f16", "must be f32"}},
    {"UnknownDtype", LL_LOGITS, F, [](auto& s) { s.z_view.dtype = 33; }, {"logits: dtype", "33", "must be f32"}},
    {"TargetsDtype", LL_LINEAR, F, [](auto& s) { s.y_view.dtype = LL_F32; }, {"targets: dtype f32", "i64 or i32"}},
    {"LossDtype", LL_LINEAR, F, [](auto& s) { s.loss_view.dtype = LL_BF16; }, {"loss: dtype bf16", "f32 or f64"}},
    {"RowLossDtype", LL_LINEAR, F, [](auto& s) { s.row_loss_view.dtype = LL_F64; }, {"row_loss: dtype f64", "f32"}},
    {"RowLseDtype", LL_LINEAR, F, [](auto& s) { s.row_lse_view.dtype = LL_F16; }, {"row_lse: dtype f16", "f32"}},
    {"RowLogprobDtype",
     LL_LINEAR,
     F,
     [](auto& s) { s.row_logprob_view.dtype = LL_I32; },
     {"row_logprob: dtype i32", "f32"}},
    {"StatsDtype", LL_LINEAR, F, [](auto& s) { s.stats_view.dtype = LL_BF16; }, {"stats: dtype bf16", "f32"}},
    {"LseDtype",
     LL_LOGITS,
     B,
     [](auto& s) {
       s.arguments.stats = nullptr;
       s.arguments.lse = &s.lse_view;
       s.lse_view.dtype = LL_F64;
     },
     {"lse: dtype f64", "f32"}},
    {"GradRowLossDtype",
     LL_LINEAR,
     FB,
     [](auto& s) {
       s.arguments.grad_row_loss = &s.grad_row_view;
       s.grad_row_view.dtype = LL_F64;
     },
     {"grad_row_loss: dtype f64", "f32"}},
    {"GradHiddenDtype",
     LL_LINEAR,
     FB,
     [](auto& s) { s.dx_view.dtype = LL_BF16; },
     {"grad_hidden: dtype bf16", "must be f32"}},
    {"GradWeightDtype",
     LL_LINEAR,
     FB,
     [](auto& s) { s.dw_view.dtype = LL_F16; },
     {"grad_weight: dtype f16", "must be f32"}},
    {"GradLogitsDtype",
     LL_LOGITS,
     FB,
     [](auto& s) { s.dz_view.dtype = LL_F64; },
     {"grad_logits: dtype f64", "must be f32"}},
    {"Device",
     LL_LINEAR,
     F,
     [](auto& s) { s.w_view.device_type = LL_DEVICE_CUDA; },
     {"weight: device_type 2", "LL_DEVICE_CPU"}},
    {"RankOne",
     LL_LINEAR,
     F,
     [](auto& s) { s.x_view = tensor(s.x.data(), LL_F32, {20}); },
     {"hidden: rank 1", "must be 2", "[4, 5]"}},
    {"RankThree",
     LL_LINEAR,
     F,
     [](auto& s) { s.w_view = tensor(s.w.data(), LL_F32, {1, 7, 5}); },
     {"weight: rank 3", "must be 2", "[7, 5]"}},
    {"RankOfTargets",
     LL_LINEAR,
     F,
     [](auto& s) { s.y_view = tensor(s.y.data(), LL_I64, {4, 1}); },
     {"targets: rank 2", "must be 1", "[4]"}},
    {"RankFive", LL_LINEAR, F, [](auto& s) { s.x_view.ndim = 5; }, {"hidden: ndim 5", "0 to 4"}},
    {"RankNegative", LL_LINEAR, F, [](auto& s) { s.x_view.ndim = -1; }, {"hidden: ndim -1", "0 to 4"}},
    {"HiddenRows", LL_LINEAR, F, [](auto& s) { s.x_view.shape[0] = 3; }, {"hidden: shape [3, 5]", "must be [4, 5]"}},
    {"HiddenColumns", LL_LINEAR, F, [](auto& s) { s.x_view.shape[1] = 4; }, {"hidden: shape [4, 4]", "must be [4, 5]"}},
    {"WeightRows", LL_LINEAR, F, [](auto& s) { s.w_view.shape[0] = 8; }, {"weight: shape [8, 5]", "must be [7, 5]"}},
    {"LogitsColumns", LL_LOGITS, F, [](auto& s) { s.z_view.shape[1] = 6; }, {"logits: shape [4, 6]", "must be [4, 7]"}},
    {"TargetsRows", LL_LINEAR, F, [](auto& s) { s.y_view.shape[0] = 5; }, {"targets: shape [5]", "must be [4]"}},
    {"NegativeShape",
     LL_LINEAR,
     F,
     [](auto& s) { s.x_view.shape[0] = -4; },
     {"hidden: shape [-4, 5]", "must be [4, 5]"}},
    {"StatsColumns",
     LL_LINEAR,
     F,
     [](auto& s) { s.stats_view.shape[1] = 3; },
     {"stats: shape [4, 3]", "must be [4, 4]"}},
    {"LossShape",
     LL_LINEAR,
     F,
     [](auto& s) { s.loss_view = tensor(&s.loss, LL_F64, {2}); },
     {"loss: shape [2]", "[] or [1]"}},
    {"NullData", LL_LINEAR, F, [](auto& s) { s.w_view.data = nullptr; }, {"weight: data is null", "[7, 5] f32"}},
    {"NullOutput",
     LL_LINEAR,
     FB,
     [](auto& s) { s.dx_view.data = nullptr; },
     {"grad_hidden: data is null", "[4, 5] f32"}},
    {"Misaligned",
     LL_LINEAR,
     F,
     [](auto& s) { s.x_view.data = reinterpret_cast<char*>(s.x.data()) + 1; },
     {"hidden: data at 0x", "aligned to its dtype's 4 bytes"}},
    {"OutputColumnStride",
     LL_LINEAR,
     FB,
     [](auto& s) { s.dx_view = tensor(s.dx.data(), LL_F32, {4, 5}, {1, 4}); },
     {"grad_hidden: column stride 4", "must be 1"}},
    {"OutputRowsOverlap",
     LL_LOGITS,
     FB,
     [](auto& s) { s.dz_view.stride[0] = 6; },
     {"grad_logits: row stride 6", "at least 7"}},
    {"OutputRowsOverlapBackwards",
     LL_LOGITS,
     FB,
     [](auto& s) { s.dz_view.stride[0] = -6; },
     {"grad_logits: row stride -6", "at least 7"}},
    {"OutputBroadcast", LL_LINEAR, F, [](auto& s) { s.row_loss_view.stride[0] = 0; }, {"row_loss: stride 0"}},
    {"StatsRowsOverlap",
     LL_LINEAR,
     F,
     [](auto& s) { s.stats_view.stride[0] = 3; },
     {"stats: row stride 3", "at least 4"}},
    {"StridesLeaveMemory",
     LL_LINEAR,
     F,
     [](auto& s) { s.x_view.stride[0] = kHuge; },
     {"hidden: strides", std::to_string(kHuge), "64 bits"}},
    {"GradWeightWithGaps",
     LL_LINEAR,
     FB,
     [](auto& s) {
       s.dw.assign(7 * 6, kSentinel);
       s.dw_view = tensor(s.dw.data(), LL_F32, {7, 5}, {6, 1});
     },
     {"grad_weight: row stride 6", "must be 5", "LL_GRAD_WEIGHT_STRIDED"}},

    // Outputs against everything else.
    {"OutputsOverlap",
     LL_LINEAR,
     FB,
     [](auto& s) { s.dx_view.data = s.dw.data() + 15; },
     {"grad_weight", "overlap", "grad_hidden", "must lie apart"}},
    {"OutputOverInput",
     LL_LINEAR,
     FB,
     [](auto& s) { s.dx_view.data = s.w.data(); },
     {"grad_hidden", "overlap", "weight"}},
    {"OutputOverTargets",
     LL_LINEAR,
     F,
     [](auto& s) { s.row_lse_view.data = s.y.data(); },
     {"row_lse", "overlap", "targets"}},
    {"RowOutputsOverlap",
     LL_LINEAR,
     F,
     [](auto& s) {
       s.row_lse.resize(7, kSentinel);
       s.row_lse_view.data = s.row_lse.data();
       s.row_logprob_view.data = s.row_lse.data() + 3;
     },
     {"row_logprob", "overlap", "row_lse"}},
    {"StatsOverLogits", LL_LOGITS, F, [](auto& s) { s.stats_view.data = s.z.data(); }, {"stats", "overlap", "logits"}},
    {"LossOverRowLoss",
     LL_LINEAR,
     F,
     [](auto& s) { s.loss_view = tensor(s.row_loss.data() + 2, LL_F32, {1}); },
     {"row_loss", "overlap", "loss"}},
    {"CountOverOutput",
     LL_LINEAR,
     FB,
     [](auto& s) { s.arguments.kept_rows = reinterpret_cast<std::int64_t*>(s.dw.data()); },
     {"kept_rows", "overlap", "grad_weight"}},
    {"CountsTogether",
     LL_LINEAR,
     F,
     [](auto& s) { s.arguments.bad_rows = &s.kept; },
     {"bad_rows", "overlap", "kept_rows"}},
    {"BackwardOverStats",
     LL_LINEAR,
     B,
     [](auto& s) {
       s.stats.assign(20, kSentinel);
       s.stats_view.data = s.stats.data();
       s.dx_view.data = s.stats.data();
     },
     {"grad_hidden", "overlap", "stats"}},
    {"NegativeStrideOverlap",
     LL_LINEAR,
     FB,
     // The last row of X read backwards lies where dX's first row is.
     [](auto& s) {
       s.dx.assign(40, kSentinel);
       s.x_view = tensor(s.dx.data() + 35, LL_F32, {4, 5}, {-5, 1});
       s.dx_view.data = s.dx.data() + 5;
     },
     {"grad_hidden", "overlap", "hidden"}},
    {"InterleavedOverlap",
     LL_LOGITS,
     FB,
     // Two column slices of one array that share a column.
     [](auto& s) {
       s.dz.assign(4 * 13, kSentinel);
       s.z_view = tensor(s.dz.data(), LL_F32, {4, 7}, {13, 1});
       s.dz_view = tensor(s.dz.data() + 6, LL_F32, {4, 7}, {13, 1});
     },
     {"grad_logits", "overlap", "logits"}},
    {"InPlaceWithoutTheFlag",
     LL_LOGITS,
     FB,
     [](auto& s) { s.dz_view.data = s.z.data(); },
     {"grad_logits", "overlap", "logits", "LL_IN_PLACE"}},
    {"InPlaceShifted",
     LL_LOGITS,
     FB,
     [](auto& s) {
       s.z.resize(29);
       s.z_view.data = s.z.data();
       s.dz_view.data = s.z.data() + 1;
     },
     {"grad_logits", "overlap", "logits", "LL_IN_PLACE"},
     [](auto& s) { s.problem.flags = LL_IN_PLACE; }},
    {"InPlaceOtherStride",
     LL_LOGITS,
     FB,
     [](auto& s) {
       s.z.resize(40);
       s.z_view.data = s.dz_view.data = s.z.data();
       s.dz_view.stride[0] = 8;
     },
     {"grad_logits", "overlap", "logits", "LL_IN_PLACE"},
     [](auto& s) { s.problem.flags = LL_IN_PLACE; }},
};

INSTANTIATE_TEST_SUITE_P(Each, RefusedArguments, testing::ValuesIn(kCases),
                         [](const auto& each) { return std::string(each.param.name); });

TEST(Run, NullPointersAndWrongFunctionAreRefused) {
  const ContextPointer context = make_context(LL_BACKEND_REFERENCE);
  SmallProblem s;
  const PlanPointer plan = s.plan(context.get());
  EXPECT_TRUE(refused(ll_forward_backward(nullptr, &s.arguments, nullptr, 0, nullptr), LL_ERROR_INVALID_ARGUMENT,
                      {"plan: null"}));
  EXPECT_TRUE(refused(ll_forward_backward(plan.get(), nullptr, nullptr, 0, nullptr), LL_ERROR_INVALID_ARGUMENT,
                      {"arguments: null", "ll_arguments"}));
  EXPECT_TRUE(refused(ll_forward(plan.get(), &s.arguments, nullptr, 0, nullptr), LL_ERROR_INVALID_ARGUMENT,
                      {"plan: made for ll_forward_backward", "not by ll_forward"}));
  EXPECT_TRUE(refused(ll_backward(plan.get(), &s.arguments, nullptr, 0, nullptr), LL_ERROR_INVALID_ARGUMENT,
                      {"plan: made for ll_forward_backward", "not by ll_backward"}));
  EXPECT_TRUE(refused(ll_forward_backward(plan.get(), &s.arguments, nullptr, 0, &s), LL_ERROR_INVALID_ARGUMENT,
                      {"stream: 0x", "must be null"}));
  EXPECT_TRUE(s.untouched());
}

TEST(Run, WorkspaceIsChecked) {
  const ContextPointer context = make_context(LL_BACKEND_CPU);
  SmallProblem s;
  const PlanPointer plan = s.plan(context.get());
  const std::size_t bytes = ll_plan_workspace_bytes(plan.get());
  ASSERT_GT(bytes, 0u);
  Scratch scratch(bytes + 64);
  auto* at = static_cast<char*>(scratch.data());
  EXPECT_TRUE(refused(s.run(plan.get(), nullptr, bytes), LL_ERROR_WORKSPACE,
                      {"workspace: null", std::to_string(bytes) + " bytes", "64"}));
  EXPECT_TRUE(refused(s.run(plan.get(), at, bytes - 1), LL_ERROR_WORKSPACE,
                      {"workspace_bytes: " + std::to_string(bytes - 1), "at least " + std::to_string(bytes)}));
  EXPECT_TRUE(refused(s.run(plan.get(), at + 32, bytes), LL_ERROR_WORKSPACE, {"workspace: at 0x", "64 bytes"}));
  EXPECT_TRUE(s.untouched());
  EXPECT_EQ(s.run(plan.get(), at + 64, bytes), LL_OK) << ll_last_error();

  // In the workspace's bytes.
  SmallProblem inside;
  inside.dx_view.data = at;
  EXPECT_TRUE(
      refused(inside.run(plan.get(), at, bytes), LL_ERROR_INVALID_ARGUMENT, {"workspace", "overlap", "grad_hidden"}));
  EXPECT_TRUE(inside.untouched());
}

// Column slices of one array that do not share a column are apart, whatever their spans.
TEST(Run, InterleavedViewsAreApart) {
  for (const ll_backend backend : {LL_BACKEND_REFERENCE, LL_BACKEND_CPU}) {
    const ContextPointer context = make_context(backend);
    SmallProblem s(LL_LOGITS);
    std::vector<float> both(4 * 14, 0.5f), rows(4 * 3, kSentinel);
    s.z_view = tensor(both.data(), LL_F32, {4, 7}, {14, 1});
    s.dz_view = tensor(both.data() + 7, LL_F32, {4, 7}, {14, 1});
    s.row_loss_view = tensor(rows.data(), LL_F32, {4}, {3});
    s.row_lse_view = tensor(rows.data() + 1, LL_F32, {4}, {3});
    s.row_logprob_view = tensor(rows.data() + 2, LL_F32, {4}, {3});
    EXPECT_EQ(s.run(context.get()), LL_OK) << ll_last_error();
    EXPECT_NEAR(rows[1], 0.5 + std::log(7.0), 1e-5);
  }
}

// R = 0: nothing is needed, not even memory; mean over nothing is on_empty's business.
TEST(Run, ZeroRows) {
  for (const ll_backend backend : {LL_BACKEND_REFERENCE, LL_BACKEND_CPU}) {
    const ContextPointer context = make_context(backend);
    SmallProblem s;
    s.problem.rows = 0;
    for (ll_tensor* each :
         {&s.x_view, &s.y_view, &s.dx_view, &s.row_loss_view, &s.row_lse_view, &s.row_logprob_view, &s.stats_view}) {
      each->shape[0] = 0;
      each->data = nullptr;
    }
    const PlanPointer plan = s.plan(context.get());
    ASSERT_NE(plan, nullptr);
    EXPECT_TRUE(refused(s.run(plan.get()), LL_ERROR_EMPTY, {}));
    EXPECT_TRUE(s.untouched());

    s.options.reduction = LL_SUM;
    const PlanPointer sum = s.plan(context.get());
    ASSERT_EQ(s.run(sum.get()), LL_OK) << ll_last_error();
    EXPECT_EQ(s.loss, 0.0);
    EXPECT_EQ(s.kept, 0);
    EXPECT_EQ(s.bad, 0);
    for (const float each : s.dw) EXPECT_EQ(each, 0.0f);
  }
}

}  // namespace
}  // namespace faces
