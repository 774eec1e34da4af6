// What comes out of the C ABI on both backends: values against the definition, scalars in either dtype, statuses of the
// data (targets, emptiness, bad logits), executors, several threads on one context, and life after fork.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "small_problem.hpp"

namespace faces {
namespace {

class Results : public testing::TestWithParam<ll_backend> {
 protected:
  ContextPointer context_ = make_context(GetParam());
};

INSTANTIATE_TEST_SUITE_P(Backend, Results, testing::Values(LL_BACKEND_REFERENCE, LL_BACKEND_CPU),
                         [](const auto& each) { return each.param == LL_BACKEND_CPU ? "cpu" : "reference"; });

std::vector<double> product(const std::vector<double>& d, const std::vector<float>& w) {
  constexpr auto R = SmallProblem::R, H = SmallProblem::H, V = SmallProblem::V;
  std::vector<double> dx(R * H, 0.0);
  for (std::size_t i = 0; i < R; ++i) {
    for (std::size_t j = 0; j < V; ++j) {
      for (std::size_t k = 0; k < H; ++k) dx[i * H + k] += d[i * V + j] * double{w[j * H + k]};
    }
  }
  return dx;
}

std::vector<double> transposed_product(const std::vector<double>& d, const std::vector<float>& x) {
  constexpr auto R = SmallProblem::R, H = SmallProblem::H, V = SmallProblem::V;
  std::vector<double> dw(V * H, 0.0);
  for (std::size_t i = 0; i < R; ++i) {
    for (std::size_t j = 0; j < V; ++j) {
      for (std::size_t k = 0; k < H; ++k) dw[j * H + k] += d[i * V + j] * double{x[i * H + k]};
    }
  }
  return dw;
}

TEST_P(Results, LinearForwardBackward) {
  SmallProblem s;
  s.options.label_smoothing = 0.25;
  ASSERT_EQ(s.run(context_.get()), LL_OK) << ll_last_error();
  const Expected want(s.exact_logits(), s.y, SmallProblem::V, 0.25, -100);
  EXPECT_NEAR(s.loss, want.loss, tolerance(want.loss));
  expect_near(s.row_loss, want.row_loss, "row_loss");
  expect_near(s.row_lse, want.row_lse, "row_lse");
  expect_near(s.dx, product(want.d, s.w), "grad_hidden");
  expect_near(s.dw, transposed_product(want.d, s.x), "grad_weight");
  EXPECT_EQ(s.kept, 3);
  EXPECT_EQ(s.bad, 0);
}

// others(alpha) puts alpha/(V-1) on the other classes; written out here as the uniform alpha V/(V-1).
TEST_P(Results, OthersSmoothing) {
  SmallProblem s;
  s.options.label_smoothing = 0.25;
  s.options.smoothing = LL_SMOOTHING_OTHERS;
  ASSERT_EQ(s.run(context_.get()), LL_OK) << ll_last_error();
  const Expected want(s.exact_logits(), s.y, SmallProblem::V, 0.25 * 7.0 / 6.0, -100);
  EXPECT_NEAR(s.loss, want.loss, tolerance(want.loss));
  expect_near(s.dx, product(want.d, s.w), "grad_hidden");
}

TEST_P(Results, ForwardThenBackwardIsForwardBackward) {
  for (const ll_kind kind : {LL_LINEAR, LL_LOGITS}) {
    SmallProblem forward(kind, LL_FORWARD), backward(kind, LL_BACKWARD), both(kind, LL_FORWARD_BACKWARD);
    ASSERT_EQ(forward.run(context_.get()), LL_OK) << ll_last_error();
    ASSERT_EQ(both.run(context_.get()), LL_OK) << ll_last_error();
    EXPECT_NEAR(forward.loss, both.loss, tolerance(both.loss));
    backward.stats_view.data = forward.stats.data();
    ASSERT_EQ(backward.run(context_.get()), LL_OK) << ll_last_error();
    const auto as_double = [](const std::vector<float>& v) { return std::vector<double>(v.begin(), v.end()); };
    if (kind == LL_LINEAR) {
      expect_near(backward.dx, as_double(both.dx), "grad_hidden");
      expect_near(backward.dw, as_double(both.dw), "grad_weight");
    } else {
      expect_near(backward.dz, as_double(both.dz), "grad_logits");
      // From lse alone.
      SmallProblem lse(LL_LOGITS, LL_BACKWARD);
      lse.lse = forward.row_lse;
      lse.lse_view.data = lse.lse.data();
      lse.arguments.stats = nullptr;
      lse.arguments.lse = &lse.lse_view;
      ASSERT_EQ(lse.run(context_.get()), LL_OK) << ll_last_error();
      expect_near(lse.dz, as_double(both.dz), "grad_logits from lse");
    }
    EXPECT_EQ(backward.kept, 3);
  }
}

TEST_P(Results, LogitsInPlace) {
  SmallProblem apart(LL_LOGITS), in_place(LL_LOGITS);
  ASSERT_EQ(apart.run(context_.get()), LL_OK) << ll_last_error();
  const Expected want(apart.exact_logits(), apart.y, SmallProblem::V, 0.0, -100);
  expect_near(apart.dz, want.d, "grad_logits");
  in_place.problem.flags = LL_IN_PLACE;
  in_place.dz_view.data = in_place.z.data();
  ASSERT_EQ(in_place.run(context_.get()), LL_OK) << ll_last_error();
  EXPECT_EQ(in_place.loss, apart.loss);
  EXPECT_EQ(in_place.z, apart.dz);
}

TEST_P(Results, LossInBothDtypesAndNotAsked) {
  SmallProblem wide, narrow, none;
  float loss = kSentinel;
  ASSERT_EQ(wide.run(context_.get()), LL_OK);
  narrow.loss_view = tensor(&loss, LL_F32, {1});
  ASSERT_EQ(narrow.run(context_.get()), LL_OK) << ll_last_error();
  EXPECT_EQ(loss, static_cast<float>(wide.loss));
  none.arguments.loss = none.arguments.row_loss = none.arguments.row_lse = none.arguments.row_logprob =
      none.arguments.stats = nullptr;
  none.arguments.kept_rows = none.arguments.bad_rows = nullptr;
  ASSERT_EQ(none.run(context_.get()), LL_OK) << ll_last_error();
  EXPECT_EQ(none.dx, wide.dx);
  EXPECT_EQ(none.loss, static_cast<double>(kSentinel));
  for (const float each : none.row_loss) EXPECT_EQ(each, kSentinel);
}

TEST_P(Results, StridesOfEverything) {
  SmallProblem plain, strided;
  ASSERT_EQ(plain.run(context_.get()), LL_OK);
  // X column-major, W reversed rows with gaps, targets and outputs in every other place.
  std::vector<float> x(20), w(7 * 8), dx(4 * 9, kSentinel), dw(7 * 6, kSentinel), row_loss(8, kSentinel);
  std::vector<std::int64_t> y(8, 99);
  for (std::size_t i = 0; i < 4; ++i) {
    y[2 * i] = plain.y[i];
    for (std::size_t k = 0; k < 5; ++k) x[k * 4 + i] = plain.x[i * 5 + k];
  }
  for (std::size_t j = 0; j < 7; ++j) {
    for (std::size_t k = 0; k < 5; ++k) w[(6 - j) * 8 + k] = plain.w[j * 5 + k];
  }
  strided.problem.flags = LL_GRAD_WEIGHT_STRIDED;
  strided.x_view = tensor(x.data(), LL_F32, {4, 5}, {1, 4});
  strided.w_view = tensor(w.data() + 48, LL_F32, {7, 5}, {-8, 1});
  strided.y_view = tensor(y.data(), LL_I64, {4}, {2});
  strided.dx_view = tensor(dx.data(), LL_F32, {4, 5}, {9, 1});
  strided.dw_view = tensor(dw.data(), LL_F32, {7, 5}, {6, 1});
  strided.row_loss_view = tensor(row_loss.data() + 6, LL_F32, {4}, {-2});
  ASSERT_EQ(strided.run(context_.get()), LL_OK) << ll_last_error();
  EXPECT_EQ(strided.loss, plain.loss);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(row_loss[6 - 2 * i], plain.row_loss[i]);
    EXPECT_EQ(row_loss[7 - 2 * i], kSentinel);
    for (std::size_t k = 0; k < 9; ++k) EXPECT_EQ(dx[i * 9 + k], k < 5 ? plain.dx[i * 5 + k] : kSentinel);
  }
  for (std::size_t j = 0; j < 7; ++j) {
    for (std::size_t k = 0; k < 6; ++k) EXPECT_EQ(dw[j * 6 + k], k < 5 ? plain.dw[j * 5 + k] : kSentinel);
  }
}

TEST_P(Results, TargetOutOfRangeNamesRowValueAndV) {
  for (const std::int64_t wrong : {std::int64_t{7}, std::int64_t{-1}, std::numeric_limits<std::int64_t>::min()}) {
    SmallProblem s;
    s.y[1] = wrong;
    EXPECT_TRUE(refused(s.run(context_.get()), LL_ERROR_TARGET_RANGE, {"1", std::to_string(wrong), "7"}));
    EXPECT_TRUE(s.untouched());
  }
}

TEST_P(Results, AllIgnored) {
  SmallProblem error, nan, zero;
  for (SmallProblem* each : {&error, &nan, &zero}) each->y.assign(4, -100);
  EXPECT_TRUE(refused(error.run(context_.get()), LL_ERROR_EMPTY, {"on_empty"}));
  EXPECT_TRUE(error.untouched());
  nan.options.on_empty = LL_EMPTY_NAN;
  ASSERT_EQ(nan.run(context_.get()), LL_OK) << ll_last_error();
  EXPECT_TRUE(std::isnan(nan.loss));
  zero.options.on_empty = LL_EMPTY_ZERO;
  ASSERT_EQ(zero.run(context_.get()), LL_OK) << ll_last_error();
  EXPECT_EQ(zero.loss, 0.0);
  EXPECT_EQ(zero.kept, 0);
  for (const float each : zero.dx) EXPECT_EQ(each, 0.0f);
}

TEST_P(Results, BadRowsAreCounted) {
  SmallProblem s(LL_LOGITS);
  s.z[2] = std::numeric_limits<float>::infinity();
  s.z[7 + 3] = std::numeric_limits<float>::quiet_NaN();
  s.options.reduction = LL_PER_ROW;
  s.arguments.loss = nullptr;
  ASSERT_EQ(s.run(context_.get()), LL_OK) << ll_last_error();
  EXPECT_EQ(s.bad, 2);
  EXPECT_TRUE(std::isnan(s.row_loss[0]));
  EXPECT_TRUE(std::isnan(s.row_loss[1]));
  EXPECT_EQ(s.row_loss[2], 0.0f);
  EXPECT_TRUE(std::isfinite(s.row_loss[3]));
}

TEST_P(Results, UpstreamGradients) {
  SmallProblem plain, scaled, rows;
  ASSERT_EQ(plain.run(context_.get()), LL_OK);
  scaled.arguments.grad_loss = -3.0;
  ASSERT_EQ(scaled.run(context_.get()), LL_OK);
  // mean over 3 kept rows plus a third for each row's own loss: twice the gradient.
  rows.grad_row.assign(4, 1.0f / 3.0f);
  rows.arguments.grad_row_loss = &rows.grad_row_view;
  ASSERT_EQ(rows.run(context_.get()), LL_OK) << ll_last_error();
  std::vector<double> by_scale, by_rows;
  for (const float each : plain.dx) {
    by_scale.push_back(-3.0 * double{each});
    by_rows.push_back(2.0 * double{each});
  }
  expect_near(scaled.dx, by_scale, "grad_hidden of -3 loss");
  expect_near(rows.dx, by_rows, "grad_hidden of loss and row losses");
}

// ---- executors and threads -----------------------------------------------------------------------------------------------

// Runs the indices backwards on the calling thread, and counts them.
struct Backwards {
  std::atomic<int> loops{0};
  static void parallel_for(void* user, std::int64_t tasks, ll_parallel_body body, void* body_user) {
    ++static_cast<Backwards*>(user)->loops;
    for (std::int64_t i = tasks - 1; i >= 0; --i) body(body_user, i);
  }
};

ContextPointer context_with_executor(Backwards& executor, int threads) {
  ll_context_options options;
  ll_context_options_init(&options);
  options.threads = threads;
  options.parallel_for = Backwards::parallel_for;
  options.parallel_for_user = &executor;
  ll_context* context = nullptr;
  EXPECT_EQ(ll_context_create(&options, &context), LL_OK) << ll_last_error();
  return ContextPointer(context);
}

TEST(Threads, AnyExecutorGivesTheSameBits) {
  Backwards executor;
  const ContextPointer own = make_context(LL_BACKEND_CPU, 3), callers = context_with_executor(executor, 3),
                       single = make_context(LL_BACKEND_CPU, 1);
  SmallProblem a, b, c;
  ASSERT_EQ(a.run(own.get()), LL_OK) << ll_last_error();
  ASSERT_EQ(b.run(callers.get()), LL_OK) << ll_last_error();
  ASSERT_EQ(c.run(single.get()), LL_OK) << ll_last_error();
  EXPECT_GT(executor.loops.load(), 0);
  EXPECT_EQ(a.loss, b.loss);
  EXPECT_EQ(a.dx, b.dx);
  EXPECT_EQ(a.dw, b.dw);
  EXPECT_EQ(a.loss, c.loss) << "a row's loss does not depend on the number of threads";
}

TEST(Threads, CallsOfSeveralThreadsQueue) {
  const ContextPointer context = make_context(LL_BACKEND_CPU, 2);
  SmallProblem want;
  ASSERT_EQ(want.run(context.get()), LL_OK) << ll_last_error();
  constexpr int kThreads = 4, kCalls = 50;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      SmallProblem s;
      const PlanPointer plan = s.plan(context.get());
      Scratch workspace(ll_plan_workspace_bytes(plan.get()));
      for (int i = 0; i < kCalls; ++i) {
        s.dx.assign(s.dx.size(), kSentinel);
        if (s.run(plan.get(), workspace.data(), workspace.size()) != LL_OK || s.dx != want.dx || s.loss != want.loss) {
          ++wrong;
        }
      }
    });
  }
  for (std::thread& each : threads) each.join();
  EXPECT_EQ(wrong.load(), 0);
}

#if defined(__SANITIZE_THREAD__)
#define LOGITLESS_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define LOGITLESS_TSAN 1
#endif
#endif

// The child has none of the parent's workers, and another thread of the parent may be computing while it forks. The
// thread sanitizer refuses new threads after a fork of a process with threads.
#ifndef LOGITLESS_TSAN
TEST(Threads, ForkedChildComputes) {
  const ContextPointer context = make_context(LL_BACKEND_CPU, 3);
  SmallProblem s;
  ASSERT_EQ(s.run(context.get()), LL_OK) << ll_last_error();
  const std::vector<float> want = s.dx;
  const PlanPointer plan = s.plan(context.get());
  Scratch workspace(ll_plan_workspace_bytes(plan.get()));

  std::atomic<bool> stop{false};
  std::thread busy([&] {
    SmallProblem other;
    const PlanPointer its = other.plan(context.get());
    Scratch its_workspace(ll_plan_workspace_bytes(its.get()));
    while (!stop.load()) other.run(its.get(), its_workspace.data(), its_workspace.size());
  });
  for (int round = 0; round < 20; ++round) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);  // a child that hangs is a failure, not a hang of the test
      int result = 0;
      for (int i = 0; i < 3; ++i) {
        s.dx.assign(s.dx.size(), kSentinel);
        if (s.run(plan.get(), workspace.data(), workspace.size()) != LL_OK) result = 2;
        if (s.dx != want) result = 3;
      }
      _exit(result);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status)) << "killed by signal " << WTERMSIG(status);
    ASSERT_EQ(WEXITSTATUS(status), 0);
  }
  stop = true;
  busy.join();
  EXPECT_EQ(s.run(plan.get(), workspace.data(), workspace.size()), LL_OK) << "the parent goes on";
}
#endif

}  // namespace
}  // namespace faces
