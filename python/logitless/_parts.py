"""A part of a vocabulary, for both faces: what is computed, as the settings of a call, and what merged statistics say.

A part is columns [first_column, first_column + V) of total_vocab classes; targets are numbers of the whole. Statistics
of rows are [R, 8] float32, as include/logitless/logitless.h orders them: m, r = sum over j != y of exp(z_j - m), z_y
(-inf where the target lies elsewhere), k = sum_j c_j (z_j - m), t = sum over j != y of exp(z_j - m) (z_j - m),
n = sum_j c_j. The C ABI gives no losses from merged ones, so that docs/losses.md's row formula stands here, in double.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _abi, _library
from ._settings import call_text, number_of, settings

SIZE = 8  # columns of a part's statistics
UPSTREAM = ("grad_row_loss", "grad_row_lse", "grad_row_logprob", "grad_row_entropy")  # in RowOutputs' order
TENSORS = ("class_weight", "row_weight", "row_temperature")


class RowOutputs(NamedTuple):
    """Per-row results [...] of merged statistics, float32; 0 in ignored rows."""

    row_loss: Any  # with class weights, smoothing, row weight and z-loss, before the reduction
    lse: Any
    logprob: Any  # of the target
    entropy: Any = None  # with entropy=True


@dataclasses.dataclass(frozen=True)
class Part:
    """Columns [first_column, first_column + V) of total_vocab classes, and the options that all its calls share.

    The options are linear_cross_entropy's: forward, merge and backward must agree on them, and so must all parts.
    entropy: statistics also hold what entropies and their gradients take.
    """

    first_column: int
    total_vocab: int
    _: dataclasses.KW_ONLY
    ignore_index: int = -100
    label_smoothing: float = 0.0
    smoothing: str = "uniform"
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    entropy: bool = False
    memory_budget: int | str | None = None

    def __post_init__(self) -> None:
        """ValueError for names and numbers that no call could take; the library checks the rest."""
        if not 0 <= self.first_column < self.total_vocab:
            raise ValueError(
                f"first_column: {self.first_column}; must be in [0, total_vocab), total_vocab being {self.total_vocab}"
            )
        self._settings()

    def _settings(self) -> str:
        number_of("smoothing", self.smoothing, _abi.SMOOTHING)
        more = [("first_column", self.first_column), ("total_vocab", self.total_vocab)]
        if self.entropy:
            more.append(("inputs", _abi.ENTROPY_GRADIENT))
        return settings(
            reduction="none",
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            smoothing=self.smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            temperature=self.temperature,
            memory_budget=self.memory_budget,
            more=more,
        )

    def _text(self, call: int, inputs: list[str], outputs: list[str]) -> str:
        return call_text(_abi.LINEAR, call, self._settings(), inputs, outputs)

    def _check_names(self, tensors: Iterable[str]) -> None:
        if unknown := set(tensors) - set(TENSORS):
            raise TypeError(f"{sorted(unknown)[0]}: no such keyword; there are {', '.join(TENSORS)}")

    def _check_entropy(self, grad_entropy: object) -> None:
        if grad_entropy is not None and not self.entropy:
            raise ValueError("grad_entropy: given, but the part has entropy=False; its statistics have no room for it")

    def _rows(self, of: Any, stats: Any, kept: Any, class_weight: Any, row_weight: Any) -> RowOutputs:
        """Row formulas. of: numpy or torch; in double stats [R, 8], class_weight [R] of the target and row_weight [R];
        kept [R] bool."""
        m, r, z_y, k, t, n = (stats[:, column] for column in range(6))
        e_y = of.exp(z_y - m)
        s = r + e_y
        log_s = of.log(s)
        lse = m + log_s
        # -log p_y; near 1 a p_y has its relative accuracy in r alone.
        loss = of.where(e_y >= r, of.log1p(r / e_y), (m - z_y) + log_s)
        logprob = -loss
        alpha, v = self.label_smoothing, self.total_vocab
        if alpha != 0.0 and self.smoothing == "others":
            alpha = alpha * v / (v - 1)
        if alpha != 0.0:
            spread = alpha / v * (n * log_s - k)
            loss = spread if alpha == 1.0 else (1.0 - alpha) * class_weight * loss + spread
        else:
            loss = loss * class_weight
        if self.z_loss != 0.0:
            loss = loss + self.z_loss * lse * lse
        loss = of.where(row_weight == 0.0, 0.0 * row_weight, loss * row_weight)
        entropy = None
        if self.entropy:
            own = of.where(e_y == 0.0, 0.0 * e_y, e_y * (z_y - m))
            entropy = log_s - (t + own) / s
            entropy = of.where(entropy < 0.0, 0.0 * e_y, entropy)
        zero = of.zeros_like(m)
        rows = [None if each is None else of.where(kept, each, zero) for each in (loss, lse, logprob, entropy)]
        return RowOutputs(*rows)


def merged(parts: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """ll_merge_statistics of adjacent arrays [R, 8]."""
    result = np.empty_like(parts[0])
    tensors = (_abi.Tensor * (len(parts) + 1))()
    for tensor, array in zip(tensors, [*parts, result], strict=True):
        tensor.size, tensor.data, tensor.dtype = ctypes.sizeof(tensor), array.ctypes.data, _abi.F32
        tensor.device_type, tensor.ndim = _abi.DEVICE_CPU, array.ndim
        tensor.shape[: array.ndim] = array.shape
        tensor.stride[: array.ndim] = [stride // array.itemsize for stride in array.strides]
    at = [ctypes.addressof(tensor) for tensor in tensors]
    listed = (ctypes.c_void_p * len(parts))(*at[:-1])
    _library.check(_library.library().ll_merge_statistics(listed, len(parts), at[-1]))
    return result
