// From the wishes of a suite case to a TargetBackend's dials: rows of a chunk, columns of a block, blocks kept and
// where.
#pragma once

#include "support/backend.hpp"
#include "support/cases.hpp"

namespace logitless::test {

inline void apply(const SuiteCase& one, TargetBackend& backend) {
  const Case& c = one.c;
  const DialWish& wish = one.dials;
  backend.least_budget = wish.least_budget;
  if (c.kind != Kind::linear || wish.least_budget) return;
  const std::int64_t leaf = 256;
  const std::int64_t chunks[] = {0, 16, c.rows / 3, c.rows};
  const std::int64_t columns[] = {0, leaf, 2 * leaf, c.vocab};
  plan::Dials dials;
  dials.chunk = chunks[wish.chunk];
  dials.block = columns[wish.block];
  const std::int64_t block = dials.block > 0 ? (dials.block + leaf - 1) / leaf * leaf : leaf;
  const std::int64_t blocks = (c.vocab + block - 1) / block;
  const std::int64_t kept[] = {-1, 0, 1, (blocks + 1) / 2, blocks};
  dials.kept_blocks = kept[wish.kept];
  dials.keep = wish.keep - 1;
  if (dials.keep == static_cast<int>(plan::Keep::inside_dw)) dials.chunk = 0;  // needs all rows in one chunk
  backend.dials = dials;
}

}  // namespace logitless::test
