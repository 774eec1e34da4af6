// .safetensors: [u64 length n, little endian][n bytes of JSON: name -> dtype, shape, data_offsets][the tensors' bytes].
//
// As strict as the format's own library: tensors lie one after another without gap or overlap and fill the rest of the
// file exactly, so a header cannot lie about where or how large they are. Dtypes that Logitless does not compute with
// are listed, and refused only when they are read.

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "files/format.hpp"
#include "files/json_header.hpp"

namespace logitless::files {
namespace {

constexpr std::uint64_t max_header = 100'000'000;  // the limit of the format's own library

struct TypeRow {
  const char* name;
  std::uint64_t bits;
  ll_dtype dtype;
};
constexpr TypeRow types[] = {
    {"F64", 64, LL_F64},     {"F32", 32, LL_F32},     {"F16", 16, LL_F16},     {"BF16", 16, LL_BF16},
    {"I64", 64, LL_I64},     {"I32", 32, LL_I32},     {"I16", 16, LL_NONE},    {"I8", 8, LL_NONE},
    {"U64", 64, LL_NONE},    {"U32", 32, LL_NONE},    {"U16", 16, LL_NONE},    {"U8", 8, LL_U8},
    {"BOOL", 8, LL_NONE},    {"C64", 64, LL_NONE},    {"F8_E4M3", 8, LL_NONE}, {"F8_E5M2", 8, LL_NONE},
    {"F8_E8M0", 8, LL_NONE}, {"F6_E2M3", 6, LL_NONE}, {"F6_E3M2", 6, LL_NONE}, {"F4", 4, LL_NONE},
};

const TypeRow* find_type(std::string_view name) {
  auto const* const row =
      std::find_if(std::begin(types), std::end(types), [&](const TypeRow& t) { return name == t.name; });
  return row == std::end(types) ? nullptr : row;
}

// {"dtype": .., "shape": [..], "data_offsets": [first, last]}; offsets from the end of the header.
TensorInfo read_entry(HeaderReader& header, std::string name) {
  TensorInfo tensor;
  tensor.name = std::move(name);
  auto const wrong = [&](const std::string& what) { return Error("tensor " + quote(tensor.name) + ": " + what); };
  bool has_type = false, has_shape = false, has_offsets = false;
  std::uint64_t first = 0, last = 0;
  auto const once = [&](bool& seen, const char* key) {
    if (seen) throw wrong(std::string("two keys ") + key);
    seen = true;
  };
  header.expect('{');
  do {
    std::string const key = header.string();
    header.expect(':');
    if (key == "dtype") {
      once(has_type, "dtype");
      tensor.type = header.string();
    } else if (key == "shape") {
      once(has_shape, "shape");
      header.expect('[');
      if (!header.accept(']')) {
        do {
          if (tensor.shape.size() == max_rank) throw wrong("more than " + std::to_string(max_rank) + " dimensions");
          tensor.shape.push_back(header.integer());
        } while (header.accept(','));
        header.expect(']');
      }
    } else if (key == "data_offsets") {
      once(has_offsets, "data_offsets");
      header.expect('[');
      first = static_cast<std::uint64_t>(header.integer());
      header.expect(',');
      last = static_cast<std::uint64_t>(header.integer());
      header.expect(']');
    } else {
      throw wrong("unknown key " + quote(key) + "; dtype, shape and data_offsets are allowed");
    }
  } while (header.accept(','));
  header.expect('}');
  if (!has_type || !has_shape || !has_offsets) {
    throw wrong(std::string("no ") + (!has_type ? "dtype" : !has_shape ? "shape" : "data_offsets"));
  }
  if (last < first) {
    throw wrong("data_offsets [" + std::to_string(first) + ", " + std::to_string(last) + "] run backwards");
  }
  tensor.offset = first;
  tensor.bytes = last - first;
  std::uint64_t bits = 0;
  TypeRow const* const type = find_type(tensor.type);
  if (!bytes_of(tensor.shape, type == nullptr ? 1 : type->bits, &bits)) {
    throw wrong("shape " + text_of(tensor.shape) + " has too many elements for any file");
  }
  if (type != nullptr) {  // the size of a dtype that came later than this table is not known
    tensor.dtype = type->dtype;
    if (bits % 8 != 0 || bits / 8 != tensor.bytes) {
      throw wrong(tensor.type + " " + text_of(tensor.shape) + " needs " + std::to_string((bits + 7) / 8) +
                  " bytes, data_offsets give " + std::to_string(tensor.bytes));
    }
  }
  return tensor;
}

void skip_metadata(HeaderReader& header) {
  header.expect('{');
  if (header.accept('}')) return;
  do {
    header.string();
    header.expect(':');
    header.string();
  } while (header.accept(','));
  header.expect('}');
}

void append_json_string(std::string& out, std::string_view text) {
  constexpr char hex[] = "0123456789abcdef";
  out += '"';
  for (char const c : text) {
    auto const byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20) {
      out += "\\u00";
      out += hex[byte >> 4];
      out += hex[byte & 15U];
    } else {
      out += c;
    }
  }
  out += '"';
}

}  // namespace

std::vector<TensorInfo> parse_safetensors(std::span<const std::byte> file) {
  if (file.size() < 8) {
    throw Error("a .safetensors file has at least 8 bytes, this one has " + std::to_string(file.size()));
  }
  std::uint64_t length = 0;
  for (std::size_t i = 8; i-- > 0;) length = (length << 8) | std::to_integer<std::uint64_t>(file[i]);
  if (length > file.size() - 8) {
    throw Error("not a .safetensors file, or cut off: its header claims " + std::to_string(length) + " bytes, " +
                std::to_string(file.size() - 8) + " follow");
  }
  if (length > max_header) {
    throw Error("its header claims " + std::to_string(length) + " bytes, at most 100000000 are allowed");
  }
  std::uint64_t const start = 8 + length;
  std::uint64_t const size = file.size() - start;

  HeaderReader header(std::string_view(reinterpret_cast<const char*>(file.data()) + 8, length));
  std::vector<TensorInfo> tensors;
  std::unordered_set<std::string> names;
  header.expect('{');
  if (!header.accept('}')) {
    do {
      std::string name = header.string();
      header.expect(':');
      if (!names.insert(name).second) throw Error("two tensors named " + quote(name));
      if (name == "__metadata__") {
        skip_metadata(header);
      } else {
        tensors.push_back(read_entry(header, std::move(name)));
      }
    } while (header.accept(','));
    header.expect('}');
  }
  header.end();

  // Lies about place are found by laying the tensors out in the order of their offsets.
  std::vector<const TensorInfo*> order;
  order.reserve(tensors.size());
  for (TensorInfo const& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return a->offset != b->offset ? a->offset < b->offset : a->bytes < b->bytes;
  });
  std::uint64_t end = 0;
  for (TensorInfo const* const tensor : order) {
    if (tensor->offset + tensor->bytes > size) {
      throw Error("tensor " + quote(tensor->name) + " ends at byte " + std::to_string(tensor->offset + tensor->bytes) +
                  " of the data, which has " + std::to_string(size) + "; the file may be cut off");
    }
    if (tensor->offset != end) {
      throw Error("tensor " + quote(tensor->name) + " begins at byte " + std::to_string(tensor->offset) +
                  " of the data, the one before it ends at " + std::to_string(end));
    }
    end = tensor->offset + tensor->bytes;
  }
  if (end != size) {
    throw Error("its tensors end at byte " + std::to_string(end) + " of the data, which has " + std::to_string(size));
  }
  for (TensorInfo& tensor : tensors) tensor.offset += start;
  return tensors;
}

Layout safetensors_layout(std::span<const Source> tensors) {
  Layout layout;
  for (std::size_t i = 0; i < tensors.size(); ++i) layout.order.push_back(i);
  // Widest elements first: then every tensor is aligned for its dtype without gaps, which the format forbids.
  std::sort(layout.order.begin(), layout.order.end(), [&](std::size_t a, std::size_t b) {
    std::int64_t const left = size_of(tensors[a].dtype), right = size_of(tensors[b].dtype);
    return left != right ? left > right : a < b;
  });
  std::string json = "{";
  std::uint64_t offset = 0;
  for (std::size_t const i : layout.order) {
    Source const& tensor = tensors[i];
    auto const* const type =
        std::find_if(std::begin(types), std::end(types), [&](const TypeRow& t) { return t.dtype == tensor.dtype; });
    std::uint64_t bytes = 0;
    if (tensor.dtype == LL_NONE || type == std::end(types) ||
        !bytes_of(tensor.shape, static_cast<std::uint64_t>(size_of(tensor.dtype)), &bytes)) {
      throw Error("tensor " + quote(tensor.name) + ": " + name_of(tensor.dtype) + " " + text_of(tensor.shape) +
                  " cannot be written");
    }
    if (json.size() > 1) json += ',';
    append_json_string(json, tensor.name);
    json += std::string(":{\"dtype\":\"") + type->name + "\",\"shape\":[";
    for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
      if (d > 0) json += ',';
      json += std::to_string(tensor.shape[d]);
    }
    json += "],\"data_offsets\":[" + std::to_string(offset) + "," + std::to_string(offset + bytes) + "]}";
    offset += bytes;
  }
  json += '}';
  while ((8 + json.size()) % 64 != 0) json += ' ';  // data starts on a cache line
  std::uint64_t const length = json.size();
  for (int i = 0; i < 8; ++i) layout.header += static_cast<char>(static_cast<unsigned char>(length >> (8 * i)));
  layout.header += json;
  return layout;
}

}  // namespace logitless::files
