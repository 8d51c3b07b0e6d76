"""What the programs of the scan's kernels see of their arrays, and what several of them compute."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxbench.ssd.pallas.call import Given, Tuning
from jaxbench.ssd.parts import Dims

Columns = slice | pl.Slice


@dataclass(frozen=True)
class _OfGroup:
    """Blocks of a program within one group."""

    dims: Dims

    @property
    def group(self) -> pl.BlockSpec:
        """All channels of the group: `B S G C`."""
        return self._of_group(self.dims.channels)

    @property
    def features(self) -> pl.BlockSpec:
        """All features of the group: `B S G F`."""
        return self._of_group(self.dims.inner)

    def _of_group(self, columns: int) -> pl.BlockSpec:
        raise NotImplementedError


@dataclass(frozen=True)
class OfHead(_OfGroup):
    """Blocks of a program for one head of one sequence, in a grid `(B, A)`."""

    length: int
    chunks: int

    def given(self, u: Array, dt: Array, a: Array, d: Array) -> dict[str, Given]:
        """What both directions of the scan read."""
        return {
            "u": Given(u, self.group),
            "dt": Given(dt, self.times),
            "a": Given(a, self.scalar),
            "d": Given(d, self.scalar),
        }

    def _of_group(self, columns: int) -> pl.BlockSpec:
        heads = self.dims.heads
        return pl.BlockSpec((None, self.length, None, columns), lambda i, h: (i, 0, h // heads, 0))

    @property
    def times(self) -> pl.BlockSpec:
        """A number for each token: `B A S`."""
        return pl.BlockSpec((None, None, self.length), lambda i, h: (i, h, 0))

    @property
    def scalar(self) -> pl.BlockSpec:
        """A number: `A`."""
        return pl.BlockSpec((1,), lambda i, h: (h,))

    @property
    def sum(self) -> pl.BlockSpec:
        """A number for each sequence: `B A`."""
        return pl.BlockSpec((None, 1), lambda i, h: (i, h))

    @property
    def state(self) -> pl.BlockSpec:
        """A state: `B A N P`."""
        sizes = self.dims.state, self.dims.head_dim
        return pl.BlockSpec((None, None, *sizes), lambda i, h: (i, h, 0, 0))

    @property
    def states(self) -> pl.BlockSpec:
        """A state for each chunk: `B A K N P`."""
        sizes = self.chunks, self.dims.state, self.dims.head_dim
        return pl.BlockSpec((None, None, *sizes), lambda i, h: (i, h, 0, 0, 0))

    def channels(self) -> tuple[Columns, Columns, Columns]:
        """The head's columns of x, b and c among its group's; in a program, outside of loops."""
        first = jax.lax.rem(pl.program_id(1), self.dims.heads) * self.dims.head_dim
        inner, state = self.dims.inner, self.dims.state
        return pl.ds(first, self.dims.head_dim), pl.ds(inner, state), pl.ds(inner + state, state)


@dataclass(frozen=True)
class OfChunk(_OfGroup):
    """Blocks of a program for some columns of the state in one chunk of one group, in a grid
    `(K x parts, G, B)`."""

    tuning: Tuning

    @property
    def columns(self) -> int:
        """Those of a program."""
        return min(self.tuning.columns, self.dims.state)

    @property
    def parts(self) -> int:
        """Programs that share a chunk."""
        return self.dims.state // self.columns

    def _of_group(self, columns: int) -> pl.BlockSpec:
        block = (None, self.tuning.chunk, None, columns)
        return pl.BlockSpec(block, lambda j, g, i: (i, j // self.parts, g, 0))

    @property
    def times(self) -> pl.BlockSpec:
        """A number for each token and head of the group: `B A S`."""
        block = (None, self.dims.heads, self.tuning.chunk)
        return pl.BlockSpec(block, lambda j, g, i: (i, g, j // self.parts))

    @property
    def scalars(self) -> pl.BlockSpec:
        """A number for each head of the group: `A`."""
        return pl.BlockSpec((self.dims.heads,), lambda j, g, i: (g,))

    @property
    def times_of_part(self) -> pl.BlockSpec:
        """The same from each part: `parts B A S`."""
        block = (None, None, self.dims.heads, self.tuning.chunk)
        return pl.BlockSpec(block, lambda j, g, i: (j % self.parts, i, g, j // self.parts))

    @property
    def states(self) -> pl.BlockSpec:
        """The chunk's states of the group's heads, some columns: `B A K N P`."""
        block = (None, self.dims.heads, None, self.columns, self.dims.head_dim)
        return pl.BlockSpec(block, lambda j, g, i: (i, g, j // self.parts, j % self.parts, 0))

    def maps(self) -> tuple[Columns, Columns]:
        """The program's columns of b and c among the channels."""
        first = self.dims.inner + jax.lax.rem(pl.program_id(0), self.parts) * self.columns
        return pl.ds(first, self.columns), pl.ds(first + self.dims.state, self.columns)


def sums(log: Float[Array, "Q"]) -> tuple[Float[Array, "Q"], Float[Array, ""]]:
    """(T, the last T)."""
    return jax.lax.cumsum(log), jnp.sum(log)


def decay(total: Float[Array, "Q"]) -> Float[Array, "Q Q"]:
    """[t, r]: exp(T_t - T_r) where r <= t, else 0; masked before exp, which would overflow."""
    size = total.shape[0]
    t, r = (jax.lax.broadcasted_iota(jnp.int32, (size, size), dim) for dim in (0, 1))
    return jnp.where(r <= t, jnp.exp(jnp.minimum(total[:, None] - total[None, :], 0.0)), 0.0)
