// The dense baseline: fp32 logits in full, and softmax, log and NLL as three kernels, each with its backward kernel.
//
//   z = X Wᵀ        p = softmax(z)      l = log p             loss = -mean l[y]
//   dl = -1/R at y, 0 elsewhere         dp = dl / p           dz = p (dp - sum_j p dp)       dX = dz W, dW += dzᵀ X
// Three [R,V] arrays live at once: z (later dz), p, l (later dl, then dp); a framework that reuses nothing holds more.
// 6RHV flops in three products; the kernels between them read and write 11 RV numbers. Rows are shared by the pool.
#include <Eigen/Core>
#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>

#include "heads.hpp"
#include "memory.hpp"

namespace tiny_lm {
namespace {

using Row = Eigen::Map<Eigen::ArrayXf>;

float rounded_to_bf16(float value) {
  const auto x = std::bit_cast<std::uint32_t>(value);
  return std::bit_cast<float>((x + 0x7fffu + (x >> 16 & 1u)) & 0xffff0000u);
}

class DenseHead : public Head {
 public:
  DenseHead(const HeadShape& shape, bool bf16, const LossOptions& loss, Products& products)
      : shape_(shape), bf16_(bf16), loss_(loss), products_(products), pool_(products.pool()) {
    const auto rv = static_cast<std::size_t>(shape.rows * shape.vocab);
    z_.resize(rv);
    p_.resize(rv);
    l_.resize(rv);
    if (bf16) {
      x_.resize(static_cast<std::size_t>(shape.rows * shape.hidden));
      w_.resize(static_cast<std::size_t>(shape.vocab * shape.hidden));
    }
  }

  double train(const float* x, const float* w, const std::int32_t* y, float* dx, float* dw) override {
    const auto [r, h, v] = shape_;
    product_seconds_ = 0;
    round_operands(x, w);
    timed([&] { products_.nt(r, v, h, x, w, z_.data()); });
    const double sum = forward_kernels(y, loss_).loss;
    nll_backward(y, 1.0f / static_cast<float>(r));
    log_backward();
    softmax_backward(1.0f / static_cast<float>(r));
    timed([&] { products_.nn(r, h, v, z_.data(), w, dx); });
    timed([&] { products_.tn(v, h, r, z_.data(), x, dw, true); });
    return sum / static_cast<double>(r);
  }

  Evaluated evaluate(const float* x, const float* w, const std::int32_t* y) override {
    round_operands(x, w);
    products_.nt(shape_.rows, shape_.vocab, shape_.hidden, x, w, z_.data());
    Evaluated out = forward_kernels(y, {.softcap = loss_.softcap});
    std::vector<double> entropy(static_cast<std::size_t>(shape_.rows));
    std::vector<char> correct(entropy.size());
    each_row([&](std::int64_t i) {
      if (y[i] == ignored) return;
      entropy[static_cast<std::size_t>(i)] = static_cast<double>(-(row(p_, i) * row(l_, i)).sum());
      Eigen::Index top = 0;
      row(z_, i).maxCoeff(&top);
      correct[static_cast<std::size_t>(i)] = top == y[i] ? 1 : 0;
    });
    for (std::size_t i = 0; i < entropy.size(); ++i) {
      out.entropy += entropy[i];
      out.correct += correct[i];
    }
    return out;
  }

  std::int64_t extra_bytes() const override {
    return static_cast<std::int64_t>((z_.size() + p_.size() + l_.size() + x_.size() + w_.size()) * sizeof(float));
  }
  double product_seconds() const override { return product_seconds_; }
  double product_flops() const override {
    return 6.0 * static_cast<double>(shape_.rows * shape_.hidden) * static_cast<double>(shape_.vocab);
  }

 private:
  template <class Function>
  void timed(Function function) {
    const auto begin = std::chrono::steady_clock::now();
    function();
    product_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  // The products stay fp32: Eigen has none in bf16. What the option means for the numbers is kept.
  void round_operands(const float*& x, const float*& w) {
    if (!bf16_) return;
    const auto copy = [&](const float* from, Vector<float>& to) {
      pool_.slabs(static_cast<std::int64_t>(to.size()), 1 << 16, [&](std::int64_t first, std::int64_t last) {
        std::transform(from + first, from + last, to.begin() + first, rounded_to_bf16);
      });
    };
    copy(x, x_);
    copy(w, w_);
    x = x_.data();
    w = w_.data();
  }

  template <class Kernel>
  void each_row(Kernel kernel) {
    pool_.slabs(shape_.rows, 8, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t i = first; i < last; ++i) kernel(i);
    });
  }
  Row row(Vector<float>& array, std::int64_t i) { return Row(&array[i * shape_.vocab], shape_.vocab); }

  Evaluated forward_kernels(const std::int32_t* y, const LossOptions& loss) {
    each_row([&](std::int64_t i) {  // softmax, of capped logits
      Row z = row(z_, i), p = row(p_, i);
      if (loss.softcap > 0) z = static_cast<float>(loss.softcap) * (z / static_cast<float>(loss.softcap)).tanh();
      p = (z - z.maxCoeff()).exp();
      p *= 1.0f / p.sum();
    });
    each_row([&](std::int64_t i) { row(l_, i) = row(p_, i).log(); });  // log
    Evaluated out;                                                     // NLL, smoothing, z-loss
    for (std::int64_t i = 0; i < shape_.rows; ++i) {
      if (y[i] == ignored) continue;
      const auto nll = -static_cast<double>(l_[i * shape_.vocab + y[i]]);
      out.loss += (1 - loss.smoothing) * nll;
      if (loss.smoothing > 0)
        out.loss -= loss.smoothing * row(l_, i).cast<double>().sum() / static_cast<double>(shape_.vocab);
      const double lse = lse_of(i, y[i]);
      out.loss += loss.z_loss * lse * lse;
    }
    return out;
  }
  double lse_of(std::int64_t i, std::int32_t y) {
    const std::int64_t at = i * shape_.vocab + y;
    return static_cast<double>(z_[at]) - static_cast<double>(l_[at]);
  }

  void nll_backward(const std::int32_t* y, float share) {
    lse_.resize(static_cast<std::size_t>(shape_.rows));
    const auto smoothing = static_cast<float>(loss_.smoothing);
    each_row([&](std::int64_t i) {
      lse_[static_cast<std::size_t>(i)] = lse_of(i, y[i]);
      Row dl = row(l_, i);
      dl.setConstant(-share * smoothing / static_cast<float>(shape_.vocab));
      dl[y[i]] -= share * (1.0f - smoothing);
    });
  }
  void log_backward() {
    each_row([&](std::int64_t i) {
      Row dp = row(l_, i);
      dp /= row(p_, i);
    });
  }
  void softmax_backward(float share) {
    const auto cap = static_cast<float>(loss_.softcap);
    each_row([&](std::int64_t i) {
      Row p = row(p_, i), dp = row(l_, i), dz = row(z_, i);
      const float along = (p * dp).sum();
      // d lambda lse^2 / dz = 2 lambda lse p; the capped logits give the cap's slope before dz takes their place.
      const float by_lse = share * 2.0f * static_cast<float>(loss_.z_loss * lse_[static_cast<std::size_t>(i)]);
      if (cap > 0)
        dz = p * (dp - along + by_lse) * (1.0f - (dz / cap).square());
      else
        dz = p * (dp - along + by_lse);
    });
  }

  HeadShape shape_;
  bool bf16_;
  LossOptions loss_;
  Products& products_;
  Pool& pool_;
  Vector<float> z_, p_, l_, x_, w_;
  std::vector<double> lse_;
  double product_seconds_ = 0;
};

}  // namespace

std::unique_ptr<Head> make_dense_head(const HeadShape& shape, bool bf16, const LossOptions& loss, Products& products) {
  return std::make_unique<DenseHead>(shape, bf16, loss, products);
}

}  // namespace tiny_lm
