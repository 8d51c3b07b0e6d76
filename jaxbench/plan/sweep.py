"""`python -m jaxbench.plan --all`: a plan of every row of every recipe, and their table.

Each row is planned in a process of its own, a few at a time, and kept as soon as it is there; a
sweep that was interrupted goes on where it stopped. A row is planned again when its settings, its
flags, this package's source or the version of another one has changed.
"""

import csv
import io
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from jaxbench.errors import RecipeError
from jaxbench.files import write_whole
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

MARK = "<!-- table -->"
COLUMNS = (
    "recipe", "GPUs", "mesh", "peak GiB", "limit GiB", "fits", "TFLOP", "recompute",
    "wire GiB", "uncovered GiB", "exposed s", "bound s", "bound MFU %", "forecast s", "fast s",
    "slow s", "forecast MFU %", "published s", "published MFU %", "launches", "compile s",
)  # fmt: skip


def rows(gpu: Gpu) -> list[Run]:
    """Every row of every recipe on a GPU but the smoke rows."""
    return [
        recipes.resolve(recipe, row)
        for recipe in (loaded.on(gpu) for loaded in recipes.load_all())
        for row in recipe.rows
        if row != recipes.SMOKE
    ]


def sweep(name: str, gpu: Gpu, settings: list[str], output: Path) -> int:
    """Plans all rows and writes the tables; 1 when a row fails or does not fit."""
    CACHE.mkdir(parents=True, exist_ok=True)
    runs = rows(gpu)
    plans: dict[str, Plan] = {}
    failures: list[str] = []
    console = Console(stderr=True)
    with Progress(MofNCompleteColumn(), *Progress.get_default_columns(), console=console) as bar:
        task = bar.add_task("planning", total=len(runs))
        with ThreadPoolExecutor(workers()) as pool:
            futures = {pool.submit(plan_row, run, name, gpu, settings): run for run in runs}
            for future in as_completed(futures):
                run, plan = futures[future], future.result()
                if isinstance(plan, str):
                    failures.append(f"{key(run)}: {plan}")
                    bar.console.print(failures[-1], highlight=False, markup=False)
                else:
                    plans[key(run)] = plan
                bar.update(task, advance=1, description=f"{run.recipe} {run.row}")
    ordered = [plans[key(run)] for run in runs if key(run) in plans]
    write_tables(ordered, failures, output)
    too_big = [plan for plan in ordered if not plan.fits]
    for plan in too_big:
        console.print(f"{plan.recipe}:{plan.row} does not fit", highlight=False)
    return int(bool(failures or too_big))


def key(run: Run) -> str:
    """A row's name, also of its file."""
    return f"{run.recipe}-{run.row}"


def workers() -> int:
    """Processes at a time: one per core, as far as memory reaches."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(os.cpu_count() or 1, available // PROCESS_BYTES))


def plan_row(run: Run, name: str, gpu: Gpu, settings: list[str]) -> Plan | str:
    """The plan of a row, of an earlier sweep or from a process of its own; or why there is none."""
    folder = CACHE / f"{key(run)}-{name}"
    if (plan := finished(folder / "plan.json", run, gpu)) is not None:
        return plan
    command = [sys.executable, "-m", "jaxbench.plan", "--config", run.recipe, "--gpus", run.row]
    command += ["--gpu", name, "--dump", str(folder), "--json"]
    command += [part for text in settings for part in ("--system", text)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode in (0, 1) and (plan := finished(folder / "plan.json", run, gpu)):
        return plan
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


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


def cells(plan: Plan) -> tuple[str, ...]:
    """A row of the table."""
    size, row = plan.bytes_per_device, plan.published

    def mfu(name: str) -> str:
        found = plan.rates[name].mfu if name in plan.rates else None
        return "" if found is None else f"{100 * found:.1f}"

    return (
        plan.recipe,
        str(plan.gpus),
        plan.mesh,
        f"{size.peak / 2**30:.1f}",
        f"{size.limit / 2**30:.1f}",
        "yes" if plan.fits else "NO",
        f"{plan.flops.compiled / 1e12:.0f}",
        f"{plan.flops.recompute_ratio:.3f}",
        f"{plan.wire_bytes / 2**30:.1f}",
        f"{plan.uncovered_wire_bytes / 2**30:.1f}",
        f"{plan.bound_parts_s.exposed:.3f}",
        f"{plan.bound_step_s:.3f}",
        mfu("bound"),
        f"{plan.forecast_step_s:.3f}",
        f"{plan.forecast.fast_s:.3f}",
        f"{plan.forecast.slow_s:.3f}",
        mfu("forecast"),
        str(row["step_time_s"]) if row else "",
        mfu("published"),
        str(plan.launches),
        f"{plan.compile_s:.0f}",
    )


def write_tables(plans: list[Plan], failures: list[str], output: Path) -> None:
    """Replaces the table of `plan.md` behind its mark, and `plan.csv`."""
    output.mkdir(parents=True, exist_ok=True)
    table = [cells(plan) for plan in plans]
    here = versions() | {"commit": None, "source": None}
    names = ", ".join(f"{name} {value}" for name, value in here.items() if value)
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {len(plans)} rows. {names}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(row)} |" for row in table),
        *([""] if failures else []),
        *(f"- not planned: {failure}" for failure in failures),
    ]
    path = output / "plan.md"
    before = path.read_text().partition(MARK)[0] if path.exists() else "# Plans\n\n"
    write_whole(path, f"{before}{MARK}\n\n" + "\n".join(lines) + "\n")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *table])
    write_whole(output / "plan.csv", text.getvalue())
