// One setting of the dials with what it costs: the exact ledger of its workspace, its flops, and a predicted time. Pure
// functions of (problem, machine, setting), some 100 ns each, so that make_plan can look at hundreds of settings.
#pragma once

#include <cstdint>

#include "plan/plan.hpp"

namespace logitless::plan {

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
inline std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

struct Setting {
  std::int64_t chunk = 0, block = 0;                // C, B (a multiple of the leaf; may exceed V)
  std::int64_t kept_blocks = 0, inside_blocks = 0;  // see Plan
};

// The workspace's buffers in the order of their layout, each rounded to 64 bytes.
class Ledger {
 public:
  // padding: elements beside the rounding that may stay untouched.
  void add(const char* name, contract::DType dtype, std::int64_t d0, std::int64_t d1, std::int64_t d2,
           std::int64_t padding = 0);
  const Buffer* begin() const { return buffers_; }
  const Buffer* end() const { return buffers_ + count_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  Buffer buffers_[40];
  int count_ = 0;
  std::int64_t bytes_ = 0;
};

// Linear cross-entropy.
bool products_in_bf16(const contract::Problem& problem, const Machine& machine);
// The teacher's product, for distillation.
bool teacher_in_bf16(const contract::Problem& problem, const Machine& machine);
contract::DType kept_dtype(const contract::Problem& problem);
// Bytes between columns of exponentials that live in dW.
std::int64_t inside_stride(const contract::Problem& problem);
// What fits into the caller's buffer: leaves, and the bytes before them (a line that identifies it, and references of
// exponentials: a number a row, or a row and leaf).
struct Saved {
  std::int64_t leaves = 0, head = 0;
};
Saved saved_of(const contract::Problem& problem, const Machine& machine);
Ledger ledger_of(const contract::Problem& problem, const Machine& machine, const Setting& setting);
double flops_of(const contract::Problem& problem, const Machine& machine, const Setting& setting);
double seconds_of(const contract::Problem& problem, const Machine& machine, const Setting& setting);

// Cross-entropy of given logits: one setting.
Ledger logits_ledger_of(const contract::Problem& problem, const Machine& machine);
double logits_seconds_of(const contract::Problem& problem, const Machine& machine);

}  // namespace logitless::plan
