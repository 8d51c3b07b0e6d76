"""Heartbeats: small datagrams from every process to the watchdog, past all file systems, which may
be what fails. Needs no JAX."""

import contextlib
import json
import os
import platform
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

KEYS = ("start", "rank", "host", "pid", "beats", "phase", "started", "completed")
"""Keys of a heartbeat; `beats` counts how many were sent before it."""


def interval(timeout: float) -> float:
    """Seconds between two heartbeats of a process, for the timeout of the watchdog."""
    return min(10.0, timeout / 5)


class Place(NamedTuple):
    """Where the heartbeats of one start of a job go: the host and port of its watchdog, and the
    start's name, since a killed start may have left processes that still send theirs."""

    host: str
    port: int
    start: str

    @property
    def folder(self) -> Path:
        """A folder of this host alone; each process that runs has a file `<rank>` there, with its
        process id."""
        name = f"jaxbench-{os.getuid()}-{self.start}-{platform.node()}"
        return Path(tempfile.gettempdir(), name)


class Heartbeat:
    """Sends the state of this process to the watchdog from a thread, until `end`.

    `phase` is `training` or a phase that may take longer than steps do; `started` and `completed`
    are the last steps that were queued and completed. Without a place nothing is sent.
    """

    def __init__(self, rank: int = 0, place: Place | None = None, interval: float = 10.0):
        self.rank, self.place = rank, place
        self.phase = "starting"
        self.started: int | None = None
        self.completed: int | None = None
        self._beats = 0
        self._failed = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if place is not None:
            with contextlib.suppress(OSError):
                place.folder.mkdir(mode=0o700, exist_ok=True)
                (place.folder / str(rank)).write_text(str(os.getpid()))
            self._send(place)
            self._thread = threading.Thread(target=self._run, args=(place, interval), daemon=True)
            self._thread.start()

    def _run(self, place: Place, interval: float) -> None:
        while not self._stop.wait(interval):
            self._send(place)
        self._send(place)

    def _send(self, place: Place) -> None:
        self._beats += 1
        values = (
            place.start, self.rank, platform.node(), os.getpid(), self._beats, self.phase,
            self.started, self.completed,
        )  # fmt: skip
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                place.host, place.port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as sender:
                sender.sendto(json.dumps(dict(zip(KEYS, values, strict=True))).encode(), address)
        except OSError as error:
            if not self._failed:
                print(f"warning: rank {self.rank} cannot send its heartbeat: {error}", flush=True)
            self._failed = True

    def end(self) -> None:
        """Sends the last heartbeat: the process ends in good order."""
        self.phase = "ended"
        self._stop.set()
        if self._thread is not None and self.place is not None:
            self._thread.join()
            with contextlib.suppress(OSError):  # the last one to end deletes the folder
                (self.place.folder / str(self.rank)).unlink()
                self.place.folder.rmdir()


class Receiver:
    """The watchdog's end: `socket` is bound to a free port; `beats` has the last heartbeat of each
    rank of a start of the job."""

    def __init__(self, start: str, receiver: socket.socket | None = None):
        self.start, self.beats = start, dict[int, dict[str, Any]]()
        self.socket = receiver or _bound()

    def read(self, seconds: float) -> list[dict[str, Any]]:
        """Receives for some seconds, and whatever has arrived; returns the last heartbeats by
        rank."""
        end = time.monotonic() + seconds
        with contextlib.suppress(BlockingIOError, TimeoutError):
            while True:
                self.socket.settimeout(max(0.0, end - time.monotonic()))
                self._take(self.socket.recv(2**12))
        return [self.beats[rank] for rank in sorted(self.beats)]

    def _take(self, datagram: bytes) -> None:
        """Notes a heartbeat; whatever else was sent to this port is ignored."""
        with contextlib.suppress(ValueError, LookupError, TypeError):
            content = json.loads(datagram)
            beat = {key: content[key] for key in KEYS}
            last = self.beats.get(beat["rank"], {"beats": 0})
            if beat["start"] == self.start and beat["beats"] > last["beats"]:
                self.beats[beat["rank"]] = beat


def _bound() -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    receiver = socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_DGRAM)
    if dual:
        receiver.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    receiver.bind(("", 0))
    return receiver
