// Hundreds of seeded problems, each under several budgets, run in guarded memory. A run asks for no memory, touches
// nothing beside its operands and its workspace (a page without access follows or precedes each, inputs are read-only),
// fills exactly the workspace that the ledger names, depends on nothing that lay there before, and gives the same bits
// of losses and statistics, and the same gradients within rounding, whatever the budget.
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <map>
#include <memory>
#include <thread>

#include "cpu/pool.hpp"
#include "plan/slack.hpp"
#include "support/scope.hpp"

namespace logitless::test {
namespace {

// A fault kills the program; its last line then says in which run.
char running[512];
void report_fault(int signal) {
  const char text[] = "\nfault in: ";
  (void)!write(2, text, sizeof text - 1);
  (void)!write(2, running, strnlen(running, sizeof running));
  (void)!write(2, "\n", 1);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

class Pools {
 public:
  cpu::Pool& of(int threads) {
    std::unique_ptr<cpu::Pool>& pool = pools_[threads];
    if (pool == nullptr) {
      pool = std::make_unique<cpu::Pool>(threads);
      // A thread that is only starting allocates what belongs to it, under sanitizers at least: let all have run once.
      std::atomic<int> arrived{0};
      struct Both {
        std::atomic<int>* arrived;
        int threads;
      } both{&arrived, threads};
      pool->parallel_for(
          threads,
          [](void* user, std::int64_t) {
            auto& b = *static_cast<Both*>(user);
            b.arrived->fetch_add(1);
            while (b.arrived->load() < b.threads) std::this_thread::yield();
          },
          &both);
    }
    return *pool;
  }

 private:
  std::map<int, std::unique_ptr<cpu::Pool>> pools_;
};

// Two runs of a plan, operands flush with the page after and with the page before; what both agree on.
struct TwoRuns {
  Result result;
  std::vector<bool> touched;  // a byte that holds either fill by chance was changed in the other run
};

TwoRuns run_twice(const Trial& trial, const plan::Plan& plan, const cpu::Target& target, cpu::Pool& pool) {
  Result results[2];
  for (const Flush flush : {Flush::end, Flush::start}) {
    Bench bench(trial, flush);
    if (trial.problem.call == Call::backward) bench.take_statistics(target, pool);
    Result& r = results[flush == Flush::end ? 0 : 1];
    r = bench.run(plan, target, pool, flush == Flush::end ? 0xa5 : 0x5a);
    EXPECT_EQ(r.error, "");
    EXPECT_EQ(r.requests, 0) << "the first is " << r.first_request;
    EXPECT_TRUE(r.rest_intact) << "bytes beside an operand or the workspace changed";
  }
  EXPECT_TRUE(results[0].same_bits(results[1])) << "depends on what lay in the workspace, or on alignment";
  TwoRuns out;
  out.touched = results[0].touched;
  for (std::size_t i = 0; i < out.touched.size(); ++i) out.touched[i] = out.touched[i] || results[1].touched[i];
  out.result = std::move(results[0]);
  return out;
}

// The end of the last touched byte in [begin, end).
std::int64_t water_mark(const std::vector<bool>& touched, std::int64_t begin, std::int64_t end) {
  while (end > begin && !touched[static_cast<std::size_t>(end - 1)]) --end;
  return end - begin;
}

void check_touched(const plan::Plan& plan, const std::vector<bool>& touched) {
  ASSERT_EQ(static_cast<std::int64_t>(touched.size()), plan.workspace_bytes);
  ASSERT_FALSE(plan.ledger.empty());
  const plan::Buffer& last = plan.ledger.back();
  EXPECT_EQ(water_mark(touched, 0, plan.workspace_bytes), plan.workspace_bytes - last.padding);
  if (plan.machine.threads > 1) return;  // how many threads find work is not the plan's to say
  std::int64_t padding = 0, count = 0;
  for (const plan::Buffer& b : plan.ledger) {
    EXPECT_GE(water_mark(touched, b.offset, b.offset + b.bytes), b.bytes - b.padding) << b.name;
    padding += b.padding;
  }
  for (const bool t : touched) count += t ? 1 : 0;
  EXPECT_GE(count, plan.workspace_bytes - padding) << "bytes that are neither used nor named as padding\n"
                                                   << plan.text();
}

class Run : public OnTarget {
 protected:
  void SetUp() override {
    OnTarget::SetUp();
    if (MemoryWatch::sees_mmap()) std::signal(SIGSEGV, report_fault);  // else the sanitizer reports
  }
  static std::uint64_t trials(std::uint64_t normal) {
    return scope() == Scope::reduced ? normal / 5 : scope() == Scope::full ? normal * 10 : normal;
  }

  void run_trials(Kind kind, std::uint64_t count) {
    const cpu::Target& target = *GetParam();
    Pools pools;
    for (std::uint64_t seed = 0; seed < count && !HasFailure(); ++seed) {
      const Trial trial = random_trial(seed * 16 + (kind == Kind::linear ? 0 : 8), kind);
      run_budgets(trial, target, pools.of(1 + static_cast<int>(seed % 3)));
    }
  }

 private:
  static void run_budgets(Trial trial, const cpu::Target& target, cpu::Pool& pool) {
    const plan::Machine machine = machine_for(target, pool.threads());
    const plan::Plan unlimited = plan::make_plan(trial.problem, machine);
    ASSERT_GT(unlimited.chunk, 0);
    trial.problem.budget = 1;
    const std::int64_t least = plan::make_plan(trial.problem, machine).workspace_bytes;
    ASSERT_LE(least, unlimited.workspace_bytes);
    Random random(trial.seed + 2);
    std::vector<std::int64_t> budgets{0, least};
    const std::int64_t between = unlimited.workspace_bytes - least;
    for (int i = 0; i < 2 && between > 0; ++i) budgets.push_back(least + random.below(between));
    TwoRuns first;
    std::unique_ptr<Slack> slack;
    std::int64_t last_bytes = -1;
    for (const std::int64_t budget : budgets) {
      trial.problem.budget = static_cast<std::uint64_t>(budget);
      const plan::Plan plan = plan::make_plan(trial.problem, machine);
      ASSERT_GT(plan.chunk, 0) << trial.text();
      if (budget > 0) {
        ASSERT_LE(plan.workspace_bytes, budget) << trial.text();
      }
      if (plan.workspace_bytes == last_bytes) continue;  // as good as the same plan
      last_bytes = plan.workspace_bytes;
      const std::string where = trial.text() + "\n" + plan.text();
      SCOPED_TRACE(where);
      std::snprintf(running, sizeof running, "%s", where.c_str());
      TwoRuns runs = run_twice(trial, plan, target, pool);
      if (trial.problem.rows > 0 && !trial.some_ignored) check_touched(plan, runs.touched);
      if (budget == 0) {
        first = std::move(runs);
        continue;
      }
      EXPECT_TRUE(first.result.same_row_bits(runs.result)) << "losses or statistics depend on the plan";
      if (trial.problem.kind != Kind::linear || !trial.problem.wants_gradient()) continue;
      if (slack == nullptr)
        slack = std::make_unique<Slack>(trial.problem, Bench(trial, Flush::end).o, plan.bf16_products);
      EXPECT_EQ(slack->compare(first.result, runs.result), "");
    }
  }
};

TEST_P(Run, LinearStaysInItsWorkspaceWithoutAllocating) { run_trials(Kind::linear, trials(100)); }
TEST_P(Run, LogitsStaysInItsWorkspaceWithoutAllocating) { run_trials(Kind::logits, trials(60)); }

INSTANTIATE_TEST_SUITE_P(Plan, Run, testing::ValuesIn(all_targets()), target_parameter_name);

// The instruments themselves: they see what they are to see.
TEST(Instruments, WatchSeesEveryKindOfRequest) {
  const auto requests = [](auto body) {
    MemoryWatch watch;
    body();
    watch.disarm();
    return watch.requests();
  };
  EXPECT_EQ(requests([] {}), 0);
  void* volatile p = nullptr;
  EXPECT_EQ(requests([&] { p = std::malloc(8); }), 1);
  EXPECT_EQ(requests([&] { std::free(p); }), 1);
  EXPECT_EQ(requests([&] { p = std::calloc(2, 8); }), 1);
  EXPECT_GE(requests([&] { p = std::realloc(p, 100000); }), 1);
  std::free(p);
  EXPECT_EQ(requests([&] { p = std::aligned_alloc(64, 64); }), 1);
  std::free(p);
  EXPECT_EQ(requests([&] { p = ::operator new(8); }), 1);
  EXPECT_EQ(requests([&] { ::operator delete(p); }), 1);
  EXPECT_GE(requests([] { std::thread([] {}).join(); }), 1);
  EXPECT_GE(requests([] { std::string(1000, 'x').swap(*std::make_unique<std::string>()); }), 2);
  if (!MemoryWatch::sees_mmap()) return;
  EXPECT_EQ(requests([&] { p = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); }), 1);
  EXPECT_EQ(requests([&] { munmap(p, 4096); }), 1);
}

TEST(Instruments, GuardedMemoryFaultsBeyondItsEnds) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto poke = [](Flush flush, std::ptrdiff_t at, bool read_only) {
    const Guarded memory(100, flush);
    if (read_only) memory.make_read_only();
    static_cast<volatile char*>(memory.data())[at] = 1;
  };
  EXPECT_DEATH(poke(Flush::end, 100, false), "");
  EXPECT_DEATH(poke(Flush::start, -1, false), "");
  EXPECT_DEATH(poke(Flush::end, 50, true), "");
  poke(Flush::end, 99, false);
  poke(Flush::start, 0, false);
  const Guarded memory(100, Flush::end);
  EXPECT_TRUE(memory.rest_intact());
  memory.data()[-1] = 1;
  EXPECT_FALSE(memory.rest_intact());
}

}  // namespace
}  // namespace logitless::test
