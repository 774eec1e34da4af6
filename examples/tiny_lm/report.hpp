// What a run found, as ten lines for the terminal and as one self-contained page with inline SVG.
//
// Both are made from the same numbers. The page loads nothing from anywhere: no script, no font, no image.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "measure.hpp"
#include "trainer.hpp"

namespace tiny_lm {

struct MemoryPoint {
  std::int64_t rows = 0;
  double dense = 0;               // peak bytes; 0: not measured
  double logitless = 0;           // without a limit
  double logitless_budgeted = 0;  // within the budget
};

struct Findings {
  std::string text_source, text_size;  // "Jane Austen ...", "4.0 MB, 868,000 tokens"
  std::string machine;
  Options options;
  Sizes sizes;
  PlanSummary plan;
  Kernel kernel = Kernel::eigen;
  Speed speed;
  std::vector<double> logitless_loss, dense_loss;  // by step
  std::vector<Evaluation> logitless_perplexity, dense_perplexity;
  StepRecord logitless_step, dense_step;  // medians
  HeadSplit logitless_split;
  double dense_flops = 0;
  std::vector<MemoryPoint> memory;
  GradientErrors errors;
  double process_peak = 0;  // of the whole run, bytes
  double seconds = 0;       // of the whole run
  std::vector<std::string> sentences, commands;

  double largest_difference() const;
  double head_speedup() const { return dense_step.head / logitless_step.head; }
  // The point of the training's own R, or nothing.
  const MemoryPoint* memory_at(std::int64_t rows) const;
};

std::vector<std::string> ten_lines(const Findings& findings, const std::filesystem::path& report);
std::string html(const Findings& findings);

}  // namespace tiny_lm
