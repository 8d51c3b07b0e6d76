"""The steps of a run that count, and the spread of their times."""

import math
import statistics
from typing import Final

PUBLISHED: Final = (11, 44)
"""First and last step (0-based) of the published parser's average; older documents quote the last
step instead."""

WINDOWS = {"published": PUBLISHED, "newer": (35, 44)}
"""Windows by name: `published` is that of the releases in configs/published.csv, `newer` that of
the source's later releases."""


def window(steps: int, begin: int = 0) -> tuple[int, int]:
    """First and last step of the summary: the published window, or the last half of a run too short
    for it. A restored run begins at a later step."""
    first, last = PUBLISHED
    whole = begin < first and steps > last
    return (first, last) if whole else ((begin + steps) // 2, steps - 1)


def too_short(steps: int, begin: int = 0) -> list[str]:
    """The reason why a run of the steps from `begin` on is not comparable with published ones; none
    if it is."""
    first, last = PUBLISHED
    had = f"iterations {begin} to {steps - 1}" if begin else f"{steps} iterations"
    reason = f"{had}: the published means are of iterations {first} to {last}"
    return [] if begin < first and steps > last else [reason]


def spread(samples: list[float]) -> dict[str, float]:
    """Mean, population standard deviation, median and 95th percentile (nearest rank)."""
    ordered = sorted(samples)
    return {
        "mean": statistics.fmean(ordered),
        "std": statistics.pstdev(ordered),
        "median": statistics.median(ordered),
        "p95": ordered[math.ceil(0.95 * len(ordered)) - 1],
    }
