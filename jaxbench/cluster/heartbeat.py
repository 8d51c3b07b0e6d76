"""Signs of life of each process, in small files that the watchdog reads."""

import contextlib
import json
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxbench.files import write_json

KEYS = ("rank", "host", "pid", "beats", "phase", "started", "completed")
"""Of a heartbeat."""


def interval(timeout: float) -> float:
    """Seconds between the heartbeats of a process, by the watchdog's time."""
    return min(10.0, timeout / 5)


class Heartbeat:
    """What one process is doing, written to the file `<rank>.json` by a thread while it lives.

    `phase` is `training` or something that may take longer than steps do; `started` and `completed`
    are the last steps that were queued and finished. Without a file nothing is written.
    """

    def __init__(self, path: Path | None = None, interval: float = 10.0):
        self.path = path
        self.phase = "starting"
        self.started: int | None = None
        self.completed: int | None = None
        self._beats = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(path)
            self._thread = threading.Thread(target=self._beat, args=(path, interval), daemon=True)
            self._thread.start()

    def _beat(self, path: Path, interval: float) -> None:
        while not self._ended.wait(interval):
            self._write(path)
        self._write(path)

    def _write(self, path: Path) -> None:
        self._beats += 1
        with contextlib.suppress(OSError):  # a full disk may have room again at the next beat
            values = (
                int(path.stem), platform.node(), os.getpid(), self._beats,
                self.phase, self.started, self.completed,
            )  # fmt: skip
            write_json(path, dict(zip(KEYS, values, strict=True)))

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The process is in this phase for a while."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def end(self) -> None:
        """The last sign: the process ends in good order."""
        self.phase = "ended"
        self._ended.set()
        if self._thread is not None:
            self._thread.join()


def beside(own: Path) -> list[dict[str, Any]]:
    """The last heartbeats of the other processes of this host, where ranks lie together as
    launchers place them, by the file of this one. Reads no others: when a job fails, thousands of
    processes ask at once."""
    found = []
    for away in (-1, 1):
        rank = int(own.stem) + away
        while isinstance(beat := read_one(own.with_name(f"{rank}.json")), dict):
            if beat["host"] != platform.node():
                break
            found.append(beat)
            rank += away
    return found


def read_one(path: Path) -> dict[str, Any] | str | None:
    """A heartbeat; None if there is none yet, and the reason if it cannot be read: a shared file
    system shows stale handles and, for a moment, files of another length."""
    try:
        beat = json.loads(path.read_text())
        return {key: beat[key] for key in KEYS}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        return str(error) or type(error).__name__
