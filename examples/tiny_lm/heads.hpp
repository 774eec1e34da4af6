// The model's head in two ways: with Logitless, and with the dense logits of the classical three kernels.
//
//   X [R,H] · W [V,H] · y [R]  ->  loss, dX [R,H] written, dW [V,H] added into the caller's fp32 buffer
// A target of `ignored` drops its row (evaluate only). With bf16 operands both heads first round X and W to bf16;
// sums, gradients and W's master copy stay fp32.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "products.hpp"

namespace tiny_lm {

inline constexpr std::int32_t ignored = -100;

struct HeadShape {
  std::int64_t rows = 0, hidden = 0, vocab = 0;  // R, H, V
};

// Of the rows that are not ignored.
struct Evaluated {
  double loss = 0, entropy = 0;  // sums; the loss is the cross-entropy alone, of the capped logits
  std::int64_t correct = 0;      // rows whose target has the largest logit
};

// What both heads train on: the loss's options, 0: none.
struct LossOptions {
  double smoothing = 0, z_loss = 0, softcap = 0;
};

class Head {
 public:
  virtual ~Head() = default;
  // Mean loss of R rows and its gradients.
  virtual double train(const float* x, const float* w, const std::int32_t* y, float* dx, float* dw) = 0;
  // R rows are given.
  virtual Evaluated evaluate(const float* x, const float* w, const std::int32_t* y) = 0;
  // Bytes that train() needs beside its arguments.
  virtual std::int64_t extra_bytes() const = 0;
  // Of the last train(): seconds inside matrix products, where the head can tell (else 0), and flops it multiplied.
  virtual double product_seconds() const { return 0; }
  virtual double product_flops() const = 0;
};

// Keeps z, p and log p as [R,V] arrays, with its products by `products`. Does not use Logitless.
std::unique_ptr<Head> make_dense_head(const HeadShape& shape, bool bf16, const LossOptions& loss, Products& products);

struct LogitlessSettings {
  std::uint64_t budget = 0;  // bytes of workspace; 0: no limit
  int threads = 1;
  LossOptions loss;
};
std::unique_ptr<Head> make_logitless_head(const HeadShape& shape, bool bf16, Pool& pool,
                                          const LogitlessSettings& settings);

// What the library says of the plan of train(): its two dials, its flops in units of RHV, and the instruction set.
struct PlanSummary {
  std::int64_t chunk = 0;  // C
  double kept = 0;         // f
  double rhv = 0;
  std::string target;
};
PlanSummary summary_of(const Head& logitless_head);

// Loss and gradients of the same rows by the library's double-precision reference, from double operands to double
// gradients: what both heads are measured against. Slow: for a few rows.
struct ReferenceGradients {
  double loss = 0;
  std::vector<double> dx, dw;  // [R,H], [V,H]
};
ReferenceGradients reference_gradients(const HeadShape& shape, bool bf16, const LossOptions& loss, const float* x,
                                       const float* w, const std::int32_t* y);

}  // namespace tiny_lm
