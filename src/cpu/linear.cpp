// Linear cross-entropy on the CPU: X [R,H], W [V,H], y [R] -> loss, dX [R,H], dW [V,H]; D and the logits exist only as
// macro tiles of 96 x 256 fp32 in the L2 cache and as one vocabulary block of C x B operands.
//
// For each chunk of C kept rows: pass 1 walks leaves of 256 columns (a task packs W's leaf and multiplies all rows by
// it), leaving (m, r, k) of each leaf and, where the plan pays, exponentials. O(C) arithmetic makes losses and
// coefficients. Pass 2 walks blocks of B columns: D of the block from kept exponentials or multiplied out again, then
// dX += D W and dW = D^T X. Tasks never share an output element, so bits do not depend on the number of threads.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/row_options.hpp"
#include "plan/setting.hpp"

namespace logitless::cpu {
namespace {

using contract::Call;
using contract::DType;
using contract::size_of;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Beyond this many nats above a row's first leaf its kept bf16 exponentials are made again from the row's maximum:
// e^40 = 2^58 leaves fp32 sums far from overflow.
constexpr float repair_above = 40.0F;
// fp16 keeps 2^15 exp(z - m_leaf): its subnormals then reach 2^-39 of the leaf's largest.
constexpr float f16_scale = 32768.0F;

// The ledger gives them ten words of f64, twelve of f32 and eleven of i64.
static_assert(sizeof(PairOutcome) == 10 * sizeof(double) && sizeof(PairRow) == 12 * sizeof(float) &&
              sizeof(GradientRow) == 11 * sizeof(std::int64_t));

class LinearRun {
 public:
  LinearRun(const plan::Plan& plan, const Target& target, Executor& executor, const Operands& operands, char* workspace)
      : plan_(plan),
        p_(plan.problem),
        rows_(target.rows),
        product_(plan.bf16_products ? target.bf16 : target.f32),
        target_(target),
        executor_(executor),
        o_(operands),
        workspace_(workspace),
        options_(plan.problem, operands, target.rows,
                 {buffer<float>("bias"), buffer<float>("class_weight"), buffer<float>("teacher_bias"),
                  buffer<std::int64_t>("topk_ids"), buffer<float>("topk_values"), buffer<float>("topk_other")}) {
    macro_rows_ = plan.machine.macro_rows;
    leaves_ = ceil_div(p_.vocab, leaf_columns);
    hidden_steps_ = ceil_div(p_.hidden, product_.ks);
    thread_columns_ = buffer<char>("thread_columns");
    thread_tile_ = buffer<float>("thread_tile");
    column_bytes_ = plan.find("thread_columns")->shape[1] * 4;
    tile_floats_ = plan.find("thread_tile")->shape[1] * leaf_columns;
    flags_ = reinterpret_cast<std::atomic<std::int64_t>*>(buffer<char>("thread_slots"));
    leaf_ = {buffer<float>("leaf_m"), buffer<float>("leaf_r"), buffer<float>("leaf_k"), buffer<float>("leaf_n"),
             buffer<float>("leaf_t"), buffer<float>("leaf_g"), buffer<float>("leaf_u"), buffer<float>("leaf_c")};
    leaf_argmax_ = buffer<std::int32_t>("leaf_argmax");
    auto* state = buffer<float>("row_state");
    float** const arrays[] = {&row_.m, &row_.r, &row_.k, &z_y_, &reference_, &scale_, &c_, &at_target_, &bad_};
    for (float** a : arrays) {
      *a = state;
      state += plan.chunk;
    }
    if (auto* more = buffer<float>("row_options"); more != nullptr)
      for (float** a : {&row_.n, &row_.t, &row_.g, &row_.u, &row_.c}) {
        *a = more;
        more += plan.chunk;
      }
    gradients_ = reinterpret_cast<GradientRow*>(buffer<char>("row_gradients"));
    if (p_.distils()) {
      bool const bf16 = plan::teacher_in_bf16(p_, plan.machine);
      teacher_ = bf16 ? &target.bf16 : &target.f32;
      teacher_steps_ = ceil_div(p_.teacher_hidden, teacher_->ks);
      teacher_panels_ = buffer<char>("teacher_panels");
      teacher_columns_ = buffer<char>("thread_teacher");
      teacher_column_bytes_ = plan.find("thread_teacher")->shape[1] * 4;
      teacher_tile_ = buffer<float>("thread_teacher_tile");
      teacher_bias_ = buffer<float>("teacher_bias");
    }
    if (p_.pairs()) {
      leaf_pair_ = buffer<float>("leaf_pair");
      pairs_ = reinterpret_cast<PairOutcome*>(buffer<char>("row_pair"));
      pair_rows_ = reinterpret_cast<PairRow*>(buffer<char>("row_pair_scales"));
    }
    db_tiles_ = buffer<float>("db_tiles");
    db_sum_ = buffer<double>("db_sum");
    loss_ = buffer<double>("row_loss");
    x_panels_ = plan.find("x_packed") != nullptr ? buffer<char>("x_packed") : buffer<char>("x_panels");
    x_columns_ = plan.find("x_columns") != nullptr ? buffer<char>("x_columns") : buffer<char>("x_packed");
    d_rows_ = buffer<char>("d_rows");
    d_columns_ = buffer<char>("d_columns");
    dx_sum_ = buffer<float>("dx_sum");
    dw_sum_ = buffer<float>("dw_sum");
    w_sum_ = buffer<float>("w_sum");
    x_sum_ = buffer<float>("x_sum");
    kept_ = buffer<char>("kept");
    index_ = buffer<std::int64_t>("kept_index");
    y_ = buffer<std::int64_t>("kept_target");
  }

  std::string run(Outcome* outcome, int* status) {
    std::int64_t kept = 0;
    if (std::string error = check_rows(p_, o_, &kept, &reducer_, status); !error.empty()) return error;
    if (std::string error = options_.prepare(); !error.empty()) {
      *status = status_target;
      return error;
    }
    free_slots(flags_, plan_.machine.threads);
    std::int64_t const gathered = gather_rows();
    if (plan_.saved_leaves > 0 && gathered > 0) {
      saved_ = static_cast<char*>(o_.saved.data);
      stored_ = gathered;
      SavedHead const want = saved_head();
      SavedHead have = want;
      if (p_.call == Call::backward) std::memcpy(&have, saved_, sizeof have);
      if (!(have == want)) {
        *status = status_invalid;
        return "saved: holds " + std::to_string(have.rows) + " rows and " + std::to_string(have.leaves) +
               " leaves; must be what forward wrote for the same targets, row weights and size (" +
               std::to_string(want.rows) + " rows, " + std::to_string(want.leaves) + " leaves)";
      }
    }
    bad_rows_ = correct_rows_ = 0;
    if (db_sum_ != nullptr) std::fill(db_sum_, db_sum_ + p_.vocab, 0.0);
    if (smoothing_corrections() && wants_dx() && live_ > 0) sum_weight_rows();
    for (row0_ = 0; row0_ < gathered; row0_ += plan_.chunk) {
      n_ = stored_ = std::min(plan_.chunk, gathered - row0_);
      run_chunk();
    }
    if (live_ == 0 && wants_dw() && !p_.accumulate_dw) zero_weight_gradient();
    if (dw_sum_ != nullptr && live_ > 0) finish_weight_gradient();
    if (db_sum_ != nullptr) finish_bias_gradient();
    outcome->kept = kept;
    outcome->bad = bad_rows_;
    outcome->correct = correct_rows_;
    filter_.report(outcome);
    outcome->loss = reduced_loss(p_, reducer_, total_);
    return {};
  }

 private:
  template <class T>
  T* buffer(const char* name) const {
    plan::Buffer const* b = plan_.find(name);
    return b == nullptr ? nullptr : reinterpret_cast<T*>(workspace_ + b->offset);
  }

  // Kept rows in the order in which they are computed: those without any gradient, by their weight of 0, come last, and
  // are left out where nothing of them is written. Returns how many there are; the first live_ have a gradient.
  std::int64_t gather_rows() {
    std::int64_t at = 0;
    auto gather = [&](bool silent) {
      for (std::int64_t i = 0; i < p_.rows; ++i) {
        std::int64_t const y = target_or_none(o_, i);
        if (y == p_.loss.ignore_index && o_.targets) {
          if (!silent) ignore_row(i);
          continue;
        }
        if (options_.silent(i) != silent) continue;
        if (silent) zero_hidden_gradient(i);
        if (silent && !options_.writes_rows()) continue;
        index_[at] = i;
        y_[at++] = options_.has_target() ? y - p_.first_column : -1;
      }
    };
    gather(false);
    live_ = at;
    if (o_.row_weight) gather(true);
    return at;
  }

  bool wants_dx() const { return p_.dx != DType::none; }
  bool wants_dw() const { return p_.dw != DType::none; }
  bool smooth() const { return p_.loss.smoothing > 0; }
  bool any_bf16() const { return plan_.bf16_products || teacher_ == &target_.bf16; }
  // Products take exponentials as they are; what belongs to a row is applied to their results.
  bool raw() const { return plan_.bf16_products && !options_.needs_logits(); }
  // They carry c * kappa as corrections of rank one, in fp32.
  bool smoothing_corrections() const { return raw() && smooth() && p_.wants_gradient(); }
  std::int64_t chunk_steps() const { return ceil_div(n_, product_.ks); }
  std::int64_t first_column(std::int64_t block) const { return block * plan_.block; }
  std::int64_t columns_of(std::int64_t block) const { return std::min(plan_.block, p_.vocab - first_column(block)); }

  static Source source_of(const View& v, const std::int64_t* index) {
    std::int64_t const size = size_of(v.dtype);
    return {static_cast<const char*>(v.data), v.dtype, v.row_stride * size, v.col_stride * size, index};
  }
  Source x_source() const { return source_of(o_.x, index_ + row0_); }
  Source w_source() const { return source_of(o_.w, nullptr); }
  Source teacher_x_source() const { return source_of(o_.teacher_x, index_ + row0_); }
  Source teacher_w_source() const { return source_of(o_.teacher_w, nullptr); }

  // Scratch of the thread that runs a task, and the products' per-thread state, for the task's duration.
  struct Scratch {
    Scratch(const LinearRun& run, bool multiplies)
        : slot(run.flags_, run.plan_.machine.threads),
          columns(run.thread_columns_ + slot.index() * run.column_bytes_),
          tile(run.thread_tile_ + slot.index() * run.tile_floats_),
          teacher_columns(run.teacher_ != nullptr ? run.teacher_columns_ + slot.index() * run.teacher_column_bytes_
                                                  : nullptr),
          teacher_tile(run.teacher_ != nullptr ? run.teacher_tile_ + slot.index() * run.tile_floats_ : nullptr),
          leave(multiplies && run.any_bf16() ? run.target_.leave : nullptr) {
      if (multiplies && run.any_bf16() && run.target_.enter != nullptr) run.target_.enter();
    }
    ~Scratch() {
      if (leave != nullptr) leave();
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    Slot slot;
    char* columns;
    float* tile;
    char* teacher_columns;  // and its logits of the same rows and classes; nothing where there is no teacher
    float* teacher_tile;
    void (*leave)();
  };

  // Where a leaf keeps its exponentials [n, its columns]; null: it does not. Leaf after leaf: a macro tile's rows are
  // adjacent, so that storing it walks few pages.
  char* kept_leaf(std::int64_t leaf) const {
    std::int64_t const j0 = leaf * leaf_columns, column_bytes = stored_ * size_of(plan_.e_dtype);
    if (saved_ != nullptr) return leaf < plan_.saved_leaves ? saved_ + plan_.saved_head + j0 * column_bytes : nullptr;
    std::int64_t const block = j0 / plan_.block, b0 = first_column(block);
    if (block >= plan_.kept_blocks) return nullptr;
    if (block < plan_.inside_blocks)
      return static_cast<char*>(o_.dw.data) + b0 * plan_.inside_stride + (j0 - b0) * column_bytes;
    return kept_ + (j0 - first_column(plan_.inside_blocks)) * column_bytes;
  }
  bool keeps() const { return plan_.keep != plan::Keep::none || saved_ != nullptr; }

  // The head of the caller's buffer: which rows and leaves it holds, then the references of its exponentials.
  struct SavedHead {
    std::int64_t rows, leaves, first_row, last_row, dtype;
    bool operator==(const SavedHead&) const = default;
  };
  SavedHead saved_head() const {
    return {stored_, plan_.saved_leaves, stored_ > 0 ? index_[0] : -1, stored_ > 0 ? index_[stored_ - 1] : -1,
            static_cast<std::int64_t>(plan_.e_dtype)};
  }
  float* saved_references() const { return reinterpret_cast<float*>(saved_ + 64); }
  void write_saved() {
    SavedHead const head = saved_head();
    std::memcpy(saved_, &head, sizeof head);
    if (options_.needs_logits()) return;
    if (raw())
      std::copy(reference_, reference_ + n_, saved_references());
    else
      for (std::int64_t leaf = 0; leaf < plan_.saved_leaves; ++leaf)
        std::copy(leaf_.m + leaf * plan_.chunk, leaf_.m + leaf * plan_.chunk + n_, saved_references() + leaf * n_);
  }

  void run_chunk() {
    pack_rows();
    if (p_.call != Call::backward) {
      bool const referenced = raw() && keeps();
      // Kept bf16 exponentials need their row's reference first: the maximum of its first leaf.
      if (referenced) walk(0, 1, false);
      walk(referenced ? 1 : 0, leaves_, false);
      merge_leaves();
      if (referenced && find_overflows()) walk(0, leaves_, true);
      if (p_.pairs()) finish_pairs();
      if (saved_ != nullptr) write_saved();
    }
    finish_rows();
    n_ = std::clamp<std::int64_t>(live_ - row0_, 0, stored_);
    if (!p_.wants_gradient() || n_ == 0) return;
    if (wants_dw()) pack_columns();
    for (std::int64_t block = 0; block < plan_.blocks; ++block) {
      make_d(block);
      if (db_sum_ != nullptr) sum_bias_gradient(block);
      multiply_block(block);
    }
    if (wants_dx()) finish_hidden_gradient();
  }

  void pack_rows() {
    std::int64_t const groups = ceil_div(n_, macro_rows_);
    parallel(executor_, groups, [&](std::int64_t g) {
      std::int64_t const r0 = g * macro_rows_, rows = std::min(macro_rows_, n_ - r0);
      product_.pack_a(x_source(), r0, rows, 0, p_.hidden, x_panels_ + panel_offset(r0, hidden_steps_));
      if (p_.distils())
        teacher_->pack_a(teacher_x_source(), r0, rows, 0, p_.teacher_hidden,
                         teacher_panels_ + panel_offset(r0, teacher_steps_));
    });
  }
  // Byte offset of row r0 (a multiple of mr) in panels of A with `steps` steps.
  std::int64_t panel_offset(std::int64_t r0, std::int64_t steps) const { return r0 * steps * segment_bytes; }

  // Splits rows into groups of whole macro tiles so that `columns` tasks become at least four a thread.
  std::int64_t rows_per_task(std::int64_t columns, std::int64_t rows) const {
    std::int64_t const tiles = ceil_div(rows, macro_rows_);
    std::int64_t const wanted = ceil_div(std::int64_t{4} * executor_.threads(), std::max<std::int64_t>(1, columns));
    std::int64_t const groups = std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(1, tiles));
    return ceil_div(tiles, groups) * macro_rows_;
  }

  // Calls before(r, rows), and tile(r, rows) with the logits of rows [r, r + rows) x the leaf in s.tile, for rows [r0,
  // r1) of the chunk.
  template <class Before, class Tile>
  void leaf_logits(Scratch& s, std::int64_t leaf, std::int64_t r0, std::int64_t r1, Before before, Tile tile) {
    std::int64_t const j0 = leaf * leaf_columns, columns = std::min(leaf_columns, p_.vocab - j0);
    product_.pack_b_rows(w_source(), j0, columns, p_.hidden, s.columns);
    if (p_.distils()) teacher_->pack_b_rows(teacher_w_source(), j0, columns, p_.teacher_hidden, s.teacher_columns);
    for (std::int64_t r = r0; r < r1; r += macro_rows_) {
      std::int64_t const rows = std::min(macro_rows_, r1 - r);
      before(r, rows);
      product_.multiply(x_panels_ + panel_offset(r, hidden_steps_), s.columns, hidden_steps_, rows, columns, s.tile);
      if (p_.distils()) {
        teacher_->multiply(teacher_panels_ + panel_offset(r, teacher_steps_), s.teacher_columns, teacher_steps_, rows,
                           columns, s.teacher_tile);
        if (teacher_bias_ != nullptr)
          for (std::int64_t i = 0; i < rows; ++i)
            rows_.transform(s.teacher_tile + i * leaf_columns, columns, {teacher_bias_ + j0, 1.0F, 0.0F, 0.0F, 1.0F});
      }
      tile(r, rows);
    }
  }

  // Pass 1 over leaves [begin, end). repair: only stores the exponentials of rows that find_overflows marked.
  void walk(std::int64_t begin, std::int64_t end, bool repair) {
    std::int64_t const per_task = rows_per_task(end - begin, n_), groups = ceil_div(n_, per_task);
    parallel(executor_, (end - begin) * groups, [&](std::int64_t task) {
      std::int64_t const leaf = begin + task / groups, r0 = task % groups * per_task;
      std::int64_t const j0 = leaf * leaf_columns, columns = std::min(leaf_columns, p_.vocab - j0);
      char* const e = kept_leaf(leaf);
      if (repair && e == nullptr) return;
      Scratch s(*this, true);
      std::int64_t const e_size = size_of(plan_.e_dtype);
      // The lines that exponentials will fill are fetched while their logits are multiplied out.
      auto fetch = [&](std::int64_t r, std::int64_t rows) {
        if (e == nullptr) return;
        for (std::int64_t i = r; i < r + rows; ++i)
          for (std::int64_t at = 0; at < columns * e_size; at += 64)
            __builtin_prefetch(e + i * columns * e_size + at, 1, 2);
      };
      leaf_logits(s, leaf, r0, std::min(n_, r0 + per_task), fetch, [&](std::int64_t r, std::int64_t rows) {
        for (std::int64_t i = r; i < r + rows; ++i) {
          if (repair && !marked(i)) continue;
          float* const z = s.tile + (i - r) * leaf_columns;
          std::int64_t const y = y_[row0_ + i] - j0;
          bool const mine = y >= 0 && y < columns;
          char* const out = e != nullptr ? e + i * columns * e_size : nullptr;
          if (options_.shapes()) options_.shape(z, columns, j0, index_[row0_ + i], mine ? y : -1);
          if (out != nullptr && options_.needs_logits()) rows_.store(z, columns, 1.0F, out, plan_.e_dtype);
          if (p_.pairs()) {
            float buffer[leaf_columns];
            PairNumbers const pair =
                rows_.pair_leaf(z, teacher_row(s, i, r, j0, columns, buffer), columns, inverse_tau());
            float const values[8] = {pair.ms, pair.ss, pair.ts, pair.cs, pair.mt, pair.st, pair.tt, pair.ct};
            for (int n = 0; n < 8; ++n) *pair_entry(n, leaf, i) = values[n];
          }
          float const m =
              repair ? rows_.leaf(z, columns, mine ? y : -1, false).m : take_leaf(z, columns, mine ? y : -1, leaf, i);
          if (out != nullptr && !options_.needs_logits())
            rows_.store(z, columns, store_factor(m, reference_[i]), out, plan_.e_dtype);
        }
      });
    });
  }

  // z becomes exponentials; their statistics go to the leaf's arrays. Returns the leaf's reference.
  float take_leaf(float* z, std::int64_t columns, std::int64_t y, std::int64_t leaf, std::int64_t i) {
    std::int64_t const at = leaf * plan_.chunk + i;
    if (options_.full()) {
      float buffer[leaf_columns], bits[leaf_columns];
      const float* const kept = options_.kept(bits, columns, leaf * leaf_columns, index_[row0_ + i], y);
      const float* const kappa =
          options_.weighs() ? options_.kappa(buffer, columns, leaf * leaf_columns, index_[row0_ + i]) : nullptr;
      LeafNumbers const v = rows_.leaf_full(z, columns, y, options_.wants(kappa, kept));
      leaf_.m[at] = v.m;
      leaf_.r[at] = v.r;
      for (auto const& [array, value] :
           {std::pair{leaf_.k, v.k}, {leaf_.n, v.n}, {leaf_.t, v.t}, {leaf_.g, v.g}, {leaf_.u, v.u}, {leaf_.c, v.c}})
        if (array != nullptr) array[at] = value;
      if (leaf_argmax_ != nullptr) leaf_argmax_[at] = v.argmax;
      if (y >= 0) z_y_[i] = v.z_y;
    } else {
      LeafResult const v = rows_.leaf(z, columns, y, smooth());
      leaf_.m[at] = v.m;
      leaf_.r[at] = v.r;
      if (smooth()) leaf_.k[at] = v.k;
      if (y >= 0) z_y_[i] = v.z_y;
    }
    float const m = leaf_.m[at];
    if (leaf == 0) reference_[i] = std::isfinite(m) ? m : 0.0F;
    return m;
  }

  // The teacher's logits of the chunk's row i for a leaf: of its head's tile, whose first row is r, or in `buffer`.
  const float* teacher_row(const Scratch& s, std::int64_t i, std::int64_t r, std::int64_t j0, std::int64_t columns,
                           float* buffer) const {
    if (teacher_ != nullptr) return s.teacher_tile + (i - r) * leaf_columns;
    options_.teacher_logits(buffer, columns, j0, index_[row0_ + i]);
    return buffer;
  }
  float inverse_tau() const { return static_cast<float>(1.0 / p_.loss.distillation.tau); }
  float* pair_entry(std::int64_t number, std::int64_t leaf, std::int64_t i) const {
    return leaf_pair_ + (number * leaves_ + leaf) * plan_.chunk + i;
  }

  // Merges both heads' statistics, leaf after leaf in double; JSD walks once more with both log-sums known.
  void finish_pairs() {
    constexpr std::int64_t group = 64;
    bool const jsd = p_.loss.distillation.divergence == contract::Divergence::jsd;
    parallel(executor_, ceil_div(n_, group), [&](std::int64_t g) {
      for (std::int64_t i = g * group; i < std::min(n_, (g + 1) * group); ++i) {
        auto sum = contract::PairStatistics<double>::identity();
        for (std::int64_t leaf = 0; leaf < leaves_; ++leaf) {
          auto const at = [&](int number) { return static_cast<double>(*pair_entry(number, leaf, i)); };
          sum = contract::merge(
              sum, contract::PairStatistics<double>{at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)});
        }
        PairOutcome& out = pairs_[i];
        out = options_.rows().pair_outcome(sum);
        if (jsd) pair_rows_[i] = options_.rows().pair_row(index_[row0_ + i], out, reducer_);  // for the walk below
      }
    });
    if (!jsd) return;
    std::int64_t const per_task = rows_per_task(leaves_, n_), groups = ceil_div(n_, per_task);
    parallel(executor_, leaves_ * groups, [&](std::int64_t task) {
      std::int64_t const leaf = task / groups, r0 = task % groups * per_task, j0 = leaf * leaf_columns;
      std::int64_t const columns = std::min(leaf_columns, p_.vocab - j0);
      Scratch s(*this, true);
      leaf_logits(
          s, leaf, r0, std::min(n_, r0 + per_task), [](std::int64_t, std::int64_t) {},
          [&](std::int64_t r, std::int64_t rows) {
            for (std::int64_t i = r; i < r + rows; ++i) {
              float* const z = s.tile + (i - r) * leaf_columns;
              if (options_.shapes()) options_.shape(z, columns, j0, index_[row0_ + i], -1);
              rows_.pair_mixture(z, s.teacher_tile + (i - r) * leaf_columns, columns, pair_rows_[i],
                                 pair_entry(0, leaf, i), pair_entry(1, leaf, i));
            }
          });
    });
    for (std::int64_t i = 0; i < n_; ++i) {
      for (std::int64_t leaf = 0; leaf < leaves_; ++leaf) {
        pairs_[i].p_mixed += static_cast<double>(*pair_entry(0, leaf, i));
        pairs_[i].q_mixed += static_cast<double>(*pair_entry(1, leaf, i));
      }
      pairs_[i].k = pairs_[i].p_mixed;
    }
  }

  // Kept exponentials: bf16 ones that products take as they are refer to their row, others to their leaf.
  float store_factor(float leaf_m, float reference) const {
    if (raw()) return std::exp(std::min(leaf_m - reference, 80.0F));
    return plan_.e_dtype == DType::f16 ? f16_scale : 1.0F;
  }

  void merge_leaves() {
    constexpr std::int64_t group = 64;
    parallel(executor_, ceil_div(n_, group), [&](std::int64_t g) {
      Scratch s(*this, false);
      rows_.merge_rows(leaf_, leaves_, plan_.chunk, p_.vocab, g * group, std::min(n_, (g + 1) * group), row_,
                       reinterpret_cast<float*>(s.columns));
    });
  }

  bool marked(std::int64_t i) const { return bad_[i] != 0.0F; }
  // Rows whose later leaves stand too far above their reference get their maximum as reference.
  bool find_overflows() {
    bool any = false;
    for (std::int64_t i = 0; i < n_; ++i) {
      bad_[i] = row_.m[i] - reference_[i] > repair_above && std::isfinite(row_.m[i]) ? 1.0F : 0.0F;
      if (!marked(i)) continue;
      reference_[i] = row_.m[i];
      any = true;
    }
    return any;
  }

  // The row's largest logit: the first leaf that has it knows where.
  std::int64_t argmax_of(std::int64_t i) const {
    for (std::int64_t leaf = 0; leaf < leaves_; ++leaf)
      if (leaf_.m[leaf * plan_.chunk + i] == row_.m[i])
        return leaf * leaf_columns + leaf_argmax_[leaf * plan_.chunk + i];
    return -1;
  }

  RowNumbers numbers_of(std::int64_t i) const {
    if (p_.call == Call::backward) return options_.rows().saved(index_[row0_ + i]);
    auto const at = [&](const float* array) { return array != nullptr ? array[i] : 0.0F; };
    RowNumbers out;
    out.m = row_.m[i];
    out.r = row_.r[i];
    out.k = smooth() || options_.weighs() ? row_.k[i] : 0.0F;
    out.n = options_.full() ? at(row_.n) : static_cast<float>(p_.vocab);
    out.t = at(row_.t);
    out.g = at(row_.g);
    out.u = at(row_.u);
    out.c = at(row_.c);
    std::int64_t const y = y_[row0_ + i];
    out.z_y = options_.has_target() && y >= 0 && y < p_.vocab ? z_y_[i] : -INFINITY;
    if (leaf_argmax_ != nullptr) out.argmax = argmax_of(i);
    return out;
  }

  // Losses, outputs and coefficients of the chunk's rows, in double. The losses are summed in row order over all
  // chunks, so that the sum's bits do not depend on C.
  void finish_rows() {
    constexpr std::int64_t group = 512;
    bool const gradient = p_.wants_gradient();
    parallel(executor_, ceil_div(n_, group), [&](std::int64_t g) {
      for (std::int64_t i = g * group; i < std::min(n_, (g + 1) * group); ++i) {
        std::int64_t const row = index_[row0_ + i];
        RowNumbers const numbers = numbers_of(i);
        if (p_.pairs() && p_.call == Call::backward) pairs_[i] = options_.rows().saved_pair(row);
        RowOutcome const out = options_.rows().finish(row, y_[row0_ + i] + p_.first_column, numbers, reducer_, gradient,
                                                      p_.pairs() ? pairs_ + i : nullptr);
        if (p_.pairs()) pair_rows_[i] = options_.rows().pair_row(row, pairs_[i], reducer_);
        auto const& result = out.result;
        loss_[i] = out.loss;
        bad_[i] = result.bad && !(p_.is_part() && p_.call == Call::forward) ? 1.0F : 0.0F;
        if (leaf_argmax_ != nullptr) leaf_argmax_[i] = out.correct ? 1 : 0;  // of leaf 0, read already
        if (!gradient) continue;
        if (p_.call == Call::backward) reference_[i] = std::isfinite(numbers.m) ? numbers.m : 0.0F;
        if (p_.call == Call::backward && saved_ != nullptr && raw()) reference_[i] = saved_references()[i];
        row_.m[i] = static_cast<float>(result.m);
        c_[i] = static_cast<float>(out.d.c);
        double scale = out.d.a * result.inv_s, at_target = out.d.at_target;
        if (raw()) {
          // E refers to reference_: what every row of E, its target's entry too, is multiplied by.
          if (!keeps()) reference_[i] = row_.m[i];
          scale *= std::exp(static_cast<double>(reference_[i]) - result.m);
          at_target = scale != 0.0 ? at_target / scale : 0.0;
        }
        scale_[i] = result.bad ? 0.0F : static_cast<float>(scale);
        at_target_[i] = result.bad ? 0.0F : static_cast<float>(at_target);
        if (result.bad) c_[i] = 0.0F;
        if (options_.needs_logits()) gradients_[i] = options_.rows().gradient_row(row, out);
      }
    });
    bad_in_chunk_ = false;
    for (std::int64_t i = 0; i < n_; ++i) {
      total_ += loss_[i];
      if (leaf_argmax_ != nullptr) correct_rows_ += leaf_argmax_[i];
      if (!marked(i)) continue;
      ++bad_rows_;
      bad_in_chunk_ = true;
    }
  }

  // X as the operand of D^T X: columns of 256, scaled per row for bf16 products.
  void pack_columns() {
    std::int64_t const groups = ceil_div(p_.hidden, leaf_columns);
    parallel(executor_, groups, [&](std::int64_t g) {
      std::int64_t const h0 = g * leaf_columns, columns = std::min(leaf_columns, p_.hidden - h0);
      product_.pack_b_cols(x_source(), 0, n_, h0, columns, raw() ? scale_ : nullptr, bad_in_chunk_ ? bad_ : nullptr,
                           x_columns_ + h0 * chunk_steps() * segment_bytes);
      if (!smoothing_corrections()) return;
      std::fill(x_sum_ + h0, x_sum_ + h0 + columns, 0.0F);
      for (std::int64_t i = 0; i < n_; ++i)
        if (!marked(i)) add_row(x_source(), i, h0, columns, c_[i], x_sum_ + h0);
    });
  }

  // acc[0, n) += factor * row i of src from column c0.
  void add_row(const Source& src, std::int64_t i, std::int64_t c0, std::int64_t n, float factor, float* acc) const {
    const char* p = src.row(i) + c0 * src.col_stride;
    if (src.col_stride == size_of(src.dtype)) return rows_.add_source(acc, p, src.dtype, n, factor);
    for (std::int64_t j = 0; j < n; ++j) rows_.add_source(acc + j, p + j * src.col_stride, src.dtype, 1, factor);
  }

  void sum_weight_rows() {
    parallel(executor_, ceil_div(p_.hidden, leaf_columns), [&](std::int64_t g) {
      std::int64_t const h0 = g * leaf_columns, columns = std::min(leaf_columns, p_.hidden - h0);
      std::fill(w_sum_ + h0, w_sum_ + h0 + columns, 0.0F);
      const float* const kappa = options_.class_weights();
      for (std::int64_t j = 0; j < p_.vocab; ++j)
        add_row(w_source(), j, h0, columns, kappa != nullptr ? kappa[j] : 1.0F, w_sum_ + h0);
    });
  }

  // D of a block as operand panels of D (for dX) and of its transpose (for dW).
  void make_d(std::int64_t block) {
    std::int64_t const b0 = first_column(block), width = columns_of(block);
    std::int64_t const leaves = ceil_div(width, leaf_columns), block_steps = ceil_div(width, product_.ks);
    std::int64_t const e_size = size_of(plan_.e_dtype);
    std::int64_t const per_task = rows_per_task(leaves, n_), groups = ceil_div(n_, per_task);
    bool const raw = this->raw(), again = options_.needs_logits();
    parallel(executor_, leaves * groups, [&](std::int64_t task) {
      std::int64_t const j = task / groups * leaf_columns, columns = std::min(leaf_columns, width - j);
      std::int64_t const r0 = task % groups * per_task, r1 = std::min(n_, r0 + per_task);
      std::int64_t const leaf = (b0 + j) / leaf_columns;
      const char* const e = kept_leaf(leaf);
      const float* const leaf_m = p_.call == Call::backward
                                      ? (saved_ != nullptr ? saved_references() + leaf * stored_ : nullptr)
                                      : leaf_.m + leaf * plan_.chunk;
      Scratch s(*this, e == nullptr);
      auto finish_tile = [&](std::int64_t r, std::int64_t rows) {
        for (std::int64_t i = r; i < r + rows; ++i) {
          float* const d = s.tile + (i - r) * leaf_columns;
          if (marked(i)) {
            std::fill(d, d + columns, 0.0F);  // a row without a distribution leaves no trace in dW
            continue;
          }
          std::int64_t const y = y_[row0_ + i] - b0 - j;
          bool const mine = y >= 0 && y < columns;
          const char* const kept = e != nullptr ? e + i * columns * e_size : nullptr;
          if (e == nullptr && options_.shapes()) options_.shape(d, columns, b0 + j, index_[row0_ + i], mine ? y : -1);
          if (again) {
            if (e != nullptr) std::memcpy(d, kept, static_cast<std::size_t>(columns) * sizeof(float));
            float z[leaf_columns], buffer[leaf_columns];
            if (p_.pairs()) std::memcpy(z, d, static_cast<std::size_t>(columns) * sizeof(float));
            make_row_from_logits(d, columns, b0 + j, i, mine ? y : -1);
            if (p_.pairs() && pair_rows_[i].g != 0.0F)
              rows_.pair_gradient(z, teacher_row(s, i, r, b0 + j, columns, buffer), columns, pair_rows_[i], d);
            continue;
          }
          const float* const kappa = !raw && smooth() ? options_.class_weights() : nullptr;
          float const c = raw || kappa != nullptr ? 0.0F : c_[i];
          if (e == nullptr) {
            rows_.recompute(d, columns, raw ? reference_[i] : row_.m[i], raw ? 1.0F : scale_[i], c);
          } else {
            float scale = 1.0F;
            if (!raw) {
              scale = scale_[i] * std::exp(leaf_m[i] - row_.m[i]);
              if (plan_.e_dtype == DType::f16) scale /= f16_scale;
            }
            rows_.decode(kept, plan_.e_dtype, columns, scale, c, d);
          }
          if (kappa != nullptr) rows_.accumulate(d, kappa + b0 + j, columns, -c_[i], true);
          if (mine) d[y] = at_target_[i] - (kappa != nullptr ? c_[i] * kappa[b0 + j + y] : c);
        }
        if (db_tiles_ != nullptr) {
          float* const sum = db_tiles_ + r / macro_rows_ * plan_.block + j;
          for (std::int64_t i = r; i < r + rows; ++i)
            rows_.accumulate(sum, s.tile + (i - r) * leaf_columns, columns, raw ? scale_[i] : 1.0F, i > r);
        }
        product_.scatter(s.tile, rows, columns, r, j, block_steps, chunk_steps(), wants_dx() ? d_rows_ : nullptr,
                         wants_dw() ? d_columns_ : nullptr);
      };
      if (e == nullptr) {
        leaf_logits(s, leaf, r0, r1, [](std::int64_t, std::int64_t) {}, finish_tile);
      } else {
        for (std::int64_t r = r0; r < r1; r += macro_rows_) finish_tile(r, std::min(macro_rows_, r1 - r));
      }
    });
  }

  // z [columns] of the chunk's row i becomes D.
  void make_row_from_logits(float* z, std::int64_t columns, std::int64_t j0, std::int64_t i, std::int64_t y) {
    float buffer[leaf_columns];
    std::int64_t const row = index_[row0_ + i];
    GradientRow by = gradients_[i];
    by.kappa = options_.gradient_kappa(buffer, columns, j0, row, y);
    by.column0 = p_.first_column + j0;
    by.target = y;
    double variance = 0.0;
    std::int64_t const left = rows_.gradient(z, columns, by, &variance);
    if (by.filter > 0.0F) filter_.add(columns, left, variance);
  }

  // The block's columns of db: tiles of rows in order, so that bits do not depend on threads.
  void sum_bias_gradient(std::int64_t block) {
    std::int64_t const b0 = first_column(block), width = columns_of(block), tiles = ceil_div(n_, macro_rows_);
    double c_sum = 0.0;
    if (smoothing_corrections())
      for (std::int64_t i = 0; i < n_; ++i) c_sum += static_cast<double>(c_[i]);
    const float* const kappa = options_.class_weights();
    parallel(executor_, ceil_div(width, leaf_columns), [&](std::int64_t g) {
      for (std::int64_t j = g * leaf_columns; j < std::min(width, (g + 1) * leaf_columns); ++j) {
        double sum = c_sum == 0.0 ? 0.0 : -c_sum * (kappa != nullptr ? static_cast<double>(kappa[b0 + j]) : 1.0);
        for (std::int64_t t = 0; t < tiles; ++t) sum += static_cast<double>(db_tiles_[t * plan_.block + j]);
        db_sum_[b0 + j] += sum;
      }
    });
  }
  void finish_bias_gradient() {
    for (std::int64_t j = 0; j < p_.vocab; ++j) {
      auto const value = static_cast<float>(db_sum_[j]);
      rows_.store(&value, 1, 1.0F, row_of(o_.db, j), p_.db);
    }
  }

  // dX += D W and dW = D^T X of a block: tasks over 256 hidden columns and groups of rows.
  void multiply_block(std::int64_t block) {
    std::int64_t const b0 = first_column(block), width = columns_of(block);
    std::int64_t const column_groups = ceil_div(p_.hidden, leaf_columns);
    std::int64_t const dx_rows = rows_per_task(column_groups, n_), dw_rows = rows_per_task(column_groups, width);
    std::int64_t const dx_groups = wants_dx() ? ceil_div(n_, dx_rows) : 0;
    std::int64_t const dw_groups = wants_dw() ? ceil_div(width, dw_rows) : 0;
    std::int64_t const dx_tasks = column_groups * dx_groups;
    parallel(executor_, dx_tasks + column_groups * dw_groups, [&](std::int64_t task) {
      Scratch s(*this, true);
      if (task < dx_tasks) {
        std::int64_t const h0 = task / dx_groups * leaf_columns, r0 = task % dx_groups * dx_rows;
        add_hidden_gradient(s, b0, width, h0, r0, std::min(n_, r0 + dx_rows));
      } else {
        std::int64_t const t = task - dx_tasks, h0 = t / dw_groups * leaf_columns, j0 = t % dw_groups * dw_rows;
        put_weight_gradient(s, b0, h0, j0, std::min(width, j0 + dw_rows));
      }
    });
  }

  // D operands times B: most of a filtered D is 0.
  auto multiply_d() const { return p_.loss.filter > 0.0 ? product_.multiply_sparse : product_.multiply; }

  bool dx_direct() const { return dx_sum_ == nullptr; }
  float* dx_row(std::int64_t i) const {
    return dx_direct() ? reinterpret_cast<float*>(row_of(o_.dx, index_[row0_ + i])) : dx_sum_ + i * p_.hidden;
  }

  void add_hidden_gradient(Scratch& s, std::int64_t b0, std::int64_t width, std::int64_t h0, std::int64_t r0,
                           std::int64_t r1) {
    std::int64_t const columns = std::min(leaf_columns, p_.hidden - h0), steps = ceil_div(width, product_.ks);
    bool const add = b0 > 0 || (dx_direct() && p_.accumulate_dx);
    product_.pack_b_cols(w_source(), b0, width, h0, columns, nullptr, nullptr, s.columns);
    for (std::int64_t r = r0; r < r1; r += macro_rows_) {
      std::int64_t const rows = std::min(macro_rows_, r1 - r);
      multiply_d()(d_rows_ + panel_offset(r, steps), s.columns, steps, rows, columns, s.tile);
      for (std::int64_t i = r; i < r + rows; ++i)
        rows_.accumulate(dx_row(i) + h0, s.tile + (i - r) * leaf_columns, columns, raw() ? scale_[i] : 1.0F, add);
    }
  }

  // Rows [j0, j1) of the block. Outputs are written once, from fp32, unless chunks are summed.
  void put_weight_gradient(Scratch& s, std::int64_t b0, std::int64_t h0, std::int64_t j0, std::int64_t j1) {
    std::int64_t const columns = std::min(leaf_columns, p_.hidden - h0), steps = chunk_steps();
    bool const first = row0_ == 0;
    for (std::int64_t j = j0; j < j1; j += macro_rows_) {
      std::int64_t const rows = std::min(macro_rows_, j1 - j);
      multiply_d()(d_columns_ + panel_offset(j, steps), x_columns_ + h0 * steps * segment_bytes, steps, rows, columns,
                   s.tile);
      for (std::int64_t i = 0; i < rows; ++i) {
        std::int64_t const row = b0 + j + i;
        const float* const from = s.tile + i * leaf_columns;
        const float* const minus = smoothing_corrections() ? x_sum_ + h0 : nullptr;
        float const kappa = options_.class_weights() != nullptr ? options_.class_weights()[row] : 1.0F;
        if (dw_sum_ != nullptr)
          rows_.write(dw_sum_ + row * p_.hidden + h0, DType::f32, from, columns, !first, kappa, minus);
        else
          rows_.write(row_of(o_.dw, row) + h0 * size_of(p_.dw), p_.dw, from, columns, p_.accumulate_dw || !first, kappa,
                      minus);
      }
    }
  }

  void finish_hidden_gradient() {
    constexpr std::int64_t group = 16;
    parallel(executor_, ceil_div(n_, group), [&](std::int64_t g) {
      for (std::int64_t i = g * group; i < std::min(n_, (g + 1) * group); ++i) {
        char* const out = row_of(o_.dx, index_[row0_ + i]);
        const float* const minus = smoothing_corrections() ? w_sum_ : nullptr;
        if (marked(i)) std::fill(dx_row(i), dx_row(i) + p_.hidden, std::nanf(""));
        if (!dx_direct())
          rows_.write(out, p_.dx, dx_row(i), p_.hidden, p_.accumulate_dx, c_[i], minus);
        else if (minus != nullptr)
          rows_.write(out, DType::f32, dx_row(i), p_.hidden, false, c_[i], minus);
      }
    });
  }

  void ignore_row(std::int64_t i) {
    if (p_.call != Call::backward) row::put_ignored(o_, i);
    zero_hidden_gradient(i);
  }
  void zero_hidden_gradient(std::int64_t i) {
    if (wants_dx() && !p_.accumulate_dx)
      std::memset(row_of(o_.dx, i), 0, static_cast<std::size_t>(p_.hidden * size_of(p_.dx)));
  }

  void zero_weight_gradient() {
    for (std::int64_t j = 0; j < p_.vocab; ++j)
      std::memset(row_of(o_.dw, j), 0, static_cast<std::size_t>(p_.hidden * size_of(p_.dw)));
  }

  void finish_weight_gradient() {
    constexpr std::int64_t group = 64;
    parallel(executor_, ceil_div(p_.vocab, group), [&](std::int64_t g) {
      for (std::int64_t j = g * group; j < std::min(p_.vocab, (g + 1) * group); ++j)
        rows_.write(row_of(o_.dw, j), p_.dw, dw_sum_ + j * p_.hidden, p_.hidden, p_.accumulate_dw, 0.0F, nullptr);
    });
  }

  const plan::Plan& plan_;
  const contract::Problem& p_;
  const RowKernels& rows_;
  const ProductKernels& product_;
  const Target& target_;
  Executor& executor_;
  const Operands& o_;
  char* workspace_;
  Reducer reducer_;
  std::int64_t macro_rows_ = 0, leaves_ = 0, hidden_steps_ = 0, column_bytes_ = 0, tile_floats_ = 0;
  std::int64_t row0_ = 0, n_ = 0;  // the chunk: kept rows [row0, row0 + n); in pass 2 those that have a gradient
  std::int64_t stored_ = 0;        // n of pass 1: exponentials lie in columns of so many
  std::int64_t live_ = 0;          // rows that have a gradient, of all
  std::int64_t bad_rows_ = 0, correct_rows_ = 0;
  FilterTally filter_;
  bool bad_in_chunk_ = false;
  double total_ = 0.0;
  char *thread_columns_ = nullptr, *x_panels_ = nullptr, *x_columns_ = nullptr, *d_rows_ = nullptr,
       *d_columns_ = nullptr;
  char* kept_ = nullptr;
  char* saved_ = nullptr;  // the caller's
  float* thread_tile_ = nullptr;
  LeafArrays leaf_{}, row_{};  // of leaves [leaves][C], merged [C]; row_.m becomes the reference of pass 2
  std::int32_t* leaf_argmax_ = nullptr;
  float *z_y_ = nullptr, *reference_ = nullptr;
  GradientRow* gradients_ = nullptr;  // where D is formed from logits
  const ProductKernels* teacher_ = nullptr;
  std::int64_t teacher_steps_ = 0, teacher_column_bytes_ = 0;
  char *teacher_panels_ = nullptr, *teacher_columns_ = nullptr;
  float *teacher_tile_ = nullptr, *teacher_bias_ = nullptr, *leaf_pair_ = nullptr;
  PairOutcome* pairs_ = nullptr;
  PairRow* pair_rows_ = nullptr;
  float* db_tiles_ = nullptr;
  double* db_sum_ = nullptr;
  float *scale_ = nullptr, *c_ = nullptr, *at_target_ = nullptr, *bad_ = nullptr;
  float *dx_sum_ = nullptr, *dw_sum_ = nullptr, *w_sum_ = nullptr, *x_sum_ = nullptr;
  double* loss_ = nullptr;
  std::int64_t *index_ = nullptr, *y_ = nullptr;
  std::atomic<std::int64_t>* flags_ = nullptr;
  RowOptions options_;
};

}  // namespace

std::string run_linear(const plan::Plan& plan, const Target& target, Executor& executor, const Operands& operands,
                       char* workspace, Outcome* outcome, int* status) {
  if (plan.problem.rows > 0 && plan.problem.call == Call::backward && !operands.stats) {
    *status = status_invalid;
    return "stats: needed by backward of kind linear (shape [R,4], written by forward)";
  }
  return LinearRun(plan, target, executor, operands, workspace).run(outcome, status);
}

}  // namespace logitless::cpu
