"""Random numbers of a training step: the counters that seed all of them, and uniform numbers for
stochastic rounding. A uniform number is a hash of the element's index and a seed. So XLA computes
the numbers where they are used, and a resumed run draws the same numbers as one that was never
interrupted."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

U32 = jnp.uint32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Counters:
    """The counters that seed the random draws of a layer.

    Random routing depends on nothing else, so it is the same on any mesh. Stochastic rounding also
    depends on a device's place in the mesh.

    `sequence` is the number of the microbatch's first sequence, counted from the first step.
    `layer` is the number of the layer, None if routing is learned. `depth` says how often the
    block of multi-token prediction was applied before. The first two are int32 scalars.
    """

    sequence: Any = 0
    layer: Any = None
    depth: int = field(default=0, metadata={"static": True})


FIRST = Counters()


def mix(x: Any) -> UInt32[Array, "*D"]:
    """A bijection of 32-bit numbers in which each bit depends on all others: lowbias32 by Wellons
    (skeeto/hash-prospector)."""
    x = jnp.asarray(x, U32)
    x = (x ^ (x >> 16)) * U32(0x7FEB352D)
    x = (x ^ (x >> 15)) * U32(0x846CA68B)
    return x ^ (x >> 16)


def fold(seed: Any, *numbers: Any) -> UInt32[Array, "*D"]:
    """Derives a seed from a seed and further numbers."""
    for number in numbers:
        seed = mix(jnp.asarray(seed, U32) + mix(jnp.asarray(number, U32) ^ U32(0x9E3779B9)))
    return jnp.asarray(seed, U32)


def uniform(seed: UInt32[Array, ""], shape: tuple[int, ...]) -> Array:
    """Numbers in [0, 1), fp32, which are multiples of 2^-24. Each depends on the row-major index of
    its element."""
    index, stride = jnp.zeros(shape, U32), 1
    for axis in reversed(range(len(shape))):
        index += jax.lax.broadcasted_iota(U32, shape, axis) * U32(stride % 2**32)
        stride *= shape[axis]
    return uniform_at(seed, index)


def uniform_at(seed: UInt32[Array, ""], index: UInt32[Array, "*D"]) -> Array:
    """The numbers of `uniform` for elements with these indices."""
    return (mix(mix(index + seed) ^ seed) >> 8).astype(jnp.int32).astype(jnp.float32) * 2.0**-24
