// A consumer in C++: loss and gradients of X [2,2] on W [3,2]; the gradient's rows must sum to what the definition
// says: sum_j D_ij = 0, hence sum_j dW_j = 0. Prints the version.
#include <cmath>
#include <cstdio>
#include <exception>
#include <logitless/logitless.hpp>
#include <vector>

int main() try {
  const std::vector<float> hidden{0.5f, -1.0f, 2.0f, 0.25f}, weight{1.0f, 0.5f, -0.5f, 2.0f, 0.25f, -1.5f};
  const std::vector<int> target{2, 0};
  std::vector<float> grad_weight(6);
  const auto result = logitless::linear_cross_entropy({hidden.data(), {2, 2}}, {weight.data(), {3, 2}}, target,
                                                      {.grad_weight = logitless::Tensor(grad_weight.data(), {3, 2})});

  double expected = 0.0;
  for (int i = 0; i < 2; ++i) {
    double sum = 0.0, at_target = 0.0;
    for (int j = 0; j < 3; ++j) {
      const double z = double(hidden[2 * i]) * weight[2 * j] + double(hidden[2 * i + 1]) * weight[2 * j + 1];
      sum += std::exp(z);
      if (j == target[i]) at_target = z;
    }
    expected += (std::log(sum) - at_target) / 2.0;
  }
  const float column0 = grad_weight[0] + grad_weight[2] + grad_weight[4];
  const float column1 = grad_weight[1] + grad_weight[3] + grad_weight[5];
  if (!(std::abs(result.loss - expected) < 1e-6 && std::abs(column0) < 1e-6f && std::abs(column1) < 1e-6f &&
        std::abs(grad_weight[0]) > 1e-3f)) {
    std::fprintf(stderr, "loss %.9g, expected %.9g; sums of dW %g %g\n", result.loss, expected, column0, column1);
    return 1;
  }
  std::printf("%s\n", logitless::version());
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
