// See views.hpp.
#include "capi/views.hpp"

#include <cstdlib>
#include <utility>

#include "capi/problem.hpp"
#include "capi/structs.hpp"

namespace logitless::capi {
namespace {

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

void check_output_strides(const char* name, const View& view) {
  if (view.cols > 1 && view.col_stride != 1) {
    refuse(std::string(name) + ": column stride " + number(view.col_stride) + "; an output's must be 1");
  }
  if (view.rows > 1 && view.row_stride > -view.cols && view.row_stride < view.cols) {
    refuse(std::string(name) + ": row stride " + number(view.row_stride) + "; must be at least " + number(view.cols) +
           ", or rows would overlap");
  }
}

}  // namespace

void Regions::add(const char* name, bool output, const void* data, std::size_t bytes) {
  Region region;
  region.name = name;
  region.output = output;
  region.begin = reinterpret_cast<std::uintptr_t>(data);
  region.end = region.begin + (data == nullptr ? 0 : bytes);
  region.width = bytes;
  add(region);
}

void Regions::check(bool in_place) const {
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

ll_tensor Checker::read(const char* name, const ll_tensor* tensor, std::initializer_list<DType> allowed) const {
  const ll_tensor t = read_struct(tensor, name, "ll_tensor", ll_tensor{});
  if (t.device_type != place_.type) {
    refuse(std::string(name) + ": device_type " + number(std::int64_t{t.device_type}) + "; must be " +
           (place_.type == LL_DEVICE_CPU ? "LL_DEVICE_CPU (1)" : "LL_DEVICE_CUDA (2)") + " on this backend");
  }
  if (place_.type == LL_DEVICE_CUDA && t.device_id != place_.index) {
    refuse(std::string(name) + ": device_id " + number(std::int64_t{t.device_id}) + "; must be " +
           number(std::int64_t{place_.index}) + ", the context's device");
  }
  if (t.ndim < 0 || t.ndim > LL_MAX_NDIM) {
    refuse(std::string(name) + ": ndim " + number(std::int64_t{t.ndim}) + "; must be 0 to " +
           number(std::int64_t{LL_MAX_NDIM}));
  }
  for (const DType each : allowed) {
    if (t.dtype == static_cast<ll_dtype>(each)) return t;
  }
  std::string text = std::string(name) + ": dtype " + name_of_dtype(t.dtype);
  if (t.dtype < LL_NONE || t.dtype > LL_U8) text += " (" + number(std::int64_t{t.dtype}) + ")";
  text += "; must be ";
  for (const DType* each = allowed.begin(); each != allowed.end(); ++each) {
    text += (each == allowed.begin() ? "" : " or ") + std::string(contract::name_of(*each));
  }
  refuse(text);
}

View Checker::matrix(const char* name, const ll_tensor* tensor, Role role, std::int64_t rows, std::int64_t cols,
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

// Of whatever shape its rank allows: the first of several that must be alike.
View Checker::matrix(const char* name, const ll_tensor* tensor, Role role, std::initializer_list<std::int64_t> widths,
                     std::initializer_list<DType> allowed) {
  const ll_tensor t = read(name, tensor, allowed);
  bool known = false;
  for (const std::int64_t width : widths) known = known || (t.ndim == 2 && t.shape[0] >= 0 && t.shape[1] == width);
  if (!known) {
    std::string text = std::string(name) + ": shape " + shape_text(t) + "; must be ";
    for (const std::int64_t* each = widths.begin(); each != widths.end(); ++each) {
      text += (each == widths.begin() ? "[R, " : " or [R, ") + number(*each) + "]";
    }
    refuse(text);
  }
  return matrix(name, tensor, role, t.shape[0], t.shape[1], allowed);
}

View Checker::vector(const char* name, const ll_tensor* tensor, Role role, std::int64_t rows,
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
  return column(name, role, t);
}

View Checker::vector(const char* name, const ll_tensor* tensor, Role role, std::initializer_list<DType> allowed) {
  const ll_tensor t = read(name, tensor, allowed);
  if (t.ndim != 1) refuse(std::string(name) + ": rank " + number(std::int64_t{t.ndim}) + "; must be 1");
  if (t.shape[0] < 0) refuse(std::string(name) + ": shape " + shape_text(t) + "; must be at least [0]");
  return column(name, role, t);
}

View Checker::column(const char* name, Role role, const ll_tensor& t) {
  View view{t.data, static_cast<DType>(t.dtype), t.shape[0], 1, t.stride[0], 1};
  if (view.rows <= 1) view.row_stride = 1;
  if (role == Role::output && view.rows > 1 && view.row_stride == 0) {
    refuse(std::string(name) + ": stride 0; must not be 0, or all rows would be written to one place");
  }
  finish(name, role, view);
  return view;
}

View Checker::scalar(const char* name, const ll_tensor* tensor, Role role, std::initializer_list<DType> allowed) {
  const ll_tensor t = read(name, tensor, allowed);
  if (t.ndim > 1 || (t.ndim == 1 && t.shape[0] != 1)) {
    refuse(std::string(name) + ": shape " + shape_text(t) + "; must be [] or [1]");
  }
  const View view{t.data, static_cast<DType>(t.dtype), 1, 1, 1, 1};
  finish(name, role, view);
  return view;
}

void Checker::finish(const char* name, Role role, const View& view) {
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
  for (const auto& [extent, stride] : {std::pair{view.rows, view.row_stride}, std::pair{view.cols, view.col_stride}}) {
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

}  // namespace logitless::capi
