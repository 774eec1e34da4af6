// Tensors in files: .safetensors and .npy, read through a read-only mapping and written beside the target and renamed.
//
// Nothing is trusted: header lengths, shapes, offsets and dtypes are checked against the file's size before a pointer
// is handed out. Every failure is one line that names the file and says what is wrong. Reading costs no copy, unless
// a tensor is misaligned for its dtype. A file that someone truncates while it is mapped still kills the process
// (SIGBUS): no reader that maps can help that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "logitless/logitless.h"

namespace logitless::files {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr std::size_t max_rank = 32;

struct TensorInfo {
  std::string name;          // empty in .npy
  std::string type;          // dtype as the file spells it: BF16, <f4
  ll_dtype dtype = LL_NONE;  // LL_NONE: a type that can be listed but not read
  std::vector<std::int64_t> shape;
  std::uint64_t offset = 0;  // bytes from the file's start; offset + bytes lies within the file
  std::uint64_t bytes = 0;
};

// The two parsers work on a whole file's bytes and name no file. They throw Error.
std::vector<TensorInfo> parse_safetensors(std::span<const std::byte> file);
// void_is_bf16: take '|V2', which is what numpy.save makes of ml_dtypes.bfloat16, as BF16 instead of refusing it.
TensorInfo parse_npy(std::span<const std::byte> file, bool void_is_bf16 = false);

// One tensor with whatever keeps its bytes alive. `data` is aligned for the dtype.
struct Tensor {
  TensorInfo info;
  const void* data = nullptr;
  std::shared_ptr<const void> owner;
};

class File {
 public:
  explicit File(const std::string& path, bool void_is_bf16 = false);

  const std::string& path() const { return path_; }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  // The tensor of that name; "" is the only one. Lists the names when that is not possible.
  Tensor read(std::string_view name) const;

 private:
  std::string path_;
  bool npy_ = false;
  std::shared_ptr<const std::byte> bytes_;
  std::uint64_t size_ = 0;
  std::vector<TensorInfo> tensors_;
};

// FILE[:NAME]. The longest prefix before a ':' (or the whole) that is an existing file is FILE.
struct Spec {
  std::string path, name;
};
Spec parse_spec(const std::string& text);
Tensor read(const std::string& spec, bool void_is_bf16 = false);

// ---- writing ------------------------------------------------------------------------------------------------------

struct Source {
  std::string name;
  ll_dtype dtype = LL_NONE;
  std::vector<std::int64_t> shape;
  const void* data = nullptr;  // row-major, no gaps
};

// Throws when writing these there cannot succeed, without touching anything; data may still be null. To be asked
// before a long computation. Knows: extension, bf16 or several tensors in .npy, missing or unwritable directory,
// a target that is a directory or a device.
void check_target(const std::string& path, std::span<const Source> tensors);

// A complete, synced file under a temporary name beside its target. commit() gives it its name; without commit it is
// removed, and a file that was there before stays as it was.
class Staged {
 public:
  Staged(const std::string& path, std::span<const Source> tensors);
  ~Staged();
  Staged(Staged&& other) noexcept;
  Staged(const Staged&) = delete;
  Staged& operator=(const Staged&) = delete;
  Staged& operator=(Staged&&) = delete;
  void commit();

 private:
  std::string path_, temporary_;
};

// Staged and committed.
void write(const std::string& path, std::span<const Source> tensors);

// ---- words for messages -------------------------------------------------------------------------------------------

std::int64_t size_of(ll_dtype dtype);                      // bytes of an element, 0 for LL_NONE
std::string name_of(ll_dtype dtype);                       // "bf16"
std::string text_of(std::span<const std::int64_t> shape);  // "[4096, 576]"
std::string quote(std::string_view text);  // 'text', control bytes escaped, long ones cut: fits in one line
// Product of the shape and `element_bytes`; false when it leaves 63 bits.
bool bytes_of(std::span<const std::int64_t> shape, std::uint64_t element_bytes, std::uint64_t* bytes);

}  // namespace logitless::files
