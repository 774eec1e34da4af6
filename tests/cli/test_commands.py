# info, plan, check and what all commands share: help with an example, one JSON object, closed pipes, full disks.
import json
import os
import subprocess
import unittest

from support import BACKEND, BIN, Case, Problem, write_safetensors


class Commands(Case):
    def test_help_has_an_example_that_works(self):
        self.assertIn("Example:", self.ok("--help"))
        for command in ("info", "plan", "loss", "check", "bench"):
            text = self.ok(command, "--help")
            self.assertIn("Example:\n", text)
            example = text.split("Example:\n")[1].replace("\\\n", " ").strip().splitlines()[0].split()
            self.assertEqual(example[:2], ["logitless", command])
            if command in ("info", "plan"):
                self.ok(*example[1:])

    def test_version(self):
        self.assertRegex(self.ok("--version"), r"^logitless \d+\.\d+\.\d+\n$")

    def test_info(self):
        info = self.json("info", "--threads", "1")
        self.assertEqual(info["threads"], 1)
        self.assertIn("reference", info["backends"])
        self.assertIn(info["cpu_target"], [t["name"] for t in info["cpu_targets"]])
        self.assertIn(info["version"], self.ok("info"))
        forced = self.json("info", env={**os.environ, "LOGITLESS_CPU_TARGET": "scalar"})
        self.assertEqual(forced["cpu_target"], "scalar")

    def test_plan(self):
        size = ["--rows", "512", "--hidden", "256", "--vocab", "5003", "--threads", "2"]
        plan = self.json("plan", *size, "--dtype", "bf16")
        self.assertEqual((plan["rows"], plan["hidden"], plan["vocab"]), (512, 256, 5003))
        self.assertEqual(sum(b["bytes"] for b in plan["ledger"]), plan["workspace_bytes"])
        tight = self.json("plan", *size, "--budget", "4MiB")
        self.assertLessEqual(tight["workspace_bytes"], 4 << 20)
        loss_only = self.json("plan", *size, "--loss-only")
        self.assertEqual(loss_only["call"], "forward")
        logits = self.json("plan", "--kind", "logits", "--rows", "64", "--vocab", "1000", "--dtype", "f32")
        self.assertEqual(logits["kind"], "logits")
        text = self.ok("plan", *size, "--budget", "4MiB")
        self.assertIn("rejected", text)
        least = self.refused(2, ["--budget", "at least"], "plan", *size, "--budget", "1KiB")
        # The minimum in the message is one that works.
        number = [w for w in least.replace(";", " ").split() if w.isdigit()][-1]
        self.assertLessEqual(self.json("plan", *size, "--budget", number)["workspace_bytes"], int(number))

    def test_check_random(self):
        for more in (["--dtype", "f32"], ["--dtype", "bf16", "--label-smoothing", "0.1"],
                     ["--dtype", "f16", "--grad-dtype", "f32", "--reduction", "sum"],
                     ["--dtype", "bf16", "--reduction", "none", "--smoothing", "others", "--label-smoothing", "0.2"]):
            report = self.json("check", "--rows", "50", "--hidden", "48", "--vocab", "701", "--backend", BACKEND, *more)
            self.assertTrue(report["passed"], report)
            self.assertFalse(report["sampled"])
            self.assertEqual(report["rows_checked"], 50)
            names = [o["output"] for o in report["outputs"]]
            self.assertEqual(names[-4:], ["row_loss", "row_lse", "grad_hidden", "grad_weight"])
            for output in report["outputs"]:
                self.assertLessEqual(output["error"], output["tolerance"])
        report = self.json("check", "--kind", "logits", "--rows", "40", "--vocab", "999", "--dtype", "f32", "--backend",
                           BACKEND)
        self.assertTrue(report["passed"])
        self.assertEqual(report["outputs"][-1]["output"], "grad_logits")

    def test_check_samples_and_says_so(self):
        arguments = ["check", "--rows", "60", "--hidden", "32", "--vocab", "500", "--sample", "8", "--backend", BACKEND]
        report = self.json(*arguments)
        self.assertTrue(report["passed"], report)
        self.assertTrue(report["sampled"])
        self.assertEqual(report["rows_checked"], 8)
        self.assertIn("sampled: 8 of 57 kept rows", self.ok(*arguments))
        self.assertEqual(self.json(*arguments)["outputs"], report["outputs"])
        other = self.json(*arguments, "--seed", "2")
        self.assertNotEqual(other["outputs"], report["outputs"])
        self.assertTrue(self.json("check", "--kind", "logits", "--rows", "60", "--vocab", "500", "--sample", "5",
                                  "--backend", BACKEND)["passed"])

    def test_check_files(self):
        path = self.path("p.safetensors")
        write_safetensors(path, Problem(20, 8, 90, ignored=[3]).tensors(dtype="BF16"))
        report = self.json("check", "--hidden", path + ":hidden", "--weight", path + ":weight", "--targets",
                           path + ":targets", "--backend", BACKEND)
        self.assertTrue(report["passed"])
        self.assertEqual(report["kept"], 19)
        self.refused(1, ["--targets"], "check", "--hidden", path + ":hidden", "--weight", path + ":weight", "--targets",
                     path + ":hidden")

    def test_check_flags(self):
        self.refused(2, ["--rows", "missing"], "check", "--vocab", "9")
        self.refused(2, ["--vocab", "missing"], "check", "--rows", "9")
        self.refused(2, ["--hidden", "'x'"], "check", "--rows", "9", "--vocab", "9", "--hidden", "x")
        self.refused(2, ["inputs", "missing"], "check")
        self.refused(2, ["--targets", "--rows"], "check", "--rows", "9", "--vocab", "9", "--targets", "y.npy")

    def test_closed_pipe(self):
        # A reader that leaves at once: no message, no failure.
        command = [BIN, "plan", "--rows", "512", "--hidden", "256", "--vocab", "5003"]
        for _ in range(3):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            process.stdout.close()
            error = process.stderr.read()
            process.stderr.close()
            self.assertEqual((process.wait(), error), (0, b""))

    @unittest.skipUnless(os.path.exists("/dev/full"), "/dev/full is absent")
    def test_full_disk(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([BIN, "info", "--json"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("stdout", done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1)

    def test_bench_refuses(self):
        done = self.run_cli("bench", "--suite", "everything")
        self.assertIn(done.returncode, (1, 2))
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)


if __name__ == "__main__":
    unittest.main()
