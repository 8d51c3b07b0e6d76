"""What a Mamba-2 mixer is given between its projections, the same for all implementations."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array, Float

Axes = tuple[str, ...]
"""The mesh axes over which the sequence is split into consecutive shards."""


@dataclass(frozen=True)
class Dims:
    """Of one group: its heads, features of a head, the state of a feature; and what is added to
    the mean square under the norm's root."""

    heads: int
    head_dim: int
    state: int
    eps: float

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """What is convolved: x, b and c."""
        return self.inner + 2 * self.state

    @property
    def columns(self) -> int:
        """Of the input projection: gate z, then x, b and c, then the time step of each head."""
        return self.inner + self.channels + self.heads


class Parameters(NamedTuple):
    """Those of groups besides their projections, all fp32: convolution, per-head scalars (time step
    before softplus, logarithm of the decay rate, skip) and the norm's gain."""

    taps: Float[Array, "G W C"]
    bias: Float[Array, "G C"]
    dt_bias: Float[Array, "G H"]
    a_log: Float[Array, "G H"]
    d: Float[Array, "G H"]
    gain: Float[Array, "G F"]

    @classmethod
    def of(cls, groups: Any) -> "Parameters":
        """Those of a module that has them as variables of the same names."""
        return cls(*(getattr(groups, name)[...] for name in cls._fields))
