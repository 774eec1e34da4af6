// The planner alone, without running anything: plans are pure, describe themselves truly, count flops as the design's
// table does, keep to the budget, never predict slower for a larger one, and say why every other setting was rejected.
// Problems of all sizes, for machines that this one need not be.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "logitless/logitless.h"
#include "plan/trial.hpp"
#include "support/scope.hpp"

namespace logitless::test {
namespace {

using nlohmann::json;
using plan::Keep;
using plan::make_plan;
using plan::Plan;

Problem linear_problem(std::int64_t rows, std::int64_t hidden, std::int64_t vocab) {
  Problem p;
  p.rows = rows;
  p.hidden = hidden;
  p.vocab = vocab;
  return p;
}

// Bytes of a buffer's shape, where 64 bits would not notice their own overflow.
__extension__ using Wide = __int128;
Wide exact_bytes(const plan::Buffer& b) {
  Wide bytes = size_of(b.dtype);
  for (const std::int64_t n : b.shape) bytes *= n;
  return bytes;
}

// A problem of any size, never run: R to 2^24, H to 2^14, V to 2^20.
Problem random_problem(Random& random) {
  const auto extent = [&](int most_bits) {
    const auto n = static_cast<std::int64_t>(std::exp2(random.uniform(0.0, most_bits)));
    return random.below(4) == 0 ? std::int64_t{1} << random.below(most_bits + 1) : n;
  };
  Problem p = random_trial(random.bits(), random.below(5) == 0 ? Kind::logits : Kind::linear).problem;
  p.rows = random.below(50) == 0 ? 0 : extent(24);
  p.vocab = extent(20);
  if (p.kind == Kind::linear) p.hidden = extent(14);
  if (p.dw != DType::none) p.dw_contiguous = random.below(8) > 0;
  return p;
}

std::int64_t count(double normal) {
  return static_cast<std::int64_t>(scope() == Scope::reduced ? normal / 10
                                   : scope() == Scope::full  ? normal * 10
                                                             : normal);
}

// Calls body(problem, machine) for seeded problems and machines in turn.
template <class Body>
void for_problems(std::uint64_t seed, double normal, Body body) {
  Random random(seed);
  const std::vector<plan::Machine> all = machines();
  for (std::int64_t i = 0; i < count(normal) && !testing::Test::HasFailure(); ++i) {
    Trial trial;
    trial.problem = random_problem(random);
    const plan::Machine& machine = all[static_cast<std::size_t>(i) % all.size()];
    SCOPED_TRACE(trial.text() + " on " + machine.target + ", threads " + std::to_string(machine.threads));
    body(trial.problem, machine, random);
  }
}

std::int64_t least_bytes(Problem p, const plan::Machine& m) {
  p.budget = 1;
  return make_plan(p, m).workspace_bytes;
}

// A budget from below the least to above what the unlimited plan takes.
std::uint64_t some_budget(Random& random, std::int64_t least, std::int64_t most) {
  return static_cast<std::uint64_t>(
             static_cast<double>(least) *
             std::pow(static_cast<double>(most) / static_cast<double>(least) * 1.5, random.uniform(-0.05, 1.0))) +
         1;
}

TEST(Planner, IsPure) {
  for_problems(1, 300, [](const Problem& p, const plan::Machine& m, Random&) {
    const Plan a = make_plan(p, m);
    make_plan(random_trial(1, Kind::linear).problem, m);  // another in between changes nothing
    const Problem copy = p;
    const Plan b = make_plan(copy, m);
    EXPECT_EQ(a.text(), b.text());
    EXPECT_EQ(a.json(), b.json());
    EXPECT_EQ(a.predicted_seconds, b.predicted_seconds);
  });
}

TEST(Planner, JsonAgreesWithTheStruct) {
  constexpr const char* calls[] = {"", "forward", "forward_backward", "backward"};
  constexpr const char* keeps[] = {"none", "workspace", "inside_dw"};
  for_problems(2, 300, [&](Problem p, const plan::Machine& m, Random& random) {
    if (random.below(2) == 0)
      p.budget = some_budget(random, std::max<std::int64_t>(1, least_bytes(p, m)), make_plan(p, m).workspace_bytes + 1);
    const Plan plan = make_plan(p, m);
    const json j = json::parse(plan.json());
    EXPECT_EQ(j.at("kind"), p.kind == Kind::linear ? "linear" : "logits");
    EXPECT_EQ(j.at("call"), calls[static_cast<int>(p.call)]);
    EXPECT_EQ(j.at("rows"), p.rows);
    EXPECT_EQ(j.at("vocab"), p.vocab);
    EXPECT_EQ(j.at("target"), m.target);
    EXPECT_EQ(j.at("threads"), m.threads);
    EXPECT_EQ(j.at("workspace_bytes"), plan.workspace_bytes);
    EXPECT_EQ(j.at("predicted_seconds").get<double>(), plan.predicted_seconds);
    if (p.kind == Kind::linear) {
      EXPECT_EQ(j.at("hidden"), p.hidden);
      EXPECT_EQ(j.at("hidden_dtype"), contract::name_of(p.x));
      EXPECT_EQ(j.at("weight_dtype"), contract::name_of(p.w));
      EXPECT_EQ(j.at("grad_hidden_dtype"), contract::name_of(p.dx));
      EXPECT_EQ(j.at("grad_weight_dtype"), contract::name_of(p.dw));
      EXPECT_EQ(j.at("products"), plan.bf16_products ? "bf16" : "f32");
      EXPECT_EQ(j.at("chunk_rows"), plan.chunk);
      EXPECT_EQ(j.at("block_columns"), plan.block);
      EXPECT_EQ(j.at("blocks"), plan.blocks);
      EXPECT_EQ(j.at("kept_blocks"), plan.kept_blocks);
      EXPECT_EQ(j.at("inside_blocks"), plan.inside_blocks);
      EXPECT_EQ(j.at("kept_share").get<double>(), plan.share);
      EXPECT_EQ(j.at("keep"), keeps[static_cast<int>(plan.keep)]);
      EXPECT_EQ(j.at("kept_dtype"), contract::name_of(plan.e_dtype));
      EXPECT_EQ(j.at("flops").get<double>(), plan.flops);
    } else {
      EXPECT_EQ(j.at("logits_dtype"), contract::name_of(p.z));
      EXPECT_EQ(j.at("grad_logits_dtype"), contract::name_of(p.dz));
    }
    ASSERT_EQ(j.at("ledger").size(), plan.ledger.size());
    for (std::size_t i = 0; i < plan.ledger.size(); ++i) {
      const plan::Buffer& b = plan.ledger[i];
      const json& e = j.at("ledger")[i];
      EXPECT_EQ(e.at("name"), b.name);
      EXPECT_EQ(e.at("dtype"), contract::name_of(b.dtype));
      EXPECT_EQ(e.at("offset"), b.offset);
      EXPECT_EQ(e.at("bytes"), b.bytes);
      EXPECT_EQ(e.at("padding"), b.padding);
      std::int64_t elements = 1, own = 1;
      for (const json& n : e.at("shape")) elements *= n.get<std::int64_t>();
      for (const std::int64_t n : b.shape) own *= n;
      EXPECT_EQ(elements, own);
    }
    EXPECT_EQ(j.at("rejected").get<std::vector<std::string>>(), plan.rejected);
  });
}

TEST(Planner, TextNamesDialsWorkspaceFlopsAndLedger) {
  Problem p = linear_problem(2048, 2048, 32768);
  p.x = p.w = p.dx = p.dw = DType::bf16;
  p.budget = 64 << 20;
  const Plan plan = make_plan(p, machine_for(*cpu::find_target("scalar"), 2));
  const std::string text = plan.text();
  for (const std::string& part :
       {"C=" + std::to_string(plan.chunk) + " rows a chunk", "B=" + std::to_string(plan.block) + " columns a block",
        std::string("f=1 "), std::to_string(plan.inside_blocks) + " inside dW",
        "workspace: " + std::to_string(plan.workspace_bytes) + " bytes", std::string("6 RHV"),
        std::string("R=2048 H=2048 V=32768"), std::string("target scalar, 2 threads"), std::string("rejected:")})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  for (const plan::Buffer& b : plan.ledger) EXPECT_NE(text.find(b.name), std::string::npos) << b.name;
  for (const std::string& line : plan.rejected) EXPECT_NE(text.find(line), std::string::npos) << line;
  p.budget = 1;
  const Plan refused = make_plan(p, machine_for(*cpu::find_target("scalar"), 2));
  EXPECT_NE(refused.text().find("refused: the budget is 1 bytes, the least that any setting needs " +
                                std::to_string(refused.workspace_bytes)),
            std::string::npos)
      << refused.text();
}

TEST(Planner, LedgerIsDisjointAlignedAndComplete) {
  for_problems(3, 1000, [](Problem p, const plan::Machine& m, Random& random) {
    const std::int64_t least = least_bytes(p, m);
    if (random.below(2) == 0) p.budget = some_budget(random, least, make_plan(p, m).workspace_bytes);
    const Plan plan = make_plan(p, m);
    if (plan.chunk == 0) {
      EXPECT_TRUE(plan.ledger.empty());
      return;
    }
    std::int64_t at = 0;
    std::set<std::string> names;
    for (const plan::Buffer& b : plan.ledger) {
      EXPECT_EQ(b.offset, at) << b.name;
      EXPECT_EQ(b.offset % 64, 0) << b.name;
      EXPECT_EQ(b.bytes % 64, 0) << b.name;
      const Wide exact = exact_bytes(b);
      EXPECT_TRUE(exact > 0 && exact <= b.bytes && b.bytes - exact < 64) << b.name;
      EXPECT_GE(b.padding, b.bytes - static_cast<std::int64_t>(exact)) << b.name;
      EXPECT_LT(b.padding, b.bytes) << b.name;
      EXPECT_TRUE(names.insert(b.name).second) << b.name;
      EXPECT_EQ(plan.find(b.name), &b);
      at += b.bytes;
    }
    EXPECT_EQ(plan.workspace_bytes, at);
    EXPECT_EQ(plan.find("no such buffer"), nullptr);
  });
}

TEST(Planner, FlopsAreThoseOfTheTable) {
  Random random(4);
  for (int i = 0; i < 200; ++i) {
    Problem p = linear_problem(1 + random.below(3000), 1 + random.below(3000), 1 + random.below(40000));
    p.x = p.w = p.dx = p.dw = DType::bf16;
    const plan::Machine m = machine_for(*cpu::find_target("scalar"), 2);
    const double rh = static_cast<double>(p.rows) * static_cast<double>(p.hidden);
    const double rhv = rh * static_cast<double>(p.vocab);
    const auto flops = [&](DType dx, DType dw, Call call, const plan::Dials& dials) {
      Problem q = p;
      q.dx = dx;
      q.dw = dw;
      q.call = call;
      const Plan plan = make_plan(q, m, dials);
      EXPECT_GT(plan.chunk, 0);
      return plan.flops;
    };
    const DType no = DType::none, yes = DType::bf16;
    const plan::Dials recompute{.keep = 0}, keep_all{.keep = 1};
    EXPECT_EQ(flops(no, no, Call::forward, {}), 2 * rhv);
    EXPECT_EQ(flops(yes, yes, Call::forward_backward, keep_all), 6 * rhv);
    EXPECT_EQ(flops(yes, yes, Call::forward_backward, recompute), 8 * rhv);
    EXPECT_EQ(flops(yes, no, Call::forward_backward, keep_all), 4 * rhv);
    EXPECT_EQ(flops(no, yes, Call::forward_backward, recompute), 6 * rhv);
    EXPECT_EQ(flops(yes, yes, Call::backward, {}), 6 * rhv);
    EXPECT_EQ(flops(no, yes, Call::backward, {}), 4 * rhv);
    EXPECT_EQ(flops(yes, no, Call::backward, {}), 4 * rhv);
    // A share: exact in columns, also when the last block is narrow.
    const std::int64_t block = 256 * (1 + random.below(8)), blocks = (p.vocab + block - 1) / block;
    const std::int64_t kept = 1 + random.below(blocks), columns = std::min(kept * block, p.vocab);
    Problem q = p;
    q.call = Call::forward_backward;
    const Plan part = make_plan(q, m, {.block = block, .kept_blocks = kept, .keep = 1});
    EXPECT_EQ(part.kept_blocks, kept);
    EXPECT_EQ(part.share, static_cast<double>(columns) / static_cast<double>(p.vocab));
    EXPECT_EQ(part.flops, 2 * rh * static_cast<double>(4 * p.vocab - columns));
    EXPECT_NEAR(part.flops, (8 - 2 * part.share) * rhv, 1e-12 * rhv);
  }
}

TEST(Planner, LargerBudgetIsNeverSlower) {
  for_problems(5, 300, [](Problem p, const plan::Machine& m, Random& random) {
    const Plan unlimited = make_plan(p, m);
    const std::int64_t least = least_bytes(p, m), most = unlimited.workspace_bytes;
    std::set<std::uint64_t> budgets{static_cast<std::uint64_t>(least), static_cast<std::uint64_t>(most)};
    for (int i = 0; i < 25; ++i) budgets.insert(std::max(some_budget(random, least, most), *budgets.begin()));
    for (const std::uint64_t b : std::set<std::uint64_t>(budgets))  // what fits just so, and what just does not
      if (b > static_cast<std::uint64_t>(least)) budgets.insert(b - 1);
    double before = INFINITY;
    for (const std::uint64_t budget : budgets) {
      p.budget = budget;
      const Plan plan = make_plan(p, m);
      ASSERT_GT(plan.chunk, 0) << budget;
      EXPECT_LE(plan.workspace_bytes, static_cast<std::int64_t>(budget));
      EXPECT_LE(plan.predicted_seconds, before) << "at a budget of " << budget;
      before = plan.predicted_seconds;
      p.budget = static_cast<std::uint64_t>(plan.workspace_bytes);  // exactly what it takes is enough for it
      EXPECT_EQ(make_plan(p, m).predicted_seconds, plan.predicted_seconds) << budget;
    }
    EXPECT_LE(unlimited.predicted_seconds, before);
  });
}

TEST(Planner, BudgetBelowTheLeastIsRefusedWithTheLeast) {
  for_problems(6, 1000, [](Problem p, const plan::Machine& m, Random& random) {
    const std::int64_t least = least_bytes(p, m);
    ASSERT_GT(least, 1);
    p.budget = static_cast<std::uint64_t>(least);
    EXPECT_GT(make_plan(p, m).chunk, 0);
    EXPECT_EQ(make_plan(p, m).workspace_bytes, least);
    for (const std::int64_t budget : {least - 1, 1 + random.below(least - 1)}) {
      p.budget = static_cast<std::uint64_t>(budget);
      const Plan refused = make_plan(p, m);
      EXPECT_EQ(refused.chunk, 0);
      EXPECT_EQ(refused.workspace_bytes, least);
    }
    p.budget = ~std::uint64_t{0};
    EXPECT_GT(make_plan(p, m).chunk, 0);
  });
}

// The same through the C ABI, whose message names both numbers.
TEST(Planner, RefusalNamesBudgetAndLeast) {
  ll_context* context = nullptr;
  ASSERT_EQ(ll_context_create(nullptr, &context), LL_OK) << ll_last_error();
  Random random(7);
  for (int i = 0; i < 100; ++i) {
    ll_problem problem;
    ll_problem_init(&problem);
    problem.rows = 1 + random.below(5000);
    problem.hidden = 1 + random.below(5000);
    problem.vocab = 1 + random.below(200000);
    problem.hidden_dtype = problem.weight_dtype = problem.grad_hidden_dtype = problem.grad_weight_dtype =
        pick(random, {LL_F32, LL_BF16, LL_F16});
    problem.memory_budget = 1;
    ll_options options;
    ll_options_init(&options);
    ll_plan* plan = nullptr;
    EXPECT_EQ(ll_plan_create(context, &problem, &options, &plan), LL_ERROR_BUDGET);
    const std::string message = ll_last_error();
    std::smatch match;
    ASSERT_TRUE(std::regex_search(message, match, std::regex("memory_budget: 1 .* at least ([0-9]+)"))) << message;
    const std::uint64_t least = std::stoull(match[1]);
    problem.memory_budget = least - 1;
    EXPECT_EQ(ll_plan_create(context, &problem, &options, &plan), LL_ERROR_BUDGET);
    EXPECT_NE(std::string(ll_last_error()).find(std::to_string(least)), std::string::npos) << ll_last_error();
    problem.memory_budget = least;
    ASSERT_EQ(ll_plan_create(context, &problem, &options, &plan), LL_OK) << ll_last_error();
    EXPECT_EQ(ll_plan_workspace_bytes(plan), least);
    ll_plan_destroy(plan);
  }
  ll_context_destroy(context);
}

// Settings that a line of `rejected` stands for, by share and block.
struct RejectedLine {
  std::int64_t settings = 1;
  bool ruled_out = false;  // by the problem, whatever the budget
};

RejectedLine parse(const std::string& line, const Plan& plan) {
  RejectedLine out;
  static const std::regex dials(
      "C=([0-9]+)(\\.\\.[0-9]+)? B=[0-9]+ f=[0-9.e+-]+( inside dW)?( and)?( in the workspace)?"
      "( \\(([0-9]+) settings\\): at best |: )(.*)");
  static const std::regex over("needs ([0-9]+) bytes, the budget is ([0-9]+)");
  static const std::regex slower("predicted ([0-9.e+-]+) ms, the chosen ([0-9.e+-]+) ms");
  static const std::regex larger("as fast as the chosen, in ([0-9]+) bytes instead of ([0-9]+)");
  static const std::regex refused("(B=[0-9]+ )?f>0.*: [a-zA-Z].*");
  std::smatch m, reason;
  if (std::regex_match(line, refused)) {
    out.ruled_out = true;
  } else if (std::regex_match(line, m, dials)) {
    if (m[7].matched) out.settings = std::stoll(m[7]);
    EXPECT_EQ(m[2].matched, m[7].matched) << line;
    const std::string why = m[8];
    if (std::regex_match(why, reason, over)) {
      EXPECT_GT(std::stoull(reason[1]), plan.problem.budget) << line;
      EXPECT_EQ(std::stoull(reason[2]), plan.problem.budget) << line;
    } else if (std::regex_match(why, reason, slower)) {
      EXPECT_GE(std::stod(reason[1]), std::stod(reason[2])) << line;
    } else if (std::regex_match(why, reason, larger)) {
      EXPECT_GE(std::stoll(reason[1]), std::stoll(reason[2])) << line;
      EXPECT_EQ(std::stoll(reason[2]), plan.workspace_bytes) << line;
    } else {
      ADD_FAILURE() << "no reason: " << line;
    }
  } else {
    ADD_FAILURE() << "not understood: " << line;
  }
  return out;
}

TEST(Planner, EveryRejectedSettingHasAReasonInFewLines) {
  for_problems(8, 300, [](Problem p, const plan::Machine& m, Random& random) {
    if (p.kind != Kind::linear) return;  // one setting
    const auto settings = [](const Plan& plan) {
      EXPECT_LE(plan.rejected.size(), 60U) << plan.text();
      std::int64_t sum = plan.chunk > 0 ? 1 : 0;
      for (const std::string& line : plan.rejected) {
        const RejectedLine parsed = parse(line, plan);
        if (!parsed.ruled_out) sum += parsed.settings;
      }
      return sum;
    };
    // Nothing disappears: what a budget of 1 refuses are all settings of a fixed share, and a larger one only adds
    // those that keep as much as fits.
    const Plan unlimited = make_plan(p, m);
    const std::int64_t all = settings(unlimited);
    const std::int64_t least = least_bytes(p, m);
    p.budget = 1;
    EXPECT_EQ(settings(make_plan(p, m)), all);
    p.budget = some_budget(random, least, unlimited.workspace_bytes);
    EXPECT_GE(settings(make_plan(p, m)), all);
    // The blocks and chunks that the design asks for are among them.
    const Plan again = make_plan(p, m, {.chunk = 1, .keep = 0});
    if (p.rows > 0 && p.budget >= static_cast<std::uint64_t>(again.workspace_bytes)) {
      EXPECT_EQ(again.chunk, 1);
    }
  });
}

// No setting that the dials can reach beats the planner's own choice by much: its grid of C and B is fine enough. (With
// many threads on few tasks the time jumps between neighbours, and so it does for a few rows.)
TEST(Planner, NoSettingWithinTheBudgetIsMuchFaster) {
  double worst = 1.0;
  for_problems(9, 400, [&](Problem p, const plan::Machine& m, Random& random) {
    if (p.kind != Kind::linear || p.rows == 0) return;
    const std::int64_t least = least_bytes(p, m);
    p.budget = some_budget(random, least, make_plan(p, m).workspace_bytes);
    const Plan chosen = make_plan(p, m);
    if (chosen.chunk == 0 || p.rows < 128 || p.hidden < 64 || p.vocab < 1024 || m.threads > 2) return;
    for (int i = 0; i < 40; ++i) {
      plan::Dials dials;
      dials.chunk = random.below(3) == 0 ? 0 : 1 + random.below(p.rows);
      dials.block = random.below(3) == 0 ? 0 : 256 * (1 + random.below(16));
      dials.keep = static_cast<int>(random.below(4)) - 1;
      const Plan other = make_plan(p, m, dials);
      if (other.chunk == 0) continue;
      worst = std::max(worst, chosen.predicted_seconds / other.predicted_seconds);
      EXPECT_LE(chosen.predicted_seconds, 1.2 * other.predicted_seconds) << chosen.text() << "\nbeaten by\n"
                                                                         << other.text();
    }
  });
  RecordProperty("worst_ratio", std::to_string(worst));
}

// Sizes at the ends of what the C ABI lets through (2^40 a side, 2^56 bytes a matrix): sums stay exact, and the
// sanitizer build finds no overflow.
TEST(Planner, HugeProblemsDoNotOverflow) {
  struct Extents {
    std::int64_t rows, hidden, vocab;
  };
  constexpr std::int64_t one = 1;
  for (const Extents e :
       {Extents{one << 24, 8192, one << 20}, Extents{one << 40, 1, 1 << 14}, Extents{1, one << 40, 1 << 14},
        Extents{1 << 14, 1, one << 40}, Extents{one << 27, one << 27, one << 27}, Extents{1, 1, 1},
        Extents{one << 40, 1 << 14, 1}, Extents{0, one << 40, 1 << 14}}) {
    for (const plan::Machine& m : machines()) {
      for (const DType t : {DType::f32, DType::bf16}) {
        for (const std::uint64_t budget :
             {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
          Problem p = linear_problem(e.rows, e.hidden, e.vocab);
          p.x = p.w = p.dx = p.dw = t;
          p.loss.smoothing = 0.1;
          p.budget = budget;
          const Plan plan = make_plan(p, m);
          EXPECT_GT(plan.workspace_bytes, 0);
          if (plan.chunk == 0) continue;
          Wide sum = 0;
          for (const plan::Buffer& b : plan.ledger) {
            EXPECT_TRUE(exact_bytes(b) <= b.bytes && b.bytes - exact_bytes(b) < 64) << b.name << "\n" << plan.text();
            sum += b.bytes;
          }
          EXPECT_TRUE(sum == plan.workspace_bytes);
          EXPECT_TRUE(std::isfinite(plan.predicted_seconds) && plan.predicted_seconds >= 0.0);
          EXPECT_TRUE(json::accept(plan.json()));
        }
      }
    }
  }
}

// Small and awkward extents under every budget around a candidate.
TEST(Planner, SmallExtents) {
  for (const plan::Machine& m : machines()) {
    for (const std::int64_t rows : {0, 1, 2, 31, 32, 33, 95, 96, 97}) {
      for (const std::int64_t hidden : {1, 17, 256, 300}) {
        for (const std::int64_t vocab : {1, 2, 255, 256, 257, 600, 5000}) {
          Problem p = linear_problem(rows, hidden, vocab);
          p.x = p.w = p.dx = p.dw = DType::f16;
          const Plan plan = make_plan(p, m);
          ASSERT_GT(plan.chunk, 0) << plan.text();
          EXPECT_LE(plan.chunk, std::max<std::int64_t>(1, rows));
          EXPECT_LE(plan.block, vocab);
          EXPECT_EQ(plan.blocks, (vocab + plan.block - 1) / plan.block);
          EXPECT_LE(plan.inside_blocks, plan.kept_blocks);
          EXPECT_LE(plan.kept_blocks, plan.blocks);
          const std::int64_t least = least_bytes(p, m);
          EXPECT_LE(least, plan.workspace_bytes);
          for (const std::int64_t b : {plan.workspace_bytes - 1, plan.workspace_bytes, plan.workspace_bytes + 1}) {
            p.budget = static_cast<std::uint64_t>(b);
            const Plan tight = make_plan(p, m);
            EXPECT_EQ(tight.chunk > 0, b >= least) << plan.text();
            if (b >= plan.workspace_bytes) {
              EXPECT_EQ(tight.workspace_bytes, plan.workspace_bytes);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace logitless::test
