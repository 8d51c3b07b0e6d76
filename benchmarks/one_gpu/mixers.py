"""Times of every Mamba-2 implementation at the recipe's shapes, and of Pallas's kernels with one
size changed at a time."""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from jaxbench import mesh, ssd
from jaxbench.ops.pallas import Launch, undeprecated
from jaxbench.plan.absent import compile_only_devices
from jaxbench.plan.plan import Memory
from jaxbench.ssd.pallas import Tuning
from one_gpu.context import MEASURED, NOT_RUN, Context, Finding
from one_gpu.operators import implementations_of_mixer, mixed, mixer_inputs, with_gradients
from one_gpu.speed import seconds

GROUPS = 8
"""Groups of heads: all of the model's."""

CHANGES = {
    "whole chunks forward": {"part": 128},
    "parts of 32 tokens": {"part": 32},
    "chunks of 64 tokens": {"chunk": 64},
    "64 columns of the state": {"columns": 64},
    "forward, 4 warps": {"forward": Launch(4)},
    "forward, 2 stages": {"forward": Launch(8, 2)},
    "reverse, 4 warps": {"reverse": Launch(4)},
    "reverse, 16 warps": {"reverse": Launch(16)},
    "maps, 4 warps": {"maps": Launch(4)},
    "maps, 2 stages": {"maps": Launch(8, 2)},
}
"""Changes of the kernels' sizes; one that cannot run on this GPU is reported as not run."""


def candidates(ctx: Context) -> dict[str, Callable]:
    """Mixers as functions of their inputs, by description."""
    mixers = implementations_of_mixer(ctx)
    if not ctx.rehearsal:
        for what, change in CHANGES.items():
            mixers[f"pallas, {what}"] = partial(ssd.pallas.mixer, tuning=Tuning(**change))
    return {name: partial(mixed, mix, ctx) for name, mix in mixers.items()}


def check(ctx: Context) -> Iterator[Finding]:
    """Times each candidate, forward and with all gradients."""
    name, (projected, *parameters) = mixer_inputs(ctx, GROUPS)
    inputs = jnp.asarray(projected, jnp.bfloat16), *map(jnp.asarray, parameters)
    on = mesh.make_mesh((1,) * 6, jax.devices()[:1])
    for by, function in candidates(ctx).items():
        try:
            with jax.set_mesh(on), undeprecated():
                times = [
                    seconds(jax.jit(f), *inputs, repeats=2 if ctx.rehearsal else 20)
                    for f in (function, with_gradients(function))
                ]
        except jax.errors.JaxRuntimeError as error:
            yield Finding(f"{name} by {by}", NOT_RUN, str(error).splitlines()[0][:300])
            continue
        forward, both = (1e3 * t for t in times)
        yield Finding(f"{name} by {by}", MEASURED, f"forward {forward:.2f} ms",
                      f"with gradients {both:.2f} ms", {"seconds": times})  # fmt: skip


def compiles(ctx: Context) -> Iterator[Finding]:
    """Compiles each candidate for an absent GPU."""
    name, arrays = mixer_inputs(ctx, GROUPS)
    inputs = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if i == 0 else jnp.float32)
              for i, x in enumerate(arrays)]  # fmt: skip
    on = mesh.make_mesh((1,) * 6, compile_only_devices(ctx.gpu, 1))
    for by, function in candidates(ctx).items():
        try:
            with jax.set_mesh(on), undeprecated():
                compiled = jax.jit(with_gradients(function)).lower(*inputs).compile()
        except jax.errors.JaxRuntimeError as error:
            yield Finding(f"{name} by {by}", NOT_RUN, str(error).splitlines()[0][:300])
            continue
        peak = Memory.of(compiled, ctx.gpu).peak / 2**30
        yield Finding(f"{name} by {by}", MEASURED, f"compiled, {peak:.1f} GiB")
