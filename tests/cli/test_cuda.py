# What --backend cuda is beside the other backends: which device, what comes back from its memory, what only it can
# tell, and that each command takes it. The other scripts run on it too, with LOGITLESS_TEST_BACKEND=cuda. A device, or
# the stand-in of tests/stand_in, is needed.
import json
import subprocess
import sys
import unittest

from support import BIN, Case, Problem, read_safetensors, write_safetensors


def devices():
    done = subprocess.run([BIN, "info", "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["cuda_devices"]


class Cuda(Case):
    def files(self, problem, **keywords):
        path = self.path("p.safetensors")
        write_safetensors(path, problem.tensors(**keywords))
        return ["--hidden", path + ":hidden", "--weight", path + ":weight", "--targets", path + ":targets"]

    def test_info_names_the_device(self):
        info = self.json("info", "--backend", "cuda")
        self.assertEqual(info["backend"], "cuda")
        self.assertTrue(info["device"])
        self.assertIn(info["device"], self.ok("info", "--backend", "cuda"))
        self.assertIsNone(self.json("info")["device"])

    def test_a_device_that_is_not_there(self):
        for command in (["loss", *self.files(Problem(3, 2, 5))], ["info"], ["bench", "--suite", "linear"],
                        ["check", "--rows", "3", "--hidden", "2", "--vocab", "5"]):
            done = self.run_cli(*command, "--backend", "cuda", "--device", "99")
            self.assertNotEqual(done.returncode, 0, command)
            self.assertIn("99", done.stderr)
            self.assertEqual((done.stderr.count("\n"), done.stdout), (1, ""), done.stderr)

    def test_every_output_as_the_reference_has_it(self):
        files = self.files(Problem(9, 5, 23, ignored=[0, 4, 8]))
        for device in range(min(devices(), 2)):
            got, want = {}, {}
            for tensors, words in ((got, ["--backend", "cuda", "--device", str(device)]),
                                   (want, ["--backend", "reference"])):
                out = [self.path(n + ".safetensors") for n in ("dx", "dw", "rows")]
                report = self.json("loss", *files, *words, "--grad-hidden", out[0], "--grad-weight", out[1],
                                   "--per-row", out[2])
                tensors["report"] = (report["loss"], report["kept"], report["correct"], report["entropy"])
                for path in out:
                    tensors.update({name: t[2] for name, t in read_safetensors(path).items()})
                self.assertEqual(report["backend"], words[1])
                self.assertEqual(report["device"] is None, words[1] != "cuda")
            self.assertEqual(set(got), set(want))
            self.assertGreaterEqual(len(got), 10)
            for name, values in want.items():
                with self.subTest(device=device, tensor=name):
                    self.assertEqual(len(got[name]), len(values))
                    for a, b in zip(got[name], values):
                        self.assertAlmostEqual(a, b, delta=1e-5)

    def test_in_place_and_in_fp32(self):
        path = self.path("z.safetensors")
        write_safetensors(path, Problem(6, 3, 17, ignored=[1]).logits_tensors("F16"))
        inputs = ["--logits", path + ":logits", "--targets", path + ":targets"]
        for dtype, name in (("input", "F16"), ("f32", "F32")):
            both = {}
            for backend in ("cuda", "reference"):
                out = self.path(backend + ".safetensors")
                self.json("loss", *inputs, "--backend", backend, "--grad-logits", out, "--grad-dtype", dtype)
                both[backend] = read_safetensors(out)["grad_logits"]
            self.assertEqual(both["cuda"][:2], (name, [6, 17]))
            for a, b in zip(both["cuda"][2], both["reference"][2]):
                self.assertAlmostEqual(a, b, delta=1e-3 if name == "F16" else 1e-6)

    def test_what_only_the_device_sees(self):
        problem = Problem(5, 3, 11)
        problem.y[3] = 11
        out = self.path("dx.safetensors")
        on_host = self.run_cli("loss", *self.files(problem), "--grad-hidden", out)
        there = self.run_cli("loss", *self.files(problem), "--grad-hidden", out, "--backend", "cuda")
        self.assertEqual(there.returncode, on_host.returncode)
        for words in ("11", "3"):
            self.assertIn(words, there.stderr)
        self.assertEqual((there.stdout, there.stderr.count("\n")), ("", 1))
        with self.assertRaises(OSError):
            open(out, "rb").close()
        problem.y = [-100] * 5
        empty = self.run_cli("loss", *self.files(problem), "--on-empty", "error", "--backend", "cuda")
        self.assertNotEqual(empty.returncode, 0)
        self.assertEqual((empty.stdout, empty.stderr.count("\n")), ("", 1))

    def test_plan_is_the_devices(self):
        plan = self.json("plan", "--rows", "4096", "--hidden", "2048", "--vocab", "32000", "--dtype", "bf16", "--backend",
                         "cuda")
        self.assertTrue(plan["target"].startswith("sm_"), plan["target"])
        self.assertEqual(sum(b["bytes"] for b in plan["ledger"]), plan["workspace_bytes"])

    def test_check(self):
        for more in (["--dtype", "bf16"], ["--dtype", "f16", "--grad-dtype", "f32"], ["--dtype", "f32", "--softcap", "20"],
                     ["--kind", "logits", "--dtype", "bf16"]):
            size = ["--rows", "40", "--vocab", "301"] + ([] if "--kind" in more else ["--hidden", "32"])
            report = self.json("check", *size, *more, "--backend", "cuda")
            self.assertTrue(report["passed"], report)
            self.assertTrue(report["device"])

    def test_bench(self):
        size = ["--rows", "70", "--hidden", "48", "--vocab", "1000", "--repeats", "2", "--backend", "cuda", "--budget", "4MiB"]
        names = {"linear": ["loss + gradients", "loss only", "75 % of rows ignored", "within 4 MiB", "dW in fp32"],
                 "logits": ["copy it", "half of a copy", "loss only", "loss + gradient in place",
                            "loss + gradient apart"]}
        for suite, wanted in names.items():
            report = json.loads(self.ok("bench", "--suite", suite, "--dtype", "bf16", *size, "--json", "-"))
            self.assertTrue(report["device"])
            self.assertEqual(report["ceilings"], [])
            (table,) = report["tables"]
            rows = {row["name"]: row for row in table["rows_measured"]}
            losses = []
            for name in wanted:
                self.assertGreater(rows[name].get("seconds", 0), 0, rows[name])
                if rows[name]["who"] == "ours" and "75" not in name:
                    losses.append(rows[name]["loss"])
            self.assertEqual(len(losses), 4 if suite == "linear" else 3)
            for loss in losses:
                self.assertAlmostEqual(loss, losses[0], delta=1e-4 * abs(losses[0]))
            if suite == "linear":
                self.assertLessEqual(rows["within 4 MiB"]["workspace_bytes"], 4 << 20)
            # The products are measured, or the rows say why not.
            for row in table["rows_measured"]:
                self.assertTrue("seconds" in row or row["note"], row)
            text = self.ok("bench", "--suite", suite, "--dtype", "bf16", *size)
            self.assertIn(report["device"], text)
        for words, flag in ((["--suite", "options"], "--suite"), (["--peers"], "--peers")):
            refused = self.run_cli("bench", *words, *size)
            self.assertEqual(refused.returncode, 2)
            self.assertIn(flag, refused.stderr)


if __name__ == "__main__":
    if devices() == 0:
        print("SKIP: needs a GPU")
        sys.exit(77)
    unittest.main()
