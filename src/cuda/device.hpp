// A CUDA device as the backend holds it: what it is, its cuBLASLt handle, its status word.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "cuda/blas.hpp"
#include "cuda/cuda.hpp"
#include "cuda/kernels/first_product_sm90.hpp"
#include "cuda/kernels/state.hpp"

namespace logitless::cuda {

// Makes a device current for its lifetime and puts back what was.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index) {
    cudaGetDevice(&before_);
    if (before_ != index) cudaSetDevice(index);
    changed_ = before_ != index;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

class Device {
 public:
  int index = 0, major = 0, minor = 0, multiprocessors = 0;
  std::int64_t memory_bytes = 0;
  std::string name, target;
  std::unique_ptr<Blas> blas;
  Status* status = nullptr;  // the device's memory

  Device() = default;
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
};

class Prepared {
 public:
  Device& device;
  const plan::Plan& plan;
  std::unique_ptr<Products> products;  // kind linear
  // Where the plan has the own product: a row's reference from one leaf, statistics alone, with E, and D.
  FirstProductPlan reference, statistics, exponentials, gradient;
};

// Arrays of a number a slot, where the plan's ledger has them.
Rows row_arrays(const plan::Plan& plan, char* workspace, std::int64_t slots);

// Kinds of problem; same contract as cuda::run.
std::string run_linear(Prepared& prepared, const Operands& operands, const ResultViews& results, char* workspace,
                       cudaStream_t stream, int* status);
std::string run_logits(Prepared& prepared, const Operands& operands, const ResultViews& results, char* workspace,
                       cudaStream_t stream, int* status);

inline constexpr int status_invalid = 1, status_target = 2, status_empty = 3, status_unsupported = 6,
                     status_internal = 9;

}  // namespace logitless::cuda
