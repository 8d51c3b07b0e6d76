"""Producers duplicated so that XLA fuses the cast and the amax of an FP8 operand.

An FP8 product casts its operand and takes its amax (largest absolute value). When the producer of
the operand is expensive, such as a gated activation with an exponential per element, XLA does not
fuse it into both consumers: it writes the operand to memory in bf16 and reads it back. Given a
second copy of the producer that XLA cannot recognise as equal (`opaque_copy`), it computes cast and
amax in one kernel from the producer's inputs, and writes FP8 alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Duplicated(NamedTuple):
    """An array `value`, which a product casts, and an equal one `for_amax`, whose amax it takes.

    The cotangents of a product's `Duplicated` result are two copies of one gradient likewise.
    """

    value: jax.Array
    for_amax: jax.Array

    @classmethod
    def of(cls, x: jax.Array) -> "Duplicated":
        """One array as both copies, where its producer is cheap or its value already in memory."""
        return cls(x, jax.lax.stop_gradient(x))


@jax.custom_vjp
def single(x: Duplicated) -> jax.Array:
    """The value of a product's result, for a consumer whose gradient is cheap or in memory."""
    return x.value


single.defvjp(lambda x: (x.value, None), lambda _, dy: (Duplicated(dy, dy),))


def opaque_copy(x: jax.Array, index: int) -> jax.Array:
    """`x`, bit for bit, as a copy that XLA cannot merge with a copy of another `index`.

    It is x 2^index 2^-index, of which the compiler sees the second factor only.
    """
    factor = jax.lax.optimization_barrier(jnp.array(2.0**index, x.dtype))
    return x * factor * jnp.array(2.0**-index, x.dtype)
