// The CUDA backend in the conformance suite: operands go to the device with their strides, alignment and gaps, the call
// runs in poisoned, guarded workspace, and everything comes back, inputs too, so that a stray write anywhere shows.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/cuda.hpp"

namespace logitless::test {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// One device and one arena of its memory for all tests of a process.
class CudaFixture {
 public:
  static CudaFixture& instance() {
    static CudaFixture fixture;
    return fixture;
  }
  // Null where this machine has no GPU; why() says what is missing.
  cuda::Device* device() const { return device_.get(); }
  const std::string& why() const { return why_; }

  void reset() { used_ = 0; }
  // `bytes` at the same offset within 256 bytes as `like`.
  char* take(std::size_t bytes, std::uintptr_t like) {
    used_ = (used_ + 255) / 256 * 256 + like % 256;
    char* const out = arena_ + used_;
    used_ += bytes;
    if (used_ > kBytes) throw std::runtime_error("the test's arena of device memory is too small");
    return out;
  }

 private:
  static constexpr std::size_t kBytes = std::size_t{8} << 30;
  CudaFixture() {
    device_ = cuda::open_device(0, &why_);
    if (device_ != nullptr) check_cuda(cudaMalloc(reinterpret_cast<void**>(&arena_), kBytes), "arena");
  }
  cuda::DevicePointer device_;
  std::string why_;
  char* arena_ = nullptr;
  std::size_t used_ = 0;
};

class TargetBackend final : public Backend {
 public:
  TargetBackend(const cpu::Target&, cpu::Executor&) {}

  // Called with every plan that ran, before it runs.
  std::function<void(const plan::Plan&)> on_plan;
  plan::Dials dials;
  bool least_budget = false;
  int machine_threads = 0;  // means nothing here

  // none, workspace, inside dW: there only as bf16.
  static std::size_t places_of_exponentials(const Mixture& m) {
    return m.x == DType::bf16 && m.w == DType::bf16 ? 3u : 2u;
  }
  std::string name() const override { return "cuda"; }
  // It cannot: a wrong target or an empty mean is known on the device alone. It says so afterwards.
  bool refuses_before_writing() const override { return false; }

  plan::Plan plan_of(const Problem& problem) const {
    const plan::GpuMachine machine = cuda::machine_of(*CudaFixture::instance().device());
    auto make = [&](const Problem& p, const plan::Dials& d) { return plan::make_gpu_plan(p, machine, d); };
    if (least_budget) {
      Problem small = problem;
      small.budget = 1;
      small.budget = static_cast<std::uint64_t>(make(small, {}).workspace_bytes);
      const plan::Plan least = make(small, {});
      if (least.chunk > 0) return least;
    }
    plan::Dials d = dials;
    plan::Plan made = make(problem, d);
    if (made.chunk == 0) d.kept_blocks = -1, made = make(problem, d);
    if (made.chunk == 0) d.keep = -1, made = make(problem, d);
    if (made.chunk == 0) made = make(problem, {});
    return made;
  }
  Storage storage(const Problem& problem) override {
    const plan::Plan plan = plan_of(problem);
    Storage s;
    s.leaf = std::min<std::int64_t>(4096, plan.block);
    if (problem.kind == Kind::linear && problem.wants_gradient() && contract::is_half(plan.operand)) {
      s.unit = unit_of(plan.operand);
      s.scaled_x = plan.exponentials;
      // fp16: D to within 2^-24 of the row's largest part, and X where it is scaled down.
      if (plan.operand == DType::f16) s.absolute = 0x1p-22;
    }
    return s;
  }
  std::string run(const Problem& problem, const Operands& operands, Outcome* outcome, int* status) override {
    const plan::Plan plan = plan_of(problem);
    if (on_plan) on_plan(plan);
    return run(plan, operands, outcome, status);
  }
  std::string run(const plan::Plan& plan, const Operands& operands, Outcome* outcome, int* status);
  std::string describe(const Problem& problem) override {
    const plan::Plan plan = plan_of(problem);
    return "plan C=" + std::to_string(plan.chunk) + " B=" + std::to_string(plan.block) +
           " kept=" + std::to_string(plan.kept_blocks) + "/" + std::to_string(plan.blocks) +
           " inside=" + std::to_string(plan.inside_blocks) + (plan.exponentials ? " exponentials" : "") +
           (plan.own_product ? " own product" : "");
  }
};

namespace on_device {

inline constexpr std::size_t kGuard = 512;

// The bytes of a view on the host and their copy on the device.
struct Span {
  char* host;
  std::size_t bytes;
  char* device;
};

inline std::vector<View Operands::*> all_views() {
  using O = Operands;
  return {&O::x,
          &O::w,
          &O::z,
          &O::targets,
          &O::row_loss,
          &O::row_lse,
          &O::row_logprob,
          &O::stats,
          &O::row_entropy,
          &O::row_zloss,
          &O::row_mean_logit,
          &O::row_log_sum_p2,
          &O::row_argmax,
          &O::row_correct,
          &O::dx,
          &O::dw,
          &O::dz,
          &O::db,
          &O::grad_row_loss,
          &O::grad_row_lse,
          &O::grad_row_logprob,
          &O::grad_row_entropy,
          &O::lse,
          &O::bias,
          &O::class_weight,
          &O::row_weight,
          &O::row_temperature,
          &O::logit_floor,
          &O::keep_mask,
          &O::soft,
          &O::topk_ids,
          &O::topk_probs,
          &O::teacher_x,
          &O::teacher_w,
          &O::teacher_bias,
          &O::old_logprob,
          &O::advantage,
          &O::ref_logprob,
          &O::saved,
          &O::normalizer};
}

inline bool adjacent(const View& v) {
  return (v.col_stride == 1 || v.cols <= 1) && (v.row_stride >= v.cols || v.rows <= 1);
}

}  // namespace on_device

inline std::string TargetBackend::run(const plan::Plan& plan, const Operands& operands, Outcome* outcome, int* status) {
  using namespace on_device;
  CudaFixture& fixture = CudaFixture::instance();
  fixture.reset();
  Operands o = operands;
  std::vector<Span> spans;
  std::vector<std::vector<char>> compact;  // operands that the plan wants without gaps
  constexpr std::uint8_t pattern = 0xa5;
  for (View Operands::* member : all_views()) {
    View& v = o.*member;
    if (!v || v.rows == 0 || v.cols == 0) continue;
    const std::int64_t size = contract::size_of(v.dtype);
    const bool in_place = (member == &Operands::x && plan.find("x_rows") == nullptr) ||
                          (member == &Operands::w && plan.find("w_block") == nullptr) ||
                          (member == &Operands::teacher_x && plan.find("teacher_rows") == nullptr) ||
                          (member == &Operands::teacher_w && plan.find("teacher_block") == nullptr);
    const bool in_boxes = !plan.own_product || (reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 &&
                                                (v.rows <= 1 || v.row_stride % 8 == 0));
    if (in_place && (!adjacent(v) || !in_boxes)) {
      // As a caller of this backend does.
      compact.emplace_back(static_cast<std::size_t>(v.rows * v.cols * size));
      for (std::int64_t i = 0; i < v.rows; ++i)
        for (std::int64_t j = 0; j < v.cols; ++j)
          std::memcpy(compact.back().data() + (i * v.cols + j) * size,
                      static_cast<char*>(v.data) + (i * v.row_stride + j * v.col_stride) * size,
                      static_cast<std::size_t>(size));
      v.data = compact.back().data();
      v.row_stride = v.cols, v.col_stride = 1;
    }
    const std::int64_t down =
        std::min<std::int64_t>(0, (v.rows - 1) * v.row_stride) + std::min<std::int64_t>(0, (v.cols - 1) * v.col_stride);
    const std::int64_t up =
        std::max<std::int64_t>(0, (v.rows - 1) * v.row_stride) + std::max<std::int64_t>(0, (v.cols - 1) * v.col_stride);
    char* const low = static_cast<char*>(v.data) + down * size;
    Span span{low, static_cast<std::size_t>((up - down + 1) * size), nullptr};
    for (const Span& known : spans)
      if (known.host == span.host && known.bytes == span.bytes) span.device = known.device;  // in place
    if (span.device == nullptr) {
      char* const room = fixture.take(span.bytes + 2 * kGuard, reinterpret_cast<std::uintptr_t>(low) - kGuard);
      span.device = room + kGuard;
      check_cuda(cudaMemset(room, pattern, span.bytes + 2 * kGuard), "guard");
      check_cuda(cudaMemcpy(span.device, low, span.bytes, cudaMemcpyHostToDevice), "copy in");
      spans.push_back(span);
    }
    v.data = span.device - down * size;
  }
  struct Results {
    double loss, filter_kept, filter_variance;
    std::int64_t kept, bad, correct;
  };
  auto* const results = reinterpret_cast<Results*>(fixture.take(sizeof(Results), 0));
  const auto bytes = static_cast<std::size_t>(plan.workspace_bytes);
  // For initcheck: memory that nothing has written yet, instead of poison.
  const bool fresh = std::getenv("LOGITLESS_TEST_UNPOISONED") != nullptr;
  char* room = nullptr;
  if (fresh)
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&room), bytes + 2 * kGuard), "workspace");
  else
    room = fixture.take(bytes + 2 * kGuard, 0);
  const std::unique_ptr<char, void (*)(char*)> owner(fresh ? room : nullptr, [](char* p) { cudaFree(p); });
  check_cuda(cudaMemset(room, pattern, kGuard), "guard");
  check_cuda(cudaMemset(room + kGuard + bytes, pattern, kGuard), "guard");
  if (!fresh) check_cuda(cudaMemset(room + kGuard, 0xff, bytes), "poison");
  std::string why;
  const cuda::PreparedPointer prepared = cuda::prepare(*fixture.device(), plan, &why);
  if (prepared == nullptr) return "not prepared: " + why;
  cuda::ResultViews to;
  to.loss = View{&results->loss, DType::f64, 1, 1, 1, 1};
  to.kept = &results->kept, to.bad = &results->bad, to.correct = &results->correct;
  to.filter_kept = &results->filter_kept, to.filter_variance = &results->filter_variance;
  std::string error = cuda::run(*prepared, o, to, room + kGuard, nullptr, status);
  check_cuda(cudaDeviceSynchronize(), "run");
  if (!error.empty()) return error;
  error = cuda::check_status(*fixture.device(), nullptr, status);
  Results got{};
  check_cuda(cudaMemcpy(&got, results, sizeof got, cudaMemcpyDeviceToHost), "results");
  outcome->loss = got.loss, outcome->kept = got.kept, outcome->bad = got.bad, outcome->correct = got.correct;
  outcome->filter_kept = got.filter_kept, outcome->filter_variance = got.filter_variance;
  std::vector<std::uint8_t> around(2 * kGuard);
  auto guards = [&](const char* begin, std::size_t length) {
    check_cuda(cudaMemcpy(around.data(), begin - kGuard, kGuard, cudaMemcpyDeviceToHost), "guard");
    check_cuda(cudaMemcpy(around.data() + kGuard, begin + length, kGuard, cudaMemcpyDeviceToHost), "guard");
    return std::all_of(around.begin(), around.end(), [](std::uint8_t b) { return b == pattern; });
  };
  for (const Span& span : spans) {
    check_cuda(cudaMemcpy(span.host, span.device, span.bytes, cudaMemcpyDeviceToHost), "copy back");
    if (!guards(span.device, span.bytes)) return "wrote outside an operand";
  }
  if (!guards(room + kGuard, bytes)) return "wrote outside the workspace of " + std::to_string(plan.workspace_bytes);
  return error;
}

}  // namespace logitless::test
