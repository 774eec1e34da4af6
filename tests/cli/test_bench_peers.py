#!/usr/bin/env python3
"""`logitless bench --peers` at a tiny shape: torch's loss and ours agree, and their rows alternate in one report.

Needs LOGITLESS_CLI; LOGITLESS_TORCH_PYTHON names an interpreter that has torch (default: the one that runs this)."""

import json
import os
import subprocess
import sys

CLI = os.environ.get("LOGITLESS_CLI", "")
PYTHON = os.environ.get("LOGITLESS_TORCH_PYTHON", sys.executable)


def main():
    if not CLI:
        sys.exit("LOGITLESS_CLI is not set to the command to test")
    if "not in this build" in subprocess.run([CLI, "bench", "--help"], capture_output=True, text=True, check=False).stdout:
        print("SKIP: this build has no benchmarks (LOGITLESS_BUILD_BENCH is off)")
        sys.exit(77)
    has_torch = subprocess.run([PYTHON, "-c", "import importlib.util as u; raise SystemExit(not u.find_spec('torch'))"],
                               check=False)
    if has_torch.returncode != 0:
        print(f"SKIP: {PYTHON} has no torch (pip install torch==2.13.0)")
        sys.exit(77)
    words = [CLI, "bench", "--suite", "all", "--rows", "64", "--hidden", "32", "--vocab", "500", "--repeats", "2",
             "--threads", "2", "--no-dense", "--peers", "--python", PYTHON, "--json", "-"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)} failed with {done.returncode}: {done.stderr}")
    peers = json.loads(done.stdout)["peers"]
    seen = []
    for table in peers["tables"]:
        seen.append((table["suite"], table["dtype"]))
        rows = {row["name"]: row for row in table["rows_measured"]}
        losses = {name: row["loss"] for name, row in rows.items() if "loss" in row}
        assert len(losses) >= 3, losses
        ours = losses["loss + gradients" if table["suite"] == "linear" else "loss + gradient in place"]
        # torch rounds logits to bf16, and the chunked path sums losses in it: 8 bits, a few roundings.
        relative = 1e-5 if table["dtype"] == "f32" else 2.0**-5
        for name, loss in losses.items():
            assert abs(loss - ours) <= relative * abs(ours), (table["suite"], table["dtype"], name, loss, ours)
        for row in rows.values():
            if "seconds" in row:
                assert row["seconds"] > 0 and len(row["samples"]) == 2, row
                assert (row["who"] == "torch") == ("ours_over_this" in row), row
            else:
                assert row["note"], row
    assert seen == [("linear", "bf16"), ("logits", "f32"), ("logits", "bf16")], seen
    print("ok")


if __name__ == "__main__":
    main()
