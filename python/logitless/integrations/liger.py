"""Liger's functions on Logitless, in Liger's argument order, so that an import is all that changes.

input [R, H], weight [V, H], target [R] -> loss. As in Liger a batch without any kept row gives 0, z-loss
(lse_square_scale) is part of the loss and is returned reduced like it, and accuracy is a mean over kept rows. Logits
are never rounded to 16 bits, and gradients are summed in float32 whatever accum_dtype says.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..pytorch import distillation_loss, linear_cross_entropy, token_logprobs

__all__ = [
    "CrossEntropyOutput",
    "LigerFusedLinearCrossEntropyLoss",
    "liger_fused_linear_cross_entropy",
    "liger_fused_linear_jsd",
]


class CrossEntropyOutput(NamedTuple):
    """What Liger returns when more than the loss is asked for; None where not asked."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **keywords: Any,
) -> Any:
    """Cross-entropy of softmax(input @ weight.T + bias).

    Args:
        input [..., H], weight [V, H], bias [V]: float32, bfloat16 or float16. target [...]: int64.
        ce_weight: class weights [V]. lse_square_scale: z-loss. softcap: as Gemma's.
        accum_dtype: without meaning; sums are float32.
        use_token_scaling: a token's loss times its own probability, a constant (one more forward pass).
        return_z_loss, return_token_accuracy, return_predicted_tokens: return a CrossEntropyOutput.
        keywords: of logitless.linear_cross_entropy (memory_budget, logit_scale, ...).

    Raises as linear_cross_entropy. Source: Liger-Kernel, src/liger_kernel/transformers/functional.py; docs/losses.md.
    """
    fields = []
    if return_z_loss:
        fields.append("z_loss")
    if return_token_accuracy:
        fields += ["correct", "kept"]
    if return_predicted_tokens:
        fields.append("argmax")
    if use_token_scaling:
        with torch.no_grad():
            keywords["row_weight"] = token_logprobs(
                input, weight, target, bias=bias, softcap=softcap, ignore_index=ignore_index
            ).exp()
    found = linear_cross_entropy(
        input,
        weight,
        target,
        linear_bias=bias,
        weight=ce_weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=lse_square_scale,
        softcap=softcap,
        return_outputs=[*fields, "kept"] if fields else False,
        **{"on_empty": "zero", **keywords},
    )
    if not fields:
        return found
    kept = found.kept.clamp(min=1)
    z_loss, accuracy = found.z_loss, None
    if z_loss is not None:
        z_loss = z_loss.detach()
        if use_token_scaling:
            z_loss = z_loss * keywords["row_weight"]
        if reduction != "none":
            z_loss = z_loss.sum() / kept if reduction == "mean" else z_loss.sum()
    if return_token_accuracy:
        accuracy = found.correct.to(torch.float32)
        accuracy = accuracy if reduction == "none" else accuracy.sum() / kept
    return CrossEntropyOutput(found.loss, z_loss, accuracy, found.argmax)


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """Liger's module: called with (lin_weight, input, target, bias). Arguments as the function's."""

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.arguments = (
            ce_weight,
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss,
            accum_dtype,
            use_token_scaling,
            return_token_accuracy,
            return_predicted_tokens,
        )

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Any:
        """The loss of _input [..., H] under lin_weight [V, H]: the weight comes first here."""
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, *self.arguments)


def liger_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
) -> Tensor:
    """Generalised Jensen-Shannon divergence of two heads, a mean over rows whose shift_labels are not ignore_index.

    student_input [..., H], student_weight [V, H], teacher_input [..., H'], teacher_weight [V, H']. jsd_beta 0 is the
    forward KL (teacher first), 1 the reverse KL. Raises as logitless.distillation_loss. Source: Liger-Kernel,
    src/liger_kernel/transformers/functional.py; docs/losses.md.
    """
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(jsd_beta), "jsd")
    loss: Tensor = distillation_loss(
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        kind=kind,
        beta=jsd_beta,
        temperature=temperature,
        target=shift_labels,
        ignore_index=ignore_index,
        on_empty="zero",
    )
    return loss
