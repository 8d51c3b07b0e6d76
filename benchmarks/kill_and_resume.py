"""Kills one training run at random moments, and checks that nothing is lost.

    python benchmarks/kill_and_resume.py [--kills 30] [--seed 0]

A tiny model trains on the CPU with a checkpoint every few steps. Each start is killed with SIGKILL
at a random moment, while it starts, trains or saves; the next one resumes. In the end the losses of
all steps must equal those of an undisturbed run bit for bit.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS, EVERY = 2000, 5
TRAIN = [
    sys.executable, "-m", "jaxbench.train", "--config", "configs/llama31_8b_bf16.yaml",
    "--steps", str(STEPS), "--cpu-devices", "2", "--set", "parallelism.fsdp=2",
    "--set", "model.layers=1", "--set", "model.embed=64", "--set", "model.ffn=64",
    "--set", "model.vocabulary=128", "--set", "batch.sequence_length=32",
]  # fmt: skip


def start(*arguments: str) -> subprocess.Popen:
    """A training process."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen([*TRAIN, *arguments], cwd=ROOT, text=True, **quiet)


def finish(process: subprocess.Popen) -> None:
    """Waits for a process that must succeed."""
    _, err = process.communicate()
    if process.returncode:
        sys.exit(f"a run failed with status {process.returncode}: {err}")


def losses(folder: Path) -> list[float]:
    """The losses of all steps, in the order of the record."""
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]


def recorded(folder: Path) -> int:
    """The number of steps in the record so far."""
    path = folder / "steps.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def main() -> None:
    """Runs everything in a temporary folder, and prints one line per kill."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        whole, killed = Path(temporary, "whole"), Path(temporary, "killed")
        began = time.monotonic()
        finish(start("--output", str(whole)))
        print(f"undisturbed: {STEPS} steps in {time.monotonic() - began:.1f} s", flush=True)
        cache = ("--compilation-cache", f"{temporary}/cache")
        resuming = (*cache, "--output", str(killed), "--resume", "--checkpoint-every", str(EVERY))
        during = 0
        for kill in range(args.kills):
            process, before = start(*resuming), recorded(killed)
            if draw.random() < 0.2:  # while it starts
                time.sleep(draw.uniform(0, 5))
            else:
                while recorded(killed) <= before and process.poll() is None:
                    before = min(before, recorded(killed))  # a resumed run drops what it repeats
                    time.sleep(0.001)
                time.sleep(draw.uniform(0, 2))
            if process.poll() is not None:
                sys.exit(f"the run ended before kill {kill + 1}; it needs more steps")
            process.send_signal(signal.SIGKILL)
            process.communicate()
            saving = [p.name for p in killed.glob("checkpoints/*tmp*")]
            during += bool(saving)
            print(f"kill {kill + 1}: {recorded(killed)} steps recorded, {saving or 'not'} saving",
                  flush=True)  # fmt: skip
        finish(start(*resuming))
        same = losses(killed) == losses(whole)
        record = json.loads((killed / "run.json").read_text())
        print(f"{args.kills} kills, {during} during a save; resumed at {record['resumed_at']}")
        print(f"final loss {losses(killed)[-1]!r}, undisturbed {losses(whole)[-1]!r}")
        sys.exit(0 if same else "the losses differ")


if __name__ == "__main__":
    main()
