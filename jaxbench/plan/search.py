"""`jaxbench plan --search`: compiles a row with other settings (`candidates.KEYS`).

The search is local. It begins with the row and continues next to the fastest candidates so far:
with one other layout or option, or with two of these at a time. What is compiled first, and what is
not worth it, follows from the seconds that we expect a candidate to save, times the probability
that it fits. The parts of compiled plans decide what we expect (`candidates.layout_s`). Step times
come only from compiled plans.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from pathlib import Path
from statistics import NormalDist
from textwrap import shorten
from typing import Any

from rich.table import Table

from jaxbench.base.errors import counted
from jaxbench.base.files import as_json
from jaxbench.base.hardware import Gpu
from jaxbench.base.terminal import console, write
from jaxbench.plan import candidates
from jaxbench.plan.absent import check_compiler
from jaxbench.plan.candidates import Policy, estimated_peak, layout, least_state, merged, options
from jaxbench.plan.plan import Plan, parts
from jaxbench.plan.processes import plan_each, progress
from jaxbench.plan.systems import Target
from jaxbench.plan.text import gib, in_gib
from jaxbench.recipe import recipes
from jaxbench.recipe.recipes import Recipe
from jaxbench.recipe.settings import CHOSEN, Run
from jaxbench.results.plans import part_name

BATCH = min(4, os.cpu_count() or 1)
"""The number of candidates chosen at a time. Free memory decides only how many of them are compiled
at a time, so a repeated search chooses the same candidates."""

WORTH = 0.99
"""Another policy of the best candidate is compiled if we expect it to take less than this share of
the best step."""

DOUBT = 0.03
"""Another layout or option is compiled unless we expect it to be slower than the best candidate by
more than this share: the estimate is rough."""

PAIRED = 6
"""The number of single changes, the most promising ones, that are also tried two at a time."""

OFF_LAYOUT, OFF_POLICY = 0.06, 0.02
"""Standard deviations of the expected peak of another layout, and of a compiled layout with another
policy, as shares of the memory limit. The first is how much the errors of
`candidates.estimated_peak` differ between two rows of a recipe (root mean square of all plans on
H100s). The second is assumed."""

UNLIKELY = 0.1
"""What fits with a lower probability is not compiled once anything fits."""

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
        self.gpu, self.limit, self.fixed = gpu, gpu.memory_limit, fixed
        execution, without_host = self.row.execution, None if gpu.host_limit else "none"
        self.remat = execution.remat if "execution.remat" in fixed else None
        self.offload = execution.offload if "execution.offload" in fixed else without_host
        every = candidates.layouts(self.row, fixed)
        self.layouts = [run for run in every if least_state(run) <= self.limit]
        self.total, self.cannot_fit = len(every), len(every) - len(self.layouts)
        self.tried: dict[Run, Outcome] = {}

    def batch(self, count: int) -> list[Run]:
        """The next candidates, at most `count`. The row alone comes first. Of candidates with the
        same layout only the most promising is in front: its result may answer for the others."""
        if not self.tried:
            return [self.row][:count]
        found = self.to_compile()
        first = {layout(run): run for run in reversed(found)}
        return sorted(found, key=lambda run: first[layout(run)] is not run)[:count]

    def best(self) -> Run | None:
        """The fastest candidate that fits. Of equally fast candidates, the one with the lowest
        peak."""
        fitting = [(o.seconds, o.peak, run) for run, o in self.tried.items() if o.fits]
        return min(fitting, key=lambda entry: entry[:2], default=(None,))[-1]

    def to_compile(self) -> list[Run]:
        """What is worth compiling next, the most promising first: the fastest candidates so far
        with one or two other settings, or the best one with another policy. While no candidate
        fits, any layout, and first those that we expect to fit."""
        best = self.best()
        return self._to_fit() if best is None else self._next_to(best)

    def _next_to(self, best: Run) -> list[Run]:
        """What is worth compiling next to the fastest candidates, the most promising first."""
        best_s = self.tried[best].seconds
        enough_s = (1 + DOUBT) * best_s
        fastest = [run for run, o in self.tried.items() if o.fits and o.seconds < enough_s]

        def promising(runs: Iterable[Run]) -> dict[Run, float]:
            return dict(new for run in runs if (new := self._most_promising(run, enough_s)))

        near = [
            run for run in self.layouts
            if layout(run) != layout(best)
            and any(candidates.distance(run, other) == 1 for other in fastest)
        ]  # fmt: skip
        single = [_with_options_of(run, best) for run in near]
        known_slower = self._slower_options() - {*options(best)}
        other = candidates.other_options(best, self.fixed)
        single += [run for run in other if known_slower.isdisjoint(options(run))]
        found = promising(single)
        # Only changes that by themselves promise to be faster than the best one.
        faster = [run for run in found if found[run] > enough_s - best_s]
        first = sorted(faster, key=found.__getitem__, reverse=True)[:PAIRED]
        pairs = (merged(one, other, best) for one, other in combinations(first, 2))
        found |= promising(run for run in pairs if run and least_state(run) <= self.limit)
        again = self._most_promising(best, enough_s)
        if again and again[1] > enough_s - WORTH * best_s:
            found[again[0]] = again[1]
        return sorted(found, key=found.__getitem__, reverse=True)

    def _to_fit(self) -> list[Run]:
        """Layouts that may fit while nothing does, each with its most promising policy."""
        centre = min(self.tried, key=lambda run: self.tried[run].peak)

        def order(run: Run) -> tuple[bool, int, float]:
            policy = candidates.policy_of(run)
            chance = self._chances(run, [policy])[policy]
            sizes = zip(run.mesh_shape, centre.mesh_shape, strict=True)
            moved = sum(abs(math.log(new / old)) for new, old in sizes)
            return chance < 1 / 2, candidates.distance(run, centre), moved

        result: list[Run] = []
        for run in sorted(self.layouts, key=order):
            if new := self._most_promising(_with_options_of(run, self.row)):
                result.append(new[0])
            if len(result) == BATCH:
                break
        return result

    def _most_promising(self, run: Run, than_s: float | None = None) -> tuple[Run, float] | None:
        """The layout and options of a run with the most promising policy, and what it promises: the
        seconds that we expect it to take less than `than_s`, times the probability that it fits.
        Without `than_s`, to fit counts more than to be fast. Of policies that promise about the
        same, it takes the one with the least host memory. None if it was tried already, if it
        promises nothing, or if this layout did not compile."""
        same = self._same(run)
        compiled = [other for other in same if self.tried[other].peak < math.inf]
        if same and not compiled:
            return None
        policies = self._policies(run)
        expected = self._expected_s(run, policies, compiled)
        least = UNLIKELY if than_s else 0.0
        than_s = than_s or 2 * max(expected.values(), default=0.0)
        faster = [policy for policy in policies if expected[policy] < than_s]
        promises = {
            policy: (than_s - expected[policy]) * chance
            for policy, chance in self._chances(run, faster).items()
            if chance >= least
        }
        enough = WORTH * max(promises.values(), default=0.0)
        for policy in sorted(promises, key=lambda p: (promises[p] < enough, p.host, -promises[p])):
            if new := candidates.with_policy(run, policy):
                return None if new in self.tried else (new, promises[policy])
        return None

    def _policies(self, run: Run) -> list[Policy]:
        """The policies to try for a run, and that of the best candidate. The memory of the host
        decides, unless it can hold none of them."""
        best = self.best()
        every = candidates.policies(run, self.remat, self.offload)
        if best and run.parallelism.pipeline == 1:
            every = [candidates.policy_of(best), *every]
        host = self.gpu.host_limit
        return [each for each in every if candidates.host_bytes(run, each) <= host] or every

    def _chances(self, run: Run, policies: list[Policy]) -> dict[Policy, float]:
        """The probability that a run fits with each of these policies. It is known for what was
        compiled. Otherwise the estimate is off by as much as on the nearest candidate of this
        layout, or else on the one that is most alike."""
        here = [o for o in self.tried if layout(o) == layout(run) and self.tried[o].peak < math.inf]
        near = here or [*filter(None, [self._most_alike(run)])]
        off = {(size := estimated_peak(o)): self.tried[o].peak - size for o in near} or {0.0: 0.0}
        known = {candidates.policy_of(o): float(self.tried[o].fits) for o in self._same(run)}
        deviation = (OFF_POLICY if here else OFF_LAYOUT) * self.limit

        def chance(policy: Policy) -> float:
            estimate = estimated_peak(run, policy)
            nearest = min(off, key=lambda size: abs(size - estimate))
            return NormalDist(estimate + off[nearest], deviation).cdf(self.limit)

        return {each: known[each] if each in known else chance(each) for each in policies}

    def _expected_s(
        self, run: Run, policies: list[Policy], compiled: list[Run]
    ) -> dict[Policy, float]:
        """The seconds that we expect of a step with each of these policies, from the fastest
        candidate that was `compiled` with the run's layout and options, or else from the one that
        is most alike. If the times of nothing are known, the seconds only order policies."""
        fastest = min(compiled, key=lambda other: self.tried[other].seconds, default=None)
        base = fastest or self._most_alike(run)
        step_s = without_policy_s = 1.0
        if base and self.tried[base].seconds < math.inf:
            step_s = self.tried[base].seconds
            without_policy_s = self._without_policy_s(run, base)
        return {
            policy: without_policy_s + candidates.policy_s(run, policy, step_s, self.gpu)
            for policy in policies
        }

    def _most_alike(self, run: Run) -> Run | None:
        """The compiled candidate whose mesh has most nearly the same axes. Of several, the fastest
        that fits. What an axis costs is only known from the plan of a mesh that has it."""
        axes = candidates.axes(run)
        order = {
            other: (len(axes ^ candidates.axes(other)), not outcome.fits, outcome.seconds)
            for other, outcome in self.tried.items()
            if outcome.peak < math.inf
        }
        return min(order, key=order.__getitem__, default=None)

    def _without_policy_s(self, run: Run, base: Run) -> float:
        """The step that we expect of a candidate from the plan of another one, without what its
        policy adds (`candidates.policy_s`)."""
        outcome = self.tried[base]
        step_s, parts_s = outcome.seconds, parts(outcome.plan) if outcome.plan else {}
        of_policy = candidates.policy_s(base, candidates.policy_of(base), step_s, self.gpu)
        return step_s - of_policy + candidates.layout_s(run, base, parts_s, step_s, self.gpu)

    def _slower_options(self) -> set[str]:
        """Options that made a candidate slower which is otherwise the same."""
        result = set[str]()
        for a, b in permutations(self.tried, 2):
            differing = {*options(b)} - {*options(a)}
            alike = layout(a) == layout(b) and candidates.policy_of(a) == candidates.policy_of(b)
            if alike and len(differing) == 1 and self.tried[b].seconds >= self.tried[a].seconds:
                result |= differing
        return result

    def _same(self, run: Run) -> list[Run]:
        """The candidates that were tried with the layout and the options of a run."""
        key = layout(run), options(run)
        return [other for other in self.tried if (layout(other), options(other)) == key]


def _with_options_of(run: Run, other: Run) -> Run:
    """A layout with another candidate's options, as far as it can have them."""
    sums = "step" if run.parallelism.pipeline > 1 else other.execution.replica_sums
    flags = other.execution.xla_flags
    execution = replace(run.execution, xla_flags=flags, replica_sums=sums)
    return replace(run, execution=execution, precision=other.precision)


def search(
    recipe: Recipe, row: Run, config: str, limit: int, target: Target, form: str,
    output: Path | None,
) -> int:  # fmt: skip
    """Searches from a row and prints the candidates, or writes them as JSON. Returns 1 if none
    fits."""
    state = run(recipe, row, config, limit, target)
    lines = table(state.tried, state.row)
    best = next((line for line in lines if line["fits"]), None)
    if form == "json":
        counts = {
            "shapes": state.total,
            "state_does_not_fit": state.cannot_fit,
        }
        write(as_json({"best": best, "candidates": lines, **counts}), output)
        return int(best is None)
    show(lines)
    print(f"\n{what_was_tried(state)}")
    if best is None:
        print("nothing fits; use more GPUs or fewer layers, or a higher --limit")
        return 1
    changes = [f"--set {change}" for change in (*row.overrides, *best["set"])]
    command = " ".join(["--config", config, "--gpus", row.row, *target.options(), *changes])
    result = f"best: {best['step_s']:.3f} s" if best["set"] else "the row itself is the best"
    print(f"{result}: {command}")
    return 0


def what_was_tried(state: Search) -> str:
    """How many candidates a search has compiled, of how many, and whether others may be faster."""
    compiled = counted(len(state.tried), "candidate")
    text = f"{compiled} compiled, of {state.total} meshes and microbatches"
    if state.cannot_fit:
        text += f"; in {state.cannot_fit} of these the train state alone does not fit"
    if state.best() is None:
        return text
    if left := len(state.to_compile()):
        return f"{text}; another {counted(left, 'candidate')} may be faster (--limit)"
    return f"{text}; we expect no other to be as fast"


def fixed_keys(row: Run) -> frozenset[str]:
    """The settings that a search would vary, but that the user `--set` on the row."""
    overrides = recipes.parse_overrides(list(row.overrides))
    return frozenset(f"{o.section}.{o.name}" for o in overrides) & frozenset(candidates.KEYS)


def run(
    recipe: Recipe, row: Run, config: str, limit: int, target: Target,
    free: frozenset[str] = frozenset(), at_a_time: int = BATCH,
) -> Search:  # fmt: skip
    """A finished search from a row: compiles candidates, a few at a time, until there are `limit`
    of them, or until none is worth it. What the user `--set` on the row stays as it is, except keys
    in `free`."""
    check_compiler()
    state = Search(row, target.gpu, fixed_keys(row) - free)
    with progress() as bar:
        task = bar.add_task(f"{row.recipe} {row.row}", total=limit)
        while batch := state.batch(min(at_a_time, limit - len(state.tried))):
            fastest = state.best()
            best_s = f"best {state.tried[fastest].seconds:.3f} s" if fastest else "none fits yet"
            bar.update(task, description=f"{row.recipe} {row.row}, {best_s}")
            runs = {_resolved(recipe, run, row): run for run in batch}
            for run, plan in plan_each(runs, target, config):
                bar.advance(task)
                state.tried[runs[run]] = Outcome.of(plan)
        bar.update(task, total=bar.tasks[task].completed)
    return state


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
            "microbatch": run.microbatch,
            "other": other_changes(run, row),
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


def other_changes(run: Run, row: Run) -> list[str]:
    """What differs from the row besides the sizes of axes and the microbatch."""
    axes = {f"parallelism.{axis}" for axis in CHOSEN} | {"batch.microbatch", "batch.global_batch"}
    before = candidates.settings(row)
    return [
        f"{key.partition('.')[2]}={value}"
        for key, value in candidates.settings(run).items()
        if key not in axes and value != before[key]
    ]


def why(plan: Plan, best: Plan | None) -> str:
    """The reason why a candidate is not the best, with the part of its step that is longer by
    most; empty for the best."""
    if not plan.fits:
        size = plan.bytes_per_device
        if size.peak <= size.limit:
            return f"does not fit: {gib(size.host - size.host_limit)} over the host's limit"
        return f"does not fit: {gib(size.peak - size.limit)} over the limit"
    if best is None or plan is best:
        return ""
    of_best = parts(best)
    longer = {name: s - of_best.get(name, 0.0) for name, s in parts(plan).items()}
    name = max(longer, key=longer.__getitem__)
    slower_s = plan.forecast_step_s - best.forecast_step_s
    return f"{slower_s:+.3f} s; {part_name(name)} {longer[name]:+.3f} s"


def show(lines: list[dict[str, Any]]) -> None:
    """Prints the table of candidates."""
    grid = Table(box=None)
    for heading in ("step s", "of row", "peak GiB", "mesh", "microbatch", "other changes", "why"):
        grid.add_column(heading, no_wrap=heading != "other changes")
    for line in lines:
        figures = ("", "", "")
        if "step_s" in line:
            ratio = f"{line['of_row']:.3f}" if line["of_row"] else ""
            figures = (f"{line['step_s']:.3f}", ratio, in_gib(line["peak"]))
        reason = "the row; " * (not line["set"]) + line["why"]
        reason = shorten(reason.removesuffix("; "), REASON_WIDTH)
        microbatch, other = str(line["microbatch"]), " ".join(line["other"])
        grid.add_row(*figures, line["mesh"], microbatch, other, reason)
    console().print(grid)
