// Every kernel, in the order of their dependence, and the tables that a target hands to the drivers. Included once by
// each file of targets/, after that target's F32 (vector of floats), transpose16 and interleave16.
#pragma once

// clang-format off
#include "cpu/kernels/rows.hpp"
#include "cpu/kernels/logits.hpp"
#include "cpu/kernels/options.hpp"
#include "cpu/kernels/pair.hpp"
#include "cpu/kernels/pack.hpp"
#include "cpu/kernels/product.hpp"
#include "cpu/kernels/sparse.hpp"
// clang-format on

namespace logitless::cpu::LL_ISA {

constexpr RowKernels row_kernels() {
  return {leaf,         store,       decode,     recompute,    accumulate,      write,
          add_source,   merge_rows,  logits_row, merge_leaves, logits_gradient, logits_gradient_again,
          transform,    restrict_to, leaf_full,  gradient,     pair_leaf,       pair_mixture,
          pair_gradient};
}

// P: a register tile (FmaProduct, or the target's own for bf16).
template <class P>
constexpr ProductKernels product_kernels() {
  return {P::mr,
          P::nr,
          P::ks,
          static_cast<int>(sizeof(typename P::Operand)),
          pack_a<P>,
          pack_b_rows<P>,
          pack_b_cols<P>,
          multiply<P>,
          multiply_sparse<P>,
          scatter<P>};
}

}  // namespace logitless::cpu::LL_ISA
