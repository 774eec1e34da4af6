"""Logitless: losses at a language model's head, and their gradients, without the matrix of logits.

    import logitless
    loss = logitless.linear_cross_entropy(hidden, lm_head.weight, labels, shift=True)

PyTorch functions are loaded when first used; `import logitless` needs no more than NumPy. logitless.numpy works on
arrays; logitless.patch(model) puts the loss into a Hugging Face model; logitless.plan and logitless.info describe.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._library import Error, check_status, info, library, version
from ._plan import PlanDescription, plan

if TYPE_CHECKING:
    from .integrations.huggingface import patch, unpatch
    from .pytorch import (
        LinearCrossEntropy,
        Outputs,
        RowOutputs,
        VocabPart,
        cross_entropy,
        distillation_loss,
        linear_cross_entropy,
        merge_statistics,
        next_token_targets,
        op_calls,
        pack_keep_mask,
        policy_loss,
        token_logprobs,
        topk_distillation_loss,
        vocab_parallel_linear_cross_entropy,
        vocab_parallel_token_logprobs,
    )

__version__ = version()

_LAZY = dict.fromkeys(
    (
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
    ),
    "pytorch",
) | {"patch": "integrations.huggingface", "unpatch": "integrations.huggingface"}

# What is imported with a face, and how it was tested.
_EXTRAS = {"torch": "torch==2.13.0", "transformers": "'transformers>=5,<6'"}

__all__ = [
    "Error",
    "LinearCrossEntropy",
    "Outputs",
    "PlanDescription",
    "RowOutputs",
    "VocabPart",
    "check_status",
    "cross_entropy",
    "distillation_loss",
    "info",
    "library",
    "linear_cross_entropy",
    "merge_statistics",
    "next_token_targets",
    "op_calls",
    "pack_keep_mask",
    "patch",
    "plan",
    "policy_loss",
    "token_logprobs",
    "topk_distillation_loss",
    "unpatch",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_token_logprobs",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'logitless' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f".{module}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        raise ModuleNotFoundError(
            f"logitless.{name} needs {error.name}: pip install {_EXTRAS[error.name]}", name=error.name
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
