"""verl's fused head on Logitless: hidden [..., H], weight [V, H], labels [...] -> log-probabilities, entropies [...].

Argument order of verl's FusedLinearForPPO (verl/utils/experimental/torch_functional.py) and of its kernel
linear_cross_entropy (verl/utils/kernel). Both results are float32 and differentiable, in one backward; verl's PyTorch
path rounds them to the hidden states' dtype. No label is ignored there; here labels of -100 give 0 and no gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..pytorch import token_logprobs

__all__ = ["FusedLinearForPPO", "fused_linear_for_ppo", "linear_cross_entropy"]


def fused_linear_for_ppo(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """(log_probs, entropy) of labels under softmax(hidden @ weight.T / temperature).

    hidden [..., H], weight [V, H] of float32, bfloat16 or float16, labels [...] int64; results float32 [...]. Keywords
    as of logitless.token_logprobs (softcap, logit_scale, memory_budget, ...). Raises as it. Source: docs/losses.md.
    """
    log_probs, entropy = token_logprobs(
        hidden, weight, labels, temperature=temperature, return_entropy=True, **keywords
    )
    return log_probs, entropy


class FusedLinearForPPO(nn.Module):
    """verl's module of this name. chunk_size has no meaning here: give memory_budget to the call instead."""

    def __init__(self, chunk_size: int = 512) -> None:
        super().__init__()
        self.chunk_size = chunk_size

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        """(log_probs, entropy), as fused_linear_for_ppo."""
        return fused_linear_for_ppo(hidden_states, vocab_weights, input_ids, temperature, **keywords)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """verl's kernel call of this name: (log_probs, entropy), flattened to [rows] as there.

    Raises NotImplementedError for a head split over a process group, ValueError for a reduction other than "none".
    """
    if dist_process_group is not None:
        raise NotImplementedError(
            "dist_process_group: not taken here; call logitless.vocab_parallel_token_logprobs(..., group=..., "
            "return_entropy=True)"
        )
    if reduction != "none":
        raise ValueError(f"reduction: {reduction!r}; must be 'none', since log-probabilities and entropies are per row")
    rows = hidden.reshape(-1, hidden.shape[-1])
    return fused_linear_for_ppo(rows, weight, labels.reshape(-1), temperature)
