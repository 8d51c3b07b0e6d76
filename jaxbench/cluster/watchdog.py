"""`python -m jaxbench.cluster.watchdog`: a separate process that ends a job that hangs.

A collective that waits for a lost rank waits forever and cannot be interrupted from inside (JAX
issue 38503), so this process imports no JAX. Rank 0 starts it. It reads the heartbeats of all
ranks, writes the reason into run.json and kills the processes of its host. The launcher
(`srun --kill-on-bad-exit`) and the loss of the coordinator end the others.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jaxbench.cluster import heartbeat
from jaxbench.files import write_json

SMALL = 64
"""Most processes whose heartbeats are read more often than they are written; with 2048 processes a
shared file system has 2048 reads in 10 s as it is."""

SLOW = 10
"""Factor on the timeout for the first step, which makes communicators, and for phases other than
training: compiling, loading, saving."""


class Watch:
    """The verdict on a job by its heartbeats over time; all times are in seconds of one clock."""

    def __init__(self, processes: int, timeout: float, now: float):
        self.processes, self.timeout = processes, timeout
        self._completed, self._completed_at = -1, now
        self._progress: dict[int, tuple] = {}
        self._progress_at = now
        self._last_beat: dict[int, tuple[int, float]] = {}
        self._cannot_write: set[int] = set()

    def verdict(
        self, beats: list[dict[str, Any]], now: float, unreadable: Collection[int] = ()
    ) -> str | None:
        """The reason to end the job, with ranks and their last steps; None while there is none.

        Steps are collective: while they complete, every rank is alive. So a rank that is silent
        meanwhile cannot write its heartbeat, and is ignored until it writes again. Ranks whose file
        cannot be read are ignored as well, and do not count as silent. If there is no progress, the
        ranks that are furthest behind are named, and their phase decides how long they may take:
        the others wait for them.
        """
        completed = max((_steps(beat)[1] for beat in beats), default=-1)
        if completed > self._completed:
            self._completed, self._completed_at = completed, now
        idle_s = now - self._completed_at
        readable = [beat for beat in beats if beat["rank"] not in unreadable]
        progress = {beat["rank"]: (beat["phase"], *_steps(beat)) for beat in readable}
        if not readable or self._progress | progress != self._progress:
            self._progress, self._progress_at = self._progress | progress, now
        for beat in beats:
            rank = beat["rank"]
            if rank in unreadable or self._last_beat.get(rank, (None,))[0] != beat["beats"]:
                self._last_beat[rank] = beat["beats"], now
                self._cannot_write.discard(rank)
            elif self._completed_at - self._last_beat[rank][1] > self.timeout:
                self._cannot_write.add(rank)
        if idle_s <= self.timeout:
            return None
        live = [
            b for b in readable if b["phase"] != "ended" and b["rank"] not in self._cannot_write
        ]
        silent = [b for b in live if now - self._last_beat[b["rank"]][1] > self.timeout]
        if silent:
            return f"no sign of life for {self.timeout:g} s from {_describe(silent)}"
        last = min(map(_steps, live), default=None)
        behind = [beat for beat in live if _steps(beat) == last]
        steady = all(b["phase"] == "training" and b["completed"] is not None for b in behind)
        limit = self.timeout * (1 if steady else SLOW)
        if live and now - self._progress_at > limit:
            waiting = len(live) - len(behind)
            return f"no progress within the time limit of {limit:g} s: {_describe(behind)}" + (
                f"; {waiting} more wait" if waiting else ""
            )
        missing = set(range(self.processes)) - {beat["rank"] for beat in beats} - {*unreadable}
        # Once a step is completed, a rank without a file cannot write.
        if missing and self._completed < 0 and idle_s > self.timeout * SLOW:
            return f"no heartbeat from rank {', '.join(map(str, sorted(missing)[:8]))}"
        return None


class Reader:
    """Reads the heartbeats of a job. `beats` has the last one of each rank that could be read,
    `unreadable` the reason for each rank whose heartbeat cannot be read now."""

    def __init__(self, folder: Path, processes: int):
        self._paths = {rank: folder / f"{rank}.json" for rank in range(processes)}
        self._beats: dict[int, dict[str, Any]] = {}
        self.unreadable: dict[int, str] = {}

    def read(self) -> list[dict[str, Any]]:
        """Reads all; returns the last heartbeats by rank."""
        results = {rank: heartbeat.read(path) for rank, path in self._paths.items()}
        self._beats |= {rank: beat for rank, beat in results.items() if isinstance(beat, dict)}
        self.unreadable = {rank: text for rank, text in results.items() if isinstance(text, str)}
        return [self._beats[rank] for rank in sorted(self._beats)]

    def problem(self) -> str:
        """Number of unreadable heartbeats and the first reason; empty if there are none."""
        if not self.unreadable:
            return ""
        reason = next(iter(self.unreadable.values()))
        return f"cannot read {len(self.unreadable)} of {len(self._paths)} heartbeats: {reason}"


def _steps(beat: dict[str, Any]) -> tuple[int, int]:
    """Last steps that were started and completed; -1 for none."""
    started, completed = (-1 if beat[k] is None else beat[k] for k in ("started", "completed"))
    return started, completed


def _describe(beats: list[dict[str, Any]]) -> str:
    texts = [
        f"rank {b['rank']} on {b['host']} ({b['phase']}, last completed step "
        f"{'none' if b['completed'] is None else b['completed']})"
        for b in beats[:8]
    ]
    return ", ".join(texts) + (f" and {len(beats) - 8} more" if len(beats) > 8 else "")


def lost(beats: list[dict[str, Any]]) -> str | None:
    """Processes of this host that are gone and have not ended; None if there are none."""
    gone = [beat for beat in beats
            if beat["host"] == platform.node() and beat["phase"] != "ended"
            and not _is_running(beat["pid"])]  # fmt: skip
    return f"lost {_describe(gone)}" if gone else None


def wait_for_lost_neighbor(path: Path, seconds: float = 2.0) -> str | None:
    """`lost` of the other processes of this host, given the heartbeat file of this one.

    Waits a little: a killed process closes its connections, and so fails its peers, a moment before
    it is gone.
    """
    beats, end = heartbeat.read_neighbors(path), time.monotonic() + seconds
    while time.monotonic() < end:
        # Read again to be sure: the process may have ended in good order meanwhile.
        if lost(beats) and (reason := lost(beats := heartbeat.read_neighbors(path))):
            return reason
        time.sleep(0.05)
    return None


def _is_running(pid: int) -> bool:
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
    """Polls until it is killed or rank 0 has ended in good order; returns 1 if it ended the job."""
    parser = argparse.ArgumentParser(prog="python -m jaxbench.cluster.watchdog")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("beats", type=Path)
    parser.add_argument("processes", type=int)
    parser.add_argument("timeout", type=float)
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(
            number, signal.SIG_IGN
        )  # meant for the job, which is watched until it has stopped
    watch = Watch(args.processes, args.timeout, time.monotonic())
    reader, problem = Reader(args.beats, args.processes), ""
    small = args.processes <= SMALL
    poll_s = min(1.0, args.timeout / 10) if small else heartbeat.interval(args.timeout)
    while True:
        time.sleep(poll_s)
        beats = reader.read()
        if reader.problem() != problem:
            problem = reader.problem()
            text = problem or "reads all heartbeats again"
            print(f"watchdog: {text}", file=sys.stderr, flush=True)
        if any(beat["rank"] == 0 and beat["phase"] == "ended" for beat in beats):
            return 0  # rank 0 has recorded how the run ended
        if reason := lost(beats):
            end_job(args.run_folder, beats, reason, "lost")
            return 1
        if reason := watch.verdict(beats, time.monotonic(), reader.unreadable):
            end_job(args.run_folder, beats, reason, "hang")
            return 1


if __name__ == "__main__":
    sys.exit(main())
