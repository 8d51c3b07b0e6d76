"""Load of the watchdog of a job of 2048 processes on a shared file system.

    python benchmarks/watchdog_load.py [--processes 2048] [--seconds 30]

Simulates the writers: every heartbeat file is replaced once per interval. Prints the watchdog's
read() calls per second, counted by the kernel, its CPU time, and the delay after which it reports a
silent process, beside its timeout.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxbench.cluster.heartbeat import KEYS, interval
from jaxbench.files import write_json

ROOT = Path(__file__).parents[1]


def write(folder: Path, processes: int, every: float, silent: set[int]) -> None:
    """Replaces every process's heartbeat once in `every` seconds, forever, except those of `silent`
    ranks, without which no step completes."""
    beats = step = 0
    while True:
        beats += 1
        step = step if silent else beats
        for rank in range(processes):
            if rank not in silent:
                values = rank, "far", 1, beats, "training", step, step
                write_json(folder / f"{rank}.json", dict(zip(KEYS, values, strict=True)))
            time.sleep(every / processes)


def reads(process: subprocess.Popen) -> int:
    """Calls of read() by a process so far."""
    text = Path(f"/proc/{process.pid}/io").read_text()
    return int(text.partition("syscr: ")[2].split()[0])


def cpu_seconds(process: subprocess.Popen) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measures for some seconds, then silences a process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--timeout", type=float, default=60, help="the watchdog's")
    args = parser.parse_args()
    silent: set[int] = set()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        every = interval(args.timeout)
        threading.Thread(
            target=write, args=(folder, args.processes, every, silent), daemon=True
        ).start()
        time.sleep(1.5 * every)
        watchdog = subprocess.Popen(
            [sys.executable, "-m", "jaxbench.cluster.watchdog", folder, folder,
             str(args.processes), str(args.timeout)],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        time.sleep(2 * every)
        before, used = reads(watchdog), cpu_seconds(watchdog)
        time.sleep(args.seconds)
        rate = (reads(watchdog) - before) / args.seconds
        used = (cpu_seconds(watchdog) - used) / args.seconds
        print(f"{args.processes} processes: {rate:.0f} reads per second, {used:.1%} of a core")
        silent.add(args.processes - 1)
        began = time.monotonic()
        _, message = watchdog.communicate(timeout=3 * args.timeout)
        delay = time.monotonic() - began
        print(f"silent rank named after {delay:.1f} s of {args.timeout:g}: {message}")
        os._exit(0)  # the writers never end


if __name__ == "__main__":
    main()
