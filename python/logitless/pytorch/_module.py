"""A head that knows its loss: an nn.Linear whose call is the loss, so that hooks of FSDP and friends see the weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import _functions


class LinearCrossEntropy(nn.Linear):
    """nn.Linear(hidden_size, vocab) whose forward(input, target) is linear_cross_entropy(input, weight, target).

    Parameters, state_dict keys and initialisation are nn.Linear's; bias is False by default. Other keywords are
    linear_cross_entropy's and serve every call; a call may override them. logits(input) gives the transformed logits,
    for generation.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(hidden_size, vocab, bias=bias, device=device, dtype=dtype)
        self.keywords = keywords

    @classmethod
    def from_linear(cls, lm_head: nn.Linear, **keywords: Any) -> LinearCrossEntropy:
        """Shares the parameters of an existing head (tied weights stay tied)."""
        if type(lm_head).__name__ != "Linear" and not isinstance(lm_head, nn.Linear):
            raise TypeError(f"lm_head: {type(lm_head).__name__}; must be an nn.Linear")
        made = cls(lm_head.in_features, lm_head.out_features, lm_head.bias is not None, device="meta", **keywords)
        made.weight = lm_head.weight
        made.bias = lm_head.bias
        return made

    def forward(self, input: Tensor, target: Tensor, **keywords: Any) -> Any:  # type: ignore[override]
        """linear_cross_entropy of input [..., H] and target [...]."""
        return _functions.linear_cross_entropy(
            input, self.weight, target, linear_bias=self.bias, **{**self.keywords, **keywords}
        )

    def logits(self, input: Tensor) -> Tensor:
        """[..., V]: what the loss takes the softmax of, with logit_scale, softcap and temperature, held in full."""
        z = nn.functional.linear(input, self.weight, self.bias)
        scale, cap = self.keywords.get("logit_scale", 1.0), self.keywords.get("softcap")
        temperature = self.keywords.get("temperature", 1.0)
        z = z * scale if scale != 1.0 else z
        z = torch.tanh(z / cap) * cap if cap is not None else z
        return z / temperature if isinstance(temperature, Tensor) or temperature != 1.0 else z

    def extra_repr(self) -> str:
        """nn.Linear's, and the loss' keywords."""
        return ", ".join([super().extra_repr(), *(f"{name}={value!r}" for name, value in self.keywords.items())])
