// What the options make of one row, for both drivers: its logits transformed and restricted, the weights kappa of its
// target distribution over a leaf, and the O(1) arithmetic from statistics to outputs and coefficients. Formulas are
// the contract's; this only fetches operands.
#pragma once

#include <cstdint>
#include <string>

#include "contract/pair.hpp"
#include "cpu/rows.hpp"

namespace logitless::cpu {

using RowNumbers = row::Numbers;
using RowOutcome = row::Outcome;
using row::PairOutcome;

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
      if (o_.row_temperature) by.inverse_temperature = static_cast<float>(1.0 / finisher_.temperature(i));
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

  // The O(1) arithmetic of a row, silent(), weight() and what else belongs to one.
  const row::Finisher& rows() const { return finisher_; }
  bool silent(std::int64_t i) const { return finisher_.silent(i); }
  // Something of every kept row is written, whatever its weight.
  bool writes_rows() const;

  // tau log t of columns [j0, j0 + n) of row i: a top-k teacher as logits.
  void teacher_logits(float* u, std::int64_t n, std::int64_t j0, std::int64_t i) const;

 private:
  const contract::Problem& p_;
  const Operands& o_;
  const RowKernels& rows_;
  Buffers buffers_;
  Transform transform_{};
  bool transforms_, restricts_, needs_logits_, has_target_;
  row::Finisher finisher_;
};

}  // namespace logitless::cpu
