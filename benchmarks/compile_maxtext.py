"""Measures how long a row takes to compile for absent GPUs, next to MaxText's step of its model.

MaxText is installed as `host_time_maxtext.py` says:

    python benchmarks/compile_maxtext.py MAXTEXT/bin/python [--rounds 3] [llama2_70b_bf16:64 ..]

Rows are those of `like_for_like.py`. Each side traces, lowers and compiles its step in a process of
its own, in turn; a round's ratio is ours over MaxText's. The sides have the mesh of their row, the
same compiler, and their own compiler options. Seconds are of this machine's cores.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import like_for_like

from jaxbench import mesh
from jaxbench.base import hardware
from jaxbench.plan.absent import compile_only_devices
from jaxbench.recipe import recipes
from jaxbench.train.program import compile_program

ROWS = ("llama2_70b_bf16:64", "llama2_70b_fp8:64")

Seconds = tuple[float, float]
"""To trace and lower, and to compile."""


def compile_ours(row: str) -> None:
    """Compiles a row of H100s and prints its `Seconds`."""
    name, _, gpus = row.partition(":")
    run = recipes.resolve(recipes.load(name), int(gpus))
    devices = compile_only_devices(hardware.H100, run.gpus)
    with jax.set_mesh(mesh.make_mesh(run.mesh_shape, devices)):
        print(*compile_program(run)[1:])


def measured(printed: str) -> Seconds:
    """The `Seconds` that a process printed last."""
    lower_s, compile_s = map(float, printed.splitlines()[-1].split())
    return lower_s, compile_s


def line(row: str, rounds: list[tuple[Seconds, Seconds]]) -> str:
    """The line of a row: medians of both sides, and ratios of the sums."""
    sides = list(zip(*rounds, strict=True))
    medians = [
        ", ".join(f"{statistics.median(times[part] for times in side):.1f}" for side in sides)
        for part in (0, 1)
    ]
    ratios = [sum(a) / sum(b) for a, b in rounds]
    return (
        f"| {row} | {' | '.join(medians)} | {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) |"
    )


def main() -> None:
    """Measures rows one after another and prints the table last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="of the environment with MaxText")
    parser.add_argument("rows", nargs="*", default=ROWS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    if args.ours:
        compile_ours(args.rows[0])
        return
    lines = []
    peers = {peer.name: peer for peer in like_for_like.rows()}
    for row in args.rows:
        rounds = []
        for _ in range(args.rounds):
            command = [sys.executable, __file__, args.python, row, "--ours"]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            ours = measured(done.stdout)
            with tempfile.TemporaryDirectory() as unused:
                peer = like_for_like.in_maxtext(args.python, peers[row], Path(unused), "--once")
            theirs = measured(peer.stdout)
            rounds.append((ours, theirs))
            print(row, *ours, *theirs, flush=True)
        lines.append(line(row, rounds))
    print(f"\nOf this machine's {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}.\n")
    print("| row | s to lower: ours, MaxText's | s to compile | ours over MaxText's |")
    print("|---|---|---|---|", *lines, sep="\n")


if __name__ == "__main__":
    main()
