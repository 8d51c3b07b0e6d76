"""Causal convolution with SiLU, in fp32. It works on tiles of tokens and channels, which it reads
in place among the columns of the input projection. The backward pass convolves again.

A program reads the tokens before its tile a second time; they are in a cache by then.
"""

from collections.abc import Callable
from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxbench.ops.pallas_call import Inputs, Launch, Output, call
from jaxbench.ops.ssd.parts import Dims

F32 = jnp.float32
TOKENS, CHANNELS = 32, 128
"""Tokens and channels of a tile."""

WALK, UNROLL = 256, 4
"""Number of tokens that a program of the backward pass walks through, and number of tokens that it
loads at a time."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def conv_silu(
    dims: Dims,
    projected: Float[Array, "B S G I"],
    taps: Float[Array, "G W C"],
    bias: Float[Array, "G C"],
) -> Float[Array, "B S G C"]:
    """x, b and c: u[t] = silu(bias + sum over w of taps[w] projected[t - W + 1 + w]). The tokens
    before the sequence are zeros."""
    batch, length, groups, _ = projected.shape
    width = taps.shape[1]
    blocks = _Blocks(dims, length, width, TOKENS)
    return call(
        partial(_kernel, width=width), "conv_silu", blocks.grid(batch, groups),
        blocks.inputs(projected, taps, bias),
        {"u": Output((batch, length, groups, dims.channels), projected.dtype, blocks.tokens)},
        Launch(4), touched={"x": _bytes(projected, dims)},
    )["u"]  # fmt: skip


def _backward(dims, inputs, du):
    projected, taps, _ = inputs
    batch, length, groups, _ = projected.shape
    width = taps.shape[1]
    tokens = gcd(WALK, length)
    blocks = _Blocks(dims, length, width, tokens)
    sums = batch, length // tokens, groups
    outputs = call(
        partial(_back_kernel, width=width, length=length, tokens=tokens),
        "conv_silu_back", blocks.grid(batch, groups),
        {**blocks.inputs(*inputs), "du": (du, blocks.all_tokens)},
        {"dx": Output(du.shape, du.dtype, blocks.tokens),
         "dbias": Output((*sums, dims.channels), F32, blocks.dbias),
         "dtaps": Output((*sums, width, dims.channels), F32, blocks.dtaps)},
        Launch(1), touched={"x": _bytes(projected, dims)},
    )  # fmt: skip
    dprojected = jnp.pad(outputs["dx"], ((0, 0), (0, 0), (0, 0), (dims.inner, dims.heads)))
    return dprojected, *(jnp.sum(outputs[name], axis=(0, 1)) for name in ("dtaps", "dbias"))


conv_silu.defvjp(lambda dims, *inputs: (conv_silu(dims, *inputs), inputs), _backward)


class _Blocks:
    """Blocks of a program for some `tokens` and a tile of channels. The grid is `(blocks of tokens,
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
    """The tokens at positions `rows`, or one token at one position. Positions before the sequence
    are zero."""
    return jnp.where(rows[..., None] >= 0, x[jnp.maximum(rows, 0), :].astype(F32), 0.0)


def _convolved(r, rows, width: int):
    total = r.bias[...][None, :]
    for w in range(width):
        total += r.taps[w][None, :] * _at(r.x, rows - (width - 1) + w)
    return total


def _kernel(r, *, width: int):
    rows = pl.program_id(0) * TOKENS + jax.lax.broadcasted_iota(jnp.int32, (TOKENS,), 0)
    convolved = _convolved(r, rows, width)
    r.u[...] = (convolved * jax.nn.sigmoid(convolved)).astype(r.u.dtype)


def _back_kernel(r, *, width: int, length: int, tokens: int):
    """Walks through the tokens and keeps the last `width` inputs and slopes in registers. So each
    input is read once, and each slope is computed once."""
    first, before = pl.program_id(0) * tokens, width - 1
    taps, bias = [r.taps[w] for w in range(width)], r.bias[...]

    def read(token):
        """The input of a token and the gradient of its result. Memory after the sequence belongs to
        another array and may hold NaN, so we do not read it."""
        inside = jnp.minimum(token, length - 1)
        return _at(r.x, inside), r.du[inside, :].astype(F32)

    def slope(token, x, du):
        """The gradient of the input of SiLU, from the inputs up to a token."""
        convolved = bias + sum(tap * x for tap, x in zip(taps, x, strict=True))
        s = jax.nn.sigmoid(convolved)
        return jnp.where(token < length, du * (s + convolved * s * (1 - s)), 0.0)

    def step(i, carry):
        x, slopes, sums = carry
        ahead = first + before + i * UNROLL
        arriving = [read(ahead + n) for n in range(UNROLL)]
        for n, (new, du) in enumerate(arriving):
            x = *x, new
            slopes = *slopes, slope(ahead + n, x, du)
            # The first token of the window contributes to the results of all tokens of the window.
            later = slopes[::-1]
            dx = sum(s * tap for s, tap in zip(later, taps, strict=True))
            r.dx[i * UNROLL + n, :] = dx.astype(r.dx.dtype)
            parts = *(s * x[0] for s in later), slopes[0]
            sums = tuple(total + part for total, part in zip(sums, parts, strict=True))
            x, slopes = x[1:], slopes[1:]
        return x, slopes, sums

    x = tuple(_at(r.x, first - before + n) for n in range(before))
    slopes: tuple = ()
    for n, (new, du) in enumerate([read(first + n) for n in range(before)]):
        x = *x, new
        slopes, x = (*slopes, slope(first + n, x, du)), x[1:]
    zero = jnp.zeros(bias.shape, F32)
    start = x, slopes, (zero,) * (width + 1)
    *dtaps, r.dbias[...] = jax.lax.fori_loop(0, tokens // UNROLL, step, start)[2]
    for w, total in enumerate(dtaps):
        r.dtaps[w] = total
