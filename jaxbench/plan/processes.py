"""Makes plans in subprocesses, a few at a time, and caches them in `results/plan`.

If a compiler fails or runs out of memory, we lose one plan. A plan is made again if its settings,
its flags, this package's source or the version of a dependency changed.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import wraps
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from jaxbench.base.errors import RecipeError
from jaxbench.base.files import owned
from jaxbench.base.hardware import Gpu, host_memory, placed
from jaxbench.base.versions import versions
from jaxbench.plan import stubs
from jaxbench.plan.absent import check_compiler
from jaxbench.plan.plan import Plan, read
from jaxbench.plan.systems import Target, system
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Run
from jaxbench.xla import flags

CACHE = Path("results", "plan")
PROCESS_BYTES = 5 * 2**30
"""Bytes that one process may need: the compiler's memory for the largest rows, and a margin."""

ERROR = re.compile(r"(error|[\w.]*(Error|Exception|Failed)): .")
"""The start of the line that gives the reason why a process failed."""


def resumable(main: Callable[[Sequence[str] | None], int]) -> Callable[[Sequence[str] | None], int]:
    """Decorates the function of a command that makes plans. If its user interrupts it, it says that
    the cache has the finished plans, and returns 130."""

    @wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except KeyboardInterrupt:
            kept = "finished plans are kept, and the same command continues from them"
            print(f"interrupted; {kept}", file=sys.stderr)
            return 130

    return run


def progress() -> Progress:
    """A progress bar on stderr that counts plans. Shows nothing if stderr is no terminal."""
    columns, console = Progress.get_default_columns(), Console(stderr=True)
    hidden = not console.is_terminal
    return Progress(MofNCompleteColumn(), *columns, console=console, disable=hidden)


def plan_all(
    runs: list[Run], target: Target, config: str | None = None
) -> tuple[dict[Run, Plan], dict[Run, str]]:
    """The plans of runs in their order, and the reasons why others failed. Reasons are also printed
    at once. `config` is as in `plan_each`."""
    check_compiler()
    plans: dict[Run, Plan] = {}
    failures: dict[Run, str] = {}
    with progress() as bar:
        task = bar.add_task("planning", total=len(runs))
        for run, plan in plan_each(runs, target, config):
            if isinstance(plan, str):
                failures[run] = plan
                text = f"{run.recipe}-{run.row}: not planned: {plan}"
                bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
            else:
                plans[run] = plan
            bar.update(task, advance=1, description=f"{run.recipe} {run.row}")
    return {run: plans[run] for run in runs if run in plans}, failures


def plan_each(
    runs: Iterable[Run], target: Target, config: str | None = None
) -> Iterator[tuple[Run, Plan | str]]:
    """Yields each run with its plan, or with the reason why it failed, as they finish. `config` is
    the recipe as the user named it; None for recipes of the package."""
    pool = ThreadPoolExecutor(workers())
    try:
        futures = {pool.submit(plan_run, run, target, config or run.recipe): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def workers() -> int:
    """The number of processes at a time: one per core, or fewer if the available memory does not
    suffice."""
    return max(1, min(os.cpu_count() or 1, host_memory("MemAvailable") // PROCESS_BYTES))


def plan_run(run: Run, target: Target, config: str) -> Plan | str:
    """The plan of a run from the cache or from a subprocess, or the reason why it failed."""
    path = folder(run, target)
    CACHE.mkdir(parents=True, exist_ok=True)
    # Another command may plan the same now.
    with owned(path.with_name(f"{path.name}.plan"), wait=True):
        if (plan := cached(path, run, target.gpu)) is not None:
            return plan
        command = [sys.executable, "-m", "jaxbench.plan", "--config", config, "--gpus", run.row]
        command += [*target.options(), "--dump", str(path), "--json"]
        command += [part for text in run.overrides for part in ("--set", text)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode in (0, 1) and (plan := cached(path, run, target.gpu)):
            return plan
        return _reason(process)


def folder(run: Run, target: Target) -> Path:
    """The cache folder of a run. It has the name of its row, with a digest of the changes to the
    row."""
    kernels = [target.kernels.read_text()] if target.kernels else []
    asked = flags.values_in(flags.variable()).items()
    without_effect = ("xla_cpu", "xla_dump", "xla_force_host")  # on a program for GPUs
    variable = [f"{name}={value}" for name, value in asked if not name.startswith(without_effect)]
    changes = [*run.overrides, *target.system, *kernels, *variable]
    digest = hashlib.sha256(json.dumps(changes).encode()).hexdigest()[:12]
    name = f"{run.recipe}-{run.row}-{target.name}"
    return CACHE / (f"{name}-{digest}" if changes else name)


def cached(path: Path, run: Run, gpu: Gpu) -> Plan | None:
    """The plan in a cache folder. None if there is none, or if what decides it has changed."""
    try:
        plan = read(path / "plan.json")
    except RecipeError:
        return None
    expected: dict[str, Any] = {
        "settings": recipes.describe(run),
        "flags": flags.options(run, "gpu"),
        "system": system(placed(gpu, run.gpus)),
        "versions": versions() | {"commit": plan.versions["commit"]},
    }
    # A script that has imported JAX cannot ask cuDNN; the process that plans can.
    if (reason := stubs.load()) != stubs.LOADED:
        expected["without_cudnn"] = reason
    same = all(getattr(plan, name) == value for name, value in expected.items())
    return plan if same else None


def _reason(process: subprocess.CompletedProcess[str]) -> str:
    """Why a process left no plan for our settings: the line of its stderr that says so, unless it
    made a plan of something else."""
    code = process.returncode
    if code < 0:
        return f"killed by signal {-code}, perhaps because memory ran out"
    if process.stdout.strip():
        return "the source, the packages or XLA_FLAGS changed while it was planned"
    lines = [line for line in process.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if ERROR.match(line)]
    return [f"exit status {code}", *lines[-1:], *errors[-1:]][-1].removeprefix("error: ")
