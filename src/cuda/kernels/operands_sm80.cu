// What products read and what they leave: rows gathered, converted, scaled and cleaned on the way in; dX and dW rounded
// once from fp32 on the way out; sums of rows for rank-one corrections. Copies at the memory's rate, but for strided
// sources, whose elements come one by one.
#include "cuda/device/logit.cuh"
#include "cuda/kernels/kernels.hpp"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

// Eight elements of 16 bits, or four of 32, in 16 bytes.
template <class T>
struct Pack {
  static constexpr int count = 16 / static_cast<int>(sizeof(T));
  uint4 bits;
  __device__ const T& operator[](int i) const { return reinterpret_cast<const T*>(&bits)[i]; }
  __device__ T& operator[](int i) { return reinterpret_cast<T*>(&bits)[i]; }
};

// Rows of x start at 16-byte addresses and hold whole packs of T.
template <class T>
bool packs(const View& x) {
  return contract::size_of(x.dtype) == static_cast<std::int64_t>(sizeof(T)) && x.col_stride == 1 &&
         x.cols % Pack<T>::count == 0 && (x.rows <= 1 || x.row_stride % Pack<T>::count == 0) &&
         reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0;
}

// A block a row of `out`.
template <class T>
__global__ void __launch_bounds__(kThreads)
    gather(const __grid_constant__ View x, const __grid_constant__ Rows rows, T* out, std::int64_t stride) {
  std::int64_t const slot = blockIdx.x, i = rows.index[slot];
  bool const empty = i < 0 || rows.flag[slot] == kIgnored;
  for (std::int64_t j = threadIdx.x; j < stride; j += kThreads)
    out[slot * stride + j] = from_float<T>(empty || j >= x.cols ? 0.0F : load_view(x, i, j));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    columns(const __grid_constant__ View x, const __grid_constant__ Rows rows, const Scalars* scalars, bool by_scale,
            bool by_exponent, T* out, std::int64_t stride, bool packed) {
  std::int64_t const slot = blockIdx.x, i = rows.index[slot];
  bool clean = i >= 0 && rows.flag[slot] == kKept;
  float factor = 1.0F;
  if (clean && by_scale) factor = rows.scale[slot];
  if (clean && by_exponent)
    factor =
        rows.exponent[slot] == 1000 ? 0.0F : exp2f(static_cast<float>(scalars->least_exponent - rows.exponent[slot]));
  clean = clean && factor != 0.0F;
  if (packed) {
    auto* const to = reinterpret_cast<Pack<T>*>(out + slot * stride);
    auto const* const from = clean ? reinterpret_cast<const Pack<T>*>(row::row_of(x, i)) : nullptr;
    for (std::int64_t j = threadIdx.x; j < x.cols / Pack<T>::count; j += kThreads) {
      Pack<T> v{make_uint4(0, 0, 0, 0)};
      if (clean) {
        v = from[j];
#pragma unroll
        for (int e = 0; e < Pack<T>::count; ++e) v[e] = from_float<T>(to_float(v[e]) * factor);
      }
      to[j] = v;
    }
    return;
  }
  for (std::int64_t j = threadIdx.x; j < stride; j += kThreads)
    out[slot * stride + j] = from_float<T>(clean && j < x.cols ? load_view(x, i, j) * factor : 0.0F);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    convert(const __grid_constant__ View from, std::int64_t row0, T* out, std::int64_t stride) {
  std::int64_t const at = blockIdx.x;
  for (std::int64_t j = threadIdx.x; j < stride; j += kThreads)
    out[at * stride + j] = from_float<T>(j < from.cols ? load_view(from, row0 + at, j) : 0.0F);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    write(const float* x, std::int64_t x_stride, std::int64_t n, T* out, std::int64_t stride, bool add) {
  std::int64_t const at = blockIdx.x;
  for (std::int64_t j = threadIdx.x; j < n; j += kThreads) {
    T* const to = out + at * stride + j;
    *to = from_float<T>((add ? to_float(*to) : 0.0F) + x[at * x_stride + j]);
  }
}

// A block a row of dX.
template <class T>
__global__ void __launch_bounds__(kThreads)
    hidden(const __grid_constant__ RowCall call, const __grid_constant__ Rows rows, const float* sums, bool by_scale,
           bool by_exponent, const float* w_sum, bool packed) {
  std::int64_t const i = blockIdx.x, slot = rows.slot_of != nullptr ? rows.slot_of[i] : i;
  View const& dx = call.o.dx;
  T* const out = reinterpret_cast<T*>(row::row_of(dx, i));
  bool const add = call.p.accumulate_dx;
  std::uint8_t const flag = slot < 0 ? static_cast<std::uint8_t>(kIgnored) : rows.flag[slot];
  bool const beyond = slot < 0 && call.scalars->kept > rows.slots;  // of more kept rows than the host said
  if ((flag == kIgnored || flag == kNoTarget) && !beyond) {
    if (!add)
      for (std::int64_t j = threadIdx.x; j < call.p.hidden; j += kThreads) out[j] = from_float<T>(0.0F);
    return;
  }
  bool const silent = !beyond && row::Finisher(call.p, call.o, call.topk).silent(i);
  bool const bad = (flag == kBad || beyond) && !silent;
  float factor = 1.0F, shift = 0.0F;
  if (!bad && by_scale) factor = rows.scale[slot];
  if (!bad && w_sum != nullptr) shift = rows.shift[slot];
  if (!bad && by_exponent)
    factor = rows.exponent[slot] == 1000 ? 0.0F : exp2f(static_cast<float>(-rows.exponent[slot]));
  if (packed && !bad && !silent && shift == 0.0F) {
    auto* const to = reinterpret_cast<Pack<T>*>(out);
    constexpr int count = Pack<T>::count;
    for (std::int64_t j = threadIdx.x; j < call.p.hidden / count; j += kThreads) {
      Pack<T> v = add ? to[j] : Pack<T>{make_uint4(0, 0, 0, 0)};
      auto const* const from = reinterpret_cast<const float4*>(sums + slot * call.p.hidden + j * count);
#pragma unroll
      for (int q = 0; q < count / 4; ++q) {
        float4 const x = from[q];
        v[4 * q] = from_float<T>((add ? to_float(v[4 * q]) : 0.0F) + x.x * factor);
        v[4 * q + 1] = from_float<T>((add ? to_float(v[4 * q + 1]) : 0.0F) + x.y * factor);
        v[4 * q + 2] = from_float<T>((add ? to_float(v[4 * q + 2]) : 0.0F) + x.z * factor);
        v[4 * q + 3] = from_float<T>((add ? to_float(v[4 * q + 3]) : 0.0F) + x.w * factor);
      }
      to[j] = v;
    }
    return;
  }
  for (std::int64_t j = threadIdx.x; j < call.p.hidden; j += kThreads) {
    float value = bad ? NAN : silent ? 0.0F : sums[slot * call.p.hidden + j] * factor;
    if (shift != 0.0F) value -= shift * w_sum[j];
    out[j] = from_float<T>((add ? to_float(out[j]) : 0.0F) + value);
  }
}

// A thread a column; a segment of rows a block row.
__global__ void __launch_bounds__(128)
    row_sums(const __grid_constant__ View x, const std::int64_t* index, const std::uint8_t* flag, const float* factor,
             std::int64_t count, float* room) {
  std::int64_t const j = static_cast<std::int64_t>(blockIdx.x) * 128 + threadIdx.x;
  if (j >= x.cols) return;
  std::int64_t const each = (count + kSumSegments - 1) / kSumSegments;
  std::int64_t const begin = blockIdx.y * each, end = min(count, begin + each);
  float sum = 0.0F;
  for (std::int64_t at = begin; at < end; ++at) {
    if (flag != nullptr && flag[at] != kKept) continue;
    float const by = factor != nullptr ? factor[at] : 1.0F;
    if (by != 0.0F) sum += by * load_view(x, index != nullptr ? index[at] : at, j);
  }
  room[blockIdx.y * x.cols + j] = sum;
}
__global__ void add_segments(std::int64_t n, const float* room, float* sums) {
  std::int64_t const j = static_cast<std::int64_t>(blockIdx.x) * 128 + threadIdx.x;
  if (j >= n) return;
  double sum = 0.0;
  for (std::int64_t s = 0; s < kSumSegments; ++s) sum += static_cast<double>(room[s * n + j]);
  sums[j] = static_cast<float>(sum);
}

// -x as the sum of three bf16, each what the ones before left over: 24 bits.
__global__ void split(const float* x, std::int64_t n, bf16* out, std::int64_t stride, std::int64_t extra) {
  std::int64_t const j = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= stride) return;
  float left = j < n ? -x[j] : 0.0F;
  for (std::int64_t row = 0; row < extra; ++row) {
    bf16 const part = from_float<bf16>(row < 3 ? left : 0.0F);
    out[row * stride + j] = part;
    left -= to_float(part);
  }
}
__global__ void ones(bf16* out, std::int64_t n, std::int64_t stride, std::int64_t extra) {
  std::int64_t const j = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= n) return;
  for (std::int64_t row = 0; row < extra; ++row) out[row * stride + j] = from_float<bf16>(row < 3 ? 1.0F : 0.0F);
}

__global__ void __launch_bounds__(kThreads) scale(const __grid_constant__ Rows rows, float* sums, std::int64_t n) {
  std::int64_t const slot = blockIdx.x;
  float const by = rows.scale[slot];
  for (std::int64_t j = threadIdx.x; j < n; j += kThreads) sums[slot * n + j] *= by;
}

unsigned rows_grid(std::int64_t rows) { return static_cast<unsigned>(rows); }
unsigned elements_grid(std::int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

}  // namespace

void gather_rows(const View& x, const Rows& rows, void* out, contract::DType dtype, std::int64_t stride,
                 cudaStream_t stream) {
  if (rows.slots == 0) return;
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    gather<T><<<rows_grid(rows.slots), kThreads, 0, stream>>>(x, rows, static_cast<T*>(out), stride);
  });
}

void column_operand(const View& x, const Rows& rows, const Scalars* scalars, bool by_scale, bool by_exponent, void* out,
                    contract::DType dtype, std::int64_t stride, cudaStream_t stream) {
  if (rows.slots == 0) return;
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    bool const packed = x.dtype == dtype && packs<T>(x) && stride == x.cols;
    columns<T><<<rows_grid(rows.slots), kThreads, 0, stream>>>(x, rows, scalars, by_scale, by_exponent,
                                                               static_cast<T*>(out), stride, packed);
  });
}

void convert_rows(const View& from, std::int64_t row0, std::int64_t rows, void* out, contract::DType dtype,
                  std::int64_t stride, cudaStream_t stream) {
  if (rows == 0) return;
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    convert<T><<<rows_grid(rows), kThreads, 0, stream>>>(from, row0, static_cast<T*>(out), stride);
  });
}

void write_rows(const float* x, std::int64_t x_stride, std::int64_t rows, std::int64_t n, void* out,
                contract::DType dtype, std::int64_t stride, bool add, cudaStream_t stream) {
  if (rows == 0) return;
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    write<T><<<rows_grid(rows), kThreads, 0, stream>>>(x, x_stride, n, static_cast<T*>(out), stride, add);
  });
}

void write_hidden_gradient(const RowCall& call, const Rows& rows, const float* sums, bool by_scale, bool by_exponent,
                           const float* w_sum, cudaStream_t stream) {
  if (call.p.rows == 0) return;
  with_storage(call.p.dx, [&](auto tag) {
    using T = decltype(tag);
    hidden<T><<<rows_grid(call.p.rows), kThreads, 0, stream>>>(call, rows, sums, by_scale, by_exponent, w_sum,
                                                               packs<T>(call.o.dx) && call.p.hidden % 4 == 0);
  });
}

void sum_rows(const View& x, const std::int64_t* index, const std::uint8_t* flag, const float* factor,
              std::int64_t rows, float* room, float* sums, cudaStream_t stream) {
  dim3 const grid(static_cast<unsigned>((x.cols + 127) / 128), kSumSegments);
  row_sums<<<grid, 128, 0, stream>>>(x, index, flag, factor, rows, room);
  add_segments<<<grid.x, 128, 0, stream>>>(x.cols, room, sums);
}

void split_row(const float* x, std::int64_t n, void* out, std::int64_t stride, std::int64_t extra,
               cudaStream_t stream) {
  split<<<elements_grid(stride), kThreads, 0, stream>>>(x, n, static_cast<bf16*>(out), stride, extra);
}

void ones_rows(void* out, std::int64_t n, std::int64_t stride, std::int64_t extra, cudaStream_t stream) {
  ones<<<elements_grid(n), kThreads, 0, stream>>>(static_cast<bf16*>(out), n, stride, extra);
}

void scale_rows(const Rows& rows, float* sums, std::int64_t n, cudaStream_t stream) {
  if (rows.slots > 0) scale<<<rows_grid(rows.slots), kThreads, 0, stream>>>(rows, sums, n);
}

}  // namespace logitless::cuda
