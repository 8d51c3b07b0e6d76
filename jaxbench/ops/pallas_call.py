"""Calls Pallas kernels with arrays by name and with their cost, and hides differences of Pallas
between versions of JAX.

The kernels are written for Pallas's Triton backend. JAX has announced that it will remove this
backend in favour of Mosaic GPU. In a port each kernel becomes a `pl.kernel` over `plgpu.Mesh` with
the same grid. Its loads and stores become copies between slices of arrays and shared memory. Its
matmuls become `plgpu.wgmma` on Hopper and `plgpu.tcgen05_mma` on Blackwell, whose accumulators of
64 rows can have the same layout. An array that the kernel fills only in part is passed as a `Ref`.
`lax.cumsum` has no lowering; a masked sum over a square replaces it. Mosaic drops `metadata=`, so
the cost would become a frontend attribute (`set_xla_metadata`). The mathematics, the order of
kernels and all code outside of them stay. `docs/design/scan.md` says what was tried and why the
kernels stay here for now.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from jaxbench import mesh
from jaxbench.jax_internals import fp8_product

HLO_DTYPES = {
    "bfloat16": "bf16", "float32": "f32", "float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """The `num_warps` and `num_stages` of a Triton kernel."""

    warps: int
    stages: int = 1


Inputs = dict[str, tuple[Array, pl.BlockSpec]]
"""The arrays that a kernel reads, by name, each with the block that one program sees."""


@dataclass(frozen=True)
class Output:
    """An array that a kernel writes, with the block that one program writes. `into` names the input
    whose memory the output takes over; elements that no block writes keep their value."""

    shape: tuple[int, ...]
    dtype: Any
    block: pl.BlockSpec
    into: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return jnp.dtype(self.dtype).itemsize * prod(self.shape)


def call(
    kernel: Callable[[Any], None],
    name: str,
    grid: tuple[int, ...],
    inputs: Inputs,
    outputs: Mapping[str, Output],
    launch: Launch,
    *,
    kind: str | None = None,
    flops: int = 0,
    sizes: tuple[int, ...] = (),
    blocks: str | None = None,
    touched: Mapping[str, int] | None = None,
) -> dict[str, Array]:
    """Runs a kernel and returns its outputs by name. The kernel gets all blocks as attributes of
    one object. Without a GPU, in tests and rehearsals, Pallas interprets it.

    `flops` are the FLOPs of the kernel's matmuls over all programs. Memory traffic counts each
    array once, since repeated reads hit the cache. `touched` gives the bytes of arrays that are
    accessed only in part. If the kernel's work is a matmul, `kind` and `sizes` are those of
    `xla.hlo.Work`, and `blocks` is the HLO dtype of block-scaled operands. All of these are stored
    in the compiled call, so that plans can read them (`xla.custom_calls`).
    """
    arrays, in_specs = zip(*inputs.values(), strict=True)
    names, like = [*inputs, *outputs], arrays[0]
    moved = {name: array.nbytes for name, (array, _) in inputs.items()}
    moved |= {name: output.nbytes for name, output in outputs.items()}
    moved |= {o.into: 0 for o in outputs.values() if o.into} | dict(touched or {})
    cost = {"kind": kind or name, "flops": str(flops), "sizes": json.dumps(sizes)}
    cost |= {"moved": str(sum(moved.values())), "dtype": blocks or HLO_DTYPES[like.dtype.name]}
    cost |= {"blocks": blocks or ""}

    def body(*refs):
        kernel(SimpleNamespace(**dict(zip(names, refs, strict=True))))

    results = pl.pallas_call(
        body,
        grid=grid,
        in_specs=in_specs,
        out_specs=[o.block for o in outputs.values()],
        out_shape=[_shape(o, like) for o in outputs.values()],
        input_output_aliases={
            names.index(o.into): i for i, o in enumerate(outputs.values()) if o.into
        },
        compiler_params=triton.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        metadata=cost,
        interpret=_interpreted(),
        name=name,
    )(*arrays)
    return dict(zip(outputs, results, strict=True))


def _interpreted() -> bool:
    """True if the current mesh, or without one this process, has no GPUs."""
    platform = mesh.platform()
    return (jax.default_backend() if platform == "none" else platform) != "gpu"


def _shape(output: Output, like: Array) -> jax.ShapeDtypeStruct:
    """The type of an output. It varies over the same mesh axes as the input `like`."""
    kind = jax.typeof(like)
    varying = (
        {"vma": kind.vma} if hasattr(kind, "vma") else {"manual_axis_type": kind.manual_axis_type}
    )
    return jax.ShapeDtypeStruct(output.shape, output.dtype, **varying)


@contextmanager
def ignoring_pallas_deprecation() -> Iterator[None]:
    """While a program is lowered, ignores JAX's warning that Pallas's Triton backend will be
    removed (see above)."""
    with warnings.catch_warnings():
        message = "The Pallas Triton backend is deprecated"
        warnings.filterwarnings("ignore", message=message, category=DeprecationWarning)
        yield


def product(a: Array, b: Array) -> Array:
    """Matmul of two matrices with an fp32 result, inside a kernel."""
    dims = (((1,), (0,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


@fp8_product
def _add_fp8_product(total: Array, a: Array, b: Array) -> Array:
    return total + product(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16))


def add_product(total: Array, a: Array, b: Array) -> Array:
    """Adds the matmul of two matrices to an fp32 sum, inside a kernel. The matrices are both in
    bf16, or each is in an FP8 type."""
    return _add_fp8_product(total, a, b) if a.itemsize == 1 else total + product(a, b)


def load_rows(x: Any, rows: Array, first: Array | int, width: int) -> Array:
    """Loads features `first` to `first` + `width` of these rows, inside a kernel. Rows that lie
    beyond the array are zero."""
    shape = (rows.size, width)
    index = jnp.broadcast_to(rows[:, None], shape)
    features = first + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    tile, filled = x.at[index, features], index < x.shape[0]
    return triton.load(tile, mask=filled, other=jnp.zeros((), x.dtype))


def whole(x: Array) -> pl.BlockSpec:
    """The block of a kernel whose programs all see the whole array."""
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)
