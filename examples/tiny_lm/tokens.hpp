// Words to numbers: a byte-pair vocabulary trained by sentencepiece, and the two streams of tokens that training needs.
//
// Every twentieth paragraph is held out; the vocabulary is trained on the others. Each paragraph ends with the token
// `end`, and a context never looks further back than the start of its stream. --vocab is an upper bound: the text may
// not support so many pieces.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "text.hpp"

namespace tiny_lm {

class Tokenizer {
 public:
  static constexpr std::int32_t end = 1;  // of a paragraph; also what stands before the first one

  static Tokenizer train(const std::vector<std::string>& paragraphs, std::int64_t vocab, int threads);
  static Tokenizer from_bytes(const std::string& model);
  Tokenizer(Tokenizer&&) noexcept;
  ~Tokenizer();

  std::int64_t vocab() const;
  const std::string& bytes() const { return model_; }
  std::vector<std::int32_t> encode(const std::string& text) const;
  std::string decode(const std::vector<std::int32_t>& tokens) const;

 private:
  struct Processor;
  Tokenizer();
  std::string model_;
  std::unique_ptr<Processor> processor_;
};

struct Corpus {
  std::vector<std::int32_t> train, held_out;
};

// Every twentieth paragraph, or the last of a text with fewer.
void split_text(const Text& text, std::vector<std::string>& train, std::vector<std::string>& held_out);
Corpus encode_corpus(const Tokenizer& tokenizer, const std::vector<std::string>& train,
                     const std::vector<std::string>& held_out);

}  // namespace tiny_lm
