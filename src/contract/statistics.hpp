// Row statistics and their merge, written once for SIMD lanes, leaves, chunks and ranks. Per row, for the columns seen:
//   m  a reference (the largest logit)        r  sum over j != y of exp(z_j - m)
//   k  sum of kappa_j (z_j - m)               n  sum of kappa_j            (target weights; 1: the smoothing term)
//   t  sum over j != y of exp(z_j - m) (z_j - m)      (entropy)            g  sum over j != y of exp(z_j - m)^2
//   u  sum of (z_j - m) over the classes kept, c their number              (mean logit, smoothing over kept classes)
// The target's own exponential is left out of r, so that 1 - p_y = r / s keeps its relative accuracy. Merging costs
// two exponentials and is associative up to rounding, commutative, and has an identity. 0 * inf counts as 0.
#pragma once

#include "contract/numeric.hpp"

namespace logitless::contract {
inline namespace LL_ISA {

// F is float, double or a vector of floats (with operators, maximum, if_equal, exp2_of found by argument).
template <class F>
struct RowStatistics {
  F m, r, k, n;
  F t{}, g{}, u{}, c{};

  LL_HD static RowStatistics identity() {
    F const zero(0.0F);
    return {F(-INFINITY), zero, zero, zero, zero, zero, zero, zero};
  }
};

// m - to, with equal infinities 0 apart.
template <class F>
LL_HD inline F shift(F m, F to) {
  return LL_MUTATE(20, if_equal(m, to, F(0.0F), m - to), m - to);
}

// count * by, 0 where count is 0 whatever `by` is.
template <class F>
LL_HD inline F times(F count, F by) {
  return if_equal(count, F(0.0F), F(0.0F), count * by);
}

// Moves `a` to the reference `to` >= a.m.
template <class F>
LL_HD inline RowStatistics<F> rebase(RowStatistics<F> a, F to) {
  F const d = shift(a.m, to), f = exp2_of(d * log2e<F>());
  return {to,
          LL_MUTATE(1, a.r * f, a.r),
          LL_MUTATE(2, a.k + times(a.n, d), a.k),
          a.n,
          LL_MUTATE(23, f * (a.t + times(a.r, d)), f * a.t),
          LL_MUTATE(24, a.g * f * f, a.g * f),
          LL_MUTATE(25, a.u + times(a.c, d), a.u),
          a.c};
}

template <class F>
LL_HD inline RowStatistics<F> merge(RowStatistics<F> a, RowStatistics<F> b) {
  F const m = LL_MUTATE(3, maximum(a.m, b.m), a.m);
  a = rebase(a, m);
  b = rebase(b, m);
  return {m,
          LL_MUTATE(4, a.r + b.r, a.r),
          LL_MUTATE(5, a.k + b.k, b.k),
          LL_MUTATE(19, a.n + b.n, a.n),
          LL_MUTATE(26, a.t + b.t, a.t),
          LL_MUTATE(27, a.g + b.g, a.g),
          LL_MUTATE(28, a.u + b.u, a.u),
          LL_MUTATE(29, a.c + b.c, a.c)};
}

// One more column that is not the target's.
template <class F>
LL_HD inline RowStatistics<F> absorb(RowStatistics<F> a, F z) {
  F const one = if_equal(z, F(-INFINITY), F(0.0F), F(1.0F)), gap = if_equal(z, F(-INFINITY), F(-INFINITY), F(0.0F));
  return merge(a, RowStatistics<F>{z, one, gap, F(1.0F), F(0.0F), one, gap, F(1.0F)});
}

// The target's column: it gives a reference and its share of k; its exponential stays outside r.
template <class F>
LL_HD inline RowStatistics<F> absorb_target(RowStatistics<F> a, F z) {
  F const gap = if_equal(z, F(-INFINITY), F(-INFINITY), F(0.0F));
  return merge(a, RowStatistics<F>{z, F(0.0F), gap, F(1.0F), F(0.0F), F(0.0F), gap, F(1.0F)});
}

}  // namespace LL_ISA
}  // namespace logitless::contract
