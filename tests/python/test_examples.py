"""examples/python, each run as a user runs it, with small arguments; what it claims is read from what it prints."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"


def example(name, *arguments, fails=False):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert (done.returncode != 0) == fails, done.stderr[-3000:]
    return done.stderr if fails else done.stdout


def number(pattern, text):
    found = re.search(pattern, text)
    assert found, (pattern, text)
    return float(found[1])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Words with an order to learn: each sentence counts on from a word."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    names = [f"{a}{b}" for a in "bcdfghjklm" for b in ("a", "en", "ik", "ol", "ust", "y")]
    path.write_text("\n".join(" ".join(names[(i + j) % len(names)] for j in range(12)) + "." for i in range(300)))
    return path


def test_drop_in():
    printed = example("drop_in.py", "--length", 32, "--hidden", 32, "--vocab", 1000, "--budget", "256KiB")
    losses = re.search(r"loss +before (\S+) +after (\S+)", printed)
    assert float(losses[1]) == pytest.approx(float(losses[2]), abs=2e-6)
    differences = re.findall(r"differs by (\S+) of its norm", printed)
    assert len(differences) == 3
    assert all(float(each) < 1e-5 for each in differences)
    assert number(r"and (\S+) MiB of workspace", printed) <= 0.3
    assert number(r"Logitless that ran: (\d+)", printed) == 1


def test_finetune(text, tmp_path):
    pytest.importorskip("transformers", exc_type=ImportError)
    picture, figures = tmp_path / "curves.png", tmp_path / "figures.json"
    small = "--steps 6 --vocab 4096 --hidden 32 --layers 1 --batch 2 --length 32".split()
    drawn = ["--out", picture] if _has_matplotlib() else []
    # The repository's sources: enough words for a head that is larger than the rest.
    example("finetune.py", *small, "--text", EXAMPLES.parents[1] / "src", "--json", figures, *drawn)
    found = json.loads(figures.read_text())
    plain, ours = found["logits"], found["logitless"]
    assert ours["op_calls"] == 6
    assert plain["op_calls"] == 0
    assert len(ours["losses"]) == len(plain["losses"]) == 6
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert ours["losses"][-1] < ours["losses"][0]
    assert found["gap"] == max(abs(a - b) for a, b in zip(ours["losses"], plain["losses"], strict=True))
    assert plain["peak_mib"] > 0
    if drawn:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size > 5000


def _has_matplotlib():
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def test_grpo():
    printed = example("grpo.py", "--steps", 8, "--hidden", 32, "--vocab", 512, "--length", 6)
    assert number(r"gradients apart, at most: (\S+)", printed) < 1e-5
    rows = [line.split() for line in printed.splitlines() if re.match(r" +\d+ ", line)]
    assert len(rows) == 8
    for _, _, _, by_hand, policy_loss, _ in rows:
        assert float(by_hand) == pytest.approx(float(policy_loss), abs=2e-6)
    first, last = re.search(r"reward: (\S+) in the first batch, (\S+) in the last", printed).groups()
    assert float(last) > float(first)
    ran = json.loads(re.search(r"that ran: (\{.*\})", printed)[1].replace("'", '"'))
    assert ran == {"forward": 2 * 8 + 16, "forward_backward": 16, "backward": 16}


def test_distill(text):
    printed = example(
        "distill.py", "--text", text, "--hidden", 32, "--teacher-steps", 60, "--steps", 40, "--rows", 128, "--lr", 0.02
    )
    table = {
        line[:22].strip(): [float(word) for word in line[22:].split()]
        for line in printed.splitlines()
        if line.startswith(("teacher", "student"))
    }
    assert table.keys() == {"student, untrained", "teacher", "student, text alone", "student, distilled"}
    assert table["teacher"][-1] == pytest.approx(0.0, abs=1e-6)
    assert table["teacher"][3] < table["student, untrained"][3]
    assert table["student, distilled"][-1] < table["student, text alone"][-1]
    assert number(r"'forward_backward': (\d+)", printed) == 60 + 2 * 40


def words(code, path):
    command = [sys.executable, "-c", f"import sys, pathlib, words; path = sys.argv[1]; {code}", str(path)]
    return subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True)


def test_text_of_words(tmp_path):
    done = words("words.read_words(path, 100)", tmp_path / "none.txt")
    assert done.returncode != 0
    assert re.fullmatch(r"--text: '.*none.txt' does not exist\n", done.stderr)
    (tmp_path / "few.txt").write_text("three words only")
    assert "3 words; at least 1000" in words("words.read_words(path, 100)", tmp_path / "few.txt").stderr
    (tmp_path / "many.txt").write_text("a b a c. " * 400)
    done = words("ids, names, _ = words.read_words(path, 3); print(ids[3:8], names)", tmp_path)
    assert done.stdout.strip() == "[1, 2, 1, 0, 0] ['<rare>', 'a', 'b']", done.stderr
    done = words("print(words.read_words(None, 5000)[2])", "")
    assert re.search("Jane Austen's novels|this repository's own", done.stdout), done.stderr


def test_the_data_of_r(tmp_path):
    """Rdata.rdb as R writes it: a record of another kind is passed over, Latin-1 and missing strings are read."""
    import struct
    import zlib

    def record(kind, *strings):
        out = b"X\n" + struct.pack(">iiiii", 3, 0x40301, 0x30500, 5, 0)[:-4] + b"UTF-8" + struct.pack(">i", kind)
        out += struct.pack(">i", len(strings))
        for flags, string in strings:
            out += struct.pack(">ii", flags, -1 if string is None else len(string)) + (string or b"")
        return struct.pack(">I", len(out)) + zlib.compress(out)

    lines = [(9, b"It is a truth"), (9 | 1 << 14, b"caf\xe9"), (9, None), (9, "wünschenswert".encode())]
    path = tmp_path / "Rdata.rdb"
    path.write_bytes(record(13) + record(16, *lines))
    done = words("print(words._read(pathlib.Path(path)).split('\\n'))", path)
    assert done.stdout.strip() == "['It is a truth', 'café', '', 'wünschenswert']", done.stderr
