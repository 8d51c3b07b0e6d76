"""Blocks of the arrays that programs of the scan's kernels read and write, and shared parts of the
kernels."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxbench.ops.pallas import Inputs
from jaxbench.ssd.pallas.tuning import Tuning
from jaxbench.ssd.parts import Dims

Columns = slice | pl.Slice


class OfHead:
    """Blocks of a program for one head of one sequence, in a grid `(B, A)`."""

    def __init__(self, dims: Dims, length: int, chunks: int):
        self.dims, self.chunks = dims, chunks
        heads, state = dims.heads, (dims.state, dims.head_dim)

        def of_group(columns: int) -> pl.BlockSpec:
            return pl.BlockSpec((None, length, None, columns), lambda i, h: (i, 0, h // heads, 0))

        # All channels and all features of the head's group: `B S G C`, `B S G F`.
        self.group, self.features = of_group(dims.channels), of_group(dims.inner)
        # A number for each token: `B A S`.
        self.times = pl.BlockSpec((None, None, length), lambda i, h: (i, h, 0))
        # A number for each head, and for each head of each sequence: `A`, `B A`.
        self.scalar = pl.BlockSpec((1,), lambda i, h: (h,))
        self.sum = pl.BlockSpec((None, 1), lambda i, h: (i, h))
        # A state, and one for each chunk: `B A N P`, `B A K N P`.
        self.state = pl.BlockSpec((None, None, *state), lambda i, h: (i, h, 0, 0))
        self.states = pl.BlockSpec((None, None, chunks, *state), lambda i, h: (i, h, 0, 0, 0))

    def inputs(self, u: Array, dt: Array, a: Array, d: Array) -> Inputs:
        """The inputs of both passes of the scan."""
        return {
            "u": (u, self.group),
            "dt": (dt, self.times),
            "a": (a, self.scalar),
            "d": (d, self.scalar),
        }

    def channels(self) -> tuple[Columns, Columns, Columns]:
        """The head's columns of x, b and c among its group's; in a program, outside of loops."""
        first = jax.lax.rem(pl.program_id(1), self.dims.heads) * self.dims.head_dim
        inner, state = self.dims.inner, self.dims.state
        return pl.ds(first, self.dims.head_dim), pl.ds(inner, state), pl.ds(inner + state, state)


class OfChunk:
    """Blocks of a program for `columns` of the state in one chunk of one group, in a grid
    `(K x parts, G, B)`: `parts` programs share a chunk."""

    def __init__(self, dims: Dims, tuning: Tuning):
        self.dims, self.tuning = dims, tuning
        self.columns = columns = min(tuning.columns, dims.state)
        self.parts = parts = dims.state // columns
        heads, chunk = dims.heads, tuning.chunk

        def of_group(columns: int) -> pl.BlockSpec:
            return pl.BlockSpec((None, chunk, None, columns), lambda j, g, i: (i, j // parts, g, 0))

        # All channels and all features of the group: `B S G C`, `B S G F`.
        self.group, self.features = of_group(dims.channels), of_group(dims.inner)
        # A number for each head of the group: `A`.
        self.scalars = pl.BlockSpec((heads,), lambda j, g, i: (g,))
        # A number for each token and head of the group, and such numbers from each part: `B A S`,
        # `parts B A S`.
        self.times = pl.BlockSpec((None, heads, chunk), lambda j, g, i: (i, g, j // parts))
        self.times_of_part = pl.BlockSpec(
            (None, None, heads, chunk), lambda j, g, i: (j % parts, i, g, j // parts)
        )
        # The columns of the chunk's states of all heads of the group: `B A K N P`.
        self.states = pl.BlockSpec(
            (None, heads, None, columns, dims.head_dim),
            lambda j, g, i: (i, g, j // parts, j % parts, 0),
        )

    def inputs(self, u: Array, dt: Array, a: Array, dy: Array, du: Array) -> Inputs:
        """The inputs of both kernels for the gradients of b and c."""
        return {
            "u": (u, self.group),
            "dt": (dt, self.times),
            "a": (a, self.scalars),
            "dy": (dy, self.features),
            "du": (du, self.group),
        }

    def bc_columns(self) -> tuple[Columns, Columns]:
        """The program's columns of b and c among the channels."""
        first = self.dims.inner + jax.lax.rem(pl.program_id(0), self.parts) * self.columns
        return pl.ds(first, self.columns), pl.ds(first + self.dims.state, self.columns)


def sums(log: Float[Array, "Q"]) -> tuple[Float[Array, "Q"], Float[Array, ""]]:
    """(T, the cumulative sum of `log` over a chunk; its last element)."""
    return jax.lax.cumsum(log), jnp.sum(log)


def decay(total: Float[Array, "Q"]) -> Float[Array, "Q Q"]:
    """[t, r]: exp(T_t - T_r) where r <= t, else 0; masked before exp, which would overflow."""
    size = total.shape[0]
    t, r = (jax.lax.broadcasted_iota(jnp.int32, (size, size), dim) for dim in (0, 1))
    return jnp.where(r <= t, jnp.exp(jnp.minimum(total[:, None] - total[None, :], 0.0)), 0.0)
