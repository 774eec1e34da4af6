#!/usr/bin/env python3
"""`logitless bench` at tiny shapes: the JSON is whole and its numbers are possible. Nothing here depends on how fast the
machine is, only on figures being of the right kind: rates positive, fractions of the size of one, losses that agree.

Needs LOGITLESS_CLI, the command to test."""

import json
import math
import os
import subprocess
import sys
import tempfile
import unittest

CLI = os.environ.get("LOGITLESS_CLI", "")
TINY = ["--rows", "70", "--hidden", "48", "--vocab", "1000", "--repeats", "2", "--threads", "2"]


def bench(*words):
    return subprocess.run([CLI, "bench", *words], capture_output=True, text=True, timeout=60)


def bench_json(*words):
    done = bench(*words, "--json", "-")
    if done.returncode != 0:
        raise AssertionError(f"bench {' '.join(words)} failed with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def refuse_constant(text):
    raise ValueError("not JSON: " + text)


class Bench(unittest.TestCase):
    def check_ceilings(self, report):
        offered = {c["name"]: c for c in report["ceilings"]}
        self.assertEqual(len(offered), 9)
        for name, ceiling in offered.items():
            with self.subTest(ceiling=name):
                if "why_not" in ceiling:
                    self.assertTrue(ceiling["why_not"])
                else:
                    self.assertGreater(ceiling["median"], 0)
                    self.assertGreaterEqual(ceiling["best"], ceiling["median"])
                    self.assertGreaterEqual(ceiling["samples"], 3)
        for always in ("dram_read", "dram_copy"):
            self.assertIn("median", offered[always])
        return offered

    def check_rows(self, report, table):
        rows = {row["name"]: row for row in table["rows_measured"]}
        ceilings = {c["name"]: c for c in report["ceilings"]}
        self.assertEqual(len(rows), len(table["rows_measured"]), "two rows have one name")
        for name, row in rows.items():
            with self.subTest(row=name):
                self.assertIn(row["who"], ("ours", "dense", "probe"))
                if "seconds" not in row:
                    self.assertTrue(row.get("note"), "a row without a time must say why")
                    continue
                self.assertGreater(row["seconds"], 0)
                self.assertLessEqual(row["seconds_best"], row["seconds"])
                self.assertTrue(row.get("gflops", 0) > 0 or row.get("gbytes", 0) > 0)
                if "fraction" in row and row["ceiling"] in ceilings:
                    ceiling = ceilings[row["ceiling"]]
                    self.assertAlmostEqual(row["fraction"] * ceiling["median"] / row["gflops"], 1, delta=1e-9)
                    # Of the best probe: the median of a few milliseconds says little while other tests run.
                    self.assertLess(row["gflops"] / ceiling["best"], 10)
                elif "fraction" in row:
                    probe = rows[row["ceiling"]]
                    self.assertAlmostEqual(row["fraction"] * row["seconds"] / probe["seconds"], 1, delta=1e-9)
                    self.assertGreater(row["fraction"], 0)
                    self.assertLess(probe["seconds_best"] / row["seconds"], 10)
                if "ratio" in row:
                    self.assertGreater(row["ratio"], 0)
                    self.assertIn(row["ratio_to"], rows)
        return rows

    def check_losses(self, rows, names, relative):
        losses = [rows[name]["loss"] for name in names]
        for loss in losses:
            self.assertTrue(math.isfinite(loss))
            self.assertAlmostEqual(loss, losses[0], delta=relative * abs(losses[0]))

    def test_linear(self):
        report = bench_json("--suite", "linear", "--dtype", "bf16", "--budget", "4MiB", *TINY)
        self.assertEqual(report["command"], "bench")
        self.assertEqual(report["threads"], 2)
        for key in ("date", "version", "machine", "cpu_target", "context"):
            self.assertTrue(report[key], key)
        offered = self.check_ceilings(report)
        (table,) = report["tables"]
        self.assertEqual((table["suite"], table["dtype"]), ("linear", "bf16"))
        self.assertEqual((table["rows"], table["hidden"], table["vocab"]), (70, 48, 1000))
        self.assertLess(table["kept"], 70)
        rows = self.check_rows(report, table)
        for name in ("loss + gradients", "loss only", "75 % of rows ignored", "within 4 MiB", "dW in fp32",
                     "dW in fp32, within 4 MiB", "loss + gradients, unfused", "loss only, unfused"):
            self.assertIn("seconds", rows[name], rows[name])
        for name in ("within 4 MiB", "dW in fp32, within 4 MiB"):
            self.assertLessEqual(rows[name]["workspace_bytes"], 4 << 20)
        full = rows["loss + gradients"]
        self.assertIn("median", offered[full["ceiling"]])
        flops = 6 * table["kept"] * 48 * 1000
        self.assertAlmostEqual(full["gflops"] * full["seconds"] * 1e9 / flops, 1, delta=1e-9)
        # bf16 operands are the same numbers for both; sums differ by fp32 rounding alone.
        self.check_losses(rows, ("loss + gradients", "loss only", "within 4 MiB", "dW in fp32",
                                 "loss + gradients, unfused"), 1e-5)

    def test_logits(self):
        report = bench_json("--suite", "logits", *TINY)
        self.assertEqual([t["dtype"] for t in report["tables"]], ["f32", "bf16"])
        for table in report["tables"]:
            rows = self.check_rows(report, table)
            for name in ("read the array", "scale it in place", "copy it", "loss only", "loss + gradient in place",
                         "loss + gradient apart", "loss + gradient, unfused"):
                self.assertIn("seconds", rows[name], rows[name])
            self.check_losses(rows, ("loss only", "loss + gradient in place", "loss + gradient apart",
                                     "loss + gradient, unfused"), 1e-5)

    def test_error(self):
        for dtype in ("f32", "bf16"):
            report = bench_json("--suite", "error", "--dtype", dtype, *TINY)
            (table,) = report["errors"]
            quantities = {q["name"]: q for q in table["quantities"]}
            self.assertEqual(set(quantities), {"dX", "dW, rows of targets", "dW, other rows", "loss"})
            # One rounding of the result to the dtype bounds what anyone can reach from below, a few of them from above.
            unit = {"f32": 2.0**-24, "bf16": 2.0**-9}[dtype]
            for name in ("dX", "dW, rows of targets", "dW, other rows"):
                for who in ("ours", "plain"):
                    with self.subTest(dtype=dtype, quantity=name, who=who):
                        self.assertGreater(quantities[name][who], 0)
                        self.assertLess(quantities[name][who], 64 * unit)
            self.assertLess(quantities["loss"]["ours"], 1e-5)

    def test_text_and_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "bench.json")
            done = bench("--suite", "linear", "--dtype", "f32", "--no-dense", "--json", path, *TINY)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("ceilings", done.stdout)
            self.assertIn("loss + gradients", done.stdout)
            self.assertNotIn("unfused", done.stdout)
            with open(path, encoding="utf-8") as file:
                report = json.load(file, parse_constant=refuse_constant)
            self.assertEqual(os.listdir(folder), ["bench.json"])
        self.check_ceilings(report)
        names = self.check_rows(report, report["tables"][0])
        self.assertNotIn("dW in fp32", names)  # it is in fp32 already

    def test_a_budget_below_the_least_is_a_note(self):
        report = bench_json("--suite", "linear", "--dtype", "bf16", "--no-dense", "--budget", "1KiB", *TINY)
        notes = [row.get("note", "") for row in report["tables"][0]["rows_measured"] if row["name"].startswith("within")]
        self.assertEqual(len(notes), 1)
        self.assertIn("budget", notes[0])

    def test_bad_requests(self):
        for words, name in ((["--suite", "fast"], "suite"), (["--dtype", "f8"], "dtype"), (["--rows", "0"], "rows"),
                            (["--data", "zeros"], "data"), (["--ignored", "1"], "ignored")):
            done = bench(*words)
            with self.subTest(words=words):
                self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
                self.assertIn(name, done.stderr)
                self.assertEqual(done.stdout, "")


if __name__ == "__main__":
    if not CLI:
        sys.exit("LOGITLESS_CLI is not set to the command to test")
    if "not in this build" in bench("--help").stdout:
        print("SKIP: this build has no benchmarks (LOGITLESS_BUILD_BENCH is off)")
        sys.exit(77)
    unittest.main()
