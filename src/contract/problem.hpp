// Options, validated once, as the plain structs that every planner and backend reads. Nothing here allocates.
//
// Symbols: R rows, H hidden, V vocabulary, X [R,H], W [V,H], z [R,V] logits, y [R] targets, D = dL/dz [R,V].
#pragma once

#include <cstdint>

namespace logitless::contract {

// Numbers equal those of the C ABI (ll_dtype).
enum class DType : std::int32_t { none = 0, f32 = 1, bf16 = 2, f16 = 3, f64 = 4, i32 = 5, i64 = 6 };

constexpr std::int64_t size_of(DType t) {
  switch (t) {
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

constexpr const char* name_of(DType t) {
  switch (t) {
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

constexpr bool is_half(DType t) { return t == DType::bf16 || t == DType::f16; }

enum class Kind : std::int32_t { linear = 1, logits = 2 };
enum class Call : std::int32_t { forward = 1, forward_backward = 2, backward = 3 };
enum class Reduction : std::int32_t { mean = 1, sum = 2, none = 3 };
enum class OnEmpty : std::int32_t { error = 1, nan = 2, zero = 3 };

// What is computed. `smoothing` is already in the uniform convention (others(a) = uniform(a V / (V - 1))), so it may
// exceed 1 a little.
struct Loss {
  Reduction reduction = Reduction::mean;
  OnEmpty on_empty = OnEmpty::error;
  std::int64_t ignore_index = -100;
  double smoothing = 0.0;
  double normalizer = 0.0;  // > 0: mean divides by it; else by the count of kept rows
};

// One call's shapes and dtypes. A dtype of none means "no such operand" or "not wanted".
struct Problem {
  Kind kind = Kind::linear;
  Call call = Call::forward_backward;
  std::int64_t rows = 0, hidden = 0, vocab = 0;
  DType x = DType::none, w = DType::none, z = DType::none;
  DType dx = DType::none, dw = DType::none, dz = DType::none;
  bool accumulate_dx = false, accumulate_dw = false;
  bool dw_contiguous = true;  // dW's rows are adjacent, so its bytes may hold exponentials until it is written
  bool in_place = false;      // D may be written over z
  std::uint64_t budget = 0;   // bytes of workspace; 0: no limit
  Loss loss;

  bool wants_gradient() const { return dx != DType::none || dw != DType::none || dz != DType::none; }
};

}  // namespace logitless::contract
