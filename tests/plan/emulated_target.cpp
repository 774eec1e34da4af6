// The tests' own target; see the header.
#include "support/emulated_target.hpp"
