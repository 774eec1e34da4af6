// logitless loss: the loss of tensors in files, with gradients and per-row outputs written to files on request.
//
// Order matters: flags, inputs, plan and output names are checked before anything is computed; all outputs are staged
// before the first takes its name; printing comes last. So a failure leaves no file and a closed pipe loses none.

#include <CLI/CLI.hpp>
#include <cmath>
#include <filesystem>
#include <memory>

#include "arrays.hpp"
#include "device/device.hpp"
#include "files/files.hpp"
#include "flags.hpp"
#include "inputs.hpp"
#include "row_outputs.hpp"

namespace logitless::cli {
namespace {

struct LossFlags {
  InputFlags inputs;
  Options options;
  ContextOptions context;
  std::uint64_t budget = 0;
  std::string grad_hidden, grad_weight, grad_logits, grad_bias, per_row;
  bool grad_f32 = false, json = false;
};

struct Output {
  const char* flag;
  const std::string& path;
  std::vector<files::Source> tensors;
};

void check_kind_of_outputs(const LossFlags& flags) {
  bool const logits = !flags.inputs.logits.empty();
  for (auto const& [flag, path, with_logits] : {std::tuple{"--grad-hidden", &flags.grad_hidden, false},
                                                {"--grad-weight", &flags.grad_weight, false},
                                                {"--grad-logits", &flags.grad_logits, true}}) {
    if (!path->empty() && with_logits != logits) {
      throw UsageError(std::string(flag) + ": " + files::quote(*path) +
                       (logits ? "; with --logits only --grad-logits can be given" : "; needs --logits"));
    }
  }
  if (flags.options.reduction == Reduction::none && flags.per_row.empty()) {
    throw UsageError("--reduction: 'none' gives a loss for each row; say where they go with --per-row OUT.safetensors");
  }
}

void check_outputs(const std::vector<Output>& outputs, const InputFlags& inputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    Output const& output = outputs[i];
    try {
      files::check_target(output.path, output.tensors);
    } catch (const files::Error& error) {
      throw UsageError(std::string(output.flag) + ": " + error.what());
    }
    std::error_code ignored;
    for (std::string const& input : inputs.paths()) {
      if (std::filesystem::equivalent(output.path, input, ignored)) {
        throw UsageError(std::string(output.flag) + ": " + files::quote(output.path) +
                         " is an input; give another name");
      }
    }
    for (std::size_t j = 0; j < i; ++j) {
      if (std::filesystem::weakly_canonical(output.path, ignored) ==
          std::filesystem::weakly_canonical(outputs[j].path, ignored)) {
        throw UsageError(std::string(output.flag) + ": " + files::quote(output.path) + " is also that of " +
                         outputs[j].flag + "; give another name");
      }
    }
  }
}

// Over the kept rows; ignored rows hold 0.
double mean_of(const Array& rows, std::int64_t kept) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < rows.count(); ++i) sum += static_cast<double>(rows.as<float>()[i]);
  return kept == 0 ? std::nan("") : sum / static_cast<double>(kept);
}

// A number, or nothing where rows have no target of their own.
void add_of_targets(Report& report, const char* key, bool known, double value) {
  report.add(key, known ? Json(value) : Json(), known ? text_of(value) : "");
}

int run(const LossFlags& flags) {
  check_kind_of_outputs(flags);
  Inputs const inputs = load(flags.inputs, flags.options.ignore_index);
  Options const options = inputs.with_inputs(flags.options);
  bool const classes = has_classes(options);
  Problem problem = inputs.problem(!flags.grad_hidden.empty(), !flags.grad_weight.empty(), !flags.grad_logits.empty(),
                                   flags.grad_f32);
  if (!flags.grad_bias.empty()) {
    if (inputs.kind == Kind::logits) {
      throw UsageError("--grad-bias: " + files::quote(flags.grad_bias) +
                       "; with --logits it is the sum of --grad-logits over rows");
    }
    if (!inputs.options.bias) throw UsageError("--grad-bias: " + files::quote(flags.grad_bias) + "; needs --bias");
    problem.call = Call::forward_backward;
    problem.grad_bias_dtype = flags.grad_f32 ? DType::f32 : problem.bias_dtype;
  }
  problem.memory_budget = flags.budget;
  problem.entropy = problem.argmax = true;
  problem.mean_logit = problem.sum_p2 = !flags.per_row.empty();
  problem.most_kept_rows = inputs.kept(options.ignore_index);

  Context context(flags.context);
  Plan plan(context, problem, options);

  auto const wanted = [](DType dtype, std::int64_t rows, std::int64_t cols) {
    return dtype == DType::none ? Array() : Array(dtype, {rows, cols});
  };
  Array const dx = wanted(problem.grad_hidden_dtype, inputs.rows, inputs.hidden);
  Array const dw = wanted(problem.grad_weight_dtype, inputs.vocab, inputs.hidden);
  Array const dz = wanted(problem.grad_logits_dtype, inputs.rows, inputs.vocab);
  Array const db = problem.grad_bias_dtype == DType::none ? Array() : Array(problem.grad_bias_dtype, {inputs.vocab});
  RowOutputs rows;
  if (!flags.per_row.empty()) {
    rows = RowOutputs::all(inputs.rows, classes);
  } else {
    rows.entropy = Array(DType::f32, {inputs.rows});  // what the report means over rows; correct rows are counted
    if (classes) rows.logprob = Array(DType::f32, {inputs.rows});
  }
  std::vector<Output> outputs;
  if (dx) outputs.push_back({"--grad-hidden", flags.grad_hidden, {dx.source("grad_hidden")}});
  if (dw) outputs.push_back({"--grad-weight", flags.grad_weight, {dw.source("grad_weight")}});
  if (dz) outputs.push_back({"--grad-logits", flags.grad_logits, {dz.source("grad_logits")}});
  if (db) outputs.push_back({"--grad-bias", flags.grad_bias, {db.source("grad_bias")}});
  if (!flags.per_row.empty()) outputs.push_back({"--per-row", flags.per_row, rows.sources()});
  check_outputs(outputs, flags.inputs);

  Arguments arguments = inputs.arguments();
  arguments.grad_hidden = dx.tensor();
  arguments.grad_weight = dw.tensor();
  arguments.grad_logits = dz.tensor();
  arguments.grad_bias = db.tensor();
  rows.ask(arguments);
  auto const [result, seconds] = device::run_plan(context, flags.context.device, plan, arguments);

  std::vector<files::Staged> staged;
  staged.reserve(outputs.size());
  for (Output const& output : outputs) staged.emplace_back(output.path, output.tensors);
  for (files::Staged& file : staged) file.commit();

  Json const machine = Json::parse(context.describe(Format::json));
  std::string const backend = machine.value("backend", "");
  std::string const target = backend == "cpu" ? machine.value("cpu_target", "") : "";
  std::string const where = backend == "cuda" ? machine.value("device", "") : target;
  bool const reduced = options.reduction != Reduction::none;
  double const accuracy = static_cast<double>(result.correct) / static_cast<double>(result.kept);  // 0 / 0: NaN
  double const entropy = mean_of(rows.entropy, result.kept);
  Report report;
  report.add("loss", reduced ? Json(result.loss) : Json(), reduced ? text_of(result.loss) : "per row");
  report.add("kept", result.kept, std::to_string(result.kept) + " of " + std::to_string(inputs.rows) + " rows");
  report.add("bad", result.bad,
             result.bad == 0 ? "" : std::to_string(result.bad) + " rows hold NaN or +inf, or are -inf throughout");
  add_of_targets(report, "perplexity", classes, std::exp(-mean_of(rows.logprob, result.kept)));
  add_of_targets(report, "accuracy", classes, accuracy);
  report.add("correct", classes ? Json(result.correct) : Json(), "");
  report.add("entropy", entropy, text_of(entropy));
  if (options.filter > 0.0) {
    report.add("filter_kept", result.filter_kept, text_of(result.filter_kept, 4));
    report.add("filter_variance", result.filter_variance, text_of(result.filter_variance, 4));
  }
  report.add("workspace_bytes", plan.workspace_bytes(), text_of_bytes(plan.workspace_bytes()));
  report.add("seconds", seconds, text_of(seconds, 4));
  report.add("rows", inputs.rows, "");
  if (inputs.kind == Kind::linear) report.add("hidden", inputs.hidden, std::to_string(inputs.hidden));
  report.add("vocab", inputs.vocab, std::to_string(inputs.vocab));
  report.add("dtype", name_of(inputs.kind == Kind::linear ? inputs.x.dtype() : inputs.z.dtype()), inputs.dtype_text());
  if (inputs.kind == Kind::linear) report.add("weight_dtype", name_of(inputs.w.dtype()), "");
  report.add("reduction", !reduced ? "none" : options.reduction == Reduction::mean ? "mean" : "sum", "");
  report.add("backend", backend, where.empty() ? backend : backend + ", " + where);
  report.add("target", target.empty() ? Json() : Json(target), "");
  report.add("device", machine["device"], "");
  report.add("threads", machine.value("threads", 0),
             backend == "cuda" ? "" : std::to_string(machine.value("threads", 0)));
  Json files = Json::array();
  std::string names;
  for (Output const& output : outputs) {
    files.push_back(output.path);
    names += (names.empty() ? "" : ", ") + output.path;
  }
  report.add("written", files, names);
  report.print(flags.json);
  return 0;
}

}  // namespace

void add_loss(CLI::App& root, Action& action) {
  CLI::App& app =
      *root.add_subcommand("loss", "Loss of tensors in files, with gradients and per-row outputs on request");
  auto const flags = std::make_shared<LossFlags>();
  add_input_flags(app, flags->inputs);
  add_option_inputs(app, flags->inputs);
  constexpr const char* outputs = "Outputs: OUT ends in .safetensors or .npy";
  add_text(app, "--grad-hidden", "OUT", "dX [R,H]", flags->grad_hidden)->group(outputs);
  add_text(app, "--grad-weight", "OUT", "dW [V,H]", flags->grad_weight)->group(outputs);
  add_text(app, "--grad-logits", "OUT", "dL/dz [R,V], with --logits", flags->grad_logits)->group(outputs);
  add_text(app, "--grad-bias", "OUT", "db [V], with --bias and --hidden", flags->grad_bias)->group(outputs);
  add_choice(app, "--grad-dtype", "the input's dtype, or f32 (input)", flags->grad_f32,
             Choices<bool>{{"input", false}, {"f32", true}})
      ->group(outputs);
  add_text(app, "--per-row", "OUT",
           "tensors loss, lse, zloss, entropy, argmax, mean_logit, log_sum_p2, and of targets logprob, correct [R]; "
           ".safetensors",
           flags->per_row)
      ->group(outputs);
  add_loss_options(app, flags->options);
  add_logit_options(app, flags->options, flags->inputs.row_temperature);
  add_more_loss_options(app, flags->options);
  add_filter_options(app, flags->options);
  constexpr const char* run_group = "How it is computed";
  add_choice(app, "--dtype", "convert hidden, weight, logits to this first", flags->inputs.dtype, dtype_choices())
      ->group(run_group);
  add_bytes(app, "--budget", "most bytes of workspace (no limit)", flags->budget)->group(run_group);
  add_context_options(app, flags->context);
  app.add_flag("--json", flags->json, "one JSON object on stdout");
  app.footer(
      "Example:\n"
      "  logitless loss --hidden head.safetensors:hidden --weight head.safetensors:weight \\\n"
      "                 --targets head.safetensors:targets --budget 64MiB --grad-weight dw.safetensors");
  app.callback([flags, &action] { action = [flags] { return run(*flags); }; });
}

}  // namespace logitless::cli
