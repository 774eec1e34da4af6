// Inputs from a seed: logits of standard deviation 2 (X of 1, W of 2 / sqrt(H)), uniform targets, one row in 17
// ignored; and what an option's flag asks for with `random`: weights around 1 or of any sign, masks that drop a quarter
// of the classes, distributions of the spread that logits have, log-probabilities near those of the targets, so that
// both branches of a clip are met. The same numbers for a seed on every machine and standard library.

#include <algorithm>
#include <cmath>
#include <memory>
#include <unordered_set>

#include "flags.hpp"
#include "inputs.hpp"

namespace logitless::cli {
namespace {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u) {}
  std::uint64_t bits() {  // SplitMix64
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t x = state_;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  // Nearly normal with variance 1: the sum of four uniform numbers.
  float bell() {
    std::uint64_t const b = bits();
    std::uint64_t const sum = (b & 0xffffu) + ((b >> 16) & 0xffffu) + ((b >> 32) & 0xffffu) + (b >> 48);
    return (static_cast<float>(sum) - 131070.0F) * static_cast<float>(1.7320508 / 65536.0);
  }
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(n)); }

 private:
  std::uint64_t state_;
};

// row(numbers of one row) fills each row in fp32.
template <class Fill>
Array matrix(DType dtype, std::int64_t rows, std::int64_t cols, const Fill& fill) {
  Array const out(dtype, {rows, cols});
  std::vector<float> row(static_cast<std::size_t>(cols));
  for (std::int64_t i = 0; i < rows; ++i) {
    fill(row);
    convert(row.data(), DType::f32, out.as<std::byte>() + i * cols * static_cast<std::int64_t>(size_of(dtype)), dtype,
            cols);
  }
  return out;
}
Array random_matrix(Random& random, DType dtype, std::int64_t rows, std::int64_t cols, double scale) {
  return matrix(dtype, rows, cols, [&](std::vector<float>& row) {
    for (float& value : row) value = random.bell() * static_cast<float>(scale);
  });
}
template <class Number>
Array vector(DType dtype, std::int64_t count, const Number& number) {
  Array const out(dtype, {count});
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = number();
  convert(values.data(), DType::f32, out.data(), dtype, count);
  return out;
}

// exp of numbers of standard deviation 2, to a sum of `mass`.
void distribution(Random& random, std::vector<float>& row, float mass) {
  float sum = 0.0F;
  for (float& value : row) sum += value = std::exp(2.0F * random.bell());
  for (float& value : row) value *= mass / sum;
}

// Distinct classes of each row.
Array random_ids(Random& random, std::int64_t rows, std::int64_t k, std::int64_t vocab) {
  Array const out(DType::i64, {rows, k});
  std::unordered_set<std::int64_t> taken;
  for (std::int64_t i = 0; i < rows; ++i) {
    taken.clear();
    for (std::int64_t at = 0; at < k; ++at) {
      std::int64_t id = random.below(vocab);
      while (!taken.insert(id).second) id = (id + 1) % vocab;
      out.as<std::int64_t>()[i * k + at] = id;
    }
  }
  return out;
}

std::uint64_t seed_of(const std::string& flag, std::uint64_t seed) {
  for (char const c : flag) seed = seed * 1099511628211u + static_cast<unsigned char>(c);
  return seed;
}

// The tensor of one option, from a seed of its own: it does not depend on what else is asked for.
Array made(const std::string& flag, std::int64_t count, const MadeUp& m, const Inputs& inputs) {
  Random random(seed_of(flag, m.seed));
  if (count != 0 && flag != "--topk-ids" && flag != "--teacher-hidden") {
    refuse(flag, "random:" + std::to_string(count), "random; its extents follow from the others");
  }
  constexpr auto f32 = DType::f32;
  if (flag == "--bias" || flag == "--teacher-bias") {
    return vector(m.dtype, m.vocab, [&] { return random.bell(); });
  }
  if (flag == "--class-weight") {
    return vector(f32, m.vocab, [&] { return std::exp(0.5F * random.bell()); });
  }
  if (flag == "--row-weight") {
    return vector(f32, m.rows, [&] { return random.below(8) == 0 ? 0.0F : random.bell(); });
  }
  if (flag == "--temperature") {
    return vector(f32, m.rows, [&] { return std::exp(0.5F * random.bell()); });
  }
  if (flag == "--keep-mask") {
    Array const out(DType::u8, {m.rows, (m.vocab + 7) / 8});
    for (std::int64_t n = 0; n < out.count(); ++n) {
      std::uint64_t const b = random.bits();
      out.as<std::uint8_t>()[n] = static_cast<std::uint8_t>(b | b >> 8);
    }
    return out;
  }
  if (flag == "--logit-floor") {
    return vector(f32, m.rows, [&] { return random.bell() - 1.0F; });
  }
  if (flag == "--soft-targets") {
    return matrix(m.dtype, m.rows, m.vocab, [&](std::vector<float>& row) { distribution(random, row, 1.0F); });
  }
  if (flag == "--topk-ids") {
    std::int64_t const k = count == 0 ? std::min<std::int64_t>(8, m.vocab) : count;
    if (k > m.vocab) refuse(flag, "random:" + std::to_string(count), "at most --vocab " + std::to_string(m.vocab));
    return random_ids(random, m.rows, k, m.vocab);
  }
  if (flag == "--topk-probs" || flag == "--topk-logprobs") {
    if (!inputs.options.topk_ids) throw UsageError(flag + ": 'random' without --topk-ids, which say how many");
    return matrix(f32, m.rows, inputs.options.topk_ids.extent(1), [&](std::vector<float>& row) {
      distribution(random, row, 0.75F);  // --rest has a quarter to give
      if (flag == "--topk-logprobs") {
        for (float& value : row) value = std::log(value);
      }
    });
  }
  if (flag == "--teacher-hidden") {
    return random_matrix(random, m.dtype, m.rows, count == 0 ? std::max<std::int64_t>(1, m.hidden / 2) : count, 1.0);
  }
  if (flag == "--teacher-weight") {
    if (!inputs.options.teacher_hidden) {
      throw UsageError("--teacher-weight: 'random' without --teacher-hidden, which says how wide it is");
    }
    std::int64_t const width = inputs.options.teacher_hidden.extent(1);
    return random_matrix(random, m.dtype, m.vocab, width, 2.0 / std::sqrt(static_cast<double>(width)));
  }
  if (flag == "--policy-old-logprob" || flag == "--policy-ref-logprob") {
    auto const middle = static_cast<float>(-std::log(static_cast<double>(m.vocab)) - 2.0);
    return vector(f32, m.rows, [&] { return std::min(-0.01F, middle + 2.0F * random.bell()); });
  }
  if (flag == "--policy-advantage") {
    return vector(f32, m.rows, [&] { return random.bell(); });
  }
  throw UsageError(flag + ": 'random' is not made up; give a file");
}

}  // namespace

Inputs make_up(const MadeUp& m, const InputFlags& flags, std::int64_t ignore_index) {
  Random random(m.seed);
  Inputs inputs;
  inputs.kind = m.kind;
  inputs.rows = m.rows;
  inputs.hidden = m.kind == Kind::linear ? m.hidden : 0;
  inputs.vocab = m.vocab;
  auto const keep = [&](const Array& array) {
    inputs.owners.push_back(std::make_shared<Array>(array));
    return array.tensor();
  };
  if (m.kind == Kind::linear) {
    inputs.x = keep(random_matrix(random, m.dtype, m.rows, m.hidden, 1.0));
    inputs.w = keep(random_matrix(random, m.dtype, m.vocab, m.hidden, 2.0 / std::sqrt(static_cast<double>(m.hidden))));
  } else {
    inputs.z = keep(random_matrix(random, m.dtype, m.rows, m.vocab, 2.0));
  }
  Array const targets(DType::i64, {m.rows});
  for (std::int64_t i = 0; i < m.rows; ++i) {
    std::int64_t const y = random.below(m.vocab);
    targets.as<std::int64_t>()[i] = i % 17 == 16 ? ignore_index : y;
  }
  inputs.y = keep(targets);
  load_options(flags, inputs,
               [&](const std::string& flag, std::int64_t count) { return made(flag, count, m, inputs); });
  shift_targets(flags, ignore_index, inputs);
  return inputs;
}

}  // namespace logitless::cli
