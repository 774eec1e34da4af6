"""Autograd, transforms, the compiler, autocast, processes: the places where bindings of plain libraries go wrong. Each
trap that was met when this binding was designed is a test here."""

import copy
import multiprocessing
import subprocess
import sys
import textwrap

import dense
import pytest
import torch
from conftest import Problem, assert_near, gradients
from torch.nn import functional as F

import logitless
from logitless.pytorch import _ops


def dense_ce(p, **options):
    return F.cross_entropy(p.x.double() @ p.w.double().T, p.y, **options)


# ---- upstream gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("upstream", [1.0, -3.0, 0.0, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scalar_upstream(upstream, dtype):
    p = Problem(dtype=dtype)
    ours = gradients(logitless.linear_cross_entropy(p.x, p.w, p.y) * upstream, p.leaves())
    theirs = gradients(dense_ce(p) * upstream, p.leaves())
    for mine, other in zip(ours, theirs, strict=True):
        assert_near(mine, other, dtype)


def test_per_row_upstream_also_expanded():
    p = Problem()
    loss = logitless.linear_cross_entropy(p.x, p.w, p.y, reduction="none")
    wanted = dense_ce(p, reduction="none")
    for upstream in (torch.randn(23), torch.tensor(-0.7).expand(23), torch.randn(46)[::2]):
        for mine, other in zip(
            gradients(loss, p.leaves(), upstream, retain_graph=True),
            gradients(wanted, p.leaves(), upstream.double(), retain_graph=True),
            strict=True,
        ):
            assert_near(mine, other, torch.float32)


def test_row_weights_outside_the_call():
    """Reported against peers: reduction none, multiplied by per-row weights, lost the weights in the gradient."""
    p = Problem()
    weights = torch.rand(23)
    ours = gradients(
        (logitless.linear_cross_entropy(p.x, p.w, p.y, reduction="none") * weights).sum() / weights.sum(), p.leaves()
    )
    theirs = gradients((dense_ce(p, reduction="none") * weights).sum() / weights.sum(), p.leaves())
    for mine, other in zip(ours, theirs, strict=True):
        assert_near(mine, other, torch.float32)


def test_fp16_with_a_loss_scale_keeps_small_gradients():
    """Gradients made before the loss scale is known must not underflow in fp16."""
    p = Problem(rows=4096, hidden=8, vocab=64, dtype=torch.float16)
    with torch.no_grad():
        p.x *= 2.0**-8
        p.w *= 2.0**-4
    loss = logitless.linear_cross_entropy(p.x, p.w, p.y)
    for mine, other in zip(
        gradients(loss * 2.0**14, p.leaves()), gradients(dense_ce(p) * 2.0**14, p.leaves()), strict=True
    ):
        assert mine.dtype == torch.float16
        assert_near(mine, other, torch.float16)


def test_backward_again():
    p = Problem()
    loss = logitless.linear_cross_entropy(p.x, p.w, p.y)
    first = gradients(loss * 2, p.leaves(), retain_graph=True)
    for factor in (3.0, 5.0):
        again = gradients(loss * factor, p.leaves(), retain_graph=True)
        for one, other in zip(first, again, strict=True):
            assert_near(other, one * factor / 2, torch.float32)
    loss.backward()
    kept = p.w.grad.clone()
    assert_near(kept, first[1] / 2, torch.float32)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_accumulate_into_grad():
    p = Problem()
    for _ in range(3):
        logitless.linear_cross_entropy(p.x, p.w, p.y).backward()
    assert_near(p.w.grad, 3 * gradients(dense_ce(p), [p.w])[0], torch.float32)


def test_inputs_stay_as_they_are():
    p = Problem(bias=True)
    before = [leaf.detach().clone() for leaf in p.leaves()]
    logitless.linear_cross_entropy(p.x, p.w, p.y, linear_bias=p.b, return_outputs=True).loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(before, p.leaves(), strict=True))


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_parts(frozen, reduction):
    """Reported against peers: no gradient for a trainable head over frozen hidden states."""
    p = Problem()
    p.leaves()[frozen].requires_grad_(False)
    live = p.leaves()[1 - frozen]
    before = logitless.op_calls()
    loss = logitless.linear_cross_entropy(p.x, p.w, p.y, reduction=reduction)
    assert_near(
        gradients(loss.sum(), [live], retain_graph=True)[0],
        gradients(dense_ce(p, reduction=reduction).sum(), [live])[0],
        torch.float32,
    )
    name = "forward_backward" if reduction == "mean" else "backward"
    assert logitless.op_calls()[name] == before[name] + 1
    loss.sum().backward()
    assert p.leaves()[frozen].grad is None


def test_nothing_wanted_costs_a_forward():
    p = Problem()
    before = logitless.op_calls()
    with torch.no_grad():
        loss = logitless.linear_cross_entropy(p.x, p.w, p.y)
    assert not loss.requires_grad
    assert logitless.op_calls()["forward"] == before["forward"] + 1
    assert logitless.op_calls()["forward_backward"] == before["forward_backward"]


def test_tied_weight():
    p = Problem()
    embed = torch.nn.Embedding(101, 19)
    tokens = torch.randint(0, 101, (23,))
    ours = gradients(logitless.linear_cross_entropy(embed(tokens) * 2, embed.weight, p.y), [embed.weight])[0]
    theirs = gradients(F.cross_entropy((embed(tokens) * 2) @ embed.weight.T, p.y), [embed.weight])[0]
    assert_near(ours, theirs, torch.float32)


def test_twice_differentiated_raises():
    p = Problem()
    for run in (
        lambda: logitless.linear_cross_entropy(p.x, p.w, p.y),
        lambda: logitless.linear_cross_entropy(p.x, p.w, p.y, reduction="none").sum(),
    ):
        gradient = torch.autograd.grad(run(), p.x, create_graph=True)[0]
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(gradient.square().sum(), p.x)
        inner = lambda x: (
            torch.func.grad(lambda a: logitless.linear_cross_entropy(a, p.w.detach(), p.y))(x).square().sum()
        )
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.func.grad(inner)(p.x.detach())


def test_forward_mode_raises():
    p = Problem()
    x, w = p.x.detach(), p.w.detach()
    f = lambda a: logitless.linear_cross_entropy(a, w, p.y)
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(f, (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        f(torch.autograd.forward_ad.make_dual(x, x))


def test_vmap_raises():
    p = Problem()
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(lambda a, y: logitless.linear_cross_entropy(a, p.w.detach(), y))(
            torch.randn(3, 5, 19), torch.zeros(3, 5, dtype=torch.long)
        )


def test_func_grad():
    p = Problem()
    x, w = p.x.detach(), p.w.detach()
    for reduction in ("mean", "none"):
        f = lambda a, b: logitless.linear_cross_entropy(a, b, p.y, reduction=reduction).sum() * -2  # noqa: B023
        for mine, other in zip(
            torch.func.grad(f, argnums=(0, 1))(x, w),
            gradients(dense_ce(p, reduction=reduction).sum() * -2, p.leaves()),
            strict=True,
        ):
            assert_near(mine, other, torch.float32)
    value, pull = torch.func.vjp(lambda a: logitless.linear_cross_entropy(a, w, p.y), x)
    assert_near(pull(torch.tensor(3.0))[0], 3 * gradients(dense_ce(p), [p.x])[0], torch.float32)


# ---- given logits --------------------------------------------------------------------------------------------------------


def test_inplace_backward_writes_over_the_logits():
    p = Problem()
    x = p.x.detach()
    z = x @ p.w.T
    reference = gradients(F.cross_entropy(z.double(), p.y) * 3, [p.w], retain_graph=True)[0]
    at = z.data_ptr()
    seen = []
    z.register_hook(lambda grad: seen.append(grad.data_ptr()))
    (logitless.cross_entropy(z, p.y, inplace_backward=True) * 3).backward()
    assert seen == [at]
    assert_near(p.w.grad, reference, torch.float32)


def test_logits_written_over_are_noticed():
    """Reported against peers: logits mutated behind autograd's back, and silently wrong gradients upstream of them."""
    p = Problem()
    z = torch.tanh(p.x @ p.w.T)  # tanh's backward reads its own result
    loss = logitless.cross_entropy(z, p.y, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    z = p.x @ p.w.T
    loss = logitless.cross_entropy(z, p.y, inplace_backward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_stay_as_they_are_by_default():
    z = torch.randn(9, 33, requires_grad=True)
    before = z.detach().clone()
    logitless.cross_entropy(z, torch.randint(0, 33, (9,))).backward()
    assert torch.equal(before, z.detach())
    with pytest.raises(ValueError, match="leaf"):
        logitless.cross_entropy(z, torch.randint(0, 33, (9,)), inplace_backward=True)


# ---- views ---------------------------------------------------------------------------------------------------------------


def test_non_contiguous_inputs():
    base = torch.randn(40, 23)
    x = base.T[:, ::2]  # [23, 20], strides (1, 46)
    w = torch.randn(101, 60)[:, 5:45:2]
    y = torch.randint(0, 101, (46,))[::2]
    leaves = [x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()]
    xs = x.detach().requires_grad_()
    ws = w.detach().requires_grad_()
    ours = gradients(logitless.linear_cross_entropy(xs, ws, y), [xs, ws])
    theirs = gradients(logitless.linear_cross_entropy(*leaves, y.contiguous()), leaves)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
    z = torch.randn(101, 23).T.requires_grad_()  # classes apart
    ours, theirs = logitless.cross_entropy(z, y), F.cross_entropy(z, y)
    assert_near(ours, theirs, torch.float32)
    assert_near(gradients(ours, [z])[0], gradients(theirs, [z])[0], torch.float32)


def test_plans_are_reused_and_bounded():
    from logitless import _engine

    p = Problem()
    with torch.no_grad():
        for rows in range(1, 150):
            logitless.linear_cross_entropy(p.x[:1].expand(rows, -1), p.w, p.y[:1].expand(rows))
    assert all(len(call._free) <= _engine._PLANS_KEPT for call in _engine._calls.values())


# ---- operators, compiler, export -----------------------------------------------------------------------------------------


def test_opcheck():
    x, w, y = torch.randn(5, 8), torch.randn(11, 8), torch.randint(0, 11, (5,))
    text = "kind=1 call=2 reduction=1 on_empty=2|hidden weight targets|loss row_entropy row_argmax row_correct kept_rows stats grad_hidden grad_weight:f32"
    torch.library.opcheck(_ops.forward_backward, ([x, w, y], text))
    text = "kind=1 call=1 reduction=3 on_empty=2|hidden weight targets|row_loss stats"
    torch.library.opcheck(_ops.forward, ([x, w, y], text))
    stats = _ops.forward([x, w, y], text)[1]
    text = "kind=1 call=3 reduction=3 on_empty=2|hidden weight targets stats grad_row_loss|grad_hidden grad_weight"
    torch.library.opcheck(_ops.backward, ([x, w, y, stats, torch.randn(5)], text))
    z = torch.randn(5, 11)
    stats = _ops.forward([z, y], "kind=2 call=1 reduction=1 on_empty=2|logits targets|loss stats")[1]
    text = "kind=2 call=3 reduction=1 on_empty=2 flags=8|logits targets stats|grad_logits"
    torch.library.opcheck(_ops.backward_inplace, (z, [y, stats], text))


def test_fakes_agree_with_the_library_on_statistics():
    from logitless import _engine

    x, w, y = torch.randn(5, 8), torch.randn(11, 8), torch.randint(0, 11, (5,))
    for more, inputs, given, outputs in (
        ("", "", [], ""),
        (" label_smoothing=0.1", "", [], ""),
        ("", "", [], "row_entropy"),
        ("", " class_weight", [torch.rand(11)], ""),
        (" targets=4", " teacher_hidden teacher_weight", [torch.randn(5, 3), torch.randn(11, 3)], ""),
    ):
        hard = "" if "targets=4" in more else " targets"
        text = f"kind=1 call=1 reduction=1 on_empty=2{more}|hidden weight{hard}{inputs}|loss {outputs} stats"
        stats = _ops.forward([x, w, *([y] if hard else []), *given], text)[-1]
        assert stats.shape == (5, _engine.statistics(text)), text


@pytest.fixture
def clean_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compile_many_rows_in_one_graph(clean_compiler):
    """Reported against peers: a wrong loss under compile with ignored targets."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("inductor")

    def f(x, w, y):
        return logitless.linear_cross_entropy(x, w, y, softcap=20.0, label_smoothing=0.1) * 2

    compiled = torch.compile(f, backend=counter, fullgraph=True, dynamic=True)
    w = torch.randn(101, 19, requires_grad=True)
    frames = set()
    for rows in (5, 23, 64, 7, 130):
        x = torch.randn(rows, 19, requires_grad=True)
        y = torch.randint(0, 101, (rows,))
        y[: rows // 2] = -100
        ours, theirs = compiled(x, w, y), f(x, w, y)
        assert torch.equal(ours, theirs)
        for mine, other in zip(gradients(ours, [x, w]), gradients(theirs, [x, w]), strict=True):
            assert_near(mine, other, torch.float32, factor=4)
        frames.add(counter.frame_count)
    assert len(frames) == 1  # all were the first call's


def test_compile_rows_and_outputs(clean_compiler):
    p = Problem()

    def f(x, w, y):
        logprob, entropy = logitless.token_logprobs(x, w, y, temperature=0.9, return_entropy=True)
        return (logprob * torch.arange(len(y))).sum() + 0.1 * entropy.sum()

    compiled = torch.compile(f, fullgraph=True, dynamic=True)
    ours, theirs = compiled(p.x, p.w, p.y), f(p.x, p.w, p.y)
    assert_near(ours, theirs, torch.float32, factor=4)
    for mine, other in zip(gradients(ours, p.leaves()), gradients(theirs, p.leaves()), strict=True):
        assert_near(mine, other, torch.float32, factor=4)


def test_compile_shift_mask_and_soft(clean_compiler):
    p = Problem(shape=(2, 9), ignored=False)
    keep = torch.rand(2, 9, 101) < 0.7

    def f(x, w, y, keep):
        a = logitless.linear_cross_entropy(x, w, y, shift=True, keep_mask=keep, normalizer=(y != -100).sum())
        return a + logitless.linear_cross_entropy(x, w, torch.softmax(keep.float(), -1))

    ours, theirs = torch.compile(f, fullgraph=True)(p.x, p.w, p.y, keep), f(p.x, p.w, p.y, keep)
    assert_near(ours, theirs, torch.float32, factor=4)
    for mine, other in zip(gradients(ours, p.leaves()), gradients(theirs, p.leaves()), strict=True):
        assert_near(mine, other, torch.float32, factor=4)


def test_compiled_module_with_frozen_weight(clean_compiler):
    head = logitless.LinearCrossEntropy(19, 101, label_smoothing=0.1)
    head.weight.requires_grad_(False)
    p = Problem()
    ours = torch.compile(head, fullgraph=True)(p.x, p.y)
    assert_near(gradients(ours, [p.x])[0], gradients(head(p.x, p.y), [p.x])[0], torch.float32, factor=4)


def test_export():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = logitless.LinearCrossEntropy(19, 101)

        def forward(self, x, y):
            return self.head(x, y, reduction="none")

    model = Model()
    p = Problem()
    rows = torch.export.Dim("rows", min=2, max=4096)
    exported = torch.export.export(model, (p.x.detach(), p.y), dynamic_shapes={"x": {0: rows}, "y": {0: rows}})
    x, y = torch.randn(40, 19), torch.randint(0, 101, (40,))
    assert torch.equal(exported.module()(x, y), model(x, y))
    assert sum("logitless.forward" in str(node.target) for node in exported.graph.nodes) == 1


def test_autocast_leaves_an_fp32_weight_alone():
    p = Problem(dtype=torch.bfloat16, weight_dtype=torch.float32, rows=64, vocab=501)
    with torch.autocast("cpu", torch.bfloat16):
        loss = logitless.linear_cross_entropy(p.x, p.w, p.y)
    assert loss.dtype == torch.float32
    gx, gw = gradients(loss, p.leaves())
    assert gw.dtype == torch.float32
    assert_near(gw, gradients(dense_ce(p), [p.w])[0], torch.float32)  # a weight cast to bf16 would miss by 1e-3


def test_meta_tensors_and_mixed_devices():
    x, w, y = (torch.empty(shape, device="meta") for shape in ((5, 8), (11, 8), (5,)))
    text = "kind=1 call=1 reduction=1 on_empty=2|hidden weight targets|loss stats"
    loss, stats = _ops.forward([x, w, y.long()], text)
    assert loss.device.type == "meta"
    assert stats.shape == (5, 4)
    with pytest.raises(RuntimeError, match="all must be on one device"):
        _ops.forward([torch.randn(5, 8), w, torch.zeros(5, dtype=torch.long)], text)
    with torch._subclasses.FakeTensorMode(), pytest.raises(RuntimeError, match="one device|device"):
        _ops.forward([torch.randn(5, 8), torch.empty(11, 8, device="meta"), torch.zeros(5, dtype=torch.long)], text)


# ---- processes and threads --------------------------------------------------------------------------------------------------


def _loss_of_a_worker(_=None):
    torch.manual_seed(7)
    x, w, y = torch.randn(50, 16), torch.randn(300, 16), torch.randint(0, 300, (50,))
    return logitless.linear_cross_entropy(x, w, y).item()


class _Losses(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return _loss_of_a_worker()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader(method):
    here = _loss_of_a_worker()  # the parent's threads are up when it forks
    loader = torch.utils.data.DataLoader(
        _Losses(), batch_size=2, num_workers=2, multiprocessing_context=method, timeout=60
    )
    for batch in loader:
        assert torch.allclose(batch, torch.full((2,), here, dtype=batch.dtype))


def test_threads_share_a_plan_key():
    import concurrent.futures

    p = Problem(rows=64)
    with torch.no_grad():
        wanted = logitless.linear_cross_entropy(p.x, p.w, p.y)

        def run(_):
            with torch.no_grad():
                return logitless.linear_cross_entropy(p.x, p.w, p.y)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert all(torch.equal(value, wanted) for value in pool.map(run, range(200)))


# ---- the module ----------------------------------------------------------------------------------------------------------------


def test_module():
    torch.manual_seed(3)
    linear = torch.nn.Linear(19, 101, bias=True)
    torch.manual_seed(3)
    head = logitless.LinearCrossEntropy(19, 101, bias=True)
    assert torch.equal(head.weight, linear.weight)
    assert head.state_dict().keys() == linear.state_dict().keys()
    head.load_state_dict(linear.state_dict())
    p = Problem()
    assert_near(head(p.x, p.y), F.cross_entropy(linear(p.x), p.y), torch.float32)
    shared = logitless.LinearCrossEntropy.from_linear(linear, softcap=9.0)
    assert shared.weight is linear.weight
    assert shared.bias is linear.bias
    assert_near(shared.logits(p.x), 9 * torch.tanh(linear(p.x) / 9), torch.float32)
    assert_near(shared(p.x, p.y), F.cross_entropy(shared.logits(p.x), p.y), torch.float32)
    assert "softcap=9.0" in repr(shared)
    assert torch.equal(copy.deepcopy(shared)(p.x, p.y), shared(p.x, p.y))
    with pytest.raises(TypeError, match="must be an nn.Linear"):
        logitless.LinearCrossEntropy.from_linear(torch.nn.Embedding(3, 3))


FSDP = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
import logitless

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(16, 24)
        self.head = logitless.LinearCrossEntropy(24, 203)
    def forward(self, x, y):
        return self.head(torch.tanh(self.body(x)), y)

def data(rank):
    torch.manual_seed(100 + rank)
    return torch.randn(32, 16), torch.randint(0, 203, (32,))

def main(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Model()
    dense = [torch.nn.functional.cross_entropy(torch.nn.functional.linear(torch.tanh(model.body(x)), model.head.weight), y)
             for x, y in map(data, range(2))]
    wanted = torch.autograd.grad(sum(dense) / 2, list(model.parameters()))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for part in (model.body, model.head, model):
        fully_shard(part, mesh=mesh)
    loss = model(*data(rank))
    loss.backward()
    assert abs(loss.item() - dense[rank].item()) < 1e-5, (loss, dense)
    for parameter, other in zip(model.parameters(), wanted):
        assert torch.allclose(parameter.grad.full_tensor(), other, rtol=1e-4, atol=1e-6)
    try:  # after backward the weight is sharded again
        logitless.linear_cross_entropy(torch.randn(3, 24), model.head.weight, torch.zeros(3, dtype=torch.long))
    except TypeError as error:
        assert "still sharded" in str(error), error
    else:
        raise AssertionError("a sharded weight was taken")
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(main, (sys.argv[1],), nprocs=2)
    print("equal")
"""


def test_fully_shard_on_two_ranks(tmp_path):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = tmp_path / "fsdp.py"
    script.write_text(textwrap.dedent(FSDP))
    done = subprocess.run([sys.executable, script, port], capture_output=True, text=True, timeout=180)
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]


def test_start_methods_exist():
    assert {"fork", "spawn"} <= set(multiprocessing.get_all_start_methods())


def test_compiled_retain_graph_is_documented_and_right_when_donation_is_off(clean_compiler):
    import torch._functorch.config as config

    p = Problem()
    with config.patch(donated_buffer=False):
        loss = torch.compile(lambda x, w, y: logitless.linear_cross_entropy(x, w, y), fullgraph=True)(p.x, p.w, p.y)
        wanted = gradients(dense_ce(p), p.leaves())
        for factor in (2.0, 3.0, 5.0):
            for mine, other in zip(gradients(loss * factor, p.leaves(), retain_graph=True), wanted, strict=True):
                assert_near(mine, other * factor, torch.float32)


def test_dense_oracle_agrees_with_pytorch():
    p = Problem()
    w = torch.rand(101)
    for alpha in (0.0, 0.2):
        assert_near(
            dense.loss(dense.logits(p.x, p.w), p.y, weight=w, label_smoothing=alpha),
            F.cross_entropy(p.x.double() @ p.w.double().T, p.y, weight=w.double(), label_smoothing=alpha),
            torch.float64,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_exponentials_serve_the_backward_of_rows(dtype):
    p = Problem(rows=64, hidden=32, vocab=1000, dtype=dtype)
    upstream = torch.randn(64)
    plain = logitless.linear_cross_entropy(p.x, p.w, p.y, reduction="none")
    wanted = gradients(plain, p.leaves(), upstream)
    for memory in ("40KiB", "1MiB"):
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):  # noqa: B023
            loss = logitless.linear_cross_entropy(p.x, p.w, p.y, reduction="none", saved_memory=memory)
        assert [t.numel() for t in seen if t.dtype == torch.uint8] == [{"40KiB": 40 << 10, "1MiB": 1 << 20}[memory]]
        assert torch.equal(loss, plain)
        for _ in range(2):
            for mine, other in zip(gradients(loss, p.leaves(), upstream, retain_graph=True), wanted, strict=True):
                assert_near(mine, other, dtype)
    with pytest.raises(ValueError, match="saved_memory: 'much'"):
        logitless.linear_cross_entropy(p.x, p.w, p.y, reduction="none", saved_memory="much")
