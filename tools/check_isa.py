#!/usr/bin/env python3
"""check_isa.py LIBRARY.a: only code inside logitless::cpu::{avx2,avx512,avx512bf16,amx} may use instructions beyond the
x86-64 baseline. Without this, an inline function of a shared header (std::min, say) that a target file compiled for
AVX-512 could be the copy that the linker keeps for everyone, and crash on machines without it. Disassembles every
object with objdump; names of templates count as inside when an argument is a type of those namespaces."""
import re
import subprocess
import sys

INSIDE = re.compile(r"logitless::cpu::(avx2|avx512|avx512bf16|amx)::")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
WIDE = re.compile(r"%[yzt]mm\d|\{%k\d\}|%k[0-7]\b")
# Mnemonics that the baseline lacks; VEX and EVEX ones begin with v, as do a few old system instructions.
NEWER = re.compile(r"^(v\w+|andn|bextr|blsi|blsr|blsmsk|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|lzcnt|tzcnt|popcnt|"
                   r"movbe|ldtilecfg|sttilecfg|tile\w+|tdp\w+)[lqw]?$")
SYSTEM = re.compile(r"^(verr|verw|vm(call|clear|func|launch|load|mcall|ptrld|ptrst|read|resume|run|save|write|xoff|xon))")

library = sys.argv[1]
process = subprocess.Popen(["objdump", "-d", "-C", "--no-show-raw-insn", "-w", library], stdout=subprocess.PIPE, text=True)
function, inside, seen, newer, problems = "", False, 0, 0, {}
for line in process.stdout:
    match = FUNCTION.match(line)
    if match:
        function = match.group(1)
        inside = bool(INSIDE.search(function))
        seen += 1
        continue
    fields = line.split("\t", 1)
    if len(fields) != 2 or not fields[0].endswith(":"):
        continue
    instruction = fields[1].strip()
    mnemonic = instruction.split(None, 1)[0] if instruction else ""
    if WIDE.search(instruction) or (NEWER.match(mnemonic) and not SYSTEM.match(mnemonic)):
        newer += 1
        if not inside:
            problems.setdefault(function, instruction)
if process.wait() != 0:
    sys.exit("objdump failed")
for name, instruction in sorted(problems.items()):
    print(f"{library}: outside the target namespaces: {name}: {instruction}")
print(f"{seen} functions, {newer} instructions beyond the baseline, {len(problems)} functions wrongly so")
sys.exit(1 if problems or not seen else 0)
