"""Plans made in processes of their own, a few at a time, and kept: what was interrupted goes on.

A compiler that fails, or that the system ends for want of memory, then costs one plan and no more.
A plan is made again when its settings, its flags, this package's source or the version of another
one has changed.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from jaxbench.errors import RecipeError
from jaxbench.hardware import Gpu
from jaxbench.plan.absent import placed
from jaxbench.plan.plan import Plan, read, system
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Run
from jaxbench.versions import versions
from jaxbench.xla import flags

CACHE = Path("results", "plan")
PROCESS_BYTES = 5 * 2**30
"""Memory that one process may need: the compiler's for the largest rows, with room."""

ERROR = re.compile(r"(error|[\w.]*(Error|Exception|Failed)): .")
"""How the line begins that says why a process failed."""


@dataclass(frozen=True)
class Target:
    """What plans are made for: a GPU, and the options that say so, `--gpu` and `--system`; and a
    user's `--kernels`, if they are forecast by those."""

    gpu: Gpu
    name: str
    system: tuple[str, ...] = ()
    kernels: Path | None = None

    def options(self) -> list[str]:
        """Those of the command line."""
        system = [part for text in self.system for part in ("--system", text)]
        kernels = ["--kernels", str(self.kernels)] if self.kernels else []
        return ["--gpu", self.name, *system, *kernels]


def progress() -> Progress:
    """A bar that counts plans, on stderr."""
    columns = Progress.get_default_columns()
    return Progress(MofNCompleteColumn(), *columns, console=Console(stderr=True))


def plan_each(
    runs: Iterable[Run], target: Target, config: str | None = None
) -> Iterator[tuple[Run, Plan | str]]:
    """The plan of each run, or why there is none, as they come. `config` is the recipe as the user
    named it; None for recipes of the package."""
    pool = ThreadPoolExecutor(workers())
    try:
        futures = {pool.submit(plan_run, run, target, config or run.recipe): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def workers() -> int:
    """Processes at a time: one per core, as far as memory reaches."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(os.cpu_count() or 1, available // PROCESS_BYTES))


def plan_run(run: Run, target: Target, config: str) -> Plan | str:
    """The plan of a run, an earlier one or from a process of its own; or why there is none."""
    kept = folder(run, target)
    if (plan := finished(kept / "plan.json", run, target.gpu)) is not None:
        return plan
    command = [sys.executable, "-m", "jaxbench.plan", "--config", config, "--gpus", run.row]
    command += [*target.options(), "--dump", str(kept), "--json", "--no-remedy"]
    command += [part for text in run.overrides for part in ("--set", text)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode in (0, 1) and (plan := finished(kept / "plan.json", run, target.gpu)):
        return plan
    return _reason(done)


def folder(run: Run, target: Target) -> Path:
    """Where the plan of a run is kept: rows by their names, changed ones with a digest of the
    changes."""
    kernels = [target.kernels.read_text()] if target.kernels else []
    changes = [*run.overrides, *target.system, *kernels]
    digest = hashlib.sha256(json.dumps(changes).encode()).hexdigest()[:12]
    name = f"{run.recipe}-{run.row}-{target.name}"
    return CACHE / (f"{name}-{digest}" if changes else name)


def finished(path: Path, run: Run, gpu: Gpu) -> Plan | None:
    """The plan that is there, if nothing that decides it has changed since."""
    try:
        plan = read(path)
    except RecipeError:
        return None
    expected = {
        "settings": json.loads(json.dumps(recipes.describe(run))),
        "flags": flags.options(run, "gpu"),
        "system": system(placed(gpu, run.gpus)),
        "versions": versions() | {"commit": plan.versions["commit"]},
    }
    same = all(getattr(plan, name) == value for name, value in expected.items())
    return plan if same else None


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """The line that says why a process failed."""
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}, as the system does for want of memory"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    said = [line for line in lines if ERROR.match(line)]
    return [f"exit status {done.returncode}", *lines[-1:], *said[-1:]][-1].removeprefix("error: ")
