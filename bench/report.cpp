// The session as one JSON object and as a compact table: ceilings first, then each suite. Fractions and ratios are
// formed here, from medians, and nowhere else.
#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <ctime>

#include "bench/session.hpp"

namespace logitless::bench {

namespace {

using Json = nlohmann::ordered_json;

std::string utc_now() {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

__attribute__((format(printf, 1, 2))) std::string format(const char* pattern, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

const Row* find(const Table& table, const std::string& name) {
  for (const Row& row : table.rows) {
    if (row.name == name && !row.seconds.empty()) return &row;
  }
  return nullptr;
}

double gflops(const Row& row) { return row.flops / median(row.seconds) / 1e9; }

// Of the row's ceiling; 0 if it has none.
double fraction(const Session& session, const Table& table, const Row& row) {
  if (row.seconds.empty()) return 0;
  if (row.ceiling) {
    const double peak = median(session.ceilings.samples(*row.ceiling));
    return peak > 0 ? gflops(row) / peak : 0;
  }
  const Row* bound = row.ceiling_row.empty() ? nullptr : find(table, row.ceiling_row);
  return bound != nullptr ? median(bound->seconds) / median(row.seconds) : 0;
}

// Position in the table, from 1, by which the text refers to it.
int number_of(const Table& table, const std::string& name) {
  int number = 1;
  for (const Row& row : table.rows) {
    if (row.name == name) return number;
    ++number;
  }
  return 0;
}

double ratio(const Table& table, const Row& row) {
  const Row* other = row.ratio_to.empty() || row.seconds.empty() ? nullptr : find(table, row.ratio_to);
  return other != nullptr ? median(row.seconds) / median(other->seconds) : 0;
}

Json row_json(const Session& session, const Table& table, const Row& row) {
  Json json{{"name", row.name}, {"who", row.who}};
  if (!row.seconds.empty()) {
    json["seconds"] = median(row.seconds);
    json["seconds_best"] = *std::min_element(row.seconds.begin(), row.seconds.end());
    json["samples"] = row.seconds;
    if (row.flops > 0) json["gflops"] = gflops(row);
    if (row.bytes > 0) json["gbytes"] = row.bytes / median(row.seconds) / 1e9;
    if (const double f = fraction(session, table, row); f > 0) {
      json["ceiling"] = row.ceiling ? info_of(*row.ceiling).key : row.ceiling_row.c_str();
      json["fraction"] = f;
    }
    if (const double x = ratio(table, row); x > 0) {
      json["ratio"] = x;
      json["ratio_to"] = row.ratio_to;
    }
  }
  if (row.workspace_bytes >= 0) json["workspace_bytes"] = row.workspace_bytes;
  if (row.loss) json["loss"] = *row.loss;
  if (!row.note.empty()) json["note"] = row.note;
  return json;
}

std::string bytes_text(std::int64_t bytes) {
  if (bytes < 0) return "";
  if (bytes < 10 * 1024) return format("%lld B", static_cast<long long>(bytes));
  if (bytes < (10 << 20)) return format("%.0f KiB", static_cast<double>(bytes) / 1024);
  return format("%.1f MiB", static_cast<double>(bytes) / 1048576);
}

}  // namespace

nlohmann::ordered_json report_json(const Session& s) {
  const MachineInfo machine = describe_machine();
  Json json{{"command", "bench"},
            {"suite", s.request.suite},
            {"date", utc_now()},
            {"version", version()},
            {"machine",
             {{"cpu", machine.cpu},
              {"cpus", machine.cpus},
              {"l1d_bytes", machine.l1d},
              {"l2_bytes", machine.l2},
              {"l3_bytes", machine.l3},
              {"memory_bytes", machine.memory}}},
            {"context", s.context_facts},
            {"cpu_target", s.cpu_target},
            {"threads", s.team.size()},
            {"device", s.context_facts.at("device")}};
  Json& ceilings = json["ceilings"] = Json::array();
  for (int i = 0; i < ceiling_count && !s.on_device(); ++i) {
    const auto ceiling = static_cast<Ceiling>(i);
    const CeilingInfo& info = info_of(ceiling);
    Json entry{{"name", info.key}, {"text", info.text}, {"unit", info.unit}};
    const std::vector<double>& samples = s.ceilings.samples(ceiling);
    if (samples.empty()) {
      entry["why_not"] = s.ceilings.why_not(ceiling);
    } else {
      entry["median"] = median(samples);
      entry["best"] = *std::max_element(samples.begin(), samples.end());
      entry["samples"] = samples.size();
      if (ceiling == Ceiling::dram_read || ceiling == Ceiling::dram_copy)
        entry["array_bytes"] = s.ceilings.dram_bytes();
    }
    ceilings.push_back(std::move(entry));
  }
  Json& tables = json["tables"] = Json::array();
  for (const Table& table : s.tables) {
    Json entry{{"suite", table.suite}, {"dtype", table.dtype}};
    entry.update(table.facts);
    entry["rows_measured"] = Json::array();
    for (const Row& row : table.rows) entry["rows_measured"].push_back(row_json(s, table, row));
    tables.push_back(std::move(entry));
  }
  if (!s.errors.empty()) {
    Json& errors = json["errors"] = Json::array();
    for (const ErrorTable& table : s.errors) {
      Json entry{{"dtype", table.dtype}};
      entry.update(table.facts);
      entry["quantities"] = Json::array();
      for (const ErrorRow& row : table.rows) {
        Json quantity{{"name", row.quantity}, {"ours", row.ours}, {"plain", row.plain}};
        if (row.plain > 0) quantity["ratio"] = row.ours / row.plain;
        entry["quantities"].push_back(std::move(quantity));
      }
      errors.push_back(std::move(entry));
    }
  }
  return json;
}

std::string report_text(const Session& s) {
  const MachineInfo machine = describe_machine();
  std::string out = format("logitless %s  %s  %s\n", version(), utc_now().c_str(), machine.cpu.c_str());
  if (s.on_device()) {
    out += "device " + std::to_string(s.request.device) + ": " + s.context_facts.at("device").get<std::string>() + '\n';
  } else {
    out += format("target %s, %d threads; %s\n", s.cpu_target.c_str(), s.team.size(),
                  s.context_facts.value("cpu_target_reason", "").c_str());
    out += format("\n%-44s %9s %9s\n", "ceilings, all threads", "median", "best");
  }
  for (int i = 0; i < ceiling_count && !s.on_device(); ++i) {
    const auto ceiling = static_cast<Ceiling>(i);
    const CeilingInfo& info = info_of(ceiling);
    const std::vector<double>& samples = s.ceilings.samples(ceiling);
    if (samples.empty()) {
      out += format("  %-42s %9s  %s\n", info.text, "-", s.ceilings.why_not(ceiling).c_str());
    } else {
      out += format("  %-42s %9.1f %9.1f %s\n", info.text, median(samples),
                    *std::max_element(samples.begin(), samples.end()), info.unit);
    }
  }
  for (const Table& table : s.tables) {
    out += format("\n%s, %s:", table.suite.c_str(), table.dtype.c_str());
    for (const auto& [key, value] : table.facts.items()) {
      out += ' ' + key + ' ' + (value.is_string() ? value.get<std::string>() : value.dump());
    }
    const bool linear = table.suite != "logits";
    out += format("\n%-44s %9s %9s %8s %10s %10s %9s\n", "", "ms", linear ? "GFLOP/s" : "GB/s", "ceiling", "ratio",
                  "workspace", "loss");
    int number = 0;
    for (const Row& row : table.rows) {
      out += format("%2d %-5s %-35s", ++number, row.who.c_str(), row.name.c_str());
      if (row.seconds.empty()) {
        out += format(" %9s", "-");
      } else {
        const double rate = linear ? gflops(row) : row.bytes / median(row.seconds) / 1e9;
        out += format(" %9.2f %9.1f", 1e3 * median(row.seconds), rate);
        const double f = fraction(s, table, row), x = ratio(table, row);
        out += f > 0 ? format(" %6.1f %%", 100 * f) : format(" %8s", "");
        out += x > 0 ? format(" %5.2f of %d", x, number_of(table, row.ratio_to)) : format(" %10s", "");
        out += format(" %10s", bytes_text(row.workspace_bytes).c_str());
        if (row.loss) out += format(" %9.5f", *row.loss);
      }
      if (!row.note.empty()) out += "  " + row.note;
      out += '\n';
    }
    if (linear) {
      const Row& first = table.rows.front();
      out += "   rate: 6 (loss only: 2) x kept rows x H x V; ceiling: " +
             (first.ceiling ? "share of '" + std::string(info_of(*first.ceiling).text) + "'"
                            : std::string("time of the products over this one's")) +
             "; ratio: time, of that row's\n";
    } else {
      out += "   rate: the least traffic; ceiling: the time of the probe that moves as much over this one's\n";
    }
  }
  for (const ErrorTable& table : s.errors) {
    out += format("\nerror against double, %s:", table.dtype.c_str());
    for (const auto& [key, value] : table.facts.items()) {
      out += ' ' + key + ' ' + (value.is_string() ? value.get<std::string>() : value.dump());
    }
    out += format("\n%-44s %9s %9s %9s\n", "", "ours", "plain", "ratio");
    for (const ErrorRow& row : table.rows) {
      out += format("  %-42s %9.2e %9.2e", row.quantity.c_str(), row.ours, row.plain);
      out += row.plain > 0 ? format(" %9.3f\n", row.ours / row.plain) : format("\n");
    }
  }
  return out;
}

}  // namespace logitless::bench
