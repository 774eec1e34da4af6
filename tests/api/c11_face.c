/* The C ABI from C11: X [3,4] · W [5,4] · y [3] -> loss, dX [3,4], dW [5,4], compared with the definition in double.
 * Compiled by a C compiler with -pedantic-errors, so that the header stays C. Prints what is wrong and returns 1. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "logitless/logitless.h"

enum { R = 3, H = 4, V = 5 };

static int failures = 0;

static void near_(const char *what, int index, double got, double want) {
  /* A few roundings of fp32 in terms of size 1. */
  const double tolerance = 4.0 * (H + V) * ldexp(1.0, -24) * (1.0 + fabs(want));
  if (!(fabs(got - want) <= tolerance)) {
    printf("%s[%d] is %.9g, must be %.9g within %.2g\n", what, index, got, want, tolerance);
    ++failures;
  }
}

static void ok(const char *what, ll_status status) {
  if (status != LL_OK) {
    printf("%s: %s: %s\n", what, ll_status_name(status), ll_last_error());
    exit(1);
  }
}

static ll_tensor matrix(float *data, int64_t rows, int64_t cols) {
  ll_tensor t = {sizeof(ll_tensor), data, LL_F32, LL_DEVICE_CPU, 0, 2, {rows, cols}, {cols, 1}};
  return t;
}

int main(void) {
  float x[R * H], w[V * H], dx[R * H], dw[V * H];
  int32_t y[R] = {4, -100, 1};
  double loss = -1.0, want_loss = 0.0;
  double want_dx[R * H] = {0}, want_dw[V * H] = {0};
  int64_t kept = -1, bad = -1;
  int i, j, k;

  for (i = 0; i < R * H; ++i) x[i] = 0.25f * (float)(i * 5 % 7 - 3);
  for (i = 0; i < V * H; ++i) w[i] = 0.5f * (float)(i * 3 % 5 - 2);

  for (i = 0; i < R; ++i) {
    double z[V], sum = 0.0;
    if (y[i] == -100) continue;
    for (j = 0; j < V; ++j) {
      z[j] = 0.0;
      for (k = 0; k < H; ++k) z[j] += (double)x[i * H + k] * (double)w[j * H + k];
      sum += exp(z[j]);
    }
    want_loss += (log(sum) - z[y[i]]) / 2.0;
    for (j = 0; j < V; ++j) {
      const double d = (exp(z[j]) / sum - (j == y[i] ? 1.0 : 0.0)) / 2.0;
      for (k = 0; k < H; ++k) {
        want_dx[i * H + k] += d * (double)w[j * H + k];
        want_dw[j * H + k] += d * (double)x[i * H + k];
      }
    }
  }

  ll_context *context = NULL;
  ok("ll_context_create", ll_context_create(NULL, &context));

  ll_problem problem;
  ll_problem_init(&problem);
  problem.rows = R;
  problem.hidden = H;
  problem.vocab = V;
  problem.hidden_dtype = problem.weight_dtype = LL_F32;
  problem.grad_hidden_dtype = problem.grad_weight_dtype = LL_F32;
  ll_options options;
  ll_options_init(&options);

  /* ll_*_init of this header know its structs, and are expressions. */
  ll_arguments none_given;
  (void)(ll_arguments_init(&none_given), 0);
  if (problem.size != sizeof problem || options.size != sizeof options || none_given.size != sizeof none_given ||
      options.beta != 0.5 || none_given.filter_kept != NULL) {
    printf("ll_*_init did not initialise the structs of this header\n");
    ++failures;
  }

  ll_plan *plan = NULL;
  ok("ll_plan_create", ll_plan_create(context, &problem, &options, &plan));
  const size_t bytes = (ll_plan_workspace_bytes(plan) + 63) / 64 * 64;
  void *workspace = bytes > 0 ? aligned_alloc(64, bytes) : NULL;

  ll_tensor hidden = matrix(x, R, H), weight = matrix(w, V, H), grad_hidden = matrix(dx, R, H),
            grad_weight = matrix(dw, V, H);
  ll_tensor targets = {sizeof(ll_tensor), y, LL_I32, LL_DEVICE_CPU, 0, 1, {R}, {1}};
  ll_tensor loss_view = {sizeof(ll_tensor), &loss, LL_F64, LL_DEVICE_CPU, 0, 0, {0}, {0}};
  ll_arguments arguments;
  ll_arguments_init(&arguments);
  arguments.hidden = &hidden;
  arguments.weight = &weight;
  arguments.targets = &targets;
  arguments.loss = &loss_view;
  arguments.grad_hidden = &grad_hidden;
  arguments.grad_weight = &grad_weight;
  arguments.kept_rows = &kept;
  arguments.bad_rows = &bad;
  ok("ll_forward_backward", ll_forward_backward(plan, &arguments, workspace, bytes, NULL));

  near_("loss", 0, loss, want_loss);
  for (i = 0; i < R * H; ++i) near_("grad_hidden", i, dx[i], want_dx[i]);
  for (i = 0; i < V * H; ++i) near_("grad_weight", i, dw[i], want_dw[i]);
  if (kept != 2 || bad != 0) {
    printf("kept %lld, bad %lld; must be 2 and 0\n", (long long)kept, (long long)bad);
    ++failures;
  }

  /* A refusal has a status and a line of text. */
  options.label_smoothing = 2.0;
  ll_plan *none = NULL;
  if (ll_plan_create(context, &problem, &options, &none) != LL_ERROR_INVALID_ARGUMENT || none != NULL ||
      ll_last_error()[0] == '\0') {
    printf("label_smoothing 2 was not refused\n");
    ++failures;
  }

  free(workspace);
  ll_plan_destroy(plan);
  ll_context_destroy(context);
  if (failures == 0) printf("logitless %s from C11: loss %.6f\n", ll_version(), loss);
  return failures == 0 ? 0 : 1;
}
