// What the first product on Hopper leaves of its epilogue, sums of each row over leaves of 256 columns that share the
// row's reference, into the row's statistics: sums in the order of leaves, the largest logit with its lowest column.
// And rows whose sums left fp32's range (a logit far above the reference), or are no numbers: their statistics are made
// again from dot products, a warp a column; slow, and rare.
#include <algorithm>

#include "cuda/device/logit.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/kernels/kernels.hpp"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

__device__ contract::RowStatistics<float> stored(const Rows& rows, std::int64_t slot) {
  return {rows.m[slot], rows.r[slot], rows.k[slot], rows.n[slot],
          rows.t[slot], rows.g[slot], rows.u[slot], rows.c[slot]};
}
__device__ void store(const Rows& rows, std::int64_t slot, const contract::RowStatistics<float>& s) {
  rows.m[slot] = s.m;
  rows.r[slot] = s.r;
  rows.k[slot] = s.k;
  rows.n[slot] = s.n;
  rows.t[slot] = s.t;
  rows.g[slot] = s.g;
  rows.u[slot] = s.u;
  rows.c[slot] = s.c;
}

// A thread a slot, so that neighbours read neighbours. 32 threads x 8 parts of the leaves a block.
__global__ void __launch_bounds__(kThreads)
    merge_leaves(const __grid_constant__ RowCall call, const __grid_constant__ Rows rows,
                 const __grid_constant__ Leaves in, std::int64_t column0, std::int64_t columns, bool first) {
  __shared__ float sums[4][8][33];
  __shared__ float tops[8][33];
  __shared__ std::int32_t places[8][33];
  int const lane = threadIdx.x % 32, part = threadIdx.x / 32;
  std::int64_t const slot = static_cast<std::int64_t>(blockIdx.x) * 32 + lane;
  bool const here = slot < rows.slots;
  std::int64_t const each = (in.count + 7) / 8, begin = part * each, end = min(in.count, begin + each);
  float s[4] = {}, top = -INFINITY;
  std::int32_t place = -1;
#pragma unroll 8
  for (std::int64_t leaf = begin; leaf < (here ? end : begin); ++leaf) {
    std::int64_t const at = leaf * in.stride + slot;
    s[0] += in.r[at];
    if (in.u != nullptr) s[1] += in.u[at];
    if (in.t != nullptr) s[2] += in.t[at];
    if (in.g != nullptr) s[3] += in.g[at];
    if (in.argmax != nullptr && (place < 0 || in.top[at] > top)) {
      top = in.top[at];
      place = in.argmax[at];
    }
  }
  for (int n = 0; n < 4; ++n) sums[n][part][lane] = s[n];
  tops[part][lane] = top;
  places[part][lane] = place;
  __syncthreads();
  if (part != 0 || !here || rows.flag[slot] == kIgnored) return;
  for (int n = 0; n < 4; ++n) {
    s[n] = sums[n][0][lane];
    for (int p = 1; p < 8; ++p) s[n] += sums[n][p][lane];
  }
  for (int p = 1; p < 8; ++p)
    if (places[p][lane] >= 0 && (place < 0 || tops[p][lane] > top)) top = tops[p][lane], place = places[p][lane];
  auto const width = static_cast<float>(columns);
  contract::RowStatistics<float> const block{rows.reference[slot], s[0], s[1], width, s[2], s[3], s[1], width};
  store(rows, slot, first ? block : contract::merge(stored(rows, slot), block));
  if (in.argmax == nullptr) return;
  // rows.u of the reference would do for none of this: the largest logit so far waits in row_top.
  if (first || top > in.row_top[slot]) {
    in.row_top[slot] = top;
    rows.argmax[slot] = column0 + place;
  }
}

__device__ __forceinline__ bool suspect(const Rows& rows, std::int64_t slot) { return !(rows.r[slot] < 0x1p58F); }

__global__ void __launch_bounds__(kThreads)
    settle(const __grid_constant__ RowCall call, const __grid_constant__ Rows rows, const __grid_constant__ Dense x,
           const __grid_constant__ Dense w) {
  __shared__ contract::RowStatistics<float> of_warp[kThreads / kWarp];
  __shared__ float top_of_warp[kThreads / kWarp];
  __shared__ std::int64_t argmax_of_warp[kThreads / kWarp];
  __shared__ int marked[kThreads];
  int const lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  std::int64_t const hidden = call.p.hidden, vocab = call.p.vocab;
  for (std::int64_t base = static_cast<std::int64_t>(blockIdx.x) * kThreads; base < rows.slots;
       base += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    std::int64_t const own = base + threadIdx.x;
    bool const live = own < rows.slots && rows.flag[own] == kKept;
    bool const mine = live && suspect(rows, own);
    if (live) {
      if (rows.target[own] < 0 || rows.target[own] >= vocab) {
        rows.z_y[own] = -INFINITY;
      } else if (!mine && rows.z_y[own] > rows.m[own]) {
        // The reference is not the maximum: move it to the target at least, as finish() would.
        store(rows, own, contract::rebase(stored(rows, own), rows.z_y[own]));
      }
    }
    marked[threadIdx.x] = mine ? 1 : 0;
    if (__syncthreads_or(mine ? 1 : 0) == 0) continue;
    for (int n = 0; n < kThreads; ++n) {
      if (marked[n] == 0) continue;
      std::int64_t const slot = base + n, target = rows.target[slot];
      Shape const shape(call, rows.index[slot], target);
      const bf16* const a = static_cast<const bf16*>(x.data) + slot * x.stride;
      auto sum = contract::RowStatistics<float>::identity();
      float top = -INFINITY;
      std::int64_t argmax = -1;
      for (std::int64_t j = warp; j < vocab; j += kThreads / kWarp) {
        const bf16* const b = static_cast<const bf16*>(w.data) + j * w.stride;
        float z = 0.0F;
        for (std::int64_t k = lane; k < hidden; k += kWarp) z = fmaf(to_float(a[k]), to_float(b[k]), z);
        z = shape(warp_sum(z), j);
        if (argmax < 0 || z > top) top = z, argmax = j;
        if (lane == 0 && j == target) rows.z_y[slot] = z;
        sum = j == target ? contract::absorb_target(sum, z) : contract::absorb(sum, z);
        if (z != z || z == INFINITY) sum.r = NAN;
      }
      if (lane == 0) {
        of_warp[warp] = sum;
        top_of_warp[warp] = top;
        argmax_of_warp[warp] = argmax;
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        for (int v = 1; v < kThreads / kWarp; ++v) {
          sum = contract::merge(sum, of_warp[v]);
          if (argmax_of_warp[v] >= 0 && (top_of_warp[v] > top || (top_of_warp[v] == top && argmax_of_warp[v] < argmax)))
            top = top_of_warp[v], argmax = argmax_of_warp[v];
        }
        store(rows, slot, sum);
        if (rows.argmax != nullptr) rows.argmax[slot] = argmax;
      }
      __syncthreads();
    }
  }
}

// What a launch of the first product reads of a row, by slot.
__global__ void slot_floats(const __grid_constant__ View from, const __grid_constant__ Rows rows, float otherwise,
                            float* out) {
  std::int64_t const slot = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (slot >= rows.slots) return;
  std::int64_t const i = rows.index[slot];
  out[slot] = i < 0 ? otherwise : row::float_at(from, i);
}

unsigned blocks_of(std::int64_t n, std::int64_t each) { return static_cast<unsigned>((n + each - 1) / each); }

}  // namespace

void merge_leaf_statistics(const RowCall& call, const Rows& rows, const Leaves& in, std::int64_t column0,
                           std::int64_t columns, bool first, cudaStream_t stream) {
  if (rows.slots > 0)
    merge_leaves<<<blocks_of(rows.slots, 32), kThreads, 0, stream>>>(call, rows, in, column0, columns, first);
}

void settle_statistics(const RowCall& call, const Rows& rows, const Dense& x, const Dense& w, cudaStream_t stream) {
  if (rows.slots == 0) return;
  unsigned const grid = std::min(264U, blocks_of(rows.slots, kThreads));
  settle<<<grid, kThreads, 0, stream>>>(call, rows, x, w);
}

void gather_floats(const View& from, const Rows& rows, float otherwise, float* out, cudaStream_t stream) {
  if (rows.slots > 0) slot_floats<<<blocks_of(rows.slots, 256), 256, 0, stream>>>(from, rows, otherwise, out);
}

}  // namespace logitless::cuda
