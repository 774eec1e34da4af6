// Forward and backward of the body, Adam, and counter-based random numbers.
//
// Element-wise work is cut into tasks of whole rows, sums over rows into tasks of columns: every number is written by
// one task in one order, so the bits do not depend on which thread came first.
#include "model.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <numbers>

namespace tiny_lm {
namespace {

using Row = Eigen::Map<Eigen::ArrayXf>;
using ConstRow = Eigen::Map<const Eigen::ArrayXf>;

constexpr std::int64_t task_rows = 32, task_columns = 64;
constexpr float norm_epsilon = 1e-5f;
// gelu(x) = x/2 (1 + tanh(u)), u = g (x + k x^3)
constexpr float gelu_g = 0.7978845608f, gelu_k = 0.044715f;

std::uint64_t mixed(std::uint64_t x) {  // splitmix64's finaliser
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

}  // namespace

std::uint64_t random_bits(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return mixed(mixed(mixed(seed) ^ stream) ^ index);
}

double random_unit(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return (static_cast<double>(random_bits(seed, stream, index) >> 11) + 0.5) * 0x1p-53;
}

Vector<float> initial_parameters(const Sizes& sizes, std::uint64_t seed) {
  Vector<float> p(static_cast<std::size_t>(sizes.parameters()));
  const auto normal = [&](std::int64_t offset, std::int64_t count, double deviation, std::uint64_t stream) {
    for (std::int64_t i = 0; i < count; ++i) {  // Box and Muller
      const auto at = static_cast<std::uint64_t>(i);
      const double radius = std::sqrt(-2 * std::log(random_unit(seed, stream, 2 * at)));
      const double angle = 2 * std::numbers::pi * random_unit(seed, stream, 2 * at + 1);
      p[static_cast<std::size_t>(offset + i)] = static_cast<float>(deviation * radius * std::cos(angle));
    }
  };
  normal(sizes.embedding(), sizes.vocab * sizes.hidden, 0.02, 1);
  normal(sizes.w1(), sizes.concatenated() * sizes.inner, 1 / std::sqrt(static_cast<double>(sizes.concatenated())), 2);
  normal(sizes.w2(), sizes.inner * sizes.hidden, 1 / std::sqrt(static_cast<double>(sizes.inner)), 3);
  std::fill_n(p.begin() + sizes.gain(), sizes.hidden, 1.0f);
  return p;
}

Body::Body(const Sizes& sizes, std::int64_t rows, Products& products)
    : sizes_(sizes), products_(products), scale_(std::sqrt(static_cast<float>(sizes.hidden))) {
  const auto elements = [&](std::int64_t columns) { return static_cast<std::size_t>(rows * columns); };
  c_.resize(elements(sizes.concatenated()));
  pre_.resize(elements(sizes.inner));
  a_.resize(elements(sizes.inner));
  sum_.resize(elements(sizes.hidden));
  normal_.resize(elements(sizes.hidden));
  x_.resize(elements(sizes.hidden));
  inverse_.resize(elements(1));
  da_.resize(elements(sizes.inner));
  dc_.resize(elements(sizes.concatenated()));
}

const float* Body::forward(const float* p, const std::int32_t* contexts, std::int64_t rows) {
  const std::int64_t n = sizes_.context, h = sizes_.hidden, f = sizes_.inner, nh = sizes_.concatenated();
  Pool& pool = products_.pool();
  pool.slabs(rows, task_rows, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first * n; i < last * n; ++i) {
      Row(&c_[i * h], h) = scale_ * ConstRow(p + contexts[i] * h, h);
    }
  });
  products_.nn(rows, f, nh, c_.data(), p + sizes_.w1(), pre_.data());
  pool.slabs(rows, task_rows, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      Row pre(&pre_[i * f], f), a(&a_[i * f], f);
      pre += ConstRow(p + sizes_.b1(), f);
      a = 0.5f * pre * (1.0f + (gelu_g * (pre + gelu_k * pre.cube())).tanh());
    }
  });
  products_.nn(rows, h, f, a_.data(), p + sizes_.w2(), sum_.data());
  pool.slabs(rows, task_rows, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      Row sum(&sum_[i * h], h), normal(&normal_[i * h], h);
      sum += ConstRow(p + sizes_.b2(), h) + ConstRow(&c_[i * nh + nh - h], h);
      normal = sum - sum.mean();
      inverse_[i] = 1.0f / std::sqrt(normal.square().mean() + norm_epsilon);
      normal *= inverse_[i];
      Row(&x_[i * h], h) = normal * ConstRow(p + sizes_.gain(), h) + ConstRow(p + sizes_.bias(), h);
    }
  });
  return x_.data();
}

void Body::backward(const float* p, const std::int32_t* contexts, std::int64_t rows, float* dx, float* g) {
  const std::int64_t n = sizes_.context, h = sizes_.hidden, f = sizes_.inner, nh = sizes_.concatenated();
  Pool& pool = products_.pool();
  pool.slabs(h, task_columns, [&](std::int64_t first, std::int64_t last) {
    const std::int64_t width = last - first;
    Row gain(g + sizes_.gain() + first, width), bias(g + sizes_.bias() + first, width);
    for (std::int64_t i = 0; i < rows; ++i) {
      const ConstRow d(dx + i * h + first, width);
      gain += d * ConstRow(&normal_[i * h + first], width);
      bias += d;
    }
  });
  // dX becomes the gradient of the sum before the norm.
  pool.slabs(rows, task_rows, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      Row d(dx + i * h, h);
      const ConstRow normal(&normal_[i * h], h);
      d *= ConstRow(p + sizes_.gain(), h);
      const float mean = d.mean(), along = (d * normal).mean();
      d = inverse_[i] * (d - mean - along * normal);
    }
  });
  const auto column_sums = [&](const float* d, std::int64_t columns, float* sums) {
    pool.slabs(columns, task_columns, [&](std::int64_t first, std::int64_t last) {
      Row sum(sums + first, last - first);
      for (std::int64_t i = 0; i < rows; ++i) sum += ConstRow(d + i * columns + first, last - first);
    });
  };
  column_sums(dx, h, g + sizes_.b2());
  products_.tn(f, h, rows, a_.data(), dx, g + sizes_.w2(), true);
  products_.nt(rows, f, h, dx, p + sizes_.w2(), da_.data());
  pool.slabs(rows, task_rows, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      Row pre(&pre_[i * f], f), da(&da_[i * f], f), t(&a_[i * f], f);  // A is not needed any more
      t = (gelu_g * (pre + gelu_k * pre.cube())).tanh();
      da *= 0.5f * (1.0f + t) + 0.5f * pre * (1.0f - t.square()) * (gelu_g * (1.0f + 3.0f * gelu_k * pre.square()));
    }
  });
  column_sums(da_.data(), f, g + sizes_.b1());
  products_.tn(nh, f, rows, c_.data(), da_.data(), g + sizes_.w1(), true);
  products_.nt(rows, nh, f, da_.data(), p + sizes_.w1(), dc_.data());
  // Rows of E occur many times in a batch: tasks own columns, not rows.
  pool.slabs(h, task_columns, [&](std::int64_t first, std::int64_t last) {
    const std::int64_t width = last - first;
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        Row row(g + contexts[i * n + j] * h + first, width);
        row += scale_ * ConstRow(&dc_[i * nh + j * h + first], width);
      }
      Row newest(g + contexts[i * n + n - 1] * h + first, width);
      newest += scale_ * ConstRow(dx + i * h + first, width);
    }
  });
}

void Adam::step(Pool& pool, std::int64_t t, float rate, Vector<float>& parameters, Vector<float>& gradients) {
  constexpr double beta1 = 0.9, beta2 = 0.99;  // few steps: a short memory of squares
  constexpr float epsilon = 1e-8f;
  const auto b1 = static_cast<float>(beta1), b2 = static_cast<float>(beta2);
  const auto step = static_cast<double>(t);
  const float correct1 = rate / static_cast<float>(1 - std::pow(beta1, step));
  const float correct2 = 1.0f / std::sqrt(static_cast<float>(1 - std::pow(beta2, step)));
  pool.slabs(static_cast<std::int64_t>(parameters.size()), 1 << 16, [&](std::int64_t first, std::int64_t last) {
    const std::int64_t width = last - first;
    Row p(&parameters[first], width), g(&gradients[first], width), mean(&m[first], width), square(&v[first], width);
    // In pieces that stay in L1, so that memory is passed over once.
    for (std::int64_t at = 0; at < width; at += 512) {
      const std::int64_t w = std::min<std::int64_t>(512, width - at);
      mean.segment(at, w) = b1 * mean.segment(at, w) + (1 - b1) * g.segment(at, w);
      square.segment(at, w) = b2 * square.segment(at, w) + (1 - b2) * g.segment(at, w).square();
      p.segment(at, w) -= correct1 * mean.segment(at, w) / (correct2 * square.segment(at, w).sqrt() + epsilon);
      g.segment(at, w).setZero();
    }
  });
}

}  // namespace tiny_lm
