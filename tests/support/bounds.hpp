// Derived error bounds of an implementation that keeps fp32 logits and fp32 statistics, for one conformance case. To
// each comes twice the error of the plain pipeline (plain.hpp); nothing is tuned. First-order analysis, u = 2^-24:
//   logit          |dz_ij| <= g(H) u |x_i| |w_j|, g(n) = min(n + 1, 6 sqrt(n + 1)): rounding errors of n terms are
//                  random, and 6 standard deviations are the bound (Higham & Mary 2019)
//   exponential    eta_ij = dz_ij + 2.3 u |z_ij - M| + (sum over a leaf, merges, polynomial) u, relative
//   nll            sum_{j != y} p_j eta_j + (1 - p_y) eta_y + rounding; the same without the factor for lse
//   D_ij           |g| p_ij (eta_ij + mean eta), and for the target |g| p_y d(nll), as 1 - p_y is formed from r / s
//   dX_i, dW_j     the norms of D's error against max_k |W_jk|, max_k |X_ik|; exponentials or D kept in 16 bits add
//                  their unit roundoff as independent errors (5 standard deviations, at most their sum)
// Cost RHV once for the logits in double, else O(RV).
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "support/case.hpp"

namespace logitless::test {

// What the implementation keeps in 16 bits between the passes.
struct Storage {
  double unit = 0.0;      // unit roundoff of kept exponentials or of D as a product's operand; 0: all fp32
  double absolute = 0.0;  // smallest error of an exponential relative to the row's reference (fp16's underflow)
  bool scaled_x = false;  // dW = E^T (diag(a/s) X) with 16-bit X: one rounding more
  std::int64_t leaf = 256;
};

inline constexpr double kUnit = 0x1p-24;  // fp32's unit roundoff

inline double unit_of(DType t) {
  return t == DType::bf16 ? 0x1p-8 : t == DType::f16 ? 0x1p-11 : t == DType::f32 ? kUnit : 0x1p-53;
}
// Half the spacing of subnormal numbers.
inline double underflow_of(DType t) {
  return t == DType::bf16 ? 0x1p-134 : t == DType::f16 ? 0x1p-25 : t == DType::f32 ? 0x1p-150 : 0.0;
}

// repeated: the terms may all be one number, whose rounding errors add up.
inline double growth(double terms, bool repeated) {
  return repeated ? terms + 1.0 : std::min(terms + 1.0, 6.0 * std::sqrt(terms + 1.0));
}

struct Bounds {
  std::vector<double> nll, loss, lse, one_minus_p, sum, z_y;  // [R]
  std::vector<double> dx, dw;                                 // [R], [V]: for every element of that row
  std::vector<double> dz;                                     // [R,V]
  std::vector<double> upstream;                               // [R] g_i
  double total = 0.0;                                         // of the reduced loss

  Bounds(const Case& c, const Data& data, const Storage& storage) : c_(c), data_(data), storage_(storage) {
    for (Layout layout : {c.x_layout, c.w_layout}) {
      repeated_ = repeated_ || layout == Layout::shared_row || layout == Layout::shared_column;
    }
    derive();
  }

 private:
  double growth(double terms) const { return test::growth(terms, repeated_); }
  // Roundings to 16 bits of entries whose sizes have this sum and this sum of squares.
  double rounded_apart(double sizes, double squares) const {
    return repeated_ ? sizes : std::min(sizes, 5.0 * std::sqrt(squares));
  }

  void derive() {
    const std::int64_t rows = c_.rows, vocab = c_.vocab;
    const auto n = static_cast<std::size_t>(rows);
    for (std::vector<double>* v : {&nll, &loss, &lse, &one_minus_p, &sum, &z_y, &dx, &upstream}) v->assign(n, 0.0);
    if (c_.kind == Kind::logits && c_.wants_gradient()) dz.assign(static_cast<std::size_t>(rows * vocab), 0.0);
    if (c_.kind == Kind::linear) read_linear();
    const auto v = static_cast<std::size_t>(vocab);
    dw_sure_.assign(v, 0.0), dw_random_.assign(v, 0.0), dw_mass_.assign(v, 0.0);

    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < rows; ++i) kept += target(i) != c_.ignore_index() ? 1 : 0;
    const bool mean = c_.reduction == Reduction::mean;
    const double divisor = mean ? (c_.normalizer > 0.0 ? c_.normalizer : static_cast<double>(kept)) : 1.0;
    double mass = 0.0;
    for (std::int64_t i = 0; i < rows; ++i) {
      if (target(i) == c_.ignore_index()) continue;
      const double row = data_.upstream ? data_.upstream.at(i) : (c_.reduction == Reduction::none ? 1.0 : 0.0);
      upstream[static_cast<std::size_t>(i)] = row + (c_.reduction == Reduction::none ? 0.0 : data_.grad_loss / divisor);
      mass += row_bounds(i);
      total += loss[static_cast<std::size_t>(i)];
    }
    total = kept == 0 ? 0.0 : (total + growth(static_cast<double>(kept)) * kUnit * mass) / divisor;

    const double rows_growth = growth(static_cast<double>(kept)) + 4.0;
    const double unit = (storage_.scaled_x ? 2.0 : 1.0) * storage_.unit;
    dw.assign(v, 0.0);
    for (std::size_t j = 0; j < v; ++j) {
      dw[j] = dw_sure_[j] + rows_growth * kUnit * dw_mass_[j] + unit * rounded_apart(dw_mass_[j], dw_random_[j]);
    }
  }

  std::int64_t target(std::int64_t i) const { return reference::load_integer(data_.y.view(), i); }

  void read_linear() {
    const auto h = static_cast<std::size_t>(c_.hidden);
    w_t_.assign(h * static_cast<std::size_t>(c_.vocab), 0.0);
    w_norm_.assign(static_cast<std::size_t>(c_.vocab), 0.0), w_max_ = w_norm_;
    for (std::int64_t j = 0; j < c_.vocab; ++j) {
      double square = 0.0;
      for (std::int64_t k = 0; k < c_.hidden; ++k) {
        const double value = data_.w.at(j, k);
        w_t_[static_cast<std::size_t>(k * c_.vocab + j)] = value;
        if (!std::isfinite(value)) continue;  // it masks its class, whose p is exactly 0
        square += value * value;
        double& most = w_max_[static_cast<std::size_t>(j)];
        most = std::max(most, std::abs(value));
      }
      w_norm_[static_cast<std::size_t>(j)] = std::sqrt(square);
    }
  }

  // Bounds of row i; adds to those of dW. Returns |loss_i|.
  double row_bounds(std::int64_t i) {
    const std::int64_t vocab = c_.vocab;
    const auto v = static_cast<std::size_t>(vocab);
    const std::size_t row = static_cast<std::size_t>(i);
    std::vector<double> z(v, 0.0), eta(v, 0.0), p(v, 0.0);
    double x_norm = 0.0, x_max = 0.0;
    if (c_.kind == Kind::linear) {
      for (std::int64_t k = 0; k < c_.hidden; ++k) {
        const double x = data_.x.at(i, k);
        x_norm += x * x;
        x_max = std::max(x_max, std::abs(x));
        const double* w = w_t_.data() + k * vocab;
        for (std::size_t j = 0; j < v; ++j) z[j] += x * w[j];
      }
      x_norm = std::sqrt(x_norm);
    } else {
      for (std::int64_t j = 0; j < vocab; ++j) z[static_cast<std::size_t>(j)] = data_.z.at(i, j);
    }

    const auto y = static_cast<std::size_t>(target(i));
    double top = -INFINITY;
    bool bad = false;
    for (double value : z) {
      bad = bad || std::isnan(value) || value == INFINITY;
      top = std::max(top, value);
    }
    if (bad || top == -INFINITY) return 0.0;  // NaN is the only right answer, and nothing is left in dW
    const auto first_leaf = static_cast<std::ptrdiff_t>(std::min<std::int64_t>(storage_.leaf, vocab));
    const double first_top = *std::max_element(z.begin(), z.begin() + first_leaf);
    // Of the row's maximum and the reference of kept exponentials; exp() of fp32 reaches no further than 128.
    const double apart = std::min(top - first_top, 127.0) + 1.0;
    double s = 0.0;
    for (std::size_t j = 0; j < v; ++j) s += std::exp(z[j] - top);
    const double log_s = std::log(s);

    const double levels = std::log2(static_cast<double>(vocab)) + 1.0;
    const double leaf = static_cast<double>(first_leaf);
    const double summed = growth(leaf + 2.0 * levels) + 4.0 * levels + 4.0;
    double eta_mean = 0.0, distance_mean = 0.0, dz_mean = 0.0;
    for (std::size_t j = 0; j < v; ++j) {
      const double distance = top - z[j];
      p[j] = std::exp(-distance - log_s);
      distance_mean += distance / static_cast<double>(vocab);  // infinite when a class is masked, as is the loss
      if (p[j] == 0.0) continue;
      const double logit =
          c_.kind == Kind::linear ? growth(static_cast<double>(c_.hidden)) * kUnit * x_norm * w_norm_[j] : 0.0;
      eta[j] = logit + (2.3 * distance + summed) * kUnit;
      eta_mean += p[j] * eta[j];
      dz_mean += logit / static_cast<double>(vocab);
    }
    double others = 0.0, r = 0.0;
    for (std::size_t j = 0; j < v; ++j) {
      if (j == y) continue;
      others += p[j] * eta[j];
      r += p[j];
    }
    const double moved = others + r * eta[y];  // error of log p_y
    const double nll_value = log_s + (top - z[y]);
    const bool leads = p[y] > 0.75;
    // The reference is double: its own rounding shows where fp32 keeps a loss of 1e-30 and it gives 0.
    const double exact = 8.0 * 0x1p-53 * (1.0 + std::abs(log_s) + (top - z[y]) + static_cast<double>(c_.hidden));
    nll[row] = exact + moved + 3.0 * kUnit * nll_value + (leads ? 0.0 : 2.0 * kUnit * (std::abs(log_s) + (top - z[y])));
    one_minus_p[row] = exact + p[y] * moved + 3.0 * kUnit * r;
    z_y[row] = (c_.kind == Kind::linear ? growth(static_cast<double>(c_.hidden)) * kUnit * x_norm * w_norm_[y] : 0.0) +
               kUnit * std::abs(z[y]);
    lse[row] = eta_mean + 2.0 * kUnit * (std::abs(top + log_s) + std::abs(log_s));
    const double alpha = c_.uniform_alpha();
    const double k_error = dz_mean + (summed + 3.0) * kUnit * distance_mean;
    const double soft = eta_mean + k_error + 3.0 * kUnit * (std::abs(log_s) + distance_mean);
    loss[row] = (alpha == 1.0 ? 0.0 : std::abs(1.0 - alpha) * nll[row]) + (alpha == 0.0 ? 0.0 : alpha * soft);
    // sum_j z_j = k + V m, formed by the test in double.
    sum[row] = static_cast<double>(vocab) * (k_error + kUnit * (std::abs(top) + apart));
    const double loss_value = std::abs((alpha == 1.0 ? 0.0 : (1.0 - alpha) * nll_value) +
                                       (alpha == 0.0 ? 0.0 : alpha * (log_s + distance_mean)));
    if (!c_.wants_gradient()) return loss_value;

    // A backward from lse in fp32 knows p only as exp(z - lse).
    const bool from_lse = c_.call == Call::backward && c_.saved == Saved::lse;
    const double saved = from_lse ? 2.0 * kUnit * std::abs(top + log_s) + 4.0 * kUnit : kUnit * 4.0;
    const double g = std::abs(upstream[row]);
    const double q = alpha / static_cast<double>(vocab);
    double sure = 0.0, mass = 0.0, squares = 0.0, absolute = 0.0;
    for (std::size_t j = 0; j < v; ++j) {
      const bool is_target = j == y;
      const double relative = eta[j] + eta_mean + saved + 2.3 * kUnit * apart;
      const double q_y = std::abs(1.0 - alpha) + q;
      double error = g * (p[j] * std::expm1(relative) + 3.0 * kUnit * (p[j] + q)) + 1e-37;
      if (is_target) {
        error = g * (p[j] * std::expm1(moved) + 5.0 * kUnit * (alpha + r + (from_lse ? q_y : 0.0))) + 1e-37;
        if (from_lse) error += g * p[j] * saved;
      }
      const double size = g * (is_target ? r + alpha : p[j] + q);
      const double by_w = c_.kind == Kind::linear ? w_max_[j] : 0.0;
      sure += error * by_w;
      mass += size * by_w;
      squares += size * by_w * size * by_w;
      absolute += storage_.absolute * g * by_w;
      if (c_.kind == Kind::linear) {
        dw_sure_[j] += (error + storage_.absolute * g) * x_max;
        dw_mass_[j] += size * x_max;
        dw_random_[j] += size * x_max * size * x_max;
      } else {
        dz[row * v + j] = error + storage_.unit * size;
      }
    }
    dx[row] = sure + absolute + (growth(static_cast<double>(vocab)) + 4.0) * kUnit * mass +
              storage_.unit * rounded_apart(mass, squares);
    return loss_value;
  }

  const Case& c_;
  const Data& data_;
  const Storage storage_;
  bool repeated_ = false;                              // rows or columns of an input are one in memory
  std::vector<double> w_t_, w_norm_, w_max_;           // W transposed [H,V]; |w_j| and max_k |W_jk| [V]
  std::vector<double> dw_sure_, dw_mass_, dw_random_;  // [V]
};

}  // namespace logitless::test
