"""patch(): TRL's fused head runs on Logitless; unpatch() takes it back.

Since 1.16 TRL builds a head of its own for SFT, DPO, GRPO, KTO and RLOO (trl.trainer.utils.add_fused_lm_head), which
calls the base model and would bypass a patched forward. Its kernel takes hidden [N, H], weight [V, H], targets [N] and
gives per token the log-probability, entropy, log of the sum of p squared, mean logit, and whether the target is the
first argmax; here these are the per-row outputs of one call, the first two differentiable. Nothing else of TRL changes.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any

import torch
from torch import Tensor

from ..pytorch import linear_cross_entropy

__all__ = ["KNOWN", "patch", "unpatch"]

KNOWN = ("1.16.",)  # beginnings of the versions whose kernel was read and tested
# What their kernel takes and gives, in order. A version that says otherwise is not known, whatever its number.
_PARAMETERS = [
    *("hidden", "weight", "bias", "targets", "temperature", "chunk_size"),
    *("final_logit_softcapping", "logit_scale", "outputs"),
]
_OUTPUTS = {"entropy": "entropy", "log_sum_sq_probs": "log_sum_p2", "mean_logits": "mean_logit", "is_top1": "correct"}

_saved: dict[str, Any] = {}


class _Head:
    """Stands for trl.kernels.ChunkedLogProbFunction, of which TRL uses `apply` alone."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = tuple(_OUTPUTS),
    ) -> tuple[Tensor | None, ...]:
        """hidden [N, H], weight [V, H], bias [V], targets [N] -> log-probabilities [N], then as in `outputs` or None:
        entropy, log sum p^2, mean logit (all float32 [N]), is_top1 (bool [N]).

        chunk_size has no meaning here: memory is bounded by the library's plan. Raises as linear_cross_entropy.
        """
        if hasattr(weight, "ds_id"):
            raise NotImplementedError(
                "logitless: DeepSpeed ZeRO-3 frees the gathered head before the backward; use ZeRO-2, or FSDP2"
            )
        wanted = [ours for theirs, ours in _OUTPUTS.items() if theirs in outputs]
        found = linear_cross_entropy(
            hidden,
            weight,
            targets,
            linear_bias=bias,
            temperature=temperature,
            softcap=final_logit_softcapping,
            logit_scale=logit_scale,
            ignore_index=-100,
            reduction="none",
            return_outputs=["logprob", *wanted],
        )
        return (found.logprob, *[getattr(found, ours) for ours in _OUTPUTS.values()])


def _always(device: torch.device) -> bool:
    return True


def patch() -> None:
    """Replaces the kernel of TRL's fused head in this process, for trainers made before and after alike.

    On every device, only positions with a label are scored then (TRL does so on Triton devices alone).

    Raises:
        ImportError: TRL is missing, or is a version that this module does not know.

    Source: trl/kernels/chunked_logprob.py and trl/trainer/utils.py of TRL 1.16.0.
    """
    if _saved:
        return
    version = importlib.metadata.version("trl")
    if not version.startswith(KNOWN):
        raise ImportError(
            f"logitless.integrations.trl: TRL {version} is not known; known: {', '.join(each + 'x' for each in KNOWN)}"
        )
    import trl.kernels.chunked_logprob as kernel
    import trl.trainer.utils as utils

    function = getattr(utils, "_ChunkedLogProbFunction", None)
    parameters = list(inspect.signature(function.forward).parameters)[1:] if function is not None else []
    if function is not kernel.ChunkedLogProbFunction or parameters != _PARAMETERS:
        raise ImportError(f"logitless.integrations.trl: TRL {version} has another head: {function}, {parameters}")
    if tuple(kernel.OPTIONAL_OUTPUTS) != tuple(_OUTPUTS) or not callable(getattr(utils, "_use_triton", None)):
        raise ImportError(f"logitless.integrations.trl: TRL {version} has other outputs: {kernel.OPTIONAL_OUTPUTS}")
    _saved.update(_ChunkedLogProbFunction=function, _use_triton=utils._use_triton)
    utils._ChunkedLogProbFunction = _Head
    utils._use_triton = _always


def unpatch() -> None:
    """Gives TRL its own kernel back."""
    import trl.trainer.utils as utils

    for name, value in _saved.items():
        setattr(utils, name, value)
    _saved.clear()
