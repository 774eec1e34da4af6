// Tensors of the C ABI, each checked by itself into a View (dtype, shape, strides, pointer), and the bytes of all of
// them against each other: an output overlaps nothing. Nothing is allocated but for a refusal.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "capi/status.hpp"
#include "plan/operands.hpp"

namespace logitless::capi {

using contract::DType;

// The bytes of a matrix: runs of `width` bytes, `pitch` bytes apart, the lowest beginning at `begin`.
struct Region {
  const char* name = nullptr;
  bool output = false;
  std::uintptr_t begin = 0, end = 0;
  std::uint64_t width = 0, pitch = 0;

  bool one_run() const { return width == end - begin; }
};

class Regions {
 public:
  static constexpr std::size_t kMost = 52;  // ll_arguments has fewer pointers, and a workspace

  void add(const Region& region) { list_[count_++] = region; }
  void add(const char* name, bool output, const void* data, std::size_t bytes);
  // `in_place`: grad_logits is known to be the logits, element for element.
  void check(bool in_place) const;

 private:
  std::array<Region, kMost> list_{};
  std::size_t count_ = 0;
};

// Where every tensor must lie.
struct Place {
  ll_device_type type = LL_DEVICE_CPU;
  int index = 0;
};

enum class Role { input, output };

class Checker {
 public:
  Checker(Regions& regions, Place place = {}) : regions_(regions), place_(place) {}

  View matrix(const char* name, const ll_tensor* tensor, Role role, std::int64_t rows, std::int64_t cols,
              std::initializer_list<DType> allowed);
  // Vectors are columns: the stride is between rows.
  View vector(const char* name, const ll_tensor* tensor, Role role, std::int64_t rows,
              std::initializer_list<DType> allowed);
  // Of any number of rows; of any length.
  View matrix(const char* name, const ll_tensor* tensor, Role role, std::initializer_list<std::int64_t> widths,
              std::initializer_list<DType> allowed);
  View vector(const char* name, const ll_tensor* tensor, Role role, std::initializer_list<DType> allowed);
  View scalar(const char* name, const ll_tensor* tensor, Role role, std::initializer_list<DType> allowed);

 private:
  View column(const char* name, Role role, const ll_tensor& t);
  void finish(const char* name, Role role, const View& view);

  ll_tensor read(const char* name, const ll_tensor* tensor, std::initializer_list<DType> allowed) const;

  Regions& regions_;
  Place place_;
};

}  // namespace logitless::capi
