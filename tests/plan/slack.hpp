// How far gradients of two plans of one problem may lie apart, element by element. D_ij enters dX and dW with a
// relative error of at most `unit` in either plan; so the difference is at most 2 unit |D| |W| and 2 unit |D|' |X|, and
// a rounding of the output. Computed in double from the definition, RHV a matrix.
//   unit   fp32: (sums of n terms: 6 sqrt(n) u, the exponential of z - m: 8 |z - m| u); exponentials kept in 16 bits,
//   or D
//          as a product's 16-bit operand: that format's unit roundoff, and once more for X scaled in 16 bits
#pragma once

#include "plan/trial.hpp"

namespace logitless::test {

struct Slack {
  std::vector<double> dx, dw;

  Slack(const Problem& p, const Operands& o, bool bf16_products) {
    const std::vector<double> x = Bench::numbers(o.x), w = Bench::numbers(o.w);
    const auto at = [](std::int64_t i, std::int64_t j, std::int64_t cols) {
      return static_cast<std::size_t>(i * cols + j);
    };
    dx.assign(x.size(), 0.0);
    dw.assign(w.size(), 0.0);
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < p.rows; ++i) kept += target(o, i) != p.loss.ignore_index ? 1 : 0;
    const double factor = p.loss.reduction == Reduction::mean && kept > 0 ? 1.0 / static_cast<double>(kept) : 1.0;
    std::vector<double> z(static_cast<std::size_t>(p.vocab));
    double widest = 0.0;
    for (std::int64_t i = 0; i < p.rows; ++i) {
      if (target(o, i) == p.loss.ignore_index) continue;
      double top = -INFINITY, low = INFINITY, sum = 0.0;
      for (std::int64_t j = 0; j < p.vocab; ++j) {
        double& zj = z[static_cast<std::size_t>(j)] = 0.0;
        for (std::int64_t k = 0; k < p.hidden; ++k) zj += x[at(i, k, p.hidden)] * w[at(j, k, p.hidden)];
        top = std::max(top, zj);
        low = std::min(low, zj);
      }
      widest = std::max(widest, top - low);
      for (double& zj : z) sum += zj = std::exp(zj - top);
      const double own = reference::load(o.grad_row_loss, i);
      const double g = std::abs(own) + (p.loss.reduction == Reduction::none ? 0.0 : o.grad_loss * factor);
      for (std::int64_t j = 0; j < p.vocab; ++j) {
        double d = z[static_cast<std::size_t>(j)] / sum + p.loss.smoothing / static_cast<double>(p.vocab);
        if (j == target(o, i)) d += 1.0;
        for (std::int64_t k = 0; k < p.hidden; ++k) {
          dx[at(i, k, p.hidden)] += g * d * std::abs(w[at(j, k, p.hidden)]);
          dw[at(j, k, p.hidden)] += g * d * std::abs(x[at(i, k, p.hidden)]);
        }
      }
    }
    const auto unit = [](DType t) { return t == DType::bf16 ? 0x1p-8 : t == DType::f16 ? 0x1p-11 : 0x1p-24; };
    const bool half = p.x == p.w && contract::is_half(p.x);
    const double sums = 6.0 * std::sqrt(static_cast<double>(p.rows + p.vocab)) + 8.0 * widest + 16.0;
    const double relative = 2.0 * (0x1p-24 * sums + (half ? unit(p.x) * (bf16_products ? 2.0 : 1.0) : 0.0));
    const auto finish = [&](std::vector<double>& bound, const View& out, bool accumulated) {
      if (!out) return bound.clear();
      // Two roundings of an output no larger than what was accumulated into (below 1) and the sum of absolute terms.
      for (double& b : bound) b = relative * b + 2.0 * unit(out.dtype) * (b + (accumulated ? 1.0 : 0.0)) + 0x1p-24;
    };
    finish(dx, o.dx, p.accumulate_dx);
    finish(dw, o.dw, p.accumulate_dw);
  }

  // "" or the first element that lies too far apart.
  static std::string compare(const char* what, const std::vector<double>& a, const std::vector<double>& b,
                             const std::vector<double>& slack) {
    if (a.size() != b.size() || a.size() != slack.size()) return std::string(what) + ": sizes differ";
    for (std::size_t i = 0; i < a.size(); ++i)
      if (!(std::abs(a[i] - b[i]) <= slack[i]))
        return std::string(what) + "[" + std::to_string(i) + "] is " + std::to_string(a[i]) + " and " +
               std::to_string(b[i]) + ", allowed " + std::to_string(slack[i]);
    return {};
  }
  std::string compare(const Result& a, const Result& b) const {
    std::string error = compare("dX", a.dx, b.dx, dx);
    return error.empty() ? compare("dW", a.dw, b.dw, dw) : error;
  }

 private:
  static std::int64_t target(const Operands& o, std::int64_t i) { return reference::load_integer(o.targets, i); }
};

}  // namespace logitless::test
