/* A consumer in C: loss of X [2,2] on W [3,2], compared with the same from the definition. Prints the version. */
#include <logitless/logitless.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static void require(ll_status status) {
  if (status != LL_OK) {
    fprintf(stderr, "%s: %s\n", ll_status_name(status), ll_last_error());
    exit(1);
  }
}

static ll_tensor matrix(void *data, ll_dtype dtype, int32_t ndim, int64_t rows, int64_t columns) {
  ll_tensor tensor = {sizeof(ll_tensor), data, dtype, LL_DEVICE_CPU, 0, ndim, {rows, columns}, {columns, 1}};
  return tensor;
}

int main(void) {
  float hidden[2][2] = {{0.5f, -1.0f}, {2.0f, 0.25f}};
  float weight[3][2] = {{1.0f, 0.5f}, {-0.5f, 2.0f}, {0.25f, -1.5f}};
  int32_t target[2] = {2, 0};
  double loss = 0.0;

  double expected = 0.0;
  for (int i = 0; i < 2; ++i) {
    double z[3], sum = 0.0;
    for (int j = 0; j < 3; ++j) {
      z[j] = (double)hidden[i][0] * weight[j][0] + (double)hidden[i][1] * weight[j][1];
      sum += exp(z[j]);
    }
    expected += (log(sum) - z[target[i]]) / 2.0;
  }

  ll_tensor x = matrix(hidden, LL_F32, 2, 2, 2), w = matrix(weight, LL_F32, 2, 3, 2);
  ll_tensor y = matrix(target, LL_I32, 1, 2, 1), out = matrix(&loss, LL_F64, 1, 1, 1);
  ll_context *context = NULL;
  require(ll_context_create(NULL, &context));
  ll_problem problem;
  ll_problem_init(&problem);
  problem.call = LL_FORWARD;
  problem.rows = 2;
  problem.hidden = 2;
  problem.vocab = 3;
  problem.hidden_dtype = problem.weight_dtype = LL_F32;
  ll_options options;
  ll_options_init(&options);
  ll_plan *plan = NULL;
  require(ll_plan_create(context, &problem, &options, &plan));
  size_t bytes = (ll_plan_workspace_bytes(plan) + 63) / 64 * 64;
  void *workspace = aligned_alloc(64, bytes + 64);
  ll_arguments arguments;
  ll_arguments_init(&arguments);
  arguments.hidden = &x;
  arguments.weight = &w;
  arguments.targets = &y;
  arguments.loss = &out;
  require(ll_forward(plan, &arguments, workspace, bytes, NULL));
  free(workspace);
  ll_plan_destroy(plan);
  ll_context_destroy(context);

  if (!(fabs(loss - expected) < 1e-6)) {
    fprintf(stderr, "loss %.9g, expected %.9g\n", loss, expected);
    return 1;
  }
  printf("%s\n", ll_version());
  return 0;
}
