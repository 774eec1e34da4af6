/* Logitless: losses at a language model's head, and their gradients, without the matrix of logits.
 *
 * The C ABI. C11, and C++. Symbols: R rows (token positions), H hidden size, V vocabulary size, X [R,H] hidden states,
 * W [V,H] head weight (row j = class j), z [R,V] logits, y [R] targets, p = softmax(z), D = dL/dz.
 * z0 = X W^T + b, or the given logits + b; z = cap(logit_scale z0) / T_i, cap(t) = softcap tanh(t / softcap).
 *
 * Use: make a context (threads, backend); describe a problem (shapes, dtypes, call, budget) and options; make a plan;
 * ask it for its workspace; run it on tensors. Compute calls never allocate; a plan may be used by one thread at a
 * time.
 *
 * Rules of the ABI: every struct begins with its own size and only grows at its end (a field beyond `size` has its
 * default, and in a field that came later than 0.1 a zero means "as before"); enumerators keep their numbers; functions
 * return ll_status and no exception leaves the library. After a failure ll_last_error() gives one line that names the
 * argument, its value and what would be right. */
#ifndef LOGITLESS_LOGITLESS_H
#define LOGITLESS_LOGITLESS_H

#include <stddef.h>
#include <stdint.h>

/* The one source of the version: the build reads it from here. */
#define LL_VERSION_MAJOR 0
#define LL_VERSION_MINOR 1
#define LL_VERSION_PATCH 0

#if defined(_WIN32)
#define LL_API
#else
#define LL_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#define LL_NOEXCEPT noexcept
#else
#define LL_NOEXCEPT
#endif

/* ---- status ------------------------------------------------------------------------------------------------- */

typedef int32_t ll_status;
enum {
  LL_OK = 0,
  LL_ERROR_INVALID_ARGUMENT = 1, /* a value, shape, stride, dtype or pointer that no call could accept */
  LL_ERROR_TARGET_RANGE = 2,     /* a target outside [0,V) that is not ignore_index; nothing was written */
  LL_ERROR_EMPTY = 3,         /* mean over no kept row (or a divisor of 0) with on_empty = error; nothing was written */
  LL_ERROR_BUDGET = 4,        /* the memory budget is below the least that any plan needs */
  LL_ERROR_WORKSPACE = 5,     /* the workspace is null, misaligned or smaller than the plan's */
  LL_ERROR_UNSUPPORTED = 6,   /* a combination that this build or backend does not offer */
  LL_ERROR_OUT_OF_MEMORY = 7, /* the library could not allocate a context or a plan */
  LL_ERROR_SYSTEM = 8,        /* the operating system refused (threads, AMX permission) */
  LL_ERROR_INTERNAL = 9       /* a defect of the library; please report it */
};

/* Name of a status, for example "LL_ERROR_BUDGET". Never null. */
LL_API const char *ll_status_name(ll_status status) LL_NOEXCEPT;
/* Text of this thread's last failure; "" if none. Valid until this thread's next call. */
LL_API const char *ll_last_error(void) LL_NOEXCEPT;
/* "major.minor.patch" of the library that runs (the header's may differ). */
LL_API const char *ll_version(void) LL_NOEXCEPT;

/* ---- log ------------------------------------------------------------------------------------------------------ */

typedef int32_t ll_log_level;
enum { LL_LOG_OFF = 0, LL_LOG_ERROR = 1, LL_LOG_INFO = 2, LL_LOG_DEBUG = 3 };
typedef void (*ll_log_fn)(void *user, ll_log_level level, const char *message);
/* Sends messages up to `level` to `fn`; null restores stderr under LOGITLESS_LOG (default off). Thread safe. */
LL_API void ll_set_log(ll_log_fn fn, void *user, ll_log_level level) LL_NOEXCEPT;

/* ---- tensors -------------------------------------------------------------------------------------------------- */

typedef int32_t ll_dtype;
enum {
  LL_NONE = 0, /* "not wanted", where a problem names the dtype of an output */
  LL_F32 = 1,
  LL_BF16 = 2,
  LL_F16 = 3,
  LL_F64 = 4, /* hidden, weight and logits in F64 run on the reference backend only */
  LL_I32 = 5,
  LL_I64 = 6,
  LL_U8 = 7 /* bits of a keep mask, and row_correct */
};

/* DLPack's numbers. */
typedef int32_t ll_device_type;
enum { LL_DEVICE_CPU = 1, LL_DEVICE_CUDA = 2 };

#define LL_MAX_NDIM 4

/* A view, DLPack's meaning: element i,j lies at data + (i*stride[0] + j*stride[1]) * sizeof(dtype).
 * Strides are in elements and may be 0 (inputs only) or negative. */
typedef struct ll_tensor {
  uint64_t size; /* sizeof(ll_tensor) */
  void *data;    /* may be null only if the tensor has no element */
  ll_dtype dtype;
  ll_device_type device_type;
  int32_t device_id;
  int32_t ndim;
  int64_t shape[LL_MAX_NDIM];
  int64_t stride[LL_MAX_NDIM];
} ll_tensor;

/* ---- context ---------------------------------------------------------------------------------------------------- */

typedef struct ll_context ll_context;

typedef int32_t ll_backend;
enum { LL_BACKEND_CPU = 1, LL_BACKEND_REFERENCE = 2, LL_BACKEND_CUDA = 3 };

/* The caller's executor: run body(body_user, i) for every i in [0, tasks), in any order, on any threads, and return
 * when all are done. At most `threads` (of the context) bodies may run at once. */
typedef void (*ll_parallel_body)(void *body_user, int64_t index);
typedef void (*ll_parallel_for)(void *user, int64_t tasks, ll_parallel_body body, void *body_user);

typedef struct ll_context_options {
  uint64_t size;
  ll_backend backend;           /* default CPU */
  int32_t threads;              /* 0: LOGITLESS_NUM_THREADS, or the CPUs this process may use */
  ll_parallel_for parallel_for; /* null: a pool of the context's own */
  void *parallel_for_user;
  const char *cpu_target; /* null: LOGITLESS_CPU_TARGET, or the best one; else scalar, avx2, avx512, avx512bf16, amx */
  /* since 0.2 */
  int32_t device; /* of LL_BACKEND_CUDA: the device's number, default 0 */
  int32_t reserved;
} ll_context_options;

/* As ll_options_init_sized; the exported ll_context_options_init is for programs built with 0.1. */
LL_API void ll_context_options_init_sized(ll_context_options *options, size_t bytes) LL_NOEXCEPT;
LL_API void ll_context_options_init(ll_context_options *options) LL_NOEXCEPT;
#define ll_context_options_init(options) ll_context_options_init_sized((options), sizeof(ll_context_options))
/* options may be null. A context may be used from several threads; its calls then queue for its threads. */
LL_API ll_status ll_context_create(const ll_context_options *options, ll_context **context) LL_NOEXCEPT;
/* Plans of the context must be destroyed before it. Null is allowed. */
LL_API void ll_context_destroy(ll_context *context) LL_NOEXCEPT;

typedef int32_t ll_format;
enum { LL_TEXT = 1, LL_JSON = 2 };
/* Machine, instruction sets found and chosen, backends, threads, version. Writes at most `capacity` bytes with the
 * terminating 0 and sets *length to the length of the whole text without it (capacity 0 and buffer null to ask). */
LL_API ll_status ll_context_describe(const ll_context *context, ll_format format, char *buffer, size_t capacity,
                                     size_t *length) LL_NOEXCEPT;

/* ---- options: what is computed ------------------------------------------------------------------------------------ */

typedef int32_t ll_reduction;
enum { LL_MEAN = 1, LL_SUM = 2, LL_PER_ROW = 3 /* reduction none: row_loss is the result */ };
typedef int32_t ll_smoothing;
enum {
  LL_SMOOTHING_UNIFORM = 1, /* every class gets alpha/V, the target 1 - alpha more (PyTorch) */
  LL_SMOOTHING_OTHERS = 2   /* the other classes get alpha/(V-1), the target 1 - alpha (Megatron, CANN) */
};
typedef int32_t ll_on_empty;
enum { LL_EMPTY_ERROR = 1, LL_EMPTY_NAN = 2, LL_EMPTY_ZERO = 3 };

/* What a row is compared with, t_ij. w: class weights, a: label_smoothing. Targets y are then optional but for hard
 * ones and a hard_share above 0; where they are given, rows of ignore_index are left out. */
typedef int32_t ll_targets;
enum {
  LL_TARGETS_HARD = 1,   /* y [R]: t_ij = w_y (1 - a) [j = y] + w_j a / V */
  LL_TARGETS_SOFT = 2,   /* s [R,V], taken as it is: t_ij = w_j ((1 - a) s_ij + a / V) */
  LL_TARGETS_TOPK = 3,   /* s from k ids and probabilities of each row, [R,k] */
  LL_TARGETS_TEACHER = 4 /* q, the softmax of a second head, kind linear only: distillation */
};
/* Mass that top-k targets leave over: nowhere; s divided by its sum; in equal parts on the other V - k classes. */
typedef int32_t ll_rest;
enum { LL_REST_DROPPED = 1, LL_REST_RENORMALISED = 2, LL_REST_SPREAD = 3 };
/* Policy: row loss = -min(w A, clamp(w, 1 - clip_low, 1 + clip_high) A) + kl_coef K - entropy_coef H, with
 * w = exp(log p_y - old_logprob), A the advantage, K = exp(d) - d - 1, d = ref_logprob - log p_y, H the row's entropy.
 */
typedef int32_t ll_rule;
enum { LL_RULE_POLICY = 1 };
/* Of q (teacher) and p (student), both at distill_temperature. JSD: beta KL(q | mix) + (1 - beta) KL(p | mix),
 * mix = beta q + (1 - beta) p. */
typedef int32_t ll_divergence;
enum { LL_FORWARD_KL = 1, LL_REVERSE_KL = 2, LL_JSD = 3 };

typedef struct ll_options {
  uint64_t size;
  ll_reduction reduction; /* default mean */
  ll_smoothing smoothing; /* default uniform */
  double label_smoothing; /* alpha in [0,1], default 0 */
  int64_t ignore_index;   /* default -100: that row has loss 0 and no gradient */
  double normalizer;      /* mean divides by it when > 0; default 0: by the kept rows' number, or their sum of w_y */
  ll_on_empty on_empty;   /* default error */
  int32_t reserved;       /* 0 */
  /* since 0.2; 0 means "as before" in all of them */
  double logit_scale;           /* above 0, default 1 */
  double softcap;               /* above 0; default 0: none */
  double temperature;           /* above 0, default 1: T of every row */
  double z_loss;                /* lambda: adds lambda lse_i^2 to a row's loss, default 0 */
  ll_targets targets;           /* default hard */
  ll_rest rest;                 /* default dropped; of LL_TARGETS_TOPK */
  ll_rule rule;                 /* default 0: none. A rule takes the place of the cross-entropy */
  ll_divergence divergence;     /* default forward KL; of LL_TARGETS_TEACHER */
  double clip_low, clip_high;   /* of the policy rule, as given; ll_options_init sets 0.2 */
  double kl_coef, entropy_coef; /* of the policy rule, default 0 */
  double beta;                  /* of LL_JSD, in (0,1); ll_options_init sets 0.5 */
  double distill_temperature;   /* tau above 0, default 1: distillation compares z / tau with the teacher's u / tau */
  double hard_share;           /* in [0,1], default 0: row loss = it times the cross-entropy of y + the rest times KD */
  int32_t temperature_squared; /* 1: KD is multiplied by tau^2; default 0 */
  int32_t reserved2;           /* 0 */
  double filter; /* eps: gradient entries below it become 0 or +-eps, unbiased; a power of two in (0,1), default 0 */
  uint64_t filter_seed;
} ll_options;

/* The defaults into a struct of `bytes` bytes, sizeof(ll_options) of the header that the caller was built with.
 * ll_options_init, ll_problem_init and ll_arguments_init call these with it; their exported functions of the same name
 * are for programs built with 0.1, and set the fields (and the size) of then alone. */
LL_API void ll_options_init_sized(ll_options *options, size_t bytes) LL_NOEXCEPT;
LL_API void ll_options_init(ll_options *options) LL_NOEXCEPT;
#define ll_options_init(options) ll_options_init_sized((options), sizeof(ll_options))

/* ---- problem and plan: how it is computed -------------------------------------------------------------------------- */

typedef int32_t ll_kind;
enum { LL_LINEAR = 1 /* from hidden and weight */, LL_LOGITS = 2 /* from given logits */ };
typedef int32_t ll_call;
enum { LL_FORWARD = 1, LL_FORWARD_BACKWARD = 2, LL_BACKWARD = 3 };

typedef uint64_t ll_problem_flags;
enum {
  LL_ACCUMULATE_GRAD_HIDDEN = 1, /* dX is added into the caller's buffer */
  LL_ACCUMULATE_GRAD_WEIGHT = 2, /* dW is added into the caller's buffer */
  LL_GRAD_WEIGHT_STRIDED = 4,    /* dW may have gaps between rows: its bytes are not borrowed for exponentials */
  LL_IN_PLACE = 8                /* grad_logits may be the logits themselves */
};

/* Inputs beside X, W or z, and y, that every run of the plan gets. */
typedef uint64_t ll_problem_inputs;
enum {
  LL_CLASS_WEIGHT = 1,
  LL_ROW_WEIGHT = 2,
  LL_ROW_TEMPERATURE = 4,
  LL_KEEP_MASK = 8,
  LL_LOGIT_FLOOR = 16,
  LL_TOPK_LOG = 32,        /* topk_probs are log-probabilities of a teacher: the row loss is forward KL from them */
  LL_ENTROPY_GRADIENT = 64 /* grad_row_entropy may be given; forward needs the bit too if backward is to have it */
};
/* Outputs that a run may ask for and that need sums of their own. backward does not write them, but must be made with
 * what its forward was made with: they decide what stats holds. */
typedef uint64_t ll_problem_outputs;
enum {
  LL_ENTROPY = 1,    /* row_entropy */
  LL_ARGMAX = 2,     /* row_argmax, row_correct, correct_rows */
  LL_MEAN_LOGIT = 4, /* row_mean_logit */
  LL_SUM_P2 = 8      /* row_log_sum_p2 */
};

typedef struct ll_problem {
  uint64_t size;
  ll_kind kind;                /* default linear */
  ll_call call;                /* default forward_backward */
  int64_t rows, hidden, vocab; /* R >= 0, H >= 1 (linear), V >= 1 */
  ll_dtype hidden_dtype, weight_dtype, logits_dtype;
  ll_dtype grad_hidden_dtype, grad_weight_dtype, grad_logits_dtype; /* LL_NONE: not wanted. The input's dtype or F32 */
  ll_problem_flags flags;
  uint64_t memory_budget; /* bytes of workspace; 0: no limit */
  /* since 0.2 */
  ll_dtype bias_dtype;                                                     /* LL_NONE: no bias; either kind */
  ll_dtype soft_dtype;                                                     /* of LL_TARGETS_SOFT */
  ll_dtype teacher_hidden_dtype, teacher_weight_dtype, teacher_bias_dtype; /* of LL_TARGETS_TEACHER */
  ll_dtype grad_bias_dtype; /* LL_NONE: not wanted. The bias' or F32; of kind linear (else: sum grad_logits) */
  int64_t topk;             /* k of LL_TARGETS_TOPK, else 0 */
  int64_t teacher_hidden;   /* the teacher's hidden size, of LL_TARGETS_TEACHER, else 0 */
  /* A part of a vocabulary: when total_vocab > 0, the columns here are [first_column, first_column + vocab) of
   * total_vocab classes, and targets are numbers of the whole. forward writes stats alone; ll_merge_statistics joins
   * those of all parts; backward takes the joined ones. */
  int64_t first_column, total_vocab;
  ll_problem_inputs inputs;
  ll_problem_outputs outputs;
  /* Bytes of a buffer of the caller's in which forward keeps what backward then need not multiply again: both problems
   * name the same number, and backward costs (6 - 2f) R H V for the share f that fits. Kind linear. 0: none */
  uint64_t saved_bytes;
  /* A bound of the kept rows that the caller knows before the call, 0: none. On CUDA kept rows are then gathered and
   * products cover so many; more of them than that make the results NaN and a status (ll_check_status). The CPU counts
   * for itself. */
  int64_t most_kept_rows;
} ll_problem;

LL_API void ll_problem_init_sized(ll_problem *problem, size_t bytes) LL_NOEXCEPT;
LL_API void ll_problem_init(ll_problem *problem) LL_NOEXCEPT;
#define ll_problem_init(problem) ll_problem_init_sized((problem), sizeof(ll_problem))

typedef struct ll_plan ll_plan;
/* options may be null: the defaults. */
LL_API ll_status ll_plan_create(ll_context *context, const ll_problem *problem, const ll_options *options,
                                ll_plan **plan) LL_NOEXCEPT;
LL_API void ll_plan_destroy(ll_plan *plan) LL_NOEXCEPT;
/* Exact bytes of workspace; any alignment of at least 64 bytes will do. */
LL_API size_t ll_plan_workspace_bytes(const ll_plan *plan) LL_NOEXCEPT;
/* Columns of `stats` that runs of the plan write or read: 4, 8, or 12 with a teacher's head, or a teacher's top k at a
 * distill_temperature other than 1. 0 of a null plan. */
LL_API int64_t ll_plan_statistics(const ll_plan *plan) LL_NOEXCEPT;
/* Bytes of `saved` that the plan uses: at most the problem's saved_bytes, 0 where not a leaf of classes fits. */
LL_API uint64_t ll_plan_saved_bytes(const ll_plan *plan) LL_NOEXCEPT;
/* The plan with its ledger, flops, prediction and rejected settings; see ll_context_describe for the buffer. */
LL_API ll_status ll_plan_describe(const ll_plan *plan, ll_format format, char *buffer, size_t capacity,
                                  size_t *length) LL_NOEXCEPT;

/* ---- compute ------------------------------------------------------------------------------------------------------- */

/* Everything a call reads and writes. A null pointer is "not given" or "not wanted". Inputs never change, outputs not
 * asked for are never touched, outputs must not overlap anything (grad_logits may be logits with LL_IN_PLACE). */
typedef struct ll_arguments {
  uint64_t size;
  /* inputs */
  const ll_tensor *hidden;  /* X [R,H] */
  const ll_tensor *weight;  /* W [V,H] */
  const ll_tensor *logits;  /* z [R,V], problems of kind logits */
  const ll_tensor *targets; /* y [R], I32 or I64; see ll_targets for when it may be null */
  /* outputs of forward and forward_backward */
  const ll_tensor *loss;        /* [] or [1], F32 or F64; mean or sum */
  const ll_tensor *row_loss;    /* [R] F32: each row's loss before the reduction, 0 for ignored rows */
  const ll_tensor *row_lse;     /* [R] F32: log-sum-exp of the row's logits */
  const ll_tensor *row_logprob; /* [R] F32: log-probability of the target */
  /* [R,4], [R,8] or [R,12] F32, ll_plan_statistics says which; backward reads it: m, r = sum over j != y of exp(z_j -
   * m), z_y, k = sum_j c_j (z_j - m) or 0 where nothing needs it; and t = sum over j != y of exp(z_j - m) (z_j - m), n
   * = sum_j c_j, and further ones that are the backend's own. lse = m + log(r + exp(z_y - m)). */
  const ll_tensor *stats;
  /* gradients, for the dtypes that the problem names */
  const ll_tensor *grad_hidden; /* dX [R,H]; columns adjacent */
  const ll_tensor *grad_weight; /* dW [V,H]; columns adjacent */
  const ll_tensor *grad_logits; /* D [R,V]; columns adjacent */
  /* upstream gradients: of the reduced loss, and of each row's loss (added; F32, stride 0 allowed) */
  double grad_loss;               /* default 1; with reduction per row: ignored */
  const ll_tensor *grad_row_loss; /* [R] F32; with reduction per row null means all ones */
  /* backward of kind logits without stats */
  const ll_tensor *lse; /* [R] F32: 1 - p_y is then only as exact as z_y - lse */
  /* counts, written when not null */
  int64_t *kept_rows;
  int64_t *bad_rows; /* kept rows whose logits are all -inf or hold +inf or NaN: their loss is NaN */
  /* since 0.2. Inputs that the problem names must be given, others must not */
  const ll_tensor *bias;            /* b [V] */
  const ll_tensor *class_weight;    /* w [V] F32; of a part: [total_vocab], since y may lie elsewhere */
  const ll_tensor *row_weight;      /* u [R] F32, any sign: multiplies the row's loss, never the divisor */
  const ll_tensor *row_temperature; /* T [R] F32, above 0 */
  const ll_tensor *keep_mask;       /* [R,ceil(V/8)] U8: class j of row i is dropped where bit j%8 of byte j/8 is 0 */
  const ll_tensor *logit_floor;     /* [R] F32: classes with z below it are dropped. The target never is */
  const ll_tensor *soft_targets;    /* s [R,V] */
  const ll_tensor *topk_ids;        /* [R,k] I32 or I64, distinct in each row */
  const ll_tensor *topk_probs;      /* [R,k] F32; with LL_TOPK_LOG their logarithms */
  const ll_tensor *teacher_hidden;  /* [R,teacher_hidden] */
  const ll_tensor *teacher_weight;  /* [V,teacher_hidden] */
  const ll_tensor *teacher_bias;    /* [V] */
  const ll_tensor *old_logprob;     /* [R] F32, of the policy rule, as the next two */
  const ll_tensor *advantage;       /* [R] F32 */
  const ll_tensor *ref_logprob;     /* [R] F32, exactly where kl_coef is not 0 */
  const ll_tensor *normalizer;      /* [] or [1], F32 or F64, optional: mean divides by it; before the option */
  /* outputs of forward and forward_backward; ignored rows have 0 */
  const ll_tensor *row_entropy;    /* [R] F32: -sum_j p log p */
  const ll_tensor *row_argmax;     /* [R] I32 or I64: lowest class of the largest z; -1 for ignored and bad rows */
  const ll_tensor *row_correct;    /* [R] U8: 1 where the target is the argmax */
  const ll_tensor *row_zloss;      /* [R] F32: u_i lambda lse_i^2 */
  const ll_tensor *row_mean_logit; /* [R] F32: mean of z over the classes that are not dropped */
  const ll_tensor *row_log_sum_p2; /* [R] F32: log sum_j p^2 */
  const ll_tensor *grad_bias;      /* db [V], adjacent */
  /* upstream gradients of the per-row outputs, added as they are (no row weight, no divisor); [R] F32, stride 0 allowed
   */
  const ll_tensor *grad_row_lse;
  const ll_tensor *grad_row_logprob;
  const ll_tensor *grad_row_entropy; /* with LL_ENTROPY_GRADIENT */
  int64_t *correct_rows;             /* kept rows whose target is the argmax, with LL_ARGMAX */
  /* of a filter: the share of the gradient's entries that it did not make 0, and a bound of the variance that it adds,
   * summed over D before upstream gradients. The reference backend filters nothing: 1 and 0 */
  double *filter_kept;
  double *filter_variance;
  /* [saved_bytes] U8, aligned to 64: written by forward, read by backward with the same targets and row weights */
  const ll_tensor *saved;
  /* [] or [1], F32 or F64, optional: multiplies grad_loss, where the loss' upstream gradient is a number in memory (on
   * CUDA: the device's, so that nobody waits for it) */
  const ll_tensor *grad_loss_factor;
} ll_arguments;

LL_API void ll_arguments_init_sized(ll_arguments *arguments, size_t bytes) LL_NOEXCEPT;
LL_API void ll_arguments_init(ll_arguments *arguments) LL_NOEXCEPT;
#define ll_arguments_init(arguments) ll_arguments_init_sized((arguments), sizeof(ll_arguments))

/* The plan's call must be the function's. On the CPU stream is null, and calls return when the result is there. On CUDA
 * stream is a cudaStream_t of the context's device: calls only enqueue, and may be captured into a graph; all tensors,
 * the workspace and the counts are memory of that device (counts: any that it can write). What a call cannot refuse
 * there, a target out of range or an empty mean, becomes NaN and is told by ll_check_status. */
LL_API ll_status ll_forward(ll_plan *plan, const ll_arguments *arguments, void *workspace, size_t workspace_bytes,
                            void *stream) LL_NOEXCEPT;
LL_API ll_status ll_forward_backward(ll_plan *plan, const ll_arguments *arguments, void *workspace,
                                     size_t workspace_bytes, void *stream) LL_NOEXCEPT;
LL_API ll_status ll_backward(ll_plan *plan, const ll_arguments *arguments, void *workspace, size_t workspace_bytes,
                             void *stream) LL_NOEXCEPT;

/* CUDA: waits for the stream and tells the first such thing since the last time: LL_ERROR_TARGET_RANGE naming row and
 * value, LL_ERROR_EMPTY (mean over no row with on_empty error), or LL_ERROR_INVALID_ARGUMENT (more kept rows than
 * most_kept_rows). Other backends refuse such calls at once: LL_OK. */
LL_API ll_status ll_check_status(ll_context *context, void *stream) LL_NOEXCEPT;

/* values *= factor: what makes gradients for an upstream gradient of 1 those for another. values [n] or
 * [m,n] of any float dtype, columns adjacent; factor [] or [1], F32 or F64. On CUDA it is enqueued, both lie on the
 * context's device, and values are not even read where factor is 1. */
LL_API ll_status ll_scale(ll_context *context, const ll_tensor *factor, const ll_tensor *values,
                          void *stream) LL_NOEXCEPT;

/* ---- helpers -------------------------------------------------------------------------------------------------------- */

/* targets[i] = ids[i+1], or ignore_index where i is the last of its sequence. ids [N] and targets [N] are I32 or I64.
 * Sequences: cu_seqlens [S+1] (0, the ends of the sequences in order, the last N), or document_ids [N] (a sequence ends
 * where the number changes), both I32 or I64; with neither, all of ids is one. At most one of them may be given. */
LL_API ll_status ll_next_token_targets(const ll_tensor *ids, const ll_tensor *cu_seqlens, const ll_tensor *document_ids,
                                       int64_t ignore_index, const ll_tensor *targets) LL_NOEXCEPT;

/* stats of `count` parts of a vocabulary, each [R,8] (or [R,4] with k = 0) F32, into those of the whole. The order of
 * parts changes the result by rounding alone. merged may be one of the parts. The last two columns, which no
 * part needs, become 0. */
LL_API ll_status ll_merge_statistics(const ll_tensor *const *parts, int64_t count, const ll_tensor *merged) LL_NOEXCEPT;

/* order[n] = the class with the n-th largest mean probability; of equals the lower class comes first. mean_probability
 * [V] F32 without NaN, order [V] I32 or I64. A weight whose rows lie in this order (targets renumbered accordingly) has
 * its rare classes side by side, so that a filter leaves whole tiles of D at 0. Compute it once per weight: mean
 * probabilities of n kept rows are grad_bias of one forward_backward with grad_loss 0, grad_row_lse 1/n (a scalar with
 * stride 0) and a bias of zeros (stride 0), wanting neither grad_hidden nor grad_weight. Allocates V numbers. */
LL_API ll_status ll_class_order(const ll_tensor *mean_probability, const ll_tensor *order) LL_NOEXCEPT;

#ifdef __cplusplus
}
#endif
#endif /* LOGITLESS_LOGITLESS_H */
