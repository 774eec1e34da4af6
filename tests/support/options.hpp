// A problem with any options and its operands, in double: what the oracle's own tests and the conformance of the
// kernels both draw their cases from.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/operands.hpp"
#include "support/random.hpp"
#include "support/tensor.hpp"

namespace logitless::test {

using contract::Call;
using contract::Divergence;
using contract::Kind;
using contract::OnEmpty;
using contract::Problem;
using contract::Reduction;
using contract::Rest;
using contract::Targets;

// ---- a problem with its operands -----------------------------------------------------------------------------------

struct Sample {
  Problem p;
  Tensor x, w, z, y, bias, class_weight, row_weight, row_temperature, floor, soft, probs;
  Tensor teacher_x, teacher_w, teacher_bias, old_logprob, advantage, ref_logprob, normalizer;
  Tensor up_loss, up_lse, up_logprob, up_entropy;
  std::vector<std::uint8_t> keep;  // [R, ceil(V/8)]
  std::vector<std::int64_t> ids;   // [R,k]
  double grad_loss = 1.0;

  Operands operands() const {
    Operands o;
    o.x = x.view(), o.w = w.view(), o.z = z.view(), o.targets = y.view(), o.bias = bias.view();
    o.class_weight = class_weight.view(), o.row_weight = row_weight.view();
    o.row_temperature = row_temperature.view(), o.logit_floor = floor.view(), o.soft = soft.view();
    o.topk_probs = probs.view(), o.normalizer = normalizer.view();
    o.teacher_x = teacher_x.view(), o.teacher_w = teacher_w.view(), o.teacher_bias = teacher_bias.view();
    o.old_logprob = old_logprob.view(), o.advantage = advantage.view(), o.ref_logprob = ref_logprob.view();
    o.grad_row_loss = up_loss.view(), o.grad_row_lse = up_lse.view();
    o.grad_row_logprob = up_logprob.view(), o.grad_row_entropy = up_entropy.view();
    o.grad_loss = grad_loss;
    if (p.keep_mask) {
      const std::int64_t bytes = (p.vocab + 7) / 8;
      o.keep_mask = View{const_cast<std::uint8_t*>(keep.data()), DType::u8, p.rows, bytes, bytes, 1};
    }
    if (p.topk > 0) {
      o.topk_ids = View{const_cast<std::int64_t*>(ids.data()), DType::i64, p.rows, p.topk, p.topk, 1};
    }
    return o;
  }
  std::int64_t target(std::int64_t i) const { return y ? static_cast<std::int64_t>(y.at(i)) : -1; }
  bool ignored(std::int64_t i) const { return y && target(i) == p.loss.ignore_index; }
  void set_keep(std::int64_t i, std::int64_t j, bool on) {
    std::uint8_t& byte = keep[static_cast<std::size_t>(i * ((p.vocab + 7) / 8) + j / 8)];
    byte = static_cast<std::uint8_t>(on ? byte | (1 << (j % 8)) : byte & ~(1 << (j % 8)));
  }
  bool keeps(std::int64_t i, std::int64_t j) const {
    return ((keep[static_cast<std::size_t>(i * ((p.vocab + 7) / 8) + j / 8)] >> (j % 8)) & 1) != 0;
  }
};

inline Tensor filled(std::int64_t rows, std::int64_t cols, const std::vector<double>& values) {
  Tensor t(DType::f64, rows, cols);
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < cols; ++j) t.set(i, j, values[static_cast<std::size_t>(i * cols + j)]);
  return t;
}

// Options that a problem may have, beside what its rows are compared with.
enum Option : unsigned {
  kBias = 1u << 0,
  kScale = 1u << 1,
  kSoftcap = 1u << 2,
  kTemperature = 1u << 3,
  kRowTemperature = 1u << 4,
  kClassWeight = 1u << 5,
  kRowWeight = 1u << 6,
  kZLoss = 1u << 7,
  kSmoothing = 1u << 8,
  kNormalizer = 1u << 9,
  kKeep = 1u << 10,
  kFloor = 1u << 11,
  kUpLoss = 1u << 12,
  kUpLse = 1u << 13,
  kUpLogprob = 1u << 14,
  kUpEntropy = 1u << 15,
  kIgnored = 1u << 16,
  kOptions = 17,
};

struct Judge {  // what a row is compared with
  const char* name;
  Targets targets;
  Rest rest = Rest::dropped;
  bool topk_log = false;
  bool policy = false;
  Divergence divergence = Divergence::forward_kl;
  double tau = 1.0, share = 0.0;
  bool square = false;
};
inline const Judge kJudges[] = {
    {"hard", Targets::hard},
    {"policy", Targets::hard, Rest::dropped, false, true},
    {"soft", Targets::soft},
    {"topk dropped", Targets::topk},
    {"topk renormalised", Targets::topk, Rest::renormalised},
    {"topk spread", Targets::topk, Rest::spread},
    {"topk teacher", Targets::topk, Rest::spread, true},
    {"topk teacher tau", Targets::topk, Rest::renormalised, true, false, Divergence::forward_kl, 2.0, 0.3, true},
    {"topk teacher low tau", Targets::topk, Rest::dropped, true, false, Divergence::forward_kl, 0.7},
    {"topk teacher half", Targets::topk, Rest::spread, true, false, Divergence::forward_kl, 3.0, 0.5},
    {"forward", Targets::teacher},
    {"reverse", Targets::teacher, Rest::dropped, false, false, Divergence::reverse_kl},
    {"jsd", Targets::teacher, Rest::dropped, false, false, Divergence::jsd},
    {"forward tau", Targets::teacher, Rest::dropped, false, false, Divergence::forward_kl, 2.0, 0.25, true},
    {"reverse tau", Targets::teacher, Rest::dropped, false, false, Divergence::reverse_kl, 0.7, 0.4, false},
    {"jsd tau", Targets::teacher, Rest::dropped, false, false, Divergence::jsd, 1.5, 0.5, true},
};

// Numbers in [low, high].
inline Tensor numbers(Random& rng, std::int64_t rows, std::int64_t cols, double low, double high) {
  Tensor t(DType::f64, rows, cols);
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < cols; ++j) t.set(i, j, low + (high - low) * rng.uniform());
  return t;
}

inline bool allowed(const Judge& judge, unsigned options) {
  if (judge.policy && (options & (kSmoothing | kClassWeight)) != 0) return false;
  const bool restricts = (options & (kKeep | kFloor)) != 0;
  if (judge.targets == Targets::teacher && judge.divergence == Divergence::forward_kl && restricts) return false;
  const bool hard = judge.targets == Targets::hard || judge.share > 0.0;
  return hard || (options & kUpLogprob) == 0;
}

inline Sample make(Kind kind, const Judge& judge, unsigned options, Reduction reduction, std::uint64_t seed,
                   std::int64_t rows = 5, std::int64_t vocab = 11, std::int64_t hidden = 3) {
  Random rng(seed);
  Sample s;
  Problem& p = s.p;
  contract::Loss& loss = p.loss;
  p.kind = kind, p.rows = rows, p.vocab = vocab;
  auto has = [options](Option option) { return (options & option) != 0; };
  if (kind == Kind::linear) {
    p.hidden = hidden, p.x = p.w = p.dx = p.dw = DType::f64;
    s.x = numbers(rng, p.rows, p.hidden, -1.5, 1.5), s.w = numbers(rng, p.vocab, p.hidden, -1.5, 1.5);
  } else {
    p.z = p.dz = DType::f64;
    s.z = numbers(rng, p.rows, p.vocab, -3.0, 3.0);
  }
  p.entropy = p.argmax = p.mean_logit = p.sum_p2 = true;
  s.y = Tensor(DType::i64, p.rows, 1);
  const std::int64_t targets[] = {3, 0, 10, 3, 7};
  for (std::int64_t i = 0; i < p.rows; ++i) {
    s.y.set_integer(i, has(kIgnored) && i % 3 == 1 ? -100 : (i < 5 ? targets[i] : (i * 37 + 3) % p.vocab));
  }
  loss.reduction = reduction, s.grad_loss = -1.75;
  loss.targets = judge.targets, loss.rest = judge.rest;
  loss.distillation.divergence = judge.divergence, loss.distillation.beta = 0.3, loss.distillation.tau = judge.tau;
  loss.distillation.hard_share = judge.share, loss.distillation.square = judge.square;
  if (judge.targets == Targets::soft) p.soft = DType::f64, s.soft = numbers(rng, p.rows, p.vocab, 0.0, 0.4);
  if (judge.targets == Targets::topk) {
    p.topk = 4, p.topk_log = judge.topk_log;
    s.probs = numbers(rng, p.rows, p.topk, 0.02, 0.24);
    for (std::int64_t i = 0; i < p.rows; ++i) {
      for (std::int64_t c = 0; c < p.topk; ++c) {
        s.ids.push_back((i * 5 + c * 8 + 2) % p.vocab);
        if (p.topk_log) s.probs.set(i, c, std::log(s.probs.at(i, c)));
      }
    }
  }
  if (judge.targets == Targets::teacher) {
    p.teacher_hidden = 2, p.teacher_x = p.teacher_w = p.teacher_bias = DType::f64;
    s.teacher_x = numbers(rng, p.rows, 2, -1.5, 1.5), s.teacher_w = numbers(rng, p.vocab, 2, -1.5, 1.5);
    s.teacher_bias = numbers(rng, p.vocab, 1, -1.0, 1.0);
  }
  if (judge.policy) {
    loss.policy.on = true, loss.policy.clip_low = 0.2, loss.policy.clip_high = 0.3;
    loss.policy.kl_coef = 0.4, loss.policy.entropy_coef = 0.2;
    s.old_logprob = numbers(rng, p.rows, 1, -3.5, -1.5), s.ref_logprob = numbers(rng, p.rows, 1, -3.5, -1.5);
    s.advantage = numbers(rng, p.rows, 1, -2.0, 2.0);
  }
  if (has(kBias)) p.bias = p.db = DType::f64, s.bias = numbers(rng, p.vocab, 1, -1.0, 1.0);
  if (has(kScale)) loss.logit_scale = 0.6;
  if (has(kSoftcap)) loss.softcap = 2.5;
  if (has(kTemperature)) loss.temperature = 1.4;
  if (has(kRowTemperature)) p.row_temperature = true, s.row_temperature = numbers(rng, p.rows, 1, 0.5, 2.0);
  if (has(kClassWeight)) p.class_weight = true, s.class_weight = numbers(rng, p.vocab, 1, 0.2, 2.0);
  if (has(kRowWeight)) p.row_weight = true, s.row_weight = numbers(rng, p.rows, 1, -1.0, 2.0);
  if (has(kZLoss)) loss.z_loss = 0.07;
  if (has(kSmoothing)) loss.smoothing = 0.15;
  if (has(kNormalizer)) s.normalizer = filled(1, 1, {3.25}), loss.normalizer = 2.0;
  if (has(kFloor)) p.logit_floor = true, s.floor = numbers(rng, p.rows, 1, -0.8, -0.2);
  if (has(kKeep)) {
    p.keep_mask = true, s.keep.assign(static_cast<std::size_t>(p.rows * ((p.vocab + 7) / 8)), 0);
    for (std::int64_t i = 0; i < p.rows; ++i)
      for (std::int64_t j = 0; j < p.vocab; ++j) s.set_keep(i, j, (i * 7 + j * 3) % 4 != 0);
  }
  if (has(kUpLoss)) s.up_loss = numbers(rng, p.rows, 1, -1.0, 1.0);
  if (has(kUpLse)) s.up_lse = numbers(rng, p.rows, 1, -1.0, 1.0);
  if (has(kUpLogprob)) s.up_logprob = numbers(rng, p.rows, 1, -1.0, 1.0);
  if (has(kUpEntropy)) p.entropy_gradient = true, s.up_entropy = numbers(rng, p.rows, 1, -1.0, 1.0);
  return s;
}

}  // namespace logitless::test
