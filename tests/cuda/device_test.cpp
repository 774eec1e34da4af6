// The device as the backend describes it, and what is declared of cuBLASLt against its header where that is found.
#include <gtest/gtest.h>

#include "cuda/lt_api.hpp"
#include "support/targets.hpp"

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>

namespace lt = logitless::cuda::lt;
static_assert(lt::success == CUBLAS_STATUS_SUCCESS && lt::compute_f32 == CUBLAS_COMPUTE_32F);
static_assert(lt::real_f32 == CUDA_R_32F && lt::real_f16 == CUDA_R_16F && lt::real_bf16 == CUDA_R_16BF);
static_assert(lt::op_none == CUBLAS_OP_N && lt::op_transpose == CUBLAS_OP_T);
static_assert(lt::desc_pointer_mode == CUBLASLT_MATMUL_DESC_POINTER_MODE &&
              lt::desc_transpose_a == CUBLASLT_MATMUL_DESC_TRANSA &&
              lt::desc_transpose_b == CUBLASLT_MATMUL_DESC_TRANSB);
static_assert(lt::pointer_mode_device == CUBLASLT_POINTER_MODE_DEVICE);
static_assert(lt::pref_workspace_bytes == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES &&
              lt::pref_alignment_a == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES &&
              lt::pref_alignment_b == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES &&
              lt::pref_alignment_c == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES &&
              lt::pref_alignment_d == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
static_assert(sizeof(lt::Algorithm) == sizeof(cublasLtMatmulAlgo_t) &&
              sizeof(lt::Heuristic) == sizeof(cublasLtMatmulHeuristicResult_t));
#endif

namespace logitless::test {
namespace {

TEST(Device, DescribesItself) {
  if (CudaFixture::instance().device() == nullptr) GTEST_SKIP() << "needs a GPU: " << CudaFixture::instance().why();
  const std::string text = cuda::describe_device(*CudaFixture::instance().device());
  EXPECT_NE(text.find("sm_"), std::string::npos) << text;
  EXPECT_NE(text.find("cuBLASLt"), std::string::npos) << text;
}

// Without a device the library loads, and says what is missing.
TEST(Device, MissingOnesAreNamed) {
  std::string why;
  EXPECT_EQ(cuda::open_device(4096, &why), nullptr);
  EXPECT_FALSE(why.empty());
}

}  // namespace
}  // namespace logitless::test
