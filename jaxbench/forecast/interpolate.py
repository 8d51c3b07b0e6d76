"""Interpolates between measured times."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from math import prod

from jaxbench.forecast.tables import Sizes


def between(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at x on a line through sorted points (x, value). Below the first point it is
    extrapolated linearly, above the last one in proportion to x."""
    xs = [point for point, _ in points]
    if len(points) == 1 or x >= xs[-1]:
        last, value = points[-1]
        return value * x / last if last else value
    upper = max(bisect_right(xs, x), 1)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


class Grid:
    """Times on a grid of sizes, with one axis for each dimension. A missing point is scaled in
    proportion from the nearest smaller one.

    A kernel's time is nearly affine in each of its sizes: a start, and a constant time per tile. So
    we interpolate multilinearly. Below the first size the time is extrapolated linearly, since the
    start does not shrink. Above the last size it grows in proportion.
    """

    def __init__(self, times: Mapping[Sizes, float]):
        self.times = times

    @cached_property
    def axes(self) -> tuple[list[int], ...]:
        """The sizes along each dimension, ascending."""
        return tuple(sorted(set(sizes)) for sizes in zip(*self.times, strict=True))

    def covers(self, sizes: Sizes) -> bool:
        """True for sizes inside the grid."""
        return all(a[0] <= s <= a[-1] for s, a in zip(sizes, self.axes, strict=True))

    def ends_below(self, sizes: Sizes) -> bool:
        """True if one of the sizes is above the last one of the grid."""
        return any(size > axis[-1] for size, axis in zip(sizes, self.axes, strict=True))

    def at(self, sizes: Sizes) -> float:
        """The time at sizes. Below the first size it is at most the time there, and at least in
        proportion to it, since a line through two measured times may rise towards small sizes."""
        inside = tuple(max(s, axis[0]) for s, axis in zip(sizes, self.axes, strict=True))
        found = self._at(sizes)
        if inside == sizes:
            return found
        edge = self._at(inside)
        return min(max(found, edge * prod(sizes) / prod(inside)), edge)

    def _at(self, sizes: Sizes) -> float:
        cells = [self._cell(axis, size) for axis, size in zip(self.axes, sizes, strict=True)]
        beyond = prod(max(1.0, s / axis[-1]) for s, axis in zip(sizes, self.axes, strict=True))
        return beyond * sum(
            prod(weight for _, weight in corner) * self._known(tuple(size for size, _ in corner))
            for corner in product(*cells)
        )

    def _cell(self, axis: list[int], size: int) -> list[tuple[int, float]]:
        """The neighbours of a size along an axis, with their weights."""
        if size >= axis[-1] or len(axis) == 1:
            return [(axis[-1], 1.0)]
        upper = max(bisect_right(axis, size), 1)
        low, high = axis[upper - 1], axis[upper]
        share = (size - low) / (high - low)
        return [(low, 1 - share), (high, share)]

    def _known(self, sizes: Sizes) -> float:
        if sizes in self.times:
            return self.times[sizes]
        smaller = [
            (*sizes[:d], size, *sizes[d + 1 :])
            for d, axis in enumerate(self.axes)
            for size in axis[: axis.index(sizes[d])]
        ]
        known = [neighbour for neighbour in smaller if neighbour in self.times] or smaller
        nearest = max(known, key=prod)
        return self._known(nearest) * prod(sizes) / prod(nearest)
