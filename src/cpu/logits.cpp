// Cross-entropy of given logits on the CPU: z [R,V], y [R] -> loss, D [R,V] (apart or over z). One read of z and one
// write of D: a row's exponentials wait in the L2 cache (in D itself when it is fp32, else in V floats of scratch)
// until its sum is known. Rows are independent, so bits do not depend on threads.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/row_options.hpp"

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
  std::int64_t leaf_floats, array_floats;  // of a thread; of one of its arrays
  float* thread_row;
  std::int64_t row_floats;
  std::atomic<std::int64_t>* flags;
  double* loss;
  std::int64_t* bad;  // 1: bad, 2: the target is the argmax
  RowOptions options;
  FilterTally* filter;

  LeafArrays arrays_of(float* at) const {
    LeafArrays a{};
    float** const all[] = {&a.m, &a.r, &a.k, &a.n, &a.t, &a.g, &a.u, &a.c};
    for (std::int64_t n = 0; n < (options.full() ? 8 : 4); ++n, at += array_floats) *all[n] = at;
    return a;
  }
  std::int64_t leaves() const { return (p.vocab + leaf_columns - 1) / leaf_columns; }
  std::int64_t columns_of(std::int64_t leaf) const { return std::min(leaf_columns, p.vocab - leaf * leaf_columns); }
  // Kernels that go from stored logits to stored gradients serve; else each leaf is shaped in a buffer.
  bool plain() const {
    return !options.full() && !options.shapes() && !options.needs_logits() && options.class_weights() == nullptr;
  }

  // One kept row with target y; next: the row of logits that this thread takes next, or null.
  void run_row(std::int64_t i, std::int64_t y, const char* next) const {
    Slot const slot(flags, plan.machine.threads);
    float* const leaf_m = thread_leaves + slot.index() * leaf_floats;  // kept while m is merged
    bool const smooth = p.loss.smoothing > 0;
    const char* const z = row_of(o.z, i);
    char* const d = p.dz != DType::none ? row_of(o.dz, i) : nullptr;
    float* e = nullptr;
    RowNumbers v;
    PairOutcome pair;
    if (p.call == Call::backward) {
      v = o.stats ? options.rows().saved(i) : from_lse(i, y);
      if (p.pairs()) pair = options.rows().saved_pair(i);
    } else {
      LeafArrays const a = arrays_of(leaf_m + array_floats);
      if (plain()) {
        if (d != nullptr) e = p.dz == DType::f32 ? reinterpret_cast<float*>(d) : thread_row + slot.index() * row_floats;
        v.z_y = rows.logits_row(z, p.z, p.vocab, y, smooth, a.m, a.r, a.k, e);
        for (std::int64_t l = 0; l < leaves(); ++l) a.n[l] = static_cast<float>(columns_of(l));
      } else {
        shaped_leaves(i, y, a, reinterpret_cast<std::int32_t*>(leaf_m + 9 * array_floats), &v, &pair);
      }
      std::copy(a.m, a.m + leaves(), leaf_m);
      rows.merge_leaves(a, leaves());
      if (p.argmax) v.argmax = argmax_of(leaf_m, a.m[0], reinterpret_cast<std::int32_t*>(leaf_m + 9 * array_floats));
      v.m = a.m[0];
      v.r = a.r[0];
      v.k = smooth || options.weighs() ? a.k[0] : 0.0F;
      v.n = a.n[0];
      if (options.full()) {
        v.t = a.t[0];
        v.g = a.g[0];
        v.u = a.u[0];
        v.c = a.c[0];
      }
    }
    RowOutcome row = options.rows().finish(i, y, v, reducer, d != nullptr, p.pairs() ? &pair : nullptr);
    auto const& result = row.result;
    loss[i] = row.loss;
    bad[i] = (result.bad ? 1 : 0) | (row.correct ? 2 : 0);
    if (d == nullptr) return;
    if (options.silent(i)) {
      std::memset(d, 0, static_cast<std::size_t>(p.vocab * size_of(p.dz)));
      return;
    }
    if (result.bad) {
      float const nan = std::nanf("");
      for (std::int64_t j = 0; j < p.vocab; ++j) rows.store(&nan, 1, 1.0F, d + j * size_of(p.dz), p.dz);
      return;
    }
    if (!plain()) return shaped_gradient(i, y, row, pair, d);
    auto const scale = static_cast<float>(row.d.a * result.inv_s), shift = static_cast<float>(row.d.c);
    if (e != nullptr)
      rows.logits_gradient(e, leaf_m, p.vocab, static_cast<float>(result.m), scale, shift, d, p.dz, next, size_of(p.z));
    else
      rows.logits_gradient_again(z, p.z, p.vocab, static_cast<float>(result.m), scale, shift, d, p.dz);
    float const at_target = static_cast<float>(row.d.at_target - row.d.c);
    rows.store(&at_target, 1, 1.0F, d + y * size_of(p.dz), p.dz);
  }

  // A leaf of the row's logits, transformed and restricted. Returns the target's column in it, or -1.
  std::int64_t shaped_leaf(std::int64_t i, std::int64_t y, std::int64_t leaf, float* z) const {
    std::int64_t const j0 = leaf * leaf_columns, n = columns_of(leaf), here = y - j0;
    std::int64_t const mine = y >= 0 && here >= 0 && here < n ? here : -1;
    rows.decode(row_of(o.z, i) + j0 * size_of(p.z), p.z, n, 1.0F, 0.0F, z);
    if (options.shapes()) options.shape(z, n, j0, i, mine);
    return mine;
  }

  void shaped_leaves(std::int64_t i, std::int64_t y, const LeafArrays& a, std::int32_t* argmax, RowNumbers* v,
                     PairOutcome* pair) const {
    alignas(64) float z[leaf_columns];
    auto sum = contract::PairStatistics<double>::identity();
    float weights[leaf_columns], bits[leaf_columns];
    v->z_y = -INFINITY;
    for (std::int64_t l = 0; l < leaves(); ++l) {
      std::int64_t const n = columns_of(l), mine = shaped_leaf(i, y, l, z);
      if (p.pairs()) {
        options.teacher_logits(weights, n, l * leaf_columns, i);
        PairNumbers const x = rows.pair_leaf(z, weights, n, inverse_tau());
        sum = contract::merge(sum, contract::PairStatistics<double>{x.ms, x.ss, x.ts, x.cs, x.mt, x.st, x.tt, x.ct});
      }
      const float* const kappa = options.weighs() ? options.kappa(weights, n, l * leaf_columns, i) : nullptr;
      const float* const kept = options.kept(bits, n, l * leaf_columns, i, mine);
      LeafNumbers const x = rows.leaf_full(z, n, mine, options.wants(kappa, kept));
      a.m[l] = x.m;
      a.r[l] = x.r;
      a.k[l] = x.k;
      a.n[l] = options.full() ? x.n : static_cast<float>(n);
      if (mine >= 0) v->z_y = x.z_y;
      if (!options.full()) continue;
      a.t[l] = x.t;
      a.g[l] = x.g;
      a.u[l] = x.u;
      a.c[l] = x.c;
      argmax[l] = x.argmax;
    }
    if (p.pairs()) *pair = options.rows().pair_outcome(sum);
  }
  float inverse_tau() const { return static_cast<float>(1.0 / p.loss.distillation.tau); }

  std::int64_t argmax_of(const float* m, float top, const std::int32_t* argmax) const {
    for (std::int64_t l = 0; l < leaves(); ++l)
      if (m[l] == top) return l * leaf_columns + argmax[l];
    return -1;
  }

  // D may lie over the logits: a leaf is read whole before it is written.
  void shaped_gradient(std::int64_t i, std::int64_t y, const RowOutcome& row, const PairOutcome& pair, char* d) const {
    alignas(64) float z[leaf_columns], logits[leaf_columns];
    float weights[leaf_columns];
    GradientRow by = options.rows().gradient_row(i, row);
    PairRow const both = p.pairs() ? options.rows().pair_row(i, pair, reducer) : PairRow{};
    double variance = 0.0;
    std::int64_t left = 0;
    for (std::int64_t l = 0; l < leaves(); ++l) {
      std::int64_t const j0 = l * leaf_columns, n = columns_of(l), mine = shaped_leaf(i, y, l, z);
      by.kappa = options.gradient_kappa(weights, n, j0, i, mine);
      by.column0 = p.first_column + j0;
      by.target = mine;
      if (p.pairs()) std::copy(z, z + n, logits);
      left += rows.gradient(z, n, by, &variance);
      if (both.g != 0.0F) {
        options.teacher_logits(weights, n, j0, i);
        rows.pair_gradient(logits, weights, n, both, z);
      }
      rows.store(z, n, 1.0F, d + j0 * size_of(p.dz), p.dz);
    }
    if (by.filter > 0.0F) filter->add(p.vocab, left, variance);
  }

  RowNumbers from_lse(std::int64_t i, std::int64_t y) const {
    float z_y = 0.0F;
    rows.decode(row_of(o.z, i) + y * size_of(p.z), p.z, 1, 1.0F, 0.0F, &z_y);
    return options.rows().from_lse(i, z_y);
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
  Reducer reducer;
  if (std::string error = check_rows(p, o, &kept, &reducer, status); !error.empty()) return error;
  auto buffer = [&](const char* name) {
    plan::Buffer const* b = plan.find(name);
    return b == nullptr ? nullptr : workspace + b->offset;
  };
  plan::Buffer const* const leaves = plan.find("thread_leaves");  // none in backward
  plan::Buffer const* const row = plan.find("thread_row");
  FilterTally filter;
  LogitsRun const run{
      plan,
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
      reinterpret_cast<std::int64_t*>(buffer("row_bad")),
      {p,
       o,
       target.rows,
       {reinterpret_cast<float*>(buffer("bias")), reinterpret_cast<float*>(buffer("class_weight")), nullptr,
        reinterpret_cast<std::int64_t*>(buffer("topk_ids")), reinterpret_cast<float*>(buffer("topk_values")),
        reinterpret_cast<float*>(buffer("topk_other"))}},
      &filter};
  if (std::string error = run.options.prepare(); !error.empty()) {
    *status = status_target;
    return error;
  }
  free_slots(run.flags, plan.machine.threads);
  // A task is a few adjacent rows: while one is written, the next is fetched.
  std::int64_t const group = std::clamp<std::int64_t>(p.rows / (std::int64_t{16} * executor.threads()), 1, 8);
  parallel(executor, (p.rows + group - 1) / group, [&](std::int64_t task) {
    std::int64_t const end = std::min(p.rows, (task + 1) * group);
    for (std::int64_t i = task * group; i < end; ++i) {
      auto const ignored = [&](std::int64_t at) {
        return o.targets && target_of(o.targets, at) == p.loss.ignore_index;
      };
      if (!ignored(i)) {
        bool const more = i + 1 < end && !ignored(i + 1);
        run.run_row(i, run.options.has_target() ? target_or_none(o, i) : -1, more ? row_of(o.z, i + 1) : nullptr);
        continue;
      }
      run.loss[i] = 0.0;
      run.bad[i] = 0;
      if (p.call != Call::backward) row::put_ignored(o, i);
      if (p.dz != DType::none) std::memset(row_of(o.dz, i), 0, static_cast<std::size_t>(p.vocab * size_of(p.dz)));
    }
  });
  double total = 0.0;
  outcome->bad = outcome->correct = 0;
  for (std::int64_t i = 0; i < p.rows; ++i) {
    total += run.loss[i];
    outcome->bad += run.bad[i] & 1;
    outcome->correct += run.bad[i] >> 1;
  }
  filter.report(outcome);
  outcome->kept = kept;
  outcome->loss = reduced_loss(p, reducer, total);
  return {};
}

}  // namespace logitless::cpu
