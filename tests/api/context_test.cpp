// Contexts, the environment, descriptions, the log, status names. No compute call.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "small_problem.hpp"

namespace faces {
namespace {

// Sets a variable for one test.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    const char* before = std::getenv(name);
    had_ = before != nullptr;
    if (had_) before_ = before;
    setenv(name, value, 1);
  }
  ~Variable() {
    if (had_) {
      setenv(name_, before_.c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }

 private:
  const char* name_;
  bool had_ = false;
  std::string before_;
};

ll_context_options options_with(void (*change)(ll_context_options&)) {
  ll_context_options options;
  ll_context_options_init(&options);
  change(options);
  return options;
}

ll_status create(const ll_context_options& options) {
  int somewhere = 0;
  auto* context = reinterpret_cast<ll_context*>(&somewhere);  // never followed: a failure must replace it by null
  const ll_status status = ll_context_create(&options, &context);
  if (status == LL_OK) {
    ll_context_destroy(context);
  } else {
    EXPECT_EQ(context, nullptr);
  }
  return status;
}

std::string describe(const ll_context* context, ll_format format) {
  std::size_t length = 0;
  EXPECT_EQ(ll_context_describe(context, format, nullptr, 0, &length), LL_OK) << ll_last_error();
  std::string text(length + 1, '?');
  EXPECT_EQ(ll_context_describe(context, format, text.data(), text.size(), &length), LL_OK);
  EXPECT_EQ(text.back(), '\0');
  text.pop_back();
  return text;
}

TEST(Version, TextAgreesWithTheHeader) {
  EXPECT_EQ(std::string(ll_version()), std::to_string(LL_VERSION_MAJOR) + "." + std::to_string(LL_VERSION_MINOR) + "." +
                                           std::to_string(LL_VERSION_PATCH));
}

TEST(Status, EveryOneHasItsName) {
  const std::vector<std::pair<ll_status, std::string>> names = {
      {LL_OK, "LL_OK"},
      {LL_ERROR_INVALID_ARGUMENT, "LL_ERROR_INVALID_ARGUMENT"},
      {LL_ERROR_TARGET_RANGE, "LL_ERROR_TARGET_RANGE"},
      {LL_ERROR_EMPTY, "LL_ERROR_EMPTY"},
      {LL_ERROR_BUDGET, "LL_ERROR_BUDGET"},
      {LL_ERROR_WORKSPACE, "LL_ERROR_WORKSPACE"},
      {LL_ERROR_UNSUPPORTED, "LL_ERROR_UNSUPPORTED"},
      {LL_ERROR_OUT_OF_MEMORY, "LL_ERROR_OUT_OF_MEMORY"},
      {LL_ERROR_SYSTEM, "LL_ERROR_SYSTEM"},
      {LL_ERROR_INTERNAL, "LL_ERROR_INTERNAL"}};
  for (const auto& [status, name] : names) EXPECT_EQ(ll_status_name(status), name);
  EXPECT_STREQ(ll_status_name(-1), "unknown status");
  EXPECT_STREQ(ll_status_name(10), "unknown status");
}

TEST(LastError, BelongsToItsThread) {
  EXPECT_NE(ll_context_create(nullptr, nullptr), LL_OK);
  const std::string here = ll_last_error();
  EXPECT_FALSE(here.empty());
  std::string there = "not read";
  std::thread([&] { there = ll_last_error(); }).join();
  EXPECT_EQ(there, "");
  EXPECT_EQ(ll_last_error(), here);
}

TEST(Context, NullOptionsAreTheDefaults) {
  ll_context* context = nullptr;
  ASSERT_EQ(ll_context_create(nullptr, &context), LL_OK) << ll_last_error();
  ll_context_destroy(context);
  ll_context_destroy(nullptr);
}

TEST(Context, RefusesBadOptions) {
  EXPECT_TRUE(refused(ll_context_create(nullptr, nullptr), LL_ERROR_INVALID_ARGUMENT, {"context", "null"}));
  EXPECT_TRUE(refused(create(options_with([](auto& o) { o.threads = -3; })), LL_ERROR_INVALID_ARGUMENT,
                      {"threads: -3", "1 to 1024"}));
  EXPECT_TRUE(refused(create(options_with([](auto& o) { o.threads = 1025; })), LL_ERROR_INVALID_ARGUMENT,
                      {"threads: 1025", "1 to 1024"}));
  EXPECT_TRUE(refused(create(options_with([](auto& o) { o.backend = 9; })), LL_ERROR_INVALID_ARGUMENT,
                      {"backend: 9", "LL_BACKEND_CPU", "LL_BACKEND_REFERENCE"}));
  // Without CUDA in the build, or without a device, the reason is named.
  ll_context* device = nullptr;
  const ll_context_options cuda = options_with([](auto& o) { o.backend = LL_BACKEND_CUDA; });
  if (ll_context_create(&cuda, &device) != LL_OK) {
    EXPECT_TRUE(refused(create(cuda), LL_ERROR_UNSUPPORTED, {"backend: LL_BACKEND_CUDA", "CUDA"}));
  }
  ll_context_destroy(device);
  EXPECT_TRUE(refused(create(options_with([](auto& o) {
                        o.backend = LL_BACKEND_CUDA;
                        o.device = 4096;
                      })),
                      LL_ERROR_UNSUPPORTED, {"backend: LL_BACKEND_CUDA"}));
  EXPECT_TRUE(refused(create(options_with([](auto& o) { o.device = 1; })), LL_ERROR_INVALID_ARGUMENT,
                      {"device: 1", "must be 0"}));
  EXPECT_TRUE(refused(create(options_with([](auto& o) { o.reserved = 1; })), LL_ERROR_INVALID_ARGUMENT,
                      {"reserved: 1", "must be 0"}));
  EXPECT_TRUE(refused(create(options_with([](auto& o) { o.cpu_target = "sse9"; })), LL_ERROR_INVALID_ARGUMENT,
                      {"cpu_target: 'sse9'", "scalar", "avx2", "amx"}));
  EXPECT_TRUE(refused(create(options_with([](auto& o) { o.parallel_for_user = &o; })), LL_ERROR_INVALID_ARGUMENT,
                      {"parallel_for: null", "parallel_for_user"}));
}

TEST(Context, RefusesBadVariablesByName) {
  const ll_context_options defaults = options_with([](auto&) {});
  for (const char* value : {"0", "-1", "two", "2x", " 2", "1025", "99999999999999999999"}) {
    const Variable set("LOGITLESS_NUM_THREADS", value);
    EXPECT_TRUE(refused(create(defaults), LL_ERROR_INVALID_ARGUMENT,
                        {"LOGITLESS_NUM_THREADS: '" + std::string(value) + "'", "1 to 1024"}));
    // What the caller says wins, and the variable is not looked at.
    EXPECT_EQ(create(options_with([](auto& o) { o.threads = 1; })), LL_OK) << ll_last_error();
  }
  {
    const Variable set("LOGITLESS_CPU_TARGET", "mmx");
    EXPECT_TRUE(refused(create(defaults), LL_ERROR_INVALID_ARGUMENT, {"LOGITLESS_CPU_TARGET: 'mmx'", "scalar"}));
    EXPECT_EQ(create(options_with([](auto& o) { o.cpu_target = "scalar"; })), LL_OK) << ll_last_error();
  }
  {
    const Variable set("LOGITLESS_LOG", "loud");
    EXPECT_TRUE(
        refused(create(defaults), LL_ERROR_INVALID_ARGUMENT, {"LOGITLESS_LOG: 'loud'", "off, error, info or debug"}));
  }
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LOGITLESS_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define LOGITLESS_SANITIZED 1
#endif
#endif

// In a child whose address space has no room for a thousand stacks. Sanitizers reserve address space of their own and
// cannot be limited.
#ifndef LOGITLESS_SANITIZED
TEST(Context, ThreadsThatTheSystemRefuses) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    long pages = 0;
    if (std::FILE* statm = std::fopen("/proc/self/statm", "r")) {
      if (std::fscanf(statm, "%ld", &pages) != 1) pages = 0;
      std::fclose(statm);
    }
    const rlim_t room = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE)) + (rlim_t{64} << 20);
    const rlimit limit{room, room};
    if (pages == 0 || setrlimit(RLIMIT_AS, &limit) != 0) _exit(2);
    const ll_status status = create(options_with([](auto& o) { o.threads = 1024; }));
    if (!refused(status, LL_ERROR_SYSTEM, {"threads", "cannot be started"})) _exit(3);
    _exit(create(options_with([](auto& o) { o.threads = 1; })) == LL_OK ? 0 : 4);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "killed by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0) << "2: no limit could be set, 3: another status or text, 4: nothing works any more";
}
#endif

TEST(Context, HonoursVariables) {
  const Variable threads("LOGITLESS_NUM_THREADS", "3");
  const Variable target("LOGITLESS_CPU_TARGET", "scalar");
  ll_context* raw = nullptr;
  ASSERT_EQ(ll_context_create(nullptr, &raw), LL_OK) << ll_last_error();
  const ContextPointer context(raw);
  const auto json = nlohmann::json::parse(describe(raw, LL_JSON));
  EXPECT_EQ(json.at("threads"), 3);
  EXPECT_EQ(json.at("cpu_target"), "scalar");
  EXPECT_EQ(json.at("cpu_target_reason"), "asked for by LOGITLESS_CPU_TARGET");
}

TEST(Context, EmptyVariablesAreUnset) {
  const Variable threads("LOGITLESS_NUM_THREADS", "");
  const Variable target("LOGITLESS_CPU_TARGET", "");
  const Variable log("LOGITLESS_LOG", "");
  EXPECT_EQ(create(options_with([](auto&) {})), LL_OK) << ll_last_error();
}

// Every target either makes a context, or is refused with the reason that the description gives.
TEST(Context, TargetsAreListedAndForced) {
  const ContextPointer any = make_context(LL_BACKEND_CPU);
  const auto json = nlohmann::json::parse(describe(any.get(), LL_JSON));
  EXPECT_EQ(json.at("version"), ll_version());
  EXPECT_FALSE(json.at("processor").get<std::string>().empty());
  EXPECT_EQ(json.at("backend"), "cpu");
  const nlohmann::json& backends = json.at("backends");
  EXPECT_TRUE(backends == nlohmann::json({"cpu", "reference"}) ||
              backends == nlohmann::json({"cpu", "reference", "cuda"}))
      << backends;
  EXPECT_GE(json.at("cuda_devices").get<int>(), 0);
  EXPECT_TRUE(json.at("device").is_null());
  EXPECT_EQ(json.at("executor"), "pool");
  int chosen = 0;
  std::vector<std::string> names;
  for (const auto& target : json.at("cpu_targets")) {
    const std::string name = target.at("name");
    names.push_back(name);
    ll_context_options options = options_with([](auto&) {});
    options.cpu_target = name.c_str();
    if (target.at("supported")) {
      EXPECT_TRUE(target.at("why_not").is_null());
      ll_context* raw = nullptr;
      ASSERT_EQ(ll_context_create(&options, &raw), LL_OK) << ll_last_error();
      const ContextPointer forced(raw);
      EXPECT_EQ(nlohmann::json::parse(describe(raw, LL_JSON)).at("cpu_target"), name);
    } else {
      EXPECT_TRUE(refused(create(options), LL_ERROR_UNSUPPORTED, {"cpu_target: " + name, target.at("why_not")}));
    }
    if (target.at("chosen")) {
      ++chosen;
      EXPECT_EQ(json.at("cpu_target"), name);
    }
  }
  EXPECT_EQ(chosen, 1);
  EXPECT_EQ(names, (std::vector<std::string>{"scalar", "avx2", "avx512", "avx512bf16", "amx"}));
}

TEST(Context, TextNamesTheSameThings) {
  const ContextPointer context = make_context(LL_BACKEND_CPU, 2);
  const std::string text = describe(context.get(), LL_TEXT);
  for (const char* piece : {"logitless ", ll_version(), "processor", "cpu targets", "scalar", "amx",
                            "chosen: ", "threads    2", "backend    cpu"}) {
    EXPECT_NE(text.find(piece), std::string::npos) << piece << " is not in:\n" << text;
  }
  const ContextPointer reference = make_context(LL_BACKEND_REFERENCE);
  EXPECT_NE(describe(reference.get(), LL_TEXT).find("backend    reference"), std::string::npos);
  EXPECT_EQ(nlohmann::json::parse(describe(reference.get(), LL_JSON)).at("executor"), "calling_thread");
}

TEST(Context, DescribeCutsAtTheCapacity) {
  const ContextPointer context = make_context(LL_BACKEND_CPU);
  const std::string whole = describe(context.get(), LL_TEXT);
  char buffer[8] = "@@@@@@@";
  std::size_t length = 0;
  ASSERT_EQ(ll_context_describe(context.get(), LL_TEXT, buffer, 5, &length), LL_OK);
  EXPECT_EQ(length, whole.size());
  EXPECT_EQ(std::string(buffer), whole.substr(0, 4));
  EXPECT_EQ(buffer[5], '@') << "wrote beyond the capacity";
  EXPECT_TRUE(refused(ll_context_describe(context.get(), LL_TEXT, nullptr, 5, &length), LL_ERROR_INVALID_ARGUMENT,
                      {"buffer: null", "capacity of 5"}));
  EXPECT_TRUE(refused(ll_context_describe(context.get(), LL_TEXT, buffer, 5, nullptr), LL_ERROR_INVALID_ARGUMENT,
                      {"length: null"}));
  EXPECT_TRUE(refused(ll_context_describe(context.get(), 3, buffer, 5, &length), LL_ERROR_INVALID_ARGUMENT,
                      {"format: 3", "LL_TEXT", "LL_JSON"}));
  EXPECT_TRUE(
      refused(ll_context_describe(nullptr, LL_TEXT, buffer, 5, &length), LL_ERROR_INVALID_ARGUMENT, {"context: null"}));
}

// ---- log ------------------------------------------------------------------------------------------------------------------

struct Heard {
  std::vector<std::pair<ll_log_level, std::string>> messages;
  static void hear(void* user, ll_log_level level, const char* message) {
    static_cast<Heard*>(user)->messages.emplace_back(level, message);
  }
  ~Heard() { ll_set_log(nullptr, nullptr, LL_LOG_OFF); }
};

TEST(Log, ErrorsReachTheCallback) {
  Heard heard;
  ll_set_log(Heard::hear, &heard, LL_LOG_ERROR);
  EXPECT_NE(create(options_with([](auto& o) { o.threads = -7; })), LL_OK);
  EXPECT_EQ(create(options_with([](auto& o) { o.threads = 1; })), LL_OK);
  ASSERT_EQ(heard.messages.size(), 1u);
  EXPECT_EQ(heard.messages[0].first, LL_LOG_ERROR);
  EXPECT_NE(heard.messages[0].second.find("threads: -7"), std::string::npos);
}

TEST(Log, LevelsNest) {
  Heard heard;
  ll_set_log(Heard::hear, &heard, LL_LOG_DEBUG);
  SmallProblem small;
  const ContextPointer context = make_context(LL_BACKEND_CPU);
  small.plan(context.get());
  ASSERT_EQ(heard.messages.size(), 2u);
  EXPECT_EQ(heard.messages[0].first, LL_LOG_INFO);
  EXPECT_NE(heard.messages[0].second.find("2 threads"), std::string::npos) << heard.messages[0].second;
  EXPECT_EQ(heard.messages[1].first, LL_LOG_DEBUG);

  heard.messages.clear();
  ll_set_log(Heard::hear, &heard, LL_LOG_OFF);
  EXPECT_NE(create(options_with([](auto& o) { o.threads = -7; })), LL_OK);
  EXPECT_TRUE(heard.messages.empty());
}

TEST(Log, VariableSendsToStderr) {
  const Variable set("LOGITLESS_LOG", "error");
  ll_set_log(nullptr, nullptr, LL_LOG_OFF);
  testing::internal::CaptureStderr();
  EXPECT_NE(create(options_with([](auto& o) { o.threads = -7; })), LL_OK);
  EXPECT_EQ(create(options_with([](auto& o) { o.threads = 1; })), LL_OK);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(text.find("logitless error: threads: -7"), 0u) << text;
  EXPECT_EQ(text.find("context:"), std::string::npos) << "info is above the level: " << text;
  {
    const Variable off("LOGITLESS_LOG", "off");
    ll_set_log(nullptr, nullptr, LL_LOG_OFF);
  }
  testing::internal::CaptureStderr();
  EXPECT_NE(create(options_with([](auto& o) { o.threads = -7; })), LL_OK);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(Log, CallbackMayCallBack) {
  struct Once {
    int count = 0;
    static void hear(void* user, ll_log_level, const char*) {
      ++static_cast<Once*>(user)->count;
      ll_set_log(nullptr, nullptr, LL_LOG_OFF);
    }
  } once;
  ll_set_log(Once::hear, &once, LL_LOG_ERROR);
  for (int i = 0; i < 2; ++i) EXPECT_NE(create(options_with([](auto& o) { o.threads = -7; })), LL_OK);
  EXPECT_EQ(once.count, 1);
}

}  // namespace
}  // namespace faces
