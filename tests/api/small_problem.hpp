// A small problem through the C ABI, whole and correct; each test changes one thing and sees what the library says.
// X [4,5] · W [7,5] · y [4] fp32, one row ignored, every output present and filled with a sentinel.
// The expected values come from the definition, in double, a row at a time (ten lines below).
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "logitless/logitless.h"

namespace faces {

constexpr float kSentinel = 777.0f;

inline ll_tensor tensor(const void* data, ll_dtype dtype, std::initializer_list<std::int64_t> shape,
                        std::initializer_list<std::int64_t> stride = {}) {
  ll_tensor t;
  std::memset(&t, 0, sizeof t);
  t.size = sizeof t;
  t.data = const_cast<void*>(data);
  t.dtype = dtype;
  t.device_type = LL_DEVICE_CPU;
  t.ndim = static_cast<std::int32_t>(shape.size());
  int i = 0;
  for (const std::int64_t extent : shape) t.shape[i++] = extent;
  std::int64_t step = 1;
  for (i = t.ndim - 1; i >= 0; --i) {
    t.stride[i] = step;
    step *= t.shape[i];
  }
  i = 0;
  for (const std::int64_t each : stride) t.stride[i++] = each;
  return t;
}

struct DestroyContext {
  void operator()(ll_context* c) const { ll_context_destroy(c); }
};
struct DestroyPlan {
  void operator()(ll_plan* p) const { ll_plan_destroy(p); }
};
using ContextPointer = std::unique_ptr<ll_context, DestroyContext>;
using PlanPointer = std::unique_ptr<ll_plan, DestroyPlan>;

inline ContextPointer make_context(ll_backend backend, int threads = 2) {
  ll_context_options options;
  ll_context_options_init(&options);
  options.backend = backend;
  options.threads = threads;
  ll_context* context = nullptr;
  EXPECT_EQ(ll_context_create(&options, &context), LL_OK) << ll_last_error();
  return ContextPointer(context);
}

// The status is `wanted` and the last error is one line that holds every piece.
inline testing::AssertionResult refused(ll_status got, ll_status wanted, const std::vector<std::string>& pieces) {
  const std::string text = ll_last_error();
  if (got != wanted) {
    return testing::AssertionFailure() << ll_status_name(got) << " instead of " << ll_status_name(wanted)
                                       << ", last error: " << text;
  }
  if (text.empty() || text.find('\n') != std::string::npos) {
    return testing::AssertionFailure() << "not one line: '" << text << "'";
  }
  for (const std::string& piece : pieces) {
    if (text.find(piece) == std::string::npos) {
      return testing::AssertionFailure() << "'" << piece << "' is not in: " << text;
    }
  }
  return testing::AssertionSuccess();
}

// Workspace with the alignment that plans ask for.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes) : memory_(bytes + 64), bytes_(bytes) {}
  void* data() {
    auto at = reinterpret_cast<std::uintptr_t>(memory_.data());
    return memory_.data() + (64 - at % 64) % 64;
  }
  std::size_t size() const { return bytes_; }

 private:
  std::vector<unsigned char> memory_;
  std::size_t bytes_;
};

// loss_i = lse(z_i) - sum_j q_ij z_ij, D_i = (p_i - q_i) g_i, with q the smoothed target (uniform) and g_i = scale.
struct Expected {
  double loss = 0.0;
  std::vector<double> row_loss, row_lse, d;

  Expected(const std::vector<double>& z, const std::vector<std::int64_t>& y, std::size_t vocab, double alpha,
           std::int64_t ignore)
      : row_loss(y.size()), row_lse(y.size()), d(z.size()) {
    double kept = 0.0;
    for (const std::int64_t target : y) kept += target != ignore ? 1.0 : 0.0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      if (y[i] == ignore) continue;
      double sum = 0.0;
      for (std::size_t j = 0; j < vocab; ++j) sum += std::exp(z[i * vocab + j]);
      row_lse[i] = std::log(sum);
      row_loss[i] = row_lse[i];
      for (std::size_t j = 0; j < vocab; ++j) {
        const bool target = j == static_cast<std::size_t>(y[i]);
        const double q = alpha / static_cast<double>(vocab) + (target ? 1.0 - alpha : 0.0);
        row_loss[i] -= q * z[i * vocab + j];
        d[i * vocab + j] = (std::exp(z[i * vocab + j]) / sum - q) / kept;
      }
      loss += row_loss[i] / kept;
    }
  }
};

struct SmallProblem {
  static constexpr std::int64_t R = 4, H = 5, V = 7;

  std::vector<float> x = std::vector<float>(R * H), w = std::vector<float>(V * H), z = std::vector<float>(R * V);
  std::vector<std::int64_t> y = {3, 0, -100, 6};
  std::vector<float> dx = std::vector<float>(R * H, kSentinel), dw = std::vector<float>(V * H, kSentinel),
                     dz = std::vector<float>(R * V, kSentinel), row_loss = std::vector<float>(R, kSentinel),
                     row_lse = row_loss, row_logprob = row_loss, stats = std::vector<float>(R * 4, kSentinel),
                     grad_row = std::vector<float>(R, 0.0f), lse = grad_row;
  double loss = kSentinel;
  std::int64_t kept = -1, bad = -1;

  ll_tensor x_view, w_view, z_view, y_view, dx_view, dw_view, dz_view, row_loss_view, row_lse_view, row_logprob_view,
      stats_view, grad_row_view, lse_view, loss_view;
  ll_problem problem;
  ll_options options;
  ll_arguments arguments;

  explicit SmallProblem(ll_kind kind = LL_LINEAR, ll_call call = LL_FORWARD_BACKWARD) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = 0.25f * static_cast<float>(static_cast<int>(i * 7 % 11) - 5);
    for (std::size_t i = 0; i < w.size(); ++i) w[i] = 0.125f * static_cast<float>(static_cast<int>(i * 5 % 13) - 6);
    const std::vector<double> logits = exact_logits();
    for (std::size_t i = 0; i < z.size(); ++i) z[i] = static_cast<float>(logits[i]);
    x_view = tensor(x.data(), LL_F32, {R, H});
    w_view = tensor(w.data(), LL_F32, {V, H});
    z_view = tensor(z.data(), LL_F32, {R, V});
    y_view = tensor(y.data(), LL_I64, {R});
    dx_view = tensor(dx.data(), LL_F32, {R, H});
    dw_view = tensor(dw.data(), LL_F32, {V, H});
    dz_view = tensor(dz.data(), LL_F32, {R, V});
    row_loss_view = tensor(row_loss.data(), LL_F32, {R});
    row_lse_view = tensor(row_lse.data(), LL_F32, {R});
    row_logprob_view = tensor(row_logprob.data(), LL_F32, {R});
    stats_view = tensor(stats.data(), LL_F32, {R, 4});
    grad_row_view = tensor(grad_row.data(), LL_F32, {R});
    lse_view = tensor(lse.data(), LL_F32, {R});
    loss_view = tensor(&loss, LL_F64, {});

    ll_problem_init(&problem);
    ll_options_init(&options);
    ll_arguments_init(&arguments);
    problem.kind = kind;
    problem.call = call;
    problem.rows = R;
    problem.vocab = V;
    const ll_dtype gradient = call == LL_FORWARD ? LL_NONE : LL_F32;
    if (kind == LL_LINEAR) {
      problem.hidden = H;
      problem.hidden_dtype = problem.weight_dtype = LL_F32;
      problem.grad_hidden_dtype = problem.grad_weight_dtype = gradient;
      arguments.hidden = &x_view;
      arguments.weight = &w_view;
    } else {
      problem.logits_dtype = LL_F32;
      problem.grad_logits_dtype = gradient;
      arguments.logits = &z_view;
    }
    arguments.targets = &y_view;
    if (call != LL_FORWARD) {
      arguments.grad_hidden = kind == LL_LINEAR ? &dx_view : nullptr;
      arguments.grad_weight = kind == LL_LINEAR ? &dw_view : nullptr;
      arguments.grad_logits = kind == LL_LOGITS ? &dz_view : nullptr;
    }
    arguments.stats = &stats_view;
    if (call != LL_BACKWARD) {
      arguments.loss = &loss_view;
      arguments.row_loss = &row_loss_view;
      arguments.row_lse = &row_lse_view;
      arguments.row_logprob = &row_logprob_view;
    }
    arguments.kept_rows = &kept;
    arguments.bad_rows = &bad;
  }
  SmallProblem(const SmallProblem&) = delete;  // the views point into it
  SmallProblem& operator=(const SmallProblem&) = delete;

  // Exact: sums of few products of short numbers.
  std::vector<double> exact_logits() const {
    std::vector<double> logits(R * V, 0.0);
    for (std::size_t i = 0; i < R; ++i) {
      for (std::size_t j = 0; j < V; ++j) {
        for (std::size_t k = 0; k < H; ++k) logits[i * V + j] += double{x[i * H + k]} * double{w[j * H + k]};
      }
    }
    return logits;
  }

  PlanPointer plan(ll_context* context) {
    ll_plan* made = nullptr;
    EXPECT_EQ(ll_plan_create(context, &problem, &options, &made), LL_OK) << ll_last_error();
    return PlanPointer(made);
  }

  ll_status run(ll_plan* made, void* workspace, std::size_t bytes) {
    switch (problem.call) {
      case LL_FORWARD: return ll_forward(made, &arguments, workspace, bytes, nullptr);
      case LL_BACKWARD: return ll_backward(made, &arguments, workspace, bytes, nullptr);
      default: return ll_forward_backward(made, &arguments, workspace, bytes, nullptr);
    }
  }
  ll_status run(ll_plan* made) {
    Scratch workspace(ll_plan_workspace_bytes(made));
    return run(made, workspace.data(), workspace.size());
  }
  ll_status run(ll_context* context) {
    const PlanPointer made = plan(context);
    return made ? run(made.get()) : LL_ERROR_INTERNAL;
  }

  // Nothing has been written.
  testing::AssertionResult untouched() const {
    for (const auto* each : {&dx, &dw, &dz, &row_loss, &row_lse, &row_logprob, &stats}) {
      for (const float value : *each) {
        if (value != kSentinel) return testing::AssertionFailure() << "an output holds " << value;
      }
    }
    if (loss != kSentinel || kept != -1 || bad != -1) return testing::AssertionFailure() << "a scalar was written";
    return testing::AssertionSuccess();
  }
};

// fp32 logits of H products, then a softmax over V: a few roundings each, of terms no larger than `scale`.
inline double tolerance(double scale) {
  return 4.0 * static_cast<double>(SmallProblem::H + SmallProblem::V) * 0x1p-24 * (1.0 + scale);
}

template <class T>
void expect_near(const std::vector<T>& got, const std::vector<double>& want, const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  double scale = 0.0;
  for (const double each : want) scale = std::max(scale, std::abs(each));
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(static_cast<double>(got[i]), want[i], tolerance(scale)) << what << "[" << i << "]";
  }
}

}  // namespace faces
