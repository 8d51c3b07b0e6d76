"""`python -m jaxbench.plan --scaling`: a recipe from its smallest row to its largest: what a step
takes, how efficient that is, and what grows.

Weak scaling: the efficiency of a row is its tokens per second and GPU over those of the smallest
row. It compares rows of one model: those with another number of layers than the largest row are
left out.
"""

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxbench.errors import RecipeError
from jaxbench.plan.plan import Plan
from jaxbench.planning.parts import parts, seconds, tokens_per_s_per_gpu
from jaxbench.planning.processes import Target, plan_each, progress
from jaxbench.recipe import recipes
from jaxbench.recipe.recipes import Recipe
from jaxbench.recipe.settings import Run

MINIMUM_S = 5e-4
"""A part shorter than this in every row is not shown: tables have three digits."""

WIDTH, BAR = 200, 60
"""Characters of a table that is no terminal's, and of the longest bar."""

FILLS = (("█", "green"), ("▓", "yellow"), ("▒", "magenta"), ("░", "blue"), ("#", "red"),
         ("=", "cyan"), ("+", "bright_red"), (":", "bright_cyan"), (".", "white"))  # fmt: skip
"""What bars are drawn with, one for each part; told apart without colours too."""


def scaling(recipe: Recipe, config: str, changes: list[str], target: Target, as_json: bool) -> int:
    """Plans the rows and prints their table; 1 when one of them fails or does not fit."""
    runs, left_out = rows(recipe, changes)
    plans: dict[Run, Plan] = {}
    failures: list[str] = []
    with progress() as bar:
        task = bar.add_task(recipe.name, total=len(runs))
        for run, plan in plan_each(runs, target, config):
            if isinstance(plan, str):
                failures.append(f"{run.gpus} GPUs: not planned: {plan}")
            else:
                plans[run] = plan
            bar.advance(task)
    lines = table([plans[run] for run in runs if run in plans])
    if as_json:
        print(json.dumps({"rows": lines, "left_out": left_out, "failures": failures}, indent=2))
    elif lines:
        show(f"{recipe.name}, {target.gpu.device}", lines)
    for line in [*failures, *left_out]:
        print(line, file=sys.stderr)
    return int(bool(failures) or not all(line["fits"] for line in lines))


def rows(recipe: Recipe, changes: list[str]) -> tuple[list[Run], list[str]]:
    """The rows that train the model of the largest one, smallest first, with `--set` changes; and
    a line for each of the others. Raises RecipeError where a change cannot be made."""
    overrides = recipes.parse_overrides(changes)
    counts = sorted(row for row in recipe.rows if isinstance(row, int))
    if not counts:
        raise RecipeError(f"recipe {recipe.name} has no rows for GPUs")
    runs = [recipes.resolve(recipe, row, overrides=overrides) for row in counts]
    work = [(run.model, run.batch.sequence_length) for run in runs]
    left_out = [
        f"{run.gpus} GPU{'s' if run.gpus > 1 else ''}: another model, {model.layers} layers on "
        f"{length} tokens: not compared"
        for run, (model, length) in zip(runs, work, strict=True)
        if (model, length) != work[-1]
    ]
    return [run for run, each in zip(runs, work, strict=True) if each == work[-1]], left_out


def table(plans: list[Plan]) -> list[dict[str, Any]]:
    """A line for each row. `parts_s` are per step; `for_same_tokens_s` are those for as many tokens
    per GPU as the smallest row has in a step, and `grows` is the one that is longer there by most,
    with how much."""
    return [_line(plan, plans[0]) for plan in plans]


def _line(plan: Plan, first: Plan) -> dict[str, Any]:
    found, before = parts(plan), parts(first)
    same = _tokens_per_gpu(first) / _tokens_per_gpu(plan)
    scaled = {name: same * value for name, value in found.items()}
    growth = {name: value - before.get(name, 0.0) for name, value in scaled.items()}
    name = max(growth, key=lambda name: growth[name])
    rate, at_first = tokens_per_s_per_gpu(plan), tokens_per_s_per_gpu(first)
    return {
        "gpus": plan.gpus,
        "mesh": plan.mesh,
        "fits": plan.fits,
        "step_s": seconds(plan),
        "tokens_per_s_per_gpu": rate,
        "efficiency": rate / at_first,
        "parts_s": found,
        "for_same_tokens_s": scaled,
        "grows": {name: growth[name]} if growth[name] >= MINIMUM_S else {},
        "published_step_s": plan.published["step_time_s"] if plan.published else None,
        "published_efficiency": _published_efficiency(plan, first),
    }


def _tokens_per_gpu(plan: Plan) -> float:
    return tokens_per_s_per_gpu(plan) * seconds(plan)


def _published_efficiency(plan: Plan, first: Plan) -> float | None:
    if plan.published is None or first.published is None:
        return None
    if plan.published["gpu_type"] != first.published["gpu_type"]:
        return None
    times = [_tokens_per_gpu(p) / p.published["step_time_s"] for p in (plan, first) if p.published]
    return times[0] / times[1]


def show(title: str, lines: list[dict[str, Any]]) -> None:
    """The table and its plot."""
    shown = [
        name
        for name in dict.fromkeys(name for line in lines for name in line["parts_s"])
        if any(line["parts_s"].get(name, 0.0) >= MINIMUM_S for line in lines)
    ]
    headings = ("GPUs", "mesh", "fits", "step s", "tokens/s/GPU", "efficiency %", "published %")
    grid = Table(title=title, box=None, title_justify="left")
    for heading in (*headings, *shown, "grows"):
        grid.add_column(heading, no_wrap=heading in ("mesh", "grows"))
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
            ", ".join(f"{name} {growth:+.3f} s" for name, growth in line["grows"].items()),
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(grid)
    console.print("\nseconds for as many tokens per GPU as in the smallest row:")
    for text in plot(lines, shown):
        console.print(text, no_wrap=True)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def plot(lines: list[dict[str, Any]], shown: list[str]) -> list[Text]:
    """A bar for each row, its parts one after another, and what they are drawn with."""
    fills = {name: FILLS[i % len(FILLS)] for i, name in enumerate(shown)}
    totals = [sum(line["for_same_tokens_s"].values()) for line in lines]
    bars = []
    for line, total in zip(lines, totals, strict=True):
        text, end, drawn = Text(f"{line['gpus']:6} "), 0.0, 0
        for name in shown:
            end += line["for_same_tokens_s"].get(name, 0.0)
            cells = round(BAR * end / max(totals)) - drawn
            character, colour = fills[name]
            text.append(character * cells, colour)
            drawn += cells
        bars.append(text.append(f" {total:.3f} s, {_percent(line['efficiency'])} %"))
    legend = Text("       ")
    for name, (character, colour) in fills.items():
        legend.append(character, colour).append(f" {name}  ")
    return [*bars, legend]
