// The first product on Hopper: Z = X W^T, X [rows,hidden], W [columns,hidden], 16-bit, from tiles of 128 x 256 logits
// that are never written. What leaves a tile: statistics of each row's leaf of 256 columns, and if wanted the
// exponentials E or the gradient D in 16 bits. Host side: fill a FirstProduct, plan once, launch any number of times
// (any stream, any graph); nothing here allocates or synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "contract/problem.hpp"

namespace logitless::cuda {

enum class Store : std::int32_t {
  nothing = 0,
  exponentials = 1,  // E = exp(z - m), the target's entry 0
  gradient = 2,      // D = exp(z - m) row_scale - row_shift, the target's entry at_target, all 0 in dead rows
};  // with a softcap every entry, the target's too, times 1 - (z temperature / softcap)^2; masked ones: 0

// One block of columns. X, W and what is stored: 16-byte aligned, rows adjacent along hidden (columns), leading
// dimensions in elements and multiples of 8. Arrays over rows or leaves are fp32; null: not there, or not wanted.
struct FirstProduct {
  const void *x = nullptr, *w = nullptr;
  std::int64_t ldx = 0, ldw = 0;
  std::int64_t rows = 0, columns = 0, hidden = 0;
  contract::DType dtype = contract::DType::bf16;  // of X, W and what is stored: bf16 or f16

  const std::int64_t* target = nullptr;  // [rows]; less target_from relative to this block; outside it: not here
  std::int64_t target_from = 0;
  const float* reference = nullptr;  // [rows] m, finite; null: each leaf's own maximum (finite, else 0)

  // z = cap(scale (x w + bias_j)) / temperature, cap(t) = softcap tanh(t / softcap), infinities and NaN as they are.
  const float* bias = nullptr;  // [columns]
  float scale = 1.0F, softcap = 0.0F /* 0: none */, temperature = 1.0F;
  const float* row_temperature = nullptr;  // [rows], instead of temperature

  Store store = Store::nothing;
  void* out = nullptr;  // [rows,ldout]; the copy engine also writes 0 up to a row's next multiple of 8 columns
  std::int64_t ldout = 0;
  const float *row_scale = nullptr, *row_shift = nullptr, *at_target = nullptr;  // [rows], of D; shift null: 0
  const std::uint8_t* dead = nullptr;                                            // [rows]

  // [leaves][rows], leaf = column / 256: sums over its columns, r, t and g without the target's.
  float* r = nullptr;                   // exp(z - m)
  float* u = nullptr;                   // z - m
  float* t = nullptr;                   // exp(z - m) (z - m), 0 where z is -inf
  float* g = nullptr;                   // exp(z - m)^2
  float* leaf_m = nullptr;              // m, where reference is null
  float* leaf_max = nullptr;            // largest z, NaN if one is; and the lowest column where it is
  std::int32_t* leaf_argmax = nullptr;  // (with a NaN: any of the leaf's)
  float* z_y = nullptr;                 // [rows], written by the tile that holds the target

  bool transforms() const {
    return bias != nullptr || row_temperature != nullptr || scale != 1.0F || softcap > 0.0F || temperature != 1.0F;
  }
};

// Resolved once for what is wanted (which pointers are null, store, dtype) and for the largest shape; serves smaller
// rows and columns too, with the same bits for a row in whatever shape it comes.
struct FirstProductPlan {
  const void* kernel = nullptr;
  void* encode = nullptr;  // cuTensorMapEncodeTiled
  contract::DType dtype = contract::DType::none;
  int statistics = 0;  // 0: r; 1: and u; 2: all
  bool transform = false;
  Store store = Store::nothing;
  int clusters = 0;      // resident at once
  int cluster_rows = 0;  // CTAs of a cluster, along the rows; they share W's tiles
  int group = 0;         // clusters along the rows that walk the columns together, so that X's tiles stay in L2
  int lead = 0;          // hidden blocks by which one consumer leads the other
  int shared_bytes = 0;
};

inline constexpr int first_product_leaf = 256;

// Returns null, or what is wrong with the description or this device.
const char* make_first_product(const FirstProduct& p, int device_sms, FirstProductPlan* plan);

// Of the plan's kind; returns null or what is wrong. Rows or columns of 0: nothing happens.
const char* launch_first_product(const FirstProductPlan& plan, const FirstProduct& p, cudaStream_t stream);

}  // namespace logitless::cuda
