// What the two formats give the writer: the bytes before the data, and the order in which the tensors follow.
#pragma once

#include "files/files.hpp"

namespace logitless::files {

struct Layout {
  std::string header;
  std::vector<std::size_t> order;
};

// Both throw Error, naming no file, when the format cannot hold the tensors.
Layout safetensors_layout(std::span<const Source> tensors);
Layout npy_layout(std::span<const Source> tensors);

inline constexpr std::string_view npy_magic{"\x93NUMPY", 6};

}  // namespace logitless::files
