// The thread pool: every index once, the caller waits for all of them, nested loops run inline, several pools live side
// by side, idle workers use no time, and a forked child has workers of its own. The stress tests are for TSan.
#include "cpu/pool.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#define LOGITLESS_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define LOGITLESS_TSAN 1
#endif
#endif

namespace logitless::cpu {
namespace {

// A loop with a capturing body.
template <class Body>
void loop(Executor& executor, std::int64_t tasks, Body&& body) {
  executor.parallel_for(
      tasks, [](void* user, std::int64_t i) { (*static_cast<std::remove_reference_t<Body>*>(user))(i); }, &body);
}

// Plain ints: two bodies with one index, or a return before the end, are races that TSan sees too.
std::vector<int> counts_of(Executor& executor, std::int64_t tasks) {
  std::vector<int> counts(static_cast<std::size_t>(tasks), 0);
  loop(executor, tasks, [&](std::int64_t i) { ++counts[static_cast<std::size_t>(i)]; });
  return counts;
}

TEST(Pool, EachIndexOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    Pool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (const std::int64_t tasks : {0, 1, 2, 3, 7, 8, 9, 1000}) {
      EXPECT_EQ(counts_of(pool, tasks), std::vector<int>(static_cast<std::size_t>(tasks), 1)) << threads << " threads";
    }
  }
}

TEST(Pool, NegativeCountIsNothing) {
  Pool pool(2);
  loop(pool, -5, [](std::int64_t) { FAIL() << "a body ran"; });
}

// Each loop reads what the one before has written: a missing edge between loops is a race or a wrong sum.
TEST(Pool, ManyShortLoopsInARow) {
  Pool pool(4);
  std::vector<std::int64_t> values(16, 0), next(16, 0);
  constexpr int kLoops = 20000;
  for (int round = 0; round < kLoops; ++round) {
    loop(pool, 16, [&](std::int64_t i) {
      next[static_cast<std::size_t>(i)] = values[static_cast<std::size_t>((i + 1) % 16)] + 1;
    });
    const std::int64_t first = round % 15;  // loops of fewer indices than threads too
    loop(pool, first, [&](std::int64_t i) { values[static_cast<std::size_t>(i)] = next[static_cast<std::size_t>(i)]; });
    loop(pool, 16 - first, [&](std::int64_t i) {
      values[static_cast<std::size_t>(first + i)] = next[static_cast<std::size_t>(first + i)];
    });
  }
  EXPECT_EQ(values, std::vector<std::int64_t>(16, kLoops));
}

// One index sleeps; the loop must not return before it is done, and the others must not wait for it.
TEST(Pool, WaitsForTheSlowest) {
  Pool pool(3);
  for (int round = 0; round < 20; ++round) {
    int done[4] = {0, 0, 0, 0};
    loop(pool, 4, [&](std::int64_t i) {
      if (i == round % 4) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      done[i] = 1;
    });
    for (const int each : done) EXPECT_EQ(each, 1);
  }
}

// Two bodies that wait for one another end only if two threads run them.
TEST(Pool, BodiesRunTogetherButNeverMoreThanThreads) {
  Pool pool(2);
  std::atomic<int> inside{0}, most{0}, met{0};
  loop(pool, 2, [&](std::int64_t) {
    ++met;
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (met.load() < 2 && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
  });
  EXPECT_EQ(met.load(), 2);
  loop(pool, 64, [&](std::int64_t) {
    const int now = ++inside;
    int seen = most.load();
    while (seen < now && !most.compare_exchange_weak(seen, now)) {
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    --inside;
  });
  EXPECT_LE(most.load(), 2);
}

TEST(Pool, NestedLoopsRunInline) {
  Pool pool(3), other(3);
  std::vector<int> counts(5 * 7, 0), others(5 * 7, 0);
  std::atomic<int> elsewhere{0};
  loop(pool, 5, [&](std::int64_t i) {
    const std::thread::id here = std::this_thread::get_id();
    loop(pool, 7, [&](std::int64_t j) {
      if (std::this_thread::get_id() != here) ++elsewhere;
      ++counts[static_cast<std::size_t>(i * 7 + j)];
    });
    loop(other, 7, [&](std::int64_t j) { ++others[static_cast<std::size_t>(i * 7 + j)]; });
  });
  EXPECT_EQ(elsewhere.load(), 0);
  EXPECT_EQ(counts, std::vector<int>(35, 1));
  EXPECT_EQ(others, std::vector<int>(35, 1));
  // And the pool is whole afterwards.
  EXPECT_EQ(counts_of(pool, 100), std::vector<int>(100, 1));
}

TEST(Pool, ManyPoolsAtOnce) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        Pool pool(3);
        for (int k = 0; k < 10; ++k) {
          if (counts_of(pool, 33) != std::vector<int>(33, 1)) ++wrong;
        }
      }
    });
  }
  for (std::thread& each : callers) each.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(Pool, MadeAndDestroyedWithoutUse) {
  for (int round = 0; round < 200; ++round) Pool pool(4);
}

double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Workers that spin would use 7 x 0.2 s of processor time.
TEST(Pool, IdleWorkersSleep) {
  Pool pool(8);
  EXPECT_EQ(counts_of(pool, 1000), std::vector<int>(1000, 1));
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_LT(cpu_seconds() - before, 0.05);
}

// The thread sanitizer refuses new threads after a fork of a process with threads.
#ifndef LOGITLESS_TSAN

// fork() leaves the child with one thread. exit code 0: all well.
int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(body());
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

TEST(Pool, ChildOfForkHasWorkersOfItsOwn) {
  auto pool = std::make_unique<Pool>(3);
  EXPECT_EQ(counts_of(*pool, 100), std::vector<int>(100, 1));
  EXPECT_EQ(in_child([&] {
              if (counts_of(*pool, 100) != std::vector<int>(100, 1)) return 1;
              // Two bodies that wait for one another: there is more than one thread again.
              std::atomic<int> met{0};
              loop(*pool, 2, [&](std::int64_t) {
                ++met;
                while (met.load() < 2) std::this_thread::yield();
              });
              pool.reset();  // joins the child's workers
              return 0;
            }),
            0);
  EXPECT_EQ(in_child([&] {
              pool.reset();  // never used here: there is nobody to join
              return 0;
            }),
            0);
  // A grandchild too.
  EXPECT_EQ(in_child([&] {
              if (counts_of(*pool, 10) != std::vector<int>(10, 1)) return 1;
              return in_child([&] { return counts_of(*pool, 10) == std::vector<int>(10, 1) ? 0 : 2; });
            }),
            0);
  EXPECT_EQ(counts_of(*pool, 100), std::vector<int>(100, 1)) << "the parent's pool goes on";
}

// The parent forks while its workers are in the middle of a loop.
TEST(Pool, ForkInTheMiddleOfALoop) {
  Pool pool(3);
  std::atomic<bool> running{false}, stop{false};
  std::thread caller([&] {
    loop(pool, 6, [&](std::int64_t) {
      running = true;
      while (!stop.load()) std::this_thread::yield();
    });
  });
  while (!running.load()) std::this_thread::yield();
  EXPECT_EQ(in_child([&] { return counts_of(pool, 50) == std::vector<int>(50, 1) ? 0 : 1; }), 0);
  stop = true;
  caller.join();
  EXPECT_EQ(counts_of(pool, 50), std::vector<int>(50, 1));
}

#endif

}  // namespace
}  // namespace logitless::cpu
