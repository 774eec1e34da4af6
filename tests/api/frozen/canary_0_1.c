/* A program as it was built when 0.1 was published, with something of its own right behind each struct that the library
 * initialises: today's library, whose structs are longer, must leave that alone. Never edit this file or its header. */
#include <stdint.h>
#include <stdio.h>

#include "logitless_0_1.h"

static const uint64_t canary = 0x5a5a5a5a5a5a5a5a;

int main(void) {
  struct {
    ll_options it;
    uint64_t behind[64];
  } options;
  struct {
    ll_problem it;
    uint64_t behind[64];
  } problem;
  struct {
    ll_arguments it;
    uint64_t behind[64];
  } arguments;
  int failures = 0;
  int i;
  for (i = 0; i < 64; ++i) options.behind[i] = problem.behind[i] = arguments.behind[i] = canary;
  ll_options_init(&options.it);
  ll_problem_init(&problem.it);
  ll_arguments_init(&arguments.it);
  for (i = 0; i < 64; ++i) {
    if (options.behind[i] == canary && problem.behind[i] == canary && arguments.behind[i] == canary) continue;
    printf("the 8 bytes at %d behind a struct were written\n", 8 * i);
    ++failures;
  }
  if (options.it.size != sizeof options.it || problem.it.size != sizeof problem.it ||
      arguments.it.size != sizeof arguments.it) {
    printf("sizes %d, %d, %d; must be %d, %d, %d\n", (int)options.it.size, (int)problem.it.size, (int)arguments.it.size,
           (int)sizeof options.it, (int)sizeof problem.it, (int)sizeof arguments.it);
    ++failures;
  }
  if (options.it.ignore_index != -100 || problem.it.call != LL_FORWARD_BACKWARD || arguments.it.grad_loss != 1.0) {
    printf("a default is not that of 0.1\n");
    ++failures;
  }
  return failures == 0 ? 0 : 1;
}
