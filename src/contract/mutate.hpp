// Wrong twins of the contract's formulas, for one purpose: a test build sets one at a time and the conformance suite
// must notice. Outside that build LL_MUTATE(id, right, wrong) is `right` and nothing else is compiled.
#pragma once

#if defined(LOGITLESS_MUTATIONS)
namespace logitless::contract {
inline int mutation = 0;              // 0: all formulas are right
inline constexpr int mutations = 56;  // ids are 1..mutations
}  // namespace logitless::contract
#define LL_MUTATE(id, right, wrong) (::logitless::contract::mutation == (id) ? (wrong) : (right))
#else
#define LL_MUTATE(id, right, wrong) (right)
#endif
