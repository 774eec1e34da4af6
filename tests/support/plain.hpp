// The plain low-precision pipeline, the yardstick of accuracy: z = X W^T with fp32 accumulation, fp32 softmax, the
// loss, D = g (p - q) cast to the inputs' dtype, dX = D W and dW = D^T X with fp32 accumulation, cast to their dtypes.
// Three materialised matrices and nothing clever. With rounded_logits z passes through the inputs' dtype first, as in a
// framework whose 16-bit product returns 16 bits. Cost 6RHV scalar fp32.
#pragma once

#include <cmath>
#include <vector>

#include "logitless/logitless.h"
#include "plan/operands.hpp"
#include "reference/convert.hpp"

namespace logitless::test {

// out += alpha x, n elements.
inline void add_scaled(float alpha, const float* x, float* out, std::int64_t n) {
  for (std::int64_t k = 0; k < n; ++k) out[k] += alpha * x[k];
}

inline std::vector<float> floats_of(const View& v) {
  std::vector<float> out(static_cast<std::size_t>(v.rows * v.cols));
  for (std::int64_t i = 0; i < v.rows; ++i)
    for (std::int64_t j = 0; j < v.cols; ++j)
      out[static_cast<std::size_t>(i * v.cols + j)] = static_cast<float>(reference::load(v, i, j));
  return out;
}

// Same contract as reference::run for forward and forward_backward of valid targets.
inline void run_plain(const contract::Problem& p, const Operands& o, bool rounded_logits, Outcome* outcome) {
  using contract::DType;
  const std::int64_t rows = p.rows, hidden = p.hidden, vocab = p.vocab;
  const bool linear = p.kind == contract::Kind::linear;
  const DType mixed = linear ? (p.x == p.w ? p.x : DType::f32) : p.z;
  std::vector<float> x, w, z;
  if (linear) {
    x = floats_of(o.x), w = floats_of(o.w);
    std::vector<float> w_t(w.size());
    for (std::int64_t j = 0; j < vocab; ++j)
      for (std::int64_t k = 0; k < hidden; ++k)
        w_t[static_cast<std::size_t>(k * vocab + j)] = w[static_cast<std::size_t>(j * hidden + k)];
    z.assign(static_cast<std::size_t>(rows * vocab), 0.0f);
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t k = 0; k < hidden; ++k)
        add_scaled(x[static_cast<std::size_t>(i * hidden + k)], w_t.data() + k * vocab, z.data() + i * vocab, vocab);
    if (rounded_logits)
      for (float& value : z) value = static_cast<float>(reference::rounded(value, mixed));
  } else {
    z = floats_of(o.z);
  }

  std::int64_t kept = 0;
  auto target_of = [&](std::int64_t i) { return reference::load_integer(o.targets, i); };
  for (std::int64_t i = 0; i < rows; ++i) kept += target_of(i) != p.loss.ignore_index ? 1 : 0;
  const bool mean = p.loss.reduction == contract::Reduction::mean;
  const double divisor = mean ? (p.loss.normalizer > 0.0 ? p.loss.normalizer : static_cast<double>(kept)) : 1.0;
  const auto alpha = static_cast<float>(p.loss.smoothing);
  const float q_other = alpha / static_cast<float>(vocab);
  double total = 0.0;
  for (std::int64_t i = 0; i < rows; ++i) {
    float* row = z.data() + i * vocab;
    const std::int64_t y = target_of(i);
    if (y == p.loss.ignore_index) {
      for (std::int64_t j = 0; j < vocab; ++j) row[j] = 0.0f;
      if (o.row_loss) reference::store(o.row_loss, i, 0, 0.0);
      if (o.row_lse) reference::store(o.row_lse, i, 0, 0.0);
      if (o.row_logprob) reference::store(o.row_logprob, i, 0, 0.0);
      continue;
    }
    float m = -INFINITY, s = 0.0f, sum = 0.0f;
    for (std::int64_t j = 0; j < vocab; ++j) m = std::max(m, row[j]);
    for (std::int64_t j = 0; j < vocab; ++j) {
      s += std::exp(row[j] - m);
      sum += row[j] - m;
    }
    const float log_s = std::log(s);
    const float log_p = (row[y] - m) - log_s;
    const float smooth = alpha == 0.0f ? 0.0f : alpha * (log_s - sum / static_cast<float>(vocab));
    const float loss = (alpha == 1.0f ? 0.0f : (1.0f - alpha) * -log_p) + smooth;
    total += loss;
    if (o.row_loss) reference::store(o.row_loss, i, 0, loss);
    if (o.row_lse) reference::store(o.row_lse, i, 0, m + log_s);
    if (o.row_logprob) reference::store(o.row_logprob, i, 0, log_p);
    double g = 1.0;
    if (p.loss.reduction == contract::Reduction::none) {
      if (o.grad_row_loss) g = reference::load(o.grad_row_loss, i);
    } else {
      g = o.grad_loss / divisor + (o.grad_row_loss ? reference::load(o.grad_row_loss, i) : 0.0);
    }
    const auto upstream = static_cast<float>(g);
    for (std::int64_t j = 0; j < vocab; ++j) {
      const float q = j == y ? q_other + (1.0f - alpha) : q_other;
      row[j] = static_cast<float>(reference::rounded(upstream * (std::exp(row[j] - m) / s - q), mixed));
    }
  }
  if (outcome != nullptr) {
    outcome->kept = kept;
    outcome->loss = p.loss.reduction == contract::Reduction::none ? 0.0 : static_cast<float>(total / divisor);
  }
  if (p.call == contract::Call::forward) return;

  if (o.dz)
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < vocab; ++j) reference::store(o.dz, i, j, z[static_cast<std::size_t>(i * vocab + j)]);
  std::vector<float> dx(static_cast<std::size_t>(o.dx ? rows * hidden : 0), 0.0f);
  std::vector<float> dw(static_cast<std::size_t>(o.dw ? vocab * hidden : 0), 0.0f);
  for (std::int64_t i = 0; i < rows && linear; ++i) {
    for (std::int64_t j = 0; j < vocab; ++j) {
      const float d = z[static_cast<std::size_t>(i * vocab + j)];
      if (o.dx) add_scaled(d, w.data() + j * hidden, dx.data() + i * hidden, hidden);
      if (o.dw) add_scaled(d, x.data() + i * hidden, dw.data() + j * hidden, hidden);
    }
  }
  auto put = [&](const View& out, const std::vector<float>& values, bool accumulate) {
    for (std::int64_t i = 0; i < out.rows; ++i)
      for (std::int64_t k = 0; k < out.cols; ++k)
        reference::store(out, i, k,
                         values[static_cast<std::size_t>(i * out.cols + k)] +
                             (accumulate ? static_cast<float>(reference::load(out, i, k)) : 0.0f));
  };
  if (o.dx) put(o.dx, dx, p.accumulate_dx);
  if (o.dw) put(o.dw, dw, p.accumulate_dw);
}

}  // namespace logitless::test
