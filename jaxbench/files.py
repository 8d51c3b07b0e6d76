"""Atomic file writes, also when the disk is full. No file is written through a link: in a folder
that several users share, another one may have made it."""

import contextlib
import errno
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

RESERVE_BYTES = 2**18
"""Disk space reserved for a record: several times the size of the largest one."""


def open_unlinked(path: Path, flags: int) -> int:
    """Opens a file for writing and makes it where there is none; returns its descriptor. Raises
    OSError where a link has its name, or with O_EXCL anything."""
    return os.open(path, flags | os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def foreign(folder: Path) -> str | None:
    """Says whose a folder is that another user owns, or that a link of another user leads to; None
    for one of this user. Raises OSError if this user cannot write into it.

    The file system says whom it takes this user for: it may map users, such as root to nobody.
    """
    with tempfile.TemporaryFile(dir=folder) as own:
        user = os.fstat(own.fileno()).st_uid
    owners = {folder.lstat().st_uid, folder.stat().st_uid} - {user}
    return f"it belongs to user {owners.pop()}" if owners else None


@contextlib.contextmanager
def private(folder: Path) -> Iterator[Path]:
    """A path to a folder of this user alone, which is made if there is none. The path stays valid
    whatever another user puts in the folder's place. Raises OSError where others own the folder or
    may write into it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        path, mode = Path(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_mode
        if reason := foreign(folder) or foreign(path):
            raise PermissionError(errno.EPERM, reason)
        if mode & 0o022:
            raise PermissionError(errno.EPERM, f"others may write into it (mode {mode & 0o777:o})")
        yield path
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Replaces a file whole: a reader sees the old or the new one, never half of one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(open_unlinked(temporary, os.O_EXCL), "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


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
        self._file = os.fdopen(open_unlinked(path, os.O_APPEND), "ab", buffering=0)

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
        with open(open_unlinked(self._reserve, 0), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)

    def write(self, content: Any) -> None:
        """Replaces the content. Raises OSError if even the reserved space is gone."""
        with open(open_unlinked(self._reserve, 0), "wb") as file:
            file.write(as_json(content).encode())
            file.truncate()
        os.replace(self._reserve, self.path)
        with contextlib.suppress(OSError):  # the next write tries again
            self._allocate()

    def close(self) -> None:
        """Deletes the reserve."""
        with contextlib.suppress(OSError):
            self._reserve.unlink()
