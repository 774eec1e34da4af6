// The README's example in C++, compiled and run as it stands there, and its results against the reference backend.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "logitless/logitless.hpp"

namespace {

TEST(Readme, Cpp) {
  constexpr std::int64_t R = 5, H = 16, V = 301;
  // region: cpp
  std::vector<float> x(R * H, 0.1f), w(V * H, 0.2f), dx(R * H), dw(V * H);  // X [R,H], W [V,H] and their gradients
  std::vector<std::int32_t> y(R, 7);                                        // y [R], -100: ignored
  y[2] = -100;
  logitless::Tensor X(x.data(), {R, H}), W(w.data(), {V, H}), dX(dx.data(), {R, H}), dW(dw.data(), {V, H});

  logitless::Result result = logitless::linear_cross_entropy(
      X, W, y, {.label_smoothing = 0.1, .grad_hidden = dX, .grad_weight = dW, .memory_budget = 64 << 20});
  std::printf("loss %.6f, rows kept %d\n", result.loss, static_cast<int>(result.kept));
  // endregion: cpp
  EXPECT_EQ(result.kept, R - 1);
  EXPECT_NEAR(result.loss, std::log(static_cast<double>(V)), 1e-5);  // equal logits
  EXPECT_EQ(dx[2 * H], 0.0f);
  EXPECT_LT(dw[7 * H], 0.0f);
  EXPECT_GT(dw[8 * H], 0.0f);
}

}  // namespace
