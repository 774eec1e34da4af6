// The conformance suite's cases: a seeded pairwise cover of shapes, layouts, options, dials and threads for one target
// and one mixture of dtypes, as linear or as given logits. Levels that contradict each other are settled here, once.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "support/case.hpp"
#include "support/pairwise.hpp"
#include "support/scope.hpp"

namespace logitless::test {

// Dials as wishes; what they mean depends on the case's shape.
struct DialWish {
  int chunk = 0;  // 0 free, 1: 16 rows, 2: a third of the rows, 3: all rows
  int block = 0;  // 0 free, 1: one leaf, 2: two leaves, 3: the whole vocabulary
  int kept = 0;   // 0 free, 1: none, 2: one block, 3: half, 4: all
  int keep = 0;   // 0 free, 1: none, 2: workspace, 3: inside dW
  bool least_budget = false;
  int threads = 1;
};

struct SuiteCase {
  Case c;
  DialWish dials;
};

inline constexpr std::array<Mixture, 6> kMixtures{{{DType::f32, DType::f32},
                                                   {DType::bf16, DType::bf16},
                                                   {DType::f16, DType::f16},
                                                   {DType::bf16, DType::f32},
                                                   {DType::f32, DType::bf16},
                                                   {DType::f16, DType::f32}}};

// Takes levels from a row of the cover one factor after another.
class Levels {
 public:
  explicit Levels(const Row& row) : row_(row) {}
  int next() { return row_[at_++]; }
  template <class T, std::size_t N>
  T pick(const T (&values)[N]) {
    return values[static_cast<std::size_t>(next())];
  }

 private:
  const Row& row_;
  std::size_t at_ = 0;
};

struct LinearShape {
  std::int64_t rows, hidden, vocab;
};

// 1, primes, 63/64/65, 255/256/257, one leaf and many, a batch that no chunk divides, and the vocabularies of GPT-2
// and Qwen with few rows.
inline constexpr LinearShape kLinearShapes[] = {{1, 1, 1},     {2, 3, 1},       {7, 5, 2},      {64, 64, 64},
                                                {63, 65, 257}, {65, 63, 255},   {31, 17, 256},  {129, 33, 521},
                                                {257, 12, 97}, {19, 128, 1031}, {48, 48, 768},  {0, 8, 33},
                                                {5, 7, 50257}, {2, 3, 151936},  {97, 24, 2048}, {200, 40, 300}};

inline void settle(Case& c) {
  if (c.vocab < 2) c.others = c.class_ignored = false;
  if (c.values == Values::offset && c.kind == Kind::linear && c.hidden < 2) c.values = Values::normal;
  if (c.kind == Kind::logits) {
    if (c.dz != c.z) c.in_place = false;
    if (c.in_place) c.x_layout = c.x_layout == Layout::contiguous ? Layout::contiguous : Layout::padded;
  } else if (c.wants_gradient() && c.dx == DType::none && c.dw == DType::none) {
    c.dx = c.x;
  }
  if (c.kind == Kind::linear && c.saved == Saved::lse) c.saved = Saved::own;
  // fp32 cannot hold the reference of a common offset in fp64 logits: own statistics only.
  if (c.kind == Kind::linear && c.values == Values::offset) c.saved = Saved::own;
  if (c.dx == DType::none) c.accumulate_dx = false;
  if (c.dw == DType::none) c.accumulate_dw = false;
}

inline SuiteCase linear_case(const Row& row, Mixture mixture, std::uint64_t seed) {
  Levels level(row);
  SuiteCase out;
  Case& c = out.c;
  c.kind = Kind::linear;
  c.x = mixture.x, c.w = mixture.w;
  const LinearShape shape = level.pick(kLinearShapes);
  c.rows = shape.rows, c.hidden = shape.hidden, c.vocab = shape.vocab;
  c.call = level.pick({Call::forward_backward, Call::backward, Call::forward});
  // Gradients: both, one, the other; in the input's dtype or fp32.
  const int wanted = level.next();
  const bool dx_f32 = level.next() == 1, dw_f32 = level.next() == 1;
  if (wanted != 2) c.dx = dx_f32 ? DType::f32 : c.x;
  if (wanted != 1) c.dw = dw_f32 ? DType::f32 : c.w;
  c.accumulate_dx = level.next() == 1;
  c.accumulate_dw = level.next() == 1;
  c.x_layout = static_cast<Layout>(level.next());
  c.w_layout = static_cast<Layout>(level.next());
  const int narrow = level.next();
  c.y = narrow == 1 ? DType::i32 : DType::i64;
  c.y_layout = narrow == 2 ? Layout::padded : Layout::contiguous;
  c.out_layout = level.pick({Layout::contiguous, Layout::padded});
  c.reduction = level.pick({Reduction::mean, Reduction::sum, Reduction::none});
  const int smoothing = level.next();
  const double alphas[] = {0.0, 0.1, 0.1, 1.0};
  c.alpha = alphas[smoothing], c.others = smoothing == 2;
  c.normalizer = level.next() == 1 ? 37.5 : 0.0;
  c.values = static_cast<Values>(level.next());
  c.ignored = static_cast<Ignored>(level.next());
  c.upstream = static_cast<Upstream>(level.next());
  const int empty = level.next();
  c.on_empty = empty == 0 ? OnEmpty::error : empty == 1 ? OnEmpty::nan : OnEmpty::zero;
  c.class_ignored = empty == 2;
  c.saved = static_cast<Saved>(level.next());  // own or reference
  out.dials.chunk = level.next();
  out.dials.block = level.next();
  const int kept = level.next();  // kept and keep in one factor: 8 sensible pairs
  const int keeps[][2] = {{0, 0}, {1, 1}, {2, 2}, {3, 2}, {4, 2}, {0, 3}, {0, 2}, {0, 0}};
  out.dials.kept = keeps[kept][0], out.dials.keep = keeps[kept][1];
  out.dials.least_budget = kept == 7;
  // Exponentials are kept only by a forward_backward, and inside dW only where dW is wanted, whole and new.
  if (kept >= 2 && kept <= 6) c.call = Call::forward_backward;
  if (kept == 5) {
    c.accumulate_dw = false;
    c.out_layout = Layout::contiguous;
    if (c.dw == DType::none) c.dw = c.w;
  }
  out.dials.threads = level.pick({1, 2, 7});
  c.seed = seed;
  settle(c);
  return out;
}

inline std::vector<SuiteCase> linear_cases(Mixture mixture, std::uint64_t seed) {
  const auto shapes = static_cast<int>(std::size(kLinearShapes));
  const std::vector<int> levels = {shapes, 3, 3, 2, 2, 2, 2, kLayouts, kLayouts, 3, 2, 3,
                                   4,      2, 5, 5, 5, 3, 2, 4,        4,        8, 3};
  std::vector<SuiteCase> out;
  std::uint64_t n = 0;
  for (const Row& row : pairwise_cover(levels, seed)) {
    SuiteCase made = linear_case(row, mixture, seed * 1000 + ++n);
    // Which row outputs are asked for walks through all subsets.
    made.c.wants_loss = (n & 1) != 0, made.c.wants_lse = (n & 2) != 0;
    made.c.wants_logprob = (n & 4) != 0, made.c.wants_stats = (n & 8) != 0;
    out.push_back(made);
  }
  return out;
}

struct LogitsShape {
  std::int64_t rows, vocab;
};
inline constexpr LogitsShape kLogitsShapes[] = {{1, 1},    {2, 2},    {64, 64},   {65, 63},   {31, 255},   {7, 256},
                                                {33, 257}, {5, 1031}, {17, 4099}, {3, 50257}, {2, 151936}, {0, 40}};

inline std::vector<SuiteCase> logits_cases(DType z, std::uint64_t seed) {
  const auto shapes = static_cast<int>(std::size(kLogitsShapes));
  const std::vector<int> levels = {shapes, 4, 3, 4, 3, 2, 3, 4, 2, 5, 5, 5, 3, 3, 3};
  std::vector<SuiteCase> out;
  std::uint64_t n = 0;
  for (const Row& row : pairwise_cover(levels, seed)) {
    ++n;
    Levels level(row);
    SuiteCase made;
    Case& c = made.c;
    c.kind = Kind::logits;
    c.z = z;
    const LogitsShape shape = level.pick(kLogitsShapes);
    c.rows = shape.rows, c.vocab = shape.vocab;
    const int call = level.next();  // backward twice as often: it has three sources
    c.call = call == 0 ? Call::forward : call == 1 ? Call::forward_backward : Call::backward;
    const int target = level.next();  // own dtype, fp32, in place
    c.dz = target == 1 ? DType::f32 : z;
    c.in_place = target == 2;
    // Classes must be adjacent; edges_test.cpp shows that other layouts are refused.
    c.x_layout = level.pick({Layout::contiguous, Layout::padded, Layout::reversed_rows, Layout::shared_row});
    const int narrow = level.next();
    c.y = narrow == 1 ? DType::i32 : DType::i64;
    c.y_layout = narrow == 2 ? Layout::padded : Layout::contiguous;
    c.out_layout = level.pick({Layout::contiguous, Layout::padded});
    c.reduction = level.pick({Reduction::mean, Reduction::sum, Reduction::none});
    const int smoothing = level.next();
    const double alphas[] = {0.0, 0.1, 0.1, 1.0};
    c.alpha = alphas[smoothing], c.others = smoothing == 2;
    c.normalizer = level.next() == 1 ? 37.5 : 0.0;
    c.values = static_cast<Values>(level.next());
    c.ignored = static_cast<Ignored>(level.next());
    c.upstream = static_cast<Upstream>(level.next());
    const int empty = level.next();
    c.on_empty = empty == 0 ? OnEmpty::error : empty == 1 ? OnEmpty::nan : OnEmpty::zero;
    c.class_ignored = empty == 2;
    c.saved = static_cast<Saved>(level.next());
    made.dials.threads = level.pick({1, 2, 7});
    c.wants_loss = (n & 1) != 0, c.wants_lse = (n & 2) != 0;
    c.wants_logprob = (n & 4) != 0, c.wants_stats = (n & 8) != 0;
    c.seed = seed * 1000 + n;
    settle(c);
    out.push_back(made);
  }
  return out;
}

// Every nth case, from an offset that walks.
inline std::vector<SuiteCase> thinned(std::vector<SuiteCase> cases, std::size_t keep_one_of) {
  if (keep_one_of <= 1) return cases;
  std::vector<SuiteCase> out;
  for (std::size_t i = 0; i < cases.size(); i += keep_one_of) out.push_back(cases[i]);
  return out;
}

}  // namespace logitless::test
