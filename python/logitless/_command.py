"""`logitless` on the PATH: hands over to the program that was built with the library."""

from __future__ import annotations

import os
import pathlib
import sys


def main() -> None:
    """Becomes the program; exit 1 where the package was built without it."""
    program = pathlib.Path(__file__).parent / "bin" / "logitless"
    if not program.exists():
        print(
            "logitless: this package was built without the command line, for want of CLI11 and nlohmann-json (Debian: "
            "libcli11-dev, nlohmann-json3-dev); install them and build the package again",
            file=sys.stderr,
        )
        sys.exit(1)
    os.execv(program, [str(program), *sys.argv[1:]])
