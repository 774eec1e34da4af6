"""Cut Cross-Entropy's functions on Logitless, in its argument order, so that an import is all that changes.

e [..., H], c [V, H], targets [...] -> loss. CCE's default drops gradient entries below a threshold (filter_eps "auto"),
which biases the gradient; here "auto" and None are exact, and a number is Logitless' filter: a power of two, unbiased.
Its arithmetic choices (impl, accum_e_fp32, accum_c_fp32) have no meaning here: sums are float32 always.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..pytorch import linear_cross_entropy as _linear_cross_entropy

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]


def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool | int = 0,
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: Any = "cce",
    vocab_parallel_options: Any = None,
    **keywords: Any,
) -> Tensor:
    """Cross-entropy of softmax(e @ c.T + bias).

    Args:
        e [..., H], c [V, H], bias [V]: float32, bfloat16 or float16. targets [...]: int64.
        shift: k predicts targets[..., t + k] from e[..., t, :]; True is 1. The targets are moved, e is not copied.
        filter_eps: "auto" and None are exact; a power of two filters without bias.
        filter_e_grad, filter_c_grad: both, or neither (exact).
        accum_e_fp32, accum_c_fp32, impl: without meaning.
        keywords: of logitless.linear_cross_entropy (memory_budget, z_loss, ...).

    Returns:
        float32: a scalar, or with reduction "none" [..., T] ([..., T - shift] for a shift), 0 where ignored.

    Raises as logitless.linear_cross_entropy; NotImplementedError for vocab_parallel_options. Source:
    cut_cross_entropy/linear_cross_entropy.py of ml-cross-entropy; docs/losses.md.
    """
    if vocab_parallel_options is not None:
        raise NotImplementedError(
            "vocab_parallel_options: not taken here; call logitless.vocab_parallel_linear_cross_entropy, with "
            "first_column=start and total_vocab where parts are not of equal size"
        )
    if filter_e_grad != filter_c_grad:
        raise ValueError(
            f"filter_e_grad, filter_c_grad: {filter_e_grad}, {filter_c_grad}; the filter serves both gradients or none"
        )
    exact = filter_eps is None or filter_eps == "auto" or not filter_e_grad
    if not exact and not isinstance(filter_eps, (int, float)):
        raise ValueError(f"filter_eps: {filter_eps!r}; must be 'auto', None or a power of two")
    steps, length = int(shift), targets.shape[-1]
    if not 0 <= steps < length:
        raise ValueError(f"shift: {shift}; must be in [0, {length})")
    if steps > 0:
        targets = nn.functional.pad(targets[..., steps:], (0, steps), value=ignore_index)
    loss: Tensor = _linear_cross_entropy(
        e,
        c,
        targets,
        linear_bias=bias,
        ignore_index=ignore_index,
        softcap=softcap,
        reduction=reduction,
        filter_eps=0.0 if exact else float(filter_eps),  # type: ignore[arg-type]
        **keywords,
    )
    return loss[..., : length - steps] if reduction == "none" and steps > 0 else loss


class LinearCrossEntropy(nn.Module):
    """CCE's module: called with (e, c, targets, bias). Arguments as the function's."""

    def __init__(
        self,
        ignore_index: int = -100,
        softcap: float | None = None,
        reduction: str = "mean",
        shift: bool | int = 0,
        filter_eps: float | str | None = "auto",
        accum_e_fp32: bool = False,
        accum_c_fp32: bool = False,
        filter_e_grad: bool = True,
        filter_c_grad: bool = True,
        impl: Any = "cce",
    ) -> None:
        super().__init__()
        self.arguments = {
            "ignore_index": ignore_index,
            "softcap": softcap,
            "reduction": reduction,
            "shift": shift,
            "filter_eps": filter_eps,
            "filter_e_grad": filter_e_grad,
            "filter_c_grad": filter_c_grad,
        }

    def forward(self, e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
        """The loss of e [..., H] under c [V, H]."""
        return linear_cross_entropy(e, c, targets, bias, **self.arguments)  # type: ignore[arg-type]
