// One head in a process of its own (posix_spawn of this program), and both heads' gradients against the reference.
#include "measure.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "memory.hpp"
#include "model.hpp"

namespace tiny_lm {
namespace {

using Json = nlohmann::json;

// A line of /proc such as "VmRSS:     1234 kB", in bytes; 0 where there is no such thing.
double kilobytes_of(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string word; file >> word;) {
    if (word == key) {
      double value = 0;
      file >> value;
      return value * 1024;
    }
  }
  return 0;
}

}  // namespace

double available_memory() { return kilobytes_of("/proc/meminfo", "MemAvailable:"); }

void print_head_measurement(const Options& options) {
  const HeadShape shape{options.rows, options.hidden, options.vocab};
  Pool pool(static_cast<int>(options.threads));
  Products products(pool, options.products == "openblas" ? Kernel::openblas : Kernel::eigen);
  const auto elements = [](std::int64_t a, std::int64_t b) { return static_cast<std::size_t>(a * b); };
  Vector<float> x(elements(shape.rows, shape.hidden)), dx(x.size());
  Vector<float> w(elements(shape.vocab, shape.hidden)), dw(w.size());
  std::vector<std::int32_t> y(static_cast<std::size_t>(shape.rows));
  const auto fill = [](Vector<float>& to, std::uint64_t stream, double scale) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i] = static_cast<float>(scale * (random_unit(1, stream, i) - 0.5));
  };
  fill(x, 1, 3.5);  // about the spread of a normalised state
  fill(w, 2, 0.3);
  for (std::size_t i = 0; i < y.size(); ++i) {
    y[i] = static_cast<std::int32_t>(random_bits(1, 3, i) % static_cast<std::uint64_t>(shape.vocab));
  }

  {
    std::ofstream("/proc/self/clear_refs") << "5";
  }  // the high-water mark starts anew, where that is allowed
  const double before = kilobytes_of("/proc/self/status", "VmRSS:");
  const auto head =
      options.measure_head == "dense"
          ? make_dense_head(shape, options.bf16(), options.loss(), products)
          : make_logitless_head(
                shape, options.bf16(), pool,
                {.budget = options.budget, .threads = static_cast<int>(options.threads), .loss = options.loss()});
  HeadMeasurement m{.seconds = std::numeric_limits<double>::infinity()};
  for (std::int64_t run = 0; run < options.steps; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    head->train(x.data(), w.data(), y.data(), dx.data(), dw.data());
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (run == 0) m.peak_bytes = std::max(0.0, kilobytes_of("/proc/self/status", "VmHWM:") - before);
    if (seconds < m.seconds) {
      m.seconds = seconds;
      m.product_seconds = head->product_seconds();
    }
  }
  const Json json{{"peak_bytes", m.peak_bytes},
                  {"extra_bytes", head->extra_bytes()},
                  {"seconds", m.seconds},
                  {"flops", head->product_flops()},
                  {"product_seconds", m.product_seconds}};
  std::printf("%s\n", json.dump().c_str());
}

HeadMeasurement measure_head(const HeadCase& which, const Options& options) {
  const std::vector<std::string> words{"/proc/self/exe",
                                       "--measure-head=" + which.head,
                                       "--steps=" + std::to_string(which.runs),
                                       "--rows=" + std::to_string(which.shape.rows),
                                       "--hidden=" + std::to_string(which.shape.hidden),
                                       "--vocab=" + std::to_string(which.shape.vocab),
                                       "--budget=" + std::to_string(which.budget),
                                       "--head=" + options.head,
                                       "--threads=" + std::to_string(options.threads),
                                       "--products=" + options.products};
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);

  std::array<int, 2> pipe_ends{};
  if (pipe(pipe_ends.data()) != 0) throw std::runtime_error("cannot make a pipe to measure a head");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addclose(&actions, pipe_ends[0]);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t child = 0;
  const int error = posix_spawn(&child, words[0].c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(pipe_ends[1]);
  std::string text;
  std::array<char, 512> buffer{};
  for (ssize_t got = 0; error == 0 && (got = read(pipe_ends[0], buffer.data(), buffer.size())) > 0;) {
    text.append(buffer.data(), static_cast<std::size_t>(got));
  }
  close(pipe_ends[0]);
  int status = 0;
  if (error != 0 || waitpid(child, &status, 0) != child)
    throw std::runtime_error("cannot start this program again to measure a head");
  if (status != 0) return {};  // the budget is below what this case needs, or memory ran out
  const Json json = Json::parse(text);
  return {json.at("peak_bytes"), json.at("extra_bytes"), json.at("seconds"), json.at("flops"),
          json.at("product_seconds")};
}

GradientErrors gradient_errors(const HeadShape& shape, const Options& options, Products& products, const float* x,
                               const float* w, const std::int32_t* y) {
  const ReferenceGradients truth = reference_gradients(shape, options.bf16(), options.loss(), x, w, y);
  const auto error_of = [&](Head& head) {
    Vector<float> dx(truth.dx.size()), dw(truth.dw.size());
    const double loss = head.train(x, w, y, dx.data(), dw.data());
    const auto relative = [](const Vector<float>& got, const std::vector<double>& want) {
      double difference = 0, norm = 0;
      for (std::size_t i = 0; i < want.size(); ++i) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
      }
      return std::sqrt(difference / norm);
    };
    return GradientError{relative(dx, truth.dx), relative(dw, truth.dw), std::abs(loss - truth.loss) / truth.loss};
  };
  const auto logitless = make_logitless_head(
      shape, options.bf16(), products.pool(),
      {.budget = options.budget, .threads = static_cast<int>(options.threads), .loss = options.loss()});
  const auto dense = make_dense_head(shape, options.bf16(), options.loss(), products);
  return {shape.rows, error_of(*logitless), error_of(*dense)};
}

HeadSplit split_by_width(const HeadMeasurement& at_h, const HeadMeasurement& at_2h) {
  // On a disturbed machine the wider head can seem as fast: then nothing is known of the rest.
  const double more = std::max(at_2h.seconds - at_h.seconds, 1e-9);
  const double rate = (at_2h.flops - at_h.flops) / more;
  const double products = std::clamp(at_h.flops / rate, 0.05 * at_h.seconds, at_h.seconds);
  return {products, at_h.seconds - products, at_h.flops / products * 1e-9};
}

}  // namespace tiny_lm
