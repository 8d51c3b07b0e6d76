"""Grouped matmuls in Pallas kernels for NVIDIA GPUs, Hopper and later. A program computes one tile
of a result; blocks without rows cost almost nothing.

Hopper's tensor cores read FP8 operands only if the summed dimension comes last. An operand that has
it first is transposed in memory before the kernel runs: a kernel that transposes its own tiles
reaches only a fifth of the rate.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import gcd
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxbench.ops.grouped.groups import (
    BLOCK,
    Groups,
    Scales,
    product_of,
    result_dtype,
    take_bytes,
)
from jaxbench.ops.implementations import Task
from jaxbench.ops.kernel_sizes import tunable
from jaxbench.ops.pallas_call import (
    Inputs,
    Launch,
    Output,
    add_product,
    call,
    load_rows,
    whole,
)

DIVISOR = 64
"""Numbers of features must be multiples of this, so that no tile is narrower."""

LAUNCHES = Launch(8, 3), Launch(8, 4), Launch(4, 3)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a kernel: the width of a tile, and the depth of one step of its sum."""

    width: int
    depth: int
    launch: Launch


FASTEST = {
    "to_permuted": {2: Sizes(256, 64, Launch(8, 3)), 1: Sizes(256, 128, Launch(8, 4))},
    "from_permuted": {2: Sizes(256, 64, Launch(8, 3)), 1: Sizes(256, 128, Launch(8, 4))},
    "weights": {2: Sizes(128, 64, Launch(4, 3)), 1: Sizes(256, 128, Launch(8, 3))},
}
"""Sizes by matmul and by bytes of an element. On an H100 they were the fastest, or within 3 % of
it, for most experts of Qwen3 30B, GPT-OSS and DeepSeek-V3 (`benchmarks/gpu.py --only tiles`)."""


def candidates(name: str, itemsize: int, width: int, depth: int) -> tuple[Sizes, ...]:
    """Sizes for a matmul whose tiles divide `width` features, and whose steps divide `depth`. The
    first is the one of `FASTEST`, or the next smaller that divides."""
    best = FASTEST[name][itemsize]
    depths = (64,) if itemsize == 2 else (128, 64)
    every = [best, *(Sizes(*sizes) for sizes in product((256, 128), depths, LAUNCHES))]
    every = [s for s in every if s.width < 256 or s.launch.warps == 8]  # four warps spill
    # Sizes are powers of two, so the greatest common divisor is the largest one that divides.
    return tuple(
        dict.fromkeys(
            replace(sizes, width=gcd(sizes.width, width), depth=gcd(sizes.depth, depth))
            for sizes in every
        )
    )


def refusal(task: Task) -> str | None:
    """Why the kernels cannot multiply; None if they can."""
    if task.dtype == "fp32":
        return "computes no fp32 matmuls"
    experts = task.cfg.experts
    assert experts is not None
    width = "model.experts.latent" if experts.latent else "model.embed"
    sizes = {"model.experts.ffn": experts.ffn, width: experts.latent or task.cfg.embed}
    for name, size in sizes.items():
        if size % DIVISOR:
            return f"needs {name} = {size} to be a multiple of {DIVISOR}"
    return None


@tunable(lambda x, w, *_: candidates("to_permuted", x.itemsize, w.shape[2], w.shape[1]))
def to_permuted(
    x: Float[Array, "A D"],
    w: Float[Array, "E D N"],
    groups: Groups,
    scales: Scales | None = None,
    *,
    sizes: Sizes,
) -> Float[Array, "R N"]:
    """`Implementation.to_permuted`."""
    shape, width = w.shape, sizes.width
    y, in_fp8 = (groups.row.size, shape[2]), x.itemsize == 1
    of_w = pl.BlockSpec((*shape[:2], width), lambda n, b: (0, 0, n))
    if in_fp8:
        w = w.swapaxes(1, 2)
        of_w = pl.BlockSpec((shape[0], width, shape[1]), lambda n, b: (0, n, 0))
    return call(
        partial(_to_permuted, depth=sizes.depth, turned=in_fp8), "grouped_to_permuted",
        (shape[2] // width, groups.group.size),
        {
            "x": (x, whole(x)),
            "w": (w, of_w),
            "row": (groups.source, pl.BlockSpec((BLOCK,), lambda n, b: (b,))),
            "group": (groups.group, pl.BlockSpec((1,), lambda n, b: (b,))),
            **scale_input(product_of(scales)),
        },
        {"y": Output(y, result_dtype(x), pl.BlockSpec((BLOCK, width), lambda n, b: (b, n)))},
        sizes.launch, **_cost(shape, groups, (x.itemsize, 2)),
    )["y"]  # fmt: skip


@tunable(lambda y, w, *_: candidates("from_permuted", y.itemsize, w.shape[1], w.shape[2]))
def from_permuted(
    y: Float[Array, "R N"],
    w: Float[Array, "E D N"],
    groups: Groups,
    scales: Scales | None = None,
    *,
    sizes: Sizes,
) -> Float[Array, "R D"]:
    """`Implementation.from_permuted`."""
    width = sizes.width
    x = (groups.row.size, w.shape[1])
    return call(
        partial(_from_permuted, depth=sizes.depth), "grouped_from_permuted",
        (w.shape[1] // width, groups.group.size),
        {
            "y": (y, pl.BlockSpec((BLOCK, y.shape[1]), lambda d, b: (b, 0))),
            "w": (w, pl.BlockSpec((w.shape[0], width, w.shape[2]), lambda d, b: (0, d, 0))),
            "group": (groups.group, pl.BlockSpec((1,), lambda d, b: (b,))),
            **scale_input(product_of(scales)),
        },
        {"x": Output(x, result_dtype(y), pl.BlockSpec((BLOCK, width), lambda d, b: (b, d)))},
        sizes.launch, **_cost(w.shape, groups, (2, y.itemsize), groups.multiplied),
    )["x"]  # fmt: skip


@tunable(lambda x, y, *_: candidates("weights", x.itemsize, y.shape[1], BLOCK))
def weights(
    x: Float[Array, "A D"],
    y: Float[Array, "R N"],
    groups: Groups,
    scales: Scales | None = None,
    *,
    sizes: Sizes,
) -> Float[Array, "E D N"]:
    """`Implementation.weights`."""
    in_fp8 = x.itemsize == 1
    tile = gcd(128, x.shape[1]), sizes.width
    w = (groups.ends.size, x.shape[1], y.shape[1])
    cost = _cost(w, groups, (x.itemsize, y.itemsize)) | {"kind": "grouped_weights"}
    if in_fp8:
        x, y = take_bytes(x, groups.source).T, y.T
        operands = {
            "x": (x, pl.BlockSpec((tile[0], x.shape[1]), lambda n, d, e: (d, 0))),
            "y": (y, pl.BlockSpec((tile[1], y.shape[1]), lambda n, d, e: (n, 0))),
        }
    else:
        operands = {
            "x": (x, pl.BlockSpec((x.shape[0], tile[0]), lambda n, d, e: (0, d))),
            "y": (y, pl.BlockSpec((y.shape[0], tile[1]), lambda n, d, e: (0, n))),
            "row": (groups.source, whole(groups.row)),
        }
    return call(
        partial(_weights, depth=sizes.depth), "grouped_weights",
        (w[2] // tile[1], w[1] // tile[0], w[0]),
        {**operands, "ends": (groups.ends, whole(groups.ends)), **scale_input(product_of(scales))},
        {"w": Output(w, result_dtype(x), pl.BlockSpec((None, *tile), lambda n, d, e: (e, d, n)))},
        sizes.launch, **cost,
    )["w"]  # fmt: skip


def _to_permuted(r: SimpleNamespace, *, depth: int, turned: bool) -> None:
    rows, of = r.row[...], r.group[0]

    def step(i, total):
        features = pl.ds(i * depth, depth)
        w = r.w[of, :, features].T if turned else r.w[of, features, :]
        return add_product(total, load_rows(r.x, rows, i * depth, depth), w)

    @pl.when(of < r.w.shape[0])
    def _():
        total = scaled_sum(step, 0, r.x.shape[1] // depth, r.y.shape, r)
        r.y[...] = total.astype(r.y.dtype)

    @pl.when(of == r.w.shape[0])
    def _():
        r.y[...] = jnp.zeros(r.y.shape, r.y.dtype)


def _from_permuted(r: SimpleNamespace, *, depth: int) -> None:
    of = r.group[0]

    def step(i, total):
        features = pl.ds(i * depth, depth)
        return add_product(total, r.y[:, features], r.w[of, :, features].T)

    @pl.when(of < r.w.shape[0])
    def _():
        total = scaled_sum(step, 0, r.y.shape[1] // depth, r.x.shape, r)
        r.x[...] = total.astype(r.x.dtype)


def _weights(r: SimpleNamespace, *, depth: int) -> None:
    of, steps = pl.program_id(2), BLOCK // depth
    first = jnp.where(of > 0, r.ends[jnp.maximum(of - 1, 0)], 0)

    def step(i, total):
        rows = pl.ds(i * depth, depth)
        if not hasattr(r, "row"):  # operands are permuted and transposed
            return add_product(total, r.x[:, rows], r.y[:, rows].T)
        x = load_rows(r.x, r.row[rows], 0, r.x.shape[1])
        return add_product(total, x.T, r.y[rows, :])

    total = scaled_sum(step, first * steps, r.ends[of] * steps, r.w.shape, r)
    r.w[...] = total.astype(r.w.dtype)


def scaled_sum(step: Callable, first, last, shape: tuple[int, ...], r: SimpleNamespace) -> Array:
    """The fp32 sum of all steps, multiplied by the scale of the operands if they have one."""
    total = jax.lax.fori_loop(first, last, step, jnp.zeros(shape, jnp.float32))
    return total * r.scale[0] if hasattr(r, "scale") else total


def scale_input(scale: Array | None) -> Inputs:
    """The scale of a matmul as an input `scale` of its kernel; no input if it has no scale."""
    return (
        {} if scale is None else {"scale": (scale.reshape(1), pl.BlockSpec((1,), lambda *_: (0,)))}
    )


def _cost(
    w: tuple[int, ...], groups: Groups, itemsizes: tuple[int, int], x_rows: int | None = None
) -> dict[str, Any]:
    """FLOPs and bytes of a matmul for the expected number of rows. `itemsizes` are those of both
    kinds of rows. `x_rows` is the number of rows with D features, the expected ones without it."""
    rows, (count, d, n) = groups.multiplied, w
    x_rows = groups.expected if x_rows is None else x_rows
    return {
        "kind": "grouped",
        "flops": 2 * rows * d * n,
        "sizes": (count, -(-rows // count), n, d),
        "touched": {"x": x_rows * d * itemsizes[0], "y": rows * n * itemsizes[1]},
    }
