// The contract compiles for the device: one thread takes logits in, finishes its row and leaves D. Compiled by ./test:
// by clang without a CUDA toolkit, and by nvcc where there is one. Nothing runs it yet.
#include "contract/coefficients.hpp"

namespace contract = logitless::contract;

// z [V] logits of one row, y its target -> d [V], loss.
template <class F>
__global__ void row(const F* z, int vocab, int y, F g, F alpha, F* d, F* loss) {
  auto s = contract::RowStatistics<F>::identity();
  for (int j = 0; j < vocab; ++j) s = j == y ? contract::absorb_target(s, z[j]) : contract::absorb(s, z[j]);
  auto const result = contract::finish(s, z[y]);
  auto const weights = contract::hard_weights(alpha, F(vocab), F(1), F(0));
  *loss = contract::loss_of(result, weights);
  auto const c = contract::coefficients_of(result, contract::Upstream<F>{g, F(0), F(0), F(0)}, weights);
  for (int j = 0; j < vocab; ++j)
    d[j] = contract::element(contract::exp2_of(contract::exponent(z[j], result.m)), c.a * result.inv_s, c.c);
  d[y] = c.at_target - c.c;
}

template __global__ void row<float>(const float*, int, int, float, float, float*, float*);
template __global__ void row<double>(const double*, int, int, double, double, double*, double*);

__global__ void round_trip(const float* x, unsigned short* halves, float* back) {
  halves[0] = contract::float_to_bf16(x[0]);
  halves[1] = contract::float_to_f16(x[1]);
  back[0] = contract::bf16_to_float(halves[0]) + contract::exp2_polynomial(x[2]);
  back[1] = contract::f16_to_float(halves[1]);
}
