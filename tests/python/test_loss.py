"""Losses and gradients against logits in double: options, dtypes, reductions, upstream gradients."""

import dense
import pytest
import torch
from conftest import Problem, assert_near, gradients
from torch.nn import functional as F

import logitless

OPTIONS = {
    "plain": {},
    "uniform": {"label_smoothing": 0.1},
    "all mass smoothed": {"label_smoothing": 1.0},
    "others": {"label_smoothing": 0.2, "smoothing": "others"},
    "z_loss": {"z_loss": 1e-3},
    "softcap": {"softcap": 5.0},
    "scale": {"logit_scale": 0.25},
    "temperature": {"temperature": 1.7},
    "rows' temperatures": {"temperature": lambda p: torch.rand(p.y.shape) + 0.5},
    "class weights": {"weight": lambda p: torch.rand(p.w.shape[0])},
    "weights and smoothing": {"weight": lambda p: torch.rand(p.w.shape[0]), "label_smoothing": 0.3},
    "row weights": {"row_weight": lambda p: torch.randn(p.y.shape)},
    "normalizer": {"normalizer": 17.5},
    "normalizer tensor": {"normalizer": lambda p: torch.tensor(9)},
    "keep mask": {"keep_mask": lambda p: torch.rand(*p.y.shape, p.w.shape[0]) < 0.5},
    "floor": {"logit_floor": lambda p: torch.zeros(p.y.shape)},
    "mixture": {
        "softcap": 8.0,
        "logit_scale": 2.0,
        "temperature": 0.7,
        "label_smoothing": 0.1,
        "z_loss": 1e-2,
        "row_weight": lambda p: torch.rand(p.y.shape),
    },
    "budget": {"memory_budget": "320KiB"},
}
HEAD = ("softcap", "logit_scale", "temperature", "keep_mask", "logit_floor")


def resolved(options, problem):
    return {name: value(problem) if callable(value) else value for name, value in options.items()}


def dense_loss(p, options, target=None, **more):
    target = p.y if target is None else target
    head = {name: value for name, value in options.items() if name in HEAD}
    rest = {name: value for name, value in options.items() if name not in HEAD and name != "memory_budget"}
    return dense.loss(dense.logits(p.x, p.w, p.b, target=target, **head), target, **rest, **more)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_options(name, reduction):
    p = Problem(bias=True)
    options = resolved(OPTIONS[name], p)
    if "normalizer" in options and reduction != "mean":
        with pytest.raises(ValueError, match="normalizer"):
            logitless.linear_cross_entropy(p.x, p.w, p.y, linear_bias=p.b, reduction=reduction, **options)
        return
    loss = logitless.linear_cross_entropy(p.x, p.w, p.y, linear_bias=p.b, reduction=reduction, **options)
    wanted = dense_loss(p, options, reduction=reduction)
    assert_near(loss, wanted, torch.float32, what="loss")
    upstream = torch.randn(wanted.shape)
    for ours, theirs in zip(
        gradients(loss, p.leaves(), upstream), gradients(wanted, p.leaves(), upstream.double()), strict=True
    ):
        assert_near(ours, theirs, torch.float32, what="gradient")


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "budget"])
def test_logits_options(name):
    p = Problem()
    z = torch.randn(23, 101, requires_grad=True)
    options = resolved(OPTIONS[name], p)
    loss = logitless.cross_entropy(z, p.y, **options)
    head = {name: value for name, value in options.items() if name in HEAD}
    rest = {name: value for name, value in options.items() if name not in HEAD}
    wanted = dense.loss(dense.transformed(z, target=p.y, **head), p.y, **rest)
    assert_near(loss, wanted, torch.float32)
    assert_near(*[gradients(each * -2.5, [z])[0] for each in (loss, wanted)], torch.float32)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.bfloat16, torch.float32),
        (torch.float64, None),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_dtypes(dtype, weight_dtype, reduction):
    p = Problem(dtype=dtype, weight_dtype=weight_dtype, rows=67, hidden=48, vocab=1009)
    loss = logitless.linear_cross_entropy(p.x, p.w, p.y, reduction=reduction)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 and reduction == "mean" else torch.float32)
    wanted = dense_loss(p, {}, reduction=reduction)
    assert_near(loss, wanted, torch.float32)
    upstream = torch.randn(wanted.shape)
    ours = gradients(loss, p.leaves(), upstream.to(loss.dtype))
    for mine, theirs, leaf in zip(ours, gradients(wanted, p.leaves(), upstream.double()), p.leaves(), strict=True):
        assert mine.dtype == leaf.dtype
        assert_near(mine, theirs, dtype, what="gradient")


def test_double_passes_gradcheck():
    p = Problem(rows=5, hidden=3, vocab=7, dtype=torch.float64, bias=True)
    assert torch.autograd.gradcheck(
        lambda x, w, b: logitless.linear_cross_entropy(
            x, w, p.y, linear_bias=b, softcap=4.0, label_smoothing=0.1, z_loss=0.1
        ),
        p.leaves(),
    )
    z = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: logitless.cross_entropy(z, p.y, reduction="sum"), [z])


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 1, 3), (0,), (1,), (2, 0)])
def test_shapes(shape):
    p = Problem(shape=shape, ignored=False)
    loss = logitless.linear_cross_entropy(p.x, p.w, p.y, reduction="none")
    assert loss.shape == shape
    assert_near(loss, dense_loss(p, {}, reduction="none"), torch.float32)
    gx, gw = gradients(loss.sum(), [p.x, p.w])
    assert gx.shape == p.x.shape
    assert gw.shape == p.w.shape


def test_soft_targets():
    p = Problem(ignored=False)
    s = torch.softmax(torch.randn(23, 101), -1)
    for reduction in ("mean", "sum", "none"):
        ours = logitless.linear_cross_entropy(p.x, p.w, s, reduction=reduction, label_smoothing=0.1)
        theirs = F.cross_entropy(p.x.double() @ p.w.double().T, s.double(), reduction=reduction, label_smoothing=0.1)
        assert_near(ours, theirs, torch.float32)
        for mine, other in zip(gradients(ours.sum(), [p.x, p.w]), gradients(theirs.sum(), [p.x, p.w]), strict=True):
            assert_near(mine, other, torch.float32)


@pytest.mark.parametrize("rest", ["dropped", "renormalised", "spread"])
def test_topk_targets(rest):
    p = Problem(ignored=False)
    ids = torch.rand(23, 101).topk(4).indices
    probs = torch.rand(23, 4) / 5
    dense_target = torch.zeros(23, 101).scatter(1, ids, probs)
    if rest == "renormalised":
        dense_target /= dense_target.sum(-1, keepdim=True)
    if rest == "spread":
        dense_target += (dense_target == 0) * (1 - dense_target.sum(-1, keepdim=True)) / 97
    ours = logitless.linear_cross_entropy(p.x, p.w, ids, topk_probs=probs, rest=rest)
    theirs = dense_loss(p, {}, dense_target)
    assert_near(ours, theirs, torch.float32)
    for mine, other in zip(gradients(ours, [p.x, p.w]), gradients(theirs, [p.x, p.w]), strict=True):
        assert_near(mine, other, torch.float32)


def divergence(kind, p, q, beta=0.5):
    """Rows; p student, q teacher, as log-probabilities."""
    kl = lambda a, b: (a.exp() * (a - b)).sum(-1)
    if kind == "forward_kl":
        return kl(q, p)
    if kind == "reverse_kl":
        return kl(p, q)
    mix = torch.logaddexp(q + torch.tensor(beta).log(), p + torch.tensor(1 - beta).log())
    return beta * kl(q, mix) + (1 - beta) * kl(p, mix)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("hard_share", [0.0, 0.3])
def test_distillation(kind, hard_share):
    p = Problem(ignored=False)
    th, tw = torch.randn(23, 31), torch.randn(101, 31) * 0.2
    options = {"temperature": 2.0, "temperature_squared": True, "hard_share": hard_share, "beta": 0.3}
    ours = logitless.distillation_loss(p.x, p.w, th, tw, kind=kind, target=p.y if hard_share else None, **options)
    z = dense.logits(p.x, p.w)
    kd = (
        divergence(
            kind, torch.log_softmax(z / 2, -1), torch.log_softmax(th.double() @ tw.double().T / 2, -1), 0.3
        ).mean()
        * 4
    )
    theirs = hard_share * F.cross_entropy(z, p.y) + (1 - hard_share) * kd
    assert_near(ours, theirs, torch.float32)
    for mine, other in zip(gradients(ours * 3, [p.x, p.w]), gradients(theirs * 3, [p.x, p.w]), strict=True):
        assert_near(mine, other, torch.float32, factor=256)


def test_topk_distillation():
    p = Problem(ignored=False)
    q = torch.log_softmax(torch.randn(23, 101), -1)
    top = q.topk(101)
    ours = logitless.topk_distillation_loss(p.x, p.w, top.indices, top.values)
    theirs = divergence("forward_kl", torch.log_softmax(dense.logits(p.x, p.w), -1), q.double()).mean()
    assert_near(ours, theirs, torch.float32)
    for mine, other in zip(gradients(ours, [p.x, p.w]), gradients(theirs, [p.x, p.w]), strict=True):
        assert_near(mine, other, torch.float32)


def test_policy_loss():
    p = Problem()
    with torch.no_grad():
        logp = torch.log_softmax(dense.logits(p.x, p.w), -1).gather(1, p.y.clamp(0)[:, None])[:, 0]
    old, ref, advantage = (
        (logp + torch.randn(23) * 0.3).float(),
        (logp + torch.randn(23) * 0.2).float(),
        torch.randn(23),
    )
    ours = logitless.policy_loss(
        p.x, p.w, p.y, old, advantage, clip_low=0.1, clip_high=0.3, ref_logprob=ref, kl_coef=0.05, entropy_coef=0.01
    )
    z = dense.logits(p.x, p.w)
    lp = torch.log_softmax(z, -1).gather(1, p.y.clamp(0)[:, None])[:, 0]
    w, d = (lp - old.double()).exp(), ref.double() - lp
    rows = (
        -torch.minimum(w * advantage, w.clamp(0.9, 1.3) * advantage)
        + 0.05 * (d.exp() - d - 1)
        - 0.01 * dense.entropy(z)
    )
    kept = p.y != -100
    theirs = rows[kept].mean()
    assert_near(ours, theirs, torch.float32)
    for mine, other in zip(gradients(ours, [p.x, p.w]), gradients(theirs, [p.x, p.w]), strict=True):
        assert_near(mine, other, torch.float32)
    with pytest.raises(ValueError, match="ref_logprob"):
        logitless.policy_loss(p.x, p.w, p.y, old, advantage, kl_coef=0.1)


def test_token_logprobs():
    p = Problem(shape=(2, 7))
    logprob, entropy = logitless.token_logprobs(p.x, p.w, p.y, temperature=0.8, return_entropy=True)
    z = dense.logits(p.x, p.w, temperature=0.8)
    kept = p.y != -100
    wanted = torch.where(kept, torch.log_softmax(z, -1).gather(-1, p.y.clamp(0)[..., None])[..., 0], 0.0)
    wanted_entropy = torch.where(kept, dense.entropy(z), 0.0)
    assert_near(logprob, wanted, torch.float32)
    assert_near(entropy, wanted_entropy, torch.float32)
    a, b = torch.randn(2, 7), torch.randn(2, 7)
    ours = gradients((logprob * a + entropy * b).sum(), [p.x, p.w])
    theirs = gradients((wanted * a + wanted_entropy * b).sum(), [p.x, p.w])
    for mine, other in zip(ours, theirs, strict=True):
        assert_near(mine, other, torch.float32)
    only = logitless.token_logprobs(p.x, p.w, p.y, temperature=0.8)
    assert torch.equal(only, logprob)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_outputs_and_their_gradients(reduction):
    p = Problem()
    found = logitless.linear_cross_entropy(p.x, p.w, p.y, reduction=reduction, z_loss=0.01, return_outputs=True)
    z = dense.logits(p.x, p.w)
    kept = p.y != -100
    logp = torch.log_softmax(z, -1)
    zero = lambda rows: torch.where(kept, rows, torch.zeros_like(rows))
    wanted = {
        "loss": dense.loss(z, p.y, z_loss=0.01, reduction=reduction),
        "row_loss": dense.rows(z, p.y, z_loss=0.01)[0],
        "lse": zero(torch.logsumexp(z, -1)),
        "logprob": zero(logp.gather(1, p.y.clamp(0)[:, None])[:, 0]),
        "entropy": zero(dense.entropy(z)),
        "z_loss": zero(0.01 * torch.logsumexp(z, -1) ** 2),
        "mean_logit": zero(z.mean(-1)),
        "log_sum_p2": zero(torch.logsumexp(2 * logp, -1)),
    }
    for name, value in wanted.items():
        assert_near(getattr(found, name), value, torch.float32, what=name)
    argmax = torch.where(kept, z.argmax(-1), -1)
    assert torch.equal(found.argmax, argmax)
    assert torch.equal(found.correct, kept & (argmax == p.y))
    assert found.kept.item() == kept.sum().item()
    assert found.correct_rows.item() == found.correct.sum().item()
    assert found.bad_rows.item() == 0
    for names in (["loss"], ["lse"], ["logprob", "entropy"], ["loss", "row_loss", "lse", "logprob", "entropy"]):
        upstream = {name: torch.randn(wanted[name].shape) for name in names}
        ours = gradients(sum((getattr(found, n) * u).sum() for n, u in upstream.items()), [p.x, p.w], retain_graph=True)
        theirs = gradients(sum((wanted[n] * u).sum() for n, u in upstream.items()), [p.x, p.w], retain_graph=True)
        for mine, other in zip(ours, theirs, strict=True):
            assert_near(mine, other, torch.float32, what=str(names))
    for name in ("argmax", "correct", "z_loss", "mean_logit", "log_sum_p2", "kept"):
        assert not getattr(found, name).requires_grad
    some = logitless.linear_cross_entropy(p.x, p.w, p.y, return_outputs=("lse",))
    assert some.lse is not None
    assert some.entropy is None


@pytest.mark.parametrize("on_empty", ["nan", "zero", "error"])
def test_all_rows_ignored(on_empty):
    p = Problem(ignored=False)
    p.y.fill_(-100)
    run = lambda: logitless.linear_cross_entropy(p.x, p.w, p.y, on_empty=on_empty)
    if on_empty == "error":
        with pytest.raises(ValueError, match="kept"):
            run()
        return
    loss = run()
    assert loss.requires_grad
    gx, gw = gradients(loss, [p.x, p.w])
    if on_empty == "zero":
        assert loss.item() == 0
        assert not gx.any()
        assert not gw.any()
    else:  # as PyTorch: NaN is the loss; ignored rows have no gradient
        assert loss.isnan()
        reference = F.cross_entropy(p.x @ p.w.T, p.y)
        assert reference.isnan()


def test_shift_and_packing():
    p = Problem(shape=(2, 9), ignored=False)
    wanted = F.cross_entropy((p.x.double() @ p.w.double().T)[:, :-1].reshape(-1, 101), p.y[:, 1:].reshape(-1))
    assert_near(logitless.linear_cross_entropy(p.x, p.w, p.y, shift=True), wanted, torch.float32)
    ids = torch.arange(9)
    assert logitless.next_token_targets(ids, cu_seqlens=torch.tensor([0, 4, 9])).tolist() == [
        1,
        2,
        3,
        -100,
        5,
        6,
        7,
        8,
        -100,
    ]
    assert logitless.next_token_targets(ids, cu_seqlens=torch.tensor([0, 0, 4, 4, 9], dtype=torch.int32)).tolist() == [
        1,
        2,
        3,
        -100,
        5,
        6,
        7,
        8,
        -100,
    ]
    documents = torch.tensor([3, 3, 3, 3, 1, 1, 1, 1, 1])
    assert logitless.next_token_targets(ids, document_ids=documents).tolist() == [1, 2, 3, -100, 5, 6, 7, 8, -100]
    assert logitless.next_token_targets(ids[:1]).tolist() == [-100]
    assert logitless.next_token_targets(ids[:0]).tolist() == []
    with pytest.raises(ValueError, match="both given"):
        logitless.next_token_targets(ids, cu_seqlens=documents, document_ids=documents)
    packed = logitless.linear_cross_entropy(p.x, p.w, p.y, shift=True, cu_seqlens=torch.tensor([0, 4, 9, 18]))
    y = p.y.reshape(-1).roll(-1)
    y[[3, 8, 17]] = -100
    assert_near(packed, F.cross_entropy(p.x.reshape(-1, 19).double() @ p.w.double().T, y), torch.float32)


def test_filter_is_unbiased_and_seeded():
    p = Problem(rows=64, vocab=997)
    exact = gradients(logitless.linear_cross_entropy(p.x, p.w, p.y), [p.w])[0]
    draw = lambda seed: gradients(
        logitless.linear_cross_entropy(p.x, p.w, p.y, filter_eps=2.0**-6, filter_seed=seed), [p.w]
    )[0]
    assert torch.equal(draw(5), draw(5))
    assert not torch.equal(draw(5), draw(6))
    mean = torch.stack([draw(seed) for seed in range(200)]).mean(0)
    assert (mean - exact).norm() < 0.3 * (draw(0) - exact).norm()


def test_targets_of_other_types():
    p = Problem(vocab=97, ignored=False)
    wanted = logitless.linear_cross_entropy(p.x, p.w, p.y)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(logitless.linear_cross_entropy(p.x, p.w, p.y.to(dtype)), wanted)


def test_refusals():
    p = Problem()
    lce = logitless.linear_cross_entropy
    cases = [
        (ValueError, "options: not taken; say memory_budget", lambda: lce(p.x, p.w, p.y, options=object())),
        (
            ValueError,
            "reduction: 'avg'; must be one of 'mean', 'sum', 'none'",
            lambda: lce(p.x, p.w, p.y, reduction="avg"),
        ),
        (ValueError, "label_smoothing: 2", lambda: lce(p.x, p.w, p.y, label_smoothing=2.0)),
        (ValueError, "softcap: 0.0; must be above 0", lambda: lce(p.x, p.w, p.y, softcap=0.0)),
        (ValueError, "must be \\[\\.\\.\\., H\\] and \\[V, H\\]", lambda: lce(p.x[:, :3], p.w, p.y)),
        (ValueError, "target: shape \\[5\\]; must be \\[23\\]", lambda: lce(p.x, p.w, p.y[:5])),
        (ValueError, "linear_bias: shape", lambda: lce(p.x, p.w, p.y, linear_bias=torch.zeros(3))),
        (
            ValueError,
            "row_weight: requires a gradient",
            lambda: lce(p.x, p.w, p.y, row_weight=torch.ones(23, requires_grad=True)),
        ),
        (
            ValueError,
            "target: soft targets that require",
            lambda: lce(p.x, p.w, torch.rand(23, 101, requires_grad=True)),
        ),
        (ValueError, "return_outputs: \\['perplexity'\\]", lambda: lce(p.x, p.w, p.y, return_outputs=("perplexity",))),
        *[
            (ValueError, "shift: .*; must be True", lambda k=k: lce(p.x, p.w, p.y, shift=k))
            for k in (2, -1, 0.5, "x", None)
        ],
        (
            ValueError,
            "memory_budget: '64MB'; must be bytes, or a text in B, KiB",
            lambda: lce(p.x, p.w, p.y, memory_budget="64MB"),
        ),
        (ValueError, "without shift=True", lambda: lce(p.x, p.w, p.y, cu_seqlens=torch.tensor([0, 23]))),
        (ValueError, "least", lambda: lce(p.x, p.w, p.y, memory_budget=64)),
        (TypeError, "target: torch.bool", lambda: lce(p.x, p.w, p.y.bool())),
        (ValueError, "hidden_dtype: i64; must be f32, bf16, f16 or f64", lambda: lce(p.x.long(), p.w, p.y)),
        (IndexError, "101", lambda: lce(p.x, p.w, torch.full((23,), 101))),
        (RuntimeError, "all must be on one device", lambda: lce(p.x, p.w.to("meta"), p.y)),
        (
            ValueError,
            "movedim",
            lambda: logitless.cross_entropy(torch.randn(4, 7, 5), torch.zeros(4, 5, dtype=torch.long)),
        ),
    ]
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()


def test_ignore_index():
    p = Problem(ignored=False)
    p.y[3] = 7
    assert_near(
        logitless.linear_cross_entropy(p.x, p.w, p.y, ignore_index=7),
        F.cross_entropy(p.x.double() @ p.w.double().T, p.y, ignore_index=7),
        torch.float32,
    )
    p.y[5] = -100
    assert torch.equal(
        logitless.linear_cross_entropy(p.x, p.w, p.y, ignore_index=None), logitless.linear_cross_entropy(p.x, p.w, p.y)
    )
