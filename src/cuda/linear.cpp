// Linear cross-entropy on a CUDA device: X [R,H], W [V,H], y [R] -> loss, dX [R,H], dW [V,H]. Everything is enqueued on
// the caller's stream, in an order that the plan alone decides, so that a call can be captured into a graph.
//
// Pass 1, block after block of the vocabulary: logits of C rows (a product), their statistics, and what the plan keeps.
// O(R) arithmetic on the device. Pass 2: of kept exponentials, dX = diag(scale) (E W) and dW = E^T (diag(scale) X); of
// other blocks D from logits, kept or multiplied out again, then dX += D W and dW = D^T X.
#include <algorithm>
#include <functional>

#include "cuda/device.hpp"
#include "cuda/kernels/kernels.hpp"

namespace logitless::cuda {
namespace {

using contract::Call;
using contract::DType;
using contract::size_of;

std::int64_t round_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b * b; }

// Every product of a plan for operands without gaps.
void each_product(const plan::Plan& plan, const std::function<void(const Product&)>& visit) {
  contract::Problem const& p = plan.problem;
  std::int64_t const n = plan.slots, ld = round_up(std::min(plan.block, p.vocab), 8);
  auto const chunks = {std::min(plan.chunk, n), n - (n - 1) / plan.chunk * plan.chunk};
  auto const widths = {plan.columns_of(0), plan.columns_of(plan.blocks - 1)};
  bool const all_exponentials = plan.exponentials && plan.kept_blocks == plan.blocks;
  for (std::int64_t const width : widths) {
    for (std::int64_t const rows : chunks) {
      if (!plan.own_product)
        visit({Form::logits, rows, width, p.hidden, p.hidden, p.hidden, ld, plan.operand, DType::f32});
      if (!p.wants_gradient() || all_exponentials) continue;
      if (p.dx != DType::none)
        visit({Form::hidden, rows, p.hidden, width, ld, p.hidden, p.hidden, plan.operand, DType::f32});
      if (p.dw != DType::none)
        visit({Form::weight, width, p.hidden, rows, ld, p.hidden, p.hidden, plan.operand,
               plan.find("dw_block") != nullptr ? DType::f32 : p.dw});
    }
    if (!plan.exponentials) continue;
    if (p.dx != DType::none)
      visit({Form::hidden, n, p.hidden, width, ld, p.hidden, p.hidden, plan.operand, DType::f32});
    if (p.dw != DType::none)
      visit({Form::weight, width, p.hidden, n + plan.extra_rows, ld, p.hidden, p.hidden, plan.operand,
             plan.find("dw_block") != nullptr ? DType::f32 : p.dw});
  }
}

// A matrix as products read it.
struct Matrix {
  char* data;
  std::int64_t stride;  // elements between rows
};

class LinearRun {
 public:
  // What the own product's variants are made for: which pointers are null is all that matters.
  static FirstProduct shape_of(const plan::Plan& plan, Store store, bool finds_reference) {
    static float some = 0.0F;
    static std::int32_t place = 0;
    contract::Problem const& p = plan.problem;
    FirstProduct out;
    out.rows = plan.slots;
    out.columns = std::min(finds_reference ? std::int64_t{first_product_leaf} : plan.block, p.vocab);
    out.hidden = out.ldx = out.ldw = p.hidden;
    out.ldout = round_up(out.columns, 8);
    out.store = store;
    describe_transform(p, &some, &some, &out);
    if (finds_reference) {
      out.leaf_m = &some;
      return out;
    }
    out.reference = out.row_scale = out.row_shift = out.at_target = out.z_y = &some;
    if (store != Store::gradient) {
      out.r = &some;
      if (p.wants_kappa() || p.mean_logit) out.u = &some;
      if (p.wants_entropy()) out.t = &some;
      if (p.sum_p2) out.g = &some;
      if (p.argmax) out.leaf_max = &some, out.leaf_argmax = &place;
    }
    return out;
  }

  static void describe_transform(const contract::Problem& p, const float* bias, const float* row_temperature,
                                 FirstProduct* out) {
    out->bias = p.bias != DType::none ? bias : nullptr;
    out->row_temperature = p.row_temperature ? row_temperature : nullptr;
    out->scale = static_cast<float>(p.loss.logit_scale);
    out->softcap = static_cast<float>(p.loss.softcap);
    out->temperature = static_cast<float>(p.loss.temperature);
  }

  LinearRun(Prepared& prepared, const Operands& o, const ResultViews& results, char* workspace, cudaStream_t stream)
      : prepared_(prepared),
        plan_(prepared.plan),
        p_(plan_.problem),
        o_(o),
        results_(results),
        workspace_(workspace),
        stream_(stream),
        products_(*prepared.products),
        n_(p_.rows == 0 ? 0 : plan_.slots),
        ld_(round_up(std::min(plan_.block, p_.vocab), 8)),
        operand_(plan_.operand) {
    scalars_ = at<Scalars>("scalars");
    call_ = {p_,
             o_,
             {at<std::int64_t>("topk_ids"), at<float>("topk_values"), at<float>("topk_other")},
             scalars_,
             prepared.device.status};
    rows_ = row_arrays(plan_, workspace_, n_);
    logits_ = at<float>("logits");
    teacher_logits_ = at<float>("teacher_logits");
    dx_sum_ = at<float>("dx_sum");
    dw_block_ = at<float>("dw_block");
  }

  static Rows row_arrays(const plan::Plan& plan, char* workspace, std::int64_t n) {
    auto buffer = [&](const char* name) {
      plan::Buffer const* const b = plan.find(name);
      return b == nullptr ? nullptr : workspace + b->offset;
    };
    Rows rows{};
    rows.slots = n;
    rows.index = reinterpret_cast<std::int64_t*>(buffer("row_index"));
    rows.slot_of = reinterpret_cast<std::int64_t*>(buffer("row_slot"));
    rows.target = reinterpret_cast<std::int64_t*>(buffer("row_target"));
    rows.flag = reinterpret_cast<std::uint8_t*>(buffer("row_flag"));
    rows.loss = reinterpret_cast<double*>(buffer("row_loss"));
    if (auto* a = reinterpret_cast<float*>(buffer("row_statistics")); a != nullptr)
      for (float** array : {&rows.m, &rows.r, &rows.k, &rows.n, &rows.t, &rows.g, &rows.u, &rows.c, &rows.z_y}) {
        *array = a;
        a += plan.slots;
      }
    if (auto* a = reinterpret_cast<float*>(buffer("row_scales")); a != nullptr) {
      for (float** array : {&rows.reference, &rows.scale, &rows.shift, &rows.at_target}) {
        *array = a;
        a += plan.slots;
      }
      if (plan.own_product && plan.problem.wants_gradient())
        for (float** array : {&rows.d_reference, &rows.d_scale, &rows.d_at_target}) {
          *array = a;
          a += plan.slots;
        }
    }
    rows.argmax = reinterpret_cast<std::int64_t*>(buffer("row_argmax"));
    rows.gradient = reinterpret_cast<row::GradientRow*>(buffer("row_gradients"));
    rows.pair_sums = reinterpret_cast<contract::PairStatistics<double>*>(buffer("row_pair_sums"));
    rows.pair = reinterpret_cast<row::PairOutcome*>(buffer("row_pair"));
    rows.pair_row = reinterpret_cast<row::PairRow*>(buffer("row_pair_scales"));
    rows.exponent = reinterpret_cast<std::int32_t*>(buffer("row_exponent"));
    rows.filter_left = reinterpret_cast<std::int64_t*>(buffer("filter_left"));
    rows.filter_variance = reinterpret_cast<double*>(buffer("filter_variance"));
    return rows;
  }

  std::string run(int* status) {
    if (std::string error = check(); !error.empty()) {
      *status = status_invalid;
      return error;
    }
    prepare_rows(call_, rows_, stream_);
    if (p_.loss.targets == contract::Targets::topk)
      prepare_topk(call_, at<std::int64_t>("topk_ids"), at<float>("topk_values"), at<float>("topk_other"), rows_,
                   stream_);
    x_ = operand_of(o_.x, "x_rows", operand_);
    if (p_.distils()) teacher_x_ = operand_of(o_.teacher_x, "teacher_rows", teacher_operand());
    if (plan_.own_product) prepare_own();
    if (p_.call != Call::backward) {
      if (plan_.own_product)
        walk_own();
      else
        walk_forward();
      if (p_.pairs()) finish_both();
    }
    bool const gradient = p_.wants_gradient();
    finish_rows(call_, rows_, {gradient, plan_.exponentials, operand_ == DType::f16}, stream_);
    reduce(false);
    if (gradient) {
      if (n_ == 0)
        zero_gradients();
      else
        walk_back();
      if (p_.loss.filter > 0) reduce(true);
    }
    if (!error_.empty()) *status = status_internal;
    return error_;
  }

 private:
  template <class T>
  T* at(const char* name) const {
    plan::Buffer const* const b = plan_.find(name);
    return b == nullptr ? nullptr : reinterpret_cast<T*>(workspace_ + b->offset);
  }

  static bool adjacent(const View& v) {
    return (v.col_stride == 1 || v.cols <= 1) && (v.row_stride >= v.cols || v.rows <= 1);
  }
  static std::string layout_error(const char* name, const View& v) {
    return std::string(name) + ": strides [" + std::to_string(v.row_stride) + "," + std::to_string(v.col_stride) +
           "]; this plan's products read it in place: columns must be adjacent and rows apart (make it contiguous)";
  }
  // What the copy engine can read.
  static bool in_boxes(const View& v) {
    return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 && (v.rows <= 1 || v.row_stride % 8 == 0);
  }
  static std::string alignment_error(const char* name, const View& v) {
    return std::string(name) + ": strides [" + std::to_string(v.row_stride) + "," + std::to_string(v.col_stride) +
           "] at an address of " + std::to_string(reinterpret_cast<std::uintptr_t>(v.data) % 16) +
           " modulo 16; this plan's product needs rows aligned to 16 bytes (make it contiguous)";
  }
  std::string check() const {
    if (p_.rows > 0 && p_.call == Call::backward && !o_.stats)
      return "stats: needed by backward of kind linear (shape [R," + std::to_string(p_.statistics()) +
             "], written by forward)";
    if (p_.rows == 0) return {};
    if (plan_.own_product) {
      if (plan_.find("x_rows") == nullptr && !in_boxes(o_.x)) return alignment_error("hidden", o_.x);
      if (!in_boxes(o_.w)) return alignment_error("weight", o_.w);
    }
    if (plan_.find("x_rows") == nullptr && !adjacent(o_.x)) return layout_error("hidden", o_.x);
    if (plan_.find("w_block") == nullptr && !adjacent(o_.w)) return layout_error("weight", o_.w);
    if (p_.distils()) {
      if (plan_.find("teacher_rows") == nullptr && !adjacent(o_.teacher_x))
        return layout_error("teacher_hidden", o_.teacher_x);
      if (plan_.find("teacher_block") == nullptr && !adjacent(o_.teacher_w))
        return layout_error("teacher_weight", o_.teacher_w);
    }
    if (o_.dw && o_.dw.rows > 1 && o_.dw.row_stride < p_.hidden)
      return "grad_weight: row stride " + std::to_string(o_.dw.row_stride) + "; must be at least " +
             std::to_string(p_.hidden) + ", as products write it";
    if (plan_.inside_blocks > 0 && reinterpret_cast<std::uintptr_t>(o_.dw.data) % 16 != 0)
      return "grad_weight: its data must be aligned to 16 bytes where the plan keeps exponentials in it";
    return {};
  }

  void note(std::string error) {
    if (error_.empty()) error_ = std::move(error);
  }
  bool wants_dx() const { return p_.dx != DType::none; }
  bool wants_dw() const { return p_.dw != DType::none; }
  DType teacher_operand() const {
    return p_.teacher_x == p_.teacher_w && contract::is_half(p_.teacher_x) ? p_.teacher_x : DType::f32;
  }
  void reduce(bool filtered) {
    reduce_rows(call_, rows_,
                {results_.loss.data, results_.loss.dtype, results_.kept, results_.bad, results_.correct,
                 results_.filter_kept, results_.filter_variance},
                filtered, stream_);
  }

  // X as products read it: the caller's, or gathered and converted.
  Matrix operand_of(const View& x, const char* name, DType dtype) {
    if (char* const gathered = at<char>(name); gathered != nullptr) {
      gather_rows(x, rows_, gathered, dtype, x.cols, stream_);
      return {gathered, x.cols};
    }
    return {static_cast<char*>(x.data), x.rows <= 1 ? x.cols : x.row_stride};
  }
  // A block of W.
  Matrix weight_of(const View& w, const char* name, DType dtype, std::int64_t block) {
    std::int64_t const first = block * plan_.block;
    if (char* const room = at<char>(name); room != nullptr) {
      convert_rows(w, first, plan_.columns_of(block), room, dtype, w.cols, stream_);
      return {room, w.cols};
    }
    std::int64_t const stride = w.rows <= 1 ? w.cols : w.row_stride;
    return {static_cast<char*>(w.data) + first * stride * size_of(dtype), stride};
  }
  Matrix weight_block(std::int64_t block) { return weight_of(o_.w, "w_block", operand_, block); }

  void multiply(Form form, std::int64_t m, std::int64_t n, std::int64_t k, Matrix a, Matrix b, Matrix c, DType operand,
                DType out, const float* alpha, const float* beta) {
    if (!error_.empty()) return;
    note(products_.launch({form, m, n, k, a.stride, b.stride, c.stride, operand, out}, a.data, b.data, c.data, alpha,
                          beta, at<char>("blas"), stream_));
  }
  const float* zero() const { return &scalars_->zero; }
  const float* one() const { return &scalars_->one; }
  static char* bytes(const void* p) { return static_cast<char*>(const_cast<void*>(p)); }

  // z [rows, columns of the block] of slots from c0 to `to`.
  void multiply_logits(std::int64_t block, Matrix w, std::int64_t c0, std::int64_t rows, float* to) {
    multiply(Form::logits, rows, plan_.columns_of(block), p_.hidden,
             {x_.data + c0 * x_.stride * size_of(operand_), x_.stride}, w, {bytes(to), ld_}, operand_, DType::f32,
             one(), zero());
  }
  void multiply_teacher(std::int64_t block, Matrix w, std::int64_t c0, std::int64_t rows) {
    DType const t = teacher_operand();
    multiply(Form::logits, rows, plan_.columns_of(block), p_.teacher_hidden,
             {teacher_x_.data + c0 * teacher_x_.stride * size_of(t), teacher_x_.stride}, w,
             {bytes(teacher_logits_), ld_}, t, DType::f32, one(), zero());
  }
  Block block_of(std::int64_t block, std::int64_t c0, std::int64_t rows, const float* z, bool shaped) const {
    return {c0,
            rows,
            block * plan_.block,
            plan_.columns_of(block),
            z,
            DType::f32,
            ld_,
            false,
            shaped,
            p_.distils() ? teacher_logits_ : nullptr,
            ld_};
  }

  // Where a kept block lies: exponentials of all slots, or their logits.
  char* kept(std::int64_t block) const {
    std::int64_t const size = plan_.exponentials ? 2 : 4;
    if (block >= plan_.kept_blocks - plan_.inside_blocks)
      return static_cast<char*>(o_.dw.data) + plan::gpu_inside_offset(plan_, block);
    return at<char>("kept") + block * (plan_.slots + plan_.extra_rows) * ld_ * size;
  }
  bool keeps(std::int64_t block) const { return block < plan_.kept_blocks; }
  bool shapes() const { return p_.transforms() || p_.restricts(); }

  template <class Body>
  void each_chunk(Body body) {
    for (std::int64_t c0 = 0; c0 < n_; c0 += plan_.chunk) body(c0, std::min(plan_.chunk, n_ - c0));
  }

  void walk_forward() {
    if (n_ == 0) return;
    for (std::int64_t block = 0; block < plan_.blocks; ++block) {
      Matrix const w = weight_block(block);
      Matrix const teacher =
          p_.distils() ? weight_of(o_.teacher_w, "teacher_block", teacher_operand(), block) : Matrix{};
      each_chunk([&](std::int64_t c0, std::int64_t rows) {
        bool const stays = keeps(block), logits_stay = stays && !plan_.exponentials;
        float* const z = logits_stay ? reinterpret_cast<float*>(kept(block)) + c0 * ld_ : logits_;
        multiply_logits(block, w, c0, rows, z);
        if (p_.distils()) multiply_teacher(block, teacher, c0, rows);
        Block const b = block_of(block, c0, rows, z, false);
        Exponentials const e{stays && !logits_stay ? kept(block) + c0 * ld_ * 2 : nullptr, ld_};
        row_statistics(call_, rows_, b, block == 0, logits_stay && shapes(), e, stream_);
        if (p_.pairs()) pair_statistics(call_, rows_, b, block == 0, stream_);
      });
    }
    repair_kept();
  }

  // Bias and temperatures as the own product reads them.
  void prepare_own() {
    if (p_.bias != DType::none) {
      View const flat{o_.bias.data, o_.bias.dtype, 1, p_.vocab, 0, o_.bias.row_stride};
      convert_rows(flat, 0, 1, at<float>("bias"), DType::f32, p_.vocab, stream_);
    }
    if (p_.row_temperature) gather_floats(o_.row_temperature, rows_, 1.0F, at<float>("row_temperature"), stream_);
  }

  FirstProduct own_product(std::int64_t block, Matrix w) const {
    FirstProduct out;
    out.x = x_.data;
    out.ldx = x_.stride;
    out.w = w.data;
    out.ldw = w.stride;
    out.rows = n_;
    out.columns = plan_.columns_of(block);
    out.hidden = p_.hidden;
    out.target = rows_.target;
    out.target_from = block * plan_.block;
    const float* const bias = at<float>("bias");
    describe_transform(p_, bias == nullptr ? nullptr : bias + block * plan_.block, at<float>("row_temperature"), &out);
    return out;
  }
  void launch_own(const FirstProductPlan& plan, const FirstProduct& product) {
    if (!error_.empty()) return;
    if (const char* const wrong = launch_first_product(plan, product, stream_); wrong != nullptr) note(wrong);
  }

  void walk_own() {
    if (n_ == 0) return;
    auto* const leaves = at<float>("leaves");
    FirstProduct first = own_product(0, weight_block(0));
    first.columns = std::min(first.columns, std::int64_t{first_product_leaf});
    first.target = nullptr;
    first.leaf_m = rows_.reference;
    launch_own(prepared_.reference, first);
    for (std::int64_t block = 0; block < plan_.blocks; ++block) {
      FirstProduct product = own_product(block, weight_block(block));
      std::int64_t const count = (product.columns + first_product_leaf - 1) / first_product_leaf, size = count * n_;
      product.reference = rows_.reference;
      product.z_y = rows_.z_y;
      product.r = leaves;
      if (p_.wants_kappa() || p_.mean_logit) product.u = leaves + size;
      if (p_.wants_entropy()) product.t = leaves + 2 * size;
      if (p_.sum_p2) product.g = leaves + 3 * size;
      if (p_.argmax) {
        product.leaf_max = leaves + 4 * size;
        product.leaf_argmax = reinterpret_cast<std::int32_t*>(leaves + 5 * size);
      }
      bool const stays = keeps(block);
      if (stays) {
        product.store = Store::exponentials;
        product.out = kept(block);
        product.ldout = ld_;
      }
      launch_own(stays ? prepared_.exponentials : prepared_.statistics, product);
      merge_leaf_statistics(call_, rows_,
                            {product.r, product.u, product.t, product.g, product.leaf_max, product.leaf_argmax,
                             p_.argmax ? rows_.z_y + plan_.slots : nullptr, count, n_},
                            block * plan_.block, product.columns, block == 0, stream_);
    }
    Matrix const w = weight_block(0);
    settle_statistics(call_, rows_, {x_.data, x_.stride}, {w.data, w.stride}, stream_);
    repair_kept();
  }

  // D of a block, multiplied out again.
  void own_gradient(std::int64_t block, Matrix w, Matrix d) {
    FirstProduct product = own_product(block, w);
    product.store = Store::gradient;
    product.out = d.data;
    product.ldout = d.stride;
    product.reference = rows_.d_reference;
    product.row_scale = rows_.d_scale;
    product.row_shift = rows_.shift;
    product.at_target = rows_.d_at_target;
    product.dead = rows_.flag;
    launch_own(prepared_.gradient, product);
  }

  void repair_kept() {
    if (!plan_.exponentials) return;
    Dense const x{x_.data, x_.stride};
    for (std::int64_t block = 0; block < plan_.kept_blocks; ++block) {
      Matrix const w = weight_block(block);
      repair_exponentials(call_, rows_, x, {w.data, w.stride}, block * plan_.block, plan_.columns_of(block),
                          kept(block), ld_, stream_);
      if (plan_.extra_rows > 0)
        ones_rows(kept(block) + n_ * ld_ * 2, plan_.columns_of(block), ld_, plan_.extra_rows, stream_);
    }
  }

  void finish_both() {
    finish_pairs(call_, rows_, stream_);
    if (p_.loss.distillation.divergence != contract::Divergence::jsd || !p_.distils() || n_ == 0) return;
    for (std::int64_t block = 0; block < plan_.blocks; ++block) {
      Matrix const w = weight_block(block),
                   teacher = weight_of(o_.teacher_w, "teacher_block", teacher_operand(), block);
      each_chunk([&](std::int64_t c0, std::int64_t rows) {
        multiply_logits(block, w, c0, rows, logits_);
        multiply_teacher(block, teacher, c0, rows);
        pair_mixture(call_, rows_, block_of(block, c0, rows, logits_, false), block == 0, stream_);
      });
    }
  }

  // The operand of dW [slots + extra, H].
  Matrix columns(bool by_scale) {
    char* const room = at<char>("x_columns");
    column_operand(o_.x, rows_, scalars_, by_scale, operand_ == DType::f16, room, operand_, p_.hidden, stream_);
    if (by_scale && plan_.extra_rows > 0) {
      auto* const x_sum = at<float>("x_sum");
      sum_rows(o_.x, rows_.index, rows_.flag, rows_.shift, n_, at<float>("sum_room"), x_sum, stream_);
      split_row(x_sum, p_.hidden, room + n_ * p_.hidden * 2, p_.hidden, plan_.extra_rows, stream_);
    }
    return {room, p_.hidden};
  }

  void walk_back() {
    std::int64_t const from_e = plan_.exponentials ? plan_.kept_blocks : 0;
    bool const corrects = from_e > 0 && p_.loss.smoothing > 0;
    const float* w_sum = nullptr;
    if (from_e > 0) {
      Matrix const x = wants_dw() ? columns(true) : Matrix{};
      if (corrects && wants_dx()) {
        View covered = o_.w;
        covered.rows = std::min(from_e * plan_.block, p_.vocab);
        sum_rows(covered, nullptr, nullptr, nullptr, covered.rows, at<float>("sum_room"), at<float>("w_sum"), stream_);
        w_sum = at<float>("w_sum");
      }
      for (std::int64_t block = 0; block < from_e; ++block) spend_exponentials(block, x);
    }
    if (from_e < plan_.blocks) {
      if (from_e > 0 && wants_dx()) scale_rows(rows_, dx_sum_, p_.hidden, stream_);
      Matrix const x = wants_dw() ? columns(false) : Matrix{};
      for (std::int64_t block = from_e; block < plan_.blocks; ++block) spend_logits(block, x);
    }
    if (wants_dx())
      write_hidden_gradient(call_, rows_, dx_sum_, from_e == plan_.blocks, operand_ == DType::f16, w_sum, stream_);
    if (o_.db) write_rows(at<float>("db_sum"), p_.vocab, 1, p_.vocab, o_.db.data, p_.db, p_.vocab, false, stream_);
  }

  Matrix dw_rows(std::int64_t block) const {
    return {static_cast<char*>(o_.dw.data) + block * plan_.block * o_.dw.row_stride * size_of(p_.dw),
            o_.dw.rows <= 1 ? p_.hidden : o_.dw.row_stride};
  }
  // dW of a block from operands d [k, columns] and x [k, H]; first and last of the products that make it.
  void multiply_weight(std::int64_t block, Matrix d, Matrix x, std::int64_t k, bool first, bool last) {
    std::int64_t const width = plan_.columns_of(block);
    const float* const alpha = operand_ == DType::f16 ? &scalars_->dw_alpha : one();
    Matrix const out = dw_rows(block);
    if (dw_block_ == nullptr) {
      multiply(Form::weight, width, p_.hidden, k, d, x, out, operand_, p_.dw, alpha,
               first && !p_.accumulate_dw ? zero() : one());
      return;
    }
    multiply(Form::weight, width, p_.hidden, k, d, x, {bytes(dw_block_), p_.hidden}, operand_, DType::f32, alpha,
             first ? zero() : one());
    if (last)
      write_rows(dw_block_, p_.hidden, width, p_.hidden, out.data, p_.dw, out.stride, p_.accumulate_dw, stream_);
  }
  void multiply_hidden(std::int64_t block, Matrix d, Matrix w, std::int64_t c0, std::int64_t rows) {
    multiply(Form::hidden, rows, p_.hidden, plan_.columns_of(block), d, w, {bytes(dx_sum_ + c0 * p_.hidden), p_.hidden},
             operand_, DType::f32, one(), block == 0 ? zero() : one());
  }
  void sum_bias(std::int64_t block, std::int64_t c0, std::int64_t rows, Matrix d, DType dtype, bool exponentials) {
    if (!o_.db) return;
    sum_columns(rows_, c0, rows, plan_.columns_of(block), d.data, dtype, d.stride, exponentials, c0 > 0,
                at<float>("db_room"), at<float>("db_sum") + block * plan_.block, stream_);
  }

  void spend_exponentials(std::int64_t block, Matrix x) {
    Matrix const e{kept(block), ld_};
    patch_exponentials(rows_, 0, n_, block * plan_.block, plan_.columns_of(block), e.data, ld_, stream_);
    sum_bias(block, 0, n_, e, DType::bf16, true);
    if (wants_dx()) multiply_hidden(block, e, weight_block(block), 0, n_);
    if (wants_dw()) multiply_weight(block, e, x, n_ + plan_.extra_rows, true, true);
  }

  void spend_logits(std::int64_t block, Matrix x) {
    Matrix const w = weight_block(block);
    Matrix const teacher = p_.distils() ? weight_of(o_.teacher_w, "teacher_block", teacher_operand(), block) : Matrix{};
    bool const stayed = keeps(block) && !plan_.exponentials;
    each_chunk([&](std::int64_t c0, std::int64_t rows) {
      float* const z = stayed ? reinterpret_cast<float*>(kept(block)) + c0 * ld_ : logits_;
      if (plan_.own_product) {
        Matrix const d{half_room(), ld_};
        own_gradient(block, w, d);
        spend_gradient(block, w, x, d, c0, rows);
        return;
      }
      if (!stayed) multiply_logits(block, w, c0, rows, z);
      if (p_.distils()) multiply_teacher(block, teacher, c0, rows);
      char* const half = operand_ == DType::f32 ? nullptr : half_room();
      Matrix const d{half != nullptr ? half : bytes(z), ld_};
      row_gradients(call_, rows_, block_of(block, c0, rows, z, stayed && shapes()), d.data, operand_, ld_, stream_);
      spend_gradient(block, w, x, d, c0, rows);
    });
  }

  // Where D of a block is made in 16 bits: a place of its own, or that of exponentials that are spent.
  char* half_room() const {
    char* const own = at<char>("d");
    return own != nullptr ? own : at<char>("kept");
  }

  void spend_gradient(std::int64_t block, Matrix w, Matrix x, Matrix d, std::int64_t c0, std::int64_t rows) {
    sum_bias(block, c0, rows, d, operand_, false);
    if (wants_dx()) multiply_hidden(block, d, w, c0, rows);
    if (wants_dw())
      multiply_weight(block, d, {x.data + c0 * x.stride * size_of(operand_), x.stride}, rows, c0 == 0, c0 + rows == n_);
  }

  // No row at all.
  void zero_gradients() {
    if (wants_dw() && !p_.accumulate_dw && p_.vocab > 0)
      cudaMemset2DAsync(o_.dw.data, static_cast<std::size_t>(dw_rows(0).stride * size_of(p_.dw)), 0,
                        static_cast<std::size_t>(p_.hidden * size_of(p_.dw)), static_cast<std::size_t>(p_.vocab),
                        stream_);
    if (o_.db) cudaMemsetAsync(o_.db.data, 0, static_cast<std::size_t>(p_.vocab * size_of(p_.db)), stream_);
  }

  const Prepared& prepared_;
  const plan::Plan& plan_;
  const contract::Problem& p_;
  const Operands& o_;
  const ResultViews& results_;
  char* workspace_;
  cudaStream_t stream_;
  Products& products_;
  std::int64_t n_, ld_;  // slots; columns between rows of block buffers
  DType operand_;
  Scalars* scalars_ = nullptr;
  RowCall call_{};
  Rows rows_{};
  Matrix x_{}, teacher_x_{};
  float *logits_ = nullptr, *teacher_logits_ = nullptr, *dx_sum_ = nullptr, *dw_block_ = nullptr;
  std::string error_;
};

}  // namespace

Rows row_arrays(const plan::Plan& plan, char* workspace, std::int64_t slots) {
  return LinearRun::row_arrays(plan, workspace, slots);
}

PreparedPointer prepare(Device& device, const plan::Plan& plan, std::string* why) {
  CurrentDevice const current(device.index);
  PreparedPointer made(new Prepared{device, plan, nullptr, {}, {}, {}, {}});
  if (plan.problem.kind != contract::Kind::linear || plan.chunk == 0) return made;
  plan::Buffer const* const room = plan.find("blas");  // none where this library's own product is all there is
  made->products = std::make_unique<Products>(*device.blas, room != nullptr ? room->bytes : 256);
  std::string error;
  if (plan.problem.rows > 0)
    each_product(plan, [&](const Product& product) {
      if (error.empty()) error = made->products->resolve(product);
    });
  if (error.empty() && plan.own_product) {
    auto const make = [&](FirstProductPlan* out, Store store, bool reference) {
      const char* const wrong =
          make_first_product(LinearRun::shape_of(plan, store, reference), device.multiprocessors, out);
      if (wrong != nullptr && error.empty()) error = wrong;
    };
    if (plan.problem.call != Call::backward) {
      make(&made->reference, Store::nothing, true);
      make(&made->statistics, Store::nothing, false);
      if (plan.exponentials) make(&made->exponentials, Store::exponentials, false);
    }
    if (plan.problem.wants_gradient() && plan.kept_blocks < plan.blocks) make(&made->gradient, Store::gradient, false);
  }
  if (error.empty()) return made;
  *why = error;
  return nullptr;
}

std::string run_linear(Prepared& prepared, const Operands& operands, const ResultViews& results, char* workspace,
                       cudaStream_t stream, int* status) {
  return LinearRun(prepared, operands, results, workspace, stream).run(status);
}

}  // namespace logitless::cuda
