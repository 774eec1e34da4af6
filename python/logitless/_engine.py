"""From a call's text to plans and runs of the C ABI, for every face alike (PyTorch, NumPy).

A call is text, so that it can be an argument of a PyTorch operator and a key of a table:
    "kind=1 call=2 reduction=1 softcap=30.0|hidden weight targets|loss stats grad_hidden grad_weight"
settings (fields of ll_options and ll_problem, numbers as in the header), names of inputs, names of outputs (fields of
ll_arguments; `grad_weight:f32` asks for another dtype than the input's). What shapes, strides and dtypes add to it
makes a plan; plans are kept, the least recently made go first. A plan runs in one thread at a time, so a second
thread that meets the same shapes makes a plan of its own.
"""

from __future__ import annotations

import collections
import ctypes
import math
import threading
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from . import _abi, _library

_PLANS_KEPT = 64  # of each call text; a plan holds a few KiB
_SMALL = 1 << 18  # bytes of workspace that a plan keeps for its next run
_ALIGNMENT = 64

_OPTION_FIELDS = {field[0] for field in _abi.Options._fields_[1:]}
_PROBLEM_FIELDS = {field[0] for field in _abi.Problem._fields_[1:]}
_FLOATS = {field[0] for field in _abi.Options._fields_ if field[1] is ctypes.c_double}
_DTYPES = {"f32": _abi.F32, "f64": _abi.F64, "i64": _abi.I64, "i32": _abi.I32, "u8": _abi.U8}
# The dtype of an input is a field of the problem.
_DTYPE_FIELDS = {
    "hidden": "hidden_dtype",
    "weight": "weight_dtype",
    "logits": "logits_dtype",
    "bias": "bias_dtype",
    "soft_targets": "soft_dtype",
    "teacher_hidden": "teacher_hidden_dtype",
    "teacher_weight": "teacher_weight_dtype",
    "teacher_bias": "teacher_bias_dtype",
}
_OPERANDS = frozenset(("hidden", "weight", "teacher_hidden", "teacher_weight"))
_GRADIENTS = {"grad_hidden": "hidden", "grad_weight": "weight", "grad_bias": "bias", "grad_logits": "logits"}
_FUNCTIONS = {_abi.FORWARD: "ll_forward", _abi.FORWARD_BACKWARD: "ll_forward_backward", _abi.BACKWARD: "ll_backward"}


class View(NamedTuple):
    """What a plan must know of an input: everything but where it lies. Strides are in elements."""

    dtype: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Place(NamedTuple):
    """Where a call runs: DLPack's device, and the threads of the CPU backend (0: the library's choice)."""

    device_type: int = _abi.DEVICE_CPU
    device_id: int = 0
    threads: int = 0


class Output(NamedTuple):
    """What a face must allocate, adjacent."""

    shape: tuple[int, ...]
    dtype: int


class Call:
    """A parsed call text with the plans made for it."""

    def __init__(self, text: str) -> None:
        settings, inputs, outputs = text.split("|")
        self.text = text
        self.settings = dict(item.split("=", 1) for item in settings.split())
        self.inputs = tuple(inputs.split())
        self.outputs = tuple(name.split(":")[0] for name in outputs.split())
        self.output_dtypes = {
            name: _DTYPES[dtype] for name, _, dtype in (each.partition(":") for each in outputs.split()) if dtype
        }
        # What products read in place on a CUDA device, where rows must be aligned.
        self.operands = tuple(at for at, name in enumerate(self.inputs) if name in _OPERANDS)
        unknown = self.settings.keys() - _OPTION_FIELDS - _PROBLEM_FIELDS
        unknown |= {*self.inputs, *self.outputs} - set(_abi.ARGUMENTS) | ({"grad_loss"} & {*self.inputs})
        if unknown:
            raise ValueError(f"unknown in a call's text: {', '.join(sorted(unknown))}")
        self.function = getattr(_library.library(), _FUNCTIONS[int(self.settings["call"])])
        self._free: collections.OrderedDict[Hashable, list[Plan]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def take(self, key: Hashable) -> Plan | None:
        """A plan that was given back under this key."""
        plans = self._free.get(key)
        if plans:
            try:
                return plans.pop()
            except IndexError:  # another thread was faster
                return None
        return None

    def give(self, key: Hashable, plan: Plan) -> None:
        """Keeps a plan for the next call with this key."""
        plans = self._free.get(key)
        if plans is not None:
            plans.append(plan)
            return
        with self._lock:
            self._free.setdefault(key, []).append(plan)
            while len(self._free) > _PLANS_KEPT:
                self._free.popitem(last=False)

    def options(self) -> _abi.Options:
        """ll_options of the settings."""
        loaded = _library.library()
        options = _abi.Options()
        loaded.ll_options_init_sized(ctypes.byref(options), ctypes.sizeof(options))
        for name, value in self.settings.items():
            if name in _OPTION_FIELDS:
                setattr(options, name, float(value) if name in _FLOATS else int(value))
        return options

    def problem(self, views: Sequence[View]) -> _abi.Problem:
        """ll_problem of the settings and the inputs' shapes and dtypes."""
        given = dict(zip(self.inputs, views, strict=True))
        loaded = _library.library()
        problem = _abi.Problem()
        loaded.ll_problem_init_sized(ctypes.byref(problem), ctypes.sizeof(problem))
        for name, value in self.settings.items():
            if name in _PROBLEM_FIELDS:
                setattr(problem, name, int(value))
        for name, field in _DTYPE_FIELDS.items():
            setattr(problem, field, given[name].dtype if name in given else _abi.NONE)
        if problem.kind == _abi.LINEAR:
            problem.rows, problem.hidden = given["hidden"].shape
            problem.vocab = given["weight"].shape[0]
        else:
            problem.rows, problem.vocab = given["logits"].shape
        if "topk_ids" in given:
            problem.topk = given["topk_ids"].shape[1]
        if "teacher_hidden" in given:
            problem.teacher_hidden = given["teacher_hidden"].shape[1]
        for name in self.inputs:
            problem.inputs |= _abi.INPUT_BITS.get(name, 0)
        for name in self.outputs:
            problem.outputs |= _abi.OUTPUT_BITS.get(name, 0)
        for name, of in _GRADIENTS.items():
            wanted = self.output_dtypes.get(name, given[of].dtype) if name in self.outputs else _abi.NONE
            setattr(problem, name + "_dtype", wanted)
        return problem


class Plan:
    """An ll_plan with its ll_arguments laid out; run() only fills in where things lie."""

    def __init__(self, call: Call, views: Sequence[View], place: Place) -> None:
        loaded = _library.library()
        problem, options = call.problem(views), call.options()
        backend = _abi.BACKEND_CUDA if place.device_type == _abi.DEVICE_CUDA else _abi.BACKEND_CPU
        self.double = _abi.F64 in (problem.hidden_dtype, problem.logits_dtype, problem.weight_dtype)
        if self.double and backend == _abi.BACKEND_CPU:
            backend = _abi.BACKEND_REFERENCE
        handle = ctypes.c_void_p()
        _library.check(
            loaded.ll_plan_create(
                _library.context(backend, place.threads, place.device_id),
                ctypes.byref(problem),
                ctypes.byref(options),
                ctypes.byref(handle),
            )
        )
        self._destroy = loaded.ll_plan_destroy
        self._handle = handle.value
        self.workspace_bytes: int = loaded.ll_plan_workspace_bytes(handle)
        self.outputs = [self._output(call, name, views, problem) for name in call.outputs]
        self._function = call.function
        self._workspace: ctypes.Array[ctypes.c_char] | None = None
        self._workspace_at = 0
        if 0 < self.workspace_bytes <= _SMALL and place.device_type == _abi.DEVICE_CPU:
            self._workspace = ctypes.create_string_buffer(self.workspace_bytes + _ALIGNMENT)
            self._workspace_at = -(-ctypes.addressof(self._workspace) // _ALIGNMENT) * _ALIGNMENT
        self._lay_out(call, views, place)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._destroy(self._handle)

    def describe(self, form: int) -> str:
        """The plan as text (_abi.TEXT) or JSON (_abi.JSON)."""
        assert self._handle is not None
        return _library.described(_library.library().ll_plan_describe, self._handle, form)

    def _output(self, call: Call, name: str, views: Sequence[View], problem: _abi.Problem) -> Output:
        rows = problem.rows
        if name in _GRADIENTS:
            view = views[call.inputs.index(_GRADIENTS[name])]
            return Output(view.shape, call.output_dtypes.get(name, view.dtype))
        if name == "loss":
            return Output((), _abi.F64 if self.double else _abi.F32)
        if name == "stats":
            return Output((rows, _library.library().ll_plan_statistics(self._handle)), _abi.F32)
        if name == "saved":
            return Output((problem.saved_bytes,), _abi.U8)
        if name in _abi.SCALARS:
            return Output((), _abi.F64 if name.startswith("filter") else _abi.I64)
        dtype = {"row_argmax": _abi.I64, "row_correct": _abi.U8}.get(name, _abi.F32)
        return Output((rows,), dtype)

    def _lay_out(self, call: Call, views: Sequence[View], place: Place) -> None:
        everything = list(zip(call.inputs, views, strict=True))
        everything += [(name, _adjacent(output)) for name, output in zip(call.outputs, self.outputs, strict=True)]
        # ll_arguments and the tensors after it, in one piece of memory: run() writes whole words into it, which costs
        # a third of what setting fields of ctypes structs does.
        size, each = ctypes.sizeof(_abi.Arguments), ctypes.sizeof(_abi.Tensor)
        self._memory = (ctypes.c_uint64 * ((size + each * len(everything)) // 8))()
        self._words = memoryview(self._memory).cast("B").cast("Q")
        self._numbers = memoryview(self._memory).cast("B").cast("d")
        arguments = _abi.Arguments.from_buffer(self._memory)
        self._at = ctypes.addressof(self._memory)
        _library.library().ll_arguments_init_sized(self._at, size)
        self._grad_loss_word = _abi.Arguments.grad_loss.offset // 8
        self._tensors = (_abi.Tensor * len(everything)).from_buffer(self._memory, size)
        self._slots: list[int] = []  # per pointer of run(): the word that it becomes
        for index, (name, view) in enumerate(everything):
            if name in _abi.SCALARS:
                self._slots.append(getattr(_abi.Arguments, name).offset // 8)
                continue
            tensor = self._tensors[index]
            tensor.size = each
            tensor.dtype = view.dtype
            tensor.device_type, tensor.device_id = place.device_type, place.device_id
            tensor.ndim = len(view.shape)
            tensor.shape[: len(view.shape)] = view.shape
            tensor.stride[: len(view.shape)] = view.stride
            setattr(arguments, name, ctypes.addressof(tensor))
            self._slots.append((size + each * index + _abi.Tensor.data.offset) // 8)

    def run(
        self, pointers: Sequence[int], workspace_at: int, grad_loss: float = 1.0, stream: int | None = None
    ) -> None:
        """Runs on inputs and outputs in the order of the call's text. stream: of a CUDA device.

        workspace_at may be 0 where needs_workspace() is 0. Raises what the library refuses."""
        words = self._words
        for slot, pointer in zip(self._slots, pointers, strict=True):
            words[slot] = pointer
        self._numbers[self._grad_loss_word] = grad_loss
        status = self._function(
            self._handle, self._at, self._workspace_at or workspace_at or None, self.workspace_bytes, stream
        )
        if status:
            _library.check(status)

    def alias_output(self, index: int, view: View) -> None:
        """Output `index` lies as `view` says, instead of adjacent: for a gradient that is written over its input."""
        tensor = self._tensors[len(self._tensors) - len(self.outputs) + index]
        tensor.stride[: len(view.stride)] = view.stride

    def needs_workspace(self) -> int:
        """Bytes that run() needs from its caller, aligned to 64."""
        return 0 if self._workspace is not None else self.workspace_bytes


def _adjacent(output: Output) -> View:
    stride = [math.prod(output.shape[i + 1 :]) for i in range(len(output.shape))]
    return View(output.dtype, output.shape, tuple(stride))


_calls: dict[str, Call] = {}


def call_of(text: str) -> Call:
    """The call of this text; parsed once a process."""
    found = _calls.get(text)
    if found is None:
        found = _calls.setdefault(text, Call(text))
    return found


def statistics(text: str) -> int:
    """Columns of `stats` for this call; they follow from the settings alone, so a problem of one row tells."""
    call = call_of(text)
    views = []
    shapes = {"hidden": (1, 1), "weight": (2, 1), "logits": (1, 2), "soft_targets": (1, 2), "keep_mask": (1, 1)}
    shapes |= {"topk_ids": (1, 1), "topk_probs": (1, 1), "teacher_hidden": (1, 1), "teacher_weight": (2, 1)}
    for name in call.inputs:
        shape = shapes.get(name, (2,) if name in ("bias", "class_weight", "teacher_bias") else (1,))
        views.append(_adjacent(Output(shape, _abi.F32)))
    place = Place(_abi.DEVICE_CPU)
    key = "statistics"
    plan = call.take(key) or Plan(call, views, place)
    call.give(key, plan)
    return int(_library.library().ll_plan_statistics(plan._handle))
