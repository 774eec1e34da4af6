"""Parts of a vocabulary equal the whole: two and three uneven parts in one process, and two ranks of gloo."""

import os
import socket
import subprocess
import sys

import dense
import pytest
import torch
from conftest import Problem, assert_near, gradients

import logitless

SPLITS = ([0, 1, 101], [0, 64, 101], [0, 30, 31, 101])
VOCAB = 101


def parts_of(p, cuts, **options):
    """(part, its keywords, weight, bias) of every span of columns."""
    tensors = {name: options.pop(name) for name in ("class_weight", "row_weight", "row_temperature") if name in options}
    for first, end in zip(cuts, cuts[1:]):
        part = logitless.VocabPart(first, VOCAB, **options)
        yield part, {**tensors, "bias": None if p.b is None else p.b[first:end]}, p.w[first:end]


def whole(p, *, row_weight=None, class_weight=None, row_temperature=None, entropy=False, **options):
    transforms = {name: options.pop(name) for name in ("softcap", "logit_scale", "temperature") if name in options}
    if row_temperature is not None:
        transforms["temperature"] = row_temperature
    z = dense.logits(p.x, p.w, p.b, **transforms)
    loss, _ = dense.rows(z, p.y, row_weight=row_weight, weight=class_weight, **options)
    kept = p.y != -100
    logprob = torch.log_softmax(z, -1).gather(-1, p.y.clamp(min=0)[..., None])[..., 0]
    rows = loss, torch.logsumexp(z, -1), logprob, dense.entropy(z)
    return [torch.where(kept, each, 0.0) for each in rows]


OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.2, "smoothing": "others"},
    {"label_smoothing": 1.0},
    {"label_smoothing": 0.3, "class_weight": torch.linspace(0.5, 2.0, VOCAB)},
    {"class_weight": torch.linspace(0.5, 2.0, VOCAB), "row_weight": torch.linspace(-1.0, 2.0, 15)},
    {"softcap": 3.0, "logit_scale": 0.5, "temperature": 0.7, "z_loss": 0.01},
    {"row_temperature": torch.linspace(0.5, 2.0, 15)},
]


@pytest.mark.parametrize("cuts", SPLITS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_equal_the_whole(cuts, options, dtype):
    options = {**options}
    for name in ("row_weight", "row_temperature"):
        if name in options:
            options[name] = options[name].reshape(3, 5)
    p = Problem(shape=(3, 5), vocab=VOCAB, bias=True, dtype=dtype)
    assert (p.y == -100).any()
    pieces = list(parts_of(p, cuts, entropy=True, **options))
    stats = [part.statistics(p.x, w, p.y, **tensors) for part, tensors, w in pieces]
    assert all(each.shape == (15, 8) and each.dtype == torch.float32 for each in stats)
    merged = logitless.merge_statistics(stats)
    rows = pieces[0][0].outputs(merged, p.y, **{name: options.get(name) for name in ("class_weight", "row_weight")})
    wanted = whole(p, **options)
    for name, ours, theirs in zip(rows._fields, rows, wanted, strict=True):
        assert_near(ours, theirs, torch.float32, what=name)
    upstream = [torch.randn(3, 5) for _ in rows]
    names = ("grad_row_loss", "grad_lse", "grad_logprob", "grad_entropy")
    for given in ([True] * 4, [True, False, False, False], [False, False, True, True]):
        chosen = [(name, u, out) for name, u, out, use in zip(names, upstream, wanted, given, strict=True) if use]
        want = torch.autograd.grad(sum((u.double() * out).sum() for _, u, out in chosen), p.leaves(), retain_graph=True)
        made = [
            part.gradients(p.x, w, p.y, merged, **tensors, **{name: u for name, u, _ in chosen})
            for part, tensors, w in pieces
        ]
        assert made[0][0].shape == p.x.shape and made[0][0].dtype == dtype
        assert_near(sum(dx.float() for dx, _, _ in made), want[0], dtype, what="dX")
        assert_near(torch.cat([dw for _, dw, _ in made]), want[1], dtype, what="dW")
        assert_near(torch.cat([db for _, _, db in made]), want[2], dtype, what="db")
        for dx, _, _ in made:
            assert (dx[p.y == -100] == 0).all()


def test_by_default_the_gradient_of_the_sum():
    p = Problem(vocab=VOCAB)
    pieces = list(parts_of(p, [0, 50, VOCAB]))
    stats = logitless.merge_statistics([part.statistics(p.x, w, p.y) for part, _, w in pieces])
    made = [part.gradients(p.x, w, p.y, stats) for part, _, w in pieces]
    want = gradients(logitless.linear_cross_entropy(p.x, p.w, p.y, reduction="sum"), p.leaves())
    assert_near(sum(dx for dx, _, _ in made), want[0], torch.float32)
    assert_near(torch.cat([dw for _, dw, _ in made]), want[1], torch.float32)
    assert pieces[0][0].gradients(p.x, p.w[:50], p.y, stats, wanted=("weight",))[0] is None


def test_edges():
    """Rows without a finite logit, a target of -inf, a target so likely that 1 - p is below a rounding."""
    p = Problem(rows=4, vocab=VOCAB, bias=True, ignored=False)
    with torch.no_grad():
        p.x.zero_()
        p.b.zero_()
        p.y[:] = torch.tensor([7, 80, 7, 3])
        p.b[7] = 30.0
        p.b[80] = -torch.inf
    pieces = list(parts_of(p, [0, 40, VOCAB], entropy=True))
    stats = logitless.merge_statistics([part.statistics(p.x, w, p.y, **t) for part, t, w in pieces])
    rows = pieces[0][0].outputs(stats, p.y)
    assert rows.row_loss[1] == torch.inf and rows.logprob[1] == -torch.inf
    assert_near(
        rows.row_loss[0], torch.tensor(99.0).double().mul(torch.tensor(-30.0).double().exp()).log1p(), torch.float32
    )
    with torch.no_grad():
        p.b.fill_(-torch.inf)
    stats = logitless.merge_statistics([part.statistics(p.x, w, p.y, **t) for part, t, w in pieces])
    assert pieces[0][0].outputs(stats, p.y).row_loss.isnan().all()


def test_refusals():
    p = Problem(vocab=VOCAB)
    with pytest.raises(ValueError, match="first_column: 101"):
        logitless.VocabPart(101, 101)
    with pytest.raises(ValueError, match="smoothing: 'some'"):
        logitless.VocabPart(0, 101, smoothing="some")
    part = logitless.VocabPart(50, VOCAB)
    with pytest.raises(ValueError, match="first_column"):
        part.statistics(p.x, p.w, p.y)  # 101 columns from 50 on
    with pytest.raises(IndexError, match="101"):
        part.statistics(p.x, p.w[:51], torch.full_like(p.y, 101))
    with pytest.raises(TypeError, match="keep_mask"):
        part.statistics(p.x, p.w[:51], p.y, keep_mask=p.y)
    with pytest.raises(ValueError, match="class_weight"):
        part.statistics(p.x, p.w[:51], p.y, class_weight=torch.ones(51))
    stats = part.statistics(p.x, p.w[:51], p.y)
    with pytest.raises(ValueError, match="entropy=False"):
        part.gradients(p.x, p.w[:51], p.y, stats, grad_entropy=torch.ones(23))
    with pytest.raises(ValueError, match="stats: shape"):
        part.outputs(stats[:, :4], p.y)
    with pytest.raises(ValueError, match="parts: empty"):
        logitless.merge_statistics([])


RANK = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import dense, logitless
from conftest import Problem, assert_near
rank = int(sys.argv[2])
dist.init_process_group("gloo", rank=rank, world_size=2)
torch.manual_seed(5)
p = Problem(shape=(3, 7), vocab=101, bias=True)  # the same on both
uneven = (0, 37, 101)

def mine(cuts):
    first, end = cuts[rank], cuts[rank + 1]
    leaves = [t.detach()[first:end].clone().requires_grad_() for t in (p.w, p.b)]
    return first, [p.x.detach().clone().requires_grad_(), *leaves], slice(first, end)

def compare(found, wanted, leaves, span, grads):
    assert_near(found, wanted, torch.float32, what="loss")
    for ours, theirs in zip(torch.autograd.grad(found, leaves), grads, strict=True):
        assert_near(ours, theirs if ours.shape == theirs.shape else theirs[span], torch.float32, what="gradient")

for options in ({}, {"reduction": "sum", "label_smoothing": 0.1}, {"normalizer": 7.0, "z_loss": 0.01},
                {"weight": torch.linspace(0.5, 2, 101)}):
    first, leaves, span = mine(uneven)
    x, w, b = leaves
    found = logitless.vocab_parallel_linear_cross_entropy(
        x, w, p.y, linear_bias=b, first_column=first, total_vocab=101, **options)
    wanted = dense.loss(dense.logits(p.x, p.w, p.b), p.y, **options)
    compare(found, wanted, leaves, span, torch.autograd.grad(wanted, p.leaves()))

# Equal parts need no numbers; the head without its last class; both outputs of tokens in one backward.
first, leaves, span = mine((0, 50, 100))
y = p.y.clamp(max=99)
z = dense.logits(p.x, p.w[:100], p.b[:100])
kept = y != -100
logp = torch.where(kept, torch.log_softmax(z, -1).gather(-1, y.clamp(min=0)[..., None])[..., 0], 0.0)
entropy = torch.where(kept, dense.entropy(z), 0.0)
both = logitless.vocab_parallel_token_logprobs(leaves[0], leaves[1], y, bias=leaves[2], return_entropy=True)
for found, wanted in zip(both, (logp, entropy), strict=True):
    assert_near(found, wanted, torch.float32)
wanted = (logp - 0.5 * entropy).sum()
compare((both[0] - 0.5 * both[1]).sum(), wanted, leaves, span, torch.autograd.grad(wanted, p.leaves(), retain_graph=True))

# A summand of dX on request.
found = logitless.vocab_parallel_linear_cross_entropy(leaves[0], leaves[1], y, linear_bias=leaves[2], reduce_grad_input=False)
dx = torch.autograd.grad(found, leaves[0])[0]
whole = torch.autograd.grad(dense.loss(z, y), p.x)[0]
assert (dx - whole).abs().max() > 1e-4
dist.all_reduce(dx)
assert_near(dx, whole, torch.float32)

# Compiled code breaks its graph there, and is right.
@torch.compile(backend="eager")
def compiled(x, w, b):
    return 2.0 * logitless.vocab_parallel_linear_cross_entropy(x * 1.0, w, y, linear_bias=b)

wanted = 2.0 * dense.loss(dense.logits(p.x, p.w[:100], p.b[:100]), y)
compare(compiled(*leaves), wanted, leaves, span, torch.autograd.grad(wanted, p.leaves()))

for first, end in ((36, 101), (38, 101), (37, 100)):  # overlap, gap, an end that is missing
    span = slice(0, 37) if rank == 0 else slice(first, end)
    try:
        logitless.vocab_parallel_linear_cross_entropy(p.x, p.w[span], y, first_column=span.start, total_vocab=101)
        raise SystemExit("not refused")
    except ValueError as error:
        assert "without gap or overlap" in str(error), error
print("done", rank)
"""


def test_two_ranks_equal_the_whole():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # HF, accelerate and torch.compile look at these; the ranks stay on the CPU.
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    here = os.path.dirname(os.path.abspath(__file__))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, here, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [each.communicate(timeout=120)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    for rank, text in enumerate(said):
        assert f"done {rank}" in text, text


def test_numpy_parts_equal_the_whole():
    import numpy as np

    from logitless import numpy as ln

    p = Problem(shape=(3, 5), vocab=VOCAB, bias=True)
    x, w, b, y = (t.detach().numpy() for t in (p.x, p.w, p.b, p.y))
    weights = np.linspace(0.5, 2.0, VOCAB)
    want = ln.linear_cross_entropy(
        x,
        w,
        y,
        linear_bias=b,
        weight=weights,
        label_smoothing=0.1,
        reduction="none",
        gradients=("input", "weight", "bias"),
        outputs=("lse", "logprob", "entropy"),
    )
    cuts = [0, 30, 31, VOCAB]
    spans = [slice(*each) for each in zip(cuts, cuts[1:])]
    parts = [ln.VocabPart(s.start, VOCAB, label_smoothing=0.1, entropy=True) for s in spans]
    stats = ln.merge_statistics(
        [part.statistics(x, w[s], y, bias=b[s], class_weight=weights) for part, s in zip(parts, spans)]
    )
    rows = parts[1].outputs(stats, y, class_weight=weights)
    for ours, theirs in zip(rows, (want.loss, want.lse, want.logprob, want.entropy), strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)
    made = [part.gradients(x, w[s], y, stats, bias=b[s], class_weight=weights) for part, s in zip(parts, spans)]
    np.testing.assert_allclose(sum(each[0] for each in made), want.grad_input, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([each[1] for each in made]), want.grad_weight, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([each[2] for each in made]), want.grad_bias, rtol=1e-5, atol=1e-5)
    up = np.ones((3, 5), np.float32)
    dx, dw, db = parts[0].gradients(x, w[spans[0]], y, stats, bias=b[spans[0]], grad_entropy=up, wanted=("weight",))
    theirs = torch.autograd.grad(whole(p)[3].sum(), p.w)[0][:30]
    assert dx is None and db is None
    np.testing.assert_allclose(dw, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="target: shape"):
        parts[0].statistics(x, w[:30], y[:2])
    with pytest.raises(ValueError, match="entropy=False"):
        ln.VocabPart(0, VOCAB).gradients(x, w, y, stats, grad_entropy=up)
