"""Rates of the grouped matmuls at the recipes' shapes, with one size of the kernels changed at a
time, next to a plain matmul of as many FLOPs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxbench import mesh
from jaxbench.jax_internals import fp8_product
from jaxbench.ops import pallas as kernels
from jaxbench.ops.grouped import pallas
from jaxbench.ops.grouped.groups import BLOCK, Groups, group
from jaxbench.ops.pallas import Launch, product, undeprecated
from jaxbench.plan.absent import compile_only_devices
from jaxbench.recipe import recipes
from one_gpu.context import MEASURED, NOT_RUN, Context, Finding, options
from one_gpu.speed import seconds

LANES = 12
"""Candidates that are compiled at a time."""

MODELS = {"qwen3_30b_a3b": 16, "gpt_oss_120b": 64, "deepseek_v3": 1024}
"""Models, and the number of their experts that divides all of them."""

ROWS = 32768
"""Rows that are multiplied: the tokens of a device times the experts that each chooses."""

MATMULS = "to_permuted", "from_permuted", "weights"

CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "depth 32": {"DEPTH": 32},
    "depth 128": {"DEPTH": 128},
    "4 warps": {"LAUNCH": Launch(4, 3)},
    "2 stages": {"LAUNCH": Launch(8, 2)},
    "4 stages": {"LAUNCH": Launch(8, 4)},
    "tiles of 256": {"TILES": (256, 128, 64)},
    "tiles of 256, 4 stages": {"TILES": (256, 128, 64), "LAUNCH": Launch(8, 4)},
    "tiles of 256, depth 128, 3 stages": {"TILES": (256, 128, 64), "DEPTH": 128},
    "tiles of 64": {"TILES": (64,)},
    "tiles of 64, 4 warps": {"TILES": (64,), "LAUNCH": Launch(4, 4)},
}
"""Changes of the module's sizes."""

PROMOTED = {"sums of 64": 64, "sums of all": 2**30}
"""For FP8, other numbers of features between fp32 sums."""


@dataclass(frozen=True)
class Shape:
    """The matmul of a model's experts: groups, features of arriving and of permuted rows."""

    model: str
    experts: int
    inputs: int
    outputs: int

    def arrays(self, dtype: Any) -> list[jax.ShapeDtypeStruct]:
        """The types of arriving rows, weights, permuted rows, and counts."""
        slots = ROWS + self.experts * (BLOCK - 1)
        rows = slots // BLOCK * BLOCK
        return [
            jax.ShapeDtypeStruct((ROWS, self.inputs), dtype),
            jax.ShapeDtypeStruct((self.experts, self.inputs, self.outputs), dtype),
            jax.ShapeDtypeStruct((rows, self.outputs), dtype),
            jax.ShapeDtypeStruct((1, self.experts), jnp.int32),
        ]

    @property
    def flops(self) -> int:
        """FLOPs of the rows that there are."""
        return 2 * ROWS * self.inputs * self.outputs


def shapes(ctx: Context) -> Iterator[Shape]:
    """The first matmul of each model's experts."""
    for model in MODELS:
        cfg = recipes.resolve(recipes.load(f"{model}_bf16"), 1, devices=1).model
        experts = cfg.experts
        count = 128 if model == "qwen3_30b_a3b" else 16
        if ctx.rehearsal:
            yield Shape(model, 4, 128, 128)
            return
        yield Shape(model, count, cfg.embed, 2 * experts.ffn)


def multiply(name: str, x: jax.Array, w: jax.Array, y: jax.Array, counts: jax.Array) -> jax.Array:
    """One of the three matmuls."""
    groups: Groups = group(counts, ROWS, ROWS)
    scale = jnp.ones(1) if x.itemsize == 1 else None
    operands = {"to_permuted": (x, w), "from_permuted": (y, w), "weights": (x, y)}[name]
    return getattr(pallas, name)(*operands, groups, scale)


def candidates(dtype: Any) -> Iterator[tuple[str, dict[str, Any], int | None]]:
    """(what is changed, sizes of the module, features between fp32 sums)."""
    for what, change in CHANGES.items():
        yield what, change, None
    if jnp.dtype(dtype).itemsize == 1:
        for what, promoted in PROMOTED.items():
            yield what, {}, promoted
            yield f"{what}, depth 128", {"DEPTH": 128}, promoted


def lowered(
    ctx: Context, on: Any, shape: Shape, dtype: Any, name: str, change: dict, promoted: int | None
) -> Any:
    """A matmul with changed sizes, lowered."""
    sizes = {size: getattr(pallas, size) for size in ("TILES", "DEPTH", "LAUNCH")} | change
    with (
        mock.patch.multiple(pallas, **sizes),
        mock.patch.object(kernels, "_fp8_product", summing(promoted)),
        jax.set_mesh(on),
        undeprecated(),
    ):
        return jax.jit(partial(multiply, name)).lower(*shape.arrays(dtype))


def summing(promoted: int | None) -> Callable:
    """The FP8 product of the kernels, with as many features between fp32 sums."""
    if promoted is None:
        return kernels._fp8_product
    return fp8_product(lambda total, a, b: total + product(a, b), promoted)


def every(ctx: Context, on: Any) -> Iterator[tuple[Shape, Any, str, str, Any]]:
    """All candidates, lowered one after another, since their sizes are patched."""
    for shape in shapes(ctx):
        for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
            for what, change, promoted in candidates(dtype):
                for name in MATMULS:
                    yield (
                        shape,
                        dtype,
                        what,
                        name,
                        lowered(ctx, on, shape, dtype, name, change, promoted),
                    )


def check(ctx: Context) -> Iterator[Finding]:
    """Times every candidate; shapes one after another, so that an early end has whole shapes."""
    on = mesh.make_mesh((1,) * 6, jax.devices()[:1])
    compiler_options = options(ctx)
    with ctx.lanes(LANES) as pool:
        programs = [
            (*candidate, pool.submit(program.compile, compiler_options))
            for *candidate, program in every(ctx, on)
        ]
        inputs: dict[Any, list[jax.Array]] = {}
        for shape, dtype, what, name, program in programs:
            key = shape, jnp.dtype(dtype).name
            if key not in inputs:
                inputs.clear()
                inputs[key] = drawn(shape, dtype)
                yield plain(ctx, shape, dtype)
            title = f"{shape.model}, {key[1]}, {name}: {what}"
            try:
                took = seconds(program.result(), *inputs[key])
            except Exception as error:
                yield Finding(title, NOT_RUN, f"{error}".splitlines()[0][:200])
                continue
            rate = shape.flops / took / 1e12
            yield Finding(title, MEASURED, f"{rate:.0f} TFLOP/s", data={"seconds": took})


def drawn(shape: Shape, dtype: Any) -> list[jax.Array]:
    """Random rows and weights; rows of experts as random routing gives them."""
    keys = jax.random.split(jax.random.key(0), 3)
    *types, _ = shape.arrays(dtype)
    arrays = [
        jax.random.normal(k, t.shape, jnp.bfloat16).astype(dtype)
        for k, t in zip(keys, types, strict=True)
    ]
    of = np.random.default_rng(0).integers(0, shape.experts, ROWS)
    counts = np.bincount(of, minlength=shape.experts)
    return [*arrays, jnp.asarray(counts[None], jnp.int32)]


def plain(ctx: Context, shape: Shape, dtype: Any) -> Finding:
    """A plain matmul of all rows with one weight."""
    a, w, *_ = drawn(shape, dtype)
    multiply = jax.jit(
        lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.bfloat16),
        compiler_options=options(ctx),
    )
    took = seconds(multiply, a, w[0])
    rate = shape.flops / took / 1e12
    what = f"{shape.model}, {jnp.dtype(dtype).name}: a plain matmul"
    return Finding(what, MEASURED, f"{rate:.0f} TFLOP/s", data={"seconds": took})


def compiles(ctx: Context) -> Iterator[Finding]:
    """Compiles every candidate for an absent GPU."""
    on = mesh.make_mesh((1,) * 6, compile_only_devices(ctx.gpu, 1))
    for shape, dtype, what, name, program in every(ctx, on):
        title = f"{shape.model}, {jnp.dtype(dtype).name}, {name}: {what}"
        try:
            program.compile(options(ctx))
        except Exception as error:
            yield Finding(title, NOT_RUN, f"{error}".splitlines()[0][:200])
            continue
        yield Finding(title, MEASURED, "compiled")
