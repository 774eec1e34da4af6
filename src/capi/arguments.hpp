// ll_arguments, checked against the plan's problem into Operands. Nothing behind it checks shapes or pointers again.
#pragma once

#include <cstdint>

#include "capi/views.hpp"
#include "logitless/logitless.h"
#include "plan/operands.hpp"

namespace logitless::capi {

// Operands, and the outputs that the backends do not know of. loss and counts may be absent.
struct CheckedArguments {
  Operands operands;
  View loss;
  std::int64_t* kept_rows = nullptr;
  std::int64_t* bad_rows = nullptr;
  std::int64_t* correct_rows = nullptr;
  double* filter_kept = nullptr;
  double* filter_variance = nullptr;
};

// Throws Failure; allocates only then. The workspace is checked by the caller but takes part in the overlap rule.
CheckedArguments checked_arguments(const ll_arguments* arguments, const contract::Problem& problem,
                                   const void* workspace, std::size_t workspace_bytes, Place place);

}  // namespace logitless::capi
