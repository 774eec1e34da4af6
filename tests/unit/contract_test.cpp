// The mathematics of src/contract by its own laws: number formats, the exponential, the merge of row statistics as an
// associative operation with identity, and the identities of losses and gradients that the design promises. Bounds are
// counted in roundings of the type that computes. The same laws hold for float and double, so both are instantiated.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "contract/coefficients.hpp"
#include "support/random.hpp"

namespace logitless::test {
namespace {

using contract::RowResult;
using contract::RowStatistics;

constexpr float kInf = std::numeric_limits<float>::infinity();

// ---- numbers -----------------------------------------------------------------------------------------------------

// A 16-bit format by its definition: the value of its fields in double.
struct Format {
  int exponent_bits, mantissa_bits;
  float (*decode)(std::uint16_t);
  std::uint16_t (*encode)(float);

  double value(std::uint32_t bits) const {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const auto field = static_cast<int>(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
    const double mantissa = (bits & ((1u << mantissa_bits) - 1)) * std::ldexp(1.0, -mantissa_bits);
    const double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
    if (field == (1 << exponent_bits) - 1) {
      return mantissa == 0.0 ? sign * static_cast<double>(kInf) : std::numeric_limits<double>::quiet_NaN();
    }
    return sign * (field == 0 ? std::ldexp(mantissa, 1 - bias) : std::ldexp(1.0 + mantissa, field - bias));
  }
};
const Format kFormats[] = {{8, 7, contract::bf16_to_float, contract::float_to_bf16},
                           {5, 10, contract::f16_to_float, contract::float_to_f16}};

TEST(Numeric, EveryNumberOfSixteenBitsIsDecodedAndComesBack) {
  for (const Format& f : kFormats) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      const auto half = static_cast<std::uint16_t>(bits);
      const float got = f.decode(half);
      const double want = f.value(bits);
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(got)) << bits;
        ASSERT_TRUE(std::isnan(f.value(f.encode(got)))) << bits;
        ASSERT_NE(f.encode(got) & (1u << (f.mantissa_bits - 1)), 0u) << "quiet: " << bits;
        continue;
      }
      ASSERT_EQ(static_cast<double>(got), want) << bits;
      ASSERT_EQ(std::signbit(got), (bits & 0x8000u) != 0) << bits;
      ASSERT_EQ(f.encode(got), half) << bits;
    }
  }
}

// Between every two neighbours: the middle goes to the even one, a float either side of it to the nearer.
TEST(Numeric, RoundingIsToNearestWithTiesToEven) {
  for (const Format& f : kFormats) {
    const std::uint32_t infinity = ((1u << f.exponent_bits) - 1) << f.mantissa_bits;
    for (std::uint32_t bits = 0; bits + 1 < infinity; ++bits) {
      // The middle of two neighbours has one bit more than they have: a float holds it, except where bf16 is subnormal.
      const double middle = (f.value(bits) + f.value(bits + 1)) / 2.0;
      const auto as_float = static_cast<float>(middle);
      ASSERT_EQ(static_cast<double>(as_float), middle);
      const std::uint32_t even = (bits & 1) == 0 ? bits : bits + 1;
      for (const std::uint32_t sign : {0u, 0x8000u}) {
        const float side = sign == 0 ? 1.0f : -1.0f;
        ASSERT_EQ(f.encode(side * as_float), sign | even) << bits;
        ASSERT_EQ(f.encode(side * std::nextafter(as_float, 0.0f)), sign | bits) << bits;
        ASSERT_EQ(f.encode(side * std::nextafter(as_float, kInf)), sign | (bits + 1)) << bits;
      }
    }
    // From half a unit beyond the largest number on: infinity.
    const double largest = f.value(infinity - 1), unit = largest - f.value(infinity - 2);
    const auto beyond = static_cast<float>(largest + unit / 2.0);
    if (std::isfinite(beyond)) {
      EXPECT_EQ(f.encode(std::nextafter(beyond, 0.0f)), infinity - 1);
      EXPECT_EQ(f.encode(beyond), infinity);
    }
    EXPECT_EQ(f.encode(std::numeric_limits<float>::max()), infinity);
    EXPECT_EQ(f.encode(kInf), infinity);
    EXPECT_EQ(f.encode(-kInf), infinity | 0x8000u);
    EXPECT_EQ(f.encode(std::numeric_limits<float>::denorm_min()), 0u);
    EXPECT_EQ(f.encode(-0.0f), 0x8000u);
  }
}

TEST(Numeric, NanStaysNanWhateverItsPayload) {
  for (const Format& f : kFormats) {
    for (std::uint32_t payload : {1u, 2u, 0x1000u, 0x1fffu, 0x2000u, 0xffffu, 0x3fffffu, 0x400000u, 0x7fffffu}) {
      for (std::uint32_t sign : {0u, 0x80000000u}) {
        const float nan = contract::float_of(sign | 0x7f800000u | payload);
        ASSERT_TRUE(std::isnan(f.value(f.encode(nan)))) << std::hex << payload;
      }
    }
  }
}

TEST(Numeric, PolynomialOfTheExponential) {
  EXPECT_EQ(contract::exp2_polynomial(0.0f), 1.0f);
  double worst_float = 0.0, worst_double = 0.0, sum = 0.0;
  const int steps = 1 << 18;
  for (int n = -steps; n <= steps; ++n) {
    const float x = static_cast<float>(n) / static_cast<float>(2 * steps);
    const double want = std::exp2(static_cast<double>(x));
    const double error = static_cast<double>(contract::exp2_polynomial(x)) / want - 1.0;
    worst_float = std::max(worst_float, std::abs(error));
    sum += error;
    worst_double = std::max(worst_double, std::abs(contract::exp2_polynomial(static_cast<double>(x)) / want - 1.0));
  }
  EXPECT_LE(worst_double, 1.1e-7);  // what numeric.hpp states
  EXPECT_LE(worst_float, 1.75e-7);
  EXPECT_LE(std::abs(sum / (2 * steps + 1)), 3e-8);  // a bias would shift every loss
}

TEST(Numeric, ExponentCancelsACommonOffset) {
  EXPECT_EQ(contract::exponent(1e16f, 1e16f), 0.0f);
  EXPECT_EQ(contract::exponent(-kInf, 3.0f), -kInf);
  EXPECT_NEAR(contract::exponent(10004.0f, 10000.0f), 4.0 / std::log(2.0), 1e-6);
}

// ---- statistics --------------------------------------------------------------------------------------------------

template <class F>
class Statistics : public ::testing::Test {
 public:
  static constexpr double rounding = std::numeric_limits<F>::epsilon() / 2.0;
};
using Floats = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Statistics, Floats);

template <class F>
RowStatistics<F> statistics_of(const std::vector<F>& z, std::size_t from, std::size_t to, std::size_t target) {
  RowStatistics<F> a = RowStatistics<F>::identity();
  for (std::size_t j = from; j < to; ++j) a = j == target ? absorb_target(a, z[j]) : absorb(a, z[j]);
  return a;
}

template <class F>
std::vector<F> row(Random& random, std::size_t n, double spread, double masked) {
  std::vector<F> z(n);
  for (F& value : z) {
    value = random.uniform() < masked ? -static_cast<F>(kInf) : static_cast<F>(spread * random.normal());
  }
  return z;
}

// The definitions, in double.
struct Exact {
  double lse = 0.0, q = 0.0, nll = 0.0, sum = 0.0;  // q = 1 - p_y; sum of z - top over the classes
  double top = -INFINITY;
  std::vector<double> p;
};
template <class F>
Exact exact_of(const std::vector<F>& z, std::size_t target) {
  Exact e;
  for (F value : z) e.top = std::max(e.top, static_cast<double>(value));
  double r = 0.0, s = 0.0;
  for (std::size_t j = 0; j < z.size(); ++j) {
    const double x = std::exp(static_cast<double>(z[j]) - e.top);
    s += x;
    if (j != target) r += x;
    e.sum += static_cast<double>(z[j]) - e.top;
  }
  e.lse = e.top + std::log(s);
  e.q = r / s;
  e.nll = (e.top - static_cast<double>(z[target])) + std::log(s);
  if (r < 0.5 * s) e.nll = std::log1p(r / std::exp(static_cast<double>(z[target]) - e.top));
  for (F value : z) e.p.push_back(std::exp(static_cast<double>(value) - e.top) / s);
  return e;
}

template <class F>
bool same_bits(const RowStatistics<F>& a, const RowStatistics<F>& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// What two roads to the same statistics may differ by: n roundings of sums, and exponents of up to `spread` nats.
template <class F>
void expect_equivalent(const RowStatistics<F>& a, const RowStatistics<F>& b, double n, double spread, double unit) {
  ASSERT_EQ(a.m, b.m);
  ASSERT_EQ(a.n, b.n);
  ASSERT_NEAR(a.r, b.r, (n + 4.0 + 3.0 * spread) * 4.0 * unit * static_cast<double>(b.r));
  if (std::isinf(static_cast<double>(b.k))) {
    ASSERT_EQ(a.k, b.k);
  } else {
    // Moving references adds and takes away up to n * spread.
    ASSERT_NEAR(a.k, b.k, (n + 4.0) * 4.0 * unit * static_cast<double>(b.n) * spread);
  }
}

TYPED_TEST(Statistics, IdentityChangesNoBit) {
  using F = TypeParam;
  Random random(1);
  const RowStatistics<F> none = RowStatistics<F>::identity();
  EXPECT_TRUE(same_bits(merge(none, none), none));
  for (int n = 0; n < 200; ++n) {
    const std::vector<F> z = row<F>(random, 20, 30.0, n % 3 * 0.4);
    const RowStatistics<F> a = statistics_of(z, 0, 20, static_cast<std::size_t>(n % 20));
    ASSERT_TRUE(same_bits(merge(a, none), a)) << n;
    ASSERT_TRUE(same_bits(merge(none, a), a)) << n;
  }
}

TYPED_TEST(Statistics, MergeCommutes) {
  using F = TypeParam;
  Random random(2);
  for (int n = 0; n < 500; ++n) {
    const std::vector<F> z = row<F>(random, 24, 50.0, n % 2 * 0.3);
    const RowStatistics<F> a = statistics_of(z, 0, 11, 5), b = statistics_of(z, 11, 24, 5);
    ASSERT_TRUE(same_bits(merge(a, b), merge(b, a))) << n;
  }
}

TYPED_TEST(Statistics, MergeIsAssociativeUpToRounding) {
  using F = TypeParam;
  Random random(3);
  for (int n = 0; n < 500; ++n) {
    const double spread = n % 5 == 4 ? 60.0 : 3.0;
    const std::vector<F> z = row<F>(random, 30, spread, n % 3 == 2 ? 0.4 : 0.0);
    const RowStatistics<F> a = statistics_of(z, 0, 10, 3), b = statistics_of(z, 10, 17, 3),
                           c = statistics_of(z, 17, 30, 3);
    expect_equivalent(merge(merge(a, b), c), merge(a, merge(b, c)), 4.0, 8.0 * spread, TestFixture::rounding);
  }
}

// Any split of the vocabulary, any order of its parts and of its classes: the same lse, loss and 1 - p_y.
TYPED_TEST(Statistics, SplitsAndPermutationsAgreeWithTheDefinition) {
  using F = TypeParam;
  Random random(4);
  for (int n = 0; n < 300; ++n) {
    const std::size_t vocab = 1 + static_cast<std::size_t>(random.below(200));
    const double spread = n % 4 == 3 ? 40.0 : 2.0;
    std::vector<F> z = row<F>(random, vocab, spread, n % 5 == 4 ? 0.3 : 0.0);
    std::size_t target = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(vocab)));
    z[target] = static_cast<F>(spread * random.normal());
    const Exact exact = exact_of(z, target);
    for (int split = 0; split < 6; ++split) {
      // A random permutation that takes the target along.
      for (std::size_t i = vocab; i > 1 && split > 0; --i) {
        const auto j = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)));
        std::swap(z[i - 1], z[j]);
        if (target == i - 1) {
          target = j;
        } else if (target == j) {
          target = i - 1;
        }
      }
      std::vector<RowStatistics<F>> parts;
      for (std::size_t from = 0; from < vocab;) {
        const std::size_t to = std::min(vocab, from + 1 + static_cast<std::size_t>(random.below(60)));
        parts.push_back(statistics_of(z, from, to, target));
        from = to;
      }
      while (parts.size() > 1) {  // a random tree
        const auto i = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(parts.size() - 1)));
        parts[i] = merge(parts[i], parts[i + 1]);
        parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(i + 1));
      }
      const RowResult<F> got = finish(parts[0], z[target]);
      const double v = static_cast<double>(vocab), unit = TestFixture::rounding;
      const double relative = (2.0 * v + 8.0 + 24.0 * spread) * unit;  // of sums of exponentials
      ASSERT_FALSE(got.bad);
      ASSERT_NEAR(got.lse(), exact.lse, relative + 4.0 * unit * std::abs(exact.lse));
      ASSERT_NEAR(got.q, exact.q, relative * exact.q);
      ASSERT_NEAR(got.nll, exact.nll, relative * std::min(exact.q * 2.0, 1.0) + 8.0 * unit * exact.nll);
      if (std::isinf(exact.sum)) {
        ASSERT_EQ(static_cast<double>(got.k), exact.sum);
      } else {
        const double sum = exact.sum + v * (exact.top - static_cast<double>(got.m));
        ASSERT_NEAR(got.k, sum, 8.0 * v * unit * (std::abs(exact.sum) + 8.0 * spread * v));
      }
    }
  }
}

TYPED_TEST(Statistics, MinusInfinityIsAMaskedClassEverywhere) {
  using F = TypeParam;
  const F masked = -static_cast<F>(kInf);
  for (std::size_t first = 0; first < 4; ++first) {  // masked classes before, between and after
    std::vector<F> z = {masked, masked, masked, masked};
    z[first] = F(2);
    const RowResult<F> alone = finish(statistics_of(z, 0, 4, first), z[first]);
    EXPECT_FALSE(alone.bad);
    EXPECT_EQ(alone.nll, F(0));  // the only class left
    EXPECT_EQ(alone.q, F(0));
    EXPECT_EQ(alone.k, masked);
    const std::size_t target = (first + 1) % 4;
    const RowResult<F> out = finish(statistics_of(z, 0, 4, target), z[target]);
    EXPECT_FALSE(out.bad);
    EXPECT_EQ(out.nll, -masked);  // a masked target: loss +inf
    EXPECT_EQ(out.q, F(1));
    EXPECT_EQ(out.lse(), F(2));
  }
  // Leaves that are all masked merge as if they were not there, but for the sum.
  const std::vector<F> z = {F(1), F(3), masked, masked, masked};
  const RowStatistics<F> a = statistics_of(z, 0, 2, 0), nothing = statistics_of(z, 2, 5, 0);
  EXPECT_EQ(merge(a, nothing).r, a.r);
  EXPECT_EQ(merge(nothing, a).r, a.r);
  EXPECT_EQ(merge(nothing, a).m, F(3));
  EXPECT_EQ(merge(nothing, a).k, masked);
}

TYPED_TEST(Statistics, RowsWithoutADistributionAreBad) {
  using F = TypeParam;
  const F infinity = static_cast<F>(kInf), nan = std::numeric_limits<F>::quiet_NaN();
  for (const F wrong : {infinity, nan}) {
    for (std::size_t at = 0; at < 3; ++at) {
      for (std::size_t target = 0; target < 3; ++target) {
        std::vector<F> z = {F(1), F(2), F(0)};
        z[at] = wrong;
        const RowResult<F> out = finish(statistics_of(z, 0, 3, target), z[target]);
        EXPECT_TRUE(out.bad) << at << ' ' << target;
        EXPECT_TRUE(std::isnan(out.lse()) && std::isnan(out.nll) && std::isnan(out.q));
      }
    }
  }
  const std::vector<F> masked(3, -infinity);
  EXPECT_TRUE(finish(statistics_of(masked, 0, 3, 1), masked[1]).bad);
  EXPECT_TRUE(finish(RowStatistics<F>::identity(), -infinity).bad);
}

// ---- results -----------------------------------------------------------------------------------------------------

TYPED_TEST(Statistics, OneMinusPyKeepsItsRelativeAccuracy) {
  using F = TypeParam;
  Random random(5);
  for (const double q : {1e-6, 1e-3, 1e-12}) {
    for (const std::size_t vocab : {2u, 7u, 100u}) {
      for (std::size_t target = 0; target < vocab; target += vocab > 50 ? 33 : 1) {
        std::vector<F> z(vocab);
        for (F& value : z) {
          value = static_cast<F>(5.0 + std::log(q / static_cast<double>(vocab - 1)) + random.uniform(-1.0, 1.0));
        }
        z[target] = F(5);
        const Exact exact = exact_of(z, target);
        const RowResult<F> got = finish(statistics_of(z, 0, vocab, target), z[target]);
        EXPECT_NEAR(got.q / exact.q, 1.0, 1e-5);
        EXPECT_NEAR(got.nll / -std::log1p(-exact.q), 1.0, 1e-5);
        // And from a reference that is not the largest logit, as statistics from elsewhere may have.
        RowStatistics<F> moved = rebase(statistics_of(z, 0, vocab, target), F(5));
        moved = rebase(moved, F(8));
        const RowResult<F> far = finish(moved, z[target]);
        EXPECT_NEAR(far.q / exact.q, 1.0, 1e-5);
        EXPECT_NEAR(far.nll / -std::log1p(-exact.q), 1.0, 1e-5);
      }
    }
  }
}

TYPED_TEST(Statistics, OffsetsOfTenToTheSixteenthGiveLogOfTheVocabulary) {
  using F = TypeParam;
  for (const std::size_t vocab : {1u, 2u, 3u, 50u}) {
    const std::vector<F> z(vocab, F(1e16));
    const RowResult<F> got = finish(statistics_of(z, 0, vocab, vocab / 2), z[0]);
    EXPECT_NEAR(got.nll, std::log(static_cast<double>(vocab)), 4e-7);
    EXPECT_NEAR(got.q, 1.0 - 1.0 / static_cast<double>(vocab), 4e-7);
  }
}

template <class F>
struct Gradient {
  double loss;
  std::vector<double> d;
};
template <class F>
Gradient<F> gradient_of(const std::vector<F>& z, std::size_t target, F g, F alpha) {
  const RowResult<F> result = finish(statistics_of(z, 0, z.size(), target), z[target]);
  const F vocab = static_cast<F>(z.size());
  const auto weights = contract::hard_weights(alpha, vocab, F(1), F(0));
  const auto c = coefficients_of(result, contract::Upstream<F>{g, F(0), F(0), F(0)}, weights);
  Gradient<F> out{static_cast<double>(loss_of(result, weights)), {}};
  for (std::size_t j = 0; j < z.size(); ++j) {
    const F e = std::exp(z[j] - result.m);
    out.d.push_back(j == target ? c.at_target - c.c : contract::element(e, c.a * result.inv_s, c.c));
  }
  return out;
}

TYPED_TEST(Statistics, LossAndGradientAreTheDefinitions) {
  using F = TypeParam;
  Random random(6);
  const double unit = TestFixture::rounding;
  for (int n = 0; n < 300; ++n) {
    const std::size_t vocab = 2 + static_cast<std::size_t>(random.below(60));
    const std::vector<F> z = row<F>(random, vocab, 3.0, 0.0);
    const auto target = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(vocab)));
    const double v = static_cast<double>(vocab);
    const double g = random.normal();
    for (const double alpha : {0.0, 0.1, 1.0, v / (v - 1.0)}) {
      const Exact exact = exact_of(z, target);
      const Gradient<F> got = gradient_of(z, target, static_cast<F>(g), static_cast<F>(alpha));
      double want = 0.0, mass = 0.0, total = 0.0;
      const double tolerance = (2.0 * v + 60.0) * 4.0 * unit;
      for (std::size_t j = 0; j < vocab; ++j) {
        const double q = alpha / v + (j == target ? 1.0 - alpha : 0.0);
        want -= q * (static_cast<double>(z[j]) - exact.lse);
        mass += std::abs(q * (static_cast<double>(z[j]) - exact.lse));
        ASSERT_NEAR(got.d[j], g * (exact.p[j] - q),
                    tolerance * std::abs(g) * (exact.p[j] + std::abs(q) + 2.0 * alpha / v))
            << j << ' ' << alpha;
        total += got.d[j];
      }
      ASSERT_NEAR(got.loss, want, tolerance * (mass + 20.0));
      ASSERT_NEAR(total, 0.0, tolerance * std::abs(g) * 4.0);  // sum_j D_j = 0
    }
  }
}

TYPED_TEST(Statistics, ShiftsChangeNeitherLossNorGradient) {
  using F = TypeParam;
  Random random(7);
  for (int n = 0; n < 100; ++n) {
    std::vector<F> z = row<F>(random, 40, 3.0, 0.0);
    // Multiples of 1/64, so that adding 1024 rounds nothing.
    for (F& value : z) value = std::round(value * F(64)) / F(64);
    std::vector<F> shifted = z;
    for (F& value : shifted) value += F(1024);
    const Gradient<F> a = gradient_of(z, 11, F(1.5), F(0.1)), b = gradient_of(shifted, 11, F(1.5), F(0.1));
    ASSERT_EQ(a.loss, b.loss);
    for (std::size_t j = 0; j < z.size(); ++j) ASSERT_EQ(a.d[j], b.d[j]);
  }
}

TYPED_TEST(Statistics, MaskedClassesHaveNoGradientAndTheirLossIsInfinite) {
  using F = TypeParam;
  const F masked = -static_cast<F>(kInf);
  const std::vector<F> z = {F(1), masked, F(2), F(0)};
  EXPECT_EQ(gradient_of(z, 0, F(1), F(0)).d[1], 0.0);
  EXPECT_EQ(gradient_of(z, 1, F(1), F(0)).loss, static_cast<double>(kInf));
  EXPECT_EQ(gradient_of(z, 1, F(1), F(0)).d[1], -1.0);
  EXPECT_EQ(gradient_of(z, 0, F(1), F(0.1)).loss, static_cast<double>(kInf));
  EXPECT_EQ(gradient_of(z, 1, F(1), F(1)).loss, static_cast<double>(kInf));
  EXPECT_TRUE(std::isfinite(gradient_of(z, 0, F(1), F(0)).loss));
}

// others(alpha): alpha/(V-1) on each other class and 1 - alpha on the target, written as uniform.
TEST(Coefficients, ConventionOthersIsUniformOfAnotherAlpha) {
  for (const double vocab : {2.0, 3.0, 100.0, 151936.0}) {
    for (const double alpha : {0.0, 0.1, 0.5, 1.0}) {
      const double uniform = contract::uniform_smoothing_of_others(alpha, vocab);
      EXPECT_NEAR(uniform / vocab, alpha / (vocab - 1.0), 1e-15);
      EXPECT_NEAR(uniform / vocab + (1.0 - uniform), 1.0 - alpha, 1e-15);
    }
  }
}

// The filter's uniform numbers: flat in 16 bins, and as if independent of those of the next column, row and seed. Six
// standard errors of 2^16 draws. Columns 2^32 apart have others.
TEST(Filter, HashIsUniformAndNeighboursAreIndependent) {
  constexpr std::uint64_t side = 256, count = side * side;
  const auto uniform = [](std::uint64_t seed, std::uint64_t row, std::uint64_t column) {
    auto h = static_cast<std::uint32_t>(column);
    contract::filter_hash(h, contract::filter_key(seed, row, column));
    EXPECT_LT(h, 1U << 24);
    return h / 16777216.0;
  };
  for (const std::uint64_t first : {std::uint64_t{0}, (std::uint64_t{5} << 32) - 128, std::uint64_t{151936}}) {
    double bins[16] = {}, mean = 0.0, with_column = 0.0, with_row = 0.0, with_seed = 0.0;
    for (std::uint64_t row = 0; row < side; ++row)
      for (std::uint64_t j = 0; j < side; ++j) {
        const double u = uniform(9, row, first + j) - 0.5;
        bins[static_cast<int>((u + 0.5) * 16)] += 1;
        mean += u / count;
        with_column += 12 * u * (uniform(9, row, first + j + 1) - 0.5) / count;
        with_row += 12 * u * (uniform(9, row + 1, first + j) - 0.5) / count;
        with_seed += 12 * u * (uniform(10, row, first + j) - 0.5) / count;
      }
    const double error = 1 / std::sqrt(static_cast<double>(count));
    for (const double bin : bins) EXPECT_NEAR(bin, count / 16.0, 6 * std::sqrt(count / 16.0));
    EXPECT_NEAR(mean, 0.0, 6 * error / std::sqrt(12.0));
    for (const double correlation : {with_column, with_row, with_seed})
      EXPECT_NEAR(correlation, 0.0, 6 * error) << first;
  }
  EXPECT_NE(uniform(9, 1, 7), uniform(9, 1, 7 + (std::uint64_t{1} << 32)));
}

}  // namespace
}  // namespace logitless::test
