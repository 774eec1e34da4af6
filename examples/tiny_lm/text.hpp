// Where the words come from: a file, a folder, or the data of an R package; always a list of paragraphs.
//
// A paragraph is a run of lines without a blank one, trimmed and joined by single spaces. R's lazy-load database
// (Rdata.rdb) is records of [4 bytes: length, big-endian][zlib stream]; of each record the character vector inside is
// read as lines. Anything else is taken as UTF-8 text. Order is fixed (paths are sorted), so the same input gives the
// same tokens.
#pragma once

#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tiny_lm {

// What the user can put right: printed as one line.
struct InputError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct DamagedRecord : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Text {
  std::vector<std::string> paragraphs;
  std::int64_t files = 0;
  std::int64_t bytes = 0;  // of all paragraphs
};

Text read_text(const std::filesystem::path& path);

// The character vectors of an Rdata.rdb, each a list of lines. Records that hold something else are passed over; a
// damaged one throws DamagedRecord with its place.
std::vector<std::vector<std::string>> read_rdb(std::string_view data);

}  // namespace tiny_lm
