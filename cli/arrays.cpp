// See arrays.hpp.

#include "arrays.hpp"

#include <cstring>
#include <new>

namespace logitless::cli {

Array::Array(DType dtype, std::vector<std::int64_t> shape) : dtype_(dtype), shape_(std::move(shape)), count_(1) {
  std::uint64_t bytes = 0;
  if (!files::bytes_of(shape_, size_of(dtype), &bytes)) throw std::bad_alloc();
  for (std::int64_t const n : shape_) count_ *= n;
  constexpr std::align_val_t alignment{64};
  memory_ =
      std::shared_ptr<void>(::operator new(bytes + 1, alignment), [](void* p) { ::operator delete(p, alignment); });
  std::memset(memory_.get(), 0, bytes);
}

Tensor Array::tensor() const {
  if (!*this) return {};
  Shape shape;
  shape.rank = static_cast<std::int32_t>(shape_.size());
  for (std::size_t i = 0; i < shape_.size(); ++i) shape.value[i] = shape_[i];
  return {data(), dtype_, shape};
}

files::Source Array::source(const std::string& name) const {
  return {name, static_cast<ll_dtype>(dtype_), shape_, data()};
}

namespace {

template <class From, class To>
void convert_as(const void* from, void* to, std::int64_t count) {
  auto const* const in = static_cast<const From*>(from);
  auto* const out = static_cast<To*>(to);
  for (std::int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<From, double> && std::is_same_v<To, double>) {
      out[i] = in[i];
    } else if constexpr (std::is_same_v<To, double>) {
      out[i] = static_cast<double>(static_cast<float>(in[i]));
    } else {
      out[i] = static_cast<To>(static_cast<float>(in[i]));
    }
  }
}

template <class From>
void convert_from(const void* from, void* to, DType to_dtype, std::int64_t count) {
  switch (to_dtype) {
    case DType::f32: return convert_as<From, float>(from, to, count);
    case DType::bf16: return convert_as<From, bfloat16>(from, to, count);
    case DType::f16: return convert_as<From, float16>(from, to, count);
    case DType::f64: return convert_as<From, double>(from, to, count);
    default: throw std::logic_error(std::string("no conversion to ") + name_of(to_dtype));
  }
}

}  // namespace

void convert(const void* from, DType from_dtype, void* to, DType to_dtype, std::int64_t count) {
  switch (from_dtype) {
    case DType::f32: return convert_from<float>(from, to, to_dtype, count);
    case DType::bf16: return convert_from<bfloat16>(from, to, to_dtype, count);
    case DType::f16: return convert_from<float16>(from, to, to_dtype, count);
    case DType::f64: return convert_from<double>(from, to, to_dtype, count);
    default: throw std::logic_error(std::string("no conversion from ") + name_of(from_dtype));
  }
}

}  // namespace logitless::cli
