"""Grouped matmuls of others, which take permuted rows: XLA's, JAX's examples in Mosaic, and
tokamax's kernels. All take the counts of rows by group."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu as tiling
from jax.experimental.pallas.ops.gpu import blackwell_ragged_dot_mgpu as blackwell
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as hopper
from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as hopper_weights

from jaxbench.ops.grouped import BLOCK, Groups
from jaxbench.ops.grouped.groups import result_dtype

NUMBERS = {
    name: jax.lax.RaggedDotDimensionNumbers((dims, ((), ())), [0], group_dims)
    for name, dims, group_dims in (
        ("to_permuted", ((1,), (1,)), [0]),
        ("from_permuted", ((1,), (2,)), [0]),
        ("weights", ((0,), (0,)), []),
    )
}
"""Our three grouped matmuls as ragged dots of permuted rows."""

TILES = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4}


def by_lax(name: str, a: jax.Array, b: jax.Array, counts: jax.Array) -> jax.Array:
    """XLA's own."""
    dtype = result_dtype(a)
    return jax.lax.ragged_dot_general(a, b, counts, NUMBERS[name], preferred_element_type=dtype)


def by_tokamax(kernels: str, name: str, a, b, counts: jax.Array) -> jax.Array:
    """tokamax's, with the sizes that it would choose without a search."""
    import tokamax

    keywords = {"preferred_element_type": result_dtype(a), "implementation": kernels}
    return tokamax.ragged_dot_general(a, b, counts, NUMBERS[name], **keywords)


def by_mosaic(
    name: str, a: jax.Array, b: jax.Array, counts: jax.Array, tiles: dict[str, int] = TILES
) -> jax.Array:
    """JAX's examples: for Hopper all matmuls, for Blackwell the first two."""
    if float(jax.devices()[0].compute_capability) < 10:
        tuning: Any = {**tiles, "grid_block_n": 1, "group_sizes": counts}
        if name == "weights":
            return hopper_weights.transposed_ragged_dot(a, b, **tuning)
        return hopper.ragged_dot(a, b, transpose_rhs=name == "from_permuted", **tuning)
    if name == "weights":
        raise NotImplementedError("no kernel for Blackwell")
    config = blackwell.TuningConfig(
        tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4, collective=True,
        grid_tile_width=8, grid_minor_dim=tiling.MatmulDimension.M,
    )  # fmt: skip
    padded = jnp.pad(a, ((0, -len(a) % (2 * BLOCK)), (0, 0)))  # two tiles at once
    b = b.mT if name == "from_permuted" else b
    return blackwell.ragged_dot_kernel(padded, b, counts, config)[: len(a)]


def with_gathers(dot: Callable, name: str, a: jax.Array, b: jax.Array, groups: Groups) -> jax.Array:
    """A ragged dot in place of ours: with gathers of arriving rows before it."""
    take = partial(jnp.take, axis=0, mode="fill", fill_value=0)
    counts = jnp.diff(groups.ends, prepend=0).astype(jnp.int32) * BLOCK
    return dot(name, a if name == "from_permuted" else take(a, groups.row), b, counts)


def hoppers() -> Iterator[tuple[str, Callable]]:
    """Candidates for Hopper, with some sizes."""
    for n, stages in ((128, 4), (128, 5), (192, 4)):
        tiles = TILES | {"block_n": n, "max_concurrent_steps": stages}
        yield f"JAX's Mosaic kernel, width {n}, {stages} stages", partial(by_mosaic, tiles=tiles)
    yield "tokamax's Mosaic kernel", partial(by_tokamax, "mosaic_gpu")
