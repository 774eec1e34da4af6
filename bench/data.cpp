// Inputs of the benchmark: see data.hpp. Noise is a hash of (seed, index) turned into a nearly normal number (the sum
// of four uniform ones), so that any element can be made by any thread.
#include "bench/data.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace logitless::bench {

namespace {

// splitmix64
std::uint64_t hash_of(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15u + index;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

double uniform(std::uint64_t seed, std::int64_t index) {
  return static_cast<double>(hash_of(seed, static_cast<std::uint64_t>(index)) >> 11) * 0x1p-53;
}

// Mean 0, variance 1, |x| < 3.5.
float normal(std::uint64_t seed, std::int64_t index) {
  const std::uint64_t h = hash_of(seed, static_cast<std::uint64_t>(index));
  const auto sum = static_cast<std::int32_t>((h & 0xffff) + (h >> 16 & 0xffff) + (h >> 32 & 0xffff) + (h >> 48));
  return static_cast<float>(sum - 131070) * (1.0f / 37837.2f);
}

enum Stream : std::uint64_t {
  hidden_stream = 1,
  weight_stream,
  target_stream,
  ignore_stream,
  lift_stream,
  logit_stream
};
std::uint64_t stream(std::uint64_t seed, Stream which) { return seed * 64 + which; }

constexpr float noise = 1.5f;          // standard deviation of the logits around the log prior
constexpr float prior_feature = 4.0f;  // X's first column: carries the log prior

float log_prior(std::int64_t j) { return 5.0f - std::log(static_cast<float>(j + 1)); }
// 0 to 10: rows from lost to sure.
float lift(const DataRequest& request, std::int64_t i) {
  return request.trained ? static_cast<float>(10.0 * uniform(stream(request.seed, lift_stream), i)) : 0.0f;
}

void put(void* to, DType dtype, std::int64_t i, float value) {
  if (dtype == DType::f32) {
    static_cast<float*>(to)[i] = value;
  } else if (dtype == DType::bf16) {
    static_cast<bfloat16*>(to)[i] = bfloat16(value);
  } else {
    static_cast<float16*>(to)[i] = float16(value);
  }
}

// The target that row i has or, when it is ignored, would have.
std::int64_t class_of(const DataRequest& request, std::int64_t i) {
  const double u = uniform(stream(request.seed, target_stream), i);
  const auto classes = static_cast<double>(request.vocab);
  const double j = request.trained ? std::exp(u * std::log(classes + 1.0)) - 1.0 : u * classes;
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(j), 0, request.vocab - 1);
}

}  // namespace

std::vector<std::int32_t> make_targets(const DataRequest& request) {
  std::vector<std::int32_t> targets(static_cast<std::size_t>(request.rows));
  for (std::int64_t i = 0; i < request.rows; ++i) {
    const bool ignore = uniform(stream(request.seed, ignore_stream), i) < request.ignored;
    targets[static_cast<std::size_t>(i)] = ignore ? -100 : static_cast<std::int32_t>(class_of(request, i));
  }
  // At least one row is kept, so that the mean exists at any size.
  if (request.rows > 0 && count_kept(targets) == 0) targets[0] = static_cast<std::int32_t>(class_of(request, 0));
  return targets;
}

LinearData make_linear(Team& team, const DataRequest& request) {
  const std::int64_t h = request.hidden;
  const std::size_t element = size_of(request.dtype);
  LinearData data{Array(static_cast<std::size_t>(request.rows * h) * element),
                  Array(static_cast<std::size_t>(request.vocab * h) * element), make_targets(request)};
  const float scale = (request.trained ? noise : 1.0f) / std::sqrt(static_cast<float>(h));
  const std::uint64_t weights = stream(request.seed, weight_stream), hiddens = stream(request.seed, hidden_stream);
  const auto weight = [&](std::int64_t j, std::int64_t k) {
    if (request.trained && k == 0 && h > 1) return log_prior(j) / prior_feature;
    return scale * normal(weights, j * h + k);
  };
  team.parallel_for(request.vocab, [&](std::int64_t j, int) {
    for (std::int64_t k = 0; k < h; ++k) put(data.w.data(), request.dtype, j * h + k, weight(j, k));
  });
  team.parallel_for(request.rows, [&](std::int64_t i, int) {
    // w_y / noise^2 has the dot product 1 with w_y, so this lifts the target's logit by `up`.
    const float up = lift(request, i) / (noise * noise);
    const std::int64_t y = class_of(request, i);
    for (std::int64_t k = 0; k < h; ++k) {
      float value = normal(hiddens, i * h + k) + up * weight(y, k);
      if (request.trained && k == 0 && h > 1) value = prior_feature;
      put(data.x.data(), request.dtype, i * h + k, value);
    }
  });
  return data;
}

LogitsData make_logits(Team& team, const DataRequest& request) {
  const std::int64_t v = request.vocab;
  LogitsData data{Array(static_cast<std::size_t>(request.rows * v) * size_of(request.dtype)), make_targets(request)};
  std::vector<float> prior(static_cast<std::size_t>(v), 0.0f);
  if (request.trained) {
    for (std::int64_t j = 0; j < v; ++j) prior[static_cast<std::size_t>(j)] = log_prior(j);
  }
  const std::uint64_t logits = stream(request.seed, logit_stream);
  team.parallel_for(request.rows, [&](std::int64_t i, int) {
    for (std::int64_t j = 0; j < v; ++j) {
      put(data.z.data(), request.dtype, i * v + j,
          prior[static_cast<std::size_t>(j)] + noise * normal(logits, i * v + j));
    }
    const std::int64_t y = class_of(request, i);
    const float value = prior[static_cast<std::size_t>(y)] + noise * normal(logits, i * v + y) + lift(request, i);
    put(data.z.data(), request.dtype, i * v + y, value);
  });
  return data;
}

std::int64_t count_kept(const std::vector<std::int32_t>& targets) {
  return std::count_if(targets.begin(), targets.end(), [](std::int32_t y) { return y >= 0; });
}

}  // namespace logitless::bench
