// The head by Logitless, through its public C++ face: a context, two plans, one workspace, all made once.
//
//   train: forward_backward within the budget, dX in fp32, dW added into the caller's fp32 buffer (tied embedding)
//   evaluate: forward alone with entropy and argmax, rows of the ignored target dropped by the library
// The [R,V] logits never exist. With bf16 operands X and W are copied to bf16 once per call; sums stay fp32.
#include <logitless/logitless.hpp>
#include <nlohmann/json.hpp>

#include "heads.hpp"
#include "memory.hpp"

namespace tiny_lm {
namespace {

namespace ll = logitless;

ll::Problem problem_of(const HeadShape& shape, bool bf16, ll::Call call, std::uint64_t budget) {
  const ll::DType operand = bf16 ? ll::DType::bf16 : ll::DType::f32;
  ll::Problem problem{.call = call,
                      .rows = shape.rows,
                      .hidden = shape.hidden,
                      .vocab = shape.vocab,
                      .hidden_dtype = operand,
                      .weight_dtype = operand,
                      .memory_budget = budget};
  if (call == ll::Call::forward_backward) {
    problem.grad_hidden_dtype = ll::DType::f32;
    problem.grad_weight_dtype = ll::DType::f32;
    problem.accumulate_grad_weight = true;
  }
  problem.entropy = problem.argmax = call == ll::Call::forward;
  return problem;
}

ll::Options options_of(const LossOptions& loss) {
  return {.label_smoothing = loss.smoothing, .softcap = loss.softcap, .z_loss = loss.z_loss};
}

void round_to_bf16(Pool& pool, const float* from, Vector<ll::bfloat16>& to) {
  pool.slabs(static_cast<std::int64_t>(to.size()), 1 << 16, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) to[static_cast<std::size_t>(i)] = ll::bfloat16(from[i]);
  });
}

class LogitlessHead : public Head {
 public:
  LogitlessHead(const HeadShape& shape, bool bf16, Pool& pool, const LogitlessSettings& settings)
      : shape_(shape),
        bf16_(bf16),
        pool_(pool),
        context_({.threads = settings.threads}),
        train_(context_, problem_of(shape, bf16, ll::Call::forward_backward, settings.budget),
               options_of(settings.loss)),
        evaluate_(context_, problem_of(shape, bf16, ll::Call::forward, settings.budget),
                  {.reduction = ll::Reduction::sum,
                   .ignore_index = ignored,
                   .on_empty = ll::OnEmpty::zero,
                   .softcap = settings.loss.softcap}),
        entropy_(static_cast<std::size_t>(shape.rows)) {
    if (bf16) {
      x_.resize(static_cast<std::size_t>(shape.rows * shape.hidden));
      w_.resize(static_cast<std::size_t>(shape.vocab * shape.hidden));
    }
  }

  double train(const float* x, const float* w, const std::int32_t* y, float* dx, float* dw) override {
    ll::Arguments arguments = operands(x, w, y);
    arguments.grad_hidden = ll::Tensor(dx, {shape_.rows, shape_.hidden});
    arguments.grad_weight = ll::Tensor(dw, {shape_.vocab, shape_.hidden});
    return train_.forward_backward(arguments, workspace_).loss;
  }

  Evaluated evaluate(const float* x, const float* w, const std::int32_t* y) override {
    ll::Arguments arguments = operands(x, w, y);
    arguments.row_entropy = ll::Tensor(entropy_.data(), {shape_.rows});
    const ll::Result result = evaluate_.forward(arguments, workspace_);
    double entropy = 0;
    for (const float h : entropy_) entropy += static_cast<double>(h);  // 0 for ignored rows
    return {result.loss, entropy, result.correct};
  }

  std::int64_t extra_bytes() const override {
    return static_cast<std::int64_t>(train_.workspace_bytes() + (x_.size() + w_.size()) * sizeof(ll::bfloat16));
  }
  double product_flops() const override { return plan().at("flops"); }
  PlanSummary summary() const {
    const nlohmann::json plan = this->plan();
    const double rhv = static_cast<double>(shape_.rows * shape_.hidden) * static_cast<double>(shape_.vocab);
    return {plan.at("chunk_rows"), plan.at("kept_share"), plan.at("flops").get<double>() / rhv, plan.at("target")};
  }

 private:
  nlohmann::json plan() const { return nlohmann::json::parse(train_.describe(ll::Format::json)); }
  ll::Arguments operands(const float* x, const float* w, const std::int32_t* y) {
    const ll::Shape x_shape{shape_.rows, shape_.hidden}, w_shape{shape_.vocab, shape_.hidden};
    ll::Arguments arguments;
    arguments.targets = ll::ConstTensor(y, {shape_.rows});
    if (bf16_) {
      round_to_bf16(pool_, x, x_);
      round_to_bf16(pool_, w, w_);
      arguments.hidden = ll::ConstTensor(x_.data(), x_shape);
      arguments.weight = ll::ConstTensor(w_.data(), w_shape);
    } else {
      arguments.hidden = ll::ConstTensor(x, x_shape);
      arguments.weight = ll::ConstTensor(w, w_shape);
    }
    return arguments;
  }

  HeadShape shape_;
  bool bf16_;
  Pool& pool_;
  Vector<ll::bfloat16> x_, w_;
  ll::Context context_;
  ll::Plan train_, evaluate_;
  ll::Workspace workspace_;
  Vector<float> entropy_;
};

}  // namespace

std::unique_ptr<Head> make_logitless_head(const HeadShape& shape, bool bf16, Pool& pool,
                                          const LogitlessSettings& settings) {
  return std::make_unique<LogitlessHead>(shape, bf16, pool, settings);
}

PlanSummary summary_of(const Head& logitless_head) {
  return dynamic_cast<const LogitlessHead&>(logitless_head).summary();
}

ReferenceGradients reference_gradients(const HeadShape& shape, bool bf16, const LossOptions& loss, const float* x,
                                       const float* w, const std::int32_t* y) {
  const auto raised = [&](const float* from, std::int64_t count) {
    std::vector<double> to(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) {
      to[static_cast<std::size_t>(i)] = bf16 ? static_cast<float>(ll::bfloat16(from[i])) : from[i];
    }
    return to;
  };
  const std::vector<double> hidden = raised(x, shape.rows * shape.hidden);
  const std::vector<double> weight = raised(w, shape.vocab * shape.hidden);
  ReferenceGradients out;
  out.dx.resize(hidden.size());
  out.dw.resize(weight.size());
  ll::Context context({.backend = ll::Backend::reference});
  const ll::Shape x_shape{shape.rows, shape.hidden}, w_shape{shape.vocab, shape.hidden};
  const ll::LinearCrossEntropy call{.label_smoothing = loss.smoothing,
                                    .softcap = loss.softcap,
                                    .z_loss = loss.z_loss,
                                    .grad_hidden = ll::Tensor(out.dx.data(), x_shape),
                                    .grad_weight = ll::Tensor(out.dw.data(), w_shape)};
  out.loss = ll::linear_cross_entropy(context, ll::ConstTensor(hidden.data(), x_shape),
                                      ll::ConstTensor(weight.data(), w_shape), ll::ConstTensor(y, {shape.rows}), call)
                 .loss;
  return out;
}

}  // namespace tiny_lm
