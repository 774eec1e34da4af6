// Output of all commands: aligned text or one JSON object on stdout, progress on a terminal's stderr.

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "command.hpp"

namespace logitless::cli {
namespace {

[[noreturn]] void stdout_failed() {
  if (errno == EPIPE) throw ReaderLeft{};
  throw Failure(std::string("stdout: cannot be written: ") + std::strerror(errno));
}

}  // namespace

void print(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) stdout_failed();
}

void flush_stdout() {
  if (std::fflush(stdout) != 0) stdout_failed();
}

void Report::print(bool as_json) const {
  if (as_json) {
    Json object = Json::object();
    for (Line const& line : lines_) object[line.key] = line.value;
    cli::print(object.dump() + "\n");
    return;
  }
  std::size_t width = 0;
  for (Line const& line : lines_) {
    if (!line.text.empty()) width = std::max(width, std::strlen(line.key));
  }
  for (Line const& line : lines_) {
    if (line.text.empty()) continue;
    std::string key = line.key;
    std::replace(key.begin(), key.end(), '_', ' ');
    key.resize(width + 2, ' ');
    cli::print(key + line.text + "\n");
  }
}

std::string text_of(double x, int digits) {
  char text[40];
  std::snprintf(text, sizeof text, "%.*g", digits, x);
  return text;
}

std::string text_of_bytes(std::uint64_t bytes) {
  constexpr const char* units[] = {"KiB", "MiB", "GiB", "TiB"};
  std::string plain = std::to_string(bytes) + " bytes";
  if (bytes < 1024) return plain;
  auto value = static_cast<double>(bytes) / 1024.0;
  int unit = 0;
  for (; value >= 1024.0 && unit < 3; ++unit) value /= 1024.0;
  return text_of(value, 4) + " " + units[unit] + " (" + plain + ")";
}

Progress::Progress() : terminal_(::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (shown_) std::fputs("\r\x1b[K", stderr);
}

void Progress::show(const std::string& what) {
  if (!terminal_) return;
  std::fprintf(stderr, "\r\x1b[K%s", what.c_str());
  std::fflush(stderr);
  shown_ = true;
}

}  // namespace logitless::cli
