// ll_scale: values *= factor on the context's backend. One read and one write of values, or neither.
#include <algorithm>
#include <mutex>

#include "capi/context.hpp"
#include "capi/views.hpp"
#include "contract/numeric.hpp"
#include "plan/row.hpp"

namespace logitless::capi {
namespace {

constexpr std::int64_t kPiece = std::int64_t{1} << 16;  // elements

template <class T, class Load, class Store>
void scale_row(void* row, std::int64_t columns, double by, Load load, Store store) {
  auto* const values = static_cast<T*>(row);
  for (std::int64_t j = 0; j < columns; ++j) values[j] = store(static_cast<double>(load(values[j])) * by);
}

void scale_row(const View& v, std::int64_t i, double by) {
  char* const row = static_cast<char*>(v.data) + i * v.row_stride * contract::size_of(v.dtype);
  const auto narrow = [](double x) { return static_cast<float>(x); };
  const auto same = [](auto x) { return x; };
  switch (v.dtype) {
    case DType::bf16:
      return scale_row<std::uint16_t>(row, v.cols, by, contract::bf16_to_float,
                                      [&](double x) { return contract::float_to_bf16(narrow(x)); });
    case DType::f16:
      return scale_row<std::uint16_t>(row, v.cols, by, contract::f16_to_float,
                                      [&](double x) { return contract::float_to_f16(narrow(x)); });
    case DType::f32: return scale_row<float>(row, v.cols, by, same, narrow);
    default: return scale_row<double>(row, v.cols, by, same, same);
  }
}

// Pieces of rows in parallel.
void scale_on_host(ll_context& context, double by, const View& v) {
  if (by == 1.0 || v.rows == 0 || v.cols == 0) return;
  struct Job {
    View v;
    double by;
    std::int64_t pieces;  // of a row
  } job{v, by, (v.cols + kPiece - 1) / kPiece};
  const auto body = [](void* user, std::int64_t task) {
    const Job& of = *static_cast<const Job*>(user);
    const std::int64_t first = task % of.pieces * kPiece;
    View piece = of.v;
    piece.data = static_cast<char*>(piece.data) + first * contract::size_of(piece.dtype);
    piece.cols = std::min(kPiece, of.v.cols - first);
    scale_row(piece, task / of.pieces, of.by);
  };
  const std::int64_t tasks = v.rows * job.pieces;
  if (context.executor == nullptr) {
    for (std::int64_t task = 0; task < tasks; ++task) body(&job, task);
    return;
  }
  const std::lock_guard queue(context.lock);
  context.executor->parallel_for(tasks, body, &job);
}

View view_of(Checker& check, const ll_tensor* values) {
  const std::initializer_list<DType> floats = {DType::f32, DType::bf16, DType::f16, DType::f64};
  if (values == nullptr) refuse("values: null; must be a tensor of floats");
  if (values->ndim == 2) return check.matrix("values", values, Role::output, {values->shape[1]}, floats);
  View v = check.vector("values", values, Role::output, floats);
  if (v.rows > 1 && v.row_stride != 1) {
    refuse("values: stride " + number(v.row_stride) + "; must be 1, or give a matrix whose columns are adjacent");
  }
  return {v.data, v.dtype, 1, v.rows, v.rows, 1};
}

}  // namespace
}  // namespace logitless::capi

using namespace logitless::capi;
using namespace logitless;

ll_status ll_scale(ll_context* context, const ll_tensor* factor, const ll_tensor* values, void* stream) noexcept {
  return guarded([&] {
    if (context == nullptr) refuse("context: null; must be a context made by ll_context_create");
    const bool on_device = context->backend == LL_BACKEND_CUDA;
    if (stream != nullptr && !on_device)
      refuse("stream: " + address(stream) + "; must be null, this backend has no streams");
    if (factor == nullptr) refuse("factor: null; must be a tensor of one number");
    Regions regions;
    Checker check(regions, {on_device ? LL_DEVICE_CUDA : LL_DEVICE_CPU, context->device_index});
    const View by = check.scalar("factor", factor, Role::input, {DType::f32, DType::f64});
    const View to = view_of(check, values);
    regions.check(false);
    if (!on_device) {
      scale_on_host(*context, row::number_of(by, 1.0), to);
      return;
    }
    if (to.dtype == DType::f64) refuse("values: dtype f64; must be f32, bf16 or f16 on a CUDA device");
    int status = LL_OK;
    std::string error = cuda::scale(*context->device, by, to, stream, &status);
    if (!error.empty()) fail(status == LL_OK ? LL_ERROR_INTERNAL : status, std::move(error));
  });
}
