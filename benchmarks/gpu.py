"""Checks and measures everything on one H100 or H200 in one call, and prints a table last.

    python benchmarks/gpu.py [--output FOLDER] [--budget SECONDS] [--only CHECK,CHECK]
    python benchmarks/gpu.py --compile-only     # no GPU: compile all of it for an absent H100
    python benchmarks/gpu.py --rehearse         # no GPU: the checks themselves, tiny, on the CPU

The most important checks run first, each in a separate process with a time limit, so that a call
that is cut short has reported most, and a crash or hang affects one check only. `--budget` seconds
after the start (540 on a GPU) no check is started, and a running one is stopped. Findings are
appended to `results.jsonl` in the output folder, output of programs to `log.txt`; the table is in
`table.md`. Exit status 1 if anything is wrong.

    check       minutes on a GPU (estimated; none was measured)
    trains      1.5   tiny rows of each family beside the CPU's losses
    real        4     row 1 of each family: complete, memory as planned, speed
    operators   1     every operator beside the CPU's, at real shapes
    mixers      1.5   Mamba-2 by XLA and by Pallas's kernels, and the sizes of these
    survives    1     kill and resume, profiler, PGLE, compiler options
    ceilings    0.5   products and copies
    breakdown   1.5   where a step's time goes
    choices     8     A/B of settings
    others      3     row 1 of the other recipes
    kernels     4     kernels beside the forecast's tables

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
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
from one_gpu import choices, kernels, mixers, operators, speed, survives, trains
from one_gpu.context import MEASURED, NOT_RUN, OK, ROOT, WRONG, Context, Finding, read_lines

from jaxbench import hardware
from jaxbench.versions import versions

BUDGET = {"gpu": 540.0, "cpu": 1200.0, "absent": 3600.0}
"""Seconds of a call, by mode."""


@dataclass(frozen=True)
class Check:
    """A check on a GPU and its limit in seconds; its counterpart that only compiles for an absent
    GPU; whether a CPU can rehearse it."""

    run: Callable[[Context], Iterator[Finding]]
    limit: int
    compile: Callable[[Context], Iterator[Finding]] | None = None
    rehearsed: bool = False


CHECKS = {
    "trains": Check(trains.small, 150, rehearsed=True),
    "real": Check(trains.real, 300),
    "operators": Check(operators.check, 120, operators.compiles, rehearsed=True),
    "mixers": Check(mixers.check, 150, mixers.compiles, rehearsed=True),
    "survives": Check(survives.check, 120, rehearsed=True),
    "ceilings": Check(speed.ceilings, 60),
    "breakdown": Check(speed.breakdown, 120, speed.compiles),
    "choices": Check(choices.check, 480, choices.compiles),
    "others": Check(trains.others, 240),
    "kernels": Check(kernels.check, 300, kernels.compiles, rehearsed=True),
    "plans": Check(trains.plans, 600, trains.plans),
}
"""Checks in the order in which they run; `plans`, which needs no GPU, runs concurrently."""

PLANS = "plans"
SHOWN = {OK: 0, MEASURED: 0, NOT_RUN: 0, WRONG: 1}
"""Exit status by verdict."""


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, default=Path("results/gpu"), help="default results/gpu")
    add("--budget", type=float, help=f"seconds in all, default {BUDGET['gpu']:.0f} on a GPU")
    add("--only", default=",".join(CHECKS), help="some checks: " + ", ".join(CHECKS))
    add("--compile-only", action="store_true", help="compile all of it for an absent H100")
    add("--rehearse", action="store_true", help="tiny, on the CPU: what can run there")
    add("--check", help=argparse.SUPPRESS)  # one check in a process of its own
    add("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.only.split(",")).difference(CHECKS):
        parser.error(f"--only {', '.join(sorted(unknown))}: the checks are {', '.join(CHECKS)}")
    return args


def mode(args: argparse.Namespace) -> str:
    """The mode of the checks (`Context.mode`)."""
    return "absent" if args.compile_only else "cpu" if args.rehearse else "gpu"


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
    ctx = Context(mode(args), args.folder, find_gpu())
    if ctx.mode == "gpu":
        # The CPU is for references, and for the plans.
        os.environ["JAX_PLATFORMS"] = "cpu" if args.check == PLANS else "cuda,cpu"
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(hardware.MEMORY_FRACTION))
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
    check = CHECKS[args.check]
    function = check.compile if args.compile_only else check.run
    assert function is not None
    if args.check == PLANS:
        os.nice(10)
    try:
        for finding in function(ctx):
            write(args.output, args.check, finding)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        write(args.output, args.check, Finding(args.check, WRONG, reason[:300]))
    return 0


def write(output: Path, check: str, finding: Finding) -> None:
    """Appends a finding to the results."""
    with (output / "results.jsonl").open("a") as file:
        file.write(json.dumps({"check": check, **asdict(finding)}) + "\n")


def start(args: argparse.Namespace, name: str, folder: Path) -> subprocess.Popen:
    """Starts a check in a new process and session."""
    modes = [f"--{m}" for m in ("compile-only", "rehearse") if getattr(args, m.replace("-", "_"))]
    command = [sys.executable, __file__, *modes, "--check", name]
    with (args.output / "log.txt").open("a") as log:
        return subprocess.Popen(
            [*command, "--output", str(args.output), "--folder", str(folder)], cwd=ROOT,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def stop(process: subprocess.Popen) -> None:
    """Kills what is left of a check and its processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finish(args: argparse.Namespace, name: str, process: subprocess.Popen, left: float) -> None:
    """Waits for a check until its limit or the end of the budget in `left` seconds, and reports a
    crash or a stop. Without a GPU only the budget counts."""
    limit = CHECKS[name].limit if mode(args) == "gpu" else left
    began = time.monotonic()
    show = partial(print, flush=True)
    shown = len(results(args.output))
    try:
        while process.poll() is None and time.monotonic() - began < min(limit, left):
            time.sleep(0.2)
            new = results(args.output)[shown:]
            for finding in new:
                show(f"  {finding['verdict']:8} {finding['what']}: {finding['figure']}")
            shown += len(new)
        if process.poll() is None:
            late = Finding(name, WRONG, f"it took more than its {limit:.0f} s")
            ended = Finding(name, NOT_RUN, f"stopped: the budget is spent, see --only {name}")
            write(args.output, name, late if limit < left else ended)
        elif process.returncode:
            reason = f"its process ended with status {process.returncode}; see log.txt"
            write(args.output, name, Finding(name, WRONG, reason))
    finally:
        stop(process)
    show(f"{name}: {time.monotonic() - began:.0f} s")


def results(output: Path) -> list[dict]:
    """All findings so far."""
    path = output / "results.jsonl"
    return read_lines(path) if path.exists() else []


def run_checks(args: argparse.Namespace, folder: Path) -> None:
    """Runs every selected check of this mode, within the budget."""
    ends = time.monotonic() + (args.budget or BUDGET[mode(args)])
    names = [name for name in CHECKS if name in args.only.split(",") and in_mode(args, name)]
    plans = None
    if PLANS in names and mode(args) == "gpu":
        names.remove(PLANS)
        plans = start(args, PLANS, folder)
    try:
        for name in names:
            left = ends - time.monotonic()
            if left < 10:
                write(args.output, name, Finding(name, NOT_RUN, f"no budget left: --only {name}"))
                continue
            print(name, flush=True)
            finish(args, name, start(args, name, folder), left)
    finally:
        if plans is not None:
            stop(plans)


def in_mode(args: argparse.Namespace, name: str) -> bool:
    """True if a check runs in this mode."""
    check = CHECKS[name]
    return {"absent": check.compile is not None, "cpu": check.rehearsed}.get(mode(args), True)


def table(output: Path) -> str:
    """The findings as Markdown."""
    lines = ["| check | what | verdict | figure | beside |", "|---|---|---|---|---|"]
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
    (args.output / "results.jsonl").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run_checks(args, Path(folder))
    text = f"{find_gpu().device}\n{versions()}\n\n{table(args.output)}"
    (args.output / "table.md").write_text(f"{text}\n")
    print(f"\n{text}")
    return max((SHOWN[f["verdict"]] for f in results(args.output)), default=1)


if __name__ == "__main__":
    sys.exit(main())
