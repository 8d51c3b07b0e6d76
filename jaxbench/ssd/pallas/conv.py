"""Causal convolution with SiLU, in fp32, over tiles of tokens and channels that are read in place
among the columns of the input projection. The backward pass convolves again.

A program reads the tokens before its tile again: they are in a cache.
"""

from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxbench.ssd.pallas.call import Given, Launch, Made, Tuning, call
from jaxbench.ssd.parts import Dims

F32 = jnp.float32
TOKENS, CHANNELS, TILES = 32, 128, 8
"""Of a tile, and how many tiles after another a program of the backward pass takes."""


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
    tiles = _Tiles(dims, length)
    shape = batch, length, groups, dims.channels
    grid = length // TOKENS, groups * tiles.across, batch
    return call(
        partial(_kernel, width=width), "conv_silu", grid,
        {"x": Given(projected, tiles.columns), "taps": Given(taps, tiles.taps(width)),
         "bias": Given(bias, tiles.bias)},
        {"u": Made(shape, projected.dtype, tiles.rows(TOKENS))},
        Launch(4), touched={"x": _bytes(projected, dims)}, interpret=tuning.interpret,
    )["u"]  # fmt: skip


def _forward(tuning, dims, projected, taps, bias):
    return conv_silu(tuning, dims, projected, taps, bias), (projected, taps, bias)


def _backward(tuning, dims, inputs, du):
    projected, taps, bias = inputs
    batch, length, groups, _ = projected.shape
    width = taps.shape[1]
    tiles = _Tiles(dims, length)
    rows = TOKENS * gcd(TILES, length // TOKENS)
    grid = length // rows, groups * tiles.across, batch
    sums = batch, length // rows, groups
    made = call(
        partial(_back_kernel, width=width, length=length, tiles=rows // TOKENS),
        "conv_silu_back", grid,
        {"x": Given(projected, tiles.columns), "taps": Given(taps, tiles.taps(width)),
         "bias": Given(bias, tiles.bias), "du": Given(du, tiles.whole)},
        {"dx": Made(du.shape, du.dtype, tiles.rows(rows)),
         "dbias": Made((*sums, dims.channels), F32, tiles.dbias),
         "dtaps": Made((*sums, width, dims.channels), F32, tiles.dtaps(width))},
        Launch(8), touched={"x": _bytes(projected, dims)}, interpret=tuning.interpret,
    )  # fmt: skip
    beside = (dims.inner, dims.heads)
    dprojected = jnp.pad(made["dx"], ((0, 0), (0, 0), (0, 0), beside))
    return dprojected, *(jnp.sum(made[name], axis=(0, 1)) for name in ("dtaps", "dbias"))


conv_silu.defvjp(_forward, _backward)


class _Tiles:
    """Blocks in a grid `(tiles of tokens, G x tiles of channels, B)`."""

    def __init__(self, dims: Dims, length: int):
        self.size = size = gcd(dims.inner, dims.state, CHANNELS)
        self.length = length
        self.across = across = dims.channels // size
        first = dims.inner // size
        whole = (None, length, None, size)
        self.columns = pl.BlockSpec(whole, lambda s, j, i: (i, 0, j // across, first + j % across))
        self.whole = pl.BlockSpec(whole, lambda s, j, i: (i, 0, j // across, j % across))
        self.bias = pl.BlockSpec((None, size), lambda s, j, i: (j // across, j % across))

    def rows(self, count: int) -> pl.BlockSpec:
        block = (None, count, None, self.size)
        return pl.BlockSpec(block, lambda s, j, i: (i, s, j // self.across, j % self.across))

    def taps(self, width: int) -> pl.BlockSpec:
        block = (None, width, self.size)
        return pl.BlockSpec(block, lambda s, j, i: (j // self.across, 0, j % self.across))

    @property
    def dbias(self) -> pl.BlockSpec:
        block = (None, None, None, self.size)
        return pl.BlockSpec(block, lambda s, j, i: (i, s, j // self.across, j % self.across))

    def dtaps(self, width: int) -> pl.BlockSpec:
        block = (None, None, None, width, self.size)
        return pl.BlockSpec(block, lambda s, j, i: (i, s, j // self.across, 0, j % self.across))


def _bytes(projected, dims: Dims) -> int:
    return projected.nbytes // dims.columns * dims.channels


def _at(x, rows):
    """Those tokens; zeros before the sequence."""
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
        """The gradient of what SiLU is given; zeros after the sequence."""
        convolved = _convolved(r, rows, width)
        s = jax.nn.sigmoid(convolved)
        du = r.du[jnp.minimum(rows, length - 1), :].astype(F32)
        return jnp.where((rows < length)[:, None], du, 0.0) * (s + convolved * s * (1 - s))

    def step(i, sums):
        rows = (first + i) * TOKENS + jax.lax.broadcasted_iota(jnp.int32, (TOKENS,), 0)
        own = slope(rows)
        dx = own * taps[-1]
        for later in range(1, width):
            dx += slope(rows + later) * taps[width - 1 - later]
        r.dx[pl.ds(i * TOKENS, TOKENS), :] = dx.astype(r.dx.dtype)
        before = (_at(r.x, rows - (width - 1) + w) for w in range(width))
        new = [*(jnp.sum(own * x, axis=0) for x in before), jnp.sum(own, axis=0)]
        return tuple(total + part for total, part in zip(sums, new, strict=True))

    zero = jnp.zeros((r.bias.shape[0],), F32)
    *dtaps, r.dbias[...] = jax.lax.fori_loop(0, tiles, step, (zero,) * (width + 1))
    for w, total in enumerate(dtaps):
        r.dtaps[w] = total
