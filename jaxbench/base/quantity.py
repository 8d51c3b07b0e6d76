"""Figures that records and logs contain. We do not trust them."""

from typing import Any

LARGEST = 1e18
"""The largest plausible quantity in any unit that is used here."""


def quantity(value: Any, *, zero: bool = True) -> float:
    """A recorded time, rate or size as a float. Raises TypeError for anything implausible, and for
    0 unless `zero`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 <= value < LARGEST and (zero or value)):
        raise TypeError(f"{str(value)[:20]} is no figure")
    return float(value)


def figure(values: Any, *path: Any) -> float | None:
    """The quantity at a path in nested values. None if it is missing or implausible."""
    try:
        for key in path:
            values = values[key]
        return quantity(values)
    except (TypeError, LookupError):
        return None
