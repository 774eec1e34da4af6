// See inputs.hpp.

#include "inputs.hpp"

#include <CLI/CLI.hpp>

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

// A tensor of this rank with numbers, or integers for targets.
Loaded load_one(const std::string& flag, const std::string& spec, std::size_t rank, const char* letters, bool integers,
                const InputFlags& flags) {
  files::Tensor tensor;
  try {
    tensor = files::read(spec, flags.npy_bf16);
  } catch (const files::Error& error) {
    throw Failure(flag + ": " + error.what());
  }
  auto const& shape = tensor.info.shape;
  auto dtype = static_cast<DType>(tensor.info.dtype);
  bool const is_integer = dtype == DType::i32 || dtype == DType::i64;
  if (is_integer != integers) {
    throw Failure(where(flag, spec) + " is " + name_of(dtype) + "; must be " +
                  (integers ? "i32 or i64" : "f32, bf16, f16 or f64"));
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
  if (!integers && flags.dtype != DType::none && flags.dtype != dtype) {
    Array const converted(flags.dtype, shape);
    convert(data, dtype, converted.data(), flags.dtype, count);
    dtype = flags.dtype;
    data = converted.data();
    loaded.owner = std::make_shared<Array>(converted);
  }
  loaded.view = ConstTensor(data, dtype, rank == 2 ? Shape(shape[0], shape[1]) : Shape(shape[0]));
  return loaded;
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
  for (std::string const& spec : {hidden, weight, logits, targets}) {
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

Inputs load(const InputFlags& flags) {
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
  if (flags.targets.empty()) throw UsageError("--targets: missing; the class of each row, i32 or i64");

  Inputs inputs;
  if (flags.logits.empty()) {
    Loaded const x = load_one("--hidden", flags.hidden, 2, "[R,H]", false, flags);
    Loaded const w = load_one("--weight", flags.weight, 2, "[V,H]", false, flags);
    Loaded const y = load_one("--targets", flags.targets, 1, "[R]", true, flags);
    if (x.view.extent(1) != w.view.extent(1)) {
      throw Failure(where("--weight", flags.weight) + " has " + std::to_string(w.view.extent(1)) + " columns, " +
                    where("--hidden", flags.hidden) + " has " + std::to_string(x.view.extent(1)) +
                    "; must be the same number H");
    }
    if (w.view.extent(0) < 1 || w.view.extent(1) < 1) {
      throw Failure(where("--weight", flags.weight) + " has shape [" + std::to_string(w.view.extent(0)) + ", " +
                    std::to_string(w.view.extent(1)) + "]; V and H must be at least 1");
    }
    check_rows("--hidden", flags.hidden, x.view.extent(0), y, flags);
    inputs.rows = x.view.extent(0);
    inputs.hidden = x.view.extent(1);
    inputs.vocab = w.view.extent(0);
    inputs.x = x.view;
    inputs.w = w.view;
    inputs.y = y.view;
    inputs.owners = {x.owner, w.owner, y.owner};
  } else {
    Loaded const z = load_one("--logits", flags.logits, 2, "[R,V]", false, flags);
    Loaded const y = load_one("--targets", flags.targets, 1, "[R]", true, flags);
    if (z.view.extent(1) < 1) throw Failure(where("--logits", flags.logits) + " has no column; V must be at least 1");
    check_rows("--logits", flags.logits, z.view.extent(0), y, flags);
    inputs.kind = Kind::logits;
    inputs.rows = z.view.extent(0);
    inputs.vocab = z.view.extent(1);
    inputs.z = z.view;
    inputs.y = y.view;
    inputs.owners = {z.owner, y.owner};
  }
  return inputs;
}

Problem Inputs::problem(bool grad_hidden, bool grad_weight, bool grad_logits, bool grad_f32) const {
  Problem problem;
  problem.kind = kind;
  problem.call = grad_hidden || grad_weight || grad_logits ? Call::forward_backward : Call::forward;
  problem.rows = rows;
  problem.hidden = hidden;
  problem.vocab = vocab;
  problem.hidden_dtype = x.dtype();
  problem.weight_dtype = w.dtype();
  problem.logits_dtype = z.dtype();
  auto const gradient = [&](bool wanted, DType input) { return !wanted ? DType::none : grad_f32 ? DType::f32 : input; };
  problem.grad_hidden_dtype = gradient(grad_hidden, x.dtype());
  problem.grad_weight_dtype = gradient(grad_weight, w.dtype());
  problem.grad_logits_dtype = gradient(grad_logits, z.dtype());
  return problem;
}

Arguments Inputs::arguments() const {
  Arguments arguments;
  arguments.hidden = x;
  arguments.weight = w;
  arguments.logits = z;
  arguments.targets = y;
  return arguments;
}

std::string Inputs::dtype_text() const {
  if (kind == Kind::logits) return name_of(z.dtype());
  std::string const text = name_of(x.dtype());
  return x.dtype() == w.dtype() ? text : text + ", weight " + name_of(w.dtype());
}

}  // namespace logitless::cli
