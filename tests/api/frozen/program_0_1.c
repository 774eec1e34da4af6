/* A program as it was built when 0.1 was published: it includes the frozen header, never today's, and is linked to
 * today's library. Logits [2,3] -> loss and gradient in place, then forward and backward of a linear problem by its
 * saved statistics; results against numbers worked out by hand. Never edit this file or its header: that is the test.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "logitless_0_1.h"

static int failures = 0;

/* Numbers up to 11, a few roundings of fp32 each. */
static void expect(const char *what, double got, double want) {
  if (!(fabs(got - want) <= 4e-6)) {
    printf("%s is %.9g, must be %.9g\n", what, got, want);
    ++failures;
  }
}

static void ok(const char *what, ll_status status) {
  if (status != LL_OK) {
    printf("%s: %s: %s\n", what, ll_status_name(status), ll_last_error());
    exit(1);
  }
}

static ll_tensor tensor(void *data, ll_dtype dtype, int32_t ndim, int64_t d0, int64_t d1) {
  ll_tensor t;
  memset(&t, 0, sizeof t);
  t.size = sizeof t;
  t.data = data;
  t.dtype = dtype;
  t.device_type = LL_DEVICE_CPU;
  t.ndim = ndim;
  t.shape[0] = d0;
  t.shape[1] = d1;
  t.stride[0] = ndim == 2 ? d1 : 1;
  t.stride[1] = ndim == 2 ? 1 : 0;
  return t;
}

static void *workspace_of(const ll_plan *plan, size_t *bytes) {
  *bytes = (ll_plan_workspace_bytes(plan) + 63) / 64 * 64;
  return *bytes > 0 ? aligned_alloc(64, *bytes) : NULL;
}

/* softmax(ln 1, ln 2, ln 5) = 1/8, 2/8, 5/8 */
static void logits_in_place(ll_context *context) {
  float z[6] = {0.0f, 0.69314718f, 1.60943791f, 0.0f, 0.69314718f, 1.60943791f};
  int64_t y[2] = {2, 0};
  float row_loss[2] = {0, 0};
  double loss = 0.0;
  ll_problem problem;
  ll_options options;
  ll_arguments arguments;
  ll_plan *plan = NULL;
  size_t bytes;
  ll_problem_init(&problem);
  problem.kind = LL_LOGITS;
  problem.rows = 2;
  problem.vocab = 3;
  problem.logits_dtype = problem.grad_logits_dtype = LL_F32;
  problem.flags = LL_IN_PLACE;
  ll_options_init(&options);
  options.reduction = LL_SUM;
  ok("ll_plan_create", ll_plan_create(context, &problem, &options, &plan));
  void *workspace = workspace_of(plan, &bytes);
  ll_tensor logits = tensor(z, LL_F32, 2, 2, 3), targets = tensor(y, LL_I64, 1, 2, 0);
  ll_tensor rows = tensor(row_loss, LL_F32, 1, 2, 0), total = tensor(&loss, LL_F64, 0, 0, 0);
  ll_arguments_init(&arguments);
  arguments.logits = arguments.grad_logits = &logits;
  arguments.targets = &targets;
  arguments.row_loss = &rows;
  arguments.loss = &total;
  ok("ll_forward_backward", ll_forward_backward(plan, &arguments, workspace, bytes, NULL));
  expect("row_loss[0]", row_loss[0], log(8.0 / 5.0));
  expect("row_loss[1]", row_loss[1], log(8.0));
  expect("loss", loss, log(64.0 / 5.0));
  expect("grad_logits[0,0]", z[0], 0.125);
  expect("grad_logits[0,2]", z[2], -0.375);
  expect("grad_logits[1,0]", z[3], -0.875);
  expect("grad_logits[1,1]", z[4], 0.25);
  free(workspace);
  ll_plan_destroy(plan);
}

/* H = 1: z = x w with w = ln 1, ln 2, ln 5, x = 1. */
static void linear_by_statistics(ll_context *context) {
  float x[1] = {1.0f}, w[3] = {0.0f, 0.69314718f, 1.60943791f}, stats[4], dw[3] = {10.0f, 10.0f, 10.0f};
  int32_t y[1] = {1};
  float loss = 0.0f;
  ll_problem problem;
  ll_options options;
  ll_arguments arguments;
  ll_plan *plan = NULL;
  size_t bytes;
  ll_problem_init(&problem);
  problem.call = LL_FORWARD;
  problem.rows = 1;
  problem.hidden = 1;
  problem.vocab = 3;
  problem.hidden_dtype = problem.weight_dtype = LL_F32;
  ll_options_init(&options);
  ok("ll_plan_create", ll_plan_create(context, &problem, &options, &plan));
  void *workspace = workspace_of(plan, &bytes);
  ll_tensor hidden = tensor(x, LL_F32, 2, 1, 1), weight = tensor(w, LL_F32, 2, 3, 1),
            targets = tensor(y, LL_I32, 1, 1, 0);
  ll_tensor saved = tensor(stats, LL_F32, 2, 1, 4), total = tensor(&loss, LL_F32, 1, 1, 0);
  ll_tensor grad = tensor(dw, LL_F32, 2, 3, 1);
  ll_arguments_init(&arguments);
  arguments.hidden = &hidden;
  arguments.weight = &weight;
  arguments.targets = &targets;
  arguments.loss = &total;
  arguments.stats = &saved;
  ok("ll_forward", ll_forward(plan, &arguments, workspace, bytes, NULL));
  expect("loss", loss, log(4.0));
  free(workspace);
  ll_plan_destroy(plan);

  problem.call = LL_BACKWARD;
  problem.grad_weight_dtype = LL_F32;
  problem.flags = LL_ACCUMULATE_GRAD_WEIGHT;
  ok("ll_plan_create", ll_plan_create(context, &problem, &options, &plan));
  workspace = workspace_of(plan, &bytes);
  arguments.loss = NULL;
  arguments.grad_weight = &grad;
  arguments.grad_loss = 8.0;
  ok("ll_backward", ll_backward(plan, &arguments, workspace, bytes, NULL));
  expect("grad_weight[0]", dw[0], 10.0 + 1.0);
  expect("grad_weight[1]", dw[1], 10.0 - 6.0);
  expect("grad_weight[2]", dw[2], 10.0 + 5.0);
  free(workspace);
  ll_plan_destroy(plan);
}

int main(void) {
  const ll_backend backends[] = {LL_BACKEND_CPU, LL_BACKEND_REFERENCE};
  for (int i = 0; i < 2; ++i) {
    ll_context_options options;
    ll_context *context = NULL;
    ll_context_options_init(&options);
    options.backend = backends[i];
    ok("ll_context_create", ll_context_create(&options, &context));
    logits_in_place(context);
    linear_by_statistics(context);
    ll_context_destroy(context);
  }
  if (failures == 0)
    printf("a program of %d.%d runs on logitless %s\n", LL_VERSION_MAJOR, LL_VERSION_MINOR, ll_version());
  return failures == 0 ? 0 : 1;
}
