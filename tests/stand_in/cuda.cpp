// src/cuda/cuda.hpp on the reference backend; see stand_in.hpp.
#include "cuda/cuda.hpp"

#include <cstdint>
#include <iterator>
#include <limits>
#include <string>

#include "contract/numeric.hpp"
#include "logitless/logitless.h"
#include "plan/row.hpp"
#include "reference/reference.hpp"
#include "stand_in/stand_in.hpp"

namespace logitless::cuda {
namespace {

using stand_in::here;
using stand_in::is_there;

constexpr int internal = LL_ERROR_INTERNAL;

constexpr View Operands::* views[] = {
    &Operands::x,
    &Operands::w,
    &Operands::z,
    &Operands::targets,
    &Operands::row_loss,
    &Operands::row_lse,
    &Operands::row_logprob,
    &Operands::stats,
    &Operands::row_entropy,
    &Operands::row_zloss,
    &Operands::row_mean_logit,
    &Operands::row_log_sum_p2,
    &Operands::row_argmax,
    &Operands::row_correct,
    &Operands::dx,
    &Operands::dw,
    &Operands::dz,
    &Operands::db,
    &Operands::grad_row_loss,
    &Operands::grad_row_lse,
    &Operands::grad_row_logprob,
    &Operands::grad_row_entropy,
    &Operands::lse,
    &Operands::bias,
    &Operands::class_weight,
    &Operands::row_weight,
    &Operands::row_temperature,
    &Operands::logit_floor,
    &Operands::keep_mask,
    &Operands::soft,
    &Operands::topk_ids,
    &Operands::topk_probs,
    &Operands::teacher_x,
    &Operands::teacher_w,
    &Operands::teacher_bias,
    &Operands::old_logprob,
    &Operands::advantage,
    &Operands::ref_logprob,
    &Operands::saved,
    &Operands::normalizer,
    &Operands::grad_loss_factor,
};
static_assert(sizeof(Operands) == sizeof(View) * std::size(views) + sizeof(double));

// The device's view as the host sees it; false for memory that is not the device's.
bool bring_here(View& view) {
  if (!view || view.rows == 0 || view.cols == 0) return true;
  if (!is_there(view.data)) return false;
  view.data = here(view.data);
  return true;
}

template <class T>
bool store(T* device, T value) {
  if (device == nullptr) return true;
  if (!is_there(device)) return false;
  *here(device) = value;
  return true;
}

std::string not_there(int* status) {
  *status = internal;
  return "stand-in: host memory where the device's must be";
}

}  // namespace

class Device {
 public:
  int index = 0, code = 0;
  std::string error;
};
class Prepared {
 public:
  Device& device;
  contract::Problem problem;
};

void DeviceDeleter::operator()(Device* device) const { delete device; }
void PreparedDeleter::operator()(Prepared* prepared) const { delete prepared; }

bool built() { return true; }
int device_count(std::string*) { return stand_in::devices; }

DevicePointer open_device(int index, std::string* why) {
  if (index < 0 || index >= stand_in::devices) {
    *why = "device " + std::to_string(index) + " of " + std::to_string(stand_in::devices) + " (numbers start at 0)";
    return nullptr;
  }
  DevicePointer device(new Device);
  device->index = index;
  return device;
}

plan::GpuMachine machine_of(const Device&) {
  return {.target = "sm_90", .major = 9, .multiprocessors = 132, .own_product = true};
}
std::string describe_device(const Device& device) { return "stand-in " + std::to_string(device.index); }

PreparedPointer prepare(Device& device, const plan::Plan& plan, std::string*) {
  return PreparedPointer(new Prepared{device, plan.problem});
}

std::string run(Prepared& prepared, const Operands& operands, const ResultViews& results, void*, void*, int* status) {
  Operands o = operands;
  for (View Operands::* const each : views) {
    if (!bring_here(o.*each)) return not_there(status);
  }
  Outcome outcome;
  int code = 0;
  std::string error = reference::run(prepared.problem, o, &outcome, &code);
  if (error.empty() && prepared.problem.most_kept > 0 && outcome.kept > prepared.problem.most_kept) {
    code = LL_ERROR_INVALID_ARGUMENT;
    error = "most_kept_rows: " + std::to_string(prepared.problem.most_kept) + ", but " + std::to_string(outcome.kept) +
            " rows are kept; the results are NaN";
  }
  if (!error.empty()) {
    if (prepared.device.error.empty()) {
      prepared.device.error = error;
      prepared.device.code = code;
    }
    outcome.loss = std::numeric_limits<double>::quiet_NaN();
  }
  View loss = results.loss;
  if (!bring_here(loss)) return not_there(status);
  if (loss.dtype == contract::DType::f64) *static_cast<double*>(loss.data) = outcome.loss;
  if (loss.dtype == contract::DType::f32) *static_cast<float*>(loss.data) = static_cast<float>(outcome.loss);
  bool const stored = store(results.kept, outcome.kept) && store(results.bad, outcome.bad) &&
                      store(results.correct, outcome.correct) && store(results.filter_kept, outcome.filter_kept) &&
                      store(results.filter_variance, outcome.filter_variance);
  return stored ? std::string() : not_there(status);
}

std::string scale(Device&, const View& factor, const View& values, void*, int* status) {
  View by = factor, to = values;
  if (!bring_here(by) || !bring_here(to)) return not_there(status);
  double const number = row::number_of(by, 1.0);
  for (std::int64_t i = 0; i < to.rows; ++i) {
    for (std::int64_t j = 0; j < to.cols; ++j) {
      char* const at = static_cast<char*>(to.data) + (i * to.row_stride + j) * contract::size_of(to.dtype);
      auto scaled = [number](float x) { return static_cast<float>(static_cast<double>(x) * number); };
      auto* const half = reinterpret_cast<std::uint16_t*>(at);
      if (to.dtype == contract::DType::f32) *reinterpret_cast<float*>(at) = scaled(*reinterpret_cast<float*>(at));
      if (to.dtype == contract::DType::bf16) *half = contract::float_to_bf16(scaled(contract::bf16_to_float(*half)));
      if (to.dtype == contract::DType::f16) *half = contract::float_to_f16(scaled(contract::f16_to_float(*half)));
    }
  }
  return {};
}

std::string check_status(Device& device, void*, int* status) {
  *status = device.code;
  std::string error;
  error.swap(device.error);
  device.code = 0;
  return error;
}

}  // namespace logitless::cuda
