"""The PyTorch face on a CUDA device: results beside the CPU's, and what only a device has: streams, graphs, status
words, alignment, several devices. Every test here needs a GPU."""

import copy

import pytest
import torch
from conftest import Problem, assert_near, gradients

import logitless

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = "cuda"


def moved(tensor, dtype=None):
    """A leaf on the device, with its strides kept."""
    if tensor is None:
        return None
    there = tensor.detach().to(CUDA, dtype if tensor.is_floating_point() else None)
    return there.requires_grad_(tensor.requires_grad)


def on_both(function, leaves, others=(), upstream=None, factor=64.0, dtype=None):
    """function(*leaves, *others) on the CPU in float32 and on the device: values and every leaf's gradient agree."""
    dtype = dtype or leaves[0].dtype
    here = [leaf.detach().float().requires_grad_(leaf.requires_grad) for leaf in leaves]
    there = [moved(leaf) for leaf in leaves]
    wanted = function(*here, *others)
    found = function(*there, *[moved(other) if isinstance(other, torch.Tensor) else other for other in others])
    assert found.is_cuda and found.shape == wanted.shape and found.dtype == torch.float32
    assert_near(found.cpu(), wanted, torch.float32, 4 * factor, "value")
    if upstream is None:
        upstream = torch.ones_like(wanted)
    ours = gradients(found, [leaf for leaf in there if leaf.requires_grad], upstream.to(CUDA))
    theirs = gradients(wanted, [leaf for leaf in here if leaf.requires_grad], upstream)
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.is_cuda
        assert_near(mine.cpu(), other, dtype, factor, f"gradient {place}")
    return found


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "vocab"), [(64, 512), (19, 101), (40, 1003)])
def test_loss_and_gradients(dtype, hidden, vocab):
    p = Problem(rows=77, hidden=hidden, vocab=vocab, dtype=dtype, bias=True)
    for reduction in ("mean", "sum", "none"):
        on_both(
            lambda x, w, b, y, r=reduction: logitless.linear_cross_entropy(x, w, y, linear_bias=b, reduction=r),
            p.leaves(),
            [p.y],
            torch.randn(77) if reduction == "none" else torch.tensor(-3.0),
        )


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1},
        {"label_smoothing": 0.1, "smoothing": "others"},
        {"z_loss": 1e-2},
        {"softcap": 3.0, "logit_scale": 0.5},
        {"temperature": 0.7},
        {"normalizer": 7.5},
        {"memory_budget": "64MiB"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_options(dtype, options):
    p = Problem(rows=96, hidden=64, vocab=768, dtype=dtype)
    on_both(lambda x, w, y: logitless.linear_cross_entropy(x, w, y, **options), p.leaves(), [p.y], torch.tensor(0.25))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_options(dtype):
    p = Problem(rows=96, hidden=64, vocab=768, dtype=dtype)
    weights, rows, heat = torch.rand(768), torch.randn(96), torch.rand(96) + 0.5
    mask = torch.rand(96, 768) < 0.7
    on_both(
        lambda x, w, y, c, r, t, m: logitless.linear_cross_entropy(
            x, w, y, weight=c, row_weight=r, temperature=t, keep_mask=m, label_smoothing=0.05
        ),
        p.leaves(),
        [p.y, weights, rows, heat, mask],
    )
    soft = torch.softmax(torch.randn(96, 768), -1)
    on_both(lambda x, w, s: logitless.linear_cross_entropy(x, w, s), p.leaves(), [soft])


def test_bf16_hidden_and_fp32_weight():
    p = Problem(rows=50, hidden=48, vocab=333, dtype=torch.bfloat16, weight_dtype=torch.float32)
    on_both(lambda x, w, y: logitless.linear_cross_entropy(x, w, y), p.leaves(), [p.y], dtype=torch.bfloat16)


def test_row_outputs_and_their_gradients():
    p = Problem(rows=64, hidden=32, vocab=300, dtype=torch.bfloat16)

    def every(x, w, y):
        out = logitless.linear_cross_entropy(x, w, y, return_outputs=("lse", "logprob", "entropy", "row_loss"))
        return out.loss * 3 + (out.lse * 0.1 + out.logprob * out.entropy - out.row_loss * 0.2).sum() / 64

    on_both(every, p.leaves(), [p.y])
    out = logitless.linear_cross_entropy(moved(p.x), moved(p.w), p.y.cuda(), return_outputs=True)
    assert out.kept.is_cuda and out.kept.item() == (p.y != -100).sum().item()
    assert out.correct_rows.item() == out.correct.sum().item() and out.bad_rows.item() == 0
    z = p.x.detach().double() @ p.w.detach().double().T
    kept = p.y != -100
    assert torch.equal(out.argmax.cpu()[kept], z.argmax(-1)[kept])


def test_token_logprobs_policy_and_distillation():
    p = Problem(rows=40, hidden=32, vocab=257, ignored=False)
    on_both(
        lambda x, w, y: sum(
            part.sum() for part in logitless.token_logprobs(x, w, y, return_entropy=True, temperature=0.8)
        ),
        p.leaves(),
        [p.y],
    )
    old, advantage = -torch.rand(40) * 3, torch.randn(40)
    on_both(
        lambda x, w, y, o, a: logitless.policy_loss(x, w, y, o, a, entropy_coef=0.01), p.leaves(), [p.y, old, advantage]
    )
    teacher = Problem(rows=40, hidden=24, vocab=257)
    for kind in ("forward_kl", "reverse_kl", "jsd"):
        on_both(
            lambda x, w, tx, tw, k=kind: logitless.distillation_loss(x, w, tx, tw, kind=k, temperature=2.0),
            p.leaves(),
            [teacher.x.detach(), teacher.w.detach()],
        )
    ids = torch.stack([torch.randperm(257)[:8] for _ in range(40)])
    logprobs = torch.log_softmax(torch.randn(40, 8), -1)
    on_both(
        lambda x, w, i, q: logitless.topk_distillation_loss(x, w, i, q, rest="renormalised"),
        p.leaves(),
        [ids, logprobs],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [512, 1003, 40000])
def test_given_logits(dtype, vocab):
    z = torch.randn(33, vocab).to(dtype).requires_grad_()
    y = torch.randint(0, vocab, (33,))
    y[::5] = -100
    on_both(lambda z, y: logitless.cross_entropy(z, y), [z], [y], torch.tensor(2.0))
    on_both(lambda z, y: logitless.cross_entropy(z, y, reduction="none"), [z], [y], torch.randn(33))
    wanted = gradients(logitless.cross_entropy(z, y), [z])[0]
    there = z.detach().cuda()
    over = (there * 1).requires_grad_()
    base = over * 1
    loss = logitless.cross_entropy(base, y.cuda(), inplace_backward=True)
    at = base.data_ptr()
    found = gradients(loss, [base])[0]
    assert found.data_ptr() == at
    assert_near(found.cpu(), wanted, dtype)


def test_frozen_inputs_cost_and_return_nothing():
    p = Problem(rows=40, hidden=32, vocab=257)
    x, w, y = moved(p.x), p.w.detach().cuda(), p.y.cuda()
    logitless.linear_cross_entropy(x, w, y).backward()
    assert x.grad is not None and w.grad is None
    x, w = p.x.detach().cuda(), moved(p.w)
    logitless.linear_cross_entropy(x, w, y).backward()
    assert x.grad is None and w.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_and_alignment(dtype):
    """What products cannot read in place is copied; the rest is read where it lies. Inputs stay as they are."""
    p = Problem(rows=48, hidden=64, vocab=520, dtype=dtype)
    x, w, y = p.x.detach().cuda(), p.w.detach().cuda(), p.y.cuda()
    wanted = logitless.linear_cross_entropy(x, w, y)
    shifted = torch.zeros(48 * 64 + 1, dtype=dtype, device=CUDA)[1:].view(48, 64).copy_(x)
    apart = torch.zeros(520, 72, dtype=dtype, device=CUDA)[:, :64].copy_(w)
    odd = torch.zeros(520, 67, dtype=dtype, device=CUDA)[:, 1:65].copy_(w)
    for one in (x, shifted, x.t().contiguous().t(), x.flip(0).flip(0)):
        for other in (w, apart, odd, w.t().contiguous().t()):
            before = one.clone(), other.clone()
            found = logitless.linear_cross_entropy(one, other, y)
            assert torch.equal(found, wanted)
            assert torch.equal(one, before[0]) and torch.equal(other, before[1])
    wide = torch.stack([y, y], 1)[:, 0]
    assert wide.stride(0) == 2 and torch.equal(logitless.linear_cross_entropy(x, w, wide), wanted)
    assert torch.equal(logitless.linear_cross_entropy(x.view(4, 12, 64), w, y.view(4, 12).int()), wanted)


def test_same_bits():
    p = Problem(rows=500, hidden=128, vocab=5000, dtype=torch.bfloat16)
    x, w, y = moved(p.x), moved(p.w), p.y.cuda()
    first = logitless.linear_cross_entropy(x, w, y)
    of_first = gradients(first, [x, w])
    for _ in range(3):
        again = logitless.linear_cross_entropy(x, w, y)
        assert torch.equal(first, again)
        assert all(torch.equal(a, b) for a, b in zip(of_first, gradients(again, [x, w]), strict=True))


def test_backward_again_and_twice():
    p = Problem(rows=40, hidden=32, vocab=257)
    x, w, y = moved(p.x), moved(p.w), p.y.cuda()
    loss = logitless.linear_cross_entropy(x, w, y)
    first = gradients(loss, [x, w], torch.tensor(2.0, device=CUDA), retain_graph=True)
    for factor in (2.0, -0.5):
        again = gradients(loss, [x, w], torch.tensor(factor, device=CUDA), retain_graph=True)
        for a, b in zip(first, again, strict=True):
            assert_near(b * (2.0 / factor), a, torch.float32)
    made = gradients(logitless.linear_cross_entropy(x, w, y), [x], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        gradients(made.sum(), [x])


def test_mixed_devices_are_refused():
    p = Problem()
    x, w, y = p.x.detach().cuda(), p.w.detach().cuda(), p.y.cuda()
    for wrong in ((x, p.w.detach(), y), (p.x.detach(), w, y), (x, w, p.y)):
        with pytest.raises(RuntimeError, match="one device"):
            logitless.linear_cross_entropy(*wrong)
    with pytest.raises(RuntimeError, match="one device"):
        logitless.linear_cross_entropy(p.x.detach(), p.w.detach(), p.y, normalizer=torch.tensor(3.0, device=CUDA))
    number = logitless.linear_cross_entropy(x, w, y, normalizer=torch.tensor(3.0))  # a number of the host's will do
    assert torch.equal(number, logitless.linear_cross_entropy(x, w, y, normalizer=3.0))


def test_float64_says_where_it_runs():
    p = Problem(dtype=torch.float64)
    with pytest.raises((NotImplementedError, ValueError), match=r"[Rr]eference|f64|F64"):
        logitless.linear_cross_entropy(p.x.detach().cuda(), p.w.detach().cuda(), p.y.cuda())


# ---- what cannot be refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [101, -5, 2**40])
def test_targets_out_of_range(wrong):
    p = Problem()
    y = p.y.clone()
    y[7] = wrong
    x, w, y = moved(p.x), moved(p.w), y.cuda()
    logitless.check_status()
    rows = logitless.linear_cross_entropy(x, w, y, reduction="none")
    with pytest.raises(IndexError, match=rf"\[7\] is {wrong}"):
        logitless.check_status()
    logitless.check_status()  # told once
    right = logitless.linear_cross_entropy(x, w, p.y.cuda(), reduction="none")
    rows, right = rows.detach().cpu(), right.detach().cpu()
    assert torch.isnan(rows[7]) and torch.equal(rows[torch.arange(23) != 7], right[torch.arange(23) != 7])
    loss = logitless.linear_cross_entropy(x, w, y)
    dx, dw = gradients(loss, [x, w])
    assert torch.isnan(loss) and torch.isfinite(dw).all() and torch.isfinite(dx[:7]).all()
    with pytest.raises(IndexError):
        logitless.check_status("cuda:0")


def test_empty_means():
    p = Problem()
    x, w, y = moved(p.x), moved(p.w), torch.full_like(p.y, -100).cuda()
    nan = logitless.linear_cross_entropy(x, w, y)
    assert torch.isnan(nan)
    logitless.check_status()
    zero = logitless.linear_cross_entropy(x, w, y, on_empty="zero")
    assert zero.item() == 0 and all(g.count_nonzero() == 0 for g in gradients(zero, [x, w]))
    error = logitless.linear_cross_entropy(x, w, y, on_empty="error")
    assert torch.isnan(error) and all(g.count_nonzero() == 0 for g in gradients(error, [x, w]))
    with pytest.raises(ValueError, match="no row is kept"):
        logitless.check_status()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_most_kept_rows(dtype):
    p = Problem(rows=200, hidden=64, vocab=1000, dtype=dtype)
    p.y[::2] = -100
    kept = (p.y != -100).sum().item()
    x, w, y = moved(p.x), moved(p.w), p.y.cuda()
    wanted = logitless.linear_cross_entropy(x, w, y)
    of_wanted = gradients(wanted, [x, w])
    for bound in (kept, kept + 1, 200):
        found = logitless.linear_cross_entropy(x, w, y, most_kept_rows=bound)
        assert_near(found, wanted, torch.float32)
        for a, b in zip(gradients(found, [x, w]), of_wanted, strict=True):
            assert_near(a, b, dtype)
    logitless.check_status()
    found = logitless.linear_cross_entropy(x, w, y, most_kept_rows=kept - 1)
    assert torch.isnan(found)
    with pytest.raises(ValueError, match="most_kept_rows"):
        logitless.check_status()
    none = logitless.linear_cross_entropy(x, w, y, most_kept_rows=kept, reduction="none")
    assert_near(none.sum() / kept, wanted, torch.float32)


# ---- streams, graphs, the compiler -----------------------------------------------------------------------------------


def test_nothing_waits():
    p = Problem(rows=64, hidden=32, vocab=257, dtype=torch.bfloat16)
    x, w, y, divisor = moved(p.x), moved(p.w), p.y.cuda(), torch.tensor(9.0, device=CUDA)

    def step():
        loss = logitless.linear_cross_entropy(x, w, y, normalizer=divisor)
        rows = logitless.token_logprobs(x, w, y)
        return gradients(loss * 0.5 + rows.sum() * 0.1, [x, w])

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_current_stream():
    p = Problem(rows=64, hidden=32, vocab=257)
    x, w, y = moved(p.x), moved(p.w), p.y.cuda()
    wanted = logitless.linear_cross_entropy(x, w, y) * 1
    of_wanted = gradients(wanted, [x, w])
    stream = torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x.detach())  # comes first only in this stream's order
        late.requires_grad_()
        found = logitless.linear_cross_entropy(late, w, y)
        made = gradients(found, [late, w])
    stream.synchronize()
    assert torch.equal(found, wanted) and all(torch.equal(a, b) for a, b in zip(made, of_wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graph_of_forward_and_backward(dtype):
    p = Problem(rows=64, hidden=64, vocab=520, dtype=dtype)
    x, w, y = moved(p.x), moved(p.w), p.y.cuda()
    upstream = torch.tensor(1.0, device=CUDA)

    def step():
        loss = logitless.linear_cross_entropy(x, w, y, z_loss=1e-3)
        return loss, *gradients(loss, [x, w], upstream)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(4):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn(64, 64))
            y.copy_(torch.randint(0, 520, (64,)))
            y[: 7 * seed] = -100  # other rows, and another number of them
            upstream.fill_((1.0, -2.0, 0.0, 0.5)[seed])
        graph.replay()
        for mine, other in zip(captured, step(), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    def step(x, w, y):
        return logitless.linear_cross_entropy(x * 2, w, y, label_smoothing=0.1) * 3

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for rows in (17, 33, 64):
        p = Problem(rows=rows, hidden=32, vocab=257)
        x, w, y = moved(p.x), moved(p.w), p.y.cuda()
        found, wanted = compiled(x, w, y), step(x, w, y)
        assert_near(found, wanted, torch.float32)
        for a, b in zip(gradients(found, [x, w]), gradients(wanted, [x, w]), strict=True):
            assert_near(a, b, torch.float32)
    assert counter.frame_count == 1


def test_autocast_leaves_an_fp32_weight():
    p = Problem(rows=40, hidden=32, vocab=257)
    x, w, y = moved(p.x), moved(p.w), p.y.cuda()
    wanted = logitless.linear_cross_entropy(x, w, y)
    with torch.autocast(CUDA, dtype=torch.bfloat16):
        found = logitless.linear_cross_entropy(x, w, y)
        half = logitless.linear_cross_entropy(torch.nn.functional.linear(x, torch.eye(32, device=CUDA)), w, y)
    assert torch.equal(found, wanted) and half.dtype == torch.float32
    dx, dw = gradients(half, [x, w])
    assert dx.dtype == dw.dtype == torch.float32


def test_module_and_state():
    head = logitless.LinearCrossEntropy(32, 257)
    there = copy.deepcopy(head).cuda()
    p = Problem(rows=40, hidden=32, vocab=257)
    loss = there(moved(p.x), p.y.cuda())
    loss.backward()
    head(p.x, p.y).backward()
    assert_near(there.weight.grad.cpu(), head.weight.grad, torch.float32)


def test_parts_of_a_vocabulary():
    p = Problem(rows=40, hidden=32, vocab=257)
    x, w, y = moved(p.x), moved(p.w), p.y.cuda()
    cut = 100
    parts = [(logitless.VocabPart(0, 257), w[:cut]), (logitless.VocabPart(cut, 257), w[cut:])]
    stats = logitless.merge_statistics([part.statistics(x, rows, y) for part, rows in parts])
    assert stats.is_cuda
    wanted = logitless.linear_cross_entropy(x, w, y, reduction="none")
    assert_near(parts[0][0].outputs(stats, y).row_loss, wanted, torch.float32)
    made = [part.gradients(x, rows, y, stats) for part, rows in parts]
    dx, dw = gradients(wanted, [x, w], torch.ones_like(wanted))
    assert_near(made[0][0] + made[1][0], dx, torch.float32)
    assert_near(torch.cat([made[0][1], made[1][1]]), dw, torch.float32)


def test_no_rows():
    p = Problem(rows=8, hidden=32, vocab=257)
    x, w, y = p.x.detach()[:0].cuda().requires_grad_(), moved(p.w), p.y[:0].cuda()
    loss = logitless.linear_cross_entropy(x, w, y, reduction="sum")
    dx, dw = gradients(loss, [x, w])
    assert loss.item() == 0 and dx.shape == x.shape and dw.count_nonzero() == 0


def test_more_rows_than_a_grid_is_high():
    p = Problem(rows=70001, hidden=8, vocab=61, dtype=torch.bfloat16)
    on_both(lambda x, w, y: logitless.linear_cross_entropy(x, w, y), p.leaves(), [p.y])


def test_plan_and_info():
    plan = logitless.plan(4096, 4096, 128256, device=CUDA, memory_budget="700MiB")
    assert 0 < plan.workspace_bytes <= 700 << 20 and "ledger" in plan.data
    assert plan.workspace_bytes < logitless.plan(4096, 4096, 128256, device="cuda:0").workspace_bytes
    fewer = logitless.plan(4096, 4096, 128256, device=CUDA, most_kept_rows=1024)
    assert fewer.workspace_bytes < logitless.plan(4096, 4096, 128256, device=CUDA).workspace_bytes
    found = logitless.info(CUDA)
    assert found["backend"] == "cuda" and "cuBLASLt" in found["device"] and found["cuda_devices"] >= 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU more than this machine has")
def test_another_device():
    p = Problem(rows=40, hidden=32, vocab=257)
    with torch.cuda.device(0):
        x, w = (leaf.detach().to("cuda:1").requires_grad_() for leaf in (p.x, p.w))
        loss = logitless.linear_cross_entropy(x, w, p.y.to("cuda:1"))
        dx, _ = gradients(loss * 2, [x, w])
    assert dx.device == torch.device("cuda:1")
    assert_near(loss.cpu(), logitless.linear_cross_entropy(p.x, p.w, p.y), torch.float32)
