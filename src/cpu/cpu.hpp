// The CPU backend's face to the C ABI: targets, thread pool, and the run of a plan.
#pragma once

#include <cstdint>
#include <string>

#include "plan/operands.hpp"
#include "plan/plan.hpp"

namespace logitless::cpu {

struct Target;  // an instruction set with its kernels (targets/*.cpp), immutable

// All targets, in order of preference from least to best; count of them.
const Target* const* all_targets(int* count);
const char* target_name(const Target& target);
// Whether this machine can run it; if not, *why names the missing feature.
bool target_supported(const Target& target, const char** why);
// By name ("scalar", "avx2", "avx512", "avx512bf16", "amx"); null if unknown.
const Target* find_target(const char* name);
// The table's choice for this machine: features and family, never a measurement.
const Target& best_target();
// Model name of the processor and the features that targets ask for.
std::string describe_machine();

plan::Machine machine_of(const Target& target, int threads);

// parallel_for: body(user, i) for i in [0, tasks); returns when all are done.
struct Executor {
  virtual ~Executor() = default;
  virtual void parallel_for(std::int64_t tasks, void (*body)(void*, std::int64_t), void* user) = 0;
  virtual int threads() const = 0;
};

// Runs a plan. Returns an empty string, or the error's text with *status set to an ll_status.
// Targets are checked before anything is written. workspace: plan.workspace_bytes, 64-byte aligned.
std::string run(const plan::Plan& plan, const Target& target, Executor& executor, const Operands& operands,
                void* workspace, Outcome* outcome, int* status);

}  // namespace logitless::cpu
