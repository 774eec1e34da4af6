// What surrounds a CUDA backend, on the stand-in: which memory the ABI takes for a context of it, what the C++ face
// offers there, and what is told later by check_status.
#include "stand_in/stand_in.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "logitless/logitless.hpp"

namespace logitless {
namespace {

// A device's copy of a host array.
template <class T>
class There {
 public:
  explicit There(std::vector<T> values) : values_(std::move(values)) {}
  T* data() { return stand_in::there(values_.data()); }
  std::vector<T>& values() { return values_; }

 private:
  std::vector<T> values_;
};

Context context_of(Backend backend, int device = 0) {
  ContextOptions options;
  options.backend = backend;
  options.device = device;
  return Context(options);
}

std::vector<float> wave(std::size_t count, double step) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(std::sin(step * static_cast<double>(i + 1)));
  return values;
}

template <class Action>
ll_status status_of(const Action& action, std::string* text = nullptr) {
  try {
    action();
  } catch (const Error& error) {
    if (text != nullptr) *text = error.what();
    return error.status();
  }
  return LL_OK;
}

// The error's text names the argument first.
template <class Action>
void expect_refused(const std::string& name, const std::string& words, const Action& action) {
  std::string text;
  EXPECT_EQ(status_of(action, &text), LL_ERROR_INVALID_ARGUMENT) << text;
  EXPECT_EQ(text.rfind(name + ":", 0), 0U) << text;
  EXPECT_NE(text.find(words), std::string::npos) << text;
}

constexpr std::int64_t R = 5, H = 3, V = 11;

struct Head : testing::Test {
  There<float> x{wave(R * H, 1.3)}, w{wave(V * H, 0.7)}, dx{std::vector<float>(R * H, -7.0f)},
      dw{std::vector<float>(V * H, -7.0f)};
  There<std::int32_t> y{{3, -100, 0, 10, 7}};
  There<Result> result{std::vector<Result>(1)};
  Context context = context_of(Backend::cuda);

  Arguments arguments(int device = 0) {
    return {.hidden = ConstTensor(x.data(), DType::f32, {R, H}).on_device(device),
            .weight = ConstTensor(w.data(), DType::f32, {V, H}).on_device(device),
            .targets = ConstTensor(y.data(), DType::i32, {R}).on_device(device),
            .grad_hidden = Tensor(dx.data(), DType::f32, {R, H}).on_device(device),
            .grad_weight = Tensor(dw.data(), DType::f32, {V, H}).on_device(device)};
  }
  Arguments on_host() {
    return {.hidden = ConstTensor(x.values().data(), DType::f32, {R, H}),
            .weight = ConstTensor(w.values().data(), DType::f32, {V, H}),
            .targets = ConstTensor(y.values().data(), DType::i32, {R}),
            .grad_hidden = Tensor(dx.values().data(), DType::f32, {R, H}),
            .grad_weight = Tensor(dw.values().data(), DType::f32, {V, H})};
  }
  // Enqueues with everything where it belongs, but for what `change` does.
  template <class Change>
  void run(const Arguments& given, const Problem& problem, const Change& change) {
    Plan plan(context, problem);
    There<std::byte> workspace(std::vector<std::byte>(plan.workspace_bytes() + 256));
    void* aligned = workspace.values().data();
    std::size_t room = workspace.values().size();
    std::align(256, plan.workspace_bytes(), aligned, room);
    Reports reports = plan.reports_in(result.data());
    reports.loss = reports.loss.on_device(0);
    change(reports);
    plan.enqueue(given, reports, stand_in::there(static_cast<std::byte*>(aligned)), plan.workspace_bytes(), nullptr);
  }
  void run(const Arguments& given, const Problem& problem) {
    run(given, problem, [](Reports&) {});
  }
  void run(const Arguments& given) { run(given, problem_of(given, Call::forward_backward)); }
};

TEST_F(Head, IsTheReferenceSeenThroughTheCudaFace) {
  run(arguments());
  context.check_status();
  const std::vector<float> got_dx = dx.values(), got_dw = dw.values();
  Context reference = context_of(Backend::reference);
  const Arguments host = on_host();
  Plan plan(reference, problem_of(host, Call::forward_backward));
  Workspace workspace(plan.workspace_bytes());
  const Result want = plan.forward_backward(host, workspace);
  EXPECT_EQ(result.values()[0].loss, want.loss);
  EXPECT_EQ(result.values()[0].kept, 4);
  EXPECT_EQ(got_dx, dx.values());
  EXPECT_EQ(got_dw, dw.values());
}

TEST_F(Head, TheHostsCallsAreRefusedForTheDevicesOne) {
  const Arguments given = arguments();
  Plan plan(context, problem_of(given, Call::forward_backward));
  Workspace workspace;
  std::string text;
  EXPECT_EQ(status_of([&] { plan.forward_backward(given, workspace); }, &text), LL_ERROR_UNSUPPORTED);
  EXPECT_NE(text.find("enqueue"), std::string::npos) << text;
  EXPECT_EQ(dx.values()[0], -7.0f);
}

TEST_F(Head, EveryTensorMustLieOnTheContextsDevice) {
  // The same tensors, one at a time left on the host or on the neighbour.
  for (const bool neighbour : {false, true}) {
    const Arguments right = arguments(), wrong = neighbour ? arguments(1) : on_host();
    const std::string words = neighbour ? "device 1" : "host";
    const Problem problem = problem_of(right, Call::forward_backward);
    const auto refused = [&](const char* name, auto field) {
      Arguments given = right;
      given.*field = wrong.*field;
      expect_refused(name, "", [&] { run(given, problem); });
    };
    refused("hidden", &Arguments::hidden);
    refused("weight", &Arguments::weight);
    refused("targets", &Arguments::targets);
    refused("grad_hidden", &Arguments::grad_hidden);
    refused("grad_weight", &Arguments::grad_weight);
    double on_the_host = 0;
    expect_refused("loss", "", [&] {
      run(right, problem, [&](Reports& reports) {
        reports.loss = neighbour ? reports.loss.on_device(1) : Tensor(&on_the_host, DType::f64, {});
      });
    });
  }
  EXPECT_EQ(dx.values()[0], -7.0f) << "a refused call writes nothing";
}

TEST_F(Head, AContextOfTheHostTakesNoDevicesTensors) {
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    context = context_of(backend);
    Arguments given = on_host();
    given.weight = arguments().weight;
    Plan plan(context, problem_of(given, Call::forward_backward));
    Workspace workspace;
    expect_refused("weight", "", [&] { plan.forward_backward(given, workspace); });
  }
}

TEST_F(Head, TheSecondDeviceTakesItsOwn) {
  context = context_of(Backend::cuda, 1);
  const Arguments given = arguments(1);
  run(given, problem_of(given, Call::forward_backward),
      [](Reports& reports) { reports.loss = reports.loss.on_device(1); });
  context.check_status();
  EXPECT_TRUE(std::isfinite(result.values()[0].loss));
  std::string text;
  EXPECT_EQ(status_of([&] { context_of(Backend::cuda, 2); }, &text), LL_ERROR_UNSUPPORTED);
  EXPECT_NE(text.find("device 2"), std::string::npos) << text;
}

TEST_F(Head, WhatOnlyTheDeviceSeesIsToldOnce) {
  y.values()[2] = V;
  run(arguments());  // enqueued: the host does not read targets
  EXPECT_TRUE(std::isnan(result.values()[0].loss));
  std::string text;
  EXPECT_EQ(status_of([&] { context.check_status(); }, &text), LL_ERROR_TARGET_RANGE);
  EXPECT_NE(text.find("11"), std::string::npos) << text;
  context.check_status();  // and not again
}

TEST_F(Head, MoreKeptRowsThanSaidAreTold) {
  const Arguments given = arguments();
  Problem problem = problem_of(given, Call::forward_backward);
  problem.most_kept_rows = 4;
  run(given, problem);
  context.check_status();
  problem.most_kept_rows = 3;
  run(given, problem);
  EXPECT_TRUE(std::isnan(result.values()[0].loss));
  std::string text;
  EXPECT_EQ(status_of([&] { context.check_status(); }, &text), LL_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(text.rfind("most_kept_rows:", 0), 0U) << text;
}

TEST_F(Head, ScaleTakesTheDevicesNumberAndTensor) {
  There<double> factor({-0.5});
  const ConstTensor by = ConstTensor(factor.data(), DType::f64, {}).on_device(0);
  scale(context, by, Tensor(dx.data(), DType::f32, {R, H}).on_device(0));
  EXPECT_EQ(dx.values(), std::vector<float>(R * H, 3.5f));
  expect_refused("factor", "", [&] {
    scale(context, ConstTensor(factor.values().data(), DType::f64, {}),
          Tensor(dx.data(), DType::f32, {R, H}).on_device(0));
  });
  expect_refused("values", "", [&] { scale(context, by, Tensor(dx.values().data(), DType::f32, {R, H})); });
}

TEST_F(Head, DescriptionsNameDeviceAndPlan) {
  EXPECT_NE(context.describe(Format::text).find("stand-in 0"), std::string::npos);
  EXPECT_NE(context.describe(Format::json).find("\"cuda_devices\": 2"), std::string::npos);
  const Plan plan(context, problem_of(arguments(), Call::forward_backward));
  EXPECT_NE(plan.describe(Format::text).find("sm_90"), std::string::npos) << plan.describe(Format::text);
}

}  // namespace
}  // namespace logitless
