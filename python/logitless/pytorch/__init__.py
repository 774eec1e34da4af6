"""The PyTorch face: functions, module, operators. Imported when first used from `logitless`."""

from ._functions import (
    Outputs,
    cross_entropy,
    distillation_loss,
    linear_cross_entropy,
    next_token_targets,
    pack_keep_mask,
    policy_loss,
    token_logprobs,
    topk_distillation_loss,
)
from ._module import LinearCrossEntropy
from ._ops import op_calls
from ._parts import (
    RowOutputs,
    VocabPart,
    merge_statistics,
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_token_logprobs,
)

__all__ = [
    "LinearCrossEntropy",
    "Outputs",
    "RowOutputs",
    "VocabPart",
    "cross_entropy",
    "distillation_loss",
    "linear_cross_entropy",
    "merge_statistics",
    "next_token_targets",
    "op_calls",
    "pack_keep_mask",
    "policy_loss",
    "token_logprobs",
    "topk_distillation_loss",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_token_logprobs",
]
