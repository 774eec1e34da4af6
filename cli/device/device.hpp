// Where a plan computes, for commands whose tensors lie on the host: run_plan is the call on any backend; on a CUDA
// device it copies operands there and results back. Memory, Stream and Mirror are its parts, for what is timed many
// times. Failures of CUDA's runtime throw std::runtime_error, one line.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "logitless/logitless.hpp"

namespace logitless::device {

struct FreeMemory {
  int device = 0;
  void operator()(void* memory) const noexcept;
};
struct FreeStream {
  int device = 0;
  void operator()(void* stream) const noexcept;
};
struct FreeEvent {
  int device = 0;
  void operator()(void* event) const noexcept;
};

// One allocation on a device, aligned to 256 bytes.
class Memory {
 public:
  Memory() = default;
  Memory(int device, std::size_t bytes);

  void* data() const noexcept { return memory_.get(); }
  std::size_t bytes() const noexcept { return bytes_; }
  void upload(const void* host);  // bytes() of them, waited for, as are the next two
  void download(void* host) const;
  void clear();

 private:
  std::unique_ptr<void, FreeMemory> memory_;
  std::size_t bytes_ = 0;
};

class Stream {
 public:
  explicit Stream(int device);

  void* get() const noexcept { return stream_.get(); }
  // The device's seconds for what `enqueue` leaves on the stream; waits for it.
  double seconds(const std::function<void()>& enqueue);
  // Enqueues a copy from device memory to device memory.
  void copy(void* to, const void* from, std::size_t bytes);

 private:
  int device_;
  std::unique_ptr<void, FreeStream> stream_;
  std::unique_ptr<void, FreeEvent> start_, stop_;
};

// Views of a device's memory in the place of host views, with their shapes, strides and bytes.
class Mirror {
 public:
  explicit Mirror(int device) : device_(device) {}

  ConstTensor input(const ConstTensor& host);
  Tensor output(const Tensor& host);
  // Every tensor of a call.
  Arguments operator()(const Arguments& host);
  // Outputs, back to the host.
  void fetch() const;

 private:
  struct Output {
    void* host;
    std::size_t memory;  // of memory_
  };
  // Host bytes from `first` on; uploaded.
  std::byte* hold(const void* first, std::size_t bytes);

  int device_;
  std::vector<Memory> memory_;
  std::vector<Output> outputs_;
};

// A device's Result.
class Scalars {
 public:
  explicit Scalars(int device);
  // Those that this plan's call has.
  Reports reports(const Plan& plan) const;
  Result fetch() const;

 private:
  int device_;
  Memory memory_;
};

// A call on a context with its workspace, and how long it took there; copies are not counted.
struct Ran {
  Result result;
  double seconds = 0.0;
};
// `device`: the context's, where its backend is Backend::cuda.
Ran run_plan(Context& context, int device, Plan& plan, const Arguments& arguments);

}  // namespace logitless::device
