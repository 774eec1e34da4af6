// Suite error: how far the gradients of X [R,H] · W [V,H] are from double arithmetic on the same inputs, ours and the
// plain low-precision pipeline's (logits, D, dX and dW written in the operands' dtype, sums in fp32), and their ratio.
//
// R is at most 256, because the exact side needs all R·V logits in double (2RHV flops). Compared are 16 rows of dX and
// of dW 16 rows that are targets and 16 that are not, as sqrt(sum of squared errors / sum of squares).
#include <algorithm>
#include <cmath>

#include "bench/dense.hpp"
#include "bench/dense_kernels.hpp"
#include "bench/session.hpp"

namespace logitless::bench {

namespace {

constexpr std::int64_t most_rows = 256;
constexpr std::size_t sampled = 16;

std::vector<double> to_double(const Array& array, DType dtype, std::int64_t first, std::int64_t count) {
  std::vector<double> out(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    double& x = out[static_cast<std::size_t>(i)];
    if (dtype == DType::f32) x = array.as<float>()[first + i];
    if (dtype == DType::bf16) x = array.as<bfloat16>()[first + i];
    if (dtype == DType::f16) x = array.as<float16>()[first + i];
  }
  return out;
}

// Sums of squares over what was compared.
struct Distance {
  double error = 0, norm = 0;
  void add(const std::vector<double>& exact, const std::vector<double>& got) {
    for (std::size_t i = 0; i < exact.size(); ++i) {
      error += (got[i] - exact[i]) * (got[i] - exact[i]);
      norm += exact[i] * exact[i];
    }
  }
  double relative() const { return norm > 0 ? std::sqrt(error / norm) : 0.0; }
};

// At most `sampled` of `all`, evenly spread.
std::vector<std::int64_t> spread(const std::vector<std::int64_t>& all) {
  std::vector<std::int64_t> some;
  const std::size_t count = std::min(sampled, all.size());
  for (std::size_t i = 0; i < count; ++i) some.push_back(all[i * all.size() / count]);
  return some;
}

}  // namespace

void run_error(Session& s, DType dtype) {
  DataRequest wanted = s.data_request(dtype);
  wanted.rows = std::min(wanted.rows, most_rows);
  const std::int64_t r = wanted.rows, h = wanted.hidden, v = wanted.vocab;
  const LinearData data = make_linear(s.team, wanted);
  const std::int64_t kept = count_kept(data.targets);

  // Ours, with gradients in the operands' dtype.
  Array dx(data.x.bytes()), dw(data.w.bytes());
  const Arguments arguments{.hidden = ConstTensor(data.x.data(), dtype, {r, h}),
                            .weight = ConstTensor(data.w.data(), dtype, {v, h}),
                            .targets = ConstTensor(data.targets),
                            .grad_hidden = Tensor(dx.data(), dtype, {r, h}),
                            .grad_weight = Tensor(dw.data(), dtype, {v, h})};
  Plan plan(s.context, problem_of(arguments, Call::forward_backward));
  Workspace workspace;
  const double our_loss = plan.forward_backward(arguments, workspace).loss;

  // The plain pipeline.
  Array plain_dx(static_cast<std::size_t>(r * h) * 4), plain_dw(static_cast<std::size_t>(v * h) * 4);
  Dense dense(s.team, unit_of(s.cpu_target, dtype == DType::bf16), r, v);
  const double plain_loss = dense.linear({data.x.data(), dtype, r, h, h}, {data.w.data(), dtype, v, h, h},
                                         data.targets.data(), plain_dx.as<float>(), plain_dw.as<float>(), dtype);

  // Exact probabilities: z [R,V] in double, then p in its place.
  const std::vector<double> x = to_double(data.x, dtype, 0, r * h);
  std::vector<double> p(static_cast<std::size_t>(r * v));
  const DenseKernels& kernels = dense_kernels();
  s.team.parallel_for(v, [&](std::int64_t j, int) {
    const std::vector<double> w = to_double(data.w, dtype, j * h, h);
    for (std::int64_t i = 0; i < r; ++i)
      p[static_cast<std::size_t>(i * v + j)] = kernels.dot_f64(&x[static_cast<std::size_t>(i * h)], w.data(), h);
  });
  std::vector<double> losses(static_cast<std::size_t>(r), 0.0);
  s.team.parallel_for(r, [&](std::int64_t i, int) {
    double* const row = &p[static_cast<std::size_t>(i * v)];
    const double top = *std::max_element(row, row + v);
    double sum = 0;
    for (std::int64_t j = 0; j < v; ++j) sum += std::exp(row[j] - top);
    const std::int32_t y = data.targets[static_cast<std::size_t>(i)];
    if (y >= 0) losses[static_cast<std::size_t>(i)] = top - row[y] + std::log(sum);
    for (std::int64_t j = 0; j < v; ++j) row[j] = std::exp(row[j] - top) / sum;
  });
  double exact_loss = 0;
  for (const double loss : losses) exact_loss += loss / static_cast<double>(kept);
  // dL/dz_ij
  const auto d = [&](std::int64_t i, std::int64_t j) {
    const std::int32_t y = data.targets[static_cast<std::size_t>(i)];
    return y < 0 ? 0.0 : (p[static_cast<std::size_t>(i * v + j)] - (j == y ? 1.0 : 0.0)) / static_cast<double>(kept);
  };

  ErrorTable table;
  table.dtype = name_of(dtype);
  const auto compare = [&](const std::string& quantity, const std::vector<std::int64_t>& rows,
                           const Array& our_gradient, const Array& plain_gradient,
                           const std::function<void(std::int64_t, double*)>& exact_row) {
    Distance ours, plain;
    for (const std::int64_t row : rows) {
      std::vector<double> exact(static_cast<std::size_t>(h), 0.0);
      exact_row(row, exact.data());
      ours.add(exact, to_double(our_gradient, dtype, row * h, h));
      plain.add(exact, to_double(plain_gradient, DType::f32, row * h, h));
    }
    if (!rows.empty()) table.rows.push_back({quantity, ours.relative(), plain.relative()});
  };

  std::vector<std::int64_t> kept_rows, targets, others;
  for (std::int64_t i = 0; i < r; ++i) {
    if (data.targets[static_cast<std::size_t>(i)] >= 0) kept_rows.push_back(i);
  }
  std::vector<bool> is_target(static_cast<std::size_t>(v), false);
  for (const std::int64_t i : kept_rows)
    is_target[static_cast<std::size_t>(data.targets[static_cast<std::size_t>(i)])] = true;
  for (std::int64_t j = 0; j < v; ++j) (is_target[static_cast<std::size_t>(j)] ? targets : others).push_back(j);

  // dX_i = sum_j D_ij W_j; dW_j = sum_i D_ij X_i
  compare("dX", spread(kept_rows), dx, plain_dx, [&](std::int64_t i, double* out) {
    for (std::int64_t j = 0; j < v; ++j) {
      const double dij = d(i, j);
      const std::vector<double> w = to_double(data.w, dtype, j * h, h);
      for (std::int64_t k = 0; k < h; ++k) out[k] += dij * w[static_cast<std::size_t>(k)];
    }
  });
  const auto weight_row = [&](std::int64_t j, double* out) {
    for (std::int64_t i = 0; i < r; ++i) {
      const double dij = d(i, j);
      for (std::int64_t k = 0; k < h; ++k) out[k] += dij * x[static_cast<std::size_t>(i * h + k)];
    }
  };
  compare("dW, rows of targets", spread(targets), dw, plain_dw, weight_row);
  compare("dW, other rows", spread(others), dw, plain_dw, weight_row);
  table.rows.push_back(
      {"loss", std::fabs(our_loss - exact_loss) / exact_loss, std::fabs(plain_loss - exact_loss) / exact_loss});
  table.facts = {{"rows", r},         {"hidden", h}, {"vocab", v}, {"kept", kept}, {"data", s.request.data},
                 {"loss", exact_loss}};
  s.errors.push_back(std::move(table));
}

}  // namespace logitless::bench
