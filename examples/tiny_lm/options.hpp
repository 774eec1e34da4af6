// The command line of the example: one table gives parsing, help and the check of a resumed run.
//
// Values that shape the numbers of a training are kept in its checkpoint; a resumed run takes them from there and
// refuses others. Every mistake is one line that names the option, its value and what would be right (UsageError).
#pragma once

#include <cstdint>
#include <set>
#include <stdexcept>
#include <string>

#include "heads.hpp"

namespace tiny_lm {

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  // kept in the checkpoint
  std::string text;  // "": this repository's sources and documentation
  std::int64_t vocab = 16384;
  std::int64_t steps = 300;
  std::string head = "fp32";  // or bf16: operands of both heads
  std::int64_t rows = 512;    // tokens of a step
  std::int64_t hidden = 256;
  std::int64_t context = 6;
  std::int64_t inner = 512;
  double rate = 2e-3;
  double smoothing = 0, z_loss = 0, softcap = 0;   // of both heads; 0: none
  std::uint64_t budget = std::uint64_t{16} << 20;  // Logitless' workspace; 0: no limit
  std::int64_t threads = 0;                        // 0: all that this process may use
  std::int64_t seed = 1;
  std::int64_t every = 0;         // steps between held-out perplexities; 0: a tenth of all
  std::string products = "auto";  // or eigen, openblas
  // of this call alone
  std::string out = "out";
  bool resume = false;
  std::int64_t stop_after = 0;    // finish this step as if interrupted; 0: never
  std::string cli = "logitless";  // for the commands shown at the end
  std::string extract;            // write the text there and stop
  std::string measure_head;       // "dense" or "logitless": measure one head and stop
  bool help = false;

  std::set<std::string> given;  // names, "--steps"
  bool bf16() const { return head == "bf16"; }
  LossOptions loss() const { return {smoothing, z_loss, softcap}; }
};

Options parse_options(int argc, const char* const* argv);
std::string help_text();

// As JSON text, and back; `given` options that contradict the JSON are refused.
std::string options_to_json(const Options& options);
void options_from_json(const std::string& json, Options& options);

std::string bytes_text(double bytes);     // "16 MiB"
std::string number_text(std::int64_t n);  // "1,234,567"

}  // namespace tiny_lm
