/* The README's example in C, compiled by a C compiler and run: equal logits, so the loss is log V. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "logitless/logitless.h"

enum { R = 5, H = 16, V = 301 };
static float x[R * H], w[V * H], dx[R * H], dw[V * H];
static int32_t y[R] = {7, 7, -100, 7, 7};

static double example(void) {
  /* region: c */
  double loss;
  ll_tensor X = {sizeof X, x, LL_F32, LL_DEVICE_CPU, 0, 2, {R, H}, {H, 1}};
  ll_tensor W = {sizeof W, w, LL_F32, LL_DEVICE_CPU, 0, 2, {V, H}, {H, 1}};
  ll_tensor Y = {sizeof Y, y, LL_I32, LL_DEVICE_CPU, 0, 1, {R}, {1}};
  ll_tensor dX = {sizeof dX, dx, LL_F32, LL_DEVICE_CPU, 0, 2, {R, H}, {H, 1}};
  ll_tensor dW = {sizeof dW, dw, LL_F32, LL_DEVICE_CPU, 0, 2, {V, H}, {H, 1}};
  ll_tensor L = {sizeof L, &loss, LL_F64, LL_DEVICE_CPU, 0, 0, {0}, {0}};
  ll_problem problem;
  ll_arguments arguments;
  ll_context *context;
  ll_plan *plan;

  ll_problem_init(&problem);
  problem.rows = R, problem.hidden = H, problem.vocab = V;
  problem.hidden_dtype = problem.weight_dtype = problem.grad_hidden_dtype = problem.grad_weight_dtype = LL_F32;
  ll_arguments_init(&arguments);
  arguments.hidden = &X, arguments.weight = &W, arguments.targets = &Y, arguments.loss = &L;
  arguments.grad_hidden = &dX, arguments.grad_weight = &dW;
  if (ll_context_create(NULL, &context) || ll_plan_create(context, &problem, NULL, &plan))
    return puts(ll_last_error()), NAN;
  size_t bytes = (ll_plan_workspace_bytes(plan) + 63) / 64 * 64;
  void *workspace = aligned_alloc(64, bytes);
  if (ll_forward_backward(plan, &arguments, workspace, bytes, NULL)) return puts(ll_last_error()), NAN;
  /* endregion: c */
  free(workspace);
  ll_plan_destroy(plan);
  ll_context_destroy(context);
  return loss;
}

int main(void) {
  int i;
  for (i = 0; i < R * H; ++i) x[i] = 0.1f;
  for (i = 0; i < V * H; ++i) w[i] = 0.2f;
  double const loss = example();
  if (!(fabs(loss - log((double)V)) < 1e-5) || !(dw[7 * H] < 0.0f) || dx[2 * H] != 0.0f) {
    printf("loss %.9g, must be %.9g; dW[7,0] %g, must be negative; dX[2,0] %g, must be 0\n", loss, log((double)V),
           dw[7 * H], dx[2 * H]);
    return 1;
  }
  return 0;
}
