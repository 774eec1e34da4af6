#!/usr/bin/env python3
"""Claims about losses at a language model's head, settled by a run each: claims.py NAME, or all. numpy alone.

Prints what is said, then what was measured; docs/claims.md quotes it. Seeds are fixed; a minute each, `skipping` a few."""
import json
import os
import struct
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def bf16(x):
    """Rounds to bf16 (nearest, ties to even), kept as fp32."""
    u = np.asarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# ---- a tiny language model: embedding, tanh, head; Zipf-distributed bigrams ------------------------------------------


def train(gradient, alpha, steps=1000, vocab=1000, width=32, rows=256, seed=0):
    """Trains with D = gradient(p, y, alpha); returns held-out NLL and held-out smoothed loss (uniform convention)."""
    rng = np.random.default_rng(seed)
    unigram = 1.0 / np.arange(1, vocab + 1)
    taste = rng.normal(size=(vocab, 8)) @ rng.normal(size=(8, vocab)) * 0.7
    chain = softmax(np.log(unigram) + taste)
    cumulative = np.cumsum(chain, 1)

    def batch(n, source):
        x = source.choice(vocab, n, p=unigram / unigram.sum())
        y = np.array([np.searchsorted(cumulative[i], source.random()) for i in x]).clip(0, vocab - 1)
        return x, y

    parameters = [rng.normal(size=(vocab, width)) * 0.3, rng.normal(size=(vocab, width)) * 0.1, np.zeros(vocab)]
    moments = [[np.zeros_like(p), np.zeros_like(p)] for p in parameters]
    for step in range(1, steps + 1):
        x, y = batch(rows, rng)
        h = np.tanh(parameters[0][x])
        p = softmax(h @ parameters[1].T + parameters[2])
        d = gradient(p, y, alpha) / rows
        dh = (d @ parameters[1]) * (1 - h * h)
        de = np.zeros_like(parameters[0])
        np.add.at(de, x, dh)
        for q, g, (m, v) in zip(parameters, [de, d.T @ h, d.sum(0)], moments):
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            q -= 0.01 * (1 - step / steps) * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-9)
    x, y = batch(20000, np.random.default_rng(99))
    h = np.tanh(parameters[0][x])
    p = softmax(h @ parameters[1].T + parameters[2])
    logs = np.log(p)
    nll = -logs[np.arange(len(y)), y].mean()
    return nll, (1 - alpha) * nll - alpha * logs.mean()


def uniform(p, y, alpha):
    d = p - alpha / p.shape[1]
    d[np.arange(len(y)), y] -= 1 - alpha
    return d


def others(p, y, alpha):
    d = p - alpha / (p.shape[1] - 1)
    d[np.arange(len(y)), y] += alpha / (p.shape[1] - 1) - (1 - alpha)
    return d


def forgotten(p, y, alpha):
    """The smoothing term left out of the other classes' gradient."""
    d = p.copy()
    d[np.arange(len(y)), y] -= 1 - alpha + alpha / p.shape[1]
    return d


def claim_smoothing_gradient():
    print("said: leaving the smoothing term out of the other classes' gradient costs about +0.02 after 1000 steps (alpha 0.1)")
    for seed in (0, 1):
        right, wrong = train(uniform, 0.1, seed=seed), train(forgotten, 0.1, seed=seed)
        print(f"measured (V 1000, 1000 steps, seed {seed}): smoothed loss right {right[1]:.4f}, left out {wrong[1]:.4f} "
              f"({wrong[1] - right[1]:+.4f}); NLL {right[0]:.4f}, {wrong[0]:.4f} ({wrong[0] - right[0]:+.4f})")


def claim_conventions():
    print("said: alpha/V and alpha/(V-1) are different losses, worth choosing between")
    for seed in (0,):
        a, b = train(uniform, 0.1, seed=seed), train(others, 0.1, seed=seed)
        print(f"measured (V 1000, 1000 steps, seed {seed}): NLL {a[0]:.5f} and {b[0]:.5f} ({b[0] - a[0]:+.5f})")
    print("others(alpha) is uniform(alpha V/(V-1)) exactly: at V = 32000 and alpha 0.1 the target's weight differs by 3e-6")


# ---- numerics -----------------------------------------------------------------------------------------------------------


def lanes_and_leaves(e):
    """Sums of leaves of 256 in 16 lanes, then a binary tree: what the kernels do."""
    e = np.pad(e, (0, -len(e) % 256)).reshape(-1, 16, 16)
    leaf = np.zeros((e.shape[0], 16), np.float32)
    for i in range(16):
        leaf = leaf + e[:, i]
    sums = leaf
    while sums.shape[1] > 1:
        sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
    sums = sums[:, 0]
    while len(sums) > 1:
        half = (len(sums) + 1) // 2
        merged = sums[:half].copy()
        merged[: len(sums) - half] += sums[half:]
        sums = merged
    return sums[0]


def sequential(e):
    return np.cumsum(e, dtype=np.float32)[-1]


def kahan(e):
    total, carry = np.float32(0), np.float32(0)
    for x in e:
        y = x - carry
        t = total + y
        carry = (t - total) - y
        total = t
    return total


def claim_compensated():
    print("said: compensated summation turns errors of 1e-6 into 1e-12")
    rng = np.random.default_rng(1)
    for vocab in (32000, 262144):
        errors = {"one running sum": [], "16 lanes, leaves of 256, a tree": [], "compensated": []}
        for _ in range(5):
            e = np.exp(rng.normal(size=vocab) * 2 - 8).astype(np.float32)
            exact = e.astype(np.float64).sum()
            for name, total in zip(errors, (sequential(e), lanes_and_leaves(e), kahan(e))):
                errors[name].append(abs(float(total) - exact) / exact)
        print(f"measured, V {vocab}, relative error of the sum, worst of 5: "
              + "; ".join(f"{name} {max(v):.1e}" for name, v in errors.items()))
    print("rounding the result to fp32 alone costs up to 6e-8, and exp itself is off by 1.7e-7: the tree is at that floor already")


def claim_reference():
    print("said: a reference other than the true maximum ruins the sum")
    z = (np.random.default_rng(2).normal(size=50000) * 3).astype(np.float32)
    exact = float(np.log(np.exp(z.astype(np.float64) - z.max()).sum()) + z.max())
    for name, m in (("maximum", z.max()), ("first leaf's maximum", z[:256].max()), ("maximum - 30", z.max() - 30),
                    ("maximum + 30", z.max() + 30), ("maximum + 80", z.max() + 80), ("maximum - 80", z.max() - 80)):
        m = np.float32(m)
        lse = float(np.log(np.float64(lanes_and_leaves(np.exp(z - m).astype(np.float32)))) + np.float64(m))
        print(f"measured: reference {name:22} error of lse {abs(lse - exact):.1e}")
    print("it may lie anywhere as long as no exponential overflows and the largest do not underflow")


def claim_rounding():
    print("said: 16-bit logits are good enough; here: round probabilities, never logits")
    rng = np.random.default_rng(3)
    z = rng.normal(size=(64, 32000)) * 3
    y = rng.integers(0, 32000, 64)
    z[np.arange(64), y] += 14
    p = softmax(z)
    size = np.sqrt((p * p).sum() + 64 - 2 * p[np.arange(64), y].sum())  # of D = p - [j = y]
    by_logits = softmax(bf16(z).astype(np.float64))
    by_probabilities = bf16(p).astype(np.float64)
    for name, q in (("logits", by_logits), ("probabilities", by_probabilities)):
        print(f"measured: bf16 {name:13} largest relative error of p {np.abs(q / p - 1).max():.1e}, "
              f"of the gradient's norm {np.linalg.norm(q - p) / size:.1e}")


def claim_chunks():
    print("said: summing dW over chunks in bf16 is harmless")
    rng = np.random.default_rng(4)
    for chunks in (4, 16, 64):
        rows, vocab, hidden = 64 * chunks, 512, 64
        x = rng.normal(size=(rows, hidden))
        d = softmax(rng.normal(size=(rows, vocab)) * 3)
        d[np.arange(rows), rng.integers(0, vocab, rows)] -= 1
        exact = d.T @ x
        half, full = np.zeros_like(exact, np.float32), np.zeros_like(exact, np.float32)
        for c in range(chunks):
            part = (d[c * 64 : c * 64 + 64].T @ x[c * 64 : c * 64 + 64]).astype(np.float32)
            half, full = bf16(half + bf16(part)), full + part
        error = lambda a: np.linalg.norm(a - exact) / np.linalg.norm(exact)
        print(f"measured, {chunks} chunks: relative error bf16 sums {error(half):.1e}, fp32 sums rounded once {error(bf16(full)):.1e}")


# ---- the filter, on a real head -------------------------------------------------------------------------------------------


def real_head(rows):
    path = os.path.join(ROOT, "..", "shared", "data", "smollm2_head.safetensors")
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        (n,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(n))
        body = file.read()

    def tensor(name, dtype):
        first, last = header[name]["data_offsets"]
        return np.frombuffer(body[first:last], dtype).reshape(header[name]["shape"])

    x = (tensor("hidden", np.uint16).astype(np.uint32) << 16).view(np.float32)
    w = tensor("weight_q8", np.int8).astype(np.float32) * np.repeat(tensor("weight_scale", np.float16).astype(np.float32), 32, 1)
    pick = np.arange(len(x)) if rows is None else np.linspace(0, len(x) - 1, rows).astype(int)
    return x[pick], bf16(w), tensor("targets", np.int32)[pick]


def claim_filter():
    print("said: entries of D below a threshold may be dropped; here: unbiased(eps) keeps their expectation")
    head = real_head(512)
    if head is None:
        print("../shared/data is not there: random data instead")
        rng = np.random.default_rng(5)
        head = rng.normal(size=(512, 64)).astype(np.float32) * 2, rng.normal(size=(8192, 64)).astype(np.float32) * 0.3, rng.integers(0, 8192, 512)
    x, w, y = head
    p = softmax((x @ w.T).astype(np.float64)).astype(np.float32)
    at = (np.arange(len(y)), y)
    eps = np.float32(2.0**-12)

    def gradients(q):
        d = q.copy()
        d[at] = p[at] - 1
        return d.T @ x, d @ w

    exact = gradients(p)
    error = lambda got: [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(got, exact)]
    small = p < eps
    dropped = np.where(small, 0, p)
    rng = np.random.default_rng(6)
    keep = [np.where(small, np.where(rng.random(p.shape, np.float32) * eps < p, eps, 0), p) for _ in range(8)]
    mass = p[small].sum() / len(y)
    print(f"data: R {p.shape[0]}, V {p.shape[1]}; {100 * (1 - small.mean()):.2f} % of p is at least 2^-12; what lies below sums to {mass:.3f} a row")
    e = error(gradients(dropped))
    print(f"measured: threshold            relative error of dW {e[0]:.4f}, dX {e[1]:.4f}; any number of batches keeps it")
    d = p.copy()
    d[at] -= 1
    for name, order in (("natural order", np.arange(p.shape[1])), ("sorted by mean logit", np.argsort(-(x @ w.T).mean(0)))):
        for high, wide in ((32, 32), (128, 256)):
            rows, columns = d.shape[0] // high * high, d.shape[1] // wide * wide
            tiles = d[:rows, order[:columns]].reshape(rows // high, high, -1, wide)
            drop = (np.abs(tiles) < eps).all((1, 3))
            kept = d.copy()
            kept[:rows, order[:columns]] = np.where(drop[:, None, :, None], 0, tiles).reshape(rows, columns)
            e = error((kept.T @ x, kept @ w))
            print(f"measured: threshold, whole tiles of {high} x {wide}, {name}: {100 * drop.mean():.1f} % dropped, relative error of "
                  f"dW {e[0]:.4f}, dX {e[1]:.4f}")
    e1 = error(gradients(keep[0]))
    mean = [np.mean([gradients(k)[i] for k in keep], 0) for i in (0, 1)]
    e8 = error(mean)
    print(f"measured: unbiased, one seed   relative error of dW {e1[0]:.4f}, dX {e1[1]:.4f}; {100 * (keep[0] != 0).mean():.2f} % kept")
    print(f"measured: unbiased, mean of 8  relative error of dW {e8[0]:.4f}, dX {e8[1]:.4f}")


def claim_skipping():
    print("said: a filter makes the backward sparse, once classes are sorted")
    head = real_head(None)
    if head is None:
        print("needs ../shared/data")
        return 1
    x, w, y = head[0][:1024], head[1], head[2][:1024]  # tokens in a row
    p = softmax(x @ w.T)
    order = np.argsort(-p.mean(0), kind="stable")  # what ll_class_order gives
    rng = np.random.default_rng(7)
    print(f"data: R {p.shape[0]}, V {p.shape[1]}; shares of D that are all zero, in natural order / sorted by mean probability")
    for power in (17, 14, 12, 10):
        eps = np.float32(2.0**-power)
        left = np.empty(p.shape, bool)
        for i in range(0, len(p), 256):
            part = p[i : i + 256]
            left[i : i + 256] = (part >= eps) | (rng.random(part.shape, np.float32) * eps < part)
        left[np.arange(len(y)), y] = True
        sorted_left = left[:, order]

        def share(a, high, wide):
            rows, columns = a.shape[0] // high * high, a.shape[1] // wide * wide
            return 100 * (1 - a[:rows, :columns].reshape(rows // high, high, -1, wide).any((1, 3)).mean())

        print(f"measured: eps 2^-{power}: {100 * left.mean():.2f} % kept; " + "; ".join(
            f"{what} {share(left, *of):.1f} / {share(sorted_left, *of):.1f} %" for what, of in
            (("6 rows x 1 class", (6, 1)), ("1 row x 6 classes", (1, 6)), ("16 x 32", (16, 32)), ("32 x 32", (32, 32)))))

    tool = command_line()
    if tool is None:
        return 1
    where = np.empty_like(order)
    where[order] = np.arange(len(order))
    with tempfile.TemporaryDirectory() as folder:
        def put(name, array):
            np.save(os.path.join(folder, name), np.ascontiguousarray(array))
            return os.path.join(folder, name + ".npy")

        hidden = put("x", x)
        heads = {"natural": (put("w", w), put("y", y)), "sorted": (put("ws", w[order]), put("ys", where[y].astype(np.int32)))}
        for dtype in ("f32", "bf16"):
            runs = [("loss only", "natural", None), ("plain", "natural", 0)]
            runs += [(f"2^-{power}, {name}", name, power) for power in (17, 14, 12, 10) for name in heads]
            runs += [("plain, again", "natural", 0)]
            seconds = {name: [] for name, _, _ in runs}
            for _ in range(5):
                for name, which, power in runs:
                    weight, targets = heads[which]
                    command = [tool, "loss", "--hidden", hidden, "--weight", weight, "--targets", targets, "--dtype", dtype, "--json"]
                    if power is not None:
                        command += ["--grad-hidden", os.path.join(folder, "dx.safetensors"), "--grad-weight", os.path.join(folder, "dw.safetensors")]
                    if power:
                        command += ["--filter", str(2.0**-power)]
                    seconds[name].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["seconds"])
            best = {name: min(values) for name, values in seconds.items()}
            for name, value in best.items():
                print(f"measured: {dtype}, loss, dX and dW, {name:15} {value:.3f} s, {value / best['plain']:.2f} of plain (best of 5)")
    return 0


def command_line():
    for tool in (os.environ.get("LOGITLESS", ""), os.path.join(ROOT, "build/release/bin/logitless")):
        if tool and os.path.exists(tool):
            return tool
    print("needs a command line tool with benchmarks: set LOGITLESS=path, or build the release preset")
    return None


def claim_passes():
    print("said: one fused pass saves what three kernels move")
    tool = command_line()
    if tool is None:
        return 1
    out = subprocess.run([tool, "bench", "--suite", "logits", "--rows", "1024", "--vocab", "32768", "--dtype", "f32",
                                     "--seconds", "10", "--json"], capture_output=True, text=True)
    if out.returncode != 0:
        print(out.stderr.strip())
        return 1
    out = json.loads(out.stdout)
    rows = {r["name"]: r["seconds"] for r in out["tables"][0]["rows_measured"] if r.get("seconds")}
    for name, seconds in rows.items():
        print(f"measured: {name:28} {1e3 * seconds:8.1f} ms")
    print(f"unfused over fused in place: {rows['loss + gradient, unfused'] / rows['loss + gradient in place']:.1f} times")
    print("counted, not measured: bytes at R 1024, V 32768, fp32: fused 1 read and 1 write of z, 256 MiB; softmax, log and NLL with their backwards 11 RV numbers, 1408 MiB")
    return 0


CLAIMS = {name[len("claim_"):]: f for name, f in sorted(globals().items()) if name.startswith("claim_")}


def main():
    names = sys.argv[1:] or ["all"]
    if names == ["all"]:
        names = list(CLAIMS)
    if unknown := [n for n in names if n not in CLAIMS]:
        print(f"claims.py: {unknown[0]!r} is none of {', '.join(CLAIMS)}, all", file=sys.stderr)
        return 2
    failed = 0
    for name in names:
        start = time.monotonic()
        print(f"== {name}")
        failed |= CLAIMS[name]() or 0
        print(f"   ({time.monotonic() - start:.0f} s)")
    return failed


if __name__ == "__main__":
    sys.exit(main())
