"""Atomic file writes, also when the disk is full."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

RESERVE_BYTES = 2**18
"""Room for a record: several times what the largest one takes."""


def write_whole(path: Path, text: str) -> None:
    """Replaces a file whole: a reader sees the old or the new one, never half of one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_json(path: Path, content: Any) -> None:
    """`write_whole` of a value as JSON."""
    write_whole(path, _json(content))


def _json(content: Any) -> str:
    return json.dumps(content, indent=2) + "\n"


class Lines:
    """A text file that is written line by line and unbuffered: a write that fails, fails at once,
    and leaves nothing behind to fail later."""

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)

    def write(self, line: str) -> None:
        """Adds a line. Raises OSError; a part of the line may be there then."""
        left = memoryview(f"{line}\n".encode())
        while left:
            left = left[self._file.write(left) or 0 :]

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


class ReservedJson:
    """A JSON file that can be replaced whole on a full disk, because room is kept for it.

    The room is a file of its own, `.<name>.reserve`. Writing takes it, and makes another one
    afterwards where it can.
    """

    def __init__(self, path: Path):
        self.path, self._reserve = path, path.with_name(f".{path.name}.reserve")
        self._keep_room()

    def _keep_room(self) -> None:
        with self._reserve.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)

    def write(self, content: Any) -> None:
        """Replaces the content. Raises OSError where there is no room, not even kept."""
        descriptor = os.open(self._reserve, os.O_WRONLY | os.O_CREAT, 0o666)
        with open(descriptor, "wb") as file:
            file.write(_json(content).encode())
            file.truncate()
        os.replace(self._reserve, self.path)
        with contextlib.suppress(OSError):  # none now; the next write may find some again
            self._keep_room()

    def close(self) -> None:
        """Gives the room back."""
        self._reserve.unlink(missing_ok=True)
