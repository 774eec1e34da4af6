"""Gradients of the operators: two nested autograd functions, the outer for the loss, the inner for its gradient.

The outer one saves inputs and statistics. Where the loss is one number, its gradients for an upstream of 1 are made
together with it (6 R H V operations instead of 8): in eager mode they wait on the context, the first backward scales
them in place and gives them away, and a second one computes them anew; while tracing or under torch.func they are
saved and multiplied out of place. Per-row outputs get their gradients from the backward operator, all in one call.
The inner one exists so that differentiating twice raises instead of returning something wrong.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from .. import _abi
from .._settings import call_text
from . import _ops

# A differentiable output and the argument of ll_backward that takes its upstream gradient.
UPSTREAM = {
    "loss": "grad_loss",
    "row_loss": "grad_row_loss",
    "row_lse": "grad_row_lse",
    "row_logprob": "grad_row_logprob",
    "row_entropy": "grad_row_entropy",
}
GRADIENT_OF = {"hidden": "grad_hidden", "weight": "grad_weight", "bias": "grad_bias", "logits": "grad_logits"}

_TWICE = (
    "logitless: the gradient of the loss cannot be differentiated again; for second derivatives compute the loss from "
    "logits with torch.nn.functional.cross_entropy"
)
_FORWARD_MODE = (
    "logitless: forward-mode differentiation (jvp, dual numbers) is not supported; use reverse mode (backward, "
    "torch.func.grad, vjp), or compute the loss from logits with torch.nn.functional.cross_entropy"
)
_VMAP = (
    "logitless: torch.vmap over the loss is not supported; give the rows of all samples at once with reduction='none'"
)


def plain_eager() -> bool:
    """Nothing is traced, transformed or intercepted: what is computed now is what the user gets."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
    )


def refuse_transforms(tensors: list[torch.Tensor]) -> None:
    """Forward mode and vmap are refused here: an operator would return zero tangents, and the compiler takes no
    autograd function with a jvp of its own."""
    level = torch._C._functorch.peek_interpreter_stack()
    if level is not None and level.key() == torch._C._functorch.TransformType.Vmap:
        raise RuntimeError(_VMAP)
    if forward_ad._current_level >= 0 and any(
        tensor.is_floating_point() and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        raise RuntimeError(_FORWARD_MODE)


def backward_call(text: str, upstream: tuple[str, ...], wanted: tuple[str, ...], over: bool = False) -> str:
    """The text of the backward call of a forward call `text`, for these upstream gradients and inputs."""
    settings, inputs, outputs = text.split("|")
    bits = 0
    for name in outputs.split():
        bits |= _abi.OUTPUT_BITS.get(name, 0)
    kept = [item for item in settings.split() if not item.startswith(("call=", "inputs=", "outputs=", "flags="))]
    kept.insert(1, f"call={_abi.BACKWARD}")
    if bits:
        kept.append(f"outputs={bits}")
    declared = sum(int(item[7:]) for item in settings.split() if item.startswith("inputs="))
    if "grad_row_entropy" in upstream:
        declared |= _abi.ENTROPY_GRADIENT
    if declared:
        kept.append(f"inputs={declared}")
    if over:
        kept.append(f"flags={_abi.IN_PLACE}")
    gradients = " ".join([GRADIENT_OF[name] for name in wanted])
    saved = "saved " if "saved" in outputs.split() else ""
    return f"{' '.join(kept)}|{inputs} stats {saved}{' '.join(upstream)}|{gradients}"


def with_bits(settings: str, declared: int) -> str:
    """Settings with further bits of the problem's inputs."""
    return f"{settings} inputs={declared}" if declared else settings


class _Once(torch.autograd.Function):
    """Base of the inner functions: computes a gradient, refuses to be differentiated."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise RuntimeError(_TWICE)


class _OnceInEager(torch.autograd.Function):
    """_Once without setup_context, whose presence costs 40 us a call (PyTorch binds the signature anew)."""

    @staticmethod
    def forward(ctx: Any, function: type[_Once], *arguments: Any) -> Any:
        return function.forward(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise RuntimeError(_TWICE)


def _once(function: type[_Once], eager: bool, *arguments: Any) -> Any:
    """function.apply in the form that fits; the compiler, which refuses second derivatives by itself, gets the bare
    computation, since it hands a context to a forward of variable length."""
    if torch.compiler.is_compiling() or (eager and not torch.is_grad_enabled()):  # without create_graph
        return function.forward(*arguments)
    return _OnceInEager.apply(function, *arguments) if eager else function.apply(*arguments)


class _Backward(_Once):
    """The backward operator."""

    @staticmethod
    def forward(text: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if plain_eager():
            return tuple(_ops.execute("backward", list(tensors), text))
        return tuple(_ops.backward(list(tensors), text))


class _BackwardInPlace(_Once):
    """The backward operator of given logits, over the logits themselves."""

    @staticmethod
    def forward(text: str, holder: list[torch.Tensor], *rest: torch.Tensor) -> torch.Tensor:
        logits = holder[0]
        _ops.backward_inplace(logits, list(rest), text)
        torch.autograd.graph.increment_version(logits)  # whoever saved the logits shall notice
        return logits.view_as(logits)


class _GiveAway(_Once):
    """Gradients made in the forward pass, scaled in place and handed over. `primals` only tie it to the graph."""

    @staticmethod
    def forward(
        buffers: list[torch.Tensor], dtypes: list[torch.dtype], upstream: torch.Tensor, *primals: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        if upstream.item() != 1.0:
            for buffer in buffers:
                buffer.mul_(upstream)
        return tuple([b if b.dtype == dtype else b.to(dtype) for b, dtype in zip(buffers, dtypes, strict=True)])


class _Scale(_Once):
    """The same out of place, for graphs."""

    @staticmethod
    def forward(dtypes: tuple[torch.dtype, ...], upstream: torch.Tensor, *tensors: torch.Tensor) -> Any:
        gradients = tensors[: len(dtypes)]  # and then the primals
        return tuple([(g * upstream).to(dtype) for g, dtype in zip(gradients, dtypes, strict=True)])


class Head(torch.autograd.Function):
    """A call with outputs: those named in `text` in that order, then statistics and gradients, which are not returned
    to users. `early`: text is a forward_backward whose gradients belong to the loss."""

    @staticmethod
    def forward(text: str, early: bool, eager: bool, in_place: bool, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        op = _ops.forward_backward if early else _ops.forward
        return tuple(op(list(inputs), text))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        text, ctx.early, ctx.eager, ctx.in_place, *tensors = inputs
        _, names, results = text.split("|")
        ctx.text, ctx.names = text, names.split()
        ctx.results = [name.split(":")[0] for name in results.split()]
        ctx.set_materialize_grads(False)
        # Users' outputs, perhaps saved exponentials, then stats, then gradients.
        shown = ctx.results.index("stats")
        ctx.mark_non_differentiable(
            *[value for name, value in zip(ctx.results, output, strict=True) if name not in UPSTREAM]
        )
        gradients = list(output[shown + 1 :])
        ctx.buffers = None
        saved = [*tensors, output[shown]]
        if ctx.results[shown - 1] == "saved":
            saved.append(output[shown - 1])
        if ctx.early and ctx.eager:
            ctx.buffers = gradients
            ctx.dtypes = [tensor.dtype for tensor in tensors]
        elif ctx.early:
            saved += gradients
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        count = len(ctx.names)
        if ctx.buffers is not None and not torch.is_grad_enabled() and grads[0] is not None:
            # The common case, short: the loss is the first output of an early call, and nothing else has an upstream.
            places = [place for place, need in enumerate(ctx.needs_input_grad) if need]
            if len(places) == len(ctx.buffers) and grads.count(None) == len(grads) - 1:
                buffers, ctx.buffers = ctx.buffers, None
                dtypes = [ctx.dtypes[place - 4] for place in places]
                result: list[torch.Tensor | None] = [None] * (count + 4)
                for place, gradient in zip(places, _GiveAway.forward(buffers, dtypes, grads[0]), strict=True):
                    result[place] = gradient
                return tuple(result)
        saved = ctx.saved_tensors
        tensors, stats, early = saved[:count], saved[count], saved[count + 1 :]  # early: or saved exponentials
        upstream = {
            name: grad for name, grad in zip(ctx.results, grads, strict=True) if name in UPSTREAM and grad is not None
        }
        wanted = tuple(
            [n for n, need in zip(ctx.names, ctx.needs_input_grad[4:], strict=True) if need and n in GRADIENT_OF]
        )
        given = dict(zip(ctx.names, tensors, strict=True))
        results: Any
        if not upstream or not wanted:
            return (None,) * (count + 4)
        early_names = ctx.results[ctx.results.index("stats") + 1 :]
        usable = list(upstream) == ["loss"] and early_names == [GRADIENT_OF[name] for name in wanted]
        dtypes = [given[name].dtype for name in wanted]
        if usable and ctx.buffers is not None:
            buffers, ctx.buffers = ctx.buffers, None
            results = _once(_GiveAway, True, buffers, dtypes, upstream["loss"], *[given[name] for name in wanted])
        elif usable and not ctx.eager:
            results = _once(_Scale, False, tuple(dtypes), upstream["loss"], *early, *[given[name] for name in wanted])
        else:
            kept = early if "saved" in ctx.results else ()
            results = _recompute(
                ctx.text, ctx.results, upstream, wanted, given, (stats, *kept), ctx.in_place, ctx.eager
            )
        by_name = dict(zip(wanted, results, strict=True))
        return (None, None, None, None, *[by_name.get(name) for name in ctx.names])


class _HeadInEager(torch.autograd.Function):
    """Head without setup_context; see _OnceInEager."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        text, early, _, _, *tensors = inputs
        output = tuple(_ops.execute("forward_backward" if early else "forward", tensors, text))
        Head.setup_context(ctx, inputs, output)
        return output

    backward = Head.backward


def _recompute(
    text: str,
    results: list[str],
    upstream: dict[str, torch.Tensor],
    wanted: tuple[str, ...],
    given: dict[str, torch.Tensor],
    kept: tuple[torch.Tensor, ...],
    in_place: bool,
    eager: bool,
) -> Any:
    """The backward operator for these upstream gradients; what has none counts as 0. kept: stats, exponentials."""
    stats = kept[0]
    rows = stats.shape[0]
    double = any(tensor.dtype == torch.float64 for tensor in given.values())
    arguments = {
        UPSTREAM[name]: grad.to(torch.float64 if name == "loss" and double else torch.float32)
        for name, grad in upstream.items()
    }
    # Left out, the loss' own upstream would count as 1.
    if "loss" in results:
        arguments.setdefault("grad_loss", stats.new_zeros(()))
    else:
        arguments.setdefault("grad_row_loss", stats.new_zeros(1).expand(rows))
    backward_text = backward_call(text, tuple(arguments), wanted, in_place)
    if in_place:
        rest = [tensor for name, tensor in given.items() if name != "logits"] + [*kept, *arguments.values()]
        return (_once(_BackwardInPlace, eager, backward_text, [given["logits"]], *rest),)
    return _once(_Backward, eager, backward_text, *given.values(), *kept, *arguments.values())


def apply(
    kind: int,
    settings: str,
    inputs: dict[str, torch.Tensor],
    outputs: list[str],
    *,
    in_place: bool = False,
    declared: int = 0,
    saved_bytes: int = 0,
) -> dict[str, torch.Tensor]:
    """Runs a call with gradients where they are wanted; the outputs by name, and `stats`. `declared`: bits of the
    problem's inputs that do not follow from the inputs' names."""
    names = list(inputs)
    tensors = list(inputs.values())
    if not torch.compiler.is_compiling():
        refuse_transforms(tensors)
    wanted = [name for name in names if inputs[name].requires_grad] if torch.is_grad_enabled() else []
    for name in wanted:
        if name not in GRADIENT_OF:
            raise ValueError(f"logitless: there is no gradient with respect to {name}; detach it")
    if kind == _abi.LOGITS and "bias" in wanted:
        raise ValueError("logitless: there is no gradient with respect to the bias of given logits; add it to them")
    if not wanted:
        text = call_text(kind, _abi.FORWARD, with_bits(settings, declared), names, [*outputs, "stats"])
        values = _ops.execute("forward", tensors, text) if plain_eager() else _ops.forward(tensors, text)
        return dict(zip([*outputs, "stats"], values, strict=True))
    # Later upstream gradients of rows need the backward operator; one of the reduced loss is known up to a factor.
    # float64 is for gradcheck, which wants the same bits from every backward.
    double = any(tensor.dtype == torch.float64 for tensor in tensors[:2])
    early = "loss" in outputs and not in_place and not double
    results = [*outputs, "stats"]
    if saved_bytes and not early and kind == _abi.LINEAR and not double:
        settings, results = f"{settings} saved_bytes={saved_bytes}", [*outputs, "saved", "stats"]
    if early:
        # fp16 underflows below 6e-8 before a loss scale comes: these gradients wait in fp32.
        results += [GRADIENT_OF[n] + (":f32" if inputs[n].dtype == torch.float16 else "") for n in wanted]
    call = _abi.FORWARD_BACKWARD if early else _abi.FORWARD
    if "row_entropy" in outputs and not early:
        declared |= _abi.ENTROPY_GRADIENT
    text = call_text(kind, call, with_bits(settings, declared), names, results)
    eager = plain_eager()
    values = (_HeadInEager if eager else Head).apply(text, early, eager, in_place, *tensors)
    return {name.split(":")[0]: value for name, value in zip(results, values, strict=True)}
