"""Grouped matmuls in Pallas kernels for NVIDIA GPUs from Hopper on. A program makes one tile of a
result; blocks without rows cost next to nothing."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from jaxbench.ops.grouped.groups import BLOCK, Groups
from jaxbench.ops.pallas import TARGET, Launch, Output, call, product, work

RULES = {TARGET: work}

TILES = 128, 64
"""Widths of a tile, the largest that divides the features is taken."""

DEPTH = 64
"""Features of a step of the sums over features."""

LAUNCH = Launch(warps=8, stages=3)
"""Not yet chosen by measurement."""


def to_permuted(
    x: Float[Array, "A D"], w: Float[Array, "E D N"], groups: Groups, *, interpret: bool = False
) -> Float[Array, "R N"]:
    """`Implementation.to_permuted`."""
    width = _tile(w.shape[2])
    y = (groups.row.size, w.shape[2])
    return call(
        partial(_to_permuted, depth=_tile(w.shape[1], DEPTH)), "grouped_to_permuted",
        (w.shape[2] // width, groups.group.size),
        {
            "x": (x, _whole(x)),
            "w": (w, pl.BlockSpec((*w.shape[:2], width), lambda n, b: (0, 0, n))),
            "row": (groups.row, pl.BlockSpec((BLOCK,), lambda n, b: (b,))),
            "group": (groups.group, pl.BlockSpec((1,), lambda n, b: (b,))),
        },
        {"y": Output(y, x.dtype, pl.BlockSpec((BLOCK, width), lambda n, b: (b, n)))},
        LAUNCH, **_cost(w.shape, groups, x.itemsize), interpret=interpret,
    )["y"]  # fmt: skip


def from_permuted(
    y: Float[Array, "R N"], w: Float[Array, "E D N"], groups: Groups, *, interpret: bool = False
) -> Float[Array, "A D"]:
    """`Implementation.from_permuted`."""
    width = _tile(w.shape[1])
    x = (groups.place.size, w.shape[1])
    return call(
        partial(_from_permuted, depth=_tile(w.shape[2], DEPTH)), "grouped_from_permuted",
        (w.shape[1] // width, groups.group.size),
        {
            "y": (y, pl.BlockSpec((BLOCK, y.shape[1]), lambda d, b: (b, 0))),
            "w": (w, pl.BlockSpec((w.shape[0], width, w.shape[2]), lambda d, b: (0, d, 0))),
            "row": (groups.row, pl.BlockSpec((BLOCK,), lambda d, b: (b,))),
            "group": (groups.group, pl.BlockSpec((1,), lambda d, b: (b,))),
        },
        {"x": Output(x, y.dtype, pl.BlockSpec((x[0], width), lambda d, b: (0, d)))},
        LAUNCH, **_cost(w.shape, groups, y.itemsize), interpret=interpret,
    )["x"]  # fmt: skip


def weights(
    x: Float[Array, "A D"], y: Float[Array, "R N"], groups: Groups, *, interpret: bool = False
) -> Float[Array, "E D N"]:
    """`Implementation.weights`."""
    tile = _tile(x.shape[1]), _tile(y.shape[1])
    w = (groups.ends.size, x.shape[1], y.shape[1])
    return call(
        _weights, "grouped_weights", (w[2] // tile[1], w[1] // tile[0], w[0]),
        {
            "x": (x, pl.BlockSpec((x.shape[0], tile[0]), lambda n, d, e: (0, d))),
            "y": (y, pl.BlockSpec((y.shape[0], tile[1]), lambda n, d, e: (0, n))),
            "row": (groups.row, _whole(groups.row)),
            "ends": (groups.ends, _whole(groups.ends)),
        },
        {"w": Output(w, x.dtype, pl.BlockSpec((None, *tile), lambda n, d, e: (e, d, n)))},
        LAUNCH, **_cost(w, groups, x.itemsize), interpret=interpret,
    )["w"]  # fmt: skip


def _to_permuted(r: SimpleNamespace, *, depth: int) -> None:
    rows, of = r.row[...], r.group[0]

    def step(i, total):
        x = _gathered(r.x, rows, i * depth, depth)
        return total + product(x, r.w[of, pl.ds(i * depth, depth), :])

    _unless_empty(r.y, of, r.w, step, r.x.shape[1] // depth)


def _from_permuted(r: SimpleNamespace, *, depth: int) -> None:
    rows, of = r.row[...], r.group[0]

    def step(i, total):
        features = pl.ds(i * depth, depth)
        return total + product(r.y[:, features], r.w[of, :, features].T)

    @pl.when(of < r.w.shape[0])
    def _():
        zeros = jnp.zeros((BLOCK, r.x.shape[1]), jnp.float32)
        total = jax.lax.fori_loop(0, r.y.shape[1] // depth, step, zeros)
        tile, filled = _tile_at(r.x, rows, 0, r.x.shape[1])
        triton.store(tile, total.astype(r.x.dtype), mask=filled)


def _weights(r: SimpleNamespace) -> None:
    of = pl.program_id(2)
    first = jnp.where(of > 0, r.ends[jnp.maximum(of - 1, 0)], 0)

    def step(b, total):
        block = pl.ds(b * BLOCK, BLOCK)
        x = _gathered(r.x, r.row[block], 0, r.x.shape[1])
        return total + product(x.T, r.y[block, :])

    total = jax.lax.fori_loop(first, r.ends[of], step, jnp.zeros(r.w.shape, jnp.float32))
    r.w[...] = total.astype(r.w.dtype)


def _unless_empty(out, of, w, step, steps: int) -> None:
    """Writes the sum of all steps, or zeros for a block without rows."""

    @pl.when(of < w.shape[0])
    def _():
        total = jax.lax.fori_loop(0, steps, step, jnp.zeros(out.shape, jnp.float32))
        out[...] = total.astype(out.dtype)

    @pl.when(of == w.shape[0])
    def _():
        out[...] = jnp.zeros(out.shape, out.dtype)


def _tile_at(x, rows: Array, first: Array | int, width: int) -> tuple[Any, Array]:
    """(features `first` to `first` + `width` of rows by their indices; which of the rows are not
    `NONE`)."""
    shape = (rows.size, width)
    index = jnp.broadcast_to(rows[:, None], shape)
    features = first + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return x.at[index, features], index < x.shape[0]


def _gathered(x, rows: Array, first: Array | int, width: int) -> Array:
    """A tile of rows by their indices, zeros for `NONE`."""
    tile, filled = _tile_at(x, rows, first, width)
    return triton.load(tile, mask=filled, other=0)


def _whole(x: Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def _tile(features: int, *widths: int) -> int:
    """The largest width that divides the features."""
    return next(width for width in widths or TILES if features % width == 0)


def _cost(w: tuple[int, ...], groups: Groups, itemsize: int) -> dict[str, Any]:
    """FLOPs and bytes of a product for the number of rows that is expected."""
    rows, (count, d, n) = groups.expected, w
    return {
        "flops": 2 * rows * d * n,
        "sizes": (count, -(-rows // count), n, d),
        "touched": {"x": rows * d * itemsize, "y": rows * n * itemsize},
    }
