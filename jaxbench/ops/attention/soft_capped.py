"""Causal attention with soft-capped scores, computed for one pair of blocks at a time, so that
memory is linear in the sequence.

Grok-1 bounds each score z to c tanh(z/c). None of the fused kernels that we have computes this. The
bound also bounds every exponential, so the softmax needs no running maximum (compare Dao et al.
2022): numerators and denominators are plain sums over blocks. Pairs of blocks above the diagonal
are never visited. The backward pass computes the scores again, block by block.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxbench.ops.attention.plain import Scores

BLOCK = 512
"""Positions of a block. This size makes the matmuls efficient. For a sequence with Grok-1's 48
heads a block pair has 48 MiB of fp32 scores."""


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def call(
    query: Float[Array, "B S N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    scores: Scores,
) -> Float[Array, "B S N H"]:
    """softmax(c tanh(z/c)) value with z = scale query key, over positions up to the query's own.

    Scores, exponentials and sums are fp32; the operands of matmuls keep their dtype. Remat policies
    save the output and its denominators under the name `attention`.
    """
    return _forward(query, key, value, scores)[0]


def _forward(query, key, value, scores):
    q = _grouped(query, key)

    def step(sums, pair):
        i, j = pair
        exp, _ = _exponentials(q, key, i, j, scores)
        numerator = jnp.einsum("BKGQS,BSKH->BQKGH", exp.astype(value.dtype), _block(value, j),
                               preferred_element_type=jnp.float32)  # fmt: skip
        denominator = jnp.moveaxis(jnp.sum(exp, axis=-1), -1, 1)
        return (_add(sums[0], numerator, i), _add(sums[1], denominator, i)), None

    zeros = _zeros(q), _zeros(q[..., 0])
    (numerator, denominator), _ = jax.lax.scan(step, zeros, _pairs(query.shape[1]))
    out = (numerator / denominator[..., None]).astype(query.dtype).reshape(query.shape)
    out, denominator = (checkpoint_name(x, "attention") for x in (out, denominator))
    return out, (query, key, value, out, denominator)


def _backward(scores, residuals, cotangent):
    query, key, value, out, denominator = residuals
    q, d_out = _grouped(query, key), _grouped(cotangent, key)
    # sum_s p_s dp_s, which is the same for all keys of a query.
    mean = jnp.sum(d_out.astype(jnp.float32) * _grouped(out, key).astype(jnp.float32), axis=-1)
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def step(sums, pair):
        i, j = pair
        exp, slope = _exponentials(q, key, i, j, scores)
        share = exp / jnp.moveaxis(_block(denominator, i), 1, -1)[..., None]
        d_share = dot("BQKGH,BSKH->BKGQS", _block(d_out, i), _block(value, j))
        d_score = share * (d_share - jnp.moveaxis(_block(mean, i), 1, -1)[..., None]) * slope
        d_score = d_score.astype(query.dtype)
        d_query = dot("BKGQS,BSKH->BQKGH", d_score, _block(key, j))
        d_key = dot("BKGQS,BQKGH->BSKH", d_score, _block(q, i))
        d_value = dot("BKGQS,BQKGH->BSKH", share.astype(value.dtype), _block(d_out, i))
        return (_add(sums[0], d_query, i), _add(sums[1], d_key, j), _add(sums[2], d_value, j)), None

    zeros = _zeros(q), _zeros(key), _zeros(value)
    (d_query, d_key, d_value), _ = jax.lax.scan(step, zeros, _pairs(query.shape[1]))
    scale = scores.scale
    return (
        (scale * d_query).astype(query.dtype).reshape(query.shape),
        (scale * d_key).astype(key.dtype),
        d_value.astype(value.dtype),
    )


call.defvjp(_forward, _backward)


def _exponentials(q, key, i, j, scores):
    """Returns exp of the capped scores of query block i and key block j (`"B K G Q S"`), which is
    zero above the diagonal, and the slope of the cap."""
    score = jnp.einsum("BQKGH,BSKH->BKGQS", _block(q, i), _block(key, j),
                       preferred_element_type=jnp.float32)  # fmt: skip
    tanh = jnp.tanh(score * (scores.scale / scores.cap))
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, score.shape[-2:], dim) for dim in (0, 1))
    visible = (i - j) * score.shape[-1] + rows >= columns
    return jnp.where(visible, jnp.exp(scores.cap * tanh), 0.0), 1 - tanh * tanh


def _pairs(length: int) -> tuple[Array, Array]:
    """All pairs (query block, key block) on and below the diagonal, row by row."""
    rows = jnp.arange(length // _block_size(length))
    pair = jnp.arange(rows.size * (rows.size + 1) // 2)
    # We compute the indices instead of using constant arrays: JAX miscounts constants in the
    # derivative of a `jax.checkpoint` that prevents the common subexpressions of some arguments
    # (`remat.recomputed`).
    i = jnp.sum(pair[:, None] >= (rows + 1) * (rows + 2) // 2, axis=1, dtype=jnp.int32)
    return i, pair - i * (i + 1) // 2


def _block_size(length: int) -> int:
    return math.gcd(length, BLOCK)


def _grouped(x, key):
    return x.reshape(*x.shape[:2], key.shape[2], -1, x.shape[-1])


def _zeros(x):
    return jnp.zeros_like(x, jnp.float32)


def _block(x, i):
    size = _block_size(x.shape[1])
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis=1)


def _add(total, x, i):
    return jax.lax.dynamic_update_slice_in_dim(total, _block(total, i) + x, i * x.shape[1], axis=1)
