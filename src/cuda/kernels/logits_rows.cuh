// Cross-entropy of given logits: z [R,V] -> row statistics -> (functor) loss [R] and D = dL/dz [R,V].
// Fused: maximum, sum of exponentials, the target's logit, sum of (z - m), the row's loss, the gradient. Never
// materialised: probabilities. Cost: z is read once, D written once; two exponentials an element with D, one without.
// Three kernels by row length: a row in the registers of 8, 32 or 256 threads; a row in shared memory (Hopper: a ring
// of bulk copies, shared by a cluster where one SM cannot hold it); a row streamed and read again from L2. Numerics:
// fp32, difference first; per-thread sums of 16 to 32 terms, then trees: error about 2^-22 + 2^-23 |z - m| on each
// exponential; equal inputs give equal bits.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "contract/problem.hpp"
#include "cuda/device/row_ptx.cuh"

namespace logitless::cuda {

// Strides in elements; z's may be negative or 0; the columns are adjacent. d may be z. d_dtype is z_dtype or f32.
struct LogitsRows {
  void const* z;
  void* d;  // null: loss only
  contract::DType z_dtype, d_dtype;
  std::int64_t rows, vocab, z_stride, d_stride;
  bool want_k;
  int sms, major;  // of the device; major 9 needs code built for sm_90a
};

// d_j = exp(z_j - m) scale - shift, d_y = at_target.
struct RowGradient {
  float m, scale, shift, at_target;
  int kind;  // 0: as above, 1: the row of D is zeros, 2: it is NaN
};

// A functor has, as __device__ const members:
//   bool kept(row), int64_t target(row)            pure; read by many threads; -1: no target
//   void ignored(row)                              once for each row that is not kept
//   RowGradient finish(row, m, r, k, z_y)          once for each kept row, by one thread; z_y is -inf without a target
//   RowGradient gradient(row)                      launch_logits_gradient instead of finish: pure, once a segment of a
//   row
namespace rows {

using contract::DType;

inline constexpr float log2e = 1.44269504088896340736F;

__device__ inline float minus_infinity() { return __int_as_float(static_cast<int>(0xff800000U)); }
// What differences are taken to: a row, or a part of one, that is all -inf so far has none.
__device__ inline float reference(float m) { return m == minus_infinity() ? 0.0F : m; }

// ---- 16 bytes of a row as numbers -----------------------------------------------------------------------------------

template <DType type>
struct Granule;

template <>
struct Granule<DType::f32> {
  using Bits = std::uint32_t;
  static constexpr int count = 4;
  static constexpr std::uint32_t lowest = 0xff800000U, nan = 0x7fc00000U;
  __device__ static float widen(Bits b) { return __uint_as_float(b); }
  __device__ static Bits narrow(float x) { return __float_as_uint(x); }
  __device__ static void widen(std::uint32_t word, float* v) { v[0] = __uint_as_float(word); }
  __device__ static std::uint32_t fold(std::uint32_t a, std::uint32_t b) {
    return __float_as_uint(max_nan(__uint_as_float(a), __uint_as_float(b)));
  }
  __device__ static float top(std::uint32_t word) { return __uint_as_float(word); }
  __device__ static uint4 narrow(float const (&v)[4]) {
    return {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])};
  }
};

template <>
struct Granule<DType::bf16> {
  using Bits = std::uint16_t;
  static constexpr int count = 8;
  static constexpr std::uint32_t lowest = 0xff80ff80U, nan = 0x7fc07fc0U;
  __device__ static float widen(Bits b) { return __uint_as_float(static_cast<std::uint32_t>(b) << 16); }
  __device__ static Bits narrow(float x) { return static_cast<Bits>(pack_bf16x2(x, 0.0F)); }
  __device__ static void widen(std::uint32_t word, float* v) {
    v[0] = __uint_as_float(word << 16);
    v[1] = __uint_as_float(word & 0xffff0000U);
  }
  __device__ static std::uint32_t fold(std::uint32_t a, std::uint32_t b) { return max_nan_bf16x2(a, b); }
  __device__ static float top(std::uint32_t word) {
    return max_nan(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000U));
  }
  __device__ static uint4 narrow(float const (&v)[8]) {
    return {pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]), pack_bf16x2(v[4], v[5]), pack_bf16x2(v[6], v[7])};
  }
};

template <>
struct Granule<DType::f16> {
  using Bits = std::uint16_t;
  static constexpr int count = 8;
  static constexpr std::uint32_t lowest = 0xfc00fc00U, nan = 0x7e007e00U;
  __device__ static float widen(Bits b) { return widen_f16(b); }
  __device__ static Bits narrow(float x) { return static_cast<Bits>(pack_f16x2(x, 0.0F)); }
  __device__ static void widen(std::uint32_t word, float* v) {
    v[0] = widen_f16(static_cast<std::uint16_t>(word));
    v[1] = widen_f16(static_cast<std::uint16_t>(word >> 16));
  }
  __device__ static std::uint32_t fold(std::uint32_t a, std::uint32_t b) { return max_nan_f16x2(a, b); }
  __device__ static float top(std::uint32_t word) {
    return max_nan(widen_f16(static_cast<std::uint16_t>(word)), widen_f16(static_cast<std::uint16_t>(word >> 16)));
  }
  __device__ static uint4 narrow(float const (&v)[8]) {
    return {pack_f16x2(v[0], v[1]), pack_f16x2(v[2], v[3]), pack_f16x2(v[4], v[5]), pack_f16x2(v[6], v[7])};
  }
};

template <class T>
__device__ inline void widen_all(uint4 q, float (&v)[T::count]) {
  constexpr int step = T::count / 4;
  T::widen(q.x, v);
  T::widen(q.y, v + step);
  T::widen(q.z, v + 2 * step);
  T::widen(q.w, v + 3 * step);
}

// ---- where a row lies -----------------------------------------------------------------------------------------------

// `head` elements up to a multiple of 16 bytes, then granules of 16 bytes, then `tail` elements. The granules
// [first, first + count) are this CTA's share; edges belong to the cluster's first and last CTA.
template <class T>
struct Span {
  char const* z;  // column 0
  int head, tail, granules, first, count;
  bool own_head, own_tail;

  __device__ Span(LogitsRows const& s, std::int64_t row, int rank = 0, int ranks = 1) {
    constexpr int size = sizeof(typename T::Bits);
    z = static_cast<char const*>(s.z) + row * s.z_stride * size;
    auto const past = static_cast<int>(reinterpret_cast<std::uintptr_t>(z) & 15U);
    std::int64_t const lead = past == 0 ? 0 : (16 - past) / size;
    head = static_cast<int>(lead < s.vocab ? lead : s.vocab);
    std::int64_t const body = s.vocab - head;
    granules = static_cast<int>(body / T::count);
    tail = static_cast<int>(body % T::count);
    first = static_cast<int>(static_cast<std::int64_t>(granules) * rank / ranks);
    count = static_cast<int>(static_cast<std::int64_t>(granules) * (rank + 1) / ranks) - first;
    own_head = rank == 0;
    own_tail = rank == ranks - 1;
  }
  __device__ std::int64_t tail_column() const { return head + static_cast<std::int64_t>(granules) * T::count; }
  // Column of this share's granule g.
  __device__ std::int64_t column(int g) const { return head + static_cast<std::int64_t>(first + g) * T::count; }
  __device__ char const* at(int g) const { return z + column(g) * static_cast<int>(sizeof(typename T::Bits)); }
  __device__ float value(std::int64_t column) const {
    return T::widen(
        *reinterpret_cast<typename T::Bits const*>(z + column * static_cast<int>(sizeof(typename T::Bits))));
  }
};

// The target's place: a granule of this share and an element in it, or an edge; -1 elsewhere.
struct Hit {
  int granule = -1, element = -1, head = -1, tail = -1;
};
template <class T>
__device__ inline Hit hit_of(Span<T> const& span, std::int64_t vocab, std::int64_t y) {
  Hit hit;
  if (y < 0 || y >= vocab) return hit;
  if (y < span.head) {
    hit.head = static_cast<int>(y);
  } else if (y >= span.tail_column()) {
    hit.tail = static_cast<int>(y - span.tail_column());
  } else {
    std::int64_t const c = y - span.head;
    std::int64_t const g = c / T::count - span.first;
    if (g >= 0 && g < span.count) {
      hit.granule = static_cast<int>(g);
      hit.element = static_cast<int>(c % T::count);
    }
  }
  return hit;
}

// ---- statistics -----------------------------------------------------------------------------------------------------

// m of the columns seen but the target's; r, k relative to it; n the number of terms in k; z_y -inf until met.
struct Partial {
  float m, r, k, n, z_y;
};
__device__ inline Partial nothing() { return {minus_infinity(), 0.0F, 0.0F, 0.0F, minus_infinity()}; }

// Takes element i out of a granule: -inf counts nothing.
template <class T>
__device__ inline void cut(uint4& q, int i, float& z_y) {
  constexpr int each = T::count / 4;
  std::uint32_t w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float v[each];
    T::widen(w[j], v);
#pragma unroll
    for (int h = 0; h < each; ++h) {
      if (i != j * each + h) continue;
      z_y = v[h];
      std::uint32_t const mask = each == 1 ? 0xffffffffU : 0xffffU << (16 * h);
      w[j] = (w[j] & ~mask) | (T::lowest & mask);
    }
  }
  q = {w[0], w[1], w[2], w[3]};
}

// U granules first, first + step, ... of a share of `count`; those past its end hold -inf.
template <class T, int U>
__device__ inline void absorb(Partial& p, uint4 (&q)[U], int first, int step, int count, Hit hit, bool want_k) {
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (first + u * step == hit.granule) cut<T>(q[u], hit.element, p.z_y);
  std::uint32_t word = T::fold(T::fold(q[0].x, q[0].y), T::fold(q[0].z, q[0].w));
#pragma unroll
  for (int u = 1; u < U; ++u) word = T::fold(word, T::fold(T::fold(q[u].x, q[u].y), T::fold(q[u].z, q[u].w)));
  float const m = max_nan(p.m, T::top(word)), to = reference(m), by = p.m - to;
  float sum[4] = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
  for (int u = 0; u < U; ++u) {
    float v[T::count];
    widen_all<T>(q[u], v);
#pragma unroll
    for (int i = 0; i < T::count; ++i) sum[i % 4] += exp2_fast((v[i] - to) * log2e);
  }
  p.r = p.r * exp2_fast(by * log2e) + ((sum[0] + sum[1]) + (sum[2] + sum[3]));
  if (want_k) {
    if (p.n > 0.0F) p.k += p.n * by;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      int const g = first + u * step;
      if (g >= count) continue;
      int const skip = g == hit.granule ? hit.element : -1;
      float v[T::count], k = 0.0F;
      widen_all<T>(q[u], v);
#pragma unroll
      for (int i = 0; i < T::count; ++i)
        if (i != skip) k += v[i] - to;
      p.k += k;
      p.n += static_cast<float>(skip < 0 ? T::count : T::count - 1);
    }
  }
  p.m = m;
}

__device__ inline void absorb_one(Partial& p, float z, bool is_target) {
  if (is_target) {
    p.z_y = z;
    return;
  }
  float const m = max_nan(p.m, z), to = reference(m), by = p.m - to;
  p.r = p.r * exp2_fast(by * log2e) + exp2_fast((z - to) * log2e);
  if (p.n > 0.0F) p.k += p.n * by;
  p.k += z - to;
  p.n += 1.0F;
  p.m = m;
}

// Elements before and behind the granules, one a thread: threads 0 to 7 of a group take both.
template <class T>
struct Edges {
  float head = 0.0F, tail = 0.0F;
  bool has_head = false, has_tail = false;

  __device__ void load(Span<T> const& span, int thread) {
    has_head = span.own_head && thread < span.head;
    has_tail = span.own_tail && thread < span.tail;
    if (has_head) head = span.value(thread);
    if (has_tail) tail = span.value(span.tail_column() + thread);
  }
  __device__ void absorb(Partial& p, int thread, Hit hit) const {
    if (has_head) absorb_one(p, head, thread == hit.head);
    if (has_tail) absorb_one(p, tail, thread == hit.tail);
  }
};

// All W lanes get the same bits: each step adds the same two numbers on both sides.
template <int W>
__device__ inline Partial reduce(Partial p, bool want_k) {
  constexpr unsigned all = 0xffffffffU;
  float m = p.m;
#pragma unroll
  for (int o = W / 2; o > 0; o /= 2) m = max_nan(m, __shfl_xor_sync(all, m, o));
  float const by = p.m - reference(m);
  p.m = m;
  p.r *= exp2_fast(by * log2e);
#pragma unroll
  for (int o = W / 2; o > 0; o /= 2) {
    p.r += __shfl_xor_sync(all, p.r, o);
    p.z_y = max_nan(p.z_y, __shfl_xor_sync(all, p.z_y, o));
  }
  if (want_k) {
    if (p.n > 0.0F) p.k += p.n * by;
#pragma unroll
    for (int o = W / 2; o > 0; o /= 2) {
      p.k += __shfl_xor_sync(all, p.k, o);
      p.n += __shfl_xor_sync(all, p.n, o);
    }
  }
  return p;
}

// The target joins m and k; then the functor makes the row's numbers. One thread.
template <class Functor>
__device__ inline RowGradient close(Partial p, Functor const& f, std::int64_t row, bool has_target) {
  if (has_target) {
    float const m = max_nan(p.m, p.z_y), to = reference(m), by = p.m - to;
    p.r *= exp2_fast(by * log2e);
    if (p.n > 0.0F) p.k += p.n * by;
    p.k += p.z_y - to;
    p.m = m;
  }
  return f.finish(row, p.m, p.r, p.k, p.z_y);
}

// ---- gradient -------------------------------------------------------------------------------------------------------

__device__ inline float element(float z, RowGradient const& g) {
  return exp2_fast((z - g.m) * log2e) * g.scale - g.shift;
}

// A row of D: `wide` says fp32 beside 16-bit z; `whole`: its granules lie on 16 bytes where z's do.
template <class T>
struct Output {
  char* d;
  bool wide, whole;

  __device__ Output(LogitsRows const& s, std::int64_t row, Span<T> const& span) {
    wide = T::count == 8 && s.d_dtype == DType::f32;
    int const size = wide ? 4 : static_cast<int>(sizeof(typename T::Bits));
    d = static_cast<char*>(s.d) + row * s.d_stride * size;
    whole = ((reinterpret_cast<std::uintptr_t>(d) + static_cast<unsigned>(span.head * size)) & 15U) == 0;
  }
  __device__ void put(std::int64_t column, float x) const {
    if (wide) {
      reinterpret_cast<float*>(d)[column] = x;
    } else {
      reinterpret_cast<typename T::Bits*>(d)[column] = T::narrow(x);
    }
  }
  // T::count columns from `column` on, z's bits in q; `hit`: the target's place among them or -1.
  __device__ void emit(std::int64_t column, uint4 q, RowGradient const& g, int hit) const {
    float v[T::count];
    widen_all<T>(q, v);
#pragma unroll
    for (int i = 0; i < T::count; ++i) v[i] = element(v[i], g);
    if (hit >= 0) {
#pragma unroll
      for (int i = 0; i < T::count; ++i) v[i] = i == hit ? g.at_target : v[i];
    }
    if (!whole) {
#pragma unroll
      for (int i = 0; i < T::count; ++i) put(column + i, v[i]);
    } else if (wide) {
#pragma unroll
      for (int i = 0; i < T::count; i += 4)
        store_16(d + (column + i) * 4, {__float_as_uint(v[i]), __float_as_uint(v[i + 1]), __float_as_uint(v[i + 2]),
                                        __float_as_uint(v[i + 3])});
    } else {
      store_16(d + column * static_cast<int>(sizeof(typename T::Bits)), T::narrow(v));
    }
  }
  __device__ void emit_edges(Edges<T> const& e, Span<T> const& span, int thread, RowGradient const& g, Hit hit) const {
    if (e.has_head) put(thread, thread == hit.head ? g.at_target : element(e.head, g));
    if (e.has_tail) put(span.tail_column() + thread, thread == hit.tail ? g.at_target : element(e.tail, g));
  }
};

// A row, or its columns [from, to), of zeros or NaN, by `threads` threads; aligned on D itself.
template <class T>
__device__ inline void fill(LogitsRows const& s, std::int64_t row, std::int64_t from, std::int64_t to, bool nan,
                            int thread, int threads) {
  bool const wide = T::count == 8 && s.d_dtype == DType::f32;
  int const size = wide ? 4 : static_cast<int>(sizeof(typename T::Bits));
  std::uint32_t const word = !nan ? 0U : wide ? Granule<DType::f32>::nan : T::nan;
  char* const d = static_cast<char*>(s.d) + (row * s.d_stride + from) * size;
  std::int64_t const bytes = (to - from) * size;
  std::int64_t lead = (16 - static_cast<int>(reinterpret_cast<std::uintptr_t>(d) & 15U)) & 15;
  if (lead > bytes) lead = bytes;
  std::int64_t const body = (bytes - lead) / 16, rest = lead + body * 16;
  auto const scalar = [&](std::int64_t at) {
    if (size == 4) {
      *reinterpret_cast<std::uint32_t*>(d + at) = word;
    } else {
      *reinterpret_cast<std::uint16_t*>(d + at) = static_cast<std::uint16_t>(word);
    }
  };
  if (thread * size < lead) scalar(thread * size);
  for (std::int64_t i = thread; i < body; i += threads) store_16(d + lead + i * 16, {word, word, word, word});
  if (rest + thread * size < bytes) scalar(rest + thread * size);
}

// ---- a CTA settles a row --------------------------------------------------------------------------------------------

template <int warps>
struct Settlement {
  Partial partial[2][warps];
  RowGradient gradient;
};

// The CTA's partial, in warp 0 alone. `turn` alternates, so that the next row's partials never meet a late reader.
template <int warps, class Sync>
__device__ inline Partial gather(Settlement<warps>& shared, Partial p, int turn, bool want_k, Sync sync) {
  int const warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  p = reduce<32>(p, want_k);
  if (lane == 0) shared.partial[turn][warp] = p;
  sync();
  if (warp == 0) {
    p = lane < warps ? shared.partial[turn][lane] : nothing();
    p = reduce<32>(p, want_k);
  }
  return p;
}

// ---- a row in registers ---------------------------------------------------------------------------------------------

// 64 or 128 bytes of z a thread: 32 elements either way.
template <class T>
inline constexpr int held = 32 / T::count;

// G threads a row. 8 or 32: four warps a CTA, no barrier. 256: one row a CTA.
template <class T, int G, class Functor>
__global__ void __launch_bounds__(G > 32 ? G : 128)
    logits_rows_registers(const __grid_constant__ LogitsRows s, const __grid_constant__ Functor f) {
  constexpr int threads = G > 32 ? G : 128, U = held<T>;
  int const lane = static_cast<int>(threadIdx.x) % G;
  std::int64_t const row = static_cast<std::int64_t>(blockIdx.x) * (threads / G) + static_cast<int>(threadIdx.x) / G;
  bool const there = row < s.rows, kept = there && f.kept(row);
  // Groups of one warp shuffle together: rows that are not kept go along empty.
  if (G > 32 && !kept) {
    if (there && s.d != nullptr) fill<T>(s, row, 0, s.vocab, false, lane, G);
    if (there && lane == 0) f.ignored(row);
    return;
  }
  std::int64_t const y = kept ? f.target(row) : -1;
  Span<T> const span(s, there ? row : 0);
  uint4 q[U];
  Edges<T> edges;
#pragma unroll
  for (int u = 0; u < U; ++u) {
    int const g = lane + u * G;
    q[u] = {T::lowest, T::lowest, T::lowest, T::lowest};
    if (kept && g < span.count) q[u] = load_16(span.at(g));
  }
  if (kept) edges.load(span, lane);
  Hit const hit = hit_of(span, s.vocab, y);
  bool const has_target = y >= 0 && y < s.vocab;
  Partial p = nothing();
  uint4 whole[U];  // absorb takes the target out; D puts its own number there
#pragma unroll
  for (int u = 0; u < U; ++u) whole[u] = q[u];
  absorb<T, U>(p, whole, lane, G, span.count, hit, s.want_k);
  edges.absorb(p, lane, hit);

  RowGradient g{};
  if constexpr (G > 32) {
    __shared__ Settlement<G / 32> shared;
    p = gather(shared, p, 0, s.want_k, [] { __syncthreads(); });
    if (threadIdx.x == 0) shared.gradient = close(p, f, row, has_target);
    if (s.d == nullptr) return;
    __syncthreads();
    g = shared.gradient;
  } else {
    p = reduce<G>(p, s.want_k);
    if (kept && lane == 0) g = close(p, f, row, has_target);
    if (there && !kept && lane == 0) f.ignored(row);
    if (s.d == nullptr) return;
    constexpr unsigned all = 0xffffffffU;
    g.m = __shfl_sync(all, g.m, 0, G);
    g.scale = __shfl_sync(all, g.scale, 0, G);
    g.shift = __shfl_sync(all, g.shift, 0, G);
    g.at_target = __shfl_sync(all, g.at_target, 0, G);
    g.kind = __shfl_sync(all, g.kind, 0, G);
    if (!there) return;
  }
  if (!kept || g.kind != 0) {
    fill<T>(s, row, 0, s.vocab, kept && g.kind == 2, lane, G);
    return;
  }
  Output<T> const out(s, row, span);
#pragma unroll
  for (int u = 0; u < U; ++u) {
    int const at = lane + u * G;
    if (at < span.count) out.emit(span.column(at), q[u], g, at == hit.granule ? hit.element : -1);
  }
  out.emit_edges(edges, span, lane, g, hit);
}

// D from known statistics: segments of 32 G elements, G threads each.
template <class T, int G, class Functor>
__global__ void __launch_bounds__(G > 32 ? G : 128)
    logits_gradient_segments(const __grid_constant__ LogitsRows s, const __grid_constant__ Functor f,
                             std::int64_t segments) {
  constexpr int threads = G > 32 ? G : 128, U = held<T>;
  int const lane = static_cast<int>(threadIdx.x) % G;
  std::int64_t const unit = static_cast<std::int64_t>(blockIdx.x) * (threads / G) + static_cast<int>(threadIdx.x) / G;
  std::int64_t const row = unit / segments, segment = unit % segments;
  if (row >= s.rows) return;
  bool const kept = f.kept(row);
  Span<T> const span(s, row);
  int const first = static_cast<int>(segment) * (G * U) + lane;
  uint4 q[U];
  Edges<T> edges;
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (kept && first + u * G < span.count) q[u] = load_16(span.at(first + u * G));
  if (kept && segment == 0) edges.load(span, lane);
  RowGradient g{};
  g.kind = 1;
  if (kept && lane == 0) g = f.gradient(row);
  if constexpr (G > 32) {
    __shared__ RowGradient shared;
    if (threadIdx.x == 0) shared = g;
    __syncthreads();
    g = shared;
  } else {
    // Rows past the end have left as whole groups of 32.
    constexpr unsigned all = 0xffffffffU;
    g.m = __shfl_sync(all, g.m, 0, G);
    g.scale = __shfl_sync(all, g.scale, 0, G);
    g.shift = __shfl_sync(all, g.shift, 0, G);
    g.at_target = __shfl_sync(all, g.at_target, 0, G);
    g.kind = __shfl_sync(all, g.kind, 0, G);
  }
  if (g.kind != 0) {
    std::int64_t const width = static_cast<std::int64_t>(G) * U * T::count, from = segment * width;
    std::int64_t const to = segment + 1 == segments || from + width > s.vocab ? s.vocab : from + width;
    if (from < s.vocab) fill<T>(s, row, from, to, g.kind == 2, lane, G);
    return;
  }
  Hit const hit = hit_of(span, s.vocab, f.target(row));
  Output<T> const out(s, row, span);
#pragma unroll
  for (int u = 0; u < U; ++u) {
    int const at = first + u * G;
    if (at < span.count) out.emit(span.column(at), q[u], g, at == hit.granule ? hit.element : -1);
  }
  out.emit_edges(edges, span, lane, g, hit);
}

// ---- a row streamed, and read again for D ---------------------------------------------------------------------------

inline constexpr int stream_threads = 512;

template <class T, class Functor>
__global__ void __launch_bounds__(stream_threads)
    logits_rows_streamed(const __grid_constant__ LogitsRows s, const __grid_constant__ Functor f) {
  constexpr int threads = stream_threads, U = 4;
  __shared__ Settlement<threads / 32> shared;
  int const thread = static_cast<int>(threadIdx.x);
  int turn = 0;
  for (std::int64_t row = blockIdx.x; row < s.rows; row += gridDim.x) {
    if (!f.kept(row)) {
      if (s.d != nullptr) fill<T>(s, row, 0, s.vocab, false, thread, threads);
      if (thread == 0) f.ignored(row);
      continue;
    }
    std::int64_t const y = f.target(row);
    Span<T> const span(s, row);
    Hit const hit = hit_of(span, s.vocab, y);
    Edges<T> edges;
    edges.load(span, thread);
    Partial p = nothing();
    for (int g = thread; g < span.count; g += threads * U) {
      uint4 q[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        q[u] = {T::lowest, T::lowest, T::lowest, T::lowest};
        if (g + u * threads < span.count) q[u] = load_16(span.at(g + u * threads));
      }
      absorb<T, U>(p, q, g, threads, span.count, hit, s.want_k);
    }
    edges.absorb(p, thread, hit);
    p = gather(shared, p, turn, s.want_k, [] { __syncthreads(); });
    turn ^= 1;
    if (thread == 0) shared.gradient = close(p, f, row, y >= 0 && y < s.vocab);
    if (s.d == nullptr) continue;
    __syncthreads();
    RowGradient const g = shared.gradient;
    if (g.kind != 0) {
      fill<T>(s, row, 0, s.vocab, g.kind == 2, thread, threads);
    } else {
      Output<T> const out(s, row, span);
      for (int i = thread; i < span.count; i += threads * U) {
        uint4 q[U];
#pragma unroll
        for (int u = 0; u < U; ++u)
          if (i + u * threads < span.count) q[u] = load_16(span.at(i + u * threads));
#pragma unroll
        for (int u = 0; u < U; ++u) {
          int const at = i + u * threads;
          if (at < span.count) out.emit(span.column(at), q[u], g, at == hit.granule ? hit.element : -1);
        }
      }
      out.emit_edges(edges, span, thread, g, hit);
    }
  }
}

// ---- a row in shared memory (Hopper) --------------------------------------------------------------------------------

// Persistent CTAs. The last warp copies chunks of 16 U T bytes of row after row into a ring of slots; T threads take
// statistics as chunks arrive, then make D from the same slots and free them, while the next row's chunks already fill
// the others. A cluster shares a row: partials and the row's numbers cross by st.async.
struct RingShared {
  float4 partials[8][2];  // in rank 0, from each rank
  float4 gradient[2];
  std::uint64_t partials_there, gradient_there;
};

template <class T, int threads, int U, class Functor>
__global__ void __launch_bounds__(threads + 32, 2)
    logits_rows_ring(const __grid_constant__ LogitsRows s, const __grid_constant__ Functor f, int slots) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int chunk = threads * U;  // granules
  constexpr int warps = threads / 32;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Settlement<warps> shared;
  __shared__ RingShared cluster;
  int const thread = static_cast<int>(threadIdx.x);
  auto const rank = static_cast<int>(cluster_rank()), ranks = static_cast<int>(cluster_size());
  std::uint32_t const data = shared_address(ring), full = data + static_cast<std::uint32_t>(slots) * (chunk * 16),
                      empty = full + static_cast<std::uint32_t>(slots) * 8;
  std::uint32_t const partials_there = shared_address(&cluster.partials_there),
                      gradient_there = shared_address(&cluster.gradient_there);
  bool const with_d = s.d != nullptr;
  if (thread == 0) {
    for (int i = 0; i < slots; ++i) {
      barrier_init(full + static_cast<std::uint32_t>(i) * 8, 1);
      barrier_init(empty + static_cast<std::uint32_t>(i) * 8, warps);
    }
    barrier_init(partials_there, 1);
    barrier_init(gradient_there, 1);
    barrier_init_fence();
  }
  __syncthreads();
  if (ranks > 1) cluster_barrier();

  std::int64_t const start = static_cast<int>(blockIdx.x) / ranks, step = static_cast<int>(gridDim.x) / ranks;
  int slot = 0;
  std::uint32_t phase = 0;
  auto const advance = [&] {
    if (++slot == slots) {
      slot = 0;
      phase ^= 1U;
    }
  };

  if (thread >= threads) {
    if (thread == threads) {
      std::uint64_t const policy = evict_first_policy();
      bool next = start < s.rows && f.kept(start);
      for (std::int64_t row = start; row < s.rows; row += step) {
        bool const kept = next;
        next = row + step < s.rows && f.kept(row + step);  // asked for a row early: its latency hides here
        if (!kept) continue;
        Span<T> const span(s, row, rank, ranks);
        char const* from = span.at(0);
        for (int g = 0; g < span.count; g += chunk) {
          barrier_wait(empty + static_cast<std::uint32_t>(slot) * 8, phase ^ 1U);
          auto const bytes = static_cast<std::uint32_t>(span.count - g < chunk ? span.count - g : chunk) * 16U;
          std::uint32_t const there = full + static_cast<std::uint32_t>(slot) * 8;
          barrier_arrive_expecting(there, static_cast<int>(bytes));
          bulk_load(data + static_cast<std::uint32_t>(slot) * (chunk * 16), from, bytes, there, policy);
          from += bytes;
          advance();
        }
      }
    }
    __syncwarp();
  } else {
    int const lane = thread % 32;
    int turn = 0;
    std::uint32_t rows_phase = 0;
    bool next_kept = start < s.rows && f.kept(start);
    std::int64_t next_y = next_kept ? f.target(start) : -1;
    Edges<T> next_edges;
    if (next_kept) next_edges.load(Span<T>(s, start, rank, ranks), thread);
    for (std::int64_t row = start; row < s.rows; row += step) {
      bool const kept = next_kept;
      std::int64_t const y = next_y;
      Edges<T> const edges = next_edges;
      next_kept = row + step < s.rows && f.kept(row + step);
      next_y = next_kept ? f.target(row + step) : -1;
      if (next_kept) next_edges.load(Span<T>(s, row + step, rank, ranks), thread);
      if (!kept) {
        if (with_d) fill<T>(s, row, 0, s.vocab, false, rank * threads + thread, ranks * threads);
        if (rank == 0 && thread == 0) f.ignored(row);
        continue;
      }
      Span<T> const span(s, row, rank, ranks);
      Hit const hit = hit_of(span, s.vocab, y);
      int const first_slot = slot;
      Partial p = nothing();
      for (int g = thread; g - thread < span.count; g += chunk) {
        barrier_wait(full + static_cast<std::uint32_t>(slot) * 8, phase);
        std::uint32_t const at =
            data + static_cast<std::uint32_t>(slot) * (chunk * 16) + static_cast<unsigned>(thread) * 16U;
        uint4 q[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
          q[u] = {T::lowest, T::lowest, T::lowest, T::lowest};
          if (g + u * threads < span.count) q[u] = load_shared_16(at + static_cast<unsigned>(u * threads) * 16U);
        }
        if (!with_d) {
          __syncwarp();
          if (lane == 0) barrier_arrive(empty + static_cast<std::uint32_t>(slot) * 8);
        }
        absorb<T, U>(p, q, g, threads, span.count, hit, s.want_k);
        advance();
      }
      edges.absorb(p, thread, hit);
      p = gather(shared, p, turn, s.want_k, [] { named_barrier(1, threads); });
      turn ^= 1;

      RowGradient g{};
      bool const has_target = y >= 0 && y < s.vocab;
      if (ranks == 1) {
        if (thread == 0) shared.gradient = close(p, f, row, has_target);
        if (!with_d) continue;
        named_barrier(1, threads);
        g = shared.gradient;
      } else {
        if (thread < 32) {
          if (lane == 0) {
            barrier_arrive_expecting(gradient_there, 32);
            std::uint32_t const to = in_rank(shared_address(&cluster.partials[rank][0]), 0),
                                there = in_rank(partials_there, 0);
            store_remote_16(to, {p.m, p.r, p.k, p.n}, there);
            store_remote_16(to + 16, {p.z_y, 0.0F, 0.0F, 0.0F}, there);
          }
          if (rank == 0) {
            if (lane == 0) barrier_arrive_expecting(partials_there, 32 * ranks);
            barrier_wait_cluster(partials_there, rows_phase);
            Partial all = nothing();
            if (lane < ranks) {
              float4 const a = cluster.partials[lane][0], b = cluster.partials[lane][1];
              all = {a.x, a.y, a.z, a.w, b.x};
            }
            all = reduce<32>(all, s.want_k);
            if (lane == 0) g = close(all, f, row, has_target);
            constexpr unsigned full_warp = 0xffffffffU;
            g.m = __shfl_sync(full_warp, g.m, 0);
            g.scale = __shfl_sync(full_warp, g.scale, 0);
            g.shift = __shfl_sync(full_warp, g.shift, 0);
            g.at_target = __shfl_sync(full_warp, g.at_target, 0);
            g.kind = __shfl_sync(full_warp, g.kind, 0);
            if (lane < ranks) {
              std::uint32_t const to = in_rank(shared_address(&cluster.gradient[0]), static_cast<std::uint32_t>(lane)),
                                  there = in_rank(gradient_there, static_cast<std::uint32_t>(lane));
              store_remote_16(to, {g.m, g.scale, g.shift, g.at_target}, there);
              store_remote_16(to + 16, {__int_as_float(g.kind), 0.0F, 0.0F, 0.0F}, there);
            }
          }
        }
        barrier_wait_cluster(gradient_there, rows_phase);
        rows_phase ^= 1U;
        float4 const a = cluster.gradient[0];
        g = {a.x, a.y, a.z, a.w, __float_as_int(cluster.gradient[1].x)};
        if (!with_d) continue;
      }

      Output<T> const out(s, row, span);
      int back = first_slot;
      for (int i = thread; i - thread < span.count; i += chunk) {
        std::uint32_t const at =
            data + static_cast<std::uint32_t>(back) * (chunk * 16) + static_cast<unsigned>(thread) * 16U;
        uint4 q[U];
#pragma unroll
        for (int u = 0; u < U; ++u)
          if (i + u * threads < span.count) q[u] = load_shared_16(at + static_cast<unsigned>(u * threads) * 16U);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + static_cast<std::uint32_t>(back) * 8);
        if (g.kind == 0) {
#pragma unroll
          for (int u = 0; u < U; ++u) {
            int const j = i + u * threads;
            if (j < span.count) out.emit(span.column(j), q[u], g, j == hit.granule ? hit.element : -1);
          }
        }
        if (++back == slots) back = 0;
      }
      if (g.kind == 0) {
        out.emit_edges(edges, span, thread, g, hit);
      } else {
        fill<T>(s, row, 0, s.vocab, g.kind == 2, rank * threads + thread, ranks * threads);
      }
    }
    __syncwarp();
  }
  // Nobody leaves while another CTA's words may still be on their way.
  if (ranks > 1) cluster_barrier();
#else
  __trap();  // chosen for major 9 only: the binary lacks code for it
#endif
}

// ---- launch ---------------------------------------------------------------------------------------------------------

// How the ring is cut for a row. Two CTAs an SM, so that one works while the other settles a row.
struct RingPlan {
  int ranks = 0;  // 0: the row is too long
  int slots = 0, ctas = 0;
};
inline constexpr int ring_slack = 4;  // chunks of the next row that fit beside a whole one

inline RingPlan ring_plan(std::int64_t row_bytes, bool with_d, int chunk_bytes) {
  int const half = 115000 / (chunk_bytes + 16), whole = 231000 / (chunk_bytes + 16);
  if (!with_d) return {1, half, 2};
  for (int ctas = 2; ctas >= 1; --ctas) {
    int const slots = ctas == 2 ? half : whole;
    for (int ranks = 1; ranks <= 8; ranks *= 2) {
      std::int64_t const chunks = (row_bytes / ranks + 16 + chunk_bytes - 1) / chunk_bytes;
      if (chunks + ring_slack <= slots && (ctas == 2 || ranks == 8)) return {ranks, slots, ctas};
    }
  }
  return {};
}

template <class T, int threads, int U, class Functor>
void launch_ring(LogitsRows const& s, Functor const& f, RingPlan plan, cudaStream_t stream) {
  auto* const kernel = logits_rows_ring<T, threads, U, Functor>;
  int const bytes = plan.slots * (threads * U * 16 + 16);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(plan.ranks);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(threads + 32);
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  // How many clusters run at once depends on how SMs are grouped on this chip: asked once, kept with the SM count.
  static std::atomic<std::int64_t> known[4][2];
  int const log = plan.ranks == 1 ? 0 : plan.ranks == 2 ? 1 : plan.ranks == 4 ? 2 : 3;
  std::int64_t clusters = static_cast<std::int64_t>(s.sms) * plan.ctas;
  if (plan.ranks > 1) {
    std::int64_t const packed = known[log][plan.ctas - 1].load(std::memory_order_relaxed);
    if (packed >> 32 == s.sms) {
      clusters = packed & 0xffffffff;
    } else {
      int n = 0;
      config.gridDim = dim3(static_cast<unsigned>(plan.ranks));
      cudaOccupancyMaxActiveClusters(&n, kernel, &config);
      clusters = n > 0 ? n : 1;
      known[log][plan.ctas - 1].store((static_cast<std::int64_t>(s.sms) << 32) | clusters, std::memory_order_relaxed);
    }
  }
  config.gridDim = dim3(static_cast<unsigned>(std::min(clusters, s.rows) * plan.ranks));
  cudaLaunchKernelEx(&config, kernel, s, f, plan.slots);
}

template <class T, int G, class Functor>
void launch_registers(LogitsRows const& s, Functor const& f, cudaStream_t stream) {
  constexpr int threads = G > 32 ? G : 128, each = threads / G;
  logits_rows_registers<T, G, Functor>
      <<<dim3(static_cast<unsigned>((s.rows + each - 1) / each)), threads, 0, stream>>>(s, f);
}

template <class T, class Functor>
void launch_streamed(LogitsRows const& s, Functor const& f, cudaStream_t stream) {
  auto const grid = static_cast<unsigned>(std::min<std::int64_t>(s.rows, 0x7fffffff));
  logits_rows_streamed<T, Functor><<<dim3(grid), stream_threads, 0, stream>>>(s, f);
}

inline constexpr int ring_threads = 256, ring_unroll = 2;

template <class T, class Functor>
void launch_rows(LogitsRows const& s, Functor const& f, cudaStream_t stream) {
  // Edges stand beside the granules, so a group's registers always hold 32 elements a thread.
  if (s.vocab <= 8 * 32) return launch_registers<T, 8>(s, f, stream);
  if (s.vocab <= 32 * 32) return launch_registers<T, 32>(s, f, stream);
  if (s.vocab <= 256 * 32) return launch_registers<T, 256>(s, f, stream);
  if (s.major == 9) {
    RingPlan const plan = ring_plan(s.vocab * static_cast<int>(sizeof(typename T::Bits)), s.d != nullptr,
                                    ring_threads * ring_unroll * 16);
    if (plan.ranks > 0) return launch_ring<T, ring_threads, ring_unroll>(s, f, plan, stream);
  }
  launch_streamed<T>(s, f, stream);
}

template <class T, class Functor>
void launch_gradient(LogitsRows const& s, Functor const& f, cudaStream_t stream) {
  if (s.vocab <= 32 * 32) {
    auto const grid = static_cast<unsigned>((s.rows + 3) / 4);
    logits_gradient_segments<T, 32, Functor><<<dim3(grid), 128, 0, stream>>>(s, f, 1);
  } else {
    std::int64_t const segments = (s.vocab + 256 * 32 - 1) / (256 * 32);
    logits_gradient_segments<T, 256, Functor>
        <<<dim3(static_cast<unsigned>(s.rows * segments)), 256, 0, stream>>>(s, f, segments);
  }
}

}  // namespace rows

// z [R,V] -> what the functor writes a row, and D [R,V] where s.d is set.
template <class Functor>
void launch_logits_rows(LogitsRows const& s, Functor const& f, cudaStream_t stream) {
  using contract::DType;
  if (s.rows <= 0 || s.vocab <= 0) return;
  switch (s.z_dtype) {
    case DType::f32: return rows::launch_rows<rows::Granule<DType::f32>>(s, f, stream);
    case DType::bf16: return rows::launch_rows<rows::Granule<DType::bf16>>(s, f, stream);
    case DType::f16: return rows::launch_rows<rows::Granule<DType::f16>>(s, f, stream);
    default: return;
  }
}

// z [R,V], a row's numbers known -> D [R,V]. Ignored rows become 0; `ignored` and `finish` are not called.
template <class Functor>
void launch_logits_gradient(LogitsRows const& s, Functor const& f, cudaStream_t stream) {
  using contract::DType;
  if (s.rows <= 0 || s.vocab <= 0 || s.d == nullptr) return;
  switch (s.z_dtype) {
    case DType::f32: return rows::launch_gradient<rows::Granule<DType::f32>>(s, f, stream);
    case DType::bf16: return rows::launch_gradient<rows::Granule<DType::bf16>>(s, f, stream);
    case DType::f16: return rows::launch_gradient<rows::Granule<DType::f16>>(s, f, stream);
    default: return;
  }
}

}  // namespace logitless::cuda
