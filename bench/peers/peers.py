#!/usr/bin/env python3
"""Logitless beside PyTorch on the CPU, alternating in one run, on the same data.

Suite linear (X [R,H], W [V,H], y [R]): loss and both gradients by logitless, by torch's eager loss, by
F.linear_cross_entropy with options None and LinearCrossEntropyOptions(), and torch's three products alone (on the kept
rows, into ready memory: the least that a pipeline of dense products can take). Suite logits (z [R,V]): loss and
gradient by logitless in place and by F.cross_entropy. Figures are medians over the rounds.

Needs torch alone (pip install torch==2.13.0); logitless is loaded by ctypes from --library, with the structs of
logitless.h written out below. `logitless bench --peers` starts it; by itself:

    python3 bench/peers/peers.py --library build/release/lib/liblogitless.so
"""

import argparse
import ctypes
import json
import math
import os
import platform
import statistics
import sys
import time
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch without numpy: nothing here needs it

MOST_ROUNDS = 15
WORTH_WARMING = 1.0  # seconds: a shorter first run is not counted
# libgomp's threads spin for some milliseconds after a torch call and would take cores from logitless's.
PAUSE = 0.05

# ---- logitless.h, as far as needed ----------------------------------------------------------------------------------

F32, BF16, F16, I64 = 1, 2, 3, 6
LINEAR, LOGITS = 1, 2
FORWARD_BACKWARD = 2
IN_PLACE = 8


class LlTensor(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint64), ("data", ctypes.c_void_p), ("dtype", ctypes.c_int32),
                ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("shape", ctypes.c_int64 * 4), ("stride", ctypes.c_int64 * 4)]


class LlContextOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint64), ("backend", ctypes.c_int32), ("threads", ctypes.c_int32),
                ("parallel_for", ctypes.c_void_p), ("parallel_for_user", ctypes.c_void_p),
                ("cpu_target", ctypes.c_char_p)]


class LlOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint64), ("reduction", ctypes.c_int32), ("smoothing", ctypes.c_int32),
                ("label_smoothing", ctypes.c_double), ("ignore_index", ctypes.c_int64),
                ("normalizer", ctypes.c_double), ("on_empty", ctypes.c_int32), ("reserved", ctypes.c_int32)]


class LlProblem(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint64), ("kind", ctypes.c_int32), ("call", ctypes.c_int32),
                ("rows", ctypes.c_int64), ("hidden", ctypes.c_int64), ("vocab", ctypes.c_int64),
                ("hidden_dtype", ctypes.c_int32), ("weight_dtype", ctypes.c_int32), ("logits_dtype", ctypes.c_int32),
                ("grad_hidden_dtype", ctypes.c_int32), ("grad_weight_dtype", ctypes.c_int32),
                ("grad_logits_dtype", ctypes.c_int32), ("flags", ctypes.c_uint64),
                ("memory_budget", ctypes.c_uint64)]


_P = ctypes.POINTER(LlTensor)


class LlArguments(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint64), ("hidden", _P), ("weight", _P), ("logits", _P), ("targets", _P),
                ("loss", _P), ("row_loss", _P), ("row_lse", _P), ("row_logprob", _P), ("stats", _P),
                ("grad_hidden", _P), ("grad_weight", _P), ("grad_logits", _P), ("grad_loss", ctypes.c_double),
                ("grad_row_loss", _P), ("lse", _P), ("kept_rows", ctypes.POINTER(ctypes.c_int64)),
                ("bad_rows", ctypes.POINTER(ctypes.c_int64))]


class Logitless:
    """The library and one context."""

    def __init__(self, path, threads, cpu_target):
        self.lib = ctypes.CDLL(path)
        self.lib.ll_last_error.restype = ctypes.c_char_p
        self.lib.ll_version.restype = ctypes.c_char_p
        self.lib.ll_plan_workspace_bytes.restype = ctypes.c_size_t
        self.lib.ll_plan_workspace_bytes.argtypes = [ctypes.c_void_p]
        self.lib.ll_context_destroy.argtypes = [ctypes.c_void_p]
        self.lib.ll_plan_destroy.argtypes = [ctypes.c_void_p]
        describe = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)]
        self.lib.ll_context_describe.argtypes = describe
        self.lib.ll_forward_backward.argtypes = [ctypes.c_void_p, ctypes.POINTER(LlArguments), ctypes.c_void_p,
                                                 ctypes.c_size_t, ctypes.c_void_p]
        options = LlContextOptions()
        self.lib.ll_context_options_init(ctypes.byref(options))
        options.threads = threads
        options.cpu_target = cpu_target.encode() if cpu_target else None
        self.context = ctypes.c_void_p()
        self.check(self.lib.ll_context_create(ctypes.byref(options), ctypes.byref(self.context)))

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.ll_last_error().decode())

    def version(self):
        return self.lib.ll_version().decode()

    def describe(self):
        length = ctypes.c_size_t()
        self.check(self.lib.ll_context_describe(self.context, 2, None, 0, ctypes.byref(length)))
        text = ctypes.create_string_buffer(length.value + 1)
        self.check(self.lib.ll_context_describe(self.context, 2, text, len(text), ctypes.byref(length)))
        return json.loads(text.value.decode())


class LossAndGradients:
    """One plan with its tensors and workspace; run() returns the loss."""

    def __init__(self, torch, library, in_place=False, **tensors):
        names = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.int64: I64}
        self.library, self.tensors = library, tensors
        self.loss = torch.zeros(1, dtype=torch.float32)
        views = {}
        for name, t in {**tensors, "loss": self.loss}.items():
            view = LlTensor(ctypes.sizeof(LlTensor), t.data_ptr(), names[t.dtype], 1, 0, t.dim())
            view.shape[:t.dim()] = t.shape
            view.stride[:t.dim()] = t.stride()
            views[name] = view
        problem, options = LlProblem(), LlOptions()
        library.lib.ll_problem_init(ctypes.byref(problem))
        library.lib.ll_options_init(ctypes.byref(options))
        problem.call = FORWARD_BACKWARD
        if "logits" in tensors:
            problem.kind, problem.logits_dtype = LOGITS, views["logits"].dtype
            problem.rows, problem.vocab = tensors["logits"].shape
            problem.grad_logits_dtype = views["grad_logits"].dtype
            problem.flags = IN_PLACE if in_place else 0
        else:
            problem.kind = LINEAR
            problem.rows, problem.hidden = tensors["hidden"].shape
            problem.vocab = tensors["weight"].shape[0]
            for name in ("hidden", "weight", "grad_hidden", "grad_weight"):
                setattr(problem, name + "_dtype", views[name].dtype)
        self.plan = ctypes.c_void_p()
        library.check(library.lib.ll_plan_create(library.context, ctypes.byref(problem), ctypes.byref(options),
                                                 ctypes.byref(self.plan)))
        self.bytes = library.lib.ll_plan_workspace_bytes(self.plan)
        self.workspace = torch.ones(self.bytes + 64, dtype=torch.uint8)  # written once: no page faults later
        self.aligned = (self.workspace.data_ptr() + 63) // 64 * 64
        self.arguments = LlArguments()
        library.lib.ll_arguments_init(ctypes.byref(self.arguments))
        for name, view in views.items():
            setattr(self.arguments, name, ctypes.pointer(view))

    def run(self):
        self.library.check(self.library.lib.ll_forward_backward(self.plan, ctypes.byref(self.arguments), self.aligned,
                                                                self.bytes, None))
        return self.loss.item()

    def close(self):
        self.library.lib.ll_plan_destroy(self.plan)


# ---- data -----------------------------------------------------------------------------------------------------------


def make_targets(torch, args):
    """Zipf's law over the classes; a share of the rows has none."""
    u = torch.rand(args.rows, dtype=torch.float64)
    targets = ((u * math.log(args.vocab + 1)).exp() - 1).long().clamp(0, args.vocab - 1)
    labels = torch.where(torch.rand(args.rows) < args.ignored, torch.tensor(-100), targets)
    if (labels < 0).all():
        labels[0] = targets[0]
    return targets, labels


def make_linear(torch, args, dtype):
    """As `logitless bench` does: a log prior, noise, and a lift of the target by 0 to 10. The loss is a few nats."""
    targets, labels = make_targets(torch, args)
    w = torch.randn(args.vocab, args.hidden) * (1.5 / math.sqrt(args.hidden))
    prior = 5 - torch.arange(1, args.vocab + 1, dtype=torch.float32).log()
    if args.hidden > 1:
        w[:, 0] = prior / 4
    x = torch.randn(args.rows, args.hidden) + w[targets] * (torch.rand(args.rows, 1) * 10 / 2.25)
    if args.hidden > 1:
        x[:, 0] = 4
    return x.to(dtype), w.to(dtype), labels


def make_logits(torch, args, dtype):
    targets, labels = make_targets(torch, args)
    z = torch.randn(args.rows, args.vocab).mul_(1.5)
    z += 5 - torch.arange(1, args.vocab + 1, dtype=torch.float32).log()
    z[torch.arange(args.rows), targets] += torch.rand(args.rows) * 10
    return z.to(dtype), labels


# ---- measuring ------------------------------------------------------------------------------------------------------


class Row:
    def __init__(self, name, who, run, prepare=None, required=False, note=""):
        self.name, self.who, self.run, self.prepare, self.required, self.note = name, who, run, prepare, required, note
        self.seconds, self.loss = [], None

    def once(self):
        if self.prepare:
            self.prepare()
        time.sleep(PAUSE)
        start = time.perf_counter()
        loss = self.run()
        taken = time.perf_counter() - start
        if loss is not None:
            self.loss = loss
        return taken

    def median(self):
        return statistics.median(self.seconds)


def measure(rows, seconds, repeats):
    """Rounds over all rows, forwards and backwards in turn, until the time or the repeats are used up."""
    start = time.perf_counter()
    rows_to_run = [row for row in rows if row.run]
    for round_ in range(repeats or MOST_ROUNDS):
        any_ran = False
        for row in rows_to_run if round_ % 2 == 0 else rows_to_run[::-1]:
            spent = time.perf_counter() - start
            if not repeats and round_ == 0 and not row.required and spent > seconds:
                row.note = f"not run: the {seconds:.0f} s of --seconds were over"
                continue
            if round_ > 0 and (not row.seconds or (not repeats and spent + row.median() > seconds)):
                continue
            taken = row.once()
            if round_ == 0 and taken < WORTH_WARMING:
                taken = row.once()
            row.seconds.append(taken)
            any_ran = True
        if not any_ran:
            break


def suite_linear(torch, library, args, dtype):
    F = torch.nn.functional
    x, w, y = make_linear(torch, args, dtype)
    dx, dw = torch.ones_like(x), torch.ones_like(w)
    ours = LossAndGradients(torch, library, hidden=x, weight=w, targets=y, grad_hidden=dx, grad_weight=dw)

    kept_x = x[y >= 0].contiguous()
    kept_dx = torch.ones_like(kept_x)
    d = torch.ones(kept_x.shape[0], args.vocab, dtype=dtype)

    def products():
        torch.mm(kept_x, w.T, out=d)
        torch.mm(d, w, out=kept_dx)
        torch.mm(d.T, kept_x, out=dw)

    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]

    def with_gradients(loss_of):
        def run():
            for leaf in leaves:
                leaf.grad = None
            loss = loss_of(*leaves)
            loss.backward()
            return loss.item()

        return run

    rows = [
        Row("loss + gradients", "logitless", ours.run, required=True),
        Row("three products", "torch", products, required=True),
        Row("F.linear, F.cross_entropy", "torch", with_gradients(lambda a, b: F.cross_entropy(F.linear(a, b), y)),
            required=True),
    ]
    if dtype != torch.float32:
        rows.append(Row("F.linear, to fp32, F.cross_entropy", "torch",
                        with_gradients(lambda a, b: F.cross_entropy(F.linear(a, b).float(), y))))
    fused = getattr(F, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    missing = f"torch {torch.__version__} does not have it"
    rows.append(Row("F.linear_cross_entropy, None", "torch",
                    with_gradients(lambda a, b: fused(a, b, y, options=None)) if fused else None,
                    note="" if fused else missing))
    rows.append(Row("F.linear_cross_entropy, Options()", "torch",
                    with_gradients(lambda a, b: fused(a, b, y, options=options())) if fused and options else None,
                    note="" if fused and options else missing))
    measure(rows, args.seconds, args.repeats)
    ours.close()
    return rows, {"rows": args.rows, "hidden": args.hidden, "vocab": args.vocab, "kept": kept_x.shape[0],
                  "workspace_bytes": ours.bytes}


def suite_logits(torch, library, args, dtype):
    F = torch.nn.functional
    z, y = make_logits(torch, args, dtype)
    work, apart = z.clone(), torch.ones_like(z)
    in_place = LossAndGradients(torch, library, in_place=True, logits=work, targets=y, grad_logits=work)
    separate = LossAndGradients(torch, library, logits=z, targets=y, grad_logits=apart)
    leaf = z.clone().requires_grad_()

    def eager():
        leaf.grad = None
        loss = F.cross_entropy(leaf, y)
        loss.backward()
        return loss.item()

    rows = [
        Row("loss + gradient in place", "logitless", in_place.run, prepare=lambda: work.copy_(z), required=True),
        Row("loss + gradient apart", "logitless", separate.run, required=True),
        Row("F.cross_entropy", "torch", eager, required=True),
    ]
    measure(rows, args.seconds / 2, args.repeats)
    in_place.close()
    separate.close()
    return rows, {"rows": args.rows, "vocab": args.vocab, "kept": int((y >= 0).sum())}


def report(suite, dtype, rows, facts):
    """The table as text on stdout, and as an object. ratio: ours over theirs."""
    ours = rows[0]
    table = {"suite": suite, "dtype": dtype, **facts, "rows_measured": []}
    print(f"\n{suite}, {dtype}, beside torch: " + " ".join(f"{k} {v}" for k, v in facts.items()))
    print(f"{'':50} {'ms':>10} {'ours/it':>8} {'loss':>10}")
    for row in rows:
        entry = {"name": row.name, "who": row.who}
        line = f"  {row.who:9} {row.name:38}"
        if row.seconds:
            entry.update(seconds=row.median(), seconds_best=min(row.seconds), samples=row.seconds)
            line += f" {1e3 * row.median():10.2f}"
            if row.who != "logitless":
                entry["ours_over_this"] = ours.median() / row.median()
                line += f" {entry['ours_over_this']:8.3f}"
            else:
                line += " " * 9
            if row.loss is not None:
                entry["loss"] = row.loss
                line += f" {row.loss:10.5f}"
        else:
            line += f" {'-':>10}"
        if row.note:
            entry["note"] = row.note
            line += "  " + row.note
        print(line, flush=True)
        table["rows_measured"].append(entry)
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True, help="liblogitless.so")
    parser.add_argument("--suite", default="all", help="linear, logits or all; others run nothing")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--dtype", default="", help="f32, bf16, f16, several with commas; linear bf16, logits f32,bf16")
    parser.add_argument("--ignored", type=float, default=1 / 17, help="share of rows without target")
    parser.add_argument("--threads", type=int, default=0, help="of both; 0: all CPUs of this process")
    parser.add_argument("--cpu-target", default="", help="of logitless")
    parser.add_argument("--seconds", type=float, default=45.0, help="to aim at for each suite")
    parser.add_argument("--repeats", type=int, default=0, help="rounds; 0: as many as fit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="FILE for the result, - for stdout instead of the tables")
    args = parser.parse_args()

    try:
        import torch
    except ImportError:
        sys.exit("peers.py: torch is not installed for " + sys.executable + "; pip install torch==2.13.0")
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    for name in filter(None, args.dtype.split(",")):
        if name not in dtypes:
            parser.error(f"dtype: {name}; must be f32, bf16 or f16")
    threads = args.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    torch.manual_seed(args.seed)
    if args.json == "-":
        stdout, sys.stdout = sys.stdout, open(os.devnull, "w", encoding="utf-8")
    library = Logitless(args.library, threads, args.cpu_target)
    about = library.describe()
    print(f"logitless {library.version()}, target {about['cpu_target']}; torch {torch.__version__}; {threads} threads")

    tables = []
    for suite, run, default in (("linear", suite_linear, "bf16"), ("logits", suite_logits, "f32,bf16")):
        if args.suite not in (suite, "all"):
            continue
        for name in (args.dtype or default).split(","):
            tables.append(report(suite, name, *run(torch, library, args, dtypes[name])))
    result = {"torch": torch.__version__, "python": platform.python_version(), "version": library.version(),
              "cpu_target": about["cpu_target"], "threads": threads, "seed": args.seed, "ignored": args.ignored,
              "tables": tables}
    text = json.dumps(result, indent=2) + "\n"
    if args.json == "-":
        stdout.write(text)
    elif args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
