// What linear and logits drivers share: the caller's rows. Which are kept, what upstream gradient each has, the divisor
// of the reduction, and the outputs of rows that are ignored. O(R), a few nanoseconds a row.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "contract/coefficients.hpp"
#include "cpu/cpu.hpp"
#include "cpu/kernels/table.hpp"

namespace logitless::cpu {

inline char* row_of(const View& v, std::int64_t i) {
  return static_cast<char*>(v.data) + i * v.row_stride * contract::size_of(v.dtype);
}

// Element (i, j) of an i32 or i64 matrix.
inline std::int64_t integer_at(const View& v, std::int64_t i, std::int64_t j) {
  const char* const p = row_of(v, i) + j * v.col_stride * contract::size_of(v.dtype);
  if (v.dtype == contract::DType::i32) {
    std::int32_t x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
  }
  std::int64_t x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
inline std::int64_t target_of(const View& targets, std::int64_t i) { return integer_at(targets, i, 0); }

inline float float_at(const View& v, std::int64_t i) {
  float x;
  __builtin_memcpy(&x, row_of(v, i), sizeof x);
  return x;
}
inline void put_float(const View& v, std::int64_t i, double x) {
  if (!v) return;
  auto const value = static_cast<float>(x);
  __builtin_memcpy(row_of(v, i), &value, sizeof value);
}

// i32, i64 or u8.
inline void put_integer(const View& v, std::int64_t i, std::int64_t x) {
  if (!v) return;
  if (v.dtype == contract::DType::i32) {
    auto const narrow = static_cast<std::int32_t>(x);
    __builtin_memcpy(row_of(v, i), &narrow, sizeof narrow);
  } else if (v.dtype == contract::DType::u8) {
    *row_of(v, i) = static_cast<char>(x);
  } else {
    __builtin_memcpy(row_of(v, i), &x, sizeof x);
  }
}

// y of row i; 0 where there are no targets (all rows are kept then).
inline std::int64_t target_or_none(const Operands& o, std::int64_t i) {
  return o.targets ? target_of(o.targets, i) : 0;
}

// The factor of the reduced loss, and whether there is nothing to reduce.
struct Reducer {
  double factor = 1.0;  // of each row's loss in the reduced one
  bool empty = false;
};
// Checks every target, counts the kept rows and makes the rule of the reduction. Returns the error's text with *status
// set, or "".
std::string check_rows(const contract::Problem& problem, const Operands& operands, std::int64_t* kept, Reducer* reducer,
                       int* status);

// The reduced loss from the sum of the kept rows' losses; 0 with reduction none.
double reduced_loss(const contract::Problem& problem, const Reducer& reducer, double total);

// Upstream gradient of row i: that of the reduced loss, and the row's own.
inline double upstream_of(const contract::Problem& problem, const Operands& o, const Reducer& reducer, std::int64_t i) {
  double const own = o.grad_row_loss ? static_cast<double>(float_at(o.grad_row_loss, i)) : 0.0;
  if (problem.loss.reduction == contract::Reduction::none) return o.grad_row_loss ? own : 1.0;
  return o.grad_loss * reducer.factor + own;
}

// What a filter did, added up by all threads. Variances are summed in fixed point, so that no bit depends on the order.
class FilterTally {
 public:
  // elements: of D that the filter saw; left: those it did not make 0.
  void add(std::int64_t elements, std::int64_t left, double variance) {
    elements_.fetch_add(elements, std::memory_order_relaxed);
    left_.fetch_add(left, std::memory_order_relaxed);
    units_.fetch_add(static_cast<std::int64_t>(variance * 0x1p40), std::memory_order_relaxed);
  }
  void report(Outcome* outcome) const {
    if (elements_ == 0) return;
    outcome->filter_kept = static_cast<double>(left_) / static_cast<double>(elements_);
    outcome->filter_variance = static_cast<double>(units_) * 0x1p-40;
  }

 private:
  std::atomic<std::int64_t> elements_{0}, left_{0}, units_{0};
};

// Zeros in the per-row outputs of an ignored row.
void put_ignored_row(const Operands& o, std::int64_t i);

// Frees all slots: once a call, before its first Slot.
void free_slots(std::atomic<std::int64_t>* flags, int slots);

// A slot of per-thread scratch, taken from flags in the workspace; at most `slots` bodies run at once.
class Slot {
 public:
  Slot(std::atomic<std::int64_t>* flags, int slots) : flags_(flags) {
    for (int i = 0;; i = i + 1 == slots ? 0 : i + 1) {
      std::int64_t free = 0;
      if (flags_[std::size_t{8} * static_cast<std::size_t>(i)].compare_exchange_strong(free, 1,
                                                                                       std::memory_order_acquire)) {
        index_ = i;
        return;
      }
    }
  }
  ~Slot() { flags_[std::size_t{8} * static_cast<std::size_t>(index_)].store(0, std::memory_order_release); }
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;
  int index() const { return index_; }

 private:
  std::atomic<std::int64_t>* flags_;
  int index_ = 0;
};

// body(i) for i in [0, tasks) on the executor's threads.
template <class Body>
void parallel(Executor& executor, std::int64_t tasks, Body&& body) {
  if (tasks <= 0) return;
  executor.parallel_for(
      tasks, [](void* user, std::int64_t i) { (*static_cast<std::remove_reference_t<Body>*>(user))(i); }, &body);
}

// Kinds of problem; same contract as cpu::run.
std::string run_linear(const plan::Plan& plan, const Target& target, Executor& executor, const Operands& operands,
                       char* workspace, Outcome* outcome, int* status);
std::string run_logits(const plan::Plan& plan, const Target& target, Executor& executor, const Operands& operands,
                       char* workspace, Outcome* outcome, int* status);

inline constexpr int status_invalid = 1, status_target = 2, status_empty = 3, status_unsupported = 6;

}  // namespace logitless::cpu
