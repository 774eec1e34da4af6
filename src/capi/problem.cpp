// See problem.hpp. `others` smoothing is turned into the uniform convention here: others(alpha) gives the target
// 1 - alpha and every other class alpha/(V-1), which is uniform(alpha V/(V-1)) exactly, as real numbers.
#include "capi/problem.hpp"

#include <cmath>
#include <initializer_list>

#include "capi/structs.hpp"

namespace logitless::capi {

const char* name_of_dtype(ll_dtype dtype) {
  return dtype >= LL_NONE && dtype <= LL_I64 ? contract::name_of(static_cast<contract::DType>(dtype))
                                             : "an unknown dtype";
}

namespace {

std::string dtype_text(ll_dtype dtype) {
  if (dtype >= LL_NONE && dtype <= LL_I64) return name_of_dtype(dtype);
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
                                     ": f64; the CPU backend takes f32, bf16 and f16, and f64 runs on a context of "
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

contract::Loss checked_loss(const ll_options& o, std::int64_t vocab) {
  check_enum("reduction", o.reduction, {{LL_MEAN, "LL_MEAN"}, {LL_SUM, "LL_SUM"}, {LL_PER_ROW, "LL_PER_ROW"}});
  check_enum("smoothing", o.smoothing,
             {{LL_SMOOTHING_UNIFORM, "LL_SMOOTHING_UNIFORM"}, {LL_SMOOTHING_OTHERS, "LL_SMOOTHING_OTHERS"}});
  check_enum("on_empty", o.on_empty,
             {{LL_EMPTY_ERROR, "LL_EMPTY_ERROR"}, {LL_EMPTY_NAN, "LL_EMPTY_NAN"}, {LL_EMPTY_ZERO, "LL_EMPTY_ZERO"}});
  if (!(o.label_smoothing >= 0.0 && o.label_smoothing <= 1.0)) {  // NaN too
    refuse("label_smoothing: " + number(o.label_smoothing) + "; must lie in [0, 1]");
  }
  if (!(o.normalizer >= 0.0) || std::isinf(o.normalizer)) {
    refuse("normalizer: " + number(o.normalizer) +
           "; must be a finite number above 0, or 0 to divide by the number of kept rows");
  }
  if (o.normalizer > 0.0 && o.reduction != LL_MEAN) {
    refuse("normalizer: " + number(o.normalizer) + " with reduction " +
           (o.reduction == LL_SUM ? "LL_SUM" : "LL_PER_ROW") + "; only LL_MEAN divides: must be 0");
  }
  if (o.reserved != 0) refuse("reserved: " + number(std::int64_t{o.reserved}) + "; must be 0");

  contract::Loss loss;
  loss.reduction = static_cast<contract::Reduction>(o.reduction);
  loss.on_empty = static_cast<contract::OnEmpty>(o.on_empty);
  loss.ignore_index = o.ignore_index;
  loss.normalizer = o.normalizer;
  loss.smoothing = o.label_smoothing;
  if (o.smoothing == LL_SMOOTHING_OTHERS && o.label_smoothing > 0.0) {
    if (vocab == 1) {
      refuse("label_smoothing: " + number(o.label_smoothing) +
             " with LL_SMOOTHING_OTHERS and vocab 1; there is no other class: must be 0");
    }
    const auto v = static_cast<double>(vocab);
    loss.smoothing = o.label_smoothing * (v / (v - 1.0));
  }
  return loss;
}

ll_problem default_problem() {
  ll_problem problem;
  ll_problem_init(&problem);
  return problem;
}

ll_options default_options() {
  ll_options options;
  ll_options_init(&options);
  return options;
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
  if (p.call != LL_FORWARD && !checked.wants_gradient()) {
    refuse(std::string("call: ") + (p.call == LL_BACKWARD ? "LL_BACKWARD" : "LL_FORWARD_BACKWARD") +
           " without a gradient; name " + (linear ? "grad_hidden_dtype or grad_weight_dtype" : "grad_logits_dtype") +
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
  checked.loss = checked_loss(o, p.vocab);
  return checked;
}

}  // namespace logitless::capi

void ll_options_init(ll_options* options) noexcept {
  if (options == nullptr) return;
  *options = ll_options{.size = sizeof(ll_options),
                        .reduction = LL_MEAN,
                        .smoothing = LL_SMOOTHING_UNIFORM,
                        .label_smoothing = 0.0,
                        .ignore_index = -100,
                        .normalizer = 0.0,
                        .on_empty = LL_EMPTY_ERROR,
                        .reserved = 0};
}

void ll_problem_init(ll_problem* problem) noexcept {
  if (problem == nullptr) return;
  *problem = ll_problem{.size = sizeof(ll_problem),
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
                        .memory_budget = 0};
}
