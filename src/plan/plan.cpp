// Enumeration of the dials' settings: the least predicted time within the budget wins, and every other setting gets its
// reason.
//
// A larger budget never predicts a slower plan: the settings with a given share do not depend on the budget, and where
// the share is "as much as fits", the time is linear in it, so that it lies between those of the share's two ends or a
// larger budget makes it less.
#include "plan/plan.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>

#include "plan/setting.hpp"

namespace logitless::plan {
namespace {

using contract::Call;
using contract::DType;
using contract::Kind;
using contract::Problem;
using contract::size_of;

constexpr std::int64_t unlimited = std::numeric_limits<std::int64_t>::max();

// What a setting keeps; settings are enumerated in this order, and equals are won by the first.
enum class Share { none, inside, inside_and_workspace, workspace, part_in_workspace };

struct Candidate {
  Share share;
  Setting setting;
  std::int64_t bytes;
  double seconds;
};

std::int64_t budget_of(const Problem& p) {
  return p.budget == 0 ? unlimited
                       : static_cast<std::int64_t>(std::min<std::uint64_t>(p.budget, std::uint64_t{unlimited}));
}

// Rows of a chunk: all of them, and even divisions by 2, 3, ... 16, then by a ninth more each time, in whole steps of
// K.
std::vector<std::int64_t> chunks_of(std::int64_t rows, std::int64_t given) {
  if (given > 0) return {std::min(given, rows)};
  std::vector<std::int64_t> chunks{rows};
  constexpr std::int64_t step = 32;
  for (std::int64_t n = 2; chunks.back() > step; n += std::max<std::int64_t>(1, n / 9)) {
    std::int64_t const chunk = round_up(ceil_div(rows, n), step);
    if (chunk < chunks.back()) chunks.push_back(chunk);
  }
  return chunks;
}

std::vector<std::int64_t> blocks_of(const Problem& p, const Machine& m, std::int64_t given) {
  if (given > 0) return {round_up(given, m.leaf)};
  if (!p.wants_gradient()) return {m.leaf};
  // Largest B, measured (Xeon, two threads, R 2048, H 2048, V 32768; docs/performance.md): bf16 is fastest at 2048,
  // where a packed block of 256 columns takes 1 MiB of the L2 cache; fp32 at 4096, where dX is added into least often.
  std::int64_t const most = products_in_bf16(p, m) ? 2048 : 4096;
  std::vector<std::int64_t> blocks;
  if (p.vocab < most) blocks.push_back(round_up(p.vocab, m.leaf));
  for (std::int64_t b = most; b >= m.leaf; b /= 2)
    if (b < p.vocab && (blocks.empty() || b < blocks.back())) blocks.push_back(b);
  return blocks;
}

// Why dW cannot lend its bytes at all; null: it can.
const char* no_lending(const Problem& p) {
  if (p.dw == DType::none) return "dW is not wanted";
  if (p.accumulate_dw) return "dW is accumulated into";
  if (!p.dw_contiguous) return "dW's rows are not adjacent";
  if (size_of(p.dw) < size_of(kept_dtype(p))) return "dW's elements are smaller than the exponentials";
  return nullptr;
}

// Blocks whose exponentials of all R rows fit in dW's bytes, inside_stride bytes a column.
std::int64_t blocks_inside_dw(const Problem& p, std::int64_t block) {
  std::int64_t const e_column = p.rows * size_of(kept_dtype(p)), dw_row = p.hidden * size_of(p.dw);
  return e_column <= dw_row ? ceil_div(p.vocab, block) : p.vocab * dw_row / (block * e_column);
}

class Planner {
 public:
  Planner(const Problem& p, const Machine& m, const Dials& dials)
      : p_(p), m_(m), dials_(dials), budget_(budget_of(p)), rows_(std::max<std::int64_t>(1, p.rows)) {}

  Plan make() {
    enumerate();
    Candidate const* best = nullptr;
    std::int64_t least = unlimited;
    for (Candidate const& c : candidates_) {
      least = std::min(least, c.bytes);
      if (c.bytes > budget_) continue;
      if (best == nullptr || c.seconds < best->seconds || (c.seconds == best->seconds && c.bytes < best->bytes))
        best = &c;
    }
    Plan plan;
    plan.problem = p_;
    plan.machine = m_;
    if (best == nullptr)
      plan.workspace_bytes = candidates_.empty() ? 0 : least;
    else
      describe(*best, &plan);
    give_reasons(best, &plan.rejected);
    return plan;
  }

 private:
  void enumerate() {
    // What is saved lies in columns of all rows.
    std::vector<std::int64_t> const chunks = chunks_of(rows_, p_.saved > 0 ? rows_ : dials_.chunk),
                                    blocks = blocks_of(p_, m_, dials_.block);
    candidates_.reserve(3 * chunks.size() * blocks.size());
    bool const may_keep = p_.call == Call::forward_backward && p_.wants_gradient();
    auto const wanted = [&](Keep keep) { return dials_.keep < 0 || dials_.keep == static_cast<int>(keep); };
    if (wanted(Keep::none) && dials_.kept_blocks <= 0)
      for (std::int64_t const block : blocks)
        for (std::int64_t const chunk : chunks) offer(Share::none, {chunk, block, 0, 0});
    if (dials_.kept_blocks == 0) return;
    if (p_.distils()) {
      if (p_.wants_gradient()) refused_.emplace_back("f>0: two heads are walked again, nothing of either is kept");
      return;
    }
    if (!may_keep) {
      if (p_.wants_gradient()) refused_.emplace_back("f>0: backward starts from statistics, without exponentials");
      return;
    }
    if (wanted(Keep::inside_dw)) enumerate_inside(chunks.front(), blocks);
    if (wanted(Keep::workspace)) {
      for (std::int64_t const block : blocks)
        for (std::int64_t const chunk : chunks) offer(Share::workspace, {chunk, block, wanted_blocks(block), 0});
      for (std::int64_t const block : blocks)
        for (std::int64_t const chunk : chunks) offer_part(Share::part_in_workspace, {chunk, block, 0, 0});
    }
  }

  void enumerate_inside(std::int64_t chunk, const std::vector<std::int64_t>& blocks) {
    const char* why = no_lending(p_);
    if (why == nullptr && p_.rows == 0) why = "there are no rows";
    if (why == nullptr && chunk < rows_) why = "a later chunk adds to dW";
    if (why != nullptr) {
      refused_.push_back(std::string("f>0 inside dW: ") + why);
      return;
    }
    for (std::int64_t const block : blocks) {
      std::int64_t const inside = std::min(blocks_inside_dw(p_, block), wanted_blocks(block));
      if (inside == 0) {
        refused_.push_back("B=" + std::to_string(block) + " f>0 inside dW: the exponentials of a block exceed dW");
        continue;
      }
      offer(Share::inside, {chunk, block, inside, inside});
      if (inside == wanted_blocks(block)) continue;
      offer(Share::inside_and_workspace, {chunk, block, wanted_blocks(block), inside});
      offer_part(Share::inside_and_workspace, {chunk, block, inside, inside});
    }
  }

  std::int64_t wanted_blocks(std::int64_t block) const {
    std::int64_t const blocks = ceil_div(p_.vocab, block);
    return dials_.kept_blocks > 0 ? std::min(dials_.kept_blocks, blocks) : blocks;
  }

  void offer(Share share, const Setting& s) {
    candidates_.push_back({share, s, ledger_of(p_, m_, s).bytes(), seconds_of(p_, m_, s)});
  }

  // As many blocks kept in the workspace as the budget has room for, when that is some but not all.
  void offer_part(Share share, Setting s) {
    if (dials_.kept_blocks > 0 || budget_ == unlimited) return;
    std::int64_t const blocks = ceil_div(p_.vocab, s.block), block_bytes = s.block * s.chunk * size_of(kept_dtype(p_));
    Setting all = s;
    all.kept_blocks = blocks;
    if (ledger_of(p_, m_, all).bytes() <= budget_) return;
    // Fewer than all: then no other buffer depends on how many, and theirs needs no rounding.
    s.kept_blocks = s.inside_blocks;
    std::int64_t const room = budget_ - ledger_of(p_, m_, s).bytes();
    if (room < block_bytes) return;
    s.kept_blocks = std::min(s.inside_blocks + room / block_bytes, blocks - 1);
    if (s.kept_blocks > s.inside_blocks) offer(share, s);
  }

  void describe(const Candidate& c, Plan* plan) const {
    Setting const& s = c.setting;
    Ledger const ledger = ledger_of(p_, m_, s);
    plan->chunk = s.chunk;
    plan->block = std::min(s.block, p_.vocab);
    plan->blocks = ceil_div(p_.vocab, s.block);
    plan->kept_blocks = s.kept_blocks;
    plan->inside_blocks = s.inside_blocks;
    plan->keep = s.inside_blocks > 0 ? Keep::inside_dw : s.kept_blocks > 0 ? Keep::workspace : Keep::none;
    Saved const saved = saved_of(p_, m_);
    if (p_.saved > 0 && saved.leaves > 0) {
      plan->saved_leaves = saved.leaves;
      plan->saved_head = saved.head;
      plan->e_dtype = kept_dtype(p_);
    }
    if (plan->keep != Keep::none) plan->e_dtype = kept_dtype(p_);
    if (s.inside_blocks > 0) plan->inside_stride = inside_stride(p_);
    plan->bf16_products = products_in_bf16(p_, m_);
    plan->share = share_of(s);
    plan->flops = flops_of(p_, m_, s);
    plan->predicted_seconds = c.seconds;
    plan->ledger.assign(ledger.begin(), ledger.end());
    plan->workspace_bytes = ledger.bytes();
  }

  double share_of(const Setting& s) const {
    return static_cast<double>(std::min(s.kept_blocks * s.block, p_.vocab)) / static_cast<double>(p_.vocab);
  }

  // Neighbours in C with the same B, share and reason make one line.
  void give_reasons(const Candidate* best, std::vector<std::string>* out) const {
    enum Reason { chosen, over_budget, slower, larger };
    auto const reason_of = [&](const Candidate& c) {
      if (&c == best) return chosen;
      if (c.bytes > budget_) return over_budget;
      return c.seconds > best->seconds ? slower : larger;
    };
    for (std::size_t i = 0, end; i < candidates_.size(); i = end) {
      Candidate const& first = candidates_[i];
      Reason const reason = reason_of(first);
      std::int64_t bytes = first.bytes;
      double seconds = first.seconds;
      for (end = i + 1; end < candidates_.size(); ++end) {
        Candidate const& c = candidates_[end];
        if (c.share != first.share || c.setting.block != first.setting.block || reason_of(c) != reason) break;
        bytes = std::min(bytes, c.bytes);
        seconds = std::min(seconds, c.seconds);
      }
      if (reason == chosen) continue;
      std::string line = settings(first, candidates_[end - 1], static_cast<std::int64_t>(end - i));
      if (reason == over_budget)
        line += "needs " + std::to_string(bytes) + " bytes, the budget is " + std::to_string(budget_);
      else if (reason == slower)
        line += "predicted " + milliseconds(seconds) + ", the chosen " + milliseconds(best->seconds);
      else
        line +=
            "as fast as the chosen, in " + std::to_string(bytes) + " bytes instead of " + std::to_string(best->bytes);
      out->push_back(std::move(line));
    }
    out->insert(out->end(), refused_.begin(), refused_.end());
  }

  std::string settings(const Candidate& first, const Candidate& last, std::int64_t count) const {
    auto const share_text = [&](const Candidate& c) {
      char text[32];
      std::snprintf(text, sizeof text, "%.3g", share_of(c.setting));
      return std::string(text);
    };
    std::string out = "C=" + std::to_string(first.setting.chunk);
    if (count > 1) out += ".." + std::to_string(last.setting.chunk);
    out += " B=" + std::to_string(first.setting.block) + " f=" + share_text(first);
    if (share_text(first) != share_text(last)) out += ".." + share_text(last);
    switch (first.share) {
      case Share::none: break;
      case Share::inside: out += " inside dW"; break;
      case Share::inside_and_workspace: out += " inside dW and in the workspace"; break;
      case Share::workspace:
      case Share::part_in_workspace: out += " in the workspace"; break;
    }
    if (count > 1) return out + " (" + std::to_string(count) + " settings): at best ";
    return out + ": ";
  }

  static std::string milliseconds(double seconds) {
    char text[48];
    std::snprintf(text, sizeof text, "%.4g ms", seconds * 1e3);
    return text;
  }

  const Problem& p_;
  const Machine& m_;
  const Dials& dials_;
  const std::int64_t budget_, rows_;
  std::vector<Candidate> candidates_;
  std::vector<std::string> refused_;  // settings that the problem rules out
};

Plan make_logits_plan(const Problem& p, const Machine& m) {
  Plan plan;
  plan.problem = p;
  plan.machine = m;
  Ledger const ledger = logits_ledger_of(p, m);
  plan.workspace_bytes = ledger.bytes();
  plan.predicted_seconds = logits_seconds_of(p, m);
  if (plan.workspace_bytes > budget_of(p)) return plan;
  plan.chunk = std::max<std::int64_t>(1, p.rows);
  plan.block = p.vocab;
  plan.blocks = 1;
  plan.ledger.assign(ledger.begin(), ledger.end());
  return plan;
}

}  // namespace

const Buffer* Plan::find(const char* name) const {
  for (Buffer const& b : ledger)
    if (std::strcmp(b.name, name) == 0) return &b;
  return nullptr;
}

Plan make_plan(const Problem& problem, const Machine& machine) { return make_plan(problem, machine, Dials{}); }

Plan make_plan(const Problem& problem, const Machine& machine, const Dials& dials) {
  if (problem.kind == Kind::logits) return make_logits_plan(problem, machine);
  return Planner(problem, machine, dials).make();
}

}  // namespace logitless::plan
