// Ledgers, flops and predicted times; see setting.hpp.
//
// A ledger names what the CPU drivers (src/cpu/linear.cpp, logits.cpp) lay out, to the byte. Its last buffer is one
// that every call with all rows kept fills to its end, so that a test can see the workspace's high-water mark.
#include "plan/setting.hpp"

#include <algorithm>
#include <cmath>

namespace logitless::plan {
namespace {

using contract::Call;
using contract::DType;
using contract::Problem;
using contract::size_of;

// Costs beside the products, in nanoseconds of one thread an element. They only rank settings.
constexpr double pack_ns = 0.35;
constexpr double exponential_ns = 0.6;
constexpr double scatter_ns = 1.0;
// To wake the other threads for a loop, and to wait for them.
constexpr double barrier_ns = 5e3;

bool wants_dx(const Problem& p) { return p.dx != DType::none; }
bool wants_dw(const Problem& p) { return p.dw != DType::none; }

std::int64_t chunks_of(const Problem& p, const Setting& s) {
  return std::max<std::int64_t>(1, ceil_div(p.rows, s.chunk));
}
std::int64_t columns_of(const Problem& p, const Setting& s, std::int64_t blocks) {
  return std::min(blocks * s.block, p.vocab);
}
std::int64_t recomputed_columns(const Problem& p, const Machine& m, const Setting& s) {
  if (p.call == Call::backward) return p.vocab - std::min(saved_of(p, m).leaves * m.leaf, p.vocab);
  return p.vocab - columns_of(p, s, s.kept_blocks);
}

// Tasks over `columns` groups of 256 columns are split further by rows until there are four a thread (the driver's
// rows_per_task). Each of them packs its columns again.
double row_groups(const Machine& m, std::int64_t columns, std::int64_t rows) {
  std::int64_t const tiles = std::max<std::int64_t>(1, ceil_div(rows, m.macro_rows));
  std::int64_t const wanted = ceil_div(std::int64_t{4} * m.threads, std::max<std::int64_t>(1, columns));
  return static_cast<double>(ceil_div(tiles, ceil_div(tiles, std::min(wanted, tiles))));
}

// Nanoseconds of a loop over tasks that together take thread_ns: in its last round threads may find no task.
double loop_ns(const Machine& m, double tasks, double thread_ns) {
  return thread_ns * std::ceil(tasks / m.threads) / tasks;
}

double padded(std::int64_t n, std::int64_t unit) {
  return static_cast<double>(round_up(n, unit)) / static_cast<double>(n);
}
// The same for the rows of all chunks together.
double padded_rows(const Problem& p, const Setting& s, std::int64_t unit) {
  std::int64_t const rows = std::max<std::int64_t>(1, p.rows), full = (chunks_of(p, s) - 1) * s.chunk;
  double const whole = static_cast<double>(full) * padded(s.chunk, unit);
  return (whole + static_cast<double>(round_up(rows - full, unit))) / static_cast<double>(rows);
}

}  // namespace

void Ledger::add(const char* name, DType dtype, std::int64_t d0, std::int64_t d1, std::int64_t d2,
                 std::int64_t padding) {
  std::int64_t const exact = d0 * d1 * d2 * size_of(dtype);
  if (exact == 0) return;
  std::int64_t const bytes = round_up(exact, 64);
  buffers_[count_++] = {name, dtype, {d0, d1, d2}, bytes_, bytes, bytes - exact + padding * size_of(dtype)};
  bytes_ += bytes;
}

bool products_in_bf16(const Problem& p, const Machine& m) {
  return m.bf16_products && p.x == DType::bf16 && p.w == DType::bf16;
}

bool teacher_in_bf16(const Problem& p, const Machine& m) {
  return m.bf16_products && p.teacher_x == DType::bf16 && p.teacher_w == DType::bf16;
}

// Where D needs the logits themselves, they are kept, in fp32. Exponentials take 16 bits beside 16-bit inputs of one
// type, else fp32.
DType kept_dtype(const Problem& p) {
  if (p.needs_logits()) return DType::f32;
  return p.x == p.w && contract::is_half(p.x) ? p.x : DType::f32;
}

Saved saved_of(const Problem& p, const Machine& m) {
  Saved out;
  auto const room = static_cast<std::int64_t>(std::min<std::uint64_t>(p.saved, std::uint64_t{1} << 60));
  std::int64_t const leaves = ceil_div(p.vocab, m.leaf), rows = std::max<std::int64_t>(1, p.rows);
  bool const raw = products_in_bf16(p, m) && !p.needs_logits();
  auto const head = [&](std::int64_t n) {
    std::int64_t const references = p.needs_logits() ? 0 : raw ? rows : n * rows;
    return 64 + round_up(references * 4, 64);
  };
  auto const bytes = [&](std::int64_t n) {
    return head(n) + std::min(n * m.leaf, p.vocab) * rows * size_of(kept_dtype(p));
  };
  // Bytes grow with leaves, so the most that fit are found by halving.
  std::int64_t low = 0, high = leaves;
  while (low < high) {
    std::int64_t const middle = (low + high + 1) / 2;
    if (bytes(middle) <= room)
      low = middle;
    else
      high = middle - 1;
  }
  out.leaves = p.saved == 0 || bytes(low) > room ? 0 : low;
  out.head = head(out.leaves);
  return out;
}

std::int64_t inside_stride(const Problem& p) {
  return std::max(p.rows * size_of(kept_dtype(p)), p.hidden * size_of(p.dw));
}

// What the options keep of their operands, in fp32.
void add_operands(const Problem& p, Ledger* out) {
  if (p.bias != DType::none) out->add("bias", DType::f32, p.vocab, 1, 1);
  if (p.class_weight) out->add("class_weight", DType::f32, p.vocab, 1, 1);
  if (p.loss.targets == contract::Targets::topk) {
    out->add("topk_ids", DType::i64, p.rows, p.topk, 1);
    out->add("topk_values", DType::f32, p.rows, p.topk, 1);
    out->add("topk_other", DType::f32, p.rows, 1, 1);
  }
}

Ledger ledger_of(const Problem& p, const Machine& m, const Setting& s) {
  bool const bf16 = products_in_bf16(p, m), gradient = p.wants_gradient(), forward = p.call != Call::backward;
  bool const dx = gradient && wants_dx(p), dw = gradient && wants_dw(p);
  DType const operand = bf16 ? DType::bf16 : DType::f32;
  std::int64_t const op = size_of(operand);
  std::int64_t const step = bf16 ? 2 * m.k_step : m.k_step;
  std::int64_t const mr = bf16 ? m.bf16_tile_rows : m.tile_rows, nr = bf16 ? m.bf16_tile_columns : m.tile_columns;
  std::int64_t const rows = p.rows, hidden = p.hidden, vocab = p.vocab, chunk = s.chunk;
  std::int64_t const block = std::min(s.block, vocab), leaves = ceil_div(vocab, m.leaf);
  std::int64_t const hidden_k = round_up(hidden, step), chunk_k = round_up(chunk, step),
                     block_k = round_up(block, step);
  std::int64_t const row_panels = round_up(chunk, mr), hidden_panels = round_up(hidden, nr);
  bool const all_kept = forward && gradient && s.kept_blocks * s.block >= vocab;
  bool const smooth = p.wants_kappa();
  bool const full = p.wants_full();
  Ledger out;

  // A slot of each thread: 256 packed columns (of W for logits, for dX; or the scratch of the merge) and a macro tile.
  std::int64_t const leaf_bytes = round_up(std::min(vocab, m.leaf), nr) * hidden_k * op;
  std::int64_t const dx_bytes = dx ? round_up(std::min(hidden, m.leaf), nr) * block_k * op : 0;
  std::int64_t const merge_bytes = forward ? leaves * (full ? 128 : 64) * 4 : 0;
  std::int64_t const packed = round_up(std::max(leaf_bytes, dx_bytes), 64) / 4,
                     slot = std::max(packed, merge_bytes / 4);
  out.add("thread_columns", DType::f32, m.threads, slot, 1, m.threads * (slot - std::max(leaf_bytes, dx_bytes) / 4));
  std::int64_t const tile_rows = std::min(m.macro_rows, round_up(dw ? std::max(chunk, block) : chunk, mr));
  std::int64_t const tile_tail = m.leaf - std::min({m.leaf, vocab, dw ? hidden : vocab});
  out.add("thread_tile", DType::f32, m.threads, tile_rows, m.leaf, m.threads * tile_rows * tile_tail);
  out.add("thread_slots", DType::i64, m.threads, 8, 1, std::int64_t{7} * m.threads);
  if (forward) {
    out.add("leaf_m", DType::f32, leaves, chunk, 1);
    out.add("leaf_r", DType::f32, leaves, chunk, 1);
    if (smooth) out.add("leaf_k", DType::f32, leaves, chunk, 1);
    if (full)
      for (const char* name : {"leaf_n", "leaf_t", "leaf_g", "leaf_u", "leaf_c"})
        out.add(name, DType::f32, leaves, chunk, 1);
    if (full) out.add("leaf_argmax", DType::i32, leaves, chunk, 1, p.argmax ? 0 : leaves * chunk);
  }
  // Of nine numbers a row, three are merged statistics (backward takes the caller's), one of them for smoothing alone,
  // and three are coefficients of gradients.
  out.add("row_state", DType::f32, 9, chunk, 1, ((!forward ? 3 : smooth ? 0 : 1) + (gradient ? 0 : 3)) * chunk);
  if (full) out.add("row_options", DType::f32, 5, chunk, 1, 5 * chunk);
  if (gradient && p.needs_logits()) out.add("row_gradients", DType::i64, 11, chunk, 1, 11 * chunk);
  out.add("row_loss", DType::f64, chunk, 1, 1);
  add_operands(p, &out);
  if (p.distils()) {
    bool const half = teacher_in_bf16(p, m);
    std::int64_t const size = half ? 2 : 4, unit = half ? 2 * m.k_step : m.k_step,
                       deep = round_up(p.teacher_hidden, unit);
    std::int64_t const wide = half ? m.bf16_tile_columns : m.tile_columns, high = half ? m.bf16_tile_rows : m.tile_rows;
    out.add("teacher_panels", half ? DType::bf16 : DType::f32, round_up(chunk, high), deep, 1);
    out.add("thread_teacher", DType::f32, m.threads,
            round_up(round_up(std::min(vocab, m.leaf), wide) * deep * size, 64) / 4, 1);
    out.add("thread_teacher_tile", DType::f32, m.threads, tile_rows, m.leaf, m.threads * tile_rows * tile_tail);
    if (p.teacher_bias != DType::none) out.add("teacher_bias", DType::f32, vocab, 1, 1);
  }
  if (p.pairs()) {
    // A row's numbers of both sides are ten doubles, and twelve words for the kernels.
    if (forward) out.add("leaf_pair", DType::f32, 8, leaves, chunk);
    out.add("row_pair", DType::f64, 10, chunk, 1);
    out.add("row_pair_scales", DType::f32, 12, chunk, 1);
  }
  if (p.db != DType::none) {
    out.add("db_tiles", DType::f32, ceil_div(chunk, m.macro_rows), block, 1);
    out.add("db_sum", DType::f64, vocab, 1, 1);
  }
  if (all_kept && dw) {
    // Panels of X are spent when the columns of X are packed.
    out.add("x_packed", operand, std::max(row_panels * hidden_k, hidden_panels * chunk_k), 1, 1);
  } else {
    out.add("x_panels", operand, row_panels, hidden_k, 1);
    if (dw) out.add("x_columns", operand, hidden_panels, chunk_k, 1);
  }
  if (dx) out.add("d_rows", operand, row_panels, block_k, 1, (row_panels - chunk) * block_k);
  if (dw) out.add("d_columns", operand, round_up(block, mr), chunk_k, 1, (round_up(block, mr) - block) * chunk_k);
  if (dx && p.dx != DType::f32) out.add("dx_sum", DType::f32, chunk, hidden, 1);
  if (bf16 && smooth && !p.needs_logits()) {
    if (dx) out.add("w_sum", DType::f32, hidden, 1, 1);
    if (dw) out.add("x_sum", DType::f32, hidden, 1, 1);
  }
  out.add("kept", kept_dtype(p), columns_of(p, s, s.kept_blocks) - columns_of(p, s, s.inside_blocks), chunk, 1);
  if (dw && p.dw != DType::f32 && chunks_of(p, s) > 1) out.add("dw_sum", DType::f32, vocab, hidden, 1);
  out.add("kept_target", DType::i64, rows, 1, 1);
  out.add("kept_index", DType::i64, rows, 1, 1);
  return out;
}

double flops_of(const Problem& p, const Machine& m, const Setting& s) {
  auto const vocab = static_cast<double>(p.vocab);
  double columns = p.call != Call::backward ? vocab : 0.0;
  if (p.wants_gradient()) {
    columns += static_cast<double>(recomputed_columns(p, m, s));
    columns += (wants_dx(p) ? vocab : 0.0) + (wants_dw(p) ? vocab : 0.0);
  }
  double products = static_cast<double>(p.hidden) * columns;
  if (p.distils()) {
    // A walk over both heads forward, one more for D, and JSD's own.
    bool const jsd = p.loss.distillation.divergence == contract::Divergence::jsd && p.call != Call::backward;
    products += vocab * static_cast<double>(p.teacher_hidden) *
                ((p.call != Call::backward ? 1.0 : 0.0) + (p.wants_gradient() ? 1.0 : 0.0) + (jsd ? 1.0 : 0.0));
    if (jsd) products += vocab * static_cast<double>(p.hidden);
  }
  return 2.0 * static_cast<double>(p.rows) * products;
}

double seconds_of(const Problem& p, const Machine& m, const Setting& s) {
  bool const bf16 = products_in_bf16(p, m), gradient = p.wants_gradient();
  std::int64_t const n = std::min(s.chunk, std::max<std::int64_t>(1, p.rows)), block = std::min(s.block, p.vocab);
  std::int64_t const mr = bf16 ? m.bf16_tile_rows : m.tile_rows, step = bf16 ? 2 * m.k_step : m.k_step;
  auto const rows = static_cast<double>(p.rows), hidden = static_cast<double>(p.hidden);
  auto const vocab = static_cast<double>(p.vocab), chunks = static_cast<double>(chunks_of(p, s));
  auto const blocks = static_cast<double>(ceil_div(p.vocab, s.block));
  double const hv = hidden * vocab, rv = rows * vocab, rh = rows * hidden;
  double const operand_bytes = bf16 ? 2.0 : 4.0, w_bytes = hv * static_cast<double>(size_of(p.w));
  double const product_ns = 2.0 * rows * hv / (bf16 ? m.bf16_gflops : m.f32_gflops);
  double const logits_ns = product_ns * padded_rows(p, s, mr) * padded(p.hidden, step);

  double ns = 2.0 * pack_ns * rh / m.threads, bytes = 0.0;
  if (p.call != Call::backward) {
    std::int64_t const leaves = ceil_div(p.vocab, m.leaf);
    double const groups = row_groups(m, leaves, n);
    ns += loop_ns(m, static_cast<double>(leaves) * groups,
                  logits_ns + exponential_ns * rv + pack_ns * hv * chunks * groups);
    bytes += w_bytes * chunks;
  }
  if (gradient) {
    // D of each block, from logits again or from kept exponentials (written, which reads the line first, and read).
    double const again = static_cast<double>(recomputed_columns(p, m, s)) / vocab;
    std::int64_t const leaves = ceil_div(block, m.leaf), columns = ceil_div(p.hidden, m.leaf);
    double const groups = row_groups(m, leaves, n);
    ns += loop_ns(m, static_cast<double>(leaves) * groups,
                  again * (logits_ns + exponential_ns * rv + pack_ns * hv * chunks * groups) + scatter_ns * rv);
    bytes += again * w_bytes * chunks + (1.0 - again) * rv * 3.0 * static_cast<double>(size_of(kept_dtype(p)));
    double tasks = 0.0, thread_ns = 0.0;
    if (wants_dx(p)) {
      double const dx_groups = row_groups(m, columns, n);
      tasks += static_cast<double>(columns) * dx_groups;
      thread_ns += product_ns * padded_rows(p, s, mr) + pack_ns * hv * chunks * dx_groups;
      bytes += w_bytes * chunks + 2.0 * operand_bytes * rv + 8.0 * rh * blocks;
    }
    if (wants_dw(p)) {
      tasks += static_cast<double>(columns) * row_groups(m, columns, block);
      thread_ns += product_ns * padded_rows(p, s, step);
      bytes += 2.0 * operand_bytes * rv;
      bytes += hv * (chunks > 1 ? 8.0 * chunks : static_cast<double>(size_of(p.dw)));
    }
    ns += loop_ns(m, tasks, thread_ns);
    if (m.threads > 1) ns += 2.0 * barrier_ns * blocks * chunks;
  }
  if (p.distils()) {
    double const teacher = flops_of(p, m, s) / (2.0 * rows * hidden) / vocab;
    ns += product_ns * std::max(0.0, teacher - 4.0) / m.threads + exponential_ns * 4.0 * rv / m.threads;
  }
  if (p.pairs() && !p.distils()) ns += exponential_ns * 4.0 * rv / m.threads;
  return ns * 1e-9 + bytes / (m.memory_gbytes * 1e9);
}

Ledger logits_ledger_of(const Problem& p, const Machine& m) {
  Ledger out;
  if (p.call != Call::backward) {
    std::int64_t const leaves = ceil_div(p.vocab, m.leaf);
    std::int64_t const array = round_up(leaves, 16), row = round_up(p.vocab, 16);
    std::int64_t const arrays = p.wants_full() ? 10 : 5;
    out.add("thread_leaves", DType::f32, m.threads, arrays, array,
            m.threads * (arrays * (array - leaves) + (arrays > 5 && !p.argmax ? leaves : 0)));
    if (p.dz != DType::none && p.dz != DType::f32)
      out.add("thread_row", DType::f32, m.threads, row, 1, m.threads * (row - p.vocab));
  }
  out.add("thread_slots", DType::i64, m.threads, 8, 1, std::int64_t{7} * m.threads);
  add_operands(p, &out);
  out.add("row_loss", DType::f64, p.rows, 1, 1);
  out.add("row_bad", DType::i64, p.rows, 1, 1);
  return out;
}

double logits_seconds_of(const Problem& p, const Machine& m) {
  double const rv = static_cast<double>(p.rows) * static_cast<double>(p.vocab);
  return rv * static_cast<double>(size_of(p.z) + size_of(p.dz)) / (m.memory_gbytes * 1e9) +
         exponential_ns * 1e-9 * rv / m.threads;
}

}  // namespace logitless::plan
