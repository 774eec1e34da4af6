// One row at a time: from its logits to its losses and to its row of D. z0 [V] raw logits, u [V] a teacher's logits.
//   z = softcap tanh(logit_scale (z0 + b) / softcap) / T, -inf where a restriction drops the class
//   p = softmax(z), t the explicit target distribution (unnormalised), Q = sum_j t_j
//   CE = -sum_j t_j log p_j
//   D_j = g (Q p_j - t_j) + (2 lambda g lse + l) p_j + h ([j = y] - p_j) - e p_j (log p_j + H), and by raw logits D
//   dz/dz0
// with g, l, h, e the upstream gradients of the row's loss, lse, log p_y and entropy. A row rule (policy) or a
// teacher's divergence comes in place of CE or beside it. O(V) a row, O(k) more for top-k targets; all in double.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/operands.hpp"

namespace logitless::reference {

// What a softmax needs: p_j = exp(z_j - m) / s, with r the sum s without the target's own term.
struct Softmax {
  double m = 0.0, r = 0.0, z_y = 0.0, s = 0.0;
  double log_s = 0.0;  // through log1p where one class leads, so that it keeps what s = 1 + tiny loses
  bool bad = false;

  // (z_j - m) - log s in that order: logits that are all 1e16 give -log V.
  double log_p(double z_j) const { return (z_j - m) - log_s; }
  double lse() const { return m + log_s; }
};

struct KeptRow {
  std::int64_t index = 0;    // i
  std::int64_t target = -1;  // y_i among all classes; -1: the row has no hard target
  double weight = 1.0;       // u_i
  // Upstream gradients: g_i = dL/dloss_i times u_i, l_i, h_i, e_i.
  double upstream = 0.0, grad_lse = 0.0, grad_logprob = 0.0, grad_entropy = 0.0;

  // What measure() leaves for gradient().
  Softmax softmax;
  double entropy = 0.0;
  double kept_classes = 0.0;                 // n_i: those that no restriction drops
  double kappa = 0.0;                        // sum of kappa_j
  double topk_scale = 1.0, topk_rest = 0.0;  // s_j of a named class: scale times its number; of any other: rest
  double mass = 0.0, mass_of_others = 0.0;   // Q, and Q - t_y
  double policy_slope = 0.0;                 // of the row rule by log p_y
  Softmax student, teacher;                  // of z / tau and u / tau
  double divergence = 0.0;                   // KL, or of jsd sum_j p_j log(p_j / mix_j)
  double distilled_mass = 0.0;               // Q of a top-k teacher
};

// What one row writes.
struct RowOutputs {
  double loss = 0.0, lse = 0.0, logprob = 0.0, entropy = 0.0, zloss = 0.0, mean_logit = 0.0, log_sum_p2 = 0.0;
  std::int64_t argmax = -1;
  bool correct = false;
  double stats[12] = {};  // m, r, z_y, k, t, n, e0, e1; with a teacher four that only other backends need
};

class Rows {
 public:
  Rows(const contract::Problem& problem, const Operands& operands);

  // Reads every target (and top-k id) of the rows that are kept. The error's text, or empty.
  std::string collect(std::vector<KeptRow>* rows, int* status) const;
  // What the sum of row losses is divided by.
  double divisor(const std::vector<KeptRow>& rows) const;
  void read_upstream(KeptRow* row, double divisor) const;

  // z0 (before the bias) and u of all V columns. Fills what gradient() reads of the row.
  RowOutputs measure(KeptRow* row, const double* raw, const double* teacher);
  // Nothing of the row's gradient is asked for.
  bool silent(const KeptRow& row) const;
  // D by raw logits for columns [first, first + count), of which raw and teacher hold count numbers. d may be raw.
  void gradient(const KeptRow& row, std::int64_t first, std::int64_t count, const double* raw, const double* teacher,
                double* d);

 private:
  bool reads_hard_targets() const;
  double class_weight(std::int64_t j) const;
  std::int64_t column_of(std::int64_t target) const;
  bool transform(const KeptRow& row, std::int64_t first, std::int64_t count, const double* raw);
  void hard_targets(const KeptRow& row, std::int64_t first, std::int64_t count);
  void given_targets(const KeptRow& row, std::int64_t first, std::int64_t count);
  void count_classes(KeptRow* row) const;
  Softmax softmax_of(const double* z, std::int64_t y, contract::DType saved_as) const;
  Softmax softmax_for(KeptRow* row, double* t) const;
  double entropy_of(const Softmax& softmax) const;
  double cross_entropy(KeptRow* row);
  double policy(KeptRow* row) const;
  double distillation(KeptRow* row, const double* teacher);
  double distillation_slope(const KeptRow& row, double z, double u, double t) const;
  void statistics(const KeptRow& row, double* stats) const;

  const contract::Problem& p_;
  const Operands& o_;
  const bool teacher_, topk_teacher_;  // what is distilled, if anything
  std::vector<double> bias_;           // [V] or empty
  std::vector<double> class_weight_;   // of all classes, or empty
  double class_weights_ = 0.0;         // of this problem's columns, added
  // Of the columns at hand: z, dz/dz0, whether no restriction drops them, and t.
  std::vector<double> z_, slope_, t_;
  std::vector<char> kept_;
};

}  // namespace logitless::reference
