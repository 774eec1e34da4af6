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
