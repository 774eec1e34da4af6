// Tensors that the commands own, and conversion between dtypes. Rounding is that of the public bfloat16 and float16;
// nothing here computes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "files/files.hpp"
#include "logitless/logitless.hpp"

namespace logitless::cli {

// Row-major, aligned to 64 bytes, zero at first (so that its pages are there before anything is timed).
class Array {
 public:
  Array() = default;
  Array(DType dtype, std::vector<std::int64_t> shape);

  explicit operator bool() const { return dtype_ != DType::none; }
  DType dtype() const { return dtype_; }
  void* data() const { return memory_.get(); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data());
  }
  std::int64_t count() const { return count_; }
  Tensor tensor() const;                                // "not wanted" when empty
  files::Source source(const std::string& name) const;  // for writing

 private:
  DType dtype_ = DType::none;
  std::vector<std::int64_t> shape_;
  std::int64_t count_ = 0;
  std::shared_ptr<void> memory_;
};

// `count` elements from one dtype to another (f32, bf16, f16, f64; to 16 bits by way of f32).
void convert(const void* from, DType from_dtype, void* to, DType to_dtype, std::int64_t count);

// A target of either integer dtype.
inline std::int64_t target_at(const ConstTensor& targets, std::int64_t row) {
  return targets.dtype() == DType::i32 ? static_cast<const std::int32_t*>(targets.data())[row]
                                       : static_cast<const std::int64_t*>(targets.data())[row];
}

}  // namespace logitless::cli
