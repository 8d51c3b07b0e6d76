"""The watchdog: a thread of each process that ends this process when the job makes no progress.

JAX's coordination service and `srun --kill-on-bad-exit` end a job that loses a process. Nothing
ends a hang: a collective that waits for a stuck rank waits forever, and cannot be interrupted (JAX
issue 38503). So each process posts its progress in the key-value store of the coordination service,
and measures for how long it has made no progress itself. After the time limit it reads what the
others have posted, records the reason, and ends itself; JAX and srun end the others. It opens no
socket and signals no process.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from typing import Any

import jax

from jaxbench.base.errors import STATUS, listed
from jaxbench.cluster.job import node
from jaxbench.jax_internals import coordination_client, coordinator

SLOW = 10
"""The factor on the time limit for the first step, which makes communicators, and for phases other
than training: compiling, loading, saving."""

LATER = 1.5
"""The factor on the time limits of ranks other than 0. Rank 0 records the reason, so it should end
first, unless rank 0 is what hangs."""

ENDED = "ended"
"""The phase of a process that ends in good order, or that has said why it fails."""

RECORD_S = 5.0
"""The longest time for recording a hang, since the file system may be what hangs."""

KEY = "jaxbench/progress"


@dataclass(frozen=True)
class Progress:
    """What a process does: its phase, the last steps that it queued and completed (-1 for none),
    and how often it has posted this."""

    rank: int
    host: str
    phase: str = "starting"
    started: int = -1
    completed: int = -1
    posts: int = 0

    @property
    def steps(self) -> tuple[int, int]:
        return self.started, self.completed

    @property
    def state(self) -> tuple[str, int, int]:
        return self.phase, self.started, self.completed


def describe(processes: list[Progress]) -> str:
    """Processes in words: the rank, host, phase and last completed step of each."""
    return listed(
        (
            f"rank {p.rank} on {p.host} ({p.phase}, last completed step "
            f"{'none' if p.completed < 0 else p.completed})"
            for p in processes
        ),
        8,
    )


class Standstill:
    """Finds out why a job makes no progress, from what its processes post from half of the time
    limit on. Times are the seconds for which the reader itself has made no progress."""

    def __init__(self, processes: int, timeout: float):
        self._processes, self._timeout = processes, timeout
        self._states: dict[int, tuple[str, int, int]] | None = None
        self._read: float | None = None
        self._moved = 0.0
        self._posts: dict[int, tuple[int, float]] = {}

    def reason(self, posted: list[Progress], idle: float) -> str | None:
        """The reason to end, with ranks and their last steps; None while there is none.

        Ranks are silent if they posted nothing for half of the time limit; the reason names them.
        A reader that starts late, on a busy host, watches for half of the limit before it judges.
        If all ranks post, it names the ranks that are furthest behind. Their phase decides how long
        they may take, since the others wait for them.
        """
        states = {process.rank: process.state for process in posted}
        if self._states not in (None, states):
            self._moved = idle
        self._states = states
        self._read = idle if self._read is None else self._read
        for process in posted:
            if self._posts.get(process.rank, (None,))[0] != process.posts:
                self._posts[process.rank] = process.posts, idle
        still = idle - self._moved
        if still <= self._timeout or idle - self._read < self._timeout / 2:
            return None
        live = [process for process in posted if process.phase != ENDED]
        since = idle - self._timeout / 2
        if silent := [process for process in live if self._posts[process.rank][1] < since]:
            return f"no sign of life for {self._timeout / 2:g} s from {describe(silent)}"
        last = min((process.steps for process in live), default=None)
        behind = [process for process in live if process.steps == last]
        missing = sorted(set(range(self._processes)) - states.keys())
        training = all(p.phase == "training" and p.completed >= 0 for p in behind)
        limit = self._timeout * (1 if training and not missing else SLOW)
        if still <= limit:
            return None
        if missing:
            return f"never a sign of life from rank {listed(map(str, missing), 8)}"
        waiting = f"; {len(live) - len(behind)} more wait" if len(live) > len(behind) else ""
        return f"no progress within the time limit of {limit:g} s: {describe(behind)}{waiting}"


class Watchdog:
    """What this process does, and the thread that watches it. Without a time limit there is no
    thread.

    `phase` is `training`, or a phase that may take longer than steps do. `started` and `completed`
    are the last steps that were queued and completed. `hung` records the reason of a hang; then the
    process ends.
    """

    def __init__(self, timeout: float | None = None, hung: Callable[[str], None] = lambda _: None):
        self.phase = "starting"
        self.started = self.completed = -1
        self._hung = hung
        self._ending = threading.Lock()
        self._ender: int | None = None
        self._stop = threading.Event()
        self._asking: dict[str, threading.Thread] = {}
        self._thread: threading.Thread | None = None
        if timeout is None:
            return
        self._timeout, self._processes = timeout, jax.process_count()
        self._posted = Progress(jax.process_index(), node())
        # At most 256 posts a second reach the coordinator.
        self._interval = min(timeout / 10, 1 + self._processes / 256)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def claim(self) -> None:
        """Lets only this thread end the process, for its own reason. A thread that comes later
        waits here until the process is gone."""
        if not self._is_first():
            threading.Event().wait()

    def _is_first(self) -> bool:
        with self._ending:
            self._ender = self._ender or threading.get_ident()
            return self._ender == threading.get_ident()

    def end(self) -> None:
        """Claims the end and stops watching. The other processes no longer expect signs of life."""
        self.claim()
        self.phase = ENDED
        self._stop.set()
        if self._thread is not None:
            self._thread.join(3 * self._interval)

    def lost(self) -> str | None:
        """The processes that no longer give a sign of life, which may be why this one fails. None
        if all of them do. Waits for the time of three posts."""
        if self._thread is None or (before := self._read()) is None:
            return None
        time.sleep(3 * self._interval)
        posts = {process.rank: process.posts for process in before}
        gone = [p for p in self._read() or [] if p.phase != ENDED and posts.get(p.rank) == p.posts]
        return f"lost {describe(gone)}" if gone else None

    def _watch(self) -> None:
        share = LATER if self._posted.rank else 1.0
        at, idle, answered, standstill = time.monotonic(), 0.0, 0.0, None
        self._post()
        while not self._stop.wait(self._interval):
            # If a wait takes much longer than it should, the process was stopped
            # (`scontrol suspend`) and made no progress for that reason.
            now = time.monotonic()
            idle += min(now - at, 2 * self._interval)
            at = now
            if self._post():
                idle, standstill = 0.0, None
            elif idle > share * self._timeout / 2 and self._ender is None:
                if standstill is None:
                    standstill, answered = Standstill(self._processes, self._timeout), idle
                if (posted := self._read()) is not None:
                    answered = idle
                    reason = standstill.reason(posted, idle / share)
                elif idle > share * self._timeout and idle - answered > self._timeout / 2:
                    where = f"rank 0 on {coordinator()}"  # a thread of which is the coordinator
                    reason = f"no sign of life for {self._timeout / 2:g} s from {where}"
                else:
                    reason = None
                if reason and self._is_first():
                    within(RECORD_S, partial(self._hung, reason))
                    os._exit(STATUS["hang"])
        self._post()

    def _post(self) -> bool:
        """Posts the progress of this process. Returns whether it made any since the last time."""
        before = self._posted
        self._posted = replace(
            before, phase=self.phase, started=self.started, completed=self.completed,
            posts=before.posts + 1,
        )  # fmt: skip
        client, text = coordination_client(), json.dumps(asdict(self._posted))
        if client is not None:
            key = f"{KEY}/{before.rank}"
            self._ask("post", lambda: client.key_value_set(key, text, allow_overwrite=True))
        return self._posted.state != before.state

    def _read(self) -> list[Progress] | None:
        """What all processes posted last, by rank. None if the coordinator does not answer."""
        client = coordination_client()
        if client is None:
            return [self._posted]
        pairs = self._ask("read", lambda: client.key_value_dir_get(KEY))
        return None if pairs is None else parse(pairs, self._processes)

    def _ask(self, kind: str, call: Callable[[], Any]) -> Any:
        """Asks the coordinator, which never answers if it is frozen. Returns None after a while,
        and as long as an earlier call of this kind waits."""
        if kind in self._asking and self._asking[kind].is_alive():
            return None
        self._asking[kind], answer = within(self._interval / 2, call)
        return answer


def parse(pairs: list[tuple[str, str]], processes: int) -> list[Progress]:
    """The processes by what they posted. Anything else is left out, since anybody who reaches the
    coordinator can post."""
    found = {}
    for key, text in pairs:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            process = Progress(**json.loads(text))
            right = [*map(type, astuple(process))] == [int, str, str, int, int, int]
            if right and process.rank in range(processes) and key == f"{KEY}/{process.rank}":
                found[process.rank] = process
    return [found[rank] for rank in sorted(found)]


def within(seconds: float, call: Callable[[], Any]) -> tuple[threading.Thread, Any]:
    """Calls a function in a thread. Returns the thread and the result; the result is None if the
    call takes longer or fails."""
    result: list[Any] = [None]

    def run() -> None:
        with contextlib.suppress(Exception):
            result[0] = call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return thread, result[0]
