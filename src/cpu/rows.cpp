// Checks and bookkeeping of the caller's rows; see rows.hpp.
#include "cpu/rows.hpp"

#include <cmath>
#include <new>

namespace logitless::cpu {

std::string check_targets(const contract::Problem& problem, const View& targets, std::int64_t* kept) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < problem.rows; ++i) {
    std::int64_t const y = target_of(targets, i);
    if (y == problem.loss.ignore_index) continue;
    if (y < 0 || y >= problem.vocab)
      return "targets[" + std::to_string(i) + "] is " + std::to_string(y) + ": must be in [0, " +
             std::to_string(problem.vocab) + ") or ignore_index " + std::to_string(problem.loss.ignore_index);
    ++count;
  }
  *kept = count;
  return {};
}

std::string reduce_rule(const contract::Problem& problem, std::int64_t kept, Reducer* out) {
  *out = {};
  if (problem.loss.reduction != contract::Reduction::mean) return {};
  // A given divisor makes the mean of no rows 0: a micro-batch may be empty where the whole batch is not.
  if (problem.loss.normalizer > 0) {
    out->factor = 1.0 / problem.loss.normalizer;
    return {};
  }
  if (kept > 0) {
    out->factor = 1.0 / static_cast<double>(kept);
    return {};
  }
  out->empty = true;
  out->factor = 0.0;
  if (problem.loss.on_empty == contract::OnEmpty::error)
    return "targets: no row is kept of " + std::to_string(problem.rows) +
           ", so the mean is undefined (choose on_empty nan or zero, reduction sum, or a normalizer)";
  return {};
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
  put_float(o.row_loss, i, 0.0);
  put_float(o.row_lse, i, 0.0);
  put_float(o.row_logprob, i, 0.0);
  if (o.stats)
    for (int c = 0; c < 4; ++c) {
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
