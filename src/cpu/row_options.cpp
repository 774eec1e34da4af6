// See row_options.hpp.
#include "cpu/row_options.hpp"

#include <algorithm>
#include <cmath>

namespace logitless::cpu {

using contract::Targets;

RowOptions::RowOptions(const contract::Problem& problem, const Operands& operands, const RowKernels& rows,
                       Buffers buffers)
    : p_(problem), o_(operands), rows_(rows), buffers_(buffers) {
  contract::Loss const& l = p_.loss;
  transforms_ = p_.transforms();
  restricts_ = p_.restricts();
  needs_logits_ = p_.needs_logits();
  has_target_ = l.targets == Targets::hard || l.distillation.hard_share > 0;
  transform_.bias = buffers_.bias;
  transform_.scale = static_cast<float>(l.logit_scale);
  transform_.cap = static_cast<float>(l.softcap);
  transform_.inverse_cap = l.softcap > 0 ? static_cast<float>(1.0 / l.softcap) : 0.0F;
  transform_.inverse_temperature = static_cast<float>(1.0 / l.temperature);
}

std::string RowOptions::prepare() const {
  auto unpack = [&](const View& v, std::int64_t first, float* out) {
    if (out == nullptr) return;
    for (std::int64_t j = 0; j < p_.vocab; ++j) rows_.decode(row_of(v, first + j), v.dtype, 1, 1.0F, 0.0F, out + j);
  };
  unpack(o_.bias, 0, buffers_.bias);
  unpack(o_.teacher_bias, 0, buffers_.teacher_bias);
  unpack(o_.class_weight, p_.first_column, buffers_.class_weight);
  if (p_.loss.targets != Targets::topk) return {};
  std::int64_t const k = p_.topk;
  for (std::int64_t i = 0; i < p_.rows; ++i) {
    buffers_.topk_other[i] = 0.0F;
    if (o_.targets && target_of(o_.targets, i) == p_.loss.ignore_index) continue;
    std::int64_t* const ids = buffers_.topk_ids + i * k;
    float* const values = buffers_.topk_values + i * k;
    double sum = 0.0;
    for (std::int64_t at = 0; at < k; ++at) {
      std::int64_t const id = integer_at(o_.topk_ids, i, at);
      if (id < 0 || id >= p_.vocab)
        return "topk_ids[" + std::to_string(i) + "," + std::to_string(at) + "] is " + std::to_string(id) +
               ": must be in [0, " + std::to_string(p_.vocab) + ")";
      float value;
      __builtin_memcpy(&value, row_of(o_.topk_probs, i) + at * o_.topk_probs.col_stride * 4, sizeof value);
      if (p_.topk_log) value = std::exp(value);
      sum += static_cast<double>(value);
      // Insertion: k is small, and teachers give them in order of probability, not of id.
      std::int64_t slot = at;
      for (; slot > 0 && ids[slot - 1] >= id; --slot) {
        if (ids[slot - 1] == id)
          return "topk_ids[" + std::to_string(i) + "," + std::to_string(at) + "] is " + std::to_string(id) +
                 " a second time: ids of a row must differ";
        ids[slot] = ids[slot - 1];
        values[slot] = values[slot - 1];
      }
      ids[slot] = id;
      values[slot] = value;
    }
    if (p_.loss.rest == contract::Rest::renormalised && sum > 0)
      for (std::int64_t at = 0; at < k; ++at) values[at] = static_cast<float>(static_cast<double>(values[at]) / sum);
    if (p_.loss.rest == contract::Rest::spread && k < p_.vocab)
      buffers_.topk_other[i] = static_cast<float>(std::max(0.0, 1.0 - sum) / static_cast<double>(p_.vocab - k));
    if (!p_.pairs()) continue;
    auto const logit = [&](float t) { return static_cast<float>(p_.loss.distillation.tau * std::log(t)); };
    std::transform(values, values + k, values, logit);
    buffers_.topk_other[i] = logit(buffers_.topk_other[i]);
  }
  return {};
}

const float* RowOptions::kappa(float* buffer, std::int64_t n, std::int64_t j0, std::int64_t i) const {
  const float* const w = buffers_.class_weight != nullptr ? buffers_.class_weight + j0 : nullptr;
  if (p_.loss.targets == Targets::hard || p_.pairs()) return w;
  auto const alpha = static_cast<float>(p_.loss.smoothing);
  float const floor = alpha / static_cast<float>(p_.vocab), keep = 1.0F - alpha;
  if (p_.loss.targets == Targets::soft) {
    const char* const row = row_of(o_.soft, i) + j0 * o_.soft.col_stride * size_of(p_.soft);
    if (o_.soft.col_stride == 1)
      rows_.decode(row, p_.soft, n, keep, -floor, buffer);
    else
      for (std::int64_t j = 0; j < n; ++j)
        rows_.decode(row + j * o_.soft.col_stride * size_of(p_.soft), p_.soft, 1, keep, -floor, buffer + j);
  } else {
    std::fill(buffer, buffer + n, keep * buffers_.topk_other[i] + floor);
    const std::int64_t* const ids = buffers_.topk_ids + i * p_.topk;
    const std::int64_t* const end = ids + p_.topk;
    for (const std::int64_t* id = std::lower_bound(ids, end, j0); id != end && *id < j0 + n; ++id)
      buffer[*id - j0] = keep * buffers_.topk_values[i * p_.topk + (id - ids)] + floor;
  }
  if (w != nullptr)
    for (std::int64_t j = 0; j < n; ++j) buffer[j] *= w[j];
  return buffer;
}

const float* RowOptions::kept(float* buffer, std::int64_t n, std::int64_t j0, std::int64_t i, std::int64_t y) const {
  if (!o_.keep_mask) return nullptr;
  auto const* const bytes = reinterpret_cast<const std::uint8_t*>(row_of(o_.keep_mask, i)) + j0 / 8;
  for (std::int64_t j = 0; j < n; ++j) buffer[j] = static_cast<float>(bytes[j / 8] >> (j % 8) & 1);
  if (y >= 0) buffer[y] = 1.0F;
  return buffer;
}

const float* RowOptions::gradient_kappa(float* buffer, std::int64_t n, std::int64_t j0, std::int64_t i,
                                        std::int64_t y) const {
  if (!weighs()) return nullptr;
  const float* const own = kappa(buffer, n, j0, i);
  if (o_.keep_mask) {
    float bits[leaf_columns];
    kept(bits, n, j0, i, y);
    for (std::int64_t j = 0; j < n; ++j) buffer[j] = bits[j] * (own != nullptr ? own[j] : 1.0F);
    return buffer;
  }
  if (own != nullptr) return own;
  std::fill(buffer, buffer + n, 1.0F);
  return buffer;
}

LeafWants RowOptions::wants(const float* kappa, const float* kept) const {
  return {kappa,          kept,     weighs(), p_.wants_entropy(), p_.sum_p2, p_.mean_logit || (restricts_ && weighs()),
          p_.logit_floor, p_.argmax};
}

double RowOptions::target_weight(std::int64_t y) const {
  return p_.class_weight ? static_cast<double>(float_at(o_.class_weight, y)) : 1.0;
}

bool RowOptions::writes_rows() const {
  return o_.row_loss || o_.row_lse || o_.row_logprob || o_.stats || o_.row_entropy || o_.row_zloss ||
         o_.row_mean_logit || o_.row_log_sum_p2 || o_.row_argmax || o_.row_correct || p_.argmax;
}

// sum_j t_j log t_j of a top-k teacher's row.
double RowOptions::divergence_constant(std::int64_t i) const {
  double sum = 0.0;
  auto add = [&](float value, double count) {
    auto const t = static_cast<double>(value);
    if (t > 0) sum += count * t * std::log(t);
  };
  for (std::int64_t at = 0; at < p_.topk; ++at) add(buffers_.topk_values[i * p_.topk + at], 1.0);
  add(buffers_.topk_other[i], static_cast<double>(p_.vocab - p_.topk));
  return sum;
}

// Weight of the divergence in a row's loss.
double RowOptions::soft_share() const {
  contract::Distillation const& d = p_.loss.distillation;
  return (1.0 - d.hard_share) * (d.square ? d.tau * d.tau : 1.0);
}

RowOutcome RowOptions::finish(std::int64_t i, std::int64_t y, const RowNumbers& v, const Reducer& reducer,
                              bool with_gradient, const PairOutcome* pair) const {
  contract::Loss const& l = p_.loss;
  auto const classes = static_cast<double>(p_.classes());
  contract::RowStatistics<double> const s{v.m, v.r, v.k, v.n, v.t, v.g, v.u, v.c};
  RowOutcome out;
  out.result = contract::finish(s, static_cast<double>(v.z_y), has_target_);
  if (pair != nullptr && pair->result.bad) out.result.bad = true;
  contract::RowResult<double> const& row = out.result;
  contract::RowWeights<double> w{};
  double constant = 0.0;
  if (pair != nullptr) {
    w = contract::hard_weights(l.smoothing, classes, has_target_ ? target_weight(y) : 1.0, 0.0);
    w = {w.hard * l.distillation.hard_share, w.spread * l.distillation.hard_share, l.z_loss};
    double const divergence = l.distillation.divergence == contract::Divergence::forward_kl ? pair->result.forward
                              : l.distillation.divergence == contract::Divergence::reverse_kl
                                  ? pair->result.reverse
                                  : l.distillation.beta * pair->q_mixed + (1.0 - l.distillation.beta) * pair->p_mixed;
    constant = soft_share() * divergence;
  } else if (l.targets == Targets::hard) {
    bool const kept_only = restricts_ && l.smoothing > 0;
    w = contract::hard_weights(l.smoothing, kept_only ? row.c : classes, target_weight(y), l.z_loss);
  } else {
    double const share = p_.topk_log ? l.distillation.hard_share : 0.0;
    w = {share * (has_target_ ? target_weight(y) : 0.0), p_.topk_log ? soft_share() : 1.0, l.z_loss};
    if (p_.topk_log) constant = w.spread * divergence_constant(i);
  }
  double const factor = weight(i);
  contract::Upstream<double> up{upstream_of(p_, o_, reducer, i) * factor, 0.0, 0.0, 0.0};
  auto at = [&](const View& view) { return view ? static_cast<double>(float_at(view, i)) : 0.0; };
  up.lse = at(o_.grad_row_lse);
  up.logprob = at(o_.grad_row_logprob);
  up.entropy = at(o_.grad_row_entropy);
  double value = 0.0;
  if (l.policy.on) {
    auto const rule = contract::policy_rule(l.policy, at(o_.old_logprob), at(o_.advantage), at(o_.ref_logprob),
                                            -row.nll, row.entropy());
    value = rule.loss;
    up.logprob += up.loss * rule.d_logprob;
    up.entropy += up.loss * rule.d_entropy;
    w.hard = w.spread = 0.0;
  } else {
    value = contract::cross_entropy_of(row, w) + constant;
  }
  value += contract::z_loss_of(row, w);
  // A weight of 0 leaves nothing, not even of an infinite loss.
  out.loss = factor == 0.0 ? 0.0 : row.bad ? std::nan("") : factor * value;
  out.correct = !row.bad && has_target_ && v.argmax == y;
  if (p_.call != contract::Call::backward) put(i, out, v, pair);
  if (!with_gradient) return out;
  double const dz = l.logit_scale / temperature(i);
  out.d = contract::coefficients_of(row, up, w, dz);
  if (l.softcap > 0 && has_target_)
    out.slope_y = v.z_y > -INFINITY ? contract::softcap_slope(static_cast<double>(v.z_y), slope(i)) : 0.0;
  return out;
}

PairOutcome RowOptions::pair_outcome(const contract::PairStatistics<double>& sum) const {
  PairOutcome out;
  out.result = contract::finish(sum);
  if (!p_.distils())
    out.k = contract::weigh_targets(out.result);
  else if (p_.loss.distillation.divergence == contract::Divergence::reverse_kl)
    out.k = out.result.reverse;
  return out;
}

void RowOptions::teacher_logits(float* u, std::int64_t n, std::int64_t j0, std::int64_t i) const {
  std::fill(u, u + n, buffers_.topk_other[i]);
  const std::int64_t* const ids = buffers_.topk_ids + i * p_.topk;
  const std::int64_t* const end = ids + p_.topk;
  for (const std::int64_t* id = std::lower_bound(ids, end, j0); id != end && *id < j0 + n; ++id)
    u[*id - j0] = buffers_.topk_values[i * p_.topk + (id - ids)];
}

PairRow RowOptions::pair_row(std::int64_t i, const PairOutcome& pair, const Reducer& reducer) const {
  contract::Distillation const& d = p_.loss.distillation;
  PairRow out{};
  out.inverse_tau = static_cast<float>(1.0 / d.tau);
  out.ms = static_cast<float>(pair.result.ms);
  out.log_ss = static_cast<float>(pair.result.log_ss);
  out.mt = static_cast<float>(pair.result.mt);
  out.log_st = static_cast<float>(pair.result.log_st);
  out.k = static_cast<float>(pair.k);
  out.g = static_cast<float>(upstream_of(p_, o_, reducer, i) * weight(i) * soft_share() / d.tau * p_.loss.logit_scale /
                             temperature(i));
  if (!p_.distils()) {
    out.g = static_cast<float>(static_cast<double>(out.g) * pair.k);
    out.k = 0.0F;
  }
  // A divergence of +inf has no gradient that means anything: its part is 0, as the reference has it.
  if (!std::isfinite(out.k)) out.k = out.g = 0.0F;
  out.log_beta = static_cast<float>(std::log(d.beta));
  out.log_rest = static_cast<float>(std::log1p(-d.beta));
  out.rest = static_cast<float>(1.0 - d.beta);
  out.slope = static_cast<float>(slope(i));
  out.divergence = d.divergence;
  return out;
}

PairOutcome RowOptions::saved_pair(std::int64_t i) const {
  float v[12];
  for (int c = 0; c < 12; ++c) __builtin_memcpy(v + c, row_of(o_.stats, i) + c * o_.stats.col_stride * 4, 4);
  PairOutcome out;
  out.result = {v[7], v[8], v[9], v[10], 0.0, 0.0, !(v[8] > -INFINITY && v[10] > -INFINITY)};
  out.k = v[11];
  return out;
}

GradientRow RowOptions::gradient_row(std::int64_t i, const RowOutcome& row) const {
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

RowNumbers RowOptions::saved(std::int64_t i) const {
  float values[12] = {};
  for (int c = 0; c < p_.statistics(); ++c)
    __builtin_memcpy(values + c, row_of(o_.stats, i) + c * o_.stats.col_stride * 4, 4);
  RowNumbers out;
  out.m = values[0];
  out.r = values[1];
  out.z_y = values[2];
  out.k = values[3];
  out.t = values[4];
  out.n = p_.statistics() >= 8 ? values[5] : static_cast<float>(p_.classes());
  out.c = values[6];
  return out;
}

void RowOptions::put(std::int64_t i, const RowOutcome& row, const RowNumbers& v, const PairOutcome* pair) const {
  contract::RowResult<double> const& r = row.result;
  put_float(o_.row_loss, i, row.loss);
  put_float(o_.row_lse, i, r.lse());
  put_float(o_.row_logprob, i, has_target_ || r.bad ? -r.nll : 0.0);
  put_float(o_.row_entropy, i, r.bad ? std::nan("") : r.entropy());
  double const factor = weight(i), penalty = factor * p_.loss.z_loss;
  put_float(o_.row_zloss, i, penalty == 0.0 && (factor == 0.0 || !r.bad) ? 0.0 : penalty * r.lse() * r.lse());
  put_float(o_.row_mean_logit, i, r.bad ? std::nan("") : r.mean_logit());
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
  for (int c = 0; c < p_.statistics(); ++c)
    __builtin_memcpy(row_of(o_.stats, i) + c * o_.stats.col_stride * 4, values + c, 4);
}

}  // namespace logitless::cpu
