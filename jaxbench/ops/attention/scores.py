"""Attention scores: scale and sliding window."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How scores are computed from query and key, and which keys a query sees in addition to the
    causal mask.

    A score is `scale` times query . key. With a `window` a query sees at most that many positions,
    including its own.
    """

    scale: float
    window: int | None = None

    @property
    def local_window(self) -> tuple[int, int] | None:
        """The number of positions that a query sees to its left and to its right, as JAX takes
        them; None without a window."""
        return None if self.window is None else (self.window - 1, 0)
