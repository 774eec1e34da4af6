// libFuzzer target: a whole .npy file, from memory, with and without V2 taken as bf16. What is accepted must lie within
// the file and have the size that its shape says.

#include <cstdint>
#include <cstdlib>

#include "files/files.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  namespace files = logitless::files;
  std::span<const std::byte> const file(reinterpret_cast<const std::byte*>(data), size);
  for (bool const void_is_bf16 : {false, true}) {
    try {
      files::TensorInfo const tensor = files::parse_npy(file, void_is_bf16);
      if (tensor.offset > size || tensor.bytes != size - tensor.offset) std::abort();
      std::uint64_t bytes = 0;
      if (!files::bytes_of(tensor.shape, static_cast<std::uint64_t>(files::size_of(tensor.dtype)), &bytes) ||
          bytes != tensor.bytes) {
        std::abort();
      }
    } catch (const files::Error& error) {
      for (const char* c = error.what(); *c != 0; ++c) {
        if (*c == '\n') std::abort();
      }
    }
  }
  return 0;
}
