// Cross-entropy of given logits where nothing shapes them: what logits_rows.cuh's kernels are told of a row. The O(1)
// arithmetic of a row runs in the kernel that holds its logits, between its sums and its gradient.
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
  __device__ void ignored(std::int64_t i) const {
    if (call.p.call != contract::Call::backward) row::put_ignored(call.o, i);
  }
  __device__ RowGradient finish(std::int64_t i, float m, float r, float k, float z_y) const {
    row::Finisher const finisher(call.p, call.o, call.topk);
    bool const no_target = rows_.flag[i] == kNoTarget;
    row::Numbers v;
    v.m = no_target ? NAN : m;
    v.r = r;
    v.z_y = z_y;
    v.k = call.p.loss.smoothing > 0 ? k : 0.0F;
    v.n = static_cast<float>(call.p.vocab);
    bool const gradient = call.p.dz != contract::DType::none;
    row::Outcome const out =
        finisher.finish(i, no_target ? 0 : rows_.target[i], v, call.scalars->reducer, gradient, nullptr);
    rows_.loss[i] = out.loss;
    if (no_target) return {0.0F, 0.0F, 0.0F, 0.0F, 1};
    if (out.result.bad) rows_.flag[i] = kBad;
    return numbers(i, static_cast<float>(out.result.m), out.d.a * out.result.inv_s, out.d.c, out.d.at_target,
                   out.result.bad, finisher.silent(i));
  }
  __device__ RowGradient gradient(std::int64_t i) const {
    row::GradientRow const& by = rows_.gradient[i];
    row::Finisher const finisher(call.p, call.o, call.topk);
    if (rows_.flag[i] == kNoTarget) return {0.0F, 0.0F, 0.0F, 0.0F, 1};
    return numbers(i, by.m, static_cast<double>(by.a) * static_cast<double>(by.inverse_s), by.c, by.at_target,
                   rows_.flag[i] == kBad, finisher.silent(i));
  }
  __device__ static RowGradient numbers(std::int64_t, float m, double scale, double c, double at_target, bool bad,
                                        bool silent) {
    if (silent) return {0.0F, 0.0F, 0.0F, 0.0F, 1};
    return {m, static_cast<float>(scale), static_cast<float>(c), static_cast<float>(at_target - c), bad ? 2 : 0};
  }
};

}  // namespace

bool plain_rows_serve(const contract::Problem& p) {
  return p.kind == contract::Kind::logits && p.loss.targets == contract::Targets::hard && !p.wants_full() &&
         !p.transforms() && !p.restricts() && !p.needs_logits();
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
