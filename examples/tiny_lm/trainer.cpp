// The training loop's steps, held-out perplexity, sampling, and checkpoints as .safetensors with a JSON beside them.
#include "trainer.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <numbers>
#include <numeric>

#include "files/files.hpp"

namespace tiny_lm {
namespace fs = std::filesystem;
namespace {

using Json = nlohmann::json;
namespace files = logitless::files;

constexpr std::int64_t evaluated = 8192;  // held-out positions of a perplexity
enum Stream : std::uint64_t { batches = 7, samples = 11 };

class Clock {
 public:
  // Seconds since construction or the last call.
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    const std::chrono::duration<double> passed = now - last_;
    last_ = now;
    return passed.count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

void write_beside(const fs::path& path, const std::string& bytes) {
  const fs::path temporary = path.string() + ".new";
  {
    std::ofstream file(temporary, std::ios::binary);
    file << bytes;
    file.flush();
    if (!file) throw InputError("--out: '" + temporary.string() + "' cannot be written");
  }
  fs::rename(temporary, path);
}

std::string read_bytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw UsageError("--resume: '" + path.string() + "' cannot be read; start anew without --resume");
  return std::string(std::istreambuf_iterator<char>(file), {});
}

template <class T, class Container>
void read_tensor(const files::File& file, const std::string& name, Container& out) {
  const files::Tensor tensor = file.read(name);
  if (tensor.info.bytes % sizeof(T) != 0) throw UsageError("--resume: '" + file.path() + "' is damaged at " + name);
  const auto* data = static_cast<const T*>(tensor.data);
  out.assign(data, data + tensor.info.bytes / sizeof(T));
}

}  // namespace

StepRecord typical_step(const Training& training) {
  const std::size_t skip = training.steps.size() > 10 ? 5 : 0;
  const auto median = [&](double StepRecord::* field) {
    std::vector<double> values;
    for (std::size_t i = skip; i < training.steps.size(); ++i) values.push_back(training.steps[i].*field);
    if (values.empty()) return 0.0;
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  };
  return {median(&StepRecord::loss), median(&StepRecord::body), median(&StepRecord::head),
          median(&StepRecord::products), median(&StepRecord::adam)};
}

Trainer::Trainer(const Options& options, std::int64_t vocab, Corpus corpus, Products& products)
    : options_(options),
      sizes_{vocab, options.hidden, options.context, options.inner},
      corpus_(std::move(corpus)),
      products_(products),
      body_(sizes_, options.rows, products),
      trainings_{Training{"logitless",
                          initial_parameters(sizes_, static_cast<std::uint64_t>(options.seed)),
                          Vector<float>(static_cast<std::size_t>(sizes_.parameters())),
                          Adam(sizes_.parameters()),
                          nullptr,
                          {},
                          {}},
                 Training{"dense",
                          {},
                          Vector<float>(static_cast<std::size_t>(sizes_.parameters())),
                          Adam(sizes_.parameters()),
                          nullptr,
                          {},
                          {}}},
      contexts_(static_cast<std::size_t>(options.rows * options.context)),
      targets_(static_cast<std::size_t>(options.rows)),
      dx_(static_cast<std::size_t>(options.rows * options.hidden)) {
  const HeadShape shape{options.rows, options.hidden, vocab};
  dense().parameters = logitless().parameters;
  const LossOptions loss = options.loss();
  logitless().head =
      make_logitless_head(shape, options.bf16(), products.pool(),
                          {.budget = options.budget, .threads = static_cast<int>(options.threads), .loss = loss});
  dense().head = make_dense_head(shape, options.bf16(), loss, products);
}

void Trainer::context_at(const std::vector<std::int32_t>& stream, std::int64_t position, std::int32_t* context) const {
  for (std::int64_t j = 0; j < sizes_.context; ++j) {
    const std::int64_t at = position - sizes_.context + j;
    context[j] = at < 0 ? Tokenizer::end : stream[static_cast<std::size_t>(at)];
  }
}

double Trainer::rate() const {
  const auto at = static_cast<double>(done_ + 1), all = static_cast<double>(options_.steps);
  const double warm = std::min(20.0, std::max(1.0, all / 10));
  if (at < warm) return options_.rate * at / warm;
  const double progress = (at - warm) / std::max(1.0, all - warm);
  return options_.rate * (0.05 + 0.95 * 0.5 * (1 + std::cos(std::numbers::pi * progress)));
}

void Trainer::step() {
  const auto seed = static_cast<std::uint64_t>(options_.seed);
  const std::uint64_t length = corpus_.train.size();
  for (std::int64_t i = 0; i < options_.rows; ++i) {
    const auto index = static_cast<std::uint64_t>(done_ * options_.rows + i);
    const auto position = static_cast<std::int64_t>(random_bits(seed, batches, index) % length);
    context_at(corpus_.train, position, &contexts_[static_cast<std::size_t>(i * sizes_.context)]);
    targets_[static_cast<std::size_t>(i)] = corpus_.train[static_cast<std::size_t>(position)];
  }
  const std::size_t first = done_ % 2;
  train(trainings_[first]);
  train(trainings_[1 - first]);
  ++done_;
}

void Trainer::train(Training& training) {
  StepRecord record;
  Clock clock;
  float* const parameters = training.parameters.data();
  float* const gradients = training.gradients.data();
  const float* x = body_.forward(parameters, contexts_.data(), options_.rows);
  record.body = clock.lap();
  // The tied weight: the head adds its gradient into the buffer that the embedding's gradient goes into as well.
  record.loss = training.head->train(x, parameters + sizes_.embedding(), targets_.data(), dx_.data(),
                                     gradients + sizes_.embedding());
  record.head = clock.lap();
  record.products = training.head->product_seconds();
  body_.backward(parameters, contexts_.data(), options_.rows, dx_.data(), gradients);
  record.body += clock.lap();
  training.adam.step(products_.pool(), done_ + 1, static_cast<float>(rate()), training.parameters, training.gradients);
  record.adam = clock.lap();
  training.steps.push_back(record);
}

void Trainer::evaluate() {
  const auto length = static_cast<std::int64_t>(corpus_.held_out.size());
  const std::int64_t count = std::min(evaluated, length);
  std::array<Evaluated, 2> sum{};
  for (std::int64_t at = 0; at < count; at += options_.rows) {
    for (std::int64_t i = 0; i < options_.rows; ++i) {
      // Spread evenly over the held-out text; rows beyond the last one are ignored.
      const std::int64_t position = std::min((at + i) * length / count, length - 1);
      context_at(corpus_.held_out, position, &contexts_[static_cast<std::size_t>(i * sizes_.context)]);
      targets_[static_cast<std::size_t>(i)] =
          at + i < count ? corpus_.held_out[static_cast<std::size_t>(position)] : ignored;
    }
    for (std::size_t k = 0; k < trainings_.size(); ++k) {
      const float* parameters = trainings_[k].parameters.data();
      const float* x = body_.forward(parameters, contexts_.data(), options_.rows);
      const Evaluated some = trainings_[k].head->evaluate(x, parameters + sizes_.embedding(), targets_.data());
      sum[k].loss += some.loss;
      sum[k].entropy += some.entropy;
      sum[k].correct += some.correct;
    }
  }
  for (std::size_t k = 0; k < trainings_.size(); ++k) {
    const auto n = static_cast<double>(count);
    trainings_[k].evaluations.push_back(
        {done_, std::exp(sum[k].loss / n), static_cast<double>(sum[k].correct) / n, sum[k].entropy / n});
  }
}

void Trainer::final_states(std::vector<float>& hidden, std::vector<std::int32_t>& targets) {
  const std::int64_t rows = std::min(options_.rows, static_cast<std::int64_t>(corpus_.held_out.size()));
  for (std::int64_t i = 0; i < rows; ++i) {
    context_at(corpus_.held_out, i, &contexts_[static_cast<std::size_t>(i * sizes_.context)]);
  }
  const float* x = body_.forward(logitless().parameters.data(), contexts_.data(), rows);
  hidden.assign(x, x + rows * sizes_.hidden);
  targets.assign(corpus_.held_out.begin(), corpus_.held_out.begin() + rows);
}

std::vector<std::int32_t> Trainer::generate(std::uint64_t stream, int count, double temperature, int top) {
  using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const float* parameters = logitless().parameters.data();
  const Eigen::Map<const Matrix> weight(parameters + sizes_.embedding(), sizes_.vocab, sizes_.hidden);
  std::vector<std::int32_t> tokens, context(static_cast<std::size_t>(sizes_.context));
  std::vector<std::int64_t> order(static_cast<std::size_t>(sizes_.vocab));
  std::vector<double> share;
  while (static_cast<int>(tokens.size()) < count) {
    context_at(tokens, static_cast<std::int64_t>(tokens.size()), context.data());
    const float* x = body_.forward(parameters, context.data(), 1);
    Eigen::VectorXf z = weight * Eigen::Map<const Eigen::VectorXf>(x, sizes_.hidden);
    if (const auto cap = static_cast<float>(options_.softcap); cap > 0) z = cap * (z / cap).array().tanh();
    if (tokens.size() < 5) z[Tokenizer::end] = -std::numeric_limits<float>::infinity();  // say something
    std::iota(order.begin(), order.end(), 0);
    const std::int64_t kept = std::min<std::int64_t>(top, sizes_.vocab);
    std::partial_sort(order.begin(), order.begin() + kept, order.end(),
                      [&](std::int64_t a, std::int64_t b) { return z[a] > z[b] || (z[a] == z[b] && a < b); });
    share.clear();
    double sum = 0;
    for (std::int64_t i = 0; i < kept; ++i) {
      sum += std::exp((z[order[static_cast<std::size_t>(i)]] - z[order[0]]) / temperature);
      share.push_back(sum);
    }
    const auto seed = static_cast<std::uint64_t>(options_.seed);
    const double drawn = sum * random_unit(seed, samples + stream, tokens.size());
    const auto pick = std::min(std::lower_bound(share.begin(), share.end(), drawn) - share.begin(), kept - 1);
    const auto token = static_cast<std::int32_t>(order[static_cast<std::size_t>(pick)]);
    if (token == Tokenizer::end) break;
    tokens.push_back(token);
  }
  return tokens;
}

// ---- checkpoints --------------------------------------------------------------------------------------------------------

void Trainer::save(const fs::path& dir, const std::string& config) const {
  const std::string tensors = "checkpoint-" + std::to_string(done_) + ".safetensors";
  std::vector<files::Source> sources;
  Json json{{"config", Json::parse(config)}, {"step", done_}, {"tensors", tensors}};
  for (const Training& training : trainings_) {
    const std::string name = training.name;
    const std::vector<std::int64_t> shape{sizes_.parameters()};
    sources.push_back({name + ".parameters", LL_F32, shape, training.parameters.data()});
    sources.push_back({name + ".m", LL_F32, shape, training.adam.m.data()});
    sources.push_back({name + ".v", LL_F32, shape, training.adam.v.data()});
    Json steps = Json::array(), evaluations = Json::array();
    for (const StepRecord& s : training.steps) steps.push_back({s.loss, s.body, s.head, s.products, s.adam});
    for (const Evaluation& e : training.evaluations)
      evaluations.push_back({e.step, e.perplexity, e.accuracy, e.entropy});
    json[name] = {{"steps", steps}, {"evaluations", evaluations}};
  }
  files::write((dir / tensors).string(), sources);
  write_beside(dir / "checkpoint.json", json.dump());
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("checkpoint-") && name.ends_with(".safetensors") && name != tensors) fs::remove(entry.path());
  }
}

void Trainer::load(const fs::path& dir) {
  const Json json = Json::parse(read_bytes(dir / "checkpoint.json"));
  const files::File file((dir / json.at("tensors").get<std::string>()).string());
  for (Training& training : trainings_) {
    const std::string name = training.name;
    for (auto [part, field] : {std::pair<const char*, Vector<float>*>{".parameters", &training.parameters},
                               {".m", &training.adam.m},
                               {".v", &training.adam.v}}) {
      read_tensor<float>(file, name + part, *field);
      if (static_cast<std::int64_t>(field->size()) != sizes_.parameters()) {
        throw UsageError("--resume: '" + file.path() + "' does not hold this model; start anew without --resume");
      }
    }
    for (const Json& s : json.at(name).at("steps")) training.steps.push_back({s[0], s[1], s[2], s[3], s[4]});
    for (const Json& e : json.at(name).at("evaluations")) training.evaluations.push_back({e[0], e[1], e[2], e[3]});
  }
  done_ = json.at("step");
}

bool has_checkpoint(const fs::path& dir) { return fs::exists(dir / "checkpoint.json"); }

Checkpoint read_checkpoint(const fs::path& dir) {
  if (!has_checkpoint(dir)) {
    throw UsageError("--resume: '" + dir.string() + "' holds no checkpoint.json; name the run's --out, or start anew");
  }
  try {
    const Json json = Json::parse(read_bytes(dir / "checkpoint.json"));
    return {json.at("config").dump(), json.at("step")};
  } catch (const Json::exception&) {
    throw UsageError("--resume: '" + (dir / "checkpoint.json").string() + "' is damaged; start anew without --resume");
  }
}

void save_corpus(const fs::path& dir, const Corpus& corpus, const Tokenizer& tokenizer) {
  write_beside(dir / "vocabulary.model", tokenizer.bytes());
  const std::vector<files::Source> sources{
      {"train", LL_I32, {static_cast<std::int64_t>(corpus.train.size())}, corpus.train.data()},
      {"held_out", LL_I32, {static_cast<std::int64_t>(corpus.held_out.size())}, corpus.held_out.data()}};
  files::write((dir / "tokens.safetensors").string(), sources);
}

Corpus load_corpus(const fs::path& dir, std::int64_t vocab) {
  const files::File file((dir / "tokens.safetensors").string());
  Corpus corpus;
  read_tensor<std::int32_t>(file, "train", corpus.train);
  read_tensor<std::int32_t>(file, "held_out", corpus.held_out);
  for (const auto* tokens : {&corpus.train, &corpus.held_out}) {
    const bool good = !tokens->empty() && std::all_of(tokens->begin(), tokens->end(),
                                                      [&](std::int32_t token) { return token >= 0 && token < vocab; });
    if (!good)
      throw UsageError("--resume: '" + file.path() + "' does not suit its vocabulary; start anew without --resume");
  }
  return corpus;
}

Tokenizer load_tokenizer(const fs::path& dir) { return Tokenizer::from_bytes(read_bytes(dir / "vocabulary.model")); }

}  // namespace tiny_lm
