// See arguments.hpp. Three steps: each tensor by itself (dtype, shape, strides, pointer), the set of them against the
// call (what is needed, what has no meaning), and the bytes of every output against everything else.
#include "capi/arguments.hpp"

#include <array>
#include <cstdlib>
#include <initializer_list>

#include "capi/problem.hpp"
#include "capi/structs.hpp"

namespace logitless::capi {
namespace {

using contract::Call;
using contract::DType;
using contract::Kind;
using contract::Problem;

// ---- bytes and their overlap -------------------------------------------------------------------------------------------

// The bytes of a matrix: runs of `width` bytes, `pitch` bytes apart, the lowest beginning at `begin`.
struct Region {
  const char* name = nullptr;
  bool output = false;
  std::uintptr_t begin = 0, end = 0;
  std::uint64_t width = 0, pitch = 0;

  bool one_run() const { return width == end - begin; }
};

// Never misses an overlap. Columns of one array, side by side with one pitch, are known to be apart; other interleaved
// strides are taken to overlap.
bool overlap(const Region& a, const Region& b) {
  if (a.begin == a.end || b.begin == b.end || a.end <= b.begin || b.end <= a.begin) return false;
  if (a.one_run() && b.one_run()) return true;
  if (!a.one_run() && !b.one_run() && a.pitch != b.pitch) return true;
  const std::uint64_t pitch = a.one_run() ? b.pitch : a.pitch;
  if (a.width > pitch || b.width > pitch) return true;
  const std::uint64_t shift =
      a.begin >= b.begin ? (a.begin - b.begin) % pitch : (pitch - (b.begin - a.begin) % pitch) % pitch;
  return shift < b.width || shift + a.width > pitch;
}

class Regions {
 public:
  void add(const Region& region) { list_[count_++] = region; }
  void add(const char* name, bool output, const void* data, std::size_t bytes) {
    Region region;
    region.name = name;
    region.output = output;
    region.begin = reinterpret_cast<std::uintptr_t>(data);
    region.end = region.begin + (data == nullptr ? 0 : bytes);
    region.width = bytes;
    add(region);
  }
  // `in_place`: grad_logits is known to be the logits, element for element.
  void check(bool in_place) const {
    for (std::size_t i = 0; i < count_; ++i) {
      for (std::size_t j = i + 1; j < count_; ++j) {
        const Region& a = list_[i];
        const Region& b = list_[j];
        if (!(a.output || b.output) || !overlap(a, b)) continue;
        const bool logits = std::strcmp(a.name, "logits") == 0 && std::strcmp(b.name, "grad_logits") == 0;
        if (logits && in_place) continue;
        std::string text = std::string(b.name) + ": its bytes from " + address(reinterpret_cast<void*>(b.begin)) +
                           " overlap those of " + a.name + " from " + address(reinterpret_cast<void*>(a.begin));
        refuse(text + (logits ? "; must lie apart, or be the same view with LL_IN_PLACE in the problem's flags"
                              : "; must lie apart"));
      }
    }
  }

 private:
  std::array<Region, 24> list_{};
  std::size_t count_ = 0;
};

// ---- one tensor -----------------------------------------------------------------------------------------------------------

std::string shape_text(std::initializer_list<std::int64_t> shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape) text += (text.size() > 1 ? ", " : "") + number(extent);
  return text + "]";
}

std::string shape_text(const ll_tensor& t) {
  std::string text = "[";
  for (int i = 0; i < t.ndim; ++i) text += (i > 0 ? ", " : "") + number(t.shape[i]);
  return text + "]";
}

enum class Role { input, output };

class Checker {
 public:
  explicit Checker(Regions& regions) : regions_(regions) {}

  View matrix(const char* name, const ll_tensor* tensor, Role role, std::int64_t rows, std::int64_t cols,
              std::initializer_list<DType> allowed) {
    const ll_tensor t = read(name, tensor, allowed);
    if (t.ndim != 2) {
      refuse(std::string(name) + ": rank " + number(std::int64_t{t.ndim}) + "; must be 2, of shape " +
             shape_text({rows, cols}));
    }
    if (t.shape[0] != rows || t.shape[1] != cols) {
      refuse(std::string(name) + ": shape " + shape_text(t) + "; must be " + shape_text({rows, cols}) +
             ", as the plan's problem says");
    }
    View view{t.data, static_cast<DType>(t.dtype), rows, cols, t.stride[0], t.stride[1]};
    // Strides over one element mean nothing; what stands there must not disturb kernels or the rules below.
    if (cols <= 1) view.col_stride = 1;
    if (rows <= 1) view.row_stride = cols;
    if (role == Role::output) check_output_strides(name, view);
    finish(name, role, view);
    return view;
  }

  // Vectors are columns: the stride is between rows.
  View vector(const char* name, const ll_tensor* tensor, Role role, std::int64_t rows,
              std::initializer_list<DType> allowed) {
    const ll_tensor t = read(name, tensor, allowed);
    if (t.ndim != 1) {
      refuse(std::string(name) + ": rank " + number(std::int64_t{t.ndim}) + "; must be 1, of shape " +
             shape_text({rows}));
    }
    if (t.shape[0] != rows) {
      refuse(std::string(name) + ": shape " + shape_text(t) + "; must be " + shape_text({rows}) +
             ", as the plan's problem says");
    }
    View view{t.data, static_cast<DType>(t.dtype), rows, 1, t.stride[0], 1};
    if (rows <= 1) view.row_stride = 1;
    if (role == Role::output && rows > 1 && view.row_stride == 0) {
      refuse(std::string(name) + ": stride 0; must not be 0, or all rows would be written to one place");
    }
    finish(name, role, view);
    return view;
  }

  View scalar(const char* name, const ll_tensor* tensor, std::initializer_list<DType> allowed) {
    const ll_tensor t = read(name, tensor, allowed);
    if (t.ndim > 1 || (t.ndim == 1 && t.shape[0] != 1)) {
      refuse(std::string(name) + ": shape " + shape_text(t) + "; must be [] or [1]");
    }
    const View view{t.data, static_cast<DType>(t.dtype), 1, 1, 1, 1};
    finish(name, Role::output, view);
    return view;
  }

 private:
  static ll_tensor read(const char* name, const ll_tensor* tensor, std::initializer_list<DType> allowed) {
    const ll_tensor t = read_struct(tensor, name, "ll_tensor", ll_tensor{});
    if (t.device_type != LL_DEVICE_CPU) {
      refuse(std::string(name) + ": device_type " + number(std::int64_t{t.device_type}) +
             "; must be LL_DEVICE_CPU (1) on this backend");
    }
    if (t.ndim < 0 || t.ndim > LL_MAX_NDIM) {
      refuse(std::string(name) + ": ndim " + number(std::int64_t{t.ndim}) + "; must be 0 to " +
             number(std::int64_t{LL_MAX_NDIM}));
    }
    for (const DType each : allowed) {
      if (t.dtype == static_cast<ll_dtype>(each)) return t;
    }
    std::string text = std::string(name) + ": dtype " + name_of_dtype(t.dtype);
    if (t.dtype < LL_NONE || t.dtype > LL_I64) text += " (" + number(std::int64_t{t.dtype}) + ")";
    text += "; must be ";
    for (const DType* each = allowed.begin(); each != allowed.end(); ++each) {
      text += (each == allowed.begin() ? "" : " or ") + std::string(contract::name_of(*each));
    }
    refuse(text);
  }

  static void check_output_strides(const char* name, const View& view) {
    if (view.cols > 1 && view.col_stride != 1) {
      refuse(std::string(name) + ": column stride " + number(view.col_stride) + "; an output's must be 1");
    }
    if (view.rows > 1 && view.row_stride > -view.cols && view.row_stride < view.cols) {
      refuse(std::string(name) + ": row stride " + number(view.row_stride) + "; must be at least " + number(view.cols) +
             ", or rows would overlap");
    }
  }

  void finish(const char* name, Role role, const View& view) {
    const bool empty = view.rows == 0 || view.cols == 0;
    if (empty) return;
    const std::int64_t element = contract::size_of(view.dtype);
    if (view.data == nullptr) {
      refuse(std::string(name) + ": data is null; must point at " + shape_text({view.rows, view.cols}) + " " +
             contract::name_of(view.dtype));
    }
    if (reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(element) != 0) {
      refuse(std::string(name) + ": data at " + address(view.data) + "; must be aligned to its dtype's " +
             number(element) + " bytes");
    }
    // Bytes from the first element to the lowest and the highest one.
    std::int64_t low = 0, high = 0;
    bool fits = true;
    for (const auto& [extent, stride] :
         {std::pair{view.rows, view.row_stride}, std::pair{view.cols, view.col_stride}}) {
      std::int64_t reach = 0;
      fits = fits && !__builtin_mul_overflow(extent - 1, stride, &reach) &&
             !__builtin_mul_overflow(reach, element, &reach) &&
             !__builtin_add_overflow(reach < 0 ? low : high, reach, reach < 0 ? &low : &high);
    }
    Region region;
    const auto data = reinterpret_cast<std::uintptr_t>(view.data);
    fits = fits && !__builtin_add_overflow(data, low, &region.begin) &&
           !__builtin_add_overflow(data, high + element, &region.end);
    if (!fits) {
      refuse(std::string(name) + ": strides " + shape_text({view.row_stride, view.col_stride}) + " over shape " +
             shape_text({view.rows, view.cols}) + " leave the address space; must stay within 64 bits");
    }
    region.name = name;
    region.output = role == Role::output;
    // Runs only where rows have no holes; else the whole span counts, as it does when rows touch.
    region.width = static_cast<std::uint64_t>(view.cols * element);
    region.pitch = static_cast<std::uint64_t>(std::llabs(view.row_stride)) * static_cast<std::uint64_t>(element);
    if (view.col_stride != 1 || region.pitch <= region.width) region.width = region.end - region.begin;
    regions_.add(region);
  }

  Regions& regions_;
};

// ---- the set -----------------------------------------------------------------------------------------------------------

void need(const char* name, const void* pointer, const char* because) {
  if (pointer == nullptr) refuse(std::string(name) + ": null; " + because);
}

void forbid(const char* name, const void* pointer, const char* because) {
  if (pointer != nullptr) refuse(std::string(name) + ": given; " + because + ": must be null");
}

// A gradient is given exactly when the plan computes it.
void match_gradient(const char* name, const ll_tensor* tensor, DType planned) {
  if (planned == DType::none && tensor != nullptr) {
    refuse(std::string(name) + ": given; the plan was made with " + name +
           "_dtype LL_NONE: must be null, or make a plan "
           "that computes it");
  }
  if (planned != DType::none && tensor == nullptr) {
    refuse(std::string(name) + ": null; the plan computes it: must be a tensor of " + contract::name_of(planned));
  }
}

void check_presence(const ll_arguments& a, const Problem& p) {
  if (p.kind == Kind::linear) {
    need("hidden", a.hidden, "a problem of kind linear needs it");
    need("weight", a.weight, "a problem of kind linear needs it");
    forbid("logits", a.logits, "a problem of kind linear has none");
  } else {
    need("logits", a.logits, "a problem of kind logits needs it");
    forbid("hidden", a.hidden, "a problem of kind logits has none");
    forbid("weight", a.weight, "a problem of kind logits has none");
  }
  need("targets", a.targets, "every call needs the targets");
  match_gradient("grad_hidden", a.grad_hidden, p.dx);
  match_gradient("grad_weight", a.grad_weight, p.dw);
  match_gradient("grad_logits", a.grad_logits, p.dz);
  if (p.call == Call::backward) {
    forbid("loss", a.loss, "backward does not compute it");
    forbid("row_loss", a.row_loss, "backward does not compute it");
    forbid("row_lse", a.row_lse, "backward does not compute it");
    forbid("row_logprob", a.row_logprob, "backward does not compute it");
    if (p.kind == Kind::linear) {
      need("stats", a.stats, "backward needs what forward wrote there");
      forbid("lse", a.lse, "only backward of kind logits takes it");
    } else if (a.stats == nullptr) {
      need("lse", a.lse, "backward of kind logits needs stats or lse");
    } else {
      forbid("lse", a.lse, "stats says the same more exactly");
    }
  } else {
    forbid("lse", a.lse, "only backward of kind logits takes it");
  }
  if (p.call == Call::forward) forbid("grad_row_loss", a.grad_row_loss, "forward computes no gradient");
  if (p.loss.reduction == contract::Reduction::none) {
    forbid("loss", a.loss, "reduction LL_PER_ROW has no reduced loss, row_loss is the result");
  }
}

ll_arguments default_arguments() {
  ll_arguments arguments;
  ll_arguments_init(&arguments);
  return arguments;
}

bool same_view(const View& a, const View& b) {
  return a.data == b.data && a.dtype == b.dtype && a.row_stride == b.row_stride && a.col_stride == b.col_stride;
}

}  // namespace

CheckedArguments checked_arguments(const ll_arguments* arguments, const Problem& p, const void* workspace,
                                   std::size_t workspace_bytes) {
  const ll_arguments a = read_struct(arguments, "arguments", "ll_arguments", default_arguments());
  check_presence(a, p);

  Regions regions;
  Checker check(regions);
  CheckedArguments out;
  Operands& o = out.operands;
  // Inputs first: the messages about overlap then name the output before the input.
  if (a.hidden != nullptr) o.x = check.matrix("hidden", a.hidden, Role::input, p.rows, p.hidden, {p.x});
  if (a.weight != nullptr) o.w = check.matrix("weight", a.weight, Role::input, p.vocab, p.hidden, {p.w});
  if (a.logits != nullptr) o.z = check.matrix("logits", a.logits, Role::input, p.rows, p.vocab, {p.z});
  o.targets = check.vector("targets", a.targets, Role::input, p.rows, {DType::i64, DType::i32});
  const bool backward = p.call == Call::backward;
  if (a.stats != nullptr) {
    o.stats = check.matrix("stats", a.stats, backward ? Role::input : Role::output, p.rows, 4, {DType::f32});
  }
  if (a.lse != nullptr) o.lse = check.vector("lse", a.lse, Role::input, p.rows, {DType::f32});
  if (a.grad_row_loss != nullptr) {
    o.grad_row_loss = check.vector("grad_row_loss", a.grad_row_loss, Role::input, p.rows, {DType::f32});
  }
  if (a.loss != nullptr) out.loss = check.scalar("loss", a.loss, {DType::f32, DType::f64});
  if (a.row_loss != nullptr) o.row_loss = check.vector("row_loss", a.row_loss, Role::output, p.rows, {DType::f32});
  if (a.row_lse != nullptr) o.row_lse = check.vector("row_lse", a.row_lse, Role::output, p.rows, {DType::f32});
  if (a.row_logprob != nullptr) {
    o.row_logprob = check.vector("row_logprob", a.row_logprob, Role::output, p.rows, {DType::f32});
  }
  if (a.grad_hidden != nullptr) {
    o.dx = check.matrix("grad_hidden", a.grad_hidden, Role::output, p.rows, p.hidden, {p.dx});
  }
  if (a.grad_weight != nullptr) {
    o.dw = check.matrix("grad_weight", a.grad_weight, Role::output, p.vocab, p.hidden, {p.dw});
    // A rule of the problem, not of the setting that the planner happened to take: it must not depend on the budget.
    if (p.dw_contiguous && o.dw.row_stride != p.hidden) {
      refuse("grad_weight: row stride " + number(o.dw.row_stride) + "; must be " + number(p.hidden) +
             " (rows adjacent), or set LL_GRAD_WEIGHT_STRIDED in the problem's flags");
    }
  }
  if (a.grad_logits != nullptr) {
    o.dz = check.matrix("grad_logits", a.grad_logits, Role::output, p.rows, p.vocab, {p.dz});
  }
  o.grad_loss = a.grad_loss;
  out.kept_rows = a.kept_rows;
  out.bad_rows = a.bad_rows;
  regions.add("kept_rows", true, a.kept_rows, sizeof *a.kept_rows);
  regions.add("bad_rows", true, a.bad_rows, sizeof *a.bad_rows);
  regions.add("workspace", true, workspace, workspace_bytes);
  regions.check(p.in_place && same_view(o.z, o.dz));
  return out;
}

}  // namespace logitless::capi

void ll_arguments_init(ll_arguments* arguments) noexcept {
  if (arguments == nullptr) return;
  *arguments = ll_arguments{};
  arguments->size = sizeof(ll_arguments);
  arguments->grad_loss = 1.0;
}
