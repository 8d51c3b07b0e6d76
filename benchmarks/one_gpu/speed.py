"""The GPU's ceilings, and a step's time by kind of kernel beside its forecast."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp

from jaxbench import mesh
from jaxbench.errors import RecipeError
from jaxbench.forecast import tables
from jaxbench.forecast.forecast import expected_schedule
from jaxbench.plan import profile
from jaxbench.plan.absent import compile_only_devices
from jaxbench.recipe.settings import Run
from jaxbench.run import profiling
from jaxbench.train.loop import run_steps
from jaxbench.train.program import read
from jaxbench.xla.schedule import Walk
from one_gpu.context import MEASURED, WRONG, Context, Finding, row
from one_gpu.operators import implementations, product, product_shapes, with_gradients

PROFILED = ("llama31_8b_fp8", "nemotronh_56b_fp8", "grok1_314b_fp8", "llama31_8b_bf16")
WARM, SHOWN = 4, 3
"""Warm-up steps, and profiled steps."""

SQUARE = 8192


def seconds(function: Callable, *arguments: jax.Array, repeats: int = 20) -> float:
    """Mean seconds of a call, after two warm-up calls."""
    for _ in range(2):
        jax.block_until_ready(function(*arguments))
    start = time.perf_counter()
    for _ in range(repeats):
        result = function(*arguments)  # frees the one before: results may be as large as memory
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats


def ceilings(ctx: Context) -> Iterator[Finding]:
    """Rates of large products, of a copy, and of products with both gradients at the recipes'
    shapes, including quantization."""
    for kind, dtype in (("bf16", jnp.bfloat16), ("fp8", jnp.float8_e4m3fn)):
        keys = jax.random.split(jax.random.key(0))
        a, b = (jax.random.normal(k, (SQUARE, SQUARE), jnp.bfloat16).astype(dtype) for k in keys)
        multiply = jax.jit(lambda a, b: jax.lax.dot_general(
            a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16
        ))  # fmt: skip
        name = jnp.dtype(dtype).name
        rate = 2 * SQUARE**3 / seconds(multiply, a, b) / 1e12
        verdict, beside = against(rate, ctx.gpu.tflops[kind])
        yield Finding(f"product {SQUARE} cubed, {name}", verdict, f"{rate:.0f} TFLOP/s", beside,
                      {"tflops": rate})  # fmt: skip
    large = jnp.ones(2**31, jnp.bfloat16)
    rate = 2 * large.nbytes / seconds(jax.jit(lambda x: -x), large) / 1e9
    verdict, beside = against(rate, ctx.gpu.bandwidth)
    yield Finding("copy of 4 GiB", verdict, f"{rate:.0f} GB/s", beside, {"gb_per_s": rate})
    for m, k, n in sorted(product_shapes(ctx)):
        yield with_both_gradients(ctx, m, k, n)


def against(rate: float, peak: float) -> tuple[str, str]:
    """The verdict on a rate beside the hardware's peak, and what is wrong with it."""
    if rate > peak:
        return WRONG, f"above the peak of {peak:.0f}: nothing was computed"
    return MEASURED, ""


def with_both_gradients(ctx: Context, m: int, k: int, n: int) -> Finding:
    """A product with its gradients, in bf16 and in FP8 by each implementation."""
    keys = jax.random.split(jax.random.key(0))
    shapes = ((1, m, k), (k, n))
    x, w = (jax.random.normal(*a, jnp.bfloat16) for a in zip(keys, shapes, strict=True))
    with jax.set_mesh(mesh.make_mesh((1,) * 6, jax.devices()[:1])):
        rates = {
            name or "bf16": 6 * m * k * n / seconds(gradients_of(name), x, w) / 1e12
            for name in (None, *implementations())
        }
    figure = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()) + " TFLOP/s"
    ratios = ", ".join(f"{name} / bf16 {rate / rates['bf16']:.2f}" for name, rate in rates.items())
    verdict, wrong = against(max(rates.values()), max(ctx.gpu.tflops.values()))
    what = f"product with gradients, {m} x {k} x {n}"
    return Finding(what, verdict, figure, wrong or ratios, rates)


def gradients_of(implementation: str | None) -> Callable:
    """The jitted product with both of its gradients."""
    return jax.jit(with_gradients(lambda x, w: product(implementation, x, w)))


def breakdown(ctx: Context) -> Iterator[Finding]:
    """Profiles some rows `1`, by the plan's kinds of kernels."""
    for recipe in PROFILED:
        run = replace(row(recipe), steps=WARM + SHOWN)
        with jax.set_mesh(mesh.make_mesh(run.mesh_shape)):
            yield profiled(ctx, run)


def profiled(ctx: Context, run: Run) -> Finding:
    """Milliseconds of a step by kind of kernel, each beside its forecast; the comparison and a
    table of kernels as data."""
    compiled, _, _ = profiling.compile_visible(run)
    folder = ctx.folder / f"breakdown-{run.recipe}"
    pause = profiling.window("jax", (WARM, run.steps), folder, compiled)
    steps = list(run_steps(run, compiled, pauses=[pause]))
    what, table = f"{run.recipe}, row 1, where its time goes", folder / "kernels.csv"
    try:
        found = profile.read(folder / "profile" / "rank-0", None, ctx.gpu, None, table)
    except RecipeError as error:
        return Finding(what, WRONG, str(error))
    figure = ", ".join(
        f"{part.name} {1e3 * part.measured_s:.1f} ms (forecast {1e3 * part.forecast_s:.1f})"
        for part in found.kernels
    )
    beside = f"step {1e3 * found.measured_s:.1f} ms (forecast {1e3 * found.forecast_s:.1f}), "
    beside += f"under the profiler {1e3 * steps[-1]['step_time_s']:.1f} ms, "
    beside += f"{100 * found.found:.0f} % of the kernels' time found"
    return Finding(what, MEASURED, figure, beside, {**asdict(found), "file": table.read_text()})


def compiles(ctx: Context) -> Iterator[Finding]:
    """Compiles the rows of `breakdown` and reports the forecast of their parts."""
    for recipe in PROFILED:
        run = row(recipe)
        on = mesh.make_mesh(run.mesh_shape, compile_only_devices(ctx.gpu, 1))
        with jax.set_mesh(on):
            compiled, _, took = profiling.compile_visible(run)
        walk, kernels = Walk(read(compiled)), tables.load(ctx.gpu.name.lower())
        parts = expected_schedule(walk, ctx.gpu, kernels).parts
        figure = ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in parts.items())
        yield Finding(f"{recipe}, row 1, forecast", MEASURED, figure, f"compiled in {took:.0f} s")
