"""The robust outlier test for values side by side: GPUs, links, processes or steps of one job."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

GPU_SPREAD = 0.015
"""Standard deviation of the speed of GPUs of one model. On five clusters of earlier GPUs (V100,
MI60 and others) times varied by 8 % on average, beside outliers (Sinha et al., SC22, arXiv
2208.11035): read as the distance of the whiskers of a normal distribution's box plot, 5.4
deviations."""

LINK_SPREAD = 0.03
"""That of links, copies from the host and collectives, which share switches and hosts."""

STEP_SPREAD = 0.002
"""That of the steps of a run, and of the processes' mean waits in them."""

DEVIATIONS = 5.0
"""Standard deviations from the median of an outlier. Of 256 nodes some 24000 rates are compared:
with normal noise a healthy job would have one once in 140 times."""

FEWEST = 4
"""Values that are compared with their median: of three, a slow one moves the deviation with it."""

K = TypeVar("K")


def robust_deviation(samples: Sequence[float]) -> float:
    """The standard deviation of normal noise, 1.4826 times the median absolute deviation, which
    half of the samples could not falsify."""
    median = statistics.median(samples)
    return 1.4826 * statistics.median(abs(s - median) for s in samples)


def outliers(values: Mapping[K, float], spread: float, *, low: bool = False) -> dict[K, float]:
    """Those of some values that are too high, or with `low` too low, over the median.

    The standard deviation is the robust one, at least `spread` times the median. Of fewer than
    `FEWEST`, one is an outlier that is twice as far from the best as it were from the median.
    """
    every = [*values.values()]
    middle = statistics.median(every or [0.0])
    if not middle:
        return {}
    typical, deviation = middle, max(robust_deviation(every), spread * middle)
    if len(every) < FEWEST:
        typical = max(every) if low else min(every)
        deviation = 2 * spread * typical
    sign = -1 if low else 1
    limit = DEVIATIONS * deviation
    return {key: v / middle for key, v in values.items() if sign * (v - typical) > limit}
