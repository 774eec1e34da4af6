// The body of the model: a neural n-gram (Bengio, Ducharme, Vincent, Jauvin 2003) with tied embeddings, and Adam.
//
//   C [R,nH] = the last n tokens' rows of E, scaled          A = gelu(C W1 + b1) [R,F]
//   X [R,H]  = layernorm(A W2 + b2 + newest token's row) * gain + bias        logits = X E^T, which is the head's work
// E [V,H] is embedding and head weight at once: its gradient buffer receives both. All in fp32. Parameters, gradients
// and Adam's moments are flat arrays of one layout, so saving, comparing and updating them needs no list of names.
// Cost per step: 6R(nHF + FH) flops, and 28 bytes of traffic per parameter for Adam.
#pragma once

#include <cstdint>
#include <vector>

#include "memory.hpp"
#include "products.hpp"

namespace tiny_lm {

struct Sizes {
  std::int64_t vocab = 0, hidden = 0, context = 0, inner = 0;  // V, H, n, F

  std::int64_t concatenated() const { return context * hidden; }
  // Offsets into the flat arrays.
  std::int64_t embedding() const { return 0; }
  std::int64_t w1() const { return vocab * hidden; }
  std::int64_t b1() const { return w1() + concatenated() * inner; }
  std::int64_t w2() const { return b1() + inner; }
  std::int64_t b2() const { return w2() + inner * hidden; }
  std::int64_t gain() const { return b2() + hidden; }
  std::int64_t bias() const { return gain() + hidden; }
  std::int64_t parameters() const { return bias() + hidden; }
};

// Parameters drawn from `seed`: the same on every call.
Vector<float> initial_parameters(const Sizes& sizes, std::uint64_t seed);

// Activations of one batch of at most R rows; shared by the two trainings, because steps do not overlap.
class Body {
 public:
  Body(const Sizes& sizes, std::int64_t rows, Products& products);

  // contexts [R,n] (oldest first) -> X [R,H]
  const float* forward(const float* parameters, const std::int32_t* contexts, std::int64_t rows);
  // dX [R,H], destroyed; gradients [all] are added into. After forward of the same batch.
  void backward(const float* parameters, const std::int32_t* contexts, std::int64_t rows, float* dx, float* gradients);

 private:
  Sizes sizes_;
  Products& products_;
  float scale_;
  Vector<float> c_, pre_, a_, sum_, normal_, x_, inverse_, da_, dc_;
};

struct Adam {
  Vector<float> m, v;
  explicit Adam(std::int64_t parameters) : m(static_cast<std::size_t>(parameters)), v(m.size()) {}
  // Step t = 1, 2, ...; sets the gradients to zero for the next one.
  void step(Pool& pool, std::int64_t t, float rate, Vector<float>& parameters, Vector<float>& gradients);
};

// Counter-based random numbers: the value at (seed, stream, index), so that resuming needs no state.
std::uint64_t random_bits(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);
double random_unit(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);  // in (0,1)

}  // namespace tiny_lm
