"""Who may write a folder or a file, and atomic writes, also when the disk is full."""

import contextlib
import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from jaxbench.errors import RecipeError

RESERVE_BYTES = 2**18
"""Disk space reserved for a record: several times the size of the largest one."""

LEASE_S = 120.0
"""Seconds for which a start of a job waits for the lock of its start before: a server of NFS keeps
the locks of a node that died for its lease, 90 s by default."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a file system without locks."""


@contextlib.contextmanager
def owned(path: Path, wait: bool = False) -> Iterator[None]:
    """Makes this process the only writer of a folder, which exists, or of a file.

    The owner holds a lock on `.owner` in the folder, or `.<name>.owner` next to the file, until it
    ends, however it ends. The file says who that is. Raises RecipeError if another process is the
    owner, or with `wait` waits for it. Locks hold between the nodes of a cluster where the file
    system has them (NFS 4, NFS 3 with lockd, GPFS, Lustre with `flock`), elsewhere within a node;
    on a file system without locks nothing is owned.
    """
    file = path / ".owner" if path.is_dir() else path.with_name(f".{path.name}.owner")
    job, until = f"job {os.environ.get('SLURM_JOB_ID')}", time.monotonic() + LEASE_S
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
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
        os.close(descriptor)  # the owner before has just deleted it
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
    """Makes a folder that did not exist: `path`, or the first free of `path-2`, `path-3`, ..."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def write_whole(path: Path, text: str) -> None:
    """Replaces a file whole: a reader sees the old or the new one, never half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{time.time_ns()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """`write_whole` of a value as JSON."""
    write_whole(path, as_json(content))


def as_json(content: Any) -> str:
    """The text of a JSON file; dataclasses as their fields."""
    return json.dumps(content, indent=2, default=asdict) + "\n"


class Lines:
    """A text file that is written line by line without a buffer, so that an error is raised by the
    write that fails, not later."""

    def __init__(self, path: Path):
        self._path, self._file = path, path.open("ab", buffering=0)

    def write(self, line: str) -> None:
        """Adds a line. Raises OSError, also where the file was deleted or replaced meanwhile; a
        part of the line may be there then."""
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
