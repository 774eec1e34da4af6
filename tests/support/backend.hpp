// What the conformance suite runs: something that behaves as reference::run does. TargetBackend makes a plan for given
// dials and runs it in poisoned, guarded workspace; PlainBackend is the plain pipeline, which tests the suite itself.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "contract/coefficients.hpp"
#include "cpu/cpu.hpp"
#include "logitless/logitless.h"
#include "reference/reference.hpp"
#include "support/bounds.hpp"
#include "support/executor.hpp"
#include "support/plain.hpp"
#include "support/tensor.hpp"

namespace logitless::test {

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string name() const = 0;
  // What it keeps in 16 bits for this problem.
  virtual Storage storage(const Problem& problem) = 0;
  virtual std::string run(const Problem& problem, const Operands& operands, Outcome* outcome, int* status) = 0;
  // How it would run the problem, for messages.
  virtual std::string describe(const Problem&) { return {}; }
  // Wrong targets and empty means are refused, and nothing is written; else they are reported afterwards.
  virtual bool refuses_before_writing() const { return true; }
  // Its own reading of the convention of alpha.
  double smoothing(const Case& c) const {
    return c.others ? contract::uniform_smoothing_of_others(c.alpha, static_cast<double>(c.vocab)) : c.alpha;
  }
};

class PlainBackend final : public Backend {
 public:
  std::string name() const override { return "plain"; }
  Storage storage(const Problem& p) override {
    Storage s;
    const bool half = contract::is_half(p.x) && p.x == p.w;
    s.unit = half ? unit_of(p.x) : 0.0;
    s.absolute = half && p.x == DType::f16 ? 1.0 : 0.0;  // D itself may underflow
    s.leaf = p.vocab;
    return s;
  }
  std::string run(const Problem& p, const Operands& o, Outcome* outcome, int* status) override {
    // The reference judges targets and emptiness and writes everything; the plain pipeline then overwrites.
    std::string error = reference::run(p, o, outcome, status);
    if (error.empty() && outcome->kept > 0) {
      if (p.call == Call::backward) return error;
      Problem again = p;
      again.accumulate_dx = again.accumulate_dw = false;
      if (!p.accumulate_dx && !p.accumulate_dw && !p.in_place) run_plain(again, o, false, outcome);
    }
    return error;
  }
};

// A plan of the problem for these dials. Dials that this problem cannot have are freed, the share first.
inline plan::Plan plan_for(const Problem& problem, const plan::Machine& machine, plan::Dials dials) {
  plan::Plan made = plan::make_plan(problem, machine, dials);
  if (made.chunk == 0 && dials.kept_blocks >= 0) {
    dials.kept_blocks = -1;
    made = plan::make_plan(problem, machine, dials);
  }
  if (made.chunk == 0 && dials.keep >= 0) {
    dials.keep = -1;
    made = plan::make_plan(problem, machine, dials);
  }
  if (made.chunk == 0) made = plan::make_plan(problem, machine);
  return made;
}

// LOGITLESS_TEST_CUDA: the suites are compiled once more, for the CUDA backend in the CPU targets' place.
#if defined(LOGITLESS_TEST_CUDA)
}  // namespace logitless::test
#include "support/cuda_backend.hpp"
namespace logitless::test {
#else
class TargetBackend final : public Backend {
 public:
  TargetBackend(const cpu::Target& target, cpu::Executor& executor) : target_(target), executor_(executor) {}

  // Called with every plan that ran, before it runs.
  std::function<void(const plan::Plan&)> on_plan;
  plan::Dials dials;
  bool least_budget = false;  // the smallest workspace that any plan needs
  int machine_threads = 0;    // threads the plan is made for; 0: the executor's

  static std::size_t places_of_exponentials(const Mixture&) { return 3u; }
  std::string name() const override { return cpu::target_name(target_); }

  plan::Plan plan_of(const Problem& problem) const {
    plan::Machine machine = cpu::machine_of(target_, machine_threads > 0 ? machine_threads : executor_.threads());
    if (machine.bf16_products && machine.bf16_gflops == 0.0) machine.bf16_gflops = 1.0;  // a target without tuning
    if (least_budget) {
      Problem small = problem;
      small.budget = 1;
      const plan::Plan refused = plan::make_plan(small, machine);
      small.budget = static_cast<std::uint64_t>(refused.workspace_bytes);
      const plan::Plan least = plan::make_plan(small, machine);
      if (least.chunk > 0) return least;
    }
    return plan_for(problem, machine, dials);
  }
  Storage storage(const Problem& problem) override {
    const plan::Plan plan = plan_of(problem);
    Storage s;
    s.leaf = plan.machine.leaf;
    if (plan.bf16_products && problem.wants_gradient()) {
      s.unit = unit_of(DType::bf16);
      s.scaled_x = true;
    } else if (plan.kept_blocks > 0 && contract::is_half(plan.e_dtype)) {
      s.unit = unit_of(plan.e_dtype);
      // fp16 exponentials are kept scaled so that their largest nearly fills the format (2^15).
      if (plan.e_dtype == DType::f16) s.absolute = 0x1p-14 * underflow_of(DType::f16);
    }
    return s;
  }
  std::string run(const Problem& problem, const Operands& operands, Outcome* outcome, int* status) override {
    const plan::Plan plan = plan_of(problem);
    if (on_plan) on_plan(plan);
    return run(plan, operands, outcome, status);
  }
  std::string run(const plan::Plan& plan, const Operands& operands, Outcome* outcome, int* status) {
    Workspace workspace(plan.workspace_bytes);
    std::string error = cpu::run(plan, target_, executor_, operands, workspace.data(), outcome, status);
    if (!workspace.guards_intact()) return "wrote outside the workspace of " + std::to_string(plan.workspace_bytes);
    return error;
  }
  std::string describe(const Problem& problem) override {
    const plan::Plan plan = plan_of(problem);
    const char* keeps[] = {"none", "workspace", "inside dW"};
    return "plan C=" + std::to_string(plan.chunk) + " B=" + std::to_string(plan.block) +
           " kept=" + std::to_string(plan.kept_blocks) + "/" + std::to_string(plan.blocks) + " in " +
           keeps[static_cast<int>(plan.keep)] + (plan.bf16_products ? " bf16 products" : "");
  }

 private:
  const cpu::Target& target_;
  cpu::Executor& executor_;
};
#endif

}  // namespace logitless::test
