// Two trainings in step: one set of batches, one initial state, two heads; and the checkpoint that resumes both.
//
// Steps alternate (Logitless, dense; next time the other way round), so that a neighbour's load on the machine meets
// both alike. Everything random is a function of (seed, step, row), and every sum has a fixed order: a resumed run
// continues with the same bits.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "heads.hpp"
#include "model.hpp"
#include "options.hpp"
#include "tokens.hpp"

namespace tiny_lm {

struct StepRecord {
  double loss = 0;
  double body = 0, head = 0, products = 0, adam = 0;  // seconds; products: the part of head in matrix products
};

struct Evaluation {
  std::int64_t step = 0;
  double perplexity = 0, accuracy = 0, entropy = 0;  // accuracy: share of tokens; entropy: mean, in nats
};

struct Training {
  const char* name;  // "logitless" or "dense"
  Vector<float> parameters, gradients;
  Adam adam;
  std::unique_ptr<Head> head;
  std::vector<StepRecord> steps;
  std::vector<Evaluation> evaluations;
};

// Medians over the steps after the first few, which touch their memory for the first time.
StepRecord typical_step(const Training& training);

class Trainer {
 public:
  Trainer(const Options& options, std::int64_t vocab, Corpus corpus, Products& products);

  std::int64_t done() const { return done_; }
  Training& logitless() { return trainings_[0]; }
  Training& dense() { return trainings_[1]; }
  const Sizes& sizes() const { return sizes_; }
  const Corpus& corpus() const { return corpus_; }

  void step();      // both trainings
  void evaluate();  // both, on the same held-out positions
  // Hidden states and targets of the first R held-out positions, by Logitless' training.
  void final_states(std::vector<float>& hidden, std::vector<std::int32_t>& targets);
  // `count` tokens at most after a paragraph's start, drawn at `temperature` from the `top` likeliest.
  std::vector<std::int32_t> generate(std::uint64_t stream, int count, double temperature, int top);

  // checkpoint.json and the tensors it names; written beside and renamed, so that an older one stays until then.
  void save(const std::filesystem::path& dir, const std::string& config) const;
  void load(const std::filesystem::path& dir);

 private:
  void context_at(const std::vector<std::int32_t>& stream, std::int64_t position, std::int32_t* context) const;
  void train(Training& training);
  double rate() const;

  Options options_;
  Sizes sizes_;
  Corpus corpus_;
  Products& products_;
  Body body_;
  std::array<Training, 2> trainings_;
  std::vector<std::int32_t> contexts_, targets_;
  Vector<float> dx_;
  std::int64_t done_ = 0;
};

// The stored configuration of a checkpoint, options_to_json's text; throws UsageError when there is none.
struct Checkpoint {
  std::string config;
  std::int64_t step = 0;
};
Checkpoint read_checkpoint(const std::filesystem::path& dir);
bool has_checkpoint(const std::filesystem::path& dir);

// Tokens and vocabulary of a run, so that resuming does not need the text.
void save_corpus(const std::filesystem::path& dir, const Corpus& corpus, const Tokenizer& tokenizer);
Corpus load_corpus(const std::filesystem::path& dir, std::int64_t vocab);
Tokenizer load_tokenizer(const std::filesystem::path& dir);

}  // namespace tiny_lm
