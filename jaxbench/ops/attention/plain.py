"""Attention in plain JAX: the reference for every other kernel, with scores for all pairs."""

import jax
from jax.ad_checkpoint import checkpoint_name


def call(query: jax.Array, key: jax.Array, value: jax.Array, cap: float | None) -> jax.Array:
    """Attention of one device's heads over whole sequences."""
    out = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="xla")
    return checkpoint_name(out, "attention")
