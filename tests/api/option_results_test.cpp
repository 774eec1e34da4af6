// Results of the options through the C ABI: the CPU backend against the reference backend, which computes each by its
// definition in double. X [7,5] · W [300,5] fp32, one row ignored. Every option is run as one call and as forward then
// backward, from hidden states and from logits, with every per-row output that it allows. Outputs agree to 1e-5 of
// their largest element, some forty roundings of fp32 over sums of 300.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "small_problem.hpp"

namespace faces {
namespace {

constexpr std::int64_t R = 7, H = 5, V = 300, K = 6, T = 3;  // T: the teacher's hidden size
constexpr std::size_t kRows = 7, kVocab = 300;

using Field = const ll_tensor* ll_arguments::*;
using Values = std::map<std::string, std::vector<double>>;

// Numbers in [low, high), the same everywhere.
std::vector<float> numbers(std::int64_t count, double low, double high, std::uint64_t seed) {
  std::vector<float> out(static_cast<std::size_t>(count));
  std::uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (float& each : out) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    each = static_cast<float>(low + (high - low) * static_cast<double>(state >> 40) * 0x1p-24);
  }
  return out;
}

struct Data {
  std::vector<float> x = numbers(R * H, -1.5, 1.5, 1), w = numbers(V * H, -1.5, 1.5, 2), bias = numbers(V, -1, 1, 3),
                     z = numbers(R * V, -4, 4, 4), class_weight = numbers(V, 0.25, 2, 5),
                     row_weight = numbers(R, -1, 2, 6), row_temperature = numbers(R, 0.5, 2, 7),
                     floor = numbers(R, -1, 0.5, 8), soft = numbers(R * V, 0, 2.0 / 300.0, 9),
                     probs = numbers(R * K, 0.05, 0.15, 10), logprobs = probs, teacher_x = numbers(R * T, -2, 2, 11),
                     teacher_w = numbers(V * T, -1, 1, 12), teacher_bias = numbers(V, -1, 1, 13),
                     old_logprob = numbers(R, -7, -5, 14), advantage = numbers(R, -2, 2, 15),
                     ref_logprob = numbers(R, -7, -5, 16), up_loss = numbers(R, -1, 1, 17),
                     up_lse = numbers(R, -1, 1, 18), up_logprob = numbers(R, -1, 1, 19),
                     up_entropy = numbers(R, -1, 1, 20);
  std::vector<std::int64_t> y = {3, 299, 0, -100, 128, 255, 77}, ids;
  std::vector<std::uint8_t> keep;
  double normalizer = 5.5;

  Data() {
    for (float& each : logprobs) each = std::log(each);
    for (std::size_t i = 0; i < soft.size(); i += 3) soft[i] = 0.0f;
    for (std::int64_t i = 0; i < R; ++i) {
      for (std::int64_t k = 0; k < K; ++k) ids.push_back((37 * i + 41 * k) % V);
    }
    for (const float each : numbers(R * ((V + 7) / 8), 0, 256, 21)) keep.push_back(static_cast<std::uint8_t>(each));
  }
};

const Data& data() {
  static const Data all;
  return all;
}

// Per-row outputs of a call: without those of a row's own target; the loss and argmax alone.
enum class Rows { all, without_targets, losses };

// One call: the inputs that it is given, the outputs that it is asked for.
class Call {
 public:
  ll_problem problem;
  ll_options options;
  double grad_loss = 1.25;

  Call(ll_kind kind, ll_call call) {
    ll_problem_init(&problem);
    ll_options_init(&options);
    problem.kind = kind;
    problem.call = call;
    problem.rows = R;
    problem.vocab = V;
    if (kind == LL_LINEAR) {
      problem.hidden = H;
      problem.hidden_dtype = problem.weight_dtype = LL_F32;
      give(&ll_arguments::hidden, data().x, {R, H});
      give(&ll_arguments::weight, data().w, {V, H});
      if (call != LL_FORWARD) {
        problem.grad_hidden_dtype = problem.grad_weight_dtype = LL_F32;
        want(&ll_arguments::grad_hidden, "grad_hidden", {R, H});
        want(&ll_arguments::grad_weight, "grad_weight", {V, H});
      }
    } else {
      problem.logits_dtype = LL_F32;
      give(&ll_arguments::logits, data().z, {R, V});
      if (call != LL_FORWARD) {
        problem.grad_logits_dtype = LL_F32;
        want(&ll_arguments::grad_logits, "grad_logits", {R, V});
      }
    }
    give(&ll_arguments::targets, data().y, {R});
    problem.outputs = LL_ENTROPY | LL_ARGMAX | LL_MEAN_LOGIT | LL_SUM_P2;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  ll_kind kind() const { return problem.kind; }
  bool forwards() const { return problem.call != LL_BACKWARD; }
  bool gradients() const { return problem.call != LL_FORWARD; }

  void give(Field field, const std::vector<float>& values, std::initializer_list<std::int64_t> shape) {
    set(field, tensor(values.data(), LL_F32, shape));
  }
  void give(Field field, const std::vector<std::int64_t>& values, std::initializer_list<std::int64_t> shape) {
    set(field, tensor(values.data(), LL_I64, shape));
  }
  void set(Field field, const ll_tensor& view) { inputs_.push_back({field, view}); }

  void want(Field field, const char* name, std::initializer_list<std::int64_t> shape, ll_dtype dtype = LL_F32) {
    Output out{field, name, dtype, {}, {}};
    std::int64_t count = 1;
    for (const std::int64_t n : shape) count *= n;
    out.words.assign(static_cast<std::size_t>(count), 0);
    outputs_.push_back(std::move(out));
    outputs_.back().view = tensor(outputs_.back().words.data(), dtype, shape);
  }
  // The bias, with its gradient where there is one of the rest; with logits it is their caller's to sum.
  void give_bias() {
    problem.bias_dtype = LL_F32;
    give(&ll_arguments::bias, data().bias, {V});
    if (!gradients() || kind() == LL_LOGITS) return;
    problem.grad_bias_dtype = LL_F32;
    want(&ll_arguments::grad_bias, "grad_bias", {V});
  }
  void want_rows(Rows rows) {
    want(&ll_arguments::loss, "loss", {1}, LL_F64);
    want(&ll_arguments::row_loss, "row_loss", {R});
    want(&ll_arguments::row_argmax, "row_argmax", {R}, LL_I64);
    if (rows == Rows::losses) return;
    want(&ll_arguments::row_lse, "row_lse", {R});
    want(&ll_arguments::row_entropy, "row_entropy", {R});
    want(&ll_arguments::row_zloss, "row_zloss", {R});
    want(&ll_arguments::row_mean_logit, "row_mean_logit", {R});
    want(&ll_arguments::row_log_sum_p2, "row_log_sum_p2", {R});
    if (rows == Rows::without_targets) return;
    want(&ll_arguments::row_logprob, "row_logprob", {R});
    want(&ll_arguments::row_correct, "row_correct", {R}, LL_U8);
  }

  // Runs and gives every output by name. `stats`: written by forward, read by backward.
  // Nothing where the call says another status than expected, or one that is not LL_OK.
  Values run(ll_context* context, std::vector<float>* stats = nullptr, ll_status expected = LL_OK) {
    ll_plan* made = nullptr;
    const ll_status planned = ll_plan_create(context, &problem, &options, &made);
    EXPECT_EQ(planned, LL_OK) << ll_last_error();
    const PlanPointer plan(made);
    if (!plan) return {};
    ll_arguments arguments;
    ll_arguments_init(&arguments);
    arguments.grad_loss = grad_loss;
    for (const Input& each : inputs_) arguments.*each.field = &each.view;
    for (Output& each : outputs_) {
      std::fill(each.words.begin(), each.words.end(), 0);
      arguments.*each.field = &each.view;
    }
    ll_tensor stats_view;
    if (stats != nullptr) {
      const std::int64_t columns = ll_plan_statistics(plan.get());
      stats->resize(static_cast<std::size_t>(R * columns));
      stats_view = tensor(stats->data(), LL_F32, {R, columns});
      arguments.stats = &stats_view;
    }
    std::int64_t kept = -1, bad = -1;
    arguments.kept_rows = &kept;
    arguments.bad_rows = &bad;
    double filter_kept = -1.0, filter_variance = -1.0;
    if (options.filter > 0.0) {
      arguments.filter_kept = &filter_kept;
      arguments.filter_variance = &filter_variance;
    }
    Scratch workspace(ll_plan_workspace_bytes(plan.get()));
    const auto function = problem.call == LL_FORWARD    ? ll_forward
                          : problem.call == LL_BACKWARD ? ll_backward
                                                        : ll_forward_backward;
    EXPECT_EQ(function(plan.get(), &arguments, workspace.data(), workspace.size(), nullptr), expected)
        << ll_last_error();
    if (expected != LL_OK) return {};
    Values values;
    for (const Output& each : outputs_) values[each.name] = each.values();
    values["kept_rows"] = {static_cast<double>(kept)};
    values["bad_rows"] = {static_cast<double>(bad)};
    if (options.filter > 0.0) {
      values["filter_kept"] = {filter_kept};
      values["filter_variance"] = {filter_variance};
    }
    return values;
  }

 private:
  struct Input {
    Field field;
    ll_tensor view;
  };
  struct Output {
    Field field;
    const char* name;
    ll_dtype dtype;
    std::vector<std::uint64_t> words;  // room for any dtype
    ll_tensor view;

    std::vector<double> values() const {
      std::vector<double> out(words.size());
      const void* from = words.data();
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i] = dtype == LL_F64   ? static_cast<const double*>(from)[i]
                 : dtype == LL_I64 ? static_cast<double>(static_cast<const std::int64_t*>(from)[i])
                 : dtype == LL_U8  ? static_cast<double>(static_cast<const std::uint8_t*>(from)[i])
                                   : static_cast<double>(static_cast<const float*>(from)[i]);
      }
      return out;
    }
  };
  std::deque<Input> inputs_;
  std::deque<Output> outputs_;
};

void expect_close(const std::vector<double>& got, const std::vector<double>& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  double scale = 0.0, worst = 0.0;
  std::size_t where = 0;
  for (const double each : want) scale = std::max(scale, std::abs(each));
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = std::abs(got[i] - want[i]);
    if (error <= worst) continue;  // false for NaN
    worst = error;
    where = i;
    if (std::isnan(error)) break;
  }
  EXPECT_LE(worst, 1e-5 * scale) << what << "[" << where << "] is " << got[where] << ", must be " << want[where];
}

void expect_close(const Values& got, const Values& want, const std::string& what) {
  for (const auto& [name, values] : got) {
    ASSERT_TRUE(want.count(name) == 1) << name;
    expect_close(values, want.at(name), what + ": " + name);
  }
}

using Configure = std::function<void(Call&)>;

// `configure` gives inputs and options; it is called for each of the calls.
void expect_as_reference(const Configure& configure, std::initializer_list<ll_kind> kinds = {LL_LINEAR, LL_LOGITS},
                         Rows rows = Rows::all) {
  const ContextPointer cpu = make_context(LL_BACKEND_CPU), reference = make_context(LL_BACKEND_REFERENCE);
  for (const ll_kind kind : kinds) {
    const std::string name = kind == LL_LINEAR ? "linear" : "logits";
    Call both(kind, LL_FORWARD_BACKWARD), forward(kind, LL_FORWARD), backward(kind, LL_BACKWARD);
    both.want_rows(rows);
    forward.want_rows(rows);
    for (Call* each : {&both, &forward, &backward}) configure(*each);
    const Values want = both.run(reference.get());
    ASSERT_FALSE(want.empty());
    EXPECT_EQ(want.at("kept_rows"), std::vector<double>{6.0});
    expect_close(both.run(cpu.get()), want, name + ", one call");
    // Without rows, where a call may take a shorter way.
    Call bare(kind, LL_FORWARD_BACKWARD);
    configure(bare);
    bare.problem.outputs = 0;
    expect_close(bare.run(cpu.get()), want, name + ", gradients alone");
    std::vector<float> stats;
    const Values first = forward.run(cpu.get(), &stats);
    expect_close(first, want, name + ", forward");
    expect_close(backward.run(cpu.get(), &stats), want, name + ", backward");
    if (kind == LL_LINEAR || stats.size() != kRows * 4 || rows == Rows::losses) continue;
    // From lse alone.
    Call from_lse(kind, LL_BACKWARD);
    configure(from_lse);
    std::vector<float> lse;
    for (const double each : first.at("row_lse")) lse.push_back(static_cast<float>(each));
    from_lse.give(&ll_arguments::lse, lse, {R});
    expect_close(from_lse.run(cpu.get()), want, name + ", backward from lse");
  }
}

TEST(OptionResults, Plain) {
  expect_as_reference([](Call&) {});
}

TEST(OptionResults, ScaleSoftcapTemperatureAndBias) {
  expect_as_reference([](Call& c) { c.options.softcap = 2.5; });
  expect_as_reference([](Call& c) {
    c.options.logit_scale = 1.5;
    c.options.temperature = 0.75;
    c.give_bias();
  });
  expect_as_reference([](Call& c) {
    c.options.softcap = 3.0;
    c.options.logit_scale = 0.75;
    c.problem.inputs = LL_ROW_TEMPERATURE;
    c.give(&ll_arguments::row_temperature, data().row_temperature, {R});
    c.give_bias();
  });
}

TEST(OptionResults, ZLoss) {
  expect_as_reference([](Call& c) { c.options.z_loss = 0.25; });
  expect_as_reference([](Call& c) {
    c.options.z_loss = 0.25;
    c.options.label_smoothing = 0.1;
    c.options.reduction = LL_SUM;
  });
}

void give_class_weight(Call& c) {
  c.problem.inputs |= LL_CLASS_WEIGHT;
  c.give(&ll_arguments::class_weight, data().class_weight, {V});
}

void give_row_weight(Call& c) {
  c.problem.inputs |= LL_ROW_WEIGHT;
  c.give(&ll_arguments::row_weight, data().row_weight, {R});
}

TEST(OptionResults, ClassWeights) {
  expect_as_reference([](Call& c) { give_class_weight(c); });
  expect_as_reference([](Call& c) {
    give_class_weight(c);
    c.options.label_smoothing = 0.25;
  });
}

TEST(OptionResults, RowWeights) {
  expect_as_reference([](Call& c) {
    give_row_weight(c);
    c.options.z_loss = 0.125;
  });
  expect_as_reference([](Call& c) {
    give_row_weight(c);
    give_class_weight(c);
    c.options.label_smoothing = 0.25;
  });
}

void give_keep_mask(Call& c) {
  c.problem.inputs |= LL_KEEP_MASK;
  c.set(&ll_arguments::keep_mask, tensor(data().keep.data(), LL_U8, {R, (V + 7) / 8}));
}

void give_floor(Call& c) {
  c.problem.inputs |= LL_LOGIT_FLOOR;
  c.give(&ll_arguments::logit_floor, data().floor, {R});
}

TEST(OptionResults, KeepMaskAndFloor) {
  expect_as_reference([](Call& c) { give_keep_mask(c); });
  expect_as_reference([](Call& c) { give_floor(c); });
  expect_as_reference([](Call& c) {
    give_keep_mask(c);
    give_floor(c);
    give_class_weight(c);
    c.options.label_smoothing = 0.25;
    c.options.softcap = 3.0;
  });
}

TEST(OptionResults, SoftTargets) {
  const auto soft = [](Call& c) {
    c.options.targets = LL_TARGETS_SOFT;
    c.problem.soft_dtype = LL_F32;
    c.give(&ll_arguments::soft_targets, data().soft, {R, V});
  };
  expect_as_reference(soft, {LL_LINEAR, LL_LOGITS}, Rows::without_targets);
  expect_as_reference(
      [&](Call& c) {
        soft(c);
        give_class_weight(c);
        give_row_weight(c);
        c.options.label_smoothing = 0.125;
        c.options.z_loss = 0.125;
        c.options.softcap = 3.0;
      },
      {LL_LINEAR, LL_LOGITS}, Rows::without_targets);
}

void give_topk(Call& c, bool log) {
  c.options.targets = LL_TARGETS_TOPK;
  c.problem.topk = K;
  c.give(&ll_arguments::topk_ids, data().ids, {R, K});
  c.give(&ll_arguments::topk_probs, log ? data().logprobs : data().probs, {R, K});
  if (log) c.problem.inputs |= LL_TOPK_LOG;
}

TEST(OptionResults, TopKTargets) {
  for (const ll_rest rest : {LL_REST_DROPPED, LL_REST_RENORMALISED, LL_REST_SPREAD}) {
    SCOPED_TRACE("rest " + std::to_string(rest));
    expect_as_reference(
        [&](Call& c) {
          give_topk(c, false);
          c.options.rest = rest;
        },
        {LL_LINEAR, LL_LOGITS}, Rows::without_targets);
    expect_as_reference(
        [&](Call& c) {
          give_topk(c, false);
          give_class_weight(c);
          c.options.rest = rest;
          c.options.label_smoothing = 0.25;
          c.options.z_loss = 0.125;
        },
        {LL_LINEAR, LL_LOGITS}, Rows::without_targets);
  }
}

TEST(OptionResults, TopKOfATeacher) {
  for (const ll_rest rest : {LL_REST_DROPPED, LL_REST_RENORMALISED, LL_REST_SPREAD}) {
    SCOPED_TRACE("rest " + std::to_string(rest));
    expect_as_reference(
        [&](Call& c) {
          give_topk(c, true);
          c.options.rest = rest;
          c.options.distill_temperature = 2.0;
          c.options.temperature_squared = 1;
        },
        {LL_LINEAR, LL_LOGITS}, Rows::without_targets);
    expect_as_reference([&](Call& c) {
      give_topk(c, true);
      c.options.rest = rest;
      c.options.distill_temperature = 0.5;
      c.options.hard_share = 0.25;
      c.options.z_loss = 0.125;
    });
    expect_as_reference([&](Call& c) {
      give_topk(c, true);
      give_row_weight(c);
      c.options.rest = rest;
      c.options.hard_share = 0.25;
    });
  }
}

TEST(OptionResults, Teacher) {
  for (const ll_divergence divergence : {LL_FORWARD_KL, LL_REVERSE_KL, LL_JSD}) {
    SCOPED_TRACE("divergence " + std::to_string(divergence));
    const auto teacher = [&](Call& c) {
      c.options.targets = LL_TARGETS_TEACHER;
      c.options.divergence = divergence;
      c.problem.teacher_hidden = T;
      c.problem.teacher_hidden_dtype = c.problem.teacher_weight_dtype = LL_F32;
      c.give(&ll_arguments::teacher_hidden, data().teacher_x, {R, T});
      c.give(&ll_arguments::teacher_weight, data().teacher_w, {V, T});
    };
    expect_as_reference(teacher, {LL_LINEAR}, Rows::without_targets);
    expect_as_reference(
        [&](Call& c) {
          teacher(c);
          c.problem.teacher_bias_dtype = LL_F32;
          c.give(&ll_arguments::teacher_bias, data().teacher_bias, {V});
          if (divergence == LL_JSD) c.options.beta = 0.25;
          c.options.distill_temperature = 2.0;
          c.options.temperature_squared = 1;
          c.options.hard_share = 0.25;
          c.options.label_smoothing = 0.125;
          give_class_weight(c);
          give_row_weight(c);
        },
        {LL_LINEAR});
  }
}

TEST(OptionResults, Policy) {
  const auto policy = [](Call& c) {
    c.options.rule = LL_RULE_POLICY;
    c.give(&ll_arguments::old_logprob, data().old_logprob, {R});
    c.give(&ll_arguments::advantage, data().advantage, {R});
  };
  expect_as_reference(policy);
  expect_as_reference([&](Call& c) {
    policy(c);
    c.options.kl_coef = 0.125;
    c.options.entropy_coef = 0.0625;
    c.options.clip_high = 0.5;
    c.options.temperature = 1.5;
    c.give(&ll_arguments::ref_logprob, data().ref_logprob, {R});
    give_row_weight(c);
  });
}

void give_upstream(Call& c, bool entropy) {
  if (entropy) c.problem.inputs |= LL_ENTROPY_GRADIENT;
  if (!c.gradients()) return;
  c.give(&ll_arguments::grad_row_loss, data().up_loss, {R});
  c.give(&ll_arguments::grad_row_lse, data().up_lse, {R});
  c.give(&ll_arguments::grad_row_logprob, data().up_logprob, {R});
  if (entropy) c.give(&ll_arguments::grad_row_entropy, data().up_entropy, {R});
}

TEST(OptionResults, UpstreamGradientsOfRows) {
  for (const bool entropy : {false, true}) {
    SCOPED_TRACE(entropy ? "with entropy" : "without entropy");
    expect_as_reference([&](Call& c) { give_upstream(c, entropy); });
    expect_as_reference([&](Call& c) {
      give_upstream(c, entropy);
      give_row_weight(c);
      give_keep_mask(c);
      c.options.softcap = 3.0;
      c.options.z_loss = 0.125;
      c.options.label_smoothing = 0.125;
    });
  }
}

TEST(OptionResults, NormalizerOfATensor) {
  expect_as_reference([](Call& c) {
    c.set(&ll_arguments::normalizer, tensor(&data().normalizer, LL_F64, {1}));
    c.options.normalizer = 100.0;  // the tensor comes before it
    c.give_bias();
  });
}

// Restricted smoothing is over the classes that no restriction drops. One that is -inf by itself is among them, and its
// share makes the loss infinite, as it does without a restriction.
TEST(OptionResults, SmoothingKeepsTheShareOfAnInfiniteLogit) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> z = {0.0f, -inf, 1.0f};
  const std::vector<std::int64_t> y = {0};
  const std::uint8_t keep = 7;
  for (const ll_backend backend : {LL_BACKEND_REFERENCE, LL_BACKEND_CPU}) {
    for (const bool restricted : {false, true}) {
      SCOPED_TRACE(std::string(backend == LL_BACKEND_CPU ? "cpu" : "reference") + (restricted ? ", restricted" : ""));
      const ContextPointer context = make_context(backend);
      Call call(LL_LOGITS, LL_FORWARD_BACKWARD);
      call.problem.rows = 1;
      call.problem.vocab = 3;
      call.problem.outputs = 0;
      call.options.label_smoothing = 0.3;
      call.grad_loss = 1.0;
      call.give(&ll_arguments::logits, z, {1, 3});
      call.give(&ll_arguments::targets, y, {1});
      call.want(&ll_arguments::grad_logits, "grad_logits", {1, 3});
      call.want(&ll_arguments::row_loss, "row_loss", {1});
      if (restricted) {
        call.problem.inputs = LL_KEEP_MASK;
        call.set(&ll_arguments::keep_mask, tensor(&keep, LL_U8, {1, 1}));
      }
      const Values got = call.run(context.get());
      EXPECT_EQ(got.at("row_loss"), std::vector<double>{static_cast<double>(inf)});
      expect_close({got.at("grad_logits")[1]}, std::vector<double>{-0.1}, "share of class 1");
    }
  }
}

// The columns of the whole, in three parts: rows of W (or columns of z), their bias and mask, and their gradients.
struct Part {
  std::int64_t first, columns;
};
constexpr Part kParts[] = {{0, 96}, {96, 104}, {200, 100}};

void take_part(Call& c, const Part& part, const std::function<void(Call&)>& rest) {
  c.problem.vocab = part.columns;
  c.problem.first_column = part.first;
  c.problem.total_vocab = V;
  c.problem.outputs = 0;
  rest(c);
}

TEST(OptionResults, PartsOfAVocabulary) {
  const ContextPointer cpu = make_context(LL_BACKEND_CPU), reference = make_context(LL_BACKEND_REFERENCE);
  struct Options {
    const char* name;
    bool smoothing, restricted, transformed, upstream;
  };
  const Options list[] = {{"plain", false, false, false, false},
                          {"smoothing and class weights", true, false, false, false},
                          {"restricted", false, true, false, false},
                          {"transformed", true, false, true, false},
                          {"upstream", false, true, true, true}};
  for (const Options& with : list) {
    const auto common = [&](Call& c) {
      if (with.smoothing) {
        give_class_weight(c);
        c.options.label_smoothing = 0.25;
      }
      if (with.restricted) give_floor(c);
      if (with.transformed) {
        c.options.softcap = 3.0;
        c.options.z_loss = 0.125;
        give_row_weight(c);
      }
      if (with.upstream) give_upstream(c, true);
    };
    for (const auto& context : {&cpu, &reference}) {
      SCOPED_TRACE(std::string(with.name) + (context == &cpu ? ", cpu" : ", reference"));
      Call whole(LL_LINEAR, LL_FORWARD_BACKWARD);
      whole.want_rows(Rows::all);
      common(whole);
      if (with.restricted) give_keep_mask(whole);
      if (with.transformed) whole.give_bias();
      const Values want = whole.run(reference.get());

      const auto slice = [&](Call& c, const Part& part) {
        c.set(&ll_arguments::weight, tensor(data().w.data() + part.first * H, LL_F32, {part.columns, H}));
        common(c);
        if (with.restricted) {
          c.problem.inputs |= LL_KEEP_MASK;
          c.set(&ll_arguments::keep_mask,
                tensor(data().keep.data() + part.first / 8, LL_U8, {R, (part.columns + 7) / 8}, {(V + 7) / 8, 1}));
        }
        if (with.transformed) {
          c.problem.bias_dtype = LL_F32;
          c.set(&ll_arguments::bias, tensor(data().bias.data() + part.first, LL_F32, {part.columns}));
        }
      };
      std::deque<std::vector<float>> stats;
      std::vector<ll_tensor> views;
      for (const Part& part : kParts) {
        Call forward(LL_LINEAR, LL_FORWARD);
        take_part(forward, part, [&](Call& c) { slice(c, part); });
        stats.emplace_back();
        forward.run(context->get(), &stats.back());
        ASSERT_EQ(stats.back().size(), kRows * 8);
        views.push_back(tensor(stats.back().data(), LL_F32, {R, 8}));
      }
      std::vector<float> joined(kRows * 8, kSentinel);
      const ll_tensor merged = tensor(joined.data(), LL_F32, {R, 8});
      const ll_tensor* parts[] = {&views[0], &views[1], &views[2]};
      ASSERT_EQ(ll_merge_statistics(parts, 3, &merged), LL_OK) << ll_last_error();
      std::vector<double> lse(kRows, 0.0), logprob(kRows, 0.0);
      for (std::size_t i = 0; i < kRows; ++i) {
        if (data().y[i] == -100) continue;
        const double m = double{joined[8 * i]}, r = double{joined[8 * i + 1]}, z_y = double{joined[8 * i + 2]};
        lse[i] = m + std::log(r + std::exp(z_y - m));
        logprob[i] = z_y - lse[i];
      }
      expect_close(lse, want.at("row_lse"), "lse of merged statistics");
      expect_close(logprob, want.at("row_logprob"), "log p_y of merged statistics");

      std::vector<double> dx(kRows * H, 0.0), dw, db;
      for (const Part& part : kParts) {
        Call backward(LL_LINEAR, LL_BACKWARD);
        take_part(backward, part, [&](Call& c) {
          slice(c, part);
          c.want(&ll_arguments::grad_weight, "grad_weight", {part.columns, H});
          if (!with.transformed) return;
          c.problem.grad_bias_dtype = LL_F32;
          c.want(&ll_arguments::grad_bias, "grad_bias", {part.columns});
        });
        const Values got = backward.run(context->get(), &joined);
        for (std::size_t n = 0; n < dx.size(); ++n) dx[n] += got.at("grad_hidden")[n];
        const auto append = [](std::vector<double>& to, const std::vector<double>& from) {
          to.insert(to.end(), from.begin(), from.end());
        };
        append(dw, got.at("grad_weight"));
        if (with.transformed) append(db, got.at("grad_bias"));
      }
      expect_close(dx, want.at("grad_hidden"), "grad_hidden, summed");
      expect_close(dw, want.at("grad_weight"), "grad_weight, of all parts");
      if (with.transformed) expect_close(db, want.at("grad_bias"), "grad_bias, of all parts");
    }
  }
}

TEST(OptionResults, FilterIsThatOfItsSeed) {
  const ContextPointer one = make_context(LL_BACKEND_CPU, 1), two = make_context(LL_BACKEND_CPU, 2),
                       reference = make_context(LL_BACKEND_REFERENCE);
  for (const ll_kind kind : {LL_LINEAR, LL_LOGITS}) {
    const char* const gradient = kind == LL_LINEAR ? "grad_hidden" : "grad_logits";
    Call call(kind, LL_FORWARD_BACKWARD), exact(kind, LL_FORWARD_BACKWARD);
    for (Call* each : {&call, &exact}) {
      each->problem.outputs = 0;
      each->want(&ll_arguments::row_loss, "row_loss", {R});
    }
    call.options.filter = 0x1p-7;
    call.options.filter_seed = 11;
    const Values first = call.run(two.get()), again = call.run(two.get()), alone = call.run(one.get());
    EXPECT_EQ(first.at(gradient), again.at(gradient));
    EXPECT_EQ(first.at(gradient), alone.at(gradient));
    EXPECT_EQ(first.at("filter_kept"), again.at("filter_kept"));
    const double kept = first.at("filter_kept")[0];
    EXPECT_GT(kept, 0.0);
    EXPECT_LT(kept, 1.0);
    EXPECT_GT(first.at("filter_variance")[0], 0.0);
    // The loss is not filtered; the reference filters nothing.
    const Values plain = exact.run(reference.get());
    expect_close(first.at("row_loss"), plain.at("row_loss"), "row_loss");
    const Values unfiltered = call.run(reference.get());
    expect_close(unfiltered.at(gradient), plain.at(gradient), gradient);
    EXPECT_EQ(unfiltered.at("filter_kept")[0], 1.0);
    EXPECT_EQ(unfiltered.at("filter_variance")[0], 0.0);
    // Forward then backward filters the same.
    Call forward(kind, LL_FORWARD), backward(kind, LL_BACKWARD);
    forward.problem.outputs = backward.problem.outputs = 0;
    backward.options.filter = 0x1p-7;
    backward.options.filter_seed = 11;
    std::vector<float> stats;
    forward.run(two.get(), &stats);
    const Values later = backward.run(two.get(), &stats);
    EXPECT_NEAR(later.at("filter_kept")[0], kept, 2.0 / (6.0 * 300.0));  // rounding of p may tip an entry
    EXPECT_GT(later.at("filter_variance")[0], 0.0);
    call.options.filter_seed = 12;
    EXPECT_NE(call.run(two.get()).at(gradient), first.at(gradient));
    if (kind == LL_LINEAR) continue;
    // What is left is an entry of the gradient or +-eps, and so many are not 0.
    std::size_t left = 0;
    for (std::size_t i = 0; i < kRows; ++i) {
      if (data().y[i] == -100) continue;
      for (std::size_t j = 0; j < kVocab; ++j) left += first.at(gradient)[i * kVocab + j] != 0.0 ? 1 : 0;
    }
    EXPECT_NEAR(static_cast<double>(left) / (6.0 * 300.0), kept, 6.5 / (6.0 * 300.0));  // targets may count or not
  }
}

// Targets of packed sequences, said in either of two ways, give the same loss as the shift made by hand.
TEST(OptionResults, NextTokenTargets) {
  const ContextPointer cpu = make_context(LL_BACKEND_CPU), reference = make_context(LL_BACKEND_REFERENCE);
  const std::vector<std::int64_t> ids = {5, 17, 299, 0, 44, 44, 8}, documents = {9, 9, 9, 2, 2, 7, 7},
                                  by_hand = {17, 299, -100, 44, -100, 8, -100};
  const std::vector<std::int32_t> ends = {0, 3, 5, 7};
  std::vector<std::int64_t> packed(kRows, 1), of_documents(kRows, 2);
  const ll_tensor from = tensor(ids.data(), LL_I64, {R}), cu = tensor(ends.data(), LL_I32, {4}),
                  numbered = tensor(documents.data(), LL_I64, {R}), first = tensor(packed.data(), LL_I64, {R}),
                  second = tensor(of_documents.data(), LL_I64, {R});
  ASSERT_EQ(ll_next_token_targets(&from, &cu, nullptr, -100, &first), LL_OK) << ll_last_error();
  ASSERT_EQ(ll_next_token_targets(&from, nullptr, &numbered, -100, &second), LL_OK) << ll_last_error();
  EXPECT_EQ(packed, by_hand);
  EXPECT_EQ(of_documents, by_hand);
  EXPECT_TRUE(refused(ll_next_token_targets(&from, &cu, &numbered, -100, &first), LL_ERROR_INVALID_ARGUMENT,
                      {"document_ids: given with cu_seqlens"}));
  const auto run = [&](const std::vector<std::int64_t>& targets, ll_context* context) {
    Call call(LL_LINEAR, LL_FORWARD_BACKWARD);
    call.want_rows(Rows::all);
    call.give(&ll_arguments::targets, targets, {R});
    return call.run(context);
  };
  const Values want = run(by_hand, reference.get());
  EXPECT_EQ(want.at("kept_rows"), std::vector<double>{4.0});
  expect_close(run(packed, cpu.get()), want, "cu_seqlens");
  expect_close(run(of_documents, cpu.get()), want, "document_ids");
}

// What forward keeps in the caller's buffer changes nothing of what backward gives but its time; the wrong buffer, or
// one for other rows, is refused.
TEST(OptionResults, BackwardFromSavedExponentials) {
  const ContextPointer cpu = make_context(LL_BACKEND_CPU), reference = make_context(LL_BACKEND_REFERENCE);
  for (const bool softcap : {false, true})
    for (const std::uint64_t bytes : {std::uint64_t{1} << 20, std::uint64_t{8192}, std::uint64_t{64}}) {
      const auto configure = [&](Call& c) {
        if (softcap) c.options.softcap = 3.0;
      };
      Call both(LL_LINEAR, LL_FORWARD_BACKWARD), forward(LL_LINEAR, LL_FORWARD), backward(LL_LINEAR, LL_BACKWARD);
      for (Call* each : {&both, &forward, &backward}) configure(*each);
      const Values want = both.run(reference.get());
      alignas(64) static std::uint8_t buffer[1 << 20];
      for (Call* each : {&forward, &backward}) {
        each->problem.saved_bytes = bytes;
        each->set(&ll_arguments::saved, tensor(buffer, LL_U8, {static_cast<std::int64_t>(bytes)}));
      }
      std::vector<float> stats;
      const Values first = forward.run(cpu.get(), &stats);
      ASSERT_FALSE(first.empty());
      expect_close(backward.run(cpu.get(), &stats), want, "saved in " + std::to_string(bytes));
      if (bytes == 64) continue;  // not a leaf fits
      buffer[0] ^= 1;
      EXPECT_TRUE(backward.run(cpu.get(), &stats, LL_ERROR_INVALID_ARGUMENT).empty());
      EXPECT_NE(std::string(ll_last_error()).find("saved: holds"), std::string::npos) << ll_last_error();
    }
}

}  // namespace
}  // namespace faces
