"""A small Llama trained twice on the same words, as transformers has it and after logitless.patch(model): the losses
fall together, and the logits [B, T, V] are gone from memory.

    python examples/python/finetune.py --out finetune.png

Random weights (nothing is downloaded), a vocabulary of words, so that the head is as large a part as in real models.
Each variant has a process of its own, with the same seed and batches; the two take their steps in turn, so that a busy
machine is busy for both. "peak" is the process' highest resident memory (VmHWM) above what it held before its first
step, with model, data and libraries; gradients and Adam's moments are in it.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

from words import read_words

VARIANTS = {"logits": "transformers alone", "logitless": "logitless.patch"}


def main() -> None:
    options = _options()
    if options.variant:
        train(options)
        return
    words, names, source = read_words(options.text, options.vocab)
    rows = options.batch * options.length
    print(f"text: {source}, {len(words)} words, vocabulary {len(names)}")
    print(
        f"model: Llama of random weights, {options.layers} layers, H {options.hidden}, R {rows} words a step; logits "
        f"in float32 are {rows * len(names) * 4 / 2**20:.0f} MiB"
    )
    results = _take_turns()
    plain, ours = results.values()
    print(f"\n{'':26}" + "".join(f"{name:>20}" for name in VARIANTS.values()))
    for label, key, form in (
        ("first loss", "first", "{:.4f}"),
        ("last loss", "last", "{:.4f}"),
        ("seconds a step (median)", "seconds", "{:.3f}"),
        ("peak of training, MiB", "peak_mib", "{:.0f}"),
    ):
        print(f"{label:26}{form.format(plain[key]):>20}{form.format(ours[key]):>20}")
    gap = max(abs(a - b) for a, b in zip(plain["losses"], ours["losses"], strict=True))
    print(f"\nlargest difference of the two losses in any step: {gap:.1e}")
    print(f"operators of Logitless that ran: {ours['op_calls']} patched, {plain['op_calls']} not")
    if options.out:
        _draw(results, options.out)
        print(f"loss curves: {options.out}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"gap": gap, **results}))


def train(options: argparse.Namespace) -> None:
    """One variant: a step for each line on stdin, then all figures as JSON on stdout."""
    import torch
    import transformers

    words, names, _ = read_words(options.text, options.vocab)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(names),
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=options.length,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    ran = dict.fromkeys(("before", "after"), 0)
    if options.variant == "logitless":
        import logitless

        logitless.patch(model, memory_budget=options.budget)  # the one line
        ran["before"] = sum(logitless.op_calls().values())  # of patch()'s own comparison
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, foreach=False)
    ids = torch.tensor(words)
    starts = torch.randint(0, len(ids) - options.length, (options.steps, options.batch))
    losses, seconds = [], []
    before = _high_water_mib(reset=True)
    print("ready", flush=True)
    for at in starts.tolist():
        sys.stdin.readline()
        begin = time.perf_counter()
        batch = torch.stack([ids[start : start + options.length] for start in at])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
        print("done", flush=True)
    if options.variant == "logitless":
        ran["after"] = sum(logitless.op_calls().values())
    result = {
        "losses": losses,
        "first": losses[0],
        "last": statistics.fmean(losses[-5:]),
        "seconds": statistics.median(seconds),
        "peak_mib": _high_water_mib() - before,
        "op_calls": ran["after"] - ran["before"],
    }
    print(json.dumps(result))


def _high_water_mib(reset: bool = False) -> float:
    """Highest resident memory of this process, reset: from now on (getrusage counts the parent's before exec, too)."""
    if reset:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("no VmHWM in /proc/self/status: this example measures memory on Linux")


def _take_turns() -> dict[str, dict[str, Any]]:
    """Both variants, each in a process; one step of one, then one step of the other."""
    command = [sys.executable, __file__, *sys.argv[1:], "--variant"]
    # The one that waits must not spin on the cores of the other: a step took several times as long.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    processes = [
        subprocess.Popen([*command, variant], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for variant in VARIANTS
    ]
    last = ["", ""]
    try:
        while not all(line.startswith("{") for line in last):
            for index, process in enumerate(processes):
                assert process.stdin is not None
                assert process.stdout is not None
                if last[index]:
                    process.stdin.write("step\n")
                    process.stdin.flush()
                last[index] = process.stdout.readline()
                if not last[index]:
                    raise SystemExit(f"{list(VARIANTS)[index]}: exit {process.wait()}")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return {variant: json.loads(line) for variant, line in zip(VARIANTS, last, strict=True)}


def _draw(results: dict[str, dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    styles: list[dict[str, Any]] = [{"color": "#9ecae1", "linewidth": 6}, {"color": "#08306b", "linewidth": 1.5}]
    for (variant, result), style in zip(results.items(), styles, strict=True):
        label = f"{VARIANTS[variant]}: {result['seconds']:.2f} s a step, peak {result['peak_mib']:.0f} MiB"
        axes.plot(range(1, len(result["losses"]) + 1), result["losses"], label=label, **style)
    axes.set(
        xlabel="step", ylabel="loss (nats a word)", title="A small Llama, the same batches: with logits, and without"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--text", help="file or folder (default: the novels of ./run, or this repository's own text)")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=12288)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--budget", default="8MiB", help="workspace of the patched loss")
    parser.add_argument("--out", help="PNG for the loss curves (needs matplotlib)")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--variant", choices=list(VARIANTS), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
