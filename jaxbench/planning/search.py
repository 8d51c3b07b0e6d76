"""`python -m jaxbench.plan --search`: other meshes, microbatches and remat policies for a row, the
best of those that were compiled, and why the others lost."""

import json
import os
from collections.abc import Iterator
from textwrap import shorten
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxbench import mesh
from jaxbench.hardware import Gpu
from jaxbench.plan.absent import compile_only_devices
from jaxbench.plan.plan import Plan, state_bytes
from jaxbench.plan.text import gib
from jaxbench.planning.candidates import CHOICES, changes
from jaxbench.planning.local_search import Outcome, Search, run_search
from jaxbench.planning.parts import parts, seconds
from jaxbench.planning.processes import Target, plan_each, progress
from jaxbench.recipe import recipes
from jaxbench.recipe.recipes import Recipe
from jaxbench.recipe.settings import Run

LIMIT = 40
"""Candidates that a search compiles, if it is not told."""

ROUND = min(4, os.cpu_count() or 1)
"""Candidates that are chosen at a time. Processes may be fewer, as memory allows at the moment;
what is tried must not depend on that, or a search would not go on where it stopped."""

WIDTH = 200
"""Characters of a table that is no terminal's."""

WHY = 70
"""Characters of a reason in the table; `--json` has all of it."""

Found = dict[Run, Plan | str]
"""The plan of each candidate, or why there is none."""


def search(recipe: Recipe, row: Run, config: str, limit: int, target: Target, as_json: bool) -> int:
    """Searches from a row, resolved with the user's changes, which stay as they are; 1 when nothing
    fits."""
    asked = recipes.parse_overrides(list(row.overrides))
    fixed = frozenset(f"{override.section}.{override.name}" for override in asked) & {*CHOICES}
    searching = Search(row, target.gpu, fixed)
    found: Found = {}
    with progress() as bar:
        task = bar.add_task(f"{row.recipe} {row.row}", total=limit)

        def compile_all(batch: list[Run]) -> Iterator[tuple[Run, Outcome]]:
            runs = {resolved(recipe, run, row): run for run in batch}
            for run, plan in plan_each(runs, target, config):
                found[runs[run]] = plan
                fitting = [seconds(p) for p in found.values() if not isinstance(p, str) and p.fits]
                best = f"best {min(fitting):.3f} s" if fitting else "none fits yet"
                bar.update(task, advance=1, description=f"{row.recipe} {row.row}, {best}")
                yield runs[run], outcome(plan)

        holds = StateFits(target.gpu, row.gpus)
        run_search(searching, limit, compile_all, ROUND, holds)
        bar.update(task, total=len(found))
    lines = table(found, searching.row)
    counts = {
        "shapes": len(searching.shapes) + searching.cannot_fit,
        "state_does_not_fit": searching.cannot_fit + holds.refused,
    }
    best = next((line for line in lines if line["fits"]), None)
    if as_json:
        print(json.dumps({"best": best, "candidates": lines, **counts}, indent=2))
    else:
        show(lines, best, row, config, counts, target)
    return int(best is None)


def resolved(recipe: Recipe, run: Run, row: Run) -> Run:
    """A candidate as its recipe and `--set` entries give it, the user's first."""
    overrides = recipes.parse_overrides([*row.overrides, *changes(run, row)])
    return recipes.resolve(recipe, row.gpus, overrides=overrides)


def outcome(plan: Plan | str) -> Outcome:
    """What a search goes by."""
    if isinstance(plan, str):
        return Outcome()
    return Outcome(seconds(plan), plan.bytes_per_device.peak, plan.fits)


class StateFits:
    """Whether train state and gradients of a candidate alone fit. Needs a mesh, but no compiler."""

    def __init__(self, gpu: Gpu, gpus: int):
        self.gpu, self.devices = gpu, compile_only_devices(gpu, gpus)
        self.refused = 0

    def __call__(self, run: Run) -> bool:
        with jax.set_mesh(mesh.make_mesh(run.mesh_shape, self.devices)):
            size = state_bytes(run)
        fits = size.parameters + size.optimizer + size.gradients <= self.gpu.memory_limit
        self.refused += not fits
        return fits


def table(found: Found, row: Run) -> list[dict[str, Any]]:
    """A line for each candidate: those that fit by their time, the others by how far they are over
    the limit, and those that were not compiled."""
    plans = {run: plan for run, plan in found.items() if not isinstance(plan, str)}
    first = plans.get(row)
    best = min((p for p in plans.values() if p.fits), key=seconds, default=None)
    order = {
        run: (0, seconds(plan)) if plan.fits else (1, plan.bytes_per_device.peak)
        for run, plan in plans.items()
    }
    lines = []
    for run in sorted(found, key=lambda run: order.get(run, (2, 0))):
        plan = found[run]
        line = {
            "set": changes(run, row),
            "mesh": run.mesh_text(),
            "virtual_stages": run.parallelism.virtual_stages,
            "microbatch": run.microbatch,
            "remat": run.execution.remat,
            "fits": not isinstance(plan, str) and plan.fits,
            "why": why(plan, best),
        }
        if not isinstance(plan, str):
            line |= {
                "step_s": seconds(plan),
                "of_row": seconds(plan) / seconds(first) if first else None,
                "peak": plan.bytes_per_device.peak,
                "parts_s": parts(plan),
            }
        lines.append(line)
    return lines


def why(plan: Plan | str, best: Plan | None) -> str:
    """Why a candidate is not the best; empty of the best."""
    if isinstance(plan, str):
        return f"not compiled: {plan}"
    size = plan.bytes_per_device
    if not plan.fits:
        return f"does not fit: {gib(size.peak - size.limit)} over the limit"
    if best is None or plan is best:
        return ""
    mine, others = parts(plan), parts(best)
    more = {name: value - others.get(name, 0.0) for name, value in mine.items()}
    name = max(more, key=lambda name: more[name])
    return f"{seconds(plan) - seconds(best):+.3f} s; {name} {more[name]:+.3f} s"


def show(
    lines: list[dict[str, Any]],
    best: dict[str, Any] | None,
    row: Run,
    config: str,
    counts: dict[str, int],
    target: Target,
) -> None:
    """The candidates, and what to paste."""
    grid = Table(box=None)
    for heading in ("step s", "of row", "peak GiB", "mesh", "chunks", "microbatch", "remat", "why"):
        grid.add_column(heading, no_wrap=heading != "remat")
    for line in lines:
        figures = ("", "", "")
        if "step_s" in line:
            ratio = f"{line['of_row']:.3f}" if line["of_row"] else ""
            figures = (f"{line['step_s']:.3f}", ratio, f"{line['peak'] / 2**30:.1f}")
        numbers = str(line["virtual_stages"]), str(line["microbatch"])
        said = "the row; " * (not line["set"]) + line["why"]
        said = shorten(said.removesuffix("; "), WHY)
        grid.add_row(*figures, line["mesh"], *numbers, line["remat"], said)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(grid)
    print(
        f"\n{len(lines)} tried of {counts['shapes']} meshes and microbatches; of "
        f"{counts['state_does_not_fit']} the train state alone does not fit"
    )
    if best is None:
        print("nothing fits: it needs more GPUs or fewer layers, or a higher --limit")
        return
    given = [part for text in (*row.overrides, *best["set"]) for part in ("--set", text)]
    said = "the row is the best of them" if not best["set"] else f"best: {best['step_s']:.3f} s"
    print(f"{said}: --config {config} --gpus {row.row}", *target.options(), *given)
