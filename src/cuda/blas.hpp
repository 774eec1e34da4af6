// The products, by cuBLASLt: row-major C [m,n] from operands of 16 or 32 bits, summed in fp32, no TF32. The library is
// found at run time, so that one liblogitless loads everywhere; algorithms are chosen when a plan is made and kept by
// shape, strides and alignment (another stride or alignment than the plan's contiguous one is resolved on its first
// use: host work only, so it may happen within a graph's capture).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "contract/problem.hpp"

namespace logitless::cuda {

// Row-major: logits Z [m,n] = A [m,k] B [n,k]^T; hidden dX [m,n] = A [m,k] B [k,n]; weight dW [m,n] = A [k,m]^T B
// [k,n].
enum class Form : std::int32_t { logits, hidden, weight };

struct Product {
  Form form = Form::logits;
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t lda = 0, ldb = 0, ldc = 0;  // elements between rows
  contract::DType operand = contract::DType::f32, out = contract::DType::f32;
  auto operator<=>(const Product&) const = default;
};

// One cuBLASLt handle of a device.
class Blas {
 public:
  // Of the current device. Null with *why where cuBLASLt cannot be loaded.
  static std::unique_ptr<Blas> open(std::string* why);
  ~Blas();
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;
  // Path of the library that was loaded, and its version.
  static std::string description();

  struct Resolved;

 private:
  explicit Blas(void* handle) : handle_(handle) {}
  friend class Products;
  void* handle_;
};

// The products of one plan.
class Products {
 public:
  Products(Blas& blas, std::int64_t workspace_bytes);
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;
  // Chooses the algorithm for operands aligned to 16 bytes. "" or what is wrong.
  std::string resolve(const Product& product) { return find(product, {16, 16, 16}).second; }
  // C = alpha A B + beta C, alpha and beta on the device. Only enqueues. An empty k leaves beta C to the caller.
  std::string launch(const Product& product, const void* a, const void* b, void* c, const float* alpha,
                     const float* beta, void* workspace, void* stream);

 private:
  struct Alignment {
    int a, b, c;
    auto operator<=>(const Alignment&) const = default;
  };
  std::pair<const Blas::Resolved*, std::string> find(const Product& product, Alignment alignment);
  Blas& blas_;
  std::int64_t workspace_bytes_;
  std::mutex lock_;
  std::map<std::pair<Product, Alignment>, std::unique_ptr<Blas::Resolved>> resolved_;
};

}  // namespace logitless::cuda
