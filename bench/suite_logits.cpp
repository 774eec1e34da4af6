// Suite logits: loss and gradient of given z [R,V], ours beside probes of the same array and the unfused baseline.
//
// Least work: the loss reads the array once, the gradient in place reads and writes it once (as scaling it does), a
// separate gradient is a copy. In-place runs destroy z, so it is restored before each, untimed.
#include <memory>

#include "bench/dense.hpp"
#include "bench/session.hpp"

namespace logitless::bench {

void run_logits(Session& s, DType dtype) {
  const DataRequest wanted = s.data_request(dtype);
  const std::int64_t r = wanted.rows, v = wanted.vocab;
  LogitsData data = make_logits(s.team, wanted);
  const std::size_t bytes = data.z.bytes();
  Array work(bytes), separate(bytes);
  const MemoryProbe memory(s.team);
  memory.copy(separate.data(), data.z.data(), bytes);
  const auto restore = [&] { memory.copy(work.data(), data.z.data(), bytes); };
  restore();

  struct LogitsCall {
    Plan plan;
    Arguments arguments;
    Array workspace;
    double loss = 0;
    LogitsCall(Context& context, const Problem& problem, const Arguments& given)
        : plan(context, problem), arguments(given), workspace(plan.workspace_bytes()) {}
  };
  std::vector<Entry> entries;
  std::vector<std::shared_ptr<LogitsCall>> calls;
  const auto array_bytes = static_cast<double>(bytes);

  const auto probe = [&](const char* name, double passes, std::function<double()> run, std::function<void()> prepare) {
    Entry entry;
    entry.row.name = name;
    entry.row.who = "probe";
    entry.row.bytes = passes * array_bytes;
    entry.run = std::move(run);
    entry.prepare = std::move(prepare);
    entry.required = true;
    entries.push_back(std::move(entry));
    calls.push_back(nullptr);
  };
  const auto ours = [&](const char* name, const char* bound, double passes, void* z, const Tensor& gradient) {
    Entry entry;
    Arguments arguments{.logits = ConstTensor(z, dtype, {r, v}), .targets = ConstTensor(data.targets)};
    if (gradient) arguments.grad_logits = gradient;
    const Problem problem = problem_of(arguments, gradient ? Call::forward_backward : Call::forward);
    auto call = std::make_shared<LogitsCall>(s.context, problem, arguments);
    entry.row.name = name;
    entry.row.who = "ours";
    entry.row.bytes = passes * array_bytes;
    entry.row.ceiling_row = bound;
    entry.row.ratio_to = bound;
    entry.row.workspace_bytes = static_cast<std::int64_t>(call->plan.workspace_bytes());
    const bool with_gradient = static_cast<bool>(gradient);
    entry.run = [call, with_gradient] {
      void* const workspace = call->workspace.data();
      const std::size_t size = call->workspace.bytes();
      call->loss = (with_gradient ? call->plan.forward_backward(call->arguments, workspace, size)
                                  : call->plan.forward(call->arguments, workspace, size))
                       .loss;
      return 0.0;
    };
    if (problem.in_place) entry.prepare = restore;
    entry.required = true;
    entries.push_back(std::move(entry));
    calls.push_back(call);
  };

  probe("read the array", 1, [&] { return memory.read(data.z.data(), bytes); }, {});
  // fp16 is scaled as if it were bf16: the same bytes move.
  const auto elements = static_cast<std::size_t>(r * v);
  probe(
      "scale it in place", 2, [&] { return memory.scale_in_place(work.data(), elements, dtype != DType::f32); },
      restore);
  probe("copy it", 2, [&] { return memory.copy(separate.data(), data.z.data(), bytes); }, {});
  ours("loss only", "read the array", 1, data.z.data(), {});
  ours("loss + gradient in place", "scale it in place", 2, work.data(), Tensor(work.data(), dtype, {r, v}));
  ours("loss + gradient apart", "copy it", 2, data.z.data(), Tensor(separate.data(), dtype, {r, v}));

  std::shared_ptr<Dense> dense;
  double dense_loss = 0;
  if (s.request.dense) {
    Entry entry;
    entry.row.name = "loss + gradient, unfused";
    entry.row.who = "dense";
    entry.row.bytes = 2 * array_bytes;
    entry.row.ceiling_row = "scale it in place";
    entry.row.ratio_to = "loss + gradient in place";
    entry.row.workspace_bytes = Dense::bytes(r, v);
    if (Dense::bytes(r, v) > available_memory() / 10 * 9) {
      entry.row.note = "not run: needs " + std::to_string(Dense::bytes(r, v) >> 20) + " MiB";
    } else {
      dense = std::make_shared<Dense>(s.team, Unit::sse2, r, v);  // no products: the unit does not matter
      entry.run = [&] {
        dense_loss = dense->logits({data.z.data(), dtype, r, v, v}, data.targets.data(), separate.data());
        return 0.0;
      };
    }
    entries.push_back(std::move(entry));
    calls.push_back(nullptr);
  }

  Table table;
  table.suite = "logits";
  table.dtype = name_of(dtype);
  table.rows = measure(std::move(entries), {}, s.request.seconds / 2, s.request.repeats);
  for (std::size_t i = 0; i < table.rows.size(); ++i) {
    Row& row = table.rows[i];
    if (row.seconds.empty()) continue;
    if (calls[i]) row.loss = calls[i]->loss;
    if (row.who == "dense") row.loss = dense_loss;
  }
  table.facts = {{"rows", r},
                 {"vocab", v},
                 {"kept", count_kept(data.targets)},
                 {"data", s.request.data},
                 {"seed", s.request.seed}};
  s.tables.push_back(std::move(table));
}

}  // namespace logitless::bench
