// The unfused baseline's kernels as a table per instruction set, resolved once; see dense_kernels.inc.
#pragma once

#include <cstdint>

namespace logitless::bench {

// C [rows of a tile, columns of a tile] += A·B over k steps of packed panels.
using TileKernel = void (*)(std::int64_t k, const void* packed_a, const void* packed_b, float* c, std::int64_t ldc);

struct DenseKernels {
  void (*softmax_row)(const float* z, float* p, std::int64_t n);
  void (*log_row)(const float* p, float* l, std::int64_t n);
  void (*log_backward_row)(const float* p, float* g, std::int64_t n);
  void (*softmax_backward_row)(const float* p, const float* g, float* d, std::int64_t n);
  double (*dot_f64)(const double* a, const double* b, std::int64_t n);
  TileKernel tile_f32;
  int tile_rows, tile_cols;
};

const DenseKernels& dense_kernels_sse2();
const DenseKernels& dense_kernels_avx2();
const DenseKernels& dense_kernels_avx512();
// The best of them that this machine runs.
const DenseKernels& dense_kernels();

// C [14,32] += A·B: a [k/2][14][2], b [k/2][32][2], bf16; k counts pairs.
void tile_dot_bf16(std::int64_t k, const void* packed_a, const void* packed_b, float* c, std::int64_t ldc);
// C [32,32] += A·B: a [k/32][32][32], b [k/32][2][16][16][2], bf16; k counts steps of 32. Tiles must be configured.
void tile_amx(std::int64_t k, const void* packed_a, const void* packed_b, float* c, std::int64_t ldc);
void configure_amx();
void release_amx();

}  // namespace logitless::bench
