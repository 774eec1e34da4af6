// What the outputs of a backend with fp32 logits and fp32 statistics may be off by, for the rows that check compares,
// to first order in u = 2^-24; growth(n) is the summation factor. No loss is computed here, but the sizes of its terms
// are: each term of a row's loss or of D = dL/dz carries the relative errors of the probabilities in it.
//   logit      |dz1_ij| <= scale (growth(H) u |x_i| |w_j| + 2 u |z0_ij|); dz_ij = (dz1_ij + a softcap's 8 u |z|) / T_i
//   exponent   eta_ij = dz_ij + 2.3 u |z_ij - M_i| + (growth(256) + 16) u: relative error of exp(z_ij - reference); of
//              p_ij: eta_ij + the row's mean of eta under p. A class within dz of a logit floor may be kept or dropped
//   D_ij       sum of its terms' errors, + (16-bit storage + growth(max(V, R)) u) times the sum of their sizes
//   dX, dW     A |W| and A^T |X| of A = D's bound (verify.cpp), and the rounding of the result
// Cost: O(V) a row, in double.
#pragma once

#include <cstdint>
#include <vector>

#include "arrays.hpp"
#include "inputs.hpp"

namespace logitless::cli {

inline constexpr double unit32 = 0x1p-24;

double unit_of(DType dtype);
// Rounding errors of n terms are random: six standard deviations, never more than their sum (Higham & Mary 2019).
double growth(std::int64_t terms);

// The logits of a head in fp32, [S,V], before its bias, and what their errors need.
struct Head {
  Array logits;
  std::int64_t vocab = 0;
  std::int64_t width = 0;                    // H; 0: given logits, which have no error
  std::vector<double> row_norm, class_norm;  // |x_i|, |w_j|
  std::vector<double> bias;                  // [V] or empty
  double logit(std::int64_t s, std::int64_t j) const;
  double product_error(std::int64_t s, std::int64_t j) const;
};

struct RowBounds {
  double loss = 0.0, lse = 0.0, logprob = 0.0, entropy = 0.0, zloss = 0.0, mean_logit = 0.0, log_sum_p2 = 0.0;
};

// How passes store D or what makes it.
struct Storage {
  double relative = 0.0;   // of 16 bits
  double underflow = 0.0;  // of kept fp16 exponentials
};

class Bounds {
 public:
  // The compared rows, their heads (teacher: null without one) and the upstream gradient of their losses; rows: R of
  // the whole problem.
  Bounds(const Inputs& sample, const Options& options, const Head& student, const Head* teacher, Storage storage,
         double upstream, std::int64_t rows);

  // Of a kept row s; fills a [V], the bound of D's error.
  RowBounds row(std::int64_t s, float* a) const;
  // The logits of a row as the loss sees them, with twice their error: what tells a tie of an argmax from a mistake.
  struct Logits {
    std::vector<double> z, error;
  };
  Logits logits(std::int64_t s) const;

 private:
  struct Transformed;
  struct Softmax;
  struct Terms;

  Transformed transformed(std::int64_t s) const;
  Softmax softmax(const std::vector<double>& z, const std::vector<double>& error, const std::vector<char>& unsure,
                  double tau) const;
  double class_weight(std::int64_t j) const;
  void hard(std::int64_t s, const Transformed& t, const Softmax& p, double share, Terms& out) const;
  void given(std::int64_t s, const Softmax& p, double loss_share, double share, Terms& out) const;
  void divergence(std::int64_t s, const Transformed& t, Terms& out) const;
  void policy(std::int64_t s, const Softmax& p, double entropy, double entropy_error, Terms& out) const;

  const Inputs& in_;
  const Options& o_;
  const Head& student_;
  const Head* teacher_;
  const Storage storage_;
  const double upstream_;
  const std::int64_t rows_, v_;
  std::vector<double> class_weight_;
};

}  // namespace logitless::cli
