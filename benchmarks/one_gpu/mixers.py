"""Which Mamba-2? Every implementation of a mixer at the recipe's shapes, and the sizes of Pallas's
kernels, one changed at a time."""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from jaxbench import mesh, ssd
from jaxbench.plan.absent import compile_only_devices
from jaxbench.ssd.pallas.call import Launch, Tuning
from one_gpu.operators import implementations_of_mixer, mixed, mixer_inputs, with_gradients
from one_gpu.place import MEASURED, NOT_RUN, Finding, Place
from one_gpu.speed import seconds

GROUPS = 8
"""Of the model: one sequence fills a GPU as two do that is given half of them."""

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
"""Of the kernels' sizes; those that run on no GPU say so."""


def candidates(place: Place) -> dict[str, Callable]:
    """Functions of the inputs, by what they are."""
    found = implementations_of_mixer(place)
    if not place.rehearsal:
        for what, change in CHANGES.items():
            found[f"pallas, {what}"] = partial(ssd.pallas.mixer, tuning=Tuning(**change))
    return {name: partial(mixed, mix, place) for name, mix in found.items()}


def check(place: Place) -> Iterator[Finding]:
    """Times of each, forward and with all gradients."""
    name, (projected, *parameters) = mixer_inputs(place, GROUPS)
    inputs = jnp.asarray(projected, jnp.bfloat16), *map(jnp.asarray, parameters)
    on = mesh.make_mesh((1,) * 6, jax.devices()[:1])
    for by, function in candidates(place).items():
        try:
            with jax.set_mesh(on), ssd.pallas.undeprecated():
                times = [
                    seconds(jax.jit(f), *inputs, repeats=2 if place.rehearsal else 20)
                    for f in (function, with_gradients(function))
                ]
        except jax.errors.JaxRuntimeError as error:
            yield Finding(f"{name} by {by}", NOT_RUN, str(error).splitlines()[0][:300])
            continue
        forward, both = (1e3 * t for t in times)
        yield Finding(f"{name} by {by}", MEASURED, f"forward {forward:.2f} ms",
                      f"with gradients {both:.2f} ms", {"seconds": times})  # fmt: skip


def compiles(place: Place) -> Iterator[Finding]:
    """Compiles each for an absent GPU."""
    name, arrays = mixer_inputs(place, GROUPS)
    inputs = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if i == 0 else jnp.float32)
              for i, x in enumerate(arrays)]  # fmt: skip
    on = mesh.make_mesh((1,) * 6, compile_only_devices(place.gpu, 1))
    for by, function in candidates(place).items():
        try:
            with jax.set_mesh(on), ssd.pallas.undeprecated():
                compiled = jax.jit(with_gradients(function)).lower(*inputs).compile()
        except jax.errors.JaxRuntimeError as error:
            yield Finding(f"{name} by {by}", NOT_RUN, str(error).splitlines()[0][:300])
            continue
        peak = compiled.memory_analysis().peak_memory_in_bytes / 2**30
        yield Finding(f"{name} by {by}", MEASURED, f"compiled, {peak:.1f} GiB")
