// What the suites share: the request, threads, ceilings, measured rows, and the way of measuring them.
//
// Rows of a suite are run in rounds, forwards and backwards in turn, with probes of the ceilings between any two, so
// that a slow minute of the machine falls on everything alike. Figures are medians over the rounds.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/bench.hpp"
#include "bench/ceilings.hpp"
#include "bench/data.hpp"
#include "bench/team.hpp"
#include "logitless/logitless.hpp"

namespace logitless::bench {

// One line of the report. `who` is ours, dense (the unfused baseline) or probe (cuBLAS too).
struct Row {
  std::string name, who;
  std::vector<double> seconds;
  double flops = 0;                // > 0: reported as GFLOP/s
  double bytes = 0;                // > 0: reported as GB/s
  std::optional<Ceiling> ceiling;  // flops / median of its samples
  std::string ceiling_row;         // or the time of this row / the time of this one
  std::string ratio_to;            // time / that row's time
  std::int64_t workspace_bytes = -1;
  std::optional<double> loss;
  std::string note;
};

struct Table {
  std::string suite, dtype;
  nlohmann::ordered_json facts;  // shape, kept rows, data
  std::vector<Row> rows;
};

struct ErrorRow {
  std::string quantity;
  double ours = 0, plain = 0;
};
struct ErrorTable {
  std::string dtype;
  nlohmann::ordered_json facts;
  std::vector<ErrorRow> rows;
};

struct Session {
  BenchRequest request;
  Context context;
  nlohmann::json context_facts;  // ll_context_describe
  std::string cpu_target;
  Team team;
  Ceilings ceilings;
  std::vector<Table> tables;
  std::vector<ErrorTable> errors;

  explicit Session(const BenchRequest& asked);
  bool on_device() const { return request.backend == Backend::cuda; }
  DataRequest data_request(DType dtype) const;
  // The request's dtypes, or the suite's default.
  std::vector<DType> dtypes(const std::vector<DType>& by_default) const;
};

// A row and how to run it. `run` may return the seconds that count; 0: the whole of it was timed.
struct Entry {
  Row row;
  std::function<double()> run;
  std::function<void()> prepare;  // before each run, untimed
  double expected = 0;            // seconds of the first run, as a multiple of the suite's first row
  bool required = false;          // runs once even if time is up
};

// Runs entries by the rules above until `seconds` are over or `repeats` rounds are done; `between` probes.
std::vector<Row> measure(std::vector<Entry> entries, const std::function<void()>& between, double seconds, int repeats);

void run_linear(Session& session, DType dtype);
void run_logits(Session& session, DType dtype);
void run_options(Session& session, DType dtype);
void run_error(Session& session, DType dtype);
void run_linear_on_device(Session& session, DType dtype);
void run_logits_on_device(Session& session, DType dtype);

nlohmann::ordered_json report_json(const Session& session);
std::string report_text(const Session& session);

}  // namespace logitless::bench
