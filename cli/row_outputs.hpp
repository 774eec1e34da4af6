// What a call says of each row, [R] each: what loss writes with --per-row, and check compares. Log-probability and
// correctness are those of the targets, whatever reduction and smoothing are, and absent where rows have no target of
// their own.
#pragma once

#include <cstdint>
#include <vector>

#include "arrays.hpp"

namespace logitless::cli {

// Rows have a target of their own.
inline bool has_classes(const Options& options) {
  return options.targets == Targets::hard || options.distillation.hard_share > 0.0;
}

struct RowOutputs {
  Array loss, lse, zloss, entropy, argmax, mean_logit, log_sum_p2, logprob, correct;

  static RowOutputs all(std::int64_t rows, bool classes) {
    RowOutputs out;
    for (Array* const each : {&out.loss, &out.lse, &out.zloss, &out.entropy, &out.mean_logit, &out.log_sum_p2}) {
      *each = Array(DType::f32, {rows});
    }
    out.argmax = Array(DType::i64, {rows});
    if (classes) {
      out.logprob = Array(DType::f32, {rows});
      out.correct = Array(DType::u8, {rows});
    }
    return out;
  }
  static RowOutputs loss_and_lse(std::int64_t rows) {
    RowOutputs out;
    out.loss = Array(DType::f32, {rows});
    out.lse = Array(DType::f32, {rows});
    return out;
  }
  void ask(Arguments& arguments) const {
    arguments.row_loss = loss.tensor();
    arguments.row_lse = lse.tensor();
    arguments.row_zloss = zloss.tensor();
    arguments.row_entropy = entropy.tensor();
    arguments.row_argmax = argmax.tensor();
    arguments.row_mean_logit = mean_logit.tensor();
    arguments.row_log_sum_p2 = log_sum_p2.tensor();
    arguments.row_logprob = logprob.tensor();
    arguments.row_correct = correct.tensor();
  }
  std::vector<files::Source> sources() const {
    std::vector<files::Source> list = {loss.source("loss"),
                                       lse.source("lse"),
                                       zloss.source("zloss"),
                                       entropy.source("entropy"),
                                       argmax.source("argmax"),
                                       mean_logit.source("mean_logit"),
                                       log_sum_p2.source("log_sum_p2")};
    if (logprob) list.push_back(logprob.source("logprob"));
    if (correct) list.push_back(correct.source("correct"));
    return list;
  }
};

}  // namespace logitless::cli
