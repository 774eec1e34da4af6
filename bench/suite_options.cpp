// Suite options: what each option of the loss costs beside the plain loss with gradients, on the same X, W and targets.
//
// Every row is loss, dX and dW; flops counted are those of the plain loss, 6RHV (distillation: of both heads as its
// plan says), so that a ratio is a ratio of times. The plain loss is measured twice, first and last: what lies between
// those two ratios is noise.
#include <cmath>
#include <functional>
#include <memory>
#include <random>

#include "bench/session.hpp"

namespace logitless::bench {

namespace {

struct OptionCall {
  Plan plan;
  Arguments arguments;
  Array workspace;
  double loss = 0;

  OptionCall(Context& context, const Problem& problem, const Options& options, const Arguments& given)
      : plan(context, problem, options), arguments(given), workspace(plan.workspace_bytes()) {}
  void run() { loss = plan.forward_backward(arguments, workspace.data(), workspace.bytes()).loss; }
};

// [count] fp32 in [low, high).
std::vector<float> numbers(std::int64_t count, float low, float high, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> of(low, high);
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& x : out) x = of(random);
  return out;
}

}  // namespace

void run_options(Session& s, DType dtype) {
  const DataRequest wanted = s.data_request(dtype);
  const std::int64_t r = wanted.rows, h = wanted.hidden, v = wanted.vocab;
  LinearData data = make_linear(s.team, wanted);
  DataRequest other = wanted;
  other.seed += 1;
  LinearData teacher = make_linear(s.team, other);

  Array dx(static_cast<std::size_t>(r * h) * size_of(dtype)), dw(static_cast<std::size_t>(v * h) * size_of(dtype));
  const std::vector<float> bias = numbers(v, -1, 1, 1), class_weight = numbers(v, 0.5F, 2, 2),
                           row_weight = numbers(r, -0.5F, 2, 3), temperature = numbers(r, 0.7F, 1.5F, 4),
                           upstream = numbers(r, -1e-3F, 1e-3F, 5), old = numbers(r, -9, -1, 6),
                           advantage = numbers(r, -1, 1, 7);
  std::vector<float> out(static_cast<std::size_t>(r) * 8), db(static_cast<std::size_t>(v));
  std::vector<std::int32_t> argmax(static_cast<std::size_t>(r));
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(r * ((v + 7) / 8)), 0xb7);
  const std::int64_t k = std::min<std::int64_t>(64, v);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(r * k));
  const std::vector<float> probs = numbers(r * k, 0, 2.0F / static_cast<float>(k), 8);
  for (std::int64_t i = 0; i < r; ++i)
    for (std::int64_t c = 0; c < k; ++c)
      ids[static_cast<std::size_t>(i * k + c)] = static_cast<std::int32_t>((i * 7919 + c * (v / k)) % v);

  std::vector<Entry> entries;
  std::vector<std::shared_ptr<OptionCall>> calls;
  const Arguments plain{.hidden = ConstTensor(data.x.data(), dtype, {r, h}),
                        .weight = ConstTensor(data.w.data(), dtype, {v, h}),
                        .targets = ConstTensor(data.targets),
                        .grad_hidden = Tensor(dx.data(), dtype, {r, h}),
                        .grad_weight = Tensor(dw.data(), dtype, {v, h})};
  const auto add = [&](const char* name, const Options& options, const std::function<void(Arguments&)>& give,
                       double flops_of_plain = 1.0, const std::function<void(Problem&)>& change = {}) {
    Arguments arguments = plain;
    if (give) give(arguments);
    Problem problem = problem_of(arguments, Call::forward_backward);
    if (change) change(problem);
    auto call = std::make_shared<OptionCall>(s.context, problem, options, arguments);
    Entry entry;
    entry.row.name = name;
    entry.row.who = "ours";
    entry.row.flops = 6.0 * flops_of_plain * static_cast<double>(count_kept(data.targets)) * static_cast<double>(h) *
                      static_cast<double>(v);
    entry.row.ratio_to = "plain";
    entry.row.workspace_bytes = static_cast<std::int64_t>(call->plan.workspace_bytes());
    entry.expected = flops_of_plain;
    entry.run = [call] {
      call->run();
      return 0.0;
    };
    entry.required = true;
    entries.push_back(std::move(entry));
    calls.push_back(std::move(call));
  };
  const auto row_output = [&](std::size_t n) { return Tensor(out.data() + n * static_cast<std::size_t>(r), {r}); };

  add("plain", {}, {});
  add("bias, with its gradient", {}, [&](Arguments& a) {
    a.bias = ConstTensor(bias);
    a.grad_bias = Tensor(db);
  });
  add("logit scale, temperature per row", {.logit_scale = 0.5},
      [&](Arguments& a) { a.row_temperature = ConstTensor(temperature); });
  add("softcap 30", {.softcap = 30.0}, {}, 8.0 / 6.0);
  add("label smoothing 0.1", {.label_smoothing = 0.1}, {});
  add("class weights, smoothing", {.label_smoothing = 0.1},
      [&](Arguments& a) { a.class_weight = ConstTensor(class_weight); });
  add("row weights, z-loss", {.z_loss = 1e-4}, [&](Arguments& a) { a.row_weight = ConstTensor(row_weight); });
  add(
      "entropy, argmax, lse, log-prob out", {},
      [&](Arguments& a) {
        a.row_entropy = row_output(0);
        a.row_argmax = Tensor(argmax);
        a.row_lse = row_output(1);
        a.row_logprob = row_output(2);
      },
      1.0, [](Problem& p) { p.entropy = p.argmax = true; });
  add("lse and log-prob gradients", {}, [&](Arguments& a) {
    a.grad_row_lse = ConstTensor(upstream);
    a.grad_row_logprob = ConstTensor(upstream);
  });
  add("entropy gradient", {}, [&](Arguments& a) { a.grad_row_entropy = ConstTensor(upstream); }, 8.0 / 6.0);
  add("policy (PPO)", {.policy = {.on = true}}, [&](Arguments& a) {
    a.old_logprob = ConstTensor(old);
    a.advantage = ConstTensor(advantage);
  });
  add("keep mask", {}, [&](Arguments& a) { a.keep_mask = ConstTensor(mask.data(), DType::u8, {r, (v + 7) / 8}); });
  add(
      "top-64 targets", {.targets = Targets::topk},
      [&](Arguments& a) {
        a.topk_ids = ConstTensor(ids.data(), {r, k});
        a.topk_probs = ConstTensor(probs.data(), {r, k});
      },
      8.0 / 6.0);
  add("filter 2^-12", {.filter = 0x1p-12}, {}, 8.0 / 6.0);
  const auto give_teacher = [&](Arguments& a) {
    a.teacher_hidden = ConstTensor(teacher.x.data(), dtype, {r, h});
    a.teacher_weight = ConstTensor(teacher.w.data(), dtype, {v, h});
  };
  // The student's 8RHV, and the teacher's logits twice; JSD's own walk is over both.
  for (const auto& [name, divergence, flops] : {std::tuple{"forward KL of a teacher", Divergence::forward_kl, 12.0},
                                                {"reverse KL of a teacher", Divergence::reverse_kl, 12.0},
                                                {"JSD of a teacher", Divergence::jsd, 16.0}})
    add(name, {.targets = Targets::teacher, .distillation = {.divergence = divergence}}, give_teacher, flops / 6.0);
  add("plain, again", {}, {});

  Table table;
  table.suite = "options";
  table.dtype = name_of(dtype);
  const Ceiling ceiling = ceiling_of_products(s.cpu_target, dtype == DType::bf16);
  for (Entry& entry : entries) entry.row.ceiling = ceiling;
  table.rows = measure(std::move(entries), [&] { s.ceilings.probe(ceiling); }, s.request.seconds, s.request.repeats);
  for (std::size_t i = 0; i < table.rows.size(); ++i)
    if (!table.rows[i].seconds.empty()) table.rows[i].loss = calls[i]->loss;
  table.facts = {{"rows", r},
                 {"hidden", h},
                 {"vocab", v},
                 {"kept", count_kept(data.targets)},
                 {"data", s.request.data},
                 {"seed", s.request.seed}};
  s.tables.push_back(std::move(table));
}

}  // namespace logitless::bench
