// First product on Hopper: X [R,H], W [V,H] (16-bit) -> statistics [leaves][R], z_y [R] and, if wanted, E or D [R,V].
// Fused: Z = X W^T in fp32, transform of the logits, row statistics of leaves of 256 columns, exponentials or gradient
// in 16 bits. Never materialised: Z. Cost: 2RHV flops, W read R / 2048 times, X about once, E or D written once.
// Persistent CTAs in clusters of 1 or 2 along the rows: one producer warp feeds 4 stages of 64 hidden elements by TMA
// (W's tile by multicast, each CTA a part), two consumer warpgroups hold 64 x 256 logits each in registers. The
// epilogue of a tile runs while the next tile's stages fill. Numerics: fp32 sums in one order over H and over a leaf,
// whatever the shape, so a row's statistics have the same bits in any block and batch; exponents (z - m) log2 e,
// difference first.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "contract/coefficients.hpp"
#include "cuda/device/barrier_sm90.cuh"
#include "cuda/device/fast_math.cuh"
#include "cuda/device/tma_sm90.cuh"
#include "cuda/device/wgmma_sm90.cuh"
#include "cuda/kernels/first_product_sm90.hpp"

// Where the kernel's body is left out, for other architectures, its helpers have no caller.
#pragma nv_diag_suppress 177

namespace logitless::cuda {
namespace {

using namespace device;

constexpr int kRows = 128, kColumns = first_product_leaf, kDepth = 64, kStages = 4, kThreads = 384;
constexpr int kBytesX = kRows * kDepth * 2, kBytesW = kColumns * kDepth * 2, kBytesStage = kBytesX + kBytesW;
constexpr int kBytesBox = 16 * 64 * 2;           // what one TMA store writes: 16 rows, 64 columns
constexpr int kBytesStaged = 8 * 2 * kBytesBox;  // two boxes for each consumer warp
constexpr int kBytesBarriers = 2 * kStages * 8;
constexpr int kBytesShared = kStages * kBytesStage + kBytesStaged + kBytesBarriers + 1024;  // 1024: alignment
constexpr int kLeadBarrier = 1;
constexpr float kFloor = -1e30F;  // stands for -inf where 0 * inf must be 0
constexpr float kLargest = 3.40282347e38F;

struct Work {
  FirstProduct p;
  int row_clusters, column_tiles, depth_blocks, group, lead;
  float inverse_cap;  // 0: no softcap
};

// The two rows of a tile whose logits a thread holds.
struct Pair {
  int row[2];
  bool in[2];
  int own[2];  // the target's place among this thread's columns: 8 j + e; -1: not this thread's
  float m[2], inverse_temperature[2], scale[2], shift[2], at_target[2];
  bool dead[2];
};

// f(register, which of the two rows, column of the tile less 2 (lane % 4)).
template <int kBegin = 0, int kEnd = 128, class F>
__device__ __forceinline__ void each_logit(F&& f) {
#pragma unroll
  for (int i = kBegin; i < kEnd; ++i) f(i, i >> 1 & 1, (i >> 2) * 8 + (i & 1));
}

// Read before the main loop, which hides the latency.
template <bool kTransform, Store kStore>
__device__ __forceinline__ Pair read_pair(const FirstProduct& p, int first, int column0, int quad) {
  Pair pair;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    int const row = pair.row[k] = first + 8 * k;
    bool const in = pair.in[k] = row < p.rows;
    std::int64_t const y = in && p.target != nullptr ? __ldg(p.target + row) - p.target_from : -1;
    std::int64_t const place = y < p.columns ? y - column0 : -1;
    bool const own = place >= 0 && place < kColumns && (place >> 1 & 3) == quad;
    pair.own[k] = own ? static_cast<int>(place) - 2 * quad : -1;
    pair.m[k] = in && p.reference != nullptr ? __ldg(p.reference + row) : 0.0F;
    if constexpr (kTransform)
      pair.inverse_temperature[k] =
          1.0F / (in && p.row_temperature != nullptr ? __ldg(p.row_temperature + row) : p.temperature);
    if constexpr (kStore == Store::gradient) {
      pair.scale[k] = in ? __ldg(p.row_scale + row) : 0.0F;
      pair.shift[k] = in && p.row_shift != nullptr ? __ldg(p.row_shift + row) : 0.0F;
      pair.at_target[k] = in && p.at_target != nullptr ? __ldg(p.at_target + row) : 0.0F;
      pair.dead[k] = in && p.dead != nullptr && __ldg(p.dead + row) != 0;
    }
  }
  return pair;
}

// z0 -> z; `columns` are left of this thread's first one on.
__device__ __forceinline__ void transform(float (&z)[128], const Work& work, const Pair& pair, const float* bias,
                                          int columns) {
  FirstProduct const& p = work.p;
  if (bias != nullptr) {
    float b = 0.0F, next = 0.0F;
    each_logit([&](int i, int, int c) {
      if ((i & 3) == 0) {
        b = c < columns ? __ldg(bias + c) : 0.0F;
        next = c + 1 < columns ? __ldg(bias + c + 1) : 0.0F;
      }
      z[i] += (i & 1) == 0 ? b : next;
    });
  }
  if (work.inverse_cap > 0.0F) {
    float const in = p.scale * work.inverse_cap;
    float const out[2] = {p.softcap * pair.inverse_temperature[0], p.softcap * pair.inverse_temperature[1]};
    each_logit([&](int i, int k, int) {
      float const x = z[i] * in;
      // Infinities are classified before the cap: x - clamp(x) is 0, or x where that is infinite or NaN. A conditional
      // would become a branch around tanh for each logit.
      z[i] = fmaf(out[k], tanh_fast(x), x - fminf(fmaxf(x, -kLargest), kLargest));
    });
  } else {
    float const by[2] = {p.scale * pair.inverse_temperature[0], p.scale * pair.inverse_temperature[1]};
    each_logit([&](int i, int k, int) { z[i] *= by[k]; });
  }
}

// Of the four lanes that hold a row.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0U, x, 1);
  return x + __shfl_xor_sync(~0U, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
  x = max_or_nan(x, __shfl_xor_sync(~0U, x, 1));
  return max_or_nan(x, __shfl_xor_sync(~0U, x, 2));
}
__device__ __forceinline__ int quad_min(int x) {
  x = min(x, __shfl_xor_sync(~0U, x, 1));
  return min(x, __shfl_xor_sync(~0U, x, 2));
}

// A warp's 16 x 256 logits: statistics, and the stored tile through its two boxes at `staged`.
template <bool kHalf, int kStats, bool kTransform, Store kStore>
__device__ __forceinline__ void finish_tile(float (&z)[128], const Work& work, Pair& pair, const CUtensorMap* map_out,
                                            std::uint32_t staged, int row0, int column0, int lane) {
  FirstProduct const& p = work.p;
  int const quad = lane & 3, columns = static_cast<int>(p.columns) - column0 - 2 * quad;  // from this thread's first on
  bool const tail = p.columns - column0 < kColumns;
  bool const writes = quad == 0;
  std::int64_t const at = static_cast<std::int64_t>(column0 / kColumns) * p.rows + pair.row[0];
  auto const put = [&](auto* array, auto first, auto second) {
    if (array == nullptr || !writes) return;
    if (pair.in[0]) array[at] = first;
    if (pair.in[1]) array[at + 8] = second;
  };

  if constexpr (kTransform)
    transform(z, work, pair, p.bias == nullptr ? nullptr : p.bias + column0 + 2 * quad, columns);
  if (tail) each_logit([&](int i, int, int c) { z[i] = c < columns ? z[i] : -INFINITY; });

  if (p.reference == nullptr || (kStats == 2 && p.leaf_max != nullptr)) {
    float most[2] = {-INFINITY, -INFINITY};
    each_logit([&](int i, int k, int) { most[k] = max_or_nan(most[k], z[i]); });
    most[0] = quad_max(most[0]);
    most[1] = quad_max(most[1]);
    if (p.reference == nullptr) {
#pragma unroll
      for (int k = 0; k < 2; ++k) pair.m[k] = fabsf(most[k]) < INFINITY ? most[k] : 0.0F;
      put(p.leaf_m, pair.m[0], pair.m[1]);
    }
    if constexpr (kStats == 2) {
      put(p.leaf_max, most[0], most[1]);
      if (p.leaf_argmax != nullptr) {
        int place[2] = {kColumns, kColumns};
#pragma unroll
        for (int i = 127; i >= 0; --i)
          if (!(z[i] < most[i >> 1 & 1])) place[i >> 1 & 1] = (i >> 2) * 8 + (i & 1);
#pragma unroll
        for (int k = 0; k < 2; ++k) place[k] = column0 + quad_min(place[k] + 2 * quad);
        put(p.leaf_argmax, place[0], place[1]);
      }
    }
  }

  bool const holds_target = __any_sync(~0U, pair.own[0] >= 0 || pair.own[1] >= 0);  // 1 warp in V / 4096
  float z_y[2] = {0.0F, 0.0F};
  if (holds_target) {
    each_logit([&](int i, int k, int c) {
      if (pair.own[k] == c) z_y[k] = z[i];
    });
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (pair.own[k] >= 0 && p.z_y != nullptr) p.z_y[pair.row[k]] = z_y[k];
  }

  each_logit([&](int i, int k, int) { z[i] -= pair.m[k]; });
  if constexpr (kStats >= 1) {
    float u[2] = {0.0F, 0.0F};
    if (tail)
      each_logit([&](int i, int k, int c) { u[k] += c < columns ? z[i] : 0.0F; });
    else
      each_logit([&](int i, int k, int) { u[k] += z[i]; });
    put(p.u, quad_sum(u[0]), quad_sum(u[1]));
  }
  if (holds_target) each_logit([&](int i, int k, int c) { z[i] = pair.own[k] == c ? -INFINITY : z[i]; });

  float r[2] = {0.0F, 0.0F}, t[2] = {0.0F, 0.0F}, g[2] = {0.0F, 0.0F};
  float const slope[2] = {kTransform ? work.inverse_cap / pair.inverse_temperature[0] : 0.0F,
                          kTransform ? work.inverse_cap / pair.inverse_temperature[1] : 0.0F};
  auto const half = [&](auto begin) {
    constexpr int kBegin = decltype(begin)::value, kEnd = kBegin + 64;
    each_logit<kBegin, kEnd>([&](int i, int k, int) {
      float const x = z[i], e = exp2_fast(x * contract::log2e<float>());
      r[k] += e;
      if constexpr (kStats == 2) {
        t[k] = fmaf(e, fmaxf(x, kFloor), t[k]);
        g[k] = fmaf(e, e, g[k]);
      }
      if constexpr (kStore != Store::nothing) {
        float v = kStore == Store::gradient ? contract::element(e, pair.scale[k], pair.shift[k]) : e;
        if constexpr (kTransform) v *= fmaxf(contract::softcap_slope(fmaxf(x, kFloor) + pair.m[k], slope[k]), 0.0F);
        z[i] = v;
      }
    });
    if constexpr (kStore != Store::nothing) {
      if constexpr (kStore == Store::gradient) {
        if (holds_target) {
          float v[2];
#pragma unroll
          for (int k = 0; k < 2; ++k)
            v[k] = pair.at_target[k] * (kTransform && work.inverse_cap > 0.0F
                                            ? fmaxf(contract::softcap_slope(fmaxf(z_y[k], kFloor), slope[k]), 0.0F)
                                            : 1.0F);
          each_logit<kBegin, kEnd>([&](int i, int k, int c) { z[i] = pair.own[k] == c ? v[k] : z[i]; });
        }
        if (tail) each_logit<kBegin, kEnd>([&](int i, int, int c) { z[i] = c < columns ? z[i] : 0.0F; });
        if (__any_sync(~0U, pair.dead[0] || pair.dead[1]))
          each_logit<kBegin, kEnd>([&](int i, int k, int) { z[i] = pair.dead[k] ? 0.0F : z[i]; });
      }
      if (lane == 0) tma_store_wait_read<0>();
      __syncwarp();
      int const row = lane & 15;
#pragma unroll
      for (int j = 0; j < 16; j += 2) {
        int const i = kBegin + 4 * j;
        store_matrix(staged + (j >> 3) * kBytesBox + row * 128 + ((((j & 7) + (lane >> 4)) ^ (row & 7)) << 4),
                     pack_16<kHalf>(z[i], z[i + 1]), pack_16<kHalf>(z[i + 2], z[i + 3]),
                     pack_16<kHalf>(z[i + 4], z[i + 5]), pack_16<kHalf>(z[i + 6], z[i + 7]));
      }
      async_proxy_fence();
      __syncwarp();
      if (lane == 0) {
        int const column = column0 + 2 * kBegin;
        tma_store(map_out, staged, column, row0);
        tma_store(map_out, staged + kBytesBox, column + 64, row0);
        tma_store_commit();
      }
    }
  };
  half(std::integral_constant<int, 0>{});
  half(std::integral_constant<int, 64>{});
  put(p.r, quad_sum(r[0]), quad_sum(r[1]));
  if constexpr (kStats == 2) {
    put(p.t, quad_sum(t[0]), quad_sum(t[1]));
    put(p.g, quad_sum(g[0]), quad_sum(g[1]));
  }
}

template <bool kHalf, int kStats, bool kTransform, Store kStore>
__global__ void __launch_bounds__(kThreads, 1)
    first_product(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_w,
                  const __grid_constant__ CUtensorMap map_out, const __grid_constant__ Work work) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // other architectures of a build never launch it
  extern __shared__ std::uint8_t shared[];
  std::uint32_t const base = (shared_address(shared) + 1023U) & ~1023U;
  std::uint32_t const staged = base + kStages * kBytesStage, barriers = staged + kBytesStaged;
  auto const full = [&](int stage) { return barriers + 8 * stage; };
  auto const empty = [&](int stage) { return barriers + 8 * (kStages + stage); };
  int const ctas = static_cast<int>(cluster_size()), rank = static_cast<int>(cluster_rank());
  int const group_of = threadIdx.x >> 7;

  if (threadIdx.x == 0) {
    tma_prefetch(&map_x);
    tma_prefetch(&map_w);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full(s), 1);
      barrier_init(empty(s), 2 * ctas);  // each consumer of each CTA that a multicast overwrites
    }
    barrier_init_fence();
  }
  cluster_sync();

  // Tiles in groups of `group` clusters along the rows, within a group column by column.
  int const tiles = work.row_clusters * work.column_tiles;
  auto const origin = [&](int tile, int& row0, int& column0) {
    int const whole = work.group * work.column_tiles, group = tile / whole, rest = tile - group * whole;
    int const members = min(work.group, work.row_clusters - group * work.group);
    row0 = ((group * work.group + rest % members) * ctas + rank) * kRows;
    column0 = rest / members * kColumns;
  };
  int const first = blockIdx.x / ctas, step = gridDim.x / ctas;
  int stage = 0, phase = 0;
  auto const advance = [&] {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  };

  if (group_of == 0) {
    registers_down<40>();
    if (threadIdx.x == 0) {
      int const part = kColumns / ctas;
      auto const everyone = static_cast<std::uint16_t>((1 << ctas) - 1);
      for (int tile = first; tile < tiles; tile += step) {
        int row0, column0;
        origin(tile, row0, column0);
        for (int b = 0; b < work.depth_blocks; ++b) {
          barrier_wait(empty(stage), phase ^ 1);
          barrier_expect(full(stage), kBytesStage);
          std::uint32_t const x = base + stage * kBytesStage, w = x + kBytesX;
          tma_load(x, &map_x, full(stage), b * kDepth, row0);
          if (ctas == 1)
            tma_load(w, &map_w, full(stage), b * kDepth, column0);
          else
            tma_load_multicast(w + rank * part * kDepth * 2, &map_w, full(stage), b * kDepth, column0 + rank * part,
                               everyone);
          advance();
        }
      }
    }
    __syncwarp();
  } else {
    registers_up<232>();
    int const consumer = group_of - 1, thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
    int const warp_row = consumer * 64 + warp * 16;
    std::uint32_t const boxes = staged + (consumer * 4 + warp) * 2 * kBytesBox;
    auto const release = [&](int s) {
      if (thread < ctas) barrier_arrive_at(empty(s), thread);
    };
    float z[128];
    for (int tile = first; tile < tiles; tile += step) {
      int row0, column0;
      origin(tile, row0, column0);
      Pair pair = read_pair<kTransform, kStore>(work.p, row0 + warp_row + (lane >> 2), column0, lane & 3);
      if (consumer == 1 && work.lead > 0) named_sync(kLeadBarrier, 256);
      int previous = 0;
      for (int b = 0; b < work.depth_blocks; ++b) {
        barrier_wait(full(stage), phase);
        std::uint32_t const x = base + stage * kBytesStage;
        std::uint64_t const of_x = wgmma_operand(x + consumer * (kBytesX / 2)), of_w = wgmma_operand(x + kBytesX);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) wgmma_64x256x16<kHalf>(z, of_x + 2 * k, of_w + 2 * k, k > 0 || b > 0);
        wgmma_commit();
        if (consumer == 0 && b == work.lead - 1) named_arrive(kLeadBarrier, 256);
        wgmma_wait<1>();
        if (b > 0) release(previous);
        previous = stage;
        advance();
      }
      wgmma_wait<0>();
      release(previous);
      finish_tile<kHalf, kStats, kTransform, kStore>(z, work, pair, &map_out, boxes, row0 + warp_row, column0, lane);
    }
    if (kStore != Store::nothing && lane == 0) tma_store_wait<0>();
    __syncwarp();
  }
  cluster_sync();  // a CTA must not leave while the other's consumers still arrive at its barriers
#endif
}

// ---- host ----

struct Variant {
  contract::DType dtype;
  int statistics;
  bool transform;
  Store store;
  const void* kernel;
};
template <bool kHalf, int kStats, bool kTransform, Store kStore>
Variant variant() {
  return {kHalf ? contract::DType::f16 : contract::DType::bf16, kStats, kTransform, kStore,
          reinterpret_cast<const void*>(&first_product<kHalf, kStats, kTransform, kStore>)};
}
// The first one that gives what is wanted serves.
template <bool kHalf>
const Variant* find(const FirstProduct& p, int statistics) {
  using enum Store;
  static Variant const all[] = {
      variant<kHalf, 0, false, nothing>(),      variant<kHalf, 0, false, exponentials>(),
      variant<kHalf, 0, false, gradient>(),     variant<kHalf, 1, false, nothing>(),
      variant<kHalf, 1, false, exponentials>(), variant<kHalf, 2, false, nothing>(),
      variant<kHalf, 2, false, exponentials>(), variant<kHalf, 0, true, nothing>(),
      variant<kHalf, 0, true, exponentials>(),  variant<kHalf, 0, true, gradient>(),
      variant<kHalf, 2, true, nothing>(),       variant<kHalf, 2, true, exponentials>(),
  };
  for (Variant const& v : all)
    if (v.statistics >= statistics && v.transform == p.transforms() && v.store == p.store) return &v;
  return nullptr;
}

int statistics_of(const FirstProduct& p) {
  if (p.t != nullptr || p.g != nullptr || p.leaf_max != nullptr || p.leaf_argmax != nullptr) return 2;
  return p.u != nullptr ? 1 : 0;
}

bool aligned(const void* p, std::int64_t leading) {
  return reinterpret_cast<std::uintptr_t>(p) % 16 == 0 && leading % 8 == 0;
}
const char* check(const FirstProduct& p) {
  constexpr std::int64_t most = std::int64_t{1} << 30;
  if (p.rows < 0 || p.columns < 0 || p.hidden <= 0) return "first product: a size is negative, or hidden is 0";
  if (p.rows > most || p.columns > most || p.hidden > most) return "first product: a size is above 2^30";
  if (!contract::is_half(p.dtype)) return "first product: X and W must be bf16 or f16";
  if (p.ldx < p.hidden || p.ldw < p.hidden) return "first product: a leading dimension is below hidden";
  if (!aligned(p.x, p.ldx) || !aligned(p.w, p.ldw)) return "first product: X or W: rows are not 16-byte aligned";
  if (p.store != Store::nothing && (p.ldout < p.columns || !aligned(p.out, p.ldout)))
    return "first product: E or D: rows are too short or not 16-byte aligned";
  if (p.store == Store::gradient && p.row_scale == nullptr) return "first product: D needs row_scale";
  return nullptr;
}

std::int64_t up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

// A matrix [outer,inner] of 16-bit elements, walked in boxes of 64 inner elements.
bool describe(CUtensorMap* map, const FirstProductPlan& plan, const void* data, std::int64_t inner, std::int64_t outer,
              std::int64_t leading, int box) {
  cuuint64_t const sizes[2] = {static_cast<cuuint64_t>(inner), static_cast<cuuint64_t>(outer)};
  cuuint64_t const strides[1] = {static_cast<cuuint64_t>(leading) * 2};
  cuuint32_t const boxes[2] = {64, static_cast<cuuint32_t>(box)}, steps[2] = {1, 1};
  auto const encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(plan.encode);
  return encode(map,
                plan.dtype == contract::DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2, const_cast<void*>(data), sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

cudaLaunchConfig_t configure(const FirstProductPlan& plan, int clusters, cudaStream_t stream,
                             cudaLaunchAttribute* cluster) {
  cluster->id = cudaLaunchAttributeClusterDimension;
  cluster->val.clusterDim.x = static_cast<unsigned>(plan.cluster_rows);
  cluster->val.clusterDim.y = cluster->val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(clusters * plan.cluster_rows));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(plan.shared_bytes);
  config.stream = stream;
  config.attrs = cluster;
  config.numAttrs = 1;
  return config;
}

}  // namespace

const char* make_first_product(const FirstProduct& p, int device_sms, FirstProductPlan* plan) {
  if (const char* const wrong = check(p)) return wrong;
  int const statistics = statistics_of(p);
  Variant const* const v = p.dtype == contract::DType::f16 ? find<true>(p, statistics) : find<false>(p, statistics);
  if (v == nullptr) return "first product: D comes with no statistics but r";
  *plan = FirstProductPlan{};
  plan->kernel = v->kernel;
  plan->dtype = v->dtype;
  plan->statistics = v->statistics;
  plan->transform = v->transform;
  plan->store = v->store;
  plan->shared_bytes = kBytesShared;
  // Two CTAs share W's tiles, unless that leaves one of them idle for more than a twentieth of the rows.
  std::int64_t const row_tiles = std::max<std::int64_t>(1, up(p.rows, kRows));
  plan->cluster_rows = row_tiles % 2 == 0 || row_tiles > 20 ? 2 : 1;
  plan->group = 16 / plan->cluster_rows;
  plan->lead = 2;

  cudaDriverEntryPointQueryResult found{};
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &plan->encode, 12000, cudaEnableDefault, &found) !=
          cudaSuccess ||
      found != cudaDriverEntryPointSuccess)
    return "first product: the driver lacks cuTensorMapEncodeTiled";
  if (cudaFuncSetAttribute(plan->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytesShared) != cudaSuccess)
    return "first product: the device lacks the shared memory, or the build its code";
  cudaLaunchAttribute cluster;
  cudaLaunchConfig_t const config = configure(*plan, std::max(1, device_sms / plan->cluster_rows), nullptr, &cluster);
  if (cudaOccupancyMaxActiveClusters(&plan->clusters, plan->kernel, &config) != cudaSuccess || plan->clusters < 1)
    return "first product: no cluster fits the device";
  return nullptr;
}

const char* launch_first_product(const FirstProductPlan& plan, const FirstProduct& p, cudaStream_t stream) {
  if (const char* const wrong = check(p)) return wrong;
  if (p.dtype != plan.dtype || p.store != plan.store || p.transforms() != plan.transform ||
      statistics_of(p) > plan.statistics)
    return "first product: the plan was made for something else";
  if (p.rows == 0 || p.columns == 0) return nullptr;

  Work work{p, 0, 0, 0, plan.group, plan.lead, p.softcap > 0.0F ? 1.0F / p.softcap : 0.0F};
  std::int64_t const row_clusters = up(p.rows, kRows * plan.cluster_rows), column_tiles = up(p.columns, kColumns);
  if (row_clusters * column_tiles > (std::int64_t{1} << 30)) return "first product: more than 2^30 tiles";
  work.row_clusters = static_cast<int>(row_clusters);
  work.column_tiles = static_cast<int>(column_tiles);
  work.depth_blocks = static_cast<int>(up(p.hidden, kDepth));
  // The leader stays less than a tile ahead only while a tile has more blocks than there are stages.
  if (work.depth_blocks <= kStages) work.lead = 0;

  CUtensorMap map_x, map_w, map_out;
  bool good = describe(&map_x, plan, p.x, p.hidden, p.rows, p.ldx, kRows) &&
              describe(&map_w, plan, p.w, p.hidden, p.columns, p.ldw, kColumns / plan.cluster_rows);
  if (p.store == Store::nothing)
    map_out = map_x;
  else
    good = good && describe(&map_out, plan, p.out, p.columns, p.rows, p.ldout, 16);
  if (!good) return "first product: a matrix cannot be described to the copy engine";

  cudaLaunchAttribute cluster;
  cudaLaunchConfig_t const config = configure(
      plan, static_cast<int>(std::min<std::int64_t>(plan.clusters, row_clusters * column_tiles)), stream, &cluster);
  void* arguments[] = {&map_x, &map_w, &map_out, &work};
  cudaError_t const error = cudaLaunchKernelExC(&config, plan.kernel, arguments);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace logitless::cuda
