// check_case: runs one case on a backend and compares everything that it may write with the reference. Returns "" or
// the first disagreement in a line. Also checks what must not change: inputs, guards, gaps, and on errors all outputs;
// and that a backward done twice gives the same bits.
#pragma once

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "support/backend.hpp"
#include "support/bounds.hpp"
#include "support/case.hpp"
#include "support/plain.hpp"
#include "support/report.hpp"

namespace logitless::test {

struct Outputs {
  Tensor row_loss, row_lse, row_logprob, stats, dx, dw, dz;

  // dtypes of rows and gradients; none leaves a gradient out.
  static Outputs of(const Case& c, DType rows, DType dx, DType dw, DType dz, Layout layout) {
    Outputs out;
    const auto column = [&](bool wanted) { return wanted ? Tensor(rows, c.rows, 1, layout) : Tensor(); };
    const bool forward = c.call != Call::backward;
    out.row_loss = column(c.wants_loss && forward);
    out.row_lse = column(c.wants_lse && forward);
    out.row_logprob = column(c.wants_logprob && forward);
    if (c.wants_stats && forward) out.stats = Tensor(rows, c.rows, 4, layout);
    if (!c.wants_gradient()) return out;
    if (c.kind == Kind::linear && dx != DType::none) out.dx = Tensor(dx, c.rows, c.hidden, layout);
    if (c.kind == Kind::linear && dw != DType::none) out.dw = Tensor(dw, c.vocab, c.hidden, layout);
    if (c.kind == Kind::logits && dz != DType::none) out.dz = Tensor(dz, c.rows, c.vocab, layout);
    return out;
  }
  void into(Operands& o) const {
    o.row_loss = row_loss.view(), o.row_lse = row_lse.view(), o.row_logprob = row_logprob.view();
    o.stats = stats.view(), o.dx = dx.view(), o.dw = dw.view(), o.dz = dz.view();
  }
  std::vector<const Tensor*> all() const { return {&row_loss, &row_lse, &row_logprob, &stats, &dx, &dw, &dz}; }
};

class CaseCheck {
 public:
  CaseCheck(const Case& c, Backend& backend, RatioTable* ratios) : CaseCheck(c, Data(c), backend, ratios) {}
  CaseCheck(const Case& c, const Data& data, Backend& backend, RatioTable* ratios)
      : c_(c), backend_(backend), ratios_(ratios), data_(data) {}

  // A column of dX that no rule fixes: where W holds an infinity, 0 * inf is NaN or 0.
  std::int64_t free_dx_column = -1;

  std::string run() {
    const std::string error = compare_with_reference();
    if (error.empty()) return error;
    return error + "\n  case " + c_.text() + "\n  on " + backend_.name() + ", " + backend_.describe(problem());
  }

 private:
  Problem problem() const { return c_.problem(backend_.smoothing(c_)); }

  // The reference's problem: everything wanted, in double, nothing accumulated, from X and W and not from statistics.
  Problem exact_problem() const {
    Problem p = c_.problem(c_.uniform_alpha());
    p.accumulate_dx = p.accumulate_dw = p.in_place = false;
    if (c_.wants_gradient()) p.call = Call::forward_backward;
    for (DType* t : {&p.dx, &p.dw, &p.dz}) {
      if (*t != DType::none) *t = DType::f64;
    }
    return p;
  }

  std::string compare_with_reference() {
    Case whole = c_;  // every row output
    whole.wants_loss = whole.wants_lse = whole.wants_logprob = whole.wants_stats = true;
    if (whole.call == Call::backward) whole.call = Call::forward_backward;
    truth_ = make_outputs(whole, DType::f64);
    Operands exact = data_.operands();
    truth_.into(exact);
    int status = LL_OK;
    const std::string refused = reference::run(exact_problem(), exact, &truth_outcome_, &status);

    Outputs got = Outputs::of(c_, DType::f32, c_.dx, c_.dw, c_.in_place ? DType::none : c_.dz, c_.out_layout);
    if (!refused.empty()) return expect_refusal(got, status);

    const bool none_kept = truth_outcome_.kept == 0;
    if (!none_kept) make_plain(whole);
    const Bounds bounds(c_, data_, backend_.storage(problem()));

    std::string error = c_.call == Call::backward ? run_backward(got) : run_forward(got);
    if (!error.empty()) return error;
    if (c_.call != Call::backward) {
      if (error = compare_outcome(bounds); !error.empty()) return error;
      if (error = compare_rows(got, bounds); !error.empty()) return error;
    }
    return compare_gradients(got, bounds);
  }

  static Outputs make_outputs(const Case& c, DType rows) {
    auto wide = [](DType t) { return t == DType::none ? t : DType::f64; };
    return Outputs::of(c, rows, wide(c.dx), wide(c.dw), wide(c.dz), Layout::contiguous);
  }

  void make_plain(const Case& whole) {
    Problem p = exact_problem();
    const bool half = c_.kind == Kind::linear && c_.x == c_.w && contract::is_half(c_.x);
    for (bool rounded : {false, true}) {
      if (rounded && (ratios_ == nullptr || !half)) continue;
      Outputs& plain = rounded ? plain_rounded_ : plain_;
      plain = Outputs::of(whole, DType::f32, c_.dx, c_.dw, c_.dz, Layout::contiguous);
      Operands o = data_.operands();
      plain.into(o);
      run_plain(p, o, rounded, rounded ? nullptr : &plain_outcome_);
    }
  }

  bool writes_over_z() const { return c_.in_place && c_.wants_gradient(); }

  // Operands of the call under test, in data of its own when the call may write over its input.
  Operands operands_of(const Outputs& got, const Data& data) const {
    Operands o = data.operands();
    got.into(o);
    if (writes_over_z()) o.dz = data.z.view();
    return o;
  }

  std::string inputs_changed(const Data& data) const {
    if (data.x.memory() != data_.x.memory()) return "X was changed";
    if (data.w.memory() != data_.w.memory()) return "W was changed";
    if (writes_over_z()) {
      if (!data.z.surroundings_intact()) return "wrote outside z";
    } else if (data.z.memory() != data_.z.memory()) {
      return "z was changed";
    }
    if (data.y.memory() != data_.y.memory()) return "targets were changed";
    if (data.upstream.memory() != data_.upstream.memory()) return "grad_row_loss was changed";
    return {};
  }

  static std::string surroundings(const Outputs& got) {
    const char* names[] = {"row_loss", "row_lse", "row_logprob", "stats", "dX", "dW", "dz"};
    const std::vector<const Tensor*> all = got.all();
    for (std::size_t n = 0; n < all.size(); ++n) {
      if (*all[n] && !all[n]->surroundings_intact()) return std::string("wrote outside ") + names[n];
    }
    return {};
  }

  // A call that must be refused: same status, nothing written.
  std::string expect_refusal(Outputs& got, int expected) {
    Problem p = problem();
    Data data = data_;
    Operands o = operands_of(got, data);
    Tensor stats;
    if (p.call == Call::backward) {
      stats = Tensor(DType::f32, c_.rows, 4);
      stats.fill(0.0);
      o.stats = stats.view();
    }
    Outcome outcome;
    int status = LL_OK;
    const std::string text = backend_.run(p, o, &outcome, &status);
    if (status != expected) {
      return "status " + std::to_string(status) + " where " + std::to_string(expected) + " is right: " + text;
    }
    if (text.empty()) return "an error without a message";
    if (backend_.refuses_before_writing()) {
      for (const Tensor* t : got.all()) {
        if (*t && !t->all_poison()) return "a refused call wrote an output";
      }
      if (data.z.memory() != data_.z.memory()) return "a refused call wrote z";
    }
    return surroundings(got);
  }

  void fill_accumulators(Outputs& got) {
    Random random(c_.seed + 77);
    if (c_.accumulate_dx && got.dx) fill_noise(got.dx, random);
    if (c_.accumulate_dw && got.dw) fill_noise(got.dw, random);
  }
  static void fill_noise(Tensor& t, Random& random) {
    for (std::int64_t i = 0; i < t.rows(); ++i)
      for (std::int64_t k = 0; k < t.cols(); ++k) t.set(i, k, random.normal());
  }

  std::string run_forward(Outputs& got) {
    fill_accumulators(got);
    Data data = data_;
    const Operands o = operands_of(got, data);
    int status = LL_OK;
    const std::string text = backend_.run(problem(), o, &outcome_, &status);
    if (!text.empty() || status != LL_OK) return "status " + std::to_string(status) + ": " + text;
    if (std::string changed = inputs_changed(data); !changed.empty()) return changed;
    if (writes_over_z()) in_place_ = std::move(data.z);
    return surroundings(got);
  }

  // forward, then backward twice from what forward saved.
  std::string run_backward(Outputs& got) {
    Tensor stats(DType::f32, c_.rows, 4), lse(DType::f32, c_.rows, 1);
    Outcome outcome;
    int status = LL_OK;
    Problem forward = problem();
    forward.call = Call::forward;
    forward.dx = forward.dw = forward.dz = DType::none;
    forward.accumulate_dx = forward.accumulate_dw = forward.in_place = false;
    Operands o = data_.operands();
    o.stats = stats.view(), o.row_lse = lse.view();
    std::string text = c_.saved == Saved::reference ? reference::run(forward, o, &outcome, &status)
                                                    : backend_.run(forward, o, &outcome, &status);
    if (!text.empty() || status != LL_OK)
      return "forward before backward, status " + std::to_string(status) + ": " + text;

    const std::vector<std::uint8_t> stats_before = stats.memory(), lse_before = lse.memory();
    Outputs again = Outputs::of(c_, DType::f32, c_.dx, c_.dw, c_.in_place ? DType::none : c_.dz, c_.out_layout);
    Tensor z_again;
    for (Outputs* out : {&got, &again}) {
      fill_accumulators(*out);
      Data data = data_;
      Operands b = operands_of(*out, data);
      if (c_.saved == Saved::lse) {
        b.lse = lse.view();
      } else {
        b.stats = stats.view();
      }
      Outcome backward_outcome;
      text = backend_.run(problem(), b, &backward_outcome, &status);
      if (!text.empty() || status != LL_OK) return "backward, status " + std::to_string(status) + ": " + text;
      if (std::string changed = inputs_changed(data); !changed.empty()) return changed;
      if (writes_over_z()) (out == &got ? in_place_ : z_again) = std::move(data.z);
      if (stats.memory() != stats_before || lse.memory() != lse_before) return "saved statistics were changed";
      if (std::string outside = surroundings(*out); !outside.empty()) return outside;
    }
    if (got.dx && got.dx.bytes() != again.dx.bytes()) return "a second backward gave other bits of dX";
    if (got.dw && got.dw.bytes() != again.dw.bytes()) return "a second backward gave other bits of dW";
    if (got.dz && got.dz.bytes() != again.dz.bytes()) return "a second backward gave other bits of dz";
    if (in_place_ && in_place_.bytes() != z_again.bytes()) return "a second backward gave other bits of dz";
    return {};
  }

  static std::string differs(const char* what, std::int64_t i, std::int64_t j, double got, double want,
                             double tolerance) {
    char text[200];
    std::snprintf(text, sizeof text, "%s[%lld,%lld] is %.9g, the reference %.9g, tolerance %.3g", what,
                  static_cast<long long>(i), static_cast<long long>(j), got, want, tolerance);
    return text;
  }
  // NaN where NaN is right, the same infinity where that is, else within the tolerance.
  static bool agrees(double got, double want, double tolerance) {
    if (std::isnan(want)) return std::isnan(got);
    if (std::isinf(want)) return got == want;
    return std::abs(got - want) <= tolerance;
  }

  std::string compare_outcome(const Bounds& bounds) const {
    if (outcome_.kept != truth_outcome_.kept) {
      return "kept " + std::to_string(outcome_.kept) + " rows, the reference " + std::to_string(truth_outcome_.kept);
    }
    if (outcome_.bad != truth_outcome_.bad) {
      return "counted " + std::to_string(outcome_.bad) + " bad rows, the reference " +
             std::to_string(truth_outcome_.bad);
    }
    const double plain = truth_outcome_.kept == 0 ? 0.0 : std::abs(plain_outcome_.loss - truth_outcome_.loss);
    const double tolerance = bounds.total + 2.0 * plain + kUnit * std::abs(truth_outcome_.loss);
    if (!agrees(outcome_.loss, truth_outcome_.loss, tolerance)) {
      return differs("loss", 0, 0, outcome_.loss, truth_outcome_.loss, tolerance);
    }
    return {};
  }

  // Compares a tensor whose element (i, j) may be off by bound(i, j) + 2 max_j |plain's error in row i| + its rounding.
  template <class Bound>
  std::string compare(const char* what, const Tensor& got, const Tensor& truth, const Tensor& plain,
                      const Tensor& plain_rounded, const Tensor* added_to, Bound bound) {
    double square = 0.0, plain_square = 0.0, rounded_square = 0.0;
    const double unit = unit_of(got.dtype()), underflow = underflow_of(got.dtype());
    for (std::int64_t i = 0; i < got.rows(); ++i) {
      double plain_error = 0.0;
      for (std::int64_t j = 0; plain && j < got.cols(); ++j) {
        const double e = plain.at(i, j) - truth.at(i, j);
        if (std::isfinite(e)) {
          plain_error = std::max(plain_error, std::abs(e));
          plain_square += e * e;
        }
        const double rounded = plain_rounded ? plain_rounded.at(i, j) - truth.at(i, j) : e;
        if (std::isfinite(rounded)) rounded_square += rounded * rounded;
      }
      for (std::int64_t j = 0; j < got.cols(); ++j) {
        if (j == free_dx_column && std::string(what) == "dX" && !std::isnan(truth.at(i, (j + 1) % got.cols())))
          continue;
        const double old = added_to != nullptr ? added_to->at(i, j) : 0.0;
        const double want = truth.at(i, j) + old;
        const double tolerance =
            bound(i, j) + 2.0 * plain_error + unit * std::abs(want) + underflow + 2.0 * kUnit * std::abs(old);
        if (!agrees(got.at(i, j), want, tolerance)) return differs(what, i, j, got.at(i, j), want, tolerance);
        const double e = got.at(i, j) - want;
        if (std::isfinite(e)) square += e * e;
      }
    }
    // Ratios of a handful of elements are luck; foreign statistics bring errors that the plain pipeline does not have.
    const bool comparable = c_.call != Call::backward || c_.saved == Saved::own;
    if (ratios_ != nullptr && comparable && added_to == nullptr && plain && got.rows() * got.cols() >= 60) {
      const std::string dtypes = c_.kind == Kind::linear
                                     ? std::string(" X ") + contract::name_of(c_.x) + " W " + contract::name_of(c_.w)
                                     : std::string(" z ") + contract::name_of(c_.z);
      const bool is_gradient = what[0] == 'd';
      ratios_->add(backend_.name() + dtypes + ' ' + what +
                       (is_gradient ? std::string(" ") + contract::name_of(got.dtype()) : ""),
                   std::sqrt(square), std::sqrt(plain_square), std::sqrt(rounded_square));
    }
    return {};
  }

  std::string compare_rows(const Outputs& got, const Bounds& bounds) {
    auto of = [](const std::vector<double>& v) {
      return [&v](std::int64_t i, std::int64_t) { return v[static_cast<std::size_t>(i)]; };
    };
    std::string error;
    if (got.row_loss) {
      error = compare("row_loss", got.row_loss, truth_.row_loss, plain_.row_loss, plain_rounded_.row_loss, nullptr,
                      of(bounds.loss));
    }
    if (error.empty() && got.row_lse) {
      error = compare("row_lse", got.row_lse, truth_.row_lse, plain_.row_lse, plain_rounded_.row_lse, nullptr,
                      of(bounds.lse));
    }
    if (error.empty() && got.row_logprob) {
      error = compare("row_logprob", got.row_logprob, truth_.row_logprob, plain_.row_logprob,
                      plain_rounded_.row_logprob, nullptr, of(bounds.nll));
    }
    if (error.empty() && got.stats) error = compare_stats(got.stats, bounds);
    return error;
  }

  // Any reference m is allowed, so what statistics mean is compared, not their numbers.
  std::string compare_stats(const Tensor& got, const Bounds& bounds) const {
    const auto vocab = static_cast<double>(c_.vocab);
    for (std::int64_t i = 0; i < c_.rows; ++i) {
      const auto row = static_cast<std::size_t>(i);
      double g[4], t[4];
      for (std::int64_t n = 0; n < 4; ++n) g[n] = got.at(i, n), t[n] = truth_.stats.at(i, n);
      if (reference::load_integer(data_.y.view(), i) == c_.ignore_index()) {
        for (std::int64_t n = 0; n < 4; ++n) {
          if (g[n] != 0.0) return differs("stats of an ignored row", i, n, g[n], 0.0, 0.0);
        }
        continue;
      }
      if (std::isnan(t[0])) continue;  // a bad row; what backward makes of it is compared there
      const double s = g[1] + std::exp(g[2] - g[0]), s_true = t[1] + std::exp(t[2] - t[0]);
      const double lse = g[0] + std::log(s), lse_true = t[0] + std::log(s_true);
      const double lse_tolerance = bounds.lse[row] + 2.0 * kUnit * std::abs(g[0]);
      if (!agrees(lse, lse_true, lse_tolerance)) return differs("lse of stats", i, 0, lse, lse_true, lse_tolerance);
      const double q_tolerance = bounds.one_minus_p[row] + bounds.z_y[row] * t[1] / s_true;
      if (!agrees(g[1] / s, t[1] / s_true, q_tolerance)) {
        return differs("1 - p_y of stats", i, 1, g[1] / s, t[1] / s_true, q_tolerance);
      }
      if (!agrees(g[2], t[2], bounds.z_y[row])) return differs("z_y of stats", i, 2, g[2], t[2], bounds.z_y[row]);
      if (c_.alpha == 0.0 && g[3] == 0.0) continue;  // only smoothing needs the sum
      const double sum = g[3] + vocab * g[0], sum_true = t[3] + vocab * t[0];
      if (!agrees(sum, sum_true, bounds.sum[row])) {
        return differs("sum z of stats", i, 3, sum, sum_true, bounds.sum[row]);
      }
    }
    return {};
  }

  std::string compare_gradients(const Outputs& got, const Bounds& bounds) {
    Outputs old;
    if (c_.accumulate_dx || c_.accumulate_dw) {
      old = Outputs::of(c_, DType::f32, c_.dx, c_.dw, DType::none, c_.out_layout);
      fill_accumulators(old);
    }
    auto of = [](const std::vector<double>& v) {
      return [&v](std::int64_t i, std::int64_t) { return v[static_cast<std::size_t>(i)]; };
    };
    std::string error;
    if (got.dx) {
      error = compare("dX", got.dx, truth_.dx, plain_.dx, plain_rounded_.dx, c_.accumulate_dx ? &old.dx : nullptr,
                      of(bounds.dx));
      if (error.empty() && !c_.accumulate_dx) error = ignored_rows_are_zero("dX", got.dx);
    }
    if (error.empty() && got.dw) {
      error = compare("dW", got.dw, truth_.dw, plain_.dw, plain_rounded_.dw, c_.accumulate_dw ? &old.dw : nullptr,
                      of(bounds.dw));
    }
    const Tensor& dz = in_place_ ? in_place_ : got.dz;
    if (error.empty() && dz) {
      error = compare("dz", dz, truth_.dz, plain_.dz, plain_rounded_.dz, nullptr, [&](std::int64_t i, std::int64_t j) {
        return bounds.dz[static_cast<std::size_t>(i * c_.vocab + j)];
      });
      if (error.empty()) error = ignored_rows_are_zero("dz", dz);
    }
    return error;
  }

  std::string ignored_rows_are_zero(const char* what, const Tensor& got) const {
    for (std::int64_t i = 0; i < got.rows(); ++i) {
      if (reference::load_integer(data_.y.view(), i) != c_.ignore_index()) continue;
      for (std::int64_t k = 0; k < got.cols(); ++k) {
        if (got.at(i, k) != 0.0) return differs(what, i, k, got.at(i, k), 0.0, 0.0);
      }
    }
    return {};
  }

  const Case c_;
  Backend& backend_;
  RatioTable* ratios_;
  const Data data_;
  Outputs truth_, plain_, plain_rounded_;
  Outcome truth_outcome_, plain_outcome_, outcome_;
  Tensor in_place_;  // z after a call that wrote D over it
};

// ratios may be null.
inline std::string check_case(const Case& c, Backend& backend, RatioTable* ratios) {
  return CaseCheck(c, backend, ratios).run();
}

}  // namespace logitless::test
