// The scanner declared in json_header.hpp. Every read is bounded by text_.size(); errors give the byte's position in
// the header.

#include "files/json_header.hpp"

#include <limits>

#include "files/files.hpp"

namespace logitless::files {

void HeaderReader::fail(const std::string& what) const {
  throw Error("header is not the JSON that safetensors prescribes: " + what + " at byte " + std::to_string(at_));
}

void HeaderReader::skip_space() {
  while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) {
    ++at_;
  }
}

bool HeaderReader::accept(char c) {
  skip_space();
  if (at_ >= text_.size() || text_[at_] != c) return false;
  ++at_;
  return true;
}

void HeaderReader::expect(char c) {
  if (!accept(c)) fail(std::string("'") + c + "' expected");
}

void HeaderReader::end() {
  skip_space();
  if (at_ != text_.size()) fail("text after the closing brace");
}

std::int64_t HeaderReader::integer() {
  skip_space();
  std::size_t const first = at_;
  std::int64_t value = 0;
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
    int const digit = text_[at_] - '0';
    if (value > (most - digit) / 10) fail("a number of 2^63 or more");
    value = value * 10 + digit;
    ++at_;
  }
  if (at_ == first) fail("a whole number of at least 0 expected");
  if (text_[first] == '0' && at_ - first > 1) fail("a number with a leading 0");
  if (at_ < text_.size() && (text_[at_] == '.' || text_[at_] == 'e' || text_[at_] == 'E')) {
    fail("a whole number expected");
  }
  return value;
}

std::uint32_t HeaderReader::hex4() {
  std::uint32_t code = 0;
  for (int i = 0; i < 4; ++i, ++at_) {
    char const c = at_ < text_.size() ? text_[at_] : '\0';
    std::uint32_t digit = 0;
    if (c >= '0' && c <= '9') {
      digit = static_cast<std::uint32_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      digit = static_cast<std::uint32_t>(c - 'a') + 10;
    } else if (c >= 'A' && c <= 'F') {
      digit = static_cast<std::uint32_t>(c - 'A') + 10;
    } else {
      fail("four hexadecimal digits expected");
    }
    code = code * 16 + digit;
  }
  return code;
}

void HeaderReader::append_utf8(std::string& out, std::uint32_t code) {
  auto const put = [&out](std::uint32_t byte) { out += static_cast<char>(static_cast<unsigned char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xc0 | (code >> 6));
    put(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    put(0xe0 | (code >> 12));
    put(0x80 | ((code >> 6) & 0x3f));
    put(0x80 | (code & 0x3f));
  } else {
    put(0xf0 | (code >> 18));
    put(0x80 | ((code >> 12) & 0x3f));
    put(0x80 | ((code >> 6) & 0x3f));
    put(0x80 | (code & 0x3f));
  }
}

// One character of two to four bytes: shortest form, no surrogates, at most U+10FFFF.
void HeaderReader::take_utf8(std::string& out) {
  auto const lead = static_cast<unsigned char>(text_[at_]);
  int const more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
  if (lead < 0xc2 || lead > 0xf4 || text_.size() - at_ <= static_cast<std::size_t>(more)) fail("bad UTF-8");
  std::uint32_t code = lead & (0x3fU >> more);
  for (int i = 1; i <= more; ++i) {
    auto const byte = static_cast<unsigned char>(text_[at_ + static_cast<std::size_t>(i)]);
    if ((byte & 0xc0U) != 0x80U) fail("bad UTF-8");
    code = (code << 6) | (byte & 0x3fU);
  }
  bool const overlong = (more == 2 && code < 0x800) || (more == 3 && code < 0x10000);
  if (overlong || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) fail("bad UTF-8");
  append_utf8(out, code);
  at_ += static_cast<std::size_t>(more) + 1;
}

std::string HeaderReader::string() {
  expect('"');
  std::string out;
  while (true) {
    if (at_ >= text_.size()) fail("a string without its end");
    char const c = text_[at_];
    auto const byte = static_cast<unsigned char>(c);
    if (byte < 0x20) fail("a control byte inside a string");
    if (byte >= 0x80) {
      take_utf8(out);
      continue;
    }
    ++at_;
    if (c == '"') return out;
    if (c != '\\') {
      out += c;
      continue;
    }
    char const escape = at_ < text_.size() ? text_[at_] : '\0';
    ++at_;
    switch (escape) {
      case '"':
      case '\\':
      case '/': out += escape; break;
      case 'b': out += '\b'; break;
      case 'f': out += '\f'; break;
      case 'n': out += '\n'; break;
      case 'r': out += '\r'; break;
      case 't': out += '\t'; break;
      case 'u': {
        std::uint32_t code = hex4();
        if (code >= 0xdc00 && code < 0xe000) fail("half of a surrogate pair");
        if (code >= 0xd800 && code < 0xdc00) {
          if (text_.substr(at_, 2) != "\\u") fail("half of a surrogate pair");
          at_ += 2;
          std::uint32_t const low = hex4();
          if (low < 0xdc00 || low >= 0xe000) fail("half of a surrogate pair");
          code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        }
        append_utf8(out, code);
        break;
      }
      default: fail("an unknown escape in a string");
    }
  }
}

}  // namespace logitless::files
