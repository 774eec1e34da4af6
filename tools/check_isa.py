#!/usr/bin/env python3
"""check_isa.py LIBRARY.a: instructions beyond the x86-64 baseline stand only inside logitless::cpu::{avx2,avx512,
avx512bf16,amx}, each of these holds none beyond its own, and all four are there.

Without this, an inline function of a shared header (std::min, say) that a target file compiled for AVX-512 could be the
copy that the linker keeps for everyone, and crash on machines without it. Disassembles every object with objdump; names
of templates count as inside when an argument is a type or lambda of those namespaces."""
import collections
import re
import subprocess
import sys

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSIDE = re.compile(r"logitless::cpu::(avx2|avx512|avx512bf16|amx)::")
WIDE = re.compile(r"%[yzt]mm\d|\{%k\d\}|%k[0-7]\b")
# Mnemonics that the baseline lacks; VEX and EVEX ones begin with v, as do a few old system instructions.
NEWER = re.compile(r"^(v\w+|andn|bextr|blsi|blsr|blsmsk|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|lzcnt|tzcnt|popcnt|"
                   r"movbe|ldtilecfg|sttilecfg|tile\w+|tdp\w+)[lqw]?$")
SYSTEM = re.compile(r"^(verr|verw|vm(call|clear|func|launch|load|mcall|ptrld|ptrst|read|resume|run|save|write|xoff|xon))")
# What a namespace may not hold although it may hold more than the baseline.
TILES, BF16 = r"%tmm\d|tilerelease|tilecfg", r"vdpbf16ps|vcvtne2?ps2bf16"
EVEX = r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])\b"
BEYOND = {"avx2": re.compile(f"{EVEX}|{TILES}|{BF16}"), "avx512": re.compile(f"{TILES}|{BF16}"),
          "avx512bf16": re.compile(TILES), "amx": re.compile(r"(?!)")}

library = sys.argv[1]
process = subprocess.Popen(["objdump", "-d", "-C", "--no-show-raw-insn", "-w", library], stdout=subprocess.PIPE, text=True)
functions, function, spaces = 0, "", set()
newer, problems = collections.Counter(), {}
for line in process.stdout:
    match = FUNCTION.match(line)
    if match:
        function = match.group(1)
        spaces = set(INSIDE.findall(function))
        functions += 1
        continue
    fields = line.split("\t", 1)
    if len(fields) != 2 or not fields[0].endswith(":") or not fields[1].strip():
        continue
    instruction = fields[1].strip()
    mnemonic = instruction.split(None, 1)[0]
    if WIDE.search(instruction) or (NEWER.match(mnemonic) and not SYSTEM.match(mnemonic)):
        newer.update(spaces)
        if not spaces or all(BEYOND[space].search(instruction) for space in spaces):
            problems.setdefault(function, instruction)
if process.wait() != 0:
    sys.exit("objdump failed")
for name, instruction in sorted(problems.items()):
    print(f"{library}: not allowed there: {name}: {instruction}")
absent = [space for space in BEYOND if not newer[space]]
if absent:
    print(f"{library}: no code of {', '.join(absent)}")
print(f"{functions} functions; beyond the baseline {', '.join(f'{space} {newer[space]}' for space in BEYOND)} instructions;"
      f" {len(problems)} functions wrongly so")
sys.exit(1 if problems or absent or not functions else 0)
