// Suites linear and logits on a CUDA device: the same jobs as on the host, beside what bounds them there, cuBLAS's
// products of the same shapes and copies of the same bytes. Seconds are the device's, between events on one stream.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <stdexcept>

#include "bench/session.hpp"
#include "device/device.hpp"

namespace logitless::bench {

namespace {

using device::Memory;
using device::Stream;

// cuBLAS, looked for where the library looks for cuBLASLt: products of row-major operands, sums in fp32 (no TF32).
class Cublas {
 public:
  explicit Cublas(void* stream) {
    const char* const named = std::getenv("LOGITLESS_CUBLASLT");
    std::string beside = named == nullptr ? "" : named;
    if (const auto at = beside.rfind("cublasLt"); at != std::string::npos) beside.replace(at, 8, "cublas");
    const std::array<std::string, 4> places{beside, "libcublas.so.13", "/usr/local/cuda/lib64/libcublas.so.13",
                                            "libcublas.so.12"};
    void* library = nullptr;
    for (const std::string& place : places) {
      if (library == nullptr && !place.empty()) library = ::dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    if (library == nullptr) {
      why_ = "libcublas.so is not found: no product to compare with";
      return;
    }
    int (*create)(void**) = nullptr;
    int (*set_stream)(void*, void*) = nullptr;
    find(library, "cublasCreate_v2", create);
    find(library, "cublasSetStream_v2", set_stream);
    find(library, "cublasGemmEx", gemm_);
    if (create == nullptr || set_stream == nullptr || gemm_ == nullptr || create(&handle_) != 0 ||
        set_stream(handle_, stream) != 0) {
      why_ = "cuBLAS does not start: no product to compare with";
    }
  }

  const std::string& why_not() const { return why_; }
  // C [n,m] = B [n,k] A, with A [m,k] transposed or [k,m]; or, with `transpose_b`, B [k,n] transposed.
  void product(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k, bool transpose_a, const Memory& a,
               bool transpose_b, const Memory& b, const Memory& c) const {
    const float one = 1, zero = 0;
    const int type = dtype == DType::bf16 ? 14 : dtype == DType::f16 ? 2 : 0;  // cudaDataType
    constexpr int compute_32f = 68, default_algorithm = -1;
    const auto lead = [](std::int64_t stride) { return static_cast<int>(stride); };
    const int status =
        gemm_(handle_, transpose_a ? 1 : 0, transpose_b ? 1 : 0, static_cast<int>(m), static_cast<int>(n),
              static_cast<int>(k), &one, a.data(), type, lead(transpose_a ? k : m), b.data(), type,
              lead(transpose_b ? n : k), &zero, c.data(), type, lead(m), compute_32f, default_algorithm);
    if (status != 0) throw std::runtime_error("cublasGemmEx failed with status " + std::to_string(status));
  }

 private:
  template <class Function>
  static void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
  }

  void* handle_ = nullptr;
  int (*gemm_)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int, const void*,
               void*, int, int, int, int) = nullptr;
  std::string why_;
};

Memory upload(int device, const Array& host) {
  Memory memory(device, host.bytes());
  memory.upload(host.data());
  return memory;
}

// One problem with its plan and memory on the device.
class DeviceCall {
 public:
  DeviceCall(Context& context, int device, const Problem& problem, const Arguments& arguments)
      : plan_(context, problem),
        arguments_(arguments),
        scalars_(device),
        reports_(scalars_.reports(plan_)),
        workspace_(device, plan_.workspace_bytes()) {}

  void enqueue(const Stream& stream) {
    plan_.enqueue(arguments_, reports_, workspace_.data(), workspace_.bytes(), stream.get());
  }
  std::int64_t workspace_bytes() const { return static_cast<std::int64_t>(workspace_.bytes()); }
  double loss() const { return scalars_.fetch().loss; }

 private:
  Plan plan_;
  Arguments arguments_;
  device::Scalars scalars_;
  Reports reports_;
  Memory workspace_;
};

// Seconds of one of `count` calls in a row: short ones would else be timed with their launches.
template <class Enqueue>
double each(Stream& stream, int count, const Enqueue& enqueue) {
  return stream.seconds([&] {
    for (int i = 0; i < count; ++i) enqueue(i);
  }) / count;
}

int repeats_of(double work, double enough) { return static_cast<int>(std::clamp(enough / work, 1.0, 20.0)); }

Entry entry_of(const char* who, const std::string& name) {
  Entry entry;
  entry.row.who = who;
  entry.row.name = name;
  entry.required = true;
  return entry;
}

}  // namespace

void run_linear_on_device(Session& s, DType dtype) {
  const DataRequest wanted = s.data_request(dtype);
  const std::int64_t r = wanted.rows, h = wanted.hidden, v = wanted.vocab;
  const int device = s.request.device;
  const bool half = dtype != DType::f32;
  const std::size_t element = size_of(dtype);
  DataRequest sparse = wanted;
  sparse.ignored = 0.75;
  const std::vector<std::int32_t> targets = make_targets(wanted), sparse_targets = make_targets(sparse);
  const auto bytes = [](std::int64_t rows, std::int64_t cols, std::size_t size) {
    return static_cast<std::size_t>(rows * cols) * size;
  };
  Memory x, w;
  {
    const LinearData data = make_linear(s.team, wanted);
    x = upload(device, data.x);
    w = upload(device, data.w);
  }
  const Memory dx(device, bytes(r, h, element)), dw(device, bytes(v, h, element));
  const Memory dw32(device, half ? bytes(v, h, 4) : 0);
  Memory y(device, targets.size() * sizeof targets[0]), sparse_y(device, targets.size() * sizeof targets[0]);
  y.upload(targets.data());
  sparse_y.upload(sparse_targets.data());
  Stream stream(device);
  const Cublas cublas(stream.get());

  const double product = 2.0 * static_cast<double>(r) * static_cast<double>(h) * static_cast<double>(v);
  const int repeats = repeats_of(product, 2e12);
  std::vector<Entry> entries;
  std::vector<std::shared_ptr<DeviceCall>> calls;
  const auto probe = [&](const std::string& name, double products, auto run) {
    Entry entry = entry_of("probe", name);
    entry.row.flops = products * product;
    entry.row.note = cublas.why_not();
    if (cublas.why_not().empty()) {
      entry.run = [&stream, repeats, run] { return each(stream, repeats, [&](int) { run(); }); };
    }
    entries.push_back(std::move(entry));
    calls.push_back(nullptr);
  };
  // The logits stand for the exponentials that the second and the third product read.
  auto const z = std::make_shared<Memory>();
  if (cublas.why_not().empty()) *z = Memory(device, bytes(r, v, element));
  const auto first = [&, z] { cublas.product(dtype, v, r, h, true, w, false, x, *z); };
  probe("three cuBLAS products", 3, [&, z, first] {
    first();
    cublas.product(dtype, h, r, v, false, w, false, *z, dx);
    cublas.product(dtype, h, v, r, false, x, true, *z, dw);
  });
  probe("one cuBLAS product", 1, first);

  const auto ours = [&](const std::string& name, bool few, bool gradient, const Tensor& weight_gradient,
                        std::uint64_t budget, const std::string& bound, const std::string& ratio_to) {
    Entry entry = entry_of("ours", name);
    const auto there = [&](const Memory& memory, std::int64_t rows) {
      return ConstTensor(memory.data(), dtype, {rows, h}).on_device(device);
    };
    Arguments arguments{.hidden = there(x, r),
                        .weight = there(w, v),
                        .targets = ConstTensor(few ? sparse_y.data() : y.data(), DType::i32, {r}).on_device(device)};
    if (gradient) {
      arguments.grad_hidden = Tensor(dx.data(), dtype, {r, h}).on_device(device);
      arguments.grad_weight = weight_gradient;
    }
    Problem problem = problem_of(arguments, gradient ? Call::forward_backward : Call::forward);
    problem.memory_budget = budget;
    const std::int64_t kept = count_kept(few ? sparse_targets : targets);
    if (few) problem.most_kept_rows = kept;
    entry.row.flops = (gradient ? 3.0 : 1.0) * product * static_cast<double>(kept) / static_cast<double>(r);
    entry.row.ceiling_row = bound;
    entry.row.ratio_to = ratio_to;
    std::shared_ptr<DeviceCall> call;
    try {
      call = std::make_shared<DeviceCall>(s.context, device, problem, arguments);
      entry.row.workspace_bytes = call->workspace_bytes();
      entry.run = [&stream, repeats, call] { return each(stream, repeats, [&](int) { call->enqueue(stream); }); };
    } catch (const std::runtime_error& error) {
      entry.row.note = error.what();  // a budget below what any plan needs, or a device without so much memory
    }
    entries.push_back(std::move(entry));
    calls.push_back(std::move(call));
  };
  const std::string all = "three cuBLAS products", full = "loss + gradients";
  const std::string within = "within " + std::to_string(s.request.budget >> 20) + " MiB";
  const Tensor grad_weight = Tensor(dw.data(), dtype, {v, h}).on_device(device);
  ours(full, false, true, grad_weight, 0, all, "");
  ours("loss only", false, false, {}, 0, "one cuBLAS product", "");
  ours("75 % of rows ignored", true, true, grad_weight, 0, "", full);
  ours(within, false, true, grad_weight, s.request.budget, all, full);
  if (half) {
    ours("dW in fp32", false, true, Tensor(dw32.data(), DType::f32, {v, h}).on_device(device), 0, all, full);
  }

  Table table;
  table.suite = "linear";
  table.dtype = name_of(dtype);
  table.rows = measure(std::move(entries), {}, s.request.seconds, s.request.repeats);
  s.context.check_status(stream.get());
  for (std::size_t i = 0; i < table.rows.size(); ++i) {
    if (calls[i] && !table.rows[i].seconds.empty()) table.rows[i].loss = calls[i]->loss();
  }
  table.facts = {{"rows", r},
                 {"hidden", h},
                 {"vocab", v},
                 {"kept", count_kept(targets)},
                 {"kept_sparse", count_kept(sparse_targets)},
                 {"data", s.request.data},
                 {"seed", s.request.seed}};
  s.tables.push_back(std::move(table));
}

void run_logits_on_device(Session& s, DType dtype) {
  const DataRequest wanted = s.data_request(dtype);
  const std::int64_t r = wanted.rows, v = wanted.vocab;
  const int device = s.request.device;
  const LogitsData data = make_logits(s.team, wanted);
  const std::size_t bytes = data.z.bytes();
  const auto array_bytes = static_cast<double>(bytes);
  // Several copies of short arrays, in turn: one alone would stay in the device's cache.
  const int copies = repeats_of(array_bytes, 0x1p31);
  Memory y(device, data.targets.size() * sizeof data.targets[0]);
  y.upload(data.targets.data());
  std::vector<Memory> given, work, gradient;
  for (int i = 0; i < copies; ++i) {
    given.push_back(upload(device, data.z));
    work.push_back(upload(device, data.z));
    gradient.push_back(upload(device, data.z));
  }
  Stream stream(device);
  const auto restore = [&] {
    (void)each(stream, copies, [&](int i) {
      const auto n = static_cast<std::size_t>(i);
      stream.copy(work[n].data(), given[n].data(), bytes);
    });
  };

  std::vector<Entry> entries;
  std::vector<std::vector<std::shared_ptr<DeviceCall>>> calls;
  Entry copy = entry_of("probe", "copy it");
  copy.row.bytes = 2 * array_bytes;
  copy.run = [&] {
    return each(stream, copies, [&](int i) {
      const auto n = static_cast<std::size_t>(i);
      stream.copy(gradient[n].data(), given[n].data(), bytes);
    });
  };
  entries.push_back(std::move(copy));
  calls.emplace_back();

  const auto ours = [&](const char* name, const char* bound, double passes, const std::vector<Memory>& z,
                        const std::vector<Memory>* out) {
    Entry entry = entry_of("ours", name);
    entry.row.bytes = passes * array_bytes;
    entry.row.ceiling_row = entry.row.ratio_to = bound;
    std::vector<std::shared_ptr<DeviceCall>> each_buffer;
    for (std::size_t i = 0; i < z.size(); ++i) {
      Arguments arguments{.logits = ConstTensor(z[i].data(), dtype, {r, v}).on_device(device),
                          .targets = ConstTensor(y.data(), DType::i32, {r}).on_device(device)};
      if (out != nullptr) arguments.grad_logits = Tensor((*out)[i].data(), dtype, {r, v}).on_device(device);
      const Problem problem = problem_of(arguments, out != nullptr ? Call::forward_backward : Call::forward);
      each_buffer.push_back(std::make_shared<DeviceCall>(s.context, device, problem, arguments));
    }
    entry.row.workspace_bytes = each_buffer.front()->workspace_bytes();
    entry.run = [&stream, each_buffer] {
      return each(stream, static_cast<int>(each_buffer.size()),
                  [&](int i) { each_buffer[static_cast<std::size_t>(i)]->enqueue(stream); });
    };
    if (out == &z) entry.prepare = restore;
    entries.push_back(std::move(entry));
    calls.push_back(std::move(each_buffer));
  };
  ours("loss only", "half of a copy", 1, given, nullptr);
  ours("loss + gradient in place", "copy it", 2, work, &work);
  ours("loss + gradient apart", "copy it", 2, given, &gradient);

  Table table;
  table.suite = "logits";
  table.dtype = name_of(dtype);
  table.rows = measure(std::move(entries), {}, s.request.seconds, s.request.repeats);
  s.context.check_status(stream.get());
  for (std::size_t i = 0; i < table.rows.size(); ++i) {
    if (!calls[i].empty() && !table.rows[i].seconds.empty()) table.rows[i].loss = calls[i].front()->loss();
  }
  // Reading moves half the bytes of a copy, at a copy's rate.
  Row read = table.rows.front();
  read.name = "half of a copy";
  read.bytes = array_bytes;
  read.note = "stands for a read";
  for (double& seconds : read.seconds) seconds /= 2;
  table.rows.insert(table.rows.begin() + 1, std::move(read));
  table.facts = {{"rows", r},
                 {"vocab", v},
                 {"kept", count_kept(data.targets)},
                 {"data", s.request.data},
                 {"seed", s.request.seed}};
  s.tables.push_back(std::move(table));
}

}  // namespace logitless::bench
