// The functions of CUDA's runtime that cli/device calls, on the stand-in's memory: see stand_in.hpp. A copy in the
// wrong direction, or of more than an allocation holds, is an error, as is a read of what was freed.
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>

#include "stand_in/stand_in.hpp"

namespace {

using stand_in::here;
using stand_in::is_there;

std::map<std::uintptr_t, std::size_t>& allocations() {
  static std::map<std::uintptr_t, std::size_t> map;
  return map;
}

bool holds(const void* device, std::size_t bytes) {
  auto const address = reinterpret_cast<std::uintptr_t>(device);
  auto after = allocations().upper_bound(address);
  if (!is_there(device) || after == allocations().begin()) return false;
  --after;
  return address + bytes <= after->first + after->second;
}

double* time_of(cudaEvent_t event) { return reinterpret_cast<double*>(event); }

}  // namespace

extern "C" {

cudaError_t cudaSetDevice(int device) {
  return device >= 0 && device < stand_in::devices ? cudaSuccess : cudaErrorInvalidDevice;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the stand-in"; }

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  if (bytes > std::size_t{1} << 30) return cudaErrorMemoryAllocation;
  void* const host = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(host, 0xff, bytes);  // NaN, until something is written
  *memory = stand_in::there(host);
  allocations()[reinterpret_cast<std::uintptr_t>(*memory)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  if (allocations().erase(reinterpret_cast<std::uintptr_t>(memory)) == 0) return cudaErrorInvalidValue;
  std::free(here(memory));
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = std::size_t{1} << 30;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  bool const up = kind == cudaMemcpyHostToDevice, down = kind == cudaMemcpyDeviceToHost;
  if (is_there(to) == down || is_there(from) == up) return cudaErrorInvalidMemcpyDirection;
  if ((is_there(to) && !holds(to, bytes)) || (is_there(from) && !holds(from, bytes))) return cudaErrorInvalidValue;
  std::memcpy(here(to), here(from), bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  if (!holds(to, bytes)) return cudaErrorInvalidValue;
  std::memset(here(to), value, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(new int);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<int*>(stream);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(new double(0.0));
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete time_of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *time_of(event) = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
  *milliseconds = static_cast<float>(1e3 * (*time_of(stop) - *time_of(start)));
  return cudaSuccess;
}

}  // extern "C"
