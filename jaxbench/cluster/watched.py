"""Heartbeat and watchdog around a run."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxbench.cluster import job
from jaxbench.cluster.heartbeat import Heartbeat, Place, Receiver, interval
from jaxbench.cluster.messages import launcher
from jaxbench.jax_internals import coordinator


@contextmanager
def watched(run_folder: Path, timeout: float | None) -> Iterator[Heartbeat]:
    """Yields this process's heartbeat while rank 0 runs a watchdog, which ends the job after
    `timeout` seconds without progress. Without a timeout there is neither."""
    if timeout is None:
        yield Heartbeat()
        return
    rank, receiver = jax.process_index(), None
    if rank == 0:
        receiver = Receiver(f"{time.time():.3f}")
        place = coordinator(), receiver.socket.getsockname()[1], receiver.start
    place = Place(*job.broadcast("watchdog", lambda: place))
    process = None
    if receiver is not None:
        descriptor = receiver.socket.fileno()
        arguments = (run_folder, place.start, descriptor, jax.process_count(), timeout)
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxbench.cluster.watchdog", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            pass_fds=(descriptor, *launcher()),
        )
        receiver.socket.close()
    beat = Heartbeat(rank, place, interval(timeout))
    yield beat
    beat.end()
    if process is not None:
        process.kill()
        process.wait()
