// See pool.hpp. A job is opened, announced by the epoch, worked on, closed, and over when nobody is inside. A worker
// that wakes too late finds the job closed and sleeps on, so that a loop never waits for a thread which has done
// nothing. Ordering: opening releases the job's fields to whoever enters; leaving releases the bodies' writes to the
// caller.
#include "cpu/pool.hpp"

#include <csignal>
#include <system_error>

namespace logitless::cpu {
namespace {

thread_local bool inside_body = false;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// 1 to 3 microseconds, by the pause instruction of Zen (about 40 cycles) and of recent Xeons (about 140).
constexpr int kSpins = 64;

}  // namespace

Pool::Pool(int threads) : threads_(threads), owner_(getpid()) {
  workers_.reserve(static_cast<std::size_t>(threads - 1));
  if (const int error = start_workers(); error != 0) {
    join_workers();
    throw std::system_error(error, std::generic_category(), "threads: a worker cannot be started");
  }
}

Pool::~Pool() {
  if (getpid() == owner_) join_workers();  // in a child that never used the pool the workers do not exist
}

int Pool::start_workers() {
  // Workers take no signals: those belong to the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = 0;
  while (error == 0 && static_cast<int>(workers_.size()) < threads_ - 1) {
    pthread_t handle;
    error = pthread_create(&handle, nullptr, worker, this);
    if (error == 0) workers_.push_back(handle);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return error;
}

void Pool::join_workers() {
  stop_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (const pthread_t handle : workers_) pthread_join(handle, nullptr);
  workers_.clear();
}

void Pool::rebuild_after_fork() {
  // The parent may have forked in the middle of a job of another thread: nothing of its state is of use here.
  workers_.clear();
  state_.store(0, std::memory_order_relaxed);
  owner_ = getpid();
  start_workers();  // fewer threads than asked for still finish the job
}

bool Pool::enter() {
  std::uint32_t seen = state_.load(std::memory_order_relaxed);
  while ((seen & kOpen) != 0) {
    if (state_.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire, std::memory_order_relaxed)) return true;
  }
  return false;
}

void Pool::leave() {
  // 1 before: the job is closed and this was the last one inside.
  if (state_.fetch_sub(1, std::memory_order_acq_rel) == 1) state_.notify_all();
}

void Pool::take_tickets() {
  inside_body = true;
  for (;;) {
    const std::int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
    if (index >= tasks_) break;
    body_(user_, index);
  }
  inside_body = false;
}

void* Pool::worker(void* pool) {
  Pool& self = *static_cast<Pool*>(pool);
  for (;;) {
    const std::uint32_t epoch = self.epoch_.load(std::memory_order_acquire);
    if (self.stop_.load(std::memory_order_relaxed)) return nullptr;
    if (self.enter()) {
      self.take_tickets();
      self.leave();
    }
    for (int i = 0; i < kSpins && self.epoch_.load(std::memory_order_relaxed) == epoch; ++i) pause();
    self.epoch_.wait(epoch, std::memory_order_acquire);
  }
}

void Pool::parallel_for(std::int64_t tasks, void (*body)(void*, std::int64_t), void* user) {
  if (tasks <= 0) return;
  if (inside_body) {  // a nested loop; the workers are busy with the outer one
    for (std::int64_t i = 0; i < tasks; ++i) body(user, i);
    return;
  }
  if (getpid() != owner_) rebuild_after_fork();
  if (tasks == 1 || workers_.empty()) {
    for (std::int64_t i = 0; i < tasks; ++i) body(user, i);
    return;
  }

  body_ = body;
  user_ = user;
  tasks_ = tasks;
  next_.store(0, std::memory_order_relaxed);
  state_.store(kOpen, std::memory_order_release);
  epoch_.fetch_add(1, std::memory_order_release);
  if (tasks > static_cast<std::int64_t>(workers_.size())) {
    epoch_.notify_all();
  } else {
    for (std::int64_t i = 1; i < tasks; ++i) epoch_.notify_one();  // the caller takes one itself
  }
  take_tickets();

  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  std::uint32_t inside = state_.load(std::memory_order_acquire);
  for (int i = 0; i < kSpins && inside != 0; ++i) {
    pause();
    inside = state_.load(std::memory_order_acquire);
  }
  while (inside != 0) {
    state_.wait(inside, std::memory_order_acquire);
    inside = state_.load(std::memory_order_acquire);
  }
}

}  // namespace logitless::cpu
