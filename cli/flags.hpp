// Flags of all commands: each is bound to a variable by one line, and a bad value is refused with the flag, the value
// and what would be right. The options of the loss are a table, so that a new one is a line in flags.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "command.hpp"
#include "logitless/logitless.hpp"

namespace logitless::cli {

// ---- values ---------------------------------------------------------------------------------------------------------

[[noreturn]] void refuse(const std::string& flag, const std::string& value, const std::string& right);
std::int64_t parse_integer(const std::string& flag, const std::string& value, std::int64_t least, std::int64_t most);
// Finite, in [least, most].
double parse_number(const std::string& flag, const std::string& value, double least, double most);
// 1048576, 512KiB, 1.5MiB, 2GiB.
std::uint64_t parse_bytes(const std::string& flag, const std::string& value);

template <class E>
using Choices = std::vector<std::pair<const char*, E>>;

template <class E>
E parse_choice(const std::string& flag, const std::string& value, const Choices<E>& choices) {
  std::string right;
  for (auto const& [name, choice] : choices) {
    if (value == name) return choice;
    right += (right.empty() ? "" : ", ") + std::string(name);
  }
  refuse(flag, value, "one of " + right);
}

const Choices<DType>& dtype_choices();  // f32, bf16, f16, f64

// ---- flags ----------------------------------------------------------------------------------------------------------

using Setter = std::function<void(const std::string& flag, const std::string& value)>;
CLI::Option* add_flag(CLI::App& app, const std::string& flag, const std::string& type, const std::string& help,
                      Setter set);

inline constexpr std::int64_t any_least = std::numeric_limits<std::int64_t>::min();
inline constexpr std::int64_t any_most = std::numeric_limits<std::int64_t>::max();

template <class Integer>
CLI::Option* add_integer(CLI::App& app, const std::string& flag, const std::string& help, Integer& out,
                         std::int64_t least, std::int64_t most = any_most) {
  return add_flag(app, flag, "N", help, [&out, least, most](const std::string& f, const std::string& v) {
    out = static_cast<Integer>(parse_integer(f, v, least, most));
  });
}
CLI::Option* add_number(CLI::App& app, const std::string& flag, const std::string& help, double& out, double least,
                        double most);
CLI::Option* add_bytes(CLI::App& app, const std::string& flag, const std::string& help, std::uint64_t& out);
CLI::Option* add_text(CLI::App& app, const std::string& flag, const std::string& type, const std::string& help,
                      std::string& out);
template <class E, class Out>
CLI::Option* add_choice(CLI::App& app, const std::string& flag, const std::string& help, Out& out, Choices<E> choices) {
  std::string type;
  for (auto const& choice : choices) type += (type.empty() ? "" : "|") + std::string(choice.first);
  return add_flag(app, flag, type, help,
                  [&out, choices = std::move(choices)](const std::string& f, const std::string& v) {
                    out = parse_choice(f, v, choices);
                  });
}

// The options of the loss that stand on their own.
void add_loss_options(CLI::App& app, Options& options);
// Those of the logits: scale, softcap, z-loss and --temperature, which takes a number, or the file of a row's own,
// whose name goes to `row_temperature`.
void add_logit_options(CLI::App& app, Options& options, std::string& row_temperature);
// Targets of other kinds, and rules.
void add_more_loss_options(CLI::App& app, Options& options);
// The filter's, or their refusal by name.
void add_filter_options(CLI::App& app, Options& options);
void refuse_filter_options(CLI::App& app, const std::string& why);
// --backend, --threads, --cpu-target.
void add_context_options(CLI::App& app, ContextOptions& options);

// A message of the library in the words of the command line: `label_smoothing: 2; ..` becomes `--label-smoothing: 2;
// ..`.
std::string in_flags(const std::string& message, const CLI::App& command);

}  // namespace logitless::cli
