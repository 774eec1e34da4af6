// logitless bench: the flags of bench/bench.hpp, which measures and prints.

#include <CLI/CLI.hpp>
#include <memory>

#include "command.hpp"
#include "flags.hpp"

#ifdef LOGITLESS_WITH_BENCH
#include "bench/bench.hpp"
#endif

namespace logitless::cli {

#ifdef LOGITLESS_WITH_BENCH

namespace {

int run(const bench::BenchRequest& request, const CLI::App& command) {
  try {
    return bench::run_bench(request);
  } catch (const std::invalid_argument& error) {
    throw UsageError(in_flags(error.what(), command));
  }
}

Choices<std::string> names(std::initializer_list<const char*> list) {
  Choices<std::string> choices;
  for (const char* const name : list) choices.emplace_back(name, name);
  return choices;
}

}  // namespace

void add_bench(CLI::App& root, Action& action) {
  CLI::App& app =
      *root.add_subcommand("bench", "The machine's ceilings, what is reached of them, the unfused baseline");
  auto const r = std::make_shared<bench::BenchRequest>();
  add_choice(app, "--suite", "(linear)", r->suite, names({"ceilings", "linear", "logits", "options", "error", "all"}));
  add_integer(app, "--rows", "R (2048)", r->rows, 1);
  add_integer(app, "--hidden", "H (2048)", r->hidden, 1);
  add_integer(app, "--vocab", "V (32768)", r->vocab, 1);
  add_text(app, "--dtype", "LIST", "f32, bf16, f16, several with commas (bf16; for logits f32,bf16)", r->dtype);
  add_choice(app, "--data", "a loss of a few nats, or uniform targets (trained)", r->data,
             names({"trained", "random"}));
  add_number(app, "--ignored", "share of ignored rows, from 0 to 1 (1/17)", r->ignored, 0.0, 1.0);
  add_bytes(app, "--budget", "of the runs within a budget (64MiB)", r->budget);
  add_number(app, "--seconds", "to aim at for each suite (45)", r->seconds, 0.0, 86400.0);
  add_integer(app, "--repeats", "rounds; 0 as many as fit (0)", r->repeats, 0, 1000000);
  app.add_flag("!--no-dense", r->dense, "leave out the unfused baseline");
  app.add_flag("--peers", r->peers, "torch's operations on the same shape, in the same run");
  add_text(app, "--python", "PROGRAM", "interpreter for --peers (python3)", r->python);
  add_text(app, "--peers-script", "FILE", "the script of --peers (bench/peers of the source tree)", r->peers_script);
  add_choice(app, "--backend", "(cpu); cuda has the suites linear and logits", r->backend,
             Choices<Backend>{{"cpu", Backend::cpu}, {"cuda", Backend::cuda}});
  add_integer(app, "--device", "of --backend cuda (0)", r->device, 0, 1023);
  add_integer(app, "--threads", "(LOGITLESS_NUM_THREADS, or all CPUs of this process)", r->threads, 1, 1024);
  add_text(app, "--cpu-target", "NAME", "force an instruction set", r->cpu_target);
  add_integer(app, "--seed", "of the data (1)", r->seed, 0);
  add_text(app, "--json", "FILE", "JSON to FILE beside the text, or instead of it on stdout when FILE is left out",
           r->json)
      ->expected(0, 1)
      ->default_str("-");
  app.footer("Example:\n  logitless bench --suite linear --rows 2048 --hidden 2048 --vocab 32768 --dtype bf16");
  app.callback([r, &app, &action] { action = [r, &app] { return run(*r, app); }; });
}

#else

void add_bench(CLI::App& root, Action& action) {
  CLI::App& app = *root.add_subcommand("bench", "Benchmarks (not in this build)");
  app.allow_extras();
  app.footer("Example:\n  logitless bench --suite linear");
  app.callback([&action] {
    action = []() -> int {
      throw Failure("this build has no benchmarks; configure it with -DLOGITLESS_BUILD_BENCH=ON");
    };
  });
}

#endif

}  // namespace logitless::cli
