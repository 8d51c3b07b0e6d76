"""The backward pass of the scan, in three kernels.

`reverse` goes through the chunks from the last to the first, one program for each head of each
sequence, with the gradient ds of the state after a chunk in registers, and leaves the gradients of
x, d, and of dt and T but for one part. What b and c map is shared by the heads of a group: `to_c`
and `to_b` have one program for each chunk, group and some columns of the state, which loops over
heads, so that nothing is added up in memory.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxbench.ssd.pallas.blocks import OfChunk, OfHead, decay, sums
from jaxbench.ssd.pallas.call import Given, Made, Tuning, call, product
from jaxbench.ssd.parts import Dims

F32 = jnp.float32


def backward(tuning: Tuning, dims: Dims, residuals, dy):
    """The gradients of what `scan.scan` is given. All three kernels write into one array, that of
    u."""
    u, dt, a, d, entering, before = residuals
    found = _reverse(tuning, dims, u, dt, a, d, entering, before, dy)
    du, started = _to_c(tuning, dims, u, dt, a, dy, before, found["du"])
    du = _to_b(tuning, dims, u, dt, a, dy, found["after"], du)
    dtotal = found["dtotal"] + jnp.sum(started, axis=0)
    chunks = dtotal.reshape(*dtotal.shape[:2], -1, tuning.chunk)
    dlog = jax.lax.cumsum(chunks, axis=3, reverse=True).reshape(dt.shape)
    ddt, da = found["ddt"] + a[:, None] * dlog, jnp.sum(dt * dlog, axis=(0, 2))
    return du, ddt, da, jnp.sum(found["dd"], axis=0), found.get("dentering")


def _reverse(tuning, dims, u, dt, a, d, entering, before, dy):
    batch, length, groups, _ = u.shape
    heads, chunks = groups * dims.heads, length // tuning.chunk
    blocks = OfHead(dims, length, chunks)
    given = blocks.given(u, dt, a, d) | {
        "dy": Given(dy, blocks.features),
        "before": Given(before, blocks.states),
    }
    made = {
        "du": Made(u.shape, u.dtype, blocks.group),
        "ddt": Made(dt.shape, F32, blocks.times),
        "dtotal": Made(dt.shape, F32, blocks.times),
        "dd": Made((batch, heads), F32, blocks.sum),
        "after": Made(before.shape, before.dtype, blocks.states),
    }
    if entering is not None:
        made["dentering"] = Made(entering.shape, F32, blocks.state)
    n, p = dims.state, dims.head_dim
    return call(
        partial(_reverse_kernel, blocks=blocks, size=tuning.chunk), "ssd_reverse", (batch, heads),
        given, made, tuning.reverse, interpret=tuning.interpret, touched={"du": dy.nbytes},
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
        # The gradient of dt x: from the state that the chunk leaves, and from its own tokens.
        by_state = jnp.exp(last - total)[:, None] * product(b, ds.astype(dtype))
        du = by_state + product(scores.astype(dtype), dy)
        r.du[rows, x_columns] = (du * dt[:, None] + d * dy.astype(F32)).astype(dtype)
        xf = x.astype(F32)
        r.ddt[rows] = jnp.sum(du * xf, axis=1)
        # T_t raises what t receives from r, and T_r lowers it; the last T is that of the state.
        received = scores * product(x, dy.T) * dt[:, None]
        sent = dt * jnp.sum(by_state * xf, axis=1)
        kept = jnp.exp(last) * jnp.sum(ds * r.before[k].astype(F32)) + jnp.sum(sent)
        own = jnp.sum(received, axis=0) - jnp.sum(received, axis=1)
        r.dtotal[rows] = own - sent + jnp.where(at_last, kept, 0.0)
        weighted = (dy.astype(F32) * jnp.exp(total)[:, None]).astype(dtype)
        dd += jnp.sum(xf * dy.astype(F32), axis=1)
        return jnp.exp(last) * ds + product(c.T, weighted), dd

    start = jnp.zeros((dims.state, dims.head_dim), F32), jnp.zeros((size,), F32)
    ds, dd = jax.lax.fori_loop(0, blocks.chunks, step, start)
    r.dd[0] = jnp.sum(dd)
    if hasattr(r, "dentering"):
        r.dentering[...] = ds


def _to_c(tuning, dims, u, dt, a, dy, before, du):
    """(du with the gradient of c, the part of T's gradient that comes from the states before
    chunks, by columns of the state)."""
    blocks = OfChunk(dims, tuning)
    given = _of_chunk(blocks, u, dt, a, dy, du) | {"before": Given(before, blocks.states)}
    made = {
        "made": Made(du.shape, du.dtype, blocks.group, into="du"),
        "started": Made((blocks.parts, *dt.shape), F32, blocks.times_of_part),
    }
    found = call(
        partial(_to_c_kernel, blocks=blocks), "ssd_to_c", _grid(blocks, u), given, made,
        tuning.maps, flops=_flops(blocks, u), interpret=tuning.interpret,
        touched={"made": u.nbytes // dims.channels * dims.state},
    )  # fmt: skip
    return found["made"], found["started"]


def _to_c_kernel(r, *, blocks: OfChunk):
    dims, dtype, size = blocks.dims, r.u.dtype, blocks.tuning.chunk
    b_columns, c_columns = blocks.maps()
    c = r.u[:, c_columns].astype(F32)

    def step(h, carry):
        dscores, dc = carry
        head = pl.ds(h * dims.head_dim, dims.head_dim)
        dy, dt = r.dy[:, head], r.dt[h]
        total, _ = sums(dt * r.a[h])
        dscores += product(dy, r.u[:, head].T) * decay(total) * dt[None, :]
        weighted = (dy.astype(F32) * jnp.exp(total)[:, None]).astype(dtype)
        by_state = product(weighted, r.before[h].T)
        r.started[h] = jnp.sum(by_state * c, axis=1)
        return dscores, dc + by_state

    zeros = jnp.zeros((size, size), F32), jnp.zeros((size, blocks.columns), F32)
    dscores, dc = jax.lax.fori_loop(0, dims.heads, step, zeros)
    dc += product(dscores.astype(dtype), r.u[:, b_columns])
    r.made[:, c_columns] = dc.astype(dtype)


def _to_b(tuning, dims, u, dt, a, dy, after, du):
    """du with the gradient of b."""
    blocks = OfChunk(dims, tuning)
    given = _of_chunk(blocks, u, dt, a, dy, du) | {"after": Given(after, blocks.states)}
    found = call(
        partial(_to_b_kernel, blocks=blocks), "ssd_to_b", _grid(blocks, u), given,
        {"made": Made(du.shape, du.dtype, blocks.group, into="du")},
        tuning.maps, flops=_flops(blocks, u), interpret=tuning.interpret,
        touched={"made": u.nbytes // dims.channels * dims.state},
    )  # fmt: skip
    return found["made"]


def _to_b_kernel(r, *, blocks: OfChunk):
    dims, dtype, size = blocks.dims, r.u.dtype, blocks.tuning.chunk
    b_columns, c_columns = blocks.maps()

    def step(h, carry):
        dscores, db = carry
        head = pl.ds(h * dims.head_dim, dims.head_dim)
        x, dt = r.u[:, head], r.dt[h]
        total, last = sums(dt * r.a[h])
        dscores += product(r.dy[:, head], x.T) * decay(total) * dt[None, :]
        left = (x.astype(F32) * (dt * jnp.exp(last - total))[:, None]).astype(dtype)
        return dscores, db + product(left, r.after[h].T)

    zeros = jnp.zeros((size, size), F32), jnp.zeros((size, blocks.columns), F32)
    dscores, db = jax.lax.fori_loop(0, dims.heads, step, zeros)
    db += product(dscores.T.astype(dtype), r.u[:, c_columns])
    r.made[:, b_columns] = db.astype(dtype)


def _of_chunk(blocks: OfChunk, u, dt, a, dy, du):
    return {
        "u": Given(u, blocks.group),
        "dt": Given(dt, blocks.times),
        "a": Given(a, blocks.scalars),
        "dy": Given(dy, blocks.features),
        "du": Given(du, blocks.group),
    }


def _grid(blocks: OfChunk, u):
    batch, length, groups, _ = u.shape
    return length // blocks.tuning.chunk * blocks.parts, groups, batch


def _flops(blocks: OfChunk, u) -> int:
    """Each program makes the products of scores for itself."""
    batch, length, groups, _ = u.shape
    size, dims = blocks.tuning.chunk, blocks.dims
    of_heads = dims.heads * dims.head_dim * (size * blocks.parts + dims.state)
    return 2 * batch * length * groups * (of_heads + size * dims.state)
