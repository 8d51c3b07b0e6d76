"""The scan. One program for each head of each sequence goes through the chunks in order and keeps
the state in registers, in fp32.

    y_t = exp(T_t) c_t . s + sum over r <= t of exp(T_t - T_r) (c_t . b_r) dt_r x_r + d x_t

Here t and r are tokens of a chunk, T is the sum of dt a from the start of the chunk, and s is the
state before the chunk. States are `N P` here. They are written only if a backward pass follows
(`gradients`): before each chunk, in the dtype of x.

u are the channels x, b and c of each group, as the convolution writes them; programs read their
columns in place. Letters are as in `jaxbench.ops.ssd`. A is all heads of a device; the heads of
a group are adjacent.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxbench.ops.kernel_sizes import tunable
from jaxbench.ops.pallas_call import Launch, Output, call, product
from jaxbench.ops.ssd.pallas import gradients
from jaxbench.ops.ssd.pallas.tiles import OfHead, Tuning, decay, launches, sums
from jaxbench.ops.ssd.parts import Dims

F32 = jnp.float32


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scan(
    tuning: Tuning,
    dims: Dims,
    u: Float[Array, "B S G C"],
    dt: Float[Array, "B A S"],
    a: Float[Array, "A"],
    d: Float[Array, "A"],
) -> Float[Array, "B S G F"]:
    """The features of all heads in the dtype of `u`. All arguments except `u` are fp32."""
    return forward(tuning, dims, False, u, dt, a, d)["y"]


def _forward(tuning, dims, u, dt, a, d):
    outputs = forward(tuning, dims, True, u, dt, a, d)
    return outputs["y"], (u, dt, a, d, outputs["before"])


scan.defvjp(_forward, gradients.backward)


@tunable(lambda tuning, *_: launches(tuning.forward))
def forward(tuning, dims, keep, u, dt, a, d, *, sizes: Launch):
    """Returns `y` by name, and `before`, the states before each chunk, if they are to be kept."""
    batch, length, groups, _ = u.shape
    heads, chunks = groups * dims.heads, length // tuning.chunk
    blocks = OfHead(dims, length, chunks)
    inputs = {
        "u": (u, blocks.group), "dt": (dt, blocks.times), "a": (a, blocks.scalar),
        "d": (d, blocks.scalar),
    }  # fmt: skip
    outputs = {"y": Output((batch, length, groups, dims.inner), u.dtype, blocks.features)}
    if keep:
        kept = (batch, heads, chunks, dims.state, dims.head_dim)
        outputs["before"] = Output(kept, u.dtype, blocks.states)
    n, p = dims.state, dims.head_dim
    return call(
        partial(_kernel, blocks=blocks, tuning=tuning), "ssd_forward", (batch, heads),
        inputs, outputs, sizes,
        flops=2 * batch * heads * length * (tuning.part * (n + p) + 2 * n * p),
    )  # fmt: skip


def _kernel(r, *, blocks: OfHead, tuning: Tuning):
    dims, dtype, size = blocks.dims, r.u.dtype, tuning.part
    x_columns, b_columns, c_columns = blocks.channels()
    a, d, parts = r.a[0], r.d[0], tuning.chunk // tuning.part

    def through_chunk(k, state):
        if hasattr(r, "before"):
            r.before[k] = state.astype(dtype)
        return jax.lax.fori_loop(k * parts, (k + 1) * parts, through_part, state)

    def through_part(k, state):
        """One step of the scan, for a part of a chunk."""
        rows = pl.ds(k * size, size)
        dt, c = r.dt[rows], r.u[rows, c_columns]
        total, last = sums(dt * a)
        y = jnp.exp(total)[:, None] * product(c, state.astype(dtype))
        b = r.u[rows, b_columns]
        scores = product(c, b.T) * decay(total, total) * dt[None, :]
        x = r.u[rows, x_columns]
        y += product(scores.astype(dtype), x) + d * x.astype(F32)
        r.y[rows, x_columns] = y.astype(dtype)
        left = (x.astype(F32) * (dt * jnp.exp(last - total))[:, None]).astype(dtype)
        return jnp.exp(last) * state + product(b.T, left)

    start = jnp.zeros((dims.state, dims.head_dim), F32)
    jax.lax.fori_loop(0, blocks.chunks, through_chunk, start)
