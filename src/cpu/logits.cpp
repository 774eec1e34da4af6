// Cross-entropy of given logits on the CPU: z [R,V], y [R] -> loss, D [R,V] (apart or over z). One read of z and one
// write of D: a row's exponentials wait in the L2 cache (in D itself when it is fp32, else in V floats of scratch)
// until its sum is known. Rows are independent, so bits do not depend on threads.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/rows.hpp"

namespace logitless::cpu {
namespace {

using contract::Call;
using contract::DType;
using contract::size_of;

struct LogitsRun {
  const plan::Plan& plan;
  const contract::Problem& p;
  const RowKernels& rows;
  Executor& executor;
  const Operands& o;
  Reducer reducer;
  float* thread_leaves;
  std::int64_t leaf_floats, array_floats;  // of a thread; of one of its five arrays
  float* thread_row;
  std::int64_t row_floats;
  std::atomic<std::int64_t>* flags;
  double* loss;
  std::int64_t* bad;

  // One kept row with target y; next: the row of logits that this thread takes next, or null.
  void run_row(std::int64_t i, std::int64_t y, const char* next) const {
    Slot const slot(flags, plan.machine.threads);
    float* m = thread_leaves + slot.index() * leaf_floats;
    float *leaf_m = m + array_floats, *r = leaf_m + array_floats, *k = r + array_floats, *n = k + array_floats;
    std::int64_t const leaves = (p.vocab + leaf_columns - 1) / leaf_columns;
    bool const smooth = p.loss.smoothing > 0;
    const char* const z = row_of(o.z, i);
    char* const d = p.dz != DType::none ? row_of(o.dz, i) : nullptr;
    float* e = nullptr;
    float z_y;
    contract::RowStatistics<double> s{0, 0, 0, static_cast<double>(p.vocab)};
    if (p.call == Call::backward) {
      z_y = saved_statistics(i, y, &s);
    } else {
      if (d != nullptr) e = p.dz == DType::f32 ? reinterpret_cast<float*>(d) : thread_row + slot.index() * row_floats;
      z_y = rows.logits_row(z, p.z, p.vocab, y, smooth, m, r, k, e);
      std::copy(m, m + leaves, leaf_m);
      LeafResult const all = rows.merge_leaves(m, r, k, n, leaves, p.vocab);
      s.m = all.m;
      s.r = all.r;
      s.k = smooth ? all.k : 0.0;
    }
    auto const vocab = static_cast<double>(p.vocab);
    auto result = contract::finish(s, static_cast<double>(z_y));
    if (p.call == Call::backward && !o.stats && !result.bad) {
      // Only lse is known: s is e^0 by definition of the reference, and q is as exact as z_y - lse.
      result.log_s = 0.0;
      result.inv_s = 1.0;
      result.q = -std::expm1(static_cast<double>(z_y) - result.m);
    }
    loss[i] = result.bad ? std::nan("") : contract::loss_of(result, p.loss.smoothing, vocab);
    bad[i] = result.bad ? 1 : 0;
    if (p.call != Call::backward) put_row(o, i, result, loss[i], s, z_y);
    if (d == nullptr) return;
    if (result.bad) {
      float const nan = std::nanf("");
      for (std::int64_t j = 0; j < p.vocab; ++j) rows.store(&nan, 1, 1.0F, d + j * size_of(p.dz), p.dz);
      return;
    }
    auto const c = contract::coefficients_of(result, upstream_of(p, o, reducer, i), p.loss.smoothing, vocab);
    auto const scale = static_cast<float>(c.a * result.inv_s), shift = static_cast<float>(c.c);
    if (e != nullptr)
      rows.logits_gradient(e, leaf_m, p.vocab, static_cast<float>(result.m), scale, shift, d, p.dz, next, size_of(p.z));
    else
      rows.logits_gradient_again(z, p.z, p.vocab, static_cast<float>(result.m), scale, shift, d, p.dz);
    float const at_target = static_cast<float>(c.at_target - c.c);
    rows.store(&at_target, 1, 1.0F, d + y * size_of(p.dz), p.dz);
  }

  // From stats (m, r, z_y, k), or from lse alone. Returns z_y.
  float saved_statistics(std::int64_t i, std::int64_t y, contract::RowStatistics<double>* s) const {
    if (o.stats) {
      float values[4];
      for (int c = 0; c < 4; ++c) std::memcpy(values + c, row_of(o.stats, i) + c * o.stats.col_stride * 4, 4);
      *s = {values[0], values[1], values[3], s->n};
      return values[2];
    }
    float z_y = 0.0F;
    rows.decode(row_of(o.z, i) + y * size_of(p.z), p.z, 1, 1.0F, 0.0F, &z_y);
    float const lse = float_at(o.lse, i);
    *s = {lse, 1.0, 0.0, s->n};
    // A target above its own lse is rounding; finish() must not move the reference to it.
    return std::isnan(z_y) ? z_y : std::min(z_y, lse);
  }
};

}  // namespace

std::string run_logits(const plan::Plan& plan, const Target& target, Executor& executor, const Operands& o,
                       char* workspace, Outcome* outcome, int* status) {
  contract::Problem const& p = plan.problem;
  if (p.rows > 0 && (o.z.col_stride != 1 && p.vocab > 1)) {
    *status = status_invalid;
    return "logits: stride[1] is " + std::to_string(o.z.col_stride) +
           ": classes must be adjacent (1); make it contiguous";
  }
  std::int64_t kept = 0;
  if (std::string error = check_targets(p, o.targets, &kept); !error.empty()) {
    *status = status_target;
    return error;
  }
  Reducer reducer;
  if (std::string error = reduce_rule(p, kept, &reducer); !error.empty()) {
    *status = status_empty;
    return error;
  }
  auto buffer = [&](const char* name) {
    plan::Buffer const* b = plan.find(name);
    return b == nullptr ? nullptr : workspace + b->offset;
  };
  plan::Buffer const* const leaves = plan.find("thread_leaves");  // none in backward
  plan::Buffer const* const row = plan.find("thread_row");
  LogitsRun const run{plan,
                      p,
                      target.rows,
                      executor,
                      o,
                      reducer,
                      reinterpret_cast<float*>(buffer("thread_leaves")),
                      leaves != nullptr ? leaves->shape[1] * leaves->shape[2] : 0,
                      leaves != nullptr ? leaves->shape[2] : 0,
                      reinterpret_cast<float*>(buffer("thread_row")),
                      row != nullptr ? row->shape[1] : 0,
                      reinterpret_cast<std::atomic<std::int64_t>*>(buffer("thread_slots")),
                      reinterpret_cast<double*>(buffer("row_loss")),
                      reinterpret_cast<std::int64_t*>(buffer("row_bad"))};
  free_slots(run.flags, plan.machine.threads);
  // A task is a few adjacent rows: while one is written, the next is fetched.
  std::int64_t const group = std::clamp<std::int64_t>(p.rows / (std::int64_t{16} * executor.threads()), 1, 8);
  parallel(executor, (p.rows + group - 1) / group, [&](std::int64_t task) {
    std::int64_t const end = std::min(p.rows, (task + 1) * group);
    for (std::int64_t i = task * group; i < end; ++i) {
      std::int64_t const y = target_of(o.targets, i);
      if (y != p.loss.ignore_index) {
        bool const more = i + 1 < end && target_of(o.targets, i + 1) != p.loss.ignore_index;
        run.run_row(i, y, more ? row_of(o.z, i + 1) : nullptr);
        continue;
      }
      run.loss[i] = 0.0;
      run.bad[i] = 0;
      if (p.call != Call::backward) put_ignored_row(o, i);
      if (p.dz != DType::none) std::memset(row_of(o.dz, i), 0, static_cast<std::size_t>(p.vocab * size_of(p.dz)));
    }
  });
  double total = 0.0;
  outcome->bad = 0;
  for (std::int64_t i = 0; i < p.rows; ++i) {
    total += run.loss[i];
    outcome->bad += run.bad[i];
  }
  outcome->kept = kept;
  outcome->loss = reduced_loss(p, reducer, total);
  return {};
}

}  // namespace logitless::cpu
