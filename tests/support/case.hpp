// One conformance case: a problem, its options, its data and how it is laid out, as a plain struct that prints itself;
// and Data, the tensors made from it. X [R,H], W [V,H] or z [R,V], y [R], upstream [R].
#pragma once

#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>

#include "plan/operands.hpp"
#include "support/random.hpp"
#include "support/tensor.hpp"

namespace logitless::test {

using contract::Call;
using contract::Kind;
using contract::OnEmpty;
using contract::Problem;
using contract::Reduction;

// dtypes of X and W.
struct Mixture {
  DType x, w;
};

enum class Values {
  uniform,  // logits of a few units
  normal,   // the same, Gaussian
  trained,  // Zipf targets that the logits know: a loss of a few nats
  wide,     // logits spread over +-100, so that references differ from leaf to leaf
  offset,   // a common offset of 1e4
};
enum class Ignored { none, some, half, all_but_one, all };
enum class Upstream { one, scalar, zero, rows, shared_row };
enum class Saved { own, reference, lse };  // what backward starts from

inline const char* name_of(Values v) {
  constexpr const char* names[] = {"uniform", "normal", "trained", "wide", "offset"};
  return names[static_cast<int>(v)];
}
inline const char* name_of(Ignored v) {
  constexpr const char* names[] = {"none", "1/17", "half", "all_but_one", "all"};
  return names[static_cast<int>(v)];
}
inline const char* name_of(Upstream v) {
  constexpr const char* names[] = {"1", "-2.5", "0", "rows", "shared_row"};
  return names[static_cast<int>(v)];
}
inline const char* name_of(Saved v) {
  constexpr const char* names[] = {"own stats", "reference's stats", "lse"};
  return names[static_cast<int>(v)];
}

struct Case {
  Kind kind = Kind::linear;
  Call call = Call::forward_backward;
  std::int64_t rows = 5, hidden = 7, vocab = 11;
  DType x = DType::f32, w = DType::f32, z = DType::f32;
  DType dx = DType::none, dw = DType::none, dz = DType::none;
  DType y = DType::i64;
  Layout x_layout = Layout::contiguous, w_layout = Layout::contiguous;  // x_layout is z's, too
  Layout y_layout = Layout::contiguous, out_layout = Layout::contiguous;
  Reduction reduction = Reduction::mean;
  OnEmpty on_empty = OnEmpty::error;
  double alpha = 0.0;
  bool others = false;         // convention of alpha: alpha/(V-1) to the other classes
  bool class_ignored = false;  // ignore_index is a class of the vocabulary
  double normalizer = 0.0;
  Values values = Values::normal;
  Ignored ignored = Ignored::none;
  Upstream upstream = Upstream::one;
  bool accumulate_dx = false, accumulate_dw = false, in_place = false;
  bool wants_loss = true, wants_lse = true, wants_logprob = true, wants_stats = true;
  Saved saved = Saved::own;
  std::uint64_t seed = 1;

  std::int64_t ignore_index() const { return class_ignored ? vocab / 2 : -100; }
  // The definition of the conventions, on its own: others(alpha) puts alpha/(V-1) on each other class.
  double uniform_alpha() const {
    if (!others) return alpha;
    return alpha / static_cast<double>(vocab - 1) * static_cast<double>(vocab);
  }
  bool wants_gradient() const { return call != Call::forward; }

  // smoothing_alpha: what the side under test makes of alpha.
  Problem problem(double smoothing_alpha) const {
    Problem p;
    p.kind = kind, p.call = call;
    p.rows = rows, p.hidden = kind == Kind::linear ? hidden : 0, p.vocab = vocab;
    if (kind == Kind::linear) {
      p.x = x, p.w = w;
      if (wants_gradient()) p.dx = dx, p.dw = dw;
    } else {
      p.z = z;
      if (wants_gradient()) p.dz = dz;
      p.in_place = in_place && wants_gradient();
    }
    p.accumulate_dx = accumulate_dx && p.dx != DType::none;
    p.accumulate_dw = accumulate_dw && p.dw != DType::none;
    p.dw_contiguous = out_layout == Layout::contiguous;
    p.loss.reduction = reduction, p.loss.on_empty = on_empty;
    p.loss.ignore_index = ignore_index();
    p.loss.smoothing = smoothing_alpha;
    p.loss.normalizer = normalizer;
    return p;
  }

  std::string text() const {
    std::ostringstream out;
    const char* calls[] = {"", "forward", "forward_backward", "backward"};
    const char* reductions[] = {"", "mean", "sum", "none"};
    const char* empties[] = {"", "error", "nan", "zero"};
    out << calls[static_cast<int>(call)] << " R=" << rows;
    if (kind == Kind::linear) {
      out << " H=" << hidden << " V=" << vocab << " x=" << contract::name_of(x) << '/' << name_of(x_layout)
          << " w=" << contract::name_of(w) << '/' << name_of(w_layout) << " dx=" << contract::name_of(dx)
          << (accumulate_dx ? "+=" : "") << " dw=" << contract::name_of(dw) << (accumulate_dw ? "+=" : "");
    } else {
      out << " V=" << vocab << " z=" << contract::name_of(z) << '/' << name_of(x_layout)
          << " dz=" << contract::name_of(dz) << (in_place ? " in place" : "");
    }
    out << " out=" << name_of(out_layout) << " y=" << contract::name_of(y) << '/' << name_of(y_layout) << ' '
        << reductions[static_cast<int>(reduction)] << " on_empty=" << empties[static_cast<int>(on_empty)]
        << " alpha=" << alpha << (others ? " others" : "") << (class_ignored ? " ignore_index=V/2" : "")
        << " normalizer=" << normalizer << " values=" << name_of(values) << " ignored=" << name_of(ignored)
        << " upstream=" << name_of(upstream) << " outputs=" << wants_loss << wants_lse << wants_logprob << wants_stats;
    if (call == Call::backward) out << " from " << name_of(saved);
    out << " seed=" << seed;
    return out.str();
  }
};

// Targets, ignored rows and upstream gradients of a case.
inline void fill_targets(Tensor& y, const Case& c, Random& random) {
  const std::int64_t spared = c.rows > 0 ? random.below(c.rows) : 0;
  for (std::int64_t i = 0; i < c.rows; ++i) {
    const bool zipf = c.values == Values::trained;
    std::int64_t target = zipf ? random.zipf(c.vocab) : random.below(c.vocab);
    if (target == c.ignore_index() && c.vocab > 1) target = (target + 1) % c.vocab;
    const bool drop = c.ignored == Ignored::some          ? random.below(17) == 0
                      : c.ignored == Ignored::half        ? random.below(2) == 0
                      : c.ignored == Ignored::all_but_one ? i != spared
                                                          : c.ignored == Ignored::all;
    y.set_integer(i, drop ? c.ignore_index() : target);
  }
}

struct Data {
  Tensor x, w, z, y, upstream;
  double grad_loss = 1.0;

  explicit Data(const Case& c) {
    Random random(c.seed);
    y = Tensor(c.y, c.rows, 1, c.y_layout);
    fill_targets(y, c, random);
    if (c.kind == Kind::linear) {
      fill_linear(c, random);
    } else {
      fill_logits(c, random);
    }
    if (c.upstream == Upstream::scalar) grad_loss = -2.5;
    if (c.upstream == Upstream::zero) grad_loss = 0.0;
    if (c.upstream == Upstream::rows || c.upstream == Upstream::shared_row) {
      grad_loss = 0.75;
      const bool shared = c.upstream == Upstream::shared_row;
      upstream = Tensor(DType::f32, c.rows, 1, shared ? Layout::shared_row : Layout::padded);
      for (std::int64_t i = 0; i < c.rows; ++i) upstream.set(i, 0, random.normal());
    }
  }

  Operands operands() const {
    Operands o;
    o.x = x.view(), o.w = w.view(), o.z = z.view(), o.targets = y.view();
    o.grad_loss = grad_loss;
    o.grad_row_loss = upstream.view();
    return o;
  }

 private:
  std::int64_t known_target(std::int64_t i, const Case& c) const {
    const std::int64_t target = reference::load_integer(y.view(), i);
    return target < 0 || target >= c.vocab ? 0 : target;
  }

  void fill_linear(const Case& c, Random& random) {
    x = Tensor(c.x, c.rows, c.hidden, c.x_layout);
    w = Tensor(c.w, c.vocab, c.hidden, c.w_layout);
    const double h = static_cast<double>(c.hidden);
    const double spread = c.values == Values::wide ? 30.0 : 2.0;  // standard deviation of a logit
    const double w_scale = 1.0 / std::sqrt(h);
    for (std::int64_t j = 0; j < c.vocab; ++j) {
      for (std::int64_t k = 0; k < c.hidden; ++k) {
        const double value = c.values == Values::uniform ? random.uniform(-1.7, 1.7) : random.normal();
        w.set(j, k, c.values == Values::offset && k == 0 ? 1e4 : value * w_scale);
      }
    }
    for (std::int64_t i = 0; i < c.rows; ++i) {
      const std::int64_t target = known_target(i, c);
      for (std::int64_t k = 0; k < c.hidden; ++k) {
        double value = spread * (c.values == Values::uniform ? random.uniform(-1.7, 1.7) : random.normal());
        // Towards the target's row of W: its logit rises by about 6.
        if (c.values == Values::trained) value = 0.5 * value + 6.0 * w.at(target, k);
        x.set(i, k, c.values == Values::offset && k == 0 ? 1.0 : value);
      }
    }
  }

  void fill_logits(const Case& c, Random& random) {
    z = Tensor(c.z, c.rows, c.vocab, c.x_layout);
    const double spread = c.values == Values::wide ? 30.0 : 2.0;
    for (std::int64_t i = 0; i < c.rows; ++i) {
      const std::int64_t target = known_target(i, c);
      for (std::int64_t j = 0; j < c.vocab; ++j) {
        double value = spread * (c.values == Values::uniform ? random.uniform(-1.7, 1.7) : random.normal());
        if (c.values == Values::trained && j == target) value += 0.8 * std::log(static_cast<double>(c.vocab));
        z.set(i, j, c.values == Values::offset ? value + 1e4 : value);
      }
    }
  }
};

}  // namespace logitless::test
