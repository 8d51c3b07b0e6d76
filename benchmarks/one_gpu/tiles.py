"""Rates of the grouped matmuls at the recipes' shapes, with other sizes of the kernels, next to
kernels of others and to a plain matmul of as many FLOPs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbench import mesh
from jaxbench.ops.grouped import pallas
from jaxbench.ops.grouped.groups import BLOCK, group
from jaxbench.ops.grouped.pallas import Sizes
from jaxbench.ops.kernel_sizes import Choices, using
from jaxbench.ops.pallas_call import ignoring_pallas_deprecation
from jaxbench.plan.absent import compile_only_devices
from jaxbench.train.kernel_timing import seconds
from one_gpu import ragged
from one_gpu.context import MEASURED, NOT_RUN, Context, Finding, options, row

LANES = 12
"""Candidates that are compiled at a time."""

MODELS = {"deepseek_v3": (16, 32768), "qwen3_30b_a3b": (128, 131072), "gpt_oss_120b": (16, 65536)}
"""Models: experts on a device, and rows, of a published row."""

MATMULS = "to_permuted", "from_permuted", "weights"


@dataclass(frozen=True)
class Shape:
    """The matmul of a model's experts: groups, features of arriving and of permuted rows."""

    model: str
    experts: int
    rows: int
    inputs: int
    outputs: int

    def arrays(self, dtype: Any) -> list[jax.ShapeDtypeStruct]:
        """The types of arriving rows, weights, permuted rows, and counts."""
        slots = self.rows + self.experts * (BLOCK - 1)
        rows = slots // BLOCK * BLOCK
        return [
            jax.ShapeDtypeStruct((self.rows, self.inputs), dtype),
            jax.ShapeDtypeStruct((self.experts, self.inputs, self.outputs), dtype),
            jax.ShapeDtypeStruct((rows, self.outputs), dtype),
            jax.ShapeDtypeStruct((1, self.experts), jnp.int32),
        ]

    @property
    def flops(self) -> int:
        """FLOPs of the rows that there are."""
        return 2 * self.rows * self.inputs * self.outputs


def shapes(ctx: Context) -> Iterator[Shape]:
    """The first matmul of each model's experts."""
    for model, (count, rows) in MODELS.items():
        cfg = row(f"{model}_bf16").model
        yield Shape(model, count, rows, cfg.embed, 2 * cfg.experts.ffn)


def multiply(
    name: str, sizes: Sizes | None, x: jax.Array, w: jax.Array, y: jax.Array, counts: jax.Array
) -> jax.Array:
    """One of the three matmuls."""
    groups = group(counts, len(x), len(x))
    scales = 2 * (jnp.ones(()),) if x.itemsize == 1 else None
    operands = {"to_permuted": (x, w), "from_permuted": (y, w), "weights": (x, y)}[name]
    return getattr(pallas, name)(*operands, groups, scales, sizes=sizes)


def lowered(on: Any, shape: Shape, dtype: Any, name: str, sizes: Sizes) -> Any:
    """A matmul with some sizes, lowered."""
    with jax.set_mesh(on), ignoring_pallas_deprecation():
        return jax.jit(partial(multiply, name, sizes)).lower(*shape.arrays(dtype))


def others(on: Any, shape: Shape) -> Iterator[tuple[str, Any]]:
    """Grouped matmuls of others in bf16, lowered, with the gathers that ours does without."""
    for name in MATMULS:
        for what, dot in ragged.hoppers():
            with jax.set_mesh(on), ignoring_pallas_deprecation():
                yield f"{name}, {what}", other(dot, name, shape)


def other(dot: Callable, name: str, shape: Shape) -> Any:
    """A grouped matmul of others, lowered; the error of one that is not installed or does not take
    the shape."""

    def run(x: jax.Array, w: jax.Array, y: jax.Array, counts: jax.Array) -> jax.Array:
        operands = {"to_permuted": (x, w), "from_permuted": (y, w), "weights": (x, y)}[name]
        return ragged.with_gathers(dot, name, *operands, group(counts, len(x), len(x)))

    try:
        return jax.jit(run).lower(*shape.arrays(jnp.bfloat16))
    except Exception as error:
        return error


def every(on: Any, shape: Shape, dtype: Any) -> Iterator[tuple[str, Any]]:
    """All candidates of our kernels by description."""
    for name in MATMULS:
        with using(choices := Choices()), jax.set_mesh(on):
            jax.jit(partial(multiply, name, None)).trace(*shape.arrays(dtype))
        (case,) = choices.asked.values()
        for sizes in case.candidates:
            launch = f"{sizes.launch.warps} warps, {sizes.launch.stages} stages"
            what = f"{name}, width {sizes.width}, depth {sizes.depth}, {launch}"
            yield what, lowered(on, shape, dtype, name, sizes)


def candidates(on: Any, shape: Shape, dtype: Any) -> Iterator[tuple[str, Any]]:
    """Ours, and in bf16 those of others, which ask the GPU that is here for its kind."""
    yield from every(on, shape, dtype)
    if dtype == jnp.bfloat16:
        yield from others(on, shape)


def check(ctx: Context) -> Iterator[Finding]:
    """Times every candidate; shapes one after another, so that an early end has whole shapes."""
    on = mesh.make_mesh((1,) * 6, jax.devices()[:1])
    for shape, dtype in product(shapes(ctx), (jnp.bfloat16, jnp.float8_e4m3fn)):
        title = f"{shape.model}, {jnp.dtype(dtype).name}"
        with ctx.lanes(LANES) as pool:
            programs = {
                what: pool.submit(finish, program, options(ctx))
                for what, program in candidates(on, shape, dtype)
            }
        inputs = drawn(shape, dtype)
        yield plain(ctx, shape, dtype)
        for what, program in programs.items():
            try:
                took = seconds(program.result(), *inputs, repeats=10)
            except Exception as error:
                reason = f"{error}".splitlines()[0][:200]
                yield Finding(f"{title}, {what}", NOT_RUN, reason)
                continue
            rate = f"{shape.flops / took / 1e12:.0f} TFLOP/s"
            yield Finding(f"{title}, {what}", MEASURED, rate, data={"seconds": took})


def finish(program: Any, options: dict[str, Any]) -> Any:
    """Compiles what could be lowered, and raises the error of what could not."""
    if isinstance(program, Exception):
        raise program
    return program.compile(options)


def drawn(shape: Shape, dtype: Any) -> list[jax.Array]:
    """Random rows and weights; rows of experts as random routing gives them."""
    keys = jax.random.split(jax.random.key(0), 3)
    *types, _ = shape.arrays(dtype)
    arrays = [
        jax.random.normal(k, t.shape, jnp.bfloat16).astype(dtype)
        for k, t in zip(keys, types, strict=True)
    ]
    of = np.random.default_rng(0).integers(0, shape.experts, shape.rows)
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
    for shape, dtype in product(shapes(ctx), (jnp.bfloat16, jnp.float8_e4m3fn)):
        for what, program in every(on, shape, dtype):
            title = f"{shape.model}, {jnp.dtype(dtype).name}, {what}"
            try:
                program.compile(options(ctx))
            except Exception as error:
                yield Finding(title, NOT_RUN, f"{error}".splitlines()[0][:200])
                continue
            yield Finding(title, MEASURED, "compiled")
