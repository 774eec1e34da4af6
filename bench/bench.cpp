// run_bench: checks the request, probes the ceilings, runs the suites, reports. See bench.hpp.
#include "bench/bench.hpp"

#include <dlfcn.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>

#include "bench/session.hpp"

extern char** environ;

namespace logitless::bench {

namespace {

constexpr int rounds_before = 3;  // of all ceilings, before the first suite

[[noreturn]] void refuse(const std::string& text) { throw std::invalid_argument(text); }

DType dtype_of_name(const std::string& name) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    if (name == name_of(type)) return type;
  }
  refuse("dtype: " + name + "; must be f32, bf16 or f16, or several of them with commas");
}

std::vector<DType> dtypes_of(const std::string& list) {
  std::vector<DType> types;
  std::stringstream stream(list);
  for (std::string name; std::getline(stream, name, ',');) types.push_back(dtype_of_name(name));
  return types;
}

void check(const BenchRequest& request) {
  bool known = false;
  for (const char* suite : {"ceilings", "linear", "logits", "options", "error", "all"})
    known = known || request.suite == suite;
  if (!known) refuse("suite: " + request.suite + "; must be ceilings, linear, logits, options, error or all");
  (void)dtypes_of(request.dtype);
  if (request.data != "trained" && request.data != "random") {
    refuse("data: " + request.data + "; must be trained or random");
  }
  const auto positive = [](const char* name, std::int64_t value) {
    if (value < 1) refuse(std::string(name) + ": " + std::to_string(value) + "; must be at least 1");
  };
  positive("rows", request.rows);
  positive("hidden", request.hidden);
  positive("vocab", request.vocab);
  if (request.vocab > INT32_MAX) refuse("vocab: " + std::to_string(request.vocab) + "; must be below 2^31");
  if (!(request.ignored >= 0 && request.ignored < 1)) {
    refuse("ignored: " + std::to_string(request.ignored) + "; must be at least 0 and below 1");
  }
  if (!(request.seconds > 0)) refuse("seconds: " + std::to_string(request.seconds) + "; must be above 0");
  if (request.repeats < 0) refuse("repeats: " + std::to_string(request.repeats) + "; must be at least 0");
  if (request.backend == Backend::reference) refuse("backend: reference; must be cpu or cuda");
  if (request.backend == Backend::cuda) {
    if (request.suite != "linear" && request.suite != "logits") {
      refuse("suite: " + request.suite + "; must be linear or logits with backend cuda (bench/gpu.py has more)");
    }
    if (request.peers) refuse("peers: not with backend cuda; bench/gpu.py runs torch beside");
  }
}

ContextOptions context_options(const BenchRequest& request) {
  ContextOptions options;
  options.backend = request.backend;
  options.device = request.device;
  options.threads = request.threads;
  options.cpu_target = request.cpu_target;
  return options;
}

// Tiny shapes are tests of this code: their ceilings need no second and no gigabyte.
bool is_small(const BenchRequest& request) {
  return request.rows * request.vocab < 1 << 20 && request.suite != "ceilings";
}

void complain(const std::string& text) { std::fprintf(stderr, "logitless bench: %s\n", text.c_str()); }

// Beside, then renamed: a failure leaves no half of a file.
bool write_file(const std::string& path, const std::string& text) {
  const std::string beside = path + ".tmp";
  {
    std::ofstream file(beside, std::ios::binary);
    file << text;
    file.close();
    if (!file) {
      complain("json: " + path + " cannot be written: " + std::strerror(errno));
      std::error_code ignored;
      std::filesystem::remove(beside, ignored);
      return false;
    }
  }
  std::error_code error;
  std::filesystem::rename(beside, path, error);
  if (error) {
    complain("json: " + path + " cannot be written: " + error.message());
    std::filesystem::remove(beside, error);
  }
  return !error;
}

// Runs bench/peers/peers.py on the request's shape, its table on stdout (or stderr, when stdout is JSON's).
std::optional<nlohmann::ordered_json> run_peers(const BenchRequest& request, int threads) {
  Dl_info library{};
  // Any function of the library tells which file it was loaded from.
  if (::dladdr(reinterpret_cast<const void*>(&ll_version), &library) == 0 ||
      std::strstr(library.dli_fname, ".so") == nullptr) {
    complain("peers: this command is linked statically; run bench/peers/peers.py --library PATH of liblogitless.so");
    return std::nullopt;
  }
  const std::string script =
      request.peers_script.empty() ? std::string(LOGITLESS_SOURCE_DIR "/bench/peers/peers.py") : request.peers_script;
  if (!std::filesystem::exists(script)) {
    complain("peers: " + script + " does not exist; give its place");
    return std::nullopt;
  }
  char result[] = "/tmp/logitless-peers-XXXXXX";
  const int file = ::mkstemp(result);
  if (file < 0) {
    complain(std::string("peers: no temporary file: ") + std::strerror(errno));
    return std::nullopt;
  }
  ::close(file);
  std::vector<std::string> words{request.python, script, "--library", library.dli_fname, "--json", result};
  const auto add = [&](const char* name, const std::string& value) {
    words.emplace_back(name);
    words.push_back(value);
  };
  add("--rows", std::to_string(request.rows));
  add("--hidden", std::to_string(request.hidden));
  add("--vocab", std::to_string(request.vocab));
  add("--threads", std::to_string(threads));
  add("--seconds", std::to_string(request.seconds));
  add("--ignored", std::to_string(request.ignored));
  if (request.repeats > 0) add("--repeats", std::to_string(request.repeats));
  if (!request.cpu_target.empty()) add("--cpu-target", request.cpu_target);
  add("--suite", request.suite);
  if (!request.dtype.empty()) add("--dtype", request.dtype);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  if (request.json == "-") ::posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
  std::fflush(stdout);
  pid_t child = 0;
  const int failed = ::posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  int status = -1;
  if (failed == 0) {
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  }
  std::ifstream stream(result);
  const std::string text((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  ::unlink(result);
  if (failed != 0) {
    complain("peers: " + request.python + " cannot be run: " + std::strerror(failed));
    return std::nullopt;
  }
  auto json = nlohmann::ordered_json::parse(text, nullptr, false);
  if (status != 0 || json.is_discarded()) {
    complain("peers: " + script + " failed");
    return std::nullopt;
  }
  return json;
}

}  // namespace

Session::Session(const BenchRequest& asked)
    : request(asked),
      context(context_options(asked)),
      context_facts(nlohmann::json::parse(context.describe(Format::json))),
      cpu_target(context_facts.at("cpu_target").get<std::string>()),
      team(context_facts.at("threads").get<int>()),
      ceilings(team, is_small(asked)) {}

DataRequest Session::data_request(DType dtype) const {
  return {.rows = request.rows,
          .hidden = request.hidden,
          .vocab = request.vocab,
          .dtype = dtype,
          .trained = request.data == "trained",
          .ignored = request.ignored,
          .seed = request.seed};
}

std::vector<DType> Session::dtypes(const std::vector<DType>& by_default) const {
  return request.dtype.empty() ? by_default : dtypes_of(request.dtype);
}

namespace {

// Prints and writes what was measured, with the peers where they were asked for. 0, or 1 after a line on stderr.
int report(const Session& session) {
  const BenchRequest& request = session.request;
  nlohmann::ordered_json json = report_json(session);
  const bool json_only = request.json == "-";
  if (!json_only) std::fputs(report_text(session).c_str(), stdout);
  int result = 0;
  if (request.peers) {
    if (auto peers = run_peers(request, session.team.size())) {
      json["peers"] = std::move(*peers);
    } else {
      result = 1;
    }
  }
  if (json_only) {
    std::fputs((json.dump(2) + "\n").c_str(), stdout);
  } else if (!request.json.empty() && !write_file(request.json, json.dump(2) + "\n")) {
    result = 1;
  }
  return result;
}

}  // namespace

int run_bench(const BenchRequest& request) {
  check(request);
  Session session(request);
  if (session.on_device()) {
    const bool linear = request.suite == "linear";
    const std::vector<DType> by_default = linear ? std::vector{DType::bf16} : std::vector{DType::f32, DType::bf16};
    for (const DType dtype : session.dtypes(by_default)) {
      linear ? run_linear_on_device(session, dtype) : run_logits_on_device(session, dtype);
    }
    return report(session);
  }
  const bool all = request.suite == "all";
  const auto wanted = [&](const char* suite) { return all || request.suite == suite; };

  for (int round = 0; round < rounds_before; ++round) {
    for (int i = 0; i < ceiling_count; ++i) session.ceilings.probe(static_cast<Ceiling>(i));
  }
  if (wanted("linear")) {
    for (const DType dtype : session.dtypes({DType::bf16})) run_linear(session, dtype);
  }
  if (wanted("logits")) {
    for (const DType dtype : session.dtypes({DType::f32, DType::bf16})) run_logits(session, dtype);
  }
  if (wanted("options")) {
    for (const DType dtype : session.dtypes({DType::f32, DType::bf16})) run_options(session, dtype);
  }
  if (wanted("error")) {
    for (const DType dtype : session.dtypes({DType::bf16})) run_error(session, dtype);
  }

  return report(session);
}

}  // namespace logitless::bench
