"""`python -m jaxbench.plan --scaling`: weak scaling of a recipe, from its smallest row to its
largest.

The efficiency of a row is its tokens per second and GPU, divided by the same rate of the smallest
row. Rows that train another model than the largest row are left out.
"""

import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxbench.base.errors import RecipeError, counted
from jaxbench.base.files import as_json
from jaxbench.base.terminal import console, write
from jaxbench.plan.many_pages import scaling_page, shown_parts
from jaxbench.plan.plan import Plan, grown_most, parts
from jaxbench.plan.processes import plan_all
from jaxbench.plan.systems import Target
from jaxbench.recipe import recipes
from jaxbench.recipe.names import work_name
from jaxbench.recipe.recipes import Recipe
from jaxbench.recipe.settings import Run
from jaxbench.results.plans import MINIMUM_S, part_name


def scaling(
    recipe: Recipe, config: str, changes: list[str], target: Target, form: str, output: Path | None
) -> int:
    """Plans the rows and prints their table, or writes it in another form. Returns 1 if a row fails
    or does not fit."""
    runs, left_out = rows(recipe, changes)
    plans, reasons = plan_all(runs, target, config)
    failures = [f"{counted(run.gpus)}: not planned: {reason}" for run, reason in reasons.items()]
    lines = [figures(plan, plans[0]) for plan in plans]
    if form == "json":
        content = {"rows": lines, "left_out": left_out, "failures": failures}
        write(as_json(content), output)
    elif form == "html" and lines:
        work, remarks = ", ".join([work_name(plans[0].settings), *changes]), [*left_out, *failures]
        write(scaling_page(work, target.name, target.gpu.device, lines, remarks), output)
    elif lines:
        show(f"{recipe.name}, {target.gpu.device}", lines)
    for text in left_out:
        print(text, file=sys.stderr)
    return int(bool(failures) or not all(line["fits"] for line in lines))


def rows(recipe: Recipe, changes: list[str]) -> tuple[list[Run], list[str]]:
    """The rows that train the model of the largest one, smallest first, with `--set` changes; and a
    message for each other row. Raises RecipeError if a change cannot be made."""
    overrides = recipes.parse_overrides(changes)
    counts = sorted(row for row in recipe.rows if isinstance(row, int))
    if not counts:
        raise RecipeError(f"recipe {recipe.name} has no rows for GPUs")
    runs = [recipes.resolve(recipe, row, overrides=overrides) for row in counts]
    kept, left_out = [], []
    for run in runs:
        length = run.batch.sequence_length
        if (run.model, length) == (runs[-1].model, runs[-1].batch.sequence_length):
            kept.append(run)
        else:
            left_out.append(
                f"{counted(run.gpus)}: not compared, since its model is another one: "
                f"{run.model.layers} layers, {length} tokens per sequence"
            )
    return kept, left_out


def figures(plan: Plan, first: Plan) -> dict[str, Any]:
    """The figures of a row, compared with the smallest row. `parts_s` are the parts of a step.
    `for_same_tokens_s` are `parts_s` scaled to the tokens per GPU that a step of the smallest row
    has. `grows` is the part whose scaled time exceeds its time in the smallest row by most."""
    rate, first_rate = _rate(plan), _rate(first)
    same = first_rate * first.forecast_step_s / (rate * plan.forecast_step_s)
    scaled = {name: same * seconds for name, seconds in parts(plan).items()}
    name, growth = grown_most(scaled, parts(first))
    published, before = plan.published, first.published
    published_efficiency = None
    if published and before and published["gpu_type"] == before["gpu_type"]:
        published_efficiency = before["step_time_s"] / published["step_time_s"] / same
    return {
        "gpus": plan.gpus,
        "mesh": plan.mesh,
        "fits": plan.fits,
        "step_s": plan.forecast_step_s,
        "tokens_per_s_per_gpu": rate,
        "efficiency": rate / first_rate,
        "parts_s": parts(plan),
        "for_same_tokens_s": scaled,
        "grows": {name: growth} if growth >= MINIMUM_S else {},
        "published_step_s": published["step_time_s"] if published else None,
        "published_efficiency": published_efficiency,
    }


def _rate(plan: Plan) -> float:
    return plan.rates["forecast"].tokens_per_s_per_gpu


def show(title: str, lines: list[dict[str, Any]]) -> None:
    """Prints the table."""
    shown = shown_parts(lines)
    headings = ("GPUs", "mesh", "fits", "step s", "tokens/s/GPU", "efficiency %", "published %")
    grid = Table(title=title, box=None, title_justify="left")
    for heading in (*headings, *map(part_name, shown), "grows"):
        text = heading in ("mesh", "fits", "grows")
        grid.add_column(
            heading, no_wrap=heading in ("mesh", "grows"), justify="left" if text else "right"
        )
    for line in lines:
        numbers = [f"{line['parts_s'].get(name, 0.0):.3f}" for name in shown]
        grid.add_row(
            str(line["gpus"]),
            line["mesh"],
            "yes" if line["fits"] else "NO",
            f"{line['step_s']:.3f}",
            f"{line['tokens_per_s_per_gpu']:.0f}",
            _percent(line["efficiency"]),
            _percent(line["published_efficiency"]),
            *numbers,
            ", ".join(
                f"{part_name(name)} {growth:+.3f} s" for name, growth in line["grows"].items()
            ),
        )
    console().print(grid)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"
