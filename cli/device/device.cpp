// See device.hpp.
#include "device/device.hpp"

#include <chrono>
#include <iterator>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#ifdef LOGITLESS_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace logitless::device {

// ---- CUDA's runtime ---------------------------------------------------------------------------------------------------

#ifdef LOGITLESS_HAS_CUDA

namespace {

void expect(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("cuda: ") + what + ": " + cudaGetErrorString(error));
}

// The commands have one thread that calls CUDA, and one device a run.
void select(int device) { expect(cudaSetDevice(device), "the device cannot be used"); }

}  // namespace

Memory::Memory(int device, std::size_t bytes) : memory_(nullptr, FreeMemory{device}), bytes_(bytes) {
  if (bytes == 0) return;
  select(device);
  void* memory = nullptr;
  if (cudaMalloc(&memory, bytes) != cudaSuccess) {
    cudaGetLastError();
    std::size_t free = 0, total = 0;
    expect(cudaMemGetInfo(&free, &total), "its memory cannot be asked for");
    throw std::runtime_error("cuda: " + std::to_string(bytes) + " bytes of device memory cannot be had, " +
                             std::to_string(free) + " are free");
  }
  memory_.reset(memory);
}

void FreeMemory::operator()(void* memory) const noexcept {
  if (cudaSetDevice(device) == cudaSuccess) cudaFree(memory);
}

void Memory::upload(const void* host) {
  if (bytes_ > 0) expect(cudaMemcpy(data(), host, bytes_, cudaMemcpyHostToDevice), "a copy to the device");
}
void Memory::download(void* host) const {
  if (bytes_ > 0) expect(cudaMemcpy(host, data(), bytes_, cudaMemcpyDeviceToHost), "a copy from the device");
}
void Memory::clear() {
  if (bytes_ == 0) return;
  expect(cudaMemset(data(), 0, bytes_), "device memory cannot be cleared");
  expect(cudaDeviceSynchronize(), "device memory cannot be cleared");  // streams of our own do not wait for it
}

Stream::Stream(int device)
    : device_(device),
      stream_(nullptr, FreeStream{device}),
      start_(nullptr, FreeEvent{device}),
      stop_(nullptr, FreeEvent{device}) {
  select(device);
  cudaStream_t stream = nullptr;
  expect(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "no stream");
  stream_.reset(stream);
  for (auto* const event : {&start_, &stop_}) {
    cudaEvent_t made = nullptr;
    expect(cudaEventCreate(&made), "no event");
    event->reset(made);
  }
}

void FreeStream::operator()(void* stream) const noexcept {
  if (cudaSetDevice(device) == cudaSuccess) cudaStreamDestroy(static_cast<cudaStream_t>(stream));
}
void FreeEvent::operator()(void* event) const noexcept {
  if (cudaSetDevice(device) == cudaSuccess) cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

double Stream::seconds(const std::function<void()>& enqueue) {
  select(device_);
  auto* const stream = static_cast<cudaStream_t>(stream_.get());
  auto *const start = static_cast<cudaEvent_t>(start_.get()), *const stop = static_cast<cudaEvent_t>(stop_.get());
  expect(cudaEventRecord(start, stream), "an event");
  enqueue();
  expect(cudaEventRecord(stop, stream), "an event");
  expect(cudaEventSynchronize(stop), "the run");
  float milliseconds = 0.0F;
  expect(cudaEventElapsedTime(&milliseconds, start, stop), "an event");
  return 1e-3 * static_cast<double>(milliseconds);
}

void Stream::copy(void* to, const void* from, std::size_t bytes) {
  expect(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream_.get())),
         "a copy on the device");
}

#else  // No context of this build computes on a device, so that nothing gets here.

namespace {
[[noreturn]] void absent() { throw std::runtime_error("cuda: this build has none"); }
}  // namespace

Memory::Memory(int, std::size_t) { absent(); }
void FreeMemory::operator()(void*) const noexcept {}
void Memory::upload(const void*) { absent(); }
void Memory::download(void*) const { absent(); }
void Memory::clear() { absent(); }
Stream::Stream(int device) : device_(device) { absent(); }
void FreeStream::operator()(void*) const noexcept {}
void FreeEvent::operator()(void*) const noexcept {}
double Stream::seconds(const std::function<void()>&) { absent(); }
void Stream::copy(void*, const void*, std::size_t) { absent(); }

#endif

// ---- views --------------------------------------------------------------------------------------------------------------

namespace {

// The bytes that a view reaches, from its lowest element, which lies `before` bytes below its data.
struct Span {
  std::size_t before = 0, bytes = 0;
};

Span span_of(const ConstTensor& view) {
  std::int64_t low = 0, high = 0;
  for (std::int32_t i = 0; i < view.rank(); ++i) {
    if (view.extent(i) == 0) return {};
    const std::int64_t reach = (view.extent(i) - 1) * view.stride(i);
    (reach < 0 ? low : high) += reach;
  }
  const std::size_t size = size_of(view.dtype());
  return {.before = static_cast<std::size_t>(-low) * size, .bytes = static_cast<std::size_t>(high - low + 1) * size};
}

std::pair<Shape, Shape> extents_of(const ConstTensor& view) {
  Shape shape, strides;
  shape.rank = strides.rank = view.rank();
  for (std::int32_t i = 0; i < view.rank(); ++i) {
    shape.value[static_cast<std::size_t>(i)] = view.extent(i);
    strides.value[static_cast<std::size_t>(i)] = view.stride(i);
  }
  return {shape, strides};
}

constexpr ConstTensor Arguments::* inputs[] = {
    &Arguments::hidden,
    &Arguments::weight,
    &Arguments::logits,
    &Arguments::targets,
    &Arguments::grad_row_loss,
    &Arguments::lse,
    &Arguments::bias,
    &Arguments::class_weight,
    &Arguments::row_weight,
    &Arguments::row_temperature,
    &Arguments::keep_mask,
    &Arguments::logit_floor,
    &Arguments::soft_targets,
    &Arguments::topk_ids,
    &Arguments::topk_probs,
    &Arguments::teacher_hidden,
    &Arguments::teacher_weight,
    &Arguments::teacher_bias,
    &Arguments::old_logprob,
    &Arguments::advantage,
    &Arguments::ref_logprob,
    &Arguments::normalizer,
    &Arguments::grad_row_lse,
    &Arguments::grad_row_logprob,
    &Arguments::grad_row_entropy,
    &Arguments::grad_loss_factor,
};
constexpr Tensor Arguments::* outputs[] = {
    &Arguments::grad_hidden, &Arguments::grad_weight, &Arguments::grad_logits,    &Arguments::row_loss,
    &Arguments::row_lse,     &Arguments::row_logprob, &Arguments::stats,          &Arguments::row_entropy,
    &Arguments::row_argmax,  &Arguments::row_correct, &Arguments::row_zloss,      &Arguments::row_mean_logit,
    &Arguments::grad_bias,   &Arguments::saved,       &Arguments::row_log_sum_p2,
};
// A field that is in neither list would reach a device's call as host memory, which it refuses.
static_assert(sizeof(Arguments) ==
              sizeof(ConstTensor) * (std::size(inputs) + std::size(outputs)) + sizeof(Arguments::grad_loss));

}  // namespace

std::byte* Mirror::hold(const void* first, std::size_t bytes) {
  Memory memory(device_, bytes);
  memory.upload(first);
  memory_.push_back(std::move(memory));
  return static_cast<std::byte*>(memory_.back().data());
}

ConstTensor Mirror::input(const ConstTensor& host) {
  if (!host) return {};
  const auto [before, bytes] = span_of(host);
  const std::byte* const data = hold(static_cast<const std::byte*>(host.data()) - before, bytes) + before;
  const auto [shape, strides] = extents_of(host);
  return ConstTensor(data, host.dtype(), shape, strides).on_device(device_);
}

// Its bytes go there too: it may be accumulated into, or have holes.
Tensor Mirror::output(const Tensor& host) {
  if (!host) return {};
  const auto [before, bytes] = span_of(host);
  std::byte* const first = static_cast<std::byte*>(host.data()) - before;
  std::byte* const data = hold(first, bytes) + before;
  outputs_.push_back({.host = first, .memory = memory_.size() - 1});
  const auto [shape, strides] = extents_of(host);
  return Tensor(data, host.dtype(), shape, strides).on_device(device_);
}

Arguments Mirror::operator()(const Arguments& host) {
  Arguments there;
  there.grad_loss = host.grad_loss;
  for (const auto field : inputs) there.*field = input(host.*field);
  for (const auto field : outputs) there.*field = output(host.*field);
  return there;
}

void Mirror::fetch() const {
  for (const Output& each : outputs_) memory_[each.memory].download(each.host);
}

// ---- calls --------------------------------------------------------------------------------------------------------------

Scalars::Scalars(int device) : device_(device), memory_(device, sizeof(Result)) {
  static_assert(std::is_trivially_copyable_v<Result>);
  const Result none;
  memory_.upload(&none);
}

Reports Scalars::reports(const Plan& plan) const {
  Reports reports = plan.reports_in(static_cast<Result*>(memory_.data()));
  if (reports.loss) reports.loss = reports.loss.on_device(device_);
  return reports;
}

Result Scalars::fetch() const {
  Result result;
  memory_.download(&result);
  return result;
}

Ran run_plan(Context& context, int device, Plan& plan, const Arguments& arguments) {
  Ran ran;
  if (context.backend() != Backend::cuda) {
    const Workspace workspace(plan.workspace_bytes());
    const auto start = std::chrono::steady_clock::now();
    plan.enqueue(arguments, plan.reports_in(&ran.result), workspace.data(), workspace.size(), nullptr);
    ran.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return ran;
  }
  Mirror mirror(device);
  const Arguments there = mirror(arguments);
  const Scalars scalars(device);
  const Memory workspace(device, plan.workspace_bytes());
  Stream stream(device);
  ran.seconds = stream.seconds(
      [&] { plan.enqueue(there, scalars.reports(plan), workspace.data(), workspace.bytes(), stream.get()); });
  context.check_status(stream.get());
  mirror.fetch();
  ran.result = scalars.fetch();
  return ran;
}

}  // namespace logitless::device
