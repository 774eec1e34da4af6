# logitless loss and check with the options beside targets: every flag once on the backend under test against --backend
# reference, with gradients and all that a row says, and seen to change something; pairs without a meaning are refused
# with status 2 and the flag's name.
import math
import random
import unittest

from support import BACKEND, COMPUTES, Case, read_safetensors, write_safetensors

R, H, V, K, T = 7, 4, 19, 3, 2  # T: the teacher's hidden size


class Options(Case):
    def setUp(self):
        super().setUp()
        g = random.Random(5)

        def numbers(count, low, high):
            return [g.uniform(low, high) for _ in range(count)]

        self.y = [3, 18, -100, 0, 7, 7, 11]
        self.x, self.w = numbers(R * H, -1.5, 1.5), numbers(V * H, -1.5, 1.5)
        soft = numbers(R * V, 0, 2 / V)
        probs = numbers(R * K, 0.1, 0.3)
        tensors = {
            "hidden": ("F32", [R, H], self.x), "weight": ("F32", [V, H], self.w), "targets": ("I64", [R], self.y),
            "logits": ("F32", [R, V], numbers(R * V, -3, 3)),
            "bias": ("F32", [V], numbers(V, -1, 1)), "class": ("F32", [V], numbers(V, 0.25, 2)),
            "row": ("F32", [R], numbers(R, -1, 2)), "t": ("F32", [R], numbers(R, 0.5, 2)),
            "keep": ("U8", [R, (V + 7) // 8], [g.randrange(256) for _ in range(R * ((V + 7) // 8))]),
            "floor": ("F32", [R], numbers(R, -1, 0)), "soft": ("F32", [R, V], soft),
            "ids": ("I32", [R, K], [(5 * i + 7 * k) % V for i in range(R) for k in range(K)]),
            "probs": ("F32", [R, K], probs), "logprobs": ("F32", [R, K], [math.log(p) for p in probs]),
            "tx": ("F32", [R, T], numbers(R * T, -2, 2)), "tw": ("F32", [V, T], numbers(V * T, -1, 1)),
            "tb": ("F32", [V], numbers(V, -1, 1)),
            "old": ("F32", [R], numbers(R, -4, -2)), "adv": ("F32", [R], numbers(R, -2, 2)),
            "ref": ("F32", [R], numbers(R, -4, -2)),
            "tokens": ("I64", [R], [4, 8, 2, 2, 17, 0, 9]), "ends": ("I64", [3], [0, 3, 7]),
        }
        self.file = self.path("o.safetensors")
        write_safetensors(self.file, tensors)
        self.linear = ["--hidden", self.of("hidden"), "--weight", self.of("weight")]
        self.hard = [*self.linear, "--targets", self.of("targets")]
        self.logits = ["--logits", self.of("logits"), "--targets", self.of("targets")]
        self.topk = [*self.hard, "--topk-ids", self.of("ids"), "--topk-probs", self.of("probs")]
        self.topk_log = [*self.hard, "--topk-ids", self.of("ids"), "--topk-logprobs", self.of("logprobs")]
        self.teacher = [*self.hard, "--teacher-hidden", self.of("tx"), "--teacher-weight", self.of("tw")]
        self.policy = [*self.hard, "--policy-old-logprob", self.of("old"), "--policy-advantage", self.of("adv")]

    def of(self, name):
        return self.file + ":" + name

    def run_on(self, backend, arguments):
        """The report and all outputs by name."""
        kind = ["--grad-logits"] if "--logits" in arguments else ["--grad-hidden", "--grad-weight"]
        if "--bias" in arguments and "--logits" not in arguments:
            kind.append("--grad-bias")
        outputs = [a for flag in kind for a in (flag, self.path(flag[2:] + ".safetensors"))]
        report = self.json("loss", *arguments, *outputs, "--per-row", self.path("rows.safetensors"), "--backend", backend)
        values = {}
        for path in outputs[1::2] + [self.path("rows.safetensors")]:
            for name, (_, _, numbers) in read_safetensors(path).items():
                values[name] = numbers
        return report, values

    def agree(self, got, want, note):
        self.assertEqual(got.keys(), want.keys())
        for name in want:
            scale = max(abs(b) for b in want[name])
            for n, (a, b) in enumerate(zip(got[name], want[name])):
                self.assertLessEqual(abs(a - b), 1e-5 * scale, "%s: %s[%d] is %r, not %r" % (note, name, n, a, b))

    def check(self, base, *flags):
        """`flags` beside `base`: as the reference says, and not what `base` says alone."""
        report, values = self.run_on(BACKEND, [*base, *flags])
        expected, want = self.run_on("reference", [*base, *flags])
        self.agree(values, want, " ".join(flags))
        for key in ("loss", "perplexity", "accuracy", "entropy"):
            if expected[key] is None:
                self.assertIsNone(report[key])
            else:
                self.assertAlmostEqual(report[key], expected[key], delta=2e-5 * (1 + abs(expected[key])), msg=key)
        for key in ("kept", "correct", "bad"):
            self.assertEqual(report[key], expected[key], key)
        if flags:
            _, without = self.run_on("reference", base)
            self.assertNotEqual({n: without[n] for n in without}, {n: want.get(n) for n in without}, flags)
        return report, values

    # ---- every flag

    def test_logits_of_the_loss(self):
        for base in (self.hard, self.logits):
            self.check(base, "--logit-scale", "0.5")
            self.check(base, "--softcap", "2")
            self.check(base, "--temperature", "1.5")
            self.check(base, "--temperature", self.of("t"))
            self.check(base, "--bias", self.of("bias"))
            self.check(base, "--keep-mask", self.of("keep"))
            self.check(base, "--logit-floor", self.of("floor"))

    def test_weights_and_z_loss(self):
        for base in (self.hard, self.logits):
            self.check(base, "--class-weight", self.of("class"))
            self.check(base, "--class-weight", self.of("class"), "--label-smoothing", "0.2")
            self.check(base, "--row-weight", self.of("row"))
            report, values = self.check(base, "--z-loss", "0.25")
            for lse, z in zip(values["lse"], values["zloss"]):
                self.assertAlmostEqual(z, 0.25 * lse * lse, places=4)
        self.assertEqual(self.run_on(BACKEND, self.hard)[1]["zloss"], [0.0] * R)

    def test_report_of_rows(self):
        report, values = self.check(self.hard)
        kept = [i for i in range(R) if self.y[i] != -100]
        logits = [[sum(a * b for a, b in zip(self.x[i * H:i * H + H], self.w[j * H:j * H + H])) for j in range(V)]
                  for i in range(R)]
        best = [z.index(max(z)) for z in logits]
        self.assertEqual(values["argmax"], [best[i] if i in kept else -1 for i in range(R)])
        self.assertEqual(report["correct"], sum(best[i] == self.y[i] for i in kept))
        self.assertAlmostEqual(report["accuracy"], report["correct"] / 6)
        entropy = 0.0
        for i in kept:
            total = sum(math.exp(a) for a in logits[i])
            entropy -= sum(math.exp(a) / total * math.log(math.exp(a) / total) for a in logits[i]) / len(kept)
        self.assertAlmostEqual(report["entropy"], entropy, places=5)
        text = self.ok("loss", *self.hard, "--backend", BACKEND)
        for word in ("perplexity", "accuracy", "entropy"):
            self.assertIn(word, text)

    def test_soft_and_topk_targets(self):
        report, values = self.run_on(BACKEND, [*self.linear, "--soft-targets", self.of("soft")])
        self.assertEqual((report["kept"], report["perplexity"], report["accuracy"], report["correct"]),
                         (R, None, None, None))
        self.assertNotIn("logprob", values)
        self.agree(values, self.run_on("reference", [*self.linear, "--soft-targets", self.of("soft")])[1], "soft")
        for base in (self.hard, self.logits):  # targets then say alone which rows are left out
            self.assertEqual(self.check(base, "--soft-targets", self.of("soft"))[0]["kept"], 6)
            self.check(base, "--topk-ids", self.of("ids"), "--topk-probs", self.of("probs"))
            self.check(base, "--topk-ids", self.of("ids"), "--topk-logprobs", self.of("logprobs"))
        self.check(self.topk, "--rest", "dropped", "--z-loss", "0.1")
        self.check(self.topk, "--rest", "renormalised")
        self.check(self.topk, "--rest", "spread")
        self.check(self.topk_log, "--rest", "spread")
        self.check(self.topk_log, "--hard-share", "0.25")
        for base in (self.hard, self.logits):  # a second softmax
            self.check([*base, *self.topk_log[6:]], "--hard-share", "0.25", "--distill-temperature", "2", "--z-loss", "0.1")

    def test_teacher(self):
        self.check(self.hard, "--teacher-hidden", self.of("tx"), "--teacher-weight", self.of("tw"))
        self.check(self.teacher, "--teacher-bias", self.of("tb"))
        self.check(self.teacher, "--divergence", "reverse_kl")
        self.check(self.teacher, "--divergence", "jsd")
        self.check([*self.teacher, "--divergence", "jsd"], "--beta", "0.25")
        self.check(self.teacher, "--distill-temperature", "2")
        self.check([*self.teacher, "--distill-temperature", "2"], "--temperature-squared")
        report, values = self.check(self.teacher, "--hard-share", "0.25")
        self.assertIsNotNone(report["perplexity"])
        self.assertIn("logprob", values)

    def test_policy(self):
        self.check(self.hard, "--policy-old-logprob", self.of("old"), "--policy-advantage", self.of("adv"))
        self.check(self.policy, "--clip-low", "0.01")
        self.check(self.policy, "--clip-high", "0.01")
        self.check(self.policy, "--entropy-coef", "0.1")
        self.check(self.policy, "--kl-coef", "0.1", "--policy-ref-logprob", self.of("ref"))

    def test_filter(self):
        for base, gradient in ((self.hard, "grad_hidden"), (self.logits, "grad_logits")):
            plain = self.run_on("reference", base)[1]
            report, values = self.run_on(BACKEND, [*base, "--filter", "0.125", "--filter-seed", "4"])
            again = self.run_on(BACKEND, [*base, "--filter", "0.125", "--filter-seed", "4"])[1]
            self.assertEqual(values, again)
            self.agree({"loss": values["loss"]}, {"loss": plain["loss"]}, "--filter")
            if COMPUTES == "reference":
                self.assertEqual((report["filter_kept"], report["filter_variance"]), (1, 0))
                continue
            other = self.run_on(BACKEND, [*base, "--filter", "0.125", "--filter-seed", "5"])[1]
            self.assertNotEqual(values[gradient], other[gradient])
            self.assertTrue(0 < report["filter_kept"] < 1, report)
            self.assertGreater(report["filter_variance"], 0)
        self.assertNotIn("filter_kept", self.json("loss", *self.hard, "--backend", BACKEND))

    def test_shift(self):
        tokens = [*self.linear, "--targets", self.of("tokens"), "--shift"]
        write_safetensors(self.path("shifted.safetensors"),
                          {"one": ("I64", [R], [8, 2, 2, 17, 0, 9, -100]), "two": ("I64", [R], [8, 2, -100, 17, 0, 9, -1])})
        one = [*self.linear, "--targets", self.path("shifted.safetensors") + ":one"]
        self.agree(self.check(tokens)[1], self.run_on("reference", one)[1], "--shift")
        report, values = self.check(tokens, "--cu-seqlens", self.of("ends"))
        self.assertEqual(report["kept"], 5)
        self.assertEqual(values["loss"][2], 0.0)
        self.assertEqual(self.check(tokens, "--ignore-index", "17")[0]["kept"], 5)

    # ---- check

    def test_check_takes_those_of_logits_and_weights(self):
        all_of_them = ["--bias", self.of("bias"), "--class-weight", self.of("class"), "--row-weight", self.of("row"),
                       "--label-smoothing", "0.2", "--softcap", "3", "--z-loss", "0.1", "--logit-scale", "1.5",
                       "--temperature", self.of("t")]
        one_by_one = [all_of_them[n:n + 2] for n in range(0, len(all_of_them), 2)]
        for base in (self.hard, self.logits):
            plain = self.json("check", *base, "--backend", BACKEND)
            for flags in [*one_by_one, ["--temperature", "0.5"], all_of_them]:
                report = self.json("check", *base, *flags, "--backend", BACKEND)
                self.assertTrue(report["passed"], (flags, report))
                self.assertNotEqual(report["outputs"], plain["outputs"], flags)
                for output in report["outputs"]:  # bounds of single precision, not of anything
                    self.assertLess(output["tolerance"], 3e-3, (flags, output))
            report = self.json("check", *base, *all_of_them, "--sample", "3", "--backend", BACKEND)
            self.assertTrue(report["passed"] and report["sampled"], report)
        random_inputs = ["check", "--rows", "7", "--vocab", "19", "--dtype", "bf16", "--backend", BACKEND]
        self.assertTrue(self.json(*random_inputs, "--hidden", "12", *all_of_them)["passed"])
        self.assertTrue(self.json(*random_inputs, "--kind", "logits", *all_of_them)["passed"])
        self.refused(2, ["--row-weight", "[7]"], *random_inputs[:1], "--rows", "9", "--vocab", "19", "--hidden", "4",
                     "--row-weight", self.of("row"))

    def test_check_takes_every_option_of_loss(self):
        def options_of(command):
            words = self.ok(command, "--help").split()
            return {word.split(",")[0] for word in words if word.startswith("--")}

        outputs = {"--grad-hidden", "--grad-weight", "--grad-logits", "--grad-bias"}
        self.assertEqual(options_of("loss") - options_of("check"), {"--filter", "--filter-seed"} | outputs)
        for flag, value in (("--filter", "0.125"), ("--filter-seed", "1")):
            self.refused(2, [flag, value, "leave it out"], "check", *self.hard, flag, value)

    def checked(self, *arguments):
        report = self.json("check", *arguments, "--per-row", "--backend", BACKEND)
        self.assertTrue(report["passed"], (arguments, report))
        for output in report["outputs"]:  # bounds of single precision, not of anything
            self.assertLess(output["tolerance"], 1e-2, (arguments, output))
        return report["outputs"]

    def test_check_from_files(self):
        options = [self.of_many("--soft-targets", "soft"), self.of_many("--keep-mask", "keep"),
                   self.of_many("--logit-floor", "floor"), [*self.topk[6:], "--rest", "spread"], self.topk[6:],
                   self.topk_log[6:], [*self.topk_log[6:], "--hard-share", "0.5"],
                   [*self.topk_log[6:], "--hard-share", "0.5", "--distill-temperature", "2", "--softcap", "3"], [*self.policy[6:], "--entropy-coef", "0.1"],
                   [*self.policy[6:], "--kl-coef", "0.1", *self.of_many("--policy-ref-logprob", "ref")]]
        teacher = [self.teacher[6:] + more for more in (
            [], self.of_many("--teacher-bias", "tb"), ["--divergence", "reverse_kl"], ["--divergence", "jsd", "--beta", "0.3"],
            ["--distill-temperature", "2", "--temperature-squared", "--hard-share", "0.4", "--softcap", "3"])]
        for base in (self.hard, self.logits):
            plain = self.checked(*base)
            for flags in options + (teacher if base is self.hard else []):
                self.assertNotEqual(self.checked(*base, *flags), plain, flags)
                self.checked(*base, *flags, "--sample", "3")
        self.checked(*self.linear, *self.of_many("--soft-targets", "soft"))  # no targets
        self.checked(*self.linear, "--targets", self.of("tokens"), "--shift", "--cu-seqlens", self.of("ends"))
        self.refused(2, ["--teacher-hidden", "--logits"], "check", *self.logits, *self.teacher[6:])
        self.refused(2, ["--cu-seqlens", "--shift"], "check", *self.hard, "--cu-seqlens", self.of("ends"))
        self.refused(2, ["--label-smoothing", "policy"], "check", *self.policy, "--label-smoothing", "0.1")

    def of_many(self, *pairs):
        return [self.of(a) if n % 2 else a for n, a in enumerate(pairs)]

    def test_check_makes_up_what_an_option_needs(self):
        made = {flag: [flag, "random"] for flag in (
            "--bias", "--class-weight", "--row-weight", "--temperature", "--keep-mask", "--logit-floor", "--soft-targets")}
        groups = [*made.values(), ["--topk-ids", "random:5", "--topk-probs", "random"], ["--shift"],
                  ["--topk-ids", "random", "--topk-logprobs", "random"],
                  ["--policy-old-logprob", "random", "--policy-advantage", "random", "--policy-ref-logprob", "random",
                   "--kl-coef", "0.001"]]
        teacher = ["--teacher-hidden", "random:9", "--teacher-weight", "random", "--teacher-bias", "random"]
        for dtype in ("f32", "bf16", "f16"):
            size = ["--rows", "40", "--vocab", "530", "--dtype", dtype]
            seen = []
            for base in ([*size, "--hidden", "24"], [*size, "--kind", "logits"]):
                for flags in [*groups, *([teacher] if "--hidden" in base else [])]:
                    report = self.json("check", *base, *flags, "--per-row", "--backend", BACKEND)
                    self.assertTrue(report["passed"], (base, flags, report))
                    seen.append(report["outputs"])
            for n, one in enumerate(seen):
                self.assertNotIn(one, seen[:n])
        size = ["check", "--rows", "9", "--vocab", "20", "--hidden", "4"]
        self.refused(2, ["--bias", "random:3"], *size, "--bias", "random:3")
        self.refused(2, ["--topk-ids", "--vocab 20"], *size, "--topk-ids", "random:21", "--topk-probs", "random")
        self.refused(2, ["--topk-probs", "--topk-ids"], *size, "--topk-probs", "random")
        self.refused(2, ["--teacher-weight", "--teacher-hidden"], *size, "--teacher-weight", "random")
        self.refused(2, ["--teacher-hidden", "--kind logits"], "check", "--rows", "9", "--vocab", "20", "--kind", "logits",
                     "--teacher-hidden", "random")
        self.refused(1, ["--soft-targets", "random"], "check", *self.hard, "--soft-targets", "random")  # a file's name

    # ---- pairs without a meaning

    def wrong(self, parts, base, *flags, status=2):
        self.refused(status, parts, "loss", *base, *flags, "--grad-hidden" if "--logits" not in base else "--grad-logits",
                     self.path("out.safetensors"), "--backend", BACKEND)

    def test_numbers_out_of_range(self):
        for flag, bad in (("--softcap", "-1"), ("--softcap", "nan"), ("--logit-scale", "0"), ("--temperature", "-2"),
                          ("--temperature", "0"), ("--z-loss", "-1"), ("--filter", "2"), ("--beta", "1.5"),
                          ("--distill-temperature", "0"), ("--hard-share", "1.5"), ("--clip-low", "-1"),
                          ("--clip-high", "inf"), ("--kl-coef", "-1"), ("--entropy-coef", "x"), ("--filter-seed", "-1")):
            self.wrong([flag, "'%s'" % bad], self.hard, flag, bad)
        for flag, right in (("--rest", "dropped, renormalised, spread"), ("--divergence", "forward_kl, reverse_kl, jsd")):
            self.wrong([flag, "'median'", right], self.hard, flag, "median")
        self.wrong(["--filter", "0.3", "power of two"], self.hard, "--filter", "0.3")

    def test_pairs(self):
        self.wrong(["--topk-logprobs", "--topk-probs"], self.topk, "--topk-logprobs", self.of("logprobs"))
        self.wrong(["--topk-probs"], self.hard, "--topk-ids", self.of("ids"))
        self.wrong(["--rest", "--topk-ids"], self.hard, "--rest", "spread")
        self.wrong(["--keep-mask", "--soft-targets"], self.hard, "--soft-targets", self.of("soft"), "--keep-mask",
                   self.of("keep"))
        self.wrong(["--logit-floor", "--topk-ids"], self.topk, "--logit-floor", self.of("floor"))
        self.wrong(["--keep-mask", "--teacher-hidden"], self.teacher, "--keep-mask", self.of("keep"))
        self.wrong(["--label-smoothing", "--topk-logprobs"], self.topk_log, "--label-smoothing", "0.1")
        self.wrong(["--class-weight", "--topk-logprobs"], self.topk_log, "--class-weight", self.of("class"))
        self.wrong(["--filter", "--topk-logprobs", "--distill-temperature"], self.topk_log, "--filter", "0.125",
                   "--distill-temperature", "2")
        self.wrong(["--hard-share", "teacher"], self.hard, "--hard-share", "0.5")
        self.wrong(["--distill-temperature", "teacher"], self.hard, "--distill-temperature", "2")
        self.wrong(["--temperature-squared", "teacher"], self.hard, "--temperature-squared")
        self.wrong(["--divergence", "--teacher-hidden"], self.hard, "--divergence", "jsd")
        self.wrong(["--divergence", "--topk-logprobs"], self.topk_log, "--divergence", "reverse_kl")
        self.wrong(["--beta", "jsd"], self.teacher, "--beta", "0.25")
        self.wrong(["--teacher-weight"], self.hard, "--teacher-hidden", self.of("tx"))
        self.wrong(["--teacher-hidden", "--logits"], self.logits, "--teacher-hidden", self.of("tx"), "--teacher-weight",
                   self.of("tw"))
        self.wrong(["--filter", "--teacher-hidden"], self.teacher, "--filter", "0.125")
        self.wrong(["--kl-coef", "policy"], self.hard, "--kl-coef", "0.1")
        self.wrong(["--clip-low", "policy"], self.hard, "--clip-low", "0.1")
        self.wrong(["--policy-advantage"], self.hard, "--policy-old-logprob", self.of("old"))
        self.wrong(["--policy-ref-logprob"], self.policy, "--kl-coef", "0.1")
        self.wrong(["--label-smoothing", "policy"], self.policy, "--label-smoothing", "0.1")
        self.wrong(["--class-weight", "policy"], self.policy, "--class-weight", self.of("class"))
        self.wrong(["--grad-bias", "--bias"], self.hard, "--grad-bias", self.path("db.safetensors"))
        self.wrong(["--grad-bias", "--grad-logits"], self.logits, "--bias", self.of("bias"), "--grad-bias",
                   self.path("db.safetensors"))
        self.wrong(["--cu-seqlens", "--shift"], self.hard, "--cu-seqlens", self.of("ends"))
        self.refused(2, ["--filter", "gradient"], "loss", *self.hard, "--filter", "0.125", "--backend", BACKEND)

    def test_tensors_of_options(self):
        self.wrong(["--bias", "[19]"], self.hard, "--bias", self.of("row"))
        self.wrong(["--row-weight", "[7]"], self.hard, "--row-weight", self.of("class"))
        self.wrong(["--keep-mask", "is f32", "u8"], self.hard, "--keep-mask", self.of("soft"), status=1)
        self.wrong(["--topk-ids", "i32 or i64"], self.hard, "--topk-ids", self.of("probs"), "--topk-probs",
                   self.of("probs"), status=1)
        self.wrong(["--soft-targets", "rank 2"], self.hard, "--soft-targets", self.of("row"), status=1)


if __name__ == "__main__":
    unittest.main()
