// Options, validated once, as the plain structs that every planner and backend reads. Nothing here allocates.
//
// Symbols: R rows, H hidden, V vocabulary, X [R,H], W [V,H], z [R,V] logits, y [R] targets, D = dL/dz [R,V].
#pragma once

#include <cstdint>

namespace logitless::contract {

// Numbers equal those of the C ABI (ll_dtype).
enum class DType : std::int32_t { none = 0, f32 = 1, bf16 = 2, f16 = 3, f64 = 4, i32 = 5, i64 = 6, u8 = 7 };

constexpr std::int64_t size_of(DType t) {
  switch (t) {
    case DType::none: return 0;
    case DType::u8: return 1;
    case DType::bf16:
    case DType::f16: return 2;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f64:
    case DType::i64: return 8;
  }
  return 0;
}

constexpr const char* name_of(DType t) {
  switch (t) {
    case DType::none: return "none";
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::f64: return "f64";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
    case DType::u8: return "u8";
  }
  return "?";
}

constexpr bool is_half(DType t) { return t == DType::bf16 || t == DType::f16; }

enum class Kind : std::int32_t { linear = 1, logits = 2 };
enum class Call : std::int32_t { forward = 1, forward_backward = 2, backward = 3 };
enum class Reduction : std::int32_t { mean = 1, sum = 2, none = 3 };
enum class OnEmpty : std::int32_t { error = 1, nan = 2, zero = 3 };

// What a row is compared with.
enum class Targets : std::int32_t {
  hard = 1,     // y [R]
  soft = 2,     // probabilities [R,V]
  topk = 3,     // ids and probabilities [R,k]
  teacher = 4,  // the softmax of a second head
};
// Mass that top-k targets do not give to a class.
enum class Rest : std::int32_t { dropped = 1, renormalised = 2, spread = 3 };
enum class Divergence : std::int32_t { forward_kl = 1, reverse_kl = 2, jsd = 3 };

// A row rule between the passes: row loss = -min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) + kl_coef K -
// entropy_coef H, with w = exp(log p_y - old), A the advantage, K = exp(ref - log p_y) - (ref - log p_y) - 1 (PPO,
// GRPO).
struct Policy {
  bool on = false;
  double clip_low = 0.2, clip_high = 0.2, kl_coef = 0.0, entropy_coef = 0.0;
};

// Distillation: row loss = hard_share CE(y) + (1 - hard_share) (square ? tau^2 : 1) KD(z / tau, u / tau), u the
// teacher's logits. jsd: beta KL(q | mix) + (1 - beta) KL(p | mix), mix = beta q + (1 - beta) p.
struct Distillation {
  Divergence divergence = Divergence::forward_kl;
  double beta = 0.5, tau = 1.0, hard_share = 0.0;
  bool square = false;
};

// What is computed. `smoothing` is already in the uniform convention (others(a) = uniform(a V / (V - 1))), so it may
// exceed 1 a little.
struct Loss {
  Reduction reduction = Reduction::mean;
  OnEmpty on_empty = OnEmpty::error;
  std::int64_t ignore_index = -100;
  double smoothing = 0.0;
  double normalizer = 0.0;  // > 0: mean divides by it; else by the sum of the kept rows' class weights
  // z = cap(logit_scale (x w + b)) / temperature, cap(t) = softcap tanh(t / softcap), in this order.
  double logit_scale = 1.0;
  double softcap = 0.0;  // 0: none
  double temperature = 1.0;
  double z_loss = 0.0;  // lambda of lambda lse^2
  Targets targets = Targets::hard;
  Rest rest = Rest::dropped;
  Policy policy;
  Distillation distillation;
  double filter = 0.0;  // eps of the unbiased gradient filter, a power of two; 0: none
  std::uint64_t filter_seed = 0;
};

// One call's shapes and dtypes. A dtype of none means "no such operand" or "not wanted".
struct Problem {
  Kind kind = Kind::linear;
  Call call = Call::forward_backward;
  std::int64_t rows = 0, hidden = 0, vocab = 0;
  DType x = DType::none, w = DType::none, z = DType::none;
  DType dx = DType::none, dw = DType::none, dz = DType::none, db = DType::none;
  bool accumulate_dx = false, accumulate_dw = false;
  bool dw_contiguous = true;  // dW's rows are adjacent, so its bytes may hold exponentials until it is written
  bool in_place = false;      // D may be written over z
  std::uint64_t budget = 0;   // bytes of workspace; 0: no limit
  // A bound of the rows that are kept, known before the call; 0: none. Where rows are gathered on a device, products
  // cover so many.
  std::int64_t most_kept = 0;
  std::uint64_t saved = 0;  // bytes of the caller's buffer in which forward keeps what backward need not multiply again
  // Inputs beside X, W or z, and y.
  DType bias = DType::none;
  bool class_weight = false, row_weight = false, row_temperature = false, keep_mask = false, logit_floor = false;
  DType soft = DType::none;  // of soft targets
  std::int64_t topk = 0;     // k of top-k targets
  bool topk_log = false;     // they are log-probabilities
  std::int64_t teacher_hidden = 0;
  DType teacher_x = DType::none, teacher_w = DType::none, teacher_bias = DType::none;
  // Per-row outputs that need statistics of their own.
  bool entropy = false, argmax = false, mean_logit = false, sum_p2 = false;
  bool entropy_gradient = false;  // backward: an upstream gradient of each row's entropy may come
  // The problem's columns are [first_column, first_column + vocab) of total_vocab classes; forward gives statistics
  // alone, backward starts from merged ones. total_vocab 0: all columns are here.
  std::int64_t first_column = 0, total_vocab = 0;
  Loss loss;

  constexpr bool wants_gradient() const {
    return dx != DType::none || dw != DType::none || dz != DType::none || db != DType::none;
  }
  constexpr bool is_part() const { return total_vocab > 0; }
  constexpr std::int64_t classes() const { return total_vocab > 0 ? total_vocab : vocab; }
  constexpr bool transforms() const {
    return bias != DType::none || row_temperature || loss.logit_scale != 1.0 || loss.softcap > 0 ||
           loss.temperature != 1.0;
  }
  constexpr bool restricts() const { return keep_mask || logit_floor; }
  constexpr bool distils() const { return loss.targets == Targets::teacher; }
  // The softmax of z / tau stands beside that of z, with statistics of its own: a teacher's head, or a top-k teacher at
  // another temperature.
  constexpr bool pairs() const {
    return distils() || (loss.targets == Targets::topk && topk_log && loss.distillation.tau != 1.0);
  }
  // sum kappa_j (z_j - m) and sum kappa_j are wanted: smoothing, or a target distribution over many classes.
  constexpr bool wants_kappa() const { return loss.smoothing > 0 || row_kappa(); }
  // kappa differs from row to row.
  constexpr bool row_kappa() const {
    return loss.targets == Targets::soft || (loss.targets == Targets::topk && !pairs()) ||
           (loss.smoothing > 0 && restricts());
  }
  // The entropy of a row is needed, by the loss or by an output.
  constexpr bool wants_entropy() const { return entropy || entropy_gradient || loss.policy.entropy_coef != 0.0; }
  // A leaf of columns yields more than m, r and a plain k.
  constexpr bool wants_full() const {
    return row_kappa() || wants_entropy() || argmax || mean_logit || sum_p2 || (class_weight && loss.smoothing > 0);
  }
  // D is formed from z itself, element by element, and not from exponentials times a number of the row.
  constexpr bool needs_logits() const {
    return loss.softcap > 0 || row_kappa() || entropy_gradient || loss.policy.entropy_coef != 0.0 || loss.filter > 0 ||
           pairs();
  }
  // Columns of the saved statistics: m, r, z_y, k; then t, n and two more; and with a teacher four more, where these
  // mean something.
  constexpr int statistics() const {
    if (pairs()) return 12;
    return wants_entropy() || class_weight || row_kappa() || is_part() ? 8 : 4;
  }
};

}  // namespace logitless::contract
