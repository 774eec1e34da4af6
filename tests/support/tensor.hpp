// A strided matrix in guarded memory, for tests: [rows, cols] of any dtype in any layout that a View can describe.
//
// Bytes around the elements and in the gaps between them hold a pattern that must survive every call; elements start
// as 0xff bytes, which is NaN in every floating format, so that whatever is read before it is written shows.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "plan/operands.hpp"
#include "reference/convert.hpp"

namespace logitless::test {

using contract::DType;

enum class Layout {
  contiguous,
  padded,         // gaps between rows; data aligned to its dtype only
  transposed,     // column after column
  column_gap,     // every third element
  reversed_rows,  // last row first in memory
  reversed,       // both strides negative
  shared_row,     // row stride 0: all rows are one
  shared_column,  // column stride 0: all columns are one
};
inline constexpr int kLayouts = 8;

inline const char* name_of(Layout layout) {
  constexpr const char* names[kLayouts] = {"contiguous",    "padded",   "transposed", "column_gap",
                                           "reversed_rows", "reversed", "shared_row", "shared_column"};
  return names[static_cast<int>(layout)];
}

class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::int64_t rows, std::int64_t cols, Layout layout = Layout::contiguous)
      : dtype_(dtype), rows_(rows), cols_(cols) {
    std::int64_t origin = 0;  // element offset of (0,0) from the lowest element
    std::int64_t shift = 0;   // elements of misalignment
    row_stride_ = cols;
    switch (layout) {
      case Layout::contiguous: break;
      case Layout::padded: row_stride_ = cols + 3, shift = 1; break;
      case Layout::transposed: row_stride_ = 1, col_stride_ = rows + 1; break;
      case Layout::column_gap: col_stride_ = 3, row_stride_ = 3 * cols + 1, shift = 3; break;
      case Layout::reversed_rows: row_stride_ = -(cols + 1); break;
      case Layout::reversed: col_stride_ = -1, row_stride_ = -(cols + 2), shift = 1; break;
      case Layout::shared_row: row_stride_ = 0; break;
      case Layout::shared_column: col_stride_ = 0, row_stride_ = 1; break;
    }
    const std::int64_t row_span = rows > 0 ? (rows - 1) * row_stride_ : 0;
    const std::int64_t col_span = cols > 0 ? (cols - 1) * col_stride_ : 0;
    origin = -(std::min<std::int64_t>(row_span, 0) + std::min<std::int64_t>(col_span, 0));
    const std::int64_t span = std::abs(row_span) + std::abs(col_span) + 1;
    const std::int64_t size = contract::size_of(dtype);
    memory_.assign(static_cast<std::size_t>(kGuard * 2 + 64 + (span + shift) * size), kPattern);
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data()) + kGuard;
    const std::uintptr_t aligned = (address + 63) / 64 * 64;
    first_ =
        static_cast<std::int64_t>(aligned - reinterpret_cast<std::uintptr_t>(memory_.data())) + (origin + shift) * size;
    poison();
  }

  explicit operator bool() const { return dtype_ != DType::none; }
  DType dtype() const { return dtype_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }

  View view() const {
    if (dtype_ == DType::none) return {};
    auto* base = const_cast<std::uint8_t*>(memory_.data());
    return View{base + first_, dtype_, rows_, cols_, row_stride_, col_stride_};
  }
  double at(std::int64_t i, std::int64_t j = 0) const {
    return dtype_ == DType::i32 || dtype_ == DType::i64 ? static_cast<double>(reference::load_integer(view(), i))
                                                        : reference::load(view(), i, j);
  }
  void set(std::int64_t i, std::int64_t j, double x) { reference::store(view(), i, j, x); }
  void set_integer(std::int64_t i, std::int64_t value) {
    if (dtype_ == DType::i32) {
      const auto narrow = static_cast<std::int32_t>(value);
      std::memcpy(element(i, 0), &narrow, sizeof narrow);
    } else {
      std::memcpy(element(i, 0), &value, sizeof value);
    }
  }
  void fill(double x) {
    for (std::int64_t i = 0; i < rows_; ++i)
      for (std::int64_t j = 0; j < cols_; ++j) set(i, j, x);
  }
  void poison() {
    for (std::int64_t i = 0; i < rows_; ++i)
      for (std::int64_t j = 0; j < cols_; ++j) std::memset(element(i, j), 0xff, element_size());
  }
  bool all_poison() const {
    for (std::int64_t i = 0; i < rows_; ++i)
      for (std::int64_t j = 0; j < cols_; ++j)
        for (std::size_t b = 0; b < element_size(); ++b)
          if (element(i, j)[b] != 0xff) return false;
    return true;
  }
  // Bytes of row i alone, for comparing bits.
  std::vector<std::uint8_t> row_bytes(std::int64_t i) const {
    std::vector<std::uint8_t> out;
    for (std::int64_t j = 0; j < cols_; ++j) out.insert(out.end(), element(i, j), element(i, j) + element_size());
    return out;
  }
  // Elements alone, in order of rows: equal for equal contents in any layout.
  std::vector<std::uint8_t> bytes() const {
    std::vector<std::uint8_t> out;
    out.reserve(static_cast<std::size_t>(rows_ * cols_) * element_size());
    for (std::int64_t i = 0; i < rows_; ++i)
      for (std::int64_t j = 0; j < cols_; ++j) out.insert(out.end(), element(i, j), element(i, j) + element_size());
    return out;
  }
  const std::vector<std::uint8_t>& memory() const { return memory_; }

  // Whether guards and gaps still hold their pattern.
  bool surroundings_intact() const {
    std::vector<std::uint8_t> is_element(memory_.size(), 0);
    for (std::int64_t i = 0; i < rows_; ++i)
      for (std::int64_t j = 0; j < cols_; ++j)
        std::memset(is_element.data() + (element(i, j) - memory_.data()), 1, element_size());
    for (std::size_t b = 0; b < memory_.size(); ++b)
      if (is_element[b] == 0 && memory_[b] != kPattern) return false;
    return true;
  }

 private:
  static constexpr std::int64_t kGuard = 256;
  static constexpr std::uint8_t kPattern = 0xa5;

  std::size_t element_size() const { return static_cast<std::size_t>(contract::size_of(dtype_)); }
  const std::uint8_t* element(std::int64_t i, std::int64_t j) const {
    return memory_.data() + first_ + (i * row_stride_ + j * col_stride_) * contract::size_of(dtype_);
  }
  std::uint8_t* element(std::int64_t i, std::int64_t j) {
    return memory_.data() + first_ + (i * row_stride_ + j * col_stride_) * contract::size_of(dtype_);
  }

  DType dtype_ = DType::none;
  std::int64_t rows_ = 0, cols_ = 0, row_stride_ = 0, col_stride_ = 1;
  std::int64_t first_ = 0;  // byte offset of element (0,0)
  std::vector<std::uint8_t> memory_;
};

// Workspace: exactly `bytes`, 64-byte aligned, poisoned with NaN, guarded on both sides.
class Workspace {
 public:
  explicit Workspace(std::int64_t bytes) : bytes_(bytes), memory_(static_cast<std::size_t>(bytes + 3 * 64), kPattern) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data()) + 64;
    first_ = static_cast<std::size_t>((address + 63) / 64 * 64 - reinterpret_cast<std::uintptr_t>(memory_.data()));
    std::memset(data(), 0xff, static_cast<std::size_t>(bytes));
  }
  void* data() { return memory_.data() + first_; }
  bool guards_intact() const {
    for (std::size_t b = 0; b < memory_.size(); ++b) {
      const bool inside = b >= first_ && b < first_ + static_cast<std::size_t>(bytes_);
      if (!inside && memory_[b] != kPattern) return false;
    }
    return true;
  }

 private:
  static constexpr std::uint8_t kPattern = 0xa5;
  std::int64_t bytes_;
  std::size_t first_ = 0;
  std::vector<std::uint8_t> memory_;
};

}  // namespace logitless::test
