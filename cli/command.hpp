// What the commands share: how they are registered, how they fail, how they print.
//
// A command adds its flags to a subcommand and leaves a function that runs it; main() calls that function after the
// whole line was understood. Exit status: 0 done; 1 the work failed (files, data, machine, a check beyond tolerance);
// 2 the command line itself is wrong. Every failure is one line on stderr.
#pragma once

#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// Its header is read by the files that define flags, and by no other: it costs seconds a file.
namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace logitless::cli {

using Json = nlohmann::ordered_json;

// The command line is wrong: exit 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
// The work failed: exit 1.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
// Whoever read stdout has gone (`| head`): exit 0 without a word.
struct ReaderLeft {};

// The command that the line asks for; returns the exit status.
using Action = std::function<int()>;

void add_info(CLI::App& root, Action& action);
void add_plan(CLI::App& root, Action& action);
void add_loss(CLI::App& root, Action& action);
void add_check(CLI::App& root, Action& action);
void add_bench(CLI::App& root, Action& action);

// ---- printing -------------------------------------------------------------------------------------------------------

// To stdout; throws Failure when it cannot be written (a full disk), ReaderLeft on a closed pipe.
void print(const std::string& text);
void flush_stdout();

// One line of a report: a JSON key with its value, and the text for people (empty: not shown there).
class Report {
 public:
  void add(const char* key, Json value, std::string text) {
    lines_.push_back({key, std::move(value), std::move(text)});
  }
  void print(bool as_json) const;

 private:
  struct Line {
    const char* key;
    Json value;
    std::string text;
  };
  std::vector<Line> lines_;
};

std::string text_of(double x, int digits = 10);  // shortest of %g
std::string text_of_bytes(std::uint64_t bytes);  // "1.25 MiB (1310720 bytes)"

// One line on stderr that is rewritten, on a terminal only; gone when it is destroyed.
class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void show(const std::string& what);

 private:
  bool terminal_;
  bool shown_ = false;
};

}  // namespace logitless::cli
