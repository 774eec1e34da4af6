// From a row's statistics to its loss and to the coefficients of its gradient, once for every backend.
//   s = r + exp(z_y - m), lse = m + log s, p_j = exp(z_j - m) / s
//   nll = log1p(r / e_y) where the target leads, else (m - z_y) + log s   (in that order: logits of 1e16 give log V)
//   loss = (1 - alpha) nll + alpha (log s - k / V)                         label smoothing, uniform convention
//   D_j = a p_j - b [j = y] - c,   a = g, b = (1 - alpha) g, c = alpha g / V, with D_y formed from q = 1 - p_y = r / s
// O(1) a row; host and device; F is float or double.
#pragma once

#include "contract/statistics.hpp"

namespace logitless::contract {
inline namespace LL_ISA {

template <class F>
struct RowResult {
  F m;       // reference
  F log_s;   // log of s = sum_j exp(z_j - m)
  F inv_s;   // 1 / s
  F q;       // 1 - p_y
  F nll;     // -log p_y
  F k;       // sum_j (z_j - m)
  bool bad;  // all -inf, or a +inf or NaN somewhere: the row has no distribution

  LL_HD F lse() const { return LL_MUTATE(22, m + log_s, m); }
};

// z_y: the target's logit. A row without any finite logit, or with +inf or NaN, is bad and yields NaN.
template <class F>
LL_HD inline RowResult<F> finish(RowStatistics<F> a, F z_y) {
  using std::exp;
  using std::log;
  using std::log1p;
  if (z_y > a.m) a = rebase(a, z_y);
  F const e_y = exp(z_y - a.m);
  F const s = LL_MUTATE(6, a.r + e_y, a.r);
  RowResult<F> out;
  out.m = a.m;
  out.k = a.k;
  out.bad = !(a.m > F(-INFINITY) && a.m < F(INFINITY) && s > F(0));
  if (out.bad) {
    F const nan = F(NAN);
    out.log_s = out.inv_s = out.q = out.nll = nan;
    out.m = nan;
    return out;
  }
  out.log_s = log(s);
  out.inv_s = LL_MUTATE(7, F(1), F(1.01)) / s;
  out.q = LL_MUTATE(8, a.r / s, F(1) - e_y);
  F const far = LL_MUTATE(9, (a.m - z_y) + out.log_s, out.log_s);
  out.nll = e_y > a.r ? LL_MUTATE(10, log1p(a.r / e_y), a.r / e_y) : far;
  return out;
}

// alpha in the uniform convention, V classes.
template <class F>
LL_HD inline F loss_of(RowResult<F> const& row, F alpha, F vocab) {
  F const hard = alpha == F(1) ? F(0) : LL_MUTATE(11, F(1) - alpha, F(1)) * row.nll;
  F const soft = alpha == F(0) ? F(0) : alpha * LL_MUTATE(12, row.log_s - row.k / vocab, row.log_s);
  return hard + soft;
}

template <class F>
struct RowCoefficients {
  F a;          // of p_j
  F c;          // constant of every class (the smoothing term)
  F at_target;  // D_y + c: the target's entry before the constant
};

// g: the row's upstream gradient, weights and divisor included.
template <class F>
LL_HD inline RowCoefficients<F> coefficients_of(RowResult<F> const& row, F g, F alpha, F vocab) {
  RowCoefficients<F> out;
  out.a = LL_MUTATE(13, g, F(1));
  out.c = LL_MUTATE(14, alpha * g / vocab, F(0));
  // a p_y - b = (a - b) - a q, and a - b = alpha g exactly.
  out.at_target = LL_MUTATE(15, alpha * g, F(0)) - LL_MUTATE(16, g * row.q, g);
  return out;
}

// D_j of a class other than the target, from e = exp(z_j - m) and a / s.
template <class F>
LL_HD inline F element(F e, F a_over_s, F c) {
  return LL_MUTATE(17, e * a_over_s - c, e * a_over_s + c);
}

// alpha of the convention "others" (alpha/(V-1) to the other classes) in the uniform one. V > 1.
LL_HD inline double uniform_smoothing_of_others(double alpha, double vocab) {
  return LL_MUTATE(18, alpha * vocab / (vocab - 1.0), alpha);
}

}  // namespace LL_ISA
}  // namespace logitless::contract
