// How much a suite runs: LOGITLESS_TEST_SCOPE = reduced (sanitizer builds) or full, LOGITLESS_TEST_FULL=1 the same as
// full; neither: the default.
#pragma once

#include <cstdlib>
#include <string>

namespace logitless::test {

enum class Scope { reduced, normal, full };

inline Scope scope() {
  const char* text = std::getenv("LOGITLESS_TEST_SCOPE");
  const char* full = std::getenv("LOGITLESS_TEST_FULL");
  if ((full != nullptr && std::string(full) == "1") || (text != nullptr && std::string(text) == "full")) {
    return Scope::full;
  }
  return text != nullptr && std::string(text) == "reduced" ? Scope::reduced : Scope::normal;
}

}  // namespace logitless::test
