// The oracle: every kept row's losses and its row of D by rows.hpp, then dX = D W, dW = D^T X and db = D^T 1 over the
// rows that are not bad. X [R,H], W [V,H], z [R,V], teacher X [R,Ht], W [V,Ht] -> per-row outputs [R], dX [R,H],
// dW [V,H], db [V], or dz [R,V].
//
// Everything in double; each output is rounded once. Tiles of rows and blocks of classes only bound the memory:
// (R + V_tile) * (H + Ht) * 8 bytes, never V * H. Cost 2RHV forward, 2RHV more for dX, 4RHV more for dW (logits once
// again), and the teacher's 2RHtV as often. Formulas are the textbook's and are not shared with src/contract: this file
// judges that one.
#include "reference/reference.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "logitless/logitless.h"
#include "reference/convert.hpp"
#include "reference/rows.hpp"

namespace logitless::reference {
namespace {

using contract::Call;
using contract::Kind;
using contract::Problem;
using contract::Reduction;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t kRowTile = 32;
constexpr std::int64_t kClassBlock = 64;

// y += a x. n is a multiple of 8, so that compilers vectorise it without being asked to reassociate.
void axpy(double a, const double* x, double* y, std::int64_t n) {
  for (std::int64_t k = 0; k < n; k += 8) {
    for (std::int64_t t = 0; t < 8; ++t) y[k + t] += a * x[k + t];
  }
}

constexpr std::int64_t padded(std::int64_t n) { return (n + 7) / 8 * 8; }

// Writes or adds, rounded once.
void put(const View& out, std::int64_t i, std::int64_t j, double value, bool accumulate) {
  store(out, i, j, accumulate ? load(out, i, j) + value : value);
}

// X W^T a block of classes at a time, X [R,H], W [V,H].
class Product {
 public:
  Product(const View& x, const View& w, std::int64_t hidden, std::int64_t vocab)
      : x_(x), w_(w), hidden_(hidden), vocab_(vocab) {}

  // W[first .. first + kClassBlock) transposed, [H][kClassBlock]; classes beyond V are 0.
  void load_classes(std::int64_t first) {
    const std::int64_t count = std::min(kClassBlock, vocab_ - first);
    w_t_.assign(static_cast<std::size_t>(hidden_ * kClassBlock), 0.0);
    std::vector<double> w_row(static_cast<std::size_t>(hidden_));
    for (std::int64_t j = 0; j < count; ++j) {
      load_row(w_, first + j, 0, hidden_, w_row.data());
      for (std::int64_t k = 0; k < hidden_; ++k) w_t_[static_cast<std::size_t>(k * kClassBlock + j)] = w_row[k];
    }
  }

  // Rows of X as doubles, [n][H padded].
  std::vector<double> load_rows(const KeptRow* rows, std::int64_t n) const {
    std::vector<double> x(static_cast<std::size_t>(n * padded(hidden_)), 0.0);
    for (std::int64_t t = 0; t < n; ++t) load_row(x_, rows[t].index, 0, hidden_, x.data() + t * padded(hidden_));
    return x;
  }

  // z[j] for the kClassBlock classes that load_classes holds. x [H].
  void block_logits(const double* x, double* z) const {
    for (std::int64_t j = 0; j < kClassBlock; ++j) z[j] = 0.0;
    for (std::int64_t k = 0; k < hidden_; ++k)
      axpy(x[k], &w_t_[static_cast<std::size_t>(k * kClassBlock)], z, kClassBlock);
  }

  // All logits of n rows, [n][width].
  void logits(const KeptRow* rows, std::int64_t n, std::int64_t width, double* z) {
    const std::vector<double> x = load_rows(rows, n);
    for (std::int64_t j = 0; j < vocab_; j += kClassBlock) {
      load_classes(j);
      for (std::int64_t t = 0; t < n; ++t) block_logits(x.data() + t * padded(hidden_), z + t * width + j);
    }
  }

 private:
  const View x_, w_;
  const std::int64_t hidden_, vocab_;
  std::vector<double> w_t_;  // [H][kClassBlock]
};

class Run {
 public:
  Run(const Problem& problem, const Operands& operands)
      : p_(problem),
        o_(operands),
        math_(problem, operands),
        student_(operands.x, operands.w, problem.hidden, problem.vocab),
        teacher_(operands.teacher_x, operands.teacher_w, problem.teacher_hidden, problem.vocab) {}

  std::string operator()(Outcome* outcome, int* status) {
    *status = LL_OK;
    std::string error = math_.collect(&rows_, status);
    if (!error.empty()) return error;
    const auto kept = static_cast<std::int64_t>(rows_.size());
    const double divisor = math_.divisor(rows_);
    const bool merges = p_.is_part() && p_.call == Call::forward;  // the mean is formed from merged statistics
    if (divisor == 0.0 && !merges && p_.loss.on_empty == contract::OnEmpty::error) {
      *status = LL_ERROR_EMPTY;
      return empty_text(kept);
    }
    for (KeptRow& row : rows_) math_.read_upstream(&row, divisor);
    if (o_.teacher_bias) {
      teacher_bias_.resize(static_cast<std::size_t>(p_.vocab));
      for (std::int64_t j = 0; j < p_.vocab; ++j) teacher_bias_[static_cast<std::size_t>(j)] = load(o_.teacher_bias, j);
    }
    if (wants_db()) db_.assign(static_cast<std::size_t>(p_.vocab), 0.0);

    clear_ignored();
    double total = 0.0;
    for (std::int64_t first = 0; first < kept; first += kRowTile) {
      total += row_tile(first, std::min(first + kRowTile, kept));
    }
    if (wants_dw()) grad_weight();
    if (wants_db()) {
      for (std::int64_t j = 0; j < p_.vocab; ++j) store(o_.db, j, 0, db_[static_cast<std::size_t>(j)]);
    }

    if (outcome != nullptr) {
      outcome->kept = kept;
      outcome->correct = correct_;
      outcome->bad = 0;
      for (const KeptRow& row : rows_) outcome->bad += row.softmax.bad ? 1 : 0;
      if (p_.loss.reduction == Reduction::none || p_.is_part()) {
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
  bool wants_db() const { return p_.call != Call::forward && p_.db != contract::DType::none && o_.db; }
  bool wants_dw() const {
    return p_.call != Call::forward && p_.kind == Kind::linear && p_.dw != contract::DType::none && o_.dw;
  }

  std::string empty_text(std::int64_t kept) const {
    const std::string hint = "; use on_empty nan or zero, or another reduction";
    if (o_.normalizer) return "normalizer = 0: reduction mean divides by it" + hint;
    if (kept == 0) return "targets: reduction mean over no kept row of " + std::to_string(p_.rows) + hint;
    return "class_weight: reduction mean over " + std::to_string(kept) + " kept rows whose weights sum to 0" + hint;
  }

  void put_row_outputs(std::int64_t i, const RowOutputs& row) {
    if (p_.call == Call::backward) return;
    if (o_.stats) {
      for (std::int64_t c = 0; c < p_.statistics(); ++c) store(o_.stats, i, c, row.stats[c]);
    }
    if (p_.is_part()) return;
    if (o_.row_loss) store(o_.row_loss, i, 0, row.loss);
    if (o_.row_lse) store(o_.row_lse, i, 0, row.lse);
    if (o_.row_logprob) store(o_.row_logprob, i, 0, row.logprob);
    if (o_.row_entropy) store(o_.row_entropy, i, 0, row.entropy);
    if (o_.row_zloss) store(o_.row_zloss, i, 0, row.zloss);
    if (o_.row_mean_logit) store(o_.row_mean_logit, i, 0, row.mean_logit);
    if (o_.row_log_sum_p2) store(o_.row_log_sum_p2, i, 0, row.log_sum_p2);
    if (o_.row_argmax) store_integer(o_.row_argmax, i, row.argmax);
    if (o_.row_correct) store_integer(o_.row_correct, i, row.correct ? 1 : 0);
    if (p_.argmax || o_.row_argmax || o_.row_correct) correct_ += row.correct ? 1 : 0;
  }

  // Ignored rows: per-row outputs 0, argmax -1, gradient exactly 0 (or left alone when adding).
  void clear_ignored() {
    std::size_t next = 0;
    for (std::int64_t i = 0; i < p_.rows; ++i) {
      if (next < rows_.size() && rows_[next].index == i) {
        ++next;
        continue;
      }
      put_row_outputs(i, RowOutputs{});
      if (wants_dx() && !p_.accumulate_dx) {
        for (std::int64_t k = 0; k < p_.hidden; ++k) store(o_.dx, i, k, 0.0);
      }
      if (wants_dz()) {
        for (std::int64_t j = 0; j < p_.vocab; ++j) store(o_.dz, i, j, 0.0);
      }
    }
  }

  void add_teacher_bias(std::int64_t first, std::int64_t count, double* u) const {
    if (teacher_bias_.empty()) return;
    for (std::int64_t j = 0; j < count; ++j) u[j] += teacher_bias_[static_cast<std::size_t>(first + j)];
  }

  // Rows [first, last) of the kept ones: logits, softmax, outputs, dX or dz, their share of db. Returns the sum of
  // their losses.
  double row_tile(std::int64_t first, std::int64_t last) {
    const std::int64_t width = (p_.vocab + kClassBlock - 1) / kClassBlock * kClassBlock;
    const std::int64_t n = last - first;
    KeptRow* rows = &rows_[static_cast<std::size_t>(first)];
    z_.resize(static_cast<std::size_t>(n * width));
    if (p_.kind == Kind::logits) {
      for (std::int64_t t = 0; t < n; ++t) load_row(o_.z, rows[t].index, 0, p_.vocab, z_.data() + t * width);
    } else {
      student_.logits(rows, n, width, z_.data());
    }
    if (p_.distils()) {
      u_.resize(z_.size());
      teacher_.logits(rows, n, width, u_.data());
      for (std::int64_t t = 0; t < n; ++t) add_teacher_bias(0, p_.vocab, u_.data() + t * width);
    }

    double total = 0.0;
    for (std::int64_t t = 0; t < n; ++t) {
      double* z = z_.data() + t * width;
      const double* u = p_.distils() ? u_.data() + t * width : nullptr;
      const RowOutputs outputs = math_.measure(&rows[t], z, u);
      total += outputs.loss;
      put_row_outputs(rows[t].index, outputs);
      if (!wants_dx() && !wants_dz() && !wants_db()) continue;
      math_.gradient(rows[t], 0, p_.vocab, z, u, z);  // z becomes D
      if (wants_dz()) {
        for (std::int64_t j = 0; j < p_.vocab; ++j) store(o_.dz, rows[t].index, j, z[j]);
      }
      if (wants_db() && !rows[t].softmax.bad) {
        for (std::int64_t j = 0; j < p_.vocab; ++j) db_[static_cast<std::size_t>(j)] += z[j];
      }
    }
    if (wants_dx()) grad_hidden(rows, n, width);
    return total;
  }

  // dX[i] = sum_j D_ij W_j for the rows whose D lies in z_.
  void grad_hidden(const KeptRow* rows, std::int64_t n, std::int64_t width) {
    const std::int64_t h = padded(p_.hidden);
    std::vector<double> dx(static_cast<std::size_t>(n * h), 0.0);
    std::vector<double> w_row(static_cast<std::size_t>(h), 0.0);
    for (std::int64_t j = 0; j < p_.vocab; ++j) {
      load_row(o_.w, j, 0, p_.hidden, w_row.data());
      for (std::int64_t t = 0; t < n; ++t)
        axpy(z_[static_cast<std::size_t>(t * width + j)], w_row.data(), &dx[static_cast<std::size_t>(t * h)], h);
    }
    for (std::int64_t t = 0; t < n; ++t) {
      for (std::int64_t k = 0; k < p_.hidden; ++k) {
        // A bad row is NaN in every element, whatever its products came to.
        const double value = math_.silent(rows[t]) ? 0.0
                             : rows[t].softmax.bad ? kNan
                                                   : dx[static_cast<std::size_t>(t * h + k)];
        put(o_.dx, rows[t].index, k, value, p_.accumulate_dx);
      }
    }
  }

  // dW_j = sum_i D_ij X_i over the rows that are not bad, a block of classes at a time.
  void grad_weight() {
    const std::int64_t h = padded(p_.hidden), teacher_h = padded(p_.teacher_hidden);
    const auto kept = static_cast<std::int64_t>(rows_.size());
    const std::vector<double> x = student_.load_rows(rows_.data(), kept);
    std::vector<double> teacher_x;
    if (p_.distils()) teacher_x = teacher_.load_rows(rows_.data(), kept);
    std::vector<double> dw(static_cast<std::size_t>(kClassBlock * h));
    double z[kClassBlock], u[kClassBlock];
    for (std::int64_t first = 0; first < p_.vocab; first += kClassBlock) {
      const std::int64_t count = std::min(kClassBlock, p_.vocab - first);
      student_.load_classes(first);
      if (p_.distils()) teacher_.load_classes(first);
      dw.assign(dw.size(), 0.0);
      for (std::int64_t t = 0; t < kept; ++t) {
        const KeptRow& row = rows_[static_cast<std::size_t>(t)];
        if (row.softmax.bad) continue;
        const double* x_row = x.data() + t * h;
        student_.block_logits(x_row, z);
        if (p_.distils()) {
          teacher_.block_logits(teacher_x.data() + t * teacher_h, u);
          add_teacher_bias(first, count, u);
        }
        math_.gradient(row, first, count, z, u, z);
        for (std::int64_t j = 0; j < count; ++j) axpy(z[j], x_row, &dw[static_cast<std::size_t>(j * h)], h);
      }
      for (std::int64_t j = 0; j < count; ++j) {
        for (std::int64_t k = 0; k < p_.hidden; ++k)
          put(o_.dw, first + j, k, dw[static_cast<std::size_t>(j * h + k)], p_.accumulate_dw);
      }
    }
  }

  const Problem& p_;
  const Operands& o_;
  Rows math_;
  Product student_, teacher_;
  std::vector<KeptRow> rows_;
  std::vector<double> teacher_bias_;  // [V] or empty
  std::vector<double> z_, u_;         // logits, then D, of one tile of rows [kRowTile, V]; the teacher's logits
  std::vector<double> db_;            // [V]
  std::int64_t correct_ = 0;
};

}  // namespace

std::string run(const Problem& problem, const Operands& operands, Outcome* outcome, int* status) {
  int ignored = LL_OK;
  return Run(problem, operands)(outcome, status != nullptr ? status : &ignored);
}

}  // namespace logitless::reference
