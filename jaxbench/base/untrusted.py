"""Reads files that somebody else may have made: they may be no files, be endless, or be written to
mislead a terminal."""

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

LARGEST_BYTES = 2**28
"""The most bytes of a file that is read as a whole. The largest plans have a few MB."""

UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal, that change the direction of text, or that no encoding
has."""


def printable(text: str) -> str:
    """The text with a mark in place of every character that is not to be printed."""
    return UNPRINTABLE.sub("\ufffd", text)


def opened(path: Path) -> BinaryIO:
    """A file, open to be read. Raises OSError for anything else, such as a device or a pipe, also
    behind a link: reading them may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_json(path: Path) -> Any:
    """The value in a JSON file, whose texts are all printable and have one line each, so that none
    looks like a line of ours. Raises OSError for what cannot be read, and ValueError for what is no
    JSON."""
    with opened(path) as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise OSError(errno.EFBIG, "too large", str(path))
    try:
        return _one_line(json.loads(content))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def count_lines(path: Path) -> int:
    """The number of lines of a file; 0 if it cannot be read."""
    try:
        with opened(path) as file:
            return sum(piece.count(b"\n") for piece in iter(lambda: file.read(2**20), b""))
    except OSError:
        return 0


def _one_line(value: Any) -> Any:
    """A value of JSON whose texts are printable and have one line each."""
    match value:
        case str():
            return printable(value.replace("\n", " "))
        case list():
            return [_one_line(item) for item in value]
        case dict():
            return {_one_line(key): _one_line(item) for key, item in value.items()}
    return value
