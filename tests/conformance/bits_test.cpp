// Bits that must not depend on anything but the data. One plan gives the same bits of every output for any number of
// threads and any order of tasks. A row's loss, lse, log-probability and statistics have the same bits for any rows
// beside it, chunk, block, place and share of kept exponentials, budget, threads and call.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "support/check.hpp"
#include "support/scope.hpp"
#include "support/targets.hpp"

namespace logitless::test {
namespace {

class Bits : public OnTarget {};

INSTANTIATE_TEST_SUITE_P(Conformance, Bits, ::testing::ValuesIn(all_targets()), target_parameter_name);

std::vector<Case> cases() {
  std::vector<Case> out;
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Case c;
    c.rows = 211, c.hidden = 24, c.vocab = 1300;
    c.x = c.w = c.dx = c.dw = dtype;
    c.values = Values::trained;
    c.ignored = Ignored::some;
    c.alpha = 0.1;
    out.push_back(c);
    c.w = DType::f32, c.dw = DType::f32;
    if (dtype != DType::f32) out.push_back(c);
  }
  return out;
}

// Each case takes every nth setting, from a first one that walks.
std::size_t one_of() { return scope() == Scope::full ? 1 : scope() == Scope::normal ? 5 : 13; }

std::vector<plan::Dials> settings(std::int64_t rows) {
  using plan::Keep;
  std::vector<plan::Dials> out;
  for (const std::int64_t chunk : {rows, std::int64_t{96}, std::int64_t{17}}) {
    for (const std::int64_t block : {256, 512, 1536}) {
      const std::int64_t blocks = (1300 + block - 1) / block;
      for (const std::int64_t kept : {std::int64_t{0}, std::int64_t{1}, blocks}) {
        plan::Dials dials;
        dials.chunk = chunk, dials.block = block, dials.kept_blocks = kept;
        dials.keep = static_cast<int>(kept == 0 ? Keep::none : Keep::workspace);
        out.push_back(dials);
      }
    }
  }
  plan::Dials inside;
  inside.keep = static_cast<int>(Keep::inside_dw);
  out.push_back(inside);
  out.push_back(plan::Dials{});
  return out;
}

Outputs all_outputs(const Case& c) { return Outputs::of(c, DType::f32, c.dx, c.dw, c.dz, Layout::contiguous); }

void run(TargetBackend& backend, const Case& c, const Data& data, const plan::Plan* plan, Outputs* out, double* loss) {
  *out = all_outputs(c);
  Operands o = data.operands();
  out->into(o);
  Outcome outcome;
  int status = LL_OK;
  const std::string error = plan != nullptr ? backend.run(*plan, o, &outcome, &status)
                                            : backend.run(c.problem(c.alpha), o, &outcome, &status);
  ASSERT_EQ(error, "") << c.text();
  *loss = outcome.loss;
}

void expect_same(const Outputs& a, const Outputs& b, const std::string& what) {
  const char* names[] = {"row_loss", "row_lse", "row_logprob", "stats", "dX", "dW", "dz"};
  const std::vector<const Tensor*> first = a.all(), second = b.all();
  for (std::size_t n = 0; n < first.size(); ++n) {
    EXPECT_TRUE(first[n]->bytes() == second[n]->bytes()) << names[n] << " has other bits: " << what;
  }
}

TEST_P(Bits, SamePlanAnyThreads) {
  const cpu::Target& target = *GetParam();
  std::size_t first_setting = 0;
  for (const Case& c : cases()) {
    const std::vector<plan::Dials> all = settings(c.rows);
    const Data data(c);
    for (std::size_t s = first_setting++ % one_of(); s < all.size(); s += one_of()) {
      ThreadExecutor one(1), two(2), seven(7);
      ShuffledExecutor shuffled(7, s), backwards(2, s + 100);
      TargetBackend maker(target, seven);
      maker.dials = all[s];
      const plan::Plan plan = maker.plan_of(c.problem(c.alpha));
      Outputs first;
      double first_loss = 0.0;
      run(maker, c, data, &plan, &first, &first_loss);
      for (cpu::Executor* executor : std::initializer_list<cpu::Executor*>{&one, &two, &seven, &shuffled, &backwards}) {
        TargetBackend other(target, *executor);
        Outputs again;
        double loss = 0.0;
        run(other, c, data, &plan, &again, &loss);
        EXPECT_EQ(loss, first_loss);
        expect_same(first, again,
                    maker.describe(c.problem(c.alpha)) + ", threads " + std::to_string(executor->threads()));
      }
    }
  }
}

TEST_P(Bits, SamePlanAnyThreadsInLogits) {
  const cpu::Target& target = *GetParam();
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Case c;
    c.kind = Kind::logits;
    c.rows = 53, c.vocab = 1300, c.z = c.dz = dtype, c.alpha = 0.1;
    c.ignored = Ignored::some;
    const Data data(c);
    ThreadExecutor seven(7);
    TargetBackend maker(target, seven);
    const plan::Plan plan = maker.plan_of(c.problem(c.alpha));
    Outputs first;
    double first_loss = 0.0;
    run(maker, c, data, &plan, &first, &first_loss);
    ThreadExecutor one(1), two(2);
    ShuffledExecutor shuffled(7, 3);
    for (cpu::Executor* executor : std::initializer_list<cpu::Executor*>{&one, &two, &shuffled}) {
      TargetBackend other(target, *executor);
      Outputs again;
      double loss = 0.0;
      run(other, c, data, &plan, &again, &loss);
      EXPECT_EQ(loss, first_loss);
      expect_same(first, again, "logits");
    }
  }
}

// The row outputs of `out` at row i of `c`, as bytes.
std::vector<std::uint8_t> row_bits(const Outputs& out, std::int64_t i) {
  std::vector<std::uint8_t> bits;
  for (const Tensor* t : {&out.row_loss, &out.row_lse, &out.row_logprob, &out.stats}) {
    const std::vector<std::uint8_t> part = t->row_bytes(i);
    bits.insert(bits.end(), part.begin(), part.end());
  }
  return bits;
}

// Rows [from, from + count) of a case's data as a case of their own.
Operands rows_of(const Data& data, std::int64_t from, std::int64_t count) {
  Operands o = data.operands();
  auto part = [&](View& v) {
    if (!v) return;
    v.data = static_cast<char*>(v.data) + from * v.row_stride * contract::size_of(v.dtype);
    v.rows = count;
  };
  part(o.x), part(o.z), part(o.targets);
  return o;
}

void compare_rows(TargetBackend& backend, const Case& c, const Operands& o, std::int64_t from,
                  const std::vector<std::vector<std::uint8_t>>& want, const std::string& what) {
  Outputs out = all_outputs(c);
  Operands with = o;
  out.into(with);
  Outcome outcome;
  int status = LL_OK;
  ASSERT_EQ(backend.run(c.problem(c.alpha), with, &outcome, &status), "") << what;
  for (std::int64_t i = 0; i < c.rows; ++i) {
    ASSERT_TRUE(row_bits(out, i) == want[static_cast<std::size_t>(from + i)])
        << "row " << from + i << " has other bits: " << what << ' ' << backend.describe(c.problem(c.alpha));
  }
}

TEST_P(Bits, RowDoesNotSeeItsBatch) {
  const cpu::Target& target = *GetParam();
  ThreadExecutor one(1), seven(7);
  std::size_t first_setting = 0;
  for (Case c : cases()) {
    c.on_empty = OnEmpty::zero;
    const Data data(c);
    Case forward = c;
    forward.call = Call::forward;
    TargetBackend plain(target, one);
    Outputs whole;
    double loss = 0.0;
    run(plain, forward, data, nullptr, &whole, &loss);
    std::vector<std::vector<std::uint8_t>> want;
    for (std::int64_t i = 0; i < c.rows; ++i) want.push_back(row_bits(whole, i));

    // Any setting, threads and budget; with gradients and without.
    const std::vector<plan::Dials> all = settings(c.rows);
    for (std::size_t s = first_setting++ % one_of(); s < all.size(); s += one_of()) {
      TargetBackend backend(target, seven);
      backend.dials = all[s];
      compare_rows(backend, c, data.operands(), 0, want, "forward_backward");
      compare_rows(backend, forward, data.operands(), 0, want, "forward");
    }
    TargetBackend tight(target, seven);
    tight.least_budget = true;
    compare_rows(tight, c, data.operands(), 0, want, "least budget");
    Case one_gradient = c;
    one_gradient.dx = DType::none;
    compare_rows(tight, one_gradient, data.operands(), 0, want, "dW alone");

    // Alone, and in batches of any size from any row.
    for (const std::int64_t count : {1, 2, 3, 5, 64, 97}) {
      for (std::int64_t from = 0; from + count <= c.rows; from += count == 1 ? 13 : 53) {
        Case part = forward;
        part.rows = count;
        compare_rows(plain, part, rows_of(data, from, count), from, want, "a batch of " + std::to_string(count));
        part.call = Call::forward_backward;
        part.dx = c.dx;
        compare_rows(plain, part, rows_of(data, from, count), from, want, "a batch of " + std::to_string(count));
      }
    }
  }
}

TEST_P(Bits, RowDoesNotSeeItsBatchInLogits) {
  const cpu::Target& target = *GetParam();
  ThreadExecutor one(1), seven(7);
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Case c;
    c.kind = Kind::logits;
    c.rows = 53, c.vocab = 1300, c.z = c.dz = dtype, c.alpha = 0.1;
    c.call = Call::forward;
    const Data data(c);
    TargetBackend plain(target, one);
    Outputs whole;
    double loss = 0.0;
    run(plain, c, data, nullptr, &whole, &loss);
    std::vector<std::vector<std::uint8_t>> want;
    for (std::int64_t i = 0; i < c.rows; ++i) want.push_back(row_bits(whole, i));
    TargetBackend many(target, seven);
    Case gradient = c;
    gradient.call = Call::forward_backward;
    compare_rows(many, gradient, data.operands(), 0, want, "with gradient");
    gradient.dz = DType::f32;
    compare_rows(many, gradient, data.operands(), 0, want, "with fp32 gradient");
    for (std::int64_t i = 0; i < c.rows; i += 7) {
      Case alone = c;
      alone.rows = 1;
      compare_rows(plain, alone, rows_of(data, i, 1), i, want, "alone");
    }
  }
}

}  // namespace
}  // namespace logitless::test
