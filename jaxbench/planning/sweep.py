"""`python -m jaxbench.plan --all`: a plan of every row of every recipe, and their table."""

import csv
import io
import sys
import time
from pathlib import Path

from jaxbench.files import write_whole
from jaxbench.hardware import Gpu
from jaxbench.plan.plan import Plan
from jaxbench.planning.processes import Target, plan_each, progress
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Run
from jaxbench.versions import versions

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


def sweep(target: Target, output: Path) -> int:
    """Plans all rows and writes the tables; 1 when a row fails or does not fit."""
    runs = rows(target.gpu)
    plans: dict[Run, Plan] = {}
    failures: list[str] = []
    with progress() as bar:
        task = bar.add_task("planning", total=len(runs))
        for run, plan in plan_each(runs, target):
            if isinstance(plan, str):
                failures.append(f"{run.recipe}-{run.row}: {plan}")
                bar.console.print(failures[-1], highlight=False, markup=False)
            else:
                plans[run] = plan
            bar.update(task, advance=1, description=f"{run.recipe} {run.row}")
    ordered = [plans[run] for run in runs if run in plans]
    write_tables(ordered, failures, output, target)
    too_big = [plan for plan in ordered if not plan.fits]
    for plan in too_big:
        print(f"{plan.recipe}:{plan.row} does not fit", file=sys.stderr)
    return int(bool(failures or too_big))


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


def write_tables(plans: list[Plan], failures: list[str], output: Path, target: Target) -> None:
    """Replaces the table of `plan.md` behind its mark, and `plan.csv`."""
    output.mkdir(parents=True, exist_ok=True)
    table = [cells(plan) for plan in plans]
    here = versions() | {"commit": None, "source": None}
    names = ", ".join(f"{name} {value}" for name, value in here.items() if value)
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {len(plans)} rows, {' '.join(target.options())}. {names}.",
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
