// ll_forward, ll_forward_backward, ll_backward: one road for all three. Check, run on the plan's backend, hand over the
// scalars. On success nothing is allocated here.
#include <mutex>

#include "capi/arguments.hpp"
#include "capi/plan.hpp"
#include "reference/reference.hpp"

namespace logitless::capi {
namespace {

constexpr std::size_t kAlignment = 64;

const char* name_of_function(contract::Call call) {
  switch (call) {
    case contract::Call::forward: return "ll_forward";
    case contract::Call::forward_backward: return "ll_forward_backward";
    case contract::Call::backward: return "ll_backward";
  }
  return "?";
}

void check_workspace(const void* workspace, std::size_t bytes, std::size_t needed) {
  if (needed == 0) return;
  if (workspace == nullptr) {
    fail(LL_ERROR_WORKSPACE, "workspace: null; must point at " + std::to_string(needed) + " bytes aligned to " +
                                 std::to_string(kAlignment));
  }
  if (bytes < needed) {
    fail(LL_ERROR_WORKSPACE, "workspace_bytes: " + std::to_string(bytes) + "; must be at least " +
                                 std::to_string(needed) + ", what ll_plan_workspace_bytes says");
  }
  if (reinterpret_cast<std::uintptr_t>(workspace) % kAlignment != 0) {
    fail(LL_ERROR_WORKSPACE,
         "workspace: at " + address(workspace) + "; must be aligned to " + std::to_string(kAlignment) + " bytes");
  }
}

void store_loss(const View& loss, double value) {
  if (loss.dtype == contract::DType::f64) {
    *static_cast<double*>(loss.data) = value;
  } else if (loss) {
    *static_cast<float*>(loss.data) = static_cast<float>(value);
  }
}

ll_status run(contract::Call call, ll_plan* plan, const ll_arguments* arguments, void* workspace,
              std::size_t workspace_bytes, void* stream) noexcept {
  return guarded([&] {
    if (plan == nullptr) refuse("plan: null; must be a plan made by ll_plan_create");
    const contract::Problem& problem = plan->problem;
    if (problem.call != call) {
      refuse(std::string("plan: made for ") + name_of_function(problem.call) +
             "; must be run by that function, not by " + name_of_function(call));
    }
    ll_context& context = *plan->context;
    const bool on_device = context.backend == LL_BACKEND_CUDA;
    if (stream != nullptr && !on_device)
      refuse("stream: " + address(stream) + "; must be null, this backend has no streams");
    const std::size_t needed = ll_plan_workspace_bytes(plan);
    check_workspace(workspace, workspace_bytes, needed);
    const CheckedArguments checked = checked_arguments(
        arguments, problem, workspace, needed, {on_device ? LL_DEVICE_CUDA : LL_DEVICE_CPU, context.device_index});

    Outcome outcome;
    int status = LL_OK;
    std::string error;
    if (on_device) {
      error = cuda::run(*plan->prepared, checked.operands,
                        {checked.loss, checked.kept_rows, checked.bad_rows, checked.correct_rows, checked.filter_kept,
                         checked.filter_variance},
                        workspace, stream, &status);
      if (!error.empty()) fail(status == LL_OK ? LL_ERROR_INTERNAL : status, std::move(error));
      return;
    }
    if (context.backend == LL_BACKEND_REFERENCE) {
      error = reference::run(problem, checked.operands, &outcome, &status);
    } else {
      const std::lock_guard queue(context.lock);
      error = cpu::run(plan->plan, *context.target, *context.executor, checked.operands, workspace, &outcome, &status);
    }
    if (!error.empty()) fail(status == LL_OK ? LL_ERROR_INTERNAL : status, std::move(error));
    store_loss(checked.loss, outcome.loss);
    if (checked.kept_rows != nullptr) *checked.kept_rows = outcome.kept;
    if (checked.bad_rows != nullptr) *checked.bad_rows = outcome.bad;
    if (checked.correct_rows != nullptr) *checked.correct_rows = outcome.correct;
    if (checked.filter_kept != nullptr) *checked.filter_kept = outcome.filter_kept;
    if (checked.filter_variance != nullptr) *checked.filter_variance = outcome.filter_variance;
  });
}

}  // namespace
}  // namespace logitless::capi

ll_status ll_forward(ll_plan* plan, const ll_arguments* arguments, void* workspace, size_t workspace_bytes,
                     void* stream) noexcept {
  return logitless::capi::run(logitless::contract::Call::forward, plan, arguments, workspace, workspace_bytes, stream);
}

ll_status ll_forward_backward(ll_plan* plan, const ll_arguments* arguments, void* workspace, size_t workspace_bytes,
                              void* stream) noexcept {
  return logitless::capi::run(logitless::contract::Call::forward_backward, plan, arguments, workspace, workspace_bytes,
                              stream);
}

ll_status ll_backward(ll_plan* plan, const ll_arguments* arguments, void* workspace, size_t workspace_bytes,
                      void* stream) noexcept {
  return logitless::capi::run(logitless::contract::Call::backward, plan, arguments, workspace, workspace_bytes, stream);
}
