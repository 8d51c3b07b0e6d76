"""The lines of files of any size and encoding."""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

PIECE = 1 << 20
LONGEST = 1 << 14
"""Bytes read at once, and characters kept of a line: the lines that count are far shorter."""


def lines(path: Path) -> Iterator[str]:
    """The lines of a file, those of a progress bar, which end with a carriage return, one by one.
    What is not text in its encoding is replaced."""
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(0)
        wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        decoder = codecs.getincrementaldecoder("utf-16" if wide else "utf-8-sig")("replace")
        rest = ""
        while piece := file.read(PIECE):
            *whole, rest = re.split(r"[\r\n]", rest + decoder.decode(piece))
            rest = rest[:LONGEST]
            yield from (line[:LONGEST] for line in whole if line)
        yield rest + decoder.decode(b"", final=True)
