// Suite linear: loss and gradients of X [R,H] · W [V,H], ours beside the unfused baseline.
//
// Rows: everything; loss only; with 75 % of the rows ignored; within the budget; for 16-bit operands also with dW in
// fp32. Flops counted are those of the kept rows, 6RHV with gradients and 2RHV without, for any plan and for the
// baseline too, so a plan that recomputes looks slower, as it is.
#include <cmath>
#include <memory>

#include "bench/dense.hpp"
#include "bench/session.hpp"

namespace logitless::bench {

namespace {

// One problem with its plan and memory, ready to run.
struct LinearCall {
  Call call;
  Plan plan;
  Arguments arguments;
  Array workspace;
  double loss = 0;

  LinearCall(Context& context, const Problem& problem, const Arguments& given)
      : call(problem.call), plan(context, problem), arguments(given), workspace(plan.workspace_bytes()) {}
  void run() {
    loss = (call == Call::forward ? plan.forward(arguments, workspace.data(), workspace.bytes())
                                  : plan.forward_backward(arguments, workspace.data(), workspace.bytes()))
               .loss;
  }
};

void touch(Team& team, Array& array) {
  team.parallel_for(static_cast<std::int64_t>(array.bytes() >> 20) + 1, [&](std::int64_t task, int) {
    const auto first = static_cast<std::size_t>(task) << 20;
    const std::size_t count = std::min(std::size_t{1} << 20, array.bytes() - std::min(array.bytes(), first));
    std::fill_n(array.as<char>() + first, count, '\1');
  });
}

}  // namespace

void run_linear(Session& s, DType dtype) {
  const DataRequest wanted = s.data_request(dtype);
  const std::int64_t r = wanted.rows, h = wanted.hidden, v = wanted.vocab;
  const bool half = dtype != DType::f32;
  LinearData data = make_linear(s.team, wanted);
  DataRequest sparse = wanted;
  sparse.ignored = 0.75;
  const std::vector<std::int32_t> sparse_targets = make_targets(sparse);

  Array dx(static_cast<std::size_t>(r * h) * size_of(dtype)), dw(static_cast<std::size_t>(v * h) * size_of(dtype));
  Array dw32(half ? static_cast<std::size_t>(v * h) * 4 : 0);
  for (Array* array : {&dx, &dw, &dw32}) touch(s.team, *array);

  const Tensor grad_hidden(dx.data(), dtype, {r, h}), grad_weight(dw.data(), dtype, {v, h});
  const Tensor grad_weight32 = half ? Tensor(dw32.data(), DType::f32, {v, h}) : Tensor();
  const ConstTensor hidden(data.x.data(), dtype, {r, h}), weight(data.w.data(), dtype, {v, h});
  const bool bf16_products = dtype == DType::bf16;
  const Ceiling ceiling = ceiling_of_products(s.cpu_target, bf16_products);

  std::vector<Entry> entries;
  std::vector<std::shared_ptr<LinearCall>> calls;
  const auto ours = [&](const std::string& name, const std::vector<std::int32_t>& targets, bool gradient,
                        const Tensor& weight_gradient, std::uint64_t budget, const std::string& ratio_to) {
    Entry entry;
    Arguments arguments{.hidden = hidden, .weight = weight, .targets = ConstTensor(targets)};
    if (gradient) {
      arguments.grad_hidden = grad_hidden;
      arguments.grad_weight = weight_gradient;
    }
    Problem problem = problem_of(arguments, gradient ? Call::forward_backward : Call::forward);
    problem.memory_budget = budget;
    const auto kept = static_cast<double>(count_kept(targets));
    entry.row.name = name;
    entry.row.who = "ours";
    entry.row.flops = (gradient ? 6.0 : 2.0) * kept * static_cast<double>(h) * static_cast<double>(v);
    entry.row.ceiling = ceiling;
    entry.row.ratio_to = ratio_to;
    entry.expected = (gradient ? 1.0 : 0.35) * kept / static_cast<double>(std::max<std::int64_t>(1, r));
    try {
      auto call = std::make_shared<LinearCall>(s.context, problem, arguments);
      touch(s.team, call->workspace);
      entry.row.workspace_bytes = static_cast<std::int64_t>(call->plan.workspace_bytes());
      entry.run = [call] {
        call->run();
        return 0.0;
      };
      calls.push_back(call);
    } catch (const Error& error) {
      entry.row.note = error.what();  // a budget below what any plan needs
      calls.push_back(nullptr);
    }
    entries.push_back(std::move(entry));
    return entries.size() - 1;
  };

  const std::size_t full = ours("loss + gradients", data.targets, true, grad_weight, 0, "");
  entries[full].required = true;

  // The baseline: forward and backward are the two parts of one run.
  std::shared_ptr<Dense> dense;
  Array dense_dx, dense_dw;
  double dense_loss = 0;
  std::vector<double> dense_forward, dense_products;
  const std::int64_t dense_bytes = Dense::bytes(r, v) + (r + v) * h * 4 * 2;
  if (s.request.dense) {
    Entry entry;
    entry.row.name = "loss + gradients, unfused";
    entry.row.who = "dense";
    entry.row.flops = entries[full].row.flops;
    entry.row.ceiling = ceiling;
    entry.row.ratio_to = "loss + gradients";
    entry.row.workspace_bytes = Dense::bytes(r, v);
    entry.expected = 1.2;
    if (dense_bytes > available_memory() / 10 * 9) {
      entry.row.note = "not run: needs " + std::to_string(dense_bytes >> 20) + " MiB";
    } else {
      dense = std::make_shared<Dense>(s.team, unit_of(s.cpu_target, bf16_products), r, v);
      dense_dx = Array(static_cast<std::size_t>(r * h) * 4);
      dense_dw = Array(static_cast<std::size_t>(v * h) * 4);
      touch(s.team, dense_dx);
      touch(s.team, dense_dw);
      entry.run = [&] {
        dense_loss = dense->linear({data.x.data(), dtype, r, h, h}, {data.w.data(), dtype, v, h, h},
                                   data.targets.data(), dense_dx.as<float>(), dense_dw.as<float>());
        dense_forward.push_back(dense->seconds_forward);
        dense_products.push_back(dense->seconds_products);
        return 0.0;
      };
    }
    entries.push_back(std::move(entry));
  }

  ours("loss only", data.targets, false, {}, 0, "");
  ours("75 % of rows ignored", sparse_targets, true, grad_weight, 0, "loss + gradients");
  const std::string within = "within " + std::to_string(s.request.budget >> 20) + " MiB";
  ours(within, data.targets, true, grad_weight, s.request.budget, "loss + gradients");
  if (half) {
    ours("dW in fp32", data.targets, true, grad_weight32, 0, "loss + gradients");
    ours("dW in fp32, " + within, data.targets, true, grad_weight32, s.request.budget, "dW in fp32");
  }

  const auto between = [&] {
    s.ceilings.probe(ceiling);
    if (ceiling == Ceiling::amx_l1) {
      s.ceilings.probe(Ceiling::amx_registers);
      s.ceilings.probe(Ceiling::amx_l2);
    }
  };
  Table table;
  table.suite = "linear";
  table.dtype = name_of(dtype);
  table.rows = measure(std::move(entries), between, s.request.seconds, s.request.repeats);

  std::size_t next_call = 0;
  for (Row& row : table.rows) {
    if (row.who == "ours" && calls[next_call] && !row.seconds.empty()) row.loss = calls[next_call]->loss;
    if (row.who == "ours") ++next_call;
    if (row.who == "dense" && !row.seconds.empty()) row.loss = dense_loss;
  }
  if (!dense_forward.empty()) {
    // Parts of the baseline's runs, as rows of their own.
    const Row& whole = table.rows[1];
    Row forward = whole;
    forward.name = "loss only, unfused";
    forward.seconds = dense_forward;
    forward.flops = whole.flops / 3;
    forward.ratio_to = "loss only";
    forward.note = "first part of the run above";
    Row products = whole;
    products.name = "its three products alone";
    products.seconds = dense_products;
    products.loss.reset();
    products.note = std::string("on ") + name_of(unit_of(s.cpu_target, bf16_products));
    // A warm-up counts in these vectors but not in the row's.
    for (Row* part : {&forward, &products}) {
      part->seconds.erase(
          part->seconds.begin(),
          part->seconds.begin() + static_cast<std::ptrdiff_t>(part->seconds.size() - whole.seconds.size()));
    }
    table.rows.insert(table.rows.begin() + 2, {forward, products});
  }
  table.facts = {{"rows", r},
                 {"hidden", h},
                 {"vocab", v},
                 {"kept", count_kept(data.targets)},
                 {"kept_sparse", count_kept(sparse_targets)},
                 {"data", s.request.data},
                 {"seed", s.request.seed}};
  s.tables.push_back(std::move(table));
}

}  // namespace logitless::bench
