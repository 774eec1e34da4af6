#!/usr/bin/env python3
"""Times the CUDA backend on this machine beside its floor and its peers, and prints one table.

Needs a GPU, torch, and LOGITLESS_LIBRARY naming a liblogitless.so built with CUDA. The library is called through its C
ABI with torch's memory and stream. In each round every contender runs in turn, so that the chip's power and clocks are
the same for all; figures are medians. Floors: cuBLAS's bf16 products on the same operands (torch.matmul), or a read or
a copy of the same bytes. Data are random, or trained-like: targets by Zipf's law that the logits know (a loss of a few
nats), every 17th row ignored.

    bench/gpu.py [--suite linear logits options ignored sweep] [--quick] [--compile] [--json FILE]
"""

import argparse
import ctypes
import json
import math
import os
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))

import torch  # noqa: E402

from logitless import _abi, _library  # noqa: E402

DTYPES = {torch.float32: _abi.F32, torch.bfloat16: _abi.BF16, torch.float16: _abi.F16, torch.int64: _abi.I64,
          torch.int32: _abi.I32, torch.uint8: _abi.U8, torch.float64: _abi.F64}
MIB = 1 << 20


def tensor(t):
    out = _abi.Tensor(size=ctypes.sizeof(_abi.Tensor), data=t.data_ptr(), dtype=DTYPES[t.dtype],
                      device_type=_abi.DEVICE_CUDA, device_id=t.device.index or 0, ndim=t.dim())
    for i in range(t.dim()):
        out.shape[i], out.stride[i] = t.shape[i], t.stride(i)
    return out


class Context:
    def __init__(self):
        self.library = _library.library()
        options = _abi.ContextOptions()
        self.library.ll_context_options_init_sized(ctypes.byref(options), ctypes.sizeof(options))
        options.backend = _abi.BACKEND_CUDA
        handle = ctypes.c_void_p()
        _library.check(self.library.ll_context_create(ctypes.byref(options), ctypes.byref(handle)))
        self.handle = handle.value

    def status(self):
        _library.check(self.library.ll_check_status(self.handle, torch.cuda.current_stream().cuda_stream))


class Run:
    """A plan with its tensors, ready to be enqueued again and again."""

    def __init__(self, context, call, problem, tensors, options=None):
        self.library, self.call = context.library, call
        p, o, a = _abi.Problem(), _abi.Options(), _abi.Arguments()
        self.library.ll_problem_init_sized(ctypes.byref(p), ctypes.sizeof(p))
        self.library.ll_options_init_sized(ctypes.byref(o), ctypes.sizeof(o))
        self.library.ll_arguments_init_sized(ctypes.byref(a), ctypes.sizeof(a))
        p.call = call
        o.on_empty = _abi.ON_EMPTY["nan"]
        for name, value in problem.items():
            setattr(p, name, value)
        for name, value in (options or {}).items():
            setattr(o, name, value)
        plan = ctypes.c_void_p()
        _library.check(self.library.ll_plan_create(context.handle, ctypes.byref(p), ctypes.byref(o), ctypes.byref(plan)))
        self.plan = plan.value
        self.bytes = self.library.ll_plan_workspace_bytes(self.plan)
        self.workspace = torch.empty(max(1, self.bytes), dtype=torch.uint8, device="cuda")
        self.arguments, self.owners = a, []
        self.set(tensors)
        self.function = {_abi.FORWARD: self.library.ll_forward, _abi.FORWARD_BACKWARD: self.library.ll_forward_backward,
                         _abi.BACKWARD: self.library.ll_backward}[call]

    def set(self, tensors):
        for name, t in tensors.items():
            view = tensor(t)
            self.owners += [view, t]
            setattr(self.arguments, name, ctypes.addressof(view))

    def __call__(self):
        _library.check(self.function(self.plan, ctypes.byref(self.arguments), self.workspace.data_ptr(), self.bytes,
                                     torch.cuda.current_stream().cuda_stream))

    def describe(self):
        return _library.described(self.library.ll_plan_describe, self.plan, _abi.TEXT)

    def close(self):
        self.library.ll_plan_destroy(self.plan)
        self.workspace = None


def made(rows, hidden, vocab, regime, dtype=torch.bfloat16):
    """X [R,H], W [V,H], y [R]."""
    torch.manual_seed(rows + vocab)
    w = torch.randn(vocab, hidden, device="cuda") / math.sqrt(hidden)
    if regime == "trained":
        frequency = torch.arange(1, vocab + 1, device="cuda", dtype=torch.float32).reciprocal()
        y = torch.multinomial(frequency, rows, replacement=True)
        # Towards the target's row by 4 to 18, noise of a few nats.
        x = w[y] * (4 + 14 * torch.rand(rows, 1, device="cuda")) + 1.5 * torch.randn(rows, hidden, device="cuda")
    else:
        y = torch.randint(0, vocab, (rows,), device="cuda")
        x = torch.randn(rows, hidden, device="cuda")
    y[::17] = -100
    return x.to(dtype), w.to(dtype), y


def timed(contenders, rounds=5, inner=3, warm=2):
    """Median milliseconds of each, all of them in turn in every round."""
    times = {name: [] for name in contenders}
    for f in contenders.values():
        for _ in range(warm):
            f()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, f in contenders.items():
            f()
            for _ in range(inner):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                f()
                end.record()
                end.synchronize()
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}


def timed_graph(contenders, rounds=7, copies=20):
    """The same for short ones: a graph of many calls, over contenders that take an index of the buffer to use."""
    graphs = {}
    for name, f in contenders.items():
        for i in range(3):
            f(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(copies):
                f(i)
        graphs[name] = graph.replay
    return {name: t / copies for name, t in timed(graphs, rounds, 1, 1).items()}


class Table:
    def __init__(self):
        self.rows = []

    def add(self, job, who, ms, floor, bar=None, mib=None, note=""):
        self.rows.append({"job": job, "who": who, "ms": ms, "of_floor": ms / floor, "reach": bar, "mib": mib,
                          "note": note})
        print(self.line(self.rows[-1]), flush=True)

    @staticmethod
    def line(r):
        bar = "" if r["reach"] is None else f"<= {r['reach']:.2f} " + ("met" if r["of_floor"] <= r["reach"] else "MISSED")
        mib = "" if r["mib"] is None else f"{r['mib']:8.1f} MiB"
        return f"{r['job']:<34} {r['who']:<28} {r['ms']:9.4f} ms {r['of_floor']:6.3f} x {bar:<15}{mib:<14}{r['note']}"


def eager(x, w, y):
    def step():
        xx, ww = x.detach().requires_grad_(), w.detach().requires_grad_()
        torch.nn.functional.cross_entropy((xx @ ww.t()).float(), y).backward()
        return xx.grad, ww.grad
    return step


def peak(f):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    f()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def exact_hidden(x, w, y, rows):
    """dX of some rows, in fp32 from fp32 operands."""
    n = (y != -100).sum()
    z = x[rows].float() @ w.float().t()
    p = torch.softmax(z, 1)
    t = y[rows]
    p[torch.arange(len(rows), device="cuda"), t.clamp(min=0)] -= 1
    p[t == -100] = 0
    return (p / n) @ w.float()


def error(got, want):
    return ((got.float() - want).norm() / want.norm()).item()


def linear_problem(x, w, dx=True, dw=True, budget=0, **more):
    return {"kind": _abi.LINEAR, "rows": x.shape[0], "hidden": x.shape[1], "vocab": w.shape[0],
            "hidden_dtype": DTYPES[x.dtype], "weight_dtype": DTYPES[w.dtype],
            "grad_hidden_dtype": DTYPES[x.dtype] if dx else 0, "grad_weight_dtype": DTYPES[w.dtype] if dw else 0,
            "memory_budget": budget, **more}


def floor_products(x, w, y):
    """What three products take on the operands of the step: logits, E W, E^T X."""
    z = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device="cuda")
    reference = (x[:, :].float() @ w[:256].float().t()).amax(1, keepdim=True)
    e = torch.empty_like(z)
    for i in range(0, x.shape[0], 1024):
        e[i:i + 1024] = torch.exp(x[i:i + 1024].float() @ w.float().t() - reference[i:i + 1024]).to(x.dtype)
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    first = lambda: torch.matmul(x, w.t(), out=z)  # noqa: E731

    def all_three():
        torch.matmul(x, w.t(), out=z)
        torch.matmul(e, w, out=dx)
        torch.matmul(e.t(), x, out=dw)
    return first, all_three


LINEAR = [(8192, 4096, 131072, 1.03, 2300), (4096, 4096, 128256, 1.03, 1150), (4096, 2048, 32000, 1.08, 350)]


def suite_linear(context, table, args):
    for rows, hidden, vocab, bar, mib in LINEAR[-1:] if args.quick else LINEAR:
        for regime in ("trained",) if args.quick else ("trained", "random"):
            x, w, y = made(rows, hidden, vocab, regime)
            first, three = floor_products(x, w, y)
            dx, dw, loss = torch.empty_like(x), torch.empty_like(w), torch.empty(1, device="cuda")
            tensors = {"hidden": x, "weight": w, "targets": y, "grad_hidden": dx, "grad_weight": dw, "loss": loss}
            runs = {}
            budgets = [(f"{mib} MiB", bar, mib * MIB), ("700 MiB", 1.25, 700 * MIB), ("450 MiB", 1.35, 450 * MIB)]
            if rows < 8192:
                budgets = [(f"{mib} MiB", bar, mib * MIB), (f"{mib // 3} MiB", None, mib * MIB // 3)]
            for name, goal, budget in budgets:
                runs[f"ours, {name}"] = (Run(context, _abi.FORWARD_BACKWARD, linear_problem(x, w, budget=budget),
                                             tensors), goal)
            job = f"{rows}x{hidden}x{vocab} {regime}"
            contenders = {"floor: three products": three, **{n: r for n, (r, _) in runs.items()}}
            if regime == "trained" and not args.quick:
                contenders["torch eager, fp32 logits"] = eager(x, w, y)
                if args.compile:
                    contenders["torch compile"] = torch.compile(eager(x, w, y))
            times = timed(contenders)
            floor = times["floor: three products"]
            sample = torch.arange(0, rows, max(1, rows // 256), device="cuda")
            want = exact_hidden(x, w, y, sample)
            for name, ms in times.items():
                goal, used, note = None, None, ""
                if name in runs:
                    run, goal = runs[name]
                    dx.fill_(float("nan"))
                    run()
                    used, note = run.bytes / MIB, f"loss {loss.item():.4f} dX error {error(dx[sample], want):.1e}"
                elif name.startswith("torch"):
                    used = peak(contenders[name])
                table.add(job, name, ms, floor, goal, used, note)
            for run, _ in runs.values():
                run.close()
            # Loss alone, beside one product.
            forward = Run(context, _abi.FORWARD, linear_problem(x, w, False, False, budget=64 * MIB),
                          {k: tensors[k] for k in ("hidden", "weight", "targets", "loss")})
            times = timed({"floor: one product": first, "ours, loss alone": forward})
            table.add(job, "ours, loss alone", times["ours, loss alone"], times["floor: one product"],
                      1.04 if rows == 8192 else None,
                      forward.bytes / MIB)
            forward.close()
            del x, w, y, dx, dw, tensors, first, three, contenders
            torch.cuda.empty_cache()


LOGITS = [(2048, 32000, torch.float16, 48 / 36, 85 / 71), (8192, 131072, torch.bfloat16, 0.58 / 0.52, 1.20 / 1.05),
          (2048, 50257, torch.bfloat16, None, None), (65543, 1000, torch.bfloat16, None, None)]


def suite_logits(context, table, args):
    for rows, vocab, dtype, loss_bar, both_bar in LOGITS[:1] if args.quick else LOGITS:
        buffers = max(2, min(8, int(4e9 // (rows * vocab * 2 * 2))))
        zs = [torch.randn(rows, vocab, device="cuda").mul_(2).to(dtype) for _ in range(buffers)]
        ds = [torch.empty_like(z) for z in zs]
        y = torch.randint(0, vocab, (rows,), device="cuda")
        y[::17] = -100
        loss = torch.empty(1, device="cuda")
        problem = {"kind": _abi.LOGITS, "rows": rows, "vocab": vocab, "logits_dtype": DTYPES[dtype]}
        forward = [Run(context, _abi.FORWARD, problem, {"logits": z, "targets": y, "loss": loss}) for z in zs]
        both = [Run(context, _abi.FORWARD_BACKWARD, {**problem, "grad_logits_dtype": DTYPES[dtype]},
                    {"logits": z, "targets": y, "loss": loss, "grad_logits": d}) for z, d in zip(zs, ds, strict=True)]
        at = lambda i: i % buffers  # noqa: E731
        contenders = {"copy": lambda i: ds[at(i)].copy_(zs[at(i)]),
                      "ours, loss": lambda i: forward[at(i)](), "ours, loss and gradient": lambda i: both[at(i)]()}
        times = timed_graph(contenders, copies=20 if rows * vocab < 1e9 else 4)
        job = f"logits {rows}x{vocab} {str(dtype)[6:]}"
        table.add(job, "floor: copy", times["copy"], times["copy"])
        # A read is half a copy's bytes, at the copy's rate.
        table.add(job, "ours, loss (of half a copy)", times["ours, loss"], times["copy"] / 2, loss_bar,
                  forward[0].bytes / MIB)
        table.add(job, "ours, loss and gradient", times["ours, loss and gradient"], times["copy"], both_bar,
                  both[0].bytes / MIB)
        if not args.quick:
            z = zs[0].clone().requires_grad_()

            def torch_step(z=z, y=y):
                z.grad = None
                torch.nn.functional.cross_entropy(z, y).backward()
            table.add(job, "F.cross_entropy, both", timed({"t": torch_step})["t"], times["copy"])
        for run in forward + both:
            run.close()
        del zs, ds, forward, both
        torch.cuda.empty_cache()


def suite_options(context, table, args):
    rows, hidden, vocab = (4096, 2048, 32000) if args.quick else (4096, 4096, 128256)
    x, w, y = made(rows, hidden, vocab, "trained")
    dx, dw, loss = torch.empty_like(x), torch.empty_like(w), torch.empty(1, device="cuda")
    per_row = torch.empty(rows, device="cuda")
    base = {"hidden": x, "weight": w, "targets": y, "grad_hidden": dx, "grad_weight": dw, "loss": loss}
    variants = {"plain": ({}, {}, {}), "smoothing 0.1": ({}, {"label_smoothing": 0.1}, {}),
                "softcap 30": ({}, {"softcap": 30.0}, {}), "z-loss 1e-4": ({}, {"z_loss": 1e-4}, {}),
                "entropy": ({"outputs": 1}, {}, {"row_entropy": per_row}),
                "filter 2^-17": ({}, {"filter": 2.0 ** -17, "filter_seed": 7}, {})}
    runs = {name: Run(context, _abi.FORWARD_BACKWARD, linear_problem(x, w, budget=2300 * MIB, **p), {**base, **t}, o)
            for name, (p, o, t) in variants.items()}
    times = timed(runs)
    for name, ms in times.items():
        table.add(f"options {rows}x{hidden}x{vocab}", name, ms, times["plain"],
                  None if name in ("plain", "filter 2^-17") else 1.05, runs[name].bytes / MIB)
    for run in runs.values():
        run.close()


def suite_ignored(context, table, args):
    rows, hidden, vocab = (4096, 2048, 32000) if args.quick else (8192, 4096, 131072)
    x, w, y = made(rows, hidden, vocab, "trained")
    few = y.clone()
    few[torch.rand(rows, device="cuda") < 0.75] = -100
    kept = int((few != -100).sum())
    dx, dw, loss = torch.empty_like(x), torch.empty_like(w), torch.empty(1, device="cuda")
    base = {"hidden": x, "weight": w, "grad_hidden": dx, "grad_weight": dw, "loss": loss}
    full = Run(context, _abi.FORWARD_BACKWARD, linear_problem(x, w, budget=2300 * MIB), {**base, "targets": y})
    part = Run(context, _abi.FORWARD_BACKWARD, linear_problem(x, w, budget=2300 * MIB, most_kept_rows=kept),
               {**base, "targets": few})
    times = timed({"all rows": full, f"{kept} of {rows} kept, known": part})
    for name, ms in times.items():
        table.add(f"ignored {rows}x{hidden}x{vocab}", name, ms, times["all rows"], 0.32 if "kept" in name else None)
    full.close(), part.close()


def suite_sweep(context, table, args):
    """R in steps of 64 around 4096: time a row beside the best's."""
    hidden, vocab = 2048, 32000
    per_row = {}
    for rows in range(3840, 4353, 64):
        x, w, y = made(rows, hidden, vocab, "trained")
        run = Run(context, _abi.FORWARD_BACKWARD, linear_problem(x, w),
                  {"hidden": x, "weight": w, "targets": y, "grad_hidden": torch.empty_like(x),
                   "grad_weight": torch.empty_like(w), "loss": torch.empty(1, device="cuda")})
        per_row[rows] = timed({"t": run}, rounds=3)["t"] / rows
        run.close()
    best = min(per_row.values())
    worst = max(per_row, key=per_row.get)
    table.add(f"sweep R 3840..4352 {hidden}x{vocab}", f"worst, R {worst}", per_row[worst] * worst, best * worst, 1.12)


SUITES = {"linear": suite_linear, "logits": suite_logits, "options": suite_options, "ignored": suite_ignored,
          "sweep": suite_sweep}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--quick", action="store_true", help="one small shape of each")
    parser.add_argument("--compile", action="store_true", help="torch.compile as a peer (a minute to compile)")
    parser.add_argument("--json", help="write the rows to FILE")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    context, table = Context(), Table()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, os.environ.get("LOGITLESS_LIBRARY", ""))
    for name in args.suite:
        SUITES[name](context, table, args)
    context.status()
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(table.rows, indent=1))
    print("\n" + "\n".join(Table.line(r) for r in table.rows))


if __name__ == "__main__":
    main()
