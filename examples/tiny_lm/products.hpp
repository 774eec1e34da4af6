// The three matrix products that training needs, by the fastest kernels at hand, split over the pool.
//
// All matrices are row-major fp32. Kernels: Eigen's, compiled for this machine, or OpenBLAS' when it was found at build
// time. Each task multiplies one slab of the longer side of C with one thread; the slabs depend on the shape and the
// number of threads alone, so that the same run gives the same bits. `probe` measures both kernels on the head's shape.
#pragma once

#include <cstdint>
#include <string>

#include "pool.hpp"

namespace tiny_lm {

enum class Kernel { eigen, openblas };

bool has_openblas();
const char* name_of(Kernel kernel);

class Products {
 public:
  Products(Pool& pool, Kernel kernel);

  // A [M,K] · B [N,K] -> C [M,N] = A Bᵀ (+ C)
  void nt(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, bool add = false);
  // A [M,K] · B [K,N] -> C [M,N] = A B (+ C)
  void nn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, bool add = false);
  // A [K,M] · B [K,N] -> C [M,N] = Aᵀ B (+ C)
  void tn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, bool add = false);

  Kernel kernel() const { return kernel_; }
  Pool& pool() { return pool_; }

 private:
  void split(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, bool a_transposed, const float* b,
             bool b_transposed, float* c, bool add);

  Pool& pool_;
  Kernel kernel_;
};

struct Speed {
  double eigen = 0, openblas = 0;  // GFLOP/s over the head's three products; 0: not there
};
// Both kernels on the three products of a head with R rows, H hidden, V classes: best of three.
Speed probe_products(Pool& pool, std::int64_t rows, std::int64_t hidden, std::int64_t vocab);

}  // namespace tiny_lm
