# A real head, SmolLM2's on "Northanger Abbey" (../shared/data/README.md): the loss in fp32 arithmetic agrees with the
# stated one to 1e-6 relative, bf16 as the machine multiplies it stays close, and `check` passes on sampled rows.
# Skips by name where ../shared is absent. In reduced scope (sanitizers, --quick) `check` sees the first 64 rows only.
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

from support import BACKEND, Case, ROOT

SHARED = os.path.join(ROOT, "..", "shared", "data", "smollm2_head.safetensors")
LOSS = 3.578283740497246


class RealHead(Case):
    @classmethod
    def setUpClass(cls):
        cls.head_folder = tempfile.mkdtemp(prefix="logitless-head-")
        cls.head = os.path.join(cls.head_folder, "head.safetensors")
        subprocess.run([sys.executable, os.path.join(ROOT, "tools", "real_head.py"), cls.head], check=True)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.head_folder, ignore_errors=True)

    def inputs(self):
        return ["--hidden", self.head + ":hidden", "--weight", self.head + ":weight", "--targets",
                self.head + ":targets", "--backend", BACKEND]

    def test_loss_in_fp32(self):
        report = self.json("loss", *self.inputs(), "--dtype", "f32")
        self.assertEqual((report["rows"], report["hidden"], report["vocab"]), (4096, 576, 49152))
        self.assertEqual(report["kept"], 4096)
        self.assertLess(abs(report["loss"] / LOSS - 1), 1e-6)

    def test_loss_in_bf16(self):
        # Products of bf16 are exact in fp32, so only the order of sums differs.
        report = self.json("loss", *self.inputs(), "--budget", "64MiB")
        self.assertLessEqual(report["workspace_bytes"], 64 << 20)
        self.assertLess(abs(report["loss"] / LOSS - 1), 1e-6)

    def test_check(self):
        rows = 64 if os.environ.get("LOGITLESS_TEST_SCOPE") == "reduced" else 4096
        inputs = self.inputs()
        if rows < 4096:
            with open(self.head, "rb") as file:
                content = file.read()
            length = struct.unpack("<Q", content[:8])[0]
            header = json.loads(content[8:8 + length])
            for name, dtype, shape in (("hidden", "BF16", [rows, 576]), ("targets", "I32", [rows])):
                first = 8 + length + header[name]["data_offsets"][0]
                data = content[first:first + (2 * 576 if name == "hidden" else 4) * rows]
                text = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
                path = self.put(name + ".safetensors", struct.pack("<Q", len(text)) + text + data)
                inputs[inputs.index("--" + name) + 1] = path
        report = self.json("check", *inputs, "--sample", "16")
        self.assertTrue(report["passed"], report)
        self.assertTrue(report["sampled"])
        self.assertEqual((report["rows"], report["rows_checked"]), (rows, 16))


if __name__ == "__main__":
    if not os.path.exists(SHARED):
        print("SKIP: ../shared is absent: no file " + os.path.normpath(SHARED))
        sys.exit(77)
    if BACKEND == "reference":
        print("SKIP: the reference backend needs minutes for the real head")
        sys.exit(77)
    unittest.main()
