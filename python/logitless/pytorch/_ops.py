"""The three calls as PyTorch operators, over ctypes on data_ptr(): no torch header, no compiler, one binary.

    forward, forward_backward, backward (Tensor[] inputs, str text) -> Tensor[] outputs

`text` is a call of logitless._engine: it names the inputs, the outputs and every option. The operators have kernels
and shape functions, and neither autograd nor autocast: gradients are _autograd.py's, and an fp32 weight under autocast
is read as it is. Each operator carries a version in its name, since the compiler's disk cache does not see how an
operator's shapes were registered.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from .. import _abi, _engine

_VERSION = 1  # of the operators' signature and of their outputs' shapes
NAMESPACE = "logitless"

DTYPE = {
    torch.float32: _abi.F32,
    torch.bfloat16: _abi.BF16,
    torch.float16: _abi.F16,
    torch.float64: _abi.F64,
    torch.int32: _abi.I32,
    torch.int64: _abi.I64,
    torch.uint8: _abi.U8,
    torch.bool: _abi.U8,
}
_TORCH = {code: dtype for dtype, code in DTYPE.items()}  # U8 is read as uint8 and written as bool

_counts: collections.Counter[str] = collections.Counter()


def op_calls() -> dict[str, int]:
    """How often each operator ran in this process (not its tracing): forward, forward_backward, backward."""
    return {name: _counts[name] for name in ("forward", "forward_backward", "backward")}


class _TorchPlan(_engine.Plan):
    """A plan that knows its outputs as torch.empty wants them."""

    def __init__(self, call: _engine.Call, inputs: Sequence[torch.Tensor], over: torch.Tensor | None) -> None:
        views = []
        for name, tensor in zip(call.inputs, inputs, strict=True):
            if tensor.dtype not in DTYPE:
                raise TypeError(f"{name}: {tensor.dtype}; must be a float or an integer type")
            views.append(_engine.View(DTYPE[tensor.dtype], tuple(tensor.shape), tensor.stride()))
        super().__init__(call, views, _engine.Place(threads=torch.get_num_threads()))
        self.empty = [
            (output.shape, torch.uint8 if name == "saved" else _TORCH[output.dtype])
            for name, output in zip(call.outputs, self.outputs, strict=True)
        ]
        if over is not None:
            self.alias_output(0, _engine.View(DTYPE[over.dtype], tuple(over.shape), over.stride()))


def same_device(inputs: Sequence[torch.Tensor]) -> torch.device:
    """The one device of all inputs; RuntimeError where there are several."""
    device = inputs[0].device
    for tensor in inputs:
        if tensor.device != device:
            raise RuntimeError(f"logitless: tensors on {device} and on {tensor.device}; all must be on one device")
    return device


def key_of(inputs: Sequence[torch.Tensor], over: bool = False) -> Hashable:
    """All that a plan depends on beside its call: what two runs must share to share it."""
    parts: list[Any] = [torch.get_num_threads(), over]
    for tensor in inputs:
        parts += (tensor.device, tensor.dtype, tensor.shape, tensor.stride())
    return tuple(parts)


def execute(
    name: str, inputs: Sequence[torch.Tensor], text: str, over: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Runs a call; its outputs are new, or the one output is written over `over`. What the operators do; eager code
    that nothing intercepts calls it past the dispatcher, which takes 20 us."""
    return run(name, inputs, _engine.call_of(text), key_of(inputs, over is not None), over)


def run(
    name: str,
    inputs: Sequence[torch.Tensor],
    call: _engine.Call,
    key: Hashable,
    over: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """execute() of a call and a key_of() that are known already."""
    plan = call.take(key)
    device = inputs[0].device
    if plan is None:
        if same_device(inputs).type != "cpu":
            raise NotImplementedError(f"logitless: tensors on {device}; this build has the CPU backend only")
        plan = _TorchPlan(call, inputs, over)
    assert isinstance(plan, _TorchPlan)
    empty = torch.empty  # the device is always said: a default device of the process' must not take hold
    outputs = [empty(shape, dtype=dtype, device=device) for shape, dtype in plan.empty] if over is None else [over]
    grad_loss = 1.0
    if call.takes_grad_loss:
        at = call.inputs.index("grad_loss")
        grad_loss = inputs[at].item()
        inputs = [*inputs[:at], *inputs[at + 1 :]]
    pointers = [tensor.data_ptr() for tensor in inputs]
    pointers += [tensor.data_ptr() for tensor in outputs]
    try:
        if size := plan.needs_workspace():
            workspace = empty(size, dtype=torch.uint8, device=device)  # aligned to 64 by PyTorch's allocator
            plan.run(pointers, workspace.data_ptr(), grad_loss)
        else:
            plan.run(pointers, 0, grad_loss)
    finally:
        call.give(key, plan)
    _counts[name] += 1
    return outputs


def _kernel(name: str) -> Callable[[list[torch.Tensor], str], list[torch.Tensor]]:
    return lambda inputs, text: execute(name, inputs, text)


def _inplace_kernel(logits: torch.Tensor, inputs: list[torch.Tensor], text: str) -> None:
    """backward of given logits, the gradient written over them."""
    execute("backward", [logits, *inputs], text, over=logits)


def _fake(inputs: list[torch.Tensor], text: str) -> list[torch.Tensor]:
    """Shapes and dtypes of the outputs, for tracing; nothing is planned for the traced shapes."""
    device = same_device(inputs)
    call = _engine.call_of(text)
    given = dict(zip(call.inputs, inputs, strict=True))
    leading = given["hidden"] if "hidden" in given else given["logits"]
    rows = leading.shape[0]
    double = any(t.dtype == torch.float64 for n, t in given.items() if n in ("hidden", "weight", "logits"))

    def empty(name: str) -> torch.Tensor:
        of = {"grad_hidden": "hidden", "grad_weight": "weight", "grad_bias": "bias", "grad_logits": "logits"}.get(name)
        if of is not None:
            dtype = _TORCH[call.output_dtypes[name]] if name in call.output_dtypes else given[of].dtype
            return torch.empty(given[of].shape, dtype=dtype, device=device)
        if name == "loss":
            return torch.empty((), dtype=torch.float64 if double else torch.float32, device=device)
        if name == "stats":
            return torch.empty((rows, _engine.statistics(text)), dtype=torch.float32, device=device)
        if name == "saved":
            return torch.empty((int(call.settings["saved_bytes"]),), dtype=torch.uint8, device=device)
        if name in _abi.SCALARS:
            return torch.empty((), dtype=torch.float64 if name.startswith("filter") else torch.int64, device=device)
        dtype = {"row_argmax": torch.int64, "row_correct": torch.bool}.get(name, torch.float32)
        return torch.empty((rows,), dtype=dtype, device=device)

    return [empty(name) for name in call.outputs]


def _define() -> torch.library.Library:
    try:
        library = torch.library.Library(NAMESPACE, "DEF")
    except RuntimeError as error:
        raise ImportError(
            "logitless: the operator namespace 'logitless' is taken in this process, so this package, or a copy of it "
            f"under another name, was loaded before; import it from one place only ({error})"
        ) from error
    for name in ("forward", "forward_backward", "backward"):
        library.define(f"{name}_{_VERSION}(Tensor[] inputs, str text) -> Tensor[]")
        library.impl(f"{name}_{_VERSION}", _kernel(name), "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}_{_VERSION}", _fake, lib=library)
    name = f"backward_inplace_{_VERSION}"
    library.define(f"{name}(Tensor(a!) logits, Tensor[] inputs, str text) -> ()")
    library.impl(name, _inplace_kernel, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda logits, inputs, text: None, lib=library)
    return library


_library = _define()
forward = getattr(torch.ops.logitless, f"forward_{_VERSION}").default
forward_backward = getattr(torch.ops.logitless, f"forward_backward_{_VERSION}").default
backward = getattr(torch.ops.logitless, f"backward_{_VERSION}").default
backward_inplace = getattr(torch.ops.logitless, f"backward_inplace_{_VERSION}").default
