"""`python -m jaxbench.cluster.watchdog`: ends a job that hangs, from a process of its own.

A collective that waits for a lost rank waits forever and cannot be interrupted from inside (JAX
issue 38503), so this process imports no JAX. The first process of a job starts it; it reads the
heartbeats of all, and writes what it found into run.json before it kills the processes of its host.
The launcher (`srun --kill-on-bad-exit`) and the loss of the coordinator end the others.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jaxbench.cluster import heartbeat
from jaxbench.files import write_json

FEW = 64
"""Processes of which all heartbeats are read every time."""

SLOW = 10
"""How many times longer than a step the other phases may take: compiling, loading, saving, and the
first step, in which communicators are made."""


def start(run_folder: Path, beats: Path, processes: int, timeout: float) -> subprocess.Popen:
    """Starts the watchdog of a job beside its first process, this one, which is to kill it in the
    end."""
    return subprocess.Popen([
        sys.executable, "-m", "jaxbench.cluster.watchdog", str(run_folder), str(beats),
        str(processes), str(timeout),
    ], stdin=subprocess.DEVNULL)  # fmt: skip


class Watch:
    """Decides from heartbeats seen over time; `now` is in seconds of any clock."""

    def __init__(self, processes: int, timeout: float, now: float):
        self.processes, self.timeout, self.began = processes, timeout, now
        self._alive: dict[int, tuple[int, float]] = {}
        self._moved: dict[int, tuple[tuple, float]] = {}

    def verdict(
        self, beats: list[dict[str, Any]], now: float, unreadable: Collection[int] = ()
    ) -> str | None:
        """What is wrong, naming ranks and their last steps; None while nothing is. Of stuck ranks
        those behind are named, for which the others may wait. The clock stands still for ranks of
        which nothing can be read now."""
        silent, stuck = [], []
        for beat in beats:
            rank = beat["rank"]
            progress = (beat["phase"], beat["started"], beat["completed"])
            seen = rank in self._alive and rank not in unreadable
            if not seen or self._alive[rank][0] != beat["beats"]:
                self._alive[rank] = beat["beats"], now
            if not seen or self._moved[rank][0] != progress:
                self._moved[rank] = progress, now
            steady = beat["phase"] == "training" and beat["completed"] is not None
            if beat["phase"] == "ended":
                continue
            if now - self._alive[rank][1] > self.timeout:
                silent.append(beat)
            if now - self._moved[rank][1] > self.timeout * (1 if steady else SLOW):
                stuck.append(beat)
        if silent:
            return f"no sign of life for {self.timeout:g} s from {_name(silent)}"
        if stuck:
            furthest = min(_order(beat) for beat in stuck)
            behind = [beat for beat in stuck if _order(beat) == furthest]
            others = len(stuck) - len(behind)
            more = f"; {others} more wait" if others else ""
            return f"no progress within the time limit of {self.timeout:g} s: {_name(behind)}{more}"
        missing = set(range(self.processes)) - {beat["rank"] for beat in beats} - {*unreadable}
        if missing and now - self.began > self.timeout * SLOW:
            return f"never heard of rank {', '.join(map(str, sorted(missing)[:8]))}"
        return None


class Reader:
    """The heartbeats of a job of many processes, each read about as often as it is written.

    At 2048 ranks and 10 s that is 200 files a second, of which a shared file system is asked;
    `beats` are the last that were seen, `unreadable` says why of those that cannot be read now.
    """

    def __init__(self, folder: Path, processes: int, rounds: int):
        self._paths = [folder / f"{rank}.json" for rank in range(processes)]
        self._rounds = rounds if processes > FEW else 1
        self._round = 0
        self._seen: dict[int, dict[str, Any]] = {}
        self.unreadable: dict[int, str] = {}

    @property
    def beats(self) -> list[dict[str, Any]]:
        """By rank."""
        return [self._seen[rank] for rank in sorted(self._seen)]

    def read(self) -> None:
        """Reads those whose turn it is."""
        for rank in range(self._round, len(self._paths), self._rounds):
            found = heartbeat.read_one(self._paths[rank])
            if isinstance(found, dict):
                self._seen[rank] = found
            if isinstance(found, str):
                self.unreadable[rank] = found
            else:
                self.unreadable.pop(rank, None)
        self._round = (self._round + 1) % self._rounds

    def blindness(self) -> str:
        """How many heartbeats cannot be read now, and why; empty if all can."""
        if not self.unreadable:
            return ""
        reason = next(iter(self.unreadable.values()))
        return f"cannot read {len(self.unreadable)} of {len(self._paths)} heartbeats: {reason}"


def _order(beat: dict[str, Any]) -> tuple[int, int]:
    return (-1 if beat["started"] is None else beat["started"],
            -1 if beat["completed"] is None else beat["completed"])  # fmt: skip


def _name(beats: list[dict[str, Any]]) -> str:
    texts = [
        f"rank {b['rank']} on {b['host']} ({b['phase']}, last completed step "
        f"{'none' if b['completed'] is None else b['completed']})"
        for b in beats[:8]
    ]
    return ", ".join(texts) + (f" and {len(beats) - 8} more" if len(beats) > 8 else "")


def dead(beats: list[dict[str, Any]]) -> str | None:
    """Which processes of this host are gone without having ended; None if all are there."""
    gone = [beat for beat in beats
            if beat["host"] == platform.node() and beat["phase"] != "ended"
            and not _runs(beat["pid"])]  # fmt: skip
    return f"lost {_name(gone)}" if gone else None


def lost(own: Path, within: float = 2.0) -> str | None:
    """`dead` of the processes beside this one, whose heartbeat is `own`, after some seconds at
    most: a process that is killed closes its connections, and so fails its peers, a moment before
    it is gone."""
    beats, end = heartbeat.beside(own), time.monotonic() + within
    while time.monotonic() < end:
        # Read again before it is said: it may have ended in good order.
        if dead(beats) and (found := dead(beats := heartbeat.beside(own))):
            return found
        time.sleep(0.05)
    return None


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def end_job(run_folder: Path, beats: list[dict[str, Any]], reason: str, cause: str) -> None:
    """Records the failure, then kills the job's processes on this host."""
    print(f"watchdog: {reason}; ending the job", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError, ValueError):
        record = json.loads((run_folder / "run.json").read_text())
        ended = {"status": "failed", "reason": reason, "cause": cause}
        write_json(run_folder / "run.json", record | ended)
    for beat in beats:
        if beat["host"] == platform.node() and beat["phase"] != "ended":
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat["pid"], signal.SIGKILL)


def main() -> int:
    """Watches until it is killed or the first process has ended in good order; returns 1 when it
    has ended the job."""
    parser = argparse.ArgumentParser(prog="python -m jaxbench.cluster.watchdog")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("beats", type=Path)
    parser.add_argument("processes", type=int)
    parser.add_argument("timeout", type=float)
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the job, which still has to be watched
    watch = Watch(args.processes, args.timeout, time.monotonic())
    tick = min(1.0, args.timeout / 10)
    reader = Reader(args.beats, args.processes, round(heartbeat.interval(args.timeout) / tick))
    blind = ""
    while True:
        time.sleep(tick)
        reader.read()
        beats = reader.beats
        if (now := reader.blindness()) != blind:
            print(f"watchdog: {now or 'reads all heartbeats again'}", file=sys.stderr, flush=True)
            blind = now
        if any(beat["rank"] == 0 and beat["phase"] == "ended" for beat in beats):
            return 0  # it says how the run ended, and no other process knows better
        if reason := dead(beats):
            end_job(args.run_folder, beats, reason, "lost")
            return 1
        if reason := watch.verdict(beats, time.monotonic(), reader.unreadable):
            end_job(args.run_folder, beats, reason, "hang")
            return 1


if __name__ == "__main__":
    sys.exit(main())
