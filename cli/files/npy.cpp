// .npy, versions 1 to 3: [magic, version, header length][a Python dict literal: descr, fortran_order, shape][data].
//
// One row-major little-endian array; column-major ones are refused unless they have at most one dimension, where the
// order means nothing. The dict is read by a scanner for exactly these three keys, not by a Python parser.

#include <limits>

#include "files/format.hpp"

namespace logitless::files {
namespace {

constexpr std::size_t max_header = 65536;  // a dict of three keys and 32 extents needs less than 1 KiB

class DictReader {
 public:
  explicit DictReader(std::string_view text) : text_(text) {}

  bool accept(char c) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) fail(std::string("'") + c + "' expected");
  }
  bool at(char c) {
    skip_space();
    return at_ < text_.size() && text_[at_] == c;
  }
  std::string string() {
    char const quote = accept('\'') ? '\'' : '"';
    if (quote == '"') expect('"');
    std::size_t const first = at_;
    while (at_ < text_.size() && text_[at_] != quote) {
      if (text_[at_] == '\\' || static_cast<unsigned char>(text_[at_]) < 0x20) fail("a plain string expected");
      ++at_;
    }
    if (at_ == text_.size()) fail("a string without its end");
    return std::string(text_.substr(first, at_++ - first));
  }
  bool boolean() {
    skip_space();
    for (bool const value : {true, false}) {
      std::string_view const word = value ? "True" : "False";
      if (text_.substr(at_, word.size()) == word) {
        at_ += word.size();
        return value;
      }
    }
    fail("True or False expected");
  }
  std::int64_t integer() {
    skip_space();
    std::size_t const first = at_;
    std::int64_t value = 0;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      int const digit = text_[at_] - '0';
      if (value > (std::numeric_limits<std::int64_t>::max() - digit) / 10) fail("a number of 2^63 or more");
      value = value * 10 + digit;
      ++at_;
    }
    if (at_ == first) fail("a whole number of at least 0 expected");
    if (at_ < text_.size() && text_[at_] == 'L') ++at_;  // Python 2 wrote long integers like that
    return value;
  }
  void end() {
    skip_space();
    if (at_ != text_.size()) fail("text after the closing brace");
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw Error("header is not the dict that .npy prescribes: " + what + " at byte " + std::to_string(at_));
  }

 private:
  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

struct TypeRow {
  const char* descr;  // without the byte order
  ll_dtype dtype;
};
constexpr TypeRow types[] = {{"f4", LL_F32}, {"f8", LL_F64}, {"f2", LL_F16},
                             {"i4", LL_I32}, {"i8", LL_I64}, {"u1", LL_U8}};

// Sets tensor.dtype and returns the bytes of an element.
std::uint64_t read_descr(const std::string& descr, bool void_is_bf16, TensorInfo& tensor) {
  tensor.type = descr;
  auto const wrong = [&](const std::string& why) { return Error("dtype " + quote(descr) + " " + why); };
  constexpr const char* known = "cannot be read; '<f4', '<f8', '<f2', '<i4', '<i8' and '|u1' can";
  if (descr.size() < 3 || std::string_view("<>|=").find(descr[0]) == std::string_view::npos) throw wrong(known);
  std::string_view const body = std::string_view(descr).substr(1);
  if (body == "V2") {
    if (void_is_bf16) {
      tensor.dtype = LL_BF16;
      return 2;
    }
    throw wrong(
        "is untyped: if numpy.save wrote bfloat16 (ml_dtypes), say so with --npy-bf16, or save it as .safetensors");
  }
  if (descr[0] == '>') throw wrong("is big endian; save it with .astype('<" + std::string(body) + "')");
  for (TypeRow const& row : types) {
    if (body == row.descr) {
      if (descr[0] == '|' && row.dtype != LL_U8) throw wrong("has no byte order");
      tensor.dtype = row.dtype;
      return static_cast<std::uint64_t>(size_of(row.dtype));
    }
  }
  throw wrong(known);
}

}  // namespace

TensorInfo parse_npy(std::span<const std::byte> file, bool void_is_bf16) {
  std::string_view const text(reinterpret_cast<const char*>(file.data()), file.size());
  if (text.substr(0, npy_magic.size()) != npy_magic) throw Error("not an .npy file: it does not begin with \\x93NUMPY");
  if (file.size() < 10) throw Error("cut off inside the first 10 bytes");
  auto const byte = [&](std::size_t i) { return std::to_integer<std::size_t>(file[i]); };
  std::size_t const version = byte(6);
  if (version < 1 || version > 3 || byte(7) != 0) {
    throw Error(".npy version " + std::to_string(version) + "." + std::to_string(byte(7)) +
                " is not known; 1.0, 2.0 and 3.0 are");
  }
  std::size_t const preamble = version == 1 ? 10 : 12;
  if (file.size() < preamble) throw Error("cut off inside the first 12 bytes");
  std::size_t const length =
      version == 1 ? byte(8) | byte(9) << 8 : byte(8) | byte(9) << 8 | byte(10) << 16 | byte(11) << 24;
  if (length > file.size() - preamble) {
    throw Error("cut off: its header claims " + std::to_string(length) + " bytes, " +
                std::to_string(file.size() - preamble) + " follow");
  }
  if (length > max_header) {
    throw Error("its header claims " + std::to_string(length) + " bytes, at most " + std::to_string(max_header) +
                " are allowed");
  }

  DictReader dict(text.substr(preamble, length));
  TensorInfo tensor;
  std::uint64_t element = 0;
  bool has_descr = false, has_order = false, has_shape = false, fortran = false;
  auto const once = [&](bool& seen, const std::string& key) {
    if (seen) dict.fail("two keys " + quote(key));
    seen = true;
  };
  dict.expect('{');
  while (!dict.at('}')) {
    std::string const key = dict.string();
    dict.expect(':');
    if (key == "descr") {
      once(has_descr, key);
      if (dict.at('[')) throw Error("a structured dtype cannot be read; save one plain array");
      element = read_descr(dict.string(), void_is_bf16, tensor);
    } else if (key == "fortran_order") {
      once(has_order, key);
      fortran = dict.boolean();
    } else if (key == "shape") {
      once(has_shape, key);
      dict.expect('(');
      while (!dict.at(')')) {
        if (tensor.shape.size() == max_rank) dict.fail("more than " + std::to_string(max_rank) + " dimensions");
        tensor.shape.push_back(dict.integer());
        if (!dict.accept(',')) break;
      }
      dict.expect(')');
    } else {
      dict.fail("unknown key " + quote(key));
    }
    if (!dict.accept(',')) break;
  }
  dict.expect('}');
  dict.end();
  if (!has_descr || !has_order || !has_shape) {
    dict.fail(std::string("no key ") + (!has_descr ? "descr" : !has_order ? "fortran_order" : "shape"));
  }
  if (fortran && tensor.shape.size() > 1) {
    throw Error("the array " + text_of(tensor.shape) +
                " is stored column by column (fortran_order); save numpy.ascontiguousarray of it");
  }
  tensor.offset = preamble + length;
  if (!bytes_of(tensor.shape, element, &tensor.bytes)) {
    throw Error("shape " + text_of(tensor.shape) + " has too many elements for any file");
  }
  if (tensor.bytes != file.size() - tensor.offset) {
    throw Error(tensor.type + " " + text_of(tensor.shape) + " needs " + std::to_string(tensor.bytes) +
                " bytes of data, the file has " + std::to_string(file.size() - tensor.offset));
  }
  return tensor;
}

Layout npy_layout(std::span<const Source> tensors) {
  if (tensors.size() != 1) {
    throw Error("an .npy file holds one array, not " + std::to_string(tensors.size()) +
                "; give a name that ends in .safetensors");
  }
  Source const& tensor = tensors[0];
  const char* descr = nullptr;
  for (TypeRow const& row : types) {
    if (row.dtype == tensor.dtype) descr = row.descr;
  }
  if (descr == nullptr) {
    throw Error("an .npy file cannot hold " + name_of(tensor.dtype) + "; give a name that ends in .safetensors");
  }
  std::string dict = std::string("{'descr': '<") + descr + "', 'fortran_order': False, 'shape': (";
  for (std::int64_t const n : tensor.shape) dict += std::to_string(n) + ", ";
  if (tensor.shape.size() > 1) dict.resize(dict.size() - 2);
  if (tensor.shape.size() == 1) dict.resize(dict.size() - 1);  // a tuple of one keeps its comma
  dict += "), }";
  while ((10 + dict.size() + 1) % 64 != 0) dict += ' ';
  dict += '\n';
  Layout layout;
  layout.order = {0};
  layout.header = std::string(npy_magic) + '\x01' + '\0';
  layout.header += static_cast<char>(static_cast<unsigned char>(dict.size() & 0xffU));
  layout.header += static_cast<char>(static_cast<unsigned char>(dict.size() >> 8));
  layout.header += dict;
  return layout;
}

}  // namespace logitless::files
