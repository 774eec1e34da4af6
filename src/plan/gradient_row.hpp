// What kernels of pass 2 read of a row; made by row.hpp. Apart from it, because kernels are compiled within their own
// instruction set and bring the contract's formulas themselves.
#pragma once

#include <cstdint>

#include "contract/problem.hpp"

namespace logitless::row {

// D of a row from its logits: p (a - e (log p + H)) - c kappa, times the softcap's slope; the target's element is
// (at_target - c kappa_y) slope_y.
struct GradientRow {
  float m, inverse_s, a, e, h0, c;  // h0 = H - log s
  float slope;                      // temperature / softcap; 0: no softcap
  float at_target, slope_y;
  float filter;                  // eps; 0: none
  const float* kappa;            // [n]; null: c is 0
  std::uint64_t seed, row;       // of the filter's hash, with the column
  std::int64_t column0, target;  // column of element 0; the target relative to it, or -1
  bool dropped;                  // kappa counts 0 where z is -inf
};

// A row of two heads in pass 2. g: what the divergence's gradient is multiplied by; slope as in GradientRow.
struct PairRow {
  float inverse_tau, ms, log_ss, mt, log_st, k, g, slope;
  float log_beta, log_rest, rest;  // rest: 1 - beta
  contract::Divergence divergence;
};

}  // namespace logitless::row
