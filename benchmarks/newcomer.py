"""A newcomer's path on a cluster: clones this repository, installs it with `launch/setup.sh`, and
submits jobs from the clone.

    python benchmarks/newcomer.py [--keep FOLDER]

The jobs are those of `tests/launch/test_slurm.py`, on a real Slurm with two virtual nodes (Debian's
slurm-wlm and munge; needs root): left alone, cancelled, requeued, preempted, out of time, or
without a node or process, each with the exit reason that it must have. Prints every job's test and
its seconds. Exit status 1 if one is wrong. Takes ten minutes and the network, for the packages.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import slurm

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Clones, installs and tests; returns the exit status of the tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="an empty folder for the clone and all logs")
    args = parser.parse_args()
    if reason := slurm.missing():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).absolute()
        clone, began = folder / "jaxbench", time.monotonic()
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        subprocess.run(
            ["launch/setup.sh"], cwd=clone, env=os.environ | {"EXTRAS": "dev"}, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        print(f"cloned and installed in {time.monotonic() - began:.0f} s", flush=True)
        options = "--all", "-v", "-n0", "--durations=0", f"--basetemp={folder / 'jobs'}"
        return subprocess.run(
            [".venv/bin/python", "-m", "pytest", *options, "tests/launch/test_slurm.py"], cwd=clone
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
