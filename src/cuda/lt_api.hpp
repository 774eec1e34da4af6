// What this library uses of cuBLASLt's C interface (CUDA 12 and 13), declared here so that building needs no header of
// it: it is opened at run time. tests/cuda/lt_api_test.cpp compares every number with cublasLt.h where that is found.
#pragma once

#include <cstddef>
#include <cstdint>

namespace logitless::cuda::lt {

struct Algorithm {
  std::uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  std::size_t workspace_bytes;
  std::int32_t state;
  float waves;
  int reserved[4];
};

inline constexpr int success = 0;
inline constexpr int compute_f32 = 68;                            // CUBLAS_COMPUTE_32F
inline constexpr int real_f32 = 0, real_f16 = 2, real_bf16 = 14;  // cudaDataType
inline constexpr int op_none = 0, op_transpose = 1;
inline constexpr int desc_pointer_mode = 2, desc_transpose_a = 3, desc_transpose_b = 4;
inline constexpr int pointer_mode_device = 1;
inline constexpr int pref_workspace_bytes = 1, pref_alignment_a = 5, pref_alignment_b = 6, pref_alignment_c = 7,
                     pref_alignment_d = 8;

using Handle = void*;
using Object = void*;  // descriptors, layouts, preferences

struct Functions {
  int (*create)(Handle*);
  int (*destroy)(Handle);
  std::size_t (*version)();
  int (*desc_create)(Object*, int compute, int scale_type);
  int (*desc_destroy)(Object);
  int (*desc_set)(Object, int attribute, const void*, std::size_t);
  int (*layout_create)(Object*, int type, std::uint64_t rows, std::uint64_t cols, std::int64_t ld);
  int (*layout_destroy)(Object);
  int (*preference_create)(Object*);
  int (*preference_destroy)(Object);
  int (*preference_set)(Object, int attribute, const void*, std::size_t);
  int (*heuristic)(Handle, Object desc, Object a, Object b, Object c, Object d, Object preference, int wanted,
                   Heuristic* results, int* found);
  int (*matmul)(Handle, Object desc, const void* alpha, const void* a, Object a_layout, const void* b, Object b_layout,
                const void* beta, const void* c, Object c_layout, void* d, Object d_layout, const Algorithm*,
                void* workspace, std::size_t workspace_bytes, void* stream);
};

}  // namespace logitless::cuda::lt
