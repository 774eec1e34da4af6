"""docs/python.md follows the docstrings, and its code runs."""

from __future__ import annotations

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def check(root):
    tool = str(pathlib.Path(root) / "tools" / "python_docs")
    return subprocess.run([sys.executable, "-S", tool, "--check"], capture_output=True, text=True)


def test_reference_follows_the_docstrings():
    done = check(ROOT)
    assert done.returncode == 0, done.stderr


def test_a_stale_page_and_a_missing_docstring_fail(tmp_path):
    import shutil

    for part in ("python/logitless", "tools", "docs"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    assert check(tmp_path).returncode == 0
    source = tmp_path / "python/logitless/integrations/verl.py"
    text = source.read_text()
    source.write_text(text.replace("(log_probs, entropy) of labels under", "(log_probs, entropy) of targets under"))
    done = check(tmp_path)
    assert done.returncode == 1
    assert "docs/python.md is stale" in done.stderr
    assert "of targets under" in done.stderr
    source.write_text(text.replace('__all__ = ["', '__all__ = ["linear_cross_entropy_two", "'))
    assert "linear_cross_entropy_two" in check(tmp_path).stderr
    source.write_text(text + "\n\ndef bare():\n    pass\n")
    source.write_text(source.read_text().replace('__all__ = ["', '__all__ = ["bare", "'))
    assert "bare has no docstring" in check(tmp_path).stderr


def test_code_above_the_reference_runs():
    import re
    import textwrap

    above = (ROOT / "docs" / "python.md").read_text().split("<!-- From here on made by")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", above, flags=re.S | re.M)
    assert len(blocks) >= 2
    code = textwrap.dedent("\n".join(blocks)) + "\nassert 0 <= accuracy <= 1 and hidden.grad is not None\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_read_in_place_and_what_is_copied(monkeypatch):
    """The table of docs/python.md: what the operators are given lies where the user's tensor lies, or not."""
    import logitless
    import torch
    from logitless.pytorch import _ops

    seen = []
    run = _ops.run
    monkeypatch.setattr(_ops, "run", lambda name, inputs, *more: seen.append(inputs) or run(name, inputs, *more))

    def in_place(call, *tensors):
        seen.clear()
        with torch.no_grad():
            call(*tensors)
        given = {tensor.data_ptr() for tensor in seen[0]}
        return [tensor.data_ptr() in given for tensor in tensors]

    linear, logits = logitless.linear_cross_entropy, logitless.cross_entropy
    x, w, y = torch.randn(6, 40)[:, 1::2], torch.randn(64, 90).T[:, ::3][:, :20], torch.randint(0, 90, (12,))[::2]
    assert w.shape == (90, 20)
    bias = torch.randn(180)[::2]
    assert in_place(lambda x, w, y, b: linear(x, w, y, linear_bias=b), x, w, y, bias) == [True] * 4
    assert in_place(linear, x.bfloat16(), w, y.int()) == [True] * 3
    assert in_place(linear, x, w, y.to(torch.int16)) == [True, True, False]
    batch, labels = torch.randn(3, 5, 20), torch.randint(0, 90, (3, 5))
    assert in_place(linear, batch, w, labels) == [True] * 3
    assert in_place(linear, batch[:, :-1], w, labels[:, 1:]) == [False, True, False]
    assert in_place(lambda *each: linear(*each, shift=True), batch, w, labels) == [True, True, False]
    z = torch.randn(6, 120)[:, :90]
    assert in_place(logits, z, y) == [True, True]
    assert in_place(logits, torch.randn(90, 6).T, y) == [False, True]
    soft = torch.rand(6, 90).half()
    assert in_place(logits, z, soft) == [True, True]
    for dtype, kept in ((torch.float32, True), (torch.float64, False)):
        rows, classes = torch.rand(6, dtype=dtype), torch.rand(90, dtype=dtype)
        found = in_place(lambda z, y, r, c: logits(z, y, row_weight=r, weight=c), z, y, rows, classes)
        assert found == [True, True, kept, kept]
    mask = torch.ones(6, 90, dtype=torch.bool)
    assert in_place(lambda z, y, m: logits(z, y, keep_mask=m), z, y, mask) == [True, True, False]
    packed = logitless.pack_keep_mask(mask)
    assert in_place(lambda z, y, m: logits(z, y, keep_mask=m), z, y, packed) == [True, True, True]


def test_dtypes_of_double():
    import logitless
    import torch

    x, w = (torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (4, 9))
    y = torch.arange(4)
    loss = logitless.linear_cross_entropy(x, w, y, return_outputs=("lse",))
    assert (loss.loss.dtype, loss.lse.dtype) == (torch.float64, torch.float32)
    assert logitless.linear_cross_entropy(x, w, y, reduction="none").dtype == torch.float32
    loss.loss.backward()
    assert x.grad.dtype == w.grad.dtype == torch.float64
