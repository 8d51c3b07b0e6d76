"""The backward pass of the scan, in four kernels.

A head's recurrence, with state h [N, P], and its output:

    h_t = exp(dt_t a) h_(t-1) + dt_t b_t x_t^T        y_t = h_t^T c_t + d x_t

In a chunk let T_t be the sum of dt_s a for s <= t, L the last T, and h the state before the chunk:

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

T is a running sum of dt a. Let e_s be the sum of dT_t for t >= s. Then ddt_s = g_s x_s + a e_s, and
da is the sum of dt_s e_s.

`reverse` goes through the chunks from the last to the first. It has one program per head and
sequence, keeps ds in registers, and writes T and the ds of each chunk. Nothing else has to wait for
the next chunk, so `gradient_of_x` has one program per chunk and head. It writes everything except
db, dc and the first term of dT. The heads of a group share b and c, so `_of_group` has one
program per half of a chunk, group and block of state columns. The program loops over heads, so that
no partial sums go through memory.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxbench.ops.kernel_sizes import tunable
from jaxbench.ops.pallas_call import Launch, Output, call, product
from jaxbench.ops.ssd.pallas.tiles import (
    SMALLER,
    OfChunk,
    OfHead,
    OfHeadInChunk,
    Tuning,
    decay,
    launches,
    sums,
)
from jaxbench.ops.ssd.parts import Dims

F32 = jnp.float32


def backward(tuning: Tuning, dims: Dims, residuals, dy):
    """The gradients of the arguments of `scan.scan`. Three kernels write into one array, the
    gradient of u."""
    u, dt, a, d, before = residuals
    reversed_ = reverse(tuning, dims, u, dt, a, before, dy)
    total, after = reversed_["total"], reversed_["after"]
    gradients = gradient_of_x(tuning, dims, u, dt, total, d, before, after, dy)
    shared = tuning, dims, u, dt, total, dy
    to_c = gradient_of_c(*shared, gradients["du"], before)
    to_b = gradient_of_b(*shared, to_c["gradient"], after)
    dtotal = gradients["dtotal"] + jnp.sum(to_c["started"], axis=0)
    chunks = dtotal.reshape(*dtotal.shape[:2], -1, tuning.chunk)
    dlog = jax.lax.cumsum(chunks, axis=3, reverse=True).reshape(dt.shape)
    ddt, da = gradients["ddt"] + a[:, None] * dlog, jnp.sum(dt * dlog, axis=(0, 2))
    dd = jnp.sum(gradients["dd"], axis=(0, 2))
    return to_b["gradient"], ddt, da, dd


@tunable(lambda tuning, *_: launches(tuning.reverse, *SMALLER))
def reverse(tuning, dims, u, dt, a, before, dy, *, sizes: Launch):
    """Returns, by name: `after`, the gradients of the states after each chunk, and `total`, which
    is T."""
    batch, length, groups, _ = u.shape
    heads = groups * dims.heads
    blocks = OfHead(dims, length, length // tuning.chunk)
    inputs = {
        "u": (u, blocks.group), "dt": (dt, blocks.times), "a": (a, blocks.scalar),
        "dy": (dy, blocks.features),
    }  # fmt: skip
    outputs = {
        "total": Output(dt.shape, F32, blocks.times),
        "after": Output(before.shape, before.dtype, blocks.states),
    }
    return call(
        partial(_reverse_kernel, blocks=blocks, size=tuning.chunk), "ssd_reverse", (batch, heads),
        inputs, outputs, sizes,
        touched={"u": u.nbytes // dims.channels * dims.state},
        flops=2 * batch * heads * length * dims.state * dims.head_dim,
    )  # fmt: skip


def _reverse_kernel(r, *, blocks: OfHead, size: int):
    dims, dtype = blocks.dims, r.u.dtype
    x_columns, _, c_columns = blocks.channels()
    a = r.a[0]

    def step(i, ds):
        k = blocks.chunks - 1 - i
        rows = pl.ds(k * size, size)
        total, last = sums(r.dt[rows] * a)
        r.total[rows] = total
        r.after[k] = ds.astype(dtype)
        dy = r.dy[rows, x_columns].astype(F32)
        weighted = (dy * jnp.exp(total)[:, None]).astype(dtype)
        return jnp.exp(last) * ds + product(r.u[rows, c_columns].T, weighted)

    start = jnp.zeros((dims.state, dims.head_dim), F32)
    jax.lax.fori_loop(0, blocks.chunks, step, start)


@tunable(lambda tuning, *_: launches(tuning.x, *SMALLER))
def gradient_of_x(tuning, dims, u, dt, total, d, before, after, dy, *, sizes: Launch):
    """The gradients of u, dt and d. In `du` only the columns of x are written. `ddt` lacks the part
    through T, `dtotal` lacks its first term, and `dd` has one number per chunk."""
    batch, length, groups, _ = u.shape
    heads, chunks = groups * dims.heads, length // tuning.chunk
    blocks = OfHeadInChunk(dims, tuning.chunk)
    inputs = {
        "u": (u, blocks.group), "dt": (dt, blocks.times), "total": (total, blocks.times),
        "d": (d, blocks.scalar), "dy": (dy, blocks.features),
        "before": (before, blocks.states), "after": (after, blocks.states),
    }  # fmt: skip
    outputs = {
        "du": Output(u.shape, u.dtype, blocks.group),
        "ddt": Output(dt.shape, F32, blocks.times),
        "dtotal": Output(dt.shape, F32, blocks.times),
        "dd": Output((batch, heads, chunks), F32, blocks.sum),
    }
    n, p, square = dims.state, dims.head_dim, (tuning.chunk + tuning.part) // 2
    return call(
        partial(_to_x_kernel, blocks=blocks, tuning=tuning), "ssd_to_x", (batch, heads, chunks),
        inputs, outputs, sizes, touched={"du": dy.nbytes},
        flops=2 * batch * heads * length * (square * (n + 2 * p) + n * p),
    )  # fmt: skip


def _to_x_kernel(r, *, blocks: OfHeadInChunk, tuning: Tuning):
    """A chunk is split into squares of `part` by `part` tokens. Squares above the diagonal are
    zero."""
    part, size, dtype = tuning.part, tuning.chunk, r.u.dtype
    x_columns, b_columns, c_columns = blocks.channels()
    parts, last, dd = range(size // part), r.total[size - 1], jnp.float32(0)
    # The terms of dT. The last token also gets dL.
    after = r.after[...]
    d_last = jnp.exp(last) * jnp.sum(after.astype(F32) * r.before[...].astype(F32))
    dtotals = [jnp.zeros((part,), F32) for _ in parts]
    for n in reversed(parts):
        rows = pl.ds(n * part, part)
        b, x, dt, total = r.u[rows, b_columns], r.u[rows, x_columns], r.dt[rows], r.total[rows]
        # g has two parts: from the state after the chunk, and from the tokens of the chunk.
        du = jnp.exp(last - total)[:, None] * product(b, after)
        sent = dt * jnp.sum(du * x.astype(F32), axis=1)
        d_last += jnp.sum(sent)
        dtotals[n] -= sent
        for m in parts[n:]:
            later = pl.ds(m * part, part)
            dy = r.dy[later, x_columns]
            decays = decay(r.total[later], total, (m - n) * part).T
            scores = product(b, r.u[later, c_columns].T) * decays  # [r, t]
            du += product(scores.astype(dtype), dy)
            received = scores * product(x, dy.T) * dt[:, None]
            dtotals[m] += jnp.sum(received, axis=0)
            dtotals[n] -= jnp.sum(received, axis=1)
        xf, dy = x.astype(F32), r.dy[rows, x_columns].astype(F32)
        r.du[rows, x_columns] = (du * dt[:, None] + r.d[0] * dy).astype(dtype)
        r.ddt[rows] = jnp.sum(du * xf, axis=1)
        dd += jnp.sum(xf * dy)
    at_last = jax.lax.broadcasted_iota(jnp.int32, (part,), 0) == part - 1
    dtotals[-1] += jnp.where(at_last, d_last, 0.0)
    for n in parts:
        r.dtotal[pl.ds(n * part, part)] = dtotals[n]
    r.dd[0] = dd


@tunable(lambda tuning, *_: launches(tuning.bc))
def gradient_of_c(tuning, dims, u, dt, total, dy, du, before, *, sizes: Launch):
    """Fills the columns of c in `du`. Returns it as `gradient`, together with `started`, the first
    term of dT by block of state columns."""
    blocks = OfChunk(dims, tuning)
    started = Output((blocks.parts, *dt.shape), F32, blocks.times_of_part)
    inputs = blocks.inputs(u, dt, total, dy, du) | {"states": (before, blocks.states)}
    return _of_group("c", _to_c_kernel, blocks, inputs, sizes, started=started)


@tunable(lambda tuning, *_: launches(tuning.bc))
def gradient_of_b(tuning, dims, u, dt, total, dy, du, after, *, sizes: Launch):
    """Fills the columns of b in `du`, and returns it as `gradient`. `after` are the gradients of
    the states after the chunks."""
    blocks = OfChunk(dims, tuning)
    inputs = blocks.inputs(u, dt, total, dy, du) | {"states": (after, blocks.states)}
    return _of_group("b", _to_b_kernel, blocks, inputs, sizes)


def _of_group(name, kernel, blocks: OfChunk, inputs, launch: Launch, **outputs):
    (u, _), (du, _) = inputs["u"], inputs["du"]
    batch, length, groups, _ = u.shape
    dims, tuning = blocks.dims, blocks.tuning
    # Every program recomputes the scores.
    of_heads = dims.heads * dims.head_dim * (tuning.chunk * blocks.parts + dims.state)
    return call(
        partial(kernel, blocks=blocks), f"ssd_to_{name}",
        (length // blocks.rows * blocks.parts, groups, batch), inputs,
        {"gradient": Output(du.shape, du.dtype, blocks.group, into="du"), **outputs},
        launch, flops=2 * batch * length * groups * (of_heads + tuning.chunk * dims.state),
        touched={"gradient": u.nbytes // dims.channels * dims.state},
    )  # fmt: skip


def _to_c_kernel(r, *, blocks: OfChunk):
    dims, dtype, size = blocks.dims, r.u.dtype, blocks.tuning.chunk
    b_columns, c_columns = blocks.bc_columns()
    first, rows = blocks.tokens()
    c = r.u[rows, c_columns]

    def step(h, carry):
        dscores, dc = carry
        head = pl.ds(h * dims.head_dim, dims.head_dim)
        dy, total = r.dy[rows, head], r.total[h, rows]
        within = product(dy, r.u[:, head].T)  # [t, r]
        dscores += within * decay(total, r.total[h], first) * r.dt[h][None, :]
        weighted = (dy.astype(F32) * jnp.exp(total)[:, None]).astype(dtype)
        by_state = product(weighted, r.states[h].T)
        r.started[h] = jnp.sum(by_state * c.astype(F32), axis=1)
        return dscores, dc + by_state

    zeros = jnp.zeros((blocks.rows, size), F32), jnp.zeros((blocks.rows, blocks.columns), F32)
    dscores, dc = jax.lax.fori_loop(0, dims.heads, step, zeros)
    dc += product(dscores.astype(dtype), r.u[:, b_columns])
    r.gradient[rows, c_columns] = dc.astype(dtype)


def _to_b_kernel(r, *, blocks: OfChunk):
    dims, dtype, size = blocks.dims, r.u.dtype, blocks.tuning.chunk
    b_columns, c_columns = blocks.bc_columns()
    first, rows = blocks.tokens()

    def step(h, carry):
        dscores, db = carry
        head = pl.ds(h * dims.head_dim, dims.head_dim)
        x, dt, total = r.u[rows, head], r.dt[h, rows], r.total[h, rows]
        within = product(x, r.dy[:, head].T)  # [r, t]
        dscores += within * decay(r.total[h], total, -first).T * dt[:, None]
        left = dt * jnp.exp(r.total[h, size - 1] - total)
        left = (x.astype(F32) * left[:, None]).astype(dtype)
        return dscores, db + product(left, r.states[h].T)

    zeros = jnp.zeros((blocks.rows, size), F32), jnp.zeros((blocks.rows, blocks.columns), F32)
    dscores, db = jax.lax.fori_loop(0, dims.heads, step, zeros)
    db += product(dscores.astype(dtype), r.u[:, c_columns])
    r.gradient[rows, b_columns] = db.astype(dtype)
