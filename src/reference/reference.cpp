// The oracle: loss_i = -sum_j q_ij log p_ij and D_ij = g_i (p_ij - q_ij) with q the explicit target distribution, then
// dX = D W and dW = D^T X. X [R,H], W [V,H], z [R,V] -> losses [R], dX [R,H], dW [V,H], or dz [R,V].
//
// Everything in double; each output is rounded once. Tiles of rows and blocks of classes only bound the memory:
// (R + V_tile) * H * 8 bytes, never V * H. Cost 2RHV forward, 2RHV more for dX, 4RHV more for dW (logits once again).
// Formulas are the textbook's and are not shared with src/contract: this file judges that one.
#include "reference/reference.hpp"

#include <cmath>
#include <limits>
#include <vector>

#include "logitless/logitless.h"
#include "reference/convert.hpp"

namespace logitless::reference {
namespace {

using contract::Call;
using contract::Kind;
using contract::Problem;
using contract::Reduction;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr std::int64_t kRowTile = 32;
constexpr std::int64_t kClassBlock = 64;

// y += a x. n is a multiple of 8, so that compilers vectorise it without being asked to reassociate.
void axpy(double a, const double* x, double* y, std::int64_t n) {
  for (std::int64_t k = 0; k < n; k += 8) {
    for (std::int64_t t = 0; t < 8; ++t) y[k + t] += a * x[k + t];
  }
}

constexpr std::int64_t padded(std::int64_t n) { return (n + 7) / 8 * 8; }

// What a row's softmax needs: p_j = exp(z_j - m) / s, with r the sum s without the target's own term.
struct RowSoftmax {
  double m = 0.0, r = 0.0, z_y = 0.0, s = 0.0;
  double sum = 0.0;  // sum_j (z_j - m)
  bool bad = false;
};

struct KeptRow {
  std::int64_t index = 0;   // i
  std::int64_t target = 0;  // y_i
  double upstream = 0.0;    // g_i = dL/dloss_i
  RowSoftmax softmax;
};

// The reference is the row's maximum as saved_as holds it, so that statistics saved in fp32 agree with each other.
RowSoftmax softmax_of(const double* z, std::int64_t vocab, std::int64_t target, contract::DType saved_as) {
  RowSoftmax row;
  row.m = -kInf;
  for (std::int64_t j = 0; j < vocab; ++j) {
    if (std::isnan(z[j]) || z[j] == kInf) row.bad = true;
    if (z[j] > row.m) row.m = z[j];
  }
  if (row.m == -kInf) row.bad = true;
  if (row.bad) {
    row.m = row.r = row.z_y = row.s = row.sum = kNan;
    return row;
  }
  const double stored = rounded(row.m, saved_as);
  if (std::abs(stored - row.m) < 1.0) row.m = stored;
  for (std::int64_t j = 0; j < vocab; ++j) {
    row.sum += z[j] - row.m;
    if (j != target) row.r += std::exp(z[j] - row.m);
  }
  row.z_y = z[target];
  row.s = row.r + std::exp(row.z_y - row.m);
  return row;
}

// backward from what forward saved. Statistics mean the same for every reference m.
RowSoftmax softmax_from_stats(const View& stats, std::int64_t i) {
  RowSoftmax row;
  row.m = load(stats, i, 0);
  row.r = load(stats, i, 1);
  row.z_y = load(stats, i, 2);
  row.sum = load(stats, i, 3);
  row.s = row.r + std::exp(row.z_y - row.m);
  row.bad = !std::isfinite(row.m) || !std::isfinite(row.s) || row.s <= 0.0;
  return row;
}

RowSoftmax softmax_from_lse(double lse, double z_y) {
  RowSoftmax row;
  row.m = lse;
  row.s = 1.0;
  row.z_y = z_y;
  row.r = 1.0 - std::exp(z_y - lse);
  row.bad = !std::isfinite(lse);
  return row;
}

// The target distribution: q_j = other for j != y, q_y = target.
struct Distribution {
  double target = 1.0, other = 0.0;
};

Distribution distribution_of(const contract::Loss& loss, std::int64_t vocab) {
  Distribution q;
  q.other = loss.smoothing / static_cast<double>(vocab);
  q.target = q.other + (1.0 - loss.smoothing);
  // alpha = V/(V-1), all mass on the others, leaves rounding where 0 is meant; 0 keeps 0 * inf = 0 below.
  if (std::abs(q.target) < 4.0 * std::numeric_limits<double>::epsilon()) q.target = 0.0;
  return q;
}

// (z_j - m) - log s in that order: logits that are all 1e16 give -log V.
double log_p(double z_j, const RowSoftmax& row) { return (z_j - row.m) - std::log(row.s); }

// -sum_j q_j log p_j, with 0 * inf = 0.
double loss_of(const double* z, std::int64_t vocab, std::int64_t target, const RowSoftmax& row, Distribution q) {
  if (row.bad) return kNan;
  double loss = q.target == 0.0 ? 0.0 : -q.target * log_p(z[target], row);
  if (q.other == 0.0) return loss;
  for (std::int64_t j = 0; j < vocab; ++j) {
    if (j != target) loss -= q.other * log_p(z[j], row);
  }
  return loss;
}

// D_ij = g (p_ij - q_ij). The target's entry through 1 - p_y = r / s, which given statistics know best.
double gradient(double z_j, bool is_target, const KeptRow& row, Distribution q) {
  const RowSoftmax& sm = row.softmax;
  if (is_target) return row.upstream * ((1.0 - q.target) - sm.r / sm.s);
  return row.upstream * (std::exp(z_j - sm.m) / sm.s - q.other);
}

// Writes or adds, rounded once.
void put(const View& out, std::int64_t i, std::int64_t j, double value, bool accumulate) {
  store(out, i, j, accumulate ? load(out, i, j) + value : value);
}

class Run {
 public:
  Run(const Problem& problem, const Operands& operands)
      : p_(problem), o_(operands), q_(distribution_of(problem.loss, problem.vocab)) {}

  std::string operator()(Outcome* outcome, int* status) {
    *status = LL_OK;
    std::string error = collect_rows(status);
    if (!error.empty()) return error;
    const std::int64_t kept = static_cast<std::int64_t>(rows_.size());
    const bool mean = p_.loss.reduction == Reduction::mean;
    const double divisor = mean ? (p_.loss.normalizer > 0.0 ? p_.loss.normalizer : static_cast<double>(kept)) : 1.0;
    if (divisor == 0.0 && p_.loss.on_empty == contract::OnEmpty::error) {
      *status = LL_ERROR_EMPTY;
      return "targets: reduction mean over no kept row of " + std::to_string(p_.rows) +
             "; use on_empty nan or zero, or another reduction";
    }
    for (KeptRow& row : rows_) row.upstream = upstream_of(row.index, divisor);

    clear_ignored();
    double total = 0.0;
    for (std::int64_t first = 0; first < kept; first += kRowTile) {
      total += row_tile(first, std::min(first + kRowTile, kept));
    }
    if (p_.kind == Kind::linear && p_.dw != contract::DType::none && o_.dw) grad_weight();

    if (outcome != nullptr) {
      outcome->kept = kept;
      outcome->bad = 0;
      for (const KeptRow& row : rows_) outcome->bad += row.softmax.bad ? 1 : 0;
      if (p_.loss.reduction == Reduction::none) {
        outcome->loss = 0.0;
      } else if (divisor == 0.0) {
        outcome->loss = p_.loss.on_empty == contract::OnEmpty::zero ? 0.0 : kNan;
      } else {
        outcome->loss = total / divisor;
      }
    }
    return {};
  }

 private:
  bool wants_dx() const { return p_.call != Call::forward && p_.dx != contract::DType::none && o_.dx; }
  bool wants_dz() const { return p_.call != Call::forward && p_.dz != contract::DType::none && o_.dz; }

  // Reads every target before anything is written.
  std::string collect_rows(int* status) {
    rows_.clear();
    for (std::int64_t i = 0; i < p_.rows; ++i) {
      const std::int64_t y = load_integer(o_.targets, i);
      if (y == p_.loss.ignore_index) continue;
      if (y < 0 || y >= p_.vocab) {
        *status = LL_ERROR_TARGET_RANGE;
        return "targets[" + std::to_string(i) + "] = " + std::to_string(y) +
               ": must be in [0, V) with V = " + std::to_string(p_.vocab) +
               ", or ignore_index = " + std::to_string(p_.loss.ignore_index);
      }
      KeptRow row;
      row.index = i;
      row.target = y;
      rows_.push_back(row);
    }
    return {};
  }

  double upstream_of(std::int64_t i, double divisor) const {
    const bool per_row = static_cast<bool>(o_.grad_row_loss);
    if (p_.loss.reduction == Reduction::none) return per_row ? load(o_.grad_row_loss, i) : 1.0;
    return o_.grad_loss / divisor + (per_row ? load(o_.grad_row_loss, i) : 0.0);
  }

  void put_row_outputs(std::int64_t i, double loss, double lse, double logprob, const RowSoftmax& row) {
    if (p_.call == Call::backward) return;
    if (o_.row_loss) store(o_.row_loss, i, 0, loss);
    if (o_.row_lse) store(o_.row_lse, i, 0, lse);
    if (o_.row_logprob) store(o_.row_logprob, i, 0, logprob);
    if (o_.stats) {
      const double values[4] = {row.m, row.r, row.z_y, row.sum};
      for (std::int64_t c = 0; c < 4; ++c) store(o_.stats, i, c, values[c]);
    }
  }

  // Ignored rows: per-row outputs 0, gradient exactly 0 (or left alone when adding).
  void clear_ignored() {
    std::size_t next = 0;
    for (std::int64_t i = 0; i < p_.rows; ++i) {
      if (next < rows_.size() && rows_[next].index == i) {
        ++next;
        continue;
      }
      put_row_outputs(i, 0.0, 0.0, 0.0, RowSoftmax{});
      if (wants_dx() && !p_.accumulate_dx) {
        for (std::int64_t k = 0; k < p_.hidden; ++k) store(o_.dx, i, k, 0.0);
      }
      if (wants_dz()) {
        for (std::int64_t j = 0; j < p_.vocab; ++j) store(o_.dz, i, j, 0.0);
      }
    }
  }

  // W[first .. first + kClassBlock) transposed, [H][kClassBlock]; classes beyond V are 0.
  void load_classes_transposed(std::int64_t first) {
    const std::int64_t count = std::min(kClassBlock, p_.vocab - first);
    w_t_.assign(static_cast<std::size_t>(p_.hidden * kClassBlock), 0.0);
    std::vector<double> w_row(static_cast<std::size_t>(p_.hidden));
    for (std::int64_t j = 0; j < count; ++j) {
      load_row(o_.w, first + j, 0, p_.hidden, w_row.data());
      for (std::int64_t k = 0; k < p_.hidden; ++k) w_t_[static_cast<std::size_t>(k * kClassBlock + j)] = w_row[k];
    }
  }

  // z[j] for the kClassBlock classes that load_classes_transposed holds. x [H].
  void block_logits(const double* x, double* z) const {
    for (std::int64_t j = 0; j < kClassBlock; ++j) z[j] = 0.0;
    for (std::int64_t k = 0; k < p_.hidden; ++k)
      axpy(x[k], &w_t_[static_cast<std::size_t>(k * kClassBlock)], z, kClassBlock);
  }

  // Rows [first, last) of the kept ones: logits, softmax, outputs, dX or dz. Returns the sum of their losses.
  double row_tile(std::int64_t first, std::int64_t last) {
    const std::int64_t width = (p_.vocab + kClassBlock - 1) / kClassBlock * kClassBlock;
    z_.resize(static_cast<std::size_t>((last - first) * width));
    auto z_of = [&](std::int64_t t) { return z_.data() + (t - first) * width; };

    if (p_.kind == Kind::logits) {
      for (std::int64_t t = first; t < last; ++t) load_row(o_.z, rows_[t].index, 0, p_.vocab, z_of(t));
    } else {
      std::vector<double> x(static_cast<std::size_t>((last - first) * p_.hidden));
      for (std::int64_t t = first; t < last; ++t) {
        load_row(o_.x, rows_[t].index, 0, p_.hidden, &x[static_cast<std::size_t>((t - first) * p_.hidden)]);
      }
      for (std::int64_t j = 0; j < p_.vocab; j += kClassBlock) {
        load_classes_transposed(j);
        for (std::int64_t t = first; t < last; ++t) block_logits(x.data() + (t - first) * p_.hidden, z_of(t) + j);
      }
    }

    double total = 0.0;
    for (std::int64_t t = first; t < last; ++t) {
      KeptRow& row = rows_[t];
      row.softmax = softmax_for(row, z_of(t));
      if (p_.call == Call::backward) continue;
      const RowSoftmax& sm = row.softmax;
      const double loss = loss_of(z_of(t), p_.vocab, row.target, sm, q_);
      total += loss;
      put_row_outputs(row.index, loss, sm.bad ? kNan : sm.m + std::log(sm.s), sm.bad ? kNan : log_p(sm.z_y, sm), sm);
    }

    if (!wants_dx() && !wants_dz()) return total;
    for (std::int64_t t = first; t < last; ++t) {  // z becomes D, a row at a time
      double* z = z_of(t);
      const KeptRow& row = rows_[t];
      for (std::int64_t j = 0; j < p_.vocab; ++j) {
        z[j] = row.softmax.bad ? kNan : gradient(z[j], j == row.target, row, q_);
      }
      if (wants_dz()) {
        for (std::int64_t j = 0; j < p_.vocab; ++j) store(o_.dz, row.index, j, z[j]);
      }
    }
    if (wants_dx()) grad_hidden(first, last, width);
    return total;
  }

  RowSoftmax softmax_for(const KeptRow& row, const double* z) const {
    if (p_.call == Call::backward && o_.stats) return softmax_from_stats(o_.stats, row.index);
    if (p_.call == Call::backward && o_.lse) return softmax_from_lse(load(o_.lse, row.index), z[row.target]);
    const bool saves = p_.call != Call::backward && o_.stats;
    return softmax_of(z, p_.vocab, row.target, saves ? o_.stats.dtype : contract::DType::f64);
  }

  // dX[i] = sum_j D_ij W_j for the rows whose D lies in z_.
  void grad_hidden(std::int64_t first, std::int64_t last, std::int64_t width) {
    const std::int64_t h = padded(p_.hidden);
    std::vector<double> dx(static_cast<std::size_t>((last - first) * h), 0.0);
    std::vector<double> w_row(static_cast<std::size_t>(h), 0.0);
    for (std::int64_t j = 0; j < p_.vocab; ++j) {
      load_row(o_.w, j, 0, p_.hidden, w_row.data());
      for (std::int64_t t = 0; t < last - first; ++t)
        axpy(z_[static_cast<std::size_t>(t * width + j)], w_row.data(), &dx[static_cast<std::size_t>(t * h)], h);
    }
    for (std::int64_t t = first; t < last; ++t) {
      for (std::int64_t k = 0; k < p_.hidden; ++k) {
        // A bad row is NaN in every element, whatever its products came to.
        const double value = rows_[t].softmax.bad ? kNan : dx[static_cast<std::size_t>((t - first) * h + k)];
        put(o_.dx, rows_[t].index, k, value, p_.accumulate_dx);
      }
    }
  }

  // dW_j = sum_i D_ij X_i over the rows that are not bad, a block of classes at a time.
  void grad_weight() {
    if (p_.call == Call::forward) return;
    const std::int64_t h = padded(p_.hidden);
    std::vector<double> x(rows_.size() * static_cast<std::size_t>(h), 0.0);
    for (std::size_t t = 0; t < rows_.size(); ++t)
      load_row(o_.x, rows_[t].index, 0, p_.hidden, &x[t * static_cast<std::size_t>(h)]);
    std::vector<double> dw(static_cast<std::size_t>(kClassBlock * h));
    double z[kClassBlock];
    for (std::int64_t first = 0; first < p_.vocab; first += kClassBlock) {
      const std::int64_t count = std::min(kClassBlock, p_.vocab - first);
      load_classes_transposed(first);
      dw.assign(dw.size(), 0.0);
      for (std::size_t t = 0; t < rows_.size(); ++t) {
        const KeptRow& row = rows_[t];
        if (row.softmax.bad) continue;
        const double* x_row = &x[t * static_cast<std::size_t>(h)];
        block_logits(x_row, z);
        for (std::int64_t j = 0; j < count; ++j) {
          axpy(gradient(z[j], first + j == row.target, row, q_), x_row, &dw[static_cast<std::size_t>(j * h)], h);
        }
      }
      for (std::int64_t j = 0; j < count; ++j) {
        for (std::int64_t k = 0; k < p_.hidden; ++k)
          put(o_.dw, first + j, k, dw[static_cast<std::size_t>(j * h + k)], p_.accumulate_dw);
      }
    }
  }

  const Problem& p_;
  const Operands& o_;
  const Distribution q_;
  std::vector<KeptRow> rows_;
  std::vector<double> z_;    // logits, then D, of one tile of rows [kRowTile, V]
  std::vector<double> w_t_;  // [H][kClassBlock]
};

}  // namespace

std::string run(const Problem& problem, const Operands& operands, Outcome* outcome, int* status) {
  int ignored = LL_OK;
  return Run(problem, operands)(outcome, status != nullptr ? status : &ignored);
}

}  // namespace logitless::reference
