"""The time of every Mamba-2 implementation at the recipe's shapes, and of Pallas's kernels with one
size changed at a time."""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from jaxbench import mesh
from jaxbench.ops.pallas_call import Launch, ignoring_pallas_deprecation
from jaxbench.ops.ssd.pallas import Tuning, mixer
from jaxbench.plan.absent import compile_only_devices
from jaxbench.plan.plan import Memory
from jaxbench.train.kernel_timing import seconds
from jaxbench.xla import flags
from one_gpu.context import MEASURED, NOT_RUN, Context, Finding, options
from one_gpu.operators import implementations_of_mixer, mixed, mixer_inputs, with_gradients

LANES = 8
"""Candidates that are compiled at a time."""

GROUPS = 8
"""Groups of heads: all of the model's."""

CHANGES = {
    "bc, 3 stages": {"bc": Launch(8, 3)},
    "bc, 4 warps": {"bc": Launch(4, 2)},
    "x, 3 stages": {"x": Launch(4, 3)},
    "x, 8 warps": {"x": Launch(8, 2)},
    "reverse, 4 warps": {"reverse": Launch(4, 2)},
    "chunks of 64 tokens": {"chunk": 64},
    "forward, 1 stage": {"forward": Launch(8)},
}
"""Changes of the kernels' sizes; one that cannot run on this GPU is reported as not run."""


def candidates(ctx: Context) -> dict[str, Callable]:
    """Mixers as functions of their inputs, by description."""
    mixers = implementations_of_mixer()
    if not ctx.rehearsal:
        for what, change in CHANGES.items():
            mixers[f"pallas, {what}"] = partial(mixer, tuning=Tuning(**change))
    return {name: partial(mixed, mix, ctx) for name, mix in mixers.items()}


def check(ctx: Context) -> Iterator[Finding]:
    """Times each candidate, forward and with all gradients."""
    name, (projected, *parameters) = mixer_inputs(ctx, GROUPS)
    inputs = jnp.asarray(projected, jnp.bfloat16), *map(jnp.asarray, parameters)

    def compiled(function: Callable) -> list[Callable]:
        with (
            jax.set_mesh(mesh.make_mesh((1,) * 6, jax.devices()[:1])),
            ignoring_pallas_deprecation(),
        ):
            return [jax.jit(f, compiler_options=options(ctx)).lower(*inputs).compile()
                    for f in (function, with_gradients(function))]  # fmt: skip

    with ctx.lanes(LANES) as pool:
        programs = {by: pool.submit(compiled, f) for by, f in candidates(ctx).items()}
    for by, program in programs.items():
        try:
            repeats = 2 if ctx.rehearsal else 20
            times = [seconds(f, *inputs, repeats=repeats) for f in program.result()]
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
            with jax.set_mesh(on), ignoring_pallas_deprecation():
                compiled = jax.jit(with_gradients(function)).lower(*inputs).compile(flags.TUNED)
        except jax.errors.JaxRuntimeError as error:
            yield Finding(f"{name} by {by}", NOT_RUN, str(error).splitlines()[0][:300])
            continue
        peak = Memory.of(compiled, ctx.gpu).peak / 2**30
        yield Finding(f"{name} by {by}", MEASURED, f"compiled, {peak:.1f} GiB")
