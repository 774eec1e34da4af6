"""logitless.plan: what a call would cost, without running it."""

from __future__ import annotations

import json
from typing import Any

from . import _abi, _engine, _library
from ._settings import call_text, number_of, settings

_DTYPES = {"float32": _abi.F32, "bfloat16": _abi.BF16, "float16": _abi.F16, "float64": _abi.F64}
_DTYPES |= {"fp32": _abi.F32, "bf16": _abi.BF16, "fp16": _abi.F16, "f32": _abi.F32, "f16": _abi.F16}
_CALLS = {"forward": _abi.FORWARD, "forward_backward": _abi.FORWARD_BACKWARD, "backward": _abi.BACKWARD}


class PlanDescription:
    """A plan in words: str(plan) prints it with its ledger; `data` is the same as a dictionary."""

    def __init__(self, text: str, data: dict[str, Any], workspace_bytes: int) -> None:
        self.text = text
        self.data = data
        self.workspace_bytes = workspace_bytes

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<logitless plan, {self.workspace_bytes} bytes of workspace>\n{self.text}"


def plan(
    rows: int,
    hidden: int,
    vocab: int,
    *,
    dtype: str = "bfloat16",
    weight_dtype: str | None = None,
    call: str = "forward_backward",
    threads: int = 0,
    device: str = "cpu",
    **options: Any,
) -> PlanDescription:
    """The plan of linear_cross_entropy on hidden [rows, hidden] and weight [vocab, hidden].

    dtype, weight_dtype: names such as "bfloat16" (a torch.dtype will do). call: forward, forward_backward or backward.
    device: "cpu", or "cuda" or "cuda:N" for a plan of that device, which must be there. options: keywords of
    linear_cross_entropy that are numbers or names, memory_budget among them. Raises ValueError for a budget below the
    least that any plan needs, naming that.
    """
    kind = number_of("call", call, _CALLS)
    code = number_of("dtype", str(dtype).removeprefix("torch."), _DTYPES)
    weight_code = (
        code if weight_dtype is None else number_of("weight_dtype", str(weight_dtype).removeprefix("torch."), _DTYPES)
    )
    inputs = ["hidden", "weight", "targets"] + (["stats"] if kind == _abi.BACKWARD else [])
    outputs = [] if kind == _abi.BACKWARD else ["loss"]
    if kind != _abi.FORWARD:
        outputs += ["grad_hidden", "grad_weight"]
    text = call_text(_abi.LINEAR, kind, settings(**options), inputs, outputs)
    views = [
        _engine.View(code, (rows, hidden), (hidden, 1)),
        _engine.View(weight_code, (vocab, hidden), (hidden, 1)),
        _engine.View(_abi.I64, (rows,), (1,)),
    ]
    if kind == _abi.BACKWARD:
        views.append(_engine.View(_abi.F32, (rows, 4), (4, 1)))
    backend, number = _library.place_of(device)
    kind_of_device = _abi.DEVICE_CUDA if backend == _abi.BACKEND_CUDA else _abi.DEVICE_CPU
    made = _engine.Plan(_engine.call_of(text), views, _engine.Place(kind_of_device, number, threads))
    return PlanDescription(made.describe(_abi.TEXT), json.loads(made.describe(_abi.JSON)), made.workspace_bytes)
