// A plan as text for people and as JSON for programs: dials, workspace, flops, prediction, the ledger of every buffer,
// and the settings that were rejected with their reasons. Text rounds to six digits; JSON gives every number exactly.
#include <charconv>
#include <cstdio>

#include "plan/plan.hpp"

namespace logitless::plan {
namespace {

const char* name_of(contract::Call call) {
  switch (call) {
    case contract::Call::forward: return "forward";
    case contract::Call::forward_backward: return "forward_backward";
    case contract::Call::backward: return "backward";
  }
  return "?";
}

const char* name_of(Keep keep) {
  switch (keep) {
    case Keep::none: return "none";
    case Keep::workspace: return "workspace";
    case Keep::inside_dw: return "inside_dw";
  }
  return "?";
}

std::string number(double x) {
  char text[40];
  std::snprintf(text, sizeof text, "%.6g", x);
  return text;
}

// The shortest decimal that reads back as x.
std::string exact(double x) {
  char text[40];
  auto const result = std::to_chars(text, text + sizeof text, x);
  return {text, result.ptr};
}

std::string shape_of(const Buffer& b, const char* separator) {
  std::string out;
  int const dims = b.shape[2] != 1 ? 3 : b.shape[1] != 1 ? 2 : 1;
  for (int i = 0; i < dims; ++i) out += (i > 0 ? separator : "") + std::to_string(b.shape[i]);
  return out;
}

std::string mebibytes(std::int64_t bytes) {
  char text[40];
  std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / 1048576.0);
  return text;
}

}  // namespace

const char* Plan::products() const {
  if (gpu) return name_of(operand);
  return bf16_products ? "bf16" : "f32";
}

std::string Plan::text() const {
  bool const linear = problem.kind == contract::Kind::linear;
  std::string out = std::string("plan: ") + (linear ? "linear" : "logits") + " " + name_of(problem.call) +
                    ", R=" + std::to_string(problem.rows);
  if (linear) out += " H=" + std::to_string(problem.hidden);
  out += " V=" + std::to_string(problem.vocab) + ", target " + machine.target + ", " + std::to_string(machine.threads) +
         (gpu                    ? " multiprocessors\n"
          : machine.threads == 1 ? " thread\n"
                                 : " threads\n");
  if (linear) {
    out += std::string("dtypes: X ") + name_of(problem.x) + ", W " + name_of(problem.w) + ", dX " +
           name_of(problem.dx) + ", dW " + name_of(problem.dw) + "; products in " + products() + ", summed in f32\n";
    if (chunk > 0) {
      out += "dials: C=" + std::to_string(chunk) + " rows a chunk, B=" + std::to_string(block) +
             " columns a block, f=" + number(share) + " (" + std::to_string(kept_blocks) + " of " +
             std::to_string(blocks) + " blocks keep exponentials";
      if (keep != Keep::none)
        out += std::string(" as ") + (gpu && !exponentials ? "logits in " : "") + name_of(e_dtype);
      if (inside_blocks > 0) out += ", " + std::to_string(inside_blocks) + " inside dW";
      if (kept_blocks > inside_blocks) out += ", " + std::to_string(kept_blocks - inside_blocks) + " in the workspace";
      out += ")\n";
    }
    if (gpu && chunk > 0) {
      out += gathers ? "rows: kept ones are gathered, products cover " + std::to_string(slots) + " of " +
                           std::to_string(problem.rows) + " (most_kept_rows)\n"
                     : std::string("rows: products cover all, ignored ones too (most_kept_rows is not given)\n");
    }
  } else {
    out += std::string("dtypes: z ") + name_of(problem.z) + ", D " + name_of(problem.dz) + "\n";
  }
  if (chunk == 0) {
    out += "refused: the budget is " + std::to_string(problem.budget) + " bytes, the least that any setting needs " +
           std::to_string(workspace_bytes) + "\n";
  } else {
    out += "workspace: " + std::to_string(workspace_bytes) + " bytes (" + mebibytes(workspace_bytes) + ")\n";
  }
  if (linear && chunk > 0) {
    double const rhv =
        static_cast<double>(problem.rows) * static_cast<double>(problem.hidden) * static_cast<double>(problem.vocab);
    out += "flops: " + number(flops) + (rhv > 0 ? " (" + number(flops / rhv) + " RHV)" : std::string()) + "\n";
  }
  if (chunk > 0) out += "predicted: " + number(predicted_seconds * 1e3) + " ms\nledger:\n";
  for (Buffer const& b : ledger) {
    char line[200];
    std::snprintf(line, sizeof line, "  %-15s %-5s [%s]  offset %lld  bytes %lld  padding %lld\n", b.name,
                  name_of(b.dtype), shape_of(b, ",").c_str(), static_cast<long long>(b.offset),
                  static_cast<long long>(b.bytes), static_cast<long long>(b.padding));
    out += line;
  }
  if (!rejected.empty()) {
    out += "rejected:\n";
    for (std::string const& line : rejected) out += "  " + line + "\n";
  }
  return out;
}

std::string Plan::json() const {
  bool const linear = problem.kind == contract::Kind::linear;
  auto text = [](const char* key, const std::string& value) {
    return std::string("\"") + key + "\":\"" + value + "\",";
  };
  auto integer = [](const char* key, std::int64_t value) {
    return std::string("\"") + key + "\":" + std::to_string(value) + ",";
  };
  auto real = [](const char* key, double value) { return std::string("\"") + key + "\":" + exact(value) + ","; };
  std::string out = "{";
  out += text("kind", linear ? "linear" : "logits") + text("call", name_of(problem.call));
  out += integer("rows", problem.rows) + integer("hidden", problem.hidden) + integer("vocab", problem.vocab);
  out += text("target", machine.target) + integer("threads", machine.threads);
  if (linear) {
    out += text("hidden_dtype", name_of(problem.x)) + text("weight_dtype", name_of(problem.w));
    out += text("grad_hidden_dtype", name_of(problem.dx)) + text("grad_weight_dtype", name_of(problem.dw));
    out += text("products", products());
    if (gpu) out += integer("product_rows", slots) + text("gathers", gathers ? "yes" : "no");
    out += integer("chunk_rows", chunk) + integer("block_columns", block) + integer("blocks", blocks);
    out += integer("kept_blocks", kept_blocks) + real("kept_share", share) + text("keep", name_of(keep));
    out += text("kept_dtype", name_of(e_dtype)) + integer("inside_blocks", inside_blocks) + real("flops", flops);
  } else {
    out += text("logits_dtype", name_of(problem.z)) + text("grad_logits_dtype", name_of(problem.dz));
  }
  out += integer("workspace_bytes", workspace_bytes) + real("predicted_seconds", predicted_seconds);
  out += "\"ledger\":[";
  for (std::size_t i = 0; i < ledger.size(); ++i) {
    Buffer const& b = ledger[i];
    out += (i > 0 ? "," : "") + std::string("{\"name\":\"") + b.name + "\",\"dtype\":\"" + name_of(b.dtype) +
           "\",\"shape\":[" + shape_of(b, ",") + "],\"offset\":" + std::to_string(b.offset) +
           ",\"bytes\":" + std::to_string(b.bytes) + ",\"padding\":" + std::to_string(b.padding) + "}";
  }
  out += "],\"rejected\":[";
  for (std::size_t i = 0; i < rejected.size(); ++i) out += (i > 0 ? ",\"" : "\"") + rejected[i] + "\"";
  return out + "]}";
}

}  // namespace logitless::plan
