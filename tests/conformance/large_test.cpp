// More than 2^31 logits: R 70000, V 32000 on the machine's best target. X repeats a few base rows, so the reference is
// exact for every row and for all of dW at the cost of the base rows: row i has the softmax of base row i mod 61, and
// dW_j = sum over base rows u of (sum of g_i p_uj over its copies) X_u - sum over i with y_i = j of g_i X_i.
// Given logits of more than 2^31 elements lie in one file mapped again and again, so that offsets are real and memory
// is not.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <vector>

#include "support/check.hpp"
#include "support/scope.hpp"
#include "support/targets.hpp"

namespace logitless::test {
namespace {

constexpr std::int64_t kBase = 61;

// Sanitizer builds run the same with a sixteenth of the rows and of the classes.
std::int64_t shrink() { return scope() == Scope::reduced ? 16 : 1; }

// Bound on the relative error of a softmax whose logits are sums of 8 products or given, within 30 of the largest:
// support/bounds.hpp's eta twice, for the exponential and for the sum.
double relative_error() {
  const double levels = 16.0;
  return 2.0 * kUnit * (growth(256.0 + 2.0 * levels, false) + 4.0 * levels + 4.0 + 2.3 * 30.0 + 9.0 * 30.0);
}

// Softmax of each base row, in double.
struct BaseRows {
  std::vector<double> lse;             // [kBase]
  std::vector<std::vector<double>> p;  // [kBase][V]
  std::vector<std::vector<double>> z;
};

BaseRows base_rows(const Tensor& x, const Tensor& w) {
  BaseRows out;
  for (std::int64_t u = 0; u < kBase; ++u) {
    std::vector<double> z(static_cast<std::size_t>(w.rows()), 0.0);
    double top = -INFINITY, s = 0.0;
    for (std::int64_t j = 0; j < w.rows(); ++j) {
      double& value = z[static_cast<std::size_t>(j)];
      for (std::int64_t k = 0; k < w.cols(); ++k) value += x.at(u, k) * w.at(j, k);
      top = std::max(top, value);
    }
    for (double value : z) s += std::exp(value - top);
    out.lse.push_back(top + std::log(s));
    std::vector<double> p;
    for (double value : z) p.push_back(std::exp(value - out.lse.back()));
    out.p.push_back(std::move(p));
    out.z.push_back(std::move(z));
  }
  return out;
}

TEST(Large, LinearBeyondTwoToTheThirtyFirst) {
  const std::int64_t rows = 70000 / shrink(), hidden = 8, vocab = 32000 / shrink();
  const cpu::Target& target = cpu::best_target();
  Random random(5);
  Tensor x(DType::f32, rows, hidden), w(DType::f32, vocab, hidden), y(DType::i64, rows, 1), g(DType::f32, rows, 1);
  for (std::int64_t j = 0; j < vocab; ++j)
    for (std::int64_t k = 0; k < hidden; ++k) w.set(j, k, random.normal());
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t k = 0; k < hidden; ++k) x.set(i, k, i < kBase ? random.normal() : x.at(i % kBase, k));
    y.set_integer(i, i % 17 == 3 ? -100 : random.zipf(vocab));
    g.set(i, 0, random.normal());
  }

  Case c;
  c.rows = rows, c.hidden = hidden, c.vocab = vocab;
  c.dx = c.dw = DType::f32;
  c.reduction = Reduction::sum;
  if (shrink() == 1) {
    ASSERT_GT(rows * vocab, std::int64_t{1} << 31);
  }
  // Everything kept in one chunk would be 2^31 * 4 bytes.
  ThreadExecutor executor(2);
  TargetBackend backend(target, executor);
  backend.dials.chunk = rows / 20;
  Tensor loss(DType::f32, rows, 1), lse(DType::f32, rows, 1), dx(DType::f32, rows, hidden),
      dw(DType::f32, vocab, hidden);
  Operands o;
  o.x = x.view(), o.w = w.view(), o.targets = y.view(), o.grad_row_loss = g.view();
  o.grad_loss = 0.5;
  o.row_loss = loss.view(), o.row_lse = lse.view(), o.dx = dx.view(), o.dw = dw.view();
  Outcome outcome;
  int status = LL_OK;
  ASSERT_EQ(backend.run(c.problem(0.0), o, &outcome, &status), "");

  const BaseRows base = base_rows(x, w);
  std::vector<double> copies(kBase, 0.0), size(kBase, 0.0);  // sums of g_i and |g_i| over a base row's copies
  std::vector<double> dw_true(static_cast<std::size_t>(vocab * hidden), 0.0), dw_size = dw_true;
  std::vector<double> dx_base(static_cast<std::size_t>(kBase * hidden), 0.0);
  for (std::int64_t u = 0; u < kBase; ++u)
    for (std::int64_t j = 0; j < vocab; ++j)
      for (std::int64_t k = 0; k < hidden; ++k)
        dx_base[static_cast<std::size_t>(u * hidden + k)] +=
            base.p[static_cast<std::size_t>(u)][static_cast<std::size_t>(j)] * w.at(j, k);
  double w_most = 0.0;
  for (std::int64_t j = 0; j < vocab; ++j)
    for (std::int64_t k = 0; k < hidden; ++k) w_most = std::max(w_most, std::abs(w.at(j, k)));
  const double dx_relative = growth(static_cast<double>(vocab), false) * kUnit + relative_error();
  double total = 0.0;
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t target_class = reference::load_integer(y.view(), i);
    if (target_class < 0) {
      ASSERT_EQ(loss.at(i), 0.0);
      for (std::int64_t k = 0; k < hidden; ++k) ASSERT_EQ(dx.at(i, k), 0.0);
      continue;
    }
    ++kept;
    const auto u = static_cast<std::size_t>(i % kBase);
    const double upstream = 0.5 + g.at(i);
    const double loss_true = base.lse[u] - base.z[u][static_cast<std::size_t>(target_class)];
    total += loss_true;
    ASSERT_NEAR(loss.at(i), loss_true, relative_error() * (1.0 + loss_true)) << i;
    ASSERT_NEAR(lse.at(i), base.lse[u], relative_error() * (1.0 + std::abs(base.lse[u]))) << i;
    copies[u] += upstream, size[u] += std::abs(upstream);
    for (std::int64_t k = 0; k < hidden; ++k) {
      const double dx_true =
          upstream * (dx_base[static_cast<std::size_t>(i % kBase * hidden + k)] - w.at(target_class, k));
      ASSERT_NEAR(dx.at(i, k), dx_true, dx_relative * std::abs(upstream) * 2.0 * w_most) << i << ' ' << k;
      dw_true[static_cast<std::size_t>(target_class * hidden + k)] -= upstream * x.at(i, k);
      dw_size[static_cast<std::size_t>(target_class * hidden + k)] += std::abs(upstream * x.at(i, k));
    }
  }
  EXPECT_EQ(outcome.kept, kept);
  EXPECT_NEAR(outcome.loss / total, 1.0, relative_error());
  for (std::int64_t u = 0; u < kBase; ++u) {
    for (std::int64_t j = 0; j < vocab; ++j) {
      const double p = base.p[static_cast<std::size_t>(u)][static_cast<std::size_t>(j)];
      for (std::int64_t k = 0; k < hidden; ++k) {
        dw_true[static_cast<std::size_t>(j * hidden + k)] += copies[static_cast<std::size_t>(u)] * p * x.at(u, k);
        dw_size[static_cast<std::size_t>(j * hidden + k)] +=
            size[static_cast<std::size_t>(u)] * p * std::abs(x.at(u, k));
      }
    }
  }
  // 70000 terms added in fp32: 6 sqrt(R) u of their sizes, and what every exponential is off by.
  const double relative = growth(static_cast<double>(rows), false) * kUnit + relative_error();
  for (std::int64_t j = 0; j < vocab; ++j) {
    for (std::int64_t k = 0; k < hidden; ++k) {
      const auto at = static_cast<std::size_t>(j * hidden + k);
      ASSERT_NEAR(dw.at(j, k), dw_true[at], relative * dw_size[at]) << j << ' ' << k;
    }
  }
}

// kBase rows of 16-bit numbers in a file, mapped `copies` times in a row: row i of the view is row i mod kBase of the
// file. kBase is odd, so that no offset cut to 32 bits meets its own row by chance.
class RepeatedRows {
 public:
  RepeatedRows(std::int64_t vocab, std::int64_t copies)
      : piece_(static_cast<std::size_t>(kBase * vocab * 2)), bytes_(piece_ * static_cast<std::size_t>(copies)) {
    const int file = memfd_create("rows", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(piece_)) != 0) return;
    memory_ = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    good_ = memory_ != MAP_FAILED;
    for (std::size_t at = 0; at < bytes_ && good_; at += piece_) {
      void* const here = static_cast<char*>(memory_) + at;
      good_ = mmap(here, piece_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == here;
    }
    close(file);
    view_ = View{memory_, DType::bf16, kBase * copies, vocab, vocab, 1};
  }
  ~RepeatedRows() {
    if (memory_ != MAP_FAILED) munmap(memory_, bytes_);
  }
  RepeatedRows(const RepeatedRows&) = delete;
  RepeatedRows& operator=(const RepeatedRows&) = delete;
  bool good() const { return good_; }
  const View& view() const { return view_; }

 private:
  std::size_t piece_, bytes_;
  void* memory_ = MAP_FAILED;
  bool good_ = false;
  View view_;
};

TEST(Large, LogitsBeyondTwoToTheThirtyFirst) {
  const std::int64_t vocab = 32768 / shrink(), copies = 1100 / shrink(), rows = kBase * copies;
  const RepeatedRows z(vocab, copies), d(vocab, copies);
  ASSERT_TRUE(z.good() && d.good());
  if (shrink() == 1) {
    ASSERT_GT(rows * vocab, std::int64_t{1} << 31);
  }
  Random random(6);
  std::vector<double> lse(kBase, 0.0);
  for (std::size_t u = 0; u < kBase; ++u) {
    for (std::int64_t j = 0; j < vocab; ++j) {
      reference::store(z.view(), static_cast<std::int64_t>(u), j, 2.0 * random.normal());
      lse[u] += std::exp(reference::load(z.view(), static_cast<std::int64_t>(u), j));
    }
    lse[u] = std::log(lse[u]);
  }
  Tensor y(DType::i32, rows, 1), loss(DType::f32, rows, 1);
  for (std::int64_t i = 0; i < rows; ++i) y.set_integer(i, i % 19 == 0 ? -100 : (i * 7919) % vocab);

  Case c;
  c.kind = Kind::logits;
  c.rows = rows, c.vocab = vocab, c.z = c.dz = DType::bf16;
  c.call = Call::forward;
  c.reduction = Reduction::sum;
  ThreadExecutor two(2), one(1);
  TargetBackend backend(cpu::best_target(), two);
  Operands o;
  o.z = z.view(), o.targets = y.view(), o.row_loss = loss.view();
  Outcome outcome;
  int status = LL_OK;
  ASSERT_EQ(backend.run(c.problem(0.0), o, &outcome, &status), "");
  double total = 0.0;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t target = reference::load_integer(y.view(), i);
    const double want =
        target < 0 ? 0.0 : lse[static_cast<std::size_t>(i % kBase)] - reference::load(z.view(), i % kBase, target);
    total += want;
    ASSERT_NEAR(loss.at(i), want, relative_error() * (1.0 + std::abs(want))) << i;
  }
  EXPECT_NEAR(outcome.loss / total, 1.0, relative_error());

  // With D: copies of a row share their bytes, so they get the same target, and one thread writes them.
  for (std::int64_t i = 0; i < rows; ++i) y.set_integer(i, (i % kBase * 7919) % vocab);
  TargetBackend single(cpu::best_target(), one);
  c.call = Call::forward_backward;
  o.dz = d.view();
  ASSERT_EQ(single.run(c.problem(0.0), o, &outcome, &status), "");
  for (std::int64_t u = 0; u < kBase; ++u) {
    for (std::int64_t j = 0; j < vocab; ++j) {
      const double p = std::exp(reference::load(z.view(), u, j) - lse[static_cast<std::size_t>(u)]);
      const double want = p - (j == (u * 7919) % vocab ? 1.0 : 0.0);
      ASSERT_NEAR(reference::load(d.view(), u, j), want, (0x1p-8 + relative_error()) * std::abs(want)) << u << ' ' << j;
    }
  }
}

}  // namespace
}  // namespace logitless::test
