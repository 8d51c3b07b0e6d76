"""Times the coordination of a job with hundreds of processes, on one machine and without a model.

    python benchmarks/many_processes.py [--processes 256] [--timeout 20]

Runs three jobs of real processes, with the coordination service and the watchdog of a run. Their
steps sleep and then wait for each other. A signal to one process stops the first job, the second
one loses a process (SIGKILL), and a process of the third one hangs (SIGSTOP). Prints the seconds
until all have joined, agreed, given a sign of life, and ended. Processes are forks of one that has
imported JAX, so no figure includes imports. All share the cores of this machine, so the
figures of a real job would be no larger.
"""

import argparse
import mmap
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import jax
import numpy as np
from jax._src import xla_bridge

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxbench.base.files import write_json
from jaxbench.cluster import job
from jaxbench.cluster.signals import LEAD, Signals
from jaxbench.cluster.watchdog import Watchdog

MOMENTS = ("joined", "devices known", "agreed", "alive", "after a step")
STEP_S = 0.5


def one_process(folder: Path, timeout: float, reached: np.ndarray) -> None:
    """One process of a run, without training; writes the time of each moment to `reached`."""
    job.join(watched=True)
    reached[0] = time.monotonic()
    jax.process_count()
    reached[1] = time.monotonic()
    value = job.broadcast("start", lambda: str(folder))
    assert all(job.all_gather("program", value == str(folder)))
    reached[2] = time.monotonic()

    def hung(reason: str) -> None:
        if jax.process_index() == 0:
            write_json(folder / "run.json", {"reason": reason})

    with Watchdog(timeout, hung) as watchdog:
        signals = Signals(lambda number: os._exit(128 + number))
        reached[3] = time.monotonic()
        watchdog.phase = "training"
        for step in count():
            watchdog.started = step
            if signals.stop(step):
                break
            time.sleep(STEP_S)
            if not job.barrier(f"step {step}", 600):
                time.sleep(600)  # as in a collective that lacks a rank
            watchdog.completed = step
            reached[4] = reached[4] or time.monotonic()
        job.gather("last step", step)
    jax.distributed.shutdown()


class Job:
    """The processes of a job, forked from this one."""

    def __init__(self, processes: int, timeout: float, folder: Path):
        self.folder = folder
        shape = (processes, len(MOMENTS))
        self.reached = np.frombuffer(mmap.mmap(-1, processes * len(MOMENTS) * 8)).reshape(shape)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.began = time.monotonic()
        self.pids = []
        for rank in range(processes):
            if (pid := os.fork()) == 0:
                os.environ |= {
                    "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes),
                    "JAX_PROCESS_ID": str(rank),
                }  # fmt: skip
                try:
                    one_process(folder, timeout, self.reached[rank])
                    os._exit(0)
                finally:
                    os._exit(1)  # never into what surrounds the parent
            self.pids.append(pid)

    def wait_until_it_trains(self) -> None:
        """Waits until every process has completed a step; prints when the last one reached each
        moment."""
        while not (self.reached > 0).all():
            time.sleep(0.1)
        for name, seconds in zip(MOMENTS, self.reached.max(axis=0) - self.began, strict=True):
            print(f"  {seconds:6.1f} s  the last is {name}", flush=True)

    def ended(self, disturbed: int) -> list[int]:
        """Waits for all processes but one, and ends that one, as srun does; returns the exit
        statuses of the others."""
        others = [os.waitpid(pid, 0)[1] for pid in self.pids if pid != disturbed]
        os.kill(disturbed, signal.SIGKILL)
        os.waitpid(disturbed, 0)
        return [os.waitstatus_to_exitcode(status) for status in others]


def disturbed(name: str, processes: int, timeout: float, disturb: Callable[[int], None]) -> None:
    """Runs a job, disturbs one of its processes while it trains, and prints how the job ends."""
    print(f"{name}: {processes} processes, steps of {STEP_S} s, watchdog {timeout:g} s")
    with tempfile.TemporaryDirectory() as temporary:
        running = Job(processes, timeout, Path(temporary))
        running.wait_until_it_trains()
        rank = random.Random(0).randrange(1, processes)
        at = time.monotonic()
        disturb(running.pids[rank])
        statuses = running.ended(running.pids[rank])
        took = time.monotonic() - at
        reason = record.read_text() if (record := Path(temporary) / "run.json").exists() else ""
        by_status = {status: statuses.count(status) for status in sorted(set(statuses))}
        print(f"  {took:6.1f} s  from there to the end of all, by status {by_status}: {reason}")


def main() -> None:
    """Runs the three jobs in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=256)
    parser.add_argument("--timeout", type=float, default=20, help="the watchdog's")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    xla_bridge.discover_pjrt_plugins()  # an installed compiler for GPUs is 120 MB to each process
    print(f"{os.cpu_count()} cores; a stop takes {LEAD} steps: {LEAD * STEP_S} s at least")
    for name, number in (
        ("stopped", signal.SIGTERM), ("killed", signal.SIGKILL), ("frozen", signal.SIGSTOP),
    ):  # fmt: skip
        disturbed(name, args.processes, args.timeout, lambda pid, n=number: os.kill(pid, n))


if __name__ == "__main__":
    main()
