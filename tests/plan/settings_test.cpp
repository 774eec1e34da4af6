// Every row of the design's table of settings: reachable by the dials, with its flops and what it keeps where, run on
// every target, with the same bits of losses as any other and gradients within rounding. And exponentials inside dW:
// for R <= H 6RHV without a byte of workspace for them, for R > H the share that dW has room for.
#include <gtest/gtest.h>

#include "cpu/pool.hpp"
#include "plan/slack.hpp"

namespace logitless::test {
namespace {

using plan::Dials;
using plan::Keep;
using plan::make_plan;
using plan::Plan;

struct Shape {
  std::int64_t rows, hidden, vocab;
};

Trial trial_of(const Shape& s, DType t, DType dx, DType dw) {
  Trial trial;
  trial.seed = 77;
  Problem& p = trial.problem;
  p.rows = s.rows;
  p.hidden = s.hidden;
  p.vocab = s.vocab;
  p.x = p.w = t;
  p.dx = dx;
  p.dw = dw;
  return trial;
}

class Settings : public OnTarget {
 protected:
  Result run(const Trial& trial, const Plan& plan) {
    SCOPED_TRACE(trial.text() + "\n" + plan.text());
    EXPECT_GT(plan.chunk, 0);
    Bench bench(trial, Flush::end);
    Result out = bench.run(plan, *GetParam(), pool_, 0xa5);
    EXPECT_EQ(out.error, "");
    EXPECT_TRUE(out.rest_intact);
    return out;
  }
  plan::Machine machine() const { return machine_for(*GetParam(), pool_.threads()); }

  cpu::Pool pool_{2};
};

TEST_P(Settings, OfTheTableGiveTheSameBitsOfLossesAndTheSameGradients) {
  struct Row {
    const char* published_as;
    Dials dials;
    Keep keep;
    std::int64_t kept_blocks;  // of 5
  };
  constexpr Shape shape{150, 24, 1153};  // five blocks, the last one of 129 columns
  const std::int64_t rows = shape.rows;
  const Row table[] = {
      {"token chunks", {.chunk = 64, .block = 256, .keep = 1}, Keep::workspace, 5},
      {"vocabulary tiles", {.chunk = rows, .block = 256, .keep = 0}, Keep::none, 0},
      {"all exponentials", {.chunk = rows, .block = 256, .keep = 1}, Keep::workspace, 5},
      {"a share of them", {.chunk = rows, .block = 256, .kept_blocks = 2, .keep = 1}, Keep::workspace, 2},
      {"a share in chunks", {.chunk = 64, .block = 256, .kept_blocks = 3, .keep = 1}, Keep::workspace, 3},
      {"nothing in chunks", {.chunk = 48, .block = 256, .keep = 0}, Keep::none, 0},
      {"one block", {.chunk = rows, .block = 2048, .keep = 1}, Keep::workspace, 1},
  };
  struct Mixture {
    DType t, dw;
    double alpha;
  };
  constexpr Mixture mixtures[] = {{DType::f32, DType::f32, 0.0},
                                  {DType::bf16, DType::bf16, 0.2},
                                  {DType::bf16, DType::f32, 0.0},
                                  {DType::f16, DType::f16, 0.0},
                                  {DType::f16, DType::f32, 0.2}};
  for (const auto& [t, dw, alpha] : mixtures) {
    Trial trial = trial_of(shape, t, t, dw);
    trial.problem.loss.smoothing = alpha;
    const Result usual = run(trial, make_plan(trial.problem, machine()));
    const Slack slack(trial.problem, Bench(trial, Flush::end).o, machine().bf16_products && t == DType::bf16);
    for (const Row& row : table) {
      SCOPED_TRACE(row.published_as);
      const Plan plan = make_plan(trial.problem, machine(), row.dials);
      EXPECT_EQ(plan.chunk, row.dials.chunk);
      EXPECT_EQ(plan.block, std::min(row.dials.block, shape.vocab));
      EXPECT_EQ(plan.keep, row.keep);
      EXPECT_EQ(plan.kept_blocks, row.kept_blocks);
      EXPECT_EQ(plan.inside_blocks, 0);
      EXPECT_EQ(plan.find("kept") != nullptr, row.keep == Keep::workspace);
      const Result result = run(trial, plan);
      EXPECT_TRUE(result.same_row_bits(usual));
      EXPECT_EQ(slack.compare(result, usual), "");
    }
    // The last row: loss only.
    Trial loss_only = trial;
    loss_only.problem.call = Call::forward;
    loss_only.problem.dx = loss_only.problem.dw = DType::none;
    const Plan plan = make_plan(loss_only.problem, machine());
    EXPECT_EQ(plan.flops, 2.0 * 150 * 24 * 1153);
    for (const char* gradient_buffer : {"kept", "d_rows", "d_columns", "dx_sum", "dw_sum", "x_columns"})
      EXPECT_EQ(plan.find(gradient_buffer), nullptr) << gradient_buffer;
    EXPECT_TRUE(run(loss_only, plan).same_row_bits(usual));
  }
}

// R H 4 for the sums of dX, one packed copy of X, block buffers, and what each thread and each row needs:
//   R' (H' + 2 B') operand bytes     X, and D of a block twice (R', H', B' padded to tiles and steps)
//   8 R V/256                        the statistics of leaves
//   52 R + 64                        a row's numbers, its loss, its index and target
//   T (256 max(H', B') operand + 96 KiB)  packed columns and a macro tile of each thread
// and 64 bytes of rounding for each buffer.
std::int64_t workspace_bound(const Plan& plan) {
  const Problem& p = plan.problem;
  const plan::Machine& m = plan.machine;
  const std::int64_t op = plan.bf16_products ? 2 : 4, unit = 64;  // no tile or step is larger than 64
  const auto up = [&](std::int64_t n) { return (n + unit - 1) / unit * unit; };
  const std::int64_t leaves = (p.vocab + 255) / 256;
  const std::int64_t per_thread = std::max(256 * std::max(up(p.hidden), up(plan.block)) * op, leaves * 256) + 96 * 1024;
  return p.rows * p.hidden * 4 + up(p.rows) * (up(p.hidden) + 2 * up(plan.block)) * op + 8 * p.rows * leaves +
         (36 + 8 + 16) * p.rows + m.threads * (per_thread + 64) + 16 * 64;
}

// R <= H and the bytes of exponentials no wider than dW's: every block's exponentials lie in its own rows of dW.
TEST_P(Settings, InsideDwCostsNoWorkspaceWhereRowsAreNoMoreThanHidden) {
  for (const Shape& shape :
       {Shape{64, 64, 700}, Shape{30, 40, 1153}, Shape{1, 1, 300}, Shape{97, 128, 256}, Shape{33, 200, 97}}) {
    for (const DType t : {DType::f32, DType::bf16, DType::f16}) {
      for (const DType dw : {t, DType::f32}) {
        for (const DType dx : {t, DType::none}) {
          const Trial trial = trial_of(shape, t, dx, dw);
          const Problem& p = trial.problem;
          const plan::Machine m = machine();
          const Plan inside = make_plan(p, m);  // the planner's own choice
          SCOPED_TRACE(trial.text() + "\n" + inside.text());
          ASSERT_EQ(inside.keep, Keep::inside_dw);
          EXPECT_EQ(inside.inside_blocks, inside.blocks);
          EXPECT_EQ(inside.kept_blocks, inside.blocks);
          EXPECT_EQ(inside.chunk, p.rows);
          const double rhv = static_cast<double>(p.rows) * static_cast<double>(p.hidden) * static_cast<double>(p.vocab);
          EXPECT_EQ(inside.flops, (dx == DType::none ? 4.0 : 6.0) * rhv);
          EXPECT_EQ(inside.find("kept"), nullptr);
          EXPECT_LE(inside.workspace_bytes, workspace_bound(inside));

          const Result result = run(trial, inside);
          const Plan beside = make_plan(p, m, {.chunk = p.rows, .block = inside.block, .keep = 1});
          ASSERT_EQ(beside.keep, Keep::workspace);
          EXPECT_EQ(beside.workspace_bytes - inside.workspace_bytes, beside.find("kept")->bytes);
          EXPECT_EQ(beside.flops, inside.flops);
          // The same exponentials in another place: the same bits of everything.
          EXPECT_TRUE(run(trial, beside).same_bits(result));
          const Slack slack(p, Bench(trial, Flush::end).o, inside.bf16_products);
          const Result recomputed = run(trial, make_plan(p, m, {.keep = 0}));
          EXPECT_TRUE(recomputed.same_row_bits(result));
          EXPECT_EQ(slack.compare(recomputed, result), "");
        }
      }
    }
  }
}

// R > H: the first blocks' exponentials fill dW's bytes, f0 = H size(dW) / (R size(E)) of them to within a block; the
// others are recomputed, or kept in the workspace as far as the budget goes.
TEST_P(Settings, InsideDwKeepsTheShareThatHasRoom) {
  struct Case {
    Shape shape;
    DType t, dw;
    double share;  // f0
  };
  const Case cases[] = {
      {{60, 20, 4096}, DType::bf16, DType::bf16, 1.0 / 3}, {{48, 40, 4096}, DType::f16, DType::f16, 40.0 / 48},
      {{50, 15, 4000}, DType::f32, DType::f32, 0.3},       {{75, 32, 3000}, DType::bf16, DType::f32, 64.0 / 75},
      {{60, 32, 2900}, DType::f16, DType::f32, 1.0},
  };
  for (const Case& c : cases) {
    const Trial trial = trial_of(c.shape, c.t, c.t, c.dw);
    const Problem& p = trial.problem;
    const plan::Machine m = machine();
    // Without a limit the rest lies in the workspace, so that all is kept.
    const Plan all = make_plan(p, m, {.block = 256, .keep = 2});
    EXPECT_EQ(all.share, 1.0);
    const Plan alone = make_plan(p, m, {.block = 256, .kept_blocks = all.inside_blocks, .keep = 2});
    SCOPED_TRACE(trial.text() + "\n" + alone.text());
    ASSERT_EQ(alone.keep, Keep::inside_dw);
    EXPECT_EQ(alone.kept_blocks, alone.inside_blocks);
    EXPECT_EQ(alone.find("kept"), nullptr);
    const double block_share = 256.0 / static_cast<double>(p.vocab);
    EXPECT_LE(alone.share, c.share + 1e-12);
    EXPECT_GT(alone.share, c.share - block_share);
    const double rhv = static_cast<double>(p.rows) * static_cast<double>(p.hidden) * static_cast<double>(p.vocab);
    EXPECT_NEAR(alone.flops, (8 - 2 * alone.share) * rhv, 1e-12 * rhv);

    // Budgets: what it takes alone, a block more, and a byte less than that.
    if (alone.kept_blocks + 1 < alone.blocks) {
      Problem limited = p;
      const std::int64_t block_bytes = 256 * p.rows * size_of(alone.e_dtype);
      for (const std::int64_t more : {std::int64_t{0}, block_bytes, block_bytes - 1}) {
        limited.budget = static_cast<std::uint64_t>(alone.workspace_bytes + more);
        EXPECT_EQ(make_plan(limited, m, {.block = 256, .keep = 2}).kept_blocks,
                  alone.kept_blocks + (more == block_bytes ? 1 : 0))
            << more;
      }
    }

    const Result recomputed = run(trial, make_plan(p, m, {.keep = 0}));
    const Slack slack(p, Bench(trial, Flush::end).o, alone.bf16_products);
    const std::int64_t blocks = alone.blocks;
    for (const std::int64_t kept : {alone.inside_blocks, std::min(alone.inside_blocks + 1, blocks), blocks}) {
      const Plan plan = make_plan(p, m, {.block = 256, .kept_blocks = kept, .keep = 2});
      EXPECT_EQ(plan.kept_blocks, kept);
      EXPECT_EQ(plan.inside_blocks, alone.inside_blocks);
      EXPECT_EQ(plan.find("kept") != nullptr, kept > plan.inside_blocks);
      const Result result = run(trial, plan);
      EXPECT_TRUE(result.same_row_bits(recomputed));
      EXPECT_EQ(slack.compare(result, recomputed), "");
    }
    // With some rows ignored the exponentials are fewer than the room.
    Trial ignored = trial;
    ignored.some_ignored = true;
    const Slack ignored_slack(p, Bench(ignored, Flush::end).o, alone.bf16_products);
    const Result a = run(ignored, alone), b = run(ignored, make_plan(p, m, {.keep = 0}));
    EXPECT_TRUE(a.same_row_bits(b));
    EXPECT_EQ(ignored_slack.compare(a, b), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Plan, Settings, testing::ValuesIn(all_targets()), target_parameter_name);

// dW lends its bytes only when nothing there is needed and exponentials fit; else the reason is in the list.
TEST(InsideDw, IsRefusedWithItsReason) {
  const plan::Machine m = machine_for(*cpu::find_target("scalar"), 2);
  const Problem lends = trial_of({64, 64, 700}, DType::bf16, DType::bf16, DType::bf16).problem;
  ASSERT_EQ(make_plan(lends, m).keep, Keep::inside_dw);
  const auto refused = [&](const char* reason, auto change, const Dials& dials = {}) {
    Problem p = lends;
    change(p);
    const Plan plan = make_plan(p, m, dials);
    EXPECT_NE(plan.keep, Keep::inside_dw) << reason;
    EXPECT_NE(plan.text().find(reason), std::string::npos) << reason << "\n" << plan.text();
  };
  refused("dW is accumulated into", [](Problem& p) { p.accumulate_dw = true; });
  refused("dW's rows are not adjacent", [](Problem& p) { p.dw_contiguous = false; });
  refused("dW is not wanted", [](Problem& p) { p.dw = DType::none; });
  refused("dW's elements are smaller than the exponentials", [](Problem& p) { p.x = DType::f32; });
  refused("the exponentials of a block exceed dW", [](Problem& p) { p.hidden = 1; });
  refused("a later chunk adds to dW", [](Problem&) {}, {.chunk = 32});
  refused("backward starts from statistics", [](Problem& p) { p.call = Call::backward; });
  refused("there are no rows", [](Problem& p) { p.rows = 0; });
}

// The reach: 64 MiB at R 2048, H 2048, V 32768, on every target that the library has.
TEST(InsideDw, ServesABudgetOf64MiB) {
  for (const plan::Machine& m : machines()) {
    if (m.threads > 2) continue;
    for (const DType t : {DType::bf16, DType::f32}) {
      Problem p = trial_of({2048, 2048, 32768}, t, t, t).problem;
      const Plan unlimited = make_plan(p, m);
      p.budget = 64 << 20;
      const Plan plan = make_plan(p, m);
      SCOPED_TRACE(plan.text());
      EXPECT_EQ(plan.keep, Keep::inside_dw);
      EXPECT_EQ(plan.share, 1.0);
      EXPECT_LE(plan.workspace_bytes, 64 << 20);
      EXPECT_LE(plan.predicted_seconds, 1.1 * unlimited.predicted_seconds);
      // A dW that is added into cannot lend; token chunks then still keep everything.
      p.dw = DType::f32;
      p.accumulate_dw = true;
      const Plan added = make_plan(p, m);
      EXPECT_LE(added.workspace_bytes, 64 << 20);
      EXPECT_LE(added.predicted_seconds, 1.2 * unlimited.predicted_seconds) << added.text();
    }
  }
}

}  // namespace
}  // namespace logitless::test
