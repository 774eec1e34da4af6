// libFuzzer target: a whole .safetensors file, from memory, as cli/files parses it. Beyond "no crash": whatever is
// accepted must lie within the file, and every byte of it must be readable (AddressSanitizer watches the sum).

#include <cstdint>
#include <cstdlib>

#include "files/files.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  namespace files = logitless::files;
  std::span<const std::byte> const file(reinterpret_cast<const std::byte*>(data), size);
  try {
    std::uint64_t covered = 0;
    for (files::TensorInfo const& tensor : files::parse_safetensors(file)) {
      if (tensor.offset > size || tensor.bytes > size - tensor.offset) std::abort();
      unsigned sum = 0;
      for (std::byte const b : file.subspan(tensor.offset, tensor.bytes)) sum += std::to_integer<unsigned>(b);
      [[maybe_unused]] volatile unsigned const kept = sum;
      covered += tensor.bytes;
      std::uint64_t bytes = 0;
      if (tensor.dtype != LL_NONE &&
          (!files::bytes_of(tensor.shape, static_cast<std::uint64_t>(files::size_of(tensor.dtype)), &bytes) ||
           bytes != tensor.bytes)) {
        std::abort();
      }
    }
    if (covered > size) std::abort();  // tensors would overlap
  } catch (const files::Error& error) {
    for (const char* c = error.what(); *c != 0; ++c) {
      if (*c == '\n') std::abort();  // messages are one line, whatever the file says
    }
  }
  return 0;
}
