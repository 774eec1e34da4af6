// A run of a backend judged against the double-precision reference: what `logitless check` prints.
//
// Tolerance of an element: a bound derived from eps of the dtypes and the norms of the operands, plus
// twice the largest error of the plain pipeline on the same data: products in the input's dtype summed in fp32, fp32
// logits, D cast back to the input's dtype. Nothing is tuned. Losses and D come from the reference backend in both
// yardsticks; the bound (bounds.hpp) knows the sizes of their terms and how each carries an error on.
//
// Large problems are judged on sampled rows: the backend runs the whole problem, once as asked and once with an
// upstream gradient that is 0 outside the sample, so that its dW (every class) equals the reference's over the sample.
// Where the plan predicts more than ten seconds for a run, it runs on evenly spaced rows. Both are reported.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "command.hpp"
#include "inputs.hpp"
#include "logitless/logitless.hpp"

namespace logitless::cli {

struct VerifyRequest {
  const Inputs& inputs;
  Options options;
  ContextOptions context;
  std::uint64_t budget = 0;
  bool grad_f32 = false;
  std::int64_t sample = 0;  // rows to compare; 0: as many as take about half a minute
  bool full = false;        // run and compare every row, however long it takes
  bool per_row = false;     // compare every output of a row, not loss and lse alone
  std::uint64_t seed = 1;
};

// One output. error and tolerance belong to one element: the first beyond tolerance by most, else the worst error.
struct Verdict {
  std::string output;
  double error = 0.0, tolerance = 0.0;
  double plain_error = 0.0;  // the plain pipeline's largest
  bool passed = true;
};

struct Verification {
  std::vector<Verdict> outputs;
  std::int64_t rows_run = 0, rows_checked = 0;
  bool sampled = false;
  std::int64_t kept = 0;
  Json machine;  // the context
  Json plan;
  double seconds = 0.0;  // of the backend's run as asked
  bool passed() const;
};

Verification verify(const VerifyRequest& request, Progress& progress);

}  // namespace logitless::cli
