// What the report shows beside the curves: gradient errors against double, peak memory and time of each head alone.
//
// Memory is measured, not computed: each point is a process of its own that makes inputs and outputs resident, resets
// the kernel's high-water mark and runs one head once. Its peak above that is what the head needs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "heads.hpp"
#include "options.hpp"

namespace tiny_lm {

struct HeadMeasurement {
  double peak_bytes = 0;   // resident, beside inputs and outputs
  double extra_bytes = 0;  // what the head says of itself
  double seconds = 0;      // best of --steps runs
  double flops = 0;        // multiplied
  double product_seconds = 0;
};
// In this process: the body of --measure-head. Prints one JSON object.
void print_head_measurement(const Options& options);

// The same in a process of its own; all zero where that head cannot run, for example within too small a budget.
struct HeadCase {
  std::string head;  // "dense" or "logitless"
  HeadShape shape;
  std::uint64_t budget = 0;
  int runs = 1;  // the best time counts
};
HeadMeasurement measure_head(const HeadCase& which, const Options& options);
// Bytes that may be asked of this machine without swapping.
double available_memory();

// ||g - double|| / ||double|| of one gradient.
struct GradientError {
  double dx = 0, dw = 0, loss = 0;
};
struct GradientErrors {
  std::int64_t rows = 0;
  GradientError logitless, dense;
};
GradientErrors gradient_errors(const HeadShape& shape, const Options& options, Products& products, const float* x,
                               const float* w, const std::int32_t* y);

// Products and the rest of a head whose inside cannot be timed: the rest does not depend on H, the products grow with
// it, so times at H and 2H tell them apart.
struct HeadSplit {
  double products = 0, outside = 0;  // seconds
  double gflops = 0;                 // in products
};
HeadSplit split_by_width(const HeadMeasurement& at_h, const HeadMeasurement& at_2h);

}  // namespace tiny_lm
