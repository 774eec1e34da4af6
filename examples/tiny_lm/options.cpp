// Parsing, help and JSON of the options, all from one table.
#include "options.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <variant>
#include <vector>

namespace tiny_lm {
namespace {

using Json = nlohmann::json;

struct Whole {
  std::int64_t Options::* field;
  std::int64_t least, most;
};
struct Real {
  double Options::* field;
  double most = 1;
  bool zero = false;  // 0 is allowed
};
struct Size {
  std::uint64_t Options::* field;
};
struct Word {
  std::string Options::* field;
  std::vector<std::string> choices;  // empty: anything but nothing
};
struct Flag {
  bool Options::* field;
};

struct Entry {
  const char* name;
  const char* value;  // as help shows it
  bool kept;          // belongs to the checkpoint
  std::variant<Whole, Real, Size, Word, Flag> kind;
  const char* help;
};

const std::vector<Entry>& table() {
  constexpr std::int64_t large = std::int64_t{1} << 24;
  static const std::vector<Entry> entries{
      {"--text", "FILE|DIR", true, Word{&Options::text, {}}, "text file, folder of them, or an R package's Rdata.rdb"},
      {"--vocab", "N", true, Whole{&Options::vocab, 16, 1 << 20}, "upper bound of the vocabulary (16384)"},
      {"--steps", "N", true, Whole{&Options::steps, 1, large}, "steps of each of the two trainings"},
      {"--out", "DIR", false, Word{&Options::out, {}},
       "where report.html, head.safetensors and the checkpoint go (out)"},
      {"--resume", "", false, Flag{&Options::resume}, "continue DIR's interrupted training, with the same bits"},
      {"--head", "fp32|bf16", true, Word{&Options::head, {"fp32", "bf16"}}, "operands of both heads (fp32)"},
      {"--budget", "SIZE", true, Size{&Options::budget}, "Logitless' workspace, like 16MiB; 0: no limit"},
      {"--rows", "R", true, Whole{&Options::rows, 1, 1 << 20}, "tokens of a step"},
      {"--hidden", "H", true, Whole{&Options::hidden, 1, 1 << 16}, "width of embedding and hidden states (256)"},
      {"--context", "N", true, Whole{&Options::context, 1, 1024}, "tokens that the model looks back"},
      {"--inner", "F", true, Whole{&Options::inner, 1, 1 << 16}, "width of the hidden layer"},
      {"--rate", "X", true, Real{&Options::rate}, "Adam's largest learning rate"},
      {"--smoothing", "A", true, Real{&Options::smoothing, 1, true}, "label smoothing of both heads (0)"},
      {"--z-loss", "X", true, Real{&Options::z_loss, 1, true}, "times the square of log-sum-exp, both heads (0)"},
      {"--softcap", "X", true, Real{&Options::softcap, 1e6, true}, "logits become X tanh(z / X); 0: none (0)"},
      {"--seed", "N", true, Whole{&Options::seed, 0, std::int64_t{1} << 62}, "of weights and batches (1)"},
      {"--every", "N", true, Whole{&Options::every, 1, large}, "steps between held-out perplexities"},
      {"--threads", "N", true, Whole{&Options::threads, 1, 1024}, "threads (all that this process may use)"},
      {"--products", "NAME", true, Word{&Options::products, {"auto", "eigen", "openblas"}},
       "kernels of body and dense head: auto takes the faster"},
      {"--stop-after", "N", false, Whole{&Options::stop_after, 1, large}, "stop after step N as Ctrl-C would"},
      {"--cli", "PATH", false, Word{&Options::cli, {}}, "the command line tool named in the last lines"},
      {"--extract", "FILE", false, Word{&Options::extract, {}}, "write the text, a paragraph a line, and stop"},
      {"--measure-head", "NAME", false, Word{&Options::measure_head, {"dense", "logitless"}},
       "--steps runs of one head of --rows, --hidden, --vocab: print times and peak bytes, and stop"},
      {"--help", "", false, Flag{&Options::help}, "this text"},
  };
  return entries;
}

const Entry* find(const std::string& name) {
  for (const Entry& entry : table()) {
    if (name == entry.name) return &entry;
  }
  return nullptr;
}

[[noreturn]] void refuse(const char* name, const std::string& value, const std::string& right) {
  throw UsageError(std::string(name) + ": '" + value + "' is not " + right);
}

template <class T>
bool parse_whole_text(const std::string& text, T& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

std::uint64_t parse_size(const char* name, const std::string& text) {
  constexpr std::array<std::pair<const char*, int>, 4> units{{{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"", 0}}};
  const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  std::uint64_t number = 0;
  for (const auto& [unit, shift] : units) {
    if (text.substr(digits) == unit && parse_whole_text(text.substr(0, digits), number) &&
        number >> (63 - shift) == 0) {
      return number << shift;
    }
  }
  refuse(name, text, "a size such as 16777216, 512KiB, 16MiB or 1GiB");
}

void set(const Entry& entry, const std::string& text, Options& options) {
  if (const auto* whole = std::get_if<Whole>(&entry.kind)) {
    std::int64_t value = 0;
    if (!parse_whole_text(text, value) || value < whole->least || value > whole->most) {
      refuse(entry.name, text,
             "a whole number from " + std::to_string(whole->least) + " to " + std::to_string(whole->most));
    }
    options.*whole->field = value;
  } else if (const auto* real = std::get_if<Real>(&entry.kind)) {
    double value = 0;
    if (!parse_whole_text(text, value) || !((value > 0 || (real->zero && value == 0)) && value <= real->most)) {
      char right[64];
      std::snprintf(right, sizeof right, "a number %s 0 %s %g", real->zero ? "from" : "above",
                    real->zero ? "to" : "and up to", real->most);
      refuse(entry.name, text, right);
    }
    options.*real->field = value;
  } else if (const auto* size = std::get_if<Size>(&entry.kind)) {
    options.*size->field = parse_size(entry.name, text);
  } else if (const auto* word = std::get_if<Word>(&entry.kind)) {
    bool good = word->choices.empty() && !text.empty();
    std::string right;
    for (const std::string& choice : word->choices) {
      good = good || text == choice;
      right += (right.empty() ? "" : ", ") + choice;
    }
    if (!good) refuse(entry.name, text, right.empty() ? "a path" : "one of " + right);
    options.*word->field = text;
  }
}

}  // namespace

Options parse_options(int argc, const char* const* argv) {
  Options options;
  const std::span<const char* const> words(argv, static_cast<std::size_t>(argc));
  for (std::size_t i = 1; i < words.size(); ++i) {
    std::string name = words[i], value;
    const std::size_t equals = name.find('=');
    const bool joined = name.starts_with("--") && equals != std::string::npos;
    if (joined) {
      value = name.substr(equals + 1);
      name.resize(equals);
    }
    const Entry* entry = find(name == "-h" ? "--help" : name);
    if (entry == nullptr) throw UsageError("'" + name + "' is not an option; see --help");
    options.given.insert(entry->name);
    if (const auto* flag = std::get_if<Flag>(&entry->kind)) {
      if (joined) throw UsageError(name + ": takes no value");
      options.*flag->field = true;
      continue;
    }
    if (!joined) {
      if (i + 1 == words.size()) throw UsageError(name + ": needs a value, " + entry->value);
      value = words[++i];
    }
    set(*entry, value, options);
  }
  return options;
}

std::string help_text() {
  std::string text =
      "Trains a small language model on real text, twice from the same seed: with Logitless and with dense logits.\n"
      "Shows that losses and gradients agree while time and memory fall; writes DIR/report.html.\n\n"
      "usage: tiny_lm [options]      for example: tiny_lm --text novels.txt --steps 200 --out out\n\n";
  for (const Entry& entry : table()) {
    std::array<char, 200> line{};
    const std::string left = std::string(entry.name) + " " + entry.value;
    std::snprintf(line.data(), line.size(), "  %-24s %s\n", left.c_str(), entry.help);
    text += line.data();
  }
  return text + "\nCtrl-C finishes the step and leaves a checkpoint; --resume continues from it.\n";
}

std::string options_to_json(const Options& options) {
  Json json;
  for (const Entry& entry : table()) {
    if (!entry.kept) continue;
    Json& value = json[entry.name + 2];
    if (const auto* whole = std::get_if<Whole>(&entry.kind)) value = options.*whole->field;
    if (const auto* real = std::get_if<Real>(&entry.kind)) value = options.*real->field;
    if (const auto* size = std::get_if<Size>(&entry.kind)) value = options.*size->field;
    if (const auto* word = std::get_if<Word>(&entry.kind)) value = options.*word->field;
  }
  return json.dump();
}

void options_from_json(const std::string& text, Options& options) {
  const Json json = Json::parse(text);
  const auto take = [&](const Entry& entry, auto& field) {
    auto stored = field;
    json.at(entry.name + 2).get_to(stored);
    if (options.given.contains(entry.name) && stored != field) {
      throw UsageError(std::string(entry.name) + ": the training in '" + options.out + "' was started with " +
                       json.at(entry.name + 2).dump() + "; leave it out to resume, or start anew without --resume");
    }
    field = stored;
  };
  for (const Entry& entry : table()) {
    if (!entry.kept) continue;
    if (const auto* whole = std::get_if<Whole>(&entry.kind)) take(entry, options.*whole->field);
    if (const auto* real = std::get_if<Real>(&entry.kind)) take(entry, options.*real->field);
    if (const auto* size = std::get_if<Size>(&entry.kind)) take(entry, options.*size->field);
    if (const auto* word = std::get_if<Word>(&entry.kind)) take(entry, options.*word->field);
  }
}

std::string bytes_text(double bytes) {
  constexpr std::array<const char*, 4> units{"B", "KiB", "MiB", "GiB"};
  std::size_t unit = 0;
  while (std::abs(bytes) >= 1024 && unit + 1 < units.size()) {
    bytes /= 1024;
    ++unit;
  }
  std::array<char, 40> text{};
  // Two digits at least, but no ".0".
  const bool tenths = unit > 0 && bytes < 9.95 && std::abs(bytes - std::round(bytes)) >= 0.05;
  std::snprintf(text.data(), text.size(), "%.*f %s", tenths ? 1 : 0, bytes, units[unit]);
  return text.data();
}

std::string number_text(std::int64_t n) {
  std::string digits = std::to_string(n);
  for (auto at = static_cast<std::int64_t>(digits.size()) - 3; at > (n < 0 ? 1 : 0); at -= 3) {
    digits.insert(static_cast<std::size_t>(at), ",");
  }
  return digits;
}

}  // namespace tiny_lm
