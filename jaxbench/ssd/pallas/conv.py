"""Causal convolution with SiLU, in fp32, over tiles of tokens and channels that are read in place
among the columns of the input projection. The backward pass convolves again.

A program reads the tokens before its tile again: they are in a cache.
"""

from collections.abc import Callable
from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxbench.ops.pallas import Inputs, Launch, Output, call
from jaxbench.ssd.pallas.tuning import Tuning
from jaxbench.ssd.parts import Dims

F32 = jnp.float32
TOKENS, CHANNELS, TILES = 32, 128, 8
"""Tokens and channels of a tile, and the tiles that a program of the backward pass goes through."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def conv_silu(
    tuning: Tuning,
    dims: Dims,
    projected: Float[Array, "B S G I"],
    taps: Float[Array, "G W C"],
    bias: Float[Array, "G C"],
) -> Float[Array, "B S G C"]:
    """x, b and c: u[t] = silu(bias + sum over w of taps[w] projected[t - W + 1 + w]), zeros before
    the sequence."""
    batch, length, groups, _ = projected.shape
    width = taps.shape[1]
    blocks = _Blocks(dims, length, width, TOKENS)
    return call(
        partial(_kernel, width=width), "conv_silu", blocks.grid(batch, groups),
        blocks.inputs(projected, taps, bias),
        {"u": Output((batch, length, groups, dims.channels), projected.dtype, blocks.tokens)},
        Launch(4), touched={"x": _bytes(projected, dims)}, interpret=tuning.interpret,
    )["u"]  # fmt: skip


def _backward(tuning, dims, inputs, du):
    projected, taps, _ = inputs
    batch, length, groups, _ = projected.shape
    width = taps.shape[1]
    tokens = TOKENS * gcd(TILES, length // TOKENS)
    blocks = _Blocks(dims, length, width, tokens)
    sums = batch, length // tokens, groups
    outputs = call(
        partial(_back_kernel, width=width, length=length, tiles=tokens // TOKENS),
        "conv_silu_back", blocks.grid(batch, groups),
        {**blocks.inputs(*inputs), "du": (du, blocks.all_tokens)},
        {"dx": Output(du.shape, du.dtype, blocks.tokens),
         "dbias": Output((*sums, dims.channels), F32, blocks.dbias),
         "dtaps": Output((*sums, width, dims.channels), F32, blocks.dtaps)},
        Launch(8), touched={"x": _bytes(projected, dims)}, interpret=tuning.interpret,
    )  # fmt: skip
    dprojected = jnp.pad(outputs["dx"], ((0, 0), (0, 0), (0, 0), (dims.inner, dims.heads)))
    return dprojected, *(jnp.sum(outputs[name], axis=(0, 1)) for name in ("dtaps", "dbias"))


conv_silu.defvjp(
    lambda tuning, dims, *inputs: (conv_silu(tuning, dims, *inputs), inputs), _backward
)


class _Blocks:
    """Blocks of a program for some `tokens` and a tile of channels, in a grid `(blocks of tokens,
    G x tiles of channels, B)`."""

    def __init__(self, dims: Dims, length: int, width: int, tokens: int):
        size = gcd(dims.inner, dims.state, CHANNELS)
        self.across = across = dims.channels // size
        self.steps = length // tokens
        first = dims.inner // size

        def block(*sizes: int | None, index: Callable) -> pl.BlockSpec:
            return pl.BlockSpec(
                (*sizes, size), lambda s, j, i: (*index(s, j // across, i), j % across)
            )

        self.columns = pl.BlockSpec(
            (None, length, None, size), lambda s, j, i: (i, 0, j // across, first + j % across)
        )
        self.all_tokens = block(None, length, None, index=lambda s, g, i: (i, 0, g))
        self.tokens = block(None, tokens, None, index=lambda s, g, i: (i, s, g))
        self.taps = block(None, width, index=lambda s, g, i: (g, 0))
        self.bias = block(None, index=lambda s, g, i: (g,))
        self.dtaps = block(None, None, None, width, index=lambda s, g, i: (i, s, g, 0))
        self.dbias = block(None, None, None, index=lambda s, g, i: (i, s, g))

    def grid(self, batch: int, groups: int) -> tuple[int, int, int]:
        return self.steps, groups * self.across, batch

    def inputs(self, projected: Array, taps: Array, bias: Array) -> Inputs:
        """The inputs of both passes."""
        return {
            "x": (projected, self.columns),
            "taps": (taps, self.taps),
            "bias": (bias, self.bias),
        }


def _bytes(projected, dims: Dims) -> int:
    return projected.nbytes // dims.columns * dims.channels


def _at(x, rows):
    """Tokens at positions `rows`, zeros before the sequence."""
    return jnp.where((rows >= 0)[:, None], x[jnp.maximum(rows, 0), :].astype(F32), 0.0)


def _convolved(r, rows, width: int):
    total = r.bias[...][None, :]
    for w in range(width):
        total += r.taps[w][None, :] * _at(r.x, rows - (width - 1) + w)
    return total


def _kernel(r, *, width: int):
    rows = pl.program_id(0) * TOKENS + jax.lax.broadcasted_iota(jnp.int32, (TOKENS,), 0)
    convolved = _convolved(r, rows, width)
    r.u[...] = (convolved * jax.nn.sigmoid(convolved)).astype(r.u.dtype)


def _back_kernel(r, *, width: int, length: int, tiles: int):
    first = pl.program_id(0) * tiles
    taps = [r.taps[w][None, :] for w in range(width)]

    def slope(rows):
        """The gradient of the input of SiLU; zeros after the sequence, where memory is another
        array's, and may be NaN."""
        inside = jnp.minimum(rows, length - 1)
        convolved = _convolved(r, inside, width)
        s = jax.nn.sigmoid(convolved)
        gradient = r.du[inside, :].astype(F32) * (s + convolved * s * (1 - s))
        return jnp.where((rows < length)[:, None], gradient, 0.0)

    def step(i, sums):
        rows = (first + i) * TOKENS + jax.lax.broadcasted_iota(jnp.int32, (TOKENS,), 0)
        here = slope(rows)
        dx = here * taps[-1]
        for later in range(1, width):
            dx += slope(rows + later) * taps[width - 1 - later]
        r.dx[pl.ds(i * TOKENS, TOKENS), :] = dx.astype(r.dx.dtype)
        before = (_at(r.x, rows - (width - 1) + w) for w in range(width))
        new = [*(jnp.sum(here * x, axis=0) for x in before), jnp.sum(here, axis=0)]
        return tuple(total + part for total, part in zip(sums, new, strict=True))

    zero = jnp.zeros((r.bias.shape[0],), F32)
    *dtaps, r.dbias[...] = jax.lax.fori_loop(0, tiles, step, (zero,) * (width + 1))
    for w, total in enumerate(dtaps):
        r.dtaps[w] = total
