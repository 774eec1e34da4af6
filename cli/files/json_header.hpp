// The JSON of a safetensors header and nothing more: objects, strings, arrays of integers without sign.
//
// Ours rather than a library's because strictness is the point: duplicate keys, fractions, exponents, signs, raw
// control bytes, bad UTF-8 and trailing text are all refused, no document tree is built (a header may be 100 MB), and
// the example programs link it without a JSON library. One pass, constant stack.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace logitless::files {

class HeaderReader {
 public:
  explicit HeaderReader(std::string_view text) : text_(text) {}

  // Skips white space, then takes `c` or throws.
  void expect(char c);
  // Skips white space, then takes `c` if it is there.
  bool accept(char c);
  std::string string();
  // An integer in [0, 2^63).
  std::int64_t integer();
  // Throws unless only white space is left.
  void end();

 private:
  [[noreturn]] void fail(const std::string& what) const;
  void skip_space();
  std::uint32_t hex4();
  void append_utf8(std::string& out, std::uint32_t code);
  void take_utf8(std::string& out);

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace logitless::files
