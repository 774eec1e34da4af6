// values [R,H] *= factor, a number in the device's memory: one read and one write, 16 bytes a thread where
// rows allow it. Where the factor is 1 nothing is read or written, so that the common case costs a launch.
#include <algorithm>

#include "cuda/device/types.cuh"
#include "cuda/kernels/kernels.hpp"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct alignas(16) Pack {
  static constexpr int kCount = 16 / sizeof(T);
  T at[kCount];
};

template <class T, bool packed>
__global__ void __launch_bounds__(kThreads)
    scale_values(View factor, T* __restrict__ values, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  double const by = row::number_of(factor, 1.0);
  if (by == 1.0) return;
  auto scaled = [by](T x) { return from_float<T>(static_cast<float>(static_cast<double>(to_float(x)) * by)); };
  std::int64_t const steps = static_cast<std::int64_t>(gridDim.x) * kThreads,
                     first = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if constexpr (packed) {
    std::int64_t const packs = columns / Pack<T>::kCount;
    for (std::int64_t n = first; n < rows * packs; n += steps) {
      std::int64_t const i = n / packs;
      auto* const at = reinterpret_cast<Pack<T>*>(values + i * stride) + (n - i * packs);
      Pack<T> pack = *at;
      for (int e = 0; e < Pack<T>::kCount; ++e) pack.at[e] = scaled(pack.at[e]);
      *at = pack;
    }
  } else {
    for (std::int64_t n = first; n < rows * columns; n += steps) {
      T* const at = values + n / columns * stride + n % columns;
      *at = scaled(*at);
    }
  }
}

}  // namespace

void scale_by(const View& factor, const View& values, int multiprocessors, cudaStream_t stream) {
  View v = values;
  // A matrix without gaps is one long row.
  if (v.rows <= 1 || v.row_stride == v.cols) v = {v.data, v.dtype, 1, v.rows * v.cols, v.rows * v.cols, 1};
  if (v.rows == 0 || v.cols == 0) return;
  std::int64_t const size = contract::size_of(v.dtype);
  bool const packed = reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 && v.cols * size % 16 == 0 &&
                      (v.rows == 1 || v.row_stride * size % 16 == 0);
  std::int64_t const work = v.rows * (packed ? v.cols * size / 16 : v.cols);
  auto const blocks = static_cast<unsigned>(
      std::min<std::int64_t>((work + kThreads - 1) / kThreads, std::int64_t{8} * multiprocessors));
  with_storage(v.dtype, [&](auto tag) {
    using T = decltype(tag);
    auto* const kernel = packed ? scale_values<T, true> : scale_values<T, false>;
    kernel<<<blocks, kThreads, 0, stream>>>(factor, static_cast<T*>(v.data), v.rows, v.cols, v.row_stride);
  });
}

}  // namespace logitless::cuda
