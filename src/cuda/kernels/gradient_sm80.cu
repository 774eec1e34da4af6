// Pass 2 over a block: D [rows, columns] from logits and a row's coefficients, element by element (every option:
// softcap, kappa, entropy, filter, a teacher's divergence), rounded once where it is stored; the last touch of kept
// exponentials; and column sums of either for db. One read and one write an element; a block of threads takes a row.
#include <algorithm>

#include "cuda/device/logit.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/kernels/kernels.hpp"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256, kTile = 4096;

// The divergence's part of D_j.
__device__ __forceinline__ float pair_element(const row::PairRow& by, float z, float u) {
  float const lp = (z * by.inverse_tau - by.ms) - by.log_ss, lq = (u * by.inverse_tau - by.mt) - by.log_st;
  float const p = contract::exp2_of(lp * contract::log2e<float>());
  float add = 0.0F;
  if (by.divergence == contract::Divergence::forward_kl) {
    add = contract::forward_element(p, contract::exp2_of(lq * contract::log2e<float>()));
  } else if (p != 0.0F) {
    add = by.divergence == contract::Divergence::reverse_kl
              ? contract::reverse_element(p, lp - lq, by.k)
              : contract::jsd_element(p, contract::mixed_log_ratio(lq - lp, by.log_beta, by.log_rest), by.rest, by.k);
  }
  add *= by.g;
  if (by.slope != 0.0F) add = z == -INFINITY ? 0.0F : add * contract::softcap_slope(z, by.slope);
  return add;
}

template <class T, class D>
__global__ void __launch_bounds__(kThreads)
    gradients(const __grid_constant__ RowCall call, const __grid_constant__ Rows rows, const __grid_constant__ Block b,
              D* d_block, std::int64_t d_stride, bool first) {
  __shared__ float scattered[kTile];
  __shared__ double sums[kThreads / kWarp];
  __shared__ long long counts[kThreads / kWarp];
  contract::Problem const& p = call.p;
  std::int64_t const at = blockIdx.x, slot = b.slot0 + at, i = rows.index[slot];
  D* const d = d_block + (b.by_index ? i : at) * d_stride;
  std::uint8_t const flag = rows.flag[slot];
  if (i < 0) {
    // A slot that no row fills.
    for (std::int64_t j = threadIdx.x; j < b.columns; j += kThreads) d[j] = from_float<D>(0.0F);
    return;
  }
  row::Finisher const finisher(call.p, call.o, call.topk);
  bool const silent = flag == kIgnored || flag == kNoTarget || finisher.silent(i);
  if (flag == kBad || silent) {
    // Of a head, a row without a distribution leaves no trace in dW; of given logits, D is all it has.
    float const value = flag == kBad && !silent && p.kind == contract::Kind::logits ? NAN : 0.0F;
    for (std::int64_t j = threadIdx.x; j < b.columns; j += kThreads) d[j] = from_float<D>(value);
    if (rows.filter_left != nullptr && threadIdx.x == 0 && first) rows.filter_left[slot] = -1;
    return;
  }
  const T* const z_row = static_cast<const T*>(b.z) + (b.by_index ? i : at) * b.z_stride;
  std::int64_t const target = rows.target[slot];
  Shape const shape(call, i, target);
  row::GradientRow const by = rows.gradient[slot];
  bool const both = p.pairs(), head = p.distils();
  row::PairRow const pair = both ? rows.pair_row[slot] : row::PairRow{};
  bool const scatters = p.loss.targets == contract::Targets::topk, weighs = p.wants_kappa();
  float const power = rows.exponent != nullptr ? exp2f(static_cast<float>(rows.exponent[slot])) : 1.0F;
  float const unit = by.filter * 5.9604644775390625e-8F;
  contract::FilterKey key{};
  if (by.filter > 0.0F)
    key = contract::filter_key(by.seed, by.row, static_cast<std::uint64_t>(p.first_column + b.column0));
  long long left = 0;
  double variance = 0.0;
  for (std::int64_t j0 = 0; j0 < b.columns; j0 += kTile) {
    std::int64_t const n = min(b.columns - j0, std::int64_t{kTile});
    if (scatters) Scattered{scattered}.fill(call, i, b.column0 + j0, n);
    for (std::int64_t j = threadIdx.x; j < n; j += kThreads) {
      std::int64_t const column = b.column0 + j0 + j;
      float z = to_float(z_row[j0 + j]);
      if (!b.shaped) z = shape(z, column);
      bool const is_target = column == target;
      float const kappa = weighs ? weighted(shape.counted(z, column), kappa_of(call, i, column, scattered + j)) : 0.0F;
      float value = 0.0F;
      if (is_target) {
        value = (by.at_target - by.c * kappa) * by.slope_y;
        ++left;
      } else {
        float q = exp_gap(z, by.m) * by.inverse_s;
        if (by.filter > 0.0F) {
          auto hash = static_cast<std::uint32_t>(p.first_column + column);
          contract::filter_hash(hash, key);
          float const before = q;
          q = contract::filtered(q, by.filter, static_cast<float>(hash), unit);
          if (q != 0.0F) ++left;
          if (before < by.filter) variance += static_cast<double>(before * (by.filter - before));
        }
        float const gap = fmaxf(-200.0F, z - by.m);
        value = by.e == 0.0F ? q * by.a : contract::element_with_entropy(q, gap, by.a, by.e, by.h0);
        if (weighs) value -= by.c * kappa;
        // A masked class lies at no finite place of the cap: slope 0.
        if (by.slope != 0.0F) value = z == -INFINITY ? 0.0F : value * contract::softcap_slope(z, by.slope);
      }
      if (both && pair.g != 0.0F) {
        float u = head ? b.u[at * b.u_stride + j0 + j] : scattered[j];
        if (head && p.teacher_bias != contract::DType::none) u += load_view(call.o.teacher_bias, column, 0);
        value += pair_element(pair, z, u);
      }
      d[j0 + j] = from_float<D>(value * power);
    }
  }
  if (by.filter > 0.0F) {
    left = block_sum<kThreads>(left, counts);
    variance = block_sum<kThreads>(variance, sums);
    if (threadIdx.x == 0) {
      rows.filter_left[slot] = (first ? 0 : rows.filter_left[slot]) + left;
      rows.filter_variance[slot] = (first ? 0.0 : rows.filter_variance[slot]) + variance;
    }
  }
}

// A block looks at 128 slots, a thread each, and then clears a share of the few rows that leave no trace.
__global__ void __launch_bounds__(128) patch(const __grid_constant__ Rows rows, std::int64_t slot0, std::int64_t count,
                                             std::int64_t column0, std::int64_t columns, bf16* e, std::int64_t stride) {
  __shared__ bool clears[128];
  std::int64_t const base = static_cast<std::int64_t>(blockIdx.x) * 128, own = base + threadIdx.x;
  bool const here = own < count, live = here && rows.flag[slot0 + own] == kKept && rows.scale[slot0 + own] != 0.0F;
  clears[threadIdx.x] = here && !live;
  if (live && blockIdx.y == 0) {
    std::int64_t const y = rows.target[slot0 + own] - column0;
    if (y >= 0 && y < columns) e[own * stride + y] = from_float<bf16>(rows.at_target[slot0 + own]);
  }
  if (__syncthreads_or(here && !live ? 1 : 0) == 0) return;
  auto const zero = make_uint4(0, 0, 0, 0);
  std::int64_t const words = (columns + 7) / 8;  // rows are padded to 16 bytes
  for (int n = 0; n < 128; ++n) {
    if (!clears[n]) continue;
    auto* const row = reinterpret_cast<uint4*>(e + (base + n) * stride);
    for (std::int64_t j = blockIdx.y * 128 + threadIdx.x; j < words; j += 128 * gridDim.y) row[j] = zero;
  }
}

// A thread a column; a segment of rows a block row.
template <class D>
__global__ void __launch_bounds__(128)
    column_sums(const __grid_constant__ Rows rows, std::int64_t slot0, std::int64_t count, std::int64_t columns,
                const D* d, std::int64_t stride, bool exponentials, float* room) {
  std::int64_t const j = static_cast<std::int64_t>(blockIdx.x) * 128 + threadIdx.x;
  if (j >= columns) return;
  std::int64_t const each = (count + kSumSegments - 1) / kSumSegments;
  std::int64_t const begin = blockIdx.y * each, end = min(count, begin + each);
  float sum = 0.0F;
  for (std::int64_t i = begin; i < end; ++i) {
    float const x = to_float(d[i * stride + j]);
    if (exponentials)
      sum += x * rows.scale[slot0 + i] - rows.shift[slot0 + i];
    else if (rows.exponent != nullptr && sizeof(D) == 2)
      sum += x == 0.0F ? 0.0F : x * exp2f(static_cast<float>(-rows.exponent[slot0 + i]));
    else
      sum += x;
  }
  room[blockIdx.y * columns + j] = sum;
}
__global__ void add_segments(std::int64_t columns, bool add, const float* room, float* sums) {
  std::int64_t const j = static_cast<std::int64_t>(blockIdx.x) * 128 + threadIdx.x;
  if (j >= columns) return;
  double sum = add ? static_cast<double>(sums[j]) : 0.0;
  for (std::int64_t s = 0; s < kSumSegments; ++s) sum += static_cast<double>(room[s * columns + j]);
  sums[j] = static_cast<float>(sum);
}

}  // namespace

void row_gradients(const RowCall& call, const Rows& rows, const Block& b, void* d, contract::DType d_dtype,
                   std::int64_t d_stride, cudaStream_t stream) {
  if (b.rows == 0) return;
  bool const first = b.column0 == 0;
  auto const grid = static_cast<unsigned>(b.rows);
  with_storage(b.z_dtype, [&](auto z_tag) {
    using T = decltype(z_tag);
    auto launch = [&](auto d_tag) {
      using D = decltype(d_tag);
      gradients<T, D><<<grid, kThreads, 0, stream>>>(call, rows, b, static_cast<D*>(d), d_stride, first);
    };
    // D has the logits' dtype or fp32; from fp32 logits of a product, the operands' dtype.
    if (d_dtype == contract::DType::f32) return launch(float{});
    if constexpr (sizeof(T) == 2) return launch(T{});
    if constexpr (sizeof(T) == 4) {
      if (d_dtype == contract::DType::bf16) return launch(bf16{});
      return launch(f16{});
    }
  });
}

void patch_exponentials(const Rows& rows, std::int64_t slot0, std::int64_t count, std::int64_t column0,
                        std::int64_t columns, void* e, std::int64_t stride, cudaStream_t stream) {
  if (count <= 0) return;
  dim3 const grid(static_cast<unsigned>((count + 127) / 128),
                  static_cast<unsigned>(std::clamp<std::int64_t>(columns / 8192, 1, 16)));
  patch<<<grid, 128, 0, stream>>>(rows, slot0, count, column0, columns, static_cast<bf16*>(e), stride);
}

void sum_columns(const Rows& rows, std::int64_t slot0, std::int64_t count, std::int64_t columns, const void* d,
                 contract::DType d_dtype, std::int64_t stride, bool exponentials, bool add, float* room, float* sums,
                 cudaStream_t stream) {
  if (columns == 0) return;
  dim3 const grid(static_cast<unsigned>((columns + 127) / 128), kSumSegments);
  with_storage(d_dtype, [&](auto tag) {
    using D = decltype(tag);
    column_sums<D>
        <<<grid, 128, 0, stream>>>(rows, slot0, count, columns, static_cast<const D*>(d), stride, exponentials, room);
  });
  add_segments<<<grid.x, 128, 0, stream>>>(columns, add, room, sums);
}

}  // namespace logitless::cuda
