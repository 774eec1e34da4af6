// Failures and messages of the C ABI. Inside src/capi a failure is thrown as Failure; guarded() is the only way out of
// the library, so that no exception crosses the ABI. The text of a thread's last failure lives in a fixed buffer: a
// report of "out of memory" must not need memory.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "logitless/logitless.h"

namespace logitless::capi {

struct Failure {
  ll_status status;
  std::string text;  // one line: argument, value, what would be right
};

[[noreturn]] void fail(ll_status status, std::string text);
[[noreturn]] inline void refuse(std::string text) { fail(LL_ERROR_INVALID_ARGUMENT, std::move(text)); }

// Turns the exception being handled into this thread's last error, and logs it.
ll_status record_exception() noexcept;

template <class Body>
ll_status guarded(Body&& body) noexcept {
  try {
    body();
    return LL_OK;
  } catch (...) {
    return record_exception();
  }
}

// Messages go to ll_set_log's callback, or to stderr under LOGITLESS_LOG.
bool logging(ll_log_level level) noexcept;
void log(ll_log_level level, const char* message) noexcept;
// Throws when LOGITLESS_LOG is not a level.
void check_log_variable();

// ---- pieces of messages; they allocate, so only failures and descriptions use them ----

std::string number(std::int64_t value);
std::string number(double value);  // the shortest text that reads back as the same number
std::string address(const void* pointer);
// A JSON string with its quotes. Bytes outside ASCII are taken as Latin-1, so that any input gives valid JSON.
std::string json_string(std::string_view text);

// The two-step protocol of ll_*_describe.
void copy_text(const std::string& text, char* buffer, std::size_t capacity, std::size_t* length);

}  // namespace logitless::capi
