// Before the passes: targets [R] -> which rows are kept, the slot of each, what they weigh together and so the divisor;
// top-k ids and probabilities [R,k] -> checked values. One block walks all targets in order, 1024 at a time: 3 us at
// R 8192, and every sum has one order. Nothing is synchronised: the counts stay here.
#include "cuda/device/reduce.cuh"
#include "cuda/kernels/kernels.hpp"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 1024;

__device__ bool is_ignored(const RowCall& call, std::int64_t i) {
  return call.o.targets && row::target_of(call.o.targets, i) == call.p.loss.ignore_index;
}

// Exclusive sum over the block of a flag a thread; *all: the sum of all.
__device__ int exclusive_count(bool mine, int* room, int* all) {
  unsigned const ballot = __ballot_sync(~0u, mine);
  int const lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  __syncthreads();
  if (lane == 0) room[warp] = __popc(ballot);
  __syncthreads();
  int before = 0, sum = 0;
  for (int w = 0; w < kThreads / kWarp; ++w) {
    if (w < warp) before += room[w];
    sum += room[w];
  }
  *all = sum;
  return before + __popc(ballot & ((1u << lane) - 1));
}

__global__ void __launch_bounds__(kThreads)
    prepare(const __grid_constant__ RowCall call, const __grid_constant__ Rows rows) {
  __shared__ int room[kThreads / kWarp];
  __shared__ double sums[kThreads / kWarp];
  __shared__ long long first_wrong;
  contract::Problem const& p = call.p;
  row::Finisher const finisher(call.p, call.o, call.topk);
  bool const hard = finisher.has_target();
  bool const weighed = p.class_weight && p.loss.targets == contract::Targets::hard && !p.loss.policy.on;
  if (threadIdx.x == 0) first_wrong = p.rows;
  std::int64_t kept = 0;
  double weight = 0.0;
  if (rows.slot_of == nullptr) {
    // Slots are rows: nothing to order, so the rounds do not wait for each other.
    std::int64_t mine = 0, wrong_row = p.rows;
#pragma unroll 4
    for (std::int64_t i = threadIdx.x; i < p.rows; i += kThreads) {
      bool const keeps = !is_ignored(call, i);
      std::int64_t const y = keeps ? row::target_or_none(call.o, i) : -1;
      bool const wrong = keeps && hard && (y < 0 || y >= p.classes());
      if (wrong) wrong_row = min(wrong_row, i);
      mine += keeps ? 1 : 0;
      if (weighed && keeps && !wrong) weight += static_cast<double>(row::float_at(call.o.class_weight, y));
      rows.index[i] = i;
      rows.target[i] = keeps && hard && !wrong ? y - p.first_column : -1;
      rows.flag[i] = !keeps ? kIgnored : wrong ? kNoTarget : kKept;
      rows.loss[i] = 0.0;
    }
    __syncthreads();
    if (wrong_row < p.rows) atomicMin(&first_wrong, static_cast<long long>(wrong_row));
    kept = block_sum<kThreads>(static_cast<int>(mine), room);
    if (weighed) weight = block_sum<kThreads>(weight, sums);
  }
  for (std::int64_t base = 0; rows.slot_of != nullptr && base < p.rows; base += kThreads) {
    std::int64_t const i = base + threadIdx.x;
    bool const here = i < p.rows, keeps = here && !is_ignored(call, i);
    std::int64_t const y = keeps ? row::target_or_none(call.o, i) : -1;
    bool const wrong = keeps && hard && (y < 0 || y >= p.classes());
    int all = 0;
    std::int64_t const at = kept + exclusive_count(keeps, room, &all);
    if (wrong) atomicMin(&first_wrong, static_cast<long long>(i));  // an integer: no order changes it
    if (weighed)
      weight +=
          block_sum<kThreads>(keeps && !wrong ? static_cast<double>(row::float_at(call.o.class_weight, y)) : 0.0, sums);
    std::int64_t const slot = at;
    if (here) rows.slot_of[i] = keeps && slot < rows.slots ? slot : -1;
    if (keeps && slot < rows.slots) {
      rows.index[slot] = i;
      rows.target[slot] = hard && !wrong ? y - p.first_column : -1;
      rows.flag[slot] = wrong ? kNoTarget : kKept;
      rows.loss[slot] = 0.0;
    }
    kept += all;
  }
  for (std::int64_t slot = (rows.slot_of != nullptr ? min(kept, rows.slots) : p.rows) + threadIdx.x; slot < rows.slots;
       slot += kThreads) {
    rows.index[slot] = -1;
    rows.target[slot] = -1;
    rows.flag[slot] = kIgnored;
    rows.loss[slot] = 0.0;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  Scalars& s = *call.scalars;
  s.reducer = row::reducer_of(p, call.o, weighed ? weight : static_cast<double>(kept));
  s.kept = kept;
  s.zero = 0.0F;
  s.one = s.dw_alpha = 1.0F;
  s.least_exponent = 0;
  Status record{};
  if (first_wrong < p.rows) {
    record = {2, kTargetOutOfRange, first_wrong, row::target_of(call.o.targets, first_wrong), p.classes()};
  } else if (kept > rows.slots) {
    record = {1, kMoreKept, kept, rows.slots, 0};
  } else if (s.reducer.empty && p.loss.on_empty == contract::OnEmpty::error) {
    record = {3, kNothingKept, kept, 0, 0};
  }
  // More rows than the host said: what is left out must not look like an answer.
  if (kept > rows.slots) s.reducer.factor = static_cast<double>(NAN);
  if (record.code != 0 && call.status->code == 0) *call.status = record;
}

// One thread a row: k is small.
__global__ void topk(const __grid_constant__ RowCall call, std::int64_t* all_ids, float* all_values, float* all_other,
                     const __grid_constant__ Rows rows) {
  contract::Problem const& p = call.p;
  std::int64_t const i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, k = p.topk;
  if (i >= p.rows) return;
  all_other[i] = 0.0F;
  std::int64_t const slot = rows.slot_of != nullptr ? rows.slot_of[i] : i;
  if (slot < 0 || rows.flag[slot] == kIgnored) return;
  std::int64_t* const ids = all_ids + i * k;
  float* const values = all_values + i * k;
  double sum = 0.0;
  bool wrong = false;
  for (std::int64_t at = 0; at < k; ++at) {
    std::int64_t const id = row::integer_at(call.o.topk_ids, i, at);
    bool bad = id < 0 || id >= p.vocab;
    for (std::int64_t before = 0; before < at && !bad; ++before) bad = ids[before] == id;
    if (bad && !wrong && call.status->code == 0) *call.status = {2, kTopkId, i, id, p.vocab};
    wrong = wrong || bad;
    float value;
    memcpy(&value, row::row_of(call.o.topk_probs, i) + at * call.o.topk_probs.col_stride * 4, sizeof value);
    if (p.topk_log) value = expf(value);
    sum += static_cast<double>(value);
    ids[at] = bad ? -1 : id;
    values[at] = value;
  }
  if (wrong) rows.flag[slot] = kNoTarget;
  if (p.loss.rest == contract::Rest::renormalised && sum > 0)
    for (std::int64_t at = 0; at < k; ++at) values[at] = static_cast<float>(static_cast<double>(values[at]) / sum);
  if (p.loss.rest == contract::Rest::spread && k < p.vocab)
    all_other[i] = static_cast<float>(fmax(0.0, 1.0 - sum) / static_cast<double>(p.vocab - k));
  if (!p.pairs()) return;
  auto const tau = p.loss.distillation.tau;
  auto const logit = [&](float t) { return static_cast<float>(tau * log(static_cast<double>(t))); };
  for (std::int64_t at = 0; at < k; ++at) values[at] = logit(values[at]);
  all_other[i] = logit(all_other[i]);
}

}  // namespace

void prepare_rows(const RowCall& call, const Rows& rows, cudaStream_t stream) {
  prepare<<<1, kThreads, 0, stream>>>(call, rows);
}

void prepare_topk(const RowCall& call, std::int64_t* ids, float* values, float* other, const Rows& rows,
                  cudaStream_t stream) {
  if (call.p.rows == 0) return;
  auto const blocks = static_cast<unsigned>((call.p.rows + 127) / 128);
  topk<<<blocks, 128, 0, stream>>>(call, ids, values, other, rows);
}

}  // namespace logitless::cuda
