"""Atomic file writes, also when the disk is full."""

import contextlib
import json
import os
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

RESERVE_BYTES = 2**18
"""Disk space reserved for a record: several times the size of the largest one."""


def write_whole(path: Path, text: str) -> None:
    """Replaces a file whole: a reader sees the old or the new one, never half of one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_json(path: Path, content: Any) -> None:
    """`write_whole` of a value as JSON."""
    write_whole(path, as_json(content))


def as_json(content: Any) -> str:
    """The text of a JSON file; dataclasses as their fields."""
    return json.dumps(content, indent=2, default=asdict) + "\n"


RECORDS = ("run.json", "job.json")
"""The record of a run, and that of its job, which the launcher writes (`launch/verdict.py`)."""


def recorded(folder: Path) -> dict[str, Any]:
    """The record of a run; that of its job before it has one. If the run was killed before it could
    record its end, status, cause and reason are those that the job has recorded since. Raises
    FileNotFoundError where there is neither, ValueError for what is no JSON object."""
    run, job = (folder / name for name in RECORDS)
    record = _object(run if run.is_file() else job)
    both = job.is_file() and run.is_file()
    if record.get("status") == "running" and both and _began(record) < job.stat().st_mtime:
        end = _object(job)
        record |= {key: end.get(key) for key in ("status", "cause", "reason", "slurm")}
    return record


def _began(record: dict[str, Any]) -> float:
    """When the last start of a run began; 0 where its record does not say it."""
    try:
        return datetime.fromisoformat(record["started"]).timestamp()
    except (LookupError, TypeError, ValueError):
        return 0.0


def _object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{path.name}: expected a JSON object")
    return content


class Lines:
    """A text file that is written line by line without a buffer, so that an error is raised by the
    write that fails, not later."""

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
    """A JSON file that can be replaced whole on a full disk, because space is reserved for it.

    The reserve is a file of its own, `.<name>.reserve`. A write goes into it and renames it; then a
    new one is allocated if possible.
    """

    def __init__(self, path: Path):
        self.path, self._reserve = path, path.with_name(f".{path.name}.reserve")
        self._allocate()

    def _allocate(self) -> None:
        with self._reserve.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)

    def write(self, content: Any) -> None:
        """Replaces the content. Raises OSError if even the reserved space is gone."""
        descriptor = os.open(self._reserve, os.O_WRONLY | os.O_CREAT, 0o666)
        with open(descriptor, "wb") as file:
            file.write(as_json(content).encode())
            file.truncate()
        os.replace(self._reserve, self.path)
        with contextlib.suppress(OSError):  # the next write tries again
            self._allocate()

    def close(self) -> None:
        """Deletes the reserve."""
        with contextlib.suppress(OSError):
            self._reserve.unlink()
