"""One run as it was found: what it was, its steps, and the verdict on it."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxbench.recipe.verdict import Verdict, judge
from jaxbench.recipe.window import spread

Window = tuple[int, int]

LISTED = 5
"""Iterations named in a reason; the rest are counted."""


@dataclass
class Steps:
    """Seconds and loss of each iteration, and what is wrong with them.

    `expected` is how many the run was to make, None where nothing says so. An iteration that comes
    twice keeps its first time.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    expected: int | None = None
    not_finite: str | None = None
    repeated: int | None = None

    def add(self, iteration: int, seconds: float, loss: float) -> None:
        """Takes an iteration in. One that lies behind the last two was begun again."""
        if self.repeated is None and self.seconds and iteration < max(self.seconds) - 1:
            self.repeated = iteration
        if iteration in self.seconds:
            return
        for name, value in (("step time", seconds), ("loss", loss)):
            if self.not_finite is None and not math.isfinite(value):
                self.not_finite = f"the {name} is {value} at iteration {iteration}"
        self.seconds[iteration], self.losses[iteration] = seconds, loss

    def problems(self) -> list[str]:
        """Why these are not all the steps of one run."""
        if not self.seconds:
            return ["no iteration is there"]
        found = []
        if self.repeated is not None:
            found.append(
                f"iteration {self.repeated} comes again after iteration {max(self.seconds)}: two "
                "runs, or one that began again"
            )
        count = self.expected if self.expected is not None else max(self.seconds) + 1
        missing = [n for n in range(count) if n not in self.seconds]
        if missing and missing[0] > max(self.seconds):
            found.append(f"it ends after iteration {max(self.seconds)} of {count - 1}")
        elif missing:
            more = f" and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
            found.append(f"missing iterations {', '.join(map(str, missing[:LISTED]))}{more}")
        return found


@dataclass(kw_only=True)
class Found:
    """What is known of a run.

    `source` says whose record it is. `flops` are the model's in one step on one GPU, by
    convention; `published` is the published row. `record` is the whole run.json, where there is
    one.
    """

    path: Path
    source: str
    recipe: str
    gpus: int | None
    dtype: str | None
    label: str
    steps: Steps
    tokens: int | None = None
    flops: dict[str, float] = field(default_factory=dict)
    peak_tflops: float | None = None
    published: dict[str, Any] | None = None
    failed: str | None = None
    unfinished: list[str] = field(default_factory=list)
    not_comparable: list[str] = field(default_factory=list)
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
    usable = [t for t in times if math.isfinite(t)]
    means = spread(usable) if usable else None
    mean = means["mean"] if means else None
    verdict = judge(
        mean,
        found.published["step_time_s"] if found.published else None,
        failed=found.failed or found.steps.not_finite,
        incomplete=incomplete,
        not_comparable=found.not_comparable,
    )
    return Result(
        found=found,
        window=window,
        mean_s=mean,
        std_s=means["std"] if means else None,
        verdict=verdict,
    )
