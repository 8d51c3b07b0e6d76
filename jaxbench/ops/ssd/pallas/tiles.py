"""Sizes of the kernels, the blocks of arrays that programs of the scan's kernels read and write,
and parts that the kernels share."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxbench import mesh
from jaxbench.ops.pallas_call import Inputs, Launch
from jaxbench.ops.ssd.parts import Dims

Columns = slice | pl.Slice

EIGHT_WARPS = Launch(8)
LOADS_AHEAD = Launch(8, 2)
FOUR_WARPS = Launch(4, 2)
LAUNCHES = EIGHT_WARPS, LOADS_AHEAD, Launch(8, 3)
SMALLER = Launch(4), FOUR_WARPS
"""For kernels that spill no kilobyte of registers with four warps."""


@dataclass(frozen=True)
class Tuning:
    """Sizes that affect the speed of kernels. The defaults are the fastest that we timed on an
    H100, at the shapes of Nemotron-H 56B (`benchmarks/one_gpu/mixers.py`).

    The scan goes through a sequence in chunks of `chunk` tokens; its forward pass goes through a
    chunk in parts of `part` tokens. One state is written per chunk. The gradient of x takes squares
    of `part` by `part` tokens. A program of the gradients of b and c computes `part` tokens and
    `columns` columns of the state.
    """

    chunk: int = 128
    part: int = 64
    columns: int = 128
    forward: Launch = LOADS_AHEAD
    reverse: Launch = LOADS_AHEAD
    x: Launch = FOUR_WARPS
    bc: Launch = LOADS_AHEAD


BLACKWELL = Tuning(reverse=EIGHT_WARPS, x=EIGHT_WARPS, bc=EIGHT_WARPS)
"""Sizes for Blackwell, where nobody has timed the kernels. With these, ptxas spills least."""


def tuning_of_mesh() -> Tuning:
    """The sizes for the GPUs of the current mesh."""
    capability = mesh.capability()
    return BLACKWELL if capability and capability[0] >= 10 else Tuning()


def launches(first: Launch, *others: Launch) -> tuple[Launch, ...]:
    """The launches among which a tuner chooses for a kernel of the scan: `LAUNCHES` and `others`.
    `first` is the default."""
    return tuple(dict.fromkeys((first, *LAUNCHES, *others)))


class OfHead:
    """Blocks of a program for one head of one sequence. The grid is `(B, A)`."""

    def __init__(self, dims: Dims, length: int, chunks: int):
        self.dims, self.chunks = dims, chunks
        heads, state = dims.heads, (dims.state, dims.head_dim)

        def of_group(columns: int) -> pl.BlockSpec:
            return pl.BlockSpec((None, length, None, columns), lambda i, h: (i, 0, h // heads, 0))

        # All channels and all features of the head's group: `B S G C`, `B S G F`.
        self.group, self.features = of_group(dims.channels), of_group(dims.inner)
        # A number for each token: `B A S`.
        self.times = pl.BlockSpec((None, None, length), lambda i, h: (i, h, 0))
        # A number for each head: `A`.
        self.scalar = pl.BlockSpec((1,), lambda i, h: (h,))
        # A state for each chunk: `B A K N P`.
        self.states = pl.BlockSpec((None, None, chunks, *state), lambda i, h: (i, h, 0, 0, 0))

    def channels(self) -> tuple[Columns, Columns, Columns]:
        """The head's columns of x, b and c among the columns of its group. In a program, call this
        outside of loops."""
        first = jax.lax.rem(pl.program_id(1), self.dims.heads) * self.dims.head_dim
        inner, state = self.dims.inner, self.dims.state
        return pl.ds(first, self.dims.head_dim), pl.ds(inner, state), pl.ds(inner + state, state)


class OfHeadInChunk(OfHead):
    """Blocks of a program for one head in one chunk of one sequence. The grid is `(B, A, K)`."""

    def __init__(self, dims: Dims, chunk: int):
        self.dims, heads = dims, dims.heads

        def of_group(columns: int) -> pl.BlockSpec:
            return pl.BlockSpec((None, chunk, None, columns), lambda i, h, k: (i, k, h // heads, 0))

        self.group, self.features = of_group(dims.channels), of_group(dims.inner)
        self.times = pl.BlockSpec((None, None, chunk), lambda i, h, k: (i, h, k))
        # A number for each head, and for each of its chunks: `A`, `B A K`.
        self.scalar = pl.BlockSpec((1,), lambda i, h, k: (h,))
        self.sum = pl.BlockSpec((None, None, 1), lambda i, h, k: (i, h, k))
        # The state of the chunk: `B A K N P`.
        state = dims.state, dims.head_dim
        self.states = pl.BlockSpec((None, None, None, *state), lambda i, h, k: (i, h, k, 0, 0))


class OfChunk:
    """Blocks of a program for `rows` tokens and `columns` of the state, in one chunk of one group.
    The grid is `(K x halves x parts, G, B)`: each of the `halves` of a chunk has `parts`
    programs."""

    def __init__(self, dims: Dims, tuning: Tuning):
        self.dims, self.tuning = dims, tuning
        self.columns = columns = min(tuning.columns, dims.state)
        self.parts = parts = dims.state // columns
        heads, chunk = dims.heads, tuning.chunk
        self.rows, self.halves = tuning.part, chunk // tuning.part
        sharing = self.halves * parts

        def of_group(columns: int) -> pl.BlockSpec:
            return pl.BlockSpec(
                (None, chunk, None, columns), lambda j, g, i: (i, j // sharing, g, 0)
            )

        # All channels and all features of the group: `B S G C`, `B S G F`.
        self.group, self.features = of_group(dims.channels), of_group(dims.inner)
        # A number for each token and head of the group: `B A S`. The same from each part: `parts B
        # A S`.
        self.times = pl.BlockSpec((None, heads, chunk), lambda j, g, i: (i, g, j // sharing))
        self.times_of_part = pl.BlockSpec(
            (None, None, heads, self.rows), lambda j, g, i: (j % parts, i, g, j // parts)
        )
        # The columns of the chunk's states of all heads of the group: `B A K N P`.
        self.states = pl.BlockSpec(
            (None, heads, None, columns, dims.head_dim),
            lambda j, g, i: (i, g, j // sharing, j % parts, 0),
        )

    def inputs(self, u: Array, dt: Array, total: Array, dy: Array, du: Array) -> Inputs:
        """The inputs of both kernels for the gradients of b and c."""
        return {
            "u": (u, self.group),
            "dt": (dt, self.times),
            "total": (total, self.times),
            "dy": (dy, self.features),
            "du": (du, self.group),
        }

    def tokens(self) -> tuple[Array, Columns]:
        """(the program's first token in its chunk, its tokens there)."""
        first = jax.lax.rem(pl.program_id(0) // self.parts, self.halves) * self.rows
        return first, pl.ds(first, self.rows)

    def bc_columns(self) -> tuple[Columns, Columns]:
        """The program's columns of b and c among the channels."""
        first = self.dims.inner + jax.lax.rem(pl.program_id(0), self.parts) * self.columns
        return pl.ds(first, self.columns), pl.ds(first + self.dims.state, self.columns)


def sums(log: Float[Array, "Q"]) -> tuple[Float[Array, "Q"], Float[Array, ""]]:
    """(T, the last element of T), where T is the cumulative sum of `log` over a chunk."""
    return jax.lax.cumsum(log), jnp.sum(log)


def decay(
    later: Float[Array, "Q"], earlier: Float[Array, "R"], ahead: Array | int = 0
) -> Float[Array, "Q R"]:
    """[t, r]: exp(T_t - T_r) where r <= t + ahead, else 0. The exponent is bounded before exp,
    which would overflow otherwise."""
    shape = later.size, earlier.size
    t, r = (jax.lax.broadcasted_iota(jnp.int32, shape, dim) for dim in (0, 1))
    between = jnp.exp(jnp.minimum(later[:, None] - earlier[None, :], 0.0))
    return jnp.where(r <= t + ahead, between, 0.0)
