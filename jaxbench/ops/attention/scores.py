"""Attention scores: scale, soft cap and sliding window."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores of query and key, and the keys that a query sees apart from the causal mask.

    `scale` is the factor of their product; a `cap` c then bounds a score z to c tanh(z / c).
    With a `window` a query sees that many positions at most, its own included.
    """

    scale: float
    cap: float | None = None
    window: int | None = None

    @property
    def local_window(self) -> tuple[int, int] | None:
        """The positions that a query sees to its left and to its right, as JAX takes them."""
        return None if self.window is None else (self.window - 1, 0)
