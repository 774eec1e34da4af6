// Small parts of src/capi that the ABI cannot show by itself: the JSON escaper, numbers in messages, the lock.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "capi/fork_lock.hpp"
#include "capi/status.hpp"

namespace logitless::capi {
namespace {

// Whatever bytes a processor's name may hold, JSON stays valid and says the same (bytes above 127 as Latin-1).
TEST(JsonString, AnyBytesGiveValidJson) {
  std::string all, want;
  for (int i = 0; i < 256; ++i) {
    all += static_cast<char>(i);
    if (i < 128) {
      want += static_cast<char>(i);
    } else {
      want += static_cast<char>(0xc0 | (i >> 6));
      want += static_cast<char>(0x80 | (i & 0x3f));
    }
  }
  EXPECT_EQ(nlohmann::json::parse(json_string(all)).get<std::string>(), want);
  EXPECT_EQ(json_string("a\"b\\c\n"), "\"a\\\"b\\\\c\\u000a\"");
  EXPECT_EQ(json_string(""), "\"\"");
}

TEST(Number, ReadsBackAsItself) {
  EXPECT_EQ(number(0.1), "0.1");
  EXPECT_EQ(number(1.5), "1.5");
  EXPECT_EQ(number(std::numeric_limits<double>::quiet_NaN()), "nan");
  EXPECT_EQ(number(-std::numeric_limits<double>::infinity()), "-inf");
  for (const double each : {1.0 / 3.0, 1e300, -5e-324, std::numeric_limits<double>::max()}) {
    EXPECT_EQ(std::strtod(number(each).c_str(), nullptr), each);
  }
  EXPECT_EQ(number(std::numeric_limits<std::int64_t>::min()), "-9223372036854775808");
}

TEST(Guarded, EveryExceptionHasAStatus) {
  EXPECT_EQ(guarded([] {}), LL_OK);
  EXPECT_EQ(guarded([] { fail(LL_ERROR_BUDGET, "too small"); }), LL_ERROR_BUDGET);
  EXPECT_STREQ(ll_last_error(), "too small");
  EXPECT_EQ(guarded([] { throw std::bad_alloc(); }), LL_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(guarded([] { throw std::system_error(EAGAIN, std::generic_category(), "threads"); }), LL_ERROR_SYSTEM);
  EXPECT_EQ(std::string(ll_last_error()).find("threads"), 0u);
  EXPECT_EQ(guarded([] { throw std::runtime_error("odd"); }), LL_ERROR_INTERNAL);
  EXPECT_EQ(guarded([] { throw 5; }), LL_ERROR_INTERNAL);
  // Longer than its buffer: cut, not overrun.
  EXPECT_EQ(guarded([] { refuse(std::string(5000, 'x')); }), LL_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(ll_last_error()), std::string(1023, 'x'));
}

TEST(ForkLock, ExcludesAndHandsOver) {
  ForkLock lock;
  std::int64_t count = 0;  // plain: TSan sees a lock that does not order
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5000; ++i) {
        const std::lock_guard hold(lock);
        ++count;
      }
    });
  }
  for (std::thread& each : threads) each.join();
  EXPECT_EQ(count, 20000);
}

TEST(ForkLock, AParentsLockIsOpenInTheChild) {
  ForkLock lock;
  lock.lock();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    lock.lock();
    lock.unlock();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the child waited for a thread that does not exist";
  lock.unlock();
}

}  // namespace
}  // namespace logitless::capi
