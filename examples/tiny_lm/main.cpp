// tiny_lm: trains a small language model on real text twice, with Logitless and with dense logits, and shows both.
//
// Order: text and vocabulary (or a checkpoint), two trainings in step, checkpoint and head.safetensors, measurements,
// sentences, report, ten lines, commands. Ctrl-C during training finishes the step and leaves a checkpoint (exit 130).
// Exit codes: 0 done, 1 failure, 2 usage. Progress goes to a terminal only.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <logitless/logitless.hpp>
#include <nlohmann/json.hpp>
#include <thread>

#include "files/files.hpp"
#include "report.hpp"
#include "text.hpp"
#include "trainer.hpp"

#ifndef TINY_LM_SOURCE_DIR
#define TINY_LM_SOURCE_DIR "."
#endif

namespace tiny_lm {
namespace fs = std::filesystem;
namespace {

constexpr int exit_interrupted = 130;

// The one global of the program: a signal handler can reach nothing else.
volatile std::sig_atomic_t interrupted = 0;

void on_signal(int signal) {
  interrupted = 1;
  std::signal(signal, SIG_DFL);  // the second Ctrl-C ends at once
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// A line that overwrites itself on a terminal, and is nothing elsewhere.
class Progress {
 public:
  void show(const std::string& line) {
    if (!terminal_) return;
    std::fprintf(stderr, "\r%s\033[K", line.c_str());
    std::fflush(stderr);
    shown_ = true;
  }
  void clear() {
    if (shown_) std::fputs("\r\033[K", stderr);
    shown_ = false;
  }
  // A line that stays, on stdout.
  void say(const std::string& line) {
    clear();
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }

 private:
  bool terminal_ = isatty(STDERR_FILENO) != 0;
  bool shown_ = false;
};

template <class... Values>
std::string format(const char* pattern, Values... values) {
  std::array<char, 400> text{};
  std::snprintf(text.data(), text.size(), pattern, values...);
  return text.data();
}

std::string clock_text(double seconds) {
  const auto whole = std::llround(seconds);
  return format("%lld:%02lld", whole / 60, whole % 60);
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown processor";
}

Text text_for(const Options& options, std::string& source) {
  if (options.text.empty()) {
    source = "this repository's own sources and documentation";
    return read_text(TINY_LM_SOURCE_DIR);
  }
  const fs::path path(options.text);
  source = path.string();
  if (options.text.find("janeaustenr") != std::string::npos)
    source = "Jane Austen's novels (Debian's r-cran-janeaustenr)";
  return read_text(path);
}

void extract(const Options& options) {
  std::string source;
  const Text text = text_for(options, source);
  std::ofstream file(options.extract, std::ios::binary);
  for (const std::string& paragraph : text.paragraphs) file << paragraph << '\n';
  file.flush();
  if (!file) throw InputError("--extract: '" + options.extract + "' cannot be written");
  std::printf("text: %s, %s paragraphs, %s bytes\n", source.c_str(),
              number_text(static_cast<std::int64_t>(text.paragraphs.size())).c_str(), number_text(text.bytes).c_str());
}

// Text to vocabulary and tokens, saved in the run's folder.
struct Prepared {
  std::string source, size;  // in words
};

Prepared prepare(const Options& options, const fs::path& out, Progress& progress) {
  Prepared prepared;
  const Text text = text_for(options, prepared.source);
  if (options.text.empty()) progress.say("text: no --text was given, so " + prepared.source + " it is");
  std::vector<std::string> train, held_out;
  split_text(text, train, held_out);
  if (train.empty() || held_out.empty() || text.bytes < 2000) {
    throw InputError("--text: " + number_text(text.bytes) + " bytes in " +
                     number_text(static_cast<std::int64_t>(text.paragraphs.size())) +
                     " paragraphs are too few; give at least 2,000 bytes in 2 paragraphs");
  }
  progress.show("training the vocabulary ...");
  const Tokenizer tokenizer = Tokenizer::train(train, options.vocab, static_cast<int>(options.threads));
  progress.show("encoding the text ...");
  const Corpus corpus = encode_corpus(tokenizer, train, held_out);
  const auto tokens = static_cast<std::int64_t>(corpus.train.size() + corpus.held_out.size());
  prepared.size =
      format("%.1f MB, ", static_cast<double>(text.bytes) * 1e-6) + number_text(tokens) + " tokens, 5 % held out";
  progress.say("text: " + prepared.source + ", " + prepared.size);
  progress.say("vocabulary: " + number_text(tokenizer.vocab()) + " byte-pair pieces" +
               (tokenizer.vocab() < options.vocab
                    ? ", as many as this text supports (asked for up to " + number_text(options.vocab) + ")"
                    : std::string()));
  save_corpus(out, corpus, tokenizer);
  return prepared;
}

std::string progress_line(Trainer& trainer, const Options& options, double seconds, std::int64_t since) {
  const StepRecord &ours = trainer.logitless().steps.back(), &dense = trainer.dense().steps.back();
  const auto speed = [&](const StepRecord& s) {
    return static_cast<double>(options.rows) / (s.body + s.head + s.adam);
  };
  const auto done = static_cast<double>(trainer.done() - since);
  const double left = seconds / done * static_cast<double>(options.steps - trainer.done());
  return format("step %lld/%lld   loss %.4f (dense %.4f)   %.0f tokens/s (dense %.0f)   %s left",
                static_cast<long long>(trainer.done()), static_cast<long long>(options.steps), ours.loss, dense.loss,
                speed(ours), speed(dense), clock_text(left).c_str());
}

// True when all steps are done, false when interrupted.
bool train(Trainer& trainer, const Options& options, Progress& progress) {
  const std::int64_t since = trainer.done();
  const auto begin = std::chrono::steady_clock::now();
  while (trainer.done() < options.steps) {
    if (interrupted != 0 || (options.stop_after > 0 && trainer.done() >= options.stop_after)) return false;
    trainer.step();
    if (trainer.done() % options.every == 0 || trainer.done() == options.steps) {
      trainer.evaluate();
      const Evaluation &ours = trainer.logitless().evaluations.back(), &dense = trainer.dense().evaluations.back();
      progress.say(format("step %lld: held-out perplexity %.2f, dense %.2f", static_cast<long long>(trainer.done()),
                          ours.perplexity, dense.perplexity));
    }
    progress.show(progress_line(trainer, options, seconds_since(begin), since));
  }
  progress.clear();
  return true;
}

std::vector<MemoryPoint> measure_memory(const Options& options, const Sizes& sizes, Progress& progress) {
  std::vector<MemoryPoint> points;
  const std::int64_t own = options.rows;
  for (const std::int64_t rows : {own / 4, own / 2, own, own * 2, own * 4, own * 8}) {
    if (rows < 1) continue;
    progress.show(format("measuring the heads' memory at R = %lld ...", static_cast<long long>(rows)));
    MemoryPoint point{.rows = rows};
    const HeadShape shape{rows, sizes.hidden, sizes.vocab};
    const double dense = 3.0 * 4.0 * static_cast<double>(rows) * static_cast<double>(sizes.vocab);
    if (dense < 0.7 * available_memory()) point.dense = measure_head({"dense", shape}, options).peak_bytes;
    point.logitless = measure_head({"logitless", shape}, options).peak_bytes;
    point.logitless_budgeted = measure_head({"logitless", shape, options.budget}, options).peak_bytes;
    points.push_back(point);
  }
  return points;
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

// For a shell: quoted only when that is needed.
std::string shell_word(const std::string& word) {
  if (word.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-./:=+") ==
      std::string::npos)
    return word;
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

// As a command line takes it: whole MiB where they are.
std::string size_argument(std::size_t bytes) {
  return bytes % (std::size_t{1} << 20) == 0 ? std::to_string(bytes >> 20) + "MiB" : std::to_string(bytes);
}

// Hidden states, weight and targets of the trained head, and the commands that look at them.
std::vector<std::string> save_head(Trainer& trainer, const Options& options, const fs::path& out) {
  std::vector<float> hidden;
  std::vector<std::int32_t> targets;
  trainer.final_states(hidden, targets);
  const Sizes& sizes = trainer.sizes();
  const auto rows = static_cast<std::int64_t>(targets.size());
  const std::string path = (out / "head.safetensors").string();
  const std::vector<logitless::files::Source> sources{
      {"hidden", LL_F32, {rows, sizes.hidden}, hidden.data()},
      {"weight", LL_F32, {sizes.vocab, sizes.hidden}, trainer.logitless().parameters.data()},
      {"targets", LL_I32, {rows}, targets.data()}};
  logitless::files::write(path, sources);
  const std::string tool = shell_word(options.cli);
  const std::string inputs = " --hidden " + shell_word(path + ":hidden") + " --weight " + shell_word(path + ":weight") +
                             " --targets " + shell_word(path + ":targets");
  return {tool + " loss" + inputs, tool + " check" + inputs,
          tool + " plan --rows " + std::to_string(rows) + " --hidden " + std::to_string(sizes.hidden) + " --vocab " +
              std::to_string(sizes.vocab) + " --dtype f32" +
              (options.budget > 0 ? " --budget " + size_argument(options.budget) : std::string())};
}

double peak_of_process() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024;
}

GradientErrors measure_gradients(Trainer& trainer, const Options& options, Products& products) {
  std::vector<float> hidden;
  std::vector<std::int32_t> targets;
  trainer.final_states(hidden, targets);
  const HeadShape shape{std::min<std::int64_t>(48, static_cast<std::int64_t>(targets.size())), trainer.sizes().hidden,
                        trainer.sizes().vocab};
  return gradient_errors(shape, options, products, hidden.data(), trainer.logitless().parameters.data(),
                         targets.data());
}

void make_folder(const fs::path& out) {
  std::error_code error;
  fs::create_directories(out, error);
  if (error || access(out.c_str(), W_OK) != 0) {
    throw UsageError("--out: '" + out.string() + "' is not a folder that can be written");
  }
}

HeadSplit measure_split(const Options& options, const Sizes& sizes) {
  const HeadShape shape{options.rows, sizes.hidden, sizes.vocab}, wide{options.rows, 2 * sizes.hidden, sizes.vocab};
  for (const std::uint64_t budget : {options.budget, std::uint64_t{0}}) {  // twice the width may need more
    const HeadMeasurement at_h = measure_head({"logitless", shape, budget, 5}, options);
    const HeadMeasurement at_2h = measure_head({"logitless", wide, budget, 5}, options);
    if (at_h.seconds > 0 && at_2h.seconds > 0) return split_by_width(at_h, at_2h);
  }
  throw std::runtime_error("the head cannot be measured in a process of its own");
}

Trainer make_trainer(const Options& options, std::int64_t vocab, Corpus corpus, Products& products) {
  try {
    return Trainer(options, vocab, std::move(corpus), products);
  } catch (const logitless::Error& error) {
    if (error.status() != LL_ERROR_BUDGET) throw;
    throw UsageError(std::string("--budget: ") + error.what());
  }
}

// Everything after training: measurements, sentences, the page. Can be had again by --resume.
Findings examine(Trainer& trainer, const Tokenizer& tokenizer, const Options& options, Products& products,
                 const fs::path& out, Progress& progress) {
  Findings found;
  found.options = options;
  found.sizes = trainer.sizes();
  found.kernel = products.kernel();
  found.plan = summary_of(*trainer.logitless().head);
  found.dense_flops = trainer.dense().head->product_flops();
  for (const StepRecord& step : trainer.logitless().steps) found.logitless_loss.push_back(step.loss);
  for (const StepRecord& step : trainer.dense().steps) found.dense_loss.push_back(step.loss);
  found.logitless_perplexity = trainer.logitless().evaluations;
  found.dense_perplexity = trainer.dense().evaluations;
  found.logitless_step = typical_step(trainer.logitless());
  found.dense_step = typical_step(trainer.dense());
  found.machine =
      processor_name() + ", " + std::to_string(options.threads) + (options.threads == 1 ? " thread" : " threads");

  found.commands = save_head(trainer, options, out);
  progress.show("comparing gradients with double precision ...");
  found.errors = measure_gradients(trainer, options, products);
  found.memory = measure_memory(options, found.sizes, progress);
  progress.show("timing the head ...");
  found.logitless_split = measure_split(options, found.sizes);
  for (std::uint64_t i = 0; i < 4; ++i) {
    found.sentences.push_back(one_line(tokenizer.decode(trainer.generate(i, 40, 0.8, 40))));
  }
  progress.clear();
  return found;
}

void present(const Findings& found, const fs::path& report) {
  for (const std::string& sentence : found.sentences) std::printf("  \"%s\"\n", sentence.c_str());
  std::printf("\n");
  for (const std::string& line : ten_lines(found, report)) std::printf("%s\n", line.c_str());
  std::printf("\n");
  for (const std::string& command : found.commands) std::printf("%s\n", command.c_str());
}

int run(Options options) {
  const auto begin = std::chrono::steady_clock::now();
  Progress progress;
  const fs::path out(options.out);
  std::string source, size;
  if (options.resume) {
    const std::string config = read_checkpoint(out).config;
    options_from_json(config, options);
    const auto json = nlohmann::json::parse(config);
    source = json.at("source");
    size = json.at("size");
  }
  if (options.products == "openblas" && !has_openblas()) {
    throw UsageError(
        "--products: 'openblas' was not found when this was built; use eigen, or install libopenblas-dev and rebuild");
  }
  if (options.threads == 0) options.threads = std::max(1u, std::thread::hardware_concurrency());
  if (options.every == 0) options.every = std::max<std::int64_t>(1, options.steps / 10);
  make_folder(out);

  if (!options.resume) {
    if (has_checkpoint(out)) {
      progress.say("note: '" + options.out +
                   "' holds a checkpoint, which this run replaces (--resume would continue it)");
    }
    Prepared prepared = prepare(options, out, progress);
    fs::remove(out / "checkpoint.json");
    source = prepared.source;
    size = prepared.size;
  }
  // A fresh run reads back what it saved, so that a resumed one cannot differ.
  const Tokenizer tokenizer = load_tokenizer(out);
  Corpus corpus = load_corpus(out, tokenizer.vocab());

  Pool pool(static_cast<int>(options.threads));
  progress.show("measuring matrix products ...");
  const Speed speed = probe_products(pool, options.rows, options.hidden, tokenizer.vocab());
  if (options.products == "auto") options.products = speed.openblas > speed.eigen ? "openblas" : "eigen";
  Products products(pool, options.products == "openblas" ? Kernel::openblas : Kernel::eigen);
  Trainer trainer = make_trainer(options, tokenizer.vocab(), std::move(corpus), products);
  if (options.resume) {
    trainer.load(out);
    progress.say("resumed after step " + std::to_string(trainer.done()) + " of " + std::to_string(options.steps));
  }
  const PlanSummary plan = summary_of(*trainer.logitless().head);
  progress.say(format("heads: Logitless %s on %s, C = %lld, f = %.2f, %.2f RHV, workspace %s; dense %s by %s",
                      logitless::version(), plan.target.c_str(), static_cast<long long>(plan.chunk), plan.kept,
                      plan.rhv, bytes_text(static_cast<double>(trainer.logitless().head->extra_bytes())).c_str(),
                      bytes_text(static_cast<double>(trainer.dense().head->extra_bytes())).c_str(),
                      name_of(products.kernel())));

  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  const bool complete = train(trainer, options, progress);
  progress.show("saving ...");
  auto config = nlohmann::json::parse(options_to_json(options));
  config["source"] = source;
  config["size"] = size;
  trainer.save(out, config.dump());
  if (!complete) {
    progress.say(format("stopped after step %lld of %lld; the same command with --resume continues",
                        static_cast<long long>(trainer.done()), static_cast<long long>(options.steps)));
    return exit_interrupted;
  }
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);

  Findings found = examine(trainer, tokenizer, options, products, out, progress);
  found.text_source = source;
  found.text_size = size;
  found.speed = speed;
  found.process_peak = peak_of_process();
  found.seconds = seconds_since(begin);
  const fs::path report = out / "report.html";
  std::ofstream file(report, std::ios::binary);
  file << html(found);
  file.flush();
  if (!file) throw InputError("--out: '" + report.string() + "' cannot be written");
  present(found, report);
  return 0;
}

int main_with(int argc, const char* const* argv) {
  Options options = parse_options(argc, argv);
  if (options.help) {
    std::fputs(help_text().c_str(), stdout);
    return 0;
  }
  if (options.resume && options.given.contains("--extract")) throw UsageError("--extract: not together with --resume");
  if (!options.extract.empty()) {
    extract(options);
    return 0;
  }
  if (!options.measure_head.empty()) {
    if (options.threads == 0) options.threads = std::max(1u, std::thread::hardware_concurrency());
    print_head_measurement(options);
    return 0;
  }
  return run(std::move(options));
}

}  // namespace
}  // namespace tiny_lm

int main(int argc, char** argv) {
  try {
    return tiny_lm::main_with(argc, argv);
  } catch (const tiny_lm::UsageError& error) {
    std::fprintf(stderr, "tiny_lm: %s\n", error.what());
    return 2;
  } catch (const tiny_lm::InputError& error) {
    std::fprintf(stderr, "tiny_lm: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tiny_lm: %s\n", error.what());
    return 1;
  }
}
