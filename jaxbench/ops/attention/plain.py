"""Attention in plain JAX, which computes the scores of all pairs: the reference for every other
kernel."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


def call(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scale: float,
    window: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of one device's heads over whole sequences. Values that are narrower than keys are
    padded, since JAX requires equal widths."""
    width = value.shape[-1]
    value = jnp.pad(value, [*[(0, 0)] * 3, (0, key.shape[-1] - width)])
    attention = partial(jax.nn.dot_product_attention, scale=scale, implementation="xla")
    if sinks is None:
        to_left_and_right = window and (window - 1, 0)
        out = attention(query, key, value, is_causal=True, local_window_size=to_left_and_right)
    else:
        key, value, bias, mask = _with_sinks(key, value, window, sinks)
        out = attention(query, key, value, bias=bias, mask=mask)
    return checkpoint_name(out[..., :width], "attention")


def _with_sinks(key, value, window, sinks):
    """Adds a key before the others; its score is the sink and its value is zero. Returns (keys,
    values, bias, mask)."""
    length, before = key.shape[1], [(0, 0), (1, 0), (0, 0), (0, 0)]
    at, of = jnp.arange(length)[:, None], jnp.arange(-1, length)
    visible = (of == -1) | (of <= at) & (of > at - (window or length))
    bias = jnp.pad(sinks[None, :, None, None], [*[(0, 0)] * 3, (0, length)])
    return jnp.pad(key, before), jnp.pad(value, before), bias, visible[None, None]
