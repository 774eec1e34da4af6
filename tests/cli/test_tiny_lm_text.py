"""tiny_lm's text: R's Rdata.rdb (built here), files, folders, the fallback, and refusals in one line.

Needs TINY_LM_BIN, or tiny_lm beside LOGITLESS_CLI; skips (77) without it. Cost: under a second.
"""
import os
import struct
import subprocess
import sys
import tempfile
import unittest
import zlib
from pathlib import Path

TOOL = Path(os.environ.get("TINY_LM_BIN") or Path(os.environ.get("LOGITLESS_CLI", "/nonexistent/logitless")).parent / "tiny_lm")

NA, LATIN1, UTF8, ASCII = "NA", 1 << 14, 1 << 15, 1 << 18


def integers(*values):
    return struct.pack(f">{len(values)}i", *values)


def character_vector(lines, version=3, attributes=b""):
    """R's serialisation of c(...): each line is text, NA, or (bytes, flag of its encoding)."""
    parts = [b"X\n", integers(version, 0x040201, 0x030500)]
    if version == 3:
        parts += [integers(5), b"UTF-8"]
    parts.append(integers(16 | (0x200 if attributes else 0), len(lines)))
    for line in lines:
        if line is NA:
            parts.append(integers(9, -1))
            continue
        data, flag = line if isinstance(line, tuple) else (line.encode(), ASCII if line.isascii() else UTF8)
        parts += [integers(9 | flag, len(data)), data]
    return b"".join(parts) + attributes


def record(content):
    return struct.pack(">I", len(content)) + zlib.compress(content)


class Text(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def tool(self, *arguments):
        return subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=60,
                              stdin=subprocess.DEVNULL)

    def extract(self, path):
        done = self.tool("--text", path, "--extract", self.folder / "extracted")
        self.assertEqual(done.returncode, 0, done.stderr)
        return (self.folder / "extracted").read_text(encoding="utf-8").splitlines()

    def refused(self, *arguments, names):
        done = self.tool("--out", self.folder / "out", *arguments)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for name in names:
            self.assertIn(name, done.stderr)
        return done.stderr

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def test_records_become_paragraphs(self):
        first = ["EMMA", "", "It was  a truth", "  that nobody doubted, ", NA, "Chapter \u201cone\u201d", ""]
        second = [(b"caf\xe9", LATIN1), "end"]
        numbers = b"X\n" + integers(2, 0x040201, 0x020300, 13, 2, 7, 8)  # an integer vector: passed over
        path = self.write("Rdata.rdb", record(character_vector(first)) + record(numbers) +
                          record(character_vector(second, version=2, attributes=integers(254))))
        self.assertEqual(self.extract(path), ["EMMA", "It was  a truth that nobody doubted,", "Chapter \u201cone\u201d",
                                              "caf\u00e9 end"])

    def test_long_records_and_empty_ones(self):
        lines = [f"line {i} of many" if i % 7 else "" for i in range(30000)]
        path = self.write("Rdata.rdb", record(character_vector([])) + record(character_vector(lines)))
        got = self.extract(path)
        self.assertEqual(len(got), -(-30000 // 7))
        self.assertEqual(got[0], " ".join(lines[1:7]))

    def test_damaged_records_are_named(self):
        good = record(character_vector(["one", "", "two"]))
        lies = struct.pack(">I", 10) + zlib.compress(b"x" * 11)
        huge = struct.pack(">I", 0xFFFFFFFF) + zlib.compress(b"x")
        for tail in (good[:-5], lies, huge, b"\0\0"):
            path = self.write("Rdata.rdb", good + tail)
            self.refused("--text", path, names=[str(path), f"byte {len(good)}"])

    def test_vectors_that_lie_are_passed_over(self):
        whole = character_vector(["one", "two"])
        for content in (whole[:-3], whole[:-20], b"X\n", b"A\n" + whole[2:], whole[:24] + integers(-5) + whole[28:]):
            path = self.write("Rdata.rdb", record(content))
            self.refused("--text", path, names=[str(path), "character vectors"])

    def test_folder(self):
        self.write("in/b.txt", "second\r\nfile\r\n\r\nits end")
        self.write("in/a/first.md", "\n\n  first file \n")
        self.write("in/.hidden/no.txt", "hidden")
        self.write("in/build-x/no.txt", "built")
        self.write("in/binary.bin", b"a\0b")
        self.write("in/other.rdb", b"not an rdb at all")
        self.assertEqual(self.extract(self.folder / "in"), ["first file", "second file", "its end"])

    def test_repository_is_the_fallback(self):
        done = self.tool("--extract", self.folder / "extracted")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("this repository's own sources and documentation", done.stdout)
        self.assertIn("#pragma once", (self.folder / "extracted").read_text(encoding="utf-8"))

    def test_refusals(self):
        text = self.write("short.txt", "too short")
        binary = self.write("binary.txt", b"words\0words")
        empty = self.folder / "empty"
        empty.mkdir()
        blocked = self.write("file", "x")
        for arguments, names in (
            (["--text", self.folder / "none"], ["--text", "none", "does not exist"]),
            (["--text", text], ["--text", "2,000"]),
            (["--text", binary], ["--text", "binary.txt", "NUL"]),
            (["--text", empty], ["--text", "no text file"]),
            (["--steps", "0"], ["--steps", "'0'", "from 1"]),
            (["--steps", "12x"], ["--steps", "'12x'"]),
            (["--vocab=-4"], ["--vocab", "'-4'"]),
            (["--rate", "nan"], ["--rate", "'nan'"]),
            (["--budget", "16MB"], ["--budget", "'16MB'", "16MiB"]),
            (["--head", "fp16"], ["--head", "'fp16'", "fp32, bf16"]),
            (["--step", "4"], ["'--step'", "--help"]),
            (["novels.txt"], ["'novels.txt'"]),
            (["--text"], ["--text", "needs a value"]),
            (["--resume=yes"], ["--resume", "no value"]),
            (["--resume"], ["--resume", "checkpoint"]),
            (["--text", text, "--out", blocked], ["--out", str(blocked)]),
        ):
            with self.subTest(arguments=arguments):
                self.refused(*arguments, names=names)
        self.assertFalse((self.folder / "out" / "checkpoint.json").exists())

    def test_a_vocabulary_too_small_for_its_letters(self):
        words = "\n\n".join(f"{chr(0x3B1 + i % 20)}{chr(0x430 + i % 30)} words and {i}" for i in range(200))
        self.refused("--text", self.write("many.txt", words), "--vocab", "16", names=["--vocab", "16"])

    def test_help(self):
        done = self.tool("--help")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for option in ("--text FILE|DIR", "--vocab", "--steps", "--out DIR", "--resume"):
            self.assertIn(option, done.stdout)


if __name__ == "__main__":
    if not TOOL.exists():
        print(f"SKIP: {TOOL} was not built")
        sys.exit(77)
    unittest.main()
