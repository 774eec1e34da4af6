// ll_context_*: options and environment -> backend, CPU target, threads. Options win over the environment; the
// environment wins over the machine. A value that cannot be honoured is refused, never replaced.
#include "capi/context.hpp"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "capi/structs.hpp"
#include "cpu/pool.hpp"

namespace logitless::capi {
namespace {

constexpr std::int32_t kMostThreads = 1024;

class CallersExecutor final : public cpu::Executor {
 public:
  CallersExecutor(ll_parallel_for fn, void* user, int threads) : fn_(fn), user_(user), threads_(threads) {}
  void parallel_for(std::int64_t tasks, void (*body)(void*, std::int64_t), void* user) override {
    if (tasks > 0) fn_(user_, tasks, body, user);
  }
  int threads() const override { return threads_; }

 private:
  ll_parallel_for fn_;
  void* user_;
  int threads_;
};

int usable_cpus() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::clamp(CPU_COUNT(&set), 1, int{kMostThreads});
#endif
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, int{kMostThreads});
}

// Null when unset or empty.
const char* variable(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? text : nullptr;
}

int choose_threads(std::int32_t asked) {
  if (asked < 0 || asked > kMostThreads) {
    refuse("threads: " + number(std::int64_t{asked}) + "; must be 1 to " + number(std::int64_t{kMostThreads}) +
           ", or 0 for the CPUs this process may use");
  }
  if (asked > 0) return asked;
  const char* text = variable("LOGITLESS_NUM_THREADS");
  if (text == nullptr) return usable_cpus();
  int threads = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, threads);
  if (error != std::errc() || stop != end || threads < 1 || threads > kMostThreads) {
    refuse("LOGITLESS_NUM_THREADS: '" + std::string(text) + "'; must be a whole number from 1 to " +
           number(std::int64_t{kMostThreads}));
  }
  return threads;
}

std::string target_names() {
  int count = 0;
  const cpu::Target* const* targets = cpu::all_targets(&count);
  std::string names;
  for (int i = 0; i < count; ++i) {
    if (i > 0) names += i + 1 < count ? ", " : " or ";
    names += cpu::target_name(*targets[i]);
  }
  return names;
}

void choose_target(ll_context& context, const char* asked) {
  const char* who = "cpu_target";
  if (asked == nullptr) {
    who = "LOGITLESS_CPU_TARGET";
    asked = variable(who);
  }
  if (asked == nullptr) {
    context.target = &cpu::best_target();
    context.target_reason = "the table's choice for this processor";
    return;
  }
  context.target = cpu::find_target(asked);
  if (context.target == nullptr) refuse(std::string(who) + ": '" + asked + "'; must be " + target_names());
  const char* why = "";
  if (!cpu::target_supported(*context.target, &why)) {
    fail(LL_ERROR_UNSUPPORTED, std::string(who) + ": " + asked + "; this machine cannot run it (" + why +
                                   "), leave it unset for " + cpu::target_name(cpu::best_target()));
  }
  context.target_reason = std::string("asked for by ") + who;
}

ll_context_options first_options() {
  return {.size = sizeof(ll_context_options),
          .backend = LL_BACKEND_CPU,
          .threads = 0,
          .parallel_for = nullptr,
          .parallel_for_user = nullptr,
          .cpu_target = nullptr,
          .device = 0,
          .reserved = 0};
}

void check_backend(ll_backend backend) {
  if (backend == LL_BACKEND_CPU || backend == LL_BACKEND_REFERENCE) return;
  if (backend == LL_BACKEND_CUDA) {
    if (cuda::built()) return;
    fail(LL_ERROR_UNSUPPORTED, std::string("backend: LL_BACKEND_CUDA; this build of logitless ") + ll_version() +
                                   " has LL_BACKEND_CPU and LL_BACKEND_REFERENCE, no CUDA");
  }
  refuse("backend: " + number(std::int64_t{backend}) +
         "; must be LL_BACKEND_CPU (1), LL_BACKEND_REFERENCE (2) or LL_BACKEND_CUDA (3)");
}

std::string describe_text(const ll_context& context) {
  std::string out = std::string("logitless ") + ll_version() + "\n";
  out += "processor  " + cpu::describe_machine() + "\n";
  out += std::string("backend    ") + name_of_backend(context.backend) + " (this build has cpu, reference" +
         (cuda::built() ? ", cuda)\n" : ")\n");
  std::string missing;
  if (context.device != nullptr)
    out += "device     " + std::to_string(context.device_index) + ": " + cuda::describe_device(*context.device) + "\n";
  else if (cuda::built())
    out += cuda::device_count(&missing) > 0
               ? "devices    " + std::to_string(cuda::device_count(&missing)) + " for cuda\n"
               : "devices    none for cuda: " + missing + "\n";
  out += "threads    " + std::to_string(context.threads);
  if (context.backend != LL_BACKEND_CPU) {
    out += context.backend == LL_BACKEND_CUDA ? " (unused: the device computes)\n"
                                              : " (the reference runs on the calling thread)\n";
  } else {
    out += context.own_pool ? " (a pool of the context's own)\n" : " (the caller's executor)\n";
  }
  out += "cpu targets\n";
  int count = 0;
  const cpu::Target* const* targets = cpu::all_targets(&count);
  for (int i = 0; i < count; ++i) {
    const char* why = "";
    const bool supported = cpu::target_supported(*targets[i], &why);
    std::string name = cpu::target_name(*targets[i]);
    name.resize(std::max<std::size_t>(name.size(), 11), ' ');
    out += "  " + name + (supported ? "  runs here" : std::string("  cannot run here: ") + why);
    if (targets[i] == context.target) out += ", chosen: " + context.target_reason;
    out += "\n";
  }
  return out;
}

std::string describe_json(const ll_context& context) {
  std::string out =
      "{\"version\": " + json_string(ll_version()) + ", \"processor\": " + json_string(cpu::describe_machine());
  out += ", \"backend\": " + json_string(name_of_backend(context.backend)) + ", \"backends\": [\"cpu\", \"reference\"" +
         (cuda::built() ? ", \"cuda\"]" : "]");
  std::string missing;
  out += ", \"cuda_devices\": " + std::to_string(cuda::device_count(&missing));
  out += ", \"device\": " + (context.device != nullptr ? json_string(cuda::describe_device(*context.device)) : "null");
  out += ", \"threads\": " + std::to_string(context.threads);
  out += ", \"executor\": ";
  out += context.backend != LL_BACKEND_CPU ? "\"calling_thread\"" : context.own_pool ? "\"pool\"" : "\"caller\"";
  out += ", \"cpu_target\": " + json_string(cpu::target_name(*context.target));
  out += ", \"cpu_target_reason\": " + json_string(context.target_reason) + ", \"cpu_targets\": [";
  int count = 0;
  const cpu::Target* const* targets = cpu::all_targets(&count);
  for (int i = 0; i < count; ++i) {
    const char* why = "";
    const bool supported = cpu::target_supported(*targets[i], &why);
    if (i > 0) out += ", ";
    out += "{\"name\": " + json_string(cpu::target_name(*targets[i])) +
           ", \"supported\": " + (supported ? "true" : "false") +
           ", \"chosen\": " + (targets[i] == context.target ? "true" : "false") +
           ", \"why_not\": " + (supported ? std::string("null") : json_string(why)) + "}";
  }
  return out + "]}";
}

}  // namespace
}  // namespace logitless::capi

using namespace logitless::capi;
using namespace logitless;

// The exported name fills what 0.1 had, as ll_options_init does.
static_assert(offsetof(ll_context_options, device) == 40);

void(ll_context_options_init)(ll_context_options* options) noexcept {
  ll_context_options_init_sized(options, offsetof(ll_context_options, device));
}

void ll_context_options_init_sized(ll_context_options* options, size_t bytes) noexcept {
  write_struct(options, bytes, first_options());
}

ll_status ll_context_create(const ll_context_options* options, ll_context** context) noexcept {
  return guarded([&] {
    if (context == nullptr) refuse("context: null; must point at an ll_context*, which receives the new context");
    *context = nullptr;
    check_log_variable();
    ll_context_options asked = first_options();
    if (options != nullptr) asked = read_struct(options, "options", "ll_context_options", asked);
    check_backend(asked.backend);
    if (asked.parallel_for == nullptr && asked.parallel_for_user != nullptr) {
      refuse("parallel_for: null with a parallel_for_user; give both, or neither for a pool of the context's own");
    }

    auto made = std::make_unique<ll_context>();
    made->backend = asked.backend;
    choose_target(*made, asked.cpu_target);
    made->threads = choose_threads(asked.threads);
    made->own_pool = asked.parallel_for == nullptr;
    if (asked.reserved != 0) refuse("reserved: " + number(std::int64_t{asked.reserved}) + "; must be 0");
    if (asked.backend != LL_BACKEND_CUDA && asked.device != 0) {
      refuse("device: " + number(std::int64_t{asked.device}) + "; must be 0 on a backend without devices");
    }
    if (asked.backend == LL_BACKEND_CUDA) {
      made->threads = 1;
      made->device_index = asked.device;
      std::string why;
      made->device = cuda::open_device(asked.device, &why);
      if (made->device == nullptr) fail(LL_ERROR_UNSUPPORTED, "backend: LL_BACKEND_CUDA; " + why);
    } else if (asked.backend == LL_BACKEND_REFERENCE) {
      made->threads = 1;
    } else if (made->own_pool) {
      made->executor = std::make_unique<cpu::Pool>(made->threads);
    } else {
      made->executor = std::make_unique<CallersExecutor>(asked.parallel_for, asked.parallel_for_user, made->threads);
    }
    if (logging(LL_LOG_INFO)) {
      const std::string device =
          made->device != nullptr ? "context: backend cuda, " + cuda::describe_device(*made->device) : std::string();
      const std::string message = std::string("context: backend ") + name_of_backend(made->backend) + ", target " +
                                  cpu::target_name(*made->target) + " (" + made->target_reason + "), " +
                                  std::to_string(made->threads) + " threads";
      log(LL_LOG_INFO, device.empty() ? message.c_str() : device.c_str());
    }
    *context = made.release();
  });
}

ll_status ll_check_status(ll_context* context, void* stream) noexcept {
  return guarded([&] {
    if (context == nullptr) refuse("context: null; must be a context made by ll_context_create");
    if (context->device == nullptr) {
      if (stream != nullptr) refuse("stream: " + address(stream) + "; must be null, this backend has no streams");
      return;
    }
    int status = LL_OK;
    std::string error = cuda::check_status(*context->device, stream, &status);
    if (!error.empty()) fail(status == LL_OK ? LL_ERROR_INTERNAL : status, std::move(error));
  });
}

void ll_context_destroy(ll_context* context) noexcept { delete context; }

ll_status ll_context_describe(const ll_context* context, ll_format format, char* buffer, size_t capacity,
                              size_t* length) noexcept {
  return guarded([&] {
    if (context == nullptr) refuse("context: null; must be a context made by ll_context_create");
    copy_text(wants_json(format) ? describe_json(*context) : describe_text(*context), buffer, capacity, length);
  });
}
