// See inputs.hpp.

#include "inputs.hpp"

#include <CLI/CLI.hpp>
#include <cstring>
#include <iterator>
#include <string_view>

#include "arrays.hpp"
#include "files/files.hpp"
#include "flags.hpp"

namespace logitless::cli {
namespace {

struct Loaded {
  ConstTensor view;
  std::shared_ptr<const void> owner;
};

std::string where(const std::string& flag, const std::string& spec) { return flag + ": " + files::quote(spec); }

// Brings a mapped file's pages in, so that the seconds of a run are not those of the disk.
void touch(const void* data, std::uint64_t bytes) {
  unsigned sum = 0;
  for (std::uint64_t at = 0; at < bytes; at += 4096) sum += static_cast<const unsigned char*>(data)[at];
  [[maybe_unused]] volatile unsigned const kept = sum;
}

// What a tensor holds. Numbers are converted to --dtype, numbers of options to f32.
enum class Of { numbers, f32, integers, bytes };

bool holds(DType dtype, Of of) {
  if (of == Of::bytes) return dtype == DType::u8;
  bool const integer = dtype == DType::i32 || dtype == DType::i64;
  return of == Of::integers ? integer : !integer && dtype != DType::u8;
}

// A tensor of this rank.
Loaded load_one(const std::string& flag, const std::string& spec, std::size_t rank, const char* letters, Of of,
                const InputFlags& flags) {
  files::Tensor tensor;
  try {
    tensor = files::read(spec, flags.npy_bf16);
  } catch (const files::Error& error) {
    throw Failure(flag + ": " + error.what());
  }
  auto const& shape = tensor.info.shape;
  auto dtype = static_cast<DType>(tensor.info.dtype);
  if (!holds(dtype, of)) {
    throw Failure(where(flag, spec) + " is " + name_of(dtype) + "; must be " +
                  (of == Of::integers ? "i32 or i64"
                   : of == Of::bytes  ? "u8"
                                      : "f32, bf16, f16 or f64"));
  }
  if (shape.size() != rank) {
    throw Failure(where(flag, spec) + " has shape " + files::text_of(shape) + "; must have rank " +
                  std::to_string(rank) + ", " + letters);
  }
  std::int64_t count = 1;
  for (std::int64_t const n : shape) count *= n;
  touch(tensor.data, tensor.info.bytes);
  Loaded loaded{{}, tensor.owner};
  void const* data = tensor.data;
  DType const wanted = of == Of::f32 ? DType::f32 : of == Of::numbers ? flags.dtype : DType::none;
  if (wanted != DType::none && wanted != dtype) {
    Array const converted(wanted, shape);
    convert(data, dtype, converted.data(), wanted, count);
    dtype = wanted;
    data = converted.data();
    loaded.owner = std::make_shared<Array>(converted);
  }
  loaded.view = ConstTensor(data, dtype, rank == 2 ? Shape(shape[0], shape[1]) : Shape(shape[0]));
  return loaded;
}

// The tensors of options, in the order of InputFlags::options.
struct OptionInput {
  const char* flag;
  ConstTensor Arguments::* field;
  Of of;
  std::size_t rank;
  const char* letters;
  const char* help;
};
constexpr OptionInput option_input_table[] = {
    {"--bias", &Arguments::bias, Of::numbers, 1, "[V]", "b [V], added to the logits"},
    {"--class-weight", &Arguments::class_weight, Of::f32, 1, "[V]", "[V], of a class as a target"},
    {"--row-weight", &Arguments::row_weight, Of::f32, 1, "[R]", "[R], multiplies a row's loss, not the divisor"},
    {"--keep-mask", &Arguments::keep_mask, Of::bytes, 2, "[R,ceil(V/8)]",
     "u8 [R,ceil(V/8)], classes whose bit is 0 are dropped; lowest bit first"},
    {"--logit-floor", &Arguments::logit_floor, Of::f32, 1, "[R]", "[R], classes with logits below it are dropped"},
    {"--soft-targets", &Arguments::soft_targets, Of::numbers, 2, "[R,V]", "probabilities [R,V]"},
    {"--topk-ids", &Arguments::topk_ids, Of::integers, 2, "[R,k]", "i32 or i64 [R,k], classes with"},
    {"--topk-probs", &Arguments::topk_probs, Of::f32, 2, "[R,k]", "their probabilities [R,k], or"},
    {"--topk-logprobs", &Arguments::topk_probs, Of::f32, 2, "[R,k]", "a teacher's log-probabilities [R,k]"},
    {"--teacher-hidden", &Arguments::teacher_hidden, Of::numbers, 2, "[R,H']", "a teacher's hidden states [R,H']"},
    {"--teacher-weight", &Arguments::teacher_weight, Of::numbers, 2, "[V,H']", "a teacher's head [V,H']"},
    {"--teacher-bias", &Arguments::teacher_bias, Of::numbers, 1, "[V]", "and its bias [V]"},
    {"--policy-old-logprob", &Arguments::old_logprob, Of::f32, 1, "[R]", "[R], with the advantage: the policy rule"},
    {"--policy-advantage", &Arguments::advantage, Of::f32, 1, "[R]", "[R]"},
    {"--policy-ref-logprob", &Arguments::ref_logprob, Of::f32, 1, "[R]", "[R], for --kl-coef"},
    {"--temperature", &Arguments::row_temperature, Of::f32, 1, "[R]", nullptr},  // a flag of flags.cpp
    {"--cu-seqlens", nullptr, Of::integers, 1, "[S+1]", nullptr},                // not an argument of the loss
};
static_assert(std::size(option_input_table) == option_inputs);

constexpr const char* options_group = "Inputs of options";

void add_option_input(CLI::App& app, InputFlags& flags, std::size_t i) {
  OptionInput const& row = option_input_table[i];
  add_text(app, row.flag, "FILE[:NAME]", row.help, flags.options[i])->group(options_group);
}

// In the table's order, those of its end too.
std::vector<std::string> specs_of(const InputFlags& flags) {
  std::vector<std::string> specs(flags.options.begin(), flags.options.end());
  specs[option_inputs - 2] = flags.row_temperature;
  specs[option_inputs - 1] = flags.cu_seqlens;
  return specs;
}

void check_rows(const std::string& flag, const std::string& spec, std::int64_t rows, const Loaded& targets,
                const InputFlags& flags) {
  if (targets.view.extent(0) != rows) {
    throw Failure(where("--targets", flags.targets) + " has " + std::to_string(targets.view.extent(0)) + " rows, " +
                  where(flag, spec) + " has " + std::to_string(rows) + "; must be the same number R");
  }
}

}  // namespace

std::vector<std::string> InputFlags::paths() const {
  std::vector<std::string> out;
  std::vector<std::string> specs = specs_of(*this);
  specs.insert(specs.end(), {hidden, weight, logits, targets});
  for (std::string const& spec : specs) {
    if (!spec.empty()) out.push_back(files::parse_spec(spec).path);
  }
  return out;
}

void add_input_flags(CLI::App& app, InputFlags& flags) {
  constexpr const char* group = "Inputs: .safetensors or .npy; NAME may be left out where there is one tensor";
  constexpr const char* type = "FILE[:NAME]";
  add_text(app, "--hidden", type, "X [R,H], hidden states", flags.hidden)->group(group);
  add_text(app, "--weight", type, "W [V,H], the head's weight", flags.weight)->group(group);
  add_text(app, "--logits", type, "z [R,V], instead of hidden and weight", flags.logits)->group(group);
  add_text(app, "--targets", type, "y [R], i32 or i64", flags.targets)->group(group);
  app.add_flag("--npy-bf16", flags.npy_bf16, "an .npy of dtype V2 is bfloat16 (ml_dtypes)")->group(group);
}

void add_option_inputs(CLI::App& app, InputFlags& flags) {
  for (std::size_t i = 0; i < option_inputs; ++i) {
    if (option_input_table[i].help != nullptr) add_option_input(app, flags, i);
  }
  app.add_flag("--shift", flags.shift, "targets are token ids; a row's target is the next row's id")
      ->group(options_group);
  add_text(app, "--cu-seqlens", "FILE[:NAME]", "i32 or i64 [S+1], ends of the sequences of --shift, from 0 to R",
           flags.cu_seqlens)
      ->group(options_group);
}

void load_options(const InputFlags& flags, Inputs& inputs, const Maker& maker) {
  std::vector<std::string> const specs = specs_of(flags);
  if (inputs.kind == Kind::logits) {
    for (std::size_t i = 0; i < option_inputs; ++i) {
      if (specs[i].empty() || std::string_view(option_input_table[i].flag).substr(0, 10) != "--teacher-") continue;
      throw UsageError(std::string(option_input_table[i].flag) + ": given with " +
                       (maker ? "--kind logits" : "--logits") +
                       "; a teacher's head needs --hidden and --weight, or give --topk-logprobs");
    }
  }
  if (!flags.cu_seqlens.empty() && !flags.shift) {
    throw UsageError("--cu-seqlens: given without --shift; it says where the sequences of --shift end");
  }
  for (std::size_t i = 0; i < option_inputs; ++i) {
    OptionInput const& row = option_input_table[i];
    if (specs[i].empty() || row.field == nullptr) continue;
    bool const log = row.flag == std::string_view("--topk-logprobs");
    if (log && inputs.options.topk_probs)
      throw UsageError("--topk-logprobs: given with --topk-probs; give one of them");
    inputs.topk_log = inputs.topk_log || log;
    constexpr std::string_view made = "random";
    if (maker && std::string_view(specs[i]).substr(0, made.size()) == made &&
        (specs[i].size() == made.size() || specs[i][made.size()] == ':')) {
      std::int64_t const count =
          specs[i].size() == made.size() ? 0 : parse_integer(row.flag, specs[i].substr(made.size() + 1), 1, any_most);
      auto const array = std::make_shared<Array>(maker(row.flag, count));
      inputs.options.*row.field = array->tensor();
      inputs.owners.push_back(array);
      continue;
    }
    Loaded const loaded = load_one(row.flag, specs[i], row.rank, row.letters, row.of, flags);
    inputs.options.*row.field = loaded.view;
    inputs.owners.push_back(loaded.owner);
  }
}

void shift_targets(const InputFlags& flags, std::int64_t ignore_index, Inputs& inputs) {
  if (!flags.shift) return;
  Sequences sequences{.ignore_index = ignore_index};
  Loaded ends;
  if (!flags.cu_seqlens.empty()) {
    OptionInput const& row = option_input_table[option_inputs - 1];
    ends = load_one(row.flag, flags.cu_seqlens, row.rank, row.letters, row.of, flags);
    sequences.cu_seqlens = ends.view;
  }
  auto const targets = std::make_shared<Array>(DType::i64, std::vector<std::int64_t>{inputs.rows});
  next_token_targets(inputs.y, targets->tensor(), sequences);
  inputs.y = targets->tensor();
  inputs.owners.push_back(targets);
}

Inputs load(const InputFlags& flags, std::int64_t ignore_index) {
  if (!flags.logits.empty() && (!flags.hidden.empty() || !flags.weight.empty())) {
    throw UsageError(std::string("--logits: given with ") + (flags.hidden.empty() ? "--weight" : "--hidden") +
                     "; give --hidden and --weight, or --logits alone");
  }
  if (flags.logits.empty() && flags.hidden.empty() && flags.weight.empty()) {
    throw UsageError("--hidden and --weight, or --logits: missing; the inputs");
  }
  if (flags.logits.empty() && (flags.hidden.empty() || flags.weight.empty())) {
    throw UsageError(std::string(flags.hidden.empty() ? "--hidden" : "--weight") + ": missing beside " +
                     (flags.hidden.empty() ? "--weight" : "--hidden"));
  }
  Inputs inputs;
  inputs.kind = flags.logits.empty() ? Kind::linear : Kind::logits;
  load_options(flags, inputs);
  bool const other_targets = inputs.with_inputs({}).targets != Targets::hard;
  if (flags.targets.empty() && (!other_targets || flags.shift)) {
    throw UsageError("--targets: missing; the class of each row, i32 or i64");
  }
  Loaded y;
  if (!flags.targets.empty()) y = load_one("--targets", flags.targets, 1, "[R]", Of::integers, flags);
  if (flags.logits.empty()) {
    Loaded const x = load_one("--hidden", flags.hidden, 2, "[R,H]", Of::numbers, flags);
    Loaded const w = load_one("--weight", flags.weight, 2, "[V,H]", Of::numbers, flags);
    if (x.view.extent(1) != w.view.extent(1)) {
      throw Failure(where("--weight", flags.weight) + " has " + std::to_string(w.view.extent(1)) + " columns, " +
                    where("--hidden", flags.hidden) + " has " + std::to_string(x.view.extent(1)) +
                    "; must be the same number H");
    }
    if (w.view.extent(0) < 1 || w.view.extent(1) < 1) {
      throw Failure(where("--weight", flags.weight) + " has shape [" + std::to_string(w.view.extent(0)) + ", " +
                    std::to_string(w.view.extent(1)) + "]; V and H must be at least 1");
    }
    if (y.view) check_rows("--hidden", flags.hidden, x.view.extent(0), y, flags);
    inputs.rows = x.view.extent(0);
    inputs.hidden = x.view.extent(1);
    inputs.vocab = w.view.extent(0);
    inputs.x = x.view;
    inputs.w = w.view;
    inputs.y = y.view;
    inputs.owners.insert(inputs.owners.end(), {x.owner, w.owner, y.owner});
  } else {
    Loaded const z = load_one("--logits", flags.logits, 2, "[R,V]", Of::numbers, flags);
    if (z.view.extent(1) < 1) throw Failure(where("--logits", flags.logits) + " has no column; V must be at least 1");
    if (y.view) check_rows("--logits", flags.logits, z.view.extent(0), y, flags);
    inputs.rows = z.view.extent(0);
    inputs.vocab = z.view.extent(1);
    inputs.z = z.view;
    inputs.y = y.view;
    inputs.owners.insert(inputs.owners.end(), {z.owner, y.owner});
  }
  shift_targets(flags, ignore_index, inputs);
  return inputs;
}

Problem Inputs::problem(bool grad_hidden, bool grad_weight, bool grad_logits, bool grad_f32) const {
  bool const gradients = grad_hidden || grad_weight || grad_logits;
  Problem problem = problem_of(arguments(), gradients ? Call::forward_backward : Call::forward);
  problem.topk_log = topk_log;
  auto const gradient = [&](bool wanted, DType input) { return !wanted ? DType::none : grad_f32 ? DType::f32 : input; };
  problem.grad_hidden_dtype = gradient(grad_hidden, x.dtype());
  problem.grad_weight_dtype = gradient(grad_weight, w.dtype());
  problem.grad_logits_dtype = gradient(grad_logits, z.dtype());
  return problem;
}

Arguments Inputs::arguments() const {
  Arguments arguments = options;
  arguments.hidden = x;
  arguments.weight = w;
  arguments.logits = z;
  arguments.targets = y;
  return arguments;
}

Options Inputs::with_inputs(Options given) const {
  if (options.teacher_hidden || options.teacher_weight) {
    given.targets = Targets::teacher;
  } else if (options.topk_ids || options.topk_probs) {
    given.targets = Targets::topk;
  } else if (options.soft_targets) {
    given.targets = Targets::soft;
  }
  given.policy.on = options.old_logprob || options.advantage || options.ref_logprob;
  return given;
}

Inputs Inputs::at_rows(const std::vector<std::int64_t>& chosen) const {
  Inputs out = *this;
  out.rows = static_cast<std::int64_t>(chosen.size());
  auto const gather = [&](ConstTensor& tensor) {
    // A wrong number of rows is the library's to refuse.
    if (!tensor || tensor.extent(0) != rows) return;
    std::vector<std::int64_t> shape = {out.rows};
    if (tensor.rank() == 2) shape.push_back(tensor.extent(1));
    auto const array = std::make_shared<Array>(tensor.dtype(), shape);
    std::size_t const bytes =
        size_of(tensor.dtype()) * (tensor.rank() == 2 ? static_cast<std::size_t>(tensor.extent(1)) : 1);
    for (std::size_t n = 0; n < chosen.size(); ++n) {
      std::memcpy(array->as<std::byte>() + n * bytes,
                  static_cast<const std::byte*>(tensor.data()) + static_cast<std::size_t>(chosen[n]) * bytes, bytes);
    }
    tensor = array->tensor();
    out.owners.push_back(array);
  };
  for (ConstTensor* const each : {&out.x, &out.z, &out.y}) gather(*each);
  for (OptionInput const& row : option_input_table) {
    if (row.field == nullptr || row.letters[1] != 'R') continue;
    if (row.flag == std::string_view("--topk-logprobs")) continue;  // the field of --topk-probs
    gather(out.options.*row.field);
  }
  return out;
}

std::string Inputs::dtype_text() const {
  if (kind == Kind::logits) return name_of(z.dtype());
  std::string const text = name_of(x.dtype());
  return x.dtype() == w.dtype() ? text : text + ", weight " + name_of(w.dtype());
}

}  // namespace logitless::cli
