// A plan: how one problem runs on one machine within a budget. Pure: same inputs, same plan; no device is touched.
//
// Two dials (docs/design.md): C rows of a chunk, and f, the share of a chunk's exponentials that pass 1 keeps for
// pass 2. B is the vocabulary block. Every published strategy is a setting of these.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "contract/problem.hpp"

namespace logitless::plan {

// How a target multiplies: shapes of its register tile and panels, and what a candidate costs there.
struct Machine {
  const char* target = "scalar";  // name of the CPU target
  int threads = 1;
  std::int64_t leaf = 256;          // columns of a statistics leaf = columns of a macro tile
  std::int64_t tile_rows = 4;       // MR, rows of the register tile
  std::int64_t tile_columns = 16;   // NR, its columns: packed panels are padded to them
  std::int64_t bf16_tile_rows = 0;  // the same for bf16 products
  std::int64_t bf16_tile_columns = 0;
  std::int64_t k_step = 16;      // K granularity of packed panels, in elements
  bool bf16_products = false;    // products take bf16 operands when X and W are bf16
  std::int64_t macro_rows = 96;  // rows of a macro tile
  double f32_gflops = 50.0;      // per thread; tuning data, used only for predictions
  double bf16_gflops = 0.0;      // per thread, when bf16_products
  double memory_gbytes = 20.0;   // all threads
};

// Where kept exponentials live; inside_dw: in dW's own bytes first, and those that find no room there in the workspace.
enum class Keep : std::int32_t { none = 0, workspace = 1, inside_dw = 2 };

// One buffer of the ledger, in the order in which the workspace is laid out.
struct Buffer {
  const char* name;
  contract::DType dtype;
  std::int64_t shape[3];
  std::int64_t offset;  // bytes from the workspace's 64-byte aligned start
  std::int64_t bytes;
  std::int64_t padding;  // bytes of `bytes` that alignment or tile padding may leave untouched
};

struct Plan {
  contract::Problem problem;
  Machine machine;
  std::int64_t chunk = 0;   // C
  std::int64_t block = 0;   // B
  std::int64_t blocks = 0;  // ceil(V / B)
  // The first kept_blocks blocks of a chunk keep their exponentials, the first inside_blocks of them in dW's bytes, a
  // column every inside_stride bytes. That is at least a row of dW, so block k's gradient, written when its
  // exponentials are spent, overwrites those of no later block.
  std::int64_t kept_blocks = 0, inside_blocks = 0;
  std::int64_t inside_stride = 0;
  Keep keep = Keep::none;
  // Leaves of 256 columns whose exponentials (or logits) lie in the caller's buffer, from forward to backward, behind a
  // head of saved_head bytes.
  std::int64_t saved_leaves = 0, saved_head = 0;
  // A device's plan (gpu.hpp): rows that products cover, whether kept ones are gathered for them, the operands' dtype,
  // and rows that carry rank-one corrections beside them. exponentials: kept blocks are E, and not logits.
  // own_product: logits come from this library's kernel, which leaves statistics and E or D and no logits.
  bool gpu = false, gathers = false, exponentials = false, own_product = false;
  std::int64_t slots = 0, extra_rows = 0;
  contract::DType operand = contract::DType::none;
  bool bf16_products = false;
  contract::DType e_dtype = contract::DType::none;  // storage of kept exponentials
  double share = 0.0;                               // f, of the columns
  double flops = 0.0;
  double predicted_seconds = 0.0;
  std::int64_t workspace_bytes = 0;
  std::vector<Buffer> ledger;
  std::vector<std::string> rejected;  // "settings: reason" a line; neighbours in C with one reason share a line

  std::int64_t columns_of(std::int64_t k) const { return std::min(block, problem.vocab - k * block); }
  const char* products() const;  // dtype of their operands
  const Buffer* find(const char* name) const;
  std::string text() const;
  std::string json() const;
};

// Takes the least predicted time among the settings within the budget. When none fits, the returned plan has
// chunk 0 and workspace_bytes = the least that any setting needs.
Plan make_plan(const contract::Problem& problem, const Machine& machine);
// The same with the dials given (0 or negative: free): for tests and benchmarks. kept_blocks counts all that are kept.
struct Dials {
  std::int64_t chunk = 0, block = 0, kept_blocks = -1;
  int keep = -1;
};
Plan make_plan(const contract::Problem& problem, const Machine& machine, const Dials& dials);

}  // namespace logitless::plan
