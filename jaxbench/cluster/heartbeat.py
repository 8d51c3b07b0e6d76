"""Heartbeats: one small JSON file per process, which the watchdog reads. Needs no JAX."""

import contextlib
import json
import os
import platform
import threading
from pathlib import Path
from typing import Any

from jaxbench.files import write_whole

KEYS = ("rank", "host", "pid", "beats", "phase", "started", "completed")
"""Keys of a heartbeat file; `beats` counts how often it was written."""


def interval(timeout: float) -> float:
    """Seconds between two heartbeats of a process, for the timeout of the watchdog."""
    return min(10.0, timeout / 5)


class Heartbeat:
    """Writes the state of this process to `<rank>.json` from a thread, until `end`.

    `phase` is `training` or a phase that may take longer than steps do; `started` and `completed`
    are the last steps that were queued and completed. Without a path nothing is written.
    """

    def __init__(self, path: Path | None = None, interval: float = 10.0):
        self.path = path
        self.phase = "starting"
        self.started: int | None = None
        self.completed: int | None = None
        self._beats = 0
        self._failed = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(path)
            self._thread = threading.Thread(target=self._run, args=(path, interval), daemon=True)
            self._thread.start()

    def _run(self, path: Path, interval: float) -> None:
        while not self._stop.wait(interval):
            self._write(path)
        self._write(path)

    def _write(self, path: Path) -> None:
        self._beats += 1
        values = (
            int(path.stem), platform.node(), os.getpid(), self._beats,
            self.phase, self.started, self.completed,
        )  # fmt: skip
        text = json.dumps(dict(zip(KEYS, values, strict=True)))
        try:
            write_whole(path, text)
        except OSError as error:
            if not self._failed:
                print(
                    f"warning: the heartbeat of rank {path.stem} cannot be written: {error}",
                    flush=True,
                )
            self._failed = True
            with contextlib.suppress(OSError):  # needs no inode, and no right to the folder
                path.write_text(text)

    def end(self) -> None:
        """Writes the last heartbeat: the process ends in good order."""
        self.phase = "ended"
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


def read(path: Path) -> dict[str, Any] | str | None:
    """A heartbeat; None if the file does not exist yet; the reason if it cannot be read, as a stale
    handle of a shared file system."""
    try:
        beat = json.loads(path.read_text())
        return {key: beat[key] for key in KEYS}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        return str(error) or type(error).__name__


def read_neighbors(path: Path) -> list[dict[str, Any]]:
    """Heartbeats of the other processes on this host, given the file of this one.

    Launchers give consecutive ranks to a host, so the search stops at the first rank of another
    host: when a job fails, thousands of processes search at once.
    """
    neighbors = []
    for direction in (-1, 1):
        rank = int(path.stem) + direction
        while isinstance(beat := read(path.with_name(f"{rank}.json")), dict):
            if beat["host"] != platform.node():
                break
            neighbors.append(beat)
            rank += direction
    return neighbors
