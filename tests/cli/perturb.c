/* Preloaded by test_check_fails.py: makes the CPU backend wrong in one element of one output, so that `logitless check`
 * has something to find. LOGITLESS_PERTURB is NAME:FACTOR; the element of largest magnitude is multiplied by FACTOR; or
 * row_argmax, row_correct, whose first element gets another lowest bit.
 * Calls without workspace are the reference's, and stay right. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "logitless/logitless.h"

typedef ll_status (*call)(ll_plan *, const ll_arguments *, void *, size_t, void *);

static float get(const ll_tensor *t, int64_t n) {
  if (t->dtype == LL_F32) return ((const float *)t->data)[n];
  uint32_t bits = (uint32_t)((const uint16_t *)t->data)[n] << 16; /* bf16 */
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static void set(const ll_tensor *t, int64_t n, float value) {
  if (t->dtype == LL_F32) {
    ((float *)t->data)[n] = value;
  } else {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    ((uint16_t *)t->data)[n] = (uint16_t)((bits + 0x8000u) >> 16);
  }
}

ll_status ll_forward_backward(ll_plan *plan, const ll_arguments *a, void *workspace, size_t bytes,
                              void *stream) LL_NOEXCEPT {
  call real = (call)dlsym(RTLD_NEXT, "ll_forward_backward");
  ll_status status = real(plan, a, workspace, bytes, stream);
  const char *what = getenv("LOGITLESS_PERTURB");
  if (status != LL_OK || bytes == 0 || what == NULL) return status;
  size_t length = strcspn(what, ":");
  float factor = (float)atof(what + length + 1);
  const struct {
    const char *name;
    const ll_tensor *tensor;
  } outputs[] = {{"row_loss", a->row_loss},
                 {"row_lse", a->row_lse},
                 {"row_logprob", a->row_logprob},
                 {"row_entropy", a->row_entropy},
                 {"row_zloss", a->row_zloss},
                 {"row_mean_logit", a->row_mean_logit},
                 {"row_log_sum_p2", a->row_log_sum_p2},
                 {"grad_bias", a->grad_bias},
                 {"grad_hidden", a->grad_hidden},
                 {"grad_weight", a->grad_weight},
                 {"grad_logits", a->grad_logits}};
  if (a->loss != NULL && length == 4 && memcmp(what, "loss", 4) == 0) *(double *)a->loss->data *= factor;
  if (a->row_argmax != NULL && strcmp(what, "row_argmax") == 0) *(int64_t *)a->row_argmax->data ^= 1;
  if (a->row_correct != NULL && strcmp(what, "row_correct") == 0) *(uint8_t *)a->row_correct->data ^= 1;
  for (size_t i = 0; i < sizeof outputs / sizeof *outputs; ++i) {
    const ll_tensor *t = outputs[i].tensor;
    if (t == NULL || strlen(outputs[i].name) != length || memcmp(what, outputs[i].name, length) != 0) continue;
    int64_t count = t->ndim == 2 ? t->shape[0] * t->shape[1] : t->shape[0], largest = 0;
    for (int64_t n = 0; n < count; ++n) {
      if (fabsf(get(t, n)) > fabsf(get(t, largest))) largest = n;
    }
    set(t, largest, get(t, largest) * factor);
  }
  return status;
}
