"""`python -m jaxbench.plan --all`: a plan of every row of every recipe, and their table.

Each row is planned in a process of its own, a few at a time, and kept as soon as it is there; a
sweep that was interrupted goes on where it stopped. A row is planned again when its settings, its
flags or the version of a package has changed; after a change of this code, remove `results/plan`.
"""

import csv
import io
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from jaxbench import environment, recipes, xla_flags
from jaxbench.config import Run
from jaxbench.systems import System

CACHE = Path("results", "plan")
PROCESS_BYTES = 5 * 2**30
"""Memory that one process may need: the compiler's for the largest rows, with room."""

MARK = "<!-- table -->"
COLUMNS = (
    "recipe", "GPUs", "mesh", "peak GiB", "limit GiB", "fits", "TFLOP", "recompute",
    "wire GiB", "uncovered GiB", "exposed s", "bound s", "bound MFU %", "published s",
    "published MFU %", "launches", "compile s",
)  # fmt: skip


def rows() -> list[Run]:
    """Every row of every recipe but the smoke rows."""
    loaded = [recipes.load(path) for path in sorted(recipes.config_folder().glob("*.yaml"))]
    return [
        recipes.resolve(recipe, row)
        for recipe in loaded
        for row in recipe.rows
        if row != recipes.SMOKE
    ]


def sweep(gpu: str, system: System, settings: list[str], output: Path) -> int:
    """Plans all rows and writes the tables; 1 when a row fails or does not fit."""
    CACHE.mkdir(parents=True, exist_ok=True)
    runs = rows()
    plans: dict[str, dict[str, Any]] = {}
    failures: list[str] = []
    console = Console(stderr=True)
    with Progress(MofNCompleteColumn(), *Progress.get_default_columns(), console=console) as bar:
        task = bar.add_task("planning", total=len(runs))
        with ThreadPoolExecutor(workers()) as pool:
            futures = {pool.submit(plan_row, run, gpu, system, settings): run for run in runs}
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
    too_big = [plan for plan in ordered if not plan["fits"]]
    for plan in too_big:
        console.print(f"{plan['recipe']}:{plan['row']} does not fit", highlight=False)
    return int(bool(failures or too_big))


def key(run: Run) -> str:
    """A row's name, also of its file."""
    return f"{run.recipe}-{run.row}"


def workers() -> int:
    """Processes at a time: one per core, as far as memory reaches."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(os.cpu_count() or 1, available // PROCESS_BYTES))


def plan_row(run: Run, gpu: str, system: System, settings: list[str]) -> dict[str, Any] | str:
    """The plan of a row, of an earlier sweep or from a process of its own; or why there is none."""
    folder = CACHE / f"{key(run)}-{gpu}"
    if (plan := finished(folder / "plan.json", run, system)) is not None:
        return plan
    config = recipes.config_folder() / f"{run.recipe}.yaml"
    command = [sys.executable, "-m", "jaxbench.plan", "--config", config, "--gpus", run.row]
    command += ["--gpu", gpu, "--dump", folder, "--json"]
    command += [part for text in settings for part in ("--system", text)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if (folder / "plan.json").exists() and done.returncode in (0, 1):
        return json.loads((folder / "plan.json").read_text())
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def finished(path: Path, run: Run, system: System) -> dict[str, Any] | None:
    """The plan that an earlier sweep left, if nothing that decides it has changed."""
    if not path.exists():
        return None
    plan = json.loads(path.read_text())
    expected = {
        "settings": json.loads(json.dumps(recipes.describe(run))),
        "flags": xla_flags.options(run, "gpu"),
        "system": asdict(system),
        "versions": environment.versions(),
    }
    expected["versions"]["commit"] = plan["versions"]["commit"]
    return plan if all(plan[name] == value for name, value in expected.items()) else None


def cells(plan: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    size, row, published = plan["bytes_per_device"], plan, plan["published"]
    return (
        row["recipe"],
        str(row["gpus"]),
        row["mesh"],
        f"{size['peak'] / 2**30:.1f}",
        f"{size['limit'] / 2**30:.1f}",
        "yes" if row["fits"] else "NO",
        f"{row['flops']['compiled'] / 1e12:.0f}",
        f"{row['flops']['recompute_ratio']:.3f}",
        f"{row['wire_bytes'] / 2**30:.1f}",
        f"{row['uncovered_wire_bytes'] / 2**30:.1f}",
        f"{row['bound_parts_s']['exposed']:.3f}",
        f"{row['bound_step_s']:.3f}",
        f"{100 * row['mfu']['bound']:.1f}",
        str(published["step_time_s"]) if published else "",
        f"{100 * row['mfu']['published']:.1f}" if published else "",
        str(row["launches"]),
        f"{row['compile_s']:.0f}",
    )


def write_tables(plans: list[dict[str, Any]], failures: list[str], output: Path) -> None:
    """Replaces the table of `plan.md` behind its mark, and `plan.csv`."""
    output.mkdir(parents=True, exist_ok=True)
    table = [cells(plan) for plan in plans]
    versions = environment.versions() | {"commit": None}
    names = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
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
    path.write_text(f"{before}{MARK}\n\n" + "\n".join(lines) + "\n")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *table])
    (output / "plan.csv").write_text(text.getvalue())
