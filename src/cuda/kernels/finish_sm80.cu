// Between the passes, a thread a slot: merged statistics -> losses, per-row outputs and the coefficients of gradients,
// in double; then one block sums all slots in order to the reduced loss and the counts. O(R): some 10 us at R 8192.
#include "cuda/device/logit.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/kernels/kernels.hpp"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 64;  // many blocks: double arithmetic is latency

__device__ std::int64_t own_slot() { return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

__global__ void __launch_bounds__(kThreads)
    pairs(const __grid_constant__ RowCall call, const __grid_constant__ Rows rows) {
  std::int64_t const slot = own_slot();
  if (slot >= rows.slots || rows.flag[slot] == kIgnored) return;
  row::Finisher const finisher(call.p, call.o, call.topk);
  row::PairOutcome out = finisher.pair_outcome(rows.pair_sums[slot]);
  out.p_mixed = out.q_mixed = 0.0;
  rows.pair[slot] = out;
  rows.pair_row[slot] = finisher.pair_row(rows.index[slot], out, call.scalars->reducer);
}

__device__ row::Numbers numbers_of(const RowCall& call, const Rows& rows, std::int64_t slot) {
  contract::Problem const& p = call.p;
  row::Finisher const finisher(call.p, call.o, call.topk);
  std::int64_t const i = rows.index[slot], y = rows.target[slot];
  row::Numbers v;
  if (p.call == contract::Call::backward) {
    if (call.o.stats) return finisher.saved(i);
    return finisher.from_lse(i, y >= 0 ? load_view(call.o.z, i, y) : -INFINITY);
  }
  v.m = rows.m[slot];
  v.r = rows.r[slot];
  v.k = p.wants_kappa() ? rows.k[slot] : 0.0F;
  v.n = p.wants_full() ? rows.n[slot] : static_cast<float>(p.vocab);
  v.t = rows.t[slot];
  v.g = rows.g[slot];
  v.u = rows.u[slot];
  v.c = rows.c[slot];
  v.z_y = finisher.has_target() && y >= 0 && y < p.vocab ? rows.z_y[slot] : -INFINITY;
  if (p.argmax) v.argmax = rows.argmax[slot];
  return v;
}

// Power of two that brings a row's |D| to at most 2^14, for fp16.
__device__ std::int32_t exponent_of(const row::Outcome& out, const row::PairRow* pair) {
  double most = fabs(out.d.a) + fabs(out.d.c) + fabs(out.d.e) * 32.0 + fabs(out.d.at_target);
  if (pair != nullptr) most += fabs(static_cast<double>(pair->g)) * 32.0;
  if (!(most > 0.0) || !(most < static_cast<double>(INFINITY))) return 0;
  int e = 0;
  frexp(most, &e);  // most < 2^e
  return min(14 - e, 100);
}

__global__ void __launch_bounds__(kThreads)
    finish(const __grid_constant__ RowCall call, const __grid_constant__ Rows rows, FinishMode mode) {
  std::int64_t const slot = own_slot();
  if (slot >= rows.slots) return;
  contract::Problem const& p = call.p;
  std::int64_t const i = rows.index[slot];
  if (rows.scale != nullptr) rows.scale[slot] = rows.shift[slot] = rows.at_target[slot] = 0.0F;
  if (rows.d_scale != nullptr) rows.d_reference[slot] = rows.d_scale[slot] = rows.d_at_target[slot] = 0.0F;
  if (rows.exponent != nullptr) rows.exponent[slot] = 1000;  // of a row without gradient: the least is another's
  rows.loss[slot] = 0.0;
  if (i < 0 || rows.flag[slot] == kIgnored) return;
  row::Finisher const finisher(call.p, call.o, call.topk);
  row::Numbers v = numbers_of(call, rows, slot);
  std::int64_t y = rows.target[slot] + p.first_column;
  bool const no_target = rows.flag[slot] == kNoTarget;
  if (no_target) {
    v.m = NAN;
    y = 0;
  }
  if (p.pairs() && p.call == contract::Call::backward) rows.pair[slot] = finisher.saved_pair(i);
  const row::PairOutcome* const pair = p.pairs() ? rows.pair + slot : nullptr;
  // A target of a part may be another part's: then its weight is read by its number in the whole.
  if (finisher.has_target() && call.o.targets && !no_target) y = row::target_of(call.o.targets, i);
  row::Outcome const out = finisher.finish(i, y, v, call.scalars->reducer, mode.gradient, pair);
  rows.loss[slot] = out.loss;
  bool const bad = !no_target && out.result.bad && !(p.is_part() && p.call == contract::Call::forward);
  if (bad) rows.flag[slot] = kBad;
  if (rows.argmax != nullptr) rows.argmax[slot] = out.correct ? 1 : 0;
  if (pair != nullptr) rows.pair_row[slot] = finisher.pair_row(i, *pair, call.scalars->reducer);
  if (!mode.gradient) return;
  bool const leaves_trace = !bad && !no_target;
  auto const put = [&](float* array, double value) { array[slot] = leaves_trace ? static_cast<float>(value) : 0.0F; };
  put(rows.shift, out.d.c);
  if (mode.exponentials) {
    // E refers to reference: what every entry of E, the target's too, is multiplied by.
    float reference = rows.reference[slot];
    if (stands_above(rows, slot)) rows.reference[slot] = reference = rows.m[slot];
    double const scale = out.d.a * out.result.inv_s * exp(static_cast<double>(reference) - out.result.m);
    put(rows.scale, scale);
    put(rows.at_target, scale != 0.0 ? out.d.at_target * out.slope_y / scale : 0.0);
  }
  if (rows.d_scale != nullptr) {
    put(rows.d_reference, out.result.m);
    put(rows.d_scale, out.d.a * out.result.inv_s);
    put(rows.d_at_target, out.d.at_target - out.d.c);
  }
  if (rows.gradient != nullptr) rows.gradient[slot] = finisher.gradient_row(i, out);
  if (mode.half_d && leaves_trace && !finisher.silent(i))
    rows.exponent[slot] = exponent_of(out, pair != nullptr ? rows.pair_row + slot : nullptr);
}

constexpr int kSumThreads = 1024;

// Each thread sums every 1024th slot, then a tree: one order for any machine.
__global__ void __launch_bounds__(kSumThreads)
    reduce(const __grid_constant__ RowCall call, const __grid_constant__ Rows rows,
           const __grid_constant__ Results results, bool filtered) {
  __shared__ double room[kSumThreads / kWarp];
  __shared__ long long counts[kSumThreads / kWarp];
  __shared__ int exponents[kSumThreads / kWarp];
  double total = 0.0, variance = 0.0;
  long long bad = 0, correct = 0, left = 0, seen = 0;
  int least = 1000;
  for (std::int64_t slot = threadIdx.x; slot < rows.slots; slot += kSumThreads) {
    std::uint8_t const flag = rows.flag[slot];
    if (flag == kIgnored) continue;
    total += rows.loss[slot];
    if (flag == kBad) ++bad;
    if (rows.argmax != nullptr) correct += rows.argmax[slot];
    if (rows.exponent != nullptr) least = min(least, rows.exponent[slot]);
    if (filtered && rows.filter_left[slot] >= 0) {
      left += rows.filter_left[slot];
      seen += call.p.vocab;
      variance += rows.filter_variance[slot];
    }
  }
  total = block_sum<kSumThreads>(total, room);
  variance = block_sum<kSumThreads>(variance, room);
  bad = block_sum<kSumThreads>(bad, counts);
  correct = block_sum<kSumThreads>(correct, counts);
  left = block_sum<kSumThreads>(left, counts);
  seen = block_sum<kSumThreads>(seen, counts);
  for (int d = kWarp / 2; d > 0; d /= 2) least = min(least, __shfl_xor_sync(~0u, least, d));
  if (threadIdx.x % kWarp == 0) exponents[threadIdx.x / kWarp] = least;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 0; w < kSumThreads / kWarp; ++w) least = min(least, exponents[w]);
  Scalars& s = *call.scalars;
  s.total = total;
  s.bad = bad;
  s.correct = correct;
  s.least_exponent = least == 1000 ? 0 : least;
  s.dw_alpha = static_cast<float>(exp2(static_cast<double>(-s.least_exponent)));
  double loss = row::reduced_loss(call.p, s.reducer, total);
  if (s.kept > rows.slots) loss = static_cast<double>(NAN);
  if (results.loss != nullptr) {
    if (results.loss_dtype == contract::DType::f64)
      *static_cast<double*>(results.loss) = loss;
    else
      *static_cast<float*>(results.loss) = static_cast<float>(loss);
  }
  if (results.kept != nullptr) *results.kept = s.kept;
  if (results.bad != nullptr) *results.bad = bad;
  if (results.correct != nullptr) *results.correct = correct;
  if (results.filter_kept != nullptr)
    *results.filter_kept = seen > 0 ? static_cast<double>(left) / static_cast<double>(seen) : 1.0;
  if (results.filter_variance != nullptr) *results.filter_variance = variance;
}

// Outputs of rows that have no slot, and of those whose slot is not kept.
__global__ void ignored(const __grid_constant__ RowCall call, const __grid_constant__ Rows rows) {
  std::int64_t const i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= call.p.rows) return;
  std::int64_t const slot = rows.slot_of != nullptr ? rows.slot_of[i] : i;
  if (slot < 0 || rows.flag[slot] == kIgnored) row::put_ignored(call.o, i);
}

unsigned blocks_of(std::int64_t n, std::int64_t threads) { return static_cast<unsigned>((n + threads - 1) / threads); }

}  // namespace

void finish_pairs(const RowCall& call, const Rows& rows, cudaStream_t stream) {
  if (rows.slots > 0) pairs<<<blocks_of(rows.slots, kThreads), kThreads, 0, stream>>>(call, rows);
}

void finish_rows(const RowCall& call, const Rows& rows, FinishMode mode, cudaStream_t stream) {
  if (rows.slots > 0) finish<<<blocks_of(rows.slots, kThreads), kThreads, 0, stream>>>(call, rows, mode);
  if (call.p.rows > 0 && call.p.call != contract::Call::backward)
    ignored<<<blocks_of(call.p.rows, 256), 256, 0, stream>>>(call, rows);
}

void reduce_rows(const RowCall& call, const Rows& rows, const Results& results, bool filtered, cudaStream_t stream) {
  reduce<<<1, kSumThreads, 0, stream>>>(call, rows, results, filtered);
}

}  // namespace logitless::cuda
