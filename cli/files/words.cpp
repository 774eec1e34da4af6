// Names, sizes and quoting that every message about files shares. Text that came out of a file is never printed raw: a
// name with a line break or an escape sequence must neither break the one-line rule nor reach the terminal.

#include <cstdio>

#include "files/files.hpp"

namespace logitless::files {

std::int64_t size_of(ll_dtype dtype) {
  switch (dtype) {
    case LL_U8: return 1;
    case LL_BF16:
    case LL_F16: return 2;
    case LL_F32:
    case LL_I32: return 4;
    case LL_F64:
    case LL_I64: return 8;
    default: return 0;
  }
}

std::string name_of(ll_dtype dtype) {
  switch (dtype) {
    case LL_NONE: return "none";
    case LL_F32: return "f32";
    case LL_BF16: return "bf16";
    case LL_F16: return "f16";
    case LL_F64: return "f64";
    case LL_I32: return "i32";
    case LL_I64: return "i64";
    case LL_U8: return "u8";
    default: return "dtype " + std::to_string(dtype);
  }
}

std::string text_of(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::int64_t const n : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(n);
  }
  return text + "]";
}

std::string quote(std::string_view text) {
  constexpr std::size_t longest = 120;
  std::string out = "'";
  for (char const c : text.substr(0, longest)) {
    auto const byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\x%02x", byte);
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + (text.size() > longest ? "...'" : "'");
}

bool bytes_of(std::span<const std::int64_t> shape, std::uint64_t element_bytes, std::uint64_t* bytes) {
  // A zero anywhere makes the product zero, but the other extents must still be sane, so the product without the
  // zeros is what is bounded.
  constexpr std::uint64_t limit = std::uint64_t{1} << 62;
  std::uint64_t product = element_bytes;
  bool empty = false;
  for (std::int64_t const n : shape) {
    if (n < 0) return false;
    if (n == 0) {
      empty = true;
      continue;
    }
    if (product > limit / static_cast<std::uint64_t>(n)) return false;
    product *= static_cast<std::uint64_t>(n);
  }
  *bytes = empty ? 0 : product;
  return true;
}

}  // namespace logitless::files
