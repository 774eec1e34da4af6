// Files and folders to paragraphs; zlib records and R's serialised character vectors (XDR) to lines.
#include "text.hpp"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <optional>
#include <set>

namespace tiny_lm {
namespace fs = std::filesystem;
namespace {

constexpr std::int64_t largest_file = std::int64_t{64} << 20;

std::string slurp(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw InputError("--text: '" + path.string() + "' cannot be read");
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// ---- R ----------------------------------------------------------------------------------------------------------------

// One zlib stream at the front of `data`; *used is its length. Nothing if it is broken.
std::optional<std::string> inflate_front(std::string_view data, std::size_t expected, std::size_t* used) {
  z_stream stream{};
  if (inflateInit(&stream) != Z_OK) return std::nullopt;
  std::string out(expected, '\0');
  char beyond = 0;  // a stream longer than announced must not pass for complete
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(data.data()));
  stream.avail_in = static_cast<uInt>(data.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  int status = inflate(&stream, Z_FINISH);
  if (status == Z_BUF_ERROR && stream.avail_out == 0) {
    stream.next_out = reinterpret_cast<Bytef*>(&beyond);
    stream.avail_out = 1;
    status = inflate(&stream, Z_FINISH);
  }
  const bool complete = status == Z_STREAM_END && stream.total_out == expected;
  *used = stream.total_in;
  inflateEnd(&stream);
  return complete ? std::optional(std::move(out)) : std::nullopt;
}

// Reads big-endian integers and bytes, never past the end.
class XdrReader {
 public:
  explicit XdrReader(std::string_view data) : data_(data) {}
  bool good() const { return good_; }
  std::string_view bytes(std::size_t n) {
    if (n > data_.size()) {
      good_ = false;
      return {};
    }
    const std::string_view out = data_.substr(0, n);
    data_.remove_prefix(n);
    return out;
  }
  std::int32_t integer() {
    const std::string_view b = bytes(4);
    if (b.size() != 4) return 0;
    std::uint32_t value = 0;
    for (const char c : b) value = value << 8 | static_cast<unsigned char>(c);
    return static_cast<std::int32_t>(value);
  }

 private:
  std::string_view data_;
  bool good_ = true;
};

std::string utf8_of_latin1(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80) {
      out += c;
    } else {
      out += static_cast<char>(0xc0 | byte >> 6);
      out += static_cast<char>(0x80 | (byte & 0x3f));
    }
  }
  return out;
}

// R's serialisation, format "X": header, then (here) one STRSXP of CHARSXPs. Nothing for other contents.
std::optional<std::vector<std::string>> character_vector(std::string_view record) {
  constexpr std::int32_t charsxp = 9, strsxp = 16, latin1 = 1 << 14;
  XdrReader in(record);
  if (in.bytes(2) != "X\n") return std::nullopt;
  const std::int32_t version = in.integer();
  in.integer();  // the R that wrote it
  in.integer();  // the oldest R that can read it
  if (version == 3) {
    const std::int32_t length = in.integer();
    if (length < 0) return std::nullopt;
    in.bytes(static_cast<std::size_t>(length));  // native encoding
  } else if (version != 2) {
    return std::nullopt;
  }
  if ((in.integer() & 0xff) != strsxp) return std::nullopt;
  const std::int32_t count = in.integer();
  if (!in.good() || count < 0) return std::nullopt;  // -1 would announce more than 2^31 lines
  std::vector<std::string> lines;
  for (std::int32_t i = 0; i < count; ++i) {
    const std::int32_t flags = in.integer();
    const std::int32_t length = in.integer();
    if (!in.good() || (flags & 0xff) != charsxp || length < -1) return std::nullopt;
    const std::string_view text = in.bytes(static_cast<std::size_t>(std::max(length, 0)));  // -1: NA, an empty line
    if (!in.good()) return std::nullopt;
    lines.push_back(flags & latin1 ? utf8_of_latin1(text) : std::string(text));
  }
  return lines;
}

// ---- paragraphs ---------------------------------------------------------------------------------------------------------

std::string_view trimmed(std::string_view line) {
  constexpr std::string_view blank = " \t\r\f\v";
  const std::size_t first = line.find_first_not_of(blank);
  if (first == std::string_view::npos) return {};
  return line.substr(first, line.find_last_not_of(blank) - first + 1);
}

class Paragraphs {
 public:
  explicit Paragraphs(Text& text) : text_(text) {}
  ~Paragraphs() { end(); }
  Paragraphs(const Paragraphs&) = delete;
  Paragraphs& operator=(const Paragraphs&) = delete;
  void line(std::string_view raw) {
    const std::string_view content = trimmed(raw);
    if (content.empty()) return end();
    if (!current_.empty()) current_ += ' ';
    current_ += content;
  }

 private:
  void end() {
    if (current_.empty()) return;
    text_.bytes += static_cast<std::int64_t>(current_.size());
    text_.paragraphs.push_back(std::move(current_));
    current_.clear();
  }
  Text& text_;
  std::string current_;
};

// False: not text (a NUL byte, or an .rdb without a character vector).
bool add_file(const fs::path& path, Text& text) {
  const std::string data = slurp(path);
  if (path.extension() == ".rdb") {
    const auto vectors = read_rdb(data);
    for (const auto& lines : vectors) {
      Paragraphs paragraphs(text);
      for (const std::string& line : lines) paragraphs.line(line);
    }
    if (vectors.empty()) return false;
  } else {
    if (data.find('\0') != std::string::npos) return false;
    Paragraphs paragraphs(text);
    std::string_view rest = data;
    while (!rest.empty()) {
      const std::size_t end = std::min(rest.find('\n'), rest.size());
      paragraphs.line(rest.substr(0, end));
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
  }
  ++text.files;
  return true;
}

// What a folder of sources holds beside its text: things made by tools.
bool passed_over(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.starts_with('.') || name.starts_with("build") || name == "out" || name == "node_modules";
}

// Formats that are text by their bytes and not by their words.
bool is_prose_or_source(const fs::path& path) {
  static const std::set<std::string> no{".svg", ".json", ".csv", ".tsv", ".xml", ".html", ".lock"};
  return !no.contains(path.extension().string());
}

}  // namespace

std::vector<std::vector<std::string>> read_rdb(std::string_view data) {
  std::vector<std::vector<std::string>> vectors;
  std::size_t at = 0;
  while (at < data.size()) {
    const std::string_view rest = data.substr(at);
    std::uint32_t expected = 0;
    for (const char c : rest.substr(0, 4)) expected = expected << 8 | static_cast<unsigned char>(c);
    // More than zlib can make of the bytes that are left (1032 : 1) is a lie, and must not be allocated.
    std::size_t used = 0;
    std::optional<std::string> record;
    if (rest.size() > 4 && expected / 1032 <= rest.size()) record = inflate_front(rest.substr(4), expected, &used);
    if (!record) throw DamagedRecord("the record at byte " + std::to_string(at) + " is damaged");
    at += 4 + used;
    if (auto lines = character_vector(*record)) vectors.push_back(std::move(*lines));
  }
  return vectors;
}

Text read_text(const fs::path& path) {
  Text text;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) throw InputError("--text: '" + path.string() + "' does not exist");
  if (!fs::is_directory(status)) {
    std::string fault = path.extension() == ".rdb" ? "no record holds R's character vectors" : "it holds NUL bytes";
    try {
      if (add_file(path, text)) return text;
    } catch (const DamagedRecord& damaged) {
      fault = damaged.what();
    }
    throw InputError("--text: '" + path.string() + "' is not text (" + fault +
                     "); give a text file, a folder of them, or an Rdata.rdb");
  }
  std::vector<fs::path> files;
  const auto options = fs::directory_options::skip_permission_denied;
  for (auto entry = fs::recursive_directory_iterator(path, options, error);
       !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    if (passed_over(entry->path())) {
      if (entry->is_directory()) entry.disable_recursion_pending();
      continue;
    }
    if (!entry->is_regular_file() || static_cast<std::int64_t>(entry->file_size()) > largest_file) continue;
    if (is_prose_or_source(entry->path())) files.push_back(entry->path());
  }
  std::sort(files.begin(), files.end());
  for (const fs::path& file : files) {
    try {
      add_file(file, text);
    } catch (const DamagedRecord&) {  // an .rdb of another compression; a folder may hold anything
      continue;
    }
  }
  if (text.files == 0) throw InputError("--text: '" + path.string() + "' holds no text file");
  return text;
}

}  // namespace tiny_lm
