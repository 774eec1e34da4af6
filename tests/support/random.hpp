// Seeded random numbers for tests: the same on every machine and standard library (std:: distributions are not).
// uniform [0,1), normal (Box-Muller), integers, and Zipf ranks as in the frequencies of words.
#pragma once

#include <cmath>
#include <cstdint>

namespace logitless::test {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du) {}

  std::uint64_t bits() {  // SplitMix64
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t x = state_;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  // In [0, n).
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(n)); }
  double normal() {
    if (has_spare_) {
      has_spare_ = false;
      return spare_;
    }
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    const double angle = 6.283185307179586 * uniform();
    spare_ = radius * std::sin(angle);
    has_spare_ = true;
    return radius * std::cos(angle);
  }
  // A rank in [0, n) with probability about proportional to 1 / (rank + 1).
  std::int64_t zipf(std::int64_t n) {
    const auto rank = static_cast<std::int64_t>(std::exp(uniform() * std::log(static_cast<double>(n) + 1.0))) - 1;
    return rank < 0 ? 0 : (rank >= n ? n - 1 : rank);
  }

 private:
  std::uint64_t state_;
  double spare_ = 0.0;
  bool has_spare_ = false;
};

}  // namespace logitless::test
