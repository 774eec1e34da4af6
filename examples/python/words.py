"""Text to numbers for the examples: words [N] and their vocabulary, from a file, a folder, or the text of ./run.

Reads what ./run trains on: Jane Austen's novels, which it fetched into .cache from Debian's r-cran-janeaustenr (R's
Rdata.rdb: records of [4 bytes: length, big-endian][zlib stream], a character vector in each); without them this
repository's own documentation and sources. A token is a word or a mark of punctuation; class 0 is every rare one.
"""

from __future__ import annotations

import collections
import pathlib
import re
import struct
import zlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOVELS = ROOT / ".cache/r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
OWN = ("README.md", "docs", "include", "src", "python", "tests", "cli", "bench", "examples")
SUFFIXES = {".md", ".txt", ".py", ".h", ".hpp", ".c", ".cpp", ".cu"}
TOKEN = re.compile(r"[A-Za-z]+(?:'[a-z]+)?|[0-9]|[^\sA-Za-z0-9]")


def read_words(path: str | None, vocab: int) -> tuple[list[int], list[str], str]:
    """Class numbers of the text, the word of each class, and where the text is from; at most `vocab` classes.

    Raises SystemExit with one line where there is no text.
    """
    if path is not None:
        text, source = _read(pathlib.Path(path)), path
    elif NOVELS.exists():
        text, source = _read(NOVELS), "Jane Austen's novels (fetched by ./run)"
    else:
        text = "\n".join(_read(ROOT / name) for name in OWN if (ROOT / name).exists())
        source = "this repository's own documentation and sources (./run fetches Jane Austen's novels)"
    words = TOKEN.findall(text)
    if len(words) < 1000:
        raise SystemExit(f"--text: {source}: {len(words)} words; at least 1000 are needed")
    common = [word for word, _ in collections.Counter(words).most_common(vocab - 1)]
    number = {word: index for index, word in enumerate(common, start=1)}
    return [number.get(word, 0) for word in words], ["<rare>", *common], source


def _read(path: pathlib.Path) -> str:
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES and each.is_file())
        return "\n".join(each.read_text("utf-8", "replace") for each in files)
    if not path.exists():
        raise SystemExit(f"--text: {str(path)!r} does not exist")
    if path.suffix == ".rdb":
        return "\n".join(_lines_of_r(path.read_bytes()))
    return path.read_text("utf-8", "replace")


def _lines_of_r(data: bytes) -> Iterator[str]:
    """Strings of every character vector in an Rdata.rdb; records of other things are passed over."""
    while data:
        stream = zlib.decompressobj()
        record = stream.decompress(data[4:])
        data = stream.unused_data
        yield from _character_vector(record)


def _character_vector(record: bytes) -> Iterator[str]:
    """R's serialisation in XDR: "X\\n", three integers (version 3: and an encoding's name), then 16 (STRSXP), the
    count, and per string its flags (9: CHARSXP; bit 14: Latin-1) and its length, -1 for a missing one."""

    def integer(at: int) -> int:
        return int(struct.unpack_from(">i", record, at)[0])

    if record[:2] != b"X\n":
        return
    at = 14
    if integer(2) == 3:
        at += 4 + integer(at)
    if integer(at) & 0xFF != 16:
        return
    count, at = integer(at + 4), at + 8
    for _ in range(count):
        flags, length = integer(at), max(integer(at + 4), 0)
        yield record[at + 8 : at + 8 + length].decode("latin-1" if flags & 1 << 14 else "utf-8", "replace")
        at += 8 + length
