"""The backward pass of the scan, in three kernels.

A head's recurrence, with state h [N, P], and its output:

    h_t = exp(dt_t a) h_(t-1) + dt_t b_t x_t^T        y_t = h_t^T c_t + d x_t

In a chunk let T_t be the sum of dt_s a for s <= t, L the last T, h the state before the chunk:

    y_t  = exp(T_t) h^T c_t + sum_(r<=t) exp(T_t - T_r) (c_t b_r) dt_r x_r + d x_t
    h_L  = exp(L) h + sum_r exp(L - T_r) dt_r b_r x_r^T

With the gradient ds of h_L, G_tr = exp(T_t - T_r) dt_r (dy_t x_r) for r <= t, S_tr = G_tr (c_t b_r)
and q_r = exp(L - T_r) dt_r (b_r ds x_r), the chain rule gives

    dh   = exp(L) ds + sum_t exp(T_t) c_t dy_t^T      the ds of the chunk before
    g_r  = exp(L - T_r) ds^T b_r + sum_(t>=r) exp(T_t - T_r) (c_t b_r) dy_t
    dx_r = dt_r g_r + d dy_r                          dd = sum_t x_t dy_t
    dc_t = exp(T_t) h dy_t + sum_(r<=t) G_tr b_r
    db_r = exp(L - T_r) dt_r ds x_r + sum_(t>=r) G_tr c_t
    dT_t = exp(T_t) (c_t h dy_t) + sum_(r<=t) S_tr - sum_(s>=t) S_st - q_t
    dL   = exp(L) <ds, h> + sum_r q_r                 added to the last dT

T is a running sum of dt a: with e_s the sum of dT_t for t >= s, ddt_s = g_s x_s + a e_s, and da is
the sum of dt_s e_s.

`_reverse` goes through the chunks from the last to the first, one program per head and sequence,
with ds in registers, and writes all but db, dc and the first term of dT. The heads of a group share
b and c: `_gradient_of_bc` has one program per chunk, group and block of state columns, which
loops over heads, so that no partial sums go through memory.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxbench.ops.pallas import Output, call, product
from jaxbench.ssd.pallas.blocks import OfChunk, OfHead, decay, sums
from jaxbench.ssd.pallas.tuning import Tuning
from jaxbench.ssd.parts import Dims

F32 = jnp.float32


def backward(tuning: Tuning, dims: Dims, residuals, dy):
    """The gradients of the arguments of `scan.scan`. All three kernels write into one array, the
    gradient of u."""
    u, dt, a, d, entering, before = residuals
    gradients = _reverse(tuning, dims, u, dt, a, d, entering, before, dy)
    blocks = OfChunk(dims, tuning)
    shared = blocks, u, dt, a, dy
    started = Output((blocks.parts, *dt.shape), F32, blocks.times_of_part)
    to_c = _gradient_of_bc("c", _to_c_kernel, *shared, gradients["du"], before, started=started)
    to_b = _gradient_of_bc("b", _to_b_kernel, *shared, to_c["gradient"], gradients["after"])
    dtotal = gradients["dtotal"] + jnp.sum(to_c["started"], axis=0)
    chunks = dtotal.reshape(*dtotal.shape[:2], -1, tuning.chunk)
    dlog = jax.lax.cumsum(chunks, axis=3, reverse=True).reshape(dt.shape)
    ddt, da = gradients["ddt"] + a[:, None] * dlog, jnp.sum(dt * dlog, axis=(0, 2))
    dd = jnp.sum(gradients["dd"], axis=0)
    return to_b["gradient"], ddt, da, dd, gradients.get("dentering")


def _reverse(tuning, dims, u, dt, a, d, entering, before, dy):
    batch, length, groups, _ = u.shape
    heads, chunks = groups * dims.heads, length // tuning.chunk
    blocks = OfHead(dims, length, chunks)
    inputs = blocks.inputs(u, dt, a, d) | {
        "dy": (dy, blocks.features),
        "before": (before, blocks.states),
    }
    outputs = {
        "du": Output(u.shape, u.dtype, blocks.group),
        "ddt": Output(dt.shape, F32, blocks.times),
        "dtotal": Output(dt.shape, F32, blocks.times),
        "dd": Output((batch, heads), F32, blocks.sum),
        "after": Output(before.shape, before.dtype, blocks.states),
    }
    if entering is not None:
        outputs["dentering"] = Output(entering.shape, F32, blocks.state)
    n, p = dims.state, dims.head_dim
    return call(
        partial(_reverse_kernel, blocks=blocks, size=tuning.chunk), "ssd_reverse", (batch, heads),
        inputs, outputs, tuning.reverse, interpret=tuning.interpret, touched={"du": dy.nbytes},
        flops=2 * batch * heads * length * (tuning.chunk * (n + 2 * p) + 2 * n * p),
    )  # fmt: skip


def _reverse_kernel(r, *, blocks: OfHead, size: int):
    dims, dtype = blocks.dims, r.u.dtype
    channels = blocks.channels()
    x_columns = channels[0]
    a, d = r.a[0], r.d[0]
    at_last = jax.lax.broadcasted_iota(jnp.int32, (size,), 0) == size - 1

    def step(i, carry):
        ds, dd = carry
        k = blocks.chunks - 1 - i
        rows = pl.ds(k * size, size)
        x, b, c = (r.u[rows, columns] for columns in channels)
        dy, dt = r.dy[rows, x_columns], r.dt[rows]
        total, last = sums(dt * a)
        r.after[k] = ds.astype(dtype)
        scores = product(b, c.T) * decay(total).T  # [r, t]
        # g: from the state after the chunk, and from the tokens of the chunk.
        by_state = jnp.exp(last - total)[:, None] * product(b, ds.astype(dtype))
        du = by_state + product(scores.astype(dtype), dy)
        r.du[rows, x_columns] = (du * dt[:, None] + d * dy.astype(F32)).astype(dtype)
        xf = x.astype(F32)
        r.ddt[rows] = jnp.sum(du * xf, axis=1)
        # The terms of dT and, at the last token, dL.
        received = scores * product(x, dy.T) * dt[:, None]
        sent = dt * jnp.sum(by_state * xf, axis=1)
        d_last = jnp.exp(last) * jnp.sum(ds * r.before[k].astype(F32)) + jnp.sum(sent)
        within = jnp.sum(received, axis=0) - jnp.sum(received, axis=1)
        r.dtotal[rows] = within - sent + jnp.where(at_last, d_last, 0.0)
        weighted = (dy.astype(F32) * jnp.exp(total)[:, None]).astype(dtype)
        dd += jnp.sum(xf * dy.astype(F32), axis=1)
        return jnp.exp(last) * ds + product(c.T, weighted), dd

    start = jnp.zeros((dims.state, dims.head_dim), F32), jnp.zeros((size,), F32)
    ds, dd = jax.lax.fori_loop(0, blocks.chunks, step, start)
    r.dd[0] = jnp.sum(dd)
    if hasattr(r, "dentering"):
        r.dentering[...] = ds


def _gradient_of_bc(name, kernel, blocks: OfChunk, u, dt, a, dy, du, states, **outputs: Output):
    """Fills the columns of b (or c) in du, which is returned as `gradient`, with the kernel's other
    `outputs`: that of c has `started`, the first term of dT, by block of state columns. `states`
    are for c the states before the chunks, for b the gradients of those after them."""
    batch, length, groups, _ = u.shape
    dims, size = blocks.dims, blocks.tuning.chunk
    # Every program recomputes the scores.
    of_heads = dims.heads * dims.head_dim * (size * blocks.parts + dims.state)
    return call(
        partial(kernel, blocks=blocks), f"ssd_to_{name}",
        (length // size * blocks.parts, groups, batch),
        blocks.inputs(u, dt, a, dy, du) | {"states": (states, blocks.states)},
        {"gradient": Output(du.shape, du.dtype, blocks.group, into="du"), **outputs},
        blocks.tuning.bc, flops=2 * batch * length * groups * (of_heads + size * dims.state),
        touched={"gradient": u.nbytes // dims.channels * dims.state},
        interpret=blocks.tuning.interpret,
    )  # fmt: skip


def _to_c_kernel(r, *, blocks: OfChunk):
    dims, dtype, size = blocks.dims, r.u.dtype, blocks.tuning.chunk
    b_columns, c_columns = blocks.bc_columns()
    c = r.u[:, c_columns].astype(F32)

    def step(h, carry):
        dscores, dc = carry
        head = pl.ds(h * dims.head_dim, dims.head_dim)
        dy, dt = r.dy[:, head], r.dt[h]
        total, _ = sums(dt * r.a[h])
        dscores += product(dy, r.u[:, head].T) * decay(total) * dt[None, :]
        weighted = (dy.astype(F32) * jnp.exp(total)[:, None]).astype(dtype)
        by_state = product(weighted, r.states[h].T)
        r.started[h] = jnp.sum(by_state * c, axis=1)
        return dscores, dc + by_state

    zeros = jnp.zeros((size, size), F32), jnp.zeros((size, blocks.columns), F32)
    dscores, dc = jax.lax.fori_loop(0, dims.heads, step, zeros)
    dc += product(dscores.astype(dtype), r.u[:, b_columns])
    r.gradient[:, c_columns] = dc.astype(dtype)


def _to_b_kernel(r, *, blocks: OfChunk):
    dims, dtype, size = blocks.dims, r.u.dtype, blocks.tuning.chunk
    b_columns, c_columns = blocks.bc_columns()

    def step(h, carry):
        dscores, db = carry
        head = pl.ds(h * dims.head_dim, dims.head_dim)
        x, dt = r.u[:, head], r.dt[h]
        total, last = sums(dt * r.a[h])
        dscores += product(r.dy[:, head], x.T) * decay(total) * dt[None, :]
        left = (x.astype(F32) * (dt * jnp.exp(last - total))[:, None]).astype(dtype)
        return dscores, db + product(left, r.states[h].T)

    zeros = jnp.zeros((size, size), F32), jnp.zeros((size, blocks.columns), F32)
    dscores, db = jax.lax.fori_loop(0, dims.heads, step, zeros)
    db += product(dscores.T.astype(dtype), r.u[:, c_columns])
    r.gradient[:, b_columns] = db.astype(dtype)
