#!/usr/bin/env python3
"""check_symbols.py LIBRARY.so HEADER: the shared library exports exactly the functions that the header declares with
LL_API, all of them strong code symbols. Reads the dynamic symbol table with nm."""
import re
import subprocess
import sys

library, header = sys.argv[1:]
with open(header, encoding="utf-8") as file:
    text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
declared = set(re.findall(r"^LL_API\b[^;#]*?\b(ll_\w+)\s*\(", text, flags=re.M))
if not declared:
    sys.exit(f"{header}: no function is declared with LL_API")

listing = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
exported = {line.split()[-1]: line.split()[-2] for line in listing.splitlines()}
problems = [f"{name} (type {kind}) is exported but not declared" for name, kind in exported.items() if name not in declared]
problems += [f"{name} is declared but not exported" for name in declared - exported.keys()]
problems += [f"{name} is exported with type {kind}, not T" for name, kind in exported.items()
             if name in declared and kind != "T"]
for problem in sorted(problems):
    print(f"{library}: {problem}")
print(f"{len(exported)} exported, {len(declared)} declared, {len(problems)} problems")
sys.exit(1 if problems else 0)
