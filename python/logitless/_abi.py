"""The C ABI of include/logitless/logitless.h in ctypes: its structs, numbers and functions, field by field.

Nothing here is computed. tests/python/test_abi.py reads the header and compares names, order and numbers with this
file, so that the two cannot drift apart.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint64, c_void_p

VERSION = (0, 1)  # major and minor of the header that this file follows

# ll_status
OK = 0
ERROR_INVALID_ARGUMENT = 1
ERROR_TARGET_RANGE = 2
ERROR_EMPTY = 3
ERROR_BUDGET = 4
ERROR_WORKSPACE = 5
ERROR_UNSUPPORTED = 6
ERROR_OUT_OF_MEMORY = 7
ERROR_SYSTEM = 8
ERROR_INTERNAL = 9

# ll_dtype
NONE, F32, BF16, F16, F64, I32, I64, U8 = range(8)
# ll_device_type, ll_backend, ll_format
DEVICE_CPU, DEVICE_CUDA = 1, 2
BACKEND_CPU, BACKEND_REFERENCE, BACKEND_CUDA = 1, 2, 3
TEXT, JSON = 1, 2
# ll_kind, ll_call
LINEAR, LOGITS = 1, 2
FORWARD, FORWARD_BACKWARD, BACKWARD = 1, 2, 3
# ll_options: names that users type, and their numbers
REDUCTION = {"mean": 1, "sum": 2, "none": 3}
SMOOTHING = {"uniform": 1, "others": 2}
ON_EMPTY = {"error": 1, "nan": 2, "zero": 3}
TARGETS = {"hard": 1, "soft": 2, "topk": 3, "teacher": 4}
REST = {"dropped": 1, "renormalised": 2, "spread": 3}
RULE = {"policy": 1}
DIVERGENCE = {"forward_kl": 1, "reverse_kl": 2, "jsd": 3}
# ll_problem_flags
ACCUMULATE_GRAD_HIDDEN = 1
ACCUMULATE_GRAD_WEIGHT = 2
GRAD_WEIGHT_STRIDED = 4
IN_PLACE = 8
# ll_problem_inputs: the bit that an input needs
INPUT_BITS = {"class_weight": 1, "row_weight": 2, "row_temperature": 4, "keep_mask": 8, "logit_floor": 16}
TOPK_LOG = 32
ENTROPY_GRADIENT = 64
# ll_problem_outputs: the bit that an output needs
OUTPUT_BITS = {
    "row_entropy": 1,
    "row_argmax": 2,
    "row_correct": 2,
    "correct_rows": 2,
    "row_mean_logit": 4,
    "row_log_sum_p2": 8,
}

# What users call an output beside the loss, and the argument of ll_arguments that it is.
FIELDS = {
    "row_loss": "row_loss",
    "lse": "row_lse",
    "logprob": "row_logprob",
    "entropy": "row_entropy",
    "argmax": "row_argmax",
    "correct": "row_correct",
    "z_loss": "row_zloss",
    "mean_logit": "row_mean_logit",
    "log_sum_p2": "row_log_sum_p2",
    "kept": "kept_rows",
    "correct_rows": "correct_rows",
    "bad_rows": "bad_rows",
}

MAX_NDIM = 4


class Tensor(ctypes.Structure):
    """ll_tensor."""

    _fields_ = [
        ("size", c_uint64),
        ("data", c_void_p),
        ("dtype", c_int32),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("shape", c_int64 * MAX_NDIM),
        ("stride", c_int64 * MAX_NDIM),
    ]


class ContextOptions(ctypes.Structure):
    """ll_context_options."""

    _fields_ = [
        ("size", c_uint64),
        ("backend", c_int32),
        ("threads", c_int32),
        ("parallel_for", c_void_p),
        ("parallel_for_user", c_void_p),
        ("cpu_target", c_char_p),
        ("device", c_int32),
        ("reserved", c_int32),
    ]


class Options(ctypes.Structure):
    """ll_options."""

    _fields_ = [
        ("size", c_uint64),
        ("reduction", c_int32),
        ("smoothing", c_int32),
        ("label_smoothing", c_double),
        ("ignore_index", c_int64),
        ("normalizer", c_double),
        ("on_empty", c_int32),
        ("reserved", c_int32),
        ("logit_scale", c_double),
        ("softcap", c_double),
        ("temperature", c_double),
        ("z_loss", c_double),
        ("targets", c_int32),
        ("rest", c_int32),
        ("rule", c_int32),
        ("divergence", c_int32),
        ("clip_low", c_double),
        ("clip_high", c_double),
        ("kl_coef", c_double),
        ("entropy_coef", c_double),
        ("beta", c_double),
        ("distill_temperature", c_double),
        ("hard_share", c_double),
        ("temperature_squared", c_int32),
        ("reserved2", c_int32),
        ("filter", c_double),
        ("filter_seed", c_uint64),
    ]


class Problem(ctypes.Structure):
    """ll_problem."""

    _fields_ = [
        ("size", c_uint64),
        ("kind", c_int32),
        ("call", c_int32),
        ("rows", c_int64),
        ("hidden", c_int64),
        ("vocab", c_int64),
        ("hidden_dtype", c_int32),
        ("weight_dtype", c_int32),
        ("logits_dtype", c_int32),
        ("grad_hidden_dtype", c_int32),
        ("grad_weight_dtype", c_int32),
        ("grad_logits_dtype", c_int32),
        ("flags", c_uint64),
        ("memory_budget", c_uint64),
        ("bias_dtype", c_int32),
        ("soft_dtype", c_int32),
        ("teacher_hidden_dtype", c_int32),
        ("teacher_weight_dtype", c_int32),
        ("teacher_bias_dtype", c_int32),
        ("grad_bias_dtype", c_int32),
        ("topk", c_int64),
        ("teacher_hidden", c_int64),
        ("first_column", c_int64),
        ("total_vocab", c_int64),
        ("inputs", c_uint64),
        ("outputs", c_uint64),
        ("saved_bytes", c_uint64),
        ("most_kept_rows", c_int64),
    ]


# ll_arguments in order. All but grad_loss are pointers: to an ll_tensor, or where SCALARS names them to one number.
ARGUMENTS = [
    "hidden",
    "weight",
    "logits",
    "targets",
    "loss",
    "row_loss",
    "row_lse",
    "row_logprob",
    "stats",
    "grad_hidden",
    "grad_weight",
    "grad_logits",
    "grad_loss",
    "grad_row_loss",
    "lse",
    "kept_rows",
    "bad_rows",
    "bias",
    "class_weight",
    "row_weight",
    "row_temperature",
    "keep_mask",
    "logit_floor",
    "soft_targets",
    "topk_ids",
    "topk_probs",
    "teacher_hidden",
    "teacher_weight",
    "teacher_bias",
    "old_logprob",
    "advantage",
    "ref_logprob",
    "normalizer",
    "row_entropy",
    "row_argmax",
    "row_correct",
    "row_zloss",
    "row_mean_logit",
    "row_log_sum_p2",
    "grad_bias",
    "grad_row_lse",
    "grad_row_logprob",
    "grad_row_entropy",
    "correct_rows",
    "filter_kept",
    "filter_variance",
    "saved",
    "grad_loss_factor",
]
SCALARS = frozenset({"kept_rows", "bad_rows", "correct_rows", "filter_kept", "filter_variance"})


class Arguments(ctypes.Structure):
    """ll_arguments."""

    _fields_ = [("size", c_uint64)] + [(name, c_double if name == "grad_loss" else c_void_p) for name in ARGUMENTS]


_POINTER, _STATUS = c_void_p, c_int32
# Name, result, arguments of every function that is called from Python.
FUNCTIONS = {
    "ll_status_name": (c_char_p, [_STATUS]),
    "ll_last_error": (c_char_p, []),
    "ll_version": (c_char_p, []),
    "ll_context_options_init_sized": (None, [_POINTER, c_size_t]),
    "ll_context_create": (_STATUS, [_POINTER, _POINTER]),
    "ll_context_destroy": (None, [_POINTER]),
    "ll_context_describe": (_STATUS, [_POINTER, c_int32, c_char_p, c_size_t, _POINTER]),
    "ll_options_init_sized": (None, [_POINTER, c_size_t]),
    "ll_problem_init_sized": (None, [_POINTER, c_size_t]),
    "ll_arguments_init_sized": (None, [_POINTER, c_size_t]),
    "ll_plan_create": (_STATUS, [_POINTER, _POINTER, _POINTER, _POINTER]),
    "ll_plan_destroy": (None, [_POINTER]),
    "ll_plan_workspace_bytes": (c_size_t, [_POINTER]),
    "ll_plan_statistics": (c_int64, [_POINTER]),
    "ll_plan_describe": (_STATUS, [_POINTER, c_int32, c_char_p, c_size_t, _POINTER]),
    "ll_forward": (_STATUS, [_POINTER, _POINTER, _POINTER, c_size_t, _POINTER]),
    "ll_forward_backward": (_STATUS, [_POINTER, _POINTER, _POINTER, c_size_t, _POINTER]),
    "ll_backward": (_STATUS, [_POINTER, _POINTER, _POINTER, c_size_t, _POINTER]),
    "ll_scale": (_STATUS, [_POINTER, _POINTER, _POINTER, _POINTER]),
    "ll_check_status": (_STATUS, [_POINTER, _POINTER]),
    "ll_next_token_targets": (_STATUS, [_POINTER, _POINTER, _POINTER, c_int64, _POINTER]),
    "ll_merge_statistics": (_STATUS, [_POINTER, c_int64, _POINTER]),
}


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Gives every function its types; an AttributeError names one that an older library lacks."""
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
