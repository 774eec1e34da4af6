// Lets clang compile tests/nvcc/contract.cu to PTX where there is no CUDA toolkit: the four keywords, and declarations
// of the device's mathematical functions from clang's own headers. Nothing is linked, so nothing more is needed.
#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __CUDACC__ 1
#include <__clang_cuda_math_forward_declares.h>
