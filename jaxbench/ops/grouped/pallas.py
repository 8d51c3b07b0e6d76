"""Grouped matmuls in Pallas kernels for NVIDIA GPUs from Hopper on. A program makes one tile of a
result; blocks without rows cost next to nothing."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from jaxbench.ops.grouped.groups import BLOCK, Groups, result_dtype
from jaxbench.ops.pallas import (
    TARGET,
    Inputs,
    Launch,
    Output,
    add_product,
    call,
    gathered,
    largest,
    tile_at,
    whole,
    work,
)
from jaxbench.recipe.model import ModelConfig

RULES = {TARGET: work}

TILES = 128, 64
"""Widths of a tile, the largest that divides the features is taken."""

DEPTH = 64
"""Features of a step of the sums over features."""

LAUNCH = Launch(warps=8, stages=3)
"""Not yet chosen by measurement."""


def refusal(cfg: ModelConfig, dtype: str, platform: str) -> str | None:
    """Reason why the kernels cannot multiply; None if they can."""
    if platform != "gpu":
        return f"does not run on a {platform}"
    if dtype == "fp32":
        return "computes no fp32 products"
    experts, least = cfg.experts, min(TILES)
    assert experts is not None
    width = "model.experts.latent" if experts.latent else "model.embed"
    sizes = {"model.experts.ffn": experts.ffn, width: experts.latent or cfg.embed}
    odd = (f"{name} = {size}" for name, size in sizes.items() if size % least)
    first = next(odd, None)
    return first and f"needs {first} to be a multiple of {least}"


def to_permuted(
    x: Float[Array, "A D"],
    w: Float[Array, "E D N"],
    groups: Groups,
    scale: Array | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "R N"]:
    """`Implementation.to_permuted`."""
    width = largest(w.shape[2], *TILES)
    y = (groups.row.size, w.shape[2])
    return call(
        partial(_to_permuted, depth=largest(w.shape[1], DEPTH)), "grouped_to_permuted",
        (w.shape[2] // width, groups.group.size),
        {
            "x": (x, whole(x)),
            "w": (w, pl.BlockSpec((*w.shape[:2], width), lambda n, b: (0, 0, n))),
            "row": (groups.row, pl.BlockSpec((BLOCK,), lambda n, b: (b,))),
            "group": (groups.group, pl.BlockSpec((1,), lambda n, b: (b,))),
            **scale_input(scale),
        },
        {"y": Output(y, result_dtype(x), pl.BlockSpec((BLOCK, width), lambda n, b: (b, n)))},
        LAUNCH, **_cost(x, w, w.shape, groups, (x.itemsize, 2)), interpret=interpret,
    )["y"]  # fmt: skip


def from_permuted(
    y: Float[Array, "R N"],
    w: Float[Array, "E D N"],
    groups: Groups,
    scale: Array | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "A D"]:
    """`Implementation.from_permuted`."""
    width = largest(w.shape[1], *TILES)
    x = (groups.place.size, w.shape[1])
    return call(
        partial(_from_permuted, depth=largest(w.shape[2], DEPTH)), "grouped_from_permuted",
        (w.shape[1] // width, groups.group.size),
        {
            "y": (y, pl.BlockSpec((BLOCK, y.shape[1]), lambda d, b: (b, 0))),
            "w": (w, pl.BlockSpec((w.shape[0], width, w.shape[2]), lambda d, b: (0, d, 0))),
            "row": (groups.row, pl.BlockSpec((BLOCK,), lambda d, b: (b,))),
            "group": (groups.group, pl.BlockSpec((1,), lambda d, b: (b,))),
            **scale_input(scale),
        },
        {"x": Output(x, result_dtype(y), pl.BlockSpec((x[0], width), lambda d, b: (0, d)))},
        LAUNCH, **_cost(y, w, w.shape, groups, (2, y.itemsize)), interpret=interpret,
    )["x"]  # fmt: skip


def weights(
    x: Float[Array, "A D"],
    y: Float[Array, "R N"],
    groups: Groups,
    scale: Array | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "E D N"]:
    """`Implementation.weights`."""
    tile = largest(x.shape[1], *TILES), largest(y.shape[1], *TILES)
    w = (groups.ends.size, x.shape[1], y.shape[1])
    return call(
        _weights, "grouped_weights", (w[2] // tile[1], w[1] // tile[0], w[0]),
        {
            "x": (x, pl.BlockSpec((x.shape[0], tile[0]), lambda n, d, e: (0, d))),
            "y": (y, pl.BlockSpec((y.shape[0], tile[1]), lambda n, d, e: (0, n))),
            "row": (groups.row, whole(groups.row)),
            "ends": (groups.ends, whole(groups.ends)),
            **scale_input(scale),
        },
        {"w": Output(w, result_dtype(x), pl.BlockSpec((None, *tile), lambda n, d, e: (e, d, n)))},
        LAUNCH, **_cost(x, y, w, groups, (x.itemsize, y.itemsize)), interpret=interpret,
    )["w"]  # fmt: skip


def _to_permuted(r: SimpleNamespace, *, depth: int) -> None:
    rows, of = r.row[...], r.group[0]

    def step(i, total):
        x = gathered(r.x, rows, i * depth, depth)
        return _add_product(total, x, r.w[of, pl.ds(i * depth, depth), :])

    @pl.when(of < r.w.shape[0])
    def _():
        total = scaled_sum(step, 0, r.x.shape[1] // depth, r.y.shape, r)
        r.y[...] = total.astype(r.y.dtype)

    @pl.when(of == r.w.shape[0])
    def _():
        r.y[...] = jnp.zeros(r.y.shape, r.y.dtype)


def _from_permuted(r: SimpleNamespace, *, depth: int) -> None:
    rows, of = r.row[...], r.group[0]

    def step(i, total):
        features = pl.ds(i * depth, depth)
        return _add_product(total, r.y[:, features], r.w[of, :, features].T)

    @pl.when(of < r.w.shape[0])
    def _():
        tile, filled = tile_at(r.x, rows, 0, r.x.shape[1])
        total = scaled_sum(step, 0, r.y.shape[1] // depth, (BLOCK, r.x.shape[1]), r)
        triton.store(tile, total.astype(r.x.dtype), mask=filled)


def _weights(r: SimpleNamespace) -> None:
    of = pl.program_id(2)
    first = jnp.where(of > 0, r.ends[jnp.maximum(of - 1, 0)], 0)

    def step(b, total):
        block = pl.ds(b * BLOCK, BLOCK)
        x = gathered(r.x, r.row[block], 0, r.x.shape[1])
        return _add_product(total, x.T, r.y[block, :])

    r.w[...] = scaled_sum(step, first, r.ends[of], r.w.shape, r).astype(r.w.dtype)


def scaled_sum(step: Callable, first, last, shape: tuple[int, ...], r: SimpleNamespace) -> Array:
    """The fp32 sum of all steps, times the scale of the operands where they have one."""
    total = jax.lax.fori_loop(first, last, step, jnp.zeros(shape, jnp.float32))
    return total * r.scale[0] if hasattr(r, "scale") else total


def _add_product(total: Array, a: Array, b: Array) -> Array:
    """The fp32 sum plus the product of two tiles; FP8 of two kinds is converted, exactly, to
    bf16."""
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return add_product(total, a, b)


def scale_input(scale: Array | None) -> Inputs:
    """The scale of a product as an input of its kernel, `scale`; none without one."""
    return (
        {} if scale is None else {"scale": (scale.reshape(1), pl.BlockSpec((1,), lambda *_: (0,)))}
    )


def _cost(
    a: Array, b: Array, w: tuple[int, ...], groups: Groups, itemsizes: tuple[int, int]
) -> dict[str, Any]:
    """FLOPs and bytes of a product for the number of rows that is expected; the item sizes are
    those of arriving and of permuted rows."""
    rows, (count, d, n) = groups.expected, w
    return {
        "flops": 2 * rows * d * n,
        "sizes": (count, -(-rows // count), n, d),
        "touched": {"x": rows * d * itemsizes[0], "y": rows * n * itemsizes[1]},
        "converted": None if a.dtype == b.dtype else "bf16",
    }
