// Executors for tests: threads that wait between calls, and one thread that runs tasks in a shuffled order. Results
// must not depend on either, so a task that leans on another's order shows without any race having to happen.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "cpu/cpu.hpp"
#include "support/random.hpp"

namespace logitless::test {

class ThreadExecutor final : public cpu::Executor {
 public:
  explicit ThreadExecutor(int threads) : threads_(threads) {
    for (int t = 1; t < threads; ++t) workers_.emplace_back([this] { work(); });
  }
  ~ThreadExecutor() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    start_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }
  void parallel_for(std::int64_t tasks, void (*body)(void*, std::int64_t), void* user) override {
    {
      std::lock_guard lock(mutex_);
      body_ = body, user_ = user, tasks_ = tasks, next_ = 0, open_ = tasks;
    }
    start_.notify_all();
    std::unique_lock lock(mutex_);
    take(lock);
    done_.wait(lock, [this] { return open_ == 0; });
  }
  int threads() const override { return threads_; }

 private:
  // Runs tasks until none is left. The lock is held on entry and exit, not while a body runs.
  void take(std::unique_lock<std::mutex>& lock) {
    while (next_ < tasks_) {
      const std::int64_t task = next_++;
      auto* const body = body_;
      void* const user = user_;
      lock.unlock();
      body(user, task);
      lock.lock();
      if (--open_ == 0) done_.notify_all();
    }
  }
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      start_.wait(lock, [this] { return stop_ || next_ < tasks_; });
      if (stop_) return;
      take(lock);
    }
  }

  int threads_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable start_, done_;
  bool stop_ = false;
  void (*body_)(void*, std::int64_t) = nullptr;
  void* user_ = nullptr;
  std::int64_t tasks_ = 0, next_ = 0, open_ = 0;
};

// One thread that says it is `threads`, with tasks in an order of its own each time.
class ShuffledExecutor final : public cpu::Executor {
 public:
  ShuffledExecutor(int threads, std::uint64_t seed) : threads_(threads), random_(seed) {}
  void parallel_for(std::int64_t tasks, void (*body)(void*, std::int64_t), void* user) override {
    std::vector<std::int64_t> order(static_cast<std::size_t>(tasks));
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(i)))]);
    }
    for (std::int64_t task : order) body(user, task);
  }
  int threads() const override { return threads_; }

 private:
  int threads_;
  Random random_;
};

}  // namespace logitless::test
