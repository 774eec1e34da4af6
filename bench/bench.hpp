// The benchmark behind `logitless bench`: what this machine can do at most, what the library reaches of it, and what
// the unfused pipeline needs, alternating in one run. Text to stdout, and one JSON object on request.
//
// Everything is measured through the public C++ face. Data is never zero (denormals and power make zeros lie), and
// every fraction is of a ceiling probed between the very runs it judges, because shared machines drift by minutes.
#pragma once

#include <cstdint>
#include <string>

#include "logitless/logitless.hpp"

namespace logitless::bench {

struct BenchRequest {
  // ceilings: the machine alone. linear, logits, options: speed. error: gradient errors against double, ours over the
  // plain low-precision pipeline's. all: everything.
  std::string suite = "linear";
  std::int64_t rows = 2048, hidden = 2048, vocab = 32768;  // R, H, V; hidden is not used by logits
  std::string dtype;  // of X, W and logits: f32, bf16, f16, several with commas; "": bf16, for logits f32,bf16
  std::string data = "trained";        // trained: loss of a few nats, Zipf targets; random: uniform targets
  double ignored = 1.0 / 17;           // share of rows whose target is ignore_index
  std::uint64_t budget = 64ull << 20;  // bytes of the rows "within a budget"
  Backend backend = Backend::cpu;  // cpu or cuda; on cuda the suites linear and logits, without ceilings of the host
  int device = 0;                  // of cuda
  int threads = 0;                 // 0: the context's default
  std::string cpu_target;          // "": the context's default
  double seconds = 45.0;           // time to aim at for each suite; every row runs once even if it takes longer
  int repeats = 0;                 // rounds of each suite; 0: as many as fit into `seconds`, 15 at most
  bool dense = true;               // run the unfused baseline too
  bool peers = false;              // run bench/peers/peers.py (torch) on the same shape afterwards
  std::string python = "python3";  // interpreter for peers
  std::string peers_script;        // "": the script of the source tree this was built from
  std::string json;                // "": no JSON; "-": JSON on stdout instead of text; else a file
  std::uint64_t seed = 1;
};

// 0, or 1 after a line on stderr (JSON file not writable, peers failed). Throws std::invalid_argument for a request
// that makes no sense (one line: argument, value, what would be right), logitless::Error from the library and
// std::runtime_error from CUDA.
int run_bench(const BenchRequest& request);

}  // namespace logitless::bench
