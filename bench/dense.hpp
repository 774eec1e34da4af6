// The unfused pipeline that the library is compared with: fp32 logits [R,V] in memory, three kernels forward (softmax,
// log, NLL) and three backward, each a pass over [R,V] arrays, and three products around them.
//
// Plain, but not slow: blocked and packed products on the best instructions of the machine (AMX or vdpbf16ps for bf16
// operands where the library's own target uses them, else fp32 FMA), vectorised kernels, all members of the team.
// It holds three arrays of R·V fp32 numbers; nothing is recomputed and ignored rows are multiplied out like others.
#pragma once

#include <cstdint>
#include <string>

#include "bench/team.hpp"
#include "logitless/logitless.hpp"

namespace logitless::bench {

// Instructions of the products.
enum class Unit : std::int32_t { sse2, avx2, avx512, dot_bf16, amx };
// The unit that a CPU target of the library multiplies with; the baseline gets the same.
Unit unit_of(const std::string& cpu_target, bool bf16_operands);
const char* name_of(Unit unit);

// A matrix of f32, bf16 or f16 for a product: element (i,j) at data[i * row_stride + j * col_stride].
struct Matrix {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0, cols = 0, row_stride = 0, col_stride = 1;

  Matrix transposed() const { return {data, dtype, cols, rows, col_stride, row_stride}; }
};

// C [M,N] = A [M,K] · B [K,N], fp32 sums. Units for bf16 round their operands to bf16 as they pack them.
class Product {
 public:
  Product(Team& team, Unit unit);
  void operator()(const Matrix& a, const Matrix& b, float* c);

 private:
  Team& team_;
  Unit unit_;
  Array packed_a_, packed_b_;
};

// One loss with its gradients, unfused. `seconds_*` are of the last run.
class Dense {
 public:
  Dense(Team& team, Unit unit, std::int64_t rows, std::int64_t vocab);

  // X [R,H], W [V,H] -> logits -> loss; then dX [R,H], dW [V,H] fp32 (null: forward only).
  // `low_precision`: the plain pipeline of that dtype, whose products write their results in it.
  double linear(const Matrix& x, const Matrix& w, const std::int32_t* targets, float* dx, float* dw,
                DType low_precision = DType::f32);
  // z [R,V] -> loss; then D [R,V] in z's dtype (null: forward only). D may be z.
  double logits(const Matrix& z, const std::int32_t* targets, void* d);

  double seconds_forward = 0, seconds_backward = 0, seconds_products = 0;
  static std::int64_t bytes(std::int64_t rows, std::int64_t vocab);

 private:
  double loss_forward(const std::int32_t* targets);
  void loss_backward(const std::int32_t* targets);

  Team& team_;
  Product product_;
  std::int64_t rows_, vocab_;
  Array z_, p_, logp_;  // [R,V] each; backward leaves D in z
};

// Rounds n numbers to `dtype` and back; and moves numbers between dtypes.
void round_to(Team& team, DType dtype, float* x, std::int64_t n);
void convert(Team& team, const void* from, DType from_type, void* to, DType to_type, std::int64_t n);

}  // namespace logitless::bench
