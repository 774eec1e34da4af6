// The true accuracy, printed when a test program ends: for each target, dtype and output, the root mean square error
// against the double reference divided by that of the plain pipeline, median and maximum over cases. Below 1 is the
// aim. Two yardsticks: plain with fp32 logits (tolerances use it), and plain whose 16-bit products return 16-bit
// logits.
#pragma once

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

namespace logitless::test {

class RatioTable {
 public:
  static RatioTable& instance() {
    static RatioTable table;
    return table;
  }
  // Errors are root mean squares; a plain error of 0 says nothing and is left out.
  void add(const std::string& what, double error, double plain, double plain_rounded) {
    if (plain > 0.0) rows_[what].fp32.push_back(error / plain);
    if (plain_rounded > 0.0) rows_[what].rounded.push_back(error / plain_rounded);
  }
  void print() const {
    if (rows_.empty()) return;
    std::printf("\nerror / error of the plain pipeline (rms against double)%*s fp32 logits       16-bit logits\n", 14,
                "");
    std::printf("%-60s %6s %7s %9s %8s %9s\n", "target, dtypes, output", "cases", "median", "max", "median", "max");
    for (const auto& [what, row] : rows_) {
      std::printf("%-60s %6zu %7.3f %9.3f %8.3f %9.3f\n", what.c_str(), row.fp32.size(), median(row.fp32),
                  most(row.fp32), median(row.rounded), most(row.rounded));
    }
  }

 private:
  struct Ratios {
    std::vector<double> fp32, rounded;
  };
  static double median(std::vector<double> v) {
    if (v.empty()) return 0.0;
    std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
    return v[v.size() / 2];
  }
  static double most(const std::vector<double>& v) { return v.empty() ? 0.0 : *std::max_element(v.begin(), v.end()); }

  std::map<std::string, Ratios> rows_;
};

}  // namespace logitless::test
