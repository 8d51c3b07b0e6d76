"""`python -m jaxbench.plan --all`: plans of every row of every recipe as one table, and what moved
between two tables, for example between two versions of jax."""

import csv
import sys
import time
from io import StringIO
from pathlib import Path

from jaxbench.base.errors import RecipeError
from jaxbench.base.files import write_whole
from jaxbench.base.versions import versions
from jaxbench.forecast.interval import accuracy, timed_programs
from jaxbench.plan.plan import Plan
from jaxbench.plan.processes import plan_all
from jaxbench.plan.systems import Target
from jaxbench.plan.text import in_gib
from jaxbench.recipe import planned, recipes
from jaxbench.recipe.settings import Run

COMPARED = (
    "peak GiB",
    "wire GiB",
    "uncovered GiB",
    "exposed s",
    "bound s",
    "forecast s",
    "launches",
)
"""Columns of a table in which more is worse."""

LEAST_GIB = 0.05
"""The change of a size that is never worth a line."""


def rows(target: Target, every: bool = True) -> list[Run]:
    """The rows on a GPU of every recipe in whose format the GPU multiplies, without smoke rows.
    Without `every`, only the rows that recipes have for this GPU."""
    runs = [
        recipes.resolve(recipe.on(target.gpu), row)
        for recipe in recipes.load_all()
        for row in (recipe.on(target.gpu).rows if every else recipe.gpu_rows.get(target.name, {}))
        if row != recipes.SMOKE
    ]
    return [run for run in runs if target.gpu.multiplies(run.precision.dtype)]


def sweep(targets: list[Target], output: Path) -> int:
    """Plans all rows on the first GPU, and on the others the rows that recipes have for them.
    Writes the table. Returns 1 if a row fails or does not fit."""
    table, lines, too_big = [], [], []
    for target in targets:
        plans, failures = plan_all(rows(target, target is targets[0]), target)
        table += [cells(plan, target.name) for plan in plans.values()]
        lines += [f"{r.recipe}-{r.row} on {target.name}: {why}" for r, why in failures.items()]
        too_big += [f"{p.recipe}:{p.row} on {target.name}" for p in plans.values() if not p.fits]
    write_table(table, lines, output, targets)
    for name in too_big:
        print(f"{name} does not fit", file=sys.stderr)
    return int(bool(lines or too_big))


def cells(plan: Plan, gpu: str) -> dict[str, str]:
    """A line of the table, by its columns."""
    size, row = plan.bytes_per_device, plan.published

    def mfu(name: str) -> str:
        value = plan.rates[name].mfu if name in plan.rates else None
        return "" if value is None else f"{100 * value:.1f}"

    return {
        "recipe": plan.recipe,
        "GPU": gpu,
        "GPUs": str(plan.gpus),
        "mesh": plan.mesh,
        "peak GiB": in_gib(size.peak),
        "limit GiB": in_gib(size.limit),
        "host GiB": in_gib(size.host),
        "fits": "yes" if plan.fits else "NO",
        "TFLOP": f"{plan.flops.compiled / 1e12:.0f}",
        "recompute": f"{plan.flops.recompute_ratio:.3f}",
        "wire GiB": in_gib(plan.wire_bytes),
        "uncovered GiB": in_gib(plan.uncovered_wire_bytes),
        "exposed s": f"{plan.bound_parts_s['exposed']:.3f}",
        "bound s": f"{plan.bound_step_s:.3f}",
        "bound MFU %": mfu("bound"),
        "forecast s": f"{plan.forecast_step_s:.3f}",
        "low s": f"{plan.forecast.interval.low_s:.3f}",
        "high s": f"{plan.forecast.interval.high_s:.3f}",
        "assumed %": f"{100 * plan.forecast.interval.assumed:.0f}",
        "forecast MFU %": mfu("forecast"),
        "published s": str(row.step_time_s) if row else "",
        "published MFU %": mfu("published"),
        "launches": str(plan.launches),
        "compile s": f"{plan.compile_s:.0f}",
        "planned": time.strftime("%Y-%m-%d"),
    }


def write_table(
    table: list[dict[str, str]], failures: list[str], output: Path, targets: list[Target]
) -> None:
    """Writes `plan.csv`, with comments that say how it was made and what failed."""
    output.mkdir(parents=True, exist_ok=True)
    columns = [*table[0]] if table else []
    packages = versions() | {"commit": None, "source": None}
    names = ", ".join(f"{name} {value}" for name, value in packages.items() if value)
    options = " and ".join(" ".join(target.options()) for target in targets)
    comments = [f"{time.strftime('%Y-%m-%d')}, {len(table)} rows, {options}. {names}."]
    comments.append(planned.ERRORS + accuracy(timed_programs()))
    comments += [f"not planned: {failure}" for failure in failures]
    text = StringIO()
    text.writelines(f"# {comment}\n" for comment in comments)
    csv.writer(text, lineterminator="\n").writerows([columns, *(line.values() for line in table)])
    write_whole(output / "plan.csv", text.getvalue())


def compare_tables(before: Path, after: Path, percent: float) -> tuple[str, bool]:
    """A line for each value that moved by more than `percent` between two tables (plan.csv), of
    seconds by more than that share of the step; and whether anything got worse: a value of a column
    grew, a row no longer fits, or a row is missing. Raises RecipeError for a file that is no such
    table."""
    old, new = _read_table(before), _read_table(after)
    lines, worse = [], False
    for row in old | new:
        name = " ".join(row)
        if row not in new or row not in old:
            lines.append(f"{name}: only in {before if row in old else after}")
            worse |= row in old
            continue
        if old[row]["fits"] != new[row]["fits"]:
            lines.append(f"{name}: fits {old[row]['fits']} -> {new[row]['fits']}")
            worse |= new[row]["fits"] != "yes"
        for column in COMPARED:
            x, y = float(old[row][column]), float(new[row][column])
            whole = float(old[row]["forecast s"]) if column.endswith(" s") else x
            least = LEAST_GIB if column.endswith("GiB") else 0.0
            if abs(y - x) > max(least, whole * percent / 100):
                ratio = f", x {y / x:.3f}" if x else ""
                lines.append(f"{name}: {column} {old[row][column]} -> {new[row][column]}{ratio}")
                worse |= y > x
    return "\n".join(lines or [f"no row changed by more than {percent:g} %"]), worse


def _read_table(path: Path) -> dict[tuple[str, str, str], dict[str, str]]:
    """The lines of a table by recipe, GPU and number of GPUs."""
    try:
        comments, lines = planned.read(path)
        needed = {"recipe", "GPU", "GPUs", "fits", *COMPARED}
        for number, line in enumerate(lines, len(comments) + 2):
            if missing := [name for name in needed if line.get(name) is None]:
                raise ValueError(f"line {number} has no {', '.join(sorted(missing))}")
        table = {(line["recipe"], line["GPU"], line["GPUs"]): line for line in lines}
        for line in lines:
            for column in COMPARED:
                float(line[column])
    except (OSError, ValueError, csv.Error) as error:
        raise RecipeError(f"{path}: not a table of plan --all (plan.csv): {error}") from error
    return table
