// logitless info: machine, instruction sets found and chosen, backends, threads, version.

#include <CLI/CLI.hpp>
#include <memory>

#include "flags.hpp"

namespace logitless::cli {
namespace {

struct InfoFlags {
  ContextOptions context;
  bool json = false;
};

int run(const InfoFlags& flags) {
  Context const context(flags.context);
  std::string const text = context.describe(flags.json ? Format::json : Format::text);
  print(flags.json ? text + "\n" : text);
  return 0;
}

}  // namespace

void add_info(CLI::App& root, Action& action) {
  CLI::App& app =
      *root.add_subcommand("info", "Machine, instruction sets found and chosen, backends, threads, version");
  auto const flags = std::make_shared<InfoFlags>();
  add_context_options(app, flags->context);
  app.add_flag("--json", flags->json, "one JSON object on stdout");
  app.footer("Example:\n  logitless info --json");
  app.callback([flags, &action] { action = [flags] { return run(*flags); }; });
}

}  // namespace logitless::cli
