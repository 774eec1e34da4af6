// Rows whose later logits stand more than 40 nats above the reference of their kept exponentials: E of such a row is
// made again from its maximum, before anything reads it. Their logits are multiplied out by dot products, one warp a
// column: slow (the row reads all of W), and rare; where no row needs it, the kernel only looks at R numbers (3 us).
#include <algorithm>

#include "cuda/device/logit.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/kernels/kernels.hpp"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    repair(const __grid_constant__ RowCall call, const __grid_constant__ Rows rows, const __grid_constant__ Dense x,
           const __grid_constant__ Dense w, std::int64_t column0, std::int64_t columns, bf16* e, std::int64_t stride) {
  __shared__ int marked[kThreads];
  int const lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  std::int64_t const hidden = call.p.hidden;
  for (std::int64_t base = static_cast<std::int64_t>(blockIdx.x) * kThreads; base < rows.slots;
       base += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    std::int64_t const own = base + threadIdx.x;
    bool const mine = own < rows.slots && rows.flag[own] == kKept && stands_above(rows, own);
    marked[threadIdx.x] = mine ? 1 : 0;
    if (__syncthreads_or(mine ? 1 : 0) == 0) continue;
    for (int n = 0; n < kThreads; ++n) {
      if (marked[n] == 0) continue;
      std::int64_t const slot = base + n;
      Shape const shape(call, rows.index[slot], rows.target[slot]);
      float const m = rows.m[slot];
      auto const slope = call.p.loss.softcap > 0
                             ? static_cast<float>(row::Finisher(call.p, call.o, call.topk).slope(rows.index[slot]))
                             : 0.0F;
      const bf16* const a = static_cast<const bf16*>(x.data) + slot * x.stride;
      for (std::int64_t j = warp; j < columns; j += kThreads / kWarp) {
        const bf16* const b = static_cast<const bf16*>(w.data) + j * w.stride;
        float sum = 0.0F;
        for (std::int64_t k = lane; k < hidden; k += kWarp) sum = fmaf(to_float(a[k]), to_float(b[k]), sum);
        sum = warp_sum(sum);
        float const z = shape(sum, column0 + j);
        float value = exp_gap(z, m);
        if (slope != 0.0F) value = z == -INFINITY ? 0.0F : value * contract::softcap_slope(z, slope);
        if (lane == 0) e[slot * stride + j] = from_float<bf16>(value);
      }
    }
    __syncthreads();
  }
}

}  // namespace

void repair_exponentials(const RowCall& call, const Rows& rows, const Dense& x, const Dense& w, std::int64_t column0,
                         std::int64_t columns, void* e, std::int64_t stride, cudaStream_t stream) {
  auto const grid = static_cast<unsigned>(std::min<std::int64_t>(264, (rows.slots + kThreads - 1) / kThreads));
  if (rows.slots > 0)
    repair<<<grid, kThreads, 0, stream>>>(call, rows, x, w, column0, columns, static_cast<bf16*>(e), stride);
}

}  // namespace logitless::cuda
