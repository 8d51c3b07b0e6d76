"""A run from any source: its workload, its steps, and its result over a window of iterations."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

from jaxbench.base.hardware import NULL, is_null
from jaxbench.results.plans import PlannedStep
from jaxbench.results.profiled import Compared
from jaxbench.results.verdict import Verdict, judge
from jaxbench.results.window import spread, start_of, too_short

Window = tuple[int, int]

LISTED = 5
"""The number of missing iterations that a reason names. It counts the rest."""


def possible(seconds: float) -> bool:
    """True for a time that a step can take. Sums and ratios of other values may overflow."""
    return 1e-9 <= seconds <= 1e9


Repeats = Literal["never", "redrawn", "processes"]


@dataclass
class Steps:
    """The seconds of each iteration, and inconsistencies among the iterations.

    `expected` is the number after the last planned iteration, None if unknown. `first` is later
    than 0 in a restored run. `repeats` says why an iteration may be logged more than once. A
    progress bar is `redrawn` (its last line counts). Each of several `processes` logs it (the first
    line counts).
    """

    seconds: dict[int, float] = field(default_factory=dict)
    expected: int | None = None
    first: int = 0
    repeats: Repeats = "never"
    invalid: str | None = None
    repeated: int | None = None
    last: int = -1
    counts: Counter[int] = field(default_factory=Counter)

    def add(self, iteration: int, seconds: float, loss: float) -> None:
        """Records one logged iteration."""
        for name, value in (("step time", seconds), ("loss", loss)):
            valid = math.isfinite(value) if name == "loss" else possible(value)
            if self.invalid is None and not valid:
                self.invalid = f"the {name} is {value} at iteration {iteration}"
        earliest = self.last + {"never": 1, "redrawn": 0, "processes": -1}[self.repeats]
        if self.repeated is None and iteration < earliest:
            self.repeated = iteration
        self.last = max(self.last, iteration)
        self.counts[iteration] += 1
        if self.repeats == "redrawn" or iteration not in self.seconds:
            self.seconds[iteration] = seconds

    def problems(self) -> list[str]:
        """Reasons why these are not all steps of exactly one run."""
        if not self.seconds:
            return ["it has no iteration"]
        problems = []
        repeated = self.repeated
        uneven = self.repeats == "processes" and len(set(self.counts.values())) > 1
        if repeated is None and uneven:
            repeated = self.counts.most_common(1)[0][0]
        if repeated is not None:
            problems.append(f"iteration {repeated} occurs again: two runs, or one that began again")
        if self.expected is not None and self.last + 1 < self.expected:
            problems.append(f"it ends after iteration {self.last} of {self.expected - 1}")
        if (missing := self.last + 1 - self.first - len(self.seconds)) > 0:
            absent = (n for n in count(self.first) if n not in self.seconds)
            listed = ", ".join(map(str, islice(absent, min(missing, LISTED))))
            rest = f" and {missing - LISTED} more" if missing > LISTED else ""
            problems.append(f"missing iterations {listed}{rest}")
        return problems


@dataclass(kw_only=True)
class RunData:
    """Everything known about a run.

    `model` is the family and size. `flops` are the model's FLOPs per step and GPU, by convention.
    `published` is the published row. Bytes are of one GPU. `dated` says where `started` is from:
    "record", or "file time". `record` holds run.json and environment.json, or the fields that a log
    declares.

    `host_s` has two values for each step: the seconds that its process took for the records of the
    step before, and how many of these it spent on compiling. `layer_loads` has the load of the
    busiest expert of each layer in each step, divided by a fair share. `begins` are the first steps
    of the run's starts. The starts from `program` on ran the recorded program. `recorded_window` is
    the window of the run's own summary.
    """

    path: Path
    recipe: str
    gpus: int | None = None
    dtype: str | None = None
    label: str = ""
    steps: Steps = field(default_factory=Steps)
    model: str = ""
    tokens: int | None = None
    flops: dict[str, float] = field(default_factory=dict)
    peak_tflops: float | None = None
    published: dict[str, Any] | None = None
    failed: str | None = None
    interrupted: str | None = None
    unfinished: list[str] = field(default_factory=list)
    not_comparable: list[str] = field(default_factory=list)
    peak_memory: float | None = None
    memory_limit: float | None = None
    started: datetime | None = None
    dated: str = "record"
    plan: PlannedStep | None = None
    record: dict[str, Any] = field(default_factory=dict)
    host_s: dict[int, tuple[float, float]] = field(default_factory=dict)
    layer_loads: dict[int, list[float]] = field(default_factory=dict)
    begins: list[int] = field(default_factory=list)
    program: int = 0
    recorded_window: Window | None = None
    profiles: list[Compared] = field(default_factory=list)

    @property
    def date(self) -> datetime:
        """The time at which the run began; the year 1970 if it is unknown."""
        return self.started or datetime.fromtimestamp(0, UTC)

    @property
    def suffixes(self) -> tuple[str, str]:
        """What a name of the run has after the recipe: dtype and label, if the recipe does not
        include them."""
        dtype = "" if not self.dtype or self.dtype in self.recipe else f" {self.dtype}"
        plain = ("full", "log", "", self.recipe.rpartition(":")[2])
        return dtype, "" if self.label in plain else f" ({self.label})"

    @property
    def tflop(self) -> float | None:
        """The model's TFLOP per step and GPU to three digits, by which we tell a changed model from
        the recipe's. None if they are unknown, as in a log."""
        count = self.flops.get("full")
        return float(f"{count / 1e12:.2e}") if count else None

    @property
    def work(self) -> str:
        """The work of a step in words."""
        flops = f" and {self.tflop:g} TFLOP per GPU" if self.tflop else ""
        return f"{self.tokens} tokens{flops}"

    @property
    def null(self) -> bool:
        """True for a run on null GPUs."""
        hardware = self.record.get("hardware")
        return isinstance(hardware, dict) and is_null(str(hardware.get("device")))

    def mixed(self, window: Window) -> str | None:
        """The reason why the iterations of a window have no mean: they belong to several starts of
        the run, or to another program than the recorded one. None if they have a mean."""
        first, last = window
        starts = sorted(
            {start_of(n, self.begins) for n in self.steps.seconds if first <= n <= last}
        )
        if len(starts) > 1:
            begun = ", ".join(str(self.begins[n]) for n in starts[1:])
            return f"iterations {first} to {last} belong to several starts: it resumed at {begun}"
        if starts and starts[0] < self.program:
            resumed = self.begins[self.program]
            return (
                f"iterations {first} to {last} belong to another program: it changed at {resumed}"
            )
        return None

    def times(self, window: Window) -> list[float]:
        """The seconds of the iterations in a window, including the last. Empty if they are
        mixed."""
        first, last = window
        if self.mixed(window):
            return []
        return [s for n, s in self.steps.seconds.items() if first <= n <= last]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The mean of a run over a window, and its verdict. Seconds are None if the window has no
    iteration."""

    run: RunData
    window: Window
    mean_s: float | None
    std_s: float | None
    verdict: Verdict

    @property
    def complete(self) -> bool:
        """True if the step time counts."""
        return self.verdict.name in ("pass", "slow", "not comparable")

    @property
    def counted_s(self) -> float | None:
        """The mean step time if it counts, else None."""
        return self.mean_s if self.complete else None


def evaluate(run: RunData, window: Window) -> Result:
    """The mean of a run over a window, and the verdict."""
    first, last = window
    times = run.times(window)
    incomplete = [*run.unfinished, *run.steps.problems(), *filter(None, [run.mixed(window)])]
    if not incomplete and len(times) < last - first + 1:
        incomplete = [f"some of the iterations {first} to {last} are missing"]
    usable = [t for t in times if possible(t)]
    means: Mapping[str, float] = spread(usable) if usable else {}
    short = too_short(run.steps.last + 1, run.steps.first)
    verdict = judge(
        means.get("mean"),
        run.published["step_time_s"] if run.published else None,
        failed=run.failed or run.steps.invalid or _impossible(run, means.get("mean")),
        interrupted=run.interrupted,
        incomplete=incomplete,
        not_comparable=[NULL] if run.null else run.not_comparable or short,
    )
    return Result(
        run=run, window=window, mean_s=means.get("mean"), std_s=means.get("std"), verdict=verdict
    )


def _impossible(run: RunData, mean: float | None) -> str | None:
    """The reason why a mean step time cannot be right. None if it can, or if there is no plan."""
    bound = run.plan.bound_s if run.plan else None
    if run.null or mean is None or bound is None or mean >= bound:
        return None
    return f"a step of {mean:.3f} s is impossible: the bound of its plan is {bound:.3f} s"
