"""`python -m jaxbench.plan --all`: plans of every row of every recipe, and their tables."""

import csv
import sys
import time
from io import StringIO
from pathlib import Path

from jaxbench.files import write_whole
from jaxbench.hardware import Gpu
from jaxbench.plan.plan import Plan
from jaxbench.plan.processes import Target, plan_all
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Run
from jaxbench.versions import versions

MARK = "<!-- table -->"
"""The line of plan.md after which the table is replaced."""


def rows(gpu: Gpu) -> list[Run]:
    """Every row of every recipe on a GPU, without smoke rows."""
    return [
        recipes.resolve(recipe, row)
        for recipe in (loaded.on(gpu) for loaded in recipes.load_all())
        for row in recipe.rows
        if row != recipes.SMOKE
    ]


def sweep(target: Target, output: Path) -> int:
    """Plans all rows and writes the tables; 1 when a row fails or does not fit."""
    plans, failures = plan_all(rows(target.gpu), target)
    lines = [f"{run.recipe}-{run.row}: {reason}" for run, reason in failures.items()]
    write_tables(plans, lines, output, target)
    too_big = [plan for plan in plans if not plan.fits]
    for plan in too_big:
        print(f"{plan.recipe}:{plan.row} does not fit", file=sys.stderr)
    return int(bool(failures or too_big))


def cells(plan: Plan) -> dict[str, str]:
    """A line of the table by its columns."""
    size, row = plan.bytes_per_device, plan.published

    def mfu(name: str) -> str:
        value = plan.rates[name].mfu if name in plan.rates else None
        return "" if value is None else f"{100 * value:.1f}"

    return {
        "recipe": plan.recipe,
        "GPUs": str(plan.gpus),
        "mesh": plan.mesh,
        "peak GiB": f"{size.peak / 2**30:.1f}",
        "limit GiB": f"{size.limit / 2**30:.1f}",
        "fits": "yes" if plan.fits else "NO",
        "TFLOP": f"{plan.flops.compiled / 1e12:.0f}",
        "recompute": f"{plan.flops.recompute_ratio:.3f}",
        "wire GiB": f"{plan.wire_bytes / 2**30:.1f}",
        "uncovered GiB": f"{plan.uncovered_wire_bytes / 2**30:.1f}",
        "exposed s": f"{plan.bound_parts_s['exposed']:.3f}",
        "bound s": f"{plan.bound_step_s:.3f}",
        "bound MFU %": mfu("bound"),
        "forecast s": f"{plan.forecast_step_s:.3f}",
        "fast s": f"{plan.forecast.fast_s:.3f}",
        "slow s": f"{plan.forecast.slow_s:.3f}",
        "forecast MFU %": mfu("forecast"),
        "published s": str(row["step_time_s"]) if row else "",
        "published MFU %": mfu("published"),
        "launches": str(plan.launches),
        "compile s": f"{plan.compile_s:.0f}",
    }


def write_tables(plans: list[Plan], failures: list[str], output: Path, target: Target) -> None:
    """Replaces the table of `plan.md` after `MARK`, and `plan.csv`."""
    output.mkdir(parents=True, exist_ok=True)
    table = [cells(plan) for plan in plans]
    columns = [*table[0]] if table else []
    packages = versions() | {"commit": None, "source": None}
    names = ", ".join(f"{name} {value}" for name, value in packages.items() if value)
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {len(plans)} rows, {' '.join(target.options())}. {names}.",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(line.values())} |" for line in table),
        *([""] if failures else []),
        *(f"- not planned: {failure}" for failure in failures),
    ]
    path = output / "plan.md"
    before = path.read_text().partition(MARK)[0] if path.exists() else "# Plans\n\n"
    write_whole(path, f"{before}{MARK}\n\n" + "\n".join(lines) + "\n")
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *(line.values() for line in table)])
    write_whole(output / "plan.csv", text.getvalue())
