"""`jaxbench plan --search`: compiles a row with other meshes, microbatches, `expert_parts` and
remat policies.

The search is local. It begins with the row and continues with the neighbours of the best candidate
so far (`candidates.distance` 1). Each candidate gets the remat policy that recomputes least within
the memory limit, as estimated from the peak of a compiled candidate. Step times come only from
compiled plans.
"""

import math
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.table import Table

from jaxbench.base.errors import counted
from jaxbench.base.files import as_json
from jaxbench.base.hardware import Gpu
from jaxbench.base.terminal import console, write
from jaxbench.plan import candidates
from jaxbench.plan.absent import check_compiler
from jaxbench.plan.candidates import layout, least_state, memory, spared
from jaxbench.plan.many_pages import search_page
from jaxbench.plan.plan import Plan, grows, parts
from jaxbench.plan.processes import Target, plan_each, progress
from jaxbench.plan.text import gib
from jaxbench.recipe import recipes
from jaxbench.recipe.recipes import Recipe
from jaxbench.recipe.settings import Run
from jaxbench.results.plans import part_name

BATCH = min(4, os.cpu_count() or 1)
"""The number of candidates chosen at a time. Free memory decides only how many of them are compiled
at a time, so a repeated search chooses the same candidates."""

WORTH = 0.99
"""Another remat policy is compiled if we expect it to take less than this share of the best
step."""

CAUTION = 0.95
"""The share of the memory limit that the estimate for a new layout may reach, since it is off by a
few GiB."""

REASON_WIDTH = 70
"""Characters of a reason in the table. `--json` has all of it."""


@dataclass(frozen=True)
class Outcome:
    """The result of a candidate: seconds and peak bytes. Both are infinite if compiling failed with
    `error`."""

    seconds: float = math.inf
    peak: float = math.inf
    fits: bool = False
    plan: Plan | None = None
    error: str = ""

    @classmethod
    def of(cls, plan: Plan | str) -> "Outcome":
        """The outcome of a plan, or of the reason why there is no plan."""
        if isinstance(plan, str):
            return cls(error=plan)
        return cls(plan.forecast_step_s, plan.bytes_per_device.peak, plan.fits, plan)


class Search:
    """The layouts of a row, the candidates that were tried, and which to try next."""

    def __init__(self, row: Run, gpu: Gpu, fixed: frozenset[str] = frozenset()):
        self.row = replace(row, batch=replace(row.batch, microbatch=row.microbatch))
        self.limit = gpu.memory_limit
        every = candidates.layouts(self.row, fixed)
        self.layouts = [run for run in every if least_state(run) <= self.limit]
        self.total, self.cannot_fit = len(every), len(every) - len(self.layouts)
        self.tried: dict[Run, Outcome] = {}
        remat = self.row.execution.remat if "execution.remat" in fixed else None
        self._policies = cache(lambda run: candidates.with_policies(run, remat))

    def batch(self, count: int) -> list[Run]:
        """The next candidates, at most `count`, each with another layout. The row alone comes
        first."""
        if not self.tried:
            return [self.row]
        batch: list[Run] = []
        while len(batch) < count and (run := self._next(batch)):
            batch.append(run)
        return batch

    def best(self) -> Run | None:
        """The fastest candidate that fits. Of equally fast candidates, the one with the lowest
        peak."""
        fitting = [(o.seconds, o.peak, run) for run, o in self.tried.items() if o.fits]
        return min(fitting, key=lambda entry: entry[:2], default=(None,))[-1]

    def _next(self, batch: list[Run]) -> Run | None:
        """The next candidate for a batch, with a layout that is not yet in it. First comes the best
        layout so far with another remat policy, then its neighbours. While no candidate fits, any
        layout may come, and first those that we expect to fit with full remat. None if no candidate
        is worth compiling."""
        best = self.best()
        centre = best or min(self.tried, key=lambda run: self.tried[run].peak)
        taken = {layout(run) for run in batch}

        def order(run: Run) -> tuple[bool, int]:
            too_big = best is None and self._peak(run, [centre]) > CAUTION * self.limit
            return too_big, candidates.distance(run, centre)

        for run in sorted(self.layouts, key=order):
            if best and candidates.distance(run, centre) > 1:
                break
            if layout(run) not in taken and (new := self._with_policy(run, centre)):
                return new
        return None

    def _with_policy(self, run: Run, centre: Run) -> Run | None:
        """The layout with the remat policy that recomputes least among those that we expect to fit.
        None if that was tried already, or if we do not expect it to be faster than the best
        candidate."""
        same = [other for other in self.tried if layout(other) == layout(run)]
        compiled = [other for other in same if self.tried[other].peak < math.inf]
        if same and not compiled:
            return None
        room = self.limit * (1 if compiled else CAUTION)
        policies, best = self._policies(run), self.best()
        fitting = [new for new in policies if self._peak(new, compiled or [centre]) <= room]
        if not fitting and best is None:
            fitting = sorted(policies, key=memory)[:1]
        new = max(fitting, key=spared, default=None)
        if new is None or new in self.tried:
            return None
        # If it recomputes a smaller share of the FLOPs than a compiled candidate of this layout, it
        # shortens the step by the difference of the shares.
        expected = [self.tried[o].seconds * (1 + spared(o) - spared(new)) for o in compiled]
        worth = not expected or best is None or min(expected) < self.tried[best].seconds * WORTH
        return new if worth else None

    def _peak(self, run: Run, compiled: list[Run]) -> float:
        """The expected peak of a candidate: the peak of the compiled candidate with the nearest
        estimate (`candidates.memory`), plus the difference between the estimates."""
        base = min(compiled, key=lambda other: abs(memory(other) - memory(run)))
        peak = self.tried[base].peak
        return memory(run) + (peak - memory(base) if peak < math.inf else 0)


def search(
    recipe: Recipe, row: Run, config: str, limit: int, target: Target, form: str,
    output: Path | None,
) -> int:  # fmt: skip
    """Searches from a row and prints the candidates, or writes them in another form. Returns 1 if
    none fits. What the user `--set` on the row stays as it is."""
    overrides = recipes.parse_overrides(list(row.overrides))
    fixed = {f"{override.section}.{override.name}" for override in overrides}
    check_compiler()
    state = Search(row, target.gpu, frozenset(fixed & {*candidates.KEYS}))
    explore(state, recipe, row, config, limit, target)
    lines = table(state.tried, state.row)
    best = next((line for line in lines if line["fits"]), None)
    counts = {"shapes": state.total, "state_does_not_fit": state.cannot_fit}
    tried = f"tried {len(lines)} of {state.total} meshes and microbatches"
    if state.cannot_fit:
        tried += f"; the train state alone does not fit with {state.cannot_fit} of them"
    changes = [*row.overrides, *best["set"]] if best else []
    options = [option for text in changes for option in ("--set", text)]
    command = " ".join(["--config", config, "--gpus", row.row, *target.options(), *options])
    if form == "json":
        write(as_json({"best": best, "candidates": lines, **counts}), output)
    elif form == "html":
        name = " ".join([row.recipe, *row.overrides])
        where = f"{name} on {counted(row.gpus, f'{target.gpu.name} GPU')}"
        write(search_page(where, lines, target.gpu.memory_limit, command, tried), output)
    else:
        show(lines)
        print(f"\n{tried}")
        if best is None:
            print("nothing fits; use more GPUs or fewer layers, or a higher --limit")
        else:
            result = (
                f"best: {best['step_s']:.3f} s" if best["set"] else "the row itself is the best"
            )
            print(f"{result}: {command}")
    return int(best is None)


def explore(
    state: Search, recipe: Recipe, row: Run, config: str, limit: int, target: Target
) -> None:
    """Compiles candidates until there are `limit` of them, or until none is worth it."""
    with progress() as bar:
        task = bar.add_task(f"{row.recipe} {row.row}", total=limit)
        while batch := state.batch(min(BATCH, limit - len(state.tried))):
            fastest = state.best()
            best_s = f"best {state.tried[fastest].seconds:.3f} s" if fastest else "none fits yet"
            bar.update(task, description=f"{row.recipe} {row.row}, {best_s}")
            runs = {_resolved(recipe, run, row): run for run in batch}
            for run, plan in plan_each(runs, target, config):
                bar.advance(task)
                state.tried[runs[run]] = Outcome.of(plan)
        bar.update(task, total=bar.tasks[task].completed)


def _resolved(recipe: Recipe, run: Run, row: Run) -> Run:
    """A candidate resolved from its `--set` entries, after the user's entries."""
    overrides = recipes.parse_overrides([*row.overrides, *candidates.changes(run, row)])
    return recipes.resolve(recipe, row.gpus, overrides=overrides)


def table(tried: dict[Run, Outcome], row: Run) -> list[dict[str, Any]]:
    """A line per candidate. First come those that fit, by their time, then the others by their
    memory, then those that were not compiled."""
    order = {run: (0, o.seconds) if o.fits else (1, o.peak) for run, o in tried.items()}
    lines, row_s = [], tried[row].seconds
    best = min((o for o in tried.values() if o.fits), key=lambda o: o.seconds, default=None)
    for run in sorted(order, key=lambda run: order[run]):
        outcome = tried[run]
        line = {
            "set": candidates.changes(run, row),
            "mesh": run.mesh_text(),
            "virtual_stages": run.parallelism.virtual_stages,
            "microbatch": run.microbatch,
            "expert_parts": run.execution.expert_parts,
            "remat": run.execution.remat,
            "fits": outcome.fits,
            "why": f"not compiled: {outcome.error}",
        }
        if outcome.plan:
            line |= {
                "why": why(outcome.plan, best.plan if best else None),
                "step_s": outcome.seconds,
                "of_row": outcome.seconds / row_s if row_s < math.inf else None,
                "peak": outcome.peak,
                "parts_s": parts(outcome.plan),
            }
        lines.append(line)
    return lines


def why(plan: Plan, best: Plan | None) -> str:
    """The reason why a candidate is not the best; empty for the best."""
    if not plan.fits:
        size = plan.bytes_per_device
        if size.peak <= size.limit:
            return f"does not fit: {gib(size.host - size.host_limit)} over the host's limit"
        return f"does not fit: {gib(size.peak - size.limit)} over the limit"
    if best is None or plan is best:
        return ""
    name, longer = grows(parts(plan), parts(best))
    return (
        f"{plan.forecast_step_s - best.forecast_step_s:+.3f} s; {part_name(name)} {longer:+.3f} s"
    )


def show(lines: list[dict[str, Any]]) -> None:
    """Prints the table of candidates."""
    grid = Table(box=None)
    numbers = {"virtual_stages": "chunks", "microbatch": "microbatch", "expert_parts": "parts"}
    for heading in ("step s", "of row", "peak GiB", "mesh", *numbers.values(), "remat", "why"):
        grid.add_column(heading, no_wrap=heading != "remat")
    for line in lines:
        figures = ("", "", "")
        if "step_s" in line:
            ratio = f"{line['of_row']:.3f}" if line["of_row"] else ""
            figures = (f"{line['step_s']:.3f}", ratio, f"{line['peak'] / 2**30:.1f}")
        reason = "the row; " * (not line["set"]) + line["why"]
        reason = shorten(reason.removesuffix("; "), REASON_WIDTH)
        counts = (str(line[key]) for key in numbers)
        grid.add_row(*figures, line["mesh"], *counts, line["remat"], reason)
    console().print(grid)
