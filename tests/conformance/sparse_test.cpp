// Products of a D that is mostly 0 (kernels/sparse.hpp) beside the plain ones, on every target: the same bits in fp32
// whatever is left of D, and an infinity of B that only zeros meet leaves no trace. Then whole runs with a filter: dX
// and dW are the products of the D that the face for given logits makes of the same numbers.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/kernels/table.hpp"
#include "support/option_check.hpp"
#include "support/targets.hpp"

namespace logitless::test {
namespace {

class Sparse : public OnTarget {};

INSTANTIATE_TEST_SUITE_P(Conformance, Sparse, ::testing::ValuesIn(all_targets()), target_parameter_name);

// 64-byte aligned; room for whole panels.
struct Panels {
  explicit Panels(std::int64_t bytes) : storage(static_cast<std::size_t>(bytes) + 64) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage.data());
    data = storage.data() + (64 - address % 64) % 64;
  }
  std::vector<char> storage;
  char* data;
};

std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

struct Product {
  const cpu::ProductKernels& kernels;
  DType dtype;
  std::int64_t rows, k, n;
  Tensor a, b;

  Product(const cpu::ProductKernels& of, DType type, std::int64_t r, std::int64_t depth, std::int64_t columns)
      : kernels(of), dtype(type), rows(r), k(depth), n(columns), a(type, r, depth), b(type, depth, columns) {}

  // C by either kernel, from a sum that is not 0, so that a row that is left alone is noticed.
  std::vector<float> run(bool sparse) const {
    const std::int64_t steps = round_up(k, kernels.ks) / kernels.ks;
    Panels pa(round_up(rows, kernels.mr) * steps * 64), pb(256 * steps * 64), c(round_up(rows, kernels.mr) * 1024);
    const std::int64_t size = contract::size_of(dtype);
    const auto source = [&](const Tensor& t) {
      const View v = t.view();
      return cpu::Source{static_cast<const char*>(v.data), dtype, v.row_stride * size, v.col_stride * size, nullptr};
    };
    kernels.pack_a(source(a), 0, rows, 0, k, pa.data);
    kernels.pack_b_cols(source(b), 0, k, 0, n, nullptr, nullptr, pb.data);
    auto* out = reinterpret_cast<float*>(c.data);
    std::fill(out, out + rows * 256, 7.0F);
    (sparse ? kernels.multiply_sparse : kernels.multiply)(pa.data, pb.data, steps, rows, n, out);
    std::vector<float> result;
    for (std::int64_t i = 0; i < rows; ++i) result.insert(result.end(), out + i * 256, out + i * 256 + n);
    return result;
  }
};

void check_products(const cpu::ProductKernels& kernels, DType dtype, const cpu::Target& target) {
  Random random(3);
  for (const double share : {0.0, 0.004, 0.03, 0.2, 0.3, 1.0})
    for (const auto& [rows, k, n] :
         {std::tuple{1, 1, 1}, {96, 700, 256}, {37, 1300, 250}, {7, 512, 16}, {64, 1024, 70}}) {
      Product product(kernels, dtype, rows, k, n);
      for (std::int64_t i = 0; i < rows; ++i)
        for (std::int64_t j = 0; j < k; ++j) {
          const double sign = random.uniform() < 0.5 ? -1.0 : 1.0;
          product.a.set(i, j, sign * (random.uniform() < share ? 0.01 + random.uniform() : 0.0));
        }
      for (std::int64_t i = 0; i < k; ++i)
        for (std::int64_t j = 0; j < n; ++j) product.b.set(i, j, random.normal());
      if (target.enter != nullptr && dtype == DType::bf16) target.enter();
      const std::vector<float> plain = product.run(false), sparse = product.run(true);
      if (target.leave != nullptr && dtype == DType::bf16) target.leave();
      for (std::size_t at = 0; at < plain.size(); ++at) {
        const auto i = static_cast<std::int64_t>(at) / n, j = static_cast<std::int64_t>(at) % n;
        if (dtype == DType::f32) {
          ASSERT_EQ(std::memcmp(&plain[at], &sparse[at], 4), 0)
              << share << ' ' << rows << ' ' << k << ' ' << n << ": " << plain[at] << ' ' << sparse[at];
          continue;
        }
        // Sums of K may be cut elsewhere.
        double want = 0.0, size = 0.0;
        for (std::int64_t w = 0; w < k; ++w) {
          want += product.a.at(i, w) * product.b.at(w, j);
          size += std::abs(product.a.at(i, w) * product.b.at(w, j));
        }
        ASSERT_NEAR(sparse[at], want, static_cast<double>(k + 2) * kEps * size) << share << ' ' << i << ' ' << j;
        ASSERT_NEAR(plain[at], want, static_cast<double>(k + 2) * kEps * size) << share << ' ' << i << ' ' << j;
      }
    }
}

TEST_P(Sparse, ProductsAreThePlainOnes) {
  const cpu::Target& target = *GetParam();
  ASSERT_NO_FATAL_FAILURE(check_products(target.f32, DType::f32, target));
  if (target.bf16.mr != 0) check_products(target.bf16, DType::bf16, target);
}

// What the filter made 0 is not multiplied: neither an infinity nor NaN of B comes through it.
TEST_P(Sparse, ZerosMeetNoInfinity) {
  for (const auto* kernels : {&GetParam()->f32, &GetParam()->bf16}) {
    if (kernels->mr == 0) continue;
    const DType dtype = kernels == &GetParam()->f32 ? DType::f32 : DType::bf16;
    Product product(*kernels, dtype, 11, 600, 40);
    product.a.fill(0.0);
    product.b.fill(2.0);
    for (std::int64_t j = 0; j < 40; ++j) {
      product.b.set(100, j, std::numeric_limits<double>::infinity());
      product.b.set(301, j, std::nan(""));
    }
    product.a.set(4, 200, 3.0);
    product.a.set(4, 100, -0.0);
    if (GetParam()->enter != nullptr && dtype == DType::bf16) GetParam()->enter();
    const std::vector<float> got = product.run(true);
    if (GetParam()->leave != nullptr && dtype == DType::bf16) GetParam()->leave();
    for (std::size_t at = 0; at < got.size(); ++at) ASSERT_EQ(got[at], at / 40 == 4 ? 6.0F : 0.0F) << at;
  }
}

// Hidden states and weights are small multiples of 1/4, so that logits are exact, and D of the two kinds has the same
// bits and the same zeros.
TEST_P(Sparse, RunsAreProductsOfTheFilteredD) {
  constexpr std::int64_t rows = 110, hidden = 7, vocab = 1300;
  Random random(12);
  Sample linear =
      stored(make(Kind::linear, kJudges[0], kRowWeight | kTemperature, Reduction::sum, 5, rows, vocab, hidden),
             DType::f32, DType::f32);
  for (Tensor* t : {&linear.x, &linear.w})
    for (std::int64_t i = 0; i < t->rows(); ++i)
      for (std::int64_t j = 0; j < hidden; ++j) t->set(i, j, 0.25 * static_cast<double>(random.below(9) - 4));
  linear.p.loss.filter_seed = 3;
  Sample logits = linear;
  logits.p.kind = Kind::logits;
  logits.p.x = logits.p.w = logits.p.dx = logits.p.dw = DType::none;
  logits.p.z = logits.p.dz = DType::f32;
  logits.z = Tensor(DType::f32, rows, vocab);
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < vocab; ++j) {
      double z = 0.0;
      for (std::int64_t h = 0; h < hidden; ++h) z += linear.x.at(i, h) * linear.w.at(j, h);
      logits.z.set(i, j, z);
    }
  ThreadExecutor executor(2);
  for (const double eps : {0x1p-24, 0x1p-12, 0x1p-8, 0x1p-4}) {
    linear.p.loss.filter = logits.p.loss.filter = eps;
    TargetBackend backend(*GetParam(), executor);
    const Answer d = ask(backend, logits);
    ASSERT_EQ(d.error, "");
    for (const std::int64_t chunk : {std::int64_t{0}, std::int64_t{64}}) {
      backend.dials.chunk = chunk;
      const Answer got = ask(backend, linear);
      ASSERT_EQ(got.error, "");
      ASSERT_EQ(got.outcome.filter_kept, d.outcome.filter_kept) << eps;
      for (std::int64_t h = 0; h < hidden; ++h) {
        for (std::int64_t i = 0; i < rows; ++i) {
          double want = 0.0, size = 0.0;
          for (std::int64_t j = 0; j < vocab; ++j) {
            want += d.dz.at(i, j) * linear.w.at(j, h);
            size += std::abs(d.dz.at(i, j) * linear.w.at(j, h));
          }
          ASSERT_NEAR(got.dx.at(i, h), want, 300 * kEps * size) << eps << ' ' << i << ' ' << h;
        }
        for (std::int64_t j = 0; j < vocab; ++j) {
          double want = 0.0, size = 0.0;
          for (std::int64_t i = 0; i < rows; ++i) {
            want += d.dz.at(i, j) * linear.x.at(i, h);
            size += std::abs(d.dz.at(i, j) * linear.x.at(i, h));
          }
          ASSERT_NEAR(got.dw.at(j, h), want, 300 * kEps * size) << eps << ' ' << j << ' ' << h;
        }
      }
    }
  }
}

}  // namespace
}  // namespace logitless::test
