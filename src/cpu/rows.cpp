// Checks and bookkeeping of the caller's rows; see rows.hpp.
#include "cpu/rows.hpp"

#include <cmath>
#include <new>

namespace logitless::cpu {

namespace {

std::string reduce_rule(const contract::Problem& problem, const Operands& o, std::int64_t kept, double weight,
                        Reducer* out) {
  *out = row::reducer_of(problem, o, weight);
  if (!out->empty) return {};
  if (problem.loss.on_empty != contract::OnEmpty::error) return {};
  if (kept > 0)
    return "targets: the kept rows' class weights sum to 0, so the mean is undefined (choose on_empty nan or zero, "
           "reduction sum, or a normalizer)";
  return "targets: no row is kept of " + std::to_string(problem.rows) +
         ", so the mean is undefined (choose on_empty nan or zero, reduction sum, or a normalizer)";
}

}  // namespace

std::string check_rows(const contract::Problem& problem, const Operands& o, std::int64_t* kept, Reducer* reducer,
                       int* status) {
  bool const hard = problem.loss.targets == contract::Targets::hard || problem.loss.distillation.hard_share > 0;
  bool const weighed =
      problem.class_weight && problem.loss.targets == contract::Targets::hard && !problem.loss.policy.on;
  std::int64_t count = 0;
  double weight = 0.0;
  for (std::int64_t i = 0; i < problem.rows; ++i) {
    std::int64_t const y = target_or_none(o, i);
    if (o.targets && y == problem.loss.ignore_index) continue;
    if (hard && (y < 0 || y >= problem.classes())) {
      *status = status_target;
      return "targets[" + std::to_string(i) + "] is " + std::to_string(y) + ": must be in [0, " +
             std::to_string(problem.classes()) + ") or ignore_index " + std::to_string(problem.loss.ignore_index);
    }
    ++count;
    if (weighed) weight += static_cast<double>(float_at(o.class_weight, y));
  }
  *kept = count;
  if (!weighed) weight = static_cast<double>(count);
  std::string error = reduce_rule(problem, o, count, weight, reducer);
  if (!error.empty()) *status = status_empty;
  return error;
}

void free_slots(std::atomic<std::int64_t>* flags, int slots) {
  for (int i = 0; i < slots; ++i)
    new (flags + std::size_t{8} * static_cast<std::size_t>(i)) std::atomic<std::int64_t>(0);
}

std::string run(const plan::Plan& plan, const Target& target, Executor& executor, const Operands& operands,
                void* workspace, Outcome* outcome, int* status) {
  auto const run_kind = plan.problem.kind == contract::Kind::linear ? run_linear : run_logits;
  return run_kind(plan, target, executor, operands, static_cast<char*>(workspace), outcome, status);
}

}  // namespace logitless::cpu
