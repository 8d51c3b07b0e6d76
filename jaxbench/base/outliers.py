"""A robust test for outliers among values that should be alike: GPUs, links, processes or steps of
one job."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

GPU_SPREAD = 0.015
"""Relative standard deviation of the speed of GPUs of one model. On five clusters of earlier GPUs
(V100, MI60 and others) times varied by 8 % on average, without outliers (Sinha et al., SC22, arXiv
2208.11035). We read the 8 % as the distance between the whiskers of a normal distribution's box
plot, which is 5.4 deviations."""

LINK_SPREAD = 0.03
"""The same for links, copies from the host and collectives, which share switches and hosts."""

LEAST_SPREAD = 0.002
"""The least deviation of GPUs that repeated samples can show: values within 1 % are alike."""

STEP_SPREAD = 0.002
"""The same for the steps of a run, and for the mean waits of its processes in them."""

DEVIATIONS = 5.0
"""An outlier is this many standard deviations from the median. A job of 256 nodes has about 24000
rates to compare; with normal noise one in 140 healthy jobs would have an outlier."""

FEWEST = 4
"""The smallest number of values that we compare with their median. Of three values a slow one
changes the deviation itself."""

ALIKE = 16
"""The smallest number of GPUs that show how much alike GPUs differ."""

K = TypeVar("K")


def robust_deviation(samples: Sequence[float]) -> float:
    """The standard deviation of normal noise: 1.4826 times the median absolute deviation. It stays
    right even if almost half of the samples are wrong."""
    median = statistics.median(samples)
    return 1.4826 * statistics.median(abs(s - median) for s in samples)


def repeated_spread(values: Sequence[float], noise: Sequence[float]) -> float:
    """The relative standard deviation of alike GPUs, from values that are each the median of
    repeated samples, with the relative standard errors `noise`. It is at most `GPU_SPREAD`.

    It is the upper end of a one-sided 99 % interval. The robust deviation of n normal values has a
    relative standard error of 1.167 / sqrt(n), so a few values (`ALIKE`) show nothing.
    """
    if len(values) < ALIKE:
        return GPU_SPREAD
    known = 1 - 2.33 * 1.167 / len(values) ** 0.5
    apart = robust_deviation(values) / known / statistics.median(values)
    return min(GPU_SPREAD, max(apart, statistics.median(noise), LEAST_SPREAD))


def outliers(values: Mapping[K, float], spread: float, *, low: bool = False) -> dict[K, float]:
    """The values that are too high, or with `low` too low, each divided by the median.

    The standard deviation is the robust one, but at least `spread` times the median. A median of
    fewer than `FEWEST` values means little. Each value is then compared with the best one, and is
    an outlier at twice the usual distance.
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
