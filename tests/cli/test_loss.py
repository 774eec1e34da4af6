# logitless loss: values, gradients, outputs and reports against the definitions in Python floats, for linear and logits
# problems and both file formats.
import math
import os
import struct
import unittest

from support import BACKEND, BIN, Case, Problem, npy, pack, read_safetensors, write_safetensors


class Loss(Case):
    def files(self, problem, **keywords):
        path = self.path("p.safetensors")
        write_safetensors(path, problem.tensors(**keywords))
        return ["--hidden", path + ":hidden", "--weight", path + ":weight", "--targets", path + ":targets",
                "--backend", BACKEND]

    def close(self, got, want, tolerance=1e-5):
        self.assertEqual(len(got), len(want))
        scale = max([abs(b) for b in want] + [1e-3])
        for n, (a, b) in enumerate(zip(got, want)):
            self.assertLessEqual(abs(a - b), tolerance * scale, "element %d: %r, not %r" % (n, a, b))

    def test_report(self):
        p = Problem(7, 5, 11, ignored=[2])
        report = self.json("loss", *self.files(p))
        losses = [p.row(i)[0] for i in p.kept()]
        mean = sum(losses) / len(losses)
        self.assertAlmostEqual(report["loss"], mean, places=5)
        self.assertAlmostEqual(report["perplexity"] / math.exp(mean), 1.0, places=5)
        self.assertEqual((report["kept"], report["rows"], report["hidden"], report["vocab"], report["bad"]),
                         (6, 7, 5, 11, 0))
        self.assertEqual((report["dtype"], report["backend"], report["reduction"]), ("f32", BACKEND, "mean"))
        self.assertGreaterEqual(report["seconds"], 0)
        self.assertGreaterEqual(report["threads"], 1)
        self.assertGreaterEqual(report["workspace_bytes"], 0)
        self.assertEqual(report["written"], [])
        text = self.ok("loss", *self.files(p))
        self.assertIn("loss ", text)
        self.assertIn("6 of 7 rows", text)

    def test_gradients_and_rows(self):
        p = Problem(6, 4, 9, ignored=[0, 4])
        out = [self.path(n) for n in ("dx.safetensors", "dw.npy", "rows.safetensors")]
        report = self.json("loss", *self.files(p), "--grad-hidden", out[0], "--grad-weight", out[1], "--per-row", out[2])
        self.assertEqual(report["written"], out)
        kept = p.kept()
        dx, dw = [0.0] * len(p.x), [0.0] * len(p.w)
        rows = {name: [0.0] * 6 for name in ("loss", "lse", "logprob", "mean_logit", "log_sum_p2")}
        for i in kept:
            rows["loss"][i], rows["lse"][i], rows["logprob"][i], d = p.row(i)
            rows["mean_logit"][i] = sum(p.logits(i)) / p.vocab
            rows["log_sum_p2"][i] = math.log(sum(math.exp(2 * (z - rows["lse"][i])) for z in p.logits(i)))
            for j in range(p.vocab):
                for k in range(p.hidden):
                    dx[i * p.hidden + k] += d[j] / len(kept) * p.w[j * p.hidden + k]
                    dw[j * p.hidden + k] += d[j] / len(kept) * p.x[i * p.hidden + k]
        dtype, shape, values = read_safetensors(out[0])["grad_hidden"]
        self.assertEqual((dtype, shape), ("F32", [6, 4]))
        self.close(values, dx)
        self.assertEqual(values[0:4], [0.0] * 4)
        with open(out[1], "rb") as file:
            content = file.read()
        self.assertIn(b"'descr': '<f4'", content)
        self.assertIn(b"'shape': (9, 4)", content)
        self.close(list(struct.unpack("<36f", content[-144:])), dw)
        saved = read_safetensors(out[2])
        self.assertEqual(sorted(saved), ["argmax", "correct", "entropy", "log_sum_p2", "logprob", "loss", "lse",
                                         "mean_logit", "zloss"])
        for name, want in rows.items():
            self.assertEqual(saved[name][:2], ("F32", [6]))
            self.close(saved[name][2], want)
        self.assertEqual(len(os.listdir(self.folder)), 4)

    def test_logits(self):
        p = Problem(5, 4, 9, ignored=[1])
        path = self.path("z.safetensors")
        write_safetensors(path, p.logits_tensors())
        out = self.path("dz.safetensors")
        report = self.json("loss", "--logits", path + ":logits", "--targets", path + ":targets", "--grad-logits", out,
                           "--reduction", "sum", "--backend", BACKEND)
        self.assertNotIn("hidden", report)
        self.assertAlmostEqual(report["loss"], sum(p.row(i)[0] for i in p.kept()), places=4)
        want = [0.0] * 45
        for i in p.kept():
            want[i * 9:(i + 1) * 9] = p.row(i)[3]
        self.close(read_safetensors(out)["grad_logits"][2], want)

    def test_options(self):
        p = Problem(8, 4, 9, seed=3)
        files = self.files(p)
        for alpha, others in ((0.1, False), (0.25, True), (1.0, False)):
            want = sum(p.row(i, alpha, others)[0] for i in range(8)) / 8
            got = self.json("loss", *files, "--label-smoothing", str(alpha), "--smoothing",
                            "others" if others else "uniform")
            self.assertAlmostEqual(got["loss"], want, places=5)
            # Perplexity is that of the targets, whatever the smoothing.
            nll = sum(p.row(i)[0] for i in range(8)) / 8
            self.assertAlmostEqual(got["perplexity"] / math.exp(nll), 1.0, places=5)
        total = sum(p.row(i)[0] for i in range(8))
        self.assertAlmostEqual(self.json("loss", *files, "--normalizer", "64")["loss"], total / 64, places=5)
        ignored = p.y[0]
        kept = [i for i in range(8) if p.y[i] != ignored]
        got = self.json("loss", *files, "--ignore-index", str(ignored))
        self.assertEqual(got["kept"], len(kept))
        self.assertAlmostEqual(got["loss"], sum(p.row(i)[0] for i in kept) / len(kept), places=5)
        self.assertEqual(self.json("loss", *files, "--ignore-index", "-7")["kept"], 8)
        report = self.json("loss", *files, "--reduction", "none", "--per-row", self.path("rows.safetensors"))
        self.assertIsNone(report["loss"])
        self.close(read_safetensors(self.path("rows.safetensors"))["loss"][2], [p.row(i)[0] for i in range(8)])

    def test_empty(self):
        p = Problem(3, 4, 9, ignored=[0, 1, 2])
        files = self.files(p)
        self.assertEqual(self.json("loss", *files, "--on-empty", "zero")["loss"], 0.0)
        self.assertIsNone(self.json("loss", *files, "--on-empty", "nan")["loss"])
        self.assertEqual(self.json("loss", *files, "--reduction", "sum")["loss"], 0.0)
        write_safetensors(self.path("none.safetensors"), Problem(0, 4, 9).tensors())
        none = self.path("none.safetensors")
        report = self.json("loss", "--hidden", none + ":hidden", "--weight", none + ":weight", "--targets",
                           none + ":targets", "--reduction", "sum", "--backend", BACKEND, "--grad-weight",
                           self.path("dw.safetensors"))
        self.assertEqual((report["loss"], report["kept"]), (0.0, 0))
        self.assertEqual(set(read_safetensors(self.path("dw.safetensors"))["grad_weight"][2]), {0.0})

    def test_dtypes(self):
        p = Problem(6, 8, 17, seed=5)
        mean = sum(p.row(i)[0] for i in range(6)) / 6
        for dtype in ("BF16", "F16", "F32", "F64"):
            files = self.files(p, dtype=dtype, integer="I32")
            if dtype == "F64":
                files[files.index("--backend") + 1] = "reference"  # the one that takes it
            out = self.path("dx.safetensors")
            report = self.json("loss", *files, "--grad-hidden", out)
            self.assertEqual(report["dtype"], dtype.lower())
            self.assertAlmostEqual(report["loss"], mean, places=4)
            self.assertEqual(read_safetensors(out)["grad_hidden"][0], dtype)
            if dtype != "F64":
                self.json("loss", *files, "--grad-hidden", out, "--grad-dtype", "f32")
                self.assertEqual(read_safetensors(out)["grad_hidden"][0], "F32")
        report = self.json("loss", *self.files(p, dtype="BF16"), "--dtype", "f32")
        self.assertEqual(report["dtype"], "f32")
        self.assertAlmostEqual(report["loss"], mean, places=5)

    def test_npy_inputs(self):
        p = Problem(4, 3, 5)
        x = self.put("x.npy", npy("<f4", (4, 3), pack("F32", p.x)))
        w = self.put("w.npy", npy("<f8", (5, 3), pack("F64", p.w), version=2))
        y = self.put("y.npy", npy("<i4", (4,), pack("I32", p.y)))
        report = self.json("loss", "--hidden", x, "--weight", w, "--targets", y, "--dtype", "f32", "--backend", BACKEND)
        self.assertAlmostEqual(report["loss"], sum(p.row(i)[0] for i in range(4)) / 4, places=5)
        v2 = self.put("x2.npy", npy("|V2", (4, 3), pack("BF16", p.x)))
        self.refused(1, ["--hidden", "x2.npy", "--npy-bf16"], "loss", "--hidden", v2, "--weight", w, "--targets", y)
        report = self.json("loss", "--hidden", v2, "--weight", w, "--targets", y, "--npy-bf16", "--dtype", "f32",
                           "--backend", BACKEND)
        self.assertAlmostEqual(report["loss"], sum(p.row(i)[0] for i in range(4)) / 4, places=5)

    def test_names(self):
        # One tensor needs no name, and a path may hold a colon.
        p = Problem(4, 3, 5)
        paths = {}
        for name, tensor in p.tensors().items():
            paths[name] = self.path("a:b " + name + ".safetensors")
            write_safetensors(paths[name], {name: tensor})
        report = self.json("loss", "--hidden", paths["hidden"], "--weight", paths["weight"] + ":weight", "--targets",
                           paths["targets"], "--backend", BACKEND)
        self.assertEqual(report["kept"], 4)

    def test_budget_and_threads(self):
        p = Problem(64, 32, 300)
        files = self.files(p)
        free = self.json("loss", *files, "--grad-weight", self.path("a.safetensors"), "--threads", "1")
        tight = self.json("loss", *files, "--grad-weight", self.path("b.safetensors"), "--budget", "8MiB")
        self.assertLessEqual(tight["workspace_bytes"], 8 << 20)
        self.assertEqual(tight["loss"], free["loss"])
        self.assertEqual(free["threads"], 1)

    def test_bad_rows_are_counted(self):
        write_safetensors(self.path("z.safetensors"),
                          {"logits": ("F32", [2, 3], [1.0, float("nan"), 2.0, 0.0, 1.0, 2.0]),
                           "targets": ("I64", [2], [0, 1])})
        z = self.path("z.safetensors")
        report = self.json("loss", "--logits", z + ":logits", "--targets", z + ":targets", "--backend", BACKEND)
        self.assertEqual(report["bad"], 1)
        self.assertIsNone(report["loss"])

    def test_existing_output_is_replaced(self):
        out = self.put("dx.safetensors", b"old")
        self.json("loss", *self.files(Problem(4, 3, 5)), "--grad-hidden", out)
        self.assertEqual(read_safetensors(out)["grad_hidden"][1], [4, 3])


if __name__ == "__main__":
    unittest.main()
