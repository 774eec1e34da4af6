// See bounds.hpp.

#include "bounds.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "row_outputs.hpp"

namespace logitless::cli {
namespace {

constexpr double infinite = std::numeric_limits<double>::infinity();
// Sums of a leaf of 256 columns, an exponential and a few roundings more.
double constant() { return (growth(256) + 16.0) * unit32; }

std::size_t at(std::int64_t j) { return static_cast<std::size_t>(j); }
float f32_at(const ConstTensor& tensor, std::int64_t n) { return static_cast<const float*>(tensor.data())[n]; }

std::vector<double> row_of(const ConstTensor& matrix, std::int64_t s) {
  std::int64_t const cols = matrix.extent(1);
  std::vector<float> row(at(cols));
  convert(static_cast<const std::byte*>(matrix.data()) + s * cols * static_cast<std::int64_t>(size_of(matrix.dtype())),
          matrix.dtype(), row.data(), DType::f32, cols);
  return {row.begin(), row.end()};
}

// a b, with 0 * infinite = 0.
double times(double a, double b) { return a == 0.0 || b == 0.0 ? 0.0 : a * b; }

}  // namespace

double unit_of(DType dtype) {
  switch (dtype) {
    case DType::bf16: return 0x1p-8;
    case DType::f16: return 0x1p-11;
    case DType::f64: return 0x1p-53;
    default: return unit32;
  }
}

double growth(std::int64_t terms) {
  auto const n = static_cast<double>(terms) + 1.0;
  return std::min(n, 6.0 * std::sqrt(n));
}

double Head::logit(std::int64_t s, std::int64_t j) const {
  return static_cast<double>(logits.as<float>()[s * vocab + j]) + (bias.empty() ? 0.0 : bias[at(j)]);
}

double Head::product_error(std::int64_t s, std::int64_t j) const {
  return width == 0 ? 0.0 : growth(width) * unit32 * row_norm[at(s)] * class_norm[at(j)];
}

// A row's logits as the loss sees them.
struct Bounds::Transformed {
  std::vector<double> z, error;            // -infinite: masked or dropped
  std::vector<double> slope, slope_error;  // dz/dz0
  std::vector<char> unsure;                // within its error of the floor
  double kept = 0.0, unsure_count = 0.0;   // classes
};

// A softmax of them, at a temperature.
struct Bounds::Softmax {
  std::vector<double> p, log_p, away;  // away: |z - top|
  std::vector<double> eta, error;      // relative, of exp(z - reference) and of p
  double lse = 0.0, mean = 0.0;        // mean of eta under p
};

// Of a row for an upstream gradient of 1: the error of its loss; and by logits of the loss, not yet z0: the sum of
// |D|'s terms and of their errors; and the factor of p in D.
struct Bounds::Terms {
  double loss = 0.0, factor = 0.0;
  std::vector<double> size, error;
};

Bounds::Bounds(const Inputs& sample, const Options& options, const Head& student, const Head* teacher, Storage storage,
               double upstream, std::int64_t rows)
    : in_(sample),
      o_(options),
      student_(student),
      teacher_(teacher),
      storage_(storage),
      upstream_(upstream),
      rows_(rows),
      v_(sample.vocab) {
  for (std::int64_t j = 0; sample.options.class_weight && j < v_; ++j) {
    class_weight_.push_back(std::abs(f32_at(sample.options.class_weight, j)));
  }
}

double Bounds::class_weight(std::int64_t j) const { return class_weight_.empty() ? 1.0 : class_weight_[at(j)]; }

Bounds::Transformed Bounds::transformed(std::int64_t s) const {
  Arguments const& with = in_.options;
  double const t = with.row_temperature ? f32_at(with.row_temperature, s) : o_.temperature, cap = o_.softcap;
  double const floor = with.logit_floor ? f32_at(with.logit_floor, s) : -infinite;
  auto const* const mask = static_cast<const std::uint8_t*>(with.keep_mask.data());
  std::int64_t const bytes = (v_ + 7) / 8, y = has_classes(o_) ? target_at(in_.y, s) : -1;
  bool const plain = !with.bias && o_.logit_scale == 1.0 && !(cap > 0.0) && t == 1.0;
  Transformed out;
  for (std::vector<double>* const each : {&out.z, &out.error, &out.slope, &out.slope_error}) each->resize(at(v_));
  out.unsure.resize(at(v_));
  for (std::int64_t j = 0; j < v_; ++j) {
    double const product = student_.product_error(s, j), z0 = student_.logit(s, j);
    double& z = out.z[at(j)];
    double& error = out.error[at(j)];
    double& slope = out.slope[at(j)];
    z = z0, error = std::isinf(z0) ? 0.0 : product, slope = 1.0;
    if (!plain && !std::isinf(z0)) {
      double const b = student_.bias.empty() ? 0.0 : student_.bias[at(j)], z1 = o_.logit_scale * z0;
      double const dz1 = o_.logit_scale * (product + 2.0 * unit32 * (std::abs(z0 - b) + std::abs(b)));
      slope = o_.logit_scale / t;
      if (cap > 0.0) {
        double const h = std::tanh(z1 / cap), left = 1.0 - h * h;
        z = cap * h / t;
        error = (left * dz1 + 8.0 * unit32 * cap * std::abs(h)) / t;
        out.slope_error[at(j)] = slope * (2.0 * std::abs(h) * left * dz1 / cap + 8.0 * unit32);
        slope *= left;
      } else {
        z = z1 / t;
        error = (dz1 + 2.0 * unit32 * std::abs(z1)) / t;
      }
    }
    bool const bit = mask == nullptr || ((mask[s * bytes + j / 8] >> (j % 8)) & 1) != 0;
    bool kept = j == y || (bit && !(z < floor));
    if (j != y && bit && std::abs(z - floor) <= error) out.unsure[at(j)] = 1, kept = true;
    if (!kept) {
      z = -infinite;
      slope = out.slope_error[at(j)] = 0.0;
    }
    out.kept += kept ? 1.0 : 0.0;
    out.unsure_count += out.unsure[at(j)] != 0 ? 1.0 : 0.0;
  }
  return out;
}

Bounds::Logits Bounds::logits(std::int64_t s) const {
  Transformed t = transformed(s);
  for (double& error : t.error) error *= 2.0;
  return {std::move(t.z), std::move(t.error)};
}

Bounds::Softmax Bounds::softmax(const std::vector<double>& z, const std::vector<double>& error,
                                const std::vector<char>& unsure, double tau) const {
  double const top = *std::max_element(z.begin(), z.end()) / tau;
  Softmax out;
  for (std::vector<double>* const each : {&out.p, &out.log_p, &out.away, &out.eta, &out.error}) each->resize(at(v_));
  double sum = 0.0;
  for (std::size_t j = 0; j < z.size(); ++j) sum += std::exp(z[j] / tau - top);
  out.lse = top + std::log(sum);
  for (std::size_t j = 0; j < z.size(); ++j) {
    out.log_p[j] = z[j] / tau - out.lse;
    out.p[j] = std::exp(out.log_p[j]);
    out.away[j] = std::isinf(z[j]) ? 0.0 : std::abs(z[j] / tau - top);
    out.eta[j] = error[j] / tau + 2.3 * unit32 * out.away[j] + constant();
    // Dropped, it scales the others by 1 / (1 - p).
    if (!unsure.empty() && unsure[j] != 0) out.eta[j] += 1.0 / std::max(1.0 - out.p[j], unit32);
    out.mean += times(out.p[j], out.eta[j]);
  }
  for (std::size_t j = 0; j < z.size(); ++j) out.error[j] = out.eta[j] + out.mean;
  return out;
}

// `share` of the cross-entropy of a hard target, t_j = alpha w_j / n and w_y (1 - alpha) more at y.
void Bounds::hard(std::int64_t s, const Transformed& t, const Softmax& p, double share, Terms& out) const {
  std::int64_t const y = target_at(in_.y, s);
  bool const restricts = in_.options.keep_mask || in_.options.logit_floor;
  double const n = restricts ? t.kept : static_cast<double>(v_);
  double const alpha = o_.label_smoothing * (o_.smoothing == Smoothing::others ? n / std::max(1.0, n - 1.0) : 1.0);
  double const w_y = class_weight(y);
  auto const spread = [&](std::int64_t j) {
    return restricts && std::isinf(t.z[at(j)]) ? 0.0 : alpha * class_weight(j) / n;
  };
  // Where the floor leaves the number of classes open.
  auto const spread_error = [&](std::int64_t j) {
    return times(spread(j), t.unsure_count / n + (t.unsure[at(j)] != 0 ? 1.0 : 0.0));
  };
  double whole = 0.0, others = 0.0, others_error = 0.0, loss = 0.0;
  for (std::int64_t j = 0; j < v_; ++j) {
    whole += spread(j);
    if (j != y) {
      others += p.p[at(j)];
      others_error += p.p[at(j)] * p.eta[at(j)];
    }
    loss += times(spread(j), p.eta[at(j)] + growth(v_) * unit32 * p.away[at(j)]) +
            times(spread_error(j), std::abs(p.log_p[at(j)]));
  }
  double const mass = w_y * std::abs(1.0 - alpha) + whole;
  out.loss += share * (loss + mass * (p.mean + 4.0 * unit32) + w_y * p.eta[at(y)]);
  out.factor += share * mass;
  double const at_target = p.eta[at(y)] + (others > 0.0 ? others_error / others : p.mean);
  for (std::int64_t j = 0; j < v_; ++j) {
    double const of_p = share * mass * (j == y ? others : p.p[at(j)]);
    double const of_t = share * (j == y ? whole : spread(j));
    out.size[at(j)] += of_p + of_t;
    out.error[at(j)] += of_p * (j == y ? at_target : p.error[at(j)]) + 4.0 * unit32 * of_t +
                        share * (spread_error(j) + p.p[at(j)] * whole * t.unsure_count / n);
  }
}

// Soft or top-k targets t_j, or a top-k teacher's: of the loss `loss_share`, of D by z `share`.
void Bounds::given(std::int64_t s, const Softmax& p, double loss_share, double share, Terms& out) const {
  Arguments const& with = in_.options;
  double const alpha =
      o_.label_smoothing * (o_.smoothing == Smoothing::others
                                ? static_cast<double>(v_) / std::max(1.0, static_cast<double>(v_) - 1.0)
                                : 1.0);
  std::vector<double> t(at(v_)), t_error(at(v_));
  if (with.soft_targets) {
    t = row_of(with.soft_targets, s);
  } else {
    std::int64_t const k = with.topk_ids.extent(1);
    double sum = 0.0;
    std::vector<double> values = row_of(with.topk_probs, s);
    for (double& value : values) {
      if (in_.topk_log) value = std::exp(value);
      sum += value;
    }
    double const factor = o_.rest == Rest::renormalised && sum > 0.0 ? 1.0 / sum : 1.0;
    if (o_.rest == Rest::spread && k < v_) {
      // What is left of 1 may cancel.
      double const left = std::max(0.0, 1.0 - sum) / static_cast<double>(v_ - k);
      std::fill(t.begin(), t.end(), left);
      std::fill(t_error.begin(), t_error.end(), 4.0 * unit32 * sum / static_cast<double>(v_ - k));
    }
    ConstTensor const ids(with.topk_ids.data(), with.topk_ids.dtype(), Shape(in_.rows * k));
    for (std::int64_t c = 0; c < k; ++c) {
      std::int64_t const j = target_at(ids, s * k + c);
      t[at(j)] = factor * values[at(c)];
      t_error[at(j)] = 0.0;
    }
  }
  double mass = 0.0, mass_error = 0.0, loss = 0.0;
  for (std::int64_t j = 0; j < v_; ++j) {
    double& each = t[at(j)];
    double const w = class_weight(j);
    each = w * (std::abs(1.0 - alpha) * std::abs(each) + alpha / static_cast<double>(v_));
    t_error[at(j)] = w * t_error[at(j)] + 8.0 * unit32 * each;
    mass += each;
    mass_error += t_error[at(j)];
    loss += times(each, p.eta[at(j)] + growth(v_) * unit32 * p.away[at(j)] + 4.0 * unit32) +
            times(t_error[at(j)], std::abs(p.log_p[at(j)]));
    if (in_.topk_log && each > 0.0) {  // and sum t log t
      loss += t_error[at(j)] * (std::abs(std::log(each)) + 1.0) + 8.0 * unit32 * each * std::abs(std::log(each));
    }
  }
  out.loss += loss_share * (loss + mass * (p.mean + 4.0 * unit32));
  out.factor += share * mass;
  for (std::int64_t j = 0; j < v_; ++j) {
    double const of_p = mass * p.p[at(j)];
    out.size[at(j)] += share * (of_p + t[at(j)]);
    out.error[at(j)] += share * (of_p * p.error[at(j)] + t_error[at(j)] + p.p[at(j)] * mass_error);
  }
}

// A teacher's head: p and q at tau. An error of log p is at most p's relative one, and log(p / mix) and log(q / mix)
// change by no more than log p and log q do.
void Bounds::divergence(std::int64_t s, const Transformed& t, Terms& out) const {
  Distillation const& d = o_.distillation;
  std::vector<double> u(at(v_)), u_error(at(v_));
  for (std::int64_t j = 0; j < v_; ++j) {
    u[at(j)] = teacher_->logit(s, j);
    double const b = teacher_->bias.empty() ? 0.0 : teacher_->bias[at(j)];
    if (std::isinf(u[at(j)])) continue;
    u_error[at(j)] = teacher_->product_error(s, j) + 4.0 * unit32 * (std::abs(u[at(j)] - b) + std::abs(b));
  }
  Softmax const p = softmax(t.z, t.error, {}, d.temperature), q = softmax(u, u_error, {}, d.temperature);
  double const square = d.temperature_squared ? d.temperature * d.temperature : 1.0;
  double const loss_share = (1.0 - d.hard_share) * square, share = loss_share / d.temperature;
  double const few = 8.0 * unit32 * (std::abs(p.lse) + std::abs(q.lse) + 1.0);
  // Both references and log-sums stand between two logits of a class.
  auto const both = [&](std::size_t j) {
    return p.error[j] + q.error[j] + 4.0 * unit32 * (p.away[j] + q.away[j]) + few;
  };
  // Sums of terms, with their sizes and errors, under p and q; of jsd against the mixture.
  bool const mixes = d.divergence == Divergence::jsd;
  auto const log_mix = [&](std::size_t j) {
    double const of_q = std::log(d.beta) + q.log_p[j], of_p = std::log1p(-d.beta) + p.log_p[j];
    double const top = std::max(of_p, of_q);
    return std::isinf(top) ? top : top + std::log1p(std::exp(std::min(of_p, of_q) - top));
  };
  double of_p = 0.0, of_p_error = 0.0, of_q_error = 0.0;
  for (std::size_t j = 0; j < at(v_); ++j) {
    if (p.p[j] > 0.0) {
      double const ratio = p.log_p[j] - (mixes ? log_mix(j) : q.log_p[j]);
      of_p += p.p[j] * ratio;
      of_p_error += p.p[j] * (std::abs(ratio) * p.error[j] + both(j) + constant() * (p.away[j] + q.away[j]));
    }
    if (q.p[j] > 0.0) {
      double const ratio = q.log_p[j] - (mixes ? log_mix(j) : p.log_p[j]);
      of_q_error += q.p[j] * (std::abs(ratio) * q.error[j] + both(j) + constant() * (p.away[j] + q.away[j]));
    }
  }
  switch (d.divergence) {
    case Divergence::forward_kl: out.loss += loss_share * of_q_error; break;
    case Divergence::reverse_kl: out.loss += loss_share * of_p_error; break;
    case Divergence::jsd: out.loss += loss_share * (d.beta * of_q_error + (1.0 - d.beta) * of_p_error); break;
  }
  bool const forward = d.divergence == Divergence::forward_kl;
  if (!forward && !std::isfinite(of_p)) return;  // an infinite divergence has no gradient
  for (std::size_t j = 0; j < at(v_); ++j) {
    if (forward) {
      out.size[j] += share * (p.p[j] + q.p[j]);
      out.error[j] += share * (p.p[j] * p.error[j] + q.p[j] * q.error[j]);
    } else if (p.p[j] > 0.0) {
      double const ratio = p.log_p[j] - (mixes ? log_mix(j) : q.log_p[j]);
      double const part = share * (mixes ? 1.0 - d.beta : 1.0) * p.p[j];
      out.size[j] += part * std::abs(ratio - of_p);
      out.error[j] += part * (std::abs(ratio - of_p) * p.error[j] + both(j) + of_p_error +
                              8.0 * unit32 * (std::abs(ratio) + std::abs(of_p)));
    }
  }
}

// The policy rule: by log p_y the slope h, and by the entropy -entropy_coef.
void Bounds::policy(std::int64_t s, const Softmax& p, double entropy, double entropy_error, Terms& out) const {
  Policy const& rule = o_.policy;
  std::int64_t const y = target_at(in_.y, s);
  double const log_p = p.log_p[at(y)], log_error = p.error[at(y)] + 4.0 * unit32 * (std::abs(log_p) + 1.0);
  double const advantage = f32_at(in_.options.advantage, s);
  double const w = std::exp(log_p - f32_at(in_.options.old_logprob, s)), w_error = w * (log_error + 4.0 * unit32);
  double const low = 1.0 - rule.clip_low, high = 1.0 + rule.clip_high, clipped = std::clamp(w, low, high);
  // At a clip the slope jumps: rounding decides the side.
  bool const near = std::abs(w - low) <= w_error || std::abs(w - high) <= w_error;
  bool const active = w * advantage <= clipped * advantage;
  double slope = active || near ? std::abs(advantage) * w : 0.0;
  double slope_error = std::abs(advantage) * ((active || near ? w_error : 0.0) + (near ? w : 0.0));
  double const moved = active || near ? w_error : 0.0;
  out.loss += std::abs(advantage) * (moved + 4.0 * unit32 * std::max(w, clipped));
  if (rule.kl_coef != 0.0) {
    double const d = f32_at(in_.options.ref_logprob, s) - log_p, e = std::exp(d);
    out.loss += rule.kl_coef * (std::abs(e - 1.0) * log_error + 8.0 * unit32 * (e + std::abs(d) + 1.0));
    slope += rule.kl_coef * std::abs(e - 1.0);
    slope_error += rule.kl_coef * e * (log_error + 4.0 * unit32);
  }
  double const coefficient = std::abs(rule.entropy_coef);
  out.loss += coefficient * (entropy_error + 4.0 * unit32 * entropy);
  out.factor += slope;
  for (std::int64_t j = 0; j < v_; ++j) {
    double const each = p.p[at(j)], share = j == y ? 1.0 - each : each;
    out.size[at(j)] += slope * share;
    out.error[at(j)] += slope * (j == y ? each : share) * p.error[at(j)] + slope_error * share;
    if (j == y) out.error[at(j)] += slope * p.mean * share;
    if (coefficient == 0.0 || !(each > 0.0)) continue;
    double const gap = std::abs(p.log_p[at(j)] + entropy);
    out.size[at(j)] += coefficient * each * (std::abs(p.log_p[at(j)]) + entropy);
    out.error[at(j)] +=
        coefficient * each *
        (gap * p.error[at(j)] + p.error[at(j)] + entropy_error + 4.0 * unit32 * (std::abs(p.log_p[at(j)]) + entropy));
  }
}

RowBounds Bounds::row(std::int64_t s, float* a) const {
  Transformed const t = transformed(s);
  Softmax const p = softmax(t.z, t.error, t.unsure, 1.0);
  Distillation const& d = o_.distillation;
  double const u = in_.options.row_weight ? std::abs(static_cast<double>(f32_at(in_.options.row_weight, s))) : 1.0;
  double entropy = 0.0, entropy_error = 0.0, squares = 0.0, squares_error = 0.0;
  RowBounds out;
  for (std::int64_t j = 0; j < v_; ++j) {
    double const each = p.p[at(j)];
    if (!(each > 0.0)) continue;
    entropy -= each * p.log_p[at(j)];
    // H = log s - sum p (z - m)
    entropy_error += each * (p.error[at(j)] * (p.away[at(j)] + 1.0) + p.eta[at(j)]);
    squares += each * each;
    squares_error += each * each * p.error[at(j)];
  }
  Terms terms;
  terms.size.resize(at(v_));
  terms.error.resize(at(v_));
  bool const topk_teacher = in_.topk_log;
  double const square = d.temperature_squared ? d.temperature * d.temperature : 1.0;
  if (o_.policy.on) {
    policy(s, p, entropy, entropy_error, terms);
  } else if (o_.targets == Targets::hard) {
    hard(s, t, p, 1.0, terms);
  } else if (o_.targets == Targets::teacher) {
    if (d.hard_share > 0.0) hard(s, t, p, d.hard_share, terms);
    divergence(s, t, terms);
  } else if (topk_teacher) {
    if (d.hard_share > 0.0) hard(s, t, p, d.hard_share, terms);
    double const share = (1.0 - d.hard_share) * square;
    given(s, softmax(t.z, t.error, {}, d.temperature), share, share / d.temperature, terms);
  } else {
    given(s, p, 1.0, 1.0, terms);
  }
  out.lse = p.mean + 4.0 * unit32 * (std::abs(p.lse) + 1.0);
  out.zloss = u * o_.z_loss * (2.0 * std::abs(p.lse) * out.lse + 8.0 * unit32 * p.lse * p.lse);
  if (has_classes(o_)) {
    std::size_t const j = at(target_at(in_.y, s));
    out.logprob = p.error[j] + 4.0 * unit32 * (std::abs(p.log_p[j]) + 1.0);
  }
  out.entropy = entropy_error + 8.0 * unit32 * (1.0 + std::log(static_cast<double>(v_)));
  double away = 0.0, top = 0.0;
  for (std::int64_t j = 0; j < v_; ++j) {
    if (std::isinf(t.z[at(j)])) continue;
    away += t.error[at(j)] + growth(v_) * unit32 * p.away[at(j)] + (t.unsure[at(j)] != 0 ? 2.0 * p.away[at(j)] : 0.0);
    top = std::max(top, std::abs(t.z[at(j)]));
  }
  if (t.unsure_count > 0.0) {
    double mean = 0.0;
    for (std::int64_t j = 0; j < v_; ++j) mean += p.away[at(j)] / t.kept;
    away += 2.0 * t.unsure_count * mean;
  }
  out.mean_logit = away / std::max(1.0, t.kept - t.unsure_count) + 8.0 * unit32 * top;
  out.log_sum_p2 = 2.0 * squares_error / squares + 8.0 * unit32 * (std::abs(std::log(squares)) + 1.0);
  out.loss = u * terms.loss + out.zloss;

  double const g = std::abs(upstream_) * u, of_lse = 2.0 * o_.z_loss;
  terms.factor += of_lse * std::abs(p.lse);
  double const product =
      in_.kind == Kind::linear ? storage_.relative + (growth(std::max(v_, rows_)) + 8.0) * unit32 : 8.0 * unit32;
  for (std::int64_t j = 0; j < v_; ++j) {
    double const size = terms.size[at(j)] + of_lse * std::abs(p.lse) * p.p[at(j)];
    double const error = terms.error[at(j)] + of_lse * p.p[at(j)] * (std::abs(p.lse) * p.error[at(j)] + out.lse);
    a[j] = static_cast<float>(g * (t.slope[at(j)] * (error + product * size + storage_.underflow * terms.factor) +
                                   t.slope_error[at(j)] * size));
  }
  return out;
}

}  // namespace logitless::cli
