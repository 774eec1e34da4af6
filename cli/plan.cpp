// logitless plan: how a problem would run within a budget: dials, ledger, workspace, flops, and the settings that were
// rejected with their reasons. Computes nothing and needs no data.

#include <CLI/CLI.hpp>
#include <memory>

#include "flags.hpp"

namespace logitless::cli {
namespace {

struct PlanFlags {
  Problem problem;
  Options options;
  ContextOptions context;
  DType dtype = DType::bf16;
  DType weight_dtype = DType::none;
  bool grad_f32 = false, loss_only = false, json = false;
};

int run(const PlanFlags& flags) {
  Problem problem = flags.problem;
  auto const gradient = [&](DType input) {
    return flags.loss_only ? DType::none : flags.grad_f32 ? DType::f32 : input;
  };
  if (problem.rows < 0) throw UsageError("--rows: missing; the number of rows (token positions)");
  if (problem.vocab == 0) throw UsageError("--vocab: missing; the number of classes");
  if (problem.kind == Kind::linear) {
    if (problem.hidden == 0) throw UsageError("--hidden: missing; the width of a hidden state, or give --kind logits");
    problem.hidden_dtype = flags.dtype;
    problem.weight_dtype = flags.weight_dtype == DType::none ? flags.dtype : flags.weight_dtype;
    problem.grad_hidden_dtype = gradient(problem.hidden_dtype);
    problem.grad_weight_dtype = gradient(problem.weight_dtype);
  } else {
    if (problem.hidden != 0) throw UsageError("--hidden: given with --kind logits, which has none; leave it out");
    if (flags.weight_dtype != DType::none) throw UsageError("--weight-dtype: given with --kind logits; leave it out");
    problem.logits_dtype = flags.dtype;
    problem.grad_logits_dtype = gradient(problem.logits_dtype);
  }
  problem.call = flags.loss_only ? Call::forward : Call::forward_backward;
  Context context(flags.context);
  Plan const plan(context, problem, flags.options);
  std::string const text = plan.describe(flags.json ? Format::json : Format::text);
  print(flags.json ? text + "\n" : text);
  return 0;
}

}  // namespace

void add_plan(CLI::App& root, Action& action) {
  CLI::App& app = *root.add_subcommand("plan", "How a problem would run within a memory budget");
  auto const flags = std::make_shared<PlanFlags>();
  flags->problem.rows = -1;
  add_integer(app, "--rows", "R, token positions", flags->problem.rows, 0);
  add_integer(app, "--hidden", "H, width of a hidden state", flags->problem.hidden, 1);
  add_integer(app, "--vocab", "V, classes", flags->problem.vocab, 1);
  add_choice(app, "--kind", "from hidden states and weight, or from given logits (linear)", flags->problem.kind,
             Choices<Kind>{{"linear", Kind::linear}, {"logits", Kind::logits}});
  add_choice(app, "--dtype", "of the inputs (bf16)", flags->dtype, dtype_choices());
  add_choice(app, "--weight-dtype", "of the weight alone (as --dtype)", flags->weight_dtype, dtype_choices());
  add_choice(app, "--grad-dtype", "of the gradients (input)", flags->grad_f32,
             Choices<bool>{{"input", false}, {"f32", true}});
  add_bytes(app, "--budget", "most bytes of workspace (no limit)", flags->problem.memory_budget);
  app.add_flag("--loss-only", flags->loss_only, "no gradients");
  app.add_flag("--json", flags->json, "one JSON object on stdout");
  add_loss_options(app, flags->options);
  add_context_options(app, flags->context);
  app.footer("Example:\n  logitless plan --rows 4096 --hidden 4096 --vocab 151936 --dtype bf16 --budget 512MiB");
  app.callback([flags, &action] { action = [flags] { return run(*flags); }; });
}

}  // namespace logitless::cli
