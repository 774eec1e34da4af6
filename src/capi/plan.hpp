// What an ll_plan holds: the context it runs on, the checked problem, and how the CPU backend does it.
#pragma once

#include "capi/context.hpp"
#include "plan/plan.hpp"

struct ll_plan {
  ll_context* context = nullptr;
  logitless::contract::Problem problem;
  logitless::plan::Plan plan;                 // CPU and CUDA; the reference has no dials and no workspace
  logitless::cuda::PreparedPointer prepared;  // CUDA
};
