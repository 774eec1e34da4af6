// See problem.hpp. `others` smoothing is turned into the uniform convention here: others(alpha) gives the target
// 1 - alpha and every other class alpha/(V-1), which is uniform(alpha V/(V-1)) exactly, as real numbers.
// Fields that came after 0.1 say "as before" by 0; what an option has no meaning for is refused, not ignored.
#include "capi/problem.hpp"

#include <cmath>
#include <cstddef>
#include <initializer_list>

#include "capi/structs.hpp"

namespace logitless::capi {

const char* name_of_dtype(ll_dtype dtype) {
  return dtype >= LL_NONE && dtype <= LL_U8 ? contract::name_of(static_cast<contract::DType>(dtype))
                                            : "an unknown dtype";
}

namespace {

std::string dtype_text(ll_dtype dtype) {
  if (dtype >= LL_NONE && dtype <= LL_U8) return name_of_dtype(dtype);
  return number(std::int64_t{dtype});
}

// One named number of an enum.
struct Enumerator {
  std::int32_t value;
  const char* name;
};

void check_enum(const char* field, std::int32_t value, std::initializer_list<Enumerator> known) {
  for (const Enumerator& each : known) {
    if (value == each.value) return;
  }
  std::string text = std::string(field) + ": " + number(std::int64_t{value}) + "; must be ";
  std::size_t i = 0;
  for (const Enumerator& each : known) {
    if (i > 0) text += i + 1 < known.size() ? ", " : " or ";
    text += std::string(each.name) + " (" + number(std::int64_t{each.value}) + ")";
    ++i;
  }
  refuse(text);
}

// Far beyond any memory, and small enough that sums of padded buffers stay exact in the planner's 64-bit arithmetic.
constexpr std::int64_t kLargestExtent = std::int64_t{1} << 40;
constexpr std::int64_t kLargestMatrix = std::int64_t{1} << 56;

void check_extent(const char* field, std::int64_t value, std::int64_t least) {
  if (value < least) refuse(std::string(field) + ": " + number(value) + "; must be at least " + number(least));
  if (value > kLargestExtent) {
    refuse(std::string(field) + ": " + number(value) + "; must be at most 2^40 = " + number(kLargestExtent));
  }
}

void check_bytes(const char* rows_name, std::int64_t rows, const char* cols_name, std::int64_t cols,
                 std::int64_t element) {
  std::int64_t bytes = 0;
  const bool overflows = __builtin_mul_overflow(rows, cols, &bytes) || __builtin_mul_overflow(bytes, element, &bytes);
  if (overflows || bytes > kLargestMatrix) {
    refuse(std::string(rows_name) + ", " + cols_name + ": " + number(rows) + " x " + number(cols) + " x " +
           number(element) + " bytes; the product must be at most 2^56 = " + number(kLargestMatrix));
  }
}

contract::DType input_dtype(const char* field, ll_dtype dtype, ll_backend backend) {
  switch (dtype) {
    case LL_F32:
    case LL_BF16:
    case LL_F16: break;
    case LL_F64:
      if (backend == LL_BACKEND_REFERENCE) break;
      fail(LL_ERROR_UNSUPPORTED, std::string(field) +
                                     ": f64; this backend takes f32, bf16 and f16, and f64 runs on a context of "
                                     "LL_BACKEND_REFERENCE");
    default: refuse(std::string(field) + ": " + dtype_text(dtype) + "; must be f32, bf16, f16 or f64");
  }
  return static_cast<contract::DType>(dtype);
}

void check_absent(const char* field, ll_dtype dtype, const char* because) {
  if (dtype != LL_NONE) {
    refuse(std::string(field) + ": " + dtype_text(dtype) + "; " + because + ": must be LL_NONE (0)");
  }
}

contract::DType gradient_dtype(const char* field, ll_dtype dtype, const char* input_field, ll_dtype input,
                               ll_call call) {
  if (dtype == LL_NONE) return contract::DType::none;
  if (call == LL_FORWARD) check_absent(field, dtype, "forward computes no gradient");
  if (dtype != input && dtype != LL_F32) {
    std::string allowed = dtype_text(input);
    if (input != LL_F32) allowed += " or f32";
    refuse(std::string(field) + ": " + dtype_text(dtype) + "; must be " + allowed + " (" + input_field +
           " or f32), or LL_NONE if it is not wanted");
  }
  return static_cast<contract::DType>(dtype);
}

void check_flag(ll_problem_flags flags, ll_problem_flags flag, const char* name, contract::DType needed,
                const char* field) {
  if ((flags & flag) != 0 && needed == contract::DType::none) {
    refuse(std::string("flags: ") + name + " without " + field + "; clear the flag, or name that dtype");
  }
}

void check_flags(const ll_problem& p, const contract::Problem& checked) {
  constexpr ll_problem_flags known =
      LL_ACCUMULATE_GRAD_HIDDEN | LL_ACCUMULATE_GRAD_WEIGHT | LL_GRAD_WEIGHT_STRIDED | LL_IN_PLACE;
  if ((p.flags & ~known) != 0) {
    refuse("flags: " + std::to_string(p.flags) + "; only the bits of " + std::to_string(known) +
           " are known to version " + ll_version());
  }
  check_flag(p.flags, LL_ACCUMULATE_GRAD_HIDDEN, "LL_ACCUMULATE_GRAD_HIDDEN", checked.dx, "grad_hidden_dtype");
  check_flag(p.flags, LL_ACCUMULATE_GRAD_WEIGHT, "LL_ACCUMULATE_GRAD_WEIGHT", checked.dw, "grad_weight_dtype");
  check_flag(p.flags, LL_GRAD_WEIGHT_STRIDED, "LL_GRAD_WEIGHT_STRIDED", checked.dw, "grad_weight_dtype");
  check_flag(p.flags, LL_IN_PLACE, "LL_IN_PLACE", checked.dz, "grad_logits_dtype");
  if ((p.flags & LL_IN_PLACE) != 0 && checked.dz != checked.z) {
    refuse(std::string("grad_logits_dtype: ") + contract::name_of(checked.dz) + " with LL_IN_PLACE; must be " +
           contract::name_of(checked.z) + ", the logits' own, to be written over them");
  }
}

// ---- the options -----------------------------------------------------------------------------------------------------

// Above 0 and finite; 0 stands for `otherwise`.
double positive(const char* field, double value, double otherwise, const char* zero) {
  if (!(value >= 0.0) || std::isinf(value)) {  // NaN too
    refuse(std::string(field) + ": " + number(value) + "; must be a finite number above 0, or 0 for " + zero);
  }
  return value > 0.0 ? value : otherwise;
}

void check_range(const char* field, double value, double least, double most) {
  if (value >= least && value <= most) return;
  refuse(std::string(field) + ": " + number(value) + "; must lie in [" + number(least) + ", " + number(most) + "]");
}

void check_finite(const char* field, double value) {
  if (!std::isfinite(value)) refuse(std::string(field) + ": " + number(value) + "; must be a finite number");
}

// `field` has a value other than its default although nothing reads it.
[[noreturn]] void refuse_unread(const char* field, const std::string& value, const char* needed) {
  refuse(std::string(field) + ": " + value + " without " + needed + "; must be its default, or give " + needed);
}

const char* name_of_targets(contract::Targets targets) {
  switch (targets) {
    case contract::Targets::hard: return "LL_TARGETS_HARD";
    case contract::Targets::soft: return "LL_TARGETS_SOFT";
    case contract::Targets::topk: return "LL_TARGETS_TOPK";
    case contract::Targets::teacher: return "LL_TARGETS_TEACHER";
  }
  return "?";
}

void read_targets(const ll_options& o, contract::Loss& loss) {
  if (o.targets != 0) {
    check_enum("targets", o.targets,
               {{LL_TARGETS_HARD, "LL_TARGETS_HARD"},
                {LL_TARGETS_SOFT, "LL_TARGETS_SOFT"},
                {LL_TARGETS_TOPK, "LL_TARGETS_TOPK"},
                {LL_TARGETS_TEACHER, "LL_TARGETS_TEACHER"}});
    loss.targets = static_cast<contract::Targets>(o.targets);
  }
  if (o.rest == 0) return;
  check_enum("rest", o.rest,
             {{LL_REST_DROPPED, "LL_REST_DROPPED"},
              {LL_REST_RENORMALISED, "LL_REST_RENORMALISED"},
              {LL_REST_SPREAD, "LL_REST_SPREAD"}});
  loss.rest = static_cast<contract::Rest>(o.rest);
  if (loss.targets != contract::Targets::topk && o.rest != LL_REST_DROPPED) {
    refuse_unread("rest", number(std::int64_t{o.rest}), "targets LL_TARGETS_TOPK");
  }
}

void read_policy(const ll_options& o, contract::Loss& loss) {
  if (o.rule == 0) {
    constexpr const char* needed = "rule LL_RULE_POLICY";
    if (o.kl_coef != 0.0) refuse_unread("kl_coef", number(o.kl_coef), needed);
    if (o.entropy_coef != 0.0) refuse_unread("entropy_coef", number(o.entropy_coef), needed);
    if (o.clip_low != 0.0 && o.clip_low != loss.policy.clip_low) refuse_unread("clip_low", number(o.clip_low), needed);
    if (o.clip_high != 0.0 && o.clip_high != loss.policy.clip_high) {
      refuse_unread("clip_high", number(o.clip_high), needed);
    }
    return;
  }
  check_enum("rule", o.rule, {{LL_RULE_POLICY, "LL_RULE_POLICY"}});
  check_range("clip_low", o.clip_low, 0.0, 1.0);
  if (!(o.clip_high >= 0.0) || std::isinf(o.clip_high)) {
    refuse("clip_high: " + number(o.clip_high) + "; must be a finite number of at least 0");
  }
  if (!(o.kl_coef >= 0.0) || std::isinf(o.kl_coef)) {
    refuse("kl_coef: " + number(o.kl_coef) + "; must be a finite number of at least 0");
  }
  check_finite("entropy_coef", o.entropy_coef);
  if (loss.targets != contract::Targets::hard) {
    refuse(std::string("rule: LL_RULE_POLICY with targets ") + name_of_targets(loss.targets) +
           "; the log-probability of one class is its input: must be LL_TARGETS_HARD");
  }
  if (o.label_smoothing > 0.0) {
    refuse("label_smoothing: " + number(o.label_smoothing) + " with rule LL_RULE_POLICY, which has none; must be 0");
  }
  loss.policy = {.on = true,
                 .clip_low = o.clip_low,
                 .clip_high = o.clip_high,
                 .kl_coef = o.kl_coef,
                 .entropy_coef = o.entropy_coef};
}

// `topk_log`: the top-k targets are log-probabilities of a teacher.
void read_distillation(const ll_options& o, bool topk_log, contract::Loss& loss) {
  contract::Distillation& d = loss.distillation;
  if (o.divergence != 0) {
    check_enum("divergence", o.divergence,
               {{LL_FORWARD_KL, "LL_FORWARD_KL"}, {LL_REVERSE_KL, "LL_REVERSE_KL"}, {LL_JSD, "LL_JSD"}});
    d.divergence = static_cast<contract::Divergence>(o.divergence);
  }
  const bool teacher = loss.targets == contract::Targets::teacher;
  if (!teacher && d.divergence != contract::Divergence::forward_kl) {
    if (topk_log) {
      refuse("divergence: " + number(std::int64_t{o.divergence}) +
             " with LL_TOPK_LOG; only LL_FORWARD_KL (1) needs no more of a teacher than its top k");
    }
    refuse_unread("divergence", number(std::int64_t{o.divergence}), "targets LL_TARGETS_TEACHER");
  }
  if (d.divergence == contract::Divergence::jsd) {
    if (!(o.beta > 0.0 && o.beta < 1.0)) {
      refuse("beta: " + number(o.beta) +
             "; must lie in (0, 1), where the ends would make LL_JSD 0: see LL_FORWARD_KL and LL_REVERSE_KL");
    }
    d.beta = o.beta;
  } else if (o.beta != 0.0 && o.beta != d.beta) {
    refuse_unread("beta", number(o.beta), "divergence LL_JSD");
  }
  d.tau = positive("distill_temperature", o.distill_temperature, 1.0, "1");
  check_range("hard_share", o.hard_share, 0.0, 1.0);
  d.hard_share = o.hard_share;
  if (o.temperature_squared != 0 && o.temperature_squared != 1) {
    refuse("temperature_squared: " + number(std::int64_t{o.temperature_squared}) + "; must be 0 or 1");
  }
  d.square = o.temperature_squared == 1;
  if (!teacher && !topk_log) {
    constexpr const char* needed = "a teacher (targets LL_TARGETS_TEACHER, or LL_TOPK_LOG)";
    if (d.tau != 1.0) refuse_unread("distill_temperature", number(d.tau), needed);
    if (d.hard_share != 0.0) refuse_unread("hard_share", number(d.hard_share), needed);
    if (d.square) refuse_unread("temperature_squared", "1", needed);
  }
  if (teacher && d.hard_share == 0.0 && o.label_smoothing > 0.0) {
    refuse("label_smoothing: " + number(o.label_smoothing) +
           " with targets LL_TARGETS_TEACHER and hard_share 0; smoothing is of the hard share: must be 0");
  }
}

void check_filter(const ll_options& o, ll_call call) {
  int exponent = 0;
  if (o.filter == 0.0) return;
  if (!(o.filter > 0.0 && o.filter < 1.0) || std::frexp(o.filter, &exponent) != 0.5) {
    refuse("filter: " + number(o.filter) + "; must be a power of two in (0, 1), such as 2^-12, or 0 for none");
  }
  if (call == LL_FORWARD) {
    refuse("filter: " + number(o.filter) + " with call LL_FORWARD; it is one of gradients: must be 0");
  }
}

contract::Loss checked_loss(const ll_options& o, std::int64_t classes, ll_call call, bool topk_log) {
  check_enum("reduction", o.reduction, {{LL_MEAN, "LL_MEAN"}, {LL_SUM, "LL_SUM"}, {LL_PER_ROW, "LL_PER_ROW"}});
  check_enum("smoothing", o.smoothing,
             {{LL_SMOOTHING_UNIFORM, "LL_SMOOTHING_UNIFORM"}, {LL_SMOOTHING_OTHERS, "LL_SMOOTHING_OTHERS"}});
  check_enum("on_empty", o.on_empty,
             {{LL_EMPTY_ERROR, "LL_EMPTY_ERROR"}, {LL_EMPTY_NAN, "LL_EMPTY_NAN"}, {LL_EMPTY_ZERO, "LL_EMPTY_ZERO"}});
  check_range("label_smoothing", o.label_smoothing, 0.0, 1.0);
  if (!(o.normalizer >= 0.0) || std::isinf(o.normalizer)) {
    refuse("normalizer: " + number(o.normalizer) +
           "; must be a finite number above 0, or 0 to divide by the number of kept rows");
  }
  if (o.normalizer > 0.0 && o.reduction != LL_MEAN) {
    refuse("normalizer: " + number(o.normalizer) + " with reduction " +
           (o.reduction == LL_SUM ? "LL_SUM" : "LL_PER_ROW") + "; only LL_MEAN divides: must be 0");
  }
  if (o.reserved != 0) refuse("reserved: " + number(std::int64_t{o.reserved}) + "; must be 0");
  if (o.reserved2 != 0) refuse("reserved2: " + number(std::int64_t{o.reserved2}) + "; must be 0");

  contract::Loss loss;
  loss.reduction = static_cast<contract::Reduction>(o.reduction);
  loss.on_empty = static_cast<contract::OnEmpty>(o.on_empty);
  loss.ignore_index = o.ignore_index;
  loss.normalizer = o.normalizer;
  loss.smoothing = o.label_smoothing;
  if (o.smoothing == LL_SMOOTHING_OTHERS && o.label_smoothing > 0.0) {
    if (classes == 1) {
      refuse("label_smoothing: " + number(o.label_smoothing) +
             " with LL_SMOOTHING_OTHERS and vocab 1; there is no other class: must be 0");
    }
    const auto v = static_cast<double>(classes);
    loss.smoothing = o.label_smoothing * (v / (v - 1.0));
  }
  loss.logit_scale = positive("logit_scale", o.logit_scale, 1.0, "1");
  loss.softcap = positive("softcap", o.softcap, 0.0, "none");
  loss.temperature = positive("temperature", o.temperature, 1.0, "1");
  loss.z_loss = positive("z_loss", o.z_loss, 0.0, "none");
  read_targets(o, loss);
  read_policy(o, loss);
  read_distillation(o, topk_log, loss);
  check_filter(o, call);
  loss.filter = o.filter;
  loss.filter_seed = o.filter_seed;
  return loss;
}

// ---- the operands of options -----------------------------------------------------------------------------------------

bool has(std::uint64_t bits, std::uint64_t bit) { return (bits & bit) != 0; }

void check_bits(const char* field, std::uint64_t bits, std::uint64_t known) {
  if ((bits & ~known) == 0) return;
  refuse(std::string(field) + ": " + std::to_string(bits) + "; only the bits of " + std::to_string(known) +
         " are known to version " + ll_version());
}

void read_bits(const ll_problem& p, contract::Problem& checked) {
  check_bits("inputs", p.inputs,
             LL_CLASS_WEIGHT | LL_ROW_WEIGHT | LL_ROW_TEMPERATURE | LL_KEEP_MASK | LL_LOGIT_FLOOR | LL_TOPK_LOG |
                 LL_ENTROPY_GRADIENT);
  check_bits("outputs", p.outputs, LL_ENTROPY | LL_ARGMAX | LL_MEAN_LOGIT | LL_SUM_P2);
  checked.class_weight = has(p.inputs, LL_CLASS_WEIGHT);
  checked.row_weight = has(p.inputs, LL_ROW_WEIGHT);
  checked.row_temperature = has(p.inputs, LL_ROW_TEMPERATURE);
  checked.keep_mask = has(p.inputs, LL_KEEP_MASK);
  checked.logit_floor = has(p.inputs, LL_LOGIT_FLOOR);
  checked.topk_log = has(p.inputs, LL_TOPK_LOG);
  checked.entropy_gradient = has(p.inputs, LL_ENTROPY_GRADIENT);
  checked.entropy = has(p.outputs, LL_ENTROPY);
  checked.argmax = has(p.outputs, LL_ARGMAX);
  checked.mean_logit = has(p.outputs, LL_MEAN_LOGIT);
  checked.sum_p2 = has(p.outputs, LL_SUM_P2);
}

void read_saved(const ll_problem& p, contract::Problem& checked) {
  if (p.saved_bytes == 0) return;
  const std::string bytes = "saved_bytes: " + std::to_string(p.saved_bytes);
  if (p.kind != LL_LINEAR) refuse(bytes + " with kind LL_LOGITS, whose logits are there anyway; must be 0");
  if (p.call == LL_FORWARD_BACKWARD) {
    refuse(bytes +
           " with call LL_FORWARD_BACKWARD, which keeps in its workspace; must be 0, or call forward and backward");
  }
  if (p.saved_bytes > static_cast<std::uint64_t>(kLargestMatrix)) refuse(bytes + "; must be at most 2^56");
  checked.saved = p.saved_bytes;
}

void read_part(const ll_problem& p, contract::Problem& checked) {
  checked.first_column = p.first_column;
  checked.total_vocab = p.total_vocab;
  if (p.total_vocab == 0) {
    if (p.first_column != 0) {
      refuse("first_column: " + number(p.first_column) + " with total_vocab 0; must be 0, or name total_vocab");
    }
    return;
  }
  check_extent("total_vocab", p.total_vocab, 1);
  if (p.vocab > p.total_vocab) {
    refuse("total_vocab: " + number(p.total_vocab) + "; must be at least vocab, " + number(p.vocab));
  }
  if (p.first_column < 0 || p.first_column > p.total_vocab - p.vocab) {
    refuse("first_column: " + number(p.first_column) +
           "; must be 0 to total_vocab - vocab = " + number(p.total_vocab - p.vocab));
  }
  if (p.call == LL_FORWARD_BACKWARD) {
    refuse("total_vocab: " + number(p.total_vocab) +
           " with call LL_FORWARD_BACKWARD; the statistics of all parts come between: must be LL_FORWARD, "
           "ll_merge_statistics, LL_BACKWARD");
  }
}

// Dtypes and extents of what the targets need, and of nothing else.
void read_target_operands(const ll_problem& p, ll_backend backend, contract::Problem& checked) {
  const contract::Targets targets = checked.loss.targets;
  if (targets == contract::Targets::soft) {
    checked.soft = input_dtype("soft_dtype", p.soft_dtype, backend);
  } else {
    check_absent("soft_dtype", p.soft_dtype, "only targets LL_TARGETS_SOFT have one");
  }
  if (targets == contract::Targets::topk) {
    if (p.topk < 1 || p.topk > p.vocab) {
      refuse("topk: " + number(p.topk) + "; must be 1 to vocab, " + number(p.vocab) + ", with LL_TARGETS_TOPK");
    }
    checked.topk = p.topk;
    check_bytes("rows", p.rows, "topk", p.topk, 8);
  } else {
    if (p.topk != 0) {
      refuse("topk: " + number(p.topk) + " with targets " + name_of_targets(targets) +
             "; only LL_TARGETS_TOPK have it: must be 0");
    }
    if (checked.topk_log) {
      refuse(std::string("inputs: LL_TOPK_LOG with targets ") + name_of_targets(targets) +
             "; clear the bit, or give targets LL_TARGETS_TOPK");
    }
  }
  if (targets != contract::Targets::teacher) {
    if (p.teacher_hidden != 0) {
      refuse("teacher_hidden: " + number(p.teacher_hidden) + " with targets " + name_of_targets(targets) +
             "; only LL_TARGETS_TEACHER have it: must be 0");
    }
    check_absent("teacher_hidden_dtype", p.teacher_hidden_dtype, "only targets LL_TARGETS_TEACHER have one");
    check_absent("teacher_weight_dtype", p.teacher_weight_dtype, "only targets LL_TARGETS_TEACHER have one");
    check_absent("teacher_bias_dtype", p.teacher_bias_dtype, "only targets LL_TARGETS_TEACHER have one");
    return;
  }
  if (checked.kind != contract::Kind::linear) {
    fail(LL_ERROR_UNSUPPORTED,
         "targets: LL_TARGETS_TEACHER with kind LL_LOGITS; must be LL_LINEAR, or give the teacher's top k "
         "(LL_TARGETS_TOPK with LL_TOPK_LOG) or its probabilities (LL_TARGETS_SOFT)");
  }
  check_extent("teacher_hidden", p.teacher_hidden, 1);
  checked.teacher_hidden = p.teacher_hidden;
  checked.teacher_x = input_dtype("teacher_hidden_dtype", p.teacher_hidden_dtype, backend);
  checked.teacher_w = input_dtype("teacher_weight_dtype", p.teacher_weight_dtype, backend);
  if (p.teacher_bias_dtype != LL_NONE) {
    checked.teacher_bias = input_dtype("teacher_bias_dtype", p.teacher_bias_dtype, backend);
  }
  check_bytes("rows", p.rows, "teacher_hidden", p.teacher_hidden, 8);
  check_bytes("vocab", p.vocab, "teacher_hidden", p.teacher_hidden, 8);
}

// Pairs that have no meaning together, or none yet.
void check_pairs(const ll_options& o, const contract::Problem& c) {
  const contract::Loss& loss = c.loss;
  if (c.row_temperature && loss.temperature != 1.0) {
    refuse("temperature: " + number(loss.temperature) +
           " with LL_ROW_TEMPERATURE; one of them is the row's: must be 1");
  }
  if (loss.policy.on && c.class_weight) {
    refuse("inputs: LL_CLASS_WEIGHT with rule LL_RULE_POLICY, which has none; clear the bit");
  }
  if (loss.targets == contract::Targets::teacher && loss.distillation.hard_share == 0.0 && c.class_weight) {
    refuse(
        "inputs: LL_CLASS_WEIGHT with targets LL_TARGETS_TEACHER and hard_share 0; weights are of the hard share: "
        "clear "
        "the bit");
  }
  if (c.topk_log) {
    constexpr const char* only = " with LL_TOPK_LOG, a divergence from a teacher and not a cross-entropy; ";
    if (o.label_smoothing > 0.0) refuse("label_smoothing: " + number(o.label_smoothing) + only + "must be 0");
    if (c.class_weight) refuse(std::string("inputs: LL_CLASS_WEIGHT") + only + "clear the bit");
  }
  if (c.saved > 0 && (c.distils() || c.is_part())) {
    refuse("saved_bytes: " + std::to_string(c.saved) + " with " +
           (c.distils() ? "targets LL_TARGETS_TEACHER" : "total_vocab, a part of a vocabulary") +
           "; nothing is kept there: must be 0");
  }
  if (c.distils() && c.entropy_gradient) {
    refuse("inputs: LL_ENTROPY_GRADIENT with targets LL_TARGETS_TEACHER, which offer none; clear the bit");
  }
  if (loss.filter > 0.0 && (c.pairs() || c.is_part())) {
    refuse("filter: " + number(loss.filter) + " with " +
           (c.distils() ? "targets LL_TARGETS_TEACHER"
            : c.pairs() ? "LL_TOPK_LOG and distill_temperature " + number(loss.distillation.tau)
                        : "total_vocab, a part of a vocabulary") +
           ", which offer none; must be 0");
  }
  if (loss.targets != contract::Targets::hard && c.restricts()) {
    refuse(std::string("inputs: ") + (c.keep_mask ? "LL_KEEP_MASK" : "LL_LOGIT_FLOOR") + " with targets " +
           name_of_targets(loss.targets) + "; a dropped class may have a target's mass: must be LL_TARGETS_HARD");
  }
  if (!c.is_part()) return;
  const std::string part = "total_vocab: " + number(c.total_vocab);
  if (loss.targets != contract::Targets::hard) {
    fail(LL_ERROR_UNSUPPORTED, part + " with targets " + name_of_targets(loss.targets) +
                                   "; a part of a vocabulary takes LL_TARGETS_HARD alone");
  }
  if (loss.policy.on) {
    fail(LL_ERROR_UNSUPPORTED, part +
                                   " with rule LL_RULE_POLICY; a part of a vocabulary has no row rule: take "
                                   "grad_row_logprob instead");
  }
  if (c.restricts() && o.label_smoothing > 0.0) {
    fail(LL_ERROR_UNSUPPORTED, part + " with label_smoothing " + number(o.label_smoothing) + " and " +
                                   (c.keep_mask ? "LL_KEEP_MASK" : "LL_LOGIT_FLOOR") +
                                   "; the number of kept classes is not one part's: must be 0");
  }
  if (c.entropy || c.argmax || c.mean_logit || c.sum_p2) {
    fail(LL_ERROR_UNSUPPORTED, part + " with outputs; a part of a vocabulary gives stats alone: must be 0");
  }
}

ll_problem default_problem() {
  return ll_problem{.size = sizeof(ll_problem),
                    .kind = LL_LINEAR,
                    .call = LL_FORWARD_BACKWARD,
                    .rows = 0,
                    .hidden = 0,
                    .vocab = 0,
                    .hidden_dtype = LL_NONE,
                    .weight_dtype = LL_NONE,
                    .logits_dtype = LL_NONE,
                    .grad_hidden_dtype = LL_NONE,
                    .grad_weight_dtype = LL_NONE,
                    .grad_logits_dtype = LL_NONE,
                    .flags = 0,
                    .memory_budget = 0,
                    .bias_dtype = LL_NONE,
                    .soft_dtype = LL_NONE,
                    .teacher_hidden_dtype = LL_NONE,
                    .teacher_weight_dtype = LL_NONE,
                    .teacher_bias_dtype = LL_NONE,
                    .grad_bias_dtype = LL_NONE,
                    .topk = 0,
                    .teacher_hidden = 0,
                    .first_column = 0,
                    .total_vocab = 0,
                    .inputs = 0,
                    .outputs = 0,
                    .saved_bytes = 0,
                    .most_kept_rows = 0};
}

ll_options default_options() {
  return ll_options{.size = sizeof(ll_options),
                    .reduction = LL_MEAN,
                    .smoothing = LL_SMOOTHING_UNIFORM,
                    .label_smoothing = 0.0,
                    .ignore_index = -100,
                    .normalizer = 0.0,
                    .on_empty = LL_EMPTY_ERROR,
                    .reserved = 0,
                    .logit_scale = 1.0,
                    .softcap = 0.0,
                    .temperature = 1.0,
                    .z_loss = 0.0,
                    .targets = LL_TARGETS_HARD,
                    .rest = LL_REST_DROPPED,
                    .rule = 0,
                    .divergence = LL_FORWARD_KL,
                    .clip_low = 0.2,
                    .clip_high = 0.2,
                    .kl_coef = 0.0,
                    .entropy_coef = 0.0,
                    .beta = 0.5,
                    .distill_temperature = 1.0,
                    .hard_share = 0.0,
                    .temperature_squared = 0,
                    .reserved2 = 0,
                    .filter = 0.0,
                    .filter_seed = 0};
}

}  // namespace

contract::Problem checked_problem(const ll_problem* problem, const ll_options* options, ll_backend backend) {
  const ll_problem p = read_struct(problem, "problem", "ll_problem", default_problem());
  const ll_options o =
      options == nullptr ? default_options() : read_struct(options, "options", "ll_options", default_options());

  check_enum("kind", p.kind, {{LL_LINEAR, "LL_LINEAR"}, {LL_LOGITS, "LL_LOGITS"}});
  check_enum("call", p.call,
             {{LL_FORWARD, "LL_FORWARD"}, {LL_FORWARD_BACKWARD, "LL_FORWARD_BACKWARD"}, {LL_BACKWARD, "LL_BACKWARD"}});
  const bool linear = p.kind == LL_LINEAR;
  check_extent("rows", p.rows, 0);
  check_extent("vocab", p.vocab, 1);

  contract::Problem checked;
  checked.kind = static_cast<contract::Kind>(p.kind);
  checked.call = static_cast<contract::Call>(p.call);
  checked.rows = p.rows;
  checked.vocab = p.vocab;
  if (linear) {
    check_extent("hidden", p.hidden, 1);
    checked.hidden = p.hidden;
    checked.x = input_dtype("hidden_dtype", p.hidden_dtype, backend);
    checked.w = input_dtype("weight_dtype", p.weight_dtype, backend);
    check_absent("logits_dtype", p.logits_dtype, "a problem of kind linear has no logits");
    check_absent("grad_logits_dtype", p.grad_logits_dtype, "a problem of kind linear has no logits");
    checked.dx = gradient_dtype("grad_hidden_dtype", p.grad_hidden_dtype, "hidden_dtype", p.hidden_dtype, p.call);
    checked.dw = gradient_dtype("grad_weight_dtype", p.grad_weight_dtype, "weight_dtype", p.weight_dtype, p.call);
  } else {
    if (p.hidden != 0) refuse("hidden: " + number(p.hidden) + "; a problem of kind logits has none: must be 0");
    checked.z = input_dtype("logits_dtype", p.logits_dtype, backend);
    check_absent("hidden_dtype", p.hidden_dtype, "a problem of kind logits has no hidden");
    check_absent("weight_dtype", p.weight_dtype, "a problem of kind logits has no weight");
    check_absent("grad_hidden_dtype", p.grad_hidden_dtype, "a problem of kind logits has no hidden");
    check_absent("grad_weight_dtype", p.grad_weight_dtype, "a problem of kind logits has no weight");
    checked.dz = gradient_dtype("grad_logits_dtype", p.grad_logits_dtype, "logits_dtype", p.logits_dtype, p.call);
  }
  if (p.bias_dtype != LL_NONE) {
    checked.bias = input_dtype("bias_dtype", p.bias_dtype, backend);
  } else if (p.grad_bias_dtype != LL_NONE) {
    check_absent("grad_bias_dtype", p.grad_bias_dtype, "there is no bias, bias_dtype is LL_NONE");
  }
  if (!linear && p.grad_bias_dtype != LL_NONE) {
    refuse("grad_bias_dtype: " + dtype_text(p.grad_bias_dtype) +
           " with kind LL_LOGITS, where db is the sum of grad_logits over rows; must be "
           "LL_NONE (0): sum grad_logits");
  }
  checked.db = gradient_dtype("grad_bias_dtype", p.grad_bias_dtype, "bias_dtype", p.bias_dtype, p.call);
  if (p.call != LL_FORWARD && !checked.wants_gradient()) {
    refuse(std::string("call: ") + (p.call == LL_BACKWARD ? "LL_BACKWARD" : "LL_FORWARD_BACKWARD") +
           " without a gradient; name " +
           (linear ? "grad_hidden_dtype, grad_weight_dtype or grad_bias_dtype" : "grad_logits_dtype") +
           (p.call == LL_BACKWARD ? "" : ", or call LL_FORWARD"));
  }

  // The widest dtype that may stand at each place: logits and sums are fp32 or wider, whatever the inputs are.
  const auto widest = [](std::int64_t a) { return a > 4 ? a : std::int64_t{4}; };
  check_bytes("rows", p.rows, "vocab", p.vocab, widest(size_of(checked.z)));
  if (linear) {
    check_bytes("rows", p.rows, "hidden", p.hidden, widest(size_of(checked.x)));
    check_bytes("vocab", p.vocab, "hidden", p.hidden, widest(size_of(checked.w)));
  }

  check_flags(p, checked);
  checked.accumulate_dx = (p.flags & LL_ACCUMULATE_GRAD_HIDDEN) != 0;
  checked.accumulate_dw = (p.flags & LL_ACCUMULATE_GRAD_WEIGHT) != 0;
  checked.dw_contiguous = (p.flags & LL_GRAD_WEIGHT_STRIDED) == 0;
  checked.in_place = (p.flags & LL_IN_PLACE) != 0;
  checked.budget = p.memory_budget;
  if (p.most_kept_rows < 0 || p.most_kept_rows > p.rows) {
    refuse("most_kept_rows: " + number(p.most_kept_rows) + "; must be 0 (unknown) to rows " + number(p.rows));
  }
  checked.most_kept = p.most_kept_rows;
  if (backend == LL_BACKEND_CUDA) {
    // Numbers of rows are those of thread blocks, numbers of columns 32-bit words of the filter's hash.
    constexpr std::int64_t most = (std::int64_t{1} << 31) - 1;
    if (p.rows > most) refuse("rows: " + number(p.rows) + "; must be at most " + number(most) + " on CUDA");
    if (p.vocab > most) refuse("vocab: " + number(p.vocab) + "; must be at most " + number(most) + " on CUDA");
  }
  read_saved(p, checked);
  read_part(p, checked);
  read_bits(p, checked);
  checked.loss = checked_loss(o, checked.classes(), p.call, checked.topk_log);
  read_target_operands(p, backend, checked);
  check_pairs(o, checked);
  return checked;
}

}  // namespace logitless::capi

// The exported names fill what 0.1 had: programs built then have structs that end there. The header's macros of these
// names give the caller's size.
static_assert(offsetof(ll_options, logit_scale) == 48 && offsetof(ll_problem, bias_dtype) == 80);

void(ll_options_init)(ll_options* options) noexcept {
  ll_options_init_sized(options, offsetof(ll_options, logit_scale));
}

void ll_options_init_sized(ll_options* options, size_t bytes) noexcept {
  logitless::capi::write_struct(options, bytes, logitless::capi::default_options());
}

void(ll_problem_init)(ll_problem* problem) noexcept {
  ll_problem_init_sized(problem, offsetof(ll_problem, bias_dtype));
}

void ll_problem_init_sized(ll_problem* problem, size_t bytes) noexcept {
  logitless::capi::write_struct(problem, bytes, logitless::capi::default_problem());
}
