// The context's own threads behind Executor::parallel_for: threads - 1 workers created once, the caller is the last
// one. Indices are handed out one at a time by an atomic counter, so a slow thread takes fewer of them; which thread
// runs an index never matters to results, because the partition into indices is the plan's and not the pool's. Idle
// workers sleep (a few microseconds of spinning bridge the gap between two loops of one call). parallel_for allocates
// nothing. After fork() the child's first loop starts workers of its own.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "cpu/cpu.hpp"

namespace logitless::cpu {

class Pool final : public Executor {
 public:
  // threads >= 1. Throws std::system_error when the system refuses a thread.
  explicit Pool(int threads);
  ~Pool() override;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // One caller at a time (the context's lock). From inside a body it runs inline.
  void parallel_for(std::int64_t tasks, void (*body)(void*, std::int64_t), void* user) override;
  int threads() const override { return threads_; }

 private:
  static constexpr std::uint32_t kOpen = 1U << 31;

  static void* worker(void* pool);
  int start_workers();  // 0, or the error number of the first thread refused
  void join_workers();
  void rebuild_after_fork();
  bool enter();
  void leave();
  void take_tickets();

  const int threads_;
  pid_t owner_;
  std::vector<pthread_t> workers_;  // raw handles: after fork they must be forgotten, which std::thread cannot do

  // The job: written only while it is closed and nobody is inside.
  void (*body_)(void*, std::int64_t) = nullptr;
  void* user_ = nullptr;
  std::int64_t tasks_ = 0;

  // On cache lines of their own: the counter is hammered by all threads while a job runs.
  alignas(64) std::atomic<std::int64_t> next_{0};
  alignas(64) std::atomic<std::uint32_t> state_{0};  // kOpen while workers may enter, plus the count of those inside
  alignas(64) std::atomic<std::uint32_t> epoch_{0};  // one more for each job; idle workers sleep on it
  std::atomic<bool> stop_{false};
};

}  // namespace logitless::cpu
