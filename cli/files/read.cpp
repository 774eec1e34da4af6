// Opening, mapping and choosing: from FILE[:NAME] to a pointer. The mapping is private and read-only and lives as long
// as any tensor of it. Copies only a tensor whose data is misaligned for its dtype.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "files/format.hpp"

namespace logitless::files {
namespace {

struct Descriptor {
  explicit Descriptor(int descriptor) : fd(descriptor) {}
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int fd;
};

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

std::string list_of(const std::vector<TensorInfo>& tensors) {
  constexpr std::size_t most = 20;
  std::string text;
  for (std::size_t i = 0; i < tensors.size() && i < most; ++i) {
    if (i > 0) text += ", ";
    std::string const type = quote(tensors[i].type);
    text += quote(tensors[i].name) + " " + type.substr(1, type.size() - 2) + " " + text_of(tensors[i].shape);
  }
  if (tensors.size() > most) text += " and " + std::to_string(tensors.size() - most) + " more";
  return text.empty() ? "no tensor" : text;
}

bool exists(const std::string& path) {
  struct stat status{};
  return ::stat(path.c_str(), &status) == 0;
}

}  // namespace

File::File(const std::string& path, bool void_is_bf16) : path_(path) {
  auto const wrong = [&](const std::string& what) { return Error(quote(path) + ": " + what); };
  if (path.find('\0') != std::string::npos) throw wrong("a path holds no zero byte");
  // Not blocking: a FIFO would otherwise wait here for its writer before it can be refused.
  Descriptor const file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.fd < 0) throw wrong(std::strerror(errno));
  struct stat status{};
  if (::fstat(file.fd, &status) != 0) throw wrong(std::strerror(errno));
  if (S_ISDIR(status.st_mode)) throw wrong("is a directory; a .safetensors or .npy file is wanted");
  if (!S_ISREG(status.st_mode)) throw wrong("is not a regular file, so it cannot be mapped");
  size_ = static_cast<std::uint64_t>(status.st_size);
  if (size_ == 0) throw wrong("is empty");
  void* const base = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (base == MAP_FAILED) throw wrong(std::string("cannot be mapped: ") + std::strerror(errno));
  auto const size = size_;
  bytes_ = std::shared_ptr<const std::byte>(static_cast<const std::byte*>(base),
                                            [size](const std::byte* p) { ::munmap(const_cast<std::byte*>(p), size); });
  std::span<const std::byte> const all(bytes_.get(), size_);
  // By content first, so that a wrong extension does no harm; by extension for the better message.
  npy_ = ends_with(path, ".npy") ||
         (size_ >= npy_magic.size() && std::memcmp(base, npy_magic.data(), npy_magic.size()) == 0);
  try {
    if (npy_) {
      tensors_.push_back(parse_npy(all, void_is_bf16));
    } else {
      tensors_ = parse_safetensors(all);
    }
  } catch (const Error& error) {
    throw wrong(error.what());
  }
}

Tensor File::read(std::string_view name) const {
  auto const wrong = [&](const std::string& what) { return Error(quote(path_) + ": " + what); };
  if (npy_ && !name.empty()) {
    throw wrong("an .npy file holds one array without a name; leave out ':" + std::string(name) + "'");
  }
  TensorInfo const* found = nullptr;
  if (name.empty()) {
    if (tensors_.size() != 1) {
      throw wrong("holds " + std::to_string(tensors_.size()) + " tensors, name one as FILE:NAME: " + list_of(tensors_));
    }
    found = &tensors_[0];
  } else {
    for (TensorInfo const& tensor : tensors_) {
      if (tensor.name == name) found = &tensor;
    }
    if (found == nullptr) throw wrong("no tensor " + quote(name) + "; it holds " + list_of(tensors_));
  }
  if (found->dtype == LL_NONE) {
    throw wrong("tensor " + quote(found->name) + " is " + quote(found->type) +
                "; F64, F32, F16, BF16, I64, I32 and U8 can be read");
  }
  Tensor tensor{*found, bytes_.get() + found->offset, bytes_};
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % static_cast<std::uintptr_t>(size_of(found->dtype)) != 0) {
    auto copy = std::make_shared<std::vector<std::uint64_t>>(found->bytes / 8 + 1);
    std::memcpy(copy->data(), tensor.data, found->bytes);
    tensor.data = copy->data();
    tensor.owner = copy;
  }
  return tensor;
}

Spec parse_spec(const std::string& text) {
  if (exists(text)) return {text, ""};
  for (std::size_t colon = text.rfind(':'); colon != std::string::npos && colon > 0;
       colon = text.rfind(':', colon - 1)) {
    std::string const path = text.substr(0, colon);
    if (exists(path)) {
      if (colon + 1 == text.size()) throw Error(quote(text) + ": no tensor name after ':'");
      return {path, text.substr(colon + 1)};
    }
  }
  std::size_t const colon = text.rfind(':');
  return colon == std::string::npos || colon == 0 ? Spec{text, ""}
                                                  : Spec{text.substr(0, colon), text.substr(colon + 1)};
}

Tensor read(const std::string& spec, bool void_is_bf16) {
  Spec const chosen = parse_spec(spec);
  return File(chosen.path, void_is_bf16).read(chosen.name);
}

}  // namespace logitless::files
