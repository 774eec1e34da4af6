// See gpu.hpp. Pure: a ledger to the byte, flops and a predicted time of each setting; the least time within the
// budget.
#include "plan/gpu.hpp"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "plan/setting.hpp"

namespace logitless::plan {
namespace {

using contract::Call;
using contract::DType;
using contract::Kind;
using contract::Problem;
using contract::size_of;

constexpr std::int64_t column_unit = 8;  // columns of buffers: 16 bytes of bf16
constexpr std::int64_t sum_segments = 64;
constexpr std::int64_t correction_rows = 8;  // three of bf16 add up to fp32, five are zeros: K stays a multiple of 8

bool half_products(const Problem& p) { return p.x == p.w && contract::is_half(p.x); }
bool half_teacher(const Problem& p) { return p.teacher_x == p.teacher_w && contract::is_half(p.teacher_x); }
bool wants_dx(const Problem& p) { return p.dx != DType::none; }
bool wants_dw(const Problem& p) { return p.dw != DType::none; }

struct GpuSetting {
  std::int64_t chunk, block, kept, inside;
};

class GpuPlanner {
 public:
  GpuPlanner(const Problem& p, const GpuMachine& m, const Dials& dials) : p_(p), m_(m), dials_(dials) {
    rows_ = std::max<std::int64_t>(1, p.rows);
    gathers_ = p.kind == Kind::linear && p.most_kept > 0 && p.most_kept < p.rows;
    slots_ = gathers_ ? p.most_kept : rows_;
    operand_ = half_products(p) ? p.x : DType::f32;
    exponentials_ = gpu_exponentials(p);
    own_ = m.own_product && gpu_own_product(p);
    extra_ = exponentials_ && p.loss.smoothing > 0 && wants_dw(p) ? correction_rows : 0;
    budget_ = p.budget == 0 ? std::numeric_limits<std::int64_t>::max()
                            : static_cast<std::int64_t>(std::min<std::uint64_t>(p.budget, std::uint64_t{1} << 62));
  }

  Plan make() {
    if (p_.kind == Kind::logits) return describe({rows_, p_.vocab, 0, 0});
    enumerate();
    const Candidate* best = nullptr;
    std::int64_t least = std::numeric_limits<std::int64_t>::max();
    for (Candidate const& c : candidates_) {
      least = std::min(least, c.bytes);
      if (c.bytes > budget_) continue;
      if (best == nullptr || c.seconds < best->seconds || (c.seconds == best->seconds && c.bytes < best->bytes))
        best = &c;
    }
    Plan out;
    if (best == nullptr) {
      out.problem = p_;
      out.gpu = true;
      fill_machine(&out);
      out.workspace_bytes = candidates_.empty() ? 0 : least;
      return out;
    }
    out = describe(best->setting);
    give_reasons(*best, &out.rejected);
    return out;
  }

 private:
  struct Candidate {
    GpuSetting setting;
    std::int64_t bytes;
    double seconds;
  };

  std::int64_t columns_of(const GpuSetting& s) const { return round_up(std::min(s.block, p_.vocab), column_unit); }
  std::int64_t blocks_of(const GpuSetting& s) const { return ceil_div(p_.vocab, s.block); }
  std::int64_t kept_bytes(const GpuSetting& s) const {
    return (slots_ + extra_) * columns_of(s) * (exponentials_ ? 2 : 4);
  }

  // How many of the blocks [kept - n, kept) can end where dW ends.
  bool fits_inside(const GpuSetting& s) const {
    if (s.inside == 0) return true;
    if (!wants_dw(p_) || p_.accumulate_dw || !p_.dw_contiguous || !exponentials_) return false;
    std::int64_t const row = p_.hidden * size_of(p_.dw), total = p_.vocab * row, bytes = kept_bytes(s);
    for (std::int64_t k : {s.kept - s.inside, s.kept - 1}) {
      std::int64_t const written = std::min(p_.vocab, (k + 1) * s.block) * row;
      if (written > (total - (s.kept - k) * bytes) / 16 * 16) return false;
    }
    return true;
  }

  void offer(GpuSetting s) {
    if (s.kept > blocks_of(s) || s.inside > s.kept || !fits_inside(s)) return;
    candidates_.push_back({s, ledger_of(s).bytes(), seconds_of(s)});
  }

  void enumerate() {
    std::vector<std::int64_t> blocks, chunks;
    if (dials_.block > 0) {
      blocks.push_back(std::min(dials_.block, round_up(p_.vocab, column_unit)));
    } else {
      // One block is what a kept whole takes; from 4096 columns up products run at full rate.
      blocks.push_back(round_up(p_.vocab, column_unit));
      for (std::int64_t b : {65536, 32768, 16384, 8192, 4096, 2048, 1024, 512, 256})
        if (b < p_.vocab) blocks.push_back(b);
    }
    if (dials_.chunk > 0) {
      chunks.push_back(std::min(dials_.chunk, slots_));
    } else {
      for (std::int64_t n = 1; n <= 256; n *= 2) {
        std::int64_t const c = std::min(slots_, round_up(ceil_div(slots_, n), 128));
        if (chunks.empty() || c < chunks.back()) chunks.push_back(c);
      }
    }
    bool const may_keep = p_.call == Call::forward_backward && p_.wants_gradient() && !p_.pairs();
    if (own_) {
      // The own product covers all rows at once, in whole tiles: a few more columns may fill the last round of them.
      chunks.assign(1, slots_);
      if (dials_.block <= 0)
        for (std::size_t i = 0, n = blocks.size(); i < n; ++i) {
          std::int64_t const best = fullest(blocks[i]);
          if (best != blocks[i] && best < p_.vocab) blocks.push_back(best);
        }
    }
    for (std::int64_t block : blocks)
      for (std::int64_t chunk : chunks) {
        GpuSetting s{chunk, block, 0, 0};
        std::int64_t const n = blocks_of(s);
        if (dials_.kept_blocks < 0 || !may_keep) {
          if (dials_.keep <= 0 || !may_keep) offer(s);
        } else if (dials_.kept_blocks == 0) {
          offer(s);
        }
        if (!may_keep || dials_.keep == 0 || dials_.kept_blocks == 0) continue;
        auto const wanted = [&](std::int64_t kept) {
          return dials_.kept_blocks < 0 || std::min(dials_.kept_blocks, n) == kept;
        };
        bool const in_dw = dials_.keep < 0 || dials_.keep == static_cast<int>(Keep::inside_dw),
                   in_workspace = dials_.keep < 0 || dials_.keep == static_cast<int>(Keep::workspace);
        if (in_workspace) {
          if (wanted(n)) offer({chunk, block, n, 0});
          // As many as the budget leaves room for; without one, half.
          std::int64_t kept = most_kept({chunk, block, 0, 0}, 0);
          if (dials_.kept_blocks > 0) kept = std::min(dials_.kept_blocks, n);
          if (kept > 0 && kept < n) offer({chunk, block, kept, 0});
        }
        if (in_dw) {
          // The most inside that fit beside w blocks in the workspace.
          std::int64_t const inside = most_inside({chunk, block, 0, 0});
          if (inside > 0) {
            std::int64_t const total = dials_.kept_blocks > 0 ? std::min(dials_.kept_blocks, n) : n;
            std::int64_t const here = std::min(inside, total - 1);
            if (here > 0) {
              std::int64_t const spare = most_kept({chunk, block, 0, 0}, here);
              offer({chunk, block, std::min(total, here + 1), here});
              if (spare > 1) offer({chunk, block, std::min(total, here + spare), here});
            }
          }
        }
      }
  }

  // Blocks that the budget lets the workspace keep.
  std::int64_t most_kept(const GpuSetting& s, std::int64_t inside) const {
    std::int64_t const n = blocks_of(s), bytes = kept_bytes(s);
    if (p_.budget == 0) return std::max<std::int64_t>(1, (n - inside) / 2);
    std::int64_t const rest = budget_ - ledger_of({s.chunk, s.block, 1, 0}).bytes();
    return rest < 0 ? 0 : std::min(n - inside, 1 + rest / bytes);
  }
  std::int64_t most_inside(GpuSetting s) const {
    std::int64_t low = 0, high = blocks_of(s) - 1;
    while (low < high) {
      s.inside = (low + high + 1) / 2;
      s.kept = s.inside + 1;
      if (fits_inside(s))
        low = s.inside;
      else
        high = s.inside - 1;
    }
    return low;
  }

  bool all_kept(const GpuSetting& s) const { return s.kept >= blocks_of(s) && p_.call == Call::forward_backward; }
  // D is formed from logits in some block.
  bool from_logits(const GpuSetting& s) const { return p_.wants_gradient() && !(exponentials_ && all_kept(s)); }

  std::int64_t blas_bytes() const {
    double const flops =
        2.0 * static_cast<double>(slots_) * static_cast<double>(p_.hidden) * static_cast<double>(p_.vocab);
    if (flops < 1e10) return std::int64_t{1} << 20;
    if (p_.budget != 0 && p_.budget < (std::uint64_t{256} << 20)) return std::int64_t{4} << 20;
    return std::int64_t{32} << 20;
  }

  Ledger ledger_of(const GpuSetting& s) const {
    Ledger out;
    bool const gradient = p_.wants_gradient(), dx = gradient && wants_dx(p_), dw = gradient && wants_dw(p_);
    bool const linear = p_.kind == Kind::linear;
    std::int64_t const n = slots_, columns = columns_of(s), chunk = std::min(s.chunk, n);
    out.add("scalars", DType::u8, 256, 1, 1);
    out.add("row_index", DType::i64, n, 1, 1);
    if (gathers_) out.add("row_slot", DType::i64, rows_, 1, 1);
    out.add("row_target", DType::i64, n, 1, 1);
    out.add("row_flag", DType::u8, n, 1, 1);
    out.add("row_loss", DType::f64, n, 1, 1);
    if (p_.call != Call::backward) out.add("row_statistics", DType::f32, own_ && p_.argmax ? 10 : 9, n, 1);
    if (p_.argmax) out.add("row_argmax", DType::i64, n, 1, 1);
    out.add("row_scales", DType::f32, own_ && gradient ? 7 : 4, n, 1);
    if (gradient) out.add("row_gradients", DType::i64, 11, n, 1);
    if (p_.pairs()) {
      if (p_.call != Call::backward) out.add("row_pair_sums", DType::f64, 8, n, 1);
      out.add("row_pair", DType::f64, 10, n, 1);
      out.add("row_pair_scales", DType::f32, 12, n, 1);
    }
    if (p_.loss.filter > 0) {
      out.add("filter_left", DType::i64, n, 1, 1);
      out.add("filter_variance", DType::f64, n, 1, 1);
    }
    if (p_.loss.targets == contract::Targets::topk) {
      out.add("topk_ids", DType::i64, rows_, p_.topk, 1);
      out.add("topk_values", DType::f32, rows_, p_.topk, 1);
      out.add("topk_other", DType::f32, rows_, 1, 1);
    }
    if (!linear) return out;
    if (gradient && operand_ == DType::f16) out.add("row_exponent", DType::i32, n, 1, 1);
    if (!own_ || gradient) out.add("blas", DType::u8, blas_bytes(), 1, 1);
    if (own_) {
      std::int64_t const leaves = ceil_div(std::min(s.block, p_.vocab), 256);
      if (p_.call != Call::backward) out.add("leaves", DType::f32, leaf_arrays(), leaves, n);
      if (p_.bias != DType::none) out.add("bias", DType::f32, p_.vocab, 1, 1);
      if (p_.row_temperature) out.add("row_temperature", DType::f32, n, 1, 1);
    }
    if (gathers_ || p_.x != operand_) out.add("x_rows", operand_, n, p_.hidden, 1);
    if (p_.w != operand_) out.add("w_block", operand_, columns, p_.hidden, 1);
    if (p_.distils()) {
      DType const t = half_teacher(p_) ? p_.teacher_x : DType::f32;
      if (gathers_ || p_.teacher_x != t) out.add("teacher_rows", t, n, p_.teacher_hidden, 1);
      if (p_.teacher_w != t) out.add("teacher_block", t, columns, p_.teacher_hidden, 1);
      out.add("teacher_logits", DType::f32, chunk, columns, 1);
    }
    bool const logits_in_place = !exponentials_ && all_kept(s);
    if (!logits_in_place && !own_) out.add("logits", DType::f32, chunk, columns, 1);
    // Kept exponentials are spent before D of other blocks is made: the first of them lends its place.
    bool const lent = exponentials_ && s.kept > s.inside && p_.call == Call::forward_backward;
    if (from_logits(s) && operand_ != DType::f32 && !lent) out.add("d", operand_, chunk, columns, 1);
    if (dw) out.add("x_columns", operand_, n + extra_, p_.hidden, 1);
    if (dx) out.add("dx_sum", DType::f32, n, p_.hidden, 1);
    if (dw && needs_block(s)) out.add("dw_block", DType::f32, std::min(s.block, p_.vocab), p_.hidden, 1);
    if (gradient && p_.db != DType::none) {
      out.add("db_room", DType::f32, sum_segments, columns, 1);
      out.add("db_sum", DType::f32, p_.vocab, 1, 1);
    }
    if (gradient && exponentials_ && p_.loss.smoothing > 0) {
      out.add("sum_room", DType::f32, sum_segments, p_.hidden, 1);
      if (dx) out.add("w_sum", DType::f32, p_.hidden, 1, 1);
      if (dw) out.add("x_sum", DType::f32, p_.hidden, 1, 1);
    }
    out.add("kept", exponentials_ ? DType::bf16 : DType::f32, s.kept - s.inside, slots_ + extra_, columns);
    return out;
  }

  // dW's blocks are summed in fp32 before they are rounded: several chunks, or an operand whose products cannot write
  // dW's dtype.
  bool needs_block(const GpuSetting& s) const {
    if (p_.dw == DType::f32) return false;
    return operand_ == DType::f32 || (from_logits(s) && s.chunk < slots_);
  }

  // r, u, t, g, the largest logit and its column; fewer where fewer are wanted.
  std::int64_t leaf_arrays() const {
    if (p_.wants_entropy() || p_.sum_p2 || p_.argmax) return 6;
    return p_.wants_kappa() || p_.mean_logit ? 2 : 1;
  }

  // Share of the multiprocessors that tiles of 128 x 256 keep busy.
  double busy(std::int64_t columns) const {
    std::int64_t const tiles = ceil_div(slots_, 128) * ceil_div(columns, 256);
    return static_cast<double>(tiles) / static_cast<double>(round_up(tiles, std::max(1, m_.multiprocessors)));
  }
  // The block of up to a tenth more columns that keeps most of them busy.
  std::int64_t fullest(std::int64_t block) const {
    std::int64_t best = block;
    for (std::int64_t b = block; b <= block + block / 10; b += 256)
      if (busy(b) > busy(best) + 0.005) best = b;
    return best;
  }

  double rate_of(std::int64_t columns) const {
    // Products on blocks of the vocabulary (../shared/notes_cuda.md, H200).
    double const share = columns >= 8192   ? 1.0
                         : columns >= 4096 ? 0.94
                         : columns >= 2048 ? 0.85
                         : columns >= 1024 ? 0.67
                                           : 0.4;
    return share * (operand_ == DType::f32 ? m_.f32_tflops : m_.half_tflops) * 1e12;
  }

  double flops_of(const GpuSetting& s) const {
    double const n = static_cast<double>(slots_), hidden = static_cast<double>(p_.hidden),
                 vocab = static_cast<double>(p_.vocab);
    double columns = p_.call != Call::backward ? vocab : 0.0;
    if (p_.wants_gradient()) {
      double const kept =
          p_.call == Call::forward_backward ? static_cast<double>(std::min(s.kept * s.block, p_.vocab)) : 0.0;
      columns += vocab - kept + (wants_dx(p_) ? vocab : 0.0) + (wants_dw(p_) ? vocab : 0.0);
    }
    double flops = 2.0 * n * hidden * columns;
    if (p_.distils()) {
      bool const jsd = p_.loss.distillation.divergence == contract::Divergence::jsd && p_.call != Call::backward;
      double const walks =
          (p_.call != Call::backward ? 1.0 : 0.0) + (p_.wants_gradient() ? 1.0 : 0.0) + (jsd ? 1.0 : 0.0);
      flops += 2.0 * n * vocab * (static_cast<double>(p_.teacher_hidden) * walks + (jsd ? hidden : 0.0));
    }
    return flops;
  }

  double seconds_of(const GpuSetting& s) const {
    double const n = static_cast<double>(slots_), vocab = static_cast<double>(p_.vocab),
                 hidden = static_cast<double>(p_.hidden);
    auto const blocks = static_cast<double>(blocks_of(s)),
               chunks = static_cast<double>(ceil_div(slots_, std::max<std::int64_t>(1, s.chunk)));
    double const kept = static_cast<double>(std::min(s.kept * s.block, p_.vocab)), again = vocab - kept;
    std::int64_t const rows = std::min(s.chunk, slots_);
    // Small chunks starve the machine as small blocks do.
    double const rate = rate_of(s.block) * std::min(1.0, 0.3 + 0.7 * static_cast<double>(rows) / 2048.0);
    double seconds = flops_of(s) / rate;
    if (own_) {
      // Its products run at the full rate whatever the block, but for the last round of tiles.
      double const walks = (p_.call != Call::backward ? 1.0 : 0.0) + (p_.wants_gradient() ? again / vocab : 0.0);
      double const own = 2.0 * n * hidden * vocab * walks, full = m_.half_tflops * 1e12;
      seconds = (flops_of(s) - own) / rate + own / (full * busy(std::min(s.block, p_.vocab)));
    }
    double bytes = 0.0;
    double const logits = own_ ? 0.0 : 8.0;
    if (p_.call != Call::backward) bytes += n * vocab * logits + (exponentials_ ? n * kept * 2.0 : n * kept * 4.0);
    if (p_.wants_gradient()) {
      bytes += n * again * (logits + 2.0 + 4.0) + n * kept * (exponentials_ ? 4.0 : 12.0);
      if (wants_dx(p_)) bytes += 8.0 * n * hidden * blocks;
      if (wants_dw(p_)) bytes += needs_block(s) ? vocab * hidden * 8.0 * chunks : vocab * hidden * 2.0;
    }
    seconds += bytes / (m_.memory_gbytes * 1e9);
    return seconds + blocks * chunks * 8e-6;
  }

  void fill_machine(Plan* out) const {
    out->machine.target = m_.target;
    out->machine.threads = m_.multiprocessors;
    out->machine.leaf = 256;
  }

  Plan describe(const GpuSetting& s) const {
    Plan out;
    out.problem = p_;
    out.gpu = true;
    fill_machine(&out);
    Ledger const ledger = ledger_of(s);
    out.workspace_bytes = ledger.bytes();
    if (out.workspace_bytes > budget_) return out;
    out.chunk = std::min(s.chunk, slots_);
    out.block = s.block;
    out.blocks = blocks_of(s);
    out.kept_blocks = s.kept;
    out.inside_blocks = s.inside;
    out.keep = s.kept == 0 ? Keep::none : s.inside > 0 ? Keep::inside_dw : Keep::workspace;
    out.inside_stride = s.inside > 0 ? kept_bytes(s) : 0;
    out.gathers = gathers_;
    out.slots = slots_;
    out.exponentials = exponentials_ && s.kept > 0;
    out.own_product = own_;
    out.extra_rows = extra_;
    out.operand = p_.kind == Kind::linear ? operand_ : DType::none;
    out.bf16_products = operand_ == DType::bf16;
    if (s.kept > 0) out.e_dtype = exponentials_ ? DType::bf16 : DType::f32;
    out.share = static_cast<double>(std::min(s.kept * s.block, p_.vocab)) / static_cast<double>(p_.vocab);
    out.flops = p_.kind == Kind::linear ? flops_of(s) : 0.0;
    out.predicted_seconds = p_.kind == Kind::linear
                                ? seconds_of(s)
                                : static_cast<double>(p_.rows) * static_cast<double>(p_.vocab) *
                                      static_cast<double>(size_of(p_.z) + size_of(p_.dz)) / (m_.memory_gbytes * 1e9);
    out.ledger.assign(ledger.begin(), ledger.end());
    return out;
  }

  void give_reasons(const Candidate& best, std::vector<std::string>* out) const {
    // The best of each block width and share, in a line; chunks that only cost more are not news.
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      Candidate const& c = candidates_[i];
      if (&c == &best) continue;
      if (i > 0 && candidates_[i - 1].setting.block == c.setting.block &&
          (candidates_[i - 1].setting.kept > 0) == (c.setting.kept > 0) && &candidates_[i - 1] != &best)
        continue;
      char text[200];
      double const share =
          static_cast<double>(std::min(c.setting.kept * c.setting.block, p_.vocab)) / static_cast<double>(p_.vocab);
      if (c.bytes > budget_)
        std::snprintf(text, sizeof text, "C=%lld B=%lld f=%.3g: needs %lld bytes, the budget is %lld",
                      static_cast<long long>(c.setting.chunk), static_cast<long long>(c.setting.block), share,
                      static_cast<long long>(c.bytes), static_cast<long long>(budget_));
      else
        std::snprintf(text, sizeof text, "C=%lld B=%lld f=%.3g: predicted %.4g ms, the chosen %.4g ms",
                      static_cast<long long>(c.setting.chunk), static_cast<long long>(c.setting.block), share,
                      c.seconds * 1e3, best.seconds * 1e3);
      out->emplace_back(text);
    }
  }

  const Problem& p_;
  const GpuMachine& m_;
  const Dials& dials_;
  std::int64_t rows_, slots_, extra_, budget_;
  bool gathers_, exponentials_, own_;
  DType operand_;
  std::vector<Candidate> candidates_;
};

}  // namespace

bool gpu_exponentials(const Problem& p) {
  if (p.kind != Kind::linear || !half_products(p) || p.x != DType::bf16 || !p.wants_gradient()) return false;
  return !p.restricts() && !(p.class_weight && p.loss.smoothing > 0) && !p.row_kappa() && !p.entropy_gradient &&
         p.loss.policy.entropy_coef == 0.0 && p.loss.filter == 0.0 && !p.pairs() &&
         !(p.loss.softcap > 0 && p.loss.smoothing > 0);
}

bool gpu_own_product(const Problem& p) {
  if (p.kind != Kind::linear || p.x != DType::bf16 || p.w != DType::bf16 || p.hidden % 8 != 0) return false;
  if (p.wants_gradient()) return gpu_exponentials(p);
  return !p.restricts() && !(p.class_weight && p.loss.smoothing > 0) && !p.row_kappa() && !p.pairs();
}

std::int64_t gpu_inside_offset(const Plan& plan, std::int64_t k) {
  std::int64_t const total = plan.problem.vocab * plan.problem.hidden * size_of(plan.problem.dw);
  return (total - (plan.kept_blocks - k) * plan.inside_stride) / 16 * 16;
}

Plan make_gpu_plan(const Problem& problem, const GpuMachine& machine, const Dials& dials) {
  return GpuPlanner(problem, machine, dials).make();
}

}  // namespace logitless::plan
