"""Uniform numbers for stochastic rounding: a hash of the element's index and of a seed, so that XLA
computes them where they are used, and a run that goes on draws what it would have drawn."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

U32 = jnp.uint32


def mix(x: Any) -> UInt32[Array, "*D"]:
    """A bijection of 32-bit numbers in which each bit depends on all others: Wellons's lowbias32
    (skeeto/hash-prospector)."""
    x = jnp.asarray(x, U32)
    x = (x ^ (x >> 16)) * U32(0x7FEB352D)
    x = (x ^ (x >> 15)) * U32(0x846CA68B)
    return x ^ (x >> 16)


def fold(seed: Any, *numbers: Any) -> UInt32[Array, "*D"]:
    """A seed that depends on further numbers."""
    for number in numbers:
        seed = mix(jnp.asarray(seed, U32) + mix(jnp.asarray(number, U32) ^ U32(0x9E3779B9)))
    return jnp.asarray(seed, U32)


def uniform(seed: UInt32[Array, ""], shape: tuple[int, ...]) -> Array:
    """Multiples of 2^-24 in [0, 1), fp32, by the row-major index of each element."""
    index, stride = jnp.zeros(shape, U32), 1
    for axis in reversed(range(len(shape))):
        index += jax.lax.broadcasted_iota(U32, shape, axis) * U32(stride % 2**32)
        stride *= shape[axis]
    return uniform_at(seed, index)


def uniform_at(seed: UInt32[Array, ""], index: UInt32[Array, "*D"]) -> Array:
    """`uniform` of elements by their indices."""
    return (mix(mix(index + seed) ^ seed) >> 8).astype(jnp.int32).astype(jnp.float32) * 2.0**-24
