// Inputs of the benchmark, from a seed alone: the same numbers for any number of threads.
//
// trained: what a head sees late in training. Targets follow Zipf's law, logits are a log prior plus noise plus a lift
// of the target that varies by row, so that the loss is a few nats and rows differ from sure to lost. random: noise and
// uniform targets. Never zeros: their products are denormal or free of cost, and timings then describe nothing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/team.hpp"
#include "logitless/logitless.hpp"

namespace logitless::bench {

struct DataRequest {
  std::int64_t rows = 0, hidden = 0, vocab = 0;
  DType dtype = DType::f32;
  bool trained = true;
  double ignored = 0.0;  // share of rows without target
  std::uint64_t seed = 1;
};

// y [R]; every ignored row carries ignore_index -100. The same seed with a larger share ignores a superset of rows.
std::vector<std::int32_t> make_targets(const DataRequest& request);

struct LinearData {
  Array x, w;                         // X [R,H], W [V,H] in the request's dtype
  std::vector<std::int32_t> targets;  // [R]
};
LinearData make_linear(Team& team, const DataRequest& request);

// z [R,V] in the request's dtype.
struct LogitsData {
  Array z;
  std::vector<std::int32_t> targets;
};
LogitsData make_logits(Team& team, const DataRequest& request);

std::int64_t count_kept(const std::vector<std::int32_t>& targets);

}  // namespace logitless::bench
