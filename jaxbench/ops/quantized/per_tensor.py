"""The FP8 format: one scale for a whole tensor (Micikevicius et al. 2022).

Inputs and weights are e4m3, and output gradients are e5m2. A tensor is stored as `x / scale_inv`.
"""

from typing import Any

import jax
import jax.numpy as jnp

VALUES, GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2
LARGEST = {dtype: float(jnp.finfo(dtype).max) for dtype in (VALUES, GRADIENTS)}
"""The largest finite value of each type: 448 for e4m3, 57344 for e5m2."""

TENSORS = (VALUES, VALUES, GRADIENTS)
"""The types of the three tensors of a matmul: input, weight, gradient of the output."""


def scale_inv_of(amax: jax.Array, dtype: Any) -> jax.Array:
    """The inverse scale of a tensor: amax / (largest value of `dtype`); 1 for zeros.

    It is rounded up to a bf16 value, since `operand.multiply` multiplies by it in bf16. If `amax`
    is not finite it is returned as it is, so that the loss is not finite either.
    """
    smallest = jnp.finfo(jnp.float32).tiny
    exact = jnp.maximum(amax * (1 / LARGEST[dtype]), smallest)
    bits = jax.lax.bitcast_convert_type(exact, jnp.uint32) + jnp.uint32(0xFFFF)
    rounded = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(amax == 0, 1.0, jnp.where(jnp.isfinite(amax), rounded, amax))


def scale_invs_of(amax: jax.Array) -> jax.Array:
    """`scale_inv_of` for input, weight and gradient, which are the last dimension of `amax`."""
    values = [scale_inv_of(amax[..., i], dtype) for i, dtype in enumerate(TENSORS)]
    return jnp.stack(values, axis=-1)


def quantize(x: jax.Array, scale_inv: jax.Array, dtype: Any) -> jax.Array:
    """`x / scale_inv` rounded to FP8. Values out of range saturate at the largest value; NaN stays
    NaN."""
    limit = LARGEST[dtype]
    return jnp.clip(x.astype(jnp.float32) * (1 / scale_inv), -limit, limit).astype(dtype)


def amax_of(x: jax.Array, axis: Any = None) -> jax.Array:
    """The largest absolute value of `x`, in fp32."""
    return jnp.max(jnp.abs(x), axis).astype(jnp.float32)
