// The CUDA backend's face to the C ABI: devices, plans with their products resolved, and the run of a plan, which only
// enqueues. No CUDA header is needed to include this.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "plan/gpu.hpp"
#include "plan/operands.hpp"

namespace logitless::cuda {

class Device;
struct DeviceDeleter {
  void operator()(Device* device) const;
};
using DevicePointer = std::unique_ptr<Device, DeviceDeleter>;

// Whether this build has the backend at all.
bool built();
// Devices that the driver shows; 0 with *why where there is none, or no driver.
int device_count(std::string* why);
// Opens device `index`; null with *why. Allocates its status word.
DevicePointer open_device(int index, std::string* why);
plan::GpuMachine machine_of(const Device& device);
std::string describe_device(const Device& device);

// What a plan needs beside its numbers: algorithms, launches.
class Prepared;
struct PreparedDeleter {
  void operator()(Prepared* prepared) const;
};
using PreparedPointer = std::unique_ptr<Prepared, PreparedDeleter>;
// Null with *why where some product cannot be computed.
PreparedPointer prepare(Device& device, const plan::Plan& plan, std::string* why);

// Where a call's scalars go: memory that the device can write, or null.
struct ResultViews {
  View loss;
  std::int64_t *kept = nullptr, *bad = nullptr, *correct = nullptr;
  double *filter_kept = nullptr, *filter_variance = nullptr;
};

// Enqueues the call on `stream` (a cudaStream_t). Returns an empty string, or the error's text with *status set to an
// ll_status. workspace: plan.workspace_bytes of the device's memory, 64-byte aligned.
std::string run(Prepared& prepared, const Operands& operands, const ResultViews& results, void* workspace, void* stream,
                int* status);

// Enqueues values *= factor, a number in the device's memory.
std::string scale(Device& device, const View& factor, const View& values, void* stream, int* status);

// The first thing on this device that a call could not refuse, since the last time: waits for `stream`. Returns its
// text with *status set, or "".
std::string check_status(Device& device, void* stream, int* status);

}  // namespace logitless::cuda
