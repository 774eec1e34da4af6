// Status names, the last error, the log. See status.hpp. The log's sink is the library's one process-wide state: the C
// ABI sets it without a context, because failures to make a context are logged too.
#include "capi/status.hpp"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>

namespace logitless::capi {
namespace {

constexpr std::size_t kErrorCapacity = 1024;
thread_local char last_error[kErrorCapacity] = "";

void set_last_error(const char* text) noexcept {
  const std::size_t length = std::min(std::strlen(text), kErrorCapacity - 1);
  std::memcpy(last_error, text, length);
  last_error[length] = '\0';
}

ll_status record(ll_status status, const char* text) noexcept {
  set_last_error(text);
  log(LL_LOG_ERROR, last_error);
  return status;
}

// LL_LOG_OFF..LL_LOG_DEBUG, or -1.
ll_log_level level_of_variable() noexcept {
  const char* text = std::getenv("LOGITLESS_LOG");
  if (text == nullptr || *text == '\0' || std::strcmp(text, "off") == 0) return LL_LOG_OFF;
  if (std::strcmp(text, "error") == 0) return LL_LOG_ERROR;
  if (std::strcmp(text, "info") == 0) return LL_LOG_INFO;
  if (std::strcmp(text, "debug") == 0) return LL_LOG_DEBUG;
  return -1;
}

void write_to_stderr(void*, ll_log_level level, const char* message) {
  static constexpr const char* names[] = {"off", "error", "info", "debug"};
  std::fprintf(stderr, "logitless %s: %s\n", names[level], message);
}

// Recursive, because a callback may call ll_set_log. Held while the callback runs, so that when ll_set_log returns the
// old callback is no longer in use.
struct Sink {
  std::recursive_mutex mutex;
  ll_log_fn fn = write_to_stderr;
  void* user = nullptr;
  std::atomic<ll_log_level> level{std::max<ll_log_level>(level_of_variable(), LL_LOG_OFF)};
};

Sink& sink() noexcept {
  // Never destroyed: other threads may log while the process ends.
  alignas(Sink) static std::byte storage[sizeof(Sink)];
  static Sink* const instance = new (storage) Sink;
  return *instance;
}

}  // namespace

void fail(ll_status status, std::string text) { throw Failure{status, std::move(text)}; }

ll_status record_exception() noexcept {
  try {
    throw;
  } catch (const Failure& failure) {
    return record(failure.status, failure.text.c_str());
  } catch (const std::bad_alloc&) {
    return record(LL_ERROR_OUT_OF_MEMORY, "memory: the library could not allocate what it needs for this call");
  } catch (const std::system_error& error) {
    return record(LL_ERROR_SYSTEM, error.what());
  } catch (const std::exception& error) {
    return record(LL_ERROR_INTERNAL, error.what());
  } catch (...) {
    return record(LL_ERROR_INTERNAL, "an exception of unknown type; please report it");
  }
}

bool logging(ll_log_level level) noexcept { return level <= sink().level.load(std::memory_order_relaxed); }

void log(ll_log_level level, const char* message) noexcept {
  if (!logging(level)) return;
  Sink& to = sink();
  const std::lock_guard lock(to.mutex);
  if (level <= to.level.load(std::memory_order_relaxed)) to.fn(to.user, level, message);
}

void check_log_variable() {
  if (level_of_variable() < 0) {
    refuse("LOGITLESS_LOG: '" + std::string(std::getenv("LOGITLESS_LOG")) + "'; must be off, error, info or debug");
  }
}

std::string number(std::int64_t value) { return std::to_string(value); }

std::string number(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  return std::string(text, end);
}

std::string address(const void* pointer) {
  if (pointer == nullptr) return "null";
  char text[32];
  std::snprintf(text, sizeof text, "%p", pointer);
  return text;
}

std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte >= 0x7f) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(byte));
      out += escaped;
    } else {
      out += c;
    }
  }
  return out += '"';
}

void copy_text(const std::string& text, char* buffer, std::size_t capacity, std::size_t* length) {
  if (length == nullptr) refuse("length: null; must point at a size_t, which receives the length of the text");
  if (buffer == nullptr && capacity != 0) {
    refuse("buffer: null with a capacity of " + std::to_string(capacity) +
           "; must point at that many bytes, or capacity must be 0");
  }
  *length = text.size();
  if (capacity == 0) return;
  const std::size_t copied = std::min(text.size(), capacity - 1);
  std::memcpy(buffer, text.data(), copied);
  buffer[copied] = '\0';
}

}  // namespace logitless::capi

using namespace logitless::capi;

const char* ll_status_name(ll_status status) noexcept {
  switch (status) {
    case LL_OK: return "LL_OK";
    case LL_ERROR_INVALID_ARGUMENT: return "LL_ERROR_INVALID_ARGUMENT";
    case LL_ERROR_TARGET_RANGE: return "LL_ERROR_TARGET_RANGE";
    case LL_ERROR_EMPTY: return "LL_ERROR_EMPTY";
    case LL_ERROR_BUDGET: return "LL_ERROR_BUDGET";
    case LL_ERROR_WORKSPACE: return "LL_ERROR_WORKSPACE";
    case LL_ERROR_UNSUPPORTED: return "LL_ERROR_UNSUPPORTED";
    case LL_ERROR_OUT_OF_MEMORY: return "LL_ERROR_OUT_OF_MEMORY";
    case LL_ERROR_SYSTEM: return "LL_ERROR_SYSTEM";
    case LL_ERROR_INTERNAL: return "LL_ERROR_INTERNAL";
    default: return "unknown status";
  }
}

const char* ll_last_error(void) noexcept { return last_error; }

#define LL_TEXT_OF_(x) #x
#define LL_TEXT_OF(x) LL_TEXT_OF_(x)
const char* ll_version(void) noexcept {
  return LL_TEXT_OF(LL_VERSION_MAJOR) "." LL_TEXT_OF(LL_VERSION_MINOR) "." LL_TEXT_OF(LL_VERSION_PATCH);
}

void ll_set_log(ll_log_fn fn, void* user, ll_log_level level) noexcept {
  Sink& to = sink();
  const std::lock_guard lock(to.mutex);
  to.fn = fn != nullptr ? fn : write_to_stderr;
  to.user = fn != nullptr ? user : nullptr;
  to.level.store(fn != nullptr ? std::clamp<ll_log_level>(level, LL_LOG_OFF, LL_LOG_DEBUG)
                               : std::max<ll_log_level>(level_of_variable(), LL_LOG_OFF),
                 std::memory_order_relaxed);
}
