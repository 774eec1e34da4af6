// Cross-entropy of given logits on a CUDA device: z [R,V], y [R] -> loss, D [R,V], apart or over z.
#include "cuda/device.hpp"
#include "cuda/kernels/kernels.hpp"

namespace logitless::cuda {

using contract::Call;
using contract::DType;

std::string run_logits(Prepared& prepared, const Operands& o, const ResultViews& results, char* workspace,
                       cudaStream_t stream, int* status) {
  plan::Plan const& plan = prepared.plan;
  contract::Problem const& p = plan.problem;
  if (p.rows > 0 && (o.z.col_stride != 1 && p.vocab > 1)) {
    *status = status_invalid;
    return "logits: stride[1] is " + std::to_string(o.z.col_stride) +
           ": classes must be adjacent (1); make it contiguous";
  }
  auto buffer = [&](const char* name) {
    plan::Buffer const* const b = plan.find(name);
    return b == nullptr ? nullptr : workspace + b->offset;
  };
  Rows const rows = row_arrays(plan, workspace, p.rows);
  auto* const ids = reinterpret_cast<std::int64_t*>(buffer("topk_ids"));
  auto* const values = reinterpret_cast<float*>(buffer("topk_values"));
  auto* const other = reinterpret_cast<float*>(buffer("topk_other"));
  RowCall const call{p, o, {ids, values, other}, reinterpret_cast<Scalars*>(buffer("scalars")), prepared.device.status};
  Block const block{0, p.rows, 0, p.vocab, o.z.data, p.z, o.z.row_stride, true, false, nullptr, 0};
  prepare_rows(call, rows, stream);
  if (ids != nullptr) prepare_topk(call, ids, values, other, rows, stream);
  bool const gradient = p.dz != DType::none;
  Results const to{results.loss.data, results.loss.dtype,  results.kept,           results.bad,
                   results.correct,   results.filter_kept, results.filter_variance};
  if (plain_rows_serve(p)) {
    PlainRows const shape{o.z.data,
                          o.dz.data,
                          p.z,
                          gradient ? p.dz : p.z,
                          o.z.row_stride,
                          o.dz.row_stride,
                          prepared.device.multiprocessors,
                          prepared.device.target == "sm_80" ? 8 : prepared.device.major};
    bool const backward = p.call == Call::backward;
    if (backward) finish_rows(call, rows, {gradient, false, false}, stream);
    plain_rows(call, rows, shape, stream);
    if (!backward) finish_rows(call, rows, {false, false, false}, stream);
    reduce_rows(call, rows, to, false, stream);
    return {};
  }
  if (p.call != Call::backward) {
    row_statistics(call, rows, block, true, false, {nullptr, 0}, stream);
    if (p.pairs()) {
      pair_statistics(call, rows, block, true, stream);
      finish_pairs(call, rows, stream);
    }
  }
  finish_rows(call, rows, {gradient, false, false}, stream);
  if (gradient) row_gradients(call, rows, block, o.dz.data, p.dz, o.dz.row_stride, stream);
  reduce_rows(call, rows, to, gradient && p.loss.filter > 0, stream);
  return {};
}

}  // namespace logitless::cuda
