"""The GPU's ceilings: matmuls under sustained load, and copies in its memory and the host's."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from jaxbench.train.kernel_timing import seconds
from jaxbench.xla import flags
from one_gpu.context import MEASURED, WRONG, Context, Finding

SQUARE = 8192
SUSTAINED_S = 1.5
"""Seconds of load before a matmul is timed, and while it is: a GPU at its power limit lowers its
clock within a second."""

COPIES = 5
"""Copies to or from the host's memory in a row."""


def sustained(function: Callable, *arguments: jax.Array) -> float:
    """Mean seconds of a call under sustained load."""
    repeats = max(20, round(SUSTAINED_S / seconds(function, *arguments)))
    seconds(function, *arguments, repeats=repeats)
    return seconds(function, *arguments, repeats=repeats)


def ceilings(ctx: Context) -> Iterator[Finding]:
    """Rates of large matmuls with random numbers and with zeros, of a copy in the GPU's memory, and
    of copies to and from the host's."""
    for kind, dtype in (("bf16", jnp.bfloat16), ("fp8", jnp.float8_e4m3fn)):
        keys = jax.random.split(jax.random.key(0))
        drawn = [jax.random.normal(k, (SQUARE, SQUARE), jnp.bfloat16).astype(dtype) for k in keys]
        multiply = jax.jit(
            lambda a, b: jax.lax.dot_general(
                a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16
            ),
            compiler_options=flags.TUNED if jax.default_backend() == "gpu" else {},
        )
        for numbers, (a, b) in {"random": drawn, "zeros": map(jnp.zeros_like, drawn)}.items():
            rate = 2 * SQUARE**3 / sustained(multiply, a, b) / 1e12
            verdict, beside = against(rate, ctx.gpu.tflops[kind])
            what = f"matmul {SQUARE} cubed, {jnp.dtype(dtype).name}, {numbers}"
            yield Finding(what, verdict, f"{rate:.0f} TFLOP/s", beside, {"tflops": rate})
    large = jnp.ones(2**31, jnp.bfloat16)
    rate = 2 * large.nbytes / seconds(jax.jit(lambda x: -x), large) / 1e9
    verdict, beside = against(rate, ctx.gpu.bandwidth)
    yield Finding("copy of 4 GiB", verdict, f"{rate:.0f} GB/s", beside, {"gb_per_s": rate})
    part = large[: 2**29]
    there = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Host))
    back = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device))
    hosted = there(part)
    for what, function, x in (("to the host", there, part), ("from the host", back, hosted)):
        seconds(function, x, repeats=COPIES)  # takes the pinned memory of as many results
        rate = part.nbytes / seconds(function, x, repeats=COPIES) / 1e9
        verdict, beside = against(rate, ctx.gpu.host)
        yield Finding(f"copy of 1 GiB {what}", verdict, f"{rate:.1f} GB/s", beside,
                      {"gb_per_s": rate})  # fmt: skip


def against(rate: float, peak: float) -> tuple[str, str]:
    """The verdict on a rate next to the hardware's peak, and what is wrong with it."""
    if rate > peak:
        return WRONG, f"above the peak of {peak:.0f}: nothing was computed"
    return MEASURED, ""
