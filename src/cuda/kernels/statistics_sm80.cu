// Pass 1 over a block of logits z [rows, columns]: row statistics (m, r, k, n, t, g, u, c, z_y, argmax) of tiles of
// 4096 columns, merged into those of the row; on request E = bf16(exp(z - reference)). z is read once (it waits in
// registers between the maximum and the sums) and E written once: 6 bytes an element beside 4 TB/s. A block of threads
// takes a row; tiles are merged in order, so bits do not depend on anything else.
#include "cuda/device/logit.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/kernels/kernels.hpp"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256, kEach = 16, kTile = kThreads * kEach;

// A row of a block: slot, original row, where its logits lie.
template <class T>
struct RowOf {
  std::int64_t slot, row, target;
  T* z;

  __device__ RowOf(const Rows& rows, const Block& b, std::int64_t at) {
    slot = b.slot0 + at;
    row = rows.index[slot];
    target = rows.target[slot];
    z = static_cast<T*>(const_cast<void*>(b.z)) + (b.by_index ? row : at) * b.z_stride;
  }
};

__device__ __forceinline__ bool skips(const Rows& rows, std::int64_t slot) {
  return rows.flag[slot] == kIgnored || rows.index[slot] < 0;
}

// options: transforms, restrictions, kappa, entropy, argmax, ... ; without: m, r and u alone.
template <class T, bool options>
__global__ void __launch_bounds__(kThreads)
    statistics(const __grid_constant__ RowCall call, const __grid_constant__ Rows rows, const __grid_constant__ Block b,
               bool first, bool store_shaped, bf16* e, std::int64_t e_stride) {
  __shared__ float room[kThreads / kWarp * 8];
  __shared__ float scattered[options ? kTile : 1];
  __shared__ long long best;
  contract::Problem const& p = call.p;
  std::int64_t const at = blockIdx.x;
  if (skips(rows, b.slot0 + at)) {
    // Rows of E that nobody owns are still read by the products.
    if (e != nullptr)
      for (std::int64_t j = threadIdx.x; j < b.columns; j += kThreads) e[at * e_stride + j] = from_float<bf16>(0.0F);
    return;
  }
  RowOf<T> const mine(rows, b, at);
  Shape const shape(call, mine.row, mine.target);
  bool const topk = options && p.loss.targets == contract::Targets::topk && !p.pairs();
  bool const wants_k = p.wants_kappa(), wants_entropy = p.wants_entropy();
  float const slope =
      p.loss.softcap > 0 ? static_cast<float>(row::Finisher(p, call.o, call.topk).slope(mine.row)) : 0.0F;
  auto sum = contract::RowStatistics<float>::identity();
  float z_y = -INFINITY, top = -INFINITY, reference = first ? 0.0F : rows.reference[mine.slot];
  std::int64_t argmax = -1;
  for (std::int64_t j0 = 0; j0 < b.columns; j0 += kTile) {
    std::int64_t const left = b.columns - j0;
    if (topk) Scattered{scattered}.fill(call, mine.row, b.column0 + j0, min(left, std::int64_t{kTile}));
    float z[kEach];
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      std::int64_t const j = n * kThreads + threadIdx.x;
      z[n] = j < left ? to_float(mine.z[j0 + j]) : -INFINITY;
      if constexpr (options) {
        if (j < left && !b.shaped) z[n] = shape(z[n], b.column0 + j0 + j);
        if (store_shaped && j < left) mine.z[j0 + j] = from_float<T>(z[n]);
      }
      most = fmaxf(most, z[n]);
    }
    float const m = block_max<kThreads>(most, room), ref = m == -INFINITY ? 0.0F : m;
    if (first && j0 == 0) reference = m > -INFINITY && m < INFINITY ? m : 0.0F;
    if constexpr (options) {
      if (p.argmax) {
        if (threadIdx.x == 0) best = left;
        __syncthreads();
#pragma unroll
        for (int n = kEach - 1; n >= 0; --n)
          if (z[n] == m && n * kThreads + threadIdx.x < left)
            atomicMin(&best, static_cast<long long>(n * kThreads + threadIdx.x));
        __syncthreads();
        // Blocks are walked from the last to the first: of equals the lower column wins.
        std::int64_t const here = b.column0 + j0 + best;
        if (best < left && (m > top || (m == top && here < argmax) || argmax < 0)) top = m, argmax = here;
      }
    }
    // r, k, n, t, g, u, c
    float x[7] = {};
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      std::int64_t const j = n * kThreads + threadIdx.x;
      if (j >= left) continue;
      std::int64_t const column = b.column0 + j0 + j;
      float const gap = z[n] - ref, ex = exp_gap(z[n], ref);
      bool const is_target = column == mine.target;
      if (is_target) z_y = z[n];
      if (!is_target) x[0] += ex;
      if constexpr (options) {
        float const one = shape.counted(z[n], column);
        if (wants_k) {
          float const kappa = weighted(one, kappa_of(call, mine.row, column, scattered + j));
          x[1] += weighted(kappa, gap);
          x[2] += kappa;
        }
        if (!is_target && wants_entropy) x[3] += ex == 0.0F ? 0.0F : ex * gap;
        if (!is_target) x[4] += ex * ex;
        x[5] += weighted(one, gap);
        x[6] += one;
      } else {
        x[5] += gap;
      }
      if (e != nullptr) {
        float value = exp_gap(z[n], reference);
        if (slope != 0.0F) value = z[n] == -INFINITY ? 0.0F : value * contract::softcap_slope(z[n], slope);
        e[at * e_stride + j0 + j] = from_float<bf16>(value);
      }
    }
    block_sums<kThreads>(x, room);
    contract::RowStatistics<float> tile{m, x[0], x[1], x[2], x[3], x[4], x[5], x[6]};
    if constexpr (!options) {
      // Every class counts 1.
      tile.c = tile.n = static_cast<float>(min(left, std::int64_t{kTile}));
      tile.k = tile.u;
    }
    sum = contract::merge(sum, tile);
  }
  // The one thread that met the target's column.
  std::int64_t const y = mine.target - b.column0;
  bool const has = y >= 0 && y < b.columns;
  if (has && threadIdx.x == static_cast<unsigned>(y % kThreads)) rows.z_y[mine.slot] = z_y;
  if (threadIdx.x != 0) return;
  if (first) {
    rows.reference[mine.slot] = reference;
    if (!has) rows.z_y[mine.slot] = -INFINITY;
  } else {
    sum = contract::merge(
        contract::RowStatistics<float>{rows.m[mine.slot], rows.r[mine.slot], rows.k[mine.slot], rows.n[mine.slot],
                                       rows.t[mine.slot], rows.g[mine.slot], rows.u[mine.slot], rows.c[mine.slot]},
        sum);
  }
  if constexpr (options) {
    if (p.argmax) {
      float const before = first ? -INFINITY : rows.m[mine.slot];
      std::int64_t const old = first ? -1 : rows.argmax[mine.slot];
      if (old >= 0 && (before > top || (before == top && old < argmax) || argmax < 0)) argmax = old;
      rows.argmax[mine.slot] = argmax;
    }
  }
  rows.m[mine.slot] = sum.m;
  rows.r[mine.slot] = sum.r;
  rows.k[mine.slot] = sum.k;
  rows.n[mine.slot] = sum.n;
  rows.t[mine.slot] = sum.t;
  rows.g[mine.slot] = sum.g;
  rows.u[mine.slot] = sum.u;
  rows.c[mine.slot] = sum.c;
}

// The teacher's logit of a column: of its head, or tau log t of its top k.
struct Teacher {
  const Block& b;
  bool head;

  __device__ float operator()(const RowCall& call, std::int64_t at, std::int64_t j, const float* scattered) const {
    if (!head) return *scattered;
    float u = b.u[at * b.u_stride + j];
    if (call.p.teacher_bias != contract::DType::none) u += load_view(call.o.teacher_bias, b.column0 + j, 0);
    return u;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    pairs(const __grid_constant__ RowCall call, const __grid_constant__ Rows rows, const __grid_constant__ Block b,
          bool first) {
  __shared__ float room[kThreads / kWarp * 8];
  __shared__ float scattered[kTile];
  std::int64_t const at = blockIdx.x;
  if (skips(rows, b.slot0 + at)) return;
  RowOf<T> const mine(rows, b, at);
  Shape const shape(call, mine.row, mine.target);
  Teacher const teacher{b, call.p.distils()};
  auto const by = static_cast<float>(1.0 / call.p.loss.distillation.tau);
  auto sum = contract::PairStatistics<double>::identity();
  for (std::int64_t j0 = 0; j0 < b.columns; j0 += kTile) {
    std::int64_t const left = b.columns - j0;
    if (!teacher.head) Scattered{scattered}.fill(call, mine.row, b.column0 + j0, min(left, std::int64_t{kTile}));
    float z[kEach], u[kEach], most_s = -INFINITY, most_t = -INFINITY;
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      std::int64_t const j = n * kThreads + threadIdx.x;
      z[n] = u[n] = -INFINITY;
      if (j >= left) continue;
      z[n] = to_float(mine.z[j0 + j]);
      if (!b.shaped) z[n] = shape(z[n], b.column0 + j0 + j);
      z[n] *= by;
      u[n] = teacher(call, at, j0 + j, scattered + j) * by;
      most_s = fmaxf(most_s, z[n]);
      most_t = fmaxf(most_t, u[n]);
    }
    float const ms = block_max<kThreads>(most_s, room), mt = block_max<kThreads>(most_t, room);
    float const rs = ms == -INFINITY ? 0.0F : ms, rt = mt == -INFINITY ? 0.0F : mt;
    float x[6] = {};
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      if (n * kThreads + threadIdx.x >= left) continue;
      float const gap_s = z[n] - rs, gap_t = u[n] - rt, es = exp_gap(z[n], rs), et = exp_gap(u[n], rt);
      x[0] += es;
      x[1] += weighted(es, gap_s);
      x[2] += weighted(es, gap_t);
      x[3] += et;
      x[4] += weighted(et, gap_t);
      x[5] += weighted(et, gap_s);
    }
    block_sums<kThreads>(x, room);
    if (threadIdx.x == 0)
      sum = contract::merge(sum, contract::PairStatistics<double>{ms, x[0], x[1], x[2], mt, x[3], x[4], x[5]});
  }
  if (threadIdx.x != 0) return;
  if (!first) sum = contract::merge(rows.pair_sums[mine.slot], sum);
  rows.pair_sums[mine.slot] = sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    mixture(const __grid_constant__ RowCall call, const __grid_constant__ Rows rows, const __grid_constant__ Block b,
            bool first) {
  __shared__ double room[kThreads / kWarp];
  std::int64_t const at = blockIdx.x;
  if (skips(rows, b.slot0 + at)) return;
  RowOf<T> const mine(rows, b, at);
  Shape const shape(call, mine.row, mine.target);
  Teacher const teacher{b, true};
  row::PairRow const by = rows.pair_row[mine.slot];
  double of_p = 0.0, of_q = 0.0;
  for (std::int64_t j = threadIdx.x; j < b.columns; j += kThreads) {
    float z = to_float(mine.z[j]);
    if (!b.shaped) z = shape(z, b.column0 + j);
    float const u = teacher(call, at, j, nullptr);
    float const lp = (z * by.inverse_tau - by.ms) - by.log_ss, lq = (u * by.inverse_tau - by.mt) - by.log_st;
    float const t = lq - lp, ratio = contract::mixed_log_ratio(t, by.log_beta, by.log_rest);
    of_p += static_cast<double>(weighted(contract::exp2_of(lp * contract::log2e<float>()), ratio));
    // Where p is 0, mix is beta q.
    of_q += static_cast<double>(
        weighted(contract::exp2_of(lq * contract::log2e<float>()), lp == -INFINITY ? -by.log_beta : t + ratio));
  }
  of_p = block_sum<kThreads>(of_p, room);
  of_q = block_sum<kThreads>(of_q, room);
  if (threadIdx.x != 0) return;
  row::PairOutcome& out = rows.pair[mine.slot];
  out.p_mixed = (first ? 0.0 : out.p_mixed) + of_p;
  out.q_mixed = (first ? 0.0 : out.q_mixed) + of_q;
  out.k = out.p_mixed;
}

}  // namespace

void row_statistics(const RowCall& call, const Rows& rows, const Block& b, bool first, bool store_shaped,
                    Exponentials out, cudaStream_t stream) {
  if (b.rows == 0) return;
  contract::Problem const& p = call.p;
  bool const options = (!b.shaped && (p.transforms() || p.restricts())) || p.wants_full() || p.restricts();
  with_storage(b.z_dtype, [&](auto tag) {
    using T = decltype(tag);
    auto* const kernel = options ? statistics<T, true> : statistics<T, false>;
    kernel<<<static_cast<unsigned>(b.rows), kThreads, 0, stream>>>(call, rows, b, first, store_shaped,
                                                                   static_cast<bf16*>(out.e), out.stride);
  });
}

void pair_statistics(const RowCall& call, const Rows& rows, const Block& b, bool first, cudaStream_t stream) {
  if (b.rows == 0) return;
  with_storage(b.z_dtype, [&](auto tag) {
    pairs<decltype(tag)><<<static_cast<unsigned>(b.rows), kThreads, 0, stream>>>(call, rows, b, first);
  });
}

void pair_mixture(const RowCall& call, const Rows& rows, const Block& b, bool first, cudaStream_t stream) {
  if (b.rows == 0) return;
  with_storage(b.z_dtype, [&](auto tag) {
    mixture<decltype(tag)><<<static_cast<unsigned>(b.rows), kThreads, 0, stream>>>(call, rows, b, first);
  });
}

}  // namespace logitless::cuda
