// Devices and the one entry to a plan's run; see cuda.hpp.
#include "cuda/device.hpp"

#include <cstdlib>

#include "cuda/kernels/kernels.hpp"

namespace logitless::cuda {
namespace {

std::string launched(int* status) {
  cudaError_t const launch = cudaGetLastError();
  if (launch == cudaSuccess) return {};
  *status = status_internal;
  return std::string("a kernel could not be launched: ") + cudaGetErrorString(launch);
}

}  // namespace

Device::~Device() {
  if (status == nullptr) return;
  CurrentDevice const current(index);
  cudaFree(status);
}

void DeviceDeleter::operator()(Device* device) const { delete device; }
void PreparedDeleter::operator()(Prepared* prepared) const { delete prepared; }

bool built() { return true; }

int device_count(std::string* why) {
  int count = 0;
  cudaError_t const error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return count;
  cudaGetLastError();  // leaves no error behind for the caller's own code
  *why = error == cudaSuccess ? "the driver shows no CUDA device" : cudaGetErrorString(error);
  return 0;
}

DevicePointer open_device(int index, std::string* why) {
  int const count = device_count(why);
  if (count == 0) return nullptr;
  if (index < 0 || index >= count) {
    *why = "device " + std::to_string(index) + " of " + std::to_string(count) + " (numbers start at 0)";
    return nullptr;
  }
  CurrentDevice const current(index);
  DevicePointer device(new Device);
  device->index = index;
  cudaDeviceProp properties{};
  if (cudaError_t const error = cudaGetDeviceProperties(&properties, index); error != cudaSuccess) {
    *why = cudaGetErrorString(error);
    return nullptr;
  }
  device->major = properties.major;
  device->minor = properties.minor;
  device->multiprocessors = properties.multiProcessorCount;
  device->memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  device->name = properties.name;
  device->target = "sm_" + std::to_string(properties.major) + std::to_string(properties.minor);
  if (const char* const forced = std::getenv("LOGITLESS_CUDA_TARGET"); forced != nullptr && *forced != '\0') {
    if (std::string(forced) != "sm_80" && forced != device->target) {
      *why = std::string("LOGITLESS_CUDA_TARGET: '") + forced + "'; must be sm_80 (the portable kernels) or " +
             device->target + ", this device's own";
      return nullptr;
    }
    device->target = forced;
  }
  if (device->major < 8) {
    *why = device->name + " has compute capability " + std::to_string(device->major) + "." +
           std::to_string(device->minor) + "; 8.0 or more is needed";
    return nullptr;
  }
  device->blas = Blas::open(why);
  if (device->blas == nullptr) return nullptr;
  if (cudaError_t const error = cudaMalloc(reinterpret_cast<void**>(&device->status), sizeof(Status));
      error != cudaSuccess) {
    *why = cudaGetErrorString(error);
    return nullptr;
  }
  // On a stream of its own, and waited for: callers' streams need not wait for the default one.
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) {
    error = cudaMemsetAsync(device->status, 0, sizeof(Status), stream);
    cudaError_t const waited = cudaStreamSynchronize(stream);
    if (error == cudaSuccess) error = waited;
    cudaStreamDestroy(stream);
  }
  if (error != cudaSuccess) {
    *why = cudaGetErrorString(error);
    return nullptr;
  }
  return device;
}

plan::GpuMachine machine_of(const Device& device) {
  plan::GpuMachine m;
  m.target = device.target.c_str();
  m.major = device.major;
  m.minor = device.minor;
  m.multiprocessors = device.multiprocessors;
  m.memory_bytes = device.memory_bytes;
  // LOGITLESS_CUDA_TARGET=sm_80 forces the portable path, as LOGITLESS_CPU_TARGET forces one of the CPU's.
  m.own_product = device.major == 9 && device.minor == 0 && device.target == "sm_90";
  if (device.major >= 9) {
    // H200: products 650 to 720 TFLOP/s under its power limit, copies 4.3 TB/s (docs/performance.md).
    m.half_tflops = 660.0;
    m.f32_tflops = 50.0;
    m.memory_gbytes = 4000.0;
  }
  return m;
}

std::string describe_device(const Device& device) {
  return device.name + " (" + device.target + ", " + std::to_string(device.multiprocessors) + " multiprocessors, " +
         std::to_string(device.memory_bytes >> 20) + " MiB; cuBLASLt " + Blas::description() + ")";
}

std::string run(Prepared& prepared, const Operands& operands, const ResultViews& results, void* workspace, void* stream,
                int* status) {
  auto const run_kind = prepared.plan.problem.kind == contract::Kind::linear ? run_linear : run_logits;
  CurrentDevice const current(prepared.device.index);
  cudaGetLastError();
  std::string error =
      run_kind(prepared, operands, results, static_cast<char*>(workspace), static_cast<cudaStream_t>(stream), status);
  if (!error.empty()) {
    if (*status == 0) *status = status_internal;
    return error;
  }
  return launched(status);
}

std::string scale(Device& device, const View& factor, const View& values, void* stream, int* status) {
  CurrentDevice const current(device.index);
  cudaGetLastError();
  scale_by(factor, values, device.multiprocessors, static_cast<cudaStream_t>(stream));
  return launched(status);
}

std::string check_status(Device& device, void* stream, int* status) {
  CurrentDevice const current(device.index);
  auto const queue = static_cast<cudaStream_t>(stream);
  Status record{};
  cudaError_t error = cudaMemcpyAsync(&record, device.status, sizeof record, cudaMemcpyDeviceToHost, queue);
  if (error == cudaSuccess) error = cudaMemsetAsync(device.status, 0, sizeof record, queue);
  if (error == cudaSuccess) error = cudaStreamSynchronize(queue);
  if (error != cudaSuccess) {
    *status = status_internal;
    return std::string("device ") + std::to_string(device.index) + ": " + cudaGetErrorString(error);
  }
  if (record.code == 0) return {};
  *status = record.code;
  auto const row = std::to_string(record.row), value = std::to_string(record.value);
  switch (record.what) {
    case kTargetOutOfRange:
      return "targets[" + row + "] is " + value + ": must be in [0, " + std::to_string(record.limit) +
             ") or ignore_index; that row's loss is NaN";
    case kMoreKept: return "most_kept_rows: " + value + ", but " + row + " rows are kept; the results are NaN";
    case kNothingKept:
      return "targets: no row is kept, or what they weigh is 0, so the mean is undefined and is NaN (choose on_empty "
             "nan or zero, reduction sum, or a normalizer)";
    case kTopkId:
      return "topk_ids: row " + row + " has " + value +
             ", which is no class or there a second time; that row's loss is NaN";
    default: return "an unknown status " + std::to_string(record.what);
  }
}

}  // namespace logitless::cuda
