"""Checks and measures everything on one H100 or H200 in one call, and prints a table last.

    python benchmarks/gpu.py [--output FOLDER] [--budget SECONDS] [--only CHECK,CHECK]
                            [--rows RECIPE "RECIPE CHANGE"]
    python benchmarks/gpu.py --compile-only     # no GPU: compile all of it for an absent H100
    python benchmarks/gpu.py --rehearse         # no GPU: the checks themselves, tiny, on the CPU

Checks that are not timed share the GPU and run first, together. The timed ones then run alone, the
most valuable first. Each check is a separate process with a time limit, so that a call that is cut
short has reported most, and a crash or hang affects one check only. `--budget` seconds after the
start (540 on a GPU) no check is started, and a running one is stopped. Findings are appended to
`results.jsonl` in the output folder as they come, after those of earlier calls; output of programs
goes to `log.txt`, and the table of all to `table.md`. Rows leave their programs and the time of
each of their kernels. Exit status 1 if anything is wrong.

    check       seconds on an H100 with 16 cores; of those in brackets none was measured
    operators   60      every operator next to the CPU's, at real shapes
    trains      (100)   tiny rows of each family next to the CPU's losses. 11 of 16 took 85 s, next
                        to `survives`. More where the CPU's runs were not made beforehand, which
                        `--compile-only --only trains` does
    survives    (120)   kill and resume, profiler, PGLE, compiler options
    ceilings    21      matmuls and copies
    rows        18 each row 1 of the recipes: the step and each kind of kernel next to the forecast
    tiles       (90)    grouped matmuls, the sizes of their kernels, and kernels of others
    mixers      40      Mamba-2 by XLA and by Pallas's kernels, and the sizes of these
    commands    15, 30 each  `jaxbench check`; row 1 by the training command: offloaded, with PGLE
                        (50), repeatable
    choices     (480)   A/B of settings
    kernels     (80)    kernels next to the forecast's tables

Run from the source tree; nothing is installed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
from one_gpu import choices, kernels, mixers, operators, rows, speed, survives, tiles, trains
from one_gpu.context import MEASURED, NOT_RUN, OK, ROOT, SHARE, WRONG, Context, Finding

from jaxbench.base import hardware
from jaxbench.base.versions import versions
from jaxbench.recipe import recipes

BUDGET = {"gpu": 540.0, "cpu": 1200.0, "absent": 3600.0}
"""Seconds of a call, by mode (`Context.mode`)."""


@dataclass(frozen=True)
class Check:
    """A check on a GPU and its limit in seconds; its counterpart that only compiles for an absent
    GPU; whether a CPU can rehearse it; whether it shares the GPU with others, because it times
    nothing."""

    run: Callable[[Context], Iterator[Finding]]
    limit: int
    compile: Callable[[Context], Iterator[Finding]] | None = None
    rehearsed: bool = False
    shared: bool = False


CHECKS = {
    "operators": Check(operators.check, 120, operators.compiles, rehearsed=True),
    "trains": Check(trains.small, 110, trains.references, rehearsed=True, shared=True),
    "survives": Check(survives.check, 150, rehearsed=True, shared=True),
    "ceilings": Check(speed.ceilings, 60),
    "rows": Check(rows.check, 600, rows.compiles),
    "tiles": Check(tiles.check, 150, tiles.compiles),
    "mixers": Check(mixers.check, 150, mixers.compiles, rehearsed=True),
    "commands": Check(trains.commands, 300),
    "choices": Check(choices.check, 480, choices.compiles),
    "kernels": Check(kernels.check, 300, kernels.compiles, rehearsed=True),
}
"""Checks in the order in which they run."""

SHOWN = {OK: 0, MEASURED: 0, NOT_RUN: 0, WRONG: 1}
"""Exit status by verdict."""


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, default=Path("results/gpu"), help="default results/gpu")
    add("--budget", type=float, help=f"seconds in all, default {BUDGET['gpu']:.0f} on a GPU")
    add("--only", default=",".join(CHECKS), help="some checks: " + ", ".join(CHECKS))
    add("--rows", nargs="*", default=[], metavar="RECIPE", help="of the check `rows`, with changes")
    parser.set_defaults(mode="gpu")
    without_gpu = parser.add_mutually_exclusive_group().add_argument
    without_gpu("--compile-only", dest="mode", action="store_const", const="absent",
                help="compile all of it for an absent H100")  # fmt: skip
    without_gpu("--rehearse", dest="mode", action="store_const", const="cpu",
                help="tiny, on the CPU: what can run there")  # fmt: skip
    add("--check", help=argparse.SUPPRESS)  # one check in a process of its own
    add("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.only.split(",")).difference(CHECKS):
        parser.error(f"--only {', '.join(sorted(unknown))}: the checks are {', '.join(CHECKS)}")
    if unknown := {row.partition(" ")[0] for row in args.rows}.difference(recipes.names()):
        parser.error(f"--rows {', '.join(sorted(unknown))}: see python -m jaxbench list")
    return args


def find_gpu() -> hardware.Gpu:
    """The GPU of this machine, or the H100 where none is known."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        names = ""
    gpu = hardware.identify(names.partition("\n")[0])
    return gpu if gpu and gpu.chip else hardware.H100


def one_check(args: argparse.Namespace) -> int:
    """Runs one check in this process, and writes its findings."""
    ctx = Context(args.mode, args.folder, find_gpu(), args.output, tuple(args.rows))
    check = CHECKS[args.check]
    if ctx.mode == "gpu":
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"  # the CPU is for references
        share = SHARE if check.shared else hardware.MEMORY_FRACTION
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(share))
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
    function = check.compile if args.mode == "absent" else check.run
    assert function is not None
    try:
        for finding in function(ctx):
            write(args.output, args.check, finding)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        write(args.output, args.check, Finding(args.check, WRONG, reason[:300]))
    return 0


def write(output: Path, check: str, finding: Finding) -> None:
    """Appends a finding to the results, with the time."""
    line = json.dumps({"check": check, "at": round(time.time(), 1), **asdict(finding)})
    with (output / "results.jsonl").open("a") as file:
        file.write(f"{line}\n")


def start(args: argparse.Namespace, name: str, folder: Path) -> subprocess.Popen:
    """Starts a check in a new process and session."""
    mode = {"absent": ["--compile-only"], "cpu": ["--rehearse"]}.get(args.mode, [])
    command = [sys.executable, __file__, *mode, "--check", name]
    with (args.output / "log.txt").open("a") as log:
        return subprocess.Popen(
            [*command, "--output", str(args.output), "--folder", str(folder), "--rows", *args.rows],
            cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def stop(process: subprocess.Popen) -> None:
    """Kills what is left of a check and its processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finish(args: argparse.Namespace, running: dict[str, subprocess.Popen], left: float) -> None:
    """Waits for checks until their limits or the end of the budget in `left` seconds, and reports a
    crash or a stop. Without a GPU only the budget counts."""
    began = time.monotonic()
    shown = len(results(args.output))
    try:
        while running:
            time.sleep(0.2)
            new = results(args.output)[shown:]
            for finding in new:
                print(
                    f"  {finding['verdict']:8} {finding['what']}: {finding['figure']}", flush=True
                )
            shown += len(new)
            took = time.monotonic() - began
            for name, process in list(running.items()):
                limit = CHECKS[name].limit if args.mode == "gpu" else left
                if process.poll() is None and took < min(limit, left):
                    continue
                if process.poll() is None:
                    late = Finding(name, WRONG, f"it took more than its {limit:.0f} s")
                    spent = f"stopped: the budget is spent, see --only {name}"
                    write(
                        args.output, name, late if limit < left else Finding(name, NOT_RUN, spent)
                    )
                elif process.returncode:
                    reason = f"its process ended with status {process.returncode}; see log.txt"
                    write(args.output, name, Finding(name, WRONG, reason))
                stop(running.pop(name))
                print(f"{name}: {took:.0f} s", flush=True)
    finally:
        for process in running.values():
            stop(process)


def results(output: Path) -> list[dict]:
    """All findings so far; a line that is still being written comes later."""
    path = output / "results.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def run_checks(args: argparse.Namespace, folder: Path) -> None:
    """Runs every selected check of this mode, within the budget."""
    ends = time.monotonic() + (args.budget or BUDGET[args.mode])
    names = [name for name in CHECKS if name in args.only.split(",") and in_mode(args, name)]
    together = [name for name in names if CHECKS[name].shared and args.mode == "gpu"]
    alone = [[name] for name in names if name not in together]
    for group in filter(None, [together, *alone]):
        left = ends - time.monotonic()
        if left < 10:
            for name in group:
                write(args.output, name, Finding(name, NOT_RUN, f"no budget left: --only {name}"))
            continue
        print(", ".join(group), flush=True)
        finish(args, {name: start(args, name, folder) for name in group}, left)


def in_mode(args: argparse.Namespace, name: str) -> bool:
    """True if a check runs in this mode."""
    check = CHECKS[name]
    return {"absent": check.compile is not None, "cpu": check.rehearsed}.get(args.mode, True)


def table(output: Path) -> str:
    """The findings as Markdown."""
    lines = ["| check | what | verdict | figure | for comparison |", "|---|---|---|---|---|"]
    columns = ("check", "what", "verdict", "figure", "beside")
    lines += ["| " + " | ".join(f[c] for c in columns) + " |" for f in results(output)]
    return "\n".join(lines)


def main() -> int:
    """Runs the selected checks, prints the table, returns the exit status."""
    args = parse_arguments()
    if args.check:
        return one_check(args)
    args.output = args.output.absolute()
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run_checks(args, Path(folder))
    text = f"{find_gpu().device}\n{versions()}\n\n{table(args.output)}"
    (args.output / "table.md").write_text(f"{text}\n")
    print(f"\n{text}")
    return max((SHOWN[f["verdict"]] for f in results(args.output)), default=1)


if __name__ == "__main__":
    sys.exit(main())
