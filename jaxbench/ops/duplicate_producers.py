"""Duplicated producers, so that XLA fuses both the cast and the amax of an FP8 operand with its
producer.

An FP8 matmul casts its operand and takes its amax (largest absolute value). If the producer of the
operand is expensive, such as a gated activation with an exponential per element, XLA does not fuse
it into both consumers: it writes the operand to memory in bf16 and reads it back. We therefore give
XLA a second copy of the producer that it cannot recognise as equal (`opaque_copy`). It then
computes the cast and the amax in one kernel from the producer's inputs, and writes only FP8.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Duplicated(NamedTuple):
    """An array twice: the matmul casts `value` and takes the amax of `for_amax`, which is equal.

    In the same way, the cotangents of a matmul's `Duplicated` result are two copies of one
    gradient.
    """

    value: jax.Array
    for_amax: jax.Array

    @classmethod
    def of(cls, x: jax.Array) -> "Duplicated":
        """Uses one array as both copies. Its producer is cheap, or its value is already in
        memory."""
        return cls(x, jax.lax.stop_gradient(x))


@jax.custom_vjp
def single(x: Duplicated) -> jax.Array:
    """The value of a matmul's result, for a consumer whose gradient is cheap or already in
    memory."""
    return x.value


single.defvjp(lambda x: (x.value, None), lambda _, dy: (Duplicated(dy, dy),))


def opaque_copy(x: jax.Array, index: int) -> jax.Array:
    """`x`, bit for bit, as a copy that XLA cannot merge with a copy of another `index`.

    It is x 2^index 2^-index, and the compiler sees only the second factor.
    """
    factor = jax.lax.optimization_barrier(jnp.array(2.0**index, x.dtype))
    return x * factor * jnp.array(2.0**-index, x.dtype)
