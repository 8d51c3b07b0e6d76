"""Grouped matmuls of block-scaled operands.

Rows are quantized in their permuted order. A block of 32 or 16 rows then belongs to one group, and
no matmul gathers. There are two implementations: Pallas kernels for Blackwell, whose tensor cores
multiply by the scales, and plain XLA for CPUs, which dequantizes.
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

from jaxbench.ops.grouped import xla
from jaxbench.ops.grouped.groups import BLOCK, Groups
from jaxbench.ops.grouped.pallas import LAUNCHES, Sizes, scale_input, scaled_sum
from jaxbench.ops.kernel_sizes import tunable
from jaxbench.ops.pallas_call import Inputs, Output, call, whole
from jaxbench.ops.quantized.block_formats import MXFP8, NVFP4, Blocks, as_bytes, dequantized
from jaxbench.ops.quantized.block_scaled import Matmuls
from jaxbench.ops.quantized.kernels import SPAN, Rows, multiplied


def candidates(width: int, depth: int | None = None) -> tuple[Sizes, ...]:
    """Sizes for a matmul whose tiles divide `width` features, and whose steps divide `depth`; steps
    of whole blocks without `depth`. Nobody has timed them yet, since there was no Blackwell GPU."""
    widths = dict.fromkeys(gcd(limit, width) for limit in (128, 64))
    depths = dict.fromkeys(gcd(limit, depth) for limit in (128, 64)) if depth else (BLOCK,)
    return tuple(Sizes(*sizes) for sizes in product(widths, depths, LAUNCHES))


@tunable(lambda x, w, *_: candidates(*w.values.shape[1:]))
def by_weight(
    x: Blocks,
    w: Blocks,
    groups: Groups,
    *,
    sizes: Sizes,
) -> Float[Array, "R U"]:
    """The permuted rows of `Matmuls.by_weight`, by a kernel."""
    count, kept, summed = w.values.shape
    width = sizes.width
    x_parts = _operand("x", x, (BLOCK,), lambda n, b: (b, 0))
    return call(
        partial(_by_weight, step=_step(x, sizes.depth)), "grouped_scaled",
        (kept // width, groups.group.size),
        {
            **x_parts,
            **_operand("w", w, (count, width), lambda n, b: (0, n, 0)),
            "group": (groups.group, pl.BlockSpec((1,), lambda n, b: (b,))),
            **_scale(x, w),
        },
        {
            "y": Output(
                (groups.row.size, kept), jnp.bfloat16,
                pl.BlockSpec((BLOCK, width), lambda n, b: (b, n)),
            )
        },
        sizes.launch,
        **_cost(groups, (count, kept, summed), x, x_parts, {"y": 2 * kept}),
    )["y"]  # fmt: skip


@tunable(lambda first, last, *_: candidates(last.values.shape[1]))
def of_weight(
    first: Blocks,
    last: Blocks,
    groups: Groups,
    *,
    sizes: Sizes,
) -> Float[Array, "E D O"]:
    """`Matmuls.of_weight` by a kernel."""
    w = groups.ends.size, first.values.shape[1], last.values.shape[1]
    tile = gcd(128, w[1]), sizes.width
    operands = {
        **_operand("a", first, (tile[0],), lambda o, d, e: (d, 0)),
        **_operand("b", last, (tile[1],), lambda o, d, e: (o, 0)),
    }
    return call(
        partial(_of_weight, step=_step(first, sizes.depth)), "grouped_scaled_weights",
        (w[2] // tile[1], w[1] // tile[0], w[0]),
        {**operands, "ends": (groups.ends, whole(groups.ends)), **_scale(first, last)},
        {"w": Output(w, jnp.bfloat16, pl.BlockSpec((None, *tile), lambda o, d, e: (e, d, o)))},
        sizes.launch, **_cost(groups, w, first, operands) | {"kind": "grouped_weights"},
    )["w"]  # fmt: skip


def _by_weight(r: SimpleNamespace, *, step: Callable) -> None:
    of = r.group[0]

    def add(i, total):
        values, scales = step(i)
        w, w_scales = r.w[of, :, values], r.w_scales[of, :, scales]
        return multiplied(total, r.x[:, values], w, r.x_scales[:, scales], w_scales)

    @pl.when(of < r.w.shape[0])
    def _():
        steps = r.x.shape[1] // step(0)[0].size
        r.y[...] = scaled_sum(add, 0, steps, r.y.shape, r).astype(jnp.bfloat16)

    @pl.when(of == r.w.shape[0])
    def _():
        r.y[...] = jnp.zeros(r.y.shape, r.y.dtype)


def _of_weight(r: SimpleNamespace, *, step: Callable) -> None:
    of = pl.program_id(2)
    first = jnp.where(of > 0, r.ends[jnp.maximum(of - 1, 0)], 0)

    def add(b, total):
        values, scales = step(b)
        return multiplied(
            total, r.a[:, values], r.b[:, values], r.a_scales[:, scales], r.b_scales[:, scales]
        )

    r.w[...] = scaled_sum(add, first, r.ends[of], r.w.shape, r).astype(jnp.bfloat16)


def _step(x: Blocks, depth: int) -> Callable[[Any], tuple[Any, Any]]:
    """Returns a function that maps a step of the sum to its spans of values, as they are in memory,
    and of scales."""
    of, packed = (NVFP4, 2) if x.format == "nvfp4" else (MXFP8, 1)
    spans = depth // packed, depth // of.size
    return lambda i: (pl.ds(i * spans[0], spans[0]), pl.ds(i * spans[1], spans[1]))


def _operand(name: str, x: Blocks, rows: tuple[int, ...], index: Callable) -> Inputs:
    """Values and scales of an operand as inputs of a kernel. They are `[rows, summed]` or `[E,
    rows, summed]`, with blocks of the given `rows`. 4-bit values are bytes that hold pairs, and
    e8m0 scales are bytes."""
    values, scales = x.values, x.scales
    if x.format == "nvfp4":
        values = as_bytes(values)
    else:
        scales = as_bytes(scales)
    if len(rows) == 1:
        values, scales = values[0], scales[0]

    def with_block(part: Array) -> tuple[Array, pl.BlockSpec]:
        return part, pl.BlockSpec((*rows, part.shape[-1]), index)

    return {name: with_block(values), f"{name}_scales": with_block(scales)}


def _scale(a: Blocks, b: Blocks) -> Inputs:
    """The scale of both tensors together, in NVFP4."""
    return scale_input(None if a.inverse is None else a.inverse * b.inverse)


def _cost(
    groups: Groups, w: tuple[int, int, int], x: Blocks, operands: Inputs, of_row: dict | None = None
) -> dict[str, Any]:
    """FLOPs and bytes of a matmul with weights `[E, m, k]` for the expected number of rows, which
    are a share of the rows of `operands`. `of_row` gives the bytes per row of other arrays."""
    rows, (count, m, k) = groups.multiplied, w
    share = rows / groups.row.size
    touched = {name: round(share * part.nbytes) for name, (part, _) in operands.items()}
    return {
        "kind": "grouped",
        "flops": 2 * rows * m * k,
        "sizes": (count, -(-rows // count), m, k),
        "touched": touched | {name: rows * size for name, size in (of_row or {}).items()},
        "blocks": "f4e2m1fn" if x.format == "nvfp4" else "f8e4m3fn",
    }


def _of_permuted(groups: Groups) -> Groups:
    """Groups for rows that are already permuted. Padding is zero, or it is what a Hadamard
    transform makes of a block that contains padding; the matmul has to include it then."""
    return replace(groups, row=jnp.arange(groups.row.size), uses=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kernels(Matmuls):
    """`Matmuls` of grouped weights, by kernels."""

    groups: Groups

    def rows(self, x: Array, side: str) -> tuple[Array, Rows]:
        """Arriving rows are gathered into the permuted order."""
        groups = self.groups
        filled = (groups.group < groups.ends.size).astype(jnp.int32)
        index = groups.source if side == "first" else None
        return x, Rows(index, jnp.repeat(filled, BLOCK // SPAN), groups.multiplied)

    def by_weight(self, rows: Blocks, w: Blocks, side: str) -> Array:
        y = by_weight(rows, w, self.groups)
        return y if side == "first" else self.groups.arriving(y)

    def of_weight(self, first: Blocks, last: Blocks) -> Array:
        return of_weight(first, last, self.groups)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dequantized(Kernels):
    """`Matmuls` of grouped weights in plain XLA."""

    def by_weight(self, rows: Blocks, w: Blocks, side: str) -> Array:
        wide, weights = dequantized(rows)[0], dequantized(w)
        if side == "first":
            y = xla.to_permuted(wide, weights.swapaxes(1, 2), _of_permuted(self.groups))
        else:
            y = self.groups.arriving(xla.from_permuted(wide, weights, self.groups))
        return y.astype(jnp.bfloat16)

    def of_weight(self, first: Blocks, last: Blocks) -> Array:
        a, b = dequantized(first)[0].T, dequantized(last)[0].T
        return xla.weights(a, b, _of_permuted(self.groups)).astype(jnp.bfloat16)
