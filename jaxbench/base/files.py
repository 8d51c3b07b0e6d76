"""Files that stay whole: one writer for each, atomic writes even when the disk is full, and folders
that belong to one user.

No file is written through a link: in a folder that several users share, another user may have made
the link.
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import secrets
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from jaxbench.base.errors import RecipeError
from jaxbench.base.untrusted import read_json

RESERVE_BYTES = 2**18
"""Disk space reserved for a record: several times the size of a record of one node."""

LEASE_S = 120.0
"""Seconds for which one start of a job waits for the lock of the start before it. If a node dies,
an NFS server keeps the node's locks for its lease, by default 90 s."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors that a file system without locks returns."""


def open_unlinked(path: Path, flags: int = 0) -> int:
    """Opens a file to read and write it, and creates it if there is none. Returns its descriptor.
    Raises OSError if the name is a link, or with O_EXCL if the name exists at all."""
    return os.open(path, flags | os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)


@contextlib.contextmanager
def owned(path: Path, wait: bool = False) -> Iterator[None]:
    """Makes this process the only writer of a file, or of a folder, which must exist.

    The owner holds a lock on `.owner` in the folder, or on `.<name>.owner` next to the file, until
    it ends, in whatever way it ends. The locked file says who the owner is. If another process is
    the owner, this raises RecipeError, or with `wait` waits for it.

    If the file system has locks between nodes (NFS 4, NFS 3 with lockd, GPFS, Lustre with `flock`),
    they hold for the whole cluster. On other file systems they hold within a node. On a file system
    without locks nothing is owned.
    """
    file = path / ".owner" if path.is_dir() else path.with_name(f".{path.name}.owner")
    job, until = f"job {os.environ.get('SLURM_JOB_ID')}", time.monotonic() + LEASE_S
    while True:
        descriptor = open_unlinked(file)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError):
            owner = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            if owner.endswith(job) and time.monotonic() < until:
                time.sleep(1)
                continue
            raise RecipeError(
                f"{path} is in use by {owner or 'another process'}; name another one, or wait for "
                "its end"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(descriptor)
                raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                break
        os.close(descriptor)  # the previous owner has just deleted it
    try:
        os.ftruncate(descriptor, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        who = f"process {os.getpid()} on {platform.node()} since {since}"
        os.write(descriptor, (f"{who}, {job}" if "SLURM_JOB_ID" in os.environ else who).encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
        os.close(descriptor)


def new_folder(path: Path) -> Path:
    """Makes a folder that did not exist: `path`, or the first free one of `path-2`, `path-3`,
    ..."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o755)
            break
    return folder


def foreign(folder: Path) -> str | None:
    """Says whose folder this is, if another user owns it, or owns a link that leads to it. None if
    this user owns both. Raises OSError if this user cannot write into it.

    We ask the file system which user it takes us for, because it may map users, such as root to
    nobody.
    """
    with tempfile.TemporaryFile(dir=folder) as own:
        user = os.fstat(own.fileno()).st_uid
    owners = {folder.lstat().st_uid, folder.stat().st_uid} - {user}
    return f"it belongs to user {owners.pop()}" if owners else None


@contextlib.contextmanager
def private(folder: Path) -> Iterator[Path]:
    """A path to a folder that belongs to this user alone. It is made if it does not exist. The path
    stays valid whatever another user puts in the folder's place. Raises OSError if others own the
    folder or may write into it."""
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
    """Replaces a file as a whole: a reader sees the old or the new file, never half of one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = open_unlinked(temporary, os.O_EXCL)
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Writes a value as JSON with `write_whole`."""
    write_whole(path, as_json(content))


def as_json(content: Any) -> str:
    """The text of a JSON file. Dataclasses become objects of their fields."""
    return json.dumps(content, indent=2, default=asdict) + "\n"


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Empty if the file cannot be read or has no object."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


RECORDS = ("run.json", "job.json")
"""The record of a run, and the record of its job, which the launcher writes
(`launch/verdict.py`)."""


SCHEMA = 1
"""Version of run.json; it grows when a field changes its meaning or is removed."""


def check_schema(record: dict[str, Any]) -> None:
    """Raises ValueError for a record of a later version, whose fields may have another meaning."""
    if (schema := record.get("schema", SCHEMA)) != SCHEMA:
        raise ValueError(f"it has schema {schema}, and this version of jaxbench reads {SCHEMA}")


def recorded(folder: Path) -> dict[str, Any]:
    """The record of a run, or of its job if the run has no record yet. Raises FileNotFoundError if
    there is neither, and ValueError if the file is no record."""
    paths = [folder / name for name in RECORDS]
    path = next((path for path in paths if path.is_file()), paths[0])
    content = read_json(path)
    if not isinstance(content, dict) or "status" not in content:
        raise ValueError(f"{path.name}: expected a JSON object with a status")
    check_schema(content)
    return content


class Lines:
    """A text file that is written line by line without a buffer, so that the write that fails
    raises the error, and not a later one."""

    def __init__(self, path: Path):
        descriptor = open_unlinked(path, os.O_APPEND)
        self._path, self._file = path, os.fdopen(descriptor, "ab", buffering=0)

    def write(self, line: str) -> None:
        """Adds a line. Raises OSError, also if the file was deleted or replaced meanwhile; a part
        of the line may then be in the file."""
        left = memoryview(f"{line}\n".encode())
        while left:
            left = left[self._file.write(left) or 0 :]
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path)):
                return
        what = f"{self._path.name} was deleted or replaced while it was written"
        raise FileNotFoundError(errno.ENOENT, what, str(self._path))

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


class ReservedJson:
    """A JSON file that can be replaced as a whole on a full disk, because space is reserved for it.

    The reserve is a separate file, `.<name>.reserve`. A write goes into the reserve and renames it.
    Then a new reserve is allocated if possible, at least `RESERVE_BYTES`, `more` bytes more, and
    twice what was written.
    """

    def __init__(self, path: Path, more: int = 0):
        self.path, self._reserve = path, path.with_name(f".{path.name}.reserve")
        self._least = RESERVE_BYTES + more
        self._allocate(self._least)

    def _allocate(self, size: int) -> None:
        with open(open_unlinked(self._reserve), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)

    def write(self, content: Any) -> None:
        """Replaces the content. Raises OSError if even the reserved space is gone."""
        text = as_json(content).encode()
        with open(open_unlinked(self._reserve), "wb") as file:
            file.write(text)
            file.truncate()
        os.replace(self._reserve, self.path)
        with contextlib.suppress(OSError):  # the next write tries again
            self._allocate(max(self._least, 2 * len(text)))

    def close(self) -> None:
        """Deletes the reserve."""
        with contextlib.suppress(OSError):
            self._reserve.unlink()
