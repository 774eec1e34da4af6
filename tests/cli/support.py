# Shared by the command line's tests: running it, files made by hand from the standard library alone (so that a mistake
# common to our readers and writers would show), and a folder for each test. The executable is LOGITLESS_BIN (or
# LOGITLESS_CLI, as ctest sets it); LOGITLESS_TEST_BACKEND chooses a backend for the commands that compute (cpu).
import json
import math
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

BIN = os.environ.get("LOGITLESS_BIN") or os.environ.get("LOGITLESS_CLI") or "logitless"
ROOT = os.environ.get("LOGITLESS_SOURCE_DIR") or os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
BACKEND = os.environ.get("LOGITLESS_TEST_BACKEND", "cpu")
COMPUTES = os.environ.get("LOGITLESS_TEST_COMPUTES", BACKEND)  # the backend whose arithmetic a stand-in has

if shutil.which(BIN) is None:
    sys.exit("no executable %s: set LOGITLESS_BIN to the built command line" % BIN)

FORMATS = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "U8": "B", "BOOL": "B"}


def bf16(x):
    """bf16 bits of a number, to nearest even."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def pack(dtype, values):
    if dtype == "BF16":
        return struct.pack("<%dH" % len(values), *[bf16(v) for v in values])
    return struct.pack("<%d%s" % (len(values), FORMATS[dtype]), *values)


def unpack(dtype, data):
    if dtype == "BF16":
        words = struct.unpack("<%dH" % (len(data) // 2), data)
        return [struct.unpack("<f", struct.pack("<I", w << 16))[0] for w in words]
    return list(struct.unpack("<%d%s" % (len(data) // struct.calcsize(FORMATS[dtype]), FORMATS[dtype]), data))


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, shape, values)."""
    header, blob = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        data = pack(dtype, values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + blob)


def read_safetensors(path):
    with open(path, "rb") as file:
        content = file.read()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + length])
    data = content[8 + length:]
    return {name: (t["dtype"], t["shape"], unpack(t["dtype"], data[t["data_offsets"][0]:t["data_offsets"][1]]))
            for name, t in header.items()}


def npy(descr, shape, data, order="False", version=1):
    text = ("{'descr': '%s', 'fortran_order': %s, 'shape': %s, }" % (descr, order, tuple(shape))).encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + data


class Problem:
    """A seeded problem in Python floats with its loss and gradients by definition, for small sizes."""

    def __init__(self, rows, hidden, vocab, seed=1, ignored=()):
        generator = random.Random(seed)
        self.rows, self.hidden, self.vocab, self.ignored = rows, hidden, vocab, set(ignored)
        # Quarters are exact in every dtype.
        self.x = [generator.randint(-8, 8) / 4 for _ in range(rows * hidden)]
        self.w = [generator.randint(-8, 8) / 4 for _ in range(vocab * hidden)]
        self.y = [-100 if i in self.ignored else generator.randrange(vocab) for i in range(rows)]

    def logits(self, i):
        x = self.x[i * self.hidden:(i + 1) * self.hidden]
        return [sum(a * b for a, b in zip(x, self.w[j * self.hidden:(j + 1) * self.hidden]))
                for j in range(self.vocab)]

    def row(self, i, alpha=0.0, others=False):
        """Loss, lse, log-probability of the target and D of row i for upstream 1."""
        z, y, v = self.logits(i), self.y[i], self.vocab
        m = max(z)
        lse = m + math.log(sum(math.exp(a - m) for a in z))
        q = [alpha / (v - 1) if others else alpha / v for _ in z]
        q[y] = 1 - alpha if others else q[y] + 1 - alpha
        loss = -sum(b * (a - lse) for a, b in zip(z, q))
        return loss, lse, z[y] - lse, [math.exp(a - lse) - b for a, b in zip(z, q)]

    def kept(self):
        return [i for i in range(self.rows) if i not in self.ignored]

    def tensors(self, dtype="F32", integer="I64"):
        return {"hidden": (dtype, [self.rows, self.hidden], self.x),
                "weight": (dtype, [self.vocab, self.hidden], self.w),
                "targets": (integer, [self.rows], self.y)}

    def logits_tensors(self, dtype="F32"):
        z = [a for i in range(self.rows) for a in self.logits(i)]
        return {"logits": (dtype, [self.rows, self.vocab], z), "targets": ("I64", [self.rows], self.y)}


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="logitless-cli-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def path(self, name):
        return os.path.join(self.folder, name)

    def put(self, name, content):
        with open(self.path(name), "wb") as file:
            file.write(content)
        return self.path(name)

    def run_cli(self, *arguments, **keywords):
        # No time limit of its own: ctest has one, and machines that are shared can be very slow.
        return subprocess.run([BIN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **keywords)

    def ok(self, *arguments, **keywords):
        done = self.run_cli(*arguments, **keywords)
        self.assertEqual(done.returncode, 0, "%s\n%s" % (arguments, done.stderr))
        self.assertEqual(done.stderr, "")
        return done.stdout

    def json(self, *arguments, **keywords):
        """The one object on stdout, which must hold nothing else and no NaN."""
        out = self.ok(*arguments, "--json", **keywords)
        self.assertEqual(out.count("\n"), 1)

        def refuse(constant):
            raise AssertionError("not JSON: " + constant)

        return json.loads(out, parse_constant=refuse)

    def refused(self, status, parts, *arguments, **keywords):
        """Exit status, nothing on stdout, one line on stderr that holds every part, and no new file."""
        before = sorted(os.listdir(self.folder))
        done = self.run_cli(*arguments, **keywords)
        self.assertEqual(done.returncode, status, "%s\nstdout: %s\nstderr: %s" % (arguments, done.stdout, done.stderr))
        self.assertEqual(done.stdout, "")
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for part in parts:
            self.assertIn(part, done.stderr)
        self.assertEqual(sorted(os.listdir(self.folder)), before)
        return done.stderr
