// One trial: a problem, its data and the machine that its plans are for, all from a seed; and what a plan's run leaves
// behind. Sizes are small (RHV of a few hundred thousand) because hundreds of trials run several plans each, and odd
// ones are frequent: 1, a leaf and its neighbours, more rows than hidden units and fewer.
#pragma once

#include <cmath>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "contract/coefficients.hpp"
#include "cpu/cpu.hpp"
#include "plan/guarded.hpp"
#include "plan/machines.hpp"
#include "plan/watch.hpp"
#include "reference/convert.hpp"
#include "support/random.hpp"

namespace logitless::test {

using contract::Call;
using contract::DType;
using contract::Kind;
using contract::Problem;
using contract::Reduction;
using contract::size_of;

struct Trial {
  Problem problem;
  std::uint64_t seed = 0;
  bool some_ignored = false;
  bool gaps = false;  // between rows of matrices

  std::string text() const {
    const Problem& p = problem;
    std::ostringstream out;
    constexpr const char* calls[] = {"", "forward", "forward_backward", "backward"};
    out << (p.kind == Kind::linear ? "linear " : "logits ") << calls[static_cast<int>(p.call)] << " R=" << p.rows
        << " H=" << p.hidden << " V=" << p.vocab << " x=" << contract::name_of(p.x) << " w=" << contract::name_of(p.w)
        << " z=" << contract::name_of(p.z) << " dx=" << contract::name_of(p.dx) << (p.accumulate_dx ? "+=" : "")
        << " dw=" << contract::name_of(p.dw) << (p.accumulate_dw ? "+=" : "") << " dz=" << contract::name_of(p.dz)
        << (p.in_place ? " in place" : "") << (p.dw_contiguous ? "" : " dW strided") << " alpha=" << p.loss.smoothing
        << (some_ignored ? " some ignored" : "") << (gaps ? " gaps" : "") << " budget=" << p.budget << " seed=" << seed;
    return out.str();
  }
};

template <class T, std::size_t N>
T pick(Random& random, const T (&values)[N]) {
  return values[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(N)))];
}

inline Trial random_trial(std::uint64_t seed, Kind kind) {
  Random random(seed);
  Trial t;
  t.seed = seed;
  Problem& p = t.problem;
  p.kind = kind;
  p.call = pick(
      random, {Call::forward, Call::forward_backward, Call::forward_backward, Call::forward_backward, Call::backward});
  const auto extent = [&](std::int64_t most) {
    constexpr std::int64_t odd[] = {1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257};
    const bool special = random.below(3) == 0;
    const std::int64_t n = special ? pick(random, odd) : 1 + random.below(most);
    return std::min(n, most);
  };
  constexpr DType all[] = {DType::f32, DType::bf16, DType::f16};
  p.rows = random.below(40) == 0 ? 0 : extent(300);
  const double alphas[] = {0.0, 0.0, 0.1};
  p.loss.smoothing = pick(random, alphas);
  p.loss.reduction = pick(random, {Reduction::mean, Reduction::sum, Reduction::none});
  p.loss.on_empty = contract::OnEmpty::zero;
  t.some_ignored = random.below(3) == 0;
  t.gaps = random.below(3) == 0;
  if (kind == Kind::logits) {
    p.vocab = extent(3000);
    p.z = pick(random, all);
    if (p.call != Call::forward) p.dz = random.below(2) == 0 ? p.z : DType::f32;
    p.in_place = p.dz == p.z && random.below(2) == 0;
    return t;
  }
  p.hidden = extent(300);
  p.vocab = std::min(extent(3000), std::max<std::int64_t>(1, 600'000 / std::max<std::int64_t>(1, p.rows * p.hidden)));
  p.x = pick(random, all);
  p.w = random.below(3) == 0 ? pick(random, all) : p.x;
  if (p.call == Call::forward) return t;
  p.dx = pick(random, {DType::none, p.x, p.x, DType::f32});
  p.dw = pick(random, {DType::none, p.w, p.w, DType::f32});
  if (!p.wants_gradient()) p.dx = p.x;
  p.accumulate_dx = p.dx != DType::none && random.below(4) == 0;
  p.accumulate_dw = p.dw != DType::none && random.below(4) == 0;
  p.dw_contiguous = !t.gaps;
  return t;
}

// What a run leaves: bits of per-row outputs, gradients as numbers, and which bytes of the workspace it changed.
struct Result {
  std::string error;
  Outcome outcome;
  std::vector<float> rows;  // row_loss, row_lse, row_logprob, stats
  std::vector<double> dx, dw, dz;
  std::vector<bool> touched;  // of the workspace, against this run's fill
  std::int64_t requests = 0;  // for memory, during the run
  std::string first_request;
  bool rest_intact = true;  // bytes beside operands and workspace in their pages

  bool same_bits(const Result& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0);
    };
    return same_row_bits(other) && same(dx, other.dx) && same(dw, other.dw) && same(dz, other.dz);
  }
  bool same_row_bits(const Result& other) const {
    return std::memcmp(&outcome.loss, &other.outcome.loss, sizeof outcome.loss) == 0 &&
           outcome.kept == other.outcome.kept && rows.size() == other.rows.size() &&
           (rows.empty() || std::memcmp(rows.data(), other.rows.data(), rows.size() * sizeof rows[0]) == 0);
  }
};

// The trial's operands in guarded memory, every one flush with a page without access.
class Bench {
 public:
  Bench(const Trial& trial, Flush flush) : p_(trial.problem), flush_(flush), gaps_(trial.gaps) {
    Random random(trial.seed + 1);
    const double spread = 4.0 / std::sqrt(static_cast<double>(std::max<std::int64_t>(1, p_.hidden)));
    o.x = matrix(p_.x, p_.rows, p_.hidden, gaps_);
    o.w = matrix(p_.w, p_.vocab, p_.hidden, gaps_);
    o.z = matrix(p_.z, p_.rows, p_.vocab, gaps_);
    fill(o.x, random, 1.0);
    fill(o.w, random, spread);
    fill(o.z, random, 5.0);
    o.targets = matrix(DType::i64, p_.rows, 1, false);
    for (std::int64_t i = 0; i < p_.rows; ++i) {
      const bool ignored = trial.some_ignored && random.below(3) == 0;
      static_cast<std::int64_t*>(o.targets.data)[i] = ignored ? p_.loss.ignore_index : random.below(p_.vocab);
    }
    o.grad_loss = p_.loss.reduction == Reduction::none ? 1.0 : 1.5;
    o.grad_row_loss = matrix(DType::f32, p_.rows, 1, false);
    fill(o.grad_row_loss, random, 1.0);
    for (const View* v : {&o.x, &o.w, &o.targets, &o.grad_row_loss}) freeze(*v);
    if (!p_.in_place) freeze(o.z);
    o.stats = matrix(DType::f32, p_.rows, 4, false);
    o.dx = matrix(p_.dx, p_.rows, p_.hidden, gaps_);
    o.dw = matrix(p_.dw, p_.vocab, p_.hidden, gaps_);
    o.dz = p_.in_place ? o.z : matrix(p_.dz, p_.rows, p_.vocab, gaps_);
    if (p_.accumulate_dx) fill(o.dx, random, 1.0);
    if (p_.accumulate_dw) fill(o.dw, random, 1.0);
    if (p_.call == Call::backward) return;
    o.row_loss = matrix(DType::f32, p_.rows, 1, false);
    o.row_lse = matrix(DType::f32, p_.rows, 1, false);
    o.row_logprob = matrix(DType::f32, p_.rows, 1, false);
  }

  // What backward reads, made by forward on the same target.
  void take_statistics(const cpu::Target& target, cpu::Executor& executor) {
    Problem forward = p_;
    forward.call = Call::forward;
    forward.dx = forward.dw = forward.dz = DType::none;
    forward.accumulate_dx = forward.accumulate_dw = forward.in_place = false;
    forward.budget = 0;
    const plan::Plan plan = plan::make_plan(forward, machine_for(target, executor.threads()));
    const Guarded workspace(plan.workspace_bytes, flush_);
    Operands operands = o;
    operands.dx = operands.dw = operands.dz = View{};
    Outcome outcome;
    int status = 0;
    const std::string error = cpu::run(plan, target, executor, operands, workspace.data(), &outcome, &status);
    if (!error.empty()) throw std::runtime_error(error);
    freeze(o.stats);
  }

  Result run(const plan::Plan& plan, const cpu::Target& target, cpu::Executor& executor, unsigned char poison) {
    Result out;
    const Guarded workspace(plan.workspace_bytes, flush_);
    workspace.fill(poison);
    int status = 0;
    {
      MemoryWatch watch;
      out.error = cpu::run(plan, target, executor, o, workspace.data(), &out.outcome, &status);
      watch.disarm();
      out.requests = watch.requests();
      out.first_request = watch.first();
    }
    out.rest_intact = workspace.rest_intact();
    for (const Guarded& g : memory_) out.rest_intact = out.rest_intact && g.rest_intact();
    out.touched.resize(workspace.bytes());
    for (std::size_t i = 0; i < workspace.bytes(); ++i)
      out.touched[i] = static_cast<unsigned char>(workspace.data()[i]) != poison;
    if (p_.call != Call::backward)
      for (const View* v : {&o.row_loss, &o.row_lse, &o.row_logprob, &o.stats})
        for (std::int64_t i = 0; i < v->rows; ++i)
          for (std::int64_t j = 0; j < v->cols; ++j)
            out.rows.push_back(static_cast<const float*>(v->data)[i * v->row_stride + j]);
    out.dx = numbers(o.dx);
    out.dw = numbers(o.dw);
    out.dz = numbers(o.dz);
    return out;
  }

  static std::vector<double> numbers(const View& v) {
    std::vector<double> out;
    if (!v) return out;
    for (std::int64_t i = 0; i < v.rows; ++i)
      for (std::int64_t j = 0; j < v.cols; ++j) out.push_back(reference::load(v, i, j));
    return out;
  }

  Operands o;

 private:
  View matrix(DType dtype, std::int64_t rows, std::int64_t cols, bool gaps) {
    if (dtype == DType::none) return {};
    View v;
    v.dtype = dtype;
    v.rows = rows;
    v.cols = cols;
    v.row_stride = gaps ? cols + 3 : cols;
    const std::int64_t elements = rows > 0 ? (rows - 1) * v.row_stride + cols : 0;
    memory_.emplace_back(elements * size_of(dtype), flush_);
    memory_.back().fill(0xff);  // NaN
    v.data = memory_.back().data();
    return v;
  }
  static void fill(const View& v, Random& random, double spread) {
    for (std::int64_t i = 0; i < v.rows; ++i)
      for (std::int64_t j = 0; j < v.cols; ++j) reference::store(v, i, j, random.uniform(-spread, spread));
  }
  // An input: from now on a write faults.
  void freeze(const View& v) const {
    for (const Guarded& g : memory_)
      if (g.data() == v.data) g.make_read_only();
  }

  const Problem p_;
  const Flush flush_;
  const bool gaps_;
  std::vector<Guarded> memory_;
};

}  // namespace logitless::test
