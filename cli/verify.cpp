// See verify.hpp. S compared rows; bounds.hpp has what each may be off by.
// Cost: reference 8SHV in double on one thread, 10SHV in fp32 on all; memory 4SV floats and two dW.

#include "verify.hpp"

#include <algorithm>
#include <cmath>
#include <future>
#include <limits>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>

#include "arrays.hpp"
#include "bounds.hpp"
#include "device/device.hpp"
#include "row_outputs.hpp"

namespace logitless::cli {
namespace {

bool is_half(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16; }

float rounded(float x, DType dtype) {
  if (dtype == DType::bf16) return bfloat16(x);
  if (dtype == DType::f16) return float16(x);
  return x;
}

// body(first, last) over [0, n) in contiguous parts, one a thread.
template <class Body>
void parallel(std::int64_t n, const Body& body) {
  if (n <= 0) return;
  auto const parts = std::clamp<std::int64_t>(static_cast<std::int64_t>(std::thread::hardware_concurrency()), 1, n);
  std::vector<std::future<void>> running;
  for (std::int64_t t = 1; t < parts; ++t) {
    running.push_back(
        std::async(std::launch::async, [&body, n, parts, t] { body(n * t / parts, n * (t + 1) / parts); }));
  }
  body(0, n / parts);
  for (std::future<void>& each : running) each.get();
}

// ---- one output against its tolerance -------------------------------------------------------------------------------

class Tally {
 public:
  // bound: without the plain pipeline's share, which is known only at the end.
  void add(double got, double want, double plain, double bound) {
    if (got == want || (std::isnan(got) && std::isnan(want))) {
      track_plain(plain, want);
      if (worst_ < 0.0 && std::isfinite(bound)) {
        worst_ = 0.0;
        worst_bound_ = bound;
      }
      return;
    }
    if (!std::isfinite(got) || !std::isfinite(want)) {
      excess_ = worst_ = std::numeric_limits<double>::infinity();
      return;
    }
    double const error = std::abs(got - want);
    track_plain(plain, want);
    if (!(error - bound <= excess_)) {  // a bound that is NaN counts as exceeded
      excess_ = std::isnan(bound) ? std::numeric_limits<double>::infinity() : error - bound;
      excess_error_ = error;
      excess_bound_ = bound;
    }
    if (error > worst_) {
      worst_ = error;
      worst_bound_ = bound;
    }
  }
  void merge(const Tally& other) {
    plain_ = std::max(plain_, other.plain_);
    if (other.excess_ > excess_) {
      excess_ = other.excess_;
      excess_error_ = other.excess_error_;
      excess_bound_ = other.excess_bound_;
    }
    if (other.worst_ > worst_) {
      worst_ = other.worst_;
      worst_bound_ = other.worst_bound_;
    }
  }
  Verdict verdict(const std::string& output) const {
    Verdict v;
    v.output = output;
    v.plain_error = plain_;
    v.passed = excess_ <= 2.0 * plain_;
    bool const shown = v.passed || !std::isfinite(excess_);
    v.error = shown ? std::max(worst_, 0.0) : excess_error_;
    v.tolerance = (shown ? worst_bound_ : excess_bound_) + 2.0 * plain_;
    return v;
  }

 private:
  void track_plain(double plain, double want) {
    if (std::isfinite(plain) && std::isfinite(want)) plain_ = std::max(plain_, std::abs(plain - want));
  }

  double plain_ = 0.0;
  double excess_ = 0.0, excess_error_ = 0.0, excess_bound_ = 0.0;  // the largest error - bound
  double worst_ = -1.0, worst_bound_ = 0.0;
};

// ---- rows ------------------------------------------------------------------------------------------------------------

// All rows, or a seeded sample of the kept ones in ascending order.
std::vector<std::int64_t> choose_rows(const VerifyRequest& r) {
  Inputs const& in = r.inputs;
  double const width =
      static_cast<double>(in.hidden + (in.options.teacher_hidden ? in.options.teacher_hidden.extent(1) : 0));
  double const row_cost = (in.kind == Kind::linear ? width : 1.0) * static_cast<double>(in.vocab);
  double const affordable = in.kind == Kind::linear ? 2.5e9 : 1e8;
  auto const most =
      r.sample > 0 ? r.sample : std::max<std::int64_t>(2, static_cast<std::int64_t>(affordable / row_cost));
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < in.rows; ++i) {
    if (most >= in.rows || !in.ignored(i, r.options.ignore_index)) rows.push_back(i);
  }
  if (most >= in.rows || static_cast<std::int64_t>(rows.size()) <= most) return rows;
  std::uint64_t state = r.seed;
  for (std::int64_t k = 0; k < most; ++k) {  // the first `most` of a shuffle
    state = state * 6364136223846793005u + 1442695040888963407u;
    auto const left = static_cast<std::uint64_t>(rows.size()) - static_cast<std::uint64_t>(k);
    std::swap(rows[static_cast<std::size_t>(k)], rows[static_cast<std::size_t>(k) + (state >> 33) % left]);
  }
  rows.resize(static_cast<std::size_t>(most));
  std::sort(rows.begin(), rows.end());
  return rows;
}

// A dense tensor in fp32.
Array in_f32(const ConstTensor& tensor) {
  std::vector<std::int64_t> shape = {tensor.extent(0)};
  if (tensor.rank() == 2) shape.push_back(tensor.extent(1));
  Array out(DType::f32, shape);
  convert(tensor.data(), tensor.dtype(), out.data(), DType::f32, out.count());
  return out;
}

std::vector<double> numbers(const ConstTensor& tensor) {
  if (!tensor) return {};
  Array const array = in_f32(tensor);
  return {array.as<float>(), array.as<float>() + array.count()};
}

// Evenly spaced rows of the inputs, where a run of them all would take more than about ten seconds.
std::optional<Inputs> fewer_rows(const VerifyRequest& r) {
  Inputs const& in = r.inputs;
  if (r.full) return {};
  Context context(r.context);
  bool const linear = in.kind == Kind::linear;
  Problem problem = in.problem(linear, linear, !linear, r.grad_f32);
  problem.memory_budget = r.budget;
  Json const plan = Json::parse(Plan(context, problem, r.options).describe(Format::json));
  double const seconds = plan.value("predicted_seconds", 0.0);
  auto const rows =
      std::max({static_cast<std::int64_t>(static_cast<double>(in.rows) * 10.0 / seconds), r.sample, std::int64_t{64}});
  if (!(seconds > 10.0) || rows >= in.rows) return {};
  std::vector<std::int64_t> chosen;
  chosen.reserve(static_cast<std::size_t>(rows));
  for (std::int64_t n = 0; n < rows; ++n) chosen.push_back(n * in.rows / rows);
  return in.at_rows(chosen);
}

// ---- the comparison ---------------------------------------------------------------------------------------------------

class Comparison {
 public:
  Comparison(const VerifyRequest& request, Progress& progress)
      : r_(request),
        in_(request.inputs),
        progress_(progress),
        rows_(choose_rows(request)),
        sampled_(static_cast<std::int64_t>(rows_.size()) < in_.rows),
        s_(static_cast<std::int64_t>(rows_.size())) {}

  Verification operator()() {
    run_backend();
    prepare();
    std::future<void> reference = std::async(std::launch::async, [this] { run_reference(); });
    try {
      multiply_heads();
      if (teacher()) {
        run_plain_beside_teacher();
      } else {
        run_plain();
      }
      bound_rows();
    } catch (...) {
      reference.wait();
      throw;
    }
    progress_.show("check: the reference, in double ...");
    reference.get();
    progress_.show("check: comparing ...");
    compare_rows();
    if (linear()) {
      compare_linear();
    } else {
      compare_logits();
    }
    out_.rows_checked = s_;
    out_.sampled = sampled_;
    return std::move(out_);
  }

 private:
  bool linear() const { return in_.kind == Kind::linear; }
  bool per_row() const { return r_.options.reduction == Reduction::none; }
  std::size_t at(std::int64_t s, std::int64_t j) const { return static_cast<std::size_t>(s * in_.vocab + j); }

  bool teacher() const { return r_.options.targets == Targets::teacher; }
  RowOutputs row_outputs(std::int64_t rows) const {
    return r_.per_row ? RowOutputs::all(rows, has_classes(r_.options)) : RowOutputs::loss_and_lse(rows);
  }

  // The whole problem as asked, and once more with an upstream gradient on the sample alone.
  void run_backend() {
    Problem problem = in_.problem(linear(), linear(), !linear(), r_.grad_f32);
    problem.memory_budget = r_.budget;
    problem.most_kept_rows = in_.kept(r_.options.ignore_index);
    problem.entropy = problem.argmax = problem.mean_logit = problem.sum_p2 = r_.per_row;
    if (linear() && in_.options.bias) problem.grad_bias_dtype = r_.grad_f32 ? DType::f32 : problem.bias_dtype;
    Context context(r_.context);
    Plan plan(context, problem, r_.options);
    out_.machine = Json::parse(context.describe(Format::json));
    out_.plan = Json::parse(plan.describe(Format::json));
    if (linear()) {
      dx_ = Array(problem.grad_hidden_dtype, {in_.rows, in_.hidden});
      dw_ = Array(problem.grad_weight_dtype, {in_.vocab, in_.hidden});
      if (in_.options.bias) db_ = Array(problem.grad_bias_dtype, {in_.vocab});
    } else {
      dz_ = Array(problem.grad_logits_dtype, {in_.rows, in_.vocab});
    }
    got_ = row_outputs(in_.rows);
    Arguments arguments = in_.arguments();
    arguments.grad_hidden = dx_.tensor();
    arguments.grad_weight = dw_.tensor();
    arguments.grad_logits = dz_.tensor();
    arguments.grad_bias = db_.tensor();
    got_.ask(arguments);
    progress_.show("check: running " + out_.machine.value("backend", "") + " ...");
    device::Ran const ran = device::run_plan(context, r_.context.device, plan, arguments);
    result_ = ran.result;
    out_.seconds = ran.seconds;
    out_.kept = result_.kept;
    divisor_ = r_.options.reduction != Reduction::mean ? 1.0
               : r_.options.normalizer > 0.0           ? r_.options.normalizer
                                                       : sum_of_weights();
    upstream_ = divisor_ == 0.0 ? 0.0F : static_cast<float>(1.0 / divisor_);
    if (!sampled_ || !linear()) return;

    Array const upstream(DType::f32, {in_.rows});
    for (std::int64_t const i : rows_) upstream.as<float>()[i] = upstream_;
    Array const again(problem.grad_hidden_dtype, {in_.rows, in_.hidden});  // dX of the run as asked is compared
    RowOutputs{}.ask(arguments);
    arguments.grad_hidden = again.tensor();
    arguments.grad_loss = 0.0;
    arguments.grad_row_loss = upstream.tensor();
    device::run_plan(context, r_.context.device, plan, arguments);
  }

  void prepare() {
    sample_ = in_.at_rows(rows_);
    student_.vocab = teacher_.vocab = in_.vocab;
    student_.bias = numbers(in_.options.bias);
    teacher_.bias = numbers(in_.options.teacher_bias);
    if (linear()) {
      x32_ = in_f32(sample_.x);
    } else {
      student_.logits = in_f32(sample_.z);
    }
    // Both yardsticks see the sample as a problem of its own, with the whole problem's upstream gradient.
    options_ = r_.options;
    if (sampled_ && options_.reduction == Reduction::mean) options_.normalizer = divisor_;
  }

  // What the mean divides by: of the kept rows.
  double sum_of_weights() const {
    if (!in_.options.class_weight || r_.options.targets != Targets::hard) return static_cast<double>(result_.kept);
    std::vector<double> const weights = numbers(in_.options.class_weight);
    double sum = 0.0;
    for (std::int64_t i = 0; i < in_.rows; ++i) {
      if (!in_.ignored(i, r_.options.ignore_index)) sum += weights[static_cast<std::size_t>(target_at(in_.y, i))];
    }
    return sum;
  }

  void set_upstream(Arguments& arguments) const {
    if (!sampled_ || per_row()) return;
    arguments.grad_loss = 0.0;
    arguments.grad_row_loss = ConstTensor(&upstream_, Shape(s_), Shape(0));
  }

  Result run_on_reference(Arguments& arguments) const {
    Context context({.backend = Backend::reference});
    set_upstream(arguments);
    Problem problem = problem_of(arguments, Call::forward_backward);
    problem.topk_log = in_.topk_log;
    Plan plan(context, problem, options_);
    Workspace workspace;
    return plan.forward_backward(arguments, workspace);
  }

  void run_reference() {
    want_rows_ = row_outputs(s_);
    Arguments arguments = sample_.arguments();
    want_rows_.ask(arguments);
    if (linear()) {
      want_dx_ = Array(DType::f32, {s_, in_.hidden});
      want_dw_ = Array(DType::f32, {in_.vocab, in_.hidden});
      if (db_) want_db_ = Array(DType::f32, {in_.vocab});
      arguments.grad_hidden = want_dx_.tensor();
      arguments.grad_weight = want_dw_.tensor();
      arguments.grad_bias = want_db_.tensor();
    } else {
      want_dz_ = Array(DType::f32, {s_, in_.vocab});
      arguments.grad_logits = want_dz_.tensor();
    }
    want_ = run_on_reference(arguments);
  }

  // A row of W in fp32.
  static void weight_row(const ConstTensor& weight, std::int64_t j, float* out) {
    std::int64_t const h = weight.extent(1);
    auto const* const bytes = static_cast<const std::byte*>(weight.data());
    convert(bytes + j * h * static_cast<std::int64_t>(size_of(weight.dtype())), weight.dtype(), out, DType::f32, h);
  }

  void multiply_heads() {
    if (linear()) multiply(x32_, in_.w, student_);
    if (teacher()) multiply(in_f32(sample_.options.teacher_hidden), in_.options.teacher_weight, teacher_);
  }

  // z32 [S,V]: products in the input's dtype (exact in fp32 for 16 bits), summed in fp32.
  void multiply(const Array& x32, const ConstTensor& weight, Head& head) const {
    std::int64_t const h = weight.extent(1);
    head.width = h;
    head.logits = Array(DType::f32, {s_, in_.vocab});
    head.class_norm.assign(static_cast<std::size_t>(in_.vocab), 0.0);
    auto const norm = [h](const float* values) {
      double sum = 0.0;
      for (std::int64_t k = 0; k < h; ++k) sum += static_cast<double>(values[k]) * static_cast<double>(values[k]);
      return std::sqrt(sum);
    };
    for (std::int64_t s = 0; s < s_; ++s) head.row_norm.push_back(norm(x32.as<float>() + s * h));
    parallel(in_.vocab, [&](std::int64_t first, std::int64_t last) {
      std::vector<float> w(static_cast<std::size_t>(h));
      for (std::int64_t j = first; j < last; ++j) {
        weight_row(weight, j, w.data());
        head.class_norm[static_cast<std::size_t>(j)] = norm(w.data());
        for (std::int64_t s = 0; s < s_; ++s) {
          float const* const x = x32.as<float>() + s * h;
          float lanes[8] = {};
          std::int64_t k = 0;
          for (; k + 8 <= h; k += 8) {
            for (int lane = 0; lane < 8; ++lane) lanes[lane] += x[k + lane] * w[static_cast<std::size_t>(k + lane)];
          }
          for (; k < h; ++k) lanes[k % 8] += x[k] * w[static_cast<std::size_t>(k)];
          head.logits.as<float>()[s * in_.vocab + j] =
              ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
        }
      }
    });
  }

  // Losses and D of the plain logits; D cast to the operands' 16 bits where both have them.
  void run_plain() {
    plain_rows_ = row_outputs(s_);
    d_ = Array(DType::f32, {s_, in_.vocab});
    Arguments arguments = sample_.arguments();
    arguments.hidden = arguments.weight = {};
    arguments.logits = student_.logits.tensor();
    arguments.grad_logits = d_.tensor();
    plain_rows_.ask(arguments);
    plain_ = run_on_reference(arguments);
    cast_plain();
  }

  // The same with a teacher, which the reference does not take beside given logits: each row is a problem of one
  // hidden state [1] and a head [V,1] that holds the row's logits, so that its dW is D.
  void run_plain_beside_teacher() {
    plain_rows_ = row_outputs(s_);
    d_ = Array(DType::f32, {s_, in_.vocab});
    Context context({.backend = Backend::reference});
    Options options = options_;
    options.reduction = Reduction::none;
    options.normalizer = 0.0;
    float const one = 1.0F;
    Workspace workspace;
    for (std::int64_t s = 0; s < s_; ++s) {
      Inputs row = sample_.at_rows({s});
      RowOutputs const outputs = row_outputs(1);
      Arguments arguments = row.arguments();
      arguments.hidden = arguments.teacher_hidden = ConstTensor(&one, Shape(1, 1));
      arguments.weight = ConstTensor(student_.logits.as<float>() + s * in_.vocab, Shape(in_.vocab, 1));
      arguments.teacher_weight = ConstTensor(teacher_.logits.as<float>() + s * in_.vocab, Shape(in_.vocab, 1));
      arguments.grad_weight = Tensor(d_.as<float>() + s * in_.vocab, Shape(in_.vocab, 1));
      arguments.grad_row_loss = ConstTensor(&upstream_, Shape(1));
      outputs.ask(arguments);
      plain_.kept += Plan(context, problem_of(arguments, Call::forward_backward), options)
                         .forward_backward(arguments, workspace)
                         .kept;
      for (auto const& field : row_fields) {
        if (plain_rows_.*field.tensor) {
          (plain_rows_.*field.tensor).as<float>()[s] = (outputs.*field.tensor).as<float>()[0];
        }
      }
      plain_.loss += static_cast<double>(outputs.loss.as<float>()[0]) / divisor_;
    }
    cast_plain();
  }

  void cast_plain() {
    DType const cast = !linear()                                                  ? dz_.dtype()
                       : in_.x.dtype() == in_.w.dtype() && is_half(in_.x.dtype()) ? in_.x.dtype()
                                                                                  : DType::f32;
    float* const d = d_.as<float>();
    parallel(d_.count(), [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t n = first; n < last; ++n) d[n] = rounded(d[n], cast);
    });
  }

  // Bounds of a row's outputs, and A [S,V], the bound of D's error.
  void bound_rows() {
    a_ = Array(DType::f32, {s_, in_.vocab});
    row_bounds_.resize(static_cast<std::size_t>(s_));
    bool const bf16_products = out_.plan.value("products", "") == "bf16";
    std::string const kept = out_.plan.value("kept_blocks", 0) > 0 ? out_.plan.value("kept_dtype", "") : "";
    // With bf16 products dW = E^T (diag(a/s) X) rounds its second operand too.
    double const storage = bf16_products    ? 2.0 * unit_of(DType::bf16)
                           : kept == "bf16" ? unit_of(DType::bf16)
                           : kept == "f16"  ? unit_of(DType::f16)
                                            : 0.0;
    bounds_.emplace(sample_, r_.options, student_, teacher() ? &teacher_ : nullptr,
                    Storage{storage, kept == "f16" ? 4.0 * 0x1p-25 : 0.0}, static_cast<double>(upstream_), in_.rows);
    parallel(s_, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t s = first; s < last; ++s) {
        if (sample_.ignored(s, r_.options.ignore_index)) continue;  // exact zeros
        RowBounds& bounds = row_bounds_[static_cast<std::size_t>(s)];
        bounds = bounds_->row(s, a_.as<float>() + s * in_.vocab);
        bounds.loss += 4.0 * unit32 * std::abs(static_cast<double>(plain_rows_.loss.as<float>()[s]));
      }
    });
  }

  // Outputs of a row that are numbers.
  struct RowField {
    const char* name;
    Array RowOutputs::* tensor;
    double RowBounds::* bound;
  };
  static constexpr RowField row_fields[] = {
      {"row_loss", &RowOutputs::loss, &RowBounds::loss},
      {"row_lse", &RowOutputs::lse, &RowBounds::lse},
      {"row_logprob", &RowOutputs::logprob, &RowBounds::logprob},
      {"row_entropy", &RowOutputs::entropy, &RowBounds::entropy},
      {"row_zloss", &RowOutputs::zloss, &RowBounds::zloss},
      {"row_mean_logit", &RowOutputs::mean_logit, &RowBounds::mean_logit},
      {"row_log_sum_p2", &RowOutputs::log_sum_p2, &RowBounds::log_sum_p2},
  };

  void compare_rows() {
    if (!per_row()) compare_total();
    for (RowField const& field : row_fields) {
      if (!(got_.*field.tensor)) continue;
      Tally tally;
      for (std::int64_t s = 0; s < s_; ++s) {
        auto const row = static_cast<std::size_t>(s);
        auto const of = [&](const RowOutputs& rows, std::int64_t i) {
          return (rows.*field.tensor).template as<float>()[i];
        };
        tally.add(of(got_, rows_[row]), of(want_rows_, s), of(plain_rows_, s), row_bounds_[row].*field.bound);
      }
      out_.outputs.push_back(tally.verdict(field.name));
    }
    if (got_.argmax) compare_argmax();
  }

  void compare_total() {
    Tally total;
    double sum = 0.0, mass = 0.0, bound = 0.0;
    for (std::int64_t i = 0; i < in_.rows; ++i) sum += got_.loss.as<float>()[i];
    Array const& rows = sampled_ ? got_.loss : plain_rows_.loss;
    for (std::int64_t i = 0; i < rows.count(); ++i) mass += std::abs(rows.as<float>()[i]);
    for (RowBounds const& each : row_bounds_) bound += each.loss;
    double const rounding = growth(in_.rows) * unit32 * mass / divisor_;
    if (sampled_) {  // the rows were judged, so the sum is judged against them
      total.add(result_.loss, sum / divisor_, sum / divisor_, rounding);
    } else {
      total.add(result_.loss, want_.loss, plain_.loss, bound / divisor_ + rounding);
    }
    out_.outputs.push_back(total.verdict("loss"));
  }

  // How far below the row's largest logit the class that was found is: its own error, or that of a tie.
  void compare_argmax() {
    if (!bounds_) throw std::logic_error("the argmax is compared after the rows, whose bounds it takes");
    Tally argmax, correct;
    for (std::int64_t s = 0; s < s_; ++s) {
      std::int64_t const i = rows_[static_cast<std::size_t>(s)];
      std::int64_t const got = got_.argmax.as<std::int64_t>()[i], want = want_rows_.argmax.as<std::int64_t>()[s];
      if (got < 0 || want < 0 || got >= in_.vocab) {
        argmax.add(static_cast<double>(got), static_cast<double>(want), static_cast<double>(want), 0.0);
      } else {
        Bounds::Logits const row = bounds_->logits(s);
        auto const a = static_cast<std::size_t>(got), b = static_cast<std::size_t>(want);
        argmax.add(a == b ? 0.0 : std::abs(row.z[b] - row.z[a]), 0.0, 0.0, row.error[a] + row.error[b]);
      }
      if (!got_.correct) continue;
      bool const is = got >= 0 && got == target_at(in_.y, i);
      correct.add(got_.correct.as<std::uint8_t>()[i], is ? 1.0 : 0.0, is ? 1.0 : 0.0, 0.0);
    }
    out_.outputs.push_back(argmax.verdict("row_argmax"));
    if (got_.correct) out_.outputs.push_back(correct.verdict("row_correct"));
  }

  void compare_logits() {
    Tally total;
    std::vector<float> got(static_cast<std::size_t>(in_.vocab));
    double const unit = unit_of(dz_.dtype());
    for (std::int64_t s = 0; s < s_; ++s) {
      gradient_row(dz_, rows_[static_cast<std::size_t>(s)], in_.vocab, got.data());
      for (std::int64_t j = 0; j < in_.vocab; ++j) {
        double const want = want_dz_.as<float>()[at(s, j)];
        total.add(got[static_cast<std::size_t>(j)], want, d_.as<float>()[at(s, j)],
                  a_.as<float>()[at(s, j)] + (unit + unit32) * std::abs(want) + smallest(dz_.dtype()));
      }
    }
    out_.outputs.push_back(total.verdict("grad_logits"));
  }

  // Half the spacing of the dtype's subnormal numbers.
  static double smallest(DType dtype) { return dtype == DType::f16 ? 0x1p-25 : 0x1p-134; }

  static void gradient_row(const Array& gradient, std::int64_t row, std::int64_t cols, float* out) {
    convert(gradient.as<std::byte>() + row * cols * static_cast<std::int64_t>(size_of(gradient.dtype())),
            gradient.dtype(), out, DType::f32, cols);
  }

  // The plain pipeline's dX and dW and their bounds, one class at a time; dW is compared on the way.
  void compare_linear() {
    std::int64_t const h = in_.hidden;
    auto const width = static_cast<std::size_t>(h);
    auto const size = static_cast<std::size_t>(s_ * h);
    std::vector<float> x_abs(size);
    for (std::size_t n = 0; n < size; ++n) x_abs[n] = std::abs(x32_.as<float>()[n]);
    std::vector<double> plain_dx(size, 0.0), bound_dx(size, 0.0);
    Tally total_dw;
    std::mutex merging;
    double const unit = unit_of(dw_.dtype());
    parallel(in_.vocab, [&](std::int64_t first, std::int64_t last) {
      std::vector<float> w(width), w_abs(width), got(width), plain_dw(width), bound_dw(width);
      std::vector<float> own_dx(size, 0.0F), own_bound(size, 0.0F);
      Tally tally;
      for (std::int64_t j = first; j < last; ++j) {
        weight_row(in_.w, j, w.data());
        for (std::size_t k = 0; k < width; ++k) w_abs[k] = std::abs(w[k]);
        std::fill(plain_dw.begin(), plain_dw.end(), 0.0F);
        std::fill(bound_dw.begin(), bound_dw.end(), 0.0F);
        for (std::int64_t s = 0; s < s_; ++s) {
          float const d = d_.as<float>()[at(s, j)], a = a_.as<float>()[at(s, j)];
          float const* const x = x32_.as<float>() + s * h;
          float const* const xa = x_abs.data() + s * h;
          float* const dx = own_dx.data() + s * h;
          float* const bx = own_bound.data() + s * h;
          for (std::size_t k = 0; k < width; ++k) {
            dx[k] += d * w[k];
            bx[k] += a * w_abs[k];
          }
          // A row that holds NaN gives NaN in its dX alone.
          if (std::isnan(d)) continue;
          for (std::size_t k = 0; k < width; ++k) {
            plain_dw[k] += d * x[k];
            bound_dw[k] += a * xa[k];
          }
        }
        gradient_row(dw_, j, h, got.data());
        float const* const want = want_dw_.as<float>() + j * h;
        for (std::size_t k = 0; k < width; ++k) {
          tally.add(got[k], want[k], rounded(plain_dw[k], dw_.dtype()),
                    static_cast<double>(bound_dw[k]) + (unit + unit32) * std::abs(static_cast<double>(want[k])) +
                        smallest(dw_.dtype()));
        }
      }
      std::lock_guard const lock(merging);
      total_dw.merge(tally);
      for (std::size_t n = 0; n < size; ++n) {
        plain_dx[n] += own_dx[n];
        bound_dx[n] += own_bound[n];
      }
    });

    Tally total_dx;
    double const unit_x = unit_of(dx_.dtype());
    std::vector<float> got(width);
    for (std::int64_t s = 0; s < s_; ++s) {
      gradient_row(dx_, rows_[static_cast<std::size_t>(s)], h, got.data());
      for (std::size_t k = 0; k < width; ++k) {
        auto const n = static_cast<std::size_t>(s * h) + k;
        double const want = want_dx_.as<float>()[n];
        total_dx.add(got[k], want, rounded(static_cast<float>(plain_dx[n]), dx_.dtype()),
                     bound_dx[n] + (unit_x + unit32) * std::abs(want) + smallest(dx_.dtype()));
      }
    }
    out_.outputs.push_back(total_dx.verdict("grad_hidden"));
    out_.outputs.push_back(total_dw.verdict("grad_weight"));
    if (db_) compare_bias();
  }

  void compare_bias() {
    Tally total;
    double const unit = unit_of(db_.dtype());
    std::vector<float> got(static_cast<std::size_t>(in_.vocab));
    gradient_row(db_, 0, in_.vocab, got.data());
    for (std::int64_t j = 0; j < in_.vocab; ++j) {
      double const want = want_db_.as<float>()[j];
      double plain = 0.0, bound = 0.0;
      for (std::int64_t s = 0; s < s_; ++s) {
        if (std::isnan(d_.as<float>()[at(s, j)])) continue;  // a bad row leaves nothing in it
        plain += d_.as<float>()[at(s, j)];
        bound += a_.as<float>()[at(s, j)];
      }
      total.add(got[static_cast<std::size_t>(j)], want, rounded(static_cast<float>(plain), db_.dtype()),
                bound + (unit + unit32) * std::abs(want) + smallest(db_.dtype()));
    }
    out_.outputs.push_back(total.verdict("grad_bias"));
  }

  const VerifyRequest& r_;
  const Inputs& in_;
  Progress& progress_;
  const std::vector<std::int64_t> rows_;  // S rows that are compared
  const bool sampled_;
  const std::int64_t s_;
  Options options_;
  double divisor_ = 1.0;
  float upstream_ = 1.0F;

  Array dx_, dw_, dz_, db_;  // the backend's, for all rows
  RowOutputs got_;
  Result result_, want_, plain_;
  Inputs sample_;           // the compared rows, in their own dtype
  Array x32_, d_, a_;       // the plain pipeline's X and D, and A
  Head student_, teacher_;  // and its logits
  RowOutputs want_rows_, plain_rows_;
  Array want_dx_, want_dw_, want_dz_, want_db_;  // the reference's
  std::optional<Bounds> bounds_;
  std::vector<RowBounds> row_bounds_;
  Verification out_;
};

}  // namespace

bool Verification::passed() const {
  return std::all_of(outputs.begin(), outputs.end(), [](const Verdict& v) { return v.passed; });
}

Verification verify(const VerifyRequest& request, Progress& progress) {
  std::optional<Inputs> const fewer = fewer_rows(request);
  VerifyRequest const reduced{fewer ? *fewer : request.inputs,
                              request.options,
                              request.context,
                              request.budget,
                              request.grad_f32,
                              request.sample,
                              request.full,
                              request.per_row,
                              request.seed};
  Verification out = Comparison(reduced, progress)();
  out.rows_run = reduced.inputs.rows;
  return out;
}

}  // namespace logitless::cli
