// logitless: the library on the command line. Commands: info, plan, loss, check, bench; each has --help with an
// example.
//
// Here: the line is understood, one command runs, and whatever goes wrong becomes one line on stderr and an exit status
// (command.hpp). Built on the public C++ face only.

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <new>

#include "files/files.hpp"
#include "flags.hpp"

namespace logitless::cli {
namespace {

// stderr's one line, whatever the text holds.
int complain(const CLI::App* command, const std::string& text, int status) {
  std::string line = text.substr(0, text.find('\n'));
  std::string const name = command == nullptr ? "logitless" : "logitless " + command->get_name();
  std::fprintf(stderr, "%s: %s\n", name.c_str(), line.c_str());
  return status;
}

const CLI::App* chosen(const CLI::App& root) {
  auto const commands = root.get_subcommands();
  return commands.empty() ? nullptr : commands.front();
}

// CLI11's errors in the words of this program.
std::string text_of_parse_error(const CLI::ParseError& error, const CLI::App& root) {
  CLI::App const* const command = chosen(root);
  std::string const help = command == nullptr ? "logitless --help" : "logitless " + command->get_name() + " --help";
  std::vector<std::string> const left = root.remaining(true);
  if (!left.empty() && command == nullptr) {
    return "unknown command " + files::quote(left.front()) + "; one of info, plan, loss, check, bench";
  }
  if (!left.empty()) return "unknown argument " + files::quote(left.front()) + "; " + help + " lists those that exist";
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    std::string const text = error.what();
    return text.substr(0, text.find(':')) + ": takes exactly one value; see " + help;
  }
  if (command == nullptr) return "no command given; one of info, plan, loss, check, bench, or --help";
  return std::string(error.what()) + "; see " + help;
}

// What the library refuses because of its arguments is wrong on the line; the rest is a failure of the work.
int status_of(const Error& error) {
  return error.status() == LL_ERROR_INVALID_ARGUMENT || error.status() == LL_ERROR_BUDGET ? 2 : 1;
}

int run(int argc, char** argv) {
  CLI::App root("Losses at a language model's head, and their gradients, without the matrix of logits.", "logitless");
  root.set_version_flag("--version", std::string("logitless ") + version());
  root.require_subcommand(1);
  root.footer(
      "Example:\n"
      "  logitless loss --hidden head.safetensors:hidden --weight head.safetensors:weight \\\n"
      "                 --targets head.safetensors:targets\n"
      "Exit status: 0 done, 1 the work failed, 2 the command line is wrong.");
  Action action;
  for (auto* const add : {add_info, add_plan, add_loss, add_check, add_bench}) add(root, action);
  for (CLI::App* const command : root.get_subcommands({})) command->get_formatter()->column_width(36);

  CLI::App const* command = nullptr;
  try {
    try {
      root.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
      print(root.help());
      flush_stdout();
      return 0;
    } catch (const CLI::CallForVersion& error) {
      print(std::string(error.what()) + "\n");
      flush_stdout();
      return 0;
    }
    command = chosen(root);
    int const status = action();
    flush_stdout();
    return status;
  } catch (const ReaderLeft&) {
    return 0;
  } catch (const CLI::ParseError& error) {
    return complain(chosen(root), text_of_parse_error(error, root), 2);
  } catch (const UsageError& error) {
    return complain(chosen(root), error.what(), 2);
  } catch (const Error& error) {
    return complain(command, command == nullptr ? error.what() : in_flags(error.what(), *command), status_of(error));
  } catch (const std::bad_alloc&) {
    return complain(command, "out of memory", 1);
  } catch (const std::exception& error) {
    return complain(command, error.what(), 1);
  }
}

}  // namespace
}  // namespace logitless::cli

int main(int argc, char** argv) {
  // A reader of stdout that leaves (`| head`) shows as EPIPE, so that files being written are still finished.
  std::signal(SIGPIPE, SIG_IGN);
  try {
    return logitless::cli::run(argc, argv);
  } catch (...) {  // while the flags themselves are set up: memory, or a defect
    std::fputs("logitless: cannot start\n", stderr);
    return 1;
  }
}
