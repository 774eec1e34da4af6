// logitless check: a backend's loss, per-row outputs and gradients against the double-precision reference, on files or
// on random data; exit status 1 beyond tolerance. What is compared and where tolerances come from: verify.hpp.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "arrays.hpp"
#include "flags.hpp"
#include "inputs.hpp"
#include "verify.hpp"

namespace logitless::cli {
namespace {

struct CheckFlags {
  InputFlags inputs;
  Options options;
  ContextOptions context;
  std::uint64_t budget = 0;
  std::int64_t rows = -1, vocab = 0, sample = 0;  // rows, vocab: of random data
  std::uint64_t seed = 1;
  Kind kind = Kind::linear;
  bool grad_f32 = false, full = false, per_row = false, json = false;
};

// --hidden is a number here.
Inputs random_inputs(const CheckFlags& flags) {
  if (flags.rows < 0) throw UsageError("--rows: missing; give --rows, --hidden and --vocab, or the inputs' files");
  if (flags.vocab == 0) throw UsageError("--vocab: missing; the number of classes");
  for (auto const& [flag, spec] :
       {std::pair{"--weight", &flags.inputs.weight}, std::pair{"--logits", &flags.inputs.logits},
        std::pair{"--targets", &flags.inputs.targets}}) {
    if (!spec->empty()) {
      throw UsageError(std::string(flag) + ": given with --rows; give files, or --rows, --hidden and --vocab");
    }
  }
  MadeUp extents{.rows = flags.rows, .vocab = flags.vocab, .kind = flags.kind, .seed = flags.seed};
  if (flags.inputs.dtype != DType::none) extents.dtype = flags.inputs.dtype;
  if (flags.kind == Kind::linear) {
    if (flags.inputs.hidden.empty()) throw UsageError("--hidden: missing; the width of a hidden state");
    extents.hidden = parse_integer("--hidden", flags.inputs.hidden, 1, any_most);
  } else if (!flags.inputs.hidden.empty()) {
    throw UsageError("--hidden: given with --kind logits, which has none; leave it out");
  }
  return make_up(extents, flags.inputs, flags.options.ignore_index);
}

std::string column(const std::string& text, std::size_t width) {
  return text.size() < width ? text + std::string(width - text.size(), ' ') : text + " ";
}

void print_text(const Verification& v, const Inputs& inputs) {
  std::string const backend = v.machine.value("backend", "");
  std::string where = backend;
  if (backend == "cuda") where += " (" + v.machine.value("device", "") + ")";
  if (backend == "cpu") {
    where +=
        " (" + v.machine.value("cpu_target", "") + ", " + std::to_string(v.machine.value("threads", 0)) + " threads)";
  }
  std::string const size = "R " + std::to_string(inputs.rows) +
                           (inputs.kind == Kind::linear ? ", H " + std::to_string(inputs.hidden) : "") + ", V " +
                           std::to_string(inputs.vocab) + ", " + inputs.dtype_text();
  print(where + " against the double-precision reference: " + size + "\n");
  if (v.rows_run < inputs.rows) {
    print("run on " + std::to_string(v.rows_run) + " of the rows, evenly spaced, to end within about a minute\n");
  }
  if (v.sampled) {
    print("sampled: " + std::to_string(v.rows_checked) + " of " + std::to_string(v.kept) + " kept rows, every class" +
          (inputs.kind == Kind::linear ? "; grad_weight is that of the sampled rows, run within the whole problem\n"
                                       : "\n") +
          "sampled: loss is compared with the mean of the backend's own rows\n");
  }
  print(column("output", 16) + column("error", 14) + column("tolerance", 14) + "plain pipeline\n");
  for (Verdict const& verdict : v.outputs) {
    print(column(verdict.output, 16) + column(text_of(verdict.error, 4), 14) +
          column(text_of(verdict.tolerance, 4), 14) + column(text_of(verdict.plain_error, 4), 14) +
          (verdict.passed ? "ok" : "BEYOND TOLERANCE") + "\n");
  }
  print(v.passed() ? "passed\n" : "failed\n");
}

void print_json(const Verification& v, const Inputs& inputs) {
  Json object = {{"passed", v.passed()},
                 {"backend", v.machine.value("backend", "")},
                 {"target", v.machine.value("backend", "") == "cpu" ? v.machine["cpu_target"] : Json()},
                 {"device", v.machine["device"]},
                 {"threads", v.machine.value("threads", 0)},
                 {"rows", inputs.rows}};
  if (inputs.kind == Kind::linear) object["hidden"] = inputs.hidden;
  object["vocab"] = inputs.vocab;
  object["dtype"] = name_of(inputs.kind == Kind::linear ? inputs.x.dtype() : inputs.z.dtype());
  object["kept"] = v.kept;
  object["sampled"] = v.sampled;
  object["rows_run"] = v.rows_run;
  object["rows_checked"] = v.rows_checked;
  object["seconds"] = v.seconds;
  object["workspace_bytes"] = v.plan.value("workspace_bytes", 0);
  object["outputs"] = Json::array();
  for (Verdict const& verdict : v.outputs) {
    object["outputs"].push_back({{"output", verdict.output},
                                 {"error", verdict.error},
                                 {"tolerance", verdict.tolerance},
                                 {"plain_error", verdict.plain_error},
                                 {"passed", verdict.passed}});
  }
  print(object.dump() + "\n");
}

int run(const CheckFlags& flags) {
  if (flags.full && flags.sample > 0) {
    throw UsageError("--sample: given with --full, which compares every row; give one of them");
  }
  bool const random = flags.rows >= 0 || flags.vocab > 0;
  if (!random && !flags.inputs.any()) {
    throw UsageError("inputs: missing; give --hidden, --weight and --targets, or --rows, --hidden and --vocab");
  }
  Inputs const inputs = random ? random_inputs(flags) : load(flags.inputs, flags.options.ignore_index);
  Verification v;
  {
    Progress progress;
    v = verify({.inputs = inputs,
                .options = inputs.with_inputs(flags.options),
                .context = flags.context,
                .budget = flags.budget,
                .grad_f32 = flags.grad_f32,
                .sample = flags.sample,
                .full = flags.full,
                .per_row = flags.per_row,
                .seed = flags.seed},
               progress);
  }
  if (flags.json) {
    print_json(v, inputs);
  } else {
    print_text(v, inputs);
  }
  if (v.passed()) return 0;
  flush_stdout();
  std::string beyond;
  for (Verdict const& verdict : v.outputs) {
    if (!verdict.passed) beyond += (beyond.empty() ? "" : ", ") + verdict.output;
  }
  throw Failure("beyond tolerance: " + beyond);
}

}  // namespace

void add_check(CLI::App& root, Action& action) {
  CLI::App& app = *root.add_subcommand("check", "Compare with the double-precision reference; exit 1 beyond tolerance");
  auto const flags = std::make_shared<CheckFlags>();
  add_input_flags(app, flags->inputs);
  add_option_inputs(app, flags->inputs);
  constexpr const char* random =
      "Or random inputs: --rows, --hidden (then a number) and --vocab; inputs of options then are FILE[:NAME] or "
      "random, "
      "and random:N for the k of --topk-ids and the width of --teacher-hidden";
  add_integer(app, "--rows", "R", flags->rows, 0)->group(random);
  add_integer(app, "--vocab", "V", flags->vocab, 1)->group(random);
  add_choice(app, "--kind", "(linear)", flags->kind, Choices<Kind>{{"linear", Kind::linear}, {"logits", Kind::logits}})
      ->group(random);
  add_integer(app, "--seed", "of the data and of the sample (1)", flags->seed, 0)->group(random);
  add_loss_options(app, flags->options);
  add_logit_options(app, flags->options, flags->inputs.row_temperature);
  add_more_loss_options(app, flags->options);
  refuse_filter_options(app, "the reference filters nothing, and a filter's error is not rounding: leave it out");
  constexpr const char* how = "How it is computed";
  add_choice(app, "--dtype", "of random inputs (bf16), or convert files to this first", flags->inputs.dtype,
             dtype_choices())
      ->group(how);
  add_choice(app, "--grad-dtype", "of the gradients (input)", flags->grad_f32,
             Choices<bool>{{"input", false}, {"f32", true}})
      ->group(how);
  add_bytes(app, "--budget", "most bytes of workspace (no limit)", flags->budget)->group(how);
  add_integer(app, "--sample", "rows to compare (what takes about half a minute)", flags->sample, 1)->group(how);
  app.add_flag("--full", flags->full, "run and compare every row, however long it takes")->group(how);
  app.add_flag("--per-row", flags->per_row, "compare every output of a row, not its loss and lse alone")->group(how);
  add_context_options(app, flags->context);
  app.add_flag("--json", flags->json, "one JSON object on stdout");
  app.footer(
      "Example:\n"
      "  logitless check --rows 256 --hidden 512 --vocab 32000 --dtype bf16 --budget 8MiB\n"
      "  logitless check --rows 64 --hidden 96 --vocab 5000 --teacher-hidden random:128 --teacher-weight random");
  app.callback([flags, &action] { action = [flags] { return run(*flags); }; });
}

}  // namespace logitless::cli
