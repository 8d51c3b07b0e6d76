"""Dimensions and parameters of a Mamba-2 mixer between its projections."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array, Float


@dataclass(frozen=True)
class Dims:
    """Dimensions of a group (heads, features per head, state size per feature), and the epsilon of
    the norm."""

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
        """Number of channels that are convolved: x, b and c."""
        return self.inner + 2 * self.state

    @property
    def columns(self) -> int:
        """Columns of the input projection: first gate z, then x, b and c, then one time step per
        head."""
        return self.inner + self.channels + self.heads


class Parameters(NamedTuple):
    """Parameters of groups besides the projections, in fp32: the convolution, scalars per head
    (time step before softplus, logarithm of the decay rate, skip), and the gain of the norm."""

    taps: Float[Array, "G W C"]
    bias: Float[Array, "G C"]
    dt_bias: Float[Array, "G H"]
    a_log: Float[Array, "G H"]
    d: Float[Array, "G H"]
    gain: Float[Array, "G F"]

    @classmethod
    def of(cls, groups: Any) -> "Parameters":
        """Reads the parameters from a module whose variables have these names."""
        return cls(*(getattr(groups, name)[...] for name in cls._fields))
