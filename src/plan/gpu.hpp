// Plans of a CUDA device. One order for all: pass 1 walks the vocabulary in blocks of B columns (of each, C rows'
// logits at a time), the first kept_blocks of which stay: as E = bf16(exp(z - reference)) where D is E times a number
// of the row, else as fp32 logits. Pass 2 walks the blocks in the same order: dX += D W_block in fp32, dW_block = D^T
// X, written once. dW is whole after its block, whatever C is.
//
// Blocks may stay in dW's own bytes: the last of them ends where dW ends, so that a block's gradient, written in order,
// never reaches exponentials that are still to be read.
#pragma once

#include "plan/plan.hpp"

namespace logitless::plan {

struct GpuMachine {
  const char* target = "sm_80";
  int major = 8, minor = 0, multiprocessors = 108;
  bool own_product = false;       // it runs this library's first product (sm_90)
  std::int64_t memory_bytes = 0;  // of the device, where no budget is given; 0: unknown
  // Rates that rank plans (docs/performance.md).
  double half_tflops = 250.0, f32_tflops = 19.0, memory_gbytes = 1500.0;
};

// Products in 16 bits; exponentials, and not logits, are kept.
bool gpu_exponentials(const contract::Problem& problem);
// The first product's epilogue can do what the problem asks of logits.
bool gpu_own_product(const contract::Problem& problem);
// Byte offset in dW of kept block k (>= inside_from), and how many can be there beside `first` that are not.
std::int64_t gpu_inside_offset(const Plan& plan, std::int64_t k);

Plan make_gpu_plan(const contract::Problem& problem, const GpuMachine& machine, const Dials& dials = {});

}  // namespace logitless::plan
