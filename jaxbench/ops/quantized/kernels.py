"""Pallas kernels for block-scaled formats.

One kernel quantizes an activation for both of its matmuls, or for one of them, and reads each
element once. XLA would read it twice for each matmul: for the amax of a block and for the values.
`multiplied` is the matmul of block-scaled tiles, for other kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from math import gcd, prod
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, UInt32

from jaxbench import jax_internals
from jaxbench.ops import draws
from jaxbench.ops.kernel_sizes import tunable
from jaxbench.ops.pallas_call import Launch, Output, call, load_rows, product, whole
from jaxbench.ops.quantized import hadamard
from jaxbench.ops.quantized.block_formats import (
    MXFP8,
    NVFP4,
    Blocks,
    as_bytes,
    dequantized,
    e2m1_bits,
    encode_of,
    mxfp8_parts,
    nvfp4_parts,
)

BOTH = True, True
"""Which results a quantization returns: (with blocks along features, with blocks along tokens)."""

RESULTS = "rows", "columns"
"""Their names in kernels. An array with their scales is `<name>_scales`."""

SPAN = 64
"""The largest number of rows in the tile of a program."""


@dataclass(frozen=True)
class Sizes:
    """The largest number of features in the tile of a program, and its launch."""

    features: int
    launch: Launch


CANDIDATES = tuple(
    Sizes(features, Launch(warps))
    for features, warps in ((128, 8), (128, 4), (64, 8), (64, 4), (32, 4))
)
"""The first was not chosen by measurement: no GPU has timed these kernels."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The rows of a quantized activation `[1, T, F]`.

    `index` gives, for each of them, the row of the activation that it is taken from. An index
    beyond the activation makes a row of zeros. With None all rows stay in their places. `filled` is
    0 for each span of `SPAN` rows that is left out; the results of such rows are undefined.
    `expected` is the number of rows in the other spans; plans use it. The results are those of `[E,
    T / E, F]`, with this number of `experts`; more than one need an `index`.
    """

    index: Int[Array, " T"] | None
    filled: Int[Array, " spans"]
    expected: int = field(metadata={"static": True})
    experts: int = field(default=1, metadata={"static": True})

    def in_order(self, count: int) -> "Rows":
        """Rows with these shapes that are all filled, from an activation of `count` rows. They
        take its rows in their order, and again from the first."""
        index = None if self.index is None else jnp.arange(self.index.size) % count
        return replace(self, index=index, filled=jnp.ones(self.filled.shape, self.filled.dtype))


def takes(x: Float[Array, "E T F"], rows: Rows | None) -> bool:
    """True if the sizes fill whole tiles."""
    return all(size % MXFP8.size == 0 for size in x.shape[2 if rows else 1 :])


class _Tiles:
    """The tiles of an activation, and of arrays with blocks along its features or, transposed,
    along its tokens."""

    def __init__(self, x: Float[Array, "E T F"], rows: Rows | None, sizes: Sizes):
        self.experts, self.tokens, self.features = x.shape
        if rows:
            self.experts, self.tokens = rows.experts, rows.filled.size // rows.experts * SPAN
        self.t, self.f = gcd(SPAN, self.tokens), gcd(sizes.features, self.features)
        self.grid = self.experts, self.tokens // self.t, self.features // self.f
        self.inputs: Any = {"x": (x, self.rows(1, x.dtype).block)}
        self.share = 1.0
        if rows:
            self.share = rows.expected / (self.experts * self.tokens)
            self.inputs["filled"] = rows.filled, self.of_span(1)
            if rows.index is not None:
                self.inputs["x"] = x[0], whole(x[0])
                self.inputs["index"] = rows.index, self.of_span(SPAN)

    def of_span(self, size: int) -> pl.BlockSpec:
        """The block of an array with so many numbers for each span of rows."""
        return pl.BlockSpec((size,), lambda e, t, f: (e * self.grid[1] + t,))

    def touched(self, outputs: dict[str, Output]) -> dict[str, int]:
        """Bytes of the arrays, reduced to the share of the expected rows."""
        arrays = {"x": self.rows(1, self.inputs["x"][0].dtype), **outputs}
        return {name: round(self.share * array.nbytes) for name, array in arrays.items()}

    def rows(self, divisor: int, dtype: Any) -> Output:
        shape = self.experts, self.tokens, self.features // divisor
        block = None, self.t, self.f // divisor
        return Output(shape, dtype, pl.BlockSpec(block, lambda e, t, f: (e, t, f)))

    def columns(self, divisor: int, dtype: Any) -> Output:
        shape = self.experts, self.features, self.tokens // divisor
        block = None, self.f, self.t // divisor
        return Output(shape, dtype, pl.BlockSpec(block, lambda e, t, f: (e, f, t)))

    def outputs(
        self, wanted: tuple[bool, bool], size: int, values: Any, scales: Any, packed: int = 1
    ) -> dict[str, Output]:
        """The wanted results of a quantization. `packed` is how many values share one element of an
        array."""
        outputs: dict[str, Output] = {}
        for name, of in compress((("rows", self.rows), ("columns", self.columns)), wanted):
            outputs |= {name: of(packed, values), f"{name}_scales": of(size, scales)}
        return outputs


@tunable(lambda *_: CANDIDATES)
def quantize_mxfp8(
    x: Float[Array, "E T F"],
    rows: Rows | None = None,
    wanted: tuple[bool, bool] = BOTH,
    *,
    sizes: Sizes,
) -> tuple[Blocks, ...]:
    """Quantizes `x`, or `rows` of it, to MXFP8 with blocks along features, and its transpose `[E,
    F, T]` with blocks along tokens. Returns what is `wanted` of the two, packed."""
    tiles = _Tiles(x, rows, sizes)
    outputs = tiles.outputs(wanted, MXFP8.size, MXFP8.values, jnp.uint8)
    y = call(
        partial(_mxfp8, width=tiles.f), "quantize_mxfp8", tiles.grid, tiles.inputs, outputs,
        sizes.launch, touched=tiles.touched(outputs),
    )  # fmt: skip
    return tuple(
        Blocks(as_bytes(y[name]), y[f"{name}_scales"]) for name in compress(RESULTS, wanted)
    )


@tunable(lambda *_: CANDIDATES)
def quantize_nvfp4(
    x: Float[Array, "E T F"],
    seeds: UInt32[Array, "2"] | None,
    turn: bool,
    rows: Rows | None = None,
    wanted: tuple[bool, bool] = BOTH,
    *,
    sizes: Sizes,
) -> tuple[Blocks, ...]:
    """Quantizes `x` and its transpose to NVFP4, as `quantize_mxfp8` does to MXFP8. Each result has
    an fp32 scale from its own amax. With `turn` the tokens go through the Hadamard transform before
    the transpose is quantized. With `seeds` both are rounded stochastically."""
    tiles, f32 = _Tiles(x, rows, sizes), jnp.float32
    square = pl.BlockSpec((hadamard.SIZE, hadamard.SIZE), lambda *_: (0, 0))
    two = pl.BlockSpec((2,), lambda *_: (0,))
    turned = turn and wanted[1]
    inputs = tiles.inputs | ({"h": (hadamard.matrix(x.dtype), square)} if turned else {})
    one = pl.BlockSpec((1,), lambda e, t, f: ((e * tiles.grid[1] + t) * tiles.grid[2] + f,))
    amax = {name: Output((prod(tiles.grid),), f32, one) for name in compress(RESULTS, wanted)}
    found = call(
        partial(_amax, width=tiles.f), "amax_nvfp4", tiles.grid, inputs, amax, sizes.launch,
        touched=tiles.touched({}),
    )  # fmt: skip
    # The factor of what is not wanted is not used.
    largest = [jnp.max(found[name]) if name in found else jnp.ones((), f32) for name in RESULTS]
    encode = encode_of(jnp.stack(largest))
    inputs["encode"] = encode, two
    if seeds is not None:
        inputs["seeds"] = seeds, two
    outputs = tiles.outputs(wanted, NVFP4.size, jnp.uint8, NVFP4.scales, packed=2)
    y = call(
        partial(_nvfp4, width=tiles.f, tokens=tiles.tokens, features=tiles.features),
        "quantize_nvfp4",
        tiles.grid, inputs, outputs, sizes.launch,
        touched=tiles.touched(outputs),
    )  # fmt: skip
    return tuple(
        Blocks(y[name], as_bytes(y[f"{name}_scales"]), 1 / encode[n])
        for n, name in compress(enumerate(RESULTS), wanted)
    )


def _x(r: SimpleNamespace, first: Array, width: int) -> Array:
    """A program's tile, whose features start at `first`."""
    return load_rows(r.x, r.index[...], first, width) if hasattr(r, "index") else r.x[...]


def _where_filled(r: SimpleNamespace, body: Callable[[], None]) -> None:
    """Runs a kernel's body, unless its rows are left out."""
    pl.when(r.filled[0] != 0)(body) if hasattr(r, "filled") else body()


def _mxfp8(r: SimpleNamespace, *, width: int) -> None:
    first = pl.program_id(2) * width  # the interpreter knows it only outside of conditions

    def body() -> None:
        x = _x(r, first, width)
        if hasattr(r, "rows"):
            r.rows[...], r.rows_scales[...] = mxfp8_parts(x, 1)
        if hasattr(r, "columns"):
            values, scales = mxfp8_parts(x, 0)
            r.columns[...], r.columns_scales[...] = values.T, scales.T

    _where_filled(r, body)


def _amax(r: SimpleNamespace, *, width: int) -> None:
    x = _x(r, pl.program_id(2) * width, width)
    if hasattr(r, "rows"):
        r.rows[...] = jnp.max(jnp.abs(x)).astype(jnp.float32).reshape(1)
    if hasattr(r, "columns"):
        r.columns[...] = jnp.max(jnp.abs(_turned(r, x))).astype(jnp.float32).reshape(1)


def _nvfp4(r: SimpleNamespace, *, width: int, tokens: int, features: int) -> None:
    e, first_t, first_f = pl.program_id(0), pl.program_id(1), pl.program_id(2) * width

    def quantized(x: Array, n: int, row: Array, width: int, column: Array):
        """(packed values, scales) of a tile, which starts at `row` and `column` of an array of this
        width."""
        draw = None
        if hasattr(r, "seeds"):
            rows = (row + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)).astype(jnp.uint32)
            columns = (column + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)).astype(jnp.uint32)
            draw = draws.uniform_at(r.seeds[n], rows * jnp.uint32(width) + columns)
        values, scales = nvfp4_parts(x, (1,), r.encode[n], draw)
        pairs = e2m1_bits(values).reshape(x.shape[0], x.shape[1] // 2, 2)
        shift = 4 * jax.lax.broadcasted_iota(jnp.int32, pairs.shape, 2)
        return jnp.sum(pairs << shift, axis=2).astype(jnp.uint8), scales

    def body() -> None:
        x = _x(r, first_f, width)
        t = first_t * x.shape[0]
        if hasattr(r, "rows"):
            r.rows[...], r.rows_scales[...] = quantized(x, 0, e * tokens + t, features, first_f)
        if hasattr(r, "columns"):
            r.columns[...], r.columns_scales[...] = quantized(
                _turned(r, x), 1, e * features + first_f, tokens, t
            )

    _where_filled(r, body)


def _turned(r: SimpleNamespace, x: Array) -> Array:
    """The transposed tile, after the Hadamard transform of its tokens if there is a matrix."""
    x = x.T
    if not hasattr(r, "h"):
        return x
    turned = product(x.reshape(-1, hadamard.SIZE), r.h[...])
    return turned.astype(x.dtype).reshape(x.shape)


@jax_internals.block_scaled_product
def multiplied(total: Array, a: Array, b: Array, scales_a: Array, scales_b: Array) -> Array:
    """`jax_internals.block_scaled_product`."""
    of = NVFP4 if a.dtype == jnp.uint8 else MXFP8

    def wide(values: Array, scales: Array) -> Array:
        return dequantized(Blocks(as_bytes(values), as_bytes(scales)).unpacked(of))

    exact = jax.lax.Precision.HIGHEST
    return total + jnp.einsum("mk,nk->mn", wide(a, scales_a), wide(b, scales_b), precision=exact)
