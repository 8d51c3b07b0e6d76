"""A process's signs of life while it runs, and the watchdog beside the first one of a job."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxbench.cluster import heartbeat, job, watchdog
from jaxbench.cluster.heartbeat import Heartbeat


@contextmanager
def watched(run_folder: Path, timeout: float | None) -> Iterator[Heartbeat]:
    """This process's heartbeat, and in the first process the watchdog, which ends the job after
    `timeout` seconds without progress; without one, a heartbeat that nobody reads."""
    if timeout is None:
        yield Heartbeat()
        return
    # A folder for each attempt: the heartbeats of a killed one are still there when it is resumed.
    attempt = job.from_first("attempt", lambda: f"{time.time():.3f}")
    folder = run_folder / "heartbeats" / attempt
    beat = Heartbeat(folder / f"{jax.process_index()}.json", heartbeat.interval(timeout))
    dog = None
    if jax.process_index() == 0:
        dog = watchdog.start(run_folder, folder, jax.process_count(), timeout)
    yield beat
    beat.end()
    if dog is not None:
        dog.kill()
        dog.wait()
