// A small pool of threads for the body of the model and for the dense baseline.
//
// run(tasks, body) calls body(i) for each i in [0, tasks) and returns when all are done. Who runs a task is open, what
// a task writes is fixed by its index, so results do not depend on timing. Idle threads sleep: they must not disturb
// the library under test, which has threads of its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tiny_lm {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }
  void run(std::int64_t tasks, const std::function<void(std::int64_t)>& body);
  // The same over slabs of [0, n): body(first, last).
  void slabs(std::int64_t n, std::int64_t slab, const std::function<void(std::int64_t, std::int64_t)>& body);

 private:
  void work(const std::function<void(std::int64_t)>& body);
  void serve();

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(std::int64_t)>* body_ = nullptr;
  std::int64_t tasks_ = 0;
  std::atomic<std::int64_t> next_{0};
  std::uint64_t round_ = 0;
  int busy_ = 0;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace tiny_lm
