"""Compares two sets of runs, such as runs with and without a flag, or with another driver.

The ratio of mean step times has a confidence interval from a t test (Welch 1947) of all steps.
Steps of a job have more in common than steps of different jobs. So if both sides have several runs,
the interval also covers that of the runs' means. If a side has a single run, the interval leaves
out the variation from job to job, and the comparison says so.
"""

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxbench.base.errors import RecipeError
from jaxbench.base.student import student
from jaxbench.recipe.build import flat
from jaxbench.report.gpus import gpus, slow_nodes
from jaxbench.report.runs import Result

CONFIDENCE = 0.95

SECTIONS = ("recipe", "flags", "options", "versions", "hardware", "kernels", "environment")
"""The sections of a record that describe what ran."""

JOB_VARIABLE = re.compile(
    r"(SLURM\w*_(JOBID|\w*ID|\w*TIME|\w*PORT|JOB_NAME|\w*SUBMIT_DIR|\w*ADDR)|JAX_COORDINATOR_PORT"
    r"|environment\.PATH)$"
)
"""Environment variables that differ from job to job, whatever the job runs, and the search path of
the shell."""

LONGEST = 120
"""The most characters of a value that differs, in a text."""

TELEMETRY_DIFFERS = 0.02
"""Telemetry of two runs differs if their medians differ by a larger share."""

Outcome = Literal["faster", "slower", "same", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The mean step time of B over the mean step time of A, its confidence interval, and the
    verdict. `differences` are (field, value in A, value in B). `runs` is the number of runs on each
    side."""

    ratio: float
    low: float
    high: float
    threshold: float
    verdict: Outcome
    runs: tuple[int, int]
    differences: list[tuple[str, Any, Any]]

    def text(self) -> str:
        """The comparison for people."""
        percent, low, high = (100 * (value - 1) for value in (self.ratio, self.low, self.high))
        single = [side for side, count in zip("AB", self.runs, strict=True) if count == 1]
        lines = [
            f"{self.verdict}: the step time of B differs from A's by {percent:+.2f} % "
            f"(95 % between {low:+.2f} and {high:+.2f} %, threshold {100 * self.threshold:g} %)",
            f"runs: {self.runs[0]} of A, {self.runs[1]} of B",
            *(f"only one run of {side}, so the interval leaves out what differs from job to job"
              for side in single),
            "what differs:" if self.differences else "the records do not differ",
            *(f"  {name}: {short(a)} -> {short(b)}" for name, a, b in self.differences),
        ]  # fmt: skip
        return "\n".join(lines) + "\n"


def compare(a: Sequence[Result], b: Sequence[Result], threshold: float) -> Comparison:
    """Compares two sets of complete runs. Raises RecipeError for an incomplete run, and for sets of
    different workloads."""
    for side, results in (("A", a), ("B", b)):
        for r in results:
            if not r.complete:
                raise RecipeError(
                    f"{r.run.path}: {side} needs complete runs, but this one is {r.verdict}"
                )
    runs = [r.run for r in [*a, *b]]
    workloads = {f"{run.recipe} {run.dtype} on {run.gpus}, {run.work}" for run in runs}
    if len(workloads) > 1:
        raise RecipeError(f"A and B are of different work: {'; '.join(sorted(workloads))}")
    sides = [[np.asarray(r.run.times(r.window)) for r in side] for side in (a, b)]
    for side, times in zip("AB", sides, strict=True):
        if sum(map(len, times)) < 2:
            raise RecipeError(
                f"{side} needs at least two steps to compare; give it more steps or runs"
            )
    values = [np.concatenate(side) for side in sides]
    intervals = [_interval(*values)]
    if min(map(len, sides)) > 1:
        values = [np.array([times.mean() for times in side]) for side in sides]
        intervals.append(_interval(*values))
    low, high = min(low for low, _ in intervals), max(high for _, high in intervals)
    return Comparison(
        ratio=float(values[1].mean() / values[0].mean()),
        low=low,
        high=high,
        threshold=threshold,
        verdict=_outcome(low, high, threshold),
        runs=(len(a), len(b)),
        differences=list(differences(a, b)),
    )


def _interval(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """The confidence interval of the mean of `b` over the mean of `a`, each of at least two values:
    Welch's, for the logarithms of the means."""
    variances = [x.var(ddof=1) / len(x) / x.mean() ** 2 for x in (a, b)]
    ratio = b.mean() / a.mean()
    if not (error := sum(variances)):
        return float(ratio), float(ratio)
    parts = zip(variances, (a, b), strict=True)
    freedom = error**2 / sum(variance**2 / (len(x) - 1) for variance, x in parts)
    factor = np.exp(student((1 + CONFIDENCE) / 2, freedom) * error**0.5)
    return float(ratio / factor), float(ratio * factor)


def _outcome(low: float, high: float, threshold: float) -> Outcome:
    if low > 1 + threshold:
        return "slower"
    if high < 1 - threshold:
        return "faster"
    return "same" if 1 - threshold <= low and high <= 1 + threshold else "undecided"


def short(value: Any) -> str:
    """A value that differs, short enough for a line."""
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def differences(a: Sequence[Result], b: Sequence[Result]) -> Iterator[tuple[str, Any, Any]]:
    """(field, value in A, value in B) for each difference between the records of two sets of runs,
    except variables of a job; then the differences of telemetry. If the runs of a set have several
    values, they are in one text."""
    left, right = (values_of([r.run.record for r in side]) for side in (a, b))
    for name in dict.fromkeys([*left, *right]):
        if left.get(name) != right.get(name) and not JOB_VARIABLE.search(name):
            yield name, left.get(name), right.get(name)
    yield from _telemetry(a, b)


def values_of(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The value of each field in some records, or a text of all its values."""
    fields = [dict(flat({part: record.get(part) for part in SECTIONS})) for record in records]
    merged = {}
    for name in dict.fromkeys(name for record in fields for name in record):
        values = [record.get(name) for record in fields]
        same = all(value == values[0] for value in values)
        merged[name] = values[0] if same else ", ".join(sorted(set(map(str, values))))
    return merged


def _telemetry(a: Sequence[Result], b: Sequence[Result]) -> Iterator[tuple[str, str, str]]:
    """What telemetry says of one set of runs and not of the other: the typical clock and power, and
    slow nodes. Nothing if one of them has no telemetry."""
    both = [[gpus(r.run.record) for r in side] for side in (a, b)]
    every = [[gpu for run in side for gpu in run] for side in both]
    clocks = [[100 * gpu.clock for gpu in side if gpu.clock] for side in every]
    powers = [[gpu.power_w for gpu in side if gpu.power_w] for side in every]
    for name, unit, values in (
        ("clock under load", "% of the highest", clocks), ("power under load", "W", powers),
    ):  # fmt: skip
        if all(values):
            typical_a, typical_b = map(statistics.median, values)
            if abs(typical_b - typical_a) > TELEMETRY_DIFFERS * typical_a:
                yield f"{name}, {unit}", f"{typical_a:.1f}", f"{typical_b:.1f}"
    if all(every):
        slow = ({node for run in side for node in slow_nodes(run)} for side in both)
        before, after = (", ".join(sorted(nodes)) or "none" for nodes in slow)
        if before != after:
            yield "slow nodes", before, after
