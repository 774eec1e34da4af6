// The C++20 face: 16-bit types, views from everything that looks like memory with a shape, one-line calls, plans,
// errors.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "logitless/logitless.hpp"
#include "small_problem.hpp"

namespace faces {
namespace {

using logitless::bfloat16;
using logitless::ConstTensor;
using logitless::DType;
using logitless::float16;
using logitless::Tensor;

// ---- numeric types ----------------------------------------------------------------------------------------------------

TEST(Bfloat16, RoundsToNearestEven) {
  EXPECT_EQ(bfloat16(1.0f).bits, 0x3f80);
  EXPECT_EQ(bfloat16(1.0f + 0x1p-8f).bits, 0x3f80) << "a tie goes to even";
  EXPECT_EQ(bfloat16(1.0f + 3 * 0x1p-8f).bits, 0x3f82) << "a tie goes to even";
  EXPECT_EQ(bfloat16(1.0f + 0x1.02p-8f).bits, 0x3f81);
  EXPECT_EQ(bfloat16(-0.0f).bits, 0x8000);
  EXPECT_EQ(bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80) << "beyond the largest finite: infinity";
  EXPECT_EQ(bfloat16(-std::numeric_limits<float>::infinity()).bits, 0xff80);
  EXPECT_EQ(bfloat16(std::numeric_limits<float>::denorm_min()).bits, 0x0000);
  for (const std::uint32_t payload : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
    EXPECT_TRUE(std::isnan(float{bfloat16(std::bit_cast<float>(payload))})) << payload;
  }
}

// Every pattern comes back as itself.
TEST(Bfloat16, RoundTrip) {
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const bfloat16 value = bfloat16::from_bits(static_cast<std::uint16_t>(i));
    if (std::isnan(float{value})) continue;
    ASSERT_EQ(bfloat16(float{value}).bits, i);
  }
}

TEST(Float16, RoundsToNearestEven) {
  EXPECT_EQ(float16(1.0f).bits, 0x3c00);
  EXPECT_EQ(float16(1.0f + 0x1p-11f).bits, 0x3c00) << "a tie goes to even";
  EXPECT_EQ(float16(1.0f + 3 * 0x1p-11f).bits, 0x3c02) << "a tie goes to even";
  EXPECT_EQ(float16(65504.0f).bits, 0x7bff);
  EXPECT_EQ(float16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(float16(65520.0f).bits, 0x7c00) << "the tie with 2^16 goes to infinity";
  EXPECT_EQ(float16(-1e30f).bits, 0xfc00);
  EXPECT_EQ(float16(0x1p-14f).bits, 0x0400) << "the least normal number";
  EXPECT_EQ(float16(0x1p-24f).bits, 0x0001) << "the least subnormal number";
  EXPECT_EQ(float16(0x1p-25f).bits, 0x0000) << "a tie goes to even";
  EXPECT_EQ(float16(0x1.8p-24f).bits, 0x0002) << "a tie goes to even";
  EXPECT_EQ(float16(0x1.004p-25f).bits, 0x0001);
  EXPECT_EQ(float16(0x1.ffcp-15f).bits, 0x0400) << "a tie that rounds up into the normal numbers";
  EXPECT_EQ(float16(-0x1p-126f).bits, 0x8000);
  EXPECT_EQ(float16(std::numeric_limits<float>::denorm_min()).bits, 0x0000);
  for (const std::uint32_t payload : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
    EXPECT_TRUE(std::isnan(float{float16(std::bit_cast<float>(payload))})) << payload;
  }
}

TEST(Float16, RoundTrip) {
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const float16 value = float16::from_bits(static_cast<std::uint16_t>(i));
    if (std::isnan(float{value})) continue;
    ASSERT_EQ(float16(float{value}).bits, i);
  }
}

// The number halfway between two neighbours goes to the even one, and its fp32 neighbours to the nearer one.
TEST(Float16, EveryTie) {
  for (std::uint32_t i = 0; i < 0x7bff; ++i) {
    const float low = float16::from_bits(static_cast<std::uint16_t>(i));
    const float high = float16::from_bits(static_cast<std::uint16_t>(i + 1));
    const float middle = (low + high) / 2;  // exact: one bit more than fp16 has
    ASSERT_EQ(float16(middle).bits, i % 2 == 0 ? i : i + 1);
    ASSERT_EQ(float16(std::nextafter(middle, low)).bits, i);
    ASSERT_EQ(float16(std::nextafter(middle, high)).bits, i + 1);
  }
}

// ---- views --------------------------------------------------------------------------------------------------------------

struct Mdspan {  // what std::mdspan has, and no more
  float* at;
  std::array<std::size_t, 2> extents, strides;
  float* data_handle() const { return at; }
  static constexpr std::size_t rank() { return 2; }
  std::size_t extent(std::size_t i) const { return extents[i]; }
  std::size_t stride(std::size_t i) const { return strides[i]; }
};

struct ConstMdspan {
  const float* data_handle() const { return nullptr; }
  std::size_t rank() const { return 7; }
  int extent(std::size_t) const { return 1; }
  int stride(std::size_t) const { return 1; }
};

// What must not compile.
static_assert(!std::is_constructible_v<Tensor, const float*, logitless::Shape>, "an output of const data");
static_assert(!std::is_constructible_v<Tensor, const std::vector<float>&>, "an output of const data");
static_assert(!std::is_constructible_v<Tensor, std::span<const float>>, "an output of const data");
static_assert(!std::is_constructible_v<Tensor, ConstMdspan&>, "an output of const data");
static_assert(!std::is_constructible_v<Tensor, ConstTensor>, "an input taken for an output");
static_assert(!std::is_constructible_v<ConstTensor, std::vector<std::uint16_t>&>, "16 bits without a meaning");
static_assert(!std::is_constructible_v<ConstTensor, std::vector<std::string>&>, "not numbers");
static_assert(!std::is_copy_constructible_v<logitless::Context> && std::is_move_constructible_v<logitless::Context>);
static_assert(!std::is_copy_constructible_v<logitless::Plan> && std::is_move_constructible_v<logitless::Plan>);
static_assert(!std::is_copy_constructible_v<logitless::Workspace> &&
              std::is_move_constructible_v<logitless::Workspace>);
// And what must.
static_assert(std::is_convertible_v<Tensor, ConstTensor>);
static_assert(std::is_convertible_v<std::vector<float>&, Tensor>);
static_assert(std::is_convertible_v<const std::vector<std::int64_t>&, ConstTensor>);
static_assert(std::is_convertible_v<std::span<const std::int32_t>, ConstTensor>);
static_assert(std::is_convertible_v<long long (&)[3], Tensor>);
static_assert(std::is_trivially_copyable_v<bfloat16> && sizeof(bfloat16) == 2);
static_assert(std::is_trivially_copyable_v<float16> && sizeof(float16) == 2);

TEST(Views, FromEverything) {
  std::array<float, 12> memory{};
  const int rows = 3;
  const std::size_t columns = 4;
  const ConstTensor dense(memory.data(), {rows, columns});
  EXPECT_EQ(dense.dtype(), DType::f32);
  EXPECT_EQ(dense.rank(), 2);
  EXPECT_EQ(dense.extent(0), 3);
  EXPECT_EQ(dense.stride(0), 4);
  EXPECT_EQ(dense.stride(1), 1);
  EXPECT_EQ(dense.data(), memory.data());

  const Tensor strided(memory.data(), {3, 2}, {4, 2});
  EXPECT_EQ(strided.get()->stride[0], 4);
  EXPECT_EQ(strided.get()->stride[1], 2);

  const Tensor list = memory;
  EXPECT_EQ(list.rank(), 1);
  EXPECT_EQ(list.extent(0), 12);

  Mdspan mdspan{memory.data(), {2, 3}, {6, 2}};
  const Tensor from_mdspan = mdspan;
  EXPECT_EQ(from_mdspan.rank(), 2);
  EXPECT_EQ(from_mdspan.extent(1), 3);
  EXPECT_EQ(from_mdspan.stride(0), 6);
  EXPECT_EQ(from_mdspan.data(), memory.data());

  std::vector<std::uint16_t> raw(6);
  const Tensor halves(raw.data(), DType::bf16, {2, 3});
  EXPECT_EQ(halves.dtype(), DType::bf16);
  EXPECT_EQ(halves.stride(0), 3);
  EXPECT_EQ(ConstTensor(std::vector<float16>(2)).dtype(), DType::f16);
  EXPECT_EQ(ConstTensor(std::vector<double>(2)).dtype(), DType::f64);
  EXPECT_EQ(ConstTensor(std::vector<std::int32_t>(2)).dtype(), DType::i32);
  EXPECT_EQ(ConstTensor(std::vector<long>(2)).dtype(), DType::i64);

  EXPECT_FALSE(Tensor());
  EXPECT_EQ(Tensor().get(), nullptr);
  EXPECT_THROW(ConstTensor(memory.data(), {3, 4}, {4}), logitless::Error);
  EXPECT_THROW(ConstTensor(ConstMdspan{}), logitless::Error);
}

TEST(Names, OfDtypes) {
  EXPECT_STREQ(logitless::name_of(DType::bf16), "bf16");
  EXPECT_EQ(logitless::size_of(DType::bf16), 2u);
  EXPECT_EQ(logitless::size_of(DType::none), 0u);
  EXPECT_STREQ(logitless::version(), ll_version());
}

// ---- calls ----------------------------------------------------------------------------------------------------------------

TEST(OneLine, LinearCrossEntropy) {
  SmallProblem s;
  const auto R = SmallProblem::R, H = SmallProblem::H, V = SmallProblem::V;
  std::vector<float>&X = s.x, &W = s.w, &dX = s.dx, &dW = s.dw;
  const auto result = logitless::linear_cross_entropy({X.data(), {R, H}}, {W.data(), {V, H}}, s.y,
                                                      {.label_smoothing = 0.1,
                                                       .grad_hidden = {dX.data(), {R, H}},
                                                       .grad_weight = {dW.data(), {V, H}},
                                                       .row_loss = s.row_loss,
                                                       .memory_budget = 64 << 20});
  const Expected want(s.exact_logits(), s.y, V, 0.1, -100);
  EXPECT_NEAR(result.loss, want.loss, tolerance(want.loss));
  EXPECT_EQ(result.kept, 3);
  EXPECT_EQ(result.bad, 0);
  expect_near(s.row_loss, want.row_loss, "row_loss");
  EXPECT_NE(dX[0], kSentinel);
  EXPECT_NE(dW[0], kSentinel);

  // Once more into the same dW: twice the gradient. dW has gaps now, which the call notices.
  std::vector<float> wide(V * 6, kSentinel);
  for (std::size_t j = 0; j < V; ++j) std::copy_n(dW.data() + j * H, H, wide.data() + j * 6);
  logitless::linear_cross_entropy(
      {X.data(), {R, H}}, {W.data(), {V, H}}, s.y,
      {.label_smoothing = 0.1, .grad_weight = {wide.data(), {V, H}, {6, 1}}, .accumulate_grad_weight = true});
  for (std::size_t j = 0; j < V; ++j) {
    for (std::size_t k = 0; k < H; ++k) EXPECT_NEAR(wide[j * 6 + k], 2 * dW[j * H + k], tolerance(1.0));
    EXPECT_EQ(wide[j * 6 + 5], kSentinel);
  }
}

TEST(OneLine, ForwardOnlyAndReductions) {
  SmallProblem s;
  const ConstTensor x(s.x.data(), {4, 5}), w(s.w.data(), {7, 5});
  const auto mean = logitless::linear_cross_entropy(x, w, s.y);
  const auto sum = logitless::linear_cross_entropy(x, w, s.y, {.reduction = logitless::Reduction::sum});
  EXPECT_NEAR(sum.loss, 3 * mean.loss, 3 * tolerance(mean.loss));
  const auto by_eight = logitless::linear_cross_entropy(x, w, s.y, {.normalizer = 8.0});
  EXPECT_NEAR(by_eight.loss, sum.loss / 8.0, tolerance(mean.loss));
  const auto none =
      logitless::linear_cross_entropy(x, w, s.y, {.reduction = logitless::Reduction::none, .row_loss = s.row_loss});
  EXPECT_EQ(none.loss, 0.0);
  EXPECT_NE(s.row_loss[0], kSentinel);
  const auto all_ignored = logitless::linear_cross_entropy(x, w, std::vector<std::int32_t>(4, -1),
                                                           {.ignore_index = -1, .on_empty = logitless::OnEmpty::zero});
  EXPECT_EQ(all_ignored.loss, 0.0);
  EXPECT_EQ(all_ignored.kept, 0);
}

TEST(OneLine, CrossEntropyApartAndInPlace) {
  SmallProblem s(LL_LOGITS);
  const auto apart =
      logitless::cross_entropy({s.z.data(), {4, 7}}, s.y, {.grad_logits = {s.dz.data(), {4, 7}}, .row_lse = s.row_lse});
  const Expected want(s.exact_logits(), s.y, 7, 0.0, -100);
  EXPECT_NEAR(apart.loss, want.loss, tolerance(want.loss));
  expect_near(s.dz, want.d, "grad_logits");
  Mdspan z{s.z.data(), {4, 7}, {7, 1}};
  logitless::Context reference({.backend = logitless::Backend::reference});
  const auto in_place = logitless::cross_entropy(reference, z, s.y, {.grad_logits = z});
  EXPECT_NEAR(in_place.loss, apart.loss, tolerance(want.loss));
  expect_near(s.z, want.d, "grad_logits in place");
}

TEST(OneLine, Bfloat16Operands) {
  SmallProblem s;
  std::vector<bfloat16> x, w, dx(20);
  for (const float each : s.x) x.push_back(bfloat16(each));  // the small problem's numbers are exact in bf16
  for (const float each : s.w) w.push_back(bfloat16(each));
  const auto result = logitless::linear_cross_entropy({x.data(), {4, 5}}, {w.data(), {7, 5}}, s.y,
                                                      {.grad_hidden = {dx.data(), {4, 5}}});
  const Expected want(s.exact_logits(), s.y, 7, 0.0, -100);
  EXPECT_NEAR(result.loss, want.loss, tolerance(want.loss));
}

// What the call is given says which options are meant; the same loss from logits that are transformed beforehand.
TEST(OneLine, OptionsFollowFromWhatIsGiven) {
  SmallProblem s;
  const ConstTensor x(s.x.data(), {4, 5}), w(s.w.data(), {7, 5});
  std::vector<float> bias = {0.5f, -0.25f, 0.0f, 1.0f, -1.0f, 0.25f, 0.75f}, db(7, kSentinel), entropy(4), z2(28);
  std::vector<std::int64_t> argmax(4), targets(4);
  std::vector<std::uint8_t> correct(4);
  for (std::size_t n = 0; n < 28; ++n) z2[n] = 2.0f * (static_cast<float>(s.exact_logits()[n]) + bias[n % 7]);
  const auto plain = logitless::cross_entropy(
      {z2.data(), {4, 7}}, s.y,
      {.grad_logits = {s.dz.data(), {4, 7}}, .row_entropy = entropy, .row_argmax = argmax, .row_correct = correct});
  const std::vector<float> entropy_of_logits = entropy;
  const std::vector<std::int64_t> argmax_of_logits = argmax;
  entropy.assign(4, kSentinel);
  const auto result = logitless::linear_cross_entropy(
      x, w, s.y, {.logit_scale = 2.0, .bias = bias, .grad_bias = db, .row_entropy = entropy, .row_argmax = argmax});
  EXPECT_NEAR(result.loss, plain.loss, tolerance(plain.loss));
  EXPECT_EQ(result.correct, plain.correct);
  EXPECT_EQ(argmax, argmax_of_logits);
  std::vector<double> want_db(7, 0.0);
  for (std::size_t n = 0; n < 28; ++n) want_db[n % 7] += 2.0 * static_cast<double>(s.dz[n]);
  expect_near(db, want_db, "grad_bias");
  expect_near(entropy, std::vector<double>(entropy_of_logits.begin(), entropy_of_logits.end()), "row_entropy");

  // Probabilities of 1 for the targets are the targets.
  std::vector<float> soft(28, 0.0f);
  for (std::size_t i = 0; i < 4; ++i) {
    if (s.y[i] != -100) soft[7 * i + static_cast<std::size_t>(s.y[i])] = 1.0f;
  }
  const auto softly = logitless::linear_cross_entropy(
      x, w, s.y, {.logit_scale = 2.0, .bias = bias, .soft_targets = {soft.data(), {4, 7}}});
  EXPECT_NEAR(softly.loss, plain.loss, tolerance(plain.loss));
  EXPECT_EQ(softly.correct, 0) << "rows have no class of their own";

  logitless::next_token_targets(std::vector<std::int64_t>{1, 2, 3, 4}, targets,
                                {.document_ids = std::vector<std::int64_t>{0, 0, 5, 5}, .ignore_index = -7});
  EXPECT_EQ(targets, (std::vector<std::int64_t>{2, -7, 4, -7}));
  std::vector<std::int32_t> order(3);
  logitless::class_order(std::vector<float>{0.25f, 0.5f, 0.25f}, order);
  EXPECT_EQ(order, (std::vector<std::int32_t>{1, 0, 2}));
  EXPECT_THROW(logitless::class_order(std::vector<float>{0.25f, NAN, 0.25f}, order), logitless::Error);
}

TEST(OneLine, FilterReports) {
  SmallProblem s;
  const ConstTensor x(s.x.data(), {4, 5}), w(s.w.data(), {7, 5});
  const auto result =
      logitless::linear_cross_entropy(x, w, s.y, {.filter = 0.25, .grad_hidden = {s.dx.data(), {4, 5}}});
  EXPECT_GT(result.filter_kept, 0.0);
  EXPECT_LT(result.filter_kept, 1.0);
  EXPECT_GT(result.filter_variance, 0.0);
  EXPECT_EQ(logitless::linear_cross_entropy(x, w, s.y, {.grad_hidden = {s.dx.data(), {4, 5}}}).filter_kept, 1.0);
}

// Two halves of a vocabulary, by way of their statistics.
TEST(Plans, PartsOfAVocabulary) {
  logitless::Context context;
  logitless::Workspace workspace;
  SmallProblem s;
  std::vector<float> halves[2], merged(32), dx(20), dw(35);
  std::vector<double> dx_sum(20, 0.0);
  const std::int64_t first[] = {0, 3}, columns[] = {3, 4};
  const auto half = [&](int part, logitless::Call call) {
    logitless::Arguments arguments{.hidden = {s.x.data(), {4, 5}},
                                   .weight = {s.w.data() + first[part] * 5, {columns[part], std::int64_t{5}}},
                                   .targets = s.y};
    if (call == logitless::Call::backward) {
      arguments.grad_hidden = {dx.data(), {4, 5}};
      arguments.grad_weight = {dw.data() + first[part] * 5, {columns[part], std::int64_t{5}}};
    }
    logitless::Problem problem = logitless::problem_of(arguments, call);
    problem.first_column = first[part];
    problem.total_vocab = 7;
    logitless::Plan plan(context, problem);
    EXPECT_EQ(plan.statistics(), 8);
    if (call == logitless::Call::forward) {
      halves[part].resize(32);
      arguments.stats = {halves[part].data(), {4, 8}};
      plan.forward(arguments, workspace);
    } else {
      arguments.stats = {merged.data(), {4, 8}};
      plan.backward(arguments, workspace);
    }
  };
  for (const int part : {0, 1}) half(part, logitless::Call::forward);
  const ConstTensor parts[] = {{halves[0].data(), {4, 8}}, {halves[1].data(), {4, 8}}};
  logitless::merge_statistics(parts, {merged.data(), {4, 8}});
  for (const int part : {0, 1}) {
    half(part, logitless::Call::backward);
    for (std::size_t n = 0; n < 20; ++n) dx_sum[n] += static_cast<double>(dx[n]);
  }
  logitless::linear_cross_entropy({s.x.data(), {4, 5}}, {s.w.data(), {7, 5}}, s.y,
                                  {.grad_hidden = {s.dx.data(), {4, 5}}, .grad_weight = {s.dw.data(), {7, 5}}});
  expect_near(s.dx, dx_sum, "grad_hidden");
  expect_near(dw, std::vector<double>(s.dw.begin(), s.dw.end()), "grad_weight");
}

TEST(Plans, ThreeStepsWithOwnWorkspace) {
  logitless::Context context({.threads = 2, .cpu_target = "scalar"});
  EXPECT_NE(context.describe().find("chosen: asked for by cpu_target"), std::string::npos);
  EXPECT_EQ(context.describe(logitless::Format::json).front(), '{');

  SmallProblem s;
  logitless::Arguments arguments{.hidden = {s.x.data(), {4, 5}},
                                 .weight = {s.w.data(), {7, 5}},
                                 .targets = s.y,
                                 .stats = {s.stats.data(), {4, 4}}};
  logitless::Plan forward(context, logitless::problem_of(arguments, logitless::Call::forward));
  logitless::Workspace workspace;
  const auto first = forward.forward(arguments, workspace);
  const Expected want(s.exact_logits(), s.y, 7, 0.0, -100);
  EXPECT_NEAR(first.loss, want.loss, tolerance(want.loss));

  arguments.grad_hidden = {s.dx.data(), {4, 5}};
  arguments.grad_weight = {s.dw.data(), {7, 5}};
  const auto problem = logitless::problem_of(arguments, logitless::Call::backward);
  EXPECT_EQ(problem.grad_weight_dtype, DType::f32);
  EXPECT_FALSE(problem.grad_weight_strided);
  logitless::Plan backward(context, problem);
  EXPECT_NE(backward.describe(logitless::Format::json).find("\"backward\""), std::string::npos);
  workspace.reserve(backward.workspace_bytes());
  const auto second = backward.backward(arguments, workspace.data(), workspace.size());
  EXPECT_EQ(second.kept, 3);
  EXPECT_EQ(second.loss, 0.0);
  logitless::Plan moved = std::move(backward);
  const std::vector<float> dx = s.dx;
  moved.backward(arguments, workspace);
  EXPECT_EQ(s.dx, dx) << "a backward done twice gives the same answer";
}

// enqueue is forward, forward_backward and backward in one; on the host it returns when all is there.
TEST(Plans, EnqueueIsTheCall) {
  logitless::Context context({.threads = 2});
  SmallProblem a, b, c;
  const auto arguments_of = [](SmallProblem& s) {
    return logitless::Arguments{.hidden = {s.x.data(), {4, 5}},
                                .weight = {s.w.data(), {7, 5}},
                                .targets = s.y,
                                .grad_hidden = {s.dx.data(), {4, 5}},
                                .grad_weight = {s.dw.data(), {7, 5}},
                                .stats = {s.stats.data(), {4, 4}}};
  };
  logitless::Arguments of_a = arguments_of(a), of_b = arguments_of(b), of_c = arguments_of(c);
  logitless::Plan plan(context, logitless::problem_of(of_a, logitless::Call::forward_backward));
  logitless::Workspace workspace(plan.workspace_bytes());
  const logitless::Result want = plan.forward_backward(of_a, workspace);
  logitless::Result got;
  plan.enqueue(of_b, {.loss = {&got.loss, {1}}, .kept = &got.kept, .bad = &got.bad}, workspace.data(), workspace.size(),
               nullptr);
  context.check_status();
  EXPECT_EQ(got.loss, want.loss);
  EXPECT_EQ(got.kept, want.kept);
  EXPECT_EQ(got.bad, want.bad);
  EXPECT_EQ(b.dx, a.dx);
  EXPECT_EQ(b.dw, a.dw);

  // An upstream gradient in memory, before and afterwards: exact for a power of two.
  const float factor = -0.5f;
  of_b.grad_loss_factor = ConstTensor(&factor, {1});
  plan.enqueue(of_b, {}, workspace.data(), workspace.size(), nullptr);
  logitless::scale(context, of_b.grad_loss_factor, of_a.grad_weight);
  EXPECT_EQ(b.dw, a.dw);

  // backward from the statistics; its saved ones are b's.
  of_c.stats = {b.stats.data(), {4, 4}};
  of_c.grad_loss = -0.5;
  logitless::Plan backward(context, logitless::problem_of(of_c, logitless::Call::backward));
  logitless::Workspace more(backward.workspace_bytes());
  backward.enqueue(of_c, {}, more.data(), more.size(), nullptr);
  expect_near(c.dx, std::vector<double>(b.dx.begin(), b.dx.end()), "grad_hidden");
}

// What lies on a device is no CPU context's, and what it computes there is not a Result's.
TEST(Plans, DevicesHaveTheirOwnMemory) {
  logitless::Context context;
  EXPECT_EQ(context.backend(), logitless::Backend::cpu);
  SmallProblem s;
  logitless::Arguments arguments{.hidden = {s.x.data(), {4, 5}}, .weight = {s.w.data(), {7, 5}}, .targets = s.y};
  const Tensor there = Tensor(s.dw.data(), {7, 5}).on_device(1);
  EXPECT_FALSE(there.on_host());
  EXPECT_EQ(there.get()->device_id, 1);
  EXPECT_EQ(there.data(), s.dw.data());
  EXPECT_TRUE(arguments.weight.on_host());
  arguments.hidden = arguments.hidden.on_device(0);
  try {
    logitless::Plan plan(context, logitless::problem_of(arguments, logitless::Call::forward));
    logitless::Workspace workspace;
    plan.forward(arguments, workspace);
    FAIL() << "memory of a device was followed on the host";
  } catch (const logitless::Error& error) {
    EXPECT_EQ(error.status(), LL_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(std::string(error.what()).find("hidden: device_type 2"), std::string::npos) << error.what();
  }
  try {
    logitless::Context cuda({.backend = logitless::Backend::cuda});
    arguments.hidden = {s.x.data(), {4, 5}};
    logitless::Plan plan(cuda, logitless::problem_of(arguments, logitless::Call::forward));
    logitless::Workspace workspace;
    plan.forward(arguments, workspace);
    FAIL() << "a Result of a device's call";
  } catch (const logitless::Error& error) {  // of the machine, or of the call
    EXPECT_EQ(error.status(), LL_ERROR_UNSUPPORTED);
    EXPECT_EQ(std::string(error.what()).find("backend: "), 0u) << error.what();
  }
}

TEST(Workspaces, GrowAndAreAligned) {
  logitless::Workspace workspace(10);
  EXPECT_EQ(workspace.size(), 10u);
  workspace.reserve(5);
  EXPECT_EQ(workspace.size(), 10u);
  workspace.reserve(1000);
  EXPECT_EQ(workspace.size(), 1000u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(workspace.data()) % 64, 0u);
  EXPECT_EQ(logitless::Workspace().data(), nullptr);
}

TEST(Errors, CarryStatusAndText) {
  SmallProblem s;
  const ConstTensor x(s.x.data(), {4, 5}), w(s.w.data(), {7, 5});
  const auto failure = [](auto&& call) -> std::pair<ll_status, std::string> {
    try {
      call();
    } catch (const logitless::Error& error) {
      EXPECT_STREQ(error.status_name(), ll_status_name(error.status()));
      return {error.status(), error.what()};
    }
    return {LL_OK, "nothing was thrown"};
  };
  auto [status, text] = failure([&] { logitless::linear_cross_entropy(x, w, s.y, {.label_smoothing = 2.0}); });
  EXPECT_EQ(status, LL_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(text.find("label_smoothing: 2"), std::string::npos) << text;
  std::tie(status, text) = failure([&] { logitless::linear_cross_entropy(x, {s.w.data(), {35}}, s.y); });
  EXPECT_EQ(status, LL_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(text.find("weight: rank 1"), std::string::npos) << text;
  std::tie(status, text) = failure([&] { logitless::cross_entropy({}, s.y); });
  EXPECT_NE(text.find("logits: not given"), std::string::npos) << text;
  std::tie(status, text) = failure([&] { logitless::linear_cross_entropy(x, {s.w.data(), {5, 7}}, s.y); });
  EXPECT_NE(text.find("weight: shape [5, 7]; must be [5, 5]"), std::string::npos) << text;
  std::tie(status, text) = failure([&] { logitless::linear_cross_entropy(x, w, s.y, {.memory_budget = 1}); });
  EXPECT_EQ(status, LL_ERROR_BUDGET);
  std::tie(status, text) = failure([&] { logitless::Context bad({.device = 3}); });
  EXPECT_EQ(status, LL_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(text.find("device: 3"), std::string::npos) << text;
  s.y[0] = 700;
  std::tie(status, text) = failure([&] { logitless::linear_cross_entropy(x, w, s.y); });
  EXPECT_EQ(status, LL_ERROR_TARGET_RANGE);
  EXPECT_NE(text.find("700"), std::string::npos) << text;
}

}  // namespace
}  // namespace faces
