#include "reference/rows.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "logitless/logitless.h"
#include "reference/convert.hpp"

namespace logitless::reference {
namespace {

using contract::Call;
using contract::Divergence;
using contract::DType;
using contract::Problem;
using contract::Reduction;
using contract::Rest;
using contract::Targets;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// a b, with 0 * inf = 0.
double times(double a, double b) { return a == 0.0 || b == 0.0 ? 0.0 : a * b; }

Softmax bad_softmax() {
  Softmax out;
  out.m = out.r = out.z_y = out.s = out.log_s = kNan;
  out.bad = true;
  return out;
}

// log(b q + (1 - b) p) from log q and log p, neither of which may have an exponential.
double log_mixture(double b, double log_q, double log_p) {
  const double q = b == 0.0 ? -kInf : std::log(b) + log_q, p = b == 1.0 ? -kInf : std::log1p(-b) + log_p;
  const double top = std::max(p, q);
  return top == -kInf ? -kInf : top + std::log1p(std::exp(std::min(p, q) - top));
}

}  // namespace

Rows::Rows(const Problem& problem, const Operands& operands)
    : p_(problem),
      o_(operands),
      teacher_(problem.distils()),
      topk_teacher_(problem.loss.targets == Targets::topk && problem.topk_log) {
  const auto columns = static_cast<std::size_t>(p_.vocab);
  if (o_.bias) {
    bias_.resize(columns);
    for (std::int64_t j = 0; j < p_.vocab; ++j) bias_[static_cast<std::size_t>(j)] = load(o_.bias, j);
  }
  if (o_.class_weight) {
    class_weight_.resize(static_cast<std::size_t>(p_.classes()));
    for (std::int64_t j = 0; j < p_.classes(); ++j) {
      class_weight_[static_cast<std::size_t>(j)] = load(o_.class_weight, j);
    }
    for (std::int64_t j = 0; j < p_.vocab; ++j) class_weights_ += class_weight(p_.first_column + j);
  }
  z_.resize(columns), slope_.resize(columns), t_.resize(columns), kept_.resize(columns);
}

// Soft and top-k rows have no y; distillation reads it for its hard part alone.
bool Rows::reads_hard_targets() const {
  if (teacher_ || topk_teacher_) return p_.loss.distillation.hard_share > 0.0;
  return p_.loss.targets == Targets::hard;
}

double Rows::class_weight(std::int64_t j) const {
  return class_weight_.empty() ? 1.0 : class_weight_[static_cast<std::size_t>(j)];
}

// The target's column here, or -1.
std::int64_t Rows::column_of(std::int64_t target) const {
  const std::int64_t j = target - p_.first_column;
  return target >= 0 && j >= 0 && j < p_.vocab ? j : -1;
}

std::string Rows::collect(std::vector<KeptRow>* rows, int* status) const {
  rows->clear();
  const std::int64_t classes = p_.classes();
  const std::string range = ": must be in [0, V) with V = " + std::to_string(classes);
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < p_.rows; ++i) {
    KeptRow row;
    row.index = i;
    if (o_.targets) {
      const std::int64_t y = load_integer(o_.targets, i);
      if (y == p_.loss.ignore_index) continue;
      if (reads_hard_targets()) {
        if (y < 0 || y >= classes) {
          *status = LL_ERROR_TARGET_RANGE;
          return "targets[" + std::to_string(i) + "] = " + std::to_string(y) + range +
                 ", or ignore_index = " + std::to_string(p_.loss.ignore_index);
        }
        row.target = y;
      }
    }
    if (p_.loss.targets == Targets::topk) {
      ids.clear();
      for (std::int64_t c = 0; c < p_.topk; ++c) {
        const std::int64_t id = load_integer(o_.topk_ids, i, c);
        if (id < 0 || id >= classes) {
          *status = LL_ERROR_TARGET_RANGE;
          return "topk_ids[" + std::to_string(i) + ", " + std::to_string(c) + "] = " + std::to_string(id) + range;
        }
        ids.push_back(id);
      }
      std::sort(ids.begin(), ids.end());
      const auto twice = std::adjacent_find(ids.begin(), ids.end());
      if (twice != ids.end()) {
        *status = LL_ERROR_TARGET_RANGE;
        return "topk_ids[" + std::to_string(i) + "] holds " + std::to_string(*twice) +
               " more than once: a row's ids must be distinct";
      }
    }
    if (o_.row_weight) row.weight = load(o_.row_weight, i);
    rows->push_back(row);
  }
  return {};
}

double Rows::divisor(const std::vector<KeptRow>& rows) const {
  if (p_.loss.reduction != Reduction::mean) return 1.0;
  if (o_.normalizer) return load(o_.normalizer, 0);
  if (p_.loss.normalizer > 0.0) return p_.loss.normalizer;
  if (p_.loss.targets != Targets::hard) return static_cast<double>(rows.size());
  double sum = 0.0;
  for (const KeptRow& row : rows) sum += class_weight(row.target);
  return sum;
}

void Rows::read_upstream(KeptRow* row, double divisor) const {
  auto read = [row](const View& view) { return view ? load(view, row->index) : 0.0; };
  double g = read(o_.grad_row_loss);
  if (p_.loss.reduction != Reduction::none) {
    const double upstream = o_.grad_loss * (o_.grad_loss_factor ? load(o_.grad_loss_factor, 0) : 1.0);
    if (divisor != 0.0) g += upstream / divisor;  // the mean of nothing has no gradient
  } else if (!o_.grad_row_loss) {
    g = 1.0;
  }
  row->upstream = g * row->weight;
  row->grad_lse = read(o_.grad_row_lse);
  row->grad_logprob = read(o_.grad_row_logprob);
  row->grad_entropy = read(o_.grad_row_entropy);
}

// Fills z_, slope_ and kept_. False: some logit is +inf or NaN, whatever a restriction makes of its class.
bool Rows::transform(const KeptRow& row, std::int64_t first, std::int64_t count, const double* raw) {
  const contract::Loss& loss = p_.loss;
  const double temperature = o_.row_temperature ? load(o_.row_temperature, row.index) : loss.temperature;
  const double floor = o_.logit_floor ? load(o_.logit_floor, row.index) : -kInf;
  const std::int64_t y = column_of(row.target) - first;
  bool good = true;
  for (std::int64_t j = 0; j < count; ++j) {
    const double z0 = raw[j] + (bias_.empty() ? 0.0 : bias_[static_cast<std::size_t>(first + j)]);
    if (std::isnan(z0) || z0 == kInf) good = false;
    double z = loss.logit_scale * z0, slope = loss.logit_scale;
    if (loss.softcap > 0.0) {
      const double t = z / loss.softcap;
      if (z0 != -kInf) z = loss.softcap * std::tanh(t);  // a masked class stays masked
      const double cosh = std::cosh(t);
      slope *= 1.0 / cosh / cosh;  // 1 - tanh^2 without its cancellation
    }
    z /= temperature, slope /= temperature;
    bool kept = !(z < floor);
    if (o_.keep_mask && kept) {
      kept = ((load_integer(o_.keep_mask, row.index, (first + j) / 8) >> ((first + j) % 8)) & 1) != 0;
    }
    kept = kept || j == y;
    z_[static_cast<std::size_t>(j)] = kept ? z : -kInf;
    slope_[static_cast<std::size_t>(j)] = slope;
    kept_[static_cast<std::size_t>(j)] = kept ? 1 : 0;
  }
  return good;
}

// t_j = w_y (1 - alpha) [j = y] + alpha / V w_j, with n_i for V where a restriction acts.
void Rows::hard_targets(const KeptRow& row, std::int64_t first, std::int64_t count) {
  const double over = p_.restricts() ? row.kept_classes : static_cast<double>(p_.classes());
  const double other = p_.loss.smoothing / over;
  for (std::int64_t j = 0; j < count; ++j) {
    const auto at = static_cast<std::size_t>(j);
    t_[at] = kept_[at] != 0 ? other * class_weight(p_.first_column + first + j) : 0.0;
  }
  const std::int64_t y = column_of(row.target) - first;
  if (column_of(row.target) < 0 || y < 0 || y >= count) return;
  double own = other + (1.0 - p_.loss.smoothing);
  // alpha = V/(V-1), all mass on the others, leaves rounding where 0 is meant; 0 keeps 0 * inf = 0.
  if (std::abs(own) < 4.0 * std::numeric_limits<double>::epsilon()) own = 0.0;
  t_[static_cast<std::size_t>(y)] = own * class_weight(row.target);
}

// t_j = w_j ((1 - alpha) s_j + alpha / V) of soft and top-k targets; dropped classes have none.
void Rows::given_targets(const KeptRow& row, std::int64_t first, std::int64_t count) {
  if (p_.loss.targets == Targets::soft) {
    load_row(o_.soft, row.index, first, count, t_.data());
  } else {
    std::fill_n(t_.begin(), count, row.topk_rest);
    for (std::int64_t c = 0; c < p_.topk; ++c) {
      const std::int64_t j = load_integer(o_.topk_ids, row.index, c) - p_.first_column - first;
      if (j < 0 || j >= count) continue;
      const double given = load(o_.topk_probs, row.index, c);
      t_[static_cast<std::size_t>(j)] = row.topk_scale * (p_.topk_log ? std::exp(given) : given);
    }
  }
  const double over = p_.restricts() ? row.kept_classes : static_cast<double>(p_.classes());
  const double smoothed = p_.loss.smoothing / over;
  for (std::int64_t j = 0; j < count; ++j) {
    const auto at = static_cast<std::size_t>(j);
    const double t = (1.0 - p_.loss.smoothing) * t_[at] + smoothed;
    t_[at] = kept_[at] != 0 ? class_weight(p_.first_column + first + j) * t : 0.0;
  }
}

// n_i, sum of kappa_j of hard targets, and what top-k targets give to the classes that they do not name.
void Rows::count_classes(KeptRow* row) const {
  row->kept_classes = static_cast<double>(p_.vocab);
  row->kappa = class_weight_.empty() ? row->kept_classes : class_weights_;
  if (p_.restricts()) {
    row->kept_classes = row->kappa = 0.0;
    for (std::int64_t j = 0; j < p_.vocab; ++j) {
      if (kept_[static_cast<std::size_t>(j)] == 0) continue;
      row->kept_classes += 1.0;
      row->kappa += class_weight(p_.first_column + j);
    }
  }
  if (p_.loss.targets != Targets::topk) return;
  double sum = 0.0;
  for (std::int64_t c = 0; c < p_.topk; ++c) {
    const double given = load(o_.topk_probs, row->index, c);
    sum += p_.topk_log ? std::exp(given) : given;
  }
  row->topk_scale = p_.loss.rest == Rest::renormalised ? (sum > 0.0 ? 1.0 / sum : 0.0) : 1.0;
  const std::int64_t others = p_.classes() - p_.topk;
  row->topk_rest =
      p_.loss.rest == Rest::spread && others > 0 ? std::max(0.0, 1.0 - sum) / static_cast<double>(others) : 0.0;
}

// The reference is the row's maximum as saved_as holds it, so that statistics saved in fp32 agree with each other.
Softmax Rows::softmax_of(const double* z, std::int64_t y, DType saved_as) const {
  Softmax out;
  std::int64_t lead = 0;
  for (std::int64_t j = 1; j < p_.vocab; ++j) {
    if (z[j] > z[lead]) lead = j;
  }
  out.z_y = y >= 0 ? z[y] : -kInf;
  const double top = z[lead];
  out.m = top;
  if (top == -kInf) {
    out.log_s = -kInf;
    out.bad = !p_.is_part();  // the classes of another range may be finite
    return out;
  }
  const double stored = rounded(top, saved_as);
  if (std::abs(stored - top) < 1.0) out.m = stored;
  double rest = 0.0;
  for (std::int64_t j = 0; j < p_.vocab; ++j) {
    const double e = std::exp(z[j] - out.m);
    if (j != y) out.r += e;
    if (j != lead) rest += e;
  }
  out.s = out.r + std::exp(out.z_y - out.m);
  out.log_s = (top - out.m) + std::log1p(rest / std::exp(top - out.m));
  return out;
}

// The row's softmax from z_, or of a backward from what forward saved. Statistics mean the same for every reference m.
// t: sum_{j != y} exp(z_j - m) (z_j - m), where statistics give it.
Softmax Rows::softmax_for(KeptRow* row, double* t) const {
  const std::int64_t y = column_of(row->target);
  if (p_.call == Call::backward && o_.stats) {
    Softmax out;
    out.m = load(o_.stats, row->index, 0);
    out.r = load(o_.stats, row->index, 1);
    out.z_y = row->target >= 0 ? load(o_.stats, row->index, 2) : -kInf;
    if (p_.is_part()) {  // sums over all classes, of which only a few are here
      *t = load(o_.stats, row->index, 4);
      row->kappa = load(o_.stats, row->index, 5);
      row->kept_classes = class_weight_.empty() ? row->kappa : load(o_.stats, row->index, 6);
    }
    if (out.z_y > out.m) {  // the target leads: it becomes the reference
      const double d = out.m - out.z_y;
      *t = times(std::exp(d), *t + times(out.r, d));
      out.r = times(std::exp(d), out.r);
      out.m = out.z_y;
    }
    const double e_y = std::exp(out.z_y - out.m);
    out.s = out.r + e_y;
    out.log_s = e_y > out.r ? (out.z_y - out.m) + std::log1p(out.r / e_y) : std::log(out.s);
    if (!std::isfinite(out.m) || !std::isfinite(out.s) || out.s <= 0.0) return bad_softmax();
    return out;
  }
  if (p_.call == Call::backward && o_.lse) {
    Softmax out;
    out.m = load(o_.lse, row->index);
    out.s = 1.0;
    out.z_y = y >= 0 ? z_[static_cast<std::size_t>(y)] : -kInf;
    out.r = 1.0 - std::exp(out.z_y - out.m);
    if (!std::isfinite(out.m)) return bad_softmax();
    return out;
  }
  const bool saves = p_.call != Call::backward && o_.stats;
  return softmax_of(z_.data(), y, saves ? o_.stats.dtype : DType::f64);
}

// H = -sum_j p_j log p_j. Every term is at least +0, so that the sum of a one-hot row is.
double Rows::entropy_of(const Softmax& softmax) const {
  double sum = 0.0;
  for (std::int64_t j = 0; j < p_.vocab; ++j) {
    const double z = z_[static_cast<std::size_t>(j)];
    const double p = std::exp(z - softmax.m) / softmax.s;
    if (p > 0.0) sum += p * (softmax.log_s - (z - softmax.m));
  }
  return sum;
}

// -sum_j t_j log p_j, with 0 * inf = 0. Sets Q and Q - t_y.
double Rows::cross_entropy(KeptRow* row) {
  const bool hard = row->target >= 0;
  if (hard) {
    hard_targets(*row, 0, p_.vocab);
    const double over = p_.restricts() ? row->kept_classes : static_cast<double>(p_.classes());
    const double other = p_.loss.smoothing / over, w_y = class_weight(row->target);
    row->mass_of_others = other == 0.0 ? 0.0 : other * (row->kappa - w_y);
    // Q - t_y is what counts; Q by itself only multiplies p_j.
    row->mass = w_y * (1.0 - p_.loss.smoothing) + (other == 0.0 ? 0.0 : other * row->kappa);
  } else {
    given_targets(*row, 0, p_.vocab);
    double mass = 0.0;
    for (std::int64_t j = 0; j < p_.vocab; ++j) mass += t_[static_cast<std::size_t>(j)];
    const bool merged = p_.is_part() && p_.call == Call::backward;
    row->mass = merged ? row->kappa : mass;
  }
  double loss = 0.0;
  for (std::int64_t j = 0; j < p_.vocab; ++j) {
    const auto at = static_cast<std::size_t>(j);
    if (t_[at] != 0.0) loss -= t_[at] * row->softmax.log_p(z_[at]);
  }
  return loss;
}

// -min(w A, clip(w) A) + kl_coef K - entropy_coef H, and its slope by log p_y.
double Rows::policy(KeptRow* row) const {
  const contract::Policy& policy = p_.loss.policy;
  const double log_p = row->softmax.log_p(row->softmax.z_y);
  const double advantage = load(o_.advantage, row->index);
  const double w = std::exp(log_p - load(o_.old_logprob, row->index));
  const double clipped = std::clamp(w, 1.0 - policy.clip_low, 1.0 + policy.clip_high);
  double loss = -std::min(w * advantage, clipped * advantage);
  row->policy_slope = w * advantage <= clipped * advantage ? -advantage * w : 0.0;
  if (policy.kl_coef != 0.0) {
    const double d = load(o_.ref_logprob, row->index) - log_p;
    loss += policy.kl_coef * (std::expm1(d) - d);
    row->policy_slope -= policy.kl_coef * std::expm1(d);
  }
  if (policy.entropy_coef != 0.0) loss -= policy.entropy_coef * row->entropy;
  return loss;
}

// The divergence of softmax(z / tau) and the teacher, with its factor tau^2.
double Rows::distillation(KeptRow* row, const double* teacher) {
  const contract::Distillation& d = p_.loss.distillation;
  const auto vocab = static_cast<std::size_t>(p_.vocab);
  std::vector<double> tempered(vocab);
  for (std::size_t j = 0; j < vocab; ++j) tempered[j] = z_[j] / d.tau;
  row->student = softmax_of(tempered.data(), -1, DType::f64);
  const double factor = d.square ? d.tau * d.tau : 1.0;
  double kl = 0.0, other = 0.0;
  if (topk_teacher_) {
    given_targets(*row, 0, p_.vocab);
    row->distilled_mass = 0.0;
    for (std::size_t j = 0; j < vocab; ++j) {
      row->distilled_mass += t_[j];
      if (t_[j] != 0.0) kl += t_[j] * (std::log(t_[j]) - row->student.log_p(tempered[j]));
    }
    row->divergence = kl;
    return factor * kl;
  }
  std::vector<double> u(vocab);
  for (std::size_t j = 0; j < vocab; ++j) u[j] = teacher[j] / d.tau;
  row->teacher = softmax_of(u.data(), -1, DType::f64);
  for (std::size_t j = 0; j < vocab; ++j) {
    if (std::isnan(u[j]) || u[j] == kInf) row->teacher.bad = true;
  }
  if (row->teacher.bad) return kNan;
  for (std::size_t j = 0; j < vocab; ++j) {
    const double log_p = row->student.log_p(tempered[j]), log_q = row->teacher.log_p(u[j]);
    const double p = std::exp(log_p), q = std::exp(log_q);
    switch (d.divergence) {
      case Divergence::forward_kl:
        if (q > 0.0) kl += q * (log_q - log_p);
        break;
      case Divergence::reverse_kl:
        if (p > 0.0) kl += p * (log_p - log_q);
        break;
      case Divergence::jsd: {
        const double log_mix = log_mixture(d.beta, log_q, log_p);
        if (p > 0.0) kl += p * (log_p - log_mix);
        if (q > 0.0) other += q * (log_q - log_mix);
        break;
      }
    }
  }
  row->divergence = kl;
  if (d.divergence == Divergence::jsd) kl = times(d.beta, other) + times(1.0 - d.beta, kl);
  return factor * kl;
}

// Its derivative by z_j. t is the top-k teacher's.
double Rows::distillation_slope(const KeptRow& row, double z, double u, double t) const {
  const contract::Distillation& d = p_.loss.distillation;
  const double factor = d.square ? d.tau : 1.0 / d.tau;
  const double log_p = row.student.log_p(z / d.tau), p = std::exp(log_p);
  if (topk_teacher_) return factor * (row.distilled_mass * p - t);
  const double log_q = row.teacher.log_p(u / d.tau);
  if (d.divergence == Divergence::forward_kl) return factor * (p - std::exp(log_q));
  // An infinite divergence has no gradient: its row keeps the gradient of what else its loss holds.
  if (p == 0.0 || !std::isfinite(row.divergence)) return 0.0;
  if (d.divergence == Divergence::reverse_kl) return factor * p * ((log_p - log_q) - row.divergence);
  return factor * (1.0 - d.beta) * p * ((log_p - log_mixture(d.beta, log_q, log_p)) - row.divergence);
}

// kappa_j: w_j beside a hard target, t_j itself of soft and top-k targets.
void Rows::statistics(const KeptRow& row, double* stats) const {
  const Softmax& softmax = row.softmax;
  const bool given = p_.loss.targets == Targets::soft || p_.loss.targets == Targets::topk;
  const std::int64_t y = column_of(row.target);
  double k = 0.0, t = 0.0, n = 0.0;
  for (std::int64_t j = 0; j < p_.vocab; ++j) {
    const auto at = static_cast<std::size_t>(j);
    if (kept_[at] == 0) continue;
    const double kappa = given ? t_[at] : class_weight(p_.first_column + j);
    const double distance = z_[at] == -kInf ? -kInf : z_[at] - softmax.m;
    k += times(kappa, distance);
    n += kappa;
    if (j != y && distance > -kInf) t += times(std::exp(distance), distance);
  }
  const double values[6] = {softmax.m, softmax.r, softmax.z_y, k, t, n};
  std::copy_n(values, 6, stats);
  if (teacher_) {
    stats[6] = row.teacher.lse(), stats[7] = row.divergence;
  } else if (topk_teacher_) {
    stats[6] = row.student.lse(), stats[7] = row.divergence;
  } else if (p_.restricts()) {
    stats[6] = row.kept_classes;  // n is a sum of class weights
  }
}

RowOutputs Rows::measure(KeptRow* row, const double* raw, const double* teacher) {
  const contract::Loss& loss = p_.loss;
  const bool good = transform(*row, 0, p_.vocab, raw);
  count_classes(row);
  double t = 0.0;
  row->softmax = good ? softmax_for(row, &t) : bad_softmax();
  const Softmax& sm = row->softmax;
  const bool merged = p_.is_part() && p_.call == Call::backward;
  if (!sm.bad && (p_.wants_entropy() || o_.row_entropy || o_.grad_row_entropy)) {
    row->entropy = merged ? sm.log_s - (t + times(std::exp(sm.z_y - sm.m), sm.z_y - sm.m)) / sm.s : entropy_of(sm);
  }

  // The row's own loss. What it leaves in t_ serves the statistics.
  const bool distils = teacher_ || topk_teacher_;
  double own = 0.0;
  if (!sm.bad) {
    if (loss.policy.on) {
      own = policy(row);
    } else if (!distils || loss.distillation.hard_share > 0.0) {
      own = cross_entropy(row);
      if (distils) own = loss.distillation.hard_share * own;
    }
    if (distils) own += times(1.0 - loss.distillation.hard_share, distillation(row, teacher));
    if (row->teacher.bad) row->softmax = bad_softmax();
  }
  RowOutputs out;
  if (p_.call == Call::backward) return out;
  if (sm.bad) {
    out.loss = out.lse = out.logprob = out.entropy = out.zloss = out.mean_logit = out.log_sum_p2 = kNan;
    if (row->weight == 0.0) out.loss = out.zloss = 0.0;  // a weight of 0 leaves nothing of a loss
    std::fill_n(out.stats, std::size(out.stats), kNan);
    return out;
  }
  if (o_.stats) statistics(*row, out.stats);
  if (p_.is_part()) return out;

  const double penalty = loss.z_loss == 0.0 ? 0.0 : loss.z_loss * sm.lse() * sm.lse();
  out.loss = times(row->weight, own + penalty);
  out.zloss = times(row->weight, penalty);
  out.lse = sm.lse();
  out.logprob = row->target >= 0 ? sm.log_p(sm.z_y) : 0.0;
  out.entropy = row->entropy;
  std::size_t lead = 0;
  double sum = 0.0;
  for (std::size_t j = 0; j < z_.size(); ++j) {
    if (z_[j] > z_[lead]) lead = j;
    if (kept_[j] != 0) sum += z_[j];
  }
  out.mean_logit = sum / row->kept_classes;
  if (o_.row_log_sum_p2) {
    double squares = 0.0;  // of the classes beside the largest, relative to it
    for (std::size_t j = 0; j < z_.size(); ++j) squares += j == lead ? 0.0 : std::exp(2.0 * (z_[j] - z_[lead]));
    out.log_sum_p2 = std::log1p(squares) + 2.0 * sm.log_p(z_[lead]);
  }
  out.argmax = static_cast<std::int64_t>(lead);
  out.correct = out.argmax == row->target;
  return out;
}

// Nothing of the row's gradient is asked for: its weight is 0, and no output of it has an upstream gradient.
bool Rows::silent(const KeptRow& row) const {
  return o_.row_weight && row.weight == 0.0 && !o_.grad_row_lse && !o_.grad_row_logprob && !o_.grad_row_entropy;
}

void Rows::gradient(const KeptRow& row, std::int64_t first, std::int64_t count, const double* raw,
                    const double* teacher, double* d) {
  const contract::Loss& loss = p_.loss;
  const Softmax& sm = row.softmax;
  if (silent(row) || sm.bad) {
    std::fill_n(d, count, silent(row) ? 0.0 : kNan);
    return;
  }
  transform(row, first, count, raw);
  const bool distils = teacher_ || topk_teacher_;
  const double hard_share = distils ? loss.distillation.hard_share : 1.0;
  const bool crosses = !loss.policy.on && hard_share > 0.0;
  const double g = row.upstream * hard_share;
  const double of_lse = 2.0 * loss.z_loss * row.upstream * sm.lse() + row.grad_lse;
  const double of_log_p = row.grad_logprob + row.upstream * row.policy_slope;
  const double of_entropy = row.grad_entropy - (loss.policy.on ? row.upstream * loss.policy.entropy_coef : 0.0);
  const double of_divergence = distils ? row.upstream * (1.0 - loss.distillation.hard_share) : 0.0;
  const std::int64_t y = column_of(row.target) < 0 ? -1 : column_of(row.target) - first;

  if (crosses && row.target >= 0) hard_targets(row, first, count);
  if (crosses && row.target < 0) given_targets(row, first, count);
  const double others = sm.r / sm.s;  // 1 - p_y, which statistics know best
  for (std::int64_t j = 0; j < count; ++j) {
    const auto at = static_cast<std::size_t>(j);
    const double p = std::exp(z_[at] - sm.m) / sm.s;
    double value = 0.0;
    if (crosses) value = j == y ? g * (row.mass_of_others - row.mass * others) : g * (row.mass * p - t_[at]);
    if (of_log_p != 0.0) value += of_log_p * (j == y ? others : -p);
    if (of_lse != 0.0) value += of_lse * p;
    if (of_entropy != 0.0 && p > 0.0) value -= of_entropy * p * (sm.log_p(z_[at]) + row.entropy);
    d[j] = value;
  }
  if (of_divergence != 0.0) {
    if (topk_teacher_) given_targets(row, first, count);
    for (std::int64_t j = 0; j < count; ++j) {
      const auto at = static_cast<std::size_t>(j);
      d[j] += of_divergence * distillation_slope(row, z_[at], teacher_ ? teacher[j] : 0.0, t_[at]);
    }
  }
  for (std::int64_t j = 0; j < count; ++j) {
    const auto at = static_cast<std::size_t>(j);
    d[j] = kept_[at] != 0 ? d[j] * slope_[at] : 0.0;
  }
}

}  // namespace logitless::reference
