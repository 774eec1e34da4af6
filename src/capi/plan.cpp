// ll_plan_*: a checked problem and the context's machine -> a plan. The budget is judged here, once.
#include "capi/plan.hpp"

#include <algorithm>

#include "capi/problem.hpp"

namespace logitless::capi {
namespace {

const char* name_of_call(contract::Call call) {
  switch (call) {
    case contract::Call::forward: return "forward";
    case contract::Call::forward_backward: return "forward_backward";
    case contract::Call::backward: return "backward";
  }
  return "?";
}

std::string reference_text(const contract::Problem& p) {
  std::string out = "reference: ";
  out += p.kind == contract::Kind::linear ? "linear " : "logits ";
  out += std::string(name_of_call(p.call)) + ", R " + number(p.rows);
  if (p.kind == contract::Kind::linear) out += ", H " + number(p.hidden);
  return out + ", V " + number(p.vocab) +
         "\nEvery formula by its definition, in double, a row at a time: no chunks, no workspace from the caller\n"
         "(it allocates what it needs), no prediction. For checking, not for speed.\n";
}

std::string reference_json(const contract::Problem& p) {
  return std::string("{\"backend\": \"reference\", \"kind\": ") +
         (p.kind == contract::Kind::linear ? "\"linear\"" : "\"logits\"") +
         ", \"call\": " + json_string(name_of_call(p.call)) + ", \"rows\": " + number(p.rows) +
         ", \"hidden\": " + number(p.hidden) + ", \"vocab\": " + number(p.vocab) +
         ", \"chunk\": 0, \"workspace_bytes\": 0, \"ledger\": [], \"rejected\": []}";
}

}  // namespace
}  // namespace logitless::capi

using namespace logitless::capi;
using namespace logitless;

ll_status ll_plan_create(ll_context* context, const ll_problem* problem, const ll_options* options,
                         ll_plan** plan) noexcept {
  return guarded([&] {
    if (plan == nullptr) refuse("plan: null; must point at an ll_plan*, which receives the new plan");
    *plan = nullptr;
    if (context == nullptr) refuse("context: null; must be a context made by ll_context_create");
    auto made = std::make_unique<ll_plan>();
    made->context = context;
    made->problem = checked_problem(problem, options, context->backend);
    const bool planned = context->backend != LL_BACKEND_REFERENCE;
    if (planned) {
      made->plan = context->backend == LL_BACKEND_CUDA
                       ? plan::make_gpu_plan(made->problem, cuda::machine_of(*context->device))
                       : plan::make_plan(made->problem, cpu::machine_of(*context->target, context->threads));
      const auto least = static_cast<std::uint64_t>(made->plan.workspace_bytes);
      if (made->problem.budget != 0 && least > made->problem.budget) {
        fail(LL_ERROR_BUDGET, "memory_budget: " + std::to_string(made->problem.budget) +
                                  " bytes; this problem needs at least " + std::to_string(least));
      }
    }
    if (context->backend == LL_BACKEND_CUDA) {
      std::string why;
      made->prepared = cuda::prepare(*context->device, made->plan, &why);
      if (made->prepared == nullptr) fail(LL_ERROR_UNSUPPORTED, "problem: " + why);
    }
    if (logging(LL_LOG_DEBUG)) {
      log(LL_LOG_DEBUG, (planned ? made->plan.text() : reference_text(made->problem)).c_str());
    }
    *plan = made.release();
  });
}

void ll_plan_destroy(ll_plan* plan) noexcept { delete plan; }

size_t ll_plan_workspace_bytes(const ll_plan* plan) noexcept {
  return plan == nullptr ? 0 : static_cast<size_t>(plan->plan.workspace_bytes);
}

int64_t ll_plan_statistics(const ll_plan* plan) noexcept { return plan == nullptr ? 0 : plan->problem.statistics(); }

uint64_t ll_plan_saved_bytes(const ll_plan* plan) noexcept {
  if (plan == nullptr || plan->plan.saved_leaves == 0) return 0;
  const logitless::plan::Plan& p = plan->plan;
  const std::int64_t columns = std::min(p.saved_leaves * p.machine.leaf, p.problem.vocab);
  return static_cast<uint64_t>(p.saved_head + columns * p.problem.rows * logitless::contract::size_of(p.e_dtype));
}

ll_status ll_plan_describe(const ll_plan* plan, ll_format format, char* buffer, size_t capacity,
                           size_t* length) noexcept {
  return guarded([&] {
    if (plan == nullptr) refuse("plan: null; must be a plan made by ll_plan_create");
    const bool json = wants_json(format);
    const bool reference = plan->context->backend == LL_BACKEND_REFERENCE;
    const std::string text = reference ? (json ? reference_json(plan->problem) : reference_text(plan->problem))
                                       : (json ? plan->plan.json() : plan->plan.text());
    copy_text(text, buffer, capacity, length);
  });
}
