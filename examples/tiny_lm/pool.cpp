// The pool's rounds: a round number wakes the workers, an atomic counter hands out tasks, the last worker wakes run().
#include "pool.hpp"

#include <algorithm>

#include "memory.hpp"

namespace tiny_lm {

Pool::Pool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { serve(); });
}

Pool::~Pool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(std::int64_t tasks, const std::function<void(std::int64_t)>& body) {
  if (workers_.empty() || tasks <= 1) {
    for (std::int64_t i = 0; i < tasks; ++i) body(i);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    body_ = &body;
    tasks_ = tasks;
    next_ = 0;
    busy_ = static_cast<int>(workers_.size());
    ++round_;
  }
  wake_.notify_all();
  work(body);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return busy_ == 0; });
}

void Pool::slabs(std::int64_t n, std::int64_t slab, const std::function<void(std::int64_t, std::int64_t)>& body) {
  run(ceil_div(n, slab), [&](std::int64_t i) { body(i * slab, std::min(n, (i + 1) * slab)); });
}

void Pool::work(const std::function<void(std::int64_t)>& body) {
  for (std::int64_t i = next_++; i < tasks_; i = next_++) body(i);
}

void Pool::serve() {
  std::uint64_t seen = 0;
  for (;;) {
    const std::function<void(std::int64_t)>* body = nullptr;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
      body = body_;
    }
    work(*body);
    std::lock_guard lock(mutex_);
    if (--busy_ == 0) done_.notify_one();
  }
}

}  // namespace tiny_lm
