// Data with masked classes and rows without a distribution, for cases of 13 rows and 700 classes: -inf in places where
// leaves of 256 begin and end, whole leaves of it, +inf and NaN, at targets and elsewhere.
#pragma once

#include <algorithm>
#include <limits>

#include "support/case.hpp"

namespace logitless::test {

// Logits with masked classes, rows without a distribution, and everything that may stand beside them.
inline Data masked_logits(const Case& c) {
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  Data data(c);
  for (std::int64_t i = 0; i < c.rows; ++i) data.y.set_integer(i, (300 + 7 * i) % c.vocab);
  auto mask = [&](std::int64_t row, std::int64_t from, std::int64_t to) {
    for (std::int64_t j = from; j < std::min(to, c.vocab); ++j) data.z.set(row, j, -infinity);
  };
  const auto target_of = [&](std::int64_t row) { return reference::load_integer(data.y.view(), row); };
  mask(0, 0, 256);                         // the first leaf is masked
  mask(1, 0, 512);                         // the first two
  mask(2, 512, c.vocab);                   // the last
  mask(3, 0, c.vocab);                     // all: no distribution
  data.z.set(4, 17, infinity);             // +inf
  data.z.set(5, 600, nan);                 // NaN
  data.z.set(6, target_of(6), nan);        // NaN at the target
  data.z.set(7, target_of(7), -infinity);  // a masked target: loss +inf
  mask(8, 0, target_of(8));                // all but the target: loss 0
  mask(8, target_of(8) + 1, c.vocab);
  data.z.set(9, target_of(9), infinity);  // +inf at the target
  mask(10, 5, 6);                         // one class
  data.z.set(11, 0, nan);                 // NaN in a leaf that is masked otherwise
  mask(11, 1, 256);
  return data;  // row 12 is as any other
}

// The same through X and W: W_j0 = -inf masks class j where x_i0 > 0, and gives +inf where x_i0 < 0; a row of X with
// NaN or infinity has no distribution and leaves no trace in dW. dX's column 0 is 0 * inf there: no rule fixes it.
// masked: so many classes, from the first on; the targets stand behind them but for one.
inline Data masked_linear(const Case& c, std::int64_t masked) {
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  Data data(c);
  for (std::int64_t i = 0; i < c.rows; ++i) {
    data.x.set(i, 0, 0.5);
    data.y.set_integer(i, 640 + i);
  }
  for (std::int64_t j = 0; j < masked; ++j) data.w.set(j, 0, -infinity);
  if (masked > 0) data.y.set_integer(2, 0);  // a masked target
  if (masked == 1) data.x.set(3, 0, -0.5);   // +inf
  data.x.set(5, 3, nan);
  data.x.set(6, 23, infinity);
  return data;
}

}  // namespace logitless::test
