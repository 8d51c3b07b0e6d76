"""Gate and RMSNorm over the features of a group, in fp32. The gate is read in place among the
columns of the input projection."""

from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxbench.ops.pallas_call import Launch, Output, call
from jaxbench.ops.ssd.parts import Dims

F32 = jnp.float32
TOKENS, TILES = 4, 16
"""Tokens of a tile, and tiles that a program of the backward pass goes through."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gate_norm(
    dims: Dims,
    y: Float[Array, "B S G F"],
    projected: Float[Array, "B S G I"],
    gain: Float[Array, "G F"],
) -> Float[Array, "B S G F"]:
    """v / sqrt(mean(v^2) + eps) * gain with v = y silu(z). z is the first columns of
    `projected`."""
    batch, length, groups, _ = y.shape
    tile, vector = _blocks(TOKENS, dims.inner)
    return call(
        partial(_kernel, eps=dims.eps), "gate_norm", (length // TOKENS, groups, batch),
        {"y": (y, tile), "z": (projected, tile), "gain": (gain, vector)},
        {"out": Output(y.shape, y.dtype, tile)},
        Launch(8), touched={"z": y.nbytes},
    )["out"]  # fmt: skip


def _backward(dims, inputs, dout):
    y, projected, gain = inputs
    batch, length, groups, inner = y.shape
    rows = TOKENS * gcd(TILES, length // TOKENS)
    steps = length // rows
    tile, vector = _blocks(rows, inner)
    sums = pl.BlockSpec((None, None, None, inner), lambda s, g, i: (i, s, g, 0))
    outputs = call(
        partial(_back_kernel, eps=dims.eps, tiles=rows // TOKENS), "gate_norm_back",
        (steps, groups, batch),
        {"y": (y, tile), "z": (projected, tile), "gain": (gain, vector),
         "dout": (dout, tile)},
        {"dy": Output(y.shape, y.dtype, tile), "dz": Output(y.shape, y.dtype, tile),
         "dgain": Output((batch, steps, groups, inner), F32, sums)},
        Launch(8), touched={"z": y.nbytes},
    )  # fmt: skip
    after = (0, dims.columns - inner)
    dprojected = jnp.pad(outputs["dz"], ((0, 0), (0, 0), (0, 0), after))
    return outputs["dy"], dprojected, jnp.sum(outputs["dgain"], axis=(0, 1))


gate_norm.defvjp(lambda dims, *inputs: (gate_norm(dims, *inputs), inputs), _backward)


def _blocks(rows: int, inner: int) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    tile = pl.BlockSpec((None, rows, None, inner), lambda s, g, i: (i, s, g, 0))
    return tile, pl.BlockSpec((None, inner), lambda s, g, i: (g, 0))


def _kernel(r, *, eps: float):
    z = r.z[...].astype(F32)
    v = r.y[...].astype(F32) * z * jax.nn.sigmoid(z)
    v *= jax.lax.rsqrt(jnp.sum(v * v, axis=1) / v.shape[1] + eps)[:, None]
    r.out[...] = (v * r.gain[...][None, :]).astype(r.out.dtype)


def _back_kernel(r, *, eps: float, tiles: int):
    gain = r.gain[...][None, :]

    def step(i, dgain):
        rows = pl.ds(i * TOKENS, TOKENS)
        y, z, dout = (ref[rows, :].astype(F32) for ref in (r.y, r.z, r.dout))
        s = jax.nn.sigmoid(z)
        gate = z * s
        v = y * gate
        scale = jax.lax.rsqrt(jnp.sum(v * v, axis=1) / v.shape[1] + eps)[:, None]
        normed, dnormed = v * scale, dout * gain
        along = (jnp.sum(dnormed * normed, axis=1) / v.shape[1])[:, None]
        dv = scale * (dnormed - normed * along)
        r.dy[rows, :] = (dv * gate).astype(r.dy.dtype)
        r.dz[rows, :] = (dv * y * (s + gate * (1 - s))).astype(r.dz.dtype)
        return dgain + jnp.sum(dout * normed, axis=0)

    r.dgain[...] = jax.lax.fori_loop(0, tiles, step, jnp.zeros((r.gain.shape[0],), F32))
