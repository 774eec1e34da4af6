"""Calls that were checked once and are then known by their keywords and their tensors' metadata: whatever differs goes
the long way, and what was refused stays refused."""

import threading

import pytest
import torch
from conftest import Problem, assert_near, gradients
from logitless.pytorch import _functions
from torch.autograd import forward_ad
from torch.nn import functional as F

import logitless

linear = logitless.linear_cross_entropy


@pytest.fixture
def p():
    _functions._recipes.clear()
    found = Problem()
    for _ in range(2):  # the second one is answered from memory
        linear(found.x, found.w, found.y)
    assert len(_functions._recipes) == 1
    return found


def dense(p, **keywords):
    return F.cross_entropy(F.linear(p.x.double(), p.w.double()), p.y.long(), **keywords)


def test_same_bits_and_gradients(p):
    _functions._recipes.clear()
    first = linear(p.x, p.w, p.y, label_smoothing=0.1)
    of_first = gradients(first, p.leaves(), retain_graph=True)
    again = linear(p.x, p.w, p.y, label_smoothing=0.1)
    assert torch.equal(first, again)
    for a, b in zip(of_first, gradients(again, p.leaves()), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(gradients(dense(p, label_smoothing=0.1), p.leaves()), of_first, strict=True):
        assert_near(b, a, torch.float32)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_each_keyword_counts(p, reduction):
    for alpha in (0.0, 0.25, 0.0):
        for _ in range(2):
            ours = linear(p.x, p.w, p.y, label_smoothing=alpha, reduction=reduction)
            assert_near(ours, dense(p, label_smoothing=alpha, reduction=reduction), torch.float32)
    z = F.linear(p.x, p.w).detach().requires_grad_()
    for _ in range(2):
        ours, theirs = (f(z, p.y, reduction=reduction).sum() for f in (logitless.cross_entropy, F.cross_entropy))
        assert_near(ours, theirs, torch.float32)
        assert_near(gradients(ours, [z])[0], gradients(theirs, [z])[0], torch.float32)


def test_values_that_change_under_one_name_are_read(p):
    cap = torch.tensor(1.0)
    small = [linear(p.x, p.w, p.y, softcap=cap).item() for _ in range(2)]
    cap.fill_(30.0)
    large = linear(p.x, p.w, p.y, softcap=cap).item()
    assert small[0] == small[1] != large
    temperature = torch.ones(23)
    one = [linear(p.x, p.w, p.y, temperature=temperature).item() for _ in range(2)]
    temperature.fill_(2.0)
    assert one[0] == one[1] != linear(p.x, p.w, p.y, temperature=temperature).item()


def test_needs_of_gradients_count(p):
    with torch.no_grad():
        assert linear(p.x, p.w, p.y).grad_fn is None
    assert linear(p.x, p.w, p.y).grad_fn is not None
    for x, w in ((p.x, p.w.detach()), (p.x.detach(), p.w), (p.x.detach(), p.w.detach())):
        for _ in range(2):
            loss = linear(x, w, p.y)
            leaves = [leaf for leaf in (x, w) if leaf.requires_grad]
            assert (loss.grad_fn is None) == (not leaves)
            for a, b in zip(gradients(loss, leaves) if leaves else (), gradients(dense(p), leaves) if leaves else ()):
                assert_near(a, b, torch.float32)
    # One leaf of two: what was made early for both does not fit.
    loss = linear(p.x, p.w, p.y)
    assert_near(gradients(loss, [p.w], retain_graph=True)[0], gradients(dense(p), [p.w])[0], torch.float32)
    for a, b in zip(gradients(loss, p.leaves()), gradients(dense(p), p.leaves()), strict=True):
        assert_near(a, b, torch.float32)


def test_what_is_refused_stays_refused(p):
    with pytest.raises(ValueError, match="linear_weight"):
        linear(p.x[:, :-1], p.w, p.y)
    with pytest.raises(ValueError, match="target: shape"):
        linear(p.x, p.w, p.y[:-1])
    with pytest.raises(ValueError, match="options"):
        linear(p.x, p.w, p.y, options=1)
    with pytest.raises(TypeError, match="target"):
        linear(p.x, p.w, p.y > 3)
    with pytest.raises(IndexError, match="101"):
        linear(p.x, p.w, torch.full_like(p.y, 101))
    with pytest.raises(RuntimeError, match="device"):
        linear(p.x, p.w.to("meta"), p.y)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(lambda x: linear(x, p.w, p.y))(p.x[None])
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        linear(forward_ad.make_dual(p.x.detach(), p.x.detach()), p.w, p.y)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        linear(p.x, p.w, p.y).backward(create_graph=True)
        p.x.grad.sum().backward()


def test_transforms_after_a_plain_call(p):
    found = torch.func.grad(lambda x: linear(x, p.w.detach(), p.y))(p.x.detach())
    assert_near(found, gradients(dense(p), [p.x])[0], torch.float32)


def test_a_default_device_is_not_the_tensors_device(p):
    """torch.set_default_device must not decide where outputs of CPU tensors lie."""
    with torch.device("meta"):
        for keywords in ({}, {"return_outputs": True}, {"reduction": "none"}):
            found = linear(p.x, p.w, p.y, **keywords)
            assert (found.loss if keywords.get("return_outputs") else found).device.type == "cpu"
        loss = linear(p.x, p.w, p.y)
        for found in gradients(loss, p.leaves()):
            assert found.device.type == "cpu"


def test_memory_is_bounded(p):
    for rows in range(1, 23):
        for alpha in range(5):
            linear(p.x[:rows], p.w, p.y[:rows], label_smoothing=alpha / 8, reduction="sum")
    assert len(_functions._recipes) <= _functions._RECIPES_KEPT


def test_threads_share_plans_and_get_their_own_answers(p):
    """Four threads call and differentiate on tensors of one shape: a plan, its structs and its workspace may serve one of
    them at a time."""
    problems = []
    for _ in range(4):
        each = Problem()
        loss = linear(each.x, each.w, each.y)
        problems.append((each, loss.detach().clone(), [g.clone() for g in gradients(loss, each.leaves())]))
    wrong, barrier = [], threading.Barrier(4)

    def work(each, loss, wanted):
        barrier.wait()
        for _ in range(150):
            found = linear(each.x, each.w, each.y)
            made = gradients(found, each.leaves())
            if not torch.equal(found, loss) or not all(map(torch.equal, made, wanted)):
                wrong.append(found)

    threads = [threading.Thread(target=work, args=each) for each in problems]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
