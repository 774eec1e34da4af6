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
#include <stdexcept>
#include <string>
#include <type_traits>

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
  i64 = LL_I64
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
  }
  return "?";
}

constexpr std::size_t size_of(DType type) noexcept {
  switch (type) {
    case DType::none: return 0;
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
};

// ---- options, problems, arguments -----------------------------------------------------------------------------------

enum class Reduction : std::int32_t { mean = LL_MEAN, sum = LL_SUM, none = LL_PER_ROW };
// uniform: alpha/V to every class (PyTorch). others: alpha/(V-1) to the other classes, 1 - alpha to the target
// (Megatron).
enum class Smoothing : std::int32_t { uniform = LL_SMOOTHING_UNIFORM, others = LL_SMOOTHING_OTHERS };
enum class OnEmpty : std::int32_t { error = LL_EMPTY_ERROR, nan = LL_EMPTY_NAN, zero = LL_EMPTY_ZERO };

// What is computed; see ll_options.
struct Options {
  Reduction reduction = Reduction::mean;
  std::int64_t ignore_index = -100;
  double label_smoothing = 0.0;
  Smoothing smoothing = Smoothing::uniform;
  double normalizer = 0.0;  // mean divides by it when > 0, else by the number of kept rows
  OnEmpty on_empty = OnEmpty::error;
};

enum class Kind : std::int32_t { linear = LL_LINEAR, logits = LL_LOGITS };
enum class Call : std::int32_t { forward = LL_FORWARD, forward_backward = LL_FORWARD_BACKWARD, backward = LL_BACKWARD };

// Shapes, dtypes, call and budget, from which a plan is made; see ll_problem. DType::none: not wanted.
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
  Tensor stats{};  // [R,4] F32: written by forward, read by backward
  double grad_loss = 1.0;
  ConstTensor grad_row_loss{};  // [R] F32
  ConstTensor lse{};            // [R] F32, backward of logits without stats
};

struct Result {
  double loss = 0.0;      // mean or sum; 0 with Reduction::none and after backward
  std::int64_t kept = 0;  // rows that are not ignored
  std::int64_t bad = 0;   // kept rows whose logits are all -inf or hold +inf or NaN: their loss is NaN
};

namespace detail {
inline void require_matrix(const ConstTensor& tensor, const char* name) {
  if (!tensor) throw Error(LL_ERROR_INVALID_ARGUMENT, std::string(name) + ": not given; this call needs it");
  if (tensor.rank() != 2) {
    throw Error(LL_ERROR_INVALID_ARGUMENT,
                std::string(name) + ": rank " + std::to_string(tensor.rank()) + "; must be a matrix of rank 2");
  }
}
}  // namespace detail

// The problem that these arguments pose: kind linear unless logits are given. Accumulation and budget are the caller's
// to add.
inline Problem problem_of(const Arguments& arguments, Call call) {
  Problem problem;
  problem.call = call;
  problem.grad_hidden_dtype = arguments.grad_hidden.dtype();
  problem.grad_weight_dtype = arguments.grad_weight.dtype();
  problem.grad_logits_dtype = arguments.grad_logits.dtype();
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
};

// Threads and a backend. Move-only; it must outlive its plans. Several threads may use one context: their calls queue.
class Context {
 public:
  explicit Context(const ContextOptions& options = {}) {
    ll_context_options raw;
    ll_context_options_init(&raw);
    raw.backend = static_cast<ll_backend>(options.backend);
    raw.threads = options.threads;
    raw.parallel_for = options.parallel_for;
    raw.parallel_for_user = options.parallel_for_user;
    raw.cpu_target = options.cpu_target.empty() ? nullptr : options.cpu_target.c_str();
    ll_context* context = nullptr;
    detail::check(ll_context_create(&raw, &context));
    context_.reset(context);
  }

  std::string describe(Format format = Format::text) const {
    return detail::described([&](char* buffer, std::size_t capacity, std::size_t* length) {
      return ll_context_describe(context_.get(), static_cast<ll_format>(format), buffer, capacity, length);
    });
  }
  ll_context* get() const noexcept { return context_.get(); }

 private:
  struct Destroy {
    void operator()(ll_context* context) const noexcept { ll_context_destroy(context); }
  };
  std::unique_ptr<ll_context, Destroy> context_;
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

// How one problem runs on one context. Move-only; one thread at a time.
class Plan {
 public:
  Plan(Context& context, const Problem& problem, const Options& options = {})
      : returns_loss_(options.reduction != Reduction::none && problem.call != Call::backward) {
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

    ll_options what;
    ll_options_init(&what);
    what.reduction = static_cast<ll_reduction>(options.reduction);
    what.smoothing = static_cast<ll_smoothing>(options.smoothing);
    what.label_smoothing = options.label_smoothing;
    what.ignore_index = options.ignore_index;
    what.normalizer = options.normalizer;
    what.on_empty = static_cast<ll_on_empty>(options.on_empty);

    ll_plan* plan = nullptr;
    detail::check(ll_plan_create(context.get(), &raw, &what, &plan));
    plan_.reset(plan);
  }

  std::size_t workspace_bytes() const noexcept { return ll_plan_workspace_bytes(plan_.get()); }
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

  ll_plan* get() const noexcept { return plan_.get(); }

 private:
  using Function = decltype(&ll_forward);

  Result run(Function function, const Arguments& arguments, Workspace& workspace) {
    workspace.reserve(workspace_bytes());
    return run(function, arguments, workspace.data(), workspace.size());
  }
  Result run(Function function, const Arguments& arguments, void* workspace, std::size_t bytes) {
    Result result;
    const Tensor loss(&result.loss, Shape(1));
    ll_arguments raw;
    ll_arguments_init(&raw);
    raw.hidden = arguments.hidden.get();
    raw.weight = arguments.weight.get();
    raw.logits = arguments.logits.get();
    raw.targets = arguments.targets.get();
    raw.loss = returns_loss_ ? loss.get() : nullptr;
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
    raw.kept_rows = &result.kept;
    raw.bad_rows = &result.bad;
    detail::check(function(plan_.get(), &raw, workspace, bytes, nullptr));
    return result;
  }

  struct Destroy {
    void operator()(ll_plan* plan) const noexcept { ll_plan_destroy(plan); }
  };
  std::unique_ptr<ll_plan, Destroy> plan_;
  bool returns_loss_;
};

// ---- one-line calls -------------------------------------------------------------------------------------------------

// Options and outputs of linear_cross_entropy. Name what is wanted, in this order; the rest has its default.
struct LinearCrossEntropy {
  Reduction reduction = Reduction::mean;
  std::int64_t ignore_index = -100;
  double label_smoothing = 0.0;
  Smoothing smoothing = Smoothing::uniform;
  double normalizer = 0.0;
  OnEmpty on_empty = OnEmpty::error;
  Tensor grad_hidden{};  // dX [R,H], hidden's dtype or F32
  Tensor grad_weight{};  // dW [V,H], weight's dtype or F32
  bool accumulate_grad_hidden = false;
  bool accumulate_grad_weight = false;
  Tensor row_loss{};
  Tensor row_lse{};
  Tensor row_logprob{};
  Tensor stats{};
  double grad_loss = 1.0;
  ConstTensor grad_row_loss{};
  std::uint64_t memory_budget = 0;
};

// X [R,H] · W [V,H] · y [R] -> loss, and the gradients that are named. Plans, allocates the workspace, runs, frees it.
inline Result linear_cross_entropy(Context& context, ConstTensor hidden, ConstTensor weight, ConstTensor targets,
                                   const LinearCrossEntropy& call = {}) {
  Arguments arguments{.hidden = hidden,
                      .weight = weight,
                      .targets = targets,
                      .grad_hidden = call.grad_hidden,
                      .grad_weight = call.grad_weight,
                      .row_loss = call.row_loss,
                      .row_lse = call.row_lse,
                      .row_logprob = call.row_logprob,
                      .stats = call.stats,
                      .grad_loss = call.grad_loss,
                      .grad_row_loss = call.grad_row_loss};
  const bool gradient = call.grad_hidden || call.grad_weight;
  Problem problem = problem_of(arguments, gradient ? Call::forward_backward : Call::forward);
  problem.accumulate_grad_hidden = call.accumulate_grad_hidden;
  problem.accumulate_grad_weight = call.accumulate_grad_weight;
  problem.memory_budget = call.memory_budget;
  Plan plan(context, problem,
            {.reduction = call.reduction,
             .ignore_index = call.ignore_index,
             .label_smoothing = call.label_smoothing,
             .smoothing = call.smoothing,
             .normalizer = call.normalizer,
             .on_empty = call.on_empty});
  Workspace workspace;
  return gradient ? plan.forward_backward(arguments, workspace) : plan.forward(arguments, workspace);
}
inline Result linear_cross_entropy(ConstTensor hidden, ConstTensor weight, ConstTensor targets,
                                   const LinearCrossEntropy& call = {}) {
  return linear_cross_entropy(default_context(), hidden, weight, targets, call);
}

// Options and outputs of cross_entropy.
struct CrossEntropy {
  Reduction reduction = Reduction::mean;
  std::int64_t ignore_index = -100;
  double label_smoothing = 0.0;
  Smoothing smoothing = Smoothing::uniform;
  double normalizer = 0.0;
  OnEmpty on_empty = OnEmpty::error;
  Tensor grad_logits{};  // D [R,V], the logits' dtype or F32; the logits themselves: written in place
  Tensor row_loss{};
  Tensor row_lse{};
  Tensor row_logprob{};
  Tensor stats{};
  double grad_loss = 1.0;
  ConstTensor grad_row_loss{};
  std::uint64_t memory_budget = 0;
};

// z [R,V] · y [R] -> loss, and D when it is named.
inline Result cross_entropy(Context& context, ConstTensor logits, ConstTensor targets, const CrossEntropy& call = {}) {
  Arguments arguments{.logits = logits,
                      .targets = targets,
                      .grad_logits = call.grad_logits,
                      .row_loss = call.row_loss,
                      .row_lse = call.row_lse,
                      .row_logprob = call.row_logprob,
                      .stats = call.stats,
                      .grad_loss = call.grad_loss,
                      .grad_row_loss = call.grad_row_loss};
  detail::require_matrix(logits, "logits");
  const bool gradient = static_cast<bool>(call.grad_logits);
  Problem problem = problem_of(arguments, gradient ? Call::forward_backward : Call::forward);
  problem.memory_budget = call.memory_budget;
  Plan plan(context, problem,
            {.reduction = call.reduction,
             .ignore_index = call.ignore_index,
             .label_smoothing = call.label_smoothing,
             .smoothing = call.smoothing,
             .normalizer = call.normalizer,
             .on_empty = call.on_empty});
  Workspace workspace;
  return gradient ? plan.forward_backward(arguments, workspace) : plan.forward(arguments, workspace);
}
inline Result cross_entropy(ConstTensor logits, ConstTensor targets, const CrossEntropy& call = {}) {
  return cross_entropy(default_context(), logits, targets, call);
}

}  // namespace logitless
