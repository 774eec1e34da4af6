// A pairwise cover: rows of levels, one level a factor, such that every pair of levels of every two factors occurs in
// some row. Greedy and seeded; about (largest level count)^2 rows for a few dozen factors.
#pragma once

#include <cstdint>
#include <vector>

#include "support/random.hpp"

namespace logitless::test {

using Row = std::vector<int>;

inline std::vector<Row> pairwise_cover(const std::vector<int>& levels, std::uint64_t seed) {
  const std::size_t factors = levels.size();
  Random random(seed);
  // open[f][g][a * levels[g] + b]: the pair (f = a, g = b), f < g, has not occurred yet.
  std::vector<std::vector<std::vector<char>>> open(factors, std::vector<std::vector<char>>(factors));
  std::size_t left = 0;
  for (std::size_t f = 0; f < factors; ++f) {
    for (std::size_t g = f + 1; g < factors; ++g) {
      open[f][g].assign(static_cast<std::size_t>(levels[f] * levels[g]), 1);
      left += open[f][g].size();
    }
  }
  auto is_open = [&](std::size_t f, int a, std::size_t g, int b) -> char& {
    return f < g ? open[f][g][static_cast<std::size_t>(a * levels[g] + b)]
                 : open[g][f][static_cast<std::size_t>(b * levels[f] + a)];
  };

  std::vector<Row> rows;
  while (left > 0) {
    // Start from some open pair, so that every row makes progress.
    Row row(factors, -1);
    std::vector<std::size_t> fixed;
    const auto start = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(factors * factors)));
    for (std::size_t n = 0; n < factors * factors && fixed.empty(); ++n) {
      const std::size_t f = (start + n) % (factors * factors) / factors;
      const std::size_t g = (start + n) % factors;
      if (f >= g) continue;
      for (int a = 0; a < levels[f] && fixed.empty(); ++a) {
        for (int b = 0; b < levels[g] && fixed.empty(); ++b) {
          if (is_open(f, a, g, b) == 0) continue;
          row[f] = a, row[g] = b;
          fixed = {f, g};
        }
      }
    }
    std::vector<std::size_t> order;
    for (std::size_t f = 0; f < factors; ++f) {
      if (row[f] < 0) order.push_back(f);
    }
    for (std::size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
    }
    for (std::size_t f : order) {
      const auto first = static_cast<int>(random.below(levels[f]));  // ties go to a random level
      int best = first, best_gain = -1;
      for (int n = 0; n < levels[f]; ++n) {
        const int a = (first + n) % levels[f];
        int gain = 0;
        for (std::size_t g : fixed) gain += is_open(f, a, g, row[g]);
        if (gain > best_gain) best = a, best_gain = gain;
      }
      row[f] = best;
      fixed.push_back(f);
    }
    for (std::size_t f = 0; f < factors; ++f) {
      for (std::size_t g = f + 1; g < factors; ++g) {
        char& pair = is_open(f, row[f], g, row[g]);
        left -= static_cast<std::size_t>(pair);
        pair = 0;
      }
    }
    rows.push_back(row);
  }
  return rows;
}

}  // namespace logitless::test
