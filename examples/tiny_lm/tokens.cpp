// sentencepiece behind a small face: train, encode, decode.
#include "tokens.hpp"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <unordered_map>

namespace tiny_lm {
namespace {

class Paragraphs : public sentencepiece::SentenceIterator {
 public:
  explicit Paragraphs(const std::vector<std::string>& all) : all_(all) {}
  bool done() const override { return at_ == all_.size(); }
  void Next() override { ++at_; }
  const std::string& value() const override { return all_[at_]; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  const std::vector<std::string>& all_;
  std::size_t at_ = 0;
};

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

struct Tokenizer::Processor {
  sentencepiece::SentencePieceProcessor pieces;
};

Tokenizer::Tokenizer() : processor_(std::make_unique<Processor>()) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer Tokenizer::train(const std::vector<std::string>& paragraphs, std::int64_t vocab, int threads) {
  const std::unordered_map<std::string, std::string> options{{"model_type", "bpe"},
                                                             {"vocab_size", std::to_string(vocab)},
                                                             {"hard_vocab_limit", "false"},
                                                             {"character_coverage", "0.9999"},
                                                             {"unk_id", "0"},
                                                             {"eos_id", std::to_string(end)},
                                                             {"bos_id", "-1"},
                                                             {"pad_id", "-1"},
                                                             {"minloglevel", "2"},
                                                             {"num_threads", std::to_string(threads)},
                                                             {"unk_surface", "?"},
                                                             {"max_sentence_length", "1000000"}};
  Paragraphs sentences(paragraphs);
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(options, &sentences, &model);
  if (!status.ok()) {
    throw InputError("--vocab: " + std::to_string(vocab) +
                     " does not suit this text: " + first_line(status.ToString()));
  }
  return from_bytes(model);
}

Tokenizer Tokenizer::from_bytes(const std::string& model) {
  Tokenizer tokenizer;
  tokenizer.model_ = model;
  const auto status = tokenizer.processor_->pieces.LoadFromSerializedProto(model);
  if (!status.ok()) throw InputError("the vocabulary cannot be read: " + first_line(status.ToString()));
  return tokenizer;
}

std::int64_t Tokenizer::vocab() const { return processor_->pieces.GetPieceSize(); }

std::vector<std::int32_t> Tokenizer::encode(const std::string& text) const {
  return processor_->pieces.EncodeAsIds(text);
}

std::string Tokenizer::decode(const std::vector<std::int32_t>& tokens) const {
  return processor_->pieces.DecodeIds(tokens);
}

void split_text(const Text& text, std::vector<std::string>& train, std::vector<std::string>& held_out) {
  const std::size_t every = 20, count = text.paragraphs.size();
  for (std::size_t i = 0; i < count; ++i) {
    const bool out = count < every ? i + 1 == count : i % every == every - 1;
    (out ? held_out : train).push_back(text.paragraphs[i]);
  }
}

Corpus encode_corpus(const Tokenizer& tokenizer, const std::vector<std::string>& train,
                     const std::vector<std::string>& held_out) {
  const auto stream = [&](const std::vector<std::string>& paragraphs) {
    std::vector<std::int32_t> tokens;
    for (const std::string& paragraph : paragraphs) {
      const auto ids = tokenizer.encode(paragraph);
      tokens.insert(tokens.end(), ids.begin(), ids.end());
      tokens.push_back(Tokenizer::end);
    }
    return tokens;
  };
  return {stream(train), stream(held_out)};
}

}  // namespace tiny_lm
