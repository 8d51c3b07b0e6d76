"""Einsum of two arrays as one matmul, without a transposed copy of an operand."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxbench import mesh


def einsum_dims(equation: str) -> tuple[str, str, str]:
    """The dimensions of both operands and of the result of an einsum, one letter each."""
    operands, result = equation.split("->")
    a, b = operands.split(",")
    return a, b, result


def contract(equation: str, a: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
    """`jnp.einsum` of two arrays. The result must have the batch dimensions first, then the
    remaining dimensions of one array, then the remaining dimensions of the other. `options` go to
    `jax.lax.dot_general`.

    If several dimensions are summed, they keep their order in `a`. `einsum` sorts them by their
    letters, and XLA then transposes an operand in memory. Raises ValueError for any other order of
    the result.
    """
    a_dims, b_dims, out = einsum_dims(equation)
    batch = [d for d in a_dims if d in b_dims and d in out]
    summed = [d for d in a_dims if d in b_dims and d not in out]
    order = "".join(batch + [d for d in a_dims + b_dims if d not in batch + summed])
    swapped = "".join(batch + [d for d in b_dims + a_dims if d not in batch + summed])
    if out not in (order, swapped):
        raise ValueError(f"{equation}: expected {order} or {swapped}")
    if out != order:
        a, b, a_dims, b_dims = b, a, b_dims, a_dims

    def positions(dims: list[str]) -> tuple[list[int], list[int]]:
        return [a_dims.index(d) for d in dims], [b_dims.index(d) for d in dims]

    dimension_numbers = positions(summed), positions(batch)
    if batch and mesh.platform() == "cpu":
        # On a CPU XLA accumulates in bf16 if the sum is not over the last dimension of `a`.
        wide = [x.astype(jnp.float32) for x in (a, b)]
        return jax.lax.dot_general(wide[0], wide[1], dimension_numbers, **options).astype(a.dtype)
    return jax.lax.dot_general(a, b, dimension_numbers, **options)
