"""The random Hadamard transform of NVFP4's weight gradients. It spreads outliers over 16 elements
of the contraction. Both operands are transformed, so the transform cancels (NVIDIA 2025, arXiv
2509.25149)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxbench.base.scopes import HADAMARD
from jaxbench.ops.quantized.block_formats import split

SIZE = 16

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The signs, which are fixed (NVIDIA/TransformerEngine jax/quantize/hadamard.py)."""


def matrix(dtype: Any = jnp.float32) -> Float[Array, "16 16"]:
    """diag(signs) H / 4 with Sylvester's H of order 16. It is orthogonal, and exact in every dtype
    of activations. H is -1 where the two indices have an odd number of common bits.

    It is computed and not a constant, because `jax.checkpoint` counts constants of its function as
    arguments.
    """
    i, j = (jax.lax.broadcasted_iota(jnp.uint32, (SIZE, SIZE), axis) for axis in (0, 1))
    negative = sum((sign < 0) << n for n, sign in enumerate(SIGNS))
    odd = jax.lax.population_count(i & j) + (jnp.uint32(negative) >> i)
    return jnp.where(odd & 1, -0.25, 0.25).astype(dtype)


def transformed(x: Array, axis: int) -> Array:
    """Multiplies each 16 consecutive elements of `x` along `axis` by `matrix`, and returns the
    dtype of `x`."""
    summed = ((axis + 1,), (0,)), ((), ())
    with jax.named_scope(HADAMARD):
        turned = jax.lax.dot_general(split(x, axis, SIZE), matrix(x.dtype), summed)
    return jnp.moveaxis(turned, -1, axis + 1).reshape(x.shape)
