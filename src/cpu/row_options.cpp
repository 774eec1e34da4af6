// See row_options.hpp.
#include "cpu/row_options.hpp"

#include <algorithm>
#include <cmath>

namespace logitless::cpu {

using contract::Targets;

RowOptions::RowOptions(const contract::Problem& problem, const Operands& operands, const RowKernels& rows,
                       Buffers buffers)
    : p_(problem),
      o_(operands),
      rows_(rows),
      buffers_(buffers),
      finisher_(problem, operands, {buffers.topk_ids, buffers.topk_values, buffers.topk_other}) {
  contract::Loss const& l = p_.loss;
  transforms_ = p_.transforms();
  restricts_ = p_.restricts();
  needs_logits_ = p_.needs_logits();
  has_target_ = finisher_.has_target();
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

bool RowOptions::writes_rows() const {
  return o_.row_loss || o_.row_lse || o_.row_logprob || o_.stats || o_.row_entropy || o_.row_zloss ||
         o_.row_mean_logit || o_.row_log_sum_p2 || o_.row_argmax || o_.row_correct || p_.argmax;
}

void RowOptions::teacher_logits(float* u, std::int64_t n, std::int64_t j0, std::int64_t i) const {
  std::fill(u, u + n, buffers_.topk_other[i]);
  const std::int64_t* const ids = buffers_.topk_ids + i * p_.topk;
  const std::int64_t* const end = ids + p_.topk;
  for (const std::int64_t* id = std::lower_bound(ids, end, j0); id != end && *id < j0 + n; ++id)
    u[*id - j0] = buffers_.topk_values[i * p_.topk + (id - ids)];
}

}  // namespace logitless::cpu
