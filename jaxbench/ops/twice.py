"""A value given twice, so that a compiler makes both in one pass.

A product in FP8 casts an operand and takes its largest magnitude. Where making the operand is dear
(an exponential for each element), XLA does not do so for each of the two: it writes the operand to
memory in bf16, and reads it back. Given the same value once more, by an expression that it cannot
know to be equal (`apart`), it makes both from what the operand was made of, in one kernel, and
writes FP8 alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Twice(NamedTuple):
    """An array, and the same array `again`, of which a product takes the largest magnitude.

    As the result of a product its two cotangents are the same gradient twice, likewise.
    """

    value: jax.Array
    again: jax.Array

    @classmethod
    def of(cls, x: jax.Array) -> "Twice":
        """An array that is cheap to make, or in memory already. Its gradient is the value's."""
        return cls(x, jax.lax.stop_gradient(x))


@jax.custom_vjp
def once(x: Twice) -> jax.Array:
    """The result of a product for a consumer whose gradient is cheap, or in memory already."""
    return x.value


once.defvjp(lambda x: (x.value, None), lambda _, dy: (Twice(dy, dy),))


def apart(x: jax.Array, way: int) -> jax.Array:
    """`x` by an expression of its own, one for each `way` of 1, 2, ..: times 2^way 2^-way, exactly,
    of which the compiler sees one factor alone."""
    factor = jax.lax.optimization_barrier(jnp.array(2.0**way, x.dtype))
    return x * factor * jnp.array(2.0**-way, x.dtype)
