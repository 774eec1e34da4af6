// One row between the passes, for every backend: from its merged statistics and the caller's operands to its outputs
// and to the coefficients of its gradient, O(1) in double. Host and device; formulas are the contract's, this fetches
// operands for them and puts results where the caller wants them.
#pragma once

#include <cstdint>

#include "contract/coefficients.hpp"
#include "contract/pair.hpp"
#include "plan/gradient_row.hpp"
#include "plan/operands.hpp"

namespace logitless::row {

// ---- elements of views ---------------------------------------------------------------------------------------------

LL_HD inline char* row_of(const View& v, std::int64_t i) {
  return static_cast<char*>(v.data) + i * v.row_stride * contract::size_of(v.dtype);
}

// Element (i, j) of an i32 or i64 matrix.
LL_HD inline std::int64_t integer_at(const View& v, std::int64_t i, std::int64_t j) {
  const char* const p = row_of(v, i) + j * v.col_stride * contract::size_of(v.dtype);
  if (v.dtype == contract::DType::i32) {
    std::int32_t x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
  }
  std::int64_t x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
LL_HD inline std::int64_t target_of(const View& targets, std::int64_t i) { return integer_at(targets, i, 0); }

LL_HD inline float float_at(const View& v, std::int64_t i) {
  float x;
  __builtin_memcpy(&x, row_of(v, i), sizeof x);
  return x;
}
LL_HD inline void put_float(const View& v, std::int64_t i, double x) {
  if (!v) return;
  auto const value = static_cast<float>(x);
  __builtin_memcpy(row_of(v, i), &value, sizeof value);
}

// i32, i64 or u8.
LL_HD inline void put_integer(const View& v, std::int64_t i, std::int64_t x) {
  if (!v) return;
  if (v.dtype == contract::DType::i32) {
    auto const narrow = static_cast<std::int32_t>(x);
    __builtin_memcpy(row_of(v, i), &narrow, sizeof narrow);
  } else if (v.dtype == contract::DType::u8) {
    *row_of(v, i) = static_cast<char>(x);
  } else {
    __builtin_memcpy(row_of(v, i), &x, sizeof x);
  }
}

LL_HD inline void put_statistics(const View& stats, std::int64_t i, const float* values, int count) {
  for (int c = 0; c < count; ++c)
    __builtin_memcpy(row_of(stats, i) + c * stats.col_stride * 4, values + c, sizeof(float));
}

// y of row i; 0 where there are no targets (all rows are kept then).
LL_HD inline std::int64_t target_or_none(const Operands& o, std::int64_t i) {
  return o.targets ? target_of(o.targets, i) : 0;
}

// The number of a view of one f32 or f64.
LL_HD inline double number_of(const View& v, double otherwise) {
  if (v.dtype == contract::DType::f64) return *static_cast<const double*>(v.data);
  return v ? static_cast<double>(*static_cast<const float*>(v.data)) : otherwise;
}

// ---- what a row is between the passes ------------------------------------------------------------------------------

// The factor of the reduced loss, and whether there is nothing to reduce.
struct Reducer {
  double factor = 1.0;  // of each row's loss in the reduced one
  bool empty = false;
};

// From what the kept rows weigh together. A given divisor makes the mean of no rows 0: a micro-batch may be empty where
// the whole batch is not.
LL_HD inline Reducer reducer_of(const contract::Problem& problem, const Operands& o, double weight) {
  Reducer out;
  if (problem.loss.reduction != contract::Reduction::mean) return out;
  double const divisor = number_of(o.normalizer, problem.loss.normalizer > 0 ? problem.loss.normalizer : weight);
  out.empty = !(divisor != 0);
  out.factor = out.empty ? 0.0 : 1.0 / divisor;
  return out;
}

// The reduced loss from the sum of the kept rows' losses; 0 with reduction none.
LL_HD inline double reduced_loss(const contract::Problem& problem, const Reducer& reducer, double total) {
  if (problem.loss.reduction == contract::Reduction::none) return 0.0;
  if (!reducer.empty) return total * reducer.factor;
  return problem.loss.on_empty == contract::OnEmpty::zero ? 0.0 : static_cast<double>(NAN);
}

// Upstream gradient of row i: that of the reduced loss, and the row's own.
LL_HD inline double upstream_of(const contract::Problem& problem, const Operands& o, const Reducer& reducer,
                                std::int64_t i) {
  double const own = o.grad_row_loss ? static_cast<double>(float_at(o.grad_row_loss, i)) : 0.0;
  if (problem.loss.reduction == contract::Reduction::none) return o.grad_row_loss ? own : 1.0;
  return o.grad_loss * number_of(o.grad_loss_factor, 1.0) * reducer.factor + own;
}

// Merged statistics of one row, as the kernels left them or backward was given them.
struct Numbers {
  float m = 0, r = 0, z_y = 0, k = 0, n = 0, t = 0, g = 0, u = 0, c = 0;
  std::int64_t argmax = -1;
};

// The same of both heads' logits, where there is a teacher.
struct PairOutcome {
  contract::PairResult<double> result;
  double p_mixed = 0.0, q_mixed = 0.0;  // JSD's sums
  double k = 0.0;                       // what its gradient takes off; of a top-k teacher: its mass, a factor
};

// A row after the O(1) arithmetic.
struct Outcome {
  contract::RowResult<double> result;
  contract::RowCoefficients<double> d;
  double loss = 0.0;
  double slope_y = 1.0;  // the softcap's at the target: D_y = (at_target - c kappa_y) slope_y
  bool correct = false;
};

// Top-k targets by row of the problem [R,k], their probabilities (or tau log t where the problem has pairs), and that
// of every other class [R].
struct TopK {
  const std::int64_t* ids;
  const float *values, *other;
};

// Zeros in the per-row outputs of an ignored row.
LL_HD inline void put_ignored(const Operands& o, std::int64_t i) {
  put_float(o.row_loss, i, 0.0);
  put_float(o.row_lse, i, 0.0);
  put_float(o.row_logprob, i, 0.0);
  put_float(o.row_entropy, i, 0.0);
  put_float(o.row_zloss, i, 0.0);
  put_float(o.row_mean_logit, i, 0.0);
  put_float(o.row_log_sum_p2, i, 0.0);
  put_integer(o.row_argmax, i, -1);
  put_integer(o.row_correct, i, 0);
  float const zero[12] = {};
  if (o.stats) put_statistics(o.stats, i, zero, static_cast<int>(o.stats.cols));
}

// ---- the arithmetic ------------------------------------------------------------------------------------------------

class Finisher {
 public:
  LL_HD Finisher(const contract::Problem& problem, const Operands& operands, TopK topk)
      : p_(problem), o_(operands), topk_(topk) {}

  LL_HD bool has_target() const {
    return p_.loss.targets == contract::Targets::hard || p_.loss.distillation.hard_share > 0;
  }
  LL_HD double temperature(std::int64_t i) const {
    return o_.row_temperature ? static_cast<double>(float_at(o_.row_temperature, i)) : p_.loss.temperature;
  }
  // The row's z = 2nd argument times this is y in 1 - y^2, the softcap's slope; 0: no cap.
  LL_HD double slope(std::int64_t i) const { return p_.loss.softcap > 0 ? temperature(i) / p_.loss.softcap : 0.0; }
  LL_HD double weight(std::int64_t i) const {
    return o_.row_weight ? static_cast<double>(float_at(o_.row_weight, i)) : 1.0;
  }
  // The row's gradient is 0 whatever its logits are.
  LL_HD bool silent(std::int64_t i) const {
    return o_.row_weight && float_at(o_.row_weight, i) == 0.0F && !o_.grad_row_lse && !o_.grad_row_logprob &&
           !o_.grad_row_entropy;
  }

  // Losses, outputs and coefficients of kept row i with target y. backward: writes no outputs.
  // pair: the teacher's row, null where there is none.
  LL_HD Outcome finish(std::int64_t i, std::int64_t y, const Numbers& v, const Reducer& reducer, bool with_gradient,
                       const PairOutcome* pair) const {
    contract::Loss const& l = p_.loss;
    auto const classes = static_cast<double>(p_.classes());
    contract::RowStatistics<double> const s{v.m, v.r, v.k, v.n, v.t, v.g, v.u, v.c};
    Outcome out;
    out.result = contract::finish(s, static_cast<double>(v.z_y), has_target());
    if (pair != nullptr && pair->result.bad) out.result.bad = true;
    contract::RowResult<double> const& row = out.result;
    contract::RowWeights<double> w{};
    double constant = 0.0;
    if (pair != nullptr) {
      w = contract::hard_weights(l.smoothing, classes, has_target() ? target_weight(y) : 1.0, 0.0);
      w = {w.hard * l.distillation.hard_share, w.spread * l.distillation.hard_share, l.z_loss};
      double const divergence = l.distillation.divergence == contract::Divergence::forward_kl ? pair->result.forward
                                : l.distillation.divergence == contract::Divergence::reverse_kl
                                    ? pair->result.reverse
                                    : l.distillation.beta * pair->q_mixed + (1.0 - l.distillation.beta) * pair->p_mixed;
      constant = soft_share() * divergence;
    } else if (l.targets == contract::Targets::hard) {
      bool const kept_only = p_.restricts() && l.smoothing > 0;
      w = contract::hard_weights(l.smoothing, kept_only ? row.c : classes, target_weight(y), l.z_loss);
    } else {
      double const share = p_.topk_log ? l.distillation.hard_share : 0.0;
      w = {share * (has_target() ? target_weight(y) : 0.0), p_.topk_log ? soft_share() : 1.0, l.z_loss};
      if (p_.topk_log) constant = w.spread * divergence_constant(i);
    }
    double const factor = weight(i);
    contract::Upstream<double> up{upstream_of(p_, o_, reducer, i) * factor, 0.0, 0.0, 0.0};
    up.lse = at(o_.grad_row_lse, i);
    up.logprob = at(o_.grad_row_logprob, i);
    up.entropy = at(o_.grad_row_entropy, i);
    double value = 0.0;
    if (l.policy.on) {
      auto const rule = contract::policy_rule(l.policy, at(o_.old_logprob, i), at(o_.advantage, i),
                                              at(o_.ref_logprob, i), -row.nll, row.entropy());
      value = rule.loss;
      up.logprob += up.loss * rule.d_logprob;
      up.entropy += up.loss * rule.d_entropy;
      w.hard = w.spread = 0.0;
    } else {
      value = contract::cross_entropy_of(row, w) + constant;
    }
    value += contract::z_loss_of(row, w);
    // A weight of 0 leaves nothing, not even of an infinite loss.
    out.loss = factor == 0.0 ? 0.0 : row.bad ? static_cast<double>(NAN) : factor * value;
    out.correct = !row.bad && has_target() && v.argmax == y;
    if (p_.call != contract::Call::backward) put(i, out, v, pair);
    if (!with_gradient) return out;
    double const dz = l.logit_scale / temperature(i);
    out.d = contract::coefficients_of(row, up, w, dz);
    if (l.softcap > 0 && has_target())
      out.slope_y = v.z_y > -INFINITY ? contract::softcap_slope(static_cast<double>(v.z_y), slope(i)) : 0.0;
    return out;
  }

  // From both sides' merged statistics; JSD's sums are missing.
  LL_HD PairOutcome pair_outcome(const contract::PairStatistics<double>& sum) const {
    PairOutcome out;
    out.result = contract::finish(sum);
    if (!p_.distils())
      out.k = contract::weigh_targets(out.result);
    else if (p_.loss.distillation.divergence == contract::Divergence::reverse_kl)
      out.k = out.result.reverse;
    return out;
  }

  // For the kernels of two heads.
  LL_HD PairRow pair_row(std::int64_t i, const PairOutcome& pair, const Reducer& reducer) const {
    using std::log;
    using std::log1p;
    contract::Distillation const& d = p_.loss.distillation;
    PairRow out{};
    out.inverse_tau = static_cast<float>(1.0 / d.tau);
    out.ms = static_cast<float>(pair.result.ms);
    out.log_ss = static_cast<float>(pair.result.log_ss);
    out.mt = static_cast<float>(pair.result.mt);
    out.log_st = static_cast<float>(pair.result.log_st);
    out.k = static_cast<float>(pair.k);
    out.g = static_cast<float>(upstream_of(p_, o_, reducer, i) * weight(i) * soft_share() / d.tau *
                               p_.loss.logit_scale / temperature(i));
    if (!p_.distils()) {
      out.g = static_cast<float>(static_cast<double>(out.g) * pair.k);
      out.k = 0.0F;
    }
    // A divergence of +inf has no gradient that means anything: its part is 0, as the reference has it.
    if (!(out.k - out.k == 0.0F)) out.k = out.g = 0.0F;
    out.log_beta = static_cast<float>(log(d.beta));
    out.log_rest = static_cast<float>(log1p(-d.beta));
    out.rest = static_cast<float>(1.0 - d.beta);
    out.slope = static_cast<float>(slope(i));
    out.divergence = d.divergence;
    return out;
  }

  // What a backward was given by its forward.
  LL_HD PairOutcome saved_pair(std::int64_t i) const {
    float v[12];
    read_statistics(i, v, 12);
    PairOutcome out;
    out.result = {v[7], v[8], v[9], v[10], 0.0, 0.0, !(v[8] > -INFINITY && v[10] > -INFINITY)};
    out.k = v[11];
    return out;
  }
  LL_HD Numbers saved(std::int64_t i) const {
    float values[12] = {};
    read_statistics(i, values, p_.statistics());
    Numbers out;
    out.m = values[0];
    out.r = values[1];
    out.z_y = values[2];
    out.k = values[3];
    out.t = values[4];
    out.n = p_.statistics() >= 8 ? values[5] : static_cast<float>(p_.classes());
    out.c = values[6];
    return out;
  }
  // From lse alone, where z_y is the target's logit: s is e^0 by definition of the reference, and 1 - p_y is only as
  // exact as z_y - lse.
  LL_HD Numbers from_lse(std::int64_t i, float z_y) const {
    using std::expm1;
    Numbers v;
    v.m = float_at(o_.lse, i);
    // A target above its own lse is rounding; the reference must not move to it.
    v.z_y = z_y > v.m ? v.m : z_y;
    v.r = -expm1(v.z_y - v.m);
    v.n = static_cast<float>(p_.vocab);
    return v;
  }

  // Fields of finish()'s result for the kernel that forms D from logits.
  LL_HD GradientRow gradient_row(std::int64_t i, const Outcome& row) const {
    GradientRow out{};
    out.m = static_cast<float>(row.result.m);
    out.inverse_s = static_cast<float>(row.result.inv_s);
    out.a = static_cast<float>(row.d.a);
    out.e = static_cast<float>(row.d.e);
    out.h0 = static_cast<float>(-row.result.mean_gap);
    out.c = static_cast<float>(row.d.c);
    out.slope = static_cast<float>(slope(i));
    out.at_target = static_cast<float>(row.d.at_target);
    out.slope_y = static_cast<float>(row.slope_y);
    out.filter = static_cast<float>(p_.loss.filter);
    out.seed = p_.loss.filter_seed;
    out.row = static_cast<std::uint64_t>(i);
    out.dropped = p_.logit_floor;
    return out;
  }

 private:
  LL_HD static double at(const View& view, std::int64_t i) {
    return view ? static_cast<double>(float_at(view, i)) : 0.0;
  }
  LL_HD void read_statistics(std::int64_t i, float* v, int count) const {
    for (int c = 0; c < count; ++c)
      __builtin_memcpy(v + c, row_of(o_.stats, i) + c * o_.stats.col_stride * 4, sizeof(float));
  }
  LL_HD double target_weight(std::int64_t y) const {
    return p_.class_weight ? static_cast<double>(float_at(o_.class_weight, y)) : 1.0;
  }
  // Weight of the divergence in a row's loss.
  LL_HD double soft_share() const {
    contract::Distillation const& d = p_.loss.distillation;
    return (1.0 - d.hard_share) * (d.square ? d.tau * d.tau : 1.0);
  }
  // sum_j t_j log t_j of a top-k teacher's row.
  LL_HD double divergence_constant(std::int64_t i) const {
    double sum = 0.0;
    for (std::int64_t n = 0; n < p_.topk; ++n) sum += entropy_term(topk_.values[i * p_.topk + n], 1.0);
    return sum + entropy_term(topk_.other[i], static_cast<double>(p_.vocab - p_.topk));
  }
  LL_HD static double entropy_term(float value, double count) {
    using std::log;
    auto const t = static_cast<double>(value);
    return t > 0 ? count * t * log(t) : 0.0;
  }

  LL_HD void put(std::int64_t i, const Outcome& row, const Numbers& v, const PairOutcome* pair) const {
    contract::RowResult<double> const& r = row.result;
    auto const nan = static_cast<double>(NAN);
    put_float(o_.row_loss, i, row.loss);
    put_float(o_.row_lse, i, r.lse());
    put_float(o_.row_logprob, i, has_target() || r.bad ? -r.nll : 0.0);
    put_float(o_.row_entropy, i, r.bad ? nan : r.entropy());
    double const factor = weight(i), penalty = factor * p_.loss.z_loss;
    put_float(o_.row_zloss, i, penalty == 0.0 && (factor == 0.0 || !r.bad) ? 0.0 : penalty * r.lse() * r.lse());
    put_float(o_.row_mean_logit, i, r.bad ? nan : r.mean_logit());
    put_float(o_.row_log_sum_p2, i, r.log_p2);
    put_integer(o_.row_argmax, i, r.bad ? -1 : v.argmax);
    put_integer(o_.row_correct, i, row.correct ? 1 : 0);
    if (!o_.stats) return;
    float values[12] = {v.m, v.r, v.z_y, v.k, v.t, v.n, v.c};
    if (pair != nullptr) {
      values[7] = static_cast<float>(pair->result.ms);
      values[8] = static_cast<float>(pair->result.log_ss);
      values[9] = static_cast<float>(pair->result.mt);
      values[10] = static_cast<float>(pair->result.log_st);
      values[11] = static_cast<float>(pair->k);
    }
    put_statistics(o_.stats, i, values, p_.statistics());
  }

  const contract::Problem& p_;
  const Operands& o_;
  TopK topk_;
};

}  // namespace logitless::row
