// Structs of the C ABI only grow at their end. read_struct copies what the caller's version has and leaves the defaults
// in the rest; a newer caller's unknown tail must be zero, which every new field will take to mean "as before".
// write_struct fills no more than the caller's version has.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "capi/status.hpp"

namespace logitless::capi {

// Beyond this a size is taken for garbage and nothing of the tail is read.
inline constexpr std::uint64_t kLargestStruct = 4096;

// `name` is the argument's, `type` the struct's; `defaults` has every field set.
template <class Struct>
Struct read_struct(const Struct* given, const char* name, const char* type, Struct defaults) {
  static_assert(offsetof(Struct, size) == 0 && sizeof(Struct) % 8 == 0);
  if (given == nullptr) refuse(std::string(name) + ": null; must point at an " + type);
  std::uint64_t size;
  std::memcpy(&size, given, sizeof size);
  // Fields are 8 bytes or pairs of 4, so a version's size is a multiple of 8 and never cuts a field.
  if (size <= sizeof size || size % 8 != 0 || size > kLargestStruct) {
    refuse(std::string(name) + ".size: " + std::to_string(size) + "; must be sizeof(" + type + "), here " +
           std::to_string(sizeof(Struct)));
  }
  if (size > sizeof(Struct)) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(given);
    for (std::size_t i = sizeof(Struct); i < size; ++i) {
      if (bytes[i] == 0) continue;
      fail(LL_ERROR_UNSUPPORTED, std::string(name) + ".size: " + std::to_string(size) + " with byte " +
                                     std::to_string(i) + " set; version " + ll_version() + " knows " +
                                     std::to_string(sizeof(Struct)) + " bytes of " + type +
                                     ", and what lies beyond must be 0");
    }
    size = sizeof(Struct);
  }
  Struct result = defaults;
  std::memcpy(&result, given, size);
  return result;
}

// The defaults into a caller's struct of `bytes` bytes: an older one gets its own fields alone, since beyond them lies
// whatever the caller put there, and a newer one gets zeros in what this version does not know.
template <class Struct>
void write_struct(Struct* out, std::size_t bytes, const Struct& defaults) {
  const std::uint64_t size = bytes;
  if (out == nullptr || bytes < sizeof size) return;
  const std::size_t known = std::min(bytes, sizeof(Struct));
  auto* const to = reinterpret_cast<unsigned char*>(out);
  std::memcpy(to, &defaults, known);
  std::memset(to + known, 0, bytes - known);
  std::memcpy(to, &size, sizeof size);
}

}  // namespace logitless::capi
