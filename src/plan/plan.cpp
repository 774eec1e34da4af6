// Enumeration of settings, their exact ledgers and predicted times; the least time within the budget wins.
//
// A candidate's ledger and time depend on nothing but (problem, machine, dials), so a larger budget only adds
// candidates and can never predict a slower plan.
#include "plan/plan.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace logitless::plan {
namespace {

using contract::Call;
using contract::DType;
using contract::Kind;
using contract::Problem;
using contract::size_of;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

// Per-element costs beside the products, in nanoseconds of one thread. They only rank candidates.
constexpr double pack_ns = 0.35;
constexpr double exponential_ns = 0.6;
constexpr double scatter_ns = 1.0;

void add(Plan& plan, const char* name, DType dtype, std::int64_t d0, std::int64_t d1, std::int64_t d2,
         std::int64_t padding_elements = 0) {
  std::int64_t const exact = d0 * d1 * d2 * size_of(dtype);
  std::int64_t const bytes = round_up(exact, 64);
  if (bytes == 0) return;
  plan.ledger.push_back(
      {name, dtype, {d0, d1, d2}, plan.workspace_bytes, bytes, bytes - exact + padding_elements * size_of(dtype)});
  plan.workspace_bytes += bytes;
}

bool linear_dx(const Problem& p) { return p.dx != DType::none; }
bool linear_dw(const Problem& p) { return p.dw != DType::none; }

// Exponentials take 16 bits beside 16-bit inputs of one type, else fp32.
DType kept_dtype(const Problem& p) { return p.x == p.w && contract::is_half(p.x) ? p.x : DType::f32; }

// The ledger of a setting; sets workspace_bytes, flops, share and predicted_seconds. The order is that of the layout:
// what every call fills to its last byte (the kept rows) comes last.
void price_linear(Plan& plan) {
  Problem const& p = plan.problem;
  Machine const& m = plan.machine;
  std::int64_t const rows = p.rows, hidden = p.hidden, vocab = p.vocab;
  DType const operand = plan.bf16_products ? DType::bf16 : DType::f32;
  std::int64_t const step = plan.bf16_products ? 2 * m.k_step : m.k_step;
  std::int64_t const chunk = plan.chunk, block = plan.block;
  std::int64_t const leaves = ceil_div(vocab, m.leaf);
  std::int64_t const chunks = std::max<std::int64_t>(1, ceil_div(rows, std::max<std::int64_t>(1, chunk)));
  bool const gradient = p.wants_gradient();
  bool const all_kept = gradient && plan.kept_blocks == plan.blocks;
  std::int64_t const tile_rows = plan.bf16_products ? m.bf16_tile_rows : m.tile_rows;
  std::int64_t const row_panels = round_up(chunk, tile_rows);
  std::int64_t const hidden_k = round_up(hidden, step), chunk_k = round_up(chunk, step),
                     block_k = round_up(block, step);
  std::int64_t const hidden_columns = round_up(hidden, m.leaf);

  plan.ledger.clear();
  plan.workspace_bytes = 0;
  std::int64_t const deepest = std::max({hidden_k, gradient && linear_dx(p) ? block_k : 0, std::int64_t{16}});
  // One slot a thread: a packed block of 256 columns (or the merge's scratch), and a macro tile.
  std::int64_t const column_block = std::max(m.leaf * deepest * size_of(operand) / 4, leaves * 64 + 64);
  add(plan, "thread_columns", DType::f32, m.threads, round_up(column_block, 16), 1);
  add(plan, "thread_tile", DType::f32, m.threads, m.macro_rows, m.leaf);
  add(plan, "thread_slots", DType::i64, m.threads, 8, 1);
  add(plan, "leaf_m", DType::f32, leaves, chunk, 1);
  add(plan, "leaf_r", DType::f32, leaves, chunk, 1);
  if (p.loss.smoothing > 0) add(plan, "leaf_k", DType::f32, leaves, chunk, 1);
  add(plan, "row_state", DType::f32, 9, chunk, 1);
  add(plan, "row_loss", DType::f64, chunk, 1, 1);
  if (p.call == Call::backward) {
    add(plan, all_kept ? "x_packed" : "x_panels", operand, row_panels, hidden_k, 1, (row_panels - chunk) * hidden_k);
    if (linear_dw(p)) add(plan, "x_columns", operand, hidden_columns, chunk_k, 1);
  } else if (all_kept && linear_dw(p)) {
    // Panels of X are spent when the columns of X are packed.
    add(plan, "x_packed", operand, std::max(row_panels * hidden_k, hidden_columns * chunk_k), 1, 1);
  } else {
    add(plan, "x_panels", operand, row_panels, hidden_k, 1);
    if (gradient && linear_dw(p)) add(plan, "x_columns", operand, hidden_columns, chunk_k, 1);
  }
  if (gradient) {
    if (linear_dx(p)) add(plan, "d_rows", operand, row_panels, block_k, 1);
    if (linear_dw(p)) add(plan, "d_columns", operand, round_up(block, tile_rows), chunk_k, 1);
    if (linear_dx(p) && p.dx != DType::f32) add(plan, "dx_sum", DType::f32, chunk, hidden, 1);
    if (plan.bf16_products && p.loss.smoothing > 0) {
      add(plan, "w_sum", DType::f32, hidden, 1, 1);
      add(plan, "x_sum", DType::f32, hidden, 1, 1);
    }
    if (plan.keep == Keep::workspace)
      add(plan, "kept", plan.e_dtype, std::min(plan.kept_blocks * block, vocab), chunk, 1);
    if (linear_dw(p) && p.dw != DType::f32 && chunks > 1) add(plan, "dw_sum", DType::f32, vocab, hidden, 1);
  }
  add(plan, "kept_target", DType::i64, rows, 1, 1);
  add(plan, "kept_index", DType::i64, rows, 1, 1);

  double const rhv = static_cast<double>(rows) * static_cast<double>(hidden) * static_cast<double>(vocab);
  double const rv = static_cast<double>(rows) * static_cast<double>(vocab);
  double const hv = static_cast<double>(hidden) * static_cast<double>(vocab);
  plan.share = plan.blocks > 0 ? static_cast<double>(plan.kept_blocks) / static_cast<double>(plan.blocks) : 0.0;
  double products = 0.0;
  if (p.call != Call::backward) products += 2.0;
  if (gradient) {
    double const walked = p.call == Call::backward ? 1.0 : 1.0 - plan.share;
    products += 2.0 * walked + (linear_dx(p) ? 2.0 : 0.0) + (linear_dw(p) ? 2.0 : 0.0);
  }
  plan.flops = products * rhv;

  double const rate = (plan.bf16_products ? m.bf16_gflops : m.f32_gflops) * 1e9 * m.threads;
  double const walks = products / 2.0;
  double const n_chunks = static_cast<double>(chunks);
  double element_ns = exponential_ns * rv;
  double pack = pack_ns * hv * n_chunks * (walks - (gradient && linear_dw(p) ? 1.0 : 0.0));
  double bytes = hv * static_cast<double>(size_of(p.w)) * n_chunks * walks;
  if (gradient) {
    element_ns += scatter_ns * rv;
    if (linear_dx(p))
      bytes += 8.0 * static_cast<double>(rows) * static_cast<double>(hidden) * static_cast<double>(plan.blocks);
    if (linear_dw(p)) bytes += hv * (chunks > 1 ? 8.0 * n_chunks : static_cast<double>(size_of(p.dw)));
    // Barriers: two a block, each leaving about a macro tile's work uneven.
    element_ns += 2e4 * static_cast<double>(plan.blocks) * n_chunks * m.threads;
  }
  plan.predicted_seconds = plan.flops / rate + (element_ns + pack) * 1e-9 / m.threads + bytes / (m.memory_gbytes * 1e9);
}

void price_logits(Plan& plan) {
  Problem const& p = plan.problem;
  Machine const& m = plan.machine;
  std::int64_t const leaves = ceil_div(p.vocab, m.leaf);
  plan.ledger.clear();
  plan.workspace_bytes = 0;
  add(plan, "thread_leaves", DType::f32, m.threads, 5, round_up(leaves + 64, 16));
  if (p.call == Call::forward_backward && p.dz != DType::f32)
    add(plan, "thread_row", DType::f32, m.threads, round_up(p.vocab, 16), 1);
  add(plan, "thread_slots", DType::i64, m.threads, 8, 1);
  add(plan, "row_loss", DType::f64, p.rows, 1, 1);
  add(plan, "row_bad", DType::i64, p.rows, 1, 1);
  double const rv = static_cast<double>(p.rows) * static_cast<double>(p.vocab);
  plan.flops = 0.0;
  plan.predicted_seconds = rv * static_cast<double>(size_of(p.z) + size_of(p.dz)) / (m.memory_gbytes * 1e9) +
                           exponential_ns * 1e-9 * rv / m.threads;
}

std::string setting(const Plan& plan) {
  std::string out = "C=" + std::to_string(plan.chunk) + " B=" + std::to_string(plan.block);
  out += " kept=" + std::to_string(plan.kept_blocks) + "/" + std::to_string(plan.blocks);
  if (plan.keep == Keep::inside_dw) out += " inside dW";
  return out;
}

std::string milliseconds(double seconds) {
  char text[48];
  std::snprintf(text, sizeof text, "%.4g ms", seconds * 1e3);
  return text;
}

// Blocks that can keep their exponentials in dW's bytes: the first of each group of blocks that together are large
// enough. Returns how many, and sets the group; 0 when dW cannot lend its bytes.
std::int64_t kept_inside_dw(const Problem& p, std::int64_t block, DType e_dtype, std::int64_t* group) {
  if (!linear_dw(p) || p.accumulate_dw || !p.dw_contiguous || size_of(p.dw) < size_of(e_dtype) || p.rows == 0) return 0;
  std::int64_t const e_row = p.rows * size_of(e_dtype), dw_row = p.hidden * size_of(p.dw);
  std::int64_t const blocks = ceil_div(p.vocab, block);
  *group = std::min(ceil_div(e_row, dw_row), blocks);
  std::int64_t kept = 0;
  for (std::int64_t first = 0; first < blocks; first += *group) {
    std::int64_t const begin = first * block, end = std::min(p.vocab, (first + *group) * block);
    std::int64_t const columns = std::min(block, p.vocab - begin);
    if (columns * e_row <= (end - begin) * dw_row) ++kept;
  }
  return kept;
}

}  // namespace

const Buffer* Plan::find(const char* name) const {
  for (Buffer const& b : ledger)
    if (std::strcmp(b.name, name) == 0) return &b;
  return nullptr;
}

Plan make_plan(const Problem& problem, const Machine& machine) { return make_plan(problem, machine, Dials{}); }

Plan make_plan(const Problem& problem, const Machine& machine, const Dials& dials) {
  Plan best;
  std::int64_t const unlimited = std::numeric_limits<std::int64_t>::max();
  std::int64_t const budget =
      problem.budget == 0
          ? unlimited
          : static_cast<std::int64_t>(std::min<std::uint64_t>(problem.budget, static_cast<std::uint64_t>(unlimited)));
  std::int64_t least = unlimited;
  std::vector<std::string> rejected;
  bool found = false;

  Plan base;
  base.problem = problem;
  base.machine = machine;
  if (problem.kind == Kind::logits) {
    base.chunk = problem.rows;
    base.block = problem.vocab;
    base.blocks = 1;
    price_logits(base);
    if (base.workspace_bytes > budget) base.chunk = 0;
    return base;
  }

  base.bf16_products = machine.bf16_products && problem.x == DType::bf16 && problem.w == DType::bf16;
  base.e_dtype = kept_dtype(problem);
  std::int64_t const rows = std::max<std::int64_t>(1, problem.rows);
  bool const gradient = problem.wants_gradient();

  auto offer = [&](Plan& candidate) {
    price_linear(candidate);
    least = std::min(least, candidate.workspace_bytes);
    if (candidate.workspace_bytes > budget) {
      rejected.push_back(setting(candidate) + ": needs " + std::to_string(candidate.workspace_bytes) +
                         " bytes, the budget is " + std::to_string(budget));
      return false;
    }
    if (found && candidate.predicted_seconds >= best.predicted_seconds) {
      // The smaller workspace wins a tie.
      bool const tie =
          candidate.predicted_seconds == best.predicted_seconds && candidate.workspace_bytes < best.workspace_bytes;
      if (!tie) {
        rejected.push_back(setting(candidate) + ": predicted " + milliseconds(candidate.predicted_seconds) +
                           ", slower than the chosen");
        return true;
      }
    }
    if (found)
      rejected.push_back(setting(best) + ": predicted " + milliseconds(best.predicted_seconds) +
                         ", slower than the chosen");
    best = candidate;
    found = true;
    return true;
  };

  // Chunks: all rows, then halves down to a macro tile, each a multiple of the macro tile.
  std::vector<std::int64_t> chunks;
  if (dials.chunk > 0) {
    chunks.push_back(std::min(dials.chunk, rows));
  } else {
    chunks.push_back(rows);
    for (std::int64_t c = 1 << 20; c >= 64; c /= 2) {
      std::int64_t const rounded = c >= machine.macro_rows ? c / machine.macro_rows * machine.macro_rows : c;
      if (rounded < rows) chunks.push_back(rounded);
    }
  }
  std::vector<std::int64_t> blocks;
  if (dials.block > 0) {
    blocks.push_back(round_up(dials.block, machine.leaf));
  } else if (!gradient) {
    blocks.push_back(machine.leaf);
  } else {
    for (std::int64_t b : {4096, 2048, 1024, 512, 256})
      if (b <= round_up(problem.vocab, machine.leaf)) blocks.push_back(b);
  }

  for (std::int64_t const chunk : chunks) {
    for (std::int64_t const block : blocks) {
      Plan candidate = base;
      candidate.chunk = chunk;
      candidate.block = std::min(block, problem.vocab);
      candidate.blocks = ceil_div(problem.vocab, block);
      bool const may_keep = gradient && problem.call == Call::forward_backward;
      // Everything recomputed.
      if (dials.kept_blocks <= 0 && dials.keep <= 0) offer(candidate);
      if (!may_keep) continue;
      // Kept in the workspace: as many blocks as asked for, all, or as many as fit.
      if (dials.keep < 0 || dials.keep == static_cast<int>(Keep::workspace)) {
        Plan kept = candidate;
        kept.keep = Keep::workspace;
        kept.kept_blocks = dials.kept_blocks >= 0 ? std::min(dials.kept_blocks, candidate.blocks) : candidate.blocks;
        if (kept.kept_blocks > 0 && !offer(kept) && dials.kept_blocks < 0) {
          std::int64_t lo = 0, hi = candidate.blocks;  // lo fits (or is 0), hi does not
          while (hi - lo > 1) {
            kept.kept_blocks = (lo + hi) / 2;
            price_linear(kept);
            (kept.workspace_bytes <= budget ? lo : hi) = kept.kept_blocks;
          }
          kept.kept_blocks = lo;
          if (lo > 0) offer(kept);
        }
      }
      if ((dials.keep < 0 || dials.keep == static_cast<int>(Keep::inside_dw)) && dials.kept_blocks < 0 &&
          chunk >= rows) {
        Plan inside = candidate;
        inside.keep = Keep::inside_dw;
        inside.kept_blocks = kept_inside_dw(problem, block, inside.e_dtype, &inside.group);
        if (inside.kept_blocks > 0) {
          offer(inside);
        } else if (linear_dw(problem)) {
          rejected.push_back(setting(inside) + ": dW cannot lend its bytes (" +
                             (problem.accumulate_dw    ? "it is accumulated into"
                              : !problem.dw_contiguous ? "its rows are not adjacent"
                                                       : "too few for one block") +
                             ")");
        }
      }
    }
  }
  if (!found) {
    best = base;
    best.chunk = 0;
    best.workspace_bytes = least == unlimited ? 0 : least;
  }
  best.rejected = std::move(rejected);
  return best;
}

}  // namespace logitless::plan
