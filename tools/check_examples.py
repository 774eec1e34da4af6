#!/usr/bin/env python3
"""check_examples.py ROOT: code in README.md and docs/*.md is what tests compile and run.

A marked block of a Markdown file
    <!-- region: tests/api/readme.cpp first -->
    ```cpp
    ...
    ```
must equal the lines between `// region: first` and `// endregion: first` of that file (`# region: first` in Python),
indentation of the whole region aside. In README.md every block of C, C++ or Python has to be marked."""
import pathlib
import re
import sys
import textwrap

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.S | re.M)
MARK = re.compile(r"<!-- region: (\S+) (\S+) -->\n$")


def region(path, name):
    """Lines of a region, or None."""
    text = path.read_text(encoding="utf-8")
    match = re.search(rf"^[ \t]*(?://|/\*|#) region: {re.escape(name)}\b.*?\n(.*?)^[ \t]*(?://|/\*|#) endregion: {re.escape(name)}\b",
                      text, flags=re.S | re.M)
    return textwrap.dedent(match.group(1)) if match else None


root = pathlib.Path(sys.argv[1])
problems, compared = [], 0
for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
    if not page.exists():
        continue
    text = page.read_text(encoding="utf-8")
    for block in FENCE.finditer(text):
        language, code = block.groups()
        line = text.count("\n", 0, block.start()) + 1
        where = f"{page.relative_to(root)}:{line}"
        mark = MARK.search(text, 0, block.start())
        if not mark:
            if page.name == "README.md" and language in ("c", "cpp", "c++", "python"):
                problems.append(f"{where}: a block of {language} without a region of a test")
            continue
        source, name = mark.groups()
        if not (root / source).is_file():
            problems.append(f"{where}: {source} does not exist")
            continue
        expected = region(root / source, name)
        compared += 1
        if expected is None:
            problems.append(f"{where}: {source} has no region {name}")
        elif expected.strip("\n") != textwrap.dedent(code).strip("\n"):
            problems.append(f"{where}: differs from region {name} of {source}, which is\n{expected}")
print("\n".join(problems))
print(f"{compared} blocks compared, {len(problems)} problems")
sys.exit(1 if problems else 0)
