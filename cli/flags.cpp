// See flags.hpp.

#include "flags.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>

#include "files/files.hpp"

namespace logitless::cli {

// ---- values ---------------------------------------------------------------------------------------------------------

void refuse(const std::string& flag, const std::string& value, const std::string& right) {
  throw UsageError(flag + ": " + files::quote(value) + " is not " + right);
}

std::int64_t parse_integer(const std::string& flag, const std::string& value, std::int64_t least, std::int64_t most) {
  std::int64_t number = 0;
  char const* const end = value.data() + value.size();
  auto const [stop, error] = std::from_chars(value.data(), end, number);
  if (error != std::errc() || stop != end || number < least || number > most) {
    std::string right = "a whole number";
    if (least != any_least && most != any_most) {
      right += " from " + std::to_string(least) + " to " + std::to_string(most);
    } else if (least != any_least) {
      right += " of at least " + std::to_string(least);
    }
    refuse(flag, value, right);
  }
  return number;
}

double parse_number(const std::string& flag, const std::string& value, double least, double most) {
  double number = 0.0;
  char const* const end = value.data() + value.size();
  auto const [stop, error] = std::from_chars(value.data(), end, number);
  // The comparison is false for NaN.
  bool const inside = number >= least && number <= most && std::isfinite(number);
  if (error != std::errc() || stop != end || !inside) {
    refuse(flag, value,
           std::isfinite(most) ? "a number from " + text_of(least) + " to " + text_of(most)
                               : "a finite number of at least " + text_of(least));
  }
  return number;
}

std::uint64_t parse_bytes(const std::string& flag, const std::string& value) {
  constexpr const char* right = "a size of at least 1 byte, such as 1048576, 64KiB, 512MiB or 2GiB";
  double number = 0.0;
  char const* const end = value.data() + value.size();
  auto const [stop, error] = std::from_chars(value.data(), end, number, std::chars_format::fixed);
  if (error != std::errc()) refuse(flag, value, right);
  std::string_view const unit(stop, static_cast<std::size_t>(end - stop));
  Choices<double> const units = {{"", 1.0},
                                 {"B", 1.0},
                                 {"KiB", 1024.0},
                                 {"MiB", 1024.0 * 1024.0},
                                 {"GiB", 1024.0 * 1024.0 * 1024.0},
                                 {"TiB", 1024.0 * 1024.0 * 1024.0 * 1024.0}};
  for (auto const& [name, factor] : units) {
    if (unit != name) continue;
    double const bytes = number * factor;
    if (!(bytes >= 1.0) || bytes >= 0x1p62) break;  // false for NaN
    return static_cast<std::uint64_t>(bytes);
  }
  refuse(flag, value, right);
}

const Choices<DType>& dtype_choices() {
  static const Choices<DType> choices = {
      {"f32", DType::f32}, {"bf16", DType::bf16}, {"f16", DType::f16}, {"f64", DType::f64}};
  return choices;
}

// ---- flags ----------------------------------------------------------------------------------------------------------

CLI::Option* add_flag(CLI::App& app, const std::string& flag, const std::string& type, const std::string& help,
                      Setter set) {
  return app
      .add_option_function<std::string>(
          flag, [flag, set = std::move(set)](const std::string& value) { set(flag, value); }, help)
      ->type_name(type);
}

CLI::Option* add_number(CLI::App& app, const std::string& flag, const std::string& help, double& out, double least,
                        double most) {
  return add_flag(app, flag, "X", help, [&out, least, most](const std::string& f, const std::string& v) {
    out = parse_number(f, v, least, most);
  });
}

CLI::Option* add_bytes(CLI::App& app, const std::string& flag, const std::string& help, std::uint64_t& out) {
  return add_flag(app, flag, "SIZE", help,
                  [&out](const std::string& f, const std::string& v) { out = parse_bytes(f, v); });
}

CLI::Option* add_text(CLI::App& app, const std::string& flag, const std::string& type, const std::string& help,
                      std::string& out) {
  return add_flag(app, flag, type, help, [&out](const std::string& f, const std::string& v) {
    if (v.empty()) refuse(f, v, "a name");
    out = v;
  });
}

// ---- the options of the loss ----------------------------------------------------------------------------------------

namespace {

struct OptionRow {
  const char* flag;
  const char* type;
  const char* help;
  std::function<void(Options& options, const std::string& flag, const std::string& value)> set;
};

template <class E>
auto choice(E Options::* field, Choices<E> choices) {
  return [field, choices = std::move(choices)](Options& o, const std::string& flag, const std::string& value) {
    o.*field = parse_choice(flag, value, choices);
  };
}
auto number(double Options::* field, double least, double most) {
  return [=](Options& o, const std::string& flag, const std::string& value) {
    o.*field = parse_number(flag, value, least, most);
  };
}
template <class Part>
auto number(Part Options::* part, double Part::* field, double least, double most) {
  return [=](Options& o, const std::string& flag, const std::string& value) {
    o.*part.*field = parse_number(flag, value, least, most);
  };
}
auto integer(std::int64_t Options::* field, std::int64_t least, std::int64_t most) {
  return [=](Options& o, const std::string& flag, const std::string& value) {
    o.*field = parse_integer(flag, value, least, most);
  };
}

constexpr double inf = std::numeric_limits<double>::infinity();

constexpr double above_0 = std::numeric_limits<double>::min();

// A new option of the library is one line in one of these four.
const std::vector<OptionRow>& option_table() {
  static const std::vector<OptionRow> table = {
      {"--reduction", "mean|sum|none", "over the kept rows (mean)",
       choice(&Options::reduction,
              Choices<Reduction>{{"mean", Reduction::mean}, {"sum", Reduction::sum}, {"none", Reduction::none}})},
      {"--ignore-index", "N", "rows with this target have no loss and no gradient (-100)",
       integer(&Options::ignore_index, any_least, any_most)},
      {"--label-smoothing", "A", "weight of the other classes, from 0 to 1 (0)",
       number(&Options::label_smoothing, 0.0, 1.0)},
      {"--smoothing", "uniform|others", "A over all V classes, or over the V-1 others (uniform)",
       choice(&Options::smoothing, Choices<Smoothing>{{"uniform", Smoothing::uniform}, {"others", Smoothing::others}})},
      {"--normalizer", "X", "mean divides by X instead of the number of kept rows",
       number(&Options::normalizer, above_0, inf)},
      {"--on-empty", "error|nan|zero", "mean over no kept row (error)",
       choice(&Options::on_empty,
              Choices<OnEmpty>{{"error", OnEmpty::error}, {"nan", OnEmpty::nan}, {"zero", OnEmpty::zero}})},
  };
  return table;
}

const std::vector<OptionRow>& logit_options_table() {
  static const std::vector<OptionRow> table = {
      {"--logit-scale", "X", "z = X times the logits (1)", number(&Options::logit_scale, above_0, inf)},
      {"--softcap", "X", "z = X tanh(z / X) after that (none)", number(&Options::softcap, above_0, inf)},
      {"--z-loss", "X", "adds X lse^2 to a row's loss (0)", number(&Options::z_loss, 0.0, inf)},
  };
  return table;
}

const std::vector<OptionRow>& more_options_table() {
  static const std::vector<OptionRow> table = {
      {"--rest", "dropped|renormalised|spread", "mass that --topk-probs leave over (dropped)",
       choice(
           &Options::rest,
           Choices<Rest>{{"dropped", Rest::dropped}, {"renormalised", Rest::renormalised}, {"spread", Rest::spread}})},
      {"--divergence", "forward_kl|reverse_kl|jsd", "from a teacher's head (forward_kl)",
       [](Options& o, const std::string& flag, const std::string& value) {
         o.distillation.divergence = parse_choice(flag, value,
                                                  Choices<Divergence>{{"forward_kl", Divergence::forward_kl},
                                                                      {"reverse_kl", Divergence::reverse_kl},
                                                                      {"jsd", Divergence::jsd}});
       }},
      {"--beta", "X", "of jsd, between 0 and 1 (0.5)",
       number(&Options::distillation, &Distillation::beta, above_0, 1.0)},
      {"--distill-temperature", "X", "of student and teacher (1)",
       number(&Options::distillation, &Distillation::temperature, above_0, inf)},
      {"--hard-share", "X", "of the targets' cross-entropy beside a teacher, from 0 to 1 (0)",
       number(&Options::distillation, &Distillation::hard_share, 0.0, 1.0)},
      {"--clip-low", "X", "of the policy rule (0.2)", number(&Options::policy, &Policy::clip_low, 0.0, 1.0)},
      {"--clip-high", "X", "of the policy rule (0.2)", number(&Options::policy, &Policy::clip_high, 0.0, inf)},
      {"--kl-coef", "X", "of the policy rule; needs --policy-ref-logprob (0)",
       number(&Options::policy, &Policy::kl_coef, 0.0, inf)},
      {"--entropy-coef", "X", "of the policy rule (0)", number(&Options::policy, &Policy::entropy_coef, -1e300, inf)},
  };
  return table;
}

const std::vector<OptionRow>& filter_options_table() {
  static const std::vector<OptionRow> table = {
      {"--filter", "X", "gradient entries below X become 0 or +-X, unbiased; a power of 2 (none)",
       number(&Options::filter, above_0, 1.0)},
      {"--filter-seed", "N", "of the filter (0)",
       [](Options& o, const std::string& flag, const std::string& value) {
         o.filter_seed = static_cast<std::uint64_t>(parse_integer(flag, value, 0, any_most));
       }},
  };
  return table;
}

void add_table(CLI::App& app, Options& options, const std::vector<OptionRow>& table) {
  for (OptionRow const& row : table) {
    add_flag(app, row.flag, row.type, row.help, [&options, &row](const std::string& flag, const std::string& value) {
      row.set(options, flag, value);
    })->group("What is computed");
  }
}

bool is_number(const std::string& text) {
  double number = 0.0;
  char const* const end = text.data() + text.size();
  auto const [stop, error] = std::from_chars(text.data(), end, number);
  return error != std::errc::invalid_argument && stop == end;
}

}  // namespace

void add_loss_options(CLI::App& app, Options& options) { add_table(app, options, option_table()); }

void add_logit_options(CLI::App& app, Options& options, std::string& row_temperature) {
  add_table(app, options, logit_options_table());
  add_flag(app, "--temperature", "X|FILE[:NAME]", "z / X, or / T [R], a row's own (1)",
           [&](const std::string& flag, const std::string& value) {
             if (value.empty()) refuse(flag, value, "a number or the name of a file");
             if (is_number(value)) {
               options.temperature = parse_number(flag, value, above_0, inf);
             } else {
               row_temperature = value;
             }
           })
      ->group("What is computed");
}

void add_more_loss_options(CLI::App& app, Options& options) {
  add_table(app, options, more_options_table());
  app.add_flag("--temperature-squared", options.distillation.temperature_squared,
               "multiply the divergence by --distill-temperature squared")
      ->group("What is computed");
}

void add_filter_options(CLI::App& app, Options& options) { add_table(app, options, filter_options_table()); }

void refuse_filter_options(CLI::App& app, const std::string& why) {
  for (OptionRow const& row : filter_options_table()) {
    add_flag(app, row.flag, row.type, row.help, [why](const std::string& flag, const std::string& value) {
      throw UsageError(std::string(flag).append(": ").append(files::quote(value)).append("; ").append(why));
    })->group("");  // known, but not in the help
  }
}

void add_context_options(CLI::App& app, ContextOptions& options) {
  constexpr const char* group = "Where it runs";
  add_choice(app, "--backend", "(cpu)", options.backend,
             Choices<Backend>{{"cpu", Backend::cpu}, {"cuda", Backend::cuda}, {"reference", Backend::reference}})
      ->group(group);
  add_integer(app, "--device", "of --backend cuda (0)", options.device, 0, 1023)->group(group);
  add_integer(app, "--threads", "(LOGITLESS_NUM_THREADS, or all CPUs of this process)", options.threads, 1, 1024)
      ->group(group);
  add_text(app, "--cpu-target", "NAME", "force an instruction set; logitless info lists them", options.cpu_target)
      ->group(group);
}

std::string in_flags(const std::string& message, const CLI::App& command) {
  std::string text = message;
  constexpr std::pair<std::string_view, std::string_view> words[] = {
      {"a context of LL_BACKEND_REFERENCE", "--backend reference"},
      {"LL_BACKEND_REFERENCE", "reference"},
      {"LL_BACKEND_CPU", "cpu"},
      {"LL_BACKEND_CUDA", "cuda"},
      {"LL_SMOOTHING_OTHERS", "--smoothing others"},
      {"LL_TARGETS_TOPK with LL_TOPK_LOG", "--topk-ids and --topk-logprobs"},
      {"LL_TARGETS_HARD", "those of --targets"},
      {"LL_TARGETS_SOFT", "--soft-targets"},
      {"LL_TARGETS_TOPK", "--topk-ids"},
      {"LL_TARGETS_TEACHER", "--teacher-hidden"},
      {"LL_TOPK_LOG", "--topk-logprobs"},
      {"LL_CLASS_WEIGHT", "--class-weight"},
      {"distill_temperature", "--distill-temperature"},
      {"hard_share", "--hard-share"},
      {"LL_KEEP_MASK", "--keep-mask"},
      {"LL_LOGIT_FLOOR", "--logit-floor"},
      {"LL_ROW_TEMPERATURE", "a row's own"},
      {"rule LL_RULE_POLICY", "the policy rule"},
      {"divergence LL_JSD", "--divergence jsd"},
      {"LL_FORWARD_KL", "forward_kl"},
      {"LL_REVERSE_KL", "reverse_kl"},
      {"LL_JSD", "jsd"},
      {"LL_FORWARD", "no gradient"},
      {"LL_PER_ROW", "none"},
      {"LL_MEAN", "mean"},
      {"LL_SUM", "sum"}};
  for (auto const& [constant, word] : words) {
    for (std::size_t at = text.find(constant); at != std::string::npos; at = text.find(constant, at + word.size())) {
      text.replace(at, constant.size(), word);
    }
  }
  std::size_t const end = text.find_first_not_of("abcdefghijklmnopqrstuvwxyz_");
  if (end == std::string::npos || end == 0) return text;
  std::string flag = text.substr(0, end);
  if (flag == "memory_budget") flag = "budget";
  if (flag.size() > 6 && flag.substr(flag.size() - 6) == "_dtype") flag.resize(flag.size() - 6);  // hidden_dtype: f64
  std::replace(flag.begin(), flag.end(), '_', '-');
  if (flag == "old-logprob" || flag == "advantage" || flag == "ref-logprob") flag = "policy-" + flag;
  flag = "--" + flag;
  return command.get_option_no_throw(flag) == nullptr ? text : flag + text.substr(end);
}

}  // namespace logitless::cli
