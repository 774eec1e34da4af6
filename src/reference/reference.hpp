// The oracle: every loss and gradient by its textbook definition, in double, one row at a time.
// Includes nothing of src/contract's mathematics (only the plain structs that describe a call).
#pragma once

#include <string>

#include "plan/operands.hpp"

namespace logitless::reference {

// Runs `problem` on `operands` (any dtype, f64 too). Returns an empty string or the error's text with *status set to an
// ll_status. Allocates what it likes.
std::string run(const contract::Problem& problem, const Operands& operands, Outcome* outcome, int* status);

}  // namespace logitless::reference
