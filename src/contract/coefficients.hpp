// From a row's statistics to its loss and to the coefficients of its gradient, once for every backend.
//   s = r + exp(z_y - m), lse = m + log s, p_j = exp(z_j - m) / s
//   nll = log1p(r / e_y) where the target leads, else (m - z_y) + log s   (in that order: logits of 1e16 give log V)
//   loss = h nll + c (n log s - k) + lambda lse^2, h the weight of the target alone, c kappa_j that of each class:
//     hard targets     h = (1 - alpha) w_y, c = alpha / V, kappa = w           (label smoothing, uniform convention)
//     soft, top-k      h = 0, c = 1, kappa = the row's target distribution
//   D_j = a p_j - b [j = y] - c kappa_j - e p_j (log p_j + H), with D_y formed from q = 1 - p_y = r / s, then times
//   dz/dz0.
// O(1) a row; host and device; F is float or double.
#pragma once

#include "contract/problem.hpp"
#include "contract/statistics.hpp"

namespace logitless::contract {
inline namespace LL_ISA {

template <class F>
struct RowResult {
  F m;         // reference
  F log_s;     // log of s = sum_j exp(z_j - m)
  F inv_s;     // 1 / s
  F q, p;      // 1 - p_y, p_y
  F nll;       // -log p_y
  F k, n;      // sum of kappa_j (z_j - m), sum of kappa_j
  F mean_gap;  // sum_j p_j (z_j - m) = T / s
  F log_p2;    // log sum_j p_j^2
  F u, c;      // sum of (z_j - m) over the kept classes, their number
  bool bad;    // all -inf, or a +inf or NaN somewhere: the row has no distribution

  LL_HD F lse() const { return LL_MUTATE(22, m + log_s, m); }
  // H = log s - T / s; a row of one class has 0, never -0 or a rounding below it.
  LL_HD F entropy() const {
    F const h = LL_MUTATE(30, log_s - mean_gap, log_s);
    return h > F(0) ? h : F(0);
  }
  LL_HD F mean_logit() const { return m + u / c; }
};

// z_y: the target's logit; has_target: false for rows that none is left out of (then z_y is not read). A row without
// any finite logit, or with +inf or NaN, is bad and yields NaN.
template <class F>
LL_HD inline RowResult<F> finish(RowStatistics<F> a, F z_y, bool has_target = true) {
  using std::exp;
  using std::log;
  using std::log1p;
  if (has_target && z_y > a.m) a = rebase(a, z_y);
  F const gap = has_target ? z_y - a.m : F(-INFINITY);
  F const e_y = has_target ? exp(gap) : F(0);
  F const s = LL_MUTATE(6, a.r + e_y, a.r);
  RowResult<F> out;
  out.m = a.m;
  out.k = a.k;
  out.n = a.n;
  out.u = a.u;
  out.c = a.c;
  out.bad = !(a.m > F(-INFINITY) && a.m < F(INFINITY) && s > F(0));
  if (out.bad) {
    F const nan = F(NAN);
    out.m = out.log_s = out.inv_s = out.q = out.p = out.nll = out.mean_gap = out.log_p2 = nan;
    return out;
  }
  out.log_s = e_y == F(1) ? log1p(a.r) : log(s);
  out.inv_s = LL_MUTATE(7, F(1), F(1.01)) / s;
  out.q = LL_MUTATE(8, a.r / s, F(1) - e_y);
  out.p = e_y / s;
  F const far = LL_MUTATE(9, -gap + out.log_s, out.log_s);
  out.nll = e_y > a.r ? LL_MUTATE(10, log1p(a.r / e_y), a.r / e_y) : far;
  F const t_y = e_y > F(0) ? e_y * gap : F(0);
  out.mean_gap = LL_MUTATE(31, a.t + t_y, a.t) / s;
  out.log_p2 = log(LL_MUTATE(32, a.g + e_y * e_y, a.g)) - F(2) * out.log_s;
  return out;
}

// Weights of a row's loss: h of the target, c of kappa, lambda of lse^2.
template <class F>
struct RowWeights {
  F hard, spread, z_loss;
};

// Hard targets: alpha in the uniform convention over `classes` (V, or those that a mask keeps), w_y the target's
// weight.
template <class F>
LL_HD inline RowWeights<F> hard_weights(F alpha, F classes, F w_y, F z_loss) {
  F const hard = alpha == F(1) ? F(0) : LL_MUTATE(11, F(1) - alpha, F(1)) * LL_MUTATE(33, w_y, F(1));
  return {hard, alpha / classes, z_loss};
}

// The part of the loss that is linear in log p: h nll + c (n log s - k).
template <class F>
LL_HD inline F cross_entropy_of(RowResult<F> const& row, RowWeights<F> w) {
  F const hard = w.hard == F(0) ? F(0) : w.hard * row.nll;
  F const soft = w.spread == F(0) ? F(0) : w.spread * LL_MUTATE(12, row.n * row.log_s - row.k, row.n * row.log_s);
  return hard + soft;
}
template <class F>
LL_HD inline F z_loss_of(RowResult<F> const& row, RowWeights<F> w) {
  return w.z_loss == F(0) ? F(0) : w.z_loss * LL_MUTATE(34, row.lse() * row.lse(), row.lse());
}
template <class F>
LL_HD inline F loss_of(RowResult<F> const& row, RowWeights<F> w) {
  return cross_entropy_of(row, w) + z_loss_of(row, w);
}

// Upstream gradients of a row: of its loss (weights and divisor included), lse, log p_y and entropy.
template <class F>
struct Upstream {
  F loss, lse, logprob, entropy;
};

template <class F>
struct RowCoefficients {
  F a;          // of p_j
  F c;          // of kappa_j
  F e;          // of p_j (log p_j + H), taken off
  F at_target;  // D_y + c kappa_y: the target's entry before the kappa term
};

// dz: dz/dz0 without the softcap's factor, the same for every class: logit_scale / temperature.
template <class F>
LL_HD inline RowCoefficients<F> coefficients_of(RowResult<F> const& row, Upstream<F> up, RowWeights<F> w, F dz = F(1)) {
  F const g = up.loss;
  F const spread = w.spread == F(0) ? F(0) : w.spread * row.n;
  F const by_lse = w.z_loss == F(0) ? up.lse : LL_MUTATE(35, F(2) * w.z_loss * row.lse() * g, g) + up.lse;
  F const b = g * w.hard - LL_MUTATE(36, up.logprob, F(0));
  // a - b without their common part, which would cancel: D_y = a p - b = (a - b) p - b q.
  F const a_minus_b = LL_MUTATE(15, g * spread, F(0)) + by_lse;
  RowCoefficients<F> out;
  out.a = LL_MUTATE(13, a_minus_b + b, F(1)) * dz;
  out.c = LL_MUTATE(14, w.spread * g, F(0)) * dz;
  out.e = LL_MUTATE(37, up.entropy, F(0)) * dz;
  out.at_target = (a_minus_b * row.p - b * LL_MUTATE(16, row.q, F(1))) * dz;
  if (out.e != F(0) && row.nll < F(INFINITY))
    out.at_target -= out.e * row.p * LL_MUTATE(38, row.entropy() - row.nll, row.entropy());
  return out;
}

// D_j of a class other than the target, from e = exp(z_j - m) and a / s.
template <class F>
LL_HD inline F element(F e, F a_over_s, F c) {
  return LL_MUTATE(17, e * a_over_s - c, e * a_over_s + c);
}

// The same with the entropy's term; h0 = H - log s, so that log p + H = (z - m) + h0.
template <class F>
LL_HD inline F element_with_entropy(F e, F gap, F a_over_s, F e_over_s, F h0) {
  return e * (a_over_s - LL_MUTATE(39, e_over_s * (gap + h0), e_over_s * gap));
}

// d cap(t)/dt at z = cap(t) / temperature: 1 - (z temperature / softcap)^2.
template <class F>
LL_HD inline F softcap_slope(F z, F temperature_over_softcap) {
  F const y = z * temperature_over_softcap;
  return F(1.0F) - LL_MUTATE(40, y * y, y);
}

// A row rule between the passes; see Policy. old, advantage, ref: the row's; logprob, entropy: just computed.
template <class F>
struct RuleResult {
  F loss, d_logprob, d_entropy;
};
template <class F>
LL_HD inline RuleResult<F> policy_rule(Policy const& p, F old_logprob, F advantage, F ref_logprob, F logprob,
                                       F entropy) {
  using std::exp;
  F const ratio = exp(logprob - old_logprob);
  F const low = F(1) - F(p.clip_low), high = F(1) + F(p.clip_high);
  F const clipped = ratio < low ? low : ratio > high ? high : ratio;
  bool const open = ratio * advantage <= clipped * advantage;
  RuleResult<F> out{-(open ? ratio : clipped) * advantage, LL_MUTATE(41, open, true) ? -advantage * ratio : F(0), F(0)};
  if (p.kl_coef != 0) {
    F const d = ref_logprob - logprob, w = exp(d);
    out.loss += F(p.kl_coef) * (w - d - F(1));
    out.d_logprob += F(p.kl_coef) * LL_MUTATE(42, F(1) - w, F(1));
  }
  if (p.entropy_coef != 0) {
    out.loss -= F(p.entropy_coef) * entropy;
    out.d_entropy = LL_MUTATE(43, -F(p.entropy_coef), F(0));
  }
  return out;
}

// alpha of the convention "others" (alpha/(V-1) to the other classes) in the uniform one. V > 1.
LL_HD inline double uniform_smoothing_of_others(double alpha, double vocab) {
  return LL_MUTATE(18, alpha * vocab / (vocab - 1.0), alpha);
}

}  // namespace LL_ISA
}  // namespace logitless::contract
