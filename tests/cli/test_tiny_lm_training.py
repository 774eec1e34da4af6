"""tiny_lm trains: both heads agree, a resumed run has the same bits, Ctrl-C leaves a checkpoint, the report stands alone.

A tiny model on made-up text. Needs TINY_LM_BIN, or tiny_lm beside LOGITLESS_CLI; skips (77) without it. Cost: seconds.
"""
import json
import math
import os
import pty
import random
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path

CLI = Path(os.environ.get("LOGITLESS_BIN") or os.environ.get("LOGITLESS_CLI") or "/nonexistent/logitless")
TOOL = Path(os.environ.get("TINY_LM_BIN") or CLI.parent / "tiny_lm")

# --products: the probe's choice may differ from run to run on a busy machine, and bits with it.
TINY = ["--vocab", "400", "--hidden", "32", "--context", "3", "--inner", "48", "--rows", "48", "--rate", "0.01",
        "--products", "eigen", "--threads", "2", "--budget", "2MiB"]


def made_up_text(sentences=900):
    """Sentences of a small grammar: something that a model of three tokens can learn in a few steps."""
    draw = random.Random(7)
    names = ["Emma", "Anne", "Elinor", "Fanny", "Catherine", "Jane"]
    verbs = ["walked to", "wrote to", "spoke of", "thought of", "danced with", "laughed at"]
    things = ["the parsonage", "her sister", "Mr. Knightley", "the captain", "a long letter", "the assembly rooms"]
    ends = ["in the morning", "with great pleasure", "without a word", "before dinner", "for the last time"]
    pick = draw.choice
    return "\n\n".join(" ".join(f"{pick(names)} {pick(verbs)} {pick(things)} {pick(ends)}." for _ in range(draw.randint(1, 4)))
                       for _ in range(sentences))


def tensors(path):
    """A .safetensors file: {name: (dtype, shape, bytes)}."""
    data = Path(path).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    return {name: (t["dtype"], t["shape"], data[8 + length + t["data_offsets"][0]:8 + length + t["data_offsets"][1]])
            for name, t in header.items()}


def numbers(tensor):
    dtype, _, data = tensor
    code = {"F32": "f", "I32": "i"}[dtype]
    return struct.unpack(f"<{len(data) // 4}{code}", data)


def checkpoint(folder):
    state = json.loads((folder / "checkpoint.json").read_text())
    return state, tensors(folder / state["tensors"])


class Training(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.text = cls.folder / "text.txt"
        cls.text.write_text(made_up_text())
        cls.whole = cls.folder / "whole"
        cls.done = cls.run_tool(cls, cls.whole, "--steps", "40", "--cli", str(CLI))

    def run_tool(self, out, *more, resume=False, code=0):
        what = ["--resume"] if resume else ["--text", self.text, *TINY]
        done = subprocess.run([TOOL, *map(str, what), *map(str, more), "--out", str(out)], capture_output=True, text=True,
                              timeout=100, stdin=subprocess.DEVNULL)
        if done.returncode != code:
            raise AssertionError(f"exit {done.returncode}, not {code}: {done.stdout}{done.stderr}")
        return done

    def assert_same_state(self, one, two):
        (state_a, bits_a), (state_b, bits_b) = checkpoint(one), checkpoint(two)
        self.assertEqual(state_a["step"], state_b["step"])
        self.assertEqual(len(bits_a), 6)
        for name in bits_a:
            self.assertEqual(bits_a[name], bits_b[name], name)
        for head in ("logitless", "dense"):
            self.assertEqual([s[0] for s in state_a[head]["steps"]], [s[0] for s in state_b[head]["steps"]])

    def test_losses_agree_and_fall(self):
        state, bits = checkpoint(self.whole)
        ours = [step[0] for step in state["logitless"]["steps"]]
        dense = [step[0] for step in state["dense"]["steps"]]
        self.assertEqual((len(ours), len(dense)), (40, 40))
        # Rounding of fp32, amplified by forty steps of Adam at a high rate.
        self.assertLess(max(abs(a - b) for a, b in zip(ours, dense)), 1e-4)
        self.assertAlmostEqual(ours[0], math.log(state_vocab(self.whole)), delta=0.2)
        self.assertLess(sum(ours[-5:]) / 5, ours[0] - 2)
        self.assertNotEqual(bits["logitless.parameters"], bits["dense.parameters"])  # two trainings, not one twice
        for head in ("logitless", "dense"):
            perplexities = [e[1] for e in state[head]["evaluations"]]
            self.assertEqual([e[0] for e in state[head]["evaluations"]], list(range(4, 44, 4)))
            self.assertLess(perplexities[-1], perplexities[0] / 3)

    def test_resumed_run_has_the_same_bits(self):
        out = self.folder / "parts"
        first = self.run_tool(out, "--steps", "40", "--stop-after", "13", code=130)
        self.assertIn("--resume continues", first.stdout)
        self.assertEqual(checkpoint(out)[0]["step"], 13)
        self.assertFalse((out / "report.html").exists())
        self.run_tool(out, "--stop-after", "14", resume=True, code=130)
        self.run_tool(out, resume=True)
        self.assert_same_state(self.whole, out)
        self.assertTrue((out / "report.html").exists())
        self.assertEqual(tensors(self.whole / "head.safetensors"), tensors(out / "head.safetensors"))
        self.assertEqual(len(list(out.glob("checkpoint-*"))), 1)

    def test_resume_refuses_other_settings(self):
        done = self.run_tool(self.whole, "--steps", "41", resume=True, code=2)
        self.assertIn("--steps", done.stderr)
        self.assertIn("started with 40", done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1)

    def test_interrupt_finishes_the_step_and_leaves_a_checkpoint(self):
        out = self.folder / "interrupted"
        with subprocess.Popen([TOOL, "--text", self.text, *TINY, "--steps", "1000000", "--every", "10", "--out", out],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL) as process:
            for line in process.stdout:  # wait until it trains
                if line.startswith("step "):
                    break
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            self.assertEqual(process.wait(60), 130, process.stderr.read())
        self.assertIn("--resume continues", rest)
        step = checkpoint(out)[0]["step"]
        self.assertGreaterEqual(step, 10)
        again = self.folder / "uninterrupted"
        self.run_tool(again, "--steps", "1000000", "--every", "10", "--stop-after", step, code=130)
        self.assert_same_state(out, again)

    def test_ten_lines_sentences_and_commands(self):
        self.assertEqual(self.done.stderr, "")
        self.assertNotIn("\r", self.done.stdout)
        blocks = [block.splitlines() for block in self.done.stdout.strip().split("\n\n")]
        self.assertEqual(len(blocks), 3, self.done.stdout)
        self.assertEqual(len(blocks[1]), 10)
        for line, word in zip(blocks[1], ["text", "model", "loss", "held out", "step", "head", "memory", " ", "gradients", "report"]):
            self.assertTrue(line.startswith(word), line)
        self.assertGreater(sum(line.startswith('  "') for line in blocks[0]), 2)
        self.assertTrue(any(name in line for line in blocks[0] for name in ("Emma", "Anne", "Elinor", "Fanny", "Jane")))
        self.assertEqual([shlex.split(line)[1] for line in blocks[2]], ["loss", "check", "plan"])

    def test_commands_work_on_the_saved_head(self):
        saved = tensors(self.whole / "head.safetensors")
        rows, hidden = saved["hidden"][1]
        vocab = saved["weight"][1][0]
        x, w, y = numbers(saved["hidden"]), numbers(saved["weight"]), numbers(saved["targets"])
        total = 0.0
        for i in range(rows):
            state = x[i * hidden:(i + 1) * hidden]
            z = [math.fsum(a * b for a, b in zip(state, w[j * hidden:(j + 1) * hidden])) for j in range(vocab)]
            top = max(z)
            total += top + math.log(math.fsum(math.exp(v - top) for v in z)) - z[y[i]]
        if not CLI.exists():
            self.skipTest(f"{CLI} was not built")
        commands = [shlex.split(line) for line in self.done.stdout.strip().splitlines()[-3:]]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
            self.assertEqual(done.returncode, 0, f"{command}: {done.stdout}{done.stderr}")
        done = subprocess.run([*commands[0], "--json"], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        self.assertAlmostEqual(json.loads(done.stdout)["loss"], total / rows, delta=1e-6 * total / rows)

    def test_report_stands_alone(self):
        page = (self.whole / "report.html").read_text(encoding="utf-8")
        for foreign in ("http:", "https:", "<script", "<link", "<img", "@import", "url(", "src="):
            self.assertNotIn(foreign, page)
        drawings = re.findall(r"<svg.*?</svg>", page, re.S)
        self.assertEqual(len(drawings), 4)
        for drawing in drawings:
            root = ElementTree.fromstring(drawing)
            width, height = map(float, root.get("viewBox").split()[2:])
            for element in root.iter():
                for key, limit in (("x", width), ("cx", width), ("x1", width), ("y", height), ("cy", height), ("y1", height)):
                    if key in element.attrib:
                        self.assertTrue(0 <= float(element.get(key)) <= limit, ElementTree.tostring(element))
        curves = [c.get("points").split() for c in ElementTree.fromstring(drawings[0]).iter("polyline")]
        self.assertEqual([len(c) for c in curves], [40, 40, 40])  # dense, Logitless, difference
        self.assertNotIn("nan", page.lower().replace("finance", ""))

    def test_progress_line_on_a_terminal_only(self):
        controller, terminal = pty.openpty()
        out = self.folder / "terminal"
        with subprocess.Popen([TOOL, "--text", self.text, *TINY, "--steps", "8", "--out", out], stdout=subprocess.DEVNULL,
                              stderr=terminal, stdin=subprocess.DEVNULL) as process:
            os.close(terminal)
            shown, end = b"", time.monotonic() + 60
            while time.monotonic() < end:
                if not select.select([controller], [], [], 0.2)[0]:
                    if process.poll() is not None:
                        break
                    continue
                try:
                    data = os.read(controller, 65536)
                except OSError:  # Linux: the other end is closed
                    break
                shown += data
            self.assertEqual(process.wait(60), 0)
        os.close(controller)
        self.assertRegex(shown.decode(), r"\rstep 3/8 +loss \d\.\d+ .*tokens/s.* left")

    def test_bf16_operands_agree(self):
        out = self.folder / "bf16"
        done = self.run_tool(out, "--steps", "20", "--head", "bf16")
        state, _ = checkpoint(out)
        ours = [step[0] for step in state["logitless"]["steps"]]
        dense = [step[0] for step in state["dense"]["steps"]]
        # Both heads see the same rounded operands; Logitless rounds its probabilities to bf16 (2^-9) on top.
        self.assertLess(max(abs(a - b) for a, b in zip(ours, dense)), 2e-2)
        self.assertEqual(state["config"]["head"], "bf16")
        self.assertIn("gradients", done.stdout)

    def test_vocabulary_is_lowered_to_what_the_text_supports(self):
        done = self.run_tool(self.folder / "lowered", "--vocab", "16384", "--steps", "1", "--stop-after", "1")
        self.assertRegex(done.stdout, r"vocabulary: \d+ byte-pair pieces, as many as this text supports \(asked for up to 16,384\)")


def state_vocab(folder):
    return tensors(folder / "head.safetensors")["weight"][1][0]


if __name__ == "__main__":
    if not TOOL.exists():
        print(f"SKIP: {TOOL} was not built")
        sys.exit(77)
    unittest.main()
