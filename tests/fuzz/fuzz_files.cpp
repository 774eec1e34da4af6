// libFuzzer target: the whole reader with its mapping. The input becomes a file in memory (memfd), which is opened by
// name like a user's, and every tensor is read, and copied where it is misaligned.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "files/files.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  namespace files = logitless::files;
  int const file = ::memfd_create("fuzz", MFD_CLOEXEC);
  if (file < 0) return 0;
  if (::write(file, data, size) == static_cast<ssize_t>(size)) {
    std::string const path = "/proc/self/fd/" + std::to_string(file);
    try {
      files::File const opened(path, size % 2 == 1);
      for (files::TensorInfo const& info : opened.tensors()) {
        try {
          files::Tensor const tensor = opened.read(info.name);
          auto const address = reinterpret_cast<std::uintptr_t>(tensor.data);
          if (address % static_cast<std::uintptr_t>(files::size_of(tensor.info.dtype)) != 0) std::abort();
          std::string const copy(static_cast<const char*>(tensor.data), tensor.info.bytes);
          [[maybe_unused]] volatile std::size_t const kept = copy.size();
        } catch (const files::Error&) {
        }
      }
    } catch (const files::Error& error) {
      if (std::strchr(error.what(), '\n') != nullptr) std::abort();
    }
  }
  ::close(file);
  return 0;
}
