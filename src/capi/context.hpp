// What an ll_context holds: the backend, the CPU target with the reason for its choice, and the threads.
#pragma once

#include <memory>
#include <string>

#include "capi/fork_lock.hpp"
#include "capi/status.hpp"
#include "cpu/cpu.hpp"
#include "cuda/cuda.hpp"

struct ll_context {
  ll_backend backend = LL_BACKEND_CPU;
  const logitless::cpu::Target* target = nullptr;
  std::string target_reason;  // who chose it
  int threads = 1;
  bool own_pool = true;
  std::unique_ptr<logitless::cpu::Executor> executor;  // CPU backend only
  logitless::cuda::DevicePointer device;               // CUDA backend only
  int device_index = 0;
  logitless::capi::ForkLock lock;  // calls of several threads queue for the executor
};

namespace logitless::capi {

inline const char* name_of_backend(ll_backend backend) {
  return backend == LL_BACKEND_CPU ? "cpu" : backend == LL_BACKEND_CUDA ? "cuda" : "reference";
}

// "text" and "json" of a format argument, refused otherwise.
inline bool wants_json(ll_format format) {
  if (format != LL_TEXT && format != LL_JSON) {
    refuse("format: " + number(std::int64_t{format}) + "; must be LL_TEXT (1) or LL_JSON (2)");
  }
  return format == LL_JSON;
}

}  // namespace logitless::capi
