"""Loses random processes of two-node Slurm jobs at random moments; nothing else may be lost.

    python benchmarks/lose_and_resume.py [--losses 100] [--seed 0] [--network]

On a real Slurm with two virtual nodes (Debian's slurm-wlm and munge; needs root), jobs of four
processes train a tiny model. In each start one process is killed (SIGKILL: while it starts,
compiles, loads, trains or saves) or, one time in ten, frozen (SIGSTOP, while it trains). A job that
saves must name the lost rank, come back, and end with the losses of an undisturbed job bit for bit;
one job in four does not save and must end with that one line. With `--network` the nodes are in
separate network namespaces, and three in four losses of jobs that train and save are network
losses: connections of the processes are reset, or their packets are dropped, or Slurm's too. Prints
a line for each loss; exit status 1 if a job behaved otherwise. A loss takes about a minute on two
cores.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import network
import slurm

STEPS, EVERY, LOSSES, RESTARTS, WATCHDOG = 120, 10, 3, 6, 10
ALONE = r"rank \d on n\d: it lost the network or another process: .+"
VERDICT = {
    "SIGKILL": r"failed: lost rank {} on \S+ \((killed by SIGKILL|\w+, last completed .*)\)(, .*)?",
    "SIGSTOP": rf"failed: no sign of life for {WATCHDOG / 2:g} s from rank {{}} on .*",
    "reset": rf"failed: {ALONE}",
    "cut": rf"failed: (no sign of life for {WATCHDOG / 2:g} s from rank .*|{ALONE})",
    "cut off": r"interrupted: lost a node",
}
NETWORK = ("reset", "cut", "cut off")


class Loser:
    """Submits jobs, and takes processes from them."""

    def __init__(self, cluster: slurm.Cluster, stage: Path, draw: random.Random):
        self.cluster, self.stage, self.draw = cluster, stage, draw

    def submit(self, saves: bool) -> tuple[str, Path]:
        """(number, main log) of a rehearsal."""
        options = [f"--checkpoint-every={EVERY}", f"--restarts={RESTARTS}"] if saves else []
        options += [f"--watchdog={WATCHDOG}", "--", f"--steps={STEPS}"]
        options += ["--checkpoint"] if saves else []
        number, folder = slurm.submit(self.cluster, self.stage, *options)
        return number, folder / f"sbatch_jaxbench_llama31_8b_bf16_4_{number}.out"

    def wait(self, reached: Callable[[], bool], seconds: float = 240) -> None:
        """Polls until `reached()`; fails after `seconds`."""
        end = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < end, "it takes too long"
            time.sleep(0.3)

    def trains(self, log: Path, start: int) -> bool:
        """True if a start of a job has trained some steps."""
        return len(re.findall(r"(?m)^step ", self.log_of(log, start))) > 5

    def ended(self, number: str) -> bool:
        """True if Slurm has ended a job."""
        return slurm.ended(self.cluster.job(number))

    def losses(self, log: Path) -> list[float]:
        """Losses of all steps recorded so far."""
        path = log.parent / "steps.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]

    def log_of(self, log: Path, start: int) -> str:
        """The part of the main log that belongs to a start."""
        text = log.read_text() if log.exists() else ""
        text = text.partition(f", start {start}, on ")[2]
        return text.partition(f", start {start + 1}, on ")[0]

    def verdict(self, log: Path, start: int) -> str | None:
        """The exit reason of a start; None before its end."""
        reasons = re.findall(
            r"(?m)^((?:interrupted|failed): (?!.*, row ).*)$", self.log_of(log, start)
        )
        return reasons[-1] if reasons else None

    def kind(self, saves: bool) -> str:
        """A random kind of loss: a signal or one of `NETWORK`."""
        if self.cluster.hosts and saves and self.draw.random() < 0.75:
            return self.draw.choice(NETWORK)
        return "SIGSTOP" if self.draw.random() < 0.1 else "SIGKILL"

    def lose(self, number: str, log: Path, start: int, saves: bool) -> tuple[str, int, str] | None:
        """(kind, rank, last phase) of a loss in a start of a job; None if it ended by itself."""

        def wait(reached: Callable[[], bool]) -> None:
            self.wait(
                lambda: reached() or self.verdict(log, start) is not None or self.ended(number)
            )

        kind = self.kind(saves)
        wait(lambda: self.log_of(log, start) != "" and len(slurm.processes(number)) == 4)
        if kind == "SIGKILL" and self.draw.random() < 0.4:
            time.sleep(self.draw.uniform(0, 8))
        else:
            wait(lambda: self.trains(log, start))
            last = self.draw.randrange(min(len(self.losses(log)), STEPS - 1), STEPS)
            wait(lambda: len(self.losses(log)) > min(last, STEPS - 5))
            time.sleep(self.draw.uniform(0, 0.2))
        rank, pids = self.draw.randrange(4), slurm.processes(number)
        if self.verdict(log, start) is not None or rank not in pids:
            return None
        if kind in NETWORK:
            self.disturb(kind)
        else:
            os.kill(pids[rank], signal.Signals[kind])
        phases = re.findall(
            r"(?m)^\S+ (compiling|loading|training|saving): ", self.log_of(log, start)
        )
        return kind, rank, phases[-1] if phases else "starting"

    def disturb(self, kind: str) -> None:
        """Resets or cuts the network of the processes, or Slurm's too."""
        hosts = self.cluster.hosts
        if kind == "reset":
            hosts.reset("data")
            return
        for link in ("data", "control") if kind == "cut off" else ("data",):
            hosts.cut(link)

    def mend(self) -> None:
        """Restores the network."""
        for link in ("data", "control") if self.cluster.hosts else ():
            self.cluster.hosts.mend(link)


def report(fine: bool, text: str) -> None:
    """Prints a line of the table."""
    print(f"{'ok' if fine else 'WRONG':6}{text}", flush=True)


def one_job(loser: Loser, expected: list[float], count: int, saves: bool) -> tuple[int, bool]:
    """(losses, no wrong line or loss) of a job that loses up to `count` processes."""
    number, log = loser.submit(saves)
    lost, start, fine = 0, 0, True
    while lost < count and not loser.ended(number):
        start += 1
        loss = loser.lose(number, log, start, saves)
        began = time.monotonic()
        loser.wait(lambda now=start: loser.verdict(log, now) is not None or loser.ended(number))
        reason = loser.verdict(log, start) or ""
        loser.mend()
        if loss is None:
            print(f"      start {start} of job {number} ended by itself: {reason}", flush=True)
            continue
        lost += 1
        kind, rank, phase = loss
        again = "" if saves else "; it does not save, so it ends"
        right = re.fullmatch(VERDICT[kind].format(rank) + re.escape(again), reason) is not None
        fine &= right
        took = f"after {time.monotonic() - began:.0f} s"
        what = f"network {kind}" if kind in NETWORK else f"{kind} of rank {rank}"
        report(right, f"{what}, last phase {phase}, {took}: {reason}")
    loser.wait(lambda: loser.ended(number))
    if saves:
        same = loser.losses(log) == expected
        fine &= same
        resumed = json.loads((log.parent / "run.json").read_text())["resumed_at"]
        report(
            same, f"job {number} ended, resumed at {resumed}, with the losses of the undisturbed"
        )
    return lost, fine


def main() -> int:
    """Prints a line for each loss and job; returns 1 if a job behaved wrongly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--losses", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--network", action="store_true")
    args = parser.parse_args()
    if reason := slurm.missing() or (args.network and network.missing()):
        sys.exit(reason)
    draw = random.Random(args.seed)
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory())
        hosts = stack.enter_context(network.Hosts(Path(temporary))) if args.network else None
        cluster = stack.enter_context(slurm.Cluster(Path(temporary, "s"), hosts))
        loser, began = Loser(cluster, Path(temporary, "stage"), draw), time.monotonic()
        number, log = loser.submit(saves=True)
        loser.wait(lambda: loser.ended(number))
        expected = loser.losses(log)
        assert len(expected) == STEPS, log.read_text()
        print(f"undisturbed: {STEPS} steps, {time.monotonic() - began:.0f} s", flush=True)
        lost, jobs, wrong = 0, 0, 0
        while lost < args.losses:
            saves = draw.random() < 0.75
            count, fine = one_job(loser, expected, LOSSES if saves else 1, saves)
            lost, jobs, wrong = lost + count, jobs + 1, wrong + (not fine)
        print(
            f"{lost} losses in {jobs} jobs, {wrong} of them wrong, {time.monotonic() - began:.0f} s"
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
