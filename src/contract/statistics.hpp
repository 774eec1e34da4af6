// Row statistics and their merge, written once for SIMD lanes, leaves, chunks and ranks. Per row, for the columns seen:
//   m  a reference (the largest logit)        r  sum over j != y of exp(z_j - m)
//   k  sum of kappa_j (z_j - m)               n  sum of kappa_j            (kappa_j = 1: the smoothing term)
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

  LL_HD static RowStatistics identity() { return {F(-INFINITY), F(0.0F), F(0.0F), F(0.0F)}; }
};

// m - to, with equal infinities 0 apart.
template <class F>
LL_HD inline F shift(F m, F to) {
  return LL_MUTATE(20, if_equal(m, to, F(0.0F), m - to), m - to);
}

// Moves `a` to the reference `to` >= a.m.
template <class F>
LL_HD inline RowStatistics<F> rebase(RowStatistics<F> a, F to) {
  F const d = shift(a.m, to);
  F const moved = if_equal(a.n, F(0.0F), F(0.0F), a.n * d);
  return {to, LL_MUTATE(1, a.r * exp2_of(d * log2e<F>()), a.r), LL_MUTATE(2, a.k + moved, a.k), a.n};
}

template <class F>
LL_HD inline RowStatistics<F> merge(RowStatistics<F> a, RowStatistics<F> b) {
  F const m = LL_MUTATE(3, maximum(a.m, b.m), a.m);
  a = rebase(a, m);
  b = rebase(b, m);
  return {m, LL_MUTATE(4, a.r + b.r, a.r), LL_MUTATE(5, a.k + b.k, b.k), LL_MUTATE(19, a.n + b.n, a.n)};
}

// One more column that is not the target's.
template <class F>
LL_HD inline RowStatistics<F> absorb(RowStatistics<F> a, F z) {
  return merge(a, RowStatistics<F>{z, if_equal(z, F(-INFINITY), F(0.0F), F(1.0F)),
                                   if_equal(z, F(-INFINITY), F(-INFINITY), F(0.0F)), F(1.0F)});
}

// The target's column: it gives a reference and its share of k; its exponential stays outside r.
template <class F>
LL_HD inline RowStatistics<F> absorb_target(RowStatistics<F> a, F z) {
  return merge(a, RowStatistics<F>{z, F(0.0F), if_equal(z, F(-INFINITY), F(-INFINITY), F(0.0F)), F(1.0F)});
}

}  // namespace LL_ISA
}  // namespace logitless::contract
