"""One run as it was found: what it was, its steps, and the verdict on it."""

import math
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

from jaxbench.recipe.verdict import Verdict, judge
from jaxbench.recipe.window import spread, too_short

Window = tuple[int, int]

LISTED = 5
"""Iterations named in a reason; the rest are counted."""

LARGEST = 1e18
"""Figure that anybody can have measured, in any unit here."""

Again = Literal["never", "redrawn", "processes"]


@dataclass
class Steps:
    """Seconds of each iteration, and what is wrong with them.

    `expected` is how many the run was to make, None where nothing says so. `again` says when an
    iteration may come more than once: as a progress bar that is drawn again, whose last state
    counts, or as often as there are processes, of which the first counts.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    expected: int | None = None
    again: Again = "never"
    wrong: str | None = None
    repeated: int | None = None
    last: int = -1
    counts: Counter[int] = field(default_factory=Counter)

    def add(self, iteration: int, seconds: float, loss: float) -> None:
        """Takes an iteration in."""
        for name, value in (("step time", seconds), ("loss", loss)):
            if self.wrong is None and not math.isfinite(value):
                self.wrong = f"the {name} is {value} at iteration {iteration}"
        if self.wrong is None and seconds <= 0:
            self.wrong = f"the step time is {seconds} at iteration {iteration}"
        near = {"never": 1, "redrawn": 0, "processes": -1}[self.again]
        if self.repeated is None and iteration < self.last + near:
            self.repeated = iteration
        self.last = max(self.last, iteration)
        self.counts[iteration] += 1
        if self.again == "redrawn" or iteration not in self.seconds:
            self.seconds[iteration] = seconds

    def problems(self) -> list[str]:
        """Why these are not all the steps of one run."""
        if not self.seconds:
            return ["no iteration is there"]
        found = []
        repeated = self.repeated
        uneven = self.again == "processes" and len(set(self.counts.values())) > 1
        if repeated is None and uneven:
            repeated = self.counts.most_common(1)[0][0]
        if repeated is not None:
            found.append(f"iteration {repeated} comes again: two runs, or one that began again")
        if self.expected is not None and self.last + 1 < self.expected:
            found.append(f"it ends after iteration {self.last} of {self.expected - 1}")
        absent = self.last + 1 - len(self.seconds)
        if absent:
            named = list(islice((n for n in count() if n not in self.seconds), min(absent, LISTED)))
            more = f" and {absent - len(named)} more" if absent > len(named) else ""
            found.append(f"missing iterations {', '.join(map(str, named))}{more}")
        return found


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a plan of the same program says of a step: `kind` is `forecast`, or `bound` where it has
    no forecast. Parts are in seconds by name, memory in bytes of one GPU."""

    path: Path
    kind: str
    step_s: float
    parts: dict[str, float]
    peak_memory: float | None


def figure(value: Any) -> float:
    """A time, a rate or a size that somebody recorded. Raises TypeError for what is none."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 <= value < LARGEST):
        raise TypeError(f"{str(value)[:20]} is no figure")
    return float(value)


@dataclass(kw_only=True)
class Found:
    """What is known of a run.

    `source` says whose record it is, `model` what was trained (family and size). `flops` are the
    model's in one step on one GPU, by convention; `published` is the published row. Bytes are of
    one GPU. `started` comes from the record, or else (`dated` is then "file time") from the file.
    `plan` is what was planned for the same program, `record` the whole run.json and
    environment.json, or what a log declares.
    """

    path: Path
    source: str
    recipe: str
    gpus: int | None
    dtype: str | None
    label: str
    steps: Steps
    model: str = ""
    tokens: int | None = None
    flops: dict[str, float] = field(default_factory=dict)
    peak_tflops: float | None = None
    published: dict[str, Any] | None = None
    failed: str | None = None
    unfinished: list[str] = field(default_factory=list)
    not_comparable: list[str] = field(default_factory=list)
    peak_memory: float | None = None
    memory_limit: float | None = None
    started: datetime | None = None
    dated: str = "record"
    plan: Plan | None = None
    record: dict[str, Any] = field(default_factory=dict)

    def times(self, window: Window) -> list[float]:
        """Seconds of the iterations in a window, the last included."""
        first, last = window
        return [s for n, s in self.steps.seconds.items() if first <= n <= last]


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run over a window of its iterations. Seconds are None where it has no such iteration."""

    found: Found
    window: Window
    mean_s: float | None
    std_s: float | None
    verdict: Verdict

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        """Training throughput."""
        f = self.found
        return f.tokens / self.mean_s / f.gpus if f.tokens and f.gpus and self.mean_s else None

    def tflops_per_gpu(self, convention: str) -> float | None:
        """Model FLOPs by a convention of `flops.CONVENTIONS`."""
        count = self.found.flops.get(convention)
        return count / self.mean_s / 1e12 if count and self.mean_s else None

    def mfu(self, convention: str) -> float | None:
        """Of the peak of the GPU it ran on, or that its source states."""
        rate, peak = self.tflops_per_gpu(convention), self.found.peak_tflops
        return rate / peak if rate and peak else None


def result(found: Found, window: Window) -> Result:
    """A run's mean over a window, and the verdict on it."""
    first, last = window
    times = found.times(window)
    incomplete = [*found.unfinished, *found.steps.problems()]
    if not incomplete and len(times) < last - first + 1:
        incomplete = [f"iterations {first} to {last} are not all there"]
    usable = [t for t in times if math.isfinite(t) and t > 0]
    means = spread(usable) if usable else None
    verdict = judge(
        means["mean"] if means else None,
        found.published["step_time_s"] if found.published else None,
        failed=found.failed or found.steps.wrong,
        incomplete=incomplete,
        not_comparable=found.not_comparable or too_short(found.steps.last + 1),
    )
    return Result(
        found=found,
        window=window,
        mean_s=means["mean"] if means else None,
        std_s=means["std"] if means else None,
        verdict=verdict,
    )
