#!/usr/bin/env python3
"""The reach that issue 3 sets (part 7), line by line, from reports of `logitless bench --json` (with or without --peers)
and of bench/peers/peers.py: what was reached, what was asked, and whether it holds on this machine.

    tools/bench_reach.py FILE.json...

Exit 0 whether or not everything was reached: the figures are for people to judge. Where the issue sets no figure for a
machine (an AVX2-only one, say), the line has no goal."""

import json
import sys


def rows_of(table):
    return {row["name"]: row for row in table["rows_measured"] if "seconds" in row}


def product_goal(target, dtype, intel):
    if dtype == "bf16" and target == "amx":
        return 0.70
    if dtype == "bf16" and target == "avx512bf16":
        return 0.80
    if dtype == "f32" and target in ("avx512", "avx512bf16", "amx"):
        return 0.65 if intel else 0.80
    return None


LINES = []


def line(what, reached, sense, goal, shown="{:.3f}"):
    """sense: +1 reached must be at least the goal, -1 at most."""
    verdict = "" if goal is None else ("reached" if sense * (reached - goal) >= 0 else "MISSED")
    asked = "" if goal is None else (">= " if sense > 0 else "<= ") + shown.format(goal)
    LINES.append((what, shown.format(reached), asked, verdict))


def linear(table, target, intel, ceilings):
    dtype, rows = table["dtype"], rows_of(table)
    name = f"linear {dtype}: "
    goal = product_goal(target, dtype, intel)
    full, forward = rows.get("loss + gradients"), rows.get("loss only")
    if full:
        line(f"{name}loss + gradients {full['seconds']:.3f} s, of {ceilings[full['ceiling']]}", full["fraction"], 1, goal)
    if forward:
        line(f"{name}loss only, of the same", forward["fraction"], 1, goal)
    for row_name, limit in (("75 % of rows ignored", 0.3),):
        if row_name in rows:
            line(name + row_name + ", of the full time", rows[row_name]["ratio"], -1, limit)
    for row_name, row in rows.items():
        if "within" not in row_name:
            continue
        line(f"{name}{row_name}: workspace, MiB", row["workspace_bytes"] / 2**20, -1,
             float(row_name.split("within ")[1].split()[0]), "{:.1f}")
        if "ratio" in row:
            # An fp32 operand has an fp32 dW only; its bytes hold exponentials as well as bf16 ones do.
            line(f"{name}{row_name}: time of the unlimited plan's", row["ratio"], -1, 1.2 if "fp32" in row_name else 1.1)
    if "loss + gradients, unfused" in rows:
        line(f"{name}unfused pipeline's time, of ours", rows["loss + gradients, unfused"]["ratio"], 1, None)


def logits(table, intel, amd):
    rows, dtype = rows_of(table), table["dtype"]
    row = rows.get("loss + gradient in place")
    if row:
        goal = (1.25 if intel else 1.4 if amd else None) if dtype == "f32" else None
        line(f"logits {dtype}: loss + gradient in place {1e3 * row['seconds']:.1f} ms, of an in-place scale", row["ratio"],
             -1, goal)


def peers(report):
    target = report["cpu_target"]
    for table in report["tables"]:
        for name, row in rows_of(table).items():
            if row["who"] != "torch":
                continue
            goal = None
            if table["suite"] == "linear" and table["dtype"] == "bf16" and target == "amx" and name == "three products":
                goal = 0.5
            if table["suite"] == "logits":
                goal = 0.25
            line(f"{table['suite']} {table['dtype']}: ours / torch {report['torch']} {name} ({row['seconds']:.3f} s)",
                 row["ours_over_this"], -1, goal)


def read(path):
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    if "torch" in report:
        peers(report)
        return
    cpu, target = report["machine"]["cpu"], report["cpu_target"]
    intel, amd = "Intel" in cpu or "Xeon" in cpu, "AMD" in cpu
    ceilings = {c["name"]: f"{c['text']} {c.get('median', 0):.0f} {c['unit']}" for c in report["ceilings"]}
    for table in report["tables"]:
        if table["suite"] == "linear":
            linear(table, target, intel, ceilings)
        else:
            logits(table, intel, amd)
    for table in report.get("errors", []):
        for quantity in table["quantities"]:
            if "ratio" in quantity and quantity["name"] != "loss":
                line(f"error {table['dtype']}: {quantity['name']} {quantity['ours']:.2e}, of the plain pipeline's",
                     quantity["ratio"], -1, 1.0)
    if "peers" in report:
        peers(report["peers"])


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    for path in sys.argv[1:]:
        read(path)
    width = max((len(what) for what, *_ in LINES), default=0)
    for what, reached, asked, verdict in LINES:
        print(f"{what:{width}}  {reached:>8}  {asked:>9}  {verdict}".rstrip())


if __name__ == "__main__":
    main()
