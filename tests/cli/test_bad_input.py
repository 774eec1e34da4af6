# Every bad input gives one line on stderr that names the argument, its value and what would be right, exit status 2
# (the line is wrong) or 1 (files, data, machine), nothing on stdout, and no file.
import os
import struct
import unittest

from support import BACKEND, Case, Problem, npy, pack, write_safetensors


class BadInput(Case):
    def setUp(self):
        super().setUp()
        self.problem = Problem(6, 4, 9)
        self.file = self.path("p.safetensors")
        write_safetensors(self.file, self.problem.tensors())

    def loss(self, status, parts, *more, **inputs):
        names = {"hidden": self.file + ":hidden", "weight": self.file + ":weight", "targets": self.file + ":targets"}
        names.update(inputs)
        arguments = ["loss", "--backend", BACKEND]
        for name, value in names.items():
            arguments += ["--" + name, value]
        # Outputs are asked for, so that "nothing written" means something.
        arguments += ["--grad-hidden", self.path("dx.safetensors"), "--per-row", self.path("rows.safetensors")]
        return self.refused(status, parts, *arguments, *more)

    def tensor(self, name, dtype, shape, values):
        path = self.path("other.safetensors")
        write_safetensors(path, {name: (dtype, shape, values)})
        return path

    # ---- files

    def test_missing_file(self):
        self.loss(1, ["--hidden", "nowhere.safetensors", "No such file"], hidden=self.path("nowhere.safetensors"))
        self.loss(1, ["--weight", "nowhere.safetensors"], weight=self.path("nowhere.safetensors") + ":weight")

    def test_directory(self):
        self.loss(1, ["--hidden", "is a directory"], hidden=self.folder)

    def test_truncated(self):
        with open(self.file, "rb") as file:
            content = file.read()
        for size in (0, 4, 40, len(content) - 1):
            self.loss(1, ["--hidden", "cut.safetensors"], hidden=self.put("cut.safetensors", content[:size]) + ":hidden")
        x = npy("<f4", (6, 4), pack("F32", self.problem.x))
        for size in (3, 9, 30, len(x) - 1):
            self.loss(1, ["--hidden", "cut.npy"], hidden=self.put("cut.npy", x[:size]))

    def test_lying_header(self):
        def lie(header, data=96):
            return self.put("lie.safetensors", struct.pack("<Q", len(header)) + header + bytes(data))

        self.loss(1, ["--hidden", "lie.safetensors", "4611686018427387904"],
                  hidden=self.put("lie.safetensors", struct.pack("<Q", 1 << 62) + b"{}"))
        self.loss(1, ["needs 96 bytes", "give 48"],
                  hidden=lie(b'{"x":{"dtype":"F32","shape":[6,4],"data_offsets":[0,48]}}', 48))
        self.loss(1, ["which has 95"], hidden=lie(b'{"x":{"dtype":"F32","shape":[6,4],"data_offsets":[0,96]}}', 95))
        self.loss(1, ["too many elements"],
                  hidden=lie(b'{"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,96]}}'))
        self.loss(1, ["JSON"], hidden=lie(b'{"x":{"dtype":"F32","shape":[6,4],"data_offsets":[0,96]}'))
        self.loss(1, ["two tensors"],
                  hidden=lie(b'{"x":{"dtype":"F32","shape":[6,4],"data_offsets":[0,96]},'
                             b'"x":{"dtype":"F32","shape":[0],"data_offsets":[96,96]}}'))

    def test_unknown_tensor(self):
        self.loss(1, ["--hidden", "'hiden'", "'hidden' F32 [6, 4]", "'weight'", "'targets'"],
                  hidden=self.file + ":hiden")
        self.loss(1, ["holds 3 tensors", "FILE:NAME"], hidden=self.file)
        self.loss(1, ["no tensor name"], hidden=self.file + ":")

    def test_names_from_files_stay_on_one_line(self):
        path = self.tensor("a\nb\x1b[31m", "F32", [6, 4], self.problem.x)
        error = self.loss(1, ["\\x0a"], hidden=path + ":x")
        self.assertNotIn("\x1b", error)

    def test_unreadable_types(self):
        self.loss(1, ["BOOL"], hidden=self.tensor("x", "BOOL", [6, 4], [0] * 24))
        self.loss(1, ["big endian"], hidden=self.put("x.npy", npy(">f4", (6, 4), bytes(96))))
        self.loss(1, ["fortran_order"], hidden=self.put("x.npy", npy("<f4", (6, 4), bytes(96), order="True")))

    # ---- tensors

    def test_wrong_dtype(self):
        self.loss(1, ["--hidden", "is i64", "f32, bf16, f16"], hidden=self.tensor("x", "I64", [6, 4], [0] * 24))
        self.loss(1, ["--targets", "is f32", "i32 or i64"], targets=self.tensor("y", "F32", [6], [0.0] * 6))
        if BACKEND == "cpu":
            self.loss(1, ["--hidden", "f64", "--backend reference"], hidden=self.tensor("x", "F64", [6, 4], [0.0] * 24))

    def test_wrong_rank(self):
        self.loss(1, ["--hidden", "[24]", "rank 2", "[R,H]"], hidden=self.tensor("x", "F32", [24], [0.0] * 24))
        self.loss(1, ["--weight", "[1, 9, 4]", "[V,H]"], weight=self.tensor("w", "F32", [1, 9, 4], [0.0] * 36))
        self.loss(1, ["--targets", "[6, 1]", "rank 1"], targets=self.tensor("y", "I64", [6, 1], [0] * 6))

    def test_shapes_that_do_not_agree(self):
        self.loss(1, ["--weight", "5 columns", "--hidden", "has 4", "H"],
                  weight=self.tensor("w", "F32", [9, 5], [0.0] * 45))
        self.loss(1, ["--targets", "5 rows", "--hidden", "has 6", "R"], targets=self.tensor("y", "I64", [5], [0] * 5))
        self.loss(1, ["--weight", "[0, 4]"], weight=self.tensor("w", "F32", [0, 4], []))
        z = self.path("z.safetensors")
        write_safetensors(z, self.problem.logits_tensors())
        self.refused(1, ["--targets", "5 rows", "--logits"], "loss", "--logits", z + ":logits", "--targets",
                     self.tensor("y", "I64", [5], [0] * 5))

    def test_target_out_of_range(self):
        for bad in (9, -1, 1 << 40):
            y = list(self.problem.y)
            y[3] = bad
            self.loss(1, ["--targets", "[3]", str(bad), "9"], targets=self.tensor("y", "I64", [6], y))

    def test_no_kept_row(self):
        y = self.tensor("y", "I64", [6], [-100] * 6)
        self.loss(1, ["--targets", "on_empty"], targets=y)
        none = self.path("none.safetensors")
        write_safetensors(none, Problem(0, 4, 9).tensors())
        self.loss(1, ["--targets", "kept", "on_empty"], hidden=none + ":hidden", targets=none + ":targets")

    # ---- options

    def test_label_smoothing(self):
        for bad in ("-0.1", "1.5", "nan", "inf", "x", ""):
            self.loss(2, ["--label-smoothing", "'%s'" % bad, "from 0 to 1"], "--label-smoothing", bad)

    def test_others_with_one_class(self):
        w = self.tensor("w", "F32", [1, 4], [0.0] * 4)
        y = self.path("y.safetensors")
        write_safetensors(y, {"y": ("I64", [6], [0] * 6)})
        self.loss(2, ["--label-smoothing", "0.1", "no other class"], "--label-smoothing", "0.1", "--smoothing", "others",
                  weight=w, targets=y)

    def test_normalizer(self):
        for bad in ("nan", "inf", "-1", "0", "x"):
            self.loss(2, ["--normalizer", "'%s'" % bad], "--normalizer", bad)
        self.loss(2, ["--normalizer", "8"], "--normalizer", "8", "--reduction", "sum")

    def test_choices(self):
        for flag, right in (("--reduction", "mean, sum, none"), ("--smoothing", "uniform, others"),
                            ("--on-empty", "error, nan, zero"), ("--backend", "cpu, cuda, reference"),
                            ("--dtype", "f32, bf16, f16, f64"), ("--grad-dtype", "input, f32")):
            self.refused(2, [flag, "'median'", right], "loss", flag, "median")

    def test_numbers(self):
        self.loss(2, ["--ignore-index", "'1.5'", "whole number"], "--ignore-index", "1.5")
        self.loss(2, ["--ignore-index", "99999999999999999999"], "--ignore-index", "99999999999999999999")
        self.loss(2, ["--threads", "'0'", "from 1"], "--threads", "0")

    def test_budget(self):
        for bad in ("0", "-1", "12XB", "MiB", "1e3MiB", "nan", "9999999999TiB", "1 MiB"):
            self.loss(2, ["--budget", "'%s'" % bad, "512MiB"], "--budget", bad)
        if BACKEND == "cpu":
            self.loss(2, ["--budget", "64", "at least"], "--budget", "64")

    def test_reduction_none_says_where(self):
        self.refused(2, ["--reduction", "--per-row"], "loss", "--hidden", self.file + ":hidden", "--weight",
                     self.file + ":weight", "--targets", self.file + ":targets", "--reduction", "none")

    # ---- outputs

    def test_outputs(self):
        base = ["loss", "--backend", BACKEND, "--hidden", self.file + ":hidden", "--weight", self.file + ":weight",
                "--targets", self.file + ":targets"]
        os.mkdir(self.path("d.safetensors"))
        for flag, out, parts in (
                ("--grad-hidden", "dx.bin", ["--grad-hidden", "dx.bin", ".safetensors or .npy"]),
                ("--grad-hidden", "no/dx.npy", ["--grad-hidden", "there is no directory"]),
                ("--grad-hidden", "d.safetensors", ["--grad-hidden", "is a directory"]),
                ("--grad-hidden", "p.safetensors", ["--grad-hidden", "is an input"]),
                ("--per-row", "rows.npy", ["--per-row", "one array, not 9", ".safetensors"])):
            self.refused(2, parts, *base, flag, self.path(out))
        self.refused(2, ["--grad-weight", "same.safetensors", "--grad-hidden"], *base, "--grad-hidden",
                     self.path("same.safetensors"), "--grad-weight", self.path("same.safetensors"))
        self.refused(2, ["--grad-logits", "--logits"], *base, "--grad-logits", self.path("dz.npy"))
        half = self.path("half.safetensors")
        write_safetensors(half, self.problem.tensors(dtype="BF16"))
        self.refused(2, ["--grad-hidden", "bf16", ".safetensors"], "loss", "--backend", BACKEND, "--hidden",
                     half + ":hidden", "--weight", half + ":weight", "--targets", half + ":targets", "--grad-hidden",
                     self.path("dx.npy"))
        # One bad output among good ones: none is written.
        self.refused(2, ["--grad-weight"], *base, "--grad-hidden", self.path("dx.npy"), "--grad-weight",
                     self.path("no/dw.npy"))

    # ---- the line itself

    def test_missing_and_contradicting_inputs(self):
        self.refused(2, ["--hidden", "--logits"], "loss")
        self.refused(2, ["--weight", "missing"], "loss", "--hidden", self.file + ":hidden")
        self.refused(2, ["--targets", "missing"], "loss", "--hidden", self.file + ":hidden", "--weight",
                     self.file + ":weight")
        self.refused(2, ["--logits", "--hidden"], "loss", "--logits", self.file + ":hidden", "--hidden",
                     self.file + ":hidden", "--targets", self.file + ":targets")

    def test_unknown_things(self):
        self.refused(2, ["no command", "loss"])
        self.refused(2, ["'lose'", "loss"], "lose")
        self.loss(2, ["'--learning-rate'", "--help"], "--learning-rate", "3")
        self.refused(2, ["--rows", "one value"], "plan", "--rows")
        self.refused(2, ["--rows", "one value"], "plan", "--rows", "3", "--rows", "4")
        self.refused(2, ["--rows", "'-3'", "at least 0"], "plan", "--rows", "-3")
        self.refused(2, ["--vocab", "missing"], "plan", "--rows", "3")
        self.refused(2, ["--hidden", "missing"], "plan", "--rows", "3", "--vocab", "9")
        self.refused(2, ["--hidden", "logits"], "plan", "--rows", "3", "--vocab", "9", "--hidden", "4", "--kind", "logits")
        self.refused(2, ["--cpu-target", "'mmx'"], "info", "--cpu-target", "mmx")
        self.refused(1, ["--backend", "CUDA"], "info", "--backend", "cuda")
        self.refused(2, ["LOGITLESS_NUM_THREADS", "many"], "info", env={"LOGITLESS_NUM_THREADS": "many"})


if __name__ == "__main__":
    unittest.main()
