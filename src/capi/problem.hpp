// ll_problem and ll_options, checked once into the contract's immutable Problem; nothing behind it checks them again.
#pragma once

#include "contract/problem.hpp"
#include "logitless/logitless.h"

namespace logitless::capi {

// Throws Failure. `backend` decides whether f64 operands are allowed.
contract::Problem checked_problem(const ll_problem* problem, const ll_options* options, ll_backend backend);

// The dtype's name in messages; any number is allowed.
const char* name_of_dtype(ll_dtype dtype);

}  // namespace logitless::capi
