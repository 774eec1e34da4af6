"""The losses on NumPy arrays, through the C ABI alone: no PyTorch. Gradients are asked for, not recorded.

    result = logitless.numpy.linear_cross_entropy(hidden, weight, targets, gradients=("input", "weight"))
    result.loss, result.grad_input, result.grad_weight

Arrays may have any strides (rows and columns are read in place). float32, float16, float64 (on the reference) and
bfloat16 as ml_dtypes has it. No mathematics here.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _abi, _engine, _parts
from ._parts import RowOutputs
from ._settings import call_text, number_of, settings

__all__ = [
    "Result",
    "RowOutputs",
    "VocabPart",
    "cross_entropy",
    "linear_cross_entropy",
    "merge_statistics",
    "next_token_targets",
]

Array = npt.NDArray[Any]

_DTYPES = {
    "float32": _abi.F32,
    "bfloat16": _abi.BF16,
    "float16": _abi.F16,
    "float64": _abi.F64,
    "int32": _abi.I32,
    "int64": _abi.I64,
    "uint8": _abi.U8,
}
_NUMPY = {_abi.F32: np.float32, _abi.F16: np.float16, _abi.F64: np.float64, _abi.I64: np.int64, _abi.U8: np.bool_}
# Keywords that are settings, and those that _run itself reads.
_KEYWORDS = set(inspect.signature(settings).parameters) - {"reduction", "temperature", "more"}
_TAKEN = {"weight", "reduction", "temperature", "row_weight", "keep_mask", "logit_floor", "topk_probs", "rest"}
_TAKEN |= {"normalizer", "outputs"}
_GRADIENTS = {"input": "hidden", "weight": "weight", "bias": "bias", "logits": "logits"}


@dataclasses.dataclass
class Result:
    """A loss and what was asked for beside it; None elsewhere. Per-row arrays have the target's shape, float32."""

    loss: Any = None  # float, or an array with reduction "none"
    row_loss: Array | None = None
    lse: Array | None = None
    logprob: Array | None = None
    entropy: Array | None = None
    argmax: Array | None = None  # int64
    correct: Array | None = None  # bool
    z_loss: Array | None = None
    mean_logit: Array | None = None
    log_sum_p2: Array | None = None
    kept: int | None = None
    correct_rows: int | None = None
    bad_rows: int | None = None
    grad_input: Array | None = None
    grad_weight: Array | None = None
    grad_bias: Array | None = None
    grad_logits: Array | None = None


def linear_cross_entropy(
    input: Array,
    linear_weight: Array,
    target: Array,
    *,
    linear_bias: Array | None = None,
    gradients: Iterable[str] = (),
    grad_loss: float = 1.0,
    grad_row_loss: Array | None = None,
    **keywords: Any,
) -> Result:
    """logitless.linear_cross_entropy on arrays: input [..., H], linear_weight [V, H], target [...] or [..., V].

    gradients: any of "input", "weight", "bias", for an upstream gradient grad_loss (of mean or sum) and grad_row_loss
    [...] (of each row's loss; with reduction "none" all ones where not given).

    keywords: weight, reduction, ignore_index, label_smoothing, smoothing, z_loss, softcap, logit_scale, temperature (a
    number, or [...]), row_weight, keep_mask, logit_floor, topk_probs, rest, normalizer, on_empty, memory_budget,
    filter_eps, filter_seed, outputs (names of Result's fields).
    Labels of a language model: next_token_targets shifts them. Raises ValueError, TypeError, IndexError as the PyTorch
    function does.
    """
    _check_head(input, linear_weight)
    inputs = {"hidden": input.reshape(-1, input.shape[-1]), "weight": linear_weight}
    if linear_bias is not None:
        inputs["bias"] = _shaped("linear_bias", linear_bias, (len(linear_weight),))
    return _run(
        _abi.LINEAR,
        inputs,
        input.shape[:-1],
        len(linear_weight),
        target,
        gradients,
        grad_loss,
        grad_row_loss,
        **keywords,
    )


def cross_entropy(
    logits: Array,
    target: Array,
    *,
    gradients: Iterable[str] = (),
    grad_loss: float = 1.0,
    grad_row_loss: Array | None = None,
    **keywords: Any,
) -> Result:
    """The same of given logits [..., V]; gradients may hold "logits"."""
    inputs = {"logits": logits.reshape(-1, logits.shape[-1])}
    return _run(
        _abi.LOGITS,
        inputs,
        logits.shape[:-1],
        logits.shape[-1],
        target,
        gradients,
        grad_loss,
        grad_row_loss,
        **keywords,
    )


def next_token_targets(
    ids: Array, *, cu_seqlens: Array | None = None, document_ids: Array | None = None, ignore_index: int = -100
) -> Array:
    """targets[t] = ids[t + 1], ignore_index in the last row of each sequence; ids [N] int32 or int64.

    cu_seqlens [S + 1] or document_ids [N] mark packed sequences; at most one of them may be given.
    """
    import ctypes

    from ._library import check, library

    targets = np.empty_like(ids)
    tensors = [_tensor(each) for each in (ids, cu_seqlens, document_ids, targets)]
    at = [None if tensor is None else ctypes.byref(tensor) for tensor in tensors]
    check(library().ll_next_token_targets(at[0], at[1], at[2], ignore_index, at[3]))
    return targets


@dataclasses.dataclass(frozen=True)
class VocabPart(_parts.Part):
    """logitless.VocabPart on arrays: columns [first_column, first_column + V) of total_vocab classes, with options.

    stats = merge_statistics([part.statistics(...) for each part]); rows = part.outputs(stats, target); dX, dW, db =
    part.gradients(..., stats) of each part, dX to be summed over the parts. Arrays by name: class_weight [total_vocab],
    row_weight [...], row_temperature [...].
    """

    def statistics(
        self, hidden: Array, weight: Array, target: Array, *, bias: Array | None = None, **arrays: Array | None
    ) -> Array:
        """Statistics [R, 8] float32 of this part's columns; hidden [..., H], weight [V, H], target [...]."""
        inputs = self._inputs(hidden, weight, target, bias, arrays)
        return _execute(self._text(_abi.FORWARD, list(inputs), ["stats"]), list(inputs.values()), 1.0)[0]

    def outputs(
        self, stats: Array, target: Array, *, class_weight: Array | None = None, row_weight: Array | None = None
    ) -> RowOutputs:
        """Rows' losses, log-sum-exps, log-probabilities and (entropy=True) entropies of merged statistics [...]."""
        flat = target.reshape(-1)
        _shaped("stats", stats, (flat.size, _parts.SIZE))
        kept = flat != self.ignore_index
        one = np.ones((), np.float64)
        of_class = one if class_weight is None else np.asarray(class_weight, np.float64)[np.where(kept, flat, 0)]
        of_row = one if row_weight is None else np.asarray(row_weight, np.float64).reshape(-1)
        with np.errstate(all="ignore"):  # -inf and NaN are values here
            rows = self._rows(np, stats.astype(np.float64), kept, of_class, of_row)
            return RowOutputs(*[None if row is None else row.astype(np.float32).reshape(target.shape) for row in rows])

    def gradients(
        self,
        hidden: Array,
        weight: Array,
        target: Array,
        stats: Array,
        *,
        bias: Array | None = None,
        grad_row_loss: Array | None = None,
        grad_lse: Array | None = None,
        grad_logprob: Array | None = None,
        grad_entropy: Array | None = None,
        wanted: Sequence[str] = ("hidden", "weight", "bias"),
        **arrays: Array | None,
    ) -> tuple[Array | None, Array | None, Array | None]:
        """(dX, dW, db) from merged statistics and upstream gradients [...]; dX is this part's summand.

        Where no upstream gradient is given, grad_row_loss is all ones."""
        self._check_entropy(grad_entropy)
        given = (grad_row_loss, grad_lse, grad_logprob, grad_entropy)
        upstream = {
            name: _row(name, value, target.shape)
            for name, value in zip(_parts.UPSTREAM, given, strict=True)
            if value is not None
        }
        if upstream and grad_row_loss is None:  # left out it would count as ones
            upstream["grad_row_loss"] = np.zeros(target.size, np.float32)
        inputs = self._inputs(hidden, weight, target, bias, arrays)
        names = [name for name in ("hidden", "weight", "bias") if name in inputs and name in wanted]
        if not names:
            return None, None, None
        text = self._text(_abi.BACKWARD, [*inputs, "stats", *upstream], ["grad_" + name for name in names])
        found = _execute(text, [*inputs.values(), stats, *upstream.values()], 1.0)
        made = dict(zip(names, found, strict=True))
        dx = made.get("hidden")
        return None if dx is None else dx.reshape(hidden.shape), made.get("weight"), made.get("bias")

    def _inputs(
        self, hidden: Array, weight: Array, target: Array, bias: Array | None, arrays: dict[str, Array | None]
    ) -> dict[str, Array]:
        self._check_names(arrays)
        _check_head(hidden, weight)
        leading = hidden.shape[:-1]
        inputs = {"hidden": hidden.reshape(-1, hidden.shape[-1]), "weight": weight}
        if bias is not None:
            inputs["bias"] = _shaped("bias", bias, (len(weight),))
        inputs["targets"] = _shaped("target", target, leading).reshape(-1)
        for name, array in arrays.items():
            if array is not None:
                inputs[name] = _row(name, array, (self.total_vocab,) if name == "class_weight" else leading)
        return inputs


def merge_statistics(parts: Sequence[Array]) -> Array:
    """Statistics [R, 8] of the whole from those of its parts, in that order (which changes roundings alone)."""
    if not parts:
        raise ValueError("parts: empty; must be statistics of at least one part")
    return _parts.merged([np.ascontiguousarray(part, np.float32) for part in parts])


# ---- one road ------------------------------------------------------------------------------------------------------


def _run(
    kind: int,
    inputs: dict[str, Array],
    leading: tuple[int, ...],
    vocab: int,
    target: Array | None,
    gradients: Iterable[str],
    grad_loss: float,
    grad_row_loss: Array | None,
    *,
    weight: Array | None = None,
    reduction: str = "mean",
    temperature: float | Array = 1.0,
    row_weight: Array | None = None,
    keep_mask: Array | None = None,
    logit_floor: Array | None = None,
    topk_probs: Array | None = None,
    rest: str = "dropped",
    normalizer: float | Array | None = None,
    outputs: Iterable[str] = (),
    **keywords: Any,
) -> Result:
    if unknown := set(keywords) - _KEYWORDS:
        raise TypeError(f"{sorted(unknown)[0]}: no such keyword; there are {', '.join(sorted(_KEYWORDS | _TAKEN))}")
    more: list[tuple[str, Any]] = []
    if topk_probs is not None and target is not None:
        k = topk_probs.shape[-1]
        inputs["topk_ids"] = _shaped("target", target, (*leading, k)).reshape(-1, k)
        inputs["topk_probs"] = _shaped("topk_probs", topk_probs, (*leading, k)).reshape(-1, k).astype(np.float32)
        more += [("targets", _abi.TARGETS["topk"]), ("rest", number_of("rest", rest, _abi.REST))]
    elif target is not None and target.dtype.kind not in "iu":
        inputs["soft_targets"] = _shaped("target", target, (*leading, vocab)).reshape(-1, vocab)
        more.append(("targets", _abi.TARGETS["soft"]))
    elif target is not None:
        inputs["targets"] = _shaped("target", target, leading).reshape(-1)
    if weight is not None:
        inputs["class_weight"] = _shaped("weight", weight, (vocab,)).astype(np.float32, copy=False)
    if not isinstance(temperature, (int, float)):
        keywords["temperature"] = 1.0
        inputs["row_temperature"] = _row("temperature", temperature, leading)
    else:
        keywords["temperature"] = temperature
    for name, rows in (("row_weight", row_weight), ("logit_floor", logit_floor)):
        if rows is not None:
            inputs[name] = _row(name, rows, leading)
    if keep_mask is not None:
        if keep_mask.dtype == np.bool_:
            keep_mask = np.packbits(_shaped("keep_mask", keep_mask, (*leading, vocab)), axis=-1, bitorder="little")
        inputs["keep_mask"] = _shaped("keep_mask", keep_mask, (*leading, -(-vocab // 8))).reshape(-1, -(-vocab // 8))
    if normalizer is not None:
        inputs["normalizer"] = np.asarray(normalizer, np.float64).reshape(())
    fields = list(outputs)
    if unknown := set(fields) - _abi.FIELDS.keys():
        raise ValueError(f"outputs: {sorted(unknown)}; must be of {list(_abi.FIELDS)}")
    wanted = list(gradients)
    if unknown := {name for name in wanted if _GRADIENTS.get(name) not in inputs}:
        raise ValueError(
            f"gradients: {sorted(unknown)}; must be of {[n for n, of in _GRADIENTS.items() if of in inputs]}"
        )
    if wanted and grad_row_loss is not None:
        inputs["grad_row_loss"] = _row("grad_row_loss", grad_row_loss, leading)
    first = "row_loss" if reduction == "none" else "loss"
    results = list(dict.fromkeys([first, *[_abi.FIELDS[name] for name in fields]]))
    results += ["grad_" + _GRADIENTS[name] for name in wanted]
    call = _abi.FORWARD_BACKWARD if wanted else _abi.FORWARD
    text = call_text(kind, call, settings(reduction=reduction, more=more, **keywords), inputs, results)
    made = dict(zip(results, _execute(text, list(inputs.values()), grad_loss), strict=True))
    result = Result(loss=made[first].reshape(leading) if reduction == "none" else float(made[first]))
    for name in fields:
        value = made[_abi.FIELDS[name]]
        setattr(result, name, int(value) if value.ndim == 0 else value.reshape(leading))
    for name in wanted:
        value = made["grad_" + _GRADIENTS[name]]
        setattr(result, "grad_" + name, value.reshape(*leading, -1) if name in ("input", "logits") else value)
    return result


def _execute(text: str, inputs: Sequence[Array], grad_loss: float) -> list[Array]:
    call = _engine.call_of(text)
    views = [_view(name, array) for name, array in zip(call.inputs, inputs, strict=True)]
    key = ("numpy", *views)
    plan = call.take(key) or _engine.Plan(call, views, _engine.Place())
    of = dict(zip(call.inputs, inputs, strict=True))
    made = []
    for name, output in zip(call.outputs, plan.outputs, strict=True):
        dtype = of[name.removeprefix("grad_")].dtype if name.startswith("grad_") else _NUMPY[output.dtype]
        made.append(np.empty(output.shape, dtype))
    workspace = np.empty(plan.needs_workspace() + 64, np.uint8)
    at = -(-workspace.ctypes.data // 64) * 64
    try:
        plan.run([array.ctypes.data for array in (*inputs, *made)], at, grad_loss)
    finally:
        call.give(key, plan)
    return made


def _view(name: str, array: Array) -> _engine.View:
    code = _DTYPES.get(array.dtype.name)
    if code is None:
        raise TypeError(f"{name}: {array.dtype}; must be one of {', '.join(_DTYPES)}")
    if any(stride % array.itemsize for stride in array.strides):
        raise ValueError(f"{name}: strides {array.strides} of {array.itemsize}-byte elements; copy it first")
    return _engine.View(code, array.shape, tuple(stride // array.itemsize for stride in array.strides))


def _tensor(array: Array | None) -> _abi.Tensor | None:
    import ctypes

    if array is None:
        return None
    view = _view("array", array)
    tensor = _abi.Tensor(size=ctypes.sizeof(_abi.Tensor), data=array.ctypes.data, dtype=view.dtype)
    tensor.device_type, tensor.ndim = _abi.DEVICE_CPU, array.ndim
    tensor.shape[: array.ndim], tensor.stride[: array.ndim] = view.shape, view.stride
    return tensor


def _shaped(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    if np.shape(array) != tuple(shape):
        raise ValueError(f"{name}: shape {list(np.shape(array))}; must be {list(shape)}")
    return array


def _row(name: str, array: Array, leading: tuple[int, ...]) -> Array:
    return _shaped(name, array, leading).reshape(-1).astype(np.float32, copy=False)


def _check_head(hidden: Array, weight: Array) -> None:
    if np.ndim(hidden) < 1 or np.ndim(weight) != 2 or np.shape(hidden)[-1] != np.shape(weight)[1]:
        raise ValueError(
            f"input, linear_weight: shapes {list(np.shape(hidden))}, {list(np.shape(weight))}; must be [..., H] "
            "and [V, H]"
        )
