"""Vocabulary parallelism: a head whose classes are split over ranks, or over several tensors of one process.

VocabPart is the pieces: statistics of a part, their merge, what the merged ones say, and a part's gradients.
vocab_parallel_linear_cross_entropy and vocab_parallel_token_logprobs put them together over a process group: one
all_gather of [R, 8] float32 forward, one all_reduce of dX backward; neither logits nor weights travel. Eager mode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _abi, _parts
from .._parts import RowOutputs
from . import _functions, _ops

__all__ = [
    "RowOutputs",
    "VocabPart",
    "merge_statistics",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_token_logprobs",
]


@dataclasses.dataclass(frozen=True)
class VocabPart(_parts.Part):
    """Columns [first_column, first_column + V) of total_vocab classes, and the options that all calls share.

    weight [V, H] and bias [V] are the part's own rows; targets are class numbers of the whole. The options are
    linear_cross_entropy's (ignore_index, label_smoothing, smoothing, z_loss, softcap, logit_scale, temperature,
    memory_budget); entropy=True makes room for entropies and their gradients. All parts must have the same options.
    Tensors by name: class_weight [total_vocab], row_weight [...], row_temperature [...].

        stats = logitless.merge_statistics([part.statistics(hidden, w, target) for part, w in zip(parts, weights)])
        rows = parts[0].outputs(stats, target)
        dx, dw, _ = parts[0].gradients(hidden, weights[0], target, stats)  # dx: of all parts, to be summed
    """

    def statistics(
        self, hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, **tensors: Tensor | None
    ) -> Tensor:
        """Statistics [R, 8] float32 of this part's columns; hidden [..., H], target [...]. 2 R H V operations.

        Raises ValueError, TypeError; IndexError for a target outside [0, total_vocab) that is not ignore_index."""
        inputs = self._inputs(hidden, weight, target, bias, tensors)
        return _ops.execute("forward", list(inputs.values()), self._text(_abi.FORWARD, list(inputs), ["stats"]))[0]

    def outputs(
        self,
        stats: Tensor,
        target: Tensor,
        *,
        class_weight: Tensor | None = None,
        row_weight: Tensor | None = None,
    ) -> RowOutputs:
        """Rows' losses, log-sum-exps, log-probabilities and (entropy=True) entropies of merged statistics, shaped like
        target, float32, without gradients."""
        flat = target.reshape(-1)
        if tuple(stats.shape) != (flat.numel(), _parts.SIZE):
            raise ValueError(f"stats: shape {list(stats.shape)}; must be [{flat.numel()}, {_parts.SIZE}]")
        kept = flat != self.ignore_index
        one = stats.new_ones((), dtype=torch.float64)
        of_class = one if class_weight is None else class_weight.double()[torch.where(kept, flat, 0)]
        of_row = one if row_weight is None else row_weight.reshape(-1).double()
        rows = self._rows(torch, stats.double(), kept, of_class, of_row)
        return RowOutputs(*[None if row is None else row.float().reshape(target.shape) for row in rows])

    def gradients(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        stats: Tensor,
        *,
        bias: Tensor | None = None,
        grad_row_loss: Tensor | None = None,
        grad_lse: Tensor | None = None,
        grad_logprob: Tensor | None = None,
        grad_entropy: Tensor | None = None,
        wanted: Sequence[str] = ("hidden", "weight", "bias"),
        **tensors: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dX, dW, db) from merged statistics and upstream gradients [...] of the rows' outputs; 6 R H V operations.

        dX [..., H] is this part's summand, to be added over all parts; dW [V, H] and db [V] are complete. Where none of
        the upstream gradients is given, grad_row_loss is all ones: the gradient of the sum of the rows' losses."""
        self._check_entropy(grad_entropy)
        given = (grad_row_loss, grad_lse, grad_logprob, grad_entropy)
        leading = target.shape
        upstream = {
            name: _functions._floats(name, value.detach(), leading, expand=True).reshape(-1)
            for name, value in zip(_parts.UPSTREAM, given, strict=True)
            if value is not None
        }
        if upstream and grad_row_loss is None:  # left out it would count as ones
            upstream["grad_row_loss"] = stats.new_zeros(1).expand(target.numel())
        inputs = self._inputs(hidden, weight, target, bias, tensors)
        names = [name for name in ("hidden", "weight", "bias") if name in inputs and name in wanted]
        if not names:
            return None, None, None
        text = self._text(_abi.BACKWARD, [*inputs, "stats", *upstream], ["grad_" + name for name in names])
        made = dict(
            zip(names, _ops.execute("backward", [*inputs.values(), stats, *upstream.values()], text), strict=True)
        )
        dx = made.get("hidden")
        return None if dx is None else dx.reshape(hidden.shape), made.get("weight"), made.get("bias")

    def _inputs(
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, tensors: dict[str, Tensor | None]
    ) -> dict[str, Tensor]:
        self._check_names(tensors)
        _functions._check_head(hidden, weight, bias)
        leading = hidden.shape[:-1]
        inputs = {"hidden": hidden.detach().reshape(-1, hidden.shape[-1]), "weight": weight.detach()}
        if bias is not None:
            inputs["bias"] = bias.detach()
        inputs["targets"] = _functions._integers("target", target, leading).reshape(-1)
        for name, tensor in tensors.items():
            if tensor is not None:
                shape = (self.total_vocab,) if name == "class_weight" else leading
                inputs[name] = _functions._floats(name, tensor, shape, expand=name == "row_temperature").reshape(-1)
        return inputs


def merge_statistics(parts: Sequence[Tensor]) -> Tensor:
    """Statistics [R, 8] of the whole from those of its parts, in that order (which changes roundings alone).

    Tensors that are not on the CPU are merged there."""
    if not parts:
        raise ValueError("parts: empty; must be statistics of at least one part")
    merged = _parts.merged([part.detach().to("cpu", torch.float32).contiguous().numpy() for part in parts])
    return torch.from_numpy(merged).to(parts[0].device)


class _VocabParallel(torch.autograd.Function):
    """Row outputs of a head split over a group; its arguments after `reduce` are tensors, or None."""

    @staticmethod
    def forward(
        ctx: Any,
        part: VocabPart,
        group: Any,
        reduce: bool,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        row_weight: Tensor | None,
        row_temperature: Tensor | None,
    ) -> tuple[Tensor, ...]:
        tensors = {"class_weight": class_weight, "row_weight": row_weight, "row_temperature": row_temperature}
        own = part.statistics(hidden, weight, target, bias=bias, **tensors)
        stats = merge_statistics(_gathered(own, part, weight.shape[0], group))
        ctx.part, ctx.group, ctx.reduce = part, group, reduce
        ctx.save_for_backward(hidden, weight, bias, target, class_weight, row_weight, row_temperature, stats)
        ctx.set_materialize_grads(False)
        rows = part.outputs(stats, target, class_weight=class_weight, row_weight=row_weight)
        return tuple(row for row in rows if row is not None)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, class_weight, row_weight, row_temperature, stats = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:6]
        wanted = [name for name, need in zip(("hidden", "weight", "bias"), needs, strict=True) if need]
        if all(grad is None for grad in grads) or not wanted:
            return (None,) * 10
        names = ("grad_row_loss", "grad_lse", "grad_logprob", "grad_entropy")
        dx, dw, db = ctx.part.gradients(
            hidden,
            weight,
            target,
            stats,
            bias=bias,
            wanted=wanted,
            class_weight=class_weight,
            row_weight=row_weight,
            row_temperature=row_temperature,
            **dict(zip(names, grads, strict=False)),
        )
        if dx is not None and ctx.reduce:
            # Summed in float32, and rounded once.
            total = dx.float()
            dist.all_reduce(total, group=ctx.group)
            dx = total.to(dx.dtype)
        return (None, None, None, dx, dw, db, None, None, None, None)


def _gathered(own: Tensor, part: VocabPart, columns: int, group: Any) -> list[Tensor]:
    """Every rank's statistics in the order of ranks. A first row says which columns they are of: parts that overlap or
    leave a gap are refused on every rank alike (of CPU tensors; elsewhere reading it would synchronise)."""
    head = own.new_tensor([[part.first_column, columns, part.total_vocab] + [0.0] * (_parts.SIZE - 3)])
    sent = torch.cat([head, own])
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    if own.is_cpu:
        end = 0
        spans = sorted(tuple(int(value) for value in each[0, :3].tolist()) for each in received)
        for first, count, total in spans:
            if first != end or total != part.total_vocab:
                break
            end += count
        if end != part.total_vocab:
            raise ValueError(
                f"first_column, total_vocab: the ranks hold {[f'[{a}, {a + n}) of {v}' for a, n, v in spans]}; they "
                "must cover the vocabulary without gap or overlap"
            )
    return [each[1:] for each in received]


def _place(weight: Tensor, group: Any, first_column: int | None, total_vocab: int | None) -> tuple[int, int]:
    if (first_column is None) != (total_vocab is None):
        raise ValueError("first_column, total_vocab: one without the other; give both, or neither for equal parts")
    if first_column is None or total_vocab is None:
        return dist.get_rank(group) * weight.shape[0], dist.get_world_size(group) * weight.shape[0]
    return first_column, total_vocab


def _run(
    part: VocabPart,
    group: Any,
    reduce: bool,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None = None,
    row_weight: Tensor | None = None,
    temperature: float | Tensor = 1.0,
) -> RowOutputs:
    rows = temperature if isinstance(temperature, Tensor) else None
    apply = torch.compiler.disable(_VocabParallel.apply)
    return RowOutputs(*apply(part, group, reduce, hidden, weight, bias, target, class_weight, row_weight, rows))


def vocab_parallel_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    group: Any = None,
    first_column: int | None = None,
    total_vocab: int | None = None,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    row_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    on_empty: str = "nan",
    memory_budget: int | str | None = None,
    reduce_grad_input: bool = True,
) -> Tensor:
    """linear_cross_entropy of a head whose rows are split over a process group: equal to the whole on every rank.

    Args:
        input: X [..., H], the same on every rank. linear_weight: this rank's rows [V, H] of the head; linear_bias its
            [V]. target: [...], class numbers of the whole. weight: class weights of the whole [total_vocab].
        group: torch.distributed's; None is the default one. Every rank of it must call.
        first_column, total_vocab: which classes lie here, and how many there are in all; None: parts of equal size in
            the order of ranks (Megatron's padded vocabulary).
        reduce_grad_input: dX is summed over the group (all_reduce, in float32). False leaves this rank's summand, for
            callers that sum it themselves (Megatron's copy_to_tensor_model_parallel_region, sequence parallelism).
        The others: as linear_cross_entropy.

    Returns: the loss, float32: a scalar, or [...] with reduction "none". Differentiable once.

    Raises: as linear_cross_entropy; ValueError where the ranks' classes overlap or leave a gap.
    """
    first, total = _place(linear_weight, group, first_column, total_vocab)
    part = VocabPart(
        first,
        total,
        ignore_index=-100 if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing,
        smoothing=smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        memory_budget=memory_budget,
    )
    if reduction not in _abi.REDUCTION:
        raise ValueError(f"reduction: {reduction!r}; must be one of {list(_abi.REDUCTION)}")
    if on_empty not in _abi.ON_EMPTY:
        raise ValueError(f"on_empty: {on_empty!r}; must be one of {list(_abi.ON_EMPTY)}")
    rows: Tensor = _run(
        part, group, reduce_grad_input, input, linear_weight, linear_bias, target, weight, row_weight, temperature
    ).row_loss
    if reduction == "none":
        return rows
    loss: Tensor = rows.sum(dtype=torch.float64)
    if reduction == "mean":
        if normalizer is not None:
            divisor = normalizer
        else:
            kept = target != part.ignore_index
            divisor = (
                kept.sum()
                if weight is None
                else torch.where(kept, weight.double()[torch.where(kept, target, 0)], 0.0).sum()
            )
            if on_empty == "error" and not divisor:
                raise ValueError("target: no row is kept, and on_empty is 'error'")
            if on_empty == "zero":
                divisor = torch.where(divisor == 0, 1, divisor)
        loss = loss / divisor
    return loss.float()


def vocab_parallel_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    group: Any = None,
    first_column: int | None = None,
    total_vocab: int | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    ignore_index: int | None = -100,
    memory_budget: int | str | None = None,
    reduce_grad_input: bool = True,
) -> Any:
    """token_logprobs of a head split over a process group: logprob, or (logprob, entropy), float32 [...].

    Both differentiable, in one backward. The group's keywords are vocab_parallel_linear_cross_entropy's."""
    first, total = _place(weight, group, first_column, total_vocab)
    part = VocabPart(
        first,
        total,
        ignore_index=-100 if ignore_index is None else ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        entropy=return_entropy,
        memory_budget=memory_budget,
    )
    found = _run(part, group, reduce_grad_input, hidden, weight, bias, target, temperature=temperature)
    return (found.logprob, found.entropy) if return_entropy else found.logprob
