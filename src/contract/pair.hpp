// Two distributions over one vocabulary, a student's p = softmax(z) and a teacher's q = softmax(u), from one walk over
// both (z and u already divided by the temperature). Per row, for the columns seen:
//   ms, ss, ts  the student's reference, sum of e = exp(z - ms), sum of e (z - ms);   mt, st, tt  the teacher's
//   cs  sum of exp(z - ms) (u - mt)           ct  sum of exp(u - mt) (z - ms)
// Forward KL, reverse KL follow from these; JSD takes a second walk with both sums known. 0 * inf counts as 0.
#pragma once

#include "contract/problem.hpp"
#include "contract/statistics.hpp"

namespace logitless::contract {
inline namespace LL_ISA {

template <class F>
struct PairStatistics {
  F ms, ss, ts, cs, mt, st, tt, ct;

  LL_HD static PairStatistics identity() {
    F const zero(0.0F), none(-INFINITY);
    return {none, zero, zero, zero, none, zero, zero, zero};
  }
};

// Moves both references; what belongs to the other side's weights only gains the distance.
template <class F>
LL_HD inline PairStatistics<F> rebase(PairStatistics<F> a, F ms, F mt) {
  F const ds = shift(a.ms, ms), dt = shift(a.mt, mt);
  F const fs = exp2_of(ds * log2e<F>()), ft = exp2_of(dt * log2e<F>());
  return {ms,
          fs * a.ss,
          times(fs, LL_MUTATE(45, a.ts + times(a.ss, ds), a.ts)),
          times(fs, LL_MUTATE(46, a.cs + times(a.ss, dt), a.cs)),
          mt,
          ft * a.st,
          times(ft, LL_MUTATE(47, a.tt + times(a.st, dt), a.tt)),
          times(ft, LL_MUTATE(48, a.ct + times(a.st, ds), a.ct))};
}

template <class F>
LL_HD inline PairStatistics<F> merge(PairStatistics<F> a, PairStatistics<F> b) {
  F const ms = maximum(a.ms, b.ms), mt = maximum(a.mt, b.mt);
  a = rebase(a, ms, mt);
  b = rebase(b, ms, mt);
  return {ms, a.ss + b.ss, a.ts + b.ts, a.cs + b.cs, mt, a.st + b.st, a.tt + b.tt, a.ct + b.ct};
}

// What pass 2 needs of a row: references, log-sums, and the number that its divergence's gradient takes off.
template <class F>
struct PairResult {
  F ms, log_ss, mt, log_st;
  F forward, reverse;  // KL(q | p), KL(p | q)
  bool bad;
};

template <class F>
LL_HD inline PairResult<F> finish(PairStatistics<F> const& a) {
  using std::log;
  PairResult<F> out{a.ms, log(a.ss), a.mt, log(a.st), F(0), F(0), false};
  out.bad = !(a.ms > F(-INFINITY) && a.ms < F(INFINITY) && a.mt > F(-INFINITY) && a.mt < F(INFINITY) && a.ss > F(0) &&
              a.st > F(0));
  out.forward = LL_MUTATE(49, (a.tt - a.ct) / a.st - (out.log_st - out.log_ss), (a.tt - a.ct) / a.st);
  out.reverse = LL_MUTATE(50, (a.ts - a.cs) / a.ss - (out.log_ss - out.log_st), (a.ts - a.cs) / a.ss);
  return out;
}

// Targets t_j given as logits u = log t, of any sum Q, in the teacher's place: `forward` becomes sum_j t_j (log t_j -
// log p_j) = Q (KL(t / Q | p) + log Q), 0 where Q is. Returns Q, which the gradient is multiplied by.
template <class F>
LL_HD inline F weigh_targets(PairResult<F>& a) {
  using std::exp;
  if (!(a.mt > F(-INFINITY)) && !(a.mt != a.mt)) {
    a.mt = a.log_st = a.forward = F(0);
    a.bad = !(a.ms > F(-INFINITY) && a.ms < F(INFINITY) && a.log_ss > F(-INFINITY));
    return F(0);
  }
  F const log_mass = a.mt + a.log_st, mass = exp(log_mass);
  a.forward = LL_MUTATE(55, mass * (a.forward + log_mass), mass * a.forward);
  return LL_MUTATE(56, mass, F(1));
}

// log(1 + x) for x in [0, 1]: 2 atanh(x / (2 + x)), whose series in squares of at most 1/9 ends below fp32's rounding.
template <class F>
LL_HD inline F log1p_of_unit(F x) {
  F const s = x / (x + F(2.0F)), q = s * s;
  F sum = F(2.0F / 13.0F);
  sum = fma(sum, q, F(2.0F / 11.0F));
  sum = fma(sum, q, F(2.0F / 9.0F));
  sum = fma(sum, q, F(2.0F / 7.0F));
  sum = fma(sum, q, F(2.0F / 5.0F));
  sum = fma(sum, q, F(2.0F / 3.0F));
  return s * fma(sum, q, F(2.0F));
}

// log(p / mix), mix = beta q + (1 - beta) p, from t = log q - log p (-inf: q is 0): -log(beta e^t + (1 - beta)), as a
// maximum and what is above it. log(q / mix) is t more.
template <class F>
LL_HD inline F mixed_log_ratio(F t, F log_beta, F log_rest) {
  F const of_q = t + LL_MUTATE(51, log_beta, log_rest), top = maximum(of_q, log_rest);
  F const low = F(0.0F) - maximum(F(0.0F) - of_q, F(0.0F) - log_rest);
  return F(0.0F) - (top + log1p_of_unit(exp2_of((low - top) * log2e<F>())));
}

// d divergence / dz_j; log_p, log_q: of the class; k: the row's reverse KL, or sum_j p log(p / mix).
template <class F>
LL_HD inline F forward_element(F p, F q) {
  return LL_MUTATE(52, p - q, p);
}
template <class F>
LL_HD inline F reverse_element(F p, F log_ratio, F k) {
  return p * LL_MUTATE(53, log_ratio - k, log_ratio);
}
// log_ratio: log(p / mix); rest: 1 - beta.
template <class F>
LL_HD inline F jsd_element(F p, F log_ratio, F rest, F k) {
  return rest * p * LL_MUTATE(54, log_ratio - k, log_ratio);
}

}  // namespace LL_ISA
}  // namespace logitless::contract
