// Threads and memory of the benchmark itself: a team for probes and the dense baseline, and arrays on huge pages.
//
// The team sleeps between jobs (a spinning one would take cores from the library's threads, which alternate with it).
// A job costs one wake-up, some 50 us, so timed jobs last milliseconds. Arrays are touched by the team when made, so
// that no page fault falls into a timed run.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace logitless::bench {

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Team {
 public:
  explicit Team(int threads) {
    for (int i = 1; i < threads; ++i) members_.emplace_back([this, i] { member(i); });
  }
  ~Team() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    start_.notify_all();
    for (std::thread& thread : members_) thread.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(members_.size()) + 1; }

  // job(i) on every member i, the caller being member 0; returns when all are done.
  void run(const std::function<void(int)>& job) {
    {
      const std::lock_guard lock(mutex_);
      job_ = &job;
      running_ = size() - 1;
      ++generation_;
    }
    start_.notify_all();
    job(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
  }

  // body(task, member) for every task in [0, tasks), taken in order by whoever is free.
  void parallel_for(std::int64_t tasks, const std::function<void(std::int64_t, int)>& body) {
    std::atomic<std::int64_t> next{0};
    run([&](int member) {
      for (std::int64_t task = next++; task < tasks; task = next++) body(task, member);
    });
  }

 private:
  void member(int index) {
    for (std::uint64_t seen = 0;;) {
      const std::function<void(int)>* job = nullptr;
      {
        std::unique_lock lock(mutex_);
        start_.wait(lock, [&] { return stop_ || generation_ != seen; });
        if (stop_) return;
        seen = generation_;
        job = job_;
      }
      (*job)(index);
      const std::lock_guard lock(mutex_);
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable start_, done_;
  const std::function<void(int)>* job_ = nullptr;
  std::uint64_t generation_ = 0;
  int running_ = 0;
  bool stop_ = false;
  std::vector<std::thread> members_;
};

// Bytes aligned to 2 MiB, asking for huge pages: 4 KiB pages cost the probes of large arrays a tenth and more.
class Array {
 public:
  Array() = default;
  explicit Array(std::size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    memory_ = ::operator new(rounded, std::align_val_t{alignment});
    // Only advice: without it the array is as usable, on small pages.
    (void)::madvise(memory_, rounded, MADV_HUGEPAGE);
  }
  ~Array() { ::operator delete(memory_, std::align_val_t{alignment}); }
  Array(Array&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Array& operator=(Array&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  template <class T>
  T* as() {
    return static_cast<T*>(memory_);
  }
  template <class T>
  const T* as() const {
    return static_cast<const T*>(memory_);
  }
  void* data() { return memory_; }
  const void* data() const { return memory_; }
  std::size_t bytes() const { return bytes_; }

 private:
  static constexpr std::size_t alignment = std::size_t{2} << 20;
  void* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace logitless::bench
