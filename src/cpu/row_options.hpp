// What the options make of one row, for both drivers: its logits transformed and restricted, the weights kappa of its
// target distribution over a leaf, and the O(1) arithmetic from statistics to outputs and coefficients. Formulas are
// the contract's; this only fetches operands.
#pragma once

#include <cstdint>
#include <string>

#include "contract/pair.hpp"
#include "cpu/rows.hpp"

namespace logitless::cpu {

// Merged statistics of one row, as the kernels left them or backward was given them.
struct RowNumbers {
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
struct RowOutcome {
  contract::RowResult<double> result;
  contract::RowCoefficients<double> d;
  double loss = 0.0;
  double slope_y = 1.0;  // the softcap's at the target: D_y = (at_target - c kappa_y) slope_y
  bool correct = false;
};

class RowOptions {
 public:
  // Where things of the options lie in the workspace; null: not wanted.
  struct Buffers {
    float *bias, *class_weight, *teacher_bias;  // [V]
    std::int64_t* topk_ids;                     // [R,k], ascending
    float *topk_values, *topk_other;            // [R,k], [R]; as logits tau log t where the problem has pairs
  };

  RowOptions(const contract::Problem& problem, const Operands& operands, const RowKernels& rows, Buffers buffers);

  // Fills the buffers and checks top-k ids; the error's text, or "".
  std::string prepare() const;

  // The options need more of a leaf than m, r and k.
  bool full() const { return p_.wants_full(); }
  bool needs_logits() const { return needs_logits_; }
  bool shapes() const { return transforms_ || restricts_; }
  bool has_target() const { return has_target_; }
  bool weighs() const { return p_.wants_kappa(); }

  // z [n] raw logits of original row i, columns from j0 -> z after transforms and restrictions; y: target's column in
  // it.
  void shape(float* z, std::int64_t n, std::int64_t j0, std::int64_t i, std::int64_t y) const {
    if (transforms_) {
      Transform by = transform_;
      if (by.bias != nullptr) by.bias += j0;
      if (o_.row_temperature) by.inverse_temperature = static_cast<float>(1.0 / temperature(i));
      rows_.transform(z, n, by);
    }
    if (restricts_) {
      const std::uint8_t* const mask =
          o_.keep_mask ? reinterpret_cast<const std::uint8_t*>(row_of(o_.keep_mask, i)) + j0 / 8 : nullptr;
      rows_.restrict_to(z, n, mask, o_.logit_floor ? float_at(o_.logit_floor, i) : -INFINITY, y);
    }
  }
  // Weights of columns [j0, j0 + n) of row i: `buffer`, or memory of the class weights; null: 1 each.
  const float* kappa(float* buffer, std::int64_t n, std::int64_t j0, std::int64_t i) const;
  // 1 for the classes that a keep mask leaves, 0 for others, y: the target's column or -1. Null: no mask.
  const float* kept(float* buffer, std::int64_t n, std::int64_t j0, std::int64_t i, std::int64_t y) const;
  // kappa for the kernel that forms D, which wants an array where every class counts 1 and 0 for what a mask drops.
  const float* gradient_kappa(float* buffer, std::int64_t n, std::int64_t j0, std::int64_t i, std::int64_t y) const;
  LeafWants wants(const float* kappa, const float* kept) const;
  // kappa over all classes, the same for every row; null: 1 each.
  const float* class_weights() const { return buffers_.class_weight; }

  // The row's z = 2nd argument times this is y in 1 - y^2, the softcap's slope; 0: no cap.
  double slope(std::int64_t i) const { return p_.loss.softcap > 0 ? temperature(i) / p_.loss.softcap : 0.0; }
  double weight(std::int64_t i) const { return o_.row_weight ? static_cast<double>(float_at(o_.row_weight, i)) : 1.0; }
  // The row's gradient is 0 whatever its logits are.
  bool silent(std::int64_t i) const {
    return o_.row_weight && float_at(o_.row_weight, i) == 0.0F && !o_.grad_row_lse && !o_.grad_row_logprob &&
           !o_.grad_row_entropy;
  }
  // Something of every kept row is written, whatever its weight.
  bool writes_rows() const;

  // Losses, outputs and coefficients of kept row i with target y. backward: writes no outputs.
  // pair: the teacher's row, null where there is none.
  RowOutcome finish(std::int64_t i, std::int64_t y, const RowNumbers& numbers, const Reducer& reducer,
                    bool with_gradient, const PairOutcome* pair = nullptr) const;
  // From both sides' merged statistics; JSD's sums are missing.
  PairOutcome pair_outcome(const contract::PairStatistics<double>& sum) const;
  // tau log t of columns [j0, j0 + n) of row i: a top-k teacher as logits.
  void teacher_logits(float* u, std::int64_t n, std::int64_t j0, std::int64_t i) const;
  // For the kernels of two heads.
  PairRow pair_row(std::int64_t i, const PairOutcome& pair, const Reducer& reducer) const;
  PairOutcome saved_pair(std::int64_t i) const;
  // Fields of finish()'s result for the kernel that forms D from logits.
  GradientRow gradient_row(std::int64_t i, const RowOutcome& row) const;

  // From the caller's stats.
  RowNumbers saved(std::int64_t i) const;

 private:
  double temperature(std::int64_t i) const {
    return o_.row_temperature ? static_cast<double>(float_at(o_.row_temperature, i)) : p_.loss.temperature;
  }
  double target_weight(std::int64_t y) const;
  double divergence_constant(std::int64_t i) const;
  void put(std::int64_t i, const RowOutcome& row, const RowNumbers& numbers, const PairOutcome* pair) const;
  double soft_share() const;

  const contract::Problem& p_;
  const Operands& o_;
  const RowKernels& rows_;
  Buffers buffers_;
  Transform transform_{};
  bool transforms_, restricts_, needs_logits_, has_target_;
};

}  // namespace logitless::cpu
