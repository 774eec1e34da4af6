// distill: tiny_lm's model as a teacher, distilled into one of half its width by forward KL from hidden states, beside
// the same small model trained alone.
//
// Both students see the same batches. The distilled one's loss is Logitless' with targets `teacher`: KL(q | p) of the
// teacher's softmax q over its own head (H_t) and the student's p (H_s), both heads streamed, neither's logits held:
// the plan has a budget below a tenth of them.
// Every step of it costs the teacher's body forward beside. Public C++ face alone.
#include <array>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <logitless/logitless.hpp>
#include <numbers>
#include <optional>
#include <string>

#include "../tiny_lm/model.hpp"
#include "../tiny_lm/text.hpp"
#include "../tiny_lm/tokens.hpp"

namespace {

namespace ll = logitless;
using tiny_lm::Adam;
using tiny_lm::Body;
using tiny_lm::Sizes;
using tiny_lm::Vector;

struct Options {
  std::string text = TINY_LM_SOURCE_DIR;
  std::int64_t steps = 240, rows = 512, hidden = 192, vocab = 8192;
  double temperature = 1.0, hard_share = 0.0, rate = 2e-3, budget_mib = 3.0;

  std::uint64_t budget() const { return static_cast<std::uint64_t>(budget_mib * 1024 * 1024); }
};

constexpr std::int64_t context = 6;

// One model with its own batch memory, plan and optimiser.
class Model {
 public:
  Model(std::int64_t vocab, std::int64_t hidden, std::int64_t rows, tiny_lm::Products& products)
      : sizes_{vocab, hidden, context, 2 * hidden},
        rows_(rows),
        products_(products),
        body_(sizes_, rows, products),
        parameters_(tiny_lm::initial_parameters(sizes_, 1)),
        gradients_(parameters_.size()),
        dx_(static_cast<std::size_t>(rows * hidden)),
        adam_(sizes_.parameters()) {}

  std::int64_t parameters() const { return sizes_.parameters(); }
  std::int64_t hidden() const { return sizes_.hidden; }
  // X [R,H], valid until the next call.
  const float* forward(const std::int32_t* contexts) { return body_.forward(parameters_.data(), contexts, rows_); }
  const float* head() const { return parameters_.data() + sizes_.embedding(); }

  // A step on a batch; with a teacher its X is that of the same contexts.
  double step(ll::Context& library, const std::int32_t* contexts, const std::int32_t* targets, std::int64_t t,
              float rate, Model* teacher, const Options& options) {
    ll::Arguments arguments{
        .hidden = ll::ConstTensor(forward(contexts), {rows_, sizes_.hidden}),
        .weight = ll::ConstTensor(head(), {sizes_.vocab, sizes_.hidden}),
        .targets = ll::ConstTensor(targets, {rows_}),
        .grad_hidden = ll::Tensor(dx_.data(), {rows_, sizes_.hidden}),
        .grad_weight = ll::Tensor(gradients_.data() + sizes_.embedding(), {sizes_.vocab, sizes_.hidden})};
    if (teacher != nullptr) {
      arguments.teacher_hidden = ll::ConstTensor(teacher->forward(contexts), {rows_, teacher->hidden()});
      arguments.teacher_weight = ll::ConstTensor(teacher->head(), {sizes_.vocab, teacher->hidden()});
    }
    if (!plan_) {  // shapes stay, so one plan serves all steps
      ll::Problem problem = ll::problem_of(arguments, ll::Call::forward_backward);
      problem.accumulate_grad_weight = true;
      problem.memory_budget = options.budget();
      ll::Options of_loss;
      if (teacher != nullptr) {
        of_loss.targets = ll::Targets::teacher;
        of_loss.distillation = {.divergence = ll::Divergence::forward_kl,
                                .temperature = options.temperature,
                                .hard_share = options.hard_share,
                                .temperature_squared = true};
      }
      plan_.emplace(library, problem, of_loss);
      workspace_.reserve(plan_->workspace_bytes());
    }
    const double loss = plan_->forward_backward(arguments, workspace_).loss;
    body_.backward(parameters_.data(), contexts, rows_, dx_.data(), gradients_.data());
    adam_.step(products_.pool(), t, rate, parameters_, gradients_);
    return loss;
  }

  // Of the head's plan, after the first step.
  std::size_t workspace_bytes() const { return plan_->workspace_bytes(); }

  // Mean negative log-likelihood of a batch.
  double loss(ll::Context& library, const std::int32_t* contexts, const std::int32_t* targets, const Options& options) {
    return ll::linear_cross_entropy(library, ll::ConstTensor(forward(contexts), {rows_, sizes_.hidden}),
                                    ll::ConstTensor(head(), {sizes_.vocab, sizes_.hidden}),
                                    ll::ConstTensor(targets, {rows_}), {.memory_budget = options.budget()})
        .loss;
  }

 private:
  Sizes sizes_;
  std::int64_t rows_;
  tiny_lm::Products& products_;
  Body body_;
  Vector<float> parameters_, gradients_, dx_;
  Adam adam_;
  std::optional<ll::Plan> plan_;
  ll::Workspace workspace_;
};

struct Batch {
  std::vector<std::int32_t> contexts, targets;
};
Batch batch_of(const std::vector<std::int32_t>& stream, std::int64_t rows,
               const std::function<std::int64_t(std::int64_t)>& position) {
  Batch out{std::vector<std::int32_t>(static_cast<std::size_t>(rows * context)),
            std::vector<std::int32_t>(static_cast<std::size_t>(rows))};
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t at = position(i);
    for (std::int64_t j = 0; j < context; ++j) {
      const std::int64_t from = at - context + j;
      out.contexts[static_cast<std::size_t>(i * context + j)] =
          from < 0 ? tiny_lm::Tokenizer::end : stream[static_cast<std::size_t>(from)];
    }
    out.targets[static_cast<std::size_t>(i)] = stream[static_cast<std::size_t>(at)];
  }
  return out;
}

float rate_at(const Options& o, std::int64_t step) {
  const double progress = static_cast<double>(step) / static_cast<double>(o.steps);
  return static_cast<float>(o.rate * (0.05 + 0.95 * 0.5 * (1 + std::cos(std::numbers::pi * progress))));
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Options parse(int argc, const char* const* argv) {
  Options o;
  const auto number = [](const std::string& name, const std::string& text, double least, double most) {
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || !(value >= least && value <= most)) {
      throw std::invalid_argument(name + ": '" + text + "' is not a number from " + std::to_string(least) + " to " +
                                  std::to_string(most));
    }
    return value;
  };
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--help") {
      std::puts(
          "distill [--text FILE|DIR] [--steps N (240)] [--rows R (512)] [--hidden H of the teacher (192)] [--vocab V "
          "(8192)]\n"
          "        [--temperature T (1)] [--hard-share S (0)] [--budget-mib M of the head's workspace (3)]\n"
          "Trains a teacher, then two students of half its width: alone, and by forward KL from the teacher's head.");
      std::exit(0);
    }
    if (i + 1 == argc) throw std::invalid_argument(name + ": needs a value; --help lists the options");
    const std::string value = argv[++i];
    if (name == "--text")
      o.text = value;
    else if (name == "--steps")
      o.steps = static_cast<std::int64_t>(number(name, value, 1, 1e6));
    else if (name == "--rows")
      o.rows = static_cast<std::int64_t>(number(name, value, 1, 1e5));
    else if (name == "--hidden")
      o.hidden = static_cast<std::int64_t>(number(name, value, 2, 4096)) / 2 * 2;
    else if (name == "--vocab")
      o.vocab = static_cast<std::int64_t>(number(name, value, 16, 1e6));
    else if (name == "--temperature")
      o.temperature = number(name, value, 0.01, 100);
    else if (name == "--hard-share")
      o.hard_share = number(name, value, 0, 1);
    else if (name == "--budget-mib")
      o.budget_mib = number(name, value, 0.01, 1e6);
    else
      throw std::invalid_argument(name + ": unknown; --help lists the options");
  }
  return o;
}

int run(const Options& o) {
  const auto begin = std::chrono::steady_clock::now();
  ll::Context library;
  tiny_lm::Pool pool(std::max(1, static_cast<int>(std::thread::hardware_concurrency())));
  tiny_lm::Products products(pool, tiny_lm::has_openblas() ? tiny_lm::Kernel::openblas : tiny_lm::Kernel::eigen);
  std::vector<std::string> train, held_out;
  split_text(tiny_lm::read_text(o.text), train, held_out);
  const auto tokenizer = tiny_lm::Tokenizer::train(train, o.vocab, pool.threads());
  const tiny_lm::Corpus corpus = encode_corpus(tokenizer, train, held_out);
  const std::int64_t vocab = tokenizer.vocab();
  std::printf("text: %zu tokens, V = %lld; %lld steps of %lld tokens\n", corpus.train.size(),
              static_cast<long long>(vocab), static_cast<long long>(o.steps), static_cast<long long>(o.rows));

  const auto batch = [&](std::int64_t step) {
    return batch_of(corpus.train, o.rows, [&](std::int64_t i) {
      return static_cast<std::int64_t>(tiny_lm::random_bits(1, 7, static_cast<std::uint64_t>(step * o.rows + i)) %
                                       corpus.train.size());
    });
  };
  const auto perplexity = [&](Model& model) {
    const auto length = static_cast<std::int64_t>(corpus.held_out.size());
    const std::int64_t batches = std::clamp<std::int64_t>(length / o.rows, 1, 16);
    double sum = 0;
    for (std::int64_t b = 0; b < batches; ++b) {
      const Batch some = batch_of(corpus.held_out, o.rows,
                                  [&](std::int64_t i) { return (b * o.rows + i) * length / (batches * o.rows); });
      sum += model.loss(library, some.contexts.data(), some.targets.data(), o);
    }
    return std::exp(sum / static_cast<double>(batches));
  };
  const auto fit = [&](const char* name, Model& model, Model* teacher) {
    const auto start = std::chrono::steady_clock::now();
    double loss = 0;
    for (std::int64_t step = 0; step < o.steps; ++step) {
      const Batch some = batch(step);
      loss = model.step(library, some.contexts.data(), some.targets.data(), step + 1, rate_at(o, step), teacher, o);
    }
    const double seconds = seconds_since(start), found = perplexity(model);
    std::printf(
        "%-22s H = %-4lld %9lld parameters  loss %.4f  held-out perplexity %.2f  (%.0f s; workspace %.2f MiB)\n", name,
        static_cast<long long>(model.hidden()), static_cast<long long>(model.parameters()), loss, found, seconds,
        static_cast<double>(model.workspace_bytes()) / (1024 * 1024));
    std::fflush(stdout);
    return found;
  };

  Model teacher(vocab, o.hidden, o.rows, products), alone(vocab, o.hidden / 2, o.rows, products),
      distilled(vocab, o.hidden / 2, o.rows, products);
  fit("teacher", teacher, nullptr);
  const double a = fit("student, alone", alone, nullptr), b = fit("student, distilled", distilled, &teacher);
  std::printf("distilled / alone: %.4f of the perplexity; %.0f s in all\n", b / a, seconds_since(begin));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse(argc, argv));
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "distill: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "distill: %s\n", error.what());
    return 1;
  }
}
