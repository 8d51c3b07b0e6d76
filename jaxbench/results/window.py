"""The steps of a run that count, and the spread of their times."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, Final

PUBLISHED: Final = (11, 44)
"""The first and last step (0-based) of the published parser's average. Older documents quote the
last step instead."""

WINDOWS = {"published": PUBLISHED, "newer": (35, 44)}
"""Windows by name. `published` is the window of the releases in configs/published.csv, `newer` the
window of the source's later releases."""


def window(steps: int, begin: int = 0) -> tuple[int, int]:
    """The first and last step of the summary: the published window, or the last half of a run that
    is too short for it. A restored run begins at a later step."""
    return PUBLISHED if not too_short(steps, begin) else ((begin + steps) // 2, steps - 1)


def start_of(step: int, begins: Sequence[int]) -> int:
    """The start of a run that a step belongs to, given the first steps of its starts: the last
    start that began at this step or before, since it repeated the steps of earlier starts."""
    return max((n for n, begin in enumerate(begins) if begin <= step), default=0)


UNCHANGED = ("hardware.host", "versions.commit")
"""Changes at a start that leave the program as it was."""


def first_of_program(starts: Sequence[dict[str, Any]]) -> int:
    """The first of a record's `starts` since which the program is the last start's program."""
    first = len(starts) - 1
    while first > 0 and {*starts[first]["changed"]} <= {*UNCHANGED}:
        first -= 1
    return first


def too_short(steps: int, begin: int = 0) -> list[str]:
    """The reason why a run of the steps from `begin` on is too short to be compared with published
    runs; empty if it is long enough."""
    first, last = PUBLISHED
    if begin < first and steps > last:
        return []
    had = f"iterations {begin} to {steps - 1}" if begin else f"{steps} iterations"
    return [f"{had}: the published means are of iterations {first} to {last}"]


def spread(samples: list[float]) -> dict[str, float]:
    """Mean, population standard deviation, median and 95th percentile (nearest rank)."""
    ordered = sorted(samples)
    return {
        "mean": statistics.fmean(ordered),
        "std": statistics.pstdev(ordered),
        "median": statistics.median(ordered),
        "p95": ordered[math.ceil(0.95 * len(ordered)) - 1],
    }
