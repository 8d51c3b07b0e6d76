"""`python -m jaxbench.cluster.watchdog`: a separate process that ends a job that hangs.

A collective that waits for a lost rank waits forever and cannot be interrupted from inside (JAX
issue 38503), so this process imports no JAX. Rank 0 starts it. It receives the heartbeats of
all ranks, kills the processes of its host and writes the reason into run.json. The launcher
(`srun --kill-on-bad-exit`) and the loss of the coordinator end the others.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from jaxbench.cluster.heartbeat import Place, Receiver
from jaxbench.cluster.messages import tell
from jaxbench.errors import listed
from jaxbench.files import write_json

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
        self._unheard: set[int] = set()

    def verdict(self, beats: list[dict[str, Any]], now: float) -> str | None:
        """The reason to end the job, with ranks and their last steps; None while there is none.

        Steps are collective: while they complete, every rank is alive. So a rank that is silent
        meanwhile is one whose heartbeats do not arrive, and is ignored until one does. If there is
        no progress, the ranks that are furthest behind are named, and their phase decides how long
        they may take: the others wait for them.
        """
        completed = max((_steps(beat)[1] for beat in beats), default=-1)
        if completed > self._completed:
            self._completed, self._completed_at = completed, now
        idle_s = now - self._completed_at
        progress = {beat["rank"]: (beat["phase"], *_steps(beat)) for beat in beats}
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        for beat in beats:
            rank = beat["rank"]
            if self._last_beat.get(rank, (None,))[0] != beat["beats"]:
                self._last_beat[rank] = beat["beats"], now
                self._unheard.discard(rank)
            elif self._completed_at - self._last_beat[rank][1] > self.timeout:
                self._unheard.add(rank)
        if idle_s <= self.timeout:
            return None
        live = [b for b in beats if b["phase"] != "ended" and b["rank"] not in self._unheard]
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
        missing = set(range(self.processes)) - {beat["rank"] for beat in beats}
        # Once a step is completed, a rank without heartbeats is one whose do not arrive.
        if missing and self._completed < 0 and idle_s > self.timeout * SLOW:
            return f"no heartbeat from rank {', '.join(map(str, sorted(missing)[:8]))}"
        return None


def _steps(beat: dict[str, Any]) -> tuple[int, int]:
    """Last steps that were started and completed; -1 for none."""
    started, completed = (-1 if beat[k] is None else beat[k] for k in ("started", "completed"))
    return started, completed


def _describe(beats: list[dict[str, Any]]) -> str:
    texts = (
        f"rank {b['rank']} on {b['host']} ({b['phase']}, last completed step "
        f"{'none' if b['completed'] is None else b['completed']})"
        for b in beats
    )
    return listed(texts, 8)


def lost(beats: list[dict[str, Any]]) -> str | None:
    """Processes of this host that are gone and have not ended; None if there are none."""
    gone = [beat for beat in beats
            if beat["host"] == platform.node() and beat["phase"] != "ended"
            and not _is_running(beat["pid"])]  # fmt: skip
    return f"lost {_describe(gone)}" if gone else None


def wait_for_lost_neighbor(place: Place, seconds: float = 2.0) -> str | None:
    """A process of this host that is gone and has not ended; None if there is none.

    Waits a little: a killed process closes its connections, and so fails its peers, a moment before
    it is gone.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):  # one may end in good order meanwhile
            for path in place.folder.iterdir():
                if not _is_running(int(path.read_text())) and path.exists():
                    return f"lost rank {path.name} on {platform.node()}"
        time.sleep(0.05)
    return None


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def end_job(run_folder: Path, beats: list[dict[str, Any]], reason: str, cause: str) -> None:
    """Kills the job's processes on this host and records the failure, if the file system answers
    within some seconds."""
    tell(f"watchdog: {reason}")
    recording = threading.Thread(target=record, args=(run_folder, reason, cause), daemon=True)
    recording.start()
    recording.join(5)
    for beat in beats:
        if beat["host"] == platform.node() and beat["phase"] != "ended":
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat["pid"], signal.SIGKILL)


def record(run_folder: Path, reason: str, cause: str) -> None:
    """Writes the reason to the log of rank 0 and into run.json."""
    with contextlib.suppress(OSError):
        print(f"watchdog: {reason}; ending the job", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError, ValueError):
        content = json.loads((run_folder / "run.json").read_text())
        ended = {"status": "failed", "reason": reason, "cause": cause}
        write_json(run_folder / "run.json", content | ended)


def main() -> int:
    """Polls until it is killed or rank 0 has ended in good order; returns 1 if it ended the job."""
    parser = argparse.ArgumentParser(prog="python -m jaxbench.cluster.watchdog")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("start", help="name of the start of the job")
    parser.add_argument("socket", type=int, help="descriptor on which heartbeats arrive")
    parser.add_argument("processes", type=int)
    parser.add_argument("timeout", type=float)
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(
            number, signal.SIG_IGN
        )  # meant for the job, which is watched until it has stopped
    watch = Watch(args.processes, args.timeout, time.monotonic())
    receiver = Receiver(args.start, socket.socket(fileno=args.socket))
    while True:
        beats = receiver.read(min(1.0, args.timeout / 10))
        if any(beat["rank"] == 0 and beat["phase"] == "ended" for beat in beats):
            return 0  # rank 0 has recorded how the run ended
        if reason := lost(beats):
            end_job(args.run_folder, beats, reason, "lost")
            return 1
        if reason := watch.verdict(beats, time.monotonic()):
            end_job(args.run_folder, beats, reason, "hang")
            return 1


if __name__ == "__main__":
    sys.exit(main())
