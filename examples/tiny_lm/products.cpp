// Slabs of the three products by Eigen or OpenBLAS, one thread each, and the probe that compares the two.
#include "products.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <chrono>

#include "memory.hpp"

#ifdef TINY_LM_OPENBLAS
#include <cblas.h>
#endif

namespace tiny_lm {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using View = Eigen::Map<Matrix, 0, Eigen::OuterStride<>>;
using ConstView = Eigen::Map<const Matrix, 0, Eigen::OuterStride<>>;

// op(A) [M,K] · op(B) [K,N] -> C [M,N], with leading dimensions (elements between rows).
struct Slab {
  std::int64_t m, n, k;
  const float* a;
  std::int64_t lda;
  bool a_transposed;
  const float* b;
  std::int64_t ldb;
  bool b_transposed;
  float* c;
  std::int64_t ldc;
  bool add;
};

void by_eigen(const Slab& s) {
  const ConstView a(s.a, s.a_transposed ? s.k : s.m, s.a_transposed ? s.m : s.k, Eigen::OuterStride<>(s.lda));
  const ConstView b(s.b, s.b_transposed ? s.n : s.k, s.b_transposed ? s.k : s.n, Eigen::OuterStride<>(s.ldb));
  View c(s.c, s.m, s.n, Eigen::OuterStride<>(s.ldc));
  if (!s.add) c.setZero();
  if (s.a_transposed) {
    c.noalias() += a.transpose() * b;
  } else if (s.b_transposed) {
    c.noalias() += a * b.transpose();
  } else {
    c.noalias() += a * b;
  }
}

void by_openblas([[maybe_unused]] const Slab& s) {
#ifdef TINY_LM_OPENBLAS
  cblas_sgemm(CblasRowMajor, s.a_transposed ? CblasTrans : CblasNoTrans, s.b_transposed ? CblasTrans : CblasNoTrans,
              static_cast<blasint>(s.m), static_cast<blasint>(s.n), static_cast<blasint>(s.k), 1.0f, s.a,
              static_cast<blasint>(s.lda), s.b, static_cast<blasint>(s.ldb), s.add ? 1.0f : 0.0f, s.c,
              static_cast<blasint>(s.ldc));
#endif
}

}  // namespace

bool has_openblas() {
#ifdef TINY_LM_OPENBLAS
  return true;
#else
  return false;
#endif
}

const char* name_of(Kernel kernel) { return kernel == Kernel::openblas ? "OpenBLAS" : "Eigen"; }

Products::Products(Pool& pool, Kernel kernel) : pool_(pool), kernel_(kernel) {
#ifdef TINY_LM_OPENBLAS
  openblas_set_num_threads(1);  // the pool splits; two layers of threads would fight for the same cores
#endif
}

void Products::split(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, bool a_transposed, const float* b,
                     bool b_transposed, float* c, bool add) {
  const std::int64_t lda = a_transposed ? m : k, ldb = b_transposed ? k : n;
  const bool by_columns = n > m;
  const std::int64_t length = by_columns ? n : m;
  // Every slab packs the other operand anew, so few slabs; two per thread even out a neighbour's load on long sides.
  const std::int64_t pieces = pool_.threads() == 1 ? 1 : pool_.threads() * (length >= 2048 ? 2 : 1);
  const std::int64_t slab = ceil_div(ceil_div(length, pieces), 64) * 64;
  pool_.slabs(length, slab, [&](std::int64_t first, std::int64_t last) {
    Slab s{m, n, k, a, lda, a_transposed, b, ldb, b_transposed, c, n, add};
    if (by_columns) {
      s.n = last - first;
      s.b += b_transposed ? first * ldb : first;
      s.c += first;
    } else {
      s.m = last - first;
      s.a += a_transposed ? first : first * lda;
      s.c += first * n;
    }
    if (kernel_ == Kernel::openblas) {
      by_openblas(s);
    } else {
      by_eigen(s);
    }
  });
}

void Products::nt(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, bool add) {
  split(m, n, k, a, false, b, true, c, add);
}
void Products::nn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, bool add) {
  split(m, n, k, a, false, b, false, c, add);
}
void Products::tn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c, bool add) {
  split(m, n, k, a, true, b, false, c, add);
}

Speed probe_products(Pool& pool, std::int64_t rows, std::int64_t hidden, std::int64_t vocab) {
  const Vector<float> x(static_cast<std::size_t>(rows * hidden), 0.01f);
  const Vector<float> w(static_cast<std::size_t>(vocab * hidden), 0.01f);
  Vector<float> z(static_cast<std::size_t>(rows * vocab)), dx(x.size()), dw(w.size());
  const double flops = 6.0 * static_cast<double>(rows * hidden) * static_cast<double>(vocab);
  double best[2] = {0, 0};
  for (int round = 0; round < 3; ++round) {
    for (const Kernel kernel : {Kernel::eigen, Kernel::openblas}) {
      if (kernel == Kernel::openblas && !has_openblas()) continue;
      Products products(pool, kernel);
      const auto begin = std::chrono::steady_clock::now();
      products.nt(rows, vocab, hidden, x.data(), w.data(), z.data());
      products.nn(rows, hidden, vocab, z.data(), w.data(), dx.data());
      products.tn(vocab, hidden, rows, z.data(), x.data(), dw.data(), true);
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      double& speed = best[kernel == Kernel::openblas ? 1 : 0];
      speed = std::max(speed, flops / seconds.count() * 1e-9);
    }
  }
  return {best[0], best[1]};
}

}  // namespace tiny_lm
