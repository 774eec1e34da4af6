// What the row kernels share: the call's operands, arrays of a number a slot in the workspace, and a call's scalars on
// the device. A slot is a row that products cover: the row itself, or, where the host gave a bound of how many rows are
// kept, the i-th kept one. Plain structs, passed to kernels by value; pointers are the device's.
#pragma once

#include <cstdint>

#include "plan/row.hpp"

namespace logitless::cuda {

// Of a slot.
enum Flag : std::uint8_t {
  kKept = 0,
  kIgnored = 1,   // an ignored row, or a slot that no row fills
  kBad = 2,       // kept, its logits are no distribution
  kNoTarget = 3,  // kept, its target is out of range
};

struct Scalars {
  row::Reducer reducer;
  double total;  // sum of the kept rows' losses
  std::int64_t kept, bad, correct;
  std::int64_t filter_left, filter_seen;
  double filter_variance;
  float zero, one, dw_alpha;  // of the products; dw_alpha undoes the scaling of fp16 gradients
  std::int32_t least_exponent;
};

// The context's record of the first thing that a call could not refuse; see ll_check_status.
struct Status {
  std::int32_t code;  // 0: nothing; an ll_status
  std::int32_t what;  // see StatusKind
  std::int64_t row, value, limit;
};
enum StatusKind : std::int32_t { kTargetOutOfRange = 1, kMoreKept = 2, kNothingKept = 3, kTopkId = 4 };

struct RowCall {
  contract::Problem p;
  Operands o;
  row::TopK topk;  // buffers in the workspace
  Scalars* scalars;
  Status* status;
};

// Arrays [slots]; null where the problem does not need them.
struct Rows {
  std::int64_t slots;
  std::int64_t* index;    // original row of a slot; -1: none
  std::int64_t* slot_of;  // [R] slot of an original row, -1: ignored; null: slots are rows
  std::int64_t* target;   // column of the target within the problem's columns, or -1
  std::uint8_t* flag;
  float *m, *r, *k, *n, *t, *g, *u, *c, *z_y;  // merged statistics
  std::int64_t* argmax;
  // Exponentials E = exp(z - reference): D = E scale - shift, and at the target E is at_target.
  float *reference, *scale, *shift, *at_target;
  // The same of D from logits multiplied out again: exponentials relative to the row's own maximum.
  float *d_reference, *d_scale, *d_at_target;
  row::GradientRow* gradient;
  contract::PairStatistics<double>* pair_sums;
  row::PairOutcome* pair;
  row::PairRow* pair_row;
  std::int32_t* exponent;  // fp16: D is stored times 2^exponent
  double* loss;
  std::int64_t* filter_left;
  double* filter_variance;
};

// A block of logits: columns [column0, column0 + columns) of slots [slot0, slot0 + rows).
struct Block {
  std::int64_t slot0, rows;
  std::int64_t column0, columns;
  const void* z;  // of slot0's first column
  contract::DType z_dtype;
  std::int64_t z_stride;  // elements between slots (or original rows)
  bool by_index;          // rows of z are original ones, from the problem's first: given logits
  bool shaped;            // z has gone through transforms and restrictions
  const float* u;         // the teacher's logits of the same slots and columns, or null
  std::int64_t u_stride;
};

}  // namespace logitless::cuda
