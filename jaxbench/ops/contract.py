"""Einsum of two arrays as one product, with nothing transposed in memory."""

from typing import Any

import jax


def contract(equation: str, a: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
    """`jnp.einsum` of two arrays whose dimensions lie, in the result, one array's after the
    other's, behind those of a batch; `options` are those of `jax.lax.dot_general`.

    Sums over several dimensions in their order in `a`. `einsum` sorts them by their letters, and
    XLA then reorders an operand in memory. Raises ValueError for another order.
    """
    inputs, out = equation.split("->")
    a_dims, b_dims = inputs.split(",")
    batch = [d for d in a_dims if d in b_dims and d in out]
    summed = [d for d in a_dims if d in b_dims and d not in out]
    order = "".join(batch + [d for d in a_dims + b_dims if d not in batch + summed])
    swapped = "".join(batch + [d for d in b_dims + a_dims if d not in batch + summed])
    if out not in (order, swapped):
        raise ValueError(f"{equation}: expected {order} or {swapped}")
    if out != order:
        a, b, a_dims, b_dims = b, a, b_dims, a_dims

    def places(letters: list[str]) -> tuple[list[int], list[int]]:
        return [a_dims.index(d) for d in letters], [b_dims.index(d) for d in letters]

    return jax.lax.dot_general(a, b, (places(summed), places(batch)), **options)
