// Logitless, the C++20 face: header-only over the C ABI of logitless.h, which it includes and hides.
//
// Views (Tensor, ConstTensor) carry shapes; aggregates (Options, Problem, Arguments) take designated initialisers;
// one-line calls (linear_cross_entropy, cross_entropy) plan, own their workspace and run; Context, Plan and Workspace
// are the same in three steps for who calls often. Symbols: R rows, H hidden, V vocabulary, X [R,H], W [V,H], z = X W^T
// [R,V] logits, y [R] targets, D = dL/dz [R,V]. Cost: what the C ABI costs; the one-line calls allocate their workspace
// each time. Every failure throws logitless::Error, whose text names the argument, its value and what would be right.
#pragma once

#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "logitless/logitless.h"

namespace logitless {

// ---- errors ---------------------------------------------------------------------------------------------------------

class Error : public std::runtime_error {
 public:
  Error(ll_status status, const std::string& text) : std::runtime_error(text), status_(status) {}
  ll_status status() const noexcept { return status_; }
  const char* status_name() const noexcept { return ll_status_name(status_); }

 private:
  ll_status status_;
};

namespace detail {
inline void check(ll_status status) {
  if (status != LL_OK) throw Error(status, ll_last_error());
}

// The two-step text of ll_*_describe as a string.
template <class Describe>
std::string described(Describe describe) {
  std::size_t length = 0;
  check(describe(nullptr, std::size_t{0}, &length));
  std::string text(length + 1, '\0');
  check(describe(text.data(), text.size(), &length));
  text.resize(length);
  return text;
}
}  // namespace detail

// "major.minor.patch" of the library that runs.
inline const char* version() noexcept { return ll_version(); }

// ---- numeric types --------------------------------------------------------------------------------------------------

enum class DType : std::int32_t {
  none = LL_NONE,
  f32 = LL_F32,
  bf16 = LL_BF16,
  f16 = LL_F16,
  f64 = LL_F64,
  i32 = LL_I32,
  i64 = LL_I64,
  u8 = LL_U8
};

constexpr const char* name_of(DType type) noexcept {
  switch (type) {
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

constexpr std::size_t size_of(DType type) noexcept {
  switch (type) {
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

// Storage types of 16 bits: trivially copyable, converted to and from float, rounding to nearest, ties to even.
struct bfloat16 {
  std::uint16_t bits;

  bfloat16() = default;
  constexpr explicit bfloat16(float value) noexcept : bits(rounded(std::bit_cast<std::uint32_t>(value))) {}
  static constexpr bfloat16 from_bits(std::uint16_t bits) noexcept {
    bfloat16 value(0.0f);
    value.bits = bits;
    return value;
  }
  constexpr operator float() const noexcept { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

 private:
  static constexpr std::uint16_t rounded(std::uint32_t x) noexcept {
    // A NaN stays one (quiet): adding the rounding term could carry its payload into the sign or to infinity.
    if ((x & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((x >> 16) | 0x0040u);
    return static_cast<std::uint16_t>((x + 0x7fffu + ((x >> 16) & 1u)) >> 16);
  }
};

struct float16 {
  std::uint16_t bits;

  float16() = default;
  constexpr explicit float16(float value) noexcept : bits(rounded(std::bit_cast<std::uint32_t>(value))) {}
  static constexpr float16 from_bits(std::uint16_t bits) noexcept {
    float16 value(0.0f);
    value.bits = bits;
    return value;
  }
  constexpr operator float() const noexcept {
    const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16;
    const std::uint32_t exponent = (bits >> 10) & 0x1fu;
    const std::uint32_t fraction = bits & 0x3ffu;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
    if (exponent == 0) {  // subnormal: fraction * 2^-24, exact in fp32
      const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
      return sign != 0 ? -magnitude : magnitude;
    }
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
  }

 private:
  static constexpr std::uint16_t rounded(std::uint32_t x) noexcept {
    const std::uint32_t sign = (x >> 16) & 0x8000u;
    const std::uint32_t a = x & 0x7fffffffu;
    std::uint32_t out = 0;
    if (a > 0x7f800000u) {
      out = 0x7e00u | ((a >> 13) & 0x1ffu);
    } else if (a >= 0x477ff000u) {  // 65520, the tie between the largest finite value and 2^16, and above
      out = 0x7c00u;
    } else if (a >= 0x38800000u) {  // 2^-14 and above: normal
      out = (a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13;
    } else {  // subnormal: the significand in units of 2^-24
      const std::uint32_t shift = 126u - (a >> 23);
      if (shift <= 24) {
        const std::uint32_t significand = (a & 0x7fffffu) | 0x800000u;
        const std::uint32_t rest = significand & ((1u << shift) - 1u);
        const std::uint32_t half = 1u << (shift - 1);
        out = significand >> shift;
        if (rest > half || (rest == half && (out & 1u) != 0)) ++out;
      }
    }
    return static_cast<std::uint16_t>(sign | out);
  }
};

namespace detail {
template <class T>
constexpr DType dtype_of() noexcept {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, float>) return DType::f32;
  if constexpr (std::is_same_v<U, double>) return DType::f64;
  if constexpr (std::is_same_v<U, bfloat16>) return DType::bf16;
  if constexpr (std::is_same_v<U, float16>) return DType::f16;
  if constexpr (std::is_same_v<U, std::uint8_t>) return DType::u8;
  if constexpr (std::is_integral_v<U> && std::is_signed_v<U>) {  // long and long long are both 64 bits on Linux
    if constexpr (sizeof(U) == 4) return DType::i32;
    if constexpr (sizeof(U) == 8) return DType::i64;
  }
  return DType::none;
}

template <class T>
concept Element = dtype_of<T>() != DType::none;
template <class T>
concept MutableElement = Element<T> && !std::is_const_v<T>;

// A contiguous range (std::vector, std::array, std::span, a C array) and what its data points at.
template <class C>
using RangeElement = std::remove_pointer_t<decltype(std::data(std::declval<C&>()))>;
template <class C>
concept Range = requires(C& c) {
  { std::size(c) } -> std::convertible_to<std::size_t>;
  requires std::is_pointer_v<decltype(std::data(c))>;
  requires Element<RangeElement<C>>;
};

// Anything that looks like std::mdspan.
template <class M>
using MdspanElement = std::remove_pointer_t<std::remove_cvref_t<decltype(std::declval<M&>().data_handle())>>;
template <class M>
concept MdspanLike = requires(M& m) {
  requires std::is_pointer_v<std::remove_cvref_t<decltype(m.data_handle())>>;
  requires Element<MdspanElement<M>>;
  { m.rank() } -> std::convertible_to<std::size_t>;
  { m.extent(0) } -> std::convertible_to<std::int64_t>;
  { m.stride(0) } -> std::convertible_to<std::int64_t>;
};
}  // namespace detail

// ---- tensors --------------------------------------------------------------------------------------------------------

// Extents or strides, in elements, from any integers: {R, H}.
struct Shape {
  std::array<std::int64_t, LL_MAX_NDIM> value{};
  std::int32_t rank = 0;

  constexpr Shape() = default;
  template <std::integral... Integers>
    requires(sizeof...(Integers) >= 1 && sizeof...(Integers) <= LL_MAX_NDIM)
  constexpr Shape(Integers... extents) noexcept
      : value{static_cast<std::int64_t>(extents)...}, rank(static_cast<std::int32_t>(sizeof...(Integers))) {}
};

// A view that is only read. Default constructed it means "not given". It owns nothing: what it views must outlive the
// call.
class ConstTensor {
 public:
  ConstTensor() = default;
  // Row-major, or with strides in elements (0 and negative are allowed for inputs).
  template <detail::Element T>
  ConstTensor(const T* data, Shape shape) : ConstTensor(data, detail::dtype_of<T>(), shape) {}
  template <detail::Element T>
  ConstTensor(const T* data, Shape shape, Shape strides) : ConstTensor(data, detail::dtype_of<T>(), shape, strides) {}
  // Raw memory with its dtype: for 16-bit numbers held as std::uint16_t, for files and buffers of bytes.
  ConstTensor(const void* data, DType type, Shape shape) : ConstTensor(data, type, shape, dense(shape)) {}
  ConstTensor(const void* data, DType type, Shape shape, Shape strides) {
    if (strides.rank != shape.rank) {
      throw Error(LL_ERROR_INVALID_ARGUMENT, "strides: " + std::to_string(strides.rank) +
                                                 " of them for a shape of rank " + std::to_string(shape.rank) +
                                                 "; give one stride for each extent");
    }
    view_.data = const_cast<void*>(data);  // the C ABI has one tensor type; inputs are never written
    view_.dtype = static_cast<ll_dtype>(type);
    view_.ndim = shape.rank;
    for (std::size_t i = 0; i < LL_MAX_NDIM; ++i) {
      view_.shape[i] = shape.value[i];
      view_.stride[i] = strides.value[i];
    }
  }
  // [n] from a contiguous range.
  template <class C>
    requires detail::Range<C>
  ConstTensor(C&& range) : ConstTensor(std::data(range), Shape(std::size(range))) {}
  template <class M>
    requires detail::MdspanLike<M>
  ConstTensor(M&& mdspan)
      : ConstTensor(mdspan.data_handle(), detail::dtype_of<detail::MdspanElement<M>>(), extents_of(mdspan),
                    strides_of(mdspan)) {}

  explicit operator bool() const noexcept { return view_.dtype != LL_NONE; }
  DType dtype() const noexcept { return static_cast<DType>(view_.dtype); }
  std::int32_t rank() const noexcept { return view_.ndim; }
  std::int64_t extent(std::int32_t i) const noexcept { return view_.shape[i]; }
  std::int64_t stride(std::int32_t i) const noexcept { return view_.stride[i]; }
  const void* data() const noexcept { return view_.data; }
  // The same view of a CUDA device's memory, which only that device's context takes. Its data is never followed here.
  ConstTensor on_device(std::int32_t device) const noexcept {
    ConstTensor there = *this;
    there.view_.device_type = LL_DEVICE_CUDA;
    there.view_.device_id = device;
    return there;
  }
  bool on_host() const noexcept { return view_.device_type == LL_DEVICE_CPU; }
  // For the C ABI: null when not given.
  const ll_tensor* get() const noexcept { return *this ? &view_ : nullptr; }

 private:
  static constexpr Shape dense(Shape shape) noexcept {
    Shape strides;
    strides.rank = shape.rank;
    std::int64_t step = 1;
    for (std::int32_t i = shape.rank - 1; i >= 0; --i) {
      const auto at = static_cast<std::size_t>(i);
      strides.value[at] = step;
      // Unsigned: a shape too large for 64 bits is refused by the library, and must not be undefined before that.
      step = static_cast<std::int64_t>(static_cast<std::uint64_t>(step) * static_cast<std::uint64_t>(shape.value[at]));
    }
    return strides;
  }
  template <class M>
  static Shape sized_like(const M& mdspan) {
    const auto rank = static_cast<std::size_t>(mdspan.rank());
    if (rank > LL_MAX_NDIM) {
      throw Error(LL_ERROR_INVALID_ARGUMENT,
                  "mdspan: rank " + std::to_string(rank) + "; at most " + std::to_string(LL_MAX_NDIM) + " are allowed");
    }
    Shape shape;
    shape.rank = static_cast<std::int32_t>(rank);
    return shape;
  }
  template <class M>
  static Shape extents_of(const M& mdspan) {
    Shape shape = sized_like(mdspan);
    for (std::size_t i = 0; i < static_cast<std::size_t>(shape.rank); ++i) {
      shape.value[i] = static_cast<std::int64_t>(mdspan.extent(i));
    }
    return shape;
  }
  template <class M>
  static Shape strides_of(const M& mdspan) {
    Shape shape = sized_like(mdspan);
    for (std::size_t i = 0; i < static_cast<std::size_t>(shape.rank); ++i) {
      shape.value[i] = static_cast<std::int64_t>(mdspan.stride(i));
    }
    return shape;
  }

  ll_tensor view_{.size = sizeof(ll_tensor),
                  .data = nullptr,
                  .dtype = LL_NONE,
                  .device_type = LL_DEVICE_CPU,
                  .device_id = 0,
                  .ndim = 0,
                  .shape = {},
                  .stride = {}};
};

// A view that is written: the same constructors, without const. An output of const data does not compile.
class Tensor : public ConstTensor {
 public:
  Tensor() = default;
  template <detail::MutableElement T>
  Tensor(T* data, Shape shape) : ConstTensor(data, shape) {}
  template <detail::MutableElement T>
  Tensor(T* data, Shape shape, Shape strides) : ConstTensor(data, shape, strides) {}
  Tensor(void* data, DType type, Shape shape) : ConstTensor(data, type, shape) {}
  Tensor(void* data, DType type, Shape shape, Shape strides) : ConstTensor(data, type, shape, strides) {}
  template <class C>
    requires(detail::Range<C> && detail::MutableElement<detail::RangeElement<C>>)
  Tensor(C&& range) : ConstTensor(range) {}
  template <class M>
    requires(detail::MdspanLike<M> && detail::MutableElement<detail::MdspanElement<M>>)
  Tensor(M&& mdspan) : ConstTensor(mdspan) {}

  void* data() const noexcept { return const_cast<void*>(ConstTensor::data()); }
  Tensor on_device(std::int32_t device) const noexcept { return Tensor(ConstTensor::on_device(device)); }

 private:
  explicit Tensor(const ConstTensor& view) : ConstTensor(view) {}
};

// ---- options, problems, arguments -----------------------------------------------------------------------------------

enum class Reduction : std::int32_t { mean = LL_MEAN, sum = LL_SUM, none = LL_PER_ROW };
// uniform: alpha/V to every class (PyTorch). others: alpha/(V-1) to the other classes, 1 - alpha to the target
// (Megatron).
enum class Smoothing : std::int32_t { uniform = LL_SMOOTHING_UNIFORM, others = LL_SMOOTHING_OTHERS };
enum class OnEmpty : std::int32_t { error = LL_EMPTY_ERROR, nan = LL_EMPTY_NAN, zero = LL_EMPTY_ZERO };

// What a row is compared with; see ll_targets.
enum class Targets : std::int32_t {
  hard = LL_TARGETS_HARD,
  soft = LL_TARGETS_SOFT,
  topk = LL_TARGETS_TOPK,
  teacher = LL_TARGETS_TEACHER
};
// Mass that top-k targets leave over.
enum class Rest : std::int32_t {
  dropped = LL_REST_DROPPED,
  renormalised = LL_REST_RENORMALISED,
  spread = LL_REST_SPREAD
};
enum class Divergence : std::int32_t { forward_kl = LL_FORWARD_KL, reverse_kl = LL_REVERSE_KL, jsd = LL_JSD };

// A clipped policy loss instead of the cross-entropy; see ll_rule.
struct Policy {
  bool on = false;
  double clip_low = 0.2;
  double clip_high = 0.2;
  double kl_coef = 0.0;
  double entropy_coef = 0.0;
};

// Of a teacher, as a head or as top-k log-probabilities; see ll_options.
struct Distillation {
  Divergence divergence = Divergence::forward_kl;
  double beta = 0.5;
  double temperature = 1.0;
  double hard_share = 0.0;
  bool temperature_squared = false;
};

// What is computed; see ll_options.
struct Options {
  Reduction reduction = Reduction::mean;
  std::int64_t ignore_index = -100;
  double label_smoothing = 0.0;
  Smoothing smoothing = Smoothing::uniform;
  double normalizer = 0.0;  // mean divides by it when > 0, else by the kept rows' number, or sum of class weights
  OnEmpty on_empty = OnEmpty::error;
  double logit_scale = 1.0;
  double softcap = 0.0;  // 0: none
  double temperature = 1.0;
  double z_loss = 0.0;
  Targets targets = Targets::hard;
  Rest rest = Rest::dropped;
  Policy policy{};
  Distillation distillation{};
  double filter = 0.0;  // 0: none
  std::uint64_t filter_seed = 0;
};

enum class Kind : std::int32_t { linear = LL_LINEAR, logits = LL_LOGITS };
enum class Call : std::int32_t { forward = LL_FORWARD, forward_backward = LL_FORWARD_BACKWARD, backward = LL_BACKWARD };

// Shapes, dtypes, call and budget, from which a plan is made; see ll_problem. DType::none: not wanted, or not given.
struct Problem {
  Kind kind = Kind::linear;
  Call call = Call::forward_backward;
  std::int64_t rows = 0;
  std::int64_t hidden = 0;
  std::int64_t vocab = 0;
  DType hidden_dtype = DType::none;
  DType weight_dtype = DType::none;
  DType logits_dtype = DType::none;
  DType grad_hidden_dtype = DType::none;
  DType grad_weight_dtype = DType::none;
  DType grad_logits_dtype = DType::none;
  bool accumulate_grad_hidden = false;
  bool accumulate_grad_weight = false;
  bool grad_weight_strided = false;
  bool in_place = false;
  std::uint64_t memory_budget = 0;  // bytes of workspace; 0: no limit
  DType bias_dtype = DType::none;
  DType soft_dtype = DType::none;
  DType teacher_hidden_dtype = DType::none;
  DType teacher_weight_dtype = DType::none;
  DType teacher_bias_dtype = DType::none;
  DType grad_bias_dtype = DType::none;
  std::int64_t topk = 0;
  std::int64_t teacher_hidden = 0;
  std::int64_t first_column = 0;  // a part of a vocabulary, when total_vocab > 0
  std::int64_t total_vocab = 0;
  std::uint64_t saved_bytes = 0;  // of Arguments::saved, from forward to backward; 0: none
  // An upper bound of the kept rows, to which a CUDA device's products shrink; 0: R. See ll_problem.
  std::int64_t most_kept_rows = 0;
  // Inputs that every run gets.
  bool class_weight = false;
  bool row_weight = false;
  bool row_temperature = false;
  bool keep_mask = false;
  bool logit_floor = false;
  bool topk_log = false;          // topk_probs are log-probabilities of a teacher
  bool entropy_gradient = false;  // grad_row_entropy may be given
  // Outputs that a run may ask for.
  bool entropy = false;
  bool argmax = false;  // and correct
  bool mean_logit = false;
  bool sum_p2 = false;
};

// What a call reads and writes; see ll_arguments. A default Tensor is "not given" or "not wanted".
struct Arguments {
  ConstTensor hidden{};   // X [R,H]
  ConstTensor weight{};   // W [V,H]
  ConstTensor logits{};   // z [R,V]
  ConstTensor targets{};  // y [R]
  Tensor grad_hidden{};   // dX [R,H]
  Tensor grad_weight{};   // dW [V,H]
  Tensor grad_logits{};   // D [R,V]
  Tensor row_loss{};      // [R] F32, as are the next two
  Tensor row_lse{};
  Tensor row_logprob{};
  Tensor stats{};  // [R,Plan::statistics()] F32: written by forward, read by backward
  double grad_loss = 1.0;
  ConstTensor grad_row_loss{};  // [R] F32
  ConstTensor lse{};            // [R] F32, backward of logits without stats
  ConstTensor bias{};           // b [V]
  ConstTensor class_weight{};   // [V] F32
  ConstTensor row_weight{};     // [R] F32
  ConstTensor row_temperature{};
  ConstTensor keep_mask{};     // [R,ceil(V/8)] U8, lowest bit first
  ConstTensor logit_floor{};   // [R] F32
  ConstTensor soft_targets{};  // [R,V]
  ConstTensor topk_ids{};      // [R,k]
  ConstTensor topk_probs{};    // [R,k] F32; their logarithms with Problem::topk_log
  ConstTensor teacher_hidden{};
  ConstTensor teacher_weight{};
  ConstTensor teacher_bias{};
  ConstTensor old_logprob{};  // [R] F32, of Policy, as the next two
  ConstTensor advantage{};
  ConstTensor ref_logprob{};
  ConstTensor normalizer{};  // [] or [1], F32 or F64
  Tensor row_entropy{};      // [R] F32
  Tensor row_argmax{};       // [R] I32 or I64
  Tensor row_correct{};      // [R] U8
  Tensor row_zloss{};        // [R] F32, as are the next two
  Tensor row_mean_logit{};
  Tensor row_log_sum_p2{};
  Tensor grad_bias{};          // db [V]
  ConstTensor grad_row_lse{};  // [R] F32, as are the next two
  ConstTensor grad_row_logprob{};
  ConstTensor grad_row_entropy{};
  Tensor saved{};                  // [Problem::saved_bytes] U8, aligned to 64: written by forward, read by backward
  ConstTensor grad_loss_factor{};  // [] or [1], F32 or F64: multiplies grad_loss
};

struct Result {
  double loss = 0.0;         // mean or sum; 0 with Reduction::none and after backward
  std::int64_t kept = 0;     // rows that are not ignored
  std::int64_t bad = 0;      // kept rows whose logits are all -inf or hold +inf or NaN: their loss is NaN
  std::int64_t correct = 0;  // kept rows whose target is the argmax, where Problem::argmax asks; else 0
  double filter_kept = 1.0;  // share of the gradient's entries that a filter did not make 0
  double filter_variance = 0.0;
};

// Where Plan::enqueue writes what Result holds: memory that the device can write. Null, or a default Tensor: not
// wanted.
struct Reports {
  Tensor loss{};  // [] or [1], F32 or F64
  std::int64_t* kept = nullptr;
  std::int64_t* bad = nullptr;
  std::int64_t* correct = nullptr;
  double* filter_kept = nullptr;
  double* filter_variance = nullptr;
};

namespace detail {
inline void require_matrix(const ConstTensor& tensor, const char* name) {
  if (!tensor) throw Error(LL_ERROR_INVALID_ARGUMENT, std::string(name) + ": not given; this call needs it");
  if (tensor.rank() != 2) {
    throw Error(LL_ERROR_INVALID_ARGUMENT,
                std::string(name) + ": rank " + std::to_string(tensor.rank()) + "; must be a matrix of rank 2");
  }
}

// What the operands of options make of a problem.
inline void add_options(Problem& problem, const Arguments& arguments) {
  const auto given = [](const ConstTensor& tensor) { return static_cast<bool>(tensor); };
  problem.bias_dtype = arguments.bias.dtype();
  problem.grad_bias_dtype = arguments.grad_bias.dtype();
  problem.soft_dtype = arguments.soft_targets.dtype();
  problem.teacher_hidden_dtype = arguments.teacher_hidden.dtype();
  problem.teacher_weight_dtype = arguments.teacher_weight.dtype();
  problem.teacher_bias_dtype = arguments.teacher_bias.dtype();
  problem.class_weight = given(arguments.class_weight);
  problem.row_weight = given(arguments.row_weight);
  problem.row_temperature = given(arguments.row_temperature);
  problem.keep_mask = given(arguments.keep_mask);
  problem.logit_floor = given(arguments.logit_floor);
  problem.entropy_gradient = given(arguments.grad_row_entropy);
  problem.entropy = given(arguments.row_entropy);
  problem.argmax = given(arguments.row_argmax) || given(arguments.row_correct);
  problem.mean_logit = given(arguments.row_mean_logit);
  problem.sum_p2 = given(arguments.row_log_sum_p2);
  if (given(arguments.topk_ids)) {
    require_matrix(arguments.topk_ids, "topk_ids");
    problem.topk = arguments.topk_ids.extent(1);
  }
  if (given(arguments.teacher_hidden)) {
    require_matrix(arguments.teacher_hidden, "teacher_hidden");
    problem.teacher_hidden = arguments.teacher_hidden.extent(1);
  }
}

// The kind of targets that these arguments give.
inline Targets targets_of(const Arguments& arguments) {
  if (arguments.teacher_hidden || arguments.teacher_weight) return Targets::teacher;
  if (arguments.topk_ids || arguments.topk_probs) return Targets::topk;
  return arguments.soft_targets ? Targets::soft : Targets::hard;
}
}  // namespace detail

// The problem that these arguments pose: kind linear unless logits are given; inputs and outputs are those that are
// given. Accumulation, budget, topk_log and parts of a vocabulary are the caller's to add.
inline Problem problem_of(const Arguments& arguments, Call call) {
  Problem problem;
  problem.call = call;
  problem.grad_hidden_dtype = arguments.grad_hidden.dtype();
  problem.grad_weight_dtype = arguments.grad_weight.dtype();
  problem.grad_logits_dtype = arguments.grad_logits.dtype();
  detail::add_options(problem, arguments);
  if (arguments.logits) {
    detail::require_matrix(arguments.logits, "logits");
    problem.kind = Kind::logits;
    problem.rows = arguments.logits.extent(0);
    problem.vocab = arguments.logits.extent(1);
    problem.logits_dtype = arguments.logits.dtype();
    problem.in_place = arguments.grad_logits && arguments.grad_logits.data() == arguments.logits.data();
    return problem;
  }
  detail::require_matrix(arguments.hidden, "hidden");
  detail::require_matrix(arguments.weight, "weight");
  problem.rows = arguments.hidden.extent(0);
  problem.hidden = arguments.hidden.extent(1);
  problem.vocab = arguments.weight.extent(0);
  problem.hidden_dtype = arguments.hidden.dtype();
  problem.weight_dtype = arguments.weight.dtype();
  problem.grad_weight_strided = arguments.grad_weight && arguments.grad_weight.rank() == 2 && problem.vocab > 1 &&
                                arguments.grad_weight.stride(0) != problem.hidden;
  return problem;
}

// ---- context --------------------------------------------------------------------------------------------------------

enum class Backend : std::int32_t { cpu = LL_BACKEND_CPU, reference = LL_BACKEND_REFERENCE, cuda = LL_BACKEND_CUDA };
enum class Format : std::int32_t { text = LL_TEXT, json = LL_JSON };

struct ContextOptions {
  Backend backend = Backend::cpu;
  std::int32_t threads = 0;                // 0: LOGITLESS_NUM_THREADS, or the CPUs this process may use
  ll_parallel_for parallel_for = nullptr;  // the caller's executor; null: a pool of the context's own
  void* parallel_for_user = nullptr;
  std::string cpu_target{};  // "": LOGITLESS_CPU_TARGET, or the best one; else scalar, avx2, avx512, avx512bf16, amx
  std::int32_t device = 0;   // of Backend::cuda, as the driver counts them
};

// Threads and a backend. Move-only; it must outlive its plans. Several threads may use one context: their calls queue.
class Context {
 public:
  explicit Context(const ContextOptions& options = {}) : backend_(options.backend) {
    ll_context_options raw;
    ll_context_options_init(&raw);
    raw.backend = static_cast<ll_backend>(options.backend);
    raw.threads = options.threads;
    raw.parallel_for = options.parallel_for;
    raw.parallel_for_user = options.parallel_for_user;
    raw.cpu_target = options.cpu_target.empty() ? nullptr : options.cpu_target.c_str();
    raw.device = options.device;
    ll_context* context = nullptr;
    detail::check(ll_context_create(&raw, &context));
    context_.reset(context);
  }

  std::string describe(Format format = Format::text) const {
    return detail::described([&](char* buffer, std::size_t capacity, std::size_t* length) {
      return ll_context_describe(context_.get(), static_cast<ll_format>(format), buffer, capacity, length);
    });
  }
  // CUDA: waits for the stream and throws the first thing, since the last time, that a call there could not refuse: a
  // target out of range, the mean of no row, more kept rows than promised. Other backends refuse at once.
  void check_status(void* stream = nullptr) { detail::check(ll_check_status(context_.get(), stream)); }

  Backend backend() const noexcept { return backend_; }
  ll_context* get() const noexcept { return context_.get(); }

 private:
  struct Destroy {
    void operator()(ll_context* context) const noexcept { ll_context_destroy(context); }
  };
  std::unique_ptr<ll_context, Destroy> context_;
  Backend backend_;
};

// The context of calls that name none: made at first use, one per process.
inline Context& default_context() {
  static Context context;
  return context;
}

// ---- workspace and plan ---------------------------------------------------------------------------------------------

// Memory with the alignment that plans ask for. Grows on request, never shrinks; contents are not kept.
class Workspace {
 public:
  Workspace() = default;
  explicit Workspace(std::size_t bytes) { reserve(bytes); }

  void reserve(std::size_t bytes) {
    if (bytes <= bytes_) return;
    memory_.reset();
    bytes_ = 0;
    memory_.reset(static_cast<std::byte*>(::operator new(bytes, alignment, std::nothrow)));
    if (!memory_) {
      throw Error(LL_ERROR_OUT_OF_MEMORY,
                  "workspace: " + std::to_string(bytes) + " bytes cannot be allocated; give a smaller memory_budget");
    }
    bytes_ = bytes;
  }
  void* data() const noexcept { return memory_.get(); }
  std::size_t size() const noexcept { return bytes_; }

 private:
  static constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(std::byte* memory) const noexcept { ::operator delete(memory, alignment); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t bytes_ = 0;
};

// How one problem runs on one context. Move-only; one thread at a time. On the host forward, forward_backward and
// backward return when the result is there; on a CUDA device enqueue is for all three.
class Plan {
 public:
  Plan(Context& context, const Problem& problem, const Options& options = {})
      : returns_loss_(options.reduction != Reduction::none && problem.call != Call::backward &&
                      problem.total_vocab == 0),
        counts_correct_(problem.argmax && problem.call != Call::backward &&
                        (options.targets == Targets::hard || options.distillation.hard_share > 0.0)),
        filters_(options.filter > 0.0),
        on_device_(context.backend() == Backend::cuda),
        call_(problem.call) {
    const ll_problem raw = raw_of(problem);
    const ll_options what = raw_of(options);
    ll_plan* plan = nullptr;
    detail::check(ll_plan_create(context.get(), &raw, &what, &plan));
    plan_.reset(plan);
  }

  std::size_t workspace_bytes() const noexcept { return ll_plan_workspace_bytes(plan_.get()); }
  // Columns of stats.
  std::int64_t statistics() const noexcept { return ll_plan_statistics(plan_.get()); }
  std::string describe(Format format = Format::text) const {
    return detail::described([&](char* buffer, std::size_t capacity, std::size_t* length) {
      return ll_plan_describe(plan_.get(), static_cast<ll_format>(format), buffer, capacity, length);
    });
  }

  // With the caller's memory: workspace_bytes() at least, aligned to 64.
  Result forward(const Arguments& arguments, void* workspace, std::size_t bytes) {
    return run(ll_forward, arguments, workspace, bytes);
  }
  Result forward_backward(const Arguments& arguments, void* workspace, std::size_t bytes) {
    return run(ll_forward_backward, arguments, workspace, bytes);
  }
  Result backward(const Arguments& arguments, void* workspace, std::size_t bytes) {
    return run(ll_backward, arguments, workspace, bytes);
  }
  // With a Workspace, which grows if it is too small (the only allocation).
  Result forward(const Arguments& arguments, Workspace& workspace) { return run(ll_forward, arguments, workspace); }
  Result forward_backward(const Arguments& arguments, Workspace& workspace) {
    return run(ll_forward_backward, arguments, workspace);
  }
  Result backward(const Arguments& arguments, Workspace& workspace) { return run(ll_backward, arguments, workspace); }

  // The plan's call on a cudaStream_t of the context's device: nothing is allocated and nothing waited for, so it may
  // be captured into a graph. Tensors (on_device), workspace and reports lie in the device's memory; what the call
  // cannot refuse there is Context::check_status' to tell. On the host it is the call itself, and stream is null.
  void enqueue(const Arguments& arguments, const Reports& reports, void* workspace, std::size_t bytes, void* stream) {
    run(call_ == Call::forward    ? ll_forward
        : call_ == Call::backward ? ll_backward
                                  : ll_forward_backward,
        arguments, reports, workspace, bytes, stream);
  }
  // What this plan's call reports, in the fields of a Result that may lie in a device's memory (its loss then wants
  // on_device): only addresses are taken.
  Reports reports_in(Result* result) const {
    Reports reports{.kept = &result->kept, .bad = &result->bad};
    if (returns_loss_) reports.loss = Tensor(&result->loss, Shape(1));
    if (counts_correct_) reports.correct = &result->correct;
    if (filters_) {
      reports.filter_kept = &result->filter_kept;
      reports.filter_variance = &result->filter_variance;
    }
    return reports;
  }

  ll_plan* get() const noexcept { return plan_.get(); }

 private:
  using Function = decltype(&ll_forward);

  static ll_problem raw_of(const Problem& problem) {
    ll_problem raw;
    ll_problem_init(&raw);
    raw.kind = static_cast<ll_kind>(problem.kind);
    raw.call = static_cast<ll_call>(problem.call);
    raw.rows = problem.rows;
    raw.hidden = problem.hidden;
    raw.vocab = problem.vocab;
    raw.hidden_dtype = static_cast<ll_dtype>(problem.hidden_dtype);
    raw.weight_dtype = static_cast<ll_dtype>(problem.weight_dtype);
    raw.logits_dtype = static_cast<ll_dtype>(problem.logits_dtype);
    raw.grad_hidden_dtype = static_cast<ll_dtype>(problem.grad_hidden_dtype);
    raw.grad_weight_dtype = static_cast<ll_dtype>(problem.grad_weight_dtype);
    raw.grad_logits_dtype = static_cast<ll_dtype>(problem.grad_logits_dtype);
    raw.flags = 0;
    if (problem.accumulate_grad_hidden) raw.flags |= LL_ACCUMULATE_GRAD_HIDDEN;
    if (problem.accumulate_grad_weight) raw.flags |= LL_ACCUMULATE_GRAD_WEIGHT;
    if (problem.grad_weight_strided) raw.flags |= LL_GRAD_WEIGHT_STRIDED;
    if (problem.in_place) raw.flags |= LL_IN_PLACE;
    raw.memory_budget = problem.memory_budget;
    raw.bias_dtype = static_cast<ll_dtype>(problem.bias_dtype);
    raw.soft_dtype = static_cast<ll_dtype>(problem.soft_dtype);
    raw.teacher_hidden_dtype = static_cast<ll_dtype>(problem.teacher_hidden_dtype);
    raw.teacher_weight_dtype = static_cast<ll_dtype>(problem.teacher_weight_dtype);
    raw.teacher_bias_dtype = static_cast<ll_dtype>(problem.teacher_bias_dtype);
    raw.grad_bias_dtype = static_cast<ll_dtype>(problem.grad_bias_dtype);
    raw.topk = problem.topk;
    raw.teacher_hidden = problem.teacher_hidden;
    raw.first_column = problem.first_column;
    raw.total_vocab = problem.total_vocab;
    raw.saved_bytes = problem.saved_bytes;
    raw.most_kept_rows = problem.most_kept_rows;
    raw.inputs = 0;
    if (problem.class_weight) raw.inputs |= LL_CLASS_WEIGHT;
    if (problem.row_weight) raw.inputs |= LL_ROW_WEIGHT;
    if (problem.row_temperature) raw.inputs |= LL_ROW_TEMPERATURE;
    if (problem.keep_mask) raw.inputs |= LL_KEEP_MASK;
    if (problem.logit_floor) raw.inputs |= LL_LOGIT_FLOOR;
    if (problem.topk_log) raw.inputs |= LL_TOPK_LOG;
    if (problem.entropy_gradient) raw.inputs |= LL_ENTROPY_GRADIENT;
    raw.outputs = 0;
    if (problem.entropy) raw.outputs |= LL_ENTROPY;
    if (problem.argmax) raw.outputs |= LL_ARGMAX;
    if (problem.mean_logit) raw.outputs |= LL_MEAN_LOGIT;
    if (problem.sum_p2) raw.outputs |= LL_SUM_P2;
    return raw;
  }

  static ll_options raw_of(const Options& options) {
    ll_options raw;
    ll_options_init(&raw);
    raw.reduction = static_cast<ll_reduction>(options.reduction);
    raw.smoothing = static_cast<ll_smoothing>(options.smoothing);
    raw.label_smoothing = options.label_smoothing;
    raw.ignore_index = options.ignore_index;
    raw.normalizer = options.normalizer;
    raw.on_empty = static_cast<ll_on_empty>(options.on_empty);
    raw.logit_scale = options.logit_scale;
    raw.softcap = options.softcap;
    raw.temperature = options.temperature;
    raw.z_loss = options.z_loss;
    raw.targets = static_cast<ll_targets>(options.targets);
    raw.rest = static_cast<ll_rest>(options.rest);
    raw.rule = options.policy.on ? LL_RULE_POLICY : 0;
    raw.clip_low = options.policy.clip_low;
    raw.clip_high = options.policy.clip_high;
    raw.kl_coef = options.policy.kl_coef;
    raw.entropy_coef = options.policy.entropy_coef;
    raw.divergence = static_cast<ll_divergence>(options.distillation.divergence);
    raw.beta = options.distillation.beta;
    raw.distill_temperature = options.distillation.temperature;
    raw.hard_share = options.distillation.hard_share;
    raw.temperature_squared = options.distillation.temperature_squared ? 1 : 0;
    raw.filter = options.filter;
    raw.filter_seed = options.filter_seed;
    return raw;
  }

  // All but what a Result or Reports hold.
  static ll_arguments raw_of(const Arguments& arguments) {
    ll_arguments raw;
    ll_arguments_init(&raw);
    raw.hidden = arguments.hidden.get();
    raw.weight = arguments.weight.get();
    raw.logits = arguments.logits.get();
    raw.targets = arguments.targets.get();
    raw.row_loss = arguments.row_loss.get();
    raw.row_lse = arguments.row_lse.get();
    raw.row_logprob = arguments.row_logprob.get();
    raw.stats = arguments.stats.get();
    raw.grad_hidden = arguments.grad_hidden.get();
    raw.grad_weight = arguments.grad_weight.get();
    raw.grad_logits = arguments.grad_logits.get();
    raw.grad_loss = arguments.grad_loss;
    raw.grad_row_loss = arguments.grad_row_loss.get();
    raw.lse = arguments.lse.get();
    raw.bias = arguments.bias.get();
    raw.class_weight = arguments.class_weight.get();
    raw.row_weight = arguments.row_weight.get();
    raw.row_temperature = arguments.row_temperature.get();
    raw.keep_mask = arguments.keep_mask.get();
    raw.logit_floor = arguments.logit_floor.get();
    raw.soft_targets = arguments.soft_targets.get();
    raw.topk_ids = arguments.topk_ids.get();
    raw.topk_probs = arguments.topk_probs.get();
    raw.teacher_hidden = arguments.teacher_hidden.get();
    raw.teacher_weight = arguments.teacher_weight.get();
    raw.teacher_bias = arguments.teacher_bias.get();
    raw.old_logprob = arguments.old_logprob.get();
    raw.advantage = arguments.advantage.get();
    raw.ref_logprob = arguments.ref_logprob.get();
    raw.normalizer = arguments.normalizer.get();
    raw.row_entropy = arguments.row_entropy.get();
    raw.row_argmax = arguments.row_argmax.get();
    raw.row_correct = arguments.row_correct.get();
    raw.row_zloss = arguments.row_zloss.get();
    raw.row_mean_logit = arguments.row_mean_logit.get();
    raw.row_log_sum_p2 = arguments.row_log_sum_p2.get();
    raw.grad_bias = arguments.grad_bias.get();
    raw.grad_row_lse = arguments.grad_row_lse.get();
    raw.grad_row_logprob = arguments.grad_row_logprob.get();
    raw.grad_row_entropy = arguments.grad_row_entropy.get();
    raw.saved = arguments.saved.get();
    raw.grad_loss_factor = arguments.grad_loss_factor.get();
    return raw;
  }

  void run(Function function, const Arguments& arguments, const Reports& reports, void* workspace, std::size_t bytes,
           void* stream) {
    ll_arguments raw = raw_of(arguments);
    raw.loss = reports.loss.get();
    raw.kept_rows = reports.kept;
    raw.bad_rows = reports.bad;
    raw.correct_rows = reports.correct;
    raw.filter_kept = reports.filter_kept;
    raw.filter_variance = reports.filter_variance;
    detail::check(function(plan_.get(), &raw, workspace, bytes, stream));
  }
  Result run(Function function, const Arguments& arguments, Workspace& workspace) {
    if (!on_device_) workspace.reserve(workspace_bytes());
    return run(function, arguments, workspace.data(), workspace.size());
  }
  Result run(Function function, const Arguments& arguments, void* workspace, std::size_t bytes) {
    if (on_device_) {
      throw Error(LL_ERROR_UNSUPPORTED,
                  "backend: cuda; results of a device lie in its memory, call Plan::enqueue with a stream, or use the "
                  "cpu backend");
    }
    Result result;
    run(function, arguments, reports_in(&result), workspace, bytes, nullptr);
    return result;
  }

  struct Destroy {
    void operator()(ll_plan* plan) const noexcept { ll_plan_destroy(plan); }
  };
  std::unique_ptr<ll_plan, Destroy> plan_;
  bool returns_loss_, counts_correct_, filters_, on_device_;
  Call call_;
};

// ---- one-line calls -------------------------------------------------------------------------------------------------

// Options, inputs and outputs of the one-line calls. Name what is wanted, in this order; the rest has its default. The
// kind of targets follows from what is given: soft_targets, topk_ids with topk_probs or topk_logprobs, a teacher's
// hidden and weight, or else the targets of the call, which may be {} where those of a row are not needed.
struct CrossEntropy {
  Reduction reduction = Reduction::mean;
  std::int64_t ignore_index = -100;
  double label_smoothing = 0.0;
  Smoothing smoothing = Smoothing::uniform;
  double normalizer = 0.0;
  OnEmpty on_empty = OnEmpty::error;
  double logit_scale = 1.0;
  double softcap = 0.0;
  double temperature = 1.0;
  double z_loss = 0.0;
  Rest rest = Rest::dropped;
  Policy policy{};
  Distillation distillation{};
  double filter = 0.0;
  std::uint64_t filter_seed = 0;
  // Inputs.
  ConstTensor bias{};
  ConstTensor class_weight{};
  ConstTensor row_weight{};
  ConstTensor row_temperature{};
  ConstTensor keep_mask{};
  ConstTensor logit_floor{};
  ConstTensor soft_targets{};
  ConstTensor topk_ids{};
  ConstTensor topk_probs{};     // or
  ConstTensor topk_logprobs{};  // of a teacher: the loss is forward KL from them
  ConstTensor teacher_hidden{};
  ConstTensor teacher_weight{};
  ConstTensor teacher_bias{};
  ConstTensor old_logprob{};
  ConstTensor advantage{};
  ConstTensor ref_logprob{};
  ConstTensor normalizer_tensor{};  // read when the call runs, before the number
  // Gradients and outputs.
  Tensor grad_hidden{};  // dX [R,H], hidden's dtype or F32
  Tensor grad_weight{};  // dW [V,H], weight's dtype or F32
  Tensor grad_logits{};  // D [R,V], the logits' dtype or F32; the logits themselves: written in place
  Tensor grad_bias{};    // db [V], the bias' dtype or F32
  bool accumulate_grad_hidden = false;
  bool accumulate_grad_weight = false;
  Tensor row_loss{};
  Tensor row_lse{};
  Tensor row_logprob{};
  Tensor row_entropy{};
  Tensor row_argmax{};
  Tensor row_correct{};
  Tensor row_zloss{};
  Tensor row_mean_logit{};
  Tensor row_log_sum_p2{};
  Tensor stats{};
  double grad_loss = 1.0;
  ConstTensor grad_row_loss{};
  ConstTensor grad_row_lse{};
  ConstTensor grad_row_logprob{};
  ConstTensor grad_row_entropy{};
  std::uint64_t memory_budget = 0;
};
using LinearCrossEntropy = CrossEntropy;

namespace detail {
// Plans, allocates the workspace, runs, frees it. `given` holds the operands that are not in `call`.
inline Result one_line(Context& context, const Arguments& given, const CrossEntropy& call) {
  if (call.topk_probs && call.topk_logprobs) {
    throw Error(LL_ERROR_INVALID_ARGUMENT, "topk_logprobs: given with topk_probs; give one of them");
  }
  const Arguments arguments{.hidden = given.hidden,
                            .weight = given.weight,
                            .logits = given.logits,
                            .targets = given.targets,
                            .grad_hidden = call.grad_hidden,
                            .grad_weight = call.grad_weight,
                            .grad_logits = call.grad_logits,
                            .row_loss = call.row_loss,
                            .row_lse = call.row_lse,
                            .row_logprob = call.row_logprob,
                            .stats = call.stats,
                            .grad_loss = call.grad_loss,
                            .grad_row_loss = call.grad_row_loss,
                            .bias = call.bias,
                            .class_weight = call.class_weight,
                            .row_weight = call.row_weight,
                            .row_temperature = call.row_temperature,
                            .keep_mask = call.keep_mask,
                            .logit_floor = call.logit_floor,
                            .soft_targets = call.soft_targets,
                            .topk_ids = call.topk_ids,
                            .topk_probs = call.topk_logprobs ? call.topk_logprobs : call.topk_probs,
                            .teacher_hidden = call.teacher_hidden,
                            .teacher_weight = call.teacher_weight,
                            .teacher_bias = call.teacher_bias,
                            .old_logprob = call.old_logprob,
                            .advantage = call.advantage,
                            .ref_logprob = call.ref_logprob,
                            .normalizer = call.normalizer_tensor,
                            .row_entropy = call.row_entropy,
                            .row_argmax = call.row_argmax,
                            .row_correct = call.row_correct,
                            .row_zloss = call.row_zloss,
                            .row_mean_logit = call.row_mean_logit,
                            .row_log_sum_p2 = call.row_log_sum_p2,
                            .grad_bias = call.grad_bias,
                            .grad_row_lse = call.grad_row_lse,
                            .grad_row_logprob = call.grad_row_logprob,
                            .grad_row_entropy = call.grad_row_entropy};
  const bool gradient = call.grad_hidden || call.grad_weight || call.grad_logits || call.grad_bias;
  Problem problem = problem_of(arguments, gradient ? Call::forward_backward : Call::forward);
  problem.topk_log = static_cast<bool>(call.topk_logprobs);
  problem.accumulate_grad_hidden = call.accumulate_grad_hidden;
  problem.accumulate_grad_weight = call.accumulate_grad_weight;
  problem.memory_budget = call.memory_budget;
  Plan plan(context, problem,
            {.reduction = call.reduction,
             .ignore_index = call.ignore_index,
             .label_smoothing = call.label_smoothing,
             .smoothing = call.smoothing,
             .normalizer = call.normalizer,
             .on_empty = call.on_empty,
             .logit_scale = call.logit_scale,
             .softcap = call.softcap,
             .temperature = call.temperature,
             .z_loss = call.z_loss,
             .targets = targets_of(arguments),
             .rest = call.rest,
             .policy = call.policy,
             .distillation = call.distillation,
             .filter = call.filter,
             .filter_seed = call.filter_seed});
  Workspace workspace;
  return gradient ? plan.forward_backward(arguments, workspace) : plan.forward(arguments, workspace);
}
}  // namespace detail

// X [R,H] · W [V,H] · y [R] -> loss, and the gradients that are named.
inline Result linear_cross_entropy(Context& context, ConstTensor hidden, ConstTensor weight, ConstTensor targets,
                                   const LinearCrossEntropy& call = {}) {
  return detail::one_line(context, {.hidden = hidden, .weight = weight, .targets = targets}, call);
}
inline Result linear_cross_entropy(ConstTensor hidden, ConstTensor weight, ConstTensor targets,
                                   const LinearCrossEntropy& call = {}) {
  return linear_cross_entropy(default_context(), hidden, weight, targets, call);
}

// z [R,V] · y [R] -> loss, and D when it is named.
inline Result cross_entropy(Context& context, ConstTensor logits, ConstTensor targets, const CrossEntropy& call = {}) {
  detail::require_matrix(logits, "logits");
  return detail::one_line(context, {.logits = logits, .targets = targets}, call);
}
inline Result cross_entropy(ConstTensor logits, ConstTensor targets, const CrossEntropy& call = {}) {
  return cross_entropy(default_context(), logits, targets, call);
}

// ---- helpers --------------------------------------------------------------------------------------------------------

// Where the sequences of a packed row of tokens end: at most one of the two tensors; see ll_next_token_targets.
struct Sequences {
  ConstTensor cu_seqlens{};
  ConstTensor document_ids{};
  std::int64_t ignore_index = -100;
};

// targets[i] = ids[i+1], or ignore_index where i is the last of its sequence.
inline void next_token_targets(ConstTensor ids, Tensor targets, const Sequences& sequences = {}) {
  detail::check(ll_next_token_targets(ids.get(), sequences.cu_seqlens.get(), sequences.document_ids.get(),
                                      sequences.ignore_index, targets.get()));
}

// stats of the parts of a vocabulary -> those of the whole; see ll_merge_statistics.
inline void merge_statistics(std::span<const ConstTensor> parts, Tensor merged) {
  std::vector<const ll_tensor*> raw;
  raw.reserve(parts.size());
  for (const ConstTensor& part : parts) raw.push_back(part.get());
  detail::check(ll_merge_statistics(raw.data(), static_cast<std::int64_t>(raw.size()), merged.get()));
}

// values *= factor, one number; on a CUDA device enqueued, and free where the factor is 1. See ll_scale.
inline void scale(Context& context, ConstTensor factor, Tensor values, void* stream = nullptr) {
  detail::check(ll_scale(context.get(), factor.get(), values.get(), stream));
}

// mean_probability [V] -> order [V]: classes from the most to the least probable; see ll_class_order.
inline void class_order(ConstTensor mean_probability, Tensor order) {
  detail::check(ll_class_order(mean_probability.get(), order.get()));
}

}  // namespace logitless
