// Cross-entropy of given logits where nothing shapes them: what logits_rows.cuh's kernels are told of a row. The
// gradient's numbers are made in the kernel that holds the row's logits, between its sums and its gradient.
#include "cuda/device/logit.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/kernels/logits_rows.cuh"

namespace logitless::cuda {
namespace {

struct Functor {
  RowCall call;
  Rows rows_;

  __device__ bool kept(std::int64_t i) const { return rows_.flag[i] != kIgnored; }
  __device__ std::int64_t target(std::int64_t i) const { return rows_.target[i]; }
  __device__ void ignored(std::int64_t) const {}  // finish_rows writes their outputs
  // Statistics for finish_rows, which makes the losses in double; here, while the row waits on the chip, its gradient's
  // numbers in fp32 (double arithmetic in one thread cost 50 of 87 us at 2048 x 32000).
  __device__ RowGradient finish(std::int64_t i, float m, float r, float k, float z_y) const {
    contract::Loss const& l = call.p.loss;
    bool const spread = l.smoothing > 0;
    auto const classes = static_cast<float>(call.p.vocab);
    rows_.m[i] = m;
    rows_.r[i] = r;
    rows_.k[i] = spread ? k : 0.0F;
    rows_.z_y[i] = z_y;
    if (call.p.dz == contract::DType::none) return {};
    row::Finisher const finisher(call.p, call.o, call.topk);
    if (rows_.flag[i] == kNoTarget || finisher.silent(i)) return {0.0F, 0.0F, 0.0F, 0.0F, 1};
    auto const result = contract::finish(contract::RowStatistics<float>{m, r, spread ? k : 0.0F, classes}, z_y);
    if (result.bad) return {0.0F, 0.0F, 0.0F, 0.0F, 2};
    float const w_y = call.p.class_weight ? row::float_at(call.o.class_weight, rows_.target[i]) : 1.0F;
    auto const weights =
        contract::hard_weights(static_cast<float>(l.smoothing), classes, w_y, static_cast<float>(l.z_loss));
    auto at = [&](const View& view) { return view ? row::float_at(view, i) : 0.0F; };
    auto const g = static_cast<float>(row::upstream_of(call.p, call.o, call.scalars->reducer, i) * finisher.weight(i));
    auto const d = contract::coefficients_of(
        result, contract::Upstream<float>{g, at(call.o.grad_row_lse), at(call.o.grad_row_logprob), 0.0F}, weights);
    return {result.m, d.a * result.inv_s, d.c, d.at_target - d.c, 0};
  }
  __device__ RowGradient gradient(std::int64_t i) const {
    row::GradientRow const& by = rows_.gradient[i];
    row::Finisher const finisher(call.p, call.o, call.topk);
    if (rows_.flag[i] == kNoTarget) return {0.0F, 0.0F, 0.0F, 0.0F, 1};
    return numbers(by.m, static_cast<double>(by.a) * static_cast<double>(by.inverse_s), by.c, by.at_target,
                   rows_.flag[i] == kBad, finisher.silent(i));
  }
  __device__ static RowGradient numbers(float m, double scale, double c, double at_target, bool bad, bool silent) {
    if (silent) return {0.0F, 0.0F, 0.0F, 0.0F, 1};
    return {m, static_cast<float>(scale), static_cast<float>(c), static_cast<float>(at_target - c), bad ? 2 : 0};
  }
};

}  // namespace

bool plain_rows_serve(const contract::Problem& p) {
  return p.kind == contract::Kind::logits && p.loss.targets == contract::Targets::hard && !p.wants_full() &&
         !p.transforms() && !p.restricts() && !p.needs_logits() && !p.loss.policy.on;
}

void plain_rows(const RowCall& call, const Rows& rows, const PlainRows& shape, cudaStream_t stream) {
  LogitsRows const s{shape.z,
                     shape.d,
                     shape.z_dtype,
                     shape.d_dtype,
                     call.p.rows,
                     call.p.vocab,
                     shape.z_stride,
                     shape.d_stride,
                     call.p.loss.smoothing > 0,
                     shape.multiprocessors,
                     shape.major};
  Functor const functor{call, rows};
  if (call.p.call == contract::Call::backward)
    launch_logits_gradient(s, functor, stream);
  else
    launch_logits_rows(s, functor, stream);
}

}  // namespace logitless::cuda
