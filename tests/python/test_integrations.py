"""Faces shaped like verl's, Liger's and CCE's functions, against what those packages document, computed dense in PyTorch.

The packages themselves need GPUs; their argument orders are written out here as their sources have them. Every test
asserts by logitless.op_calls() that Logitless ran.
"""

from __future__ import annotations

import importlib.util
import inspect
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import logitless
import pytest
import torch
import torch.nn.functional as F
from logitless.integrations import cce, liger, verl
from torch import Tensor

R, H, V = 19, 24, 310


@pytest.fixture(autouse=True)
def _it_really_ran(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(5)
    before = sum(logitless.op_calls().values())
    yield
    ran = sum(logitless.op_calls().values()) - before
    assert (ran > 0) == ("refus" not in request.node.name and "argument_order" not in request.node.name)


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [R, H], weight [V, H], bias [V], all with gradients, and labels [R], three of them ignored."""
    hidden, weight, bias = torch.randn(R, H), torch.randn(V, H) * 0.5, torch.randn(V)
    labels = torch.randint(0, V, (R,))
    labels[::7] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


def assert_equal(found: Tensor, expected: Tensor, leaves: list[Tensor], upstream: Tensor | None = None) -> None:
    """Value and gradients; both sides are fp32 sums in different orders."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    upstream = torch.ones_like(expected) if upstream is None else upstream
    one = torch.autograd.grad(found, leaves, upstream.expand_as(found))
    other = torch.autograd.grad(expected, leaves, upstream)
    for ours, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def names(function: Any) -> list[str]:
    return [name for name, each in inspect.signature(function).parameters.items() if each.kind is not each.VAR_KEYWORD]


def test_argument_order_is_the_packages() -> None:
    assert names(verl.fused_linear_for_ppo) == "hidden weight labels temperature".split()
    assert names(verl.FusedLinearForPPO().forward) == "hidden_states vocab_weights input_ids temperature".split()
    assert names(verl.linear_cross_entropy) == "hidden weight labels temperature reduction dist_process_group".split()
    options = (
        "ce_weight ignore_index lse_square_scale label_smoothing reduction softcap return_z_loss accum_dtype "
        "use_token_scaling return_token_accuracy return_predicted_tokens"
    ).split()
    assert names(liger.liger_fused_linear_cross_entropy) == ["input", "weight", "target", "bias", *options]
    assert names(liger.LigerFusedLinearCrossEntropyLoss) == options
    assert names(liger.LigerFusedLinearCrossEntropyLoss().forward) == ["lin_weight", "_input", "target", "bias"]
    options = (
        "ignore_index softcap reduction shift filter_eps accum_e_fp32 accum_c_fp32 filter_e_grad filter_c_grad impl"
    ).split()
    assert names(cce.linear_cross_entropy) == ["e", "c", "targets", "bias", *options, "vocab_parallel_options"]
    assert names(cce.LinearCrossEntropy) == options
    assert names(cce.LinearCrossEntropy().forward) == ["e", "c", "targets", "bias"]


def test_names_in_adopt_md_exist_refusing_typos() -> None:
    page = pathlib.Path(__file__).parents[2] / "docs" / "adopt.md"
    if not page.exists():
        pytest.skip("the installed package is tested without its repository")
    text = page.read_text()
    named = set(re.findall(r"(?<![./\w])logitless\.(\w+)", text)) - {"integrations"}
    assert len(named) > 6 and all(hasattr(logitless, name) for name in named), named
    imports = re.findall(r"from (logitless\.integrations[.\w]*) import ([\w, ]+)", text)
    assert len(imports) > 4
    for module, names_of in imports:
        for name in names_of.split(","):
            if module == "logitless.integrations":
                importlib.util.find_spec(f"{module}.{name.strip()}")
            else:
                assert hasattr(importlib.import_module(module), name.strip()), (module, name)


# verl


def verl_dense(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = F.log_softmax(hidden @ weight.T / temperature, -1)
    return log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("face", ["function", "module", "kernel"])
def test_verl(face: str) -> None:
    hidden, weight, _, _ = data()
    labels = torch.randint(0, V, (R,))
    call = {
        "function": verl.fused_linear_for_ppo,
        "module": verl.FusedLinearForPPO(chunk_size=8),
        "kernel": verl.linear_cross_entropy,
    }[face]
    log_probs, entropy = call(hidden, weight, labels, 0.7)
    expected_log_probs, expected_entropy = verl_dense(hidden, weight, labels, 0.7)
    assert log_probs.dtype == entropy.dtype == torch.float32
    # One backward of a loss of both, each row with another upstream gradient.
    old, advantage = expected_log_probs.detach() - 0.1, torch.randn(R)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-6)
    assert_equal(
        ((log_probs - old).exp() * advantage + 0.01 * entropy).sum(),
        ((expected_log_probs - old).exp() * advantage + 0.01 * expected_entropy).sum(),
        [hidden, weight],
    )
    assert_equal(call(hidden, weight, labels)[0], verl_dense(hidden, weight, labels, 1.0)[0], [hidden, weight])


def test_verl_batches_and_sixteen_bits() -> None:
    hidden = torch.randn(2, 5, H).bfloat16()
    weight = (torch.randn(V, H) * 0.5).bfloat16()
    labels = torch.randint(0, V, (2, 5))
    log_probs, entropy = verl.FusedLinearForPPO()(hidden, weight, labels, temperature=2.0)
    expected = verl_dense(hidden.float(), weight.float(), labels, 2.0)
    torch.testing.assert_close(log_probs, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected[1], rtol=1e-5, atol=1e-5)
    assert verl.linear_cross_entropy(hidden, weight, labels)[0].shape == (10,)  # flattened, as verl's kernel


def test_verl_refusals() -> None:
    hidden, weight, _, labels = data()
    with pytest.raises(NotImplementedError, match="dist_process_group"):
        verl.linear_cross_entropy(hidden, weight, labels, 1.0, "none", object())
    with pytest.raises(ValueError, match="reduction: 'mean'"):
        verl.linear_cross_entropy(hidden, weight, labels, 1.0, "mean")


# Liger


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_liger_equals_cross_entropy(reduction: str, with_bias: bool) -> None:
    hidden, weight, bias, labels = data()
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    class_weight = torch.rand(V) + 0.5
    for ce_weight, smoothing, softcap in ((None, 0.0, None), (class_weight, 0.1, 5.0)):
        logits = F.linear(hidden, weight, bias if with_bias else None)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        expected = F.cross_entropy(logits, labels, ce_weight, reduction=reduction, label_smoothing=smoothing)
        upstream = torch.randn(R) if reduction == "none" else torch.tensor(3.0)
        found = liger.liger_fused_linear_cross_entropy(
            hidden, weight, labels, bias if with_bias else None, ce_weight, -100, 0.0, smoothing, reduction, softcap
        )
        assert_equal(found, expected, leaves, upstream)
        module = liger.LigerFusedLinearCrossEntropyLoss(ce_weight, -100, 0.0, smoothing, reduction, softcap)
        assert torch.equal(module(weight, hidden, labels, bias if with_bias else None), found)


def test_liger_extras() -> None:
    hidden, weight, bias, labels = data()
    labels[1:4] = (hidden[1:4] @ weight.T + bias).argmax(-1).detach()
    logits = F.linear(hidden, weight, bias)
    kept = labels != -100
    z_rows = 1e-2 * logits.logsumexp(-1).square() * kept
    right = (logits.argmax(-1) == labels) & kept
    for reduction in ("mean", "sum", "none"):
        found = liger.liger_fused_linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias,
            lse_square_scale=1e-2,
            reduction=reduction,
            return_z_loss=True,
            return_token_accuracy=True,
            return_predicted_tokens=True,
        )
        z_loss = {"mean": z_rows.sum() / kept.sum(), "sum": z_rows.sum(), "none": z_rows}[reduction]
        assert_equal(found.loss, F.cross_entropy(logits, labels, reduction=reduction) + z_loss, [hidden, weight, bias])
        logits = F.linear(hidden, weight, bias)
        z_rows = 1e-2 * logits.logsumexp(-1).square() * kept
        torch.testing.assert_close(found.z_loss, z_loss.detach())
        accuracy = right.float() if reduction == "none" else right.sum() / kept.sum()
        torch.testing.assert_close(found.token_accuracy, accuracy)
        assert found.predicted_tokens.tolist() == logits.argmax(-1).where(kept, torch.tensor(-1)).tolist()
    assert isinstance(found, liger.CrossEntropyOutput) and 0 < right.sum() < kept.sum()


def test_liger_token_scaling() -> None:
    hidden, weight, bias, labels = data()
    log_p = -F.cross_entropy(F.linear(hidden, weight, bias), labels, reduction="none")
    expected = (-log_p * log_p.detach().exp() * (labels != -100)).sum() / (labels != -100).sum()
    found = liger.liger_fused_linear_cross_entropy(hidden, weight, labels, bias, use_token_scaling=True)
    assert_equal(found, expected, [hidden, weight, bias])


def test_liger_without_labels_is_zero_with_gradients() -> None:
    hidden, weight, _, labels = data()
    loss = liger.liger_fused_linear_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert float(loss.detach()) == 0.0 and float(hidden.grad.abs().max()) == float(weight.grad.abs().max()) == 0.0


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_liger_jsd(beta: float) -> None:
    hidden, weight, _, labels = data()
    teacher_hidden, teacher_weight = torch.randn(R, 2 * H), torch.randn(V, 2 * H) * 0.3
    log_q = F.log_softmax(teacher_hidden @ teacher_weight.T / 2.0, -1)
    log_p = F.log_softmax(hidden @ weight.T / 2.0, -1)

    def divergence(one: Tensor, two: Tensor) -> Tensor:
        return (one.exp() * (one - two)).sum(-1)

    if beta == 0.0:
        rows = divergence(log_q, log_p)
    elif beta == 1.0:
        rows = divergence(log_p, log_q)
    else:
        mix = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
        rows = beta * divergence(log_q, mix) + (1 - beta) * divergence(log_p, mix)
    kept = labels != -100
    found = liger.liger_fused_linear_jsd(hidden, weight, teacher_hidden, teacher_weight, labels, beta, -100, 2.0)
    assert_equal(found, (rows * kept).sum() / kept.sum(), [hidden, weight])
    everything = liger.liger_fused_linear_jsd(hidden, weight, teacher_hidden, teacher_weight, None, beta, -100, 2.0)
    torch.testing.assert_close(everything.detach(), rows.detach().mean(), rtol=1e-5, atol=1e-6)


# Cut Cross-Entropy


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shift", [0, False, 1, True, 3])
def test_cce(reduction: str, shift: int) -> None:
    e = torch.randn(2, 9, H, requires_grad=True)
    c, bias = (torch.randn(V, H) * 0.5).requires_grad_(), torch.randn(V, requires_grad=True)
    targets = torch.randint(0, V, (2, 9))
    targets[0, 2:5] = -100
    length = 9 - int(shift)
    for softcap in (None, 5.0):
        logits = F.linear(e[:, :length], c, bias)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        expected = F.cross_entropy(logits.flatten(0, 1), targets[:, int(shift) :].flatten(), reduction=reduction)
        expected = expected.view(2, length) if reduction == "none" else expected
        found = cce.linear_cross_entropy(e, c, targets, bias, -100, softcap, reduction, shift)
        assert found.shape == expected.shape and found.dtype == torch.float32
        upstream = torch.randn(expected.shape)
        assert_equal(found, expected, [e, c, bias], upstream)
        module = cce.LinearCrossEntropy(softcap=softcap, reduction=reduction, shift=shift)
        assert torch.equal(module(e, c, targets, bias), found)


def test_cce_filter_is_exact_unless_a_power_of_two_is_given() -> None:
    hidden, weight, _, labels = data()

    def gradient(**options: Any) -> Tensor:
        return torch.autograd.grad(
            cce.linear_cross_entropy(hidden, weight, labels, reduction="sum", **options), weight
        )[0]

    exact = gradient(filter_eps=None)
    assert torch.equal(exact, gradient()) and torch.equal(
        exact, gradient(filter_eps=2.0**-6, filter_e_grad=False, filter_c_grad=False)
    )
    filtered = gradient(filter_eps=2.0**-6)
    assert not torch.equal(exact, filtered)
    many = torch.stack([gradient(filter_eps=2.0**-6, filter_seed=seed) for seed in range(64)])
    # Unbiased: over 64 seeds the mean's error falls to an eighth of one seed's.
    assert float((many.mean(0) - exact).norm()) < 0.25 * float((filtered - exact).norm())


def test_cce_without_labels_is_nan_as_there() -> None:
    hidden, weight, _, labels = data()
    nothing = torch.full_like(labels, -100)
    assert torch.isnan(cce.linear_cross_entropy(hidden, weight, nothing))
    assert float(cce.linear_cross_entropy(hidden, weight, nothing, on_empty="zero").detach()) == 0.0


def test_cce_refusals() -> None:
    hidden, weight, _, labels = data()
    with pytest.raises(NotImplementedError, match="vocab_parallel_options"):
        cce.linear_cross_entropy(hidden, weight, labels, vocab_parallel_options=object())
    with pytest.raises(ValueError, match="filter_e_grad, filter_c_grad: True, False"):
        cce.linear_cross_entropy(hidden, weight, labels, filter_c_grad=False)
    with pytest.raises(ValueError, match="filter_eps: 'high'"):
        cce.linear_cross_entropy(hidden, weight, labels, filter_eps="high")
    with pytest.raises(ValueError, match="filter"):
        cce.linear_cross_entropy(hidden, weight, labels, filter_eps=3e-4)
    for shift in (-1, R):
        with pytest.raises(ValueError, match="shift"):
            cce.linear_cross_entropy(hidden, weight, labels, shift=shift)
