"""The three calls as PyTorch operators, over ctypes on data_ptr(): no torch header, no compiler, one binary.

    forward, forward_backward, backward (Tensor[] inputs, str text) -> Tensor[] outputs

`text` is a call of logitless._engine: it names the inputs, the outputs and every option. The operators have kernels
and shape functions, and neither autograd nor autocast: gradients are _autograd.py's, and an fp32 weight under autocast
is read as it is. Each operator carries a version in its name, since the compiler's disk cache does not see how an
operator's shapes were registered.
"""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from .. import _abi, _engine, _library

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
        device = same_device(inputs)
        if device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"logitless: tensors on {device}; there are backends for cpu and cuda")
        place = _engine.Place(threads=torch.get_num_threads())
        if device.type == "cuda":
            place = _engine.Place(_abi.DEVICE_CUDA, device.index)
        super().__init__(call, views, place)
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
    device = inputs[0].device
    stream = None
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
        copied = _readable(call, inputs)
        if copied is not None:
            inputs, key = copied, key_of(copied, over is not None)
    plan = call.take(key)
    if plan is None:
        plan = _TorchPlan(call, inputs, over)
    assert isinstance(plan, _TorchPlan)
    empty = torch.empty  # the device is always said: a default device of the process' must not take hold
    outputs = [empty(shape, dtype=dtype, device=device) for shape, dtype in plan.empty] if over is None else [over]
    pointers = [tensor.data_ptr() for tensor in inputs]
    pointers += [tensor.data_ptr() for tensor in outputs]
    try:
        if size := plan.needs_workspace():
            workspace = empty(size, dtype=torch.uint8, device=device)  # aligned to 64 by PyTorch's allocators
            plan.run(pointers, workspace.data_ptr(), stream=stream)
        else:
            plan.run(pointers, 0, stream=stream)
    finally:
        call.give(key, plan)
    _counts[name] += 1
    return outputs


def _readable(call: _engine.Call, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """The inputs with copies of those that products on a CUDA device cannot read in place; None where they all can.
    They want columns adjacent, and rows apart and aligned to 16 bytes where H allows that."""
    copied = None
    for at in call.operands:
        tensor = inputs[at]
        rows, columns = tensor.stride()
        width, unit = tensor.shape[1], 16 // tensor.element_size()
        apart = tensor.shape[0] <= 1 or rows == width or (rows > width and rows % unit == 0)
        if apart and (columns == 1 or width <= 1) and tensor.data_ptr() % 16 == 0:
            continue
        copied = copied or list(inputs)
        copied[at] = tensor.clone(memory_format=torch.contiguous_format)
    return copied


def scale(buffers: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies adjacent tensors [n] or [m, n] on a CUDA device by a number that lies there, and waits for nothing."""
    device = factor.device
    stream = torch.cuda.current_stream(device).cuda_stream
    context = _library.context(_abi.BACKEND_CUDA, 0, device.index)
    by = _tensor_of(factor if factor.dtype in (torch.float32, torch.float64) else factor.float())
    for buffer in buffers:
        values = _tensor_of(buffer)
        _library.check(_library.library().ll_scale(context, ctypes.byref(by), ctypes.byref(values), stream))


def _tensor_of(tensor: torch.Tensor) -> _abi.Tensor:
    made = _abi.Tensor()
    made.size, made.data, made.dtype = ctypes.sizeof(made), tensor.data_ptr(), DTYPE[tensor.dtype]
    made.device_type, made.device_id = _abi.DEVICE_CUDA, tensor.device.index
    made.ndim = tensor.dim()
    made.shape[: made.ndim], made.stride[: made.ndim] = tuple(tensor.shape), tensor.stride()
    return made


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
        for device in ("CPU", "CUDA"):
            library.impl(f"{name}_{_VERSION}", _kernel(name), device)
        torch.library.register_fake(f"{NAMESPACE}::{name}_{_VERSION}", _fake, lib=library)
    name = f"backward_inplace_{_VERSION}"
    library.define(f"{name}(Tensor(a!) logits, Tensor[] inputs, str text) -> ()")
    for device in ("CPU", "CUDA"):
        library.impl(name, _inplace_kernel, device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda logits, inputs, text: None, lib=library)
    return library


_operators = _define()
forward = getattr(torch.ops.logitless, f"forward_{_VERSION}").default
forward_backward = getattr(torch.ops.logitless, f"forward_backward_{_VERSION}").default
backward = getattr(torch.ops.logitless, f"backward_{_VERSION}").default
backward_inplace = getattr(torch.ops.logitless, f"backward_inplace_{_VERSION}").default
