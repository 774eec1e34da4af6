// Aligned storage of numbers, and the arithmetic of splitting ranges, shared by body, heads and trainer.
//
// Vector<T> is a std::vector whose memory starts on a cache line (64 bytes): what Eigen's and BLAS' kernels like best.
// New elements are zero, so their pages are resident from the start and peaks of memory mean something.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace tiny_lm {

template <class T>
struct Aligned {
  using value_type = T;
  static constexpr std::align_val_t alignment{64};

  Aligned() = default;
  template <class U>
  Aligned(const Aligned<U>&) noexcept {}
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), alignment)); }
  void deallocate(T* p, std::size_t) noexcept { ::operator delete(p, alignment); }
  friend bool operator==(const Aligned&, const Aligned&) { return true; }
};

template <class T>
using Vector = std::vector<T, Aligned<T>>;

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace tiny_lm
