// See verify.hpp. S compared rows. Derivation of the bound, to first order, u = 2^-24, growth(n) the summation factor:
//   logit      |dz1_ij| <= scale (growth(H) u |x_i| |w_j| + 2 u |z0_ij|); dz_ij = (dz1_ij + a softcap's 8 u |z|) / T_i
//   exponent   eta_ij = dz_ij + 2.3 u |z_ij - M_i| + (growth(256) + 16) u: relative error of exp(z_ij - reference)
//   lse_i      mean of eta_ij under p, and rounding; loss_i: sum_j t_ij (lse - z_ij) + lambda lse^2, term by term
//   D_ij       A_ij = |D_ij| (eta_ij + the row's mean + 16-bit storage + growth(max(V, R)) u) + fp16's underflow, where
//              |D_ij| has its terms' sizes added that may cancel; and the error of the softcap's slope
//   dX, dW     A |W| and A^T |X|, and the rounding of the result
// Cost: reference 8SHV in double on one thread, 10SHV in fp32 on all; memory 4SV floats and two dW.

#include "verify.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <future>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>

#include "arrays.hpp"

namespace logitless::cli {
namespace {

constexpr double unit32 = 0x1p-24;

double unit_of(DType dtype) {
  switch (dtype) {
    case DType::bf16: return 0x1p-8;
    case DType::f16: return 0x1p-11;
    case DType::f64: return 0x1p-53;
    default: return unit32;
  }
}

// Rounding errors of n terms are random: six standard deviations, never more than their sum (Higham & Mary 2019).
double growth(std::int64_t terms) {
  auto const n = static_cast<double>(terms) + 1.0;
  return std::min(n, 6.0 * std::sqrt(n));
}

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
  double const row_cost = in.kind == Kind::linear ? static_cast<double>(in.hidden) * static_cast<double>(in.vocab)
                                                  : static_cast<double>(in.vocab);
  double const affordable = in.kind == Kind::linear ? 2.5e9 : 1e8;
  auto const most =
      r.sample > 0 ? r.sample : std::max<std::int64_t>(2, static_cast<std::int64_t>(affordable / row_cost));
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < in.rows; ++i) {
    if (most >= in.rows || target_at(in.y, i) != r.options.ignore_index) rows.push_back(i);
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

float element(const ConstTensor& vector, std::int64_t i) { return static_cast<const float*>(vector.data())[i]; }

// Rows of a dense matrix, in its own dtype or another.
Array gather(const ConstTensor& matrix, const std::vector<std::int64_t>& rows, DType dtype) {
  std::int64_t const cols = matrix.extent(1);
  Array out(dtype, {static_cast<std::int64_t>(rows.size()), cols});
  auto const row_bytes = cols * static_cast<std::int64_t>(size_of(matrix.dtype()));
  for (std::size_t s = 0; s < rows.size(); ++s) {
    convert(static_cast<const std::byte*>(matrix.data()) + rows[s] * row_bytes, matrix.dtype(),
            out.as<std::byte>() + static_cast<std::int64_t>(s) * cols * static_cast<std::int64_t>(size_of(dtype)),
            dtype, cols);
  }
  return out;
}

// Elements of a dense fp32 vector.
Array gather_rows(const ConstTensor& vector, const std::vector<std::int64_t>& rows) {
  Array out(DType::f32, {static_cast<std::int64_t>(rows.size())});
  for (std::size_t s = 0; s < rows.size(); ++s) out.as<float>()[s] = element(vector, rows[s]);
  return out;
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
  Inputs fewer = in;
  auto const keep = [&](const Array& array) {
    fewer.owners.push_back(std::make_shared<Array>(array));
    return array.tensor();
  };
  fewer.rows = rows;
  if (linear) {
    fewer.x = keep(gather(in.x, chosen, in.x.dtype()));
  } else {
    fewer.z = keep(gather(in.z, chosen, in.z.dtype()));
  }
  Array const targets(DType::i64, {rows});
  for (std::int64_t n = 0; n < rows; ++n) {
    targets.as<std::int64_t>()[n] = target_at(in.y, chosen[static_cast<std::size_t>(n)]);
  }
  fewer.y = keep(targets);
  for (ConstTensor* const each : {&fewer.options.row_weight, &fewer.options.row_temperature}) {
    // A wrong length is the library's to refuse.
    if (*each && each->extent(0) == in.rows) *each = keep(gather_rows(*each, chosen));
  }
  return fewer;
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
      if (linear()) multiply_logits();
      run_plain();
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

  // The whole problem as asked, and once more with an upstream gradient on the sample alone.
  void run_backend() {
    Problem problem = in_.problem(linear(), linear(), !linear(), r_.grad_f32);
    problem.memory_budget = r_.budget;
    Context context(r_.context);
    Plan plan(context, problem, r_.options);
    out_.machine = Json::parse(context.describe(Format::json));
    out_.plan = Json::parse(plan.describe(Format::json));
    if (linear()) {
      dx_ = Array(problem.grad_hidden_dtype, {in_.rows, in_.hidden});
      dw_ = Array(problem.grad_weight_dtype, {in_.vocab, in_.hidden});
    } else {
      dz_ = Array(problem.grad_logits_dtype, {in_.rows, in_.vocab});
    }
    row_loss_ = Array(DType::f32, {in_.rows});
    row_lse_ = Array(DType::f32, {in_.rows});
    Arguments arguments = in_.arguments();
    arguments.grad_hidden = dx_.tensor();
    arguments.grad_weight = dw_.tensor();
    arguments.grad_logits = dz_.tensor();
    arguments.row_loss = row_loss_.tensor();
    arguments.row_lse = row_lse_.tensor();
    Workspace workspace(plan.workspace_bytes());
    progress_.show("check: running " + out_.machine.value("backend", "") + " ...");
    auto const start = std::chrono::steady_clock::now();
    result_ = plan.forward_backward(arguments, workspace);
    out_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    out_.kept = result_.kept;
    divisor_ = r_.options.reduction != Reduction::mean ? 1.0
               : r_.options.normalizer > 0.0           ? r_.options.normalizer
                                                       : sum_of_weights();
    upstream_ = static_cast<float>(1.0 / divisor_);
    if (!sampled_ || !linear()) return;

    Array const upstream(DType::f32, {in_.rows});
    for (std::int64_t const i : rows_) upstream.as<float>()[i] = upstream_;
    Array const again(problem.grad_hidden_dtype, {in_.rows, in_.hidden});  // dX of the run as asked is compared
    arguments.grad_hidden = again.tensor();
    arguments.row_loss = arguments.row_lse = {};
    arguments.grad_loss = 0.0;
    arguments.grad_row_loss = upstream.tensor();
    plan.forward_backward(arguments, workspace);
  }

  void prepare() {
    targets_ = Array(DType::i64, {s_});
    for (std::int64_t s = 0; s < s_; ++s) {
      targets_.as<std::int64_t>()[s] = target_at(in_.y, rows_[static_cast<std::size_t>(s)]);
    }
    if (linear()) {
      x_ = gather(in_.x, rows_, in_.x.dtype());
      x32_ = gather(in_.x, rows_, DType::f32);
      z32_ = Array(DType::f32, {s_, in_.vocab});
      w_norm_.assign(static_cast<std::size_t>(in_.vocab), 0.0);
    } else {
      z_ = gather(in_.z, rows_, in_.z.dtype());
      z32_ = gather(in_.z, rows_, DType::f32);
    }
    if (in_.options.row_weight) row_weight_ = gather_rows(in_.options.row_weight, rows_);
    if (in_.options.row_temperature) row_temperature_ = gather_rows(in_.options.row_temperature, rows_);
    if (in_.options.bias) {
      bias32_ = Array(DType::f32, {in_.vocab});
      convert(in_.options.bias.data(), in_.options.bias.dtype(), bias32_.data(), DType::f32, in_.vocab);
    }
    double weights = 0.0;
    for (std::int64_t j = 0; j < in_.vocab; ++j) weights += class_weight(j);
    mean_weight_ = weights / static_cast<double>(in_.vocab);
    // Both yardsticks see the sample as a problem of its own, with the whole problem's upstream gradient.
    options_ = r_.options;
    if (sampled_ && options_.reduction == Reduction::mean) options_.normalizer = divisor_;
  }

  double class_weight(std::int64_t j) const {
    return in_.options.class_weight ? static_cast<double>(element(in_.options.class_weight, j)) : 1.0;
  }

  // What the mean divides by: of the kept rows.
  double sum_of_weights() const {
    if (!in_.options.class_weight) return static_cast<double>(result_.kept);
    double sum = 0.0;
    for (std::int64_t i = 0; i < in_.rows; ++i) {
      std::int64_t const y = target_at(in_.y, i);
      if (y != r_.options.ignore_index) sum += class_weight(y);
    }
    return sum;
  }

  // The sample's inputs of options, for either yardstick.
  void set_options(Arguments& arguments) const {
    arguments.bias = in_.options.bias;
    arguments.class_weight = in_.options.class_weight;
    arguments.row_weight = row_weight_.tensor();
    arguments.row_temperature = row_temperature_.tensor();
  }

  void set_upstream(Arguments& arguments) const {
    if (!sampled_ || per_row()) return;
    arguments.grad_loss = 0.0;
    arguments.grad_row_loss = ConstTensor(&upstream_, Shape(s_), Shape(0));
  }

  Result run_on_reference(Arguments& arguments) const {
    Context context({.backend = Backend::reference});
    set_upstream(arguments);
    set_options(arguments);
    Plan plan(context, problem_of(arguments, Call::forward_backward), options_);
    Workspace workspace;
    return plan.forward_backward(arguments, workspace);
  }

  void run_reference() {
    want_loss_ = Array(DType::f32, {s_});
    want_lse_ = Array(DType::f32, {s_});
    Arguments arguments;
    arguments.targets = targets_.tensor();
    arguments.row_loss = want_loss_.tensor();
    arguments.row_lse = want_lse_.tensor();
    if (linear()) {
      want_dx_ = Array(DType::f32, {s_, in_.hidden});
      want_dw_ = Array(DType::f32, {in_.vocab, in_.hidden});
      arguments.hidden = x_.tensor();
      arguments.weight = in_.w;
      arguments.grad_hidden = want_dx_.tensor();
      arguments.grad_weight = want_dw_.tensor();
    } else {
      want_dz_ = Array(DType::f32, {s_, in_.vocab});
      arguments.logits = z_.tensor();
      arguments.grad_logits = want_dz_.tensor();
    }
    want_ = run_on_reference(arguments);
  }

  // A row of W in fp32, and the size of a block of rows that stays in the first caches.
  void weight_row(std::int64_t j, float* out) const {
    auto const* const bytes = static_cast<const std::byte*>(in_.w.data());
    convert(bytes + j * in_.hidden * static_cast<std::int64_t>(size_of(in_.w.dtype())), in_.w.dtype(), out, DType::f32,
            in_.hidden);
  }

  // z32 [S,V]: products in the input's dtype (exact in fp32 for 16 bits), summed in fp32.
  void multiply_logits() {
    std::int64_t const h = in_.hidden;
    parallel(in_.vocab, [&](std::int64_t first, std::int64_t last) {
      std::vector<float> w(static_cast<std::size_t>(h));
      for (std::int64_t j = first; j < last; ++j) {
        weight_row(j, w.data());
        double norm = 0.0;
        for (float const value : w) norm += static_cast<double>(value) * static_cast<double>(value);
        w_norm_[static_cast<std::size_t>(j)] = std::sqrt(norm);
        for (std::int64_t s = 0; s < s_; ++s) {
          float const* const x = x32_.as<float>() + s * h;
          float lanes[8] = {};
          std::int64_t k = 0;
          for (; k + 8 <= h; k += 8) {
            for (int lane = 0; lane < 8; ++lane) lanes[lane] += x[k + lane] * w[static_cast<std::size_t>(k + lane)];
          }
          for (; k < h; ++k) lanes[k % 8] += x[k] * w[static_cast<std::size_t>(k)];
          z32_.as<float>()[s * in_.vocab + j] =
              ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
        }
      }
    });
  }

  // Loss, lse and D of the plain logits; D cast to the operands' 16 bits where both have them.
  void run_plain() {
    plain_loss_ = Array(DType::f32, {s_});
    plain_lse_ = Array(DType::f32, {s_});
    d_ = Array(DType::f32, {s_, in_.vocab});
    Arguments arguments;
    arguments.logits = z32_.tensor();
    arguments.targets = targets_.tensor();
    arguments.row_loss = plain_loss_.tensor();
    arguments.row_lse = plain_lse_.tensor();
    arguments.grad_logits = d_.tensor();
    plain_ = run_on_reference(arguments);
    DType const cast = !linear()                                                  ? dz_.dtype()
                       : in_.x.dtype() == in_.w.dtype() && is_half(in_.x.dtype()) ? in_.x.dtype()
                                                                                  : DType::f32;
    float* const d = d_.as<float>();
    parallel(d_.count(), [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t n = first; n < last; ++n) d[n] = rounded(d[n], cast);
    });
  }

  // Bounds of lse and loss, and A [S,V], the bound of D's error.
  void bound_rows() {
    a_ = Array(DType::f32, {s_, in_.vocab});
    lse_bound_.assign(static_cast<std::size_t>(s_), 0.0);
    loss_bound_ = lse_bound_;
    bool const bf16_products = out_.plan.value("products", "") == "bf16";
    std::string const kept = out_.plan.value("kept_blocks", 0) > 0 ? out_.plan.value("kept_dtype", "") : "";
    // With bf16 products dW = E^T (diag(a/s) X) rounds its second operand too.
    double const storage = bf16_products    ? 2.0 * unit_of(DType::bf16)
                           : kept == "bf16" ? unit_of(DType::bf16)
                           : kept == "f16"  ? unit_of(DType::f16)
                                            : 0.0;
    double const underflow = kept == "f16" ? 4.0 * 0x1p-25 : 0.0;
    parallel(s_, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t s = first; s < last; ++s) bound_row(s, storage, underflow);
    });
  }

  void bound_row(std::int64_t s, double storage, double underflow) {
    std::int64_t const v = in_.vocab, y = targets_.as<std::int64_t>()[s];
    if (y == r_.options.ignore_index) return;  // exact zeros
    auto const row = static_cast<std::size_t>(s);
    float const* const raw = z32_.as<float>() + s * v;
    double x_norm = 0.0;
    for (std::int64_t k = 0; linear() && k < in_.hidden; ++k) {
      double const x = x32_.as<float>()[s * in_.hidden + k];
      x_norm += x * x;
    }
    double const logit_factor = growth(in_.hidden) * unit32 * std::sqrt(x_norm);
    Options const& o = r_.options;
    double const t = row_temperature_ ? static_cast<double>(row_temperature_.as<float>()[s]) : o.temperature;
    double const u = row_weight_ ? std::abs(static_cast<double>(row_weight_.as<float>()[s])) : 1.0;
    double const cap = o.softcap;
    // A logit as the loss sees it, and the bounds of its error and of that of its slope dz/dz0.
    struct Logit {
      double z, error, slope, slope_error;
    };
    bool const transformed = bias32_ || o.logit_scale != 1.0 || cap > 0.0 || t != 1.0;
    auto const logit = [&](std::int64_t j) -> Logit {
      double const product = linear() ? logit_factor * w_norm_[static_cast<std::size_t>(j)] : 0.0;
      double const z0 = raw[j];
      if (!transformed || std::isinf(z0)) return {z0, product, 1.0, 0.0};
      double const b = bias32_ ? static_cast<double>(bias32_.as<float>()[j]) : 0.0;
      double const z1 = o.logit_scale * (z0 + b);
      double const dz1 = o.logit_scale * (product + 2.0 * unit32 * (std::abs(z0) + std::abs(b)));
      if (!(cap > 0.0)) return {z1 / t, (dz1 + 2.0 * unit32 * std::abs(z1)) / t, o.logit_scale / t, 0.0};
      double const h = std::tanh(z1 / cap), left = 1.0 - h * h;
      return {cap * h / t, (left * dz1 + 8.0 * unit32 * cap * std::abs(h)) / t, o.logit_scale / t * left,
              o.logit_scale / t * (2.0 * std::abs(h) * left * dz1 / cap + 8.0 * unit32)};
    };
    std::vector<Logit> z(static_cast<std::size_t>(v));
    double top = -std::numeric_limits<double>::infinity();
    for (std::int64_t j = 0; j < v; ++j) {
      z[static_cast<std::size_t>(j)] = logit(j);
      top = std::max(top, z[static_cast<std::size_t>(j)].z);
    }
    double const lse = plain_lse_.as<float>()[s];
    double const constant = (growth(256) + 16.0) * unit32;
    auto const away = [&](std::int64_t j) {
      double const each = z[static_cast<std::size_t>(j)].z;
      return std::isinf(each) ? 0.0 : std::abs(each - top);
    };
    auto const eta = [&](std::int64_t j) {
      return z[static_cast<std::size_t>(j)].error + 2.3 * unit32 * away(j) + constant;
    };
    double mean = 0.0, plain_mean = 0.0, others = 0.0, distance = 0.0;
    for (std::int64_t j = 0; j < v; ++j) {
      double const e = eta(j), p = std::exp(z[static_cast<std::size_t>(j)].z - lse);
      double const share = class_weight(j) / static_cast<double>(v);
      mean += p * e;
      plain_mean += share * e;
      if (j != y) others += p * e;
      distance += share * away(j);
    }
    double const p_y = std::exp(z[static_cast<std::size_t>(y)].z - lse);
    double const others_mean = p_y < 1.0 ? others / (1.0 - p_y) : mean;
    double const alpha = o.label_smoothing * (o.smoothing == Smoothing::others ? 2.0 : 1.0);
    double const w_y = class_weight(y), mass = w_y + alpha * mean_weight_;
    double const loss = std::abs(static_cast<double>(plain_loss_.as<float>()[s]));
    lse_bound_[row] = mean + 4.0 * unit32 * (std::abs(lse) + 1.0);
    loss_bound_[row] = u * (mass * mean + w_y * eta(y) + 4.0 * unit32 * mass +
                            (alpha > 0.0 ? alpha * (plain_mean + growth(v) * unit32 * distance) : 0.0) +
                            o.z_loss * (2.0 * std::abs(lse) * lse_bound_[row] + 8.0 * unit32 * lse * lse)) +
                       4.0 * unit32 * loss;
    double const g = static_cast<double>(upstream_) * u;
    double const product = linear() ? storage + (growth(std::max(v, in_.rows)) + 8.0) * unit32 : 8.0 * unit32;
    bool const cancels = alpha > 0.0 && in_.options.class_weight;
    for (std::int64_t j = 0; j < v; ++j) {
      Logit const& at_j = z[static_cast<std::size_t>(j)];
      double const p = std::exp(at_j.z - lse);
      // |D| may be small where p, the smoothing and the z-loss cancel.
      double const smoothing = alpha * class_weight(j) / static_cast<double>(v);
      double const spread =
          smoothing + (cancels ? 2.0 * alpha * mean_weight_ * p : 0.0) + 4.0 * o.z_loss * (std::abs(lse) + 1.0) * p;
      double const size = std::abs(static_cast<double>(d_.as<float>()[at(s, j)])) + g * at_j.slope * spread;
      double const relative = (j == y ? eta(j) + others_mean : eta(j) + mean) + product;
      double const uncapped = mass * p + (j == y ? w_y : 0.0) + spread;
      a_.as<float>()[at(s, j)] =
          static_cast<float>(size * relative + g * (at_j.slope_error * uncapped + at_j.slope * underflow));
    }
  }

  void compare_rows() {
    Tally loss, lse;
    for (std::int64_t s = 0; s < s_; ++s) {
      auto const row = static_cast<std::size_t>(s);
      std::int64_t const i = rows_[row];
      loss.add(row_loss_.as<float>()[i], want_loss_.as<float>()[s], plain_loss_.as<float>()[s], loss_bound_[row]);
      lse.add(row_lse_.as<float>()[i], want_lse_.as<float>()[s], plain_lse_.as<float>()[s], lse_bound_[row]);
    }
    if (!per_row()) {
      Tally total;
      double sum = 0.0, mass = 0.0, bound = 0.0;
      for (std::int64_t i = 0; i < in_.rows; ++i) sum += row_loss_.as<float>()[i];
      Array const& rows = sampled_ ? row_loss_ : plain_loss_;
      for (std::int64_t i = 0; i < rows.count(); ++i) mass += std::abs(rows.as<float>()[i]);
      for (double const each : loss_bound_) bound += each;
      double const rounding = growth(in_.rows) * unit32 * mass / divisor_;
      if (sampled_) {  // the rows were judged, so the sum is judged against them
        total.add(result_.loss, sum / divisor_, sum / divisor_, rounding);
      } else {
        total.add(result_.loss, want_.loss, plain_.loss, bound / divisor_ + rounding);
      }
      out_.outputs.push_back(total.verdict("loss"));
    }
    out_.outputs.push_back(loss.verdict("row_loss"));
    out_.outputs.push_back(lse.verdict("row_lse"));
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
        weight_row(j, w.data());
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

  Array dx_, dw_, dz_, row_loss_, row_lse_;  // the backend's, for all rows
  Result result_, want_, plain_;
  Array x_, z_, targets_;                                     // the sample, in its own dtype
  Array x32_, z32_, d_, a_;                                   // the plain pipeline's, and A
  Array bias32_, row_weight_, row_temperature_;               // of options; of the sample
  double mean_weight_ = 1.0;                                  // of the classes
  Array want_loss_, want_lse_, want_dx_, want_dw_, want_dz_;  // the reference's
  Array plain_loss_, plain_lse_;
  std::vector<double> w_norm_, lse_bound_, loss_bound_;
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
                              request.seed};
  Verification out = Comparison(reduced, progress)();
  out.rows_run = reduced.inputs.rows;
  return out;
}

}  // namespace logitless::cli
