"""Loses random processes of two-node Slurm jobs at random moments; nothing else may be lost.

    python benchmarks/lose_and_resume.py [--losses 100] [--seed 0] [--network]

On a real Slurm with two virtual nodes (Debian's slurm-wlm and munge; needs root), jobs of four
processes train a tiny model. A process of each start is killed (SIGKILL: while it starts, compiles,
loads, trains or saves) or, one time in ten, frozen (SIGSTOP, while it trains). A job that saves has
to name the lost rank, come back, and end with the losses of an undisturbed job bit for bit; one in
four of the jobs does not save, and has to end with that one line. With `--network` the nodes have
networks of their own, and three in four losses of jobs that train and save are of those: all
connections of the processes are reset, or nothing that they send arrives, or nothing that Slurm
sends either. Prints a line for each loss; exit status 1 if a job did anything else. A loss takes
about a minute on two cores.
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
from newcomer import Newcomer

ROOT = Path(__file__).parents[1]
STEPS, EVERY, LOSSES, RESTARTS, WATCHDOG = 120, 10, 3, 6, 10
ALONE = r"rank \d on n\d: it lost the network or another process: .+"
VERDICT = {
    "SIGKILL": r"failed: lost rank {} on \S+ \((killed by SIGKILL|\w+, last completed .*)\)(, .*)?",
    "SIGSTOP": rf"failed: no sign of life for {WATCHDOG} s from rank {{}} on .*",
    "reset": rf"failed: {ALONE}",
    # While it saves, the watchdog waits for longer than JAX.
    "cut": rf"failed: (no progress within the time limit of {WATCHDOG} s: rank .*|{ALONE})",
    "cut off": r"interrupted: lost a node",
}
NETWORK = ("reset", "cut", "cut off")


def processes(number: str) -> dict[int, int]:
    """Process ids of a job's ranks, those that run Python now."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"jaxbench.train" not in (folder / "cmdline").read_bytes().split(b"\0"):
                continue
            words = (folder / "environ").read_bytes().decode().split("\0")
        except OSError:  # gone meanwhile
            continue
        named = dict(word.partition("=")[::2] for word in words)
        if named.get("SLURM_JOB_ID") == number and (folder / "exe").resolve().stem[:6] == "python":
            found[int(named["SLURM_PROCID"])] = int(folder.name)
    return found


class Loser:
    """Submits jobs, and takes processes from them."""

    def __init__(self, user: Newcomer, draw: random.Random):
        self.user, self.draw = user, draw

    def submit(self, saves: bool) -> tuple[str, Path]:
        """(number, main log) of a job."""
        saving = (f"--checkpoint-every={EVERY}", f"--restarts={RESTARTS}") if saves else ()
        return self.user.submit(STEPS, *saving, f"--watchdog={WATCHDOG}", saves=saves)

    def losses(self, log: Path) -> list[float]:
        """Of all steps recorded so far."""
        path = log.parent / "steps.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]

    def said(self, log: Path, start: int) -> str:
        """The main log of a start so far."""
        said = log.read_text() if log.exists() else ""
        said = said.partition(f", start {start}, on ")[2]
        return said.partition(f", start {start + 1}, on ")[0]

    def verdict(self, log: Path, start: int) -> str | None:
        """What the main log says last of a start that has ended; None before."""
        found = re.findall(r"(?m)^((?:interrupted|failed): (?!.*, row ).*)$", self.said(log, start))
        return found[-1] if found else None

    def how(self, saves: bool) -> str:
        """What is to be lost, and by what."""
        if self.user.cluster.hosts and saves and self.draw.random() < 0.75:
            return self.draw.choice(NETWORK)
        return "SIGSTOP" if self.draw.random() < 0.1 else "SIGKILL"

    def lose(self, number: str, log: Path, start: int, saves: bool) -> tuple[str, int, str] | None:
        """(how, rank, last phase) of a loss in a start of a job; None where it ended by itself."""

        def wait(reached: Callable[[], bool]) -> None:
            self.user.wait(lambda: reached() or self.verdict(log, start) is not None)

        how = self.how(saves)
        wait(lambda: self.said(log, start) != "" and len(processes(number)) == 4)
        if how == "SIGKILL" and self.draw.random() < 0.4:
            time.sleep(self.draw.uniform(0, 8))
        else:
            wait(lambda: self.user.trains(log, start))
            last = self.draw.randrange(len(self.losses(log)), STEPS)
            wait(lambda: len(self.losses(log)) > min(last, STEPS - 5))
            time.sleep(self.draw.uniform(0, 0.2))
        rank, found = self.draw.randrange(4), processes(number)
        if self.verdict(log, start) is not None or rank not in found:
            return None
        if how in NETWORK:
            self.disturb(how)
        else:
            os.kill(found[rank], signal.Signals[how])
        phases = re.findall(
            r"(?m)^\S+ (compiling|loading|training|saving): ", self.said(log, start)
        )
        return how, rank, phases[-1] if phases else "starting"

    def disturb(self, how: str) -> None:
        """Takes the network of the processes, or of Slurm too."""
        hosts = self.user.cluster.hosts
        if how == "reset":
            hosts.reset("data")
            return
        for link in ("data", "control") if how == "cut off" else ("data",):
            hosts.cut(link)

    def mend(self) -> None:
        """The network is as before."""
        for link in ("data", "control") if self.user.cluster.hosts else ():
            self.user.cluster.hosts.mend(link)


def tell(fine: bool, what: str) -> None:
    """A line of the table."""
    print(f"{'ok' if fine else 'WRONG':6}{what}", flush=True)


def one_job(loser: Loser, expected: list[float], count: int, saves: bool) -> tuple[int, bool]:
    """(losses, whether all was well) of a job that loses up to `count` processes."""
    number, log = loser.submit(saves)
    lost, start, fine = 0, 0, True
    while lost < count and not loser.user.ended(number):
        start += 1
        loss = loser.lose(number, log, start, saves)
        began = time.monotonic()
        loser.user.wait(
            lambda now=start: loser.verdict(log, now) is not None or loser.user.ended(number)
        )
        said = loser.verdict(log, start) or ""
        loser.mend()
        if loss is None:
            print(f"      start {start} of job {number} ended by itself: {said}", flush=True)
            continue
        lost += 1
        how, rank, when = loss
        again = "" if saves else "; it does not save, so it ends"
        right = re.fullmatch(VERDICT[how].format(rank) + re.escape(again), said) is not None
        fine &= right
        took = f"after {time.monotonic() - began:.0f} s"
        what = f"network {how}" if how in NETWORK else f"{how} of rank {rank}"
        tell(right, f"{what}, last phase {when}, {took}: {said}")
    loser.user.wait(lambda: loser.user.ended(number))
    if saves:
        same = loser.losses(log) == expected
        fine &= same
        resumed = json.loads((log.parent / "run.json").read_text())["resumed_at"]
        tell(same, f"job {number} ended, resumed at {resumed}, with the losses of the undisturbed")
    return lost, fine


def main() -> int:
    """Prints a line for each loss and job; returns 1 if a job lost more than its process."""
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
        user = Newcomer(ROOT, cluster, Path(temporary, "stage"))
        user.environment["JAXBENCH_VENV"] = sys.prefix
        loser, began = Loser(user, draw), time.monotonic()
        number, log = loser.submit(saves=True)
        user.wait(lambda: user.ended(number))
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
