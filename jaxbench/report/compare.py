"""Two runs, or two sets of repeats, against each other: what a flag, a driver or a cluster changed.

The ratio of mean step times comes with a confidence interval by the bootstrap (Efron 1979) over
both what varies between repeats and what varies between the steps of one: repeats are drawn with
replacement, and then steps from each. With a single run on a side only its steps are drawn, and
what differs from job to job is not in the interval; the comparison says so.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxbench.errors import RecipeError
from jaxbench.report.found import Result

DRAWS = 4000
CONFIDENCE = 0.95
DRAWN_AT_ONCE = 1_000_000
"""Steps, of all draws together: what a long run takes in memory."""

SEED = 0
"""Of the draws: the same runs give the same interval."""

SECTIONS = ("recipe", "flags", "versions", "hardware", "kernels", "environment")
"""Parts of a record in which two runs may differ on purpose."""

NAMES_A_JOB = re.compile(r"SLURM\w*_(JOBID|\w*ID|\w*TIME|\w*PORT|JOB_NAME|\w*SUBMIT_DIR|\w*ADDR)$")
"""Variables of the environment that differ from job to job, whatever it runs."""

Name = Literal["faster", "slower", "same", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The mean step time of B over that of A, its interval, and what it comes to at a threshold.

    `differences` are (field, value in A, value in B); `runs` is the number of runs on each side.
    """

    ratio: float
    low: float
    high: float
    threshold: float
    verdict: Name
    runs: tuple[int, int]
    differences: list[tuple[str, Any, Any]]

    def text(self) -> str:
        """The comparison for people."""
        percent = f"{100 * (self.ratio - 1):+.2f} %"
        single = [side for side, count in zip("AB", self.runs, strict=True) if count == 1]
        lines = [
            f"{self.verdict}: the step time of B is {percent} that of A "
            f"(95 % between {100 * (self.low - 1):+.2f} and {100 * (self.high - 1):+.2f} %, "
            f"threshold {100 * self.threshold:g} %)",
            f"runs: {self.runs[0]} of A, {self.runs[1]} of B",
            *(
                f"only one run of {side}: what differs from job to job is not in the interval"
                for side in single
            ),
            *(["what differs:"] if self.differences else ["nothing recorded differs"]),
            *(f"  {name}: {a} -> {b}" for name, a, b in self.differences),
        ]
        return "\n".join(lines) + "\n"


def compare(a: Sequence[Result], b: Sequence[Result], threshold: float) -> Comparison:
    """Two sets of whole runs of the same work. Raises RecipeError for a run that is not whole, and
    for sets of different work."""
    for side, results in (("A", a), ("B", b)):
        for r in results:
            if r.verdict.name in ("failed", "incomplete"):
                raise RecipeError(f"{r.found.path}, a run of {side}, is {r.verdict}")
    works = {(r.found.recipe, r.found.dtype, r.found.gpus, r.found.tokens) for r in [*a, *b]}
    if len(works) > 1:
        shown = "; ".join(sorted(f"{recipe} {dtype} on {gpus}" for recipe, dtype, gpus, _ in works))
        raise RecipeError(f"A and B hold different work: {shown}")
    generator = np.random.default_rng(SEED)
    samples = [[np.asarray(r.found.times(r.window)) for r in side] for side in (a, b)]
    means = [np.mean([np.mean(times) for times in side]) for side in samples]
    drawn = [_draw(side, generator) for side in samples]
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(drawn[1] / drawn[0], [tail, 100 - tail])
    return Comparison(
        ratio=float(means[1] / means[0]),
        low=float(low),
        high=float(high),
        threshold=threshold,
        verdict=_verdict(low, high, threshold),
        runs=(len(a), len(b)),
        differences=list(differences(a[0], b[0])),
    )


def _draw(runs: list[np.ndarray], generator: np.random.Generator) -> np.ndarray:
    """Means of resampled sets of runs, `[DRAWS]`."""
    each = np.stack([_resampled(times, generator) for times in runs])
    chosen = generator.integers(len(runs), size=(len(runs), DRAWS))
    return np.take_along_axis(each, chosen, axis=0).mean(axis=0)


def _resampled(times: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Means of draws from a run's steps, `[DRAWS]`; some at a time, since a run may be long."""
    some = max(1, DRAWN_AT_ONCE // len(times))
    counts = [min(some, DRAWS - start) for start in range(0, DRAWS, some)]
    return np.concatenate([
        times[generator.integers(len(times), size=(count, len(times)))].mean(axis=1)
        for count in counts
    ])  # fmt: skip


def _verdict(low: float, high: float, threshold: float) -> Name:
    if low > 1 + threshold:
        return "slower"
    if high < 1 - threshold:
        return "faster"
    return "same" if 1 - threshold <= low and high <= 1 + threshold else "undecided"


def differences(a: Result, b: Result) -> Iterator[tuple[str, Any, Any]]:
    """(field, value in A, value in B) of what two records say otherwise, but for what names a job
    and not what it ran on."""
    left, right = (
        {name: value for part in SECTIONS for name, value in flat(part, r.found.record.get(part))}
        for r in (a, b)
    )
    for name in dict.fromkeys([*left, *right]):
        if left.get(name) != right.get(name) and not NAMES_A_JOB.search(name):
            yield name, left.get(name), right.get(name)


def flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values of nested objects, by their keys in a row: `flags.compiler_options.xla_some`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(f"{prefix}.{key}", inner)
    elif value is not None:
        yield prefix, value
