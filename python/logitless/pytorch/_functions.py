"""The functions that users call: keywords checked, shapes brought to rows, one call each. No mathematics."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _abi
from .._settings import bytes_of, number_of, positive, settings
from . import _autograd

_COUNTS = ("kept", "correct_rows", "bad_rows")
_OF_A_CLASS = ("logprob", "correct", "correct_rows")  # rows need a target class for these


class Outputs(NamedTuple):
    """A loss with its per-row outputs: [...] of the target's shape, float32 unless said; None where not asked for.

    loss, row_loss, lse, logprob and entropy are differentiable, all in one backward. Ignored rows: 0, argmax -1.
    """

    loss: Tensor  # as the reduction says
    row_loss: Tensor | None = None  # before the reduction
    lse: Tensor | None = None  # log-sum-exp of the row's logits
    logprob: Tensor | None = None  # of the target
    entropy: Tensor | None = None
    argmax: Tensor | None = None  # int64, the lowest class of the largest logit
    correct: Tensor | None = None  # bool, the target is the argmax
    z_loss: Tensor | None = None  # the row's share of it
    mean_logit: Tensor | None = None
    log_sum_p2: Tensor | None = None
    kept: Tensor | None = None  # int64 scalar: rows that are not ignored
    correct_rows: Tensor | None = None  # int64 scalar
    bad_rows: Tensor | None = None  # int64 scalar: kept rows with NaN or +inf, or all -inf


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
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
    keep_mask: Tensor | None = None,
    logit_floor: Tensor | None = None,
    topk_probs: Tensor | None = None,
    rest: str = "dropped",
    shift: bool = False,
    cu_seqlens: Tensor | None = None,
    document_ids: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    on_empty: str = "nan",
    memory_budget: int | str | None = None,
    saved_memory: int | str | None = None,
    filter_eps: float = 0.0,
    filter_seed: int = 0,
    most_kept_rows: int | None = None,
    return_outputs: bool | Iterable[str] = False,
    options: object = None,
) -> Any:
    """Cross-entropy of softmax(input @ linear_weight.T + linear_bias), without the matrix of logits.

    Args:
        input: X [..., H], float32, bfloat16, float16 or float64 (double runs on the reference, slowly).
        linear_weight: W [V, H], any of these dtypes; bfloat16 input with float32 weight is read as it is.
        target: [...] int64 or int32, or probabilities [..., V] (soft targets, as F.cross_entropy takes them), or
            with topk_probs class numbers [..., k].
        linear_bias: b [V]. -inf masks a class.
        weight: class weights [V], PyTorch's meaning.
        reduction: "mean" (over the kept rows' weights, or by normalizer), "sum", or "none".
        ignore_index: rows with this target have loss 0 and no gradient; None is -100.
        label_smoothing, smoothing: "uniform" gives every class alpha/V (PyTorch), "others" gives the other classes
            alpha/(V-1) (Megatron).
        z_loss: lambda; adds lambda lse^2 to each row's loss.
        softcap, logit_scale, temperature: z = softcap tanh(logit_scale (X W^T + b) / softcap) / temperature;
            temperature may be a tensor [...] of one number per row.
        row_weight: [...], any sign; multiplies a row's loss and never the divisor.
        keep_mask: [..., V] bool, or [..., ceil(V/8)] uint8 lowest bit first; dropped classes leave the softmax.
        logit_floor: [...]; classes with a logit below it leave the softmax. The target never does.
        topk_probs, rest: [..., k] probabilities of target's k classes; what they leave over is "dropped",
            "renormalised" or "spread" over the other classes.
        shift: the target of row t is target[..., t + 1], the last row of each sequence is ignored. Labels move, never
            hidden states. cu_seqlens [S + 1] or document_ids [...] mark sequences packed in the flattened rows.
        normalizer: what "mean" divides by instead: a number or a tensor of one (no host synchronisation).
        on_empty: mean over no kept row: "nan" (PyTorch), "zero" (with gradients of 0) or "error".
        memory_budget: bytes of workspace, or '512MiB'; None is no limit. Less memory, more arithmetic.
        saved_memory: bytes, or '256MiB', that a loss per row (reduction "none") may keep until its backward, which
            then multiplies less: 2 R V bytes with 16-bit inputs, 4 R V else, save a quarter of it. None keeps nothing.
            On the CPU; CUDA keeps nothing.
        filter_eps, filter_seed: a power of two; gradient entries |p| below it become 0 or eps at random, unbiased.
        most_kept_rows: a bound of the rows that are not ignored, known without a synchronisation. On CUDA products
            then cover so many rows, gathered, instead of all; more of them than that make the result NaN, which
            logitless.check_status() tells. The CPU counts for itself.
        return_outputs: True, or names of Outputs' fields, for per-row outputs beside the loss.
        options: PyTorch's argument; refused, memory_budget says what it says.

    Returns:
        The loss: a scalar, float32 (float64 for float64 input), or with reduction "none" float32 [...]; or Outputs.

    Raises:
        ValueError, TypeError: an argument, with its value and what would be right. IndexError: a target out of range;
            on CUDA, where calls only enqueue, its row is NaN and logitless.check_status() raises this.

    Source: docs/losses.md has the formula, the gradient and the origin of each option.
    """
    quick = _quick_key(
        (input, linear_weight, target),
        (
            linear_bias,
            weight,
            reduction,
            ignore_index,
            label_smoothing,
            smoothing,
            z_loss,
            softcap,
            logit_scale,
            temperature,
            row_weight,
            keep_mask,
            logit_floor,
            topk_probs,
            rest,
            shift,
            cu_seqlens,
            document_ids,
            normalizer,
            on_empty,
            memory_budget,
            saved_memory,
            filter_eps,
            filter_seed,
            most_kept_rows,
            return_outputs,
            options,
        ),
    )
    if quick is not None and (recipe := _recipes.get(quick)) is not None:
        return _autograd.run(recipe, (input, linear_weight, target))
    if options is not None:
        raise ValueError("options: not taken; say memory_budget='512MiB' for what chunking options of PyTorch say")
    inputs = {"hidden": input, "weight": linear_weight}
    if linear_bias is not None:
        inputs["bias"] = linear_bias
    _check_head(input, linear_weight, linear_bias)
    return _cross_entropy(
        _abi.LINEAR,
        inputs,
        linear_weight.shape[0],
        target,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        smoothing=smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        row_weight=row_weight,
        keep_mask=keep_mask,
        logit_floor=logit_floor,
        topk_probs=topk_probs,
        rest=rest,
        shift=shift,
        cu_seqlens=cu_seqlens,
        document_ids=document_ids,
        normalizer=normalizer,
        on_empty=on_empty,
        memory_budget=memory_budget,
        saved_memory=saved_memory,
        filter_eps=filter_eps,
        filter_seed=filter_seed,
        most_kept_rows=most_kept_rows,
        return_outputs=return_outputs,
        quick=quick,
    )


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
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
    keep_mask: Tensor | None = None,
    logit_floor: Tensor | None = None,
    topk_probs: Tensor | None = None,
    rest: str = "dropped",
    shift: bool = False,
    cu_seqlens: Tensor | None = None,
    document_ids: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    on_empty: str = "nan",
    memory_budget: int | str | None = None,
    filter_eps: float = 0.0,
    filter_seed: int = 0,
    return_outputs: bool | Iterable[str] = False,
    inplace_backward: bool = False,
) -> Any:
    """Cross-entropy of given logits [..., V], classes last: one read, and one write for the gradient.

    The keywords are linear_cross_entropy's. inplace_backward: the gradient is written over the logits (eager mode), so
    that no second array of their size is needed; whatever else saved the logits for its backward then says so.
    Logits whose classes are not adjacent are copied; all other strides are read in place.

    Raises: as linear_cross_entropy; ValueError for logits with classes in the second place, naming movedim.
    """
    quick = _quick_key(
        (logits, target),
        (
            weight,
            reduction,
            ignore_index,
            label_smoothing,
            smoothing,
            z_loss,
            softcap,
            logit_scale,
            temperature,
            row_weight,
            keep_mask,
            logit_floor,
            topk_probs,
            rest,
            shift,
            cu_seqlens,
            document_ids,
            normalizer,
            on_empty,
            memory_budget,
            filter_eps,
            filter_seed,
            return_outputs,
            inplace_backward,
        ),
    )
    if quick is not None and (recipe := _recipes.get(quick)) is not None:
        return _autograd.run(recipe, (logits, target))
    if logits.dim() < 1:
        raise ValueError(f"logits: shape {list(logits.shape)}; must be [..., V]")
    if logits.dim() > 2 and tuple(target.shape) == (logits.shape[0], *logits.shape[2:]) != tuple(logits.shape[:-1]):
        raise ValueError(
            f"logits: shape {list(logits.shape)} with targets {list(target.shape)}; classes must come last: "
            "logits.movedim(1, -1)"
        )
    if inplace_backward and not _autograd.plain_eager():
        raise NotImplementedError("inplace_backward: not under torch.compile or torch.func; it saves nothing there")
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        if inplace_backward:
            raise ValueError(f"inplace_backward: logits of strides {logits.stride()}; classes must be adjacent")
        logits = logits.contiguous()
    if inplace_backward and logits.is_leaf and logits.requires_grad:
        raise ValueError("inplace_backward: logits are a leaf that requires a gradient; its own value would be lost")
    return _cross_entropy(
        _abi.LOGITS,
        {"logits": logits},
        logits.shape[-1],
        target,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        smoothing=smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        row_weight=row_weight,
        keep_mask=keep_mask,
        logit_floor=logit_floor,
        topk_probs=topk_probs,
        rest=rest,
        shift=shift,
        cu_seqlens=cu_seqlens,
        document_ids=document_ids,
        normalizer=normalizer,
        on_empty=on_empty,
        memory_budget=memory_budget,
        filter_eps=filter_eps,
        filter_seed=filter_seed,
        return_outputs=return_outputs,
        in_place=inplace_backward,
        quick=None if inplace_backward else quick,
    )


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    ignore_index: int | None = -100,
    keep_mask: Tensor | None = None,
    logit_floor: Tensor | None = None,
    memory_budget: int | str | None = None,
    saved_memory: int | str | None = None,
    most_kept_rows: int | None = None,
) -> Any:
    """Log-probabilities of target [...] under the head, differentiable; with return_entropy also the rows' entropies.

    Returns logprob, or the tuple (logprob, entropy), float32 [...], 0 in ignored rows; one backward serves both. hidden
    [..., H], weight [V, H], bias [V]. keep_mask and logit_floor make them those of a truncated sampler. Raises as
    linear_cross_entropy.
    """
    found = linear_cross_entropy(
        hidden,
        weight,
        target,
        linear_bias=bias,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        keep_mask=keep_mask,
        logit_floor=logit_floor,
        memory_budget=memory_budget,
        saved_memory=saved_memory,
        most_kept_rows=most_kept_rows,
        reduction="none",
        return_outputs=("logprob", "entropy") if return_entropy else ("logprob",),
    )
    return (found.logprob, found.entropy) if return_entropy else found.logprob


def policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ref_logprob: Tensor | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    row_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    normalizer: float | Tensor | None = None,
    on_empty: str = "nan",
    memory_budget: int | str | None = None,
    return_outputs: bool | Iterable[str] = False,
) -> Any:
    """The clipped policy objective of PPO (Schulman et al. 2017) and GRPO (Shao et al. 2024), at the cost of one loss.

    Row loss: -min(w A, clamp(w, 1 - clip_low, 1 + clip_high) A) + kl_coef K - entropy_coef H, with w = exp(log p_y -
    old_logprob), A the advantage, K = exp(d) - d - 1, d = ref_logprob - log p_y, H the row's entropy. old_logprob,
    advantage and ref_logprob: [...] like target, without gradients. The rest as linear_cross_entropy.
    """
    _check_head(hidden, weight, bias)
    inputs = {"hidden": hidden, "weight": weight}
    if bias is not None:
        inputs["bias"] = bias
    rows = {"old_logprob": old_logprob, "advantage": advantage}
    if kl_coef != 0.0:
        if ref_logprob is None:
            raise ValueError(f"ref_logprob: None with kl_coef {kl_coef}; must be [...] like target")
        rows["ref_logprob"] = ref_logprob
    more = [("rule", _abi.RULE["policy"]), ("clip_low", repr(float(clip_low))), ("clip_high", repr(float(clip_high)))]
    more += [("kl_coef", repr(float(kl_coef))), ("entropy_coef", repr(float(entropy_coef)))]
    return _cross_entropy(
        _abi.LINEAR,
        inputs,
        weight.shape[0],
        target,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        row_weight=row_weight,
        reduction=reduction,
        ignore_index=ignore_index,
        normalizer=normalizer,
        on_empty=on_empty,
        memory_budget=memory_budget,
        return_outputs=return_outputs,
        rows=rows,
        more=more,
    )


def distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    kind: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    target: Tensor | None = None,
    hard_share: float = 0.0,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
    row_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    normalizer: float | Tensor | None = None,
    on_empty: str = "nan",
    memory_budget: int | str | None = None,
    return_outputs: bool | Iterable[str] = False,
) -> Any:
    """Divergence of a student's head from a teacher's, both streamed; neither's logits are held (Hinton et al. 2015).

    Args:
        hidden, weight: student, X [..., H], W [V, H]. teacher_hidden, teacher_weight: [..., H'], [V, H'] of any H'; no
            gradient goes to the teacher.
        kind: "forward_kl" KL(q|p), "reverse_kl" KL(p|q), or "jsd": beta KL(q|mix) + (1 - beta) KL(p|mix), mix = beta q
            + (1 - beta) p; q the teacher's and p the student's softmax at `temperature`.
        temperature_squared: multiplies the divergence by temperature^2.
        target, hard_share: row loss = hard_share times the cross-entropy of target (at temperature 1) + the rest times
            the divergence. target alone marks ignored rows.
        The rest as linear_cross_entropy; softcap and logit_scale are the student's and the teacher's alike.
    """
    _check_head(hidden, weight, bias)
    same_rows = teacher_hidden.shape[:-1] == hidden.shape[:-1]
    if not same_rows or teacher_weight.dim() != 2 or len(teacher_weight) != len(weight):
        raise ValueError(
            f"teacher_hidden, teacher_weight: shapes {list(teacher_hidden.shape)}, {list(teacher_weight.shape)}; must "
            f"be {[*hidden.shape[:-1], 'H']} and [{weight.shape[0]}, H]"
        )
    inputs = {"hidden": hidden, "weight": weight}
    if bias is not None:
        inputs["bias"] = bias
    inputs["teacher_hidden"] = teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1])
    inputs["teacher_weight"] = teacher_weight.detach()
    if teacher_bias is not None:
        inputs["teacher_bias"] = teacher_bias.detach()
    more = [("targets", _abi.TARGETS["teacher"]), ("divergence", number_of("kind", kind, _abi.DIVERGENCE))]
    if kind == "jsd":
        more.append(("beta", repr(float(beta))))  # type: ignore[arg-type]
    return _cross_entropy(
        _abi.LINEAR,
        inputs,
        weight.shape[0],
        target,
        softcap=softcap,
        logit_scale=logit_scale,
        label_smoothing=label_smoothing,
        smoothing=smoothing,
        row_weight=row_weight,
        reduction=reduction,
        ignore_index=ignore_index,
        normalizer=normalizer,
        on_empty=on_empty,
        memory_budget=memory_budget,
        return_outputs=return_outputs,
        more=more + _distillation(temperature, temperature_squared, hard_share),
    )


def topk_distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    rest: str = "dropped",
    temperature: float = 1.0,
    temperature_squared: bool = False,
    target: Tensor | None = None,
    hard_share: float = 0.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    row_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    normalizer: float | Tensor | None = None,
    on_empty: str = "nan",
    memory_budget: int | str | None = None,
    return_outputs: bool | Iterable[str] = False,
) -> Any:
    """Forward KL from a teacher's stored top k: teacher_ids [..., k] distinct classes, teacher_logprobs [..., k].

    rest: the mass that the k leave over is "dropped", "renormalised" away or "spread" over the other classes. The
    other keywords are distillation_loss's.
    """
    _check_head(hidden, weight, bias)
    inputs = {"hidden": hidden, "weight": weight}
    if bias is not None:
        inputs["bias"] = bias
    inputs["topk_ids"] = _integers("teacher_ids", teacher_ids, (*hidden.shape[:-1], teacher_ids.shape[-1])).reshape(
        -1, teacher_ids.shape[-1]
    )
    inputs["topk_probs"] = _floats("teacher_logprobs", teacher_logprobs, teacher_ids.shape).reshape(
        -1, teacher_ids.shape[-1]
    )
    more = [("targets", _abi.TARGETS["topk"]), ("rest", number_of("rest", rest, _abi.REST))]
    return _cross_entropy(
        _abi.LINEAR,
        inputs,
        weight.shape[0],
        target,
        softcap=softcap,
        logit_scale=logit_scale,
        row_weight=row_weight,
        reduction=reduction,
        ignore_index=ignore_index,
        normalizer=normalizer,
        on_empty=on_empty,
        memory_budget=memory_budget,
        return_outputs=return_outputs,
        more=more + _distillation(temperature, temperature_squared, hard_share),
        declared=_abi.TOPK_LOG,
    )


def next_token_targets(
    ids: Tensor, *, cu_seqlens: Tensor | None = None, document_ids: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """targets[..., t] = ids[..., t + 1], ignore_index in the last row of each sequence; ids [..., T] integers.

    cu_seqlens [S + 1]: 0 and the ends of sequences packed in the flattened ids. document_ids [..., T]: a sequence ends
    where the number changes. What the shift keyword of the losses does.
    """
    if cu_seqlens is not None and document_ids is not None:
        raise ValueError("cu_seqlens, document_ids: both given; at most one may be")
    targets = torch.cat([ids[..., 1:], ids.new_full((*ids.shape[:-1], min(1, ids.shape[-1])), ignore_index)], -1)
    if document_ids is not None:
        if document_ids.shape != ids.shape:
            raise ValueError(f"document_ids: shape {list(document_ids.shape)}; must be {list(ids.shape)}")
        ends = document_ids[..., 1:] != document_ids[..., :-1]
        last = torch.ones_like(ends[..., :1]) if ids.shape[-1] > 1 else ends.new_ones(ids.shape)
        targets = targets.masked_fill(torch.cat([ends, last], -1)[..., : ids.shape[-1]], ignore_index)
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1:
            raise ValueError(f"cu_seqlens: shape {list(cu_seqlens.shape)}; must be [S + 1]")
        ends = cu_seqlens[1:].to(torch.int64) - 1
        # The end of an empty first sequence is no row; the very last row is ignored anyway.
        ends = torch.where(ends < 0, ids.numel() - 1, ends)
        targets = targets.reshape(-1).index_fill(0, ends, ignore_index).reshape(ids.shape)
    return targets


def pack_keep_mask(mask: Tensor) -> Tensor:
    """Bits of a bool mask [..., V], lowest first, in uint8 [..., ceil(V/8)]: the form that the library reads."""
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.shape[-1] % 8))
    bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    return (padded.reshape(*mask.shape[:-1], -1, 8) * bits).sum(-1, dtype=torch.uint8)


# ---- one road ------------------------------------------------------------------------------------------------------


def _cross_entropy(
    kind: int,
    inputs: dict[str, Tensor],
    vocab: int,
    target: Tensor | None,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    temperature: float | Tensor = 1.0,
    row_weight: Tensor | None = None,
    keep_mask: Tensor | None = None,
    logit_floor: Tensor | None = None,
    topk_probs: Tensor | None = None,
    rest: str = "dropped",
    shift: bool = False,
    cu_seqlens: Tensor | None = None,
    document_ids: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    return_outputs: bool | Iterable[str] = False,
    rows: dict[str, Tensor] | None = None,
    more: Sequence[tuple[str, Any]] = (),
    declared: int = 0,
    in_place: bool = False,
    saved_memory: int | str | None = None,
    quick: Hashable = None,
    **keywords: Any,
) -> Any:
    first = "hidden" if kind == _abi.LINEAR else "logits"
    given = [*inputs.values(), target]  # as the user gave them
    leading = inputs[first].shape[:-1]
    device = inputs[first].device
    if len(leading) != 1:
        inputs[first] = inputs[first].reshape(-1, inputs[first].shape[-1])
    if shift not in (False, True):
        raise ValueError(
            f"shift: {shift!r}; must be True (the target of row t is target[..., t + 1]) or False; targets that lie "
            "further ahead are shifted by the caller, or by logitless.integrations.cce"
        )
    extra = list(more)
    classes = True
    if target is not None:
        if shift or cu_seqlens is not None or document_ids is not None:
            if not shift:
                raise ValueError("cu_seqlens, document_ids: given without shift=True, which they belong to")
            target = next_token_targets(
                target,
                cu_seqlens=cu_seqlens,
                document_ids=document_ids,
                ignore_index=-100 if ignore_index is None else ignore_index,
            )
        if topk_probs is not None:
            k = topk_probs.shape[-1]
            inputs["topk_ids"] = _integers("target", target, (*leading, k)).reshape(-1, k)
            inputs["topk_probs"] = _floats("topk_probs", topk_probs, (*leading, k)).reshape(-1, k)
            extra += [("targets", _abi.TARGETS["topk"]), ("rest", number_of("rest", rest, _abi.REST))]
            classes = False
        elif target.is_floating_point():
            _same_shape("target", target, (*leading, vocab))
            if target.requires_grad:
                raise ValueError("target: soft targets that require a gradient; there is none, detach them")
            inputs["soft_targets"] = target.reshape(-1, vocab)
            extra.append(("targets", _abi.TARGETS["soft"]))
            classes = False
        else:
            target = _integers("target", target, leading)
            inputs["targets"] = target if len(leading) == 1 else target.reshape(-1)
    else:
        classes = False
    if weight is not None:
        inputs["class_weight"] = _floats("weight", weight, (vocab,))
    if row_weight is not None:
        inputs["row_weight"] = _floats("row_weight", row_weight, leading).reshape(-1)
    if isinstance(temperature, Tensor):
        inputs["row_temperature"] = _floats("temperature", temperature, leading, expand=True).reshape(-1)
        temperature = 1.0
    if logit_floor is not None:
        inputs["logit_floor"] = _floats("logit_floor", logit_floor, leading).reshape(-1)
    if keep_mask is not None:
        packed = pack_keep_mask(keep_mask) if keep_mask.dtype == torch.bool else keep_mask
        _same_shape("keep_mask", keep_mask, (*leading, vocab if keep_mask.dtype == torch.bool else (vocab + 7) // 8))
        inputs["keep_mask"] = packed.reshape(-1, packed.shape[-1])
    for name, value in (rows or {}).items():
        inputs[name] = _floats(name, value, leading).reshape(-1)
    if normalizer is not None:
        inputs["normalizer"] = _scalar(normalizer, device)
    outputs = ["row_loss" if reduction == "none" else "loss"]
    fields: list[str] = []
    if return_outputs is not False:
        fields = list(_abi.FIELDS) if return_outputs is True else list(return_outputs)
        if unknown := set(fields) - set(_abi.FIELDS) - {"loss"}:
            raise ValueError(f"return_outputs: {sorted(unknown)}; must be of {list(_abi.FIELDS)}")
        if not classes and not any(name == "hard_share" for name, _ in extra):
            fields = [name for name in fields if name not in _OF_A_CLASS]
        outputs += [_abi.FIELDS[name] for name in fields if name != "loss" and _abi.FIELDS[name] not in outputs]
    text = settings(reduction=reduction, ignore_index=ignore_index, temperature=temperature, more=extra, **keywords)
    for name, tensor in inputs.items():
        if tensor.device != device and name != "normalizer":
            raise RuntimeError(f"{name}: on {tensor.device}, {first} on {device}; all must be on one device")
        if hasattr(tensor, "placements"):
            raise TypeError(
                f"{name}: a DTensor that is still sharded; call the loss inside the forward of the module that owns "
                "the weight (logitless.LinearCrossEntropy), where FSDP2 gathers it, or give .full_tensor()"
            )
    found, recipe = _autograd.apply(
        kind,
        text,
        inputs,
        outputs,
        in_place=in_place,
        declared=declared,
        saved_bytes=bytes_of(saved_memory, "saved_memory"),
    )
    loss = found[outputs[0]]
    if quick is not None and recipe is not None and return_outputs is False:
        _remember(quick, recipe, list(inputs.values()), given)
    if reduction == "none":
        loss = loss.reshape(leading)
    if return_outputs is False:
        return loss
    shaped = {
        name: found[_abi.FIELDS[name]].reshape(() if name in _COUNTS else leading) for name in fields if name != "loss"
    }
    return Outputs(loss, **shaped)


# Recipes of calls that need nothing but their tensors as they are, by all that a recipe follows from.
_recipes: dict[Hashable, _autograd.Recipe] = {}
_RECIPES_KEPT = 64
_PLAIN_TYPES = frozenset((bool, int, float, str, type(None)))  # hashed by value; a tensor would be by identity
_TENSOR_TYPES = frozenset((Tensor, torch.nn.Parameter))


def _quick_key(tensors: tuple[Tensor, ...], keywords: tuple[Any, ...]) -> Hashable:
    """The key of such a call in _recipes; None where it may not be one."""
    if (
        not _autograd.plain_eager()
        or _autograd.in_forward_mode()
        or not _PLAIN_TYPES.issuperset(map(type, keywords))
        or not _TENSOR_TYPES.issuperset(map(type, tensors))
    ):
        return None
    key: list[Any] = [keywords, torch.get_num_threads(), torch.is_grad_enabled()]
    for tensor in tensors:
        key += (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad)
    return tuple(key)


def _remember(key: Hashable, recipe: _autograd.Recipe, used: list[Tensor], given: list[Tensor | None]) -> None:
    """Keeps a recipe whose call was checked and has run, where its operator reads the user's tensors themselves."""
    if len(used) != len(given) or any(a is not b for a, b in zip(used, given, strict=True)):
        return
    if len(_recipes) >= _RECIPES_KEPT:
        with contextlib.suppress(KeyError, StopIteration, RuntimeError):  # another thread was at it as well
            del _recipes[next(iter(_recipes))]
    _recipes[key] = recipe


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"input, linear_weight: shapes {list(hidden.shape)}, {list(weight.shape)}; must be [..., H] and [V, H]"
        )
    if bias is not None:
        _same_shape("linear_bias", bias, (weight.shape[0],))


def _same_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name}: shape {list(tensor.shape)}; must be {list(shape)}")


def _integers(name: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    _same_shape(name, tensor, shape)
    if tensor.dtype in (torch.int64, torch.int32):
        return tensor
    if tensor.dtype in (torch.int16, torch.int8, torch.uint8):
        return tensor.to(torch.int64)
    raise TypeError(f"{name}: {tensor.dtype}; must be an integer type")


def _floats(name: str, tensor: Tensor, shape: Sequence[int], expand: bool = False) -> Tensor:
    """float32, without a gradient of its own."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: requires a gradient, and there is none with respect to it; detach it")
    if expand and tensor.numel() == 1:
        tensor = tensor.expand(shape)
    _same_shape(name, tensor, shape)
    return tensor if tensor.dtype == torch.float32 else tensor.to(torch.float32)


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"normalizer: shape {list(value.shape)}; must be a number or a tensor of one")
        value = value.detach().reshape(())
        if value.is_cpu and device.type != "cpu":
            value = torch.full((), value.item(), dtype=torch.float64, device=device)
        return value if value.dtype in (torch.float32, torch.float64) else value.to(torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


def _distillation(temperature: float, squared: bool, hard_share: float) -> list[tuple[str, Any]]:
    more: list[tuple[str, Any]] = []
    if temperature != 1.0:
        more.append(("distill_temperature", repr(positive("temperature", temperature))))
    if squared:
        more.append(("temperature_squared", 1))
    if hard_share != 0.0:
        more.append(("hard_share", repr(float(hard_share))))
    return more
