# `logitless check` must fail: one element of one output of the CPU backend is made wrong by a preloaded library
# (perturb.c), and check must name that output, and only that one, and exit with 1. Skips where the machine has no C
# compiler or the library is linked statically.
import json
import os
import shutil
import subprocess
import sys
import unittest

from support import BACKEND, BIN, Case, ROOT

COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


class CheckFails(Case):
    def check(self, what, *more):
        library = self.path("perturb.so")
        if not os.path.exists(library):
            subprocess.run([COMPILER, "-std=c11", "-O1", "-shared", "-fPIC", "-I", os.path.join(ROOT, "include"),
                            os.path.join(ROOT, "tests", "cli", "perturb.c"), "-o", library, "-ldl"], check=True)
        environment = dict(os.environ, LD_PRELOAD=library)
        if what:
            environment["LOGITLESS_PERTURB"] = what
        done = self.run_cli("check", "--rows", "40", "--hidden", "32", "--vocab", "600", "--json", *more, env=environment)
        report = json.loads(done.stdout)
        wrong = [o["output"] for o in report["outputs"] if not o["passed"]]
        self.assertEqual(done.returncode, 1 if wrong else 0, done.stderr)
        self.assertEqual(report["passed"], not wrong)
        if wrong:
            self.assertEqual(done.stderr, "logitless check: beyond tolerance: %s\n" % ", ".join(wrong))
            for output in report["outputs"]:
                if not output["passed"]:
                    error = output["error"]  # null: NaN where a number should be
                    self.assertTrue(error is None or error > output["tolerance"])
        return wrong

    def test_right_results_pass(self):
        self.assertEqual(self.check("", "--dtype", "f32"), [])
        self.assertEqual(self.check("", "--dtype", "bf16", "--sample", "6"), [])

    def test_one_wrong_element_is_found(self):
        for what in ("loss", "row_loss", "row_lse", "grad_hidden", "grad_weight"):
            self.assertEqual(self.check(what + ":1.001", "--dtype", "f32"), [what])
            self.assertEqual(self.check(what + ":nan", "--dtype", "f32"), [what])
        for what in ("grad_hidden", "grad_weight"):
            self.assertEqual(self.check(what + ":1.1", "--dtype", "bf16"), [what])

    def test_sampled(self):
        self.assertEqual(self.check("grad_weight:1.1", "--dtype", "bf16", "--sample", "6"), ["grad_weight"])
        self.assertEqual(self.check("loss:1.001", "--dtype", "f32", "--sample", "6"), ["loss"])

    def test_every_output_of_a_row(self):
        f32 = ["--dtype", "f32", "--per-row", "--z-loss", "0.1", "--bias", "random"]
        self.assertEqual(self.check("", *f32), [])
        for what in ("row_logprob", "row_entropy", "row_zloss", "row_mean_logit", "row_log_sum_p2", "grad_bias"):
            self.assertEqual(self.check(what + ":1.01", *f32), [what])
            self.assertEqual(self.check(what + ":nan", *f32), [what])
        # A wrong argmax makes what is said of it wrong too where the first row's target is one of the two.
        self.assertIn("row_argmax", self.check("row_argmax", *f32))
        self.assertEqual(self.check("row_correct", *f32), ["row_correct"])

    def test_one_wrong_element_with_every_option(self):
        topk = ["--topk-ids", "random", "--topk-probs", "random"]
        teacher = ["--teacher-hidden", "random:20", "--teacher-weight", "random"]
        for options in (["--soft-targets", "random"], [*topk, "--rest", "spread"], topk,
                        ["--topk-ids", "random", "--topk-logprobs", "random", "--hard-share", "0.5"], teacher,
                        [*teacher, "--divergence", "reverse_kl"],
                        [*teacher, "--divergence", "jsd", "--distill-temperature", "2", "--hard-share", "0.5"],
                        ["--keep-mask", "random", "--label-smoothing", "0.1"], ["--logit-floor", "random"],
                        ["--temperature", "random", "--row-weight", "random", "--class-weight", "random"],
                        ["--policy-old-logprob", "random", "--policy-advantage", "random", "--entropy-coef", "0.1",
                         "--policy-ref-logprob", "random", "--kl-coef", "0.01"]):
            for sample in ([], ["--sample", "12"]):
                f32 = ["--dtype", "f32", *options, *sample]
                self.assertEqual(self.check("", *f32), [], options)
                self.assertEqual(self.check("grad_weight:1.01", *f32), ["grad_weight"], options)
                if not sample:  # the largest element's row may not be in it
                    self.assertEqual(self.check("row_loss:1.01", *f32), ["row_loss"], options)
                    self.assertEqual(self.check("grad_hidden:1.01", *f32), ["grad_hidden"], options)


if __name__ == "__main__":
    if COMPILER is None:
        print("SKIP: no C compiler, so no library to preload")
        sys.exit(77)
    if BACKEND != "cpu":
        print("SKIP: the CPU backend is what is made wrong, LOGITLESS_TEST_BACKEND is " + BACKEND)
        sys.exit(77)
    if "liblogitless" not in subprocess.run(["ldd", BIN], stdout=subprocess.PIPE, text=True).stdout:
        print("SKIP: liblogitless is not a shared library here, so it cannot be preloaded over")
        sys.exit(77)
    unittest.main()
