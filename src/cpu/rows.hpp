// What linear and logits drivers share: the caller's rows. Which are kept, what upstream gradient each has, the divisor
// of the reduction, and the outputs of rows that are ignored. O(R), a few nanoseconds a row.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "cpu/cpu.hpp"
#include "cpu/kernels/table.hpp"
#include "plan/row.hpp"

namespace logitless::cpu {

using row::float_at;
using row::integer_at;
using row::put_float;
using row::put_integer;
using row::reduced_loss;
using row::Reducer;
using row::row_of;
using row::target_of;
using row::target_or_none;
using row::upstream_of;

// Checks every target, counts the kept rows and makes the rule of the reduction. Returns the error's text with *status
// set, or "".
std::string check_rows(const contract::Problem& problem, const Operands& operands, std::int64_t* kept, Reducer* reducer,
                       int* status);

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
