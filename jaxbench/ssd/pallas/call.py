"""How these kernels are called: arrays by name, what they cost, and Pallas's differences between
versions of JAX.

The kernels are written for Pallas's Triton backend, which JAX announces to remove in favour of
Mosaic GPU. What moves then: a kernel's loads and stores become copies to shared memory
(`plgpu.copy_gmem_to_smem`), its products `plgpu.wgmma` into accumulators, under
`LoweringSemantics.Lane`, as `pl.kernel` with this grid; the mathematics, the order of kernels and
all that is outside of them stay. A block there is copied as a whole, so what now writes some
columns of a block needs a block of those columns; sums of dt a come from XLA, if `lax.cumsum` has
no form there.
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

from jaxbench.xla.hlo import Instruction, Scope, Work

TARGET = "__gpu$xla.gpu.triton"
"""Of the compiled calls."""

METADATA = r'serialized_metadata = "((?:[^"\\]|\\.)*)"'
"""Where a compiled call keeps what it costs."""

HLO_DTYPES = {"bfloat16": "bf16", "float32": "f32"}


@dataclass(frozen=True)
class Launch:
    """Warps of a program, and stages of its loops' loads."""

    warps: int
    stages: int = 1


@dataclass(frozen=True)
class Tuning:
    """Sizes that decide how fast kernels are, and little else: not yet chosen by measurement
    (`benchmarks/one_gpu/mixers.py` has others).

    The scan goes through a sequence in chunks of `chunk` tokens, its first pass in parts of chunks;
    states are kept once per chunk. Gradients of b and c are made for `columns` of them at a time.
    """

    chunk: int = 128
    part: int = 64
    columns: int = 128
    forward: Launch = Launch(8)
    reverse: Launch = Launch(8)
    maps: Launch = Launch(8)
    interpret: bool = False


@dataclass(frozen=True)
class Given:
    """An array that a kernel reads, in blocks."""

    array: Array
    block: pl.BlockSpec


@dataclass(frozen=True)
class Made:
    """An array that a kernel writes, in blocks. `into` names the operand in whose memory it lies:
    what no block writes stays."""

    shape: tuple[int, ...]
    dtype: Any
    block: pl.BlockSpec
    into: str | None = None


def call(
    kernel: Callable[[Any], None],
    name: str,
    grid: tuple[int, ...],
    given: Mapping[str, Given],
    made: Mapping[str, Made],
    launch: Launch,
    *,
    flops: int = 0,
    touched: Mapping[str, int] | None = None,
    interpret: bool,
) -> dict[str, Array]:
    """What a kernel makes, by name. It is called with its blocks as attributes of one object.

    `flops` are those of its products, in all programs. Its bytes are those of each array once,
    since caches keep what programs share, but of those of which it touches a part the bytes
    `touched`. Both are left in the compiled call, for plans.
    """
    moved = {name: _bytes(g.array) for name, g in given.items()}
    moved |= {name: _bytes(m) for name, m in made.items()}
    moved |= {m.into: 0 for m in made.values() if m.into} | dict(touched or {})
    cost = {"name": name, "flops": str(flops), "moved": str(sum(moved.values()))}
    names = [*given, *made]
    places = {name: i for i, name in enumerate(given)}

    def body(*refs):
        kernel(SimpleNamespace(**dict(zip(names, refs, strict=True))))

    like = next(iter(given.values())).array
    results = pl.pallas_call(
        body,
        grid=grid,
        in_specs=[g.block for g in given.values()],
        out_specs=[m.block for m in made.values()],
        out_shape=[_shape(m, like) for m in made.values()],
        input_output_aliases={places[m.into]: i for i, m in enumerate(made.values()) if m.into},
        compiler_params=triton.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        metadata=cost | {"dtype": HLO_DTYPES[like.dtype.name]},
        interpret=interpret,
        name=name,
    )(*(g.array for g in given.values()))
    return dict(zip(made, results, strict=True))


def _shape(made: Made, like: Array) -> jax.ShapeDtypeStruct:
    """The type of a result, which varies over the same mesh axes as an operand."""
    kind = jax.typeof(like)
    varying = (
        {"vma": kind.vma} if hasattr(kind, "vma") else {"manual_axis_type": kind.manual_axis_type}
    )
    return jax.ShapeDtypeStruct(made.shape, made.dtype, **varying)


def _bytes(array: Array | Made) -> int:
    return jnp.dtype(array.dtype).itemsize * prod(array.shape)


def work(i: Instruction, scope: Scope) -> Work:
    """What a compiled call computes and moves."""
    cost = json.loads((i.attribute(METADATA) or "{}").replace(r"\22", '"').replace(r"\"", '"'))
    return Work(cost["name"], cost["dtype"], int(cost["flops"]), bytes=int(cost["moved"]))


@contextmanager
def undeprecated() -> Iterator[None]:
    """While a program is lowered: JAX's warning that Pallas's Triton backend is to be removed is
    known (see above)."""
    with warnings.catch_warnings():
        message = "The Pallas Triton backend is deprecated"
        warnings.filterwarnings("ignore", message=message, category=DeprecationWarning)
        yield


def product(a: Array, b: Array) -> Array:
    """The fp32 product of two matrices, inside a kernel."""
    dims = (((1,), (0,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
