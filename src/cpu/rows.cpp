// Checks and bookkeeping of the caller's rows; see rows.hpp.
#include "cpu/rows.hpp"

#include <cmath>
#include <new>

namespace logitless::cpu {

namespace {

// The divisor that the caller gave, or what the kept rows weigh together.
double divisor_of(const contract::Problem& problem, const Operands& o, double weight) {
  if (o.normalizer.dtype == contract::DType::f64) return *static_cast<const double*>(o.normalizer.data);
  if (o.normalizer) return static_cast<double>(*static_cast<const float*>(o.normalizer.data));
  return problem.loss.normalizer > 0 ? problem.loss.normalizer : weight;
}

std::string reduce_rule(const contract::Problem& problem, const Operands& o, std::int64_t kept, double weight,
                        Reducer* out) {
  *out = {};
  if (problem.loss.reduction != contract::Reduction::mean) return {};
  // A given divisor makes the mean of no rows 0: a micro-batch may be empty where the whole batch is not.
  double const divisor = divisor_of(problem, o, weight);
  if (divisor != 0) {
    out->factor = 1.0 / divisor;
    return {};
  }
  out->empty = true;
  out->factor = 0.0;
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

double reduced_loss(const contract::Problem& problem, const Reducer& reducer, double total) {
  if (problem.loss.reduction == contract::Reduction::none) return 0.0;
  if (!reducer.empty) return total * reducer.factor;
  return problem.loss.on_empty == contract::OnEmpty::nan ? std::nan("") : 0.0;
}

void free_slots(std::atomic<std::int64_t>* flags, int slots) {
  for (int i = 0; i < slots; ++i)
    new (flags + std::size_t{8} * static_cast<std::size_t>(i)) std::atomic<std::int64_t>(0);
}

void put_ignored_row(const Operands& o, std::int64_t i) {
  for (const View* view :
       {&o.row_loss, &o.row_lse, &o.row_logprob, &o.row_entropy, &o.row_zloss, &o.row_mean_logit, &o.row_log_sum_p2})
    put_float(*view, i, 0.0);
  put_integer(o.row_argmax, i, -1);
  put_integer(o.row_correct, i, 0);
  if (o.stats)
    for (std::int64_t c = 0; c < o.stats.cols; ++c) {
      float const zero = 0.0F;
      __builtin_memcpy(row_of(o.stats, i) + c * o.stats.col_stride * 4, &zero, sizeof zero);
    }
}

std::string run(const plan::Plan& plan, const Target& target, Executor& executor, const Operands& operands,
                void* workspace, Outcome* outcome, int* status) {
  auto const run_kind = plan.problem.kind == contract::Kind::linear ? run_linear : run_logits;
  return run_kind(plan, target, executor, operands, static_cast<char*>(workspace), outcome, status);
}

}  // namespace logitless::cpu
