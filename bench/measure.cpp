// Rounds of measurements: see session.hpp.
#include <algorithm>
#include <cstdio>

#include "bench/session.hpp"

namespace logitless::bench {

namespace {
constexpr int most_rounds = 15;
// The first run counts if it is longer than this; else it only warmed up caches, pages and clocks.
constexpr double short_run = 1.0;

double run_once(Entry& entry) {
  if (entry.prepare) entry.prepare();
  const double start = now();
  const double own = entry.run();
  return own > 0 ? own : now() - start;
}
}  // namespace

std::vector<Row> measure(std::vector<Entry> entries, const std::function<void()>& between, double seconds,
                         int repeats) {
  const double start = now();
  const int rounds = repeats > 0 ? repeats : most_rounds;
  double unit = 0;  // seconds of the first row
  for (int round = 0; round < rounds; ++round) {
    bool any = false;
    for (std::size_t n = 0; n < entries.size(); ++n) {
      Entry& entry = entries[round % 2 == 0 ? n : entries.size() - 1 - n];
      Row& row = entry.row;
      if (!entry.run) continue;
      const double spent = now() - start;
      if (repeats == 0 && round == 0 && !entry.required && spent + entry.expected * unit > seconds) {
        char text[96];
        std::snprintf(text, sizeof text, "not run: about %.0f s more than the %.0f s of --seconds",
                      spent + entry.expected * unit - seconds, seconds);
        row.note = text;
        entry.run = nullptr;
        continue;
      }
      if (repeats == 0 && round > 0 && spent + median(row.seconds) > seconds) continue;
      try {
        if (between) between();
        double taken = run_once(entry);
        if (round == 0 && taken < short_run) taken = run_once(entry);
        row.seconds.push_back(taken);
      } catch (const Error& error) {
        // A budget that nothing fits, or too little memory: the row says so and the others go on.
        row.note = error.what();
        entry.run = nullptr;
        continue;
      }
      any = true;
      if (unit <= 0) unit = row.seconds.back();
    }
    if (!any) break;
  }
  std::vector<Row> rows;
  for (Entry& entry : entries) rows.push_back(std::move(entry.row));
  return rows;
}

}  // namespace logitless::bench
