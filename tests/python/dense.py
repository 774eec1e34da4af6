"""The losses written down with logits, in double precision, for autograd: what every test of the PyTorch face compares
with. Nothing of Logitless is used here."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def logits(
    x, w, b=None, *, softcap=None, logit_scale=1.0, temperature=1.0, keep_mask=None, logit_floor=None, target=None
):
    z = x.double() @ w.double().T
    if b is not None:
        z = z + b.double()
    return transformed(z, softcap, logit_scale, temperature, keep_mask, logit_floor, target)


def transformed(z, softcap=None, logit_scale=1.0, temperature=1.0, keep_mask=None, logit_floor=None, target=None):
    z = z.double() * logit_scale
    if softcap is not None:
        z = torch.where(torch.isneginf(z), z, softcap * torch.tanh(z / softcap))
    z = z / (temperature.double()[..., None] if isinstance(temperature, torch.Tensor) else temperature)
    keep = torch.ones_like(z, dtype=torch.bool)
    if keep_mask is not None:
        keep &= keep_mask
    if logit_floor is not None:
        keep &= z >= logit_floor.double()[..., None]
    if target is not None and not target.is_floating_point():
        safe = target.clamp(0, z.shape[-1] - 1)
        keep = keep | F.one_hot(safe, z.shape[-1]).bool()
    return z.masked_fill(~keep, -torch.inf)


def rows(
    z, target, *, weight=None, ignore_index=-100, label_smoothing=0.0, smoothing="uniform", z_loss=0.0, row_weight=None
):
    """Row losses, and each row's weight in the mean."""
    v = z.shape[-1]
    logp = torch.log_softmax(z, -1)
    kept = torch.ones(z.shape[:-1], dtype=torch.bool)
    alpha = label_smoothing * (v / (v - 1) if smoothing == "others" else 1.0)
    if target.is_floating_point():
        t = target.double() * (1 - alpha) + alpha / v
    else:
        kept = target != ignore_index
        t = F.one_hot(torch.where(kept, target, 0), v).double() * (1 - alpha)
        t = t + (alpha / v if alpha else 0.0)
    divisor = kept.double()
    if weight is not None:
        t = t * weight.double()
        if not target.is_floating_point():
            divisor = divisor * weight.double()[torch.where(kept, target, 0)]
    loss = -torch.where(t == 0, 0.0, t * logp).sum(-1)
    loss = loss + z_loss * torch.logsumexp(z, -1) ** 2
    loss = torch.where(kept, loss, 0.0)
    if row_weight is not None:
        loss = loss * row_weight.double()
    return loss, divisor


def loss(z, target, *, reduction="mean", normalizer=None, **options):
    each, divisor = rows(z, target, **options)
    if reduction == "none":
        return each
    if reduction == "sum":
        return each.sum()
    return each.sum() / (divisor.sum() if normalizer is None else float(normalizer))


def entropy(z):
    logp = torch.log_softmax(z, -1)
    return -(torch.where(torch.isneginf(logp), 0.0, logp.exp() * logp)).sum(-1)
