"""Heartbeat and watchdog around a run."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxbench.cluster import heartbeat, job
from jaxbench.cluster.heartbeat import Heartbeat


@contextmanager
def watched(run_folder: Path, timeout: float | None) -> Iterator[Heartbeat]:
    """Yields this process's heartbeat while rank 0 runs a watchdog, which ends the job after
    `timeout` seconds without progress. Without a timeout there is neither file nor watchdog."""
    if timeout is None:
        yield Heartbeat()
        return
    # A folder for each start: heartbeats of a killed one are still there when it is resumed.
    started = job.broadcast("heartbeats", lambda: f"{time.time():.3f}")
    folder = run_folder / "heartbeats" / started
    beat = Heartbeat(folder / f"{jax.process_index()}.json", heartbeat.interval(timeout))
    process = None
    if jax.process_index() == 0:
        arguments = map(str, (run_folder, folder, jax.process_count(), timeout))
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxbench.cluster.watchdog", *arguments],
            stdin=subprocess.DEVNULL,
        )
    yield beat
    beat.end()
    if process is not None:
        process.kill()
        process.wait()
