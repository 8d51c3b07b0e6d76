"""What a newcomer with a cluster does, from `git clone` on, and the verdict each job must have.

    python benchmarks/newcomer.py [--keep FOLDER]

Clones this repository, installs it with `launch/setup.sh`, starts a real Slurm with two virtual
nodes (Debian's slurm-wlm and munge; needs root), and submits rehearsals of one job that are left
alone, cancelled, requeued, preempted, out of time, robbed of a node and of a process. Prints a
table of what the main logs said last, and how long each took. Exit status 1 if one said anything
else. Takes five minutes and the network, for the packages.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import slurm

ROOT = Path(__file__).parents[1]
TINY = (
    "model.layers=1", "model.embed=64", "model.ffn=64", "model.vocabulary=128",
    "batch.sequence_length=32", "parallelism.fsdp=4",
)  # fmt: skip
FOREVER = 100_000


class Newcomer:
    """A clone of the repository and a cluster: submits jobs, reads their logs."""

    def __init__(self, clone: Path, cluster: slurm.Cluster, stage: Path):
        self.clone, self.cluster = clone, cluster
        self.environment = cluster.environment | {
            "STAGE_PATH": str(stage), "JOB_TOTAL_GPUS": "4", "GPUS_PER_NODE": "2",
        }  # fmt: skip

    def submit(self, steps: int, *options: str, saves: bool = True) -> tuple[str, Path]:
        """(number, main log) of a rehearsal, as `launch/submit.sh` prints them."""
        saving = ["--checkpoint"] if saves else []
        settings = [part for text in TINY for part in ("--set", text)]
        command = ["launch/submit.sh", "llama31_8b_bf16", "--cpu", *settings, *options]
        done = subprocess.run(
            [*command, "--", *saving, f"--steps={steps}"], cwd=self.clone,
            env=self.environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        found = re.fullmatch(r"job (\d+): .*\nwatch it: tail -F '?(.*?)'?\n", done.stdout)
        assert found, done.stdout
        return found[1], Path(found[2])

    def wait(self, reached: Callable[[], bool], seconds: float = 240) -> None:
        """Returns when something is reached."""
        end = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < end, "it takes too long"
            time.sleep(0.3)

    def trains(self, log: Path, start: int = 1) -> bool:
        """Whether a start of a job has trained some steps."""
        said = log.read_text() if log.exists() else ""
        return len(re.findall(r"(?m)^step ", said.partition(f", start {start}, on ")[2])) > 5

    def ended(self, number: str) -> bool:
        """Whether Slurm runs a job no more."""
        return self.cluster.job(number)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED")

    def disturbed(self, disturb: Callable[[str, Path], object], again: bool, *options: str) -> str:
        """What the log of a job says of a disturbance while it trains; one that comes back is
        waited for, and cancelled."""
        number, log = self.submit(FOREVER, *options)
        self.wait(lambda: self.trains(log))
        disturb(number, log)
        if again:
            self.wait(lambda: self.trains(log, start=2))
            self.cluster.run("scancel", number)
        self.wait(lambda: self.ended(number))
        verdicts = re.findall(r"(?m)^((?:interrupted|failed|completed): .*)$", log.read_text())
        return next(v for v in verdicts if ", row " not in v)


def kill_a_rank(number: str, log: Path) -> None:
    """SIGKILL to the process of rank 2."""
    said = (max((log.parent / "heartbeats").iterdir()) / "2.json").read_text()
    os.kill(int(re.search(r'"pid": (\d+)', said)[1]), signal.SIGKILL)


def scenarios(user: Newcomer) -> dict[str, tuple[str, Callable[[], str]]]:
    """What happens to a job, by name: the verdict it must have, and how it is brought about."""
    run = user.cluster.run

    def alone() -> str:
        number, log = user.submit(20)
        user.wait(lambda: user.ended(number))
        return next(line for line in log.read_text().splitlines() if line.startswith("completed"))

    def preempt(number: str, log: Path) -> None:
        run("sbatch", "-p", "urgent", "-N2", "-o", "/dev/null", "--wrap=sleep 3")

    def node_down(number: str, log: Path) -> None:
        run("scontrol", "update", "node=n1", "state=down", "reason=newcomer")
        time.sleep(3)
        run("scontrol", "update", "node=n1", "state=resume")

    def disturbed(disturb: Callable, again: bool, *options: str) -> Callable[[], str]:
        return lambda: user.disturbed(disturb, again, *options)

    lost = r"failed: lost rank 2 on n1 \(killed by SIGKILL\), after step \d+"
    return {
        "left alone": (r"completed: .*", alone),
        "scancel": ("interrupted: cancelled", disturbed(lambda n, _: run("scancel", n), False)),
        "requeue": (
            "interrupted: requeued", disturbed(lambda n, _: run("scontrol", "requeue", n), True)
        ),
        "preemption": ("interrupted: preempted", disturbed(preempt, True)),
        "node down": ("interrupted: lost a node", disturbed(node_down, True)),
        "kill -9": (lost, disturbed(kill_a_rank, True)),
        "time limit": (
            "interrupted: time limit", disturbed(lambda *_: None, False, "--time", "00:02:10")
        ),
    }  # fmt: skip


def main() -> int:
    """Prints a line for each scenario; returns 1 if a verdict is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="an empty folder for the clone and all logs")
    args = parser.parse_args()
    if reason := slurm.missing():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        clone, wrong = folder / "jaxbench", 0
        began = time.monotonic()
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        subprocess.run(
            ["launch/setup.sh"], cwd=clone, env=os.environ | {"EXTRAS": "dev"}, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        print(f"cloned and installed in {time.monotonic() - began:.0f} s", flush=True)
        with slurm.Cluster(folder / "slurm") as cluster:
            user = Newcomer(clone, cluster, folder / "stage")
            for name, (expected, happens) in scenarios(user).items():
                began = time.monotonic()
                said = happens()
                fine = re.fullmatch(expected, said) is not None
                wrong += not fine
                took = time.monotonic() - began
                print(f"{'ok' if fine else 'WRONG':6}{took:5.0f} s  {name:12} {said}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
