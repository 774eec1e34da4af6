"""Gradients of the operators: two nested autograd functions, the outer for the loss, the inner for its gradient.

The outer one saves inputs and statistics. Where the loss is one number, its gradients for an upstream of 1 are made
together with it (6 R H V operations instead of 8): in eager mode they wait on the context, the first backward scales
them in place and gives them away, and a second one computes them anew; while tracing or under torch.func they are
saved and multiplied out of place. Per-row outputs get their gradients from the backward operator, all in one call.
The inner one exists so that differentiating twice raises instead of returning something wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from .. import _abi, _engine
from .._settings import call_text
from . import _ops

# A differentiable output and the argument of ll_backward that takes its upstream gradient.
UPSTREAM = {
    "loss": "grad_loss_factor",
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


def in_forward_mode() -> bool:
    """Inside torch.autograd.forward_ad.dual_level()."""
    return bool(forward_ad._current_level >= 0)


def refuse_transforms(tensors: list[torch.Tensor]) -> None:
    """Forward mode and vmap are refused here: an operator would return zero tangents, and the compiler takes no
    autograd function with a jvp of its own."""
    level = torch._C._functorch.peek_interpreter_stack()
    if level is not None and level.key() == torch._C._functorch.TransformType.Vmap:
        raise RuntimeError(_VMAP)
    if in_forward_mode() and any(
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
        if upstream.is_cuda:
            _ops.scale(buffers, upstream)  # there nothing waits for the number
        elif upstream.item() != 1.0:
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
    def forward(text: str, early: bool, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        op = _ops.forward_backward if early else _ops.forward
        return tuple(op(list(inputs), text))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.text, ctx.early, *tensors = inputs
        _, names, results = ctx.text.split("|")
        ctx.names = names.split()
        ctx.results = [name.split(":")[0] for name in results.split()]
        ctx.set_materialize_grads(False)
        # Users' outputs, perhaps saved exponentials, then stats, then gradients.
        shown = ctx.results.index("stats")
        ctx.mark_non_differentiable(
            *[value for name, value in zip(ctx.results, output, strict=True) if name not in UPSTREAM]
        )
        saved = [*tensors, output[shown]]
        if ctx.results[shown - 1] == "saved":
            saved.append(output[shown - 1])
        if ctx.early:
            saved += output[shown + 1 :]
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        count = len(ctx.names)
        saved = ctx.saved_tensors
        tensors, stats, rest = saved[:count], saved[count], saved[count + 1 :]  # early gradients, or exponentials
        given = dict(zip(ctx.names, tensors, strict=True))
        upstream = _upstream(ctx.results, grads)
        wanted = _wanted(ctx.names, ctx.needs_input_grad[2:])
        if not upstream or not wanted:
            return (None,) * (count + 2)
        results: Any
        early_names = ctx.results[ctx.results.index("stats") + 1 :]
        if list(upstream) == ["loss"] and early_names == [GRADIENT_OF[name] for name in wanted]:
            dtypes = tuple([given[name].dtype for name in wanted])
            results = _once(_Scale, False, dtypes, upstream["loss"], *rest, *[given[name] for name in wanted])
        else:
            kept = rest if "saved" in ctx.results else ()
            results = _recompute(ctx.text, ctx.results, upstream, wanted, given, (stats, *kept), False, False)
        by_name = dict(zip(wanted, results, strict=True))
        return (None, None, *[by_name.get(name) for name in ctx.names])


class Recipe:
    """A call in eager mode, as far as it follows from keywords and from the inputs' names, dtypes, shapes and need of a
    gradient. Made once for all calls that have these in common, and never changed, so that threads may share it."""

    __slots__ = (
        "call",
        "dtypes",
        "early",
        "in_place",
        "key",
        "marked",
        "names",
        "needs",
        "operator",
        "outputs",
        "places",
        "results",
        "shown",
        "text",
    )

    def __init__(
        self, text: str, early: bool, in_place: bool, outputs: list[str], wanted: list[str], tensors: list[torch.Tensor]
    ) -> None:
        _, names, results = text.split("|")
        self.text, self.early, self.in_place = text, early, in_place
        self.names = names.split()
        self.results = [name.split(":")[0] for name in results.split()]
        self.outputs, self.shown = outputs, len(outputs)  # what the caller sees; behind it perhaps saved, then stats
        self.operator = "forward_backward" if early else "forward"
        self.call, self.key = _engine.call_of(text), _ops.key_of(tensors)
        self.needs = (False, *[name in wanted for name in self.names])  # ctx.needs_input_grad, where all are asked for
        self.places = [place for place, need in enumerate(self.needs) if need]
        self.dtypes = [tensors[place - 1].dtype for place in self.places]
        self.marked = [at for at, name in enumerate(outputs) if name not in UPSTREAM]


def run(recipe: Recipe, tensors: Sequence[torch.Tensor]) -> Any:
    """The recipe's outputs on tensors like those that it was made for: one tensor, or a tuple."""
    if recipe.places:
        return _HeadInEager.apply(recipe, *tensors)
    made = _ops.run(recipe.operator, tensors, recipe.call, recipe.key)
    return made[0] if recipe.shown == 1 else tuple(made[: recipe.shown])


class _HeadInEager(torch.autograd.Function):
    """Head without setup_context (see _OnceInEager), with users' outputs alone."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, *tensors: torch.Tensor) -> Any:
        made = _ops.run(recipe.operator, tensors, recipe.call, recipe.key)
        shown = recipe.shown
        ctx.recipe = recipe
        ctx.set_materialize_grads(False)
        if recipe.early:
            ctx.buffers = made[shown + 1 :]
            ctx.save_for_backward(*tensors, made[shown])
        else:
            ctx.buffers = None
            ctx.save_for_backward(*tensors, made[-1], *made[shown:-1])  # stats, perhaps saved exponentials
        if recipe.marked:
            ctx.mark_non_differentiable(*[made[at] for at in recipe.marked])
        return made[0] if shown == 1 else tuple(made[:shown])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        recipe: Recipe = ctx.recipe
        count = len(recipe.names)
        # The loss is the first output of an early call. A comparison of tensors with == would cost 25 us.
        first = grads[0] if recipe.early and all(grad is None for grad in grads[1:]) else None
        result: list[torch.Tensor | None] = [None] * (count + 1)
        if first is not None and ctx.buffers is not None and ctx.needs_input_grad == recipe.needs:
            buffers, ctx.buffers = ctx.buffers, None
            if not torch.is_grad_enabled():  # the common case, short: without create_graph
                made = _GiveAway.forward(buffers, recipe.dtypes, first)
            else:
                primals = [ctx.saved_tensors[place - 1] for place in recipe.places]
                made = _once(_GiveAway, True, buffers, recipe.dtypes, first, *primals)
            for place, gradient in zip(recipe.places, made, strict=True):
                result[place] = gradient
            return tuple(result)
        upstream = _upstream(recipe.outputs, grads)
        wanted = _wanted(recipe.names, ctx.needs_input_grad[1:])
        if not upstream or not wanted:
            return tuple(result)
        saved = ctx.saved_tensors
        given = dict(zip(recipe.names, saved[:count], strict=True))
        results = _recompute(recipe.text, recipe.results, upstream, wanted, given, saved[count:], recipe.in_place, True)
        by_name = dict(zip(wanted, results, strict=True))
        return (None, *[by_name.get(name) for name in recipe.names])


def _upstream(names: Sequence[str], grads: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """The upstream gradients that there are, by output."""
    return {name: grad for name, grad in zip(names, grads, strict=True) if name in UPSTREAM and grad is not None}


def _wanted(names: Sequence[str], needs: Sequence[bool]) -> tuple[str, ...]:
    """The inputs whose gradient is asked for."""
    return tuple([name for name, need in zip(names, needs, strict=True) if need and name in GRADIENT_OF])


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
        arguments.setdefault("grad_loss_factor", stats.new_zeros(()))
    else:
        arguments.setdefault("grad_row_loss", stats.new_zeros(1).expand(rows))
    backward_text = backward_call(text, tuple(arguments), wanted, in_place)
    if in_place:
        rest = [tensor for name, tensor in given.items() if name != "logits"] + [*kept, *arguments.values()]
        return (_once(_BackwardInPlace, eager, backward_text, [given["logits"]], *rest),)
    return _once(_Backward, eager, backward_text, *given.values(), *kept, *arguments.values())


def prepare(
    kind: int,
    settings: str,
    inputs: dict[str, torch.Tensor],
    outputs: list[str],
    *,
    in_place: bool = False,
    declared: int = 0,
    saved_bytes: int = 0,
) -> tuple[str, bool, list[str]]:
    """A call's text for these inputs; whether its gradients are made early; the inputs that want one. `declared`: bits
    of the problem's inputs that do not follow from the inputs' names."""
    names = list(inputs)
    wanted = [name for name in names if inputs[name].requires_grad] if torch.is_grad_enabled() else []
    for name in wanted:
        if name not in GRADIENT_OF:
            raise ValueError(f"logitless: there is no gradient with respect to {name}; detach it")
    if kind == _abi.LOGITS and "bias" in wanted:
        raise ValueError("logitless: there is no gradient with respect to the bias of given logits; add it to them")
    if not wanted:
        text = call_text(kind, _abi.FORWARD, with_bits(settings, declared), names, outputs)
        return text, False, wanted
    # Later upstream gradients of rows need the backward operator; one of the reduced loss is known up to a factor.
    # float64 is for gradcheck, which wants the same bits from every backward.
    double = any(tensor.dtype == torch.float64 for tensor in list(inputs.values())[:2])
    early = "loss" in outputs and not in_place and not double
    results = [*outputs, "stats"]
    on_cpu = next(iter(inputs.values())).is_cpu  # elsewhere nothing is kept
    if saved_bytes and not early and kind == _abi.LINEAR and not double and on_cpu:
        settings, results = f"{settings} saved_bytes={saved_bytes}", [*outputs, "saved", "stats"]
    if early:
        # fp16 underflows below 6e-8 before a loss scale comes: these gradients wait in fp32.
        results += [GRADIENT_OF[n] + (":f32" if inputs[n].dtype == torch.float16 else "") for n in wanted]
    call = _abi.FORWARD_BACKWARD if early else _abi.FORWARD
    if "row_entropy" in outputs and not early:
        declared |= _abi.ENTROPY_GRADIENT
    return call_text(kind, call, with_bits(settings, declared), names, results), early, wanted


def apply(
    kind: int, settings: str, inputs: dict[str, torch.Tensor], outputs: list[str], **more: Any
) -> tuple[dict[str, torch.Tensor], Recipe | None]:
    """Runs a call with gradients where they are wanted; the outputs by name, and in eager mode the recipe for calls
    with the same settings and with inputs like these. more: prepare()'s."""
    tensors = list(inputs.values())
    if not torch.compiler.is_compiling():
        refuse_transforms(tensors)
    text, early, wanted = prepare(kind, settings, inputs, outputs, **more)
    recipe = None
    if plain_eager():
        recipe = Recipe(text, early, more.get("in_place", False), outputs, wanted, tensors)
        values = run(recipe, tensors)
        values = (values,) if recipe.shown == 1 else values
    elif not wanted:
        values = _ops.forward(tensors, text)
    else:
        values = Head.apply(text, early, *tensors)
    return dict(zip(outputs, values, strict=False)), recipe  # stats and what comes behind are nobody's
