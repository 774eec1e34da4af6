// A mutex that a child of fork() finds open. A context's lock may be held by another thread when the process forks; in
// the child that thread does not exist and would hold the lock forever. The owner's process id is part of the state, so
// a lock left behind by the parent counts as open. 4 bytes, sleeps while it waits.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace logitless::capi {

class ForkLock {
 public:
  void lock() {
    const std::uint32_t mine = (static_cast<std::uint32_t>(getpid()) << 1) | 1U;
    std::uint32_t seen = word_.load(std::memory_order_relaxed);
    for (;;) {
      if (seen == mine) {
        word_.wait(seen, std::memory_order_relaxed);
        seen = word_.load(std::memory_order_relaxed);
      } else if (word_.compare_exchange_weak(seen, mine, std::memory_order_acquire, std::memory_order_relaxed)) {
        return;
      }
    }
  }
  void unlock() {
    word_.store(0, std::memory_order_release);
    word_.notify_one();
  }

 private:
  std::atomic<std::uint32_t> word_{0};
};

}  // namespace logitless::capi
