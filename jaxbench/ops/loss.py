"""Cross entropy over a vocabulary that may be sharded, fused with the head's matrix product.

The head is the widest layer (128k columns) and its fp32 logits would be the largest array of the
whole step. Here the tokens are taken in chunks: logits of one chunk, its loss, and at once the
gradient of its logits in bf16. So the logits are computed once, never all held, and the backward
pass only scales what is already there.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxbench import mesh
from jaxbench.ops.slots import scan

CHUNK_TOKENS = 2048
"""Tokens per chunk: enough rows for an efficient product, 1 GB of fp32 logits at 128k columns."""


@jax.custom_vjp
def cross_entropy(
    hidden: Float[Array, "B S D"], head: Float[Array, "D V"], targets: Int[Array, "B S"]
) -> Float[Array, ""]:
    """Mean over all tokens of -log softmax(hidden @ head)[target], in nats, accumulated in fp32.

    `hidden` is `"batch seq embed"`, `head` a weight at rest `"embed vocab"`, `targets` `"batch
    seq"`, other sequences on each rank of `SEQUENCES`.
    """
    return _sharded(hidden, head, targets, gradients=False)[0]


def _forward(hidden, head, targets):
    loss, d_hidden, d_head = _sharded(hidden, head, targets, gradients=True)
    return loss, (d_hidden, d_head)


def _backward(residuals, cotangent):
    def scaled(d):
        # A factor of an unreduced array has to be reduced over the same axes: every rank scales its
        # part of the sum.
        marks = PartitionSpec(reduced=jax.typeof(d).sharding.spec.unreduced)
        return d * jax.sharding.reshard(cotangent.astype(d.dtype), marks)

    return *map(scaled, residuals), None


cross_entropy.defvjp(_forward, _backward)


def _sharded(hidden, head, targets, *, gradients: bool):
    """(loss, d hidden, d head) on the current mesh; without `gradients` only (loss,)."""
    # What a primal is reduced over, its gradient is unreduced over: nothing is summed across these.
    for x, axes in ((hidden, {mesh.TENSOR}), (head, set(mesh.REPLICAS))):
        assert jax.typeof(x).sharding.spec.reduced == mesh.spec("", {}, reduced=axes).reduced
    d_specs = [mesh.cotangent_spec(x) for x in (hidden, head) if gradients]
    shards = tuple(axis for _, axes in mesh.gathered_dims(head) for axis in axes)
    local = partial(_local, shards=shards, gradients=gradients)
    out_specs = (PartitionSpec(), *d_specs)
    return mesh.on_each_device(local, out_specs, check_vma=False)(hidden, head, targets)


def _local(hidden, head, targets, *, shards: tuple[str, ...], gradients: bool):
    """One device's share: its tokens against its columns of the vocabulary. The rows of the
    head lie over the axes `shards`."""
    everyone = (*mesh.SEQUENCES, mesh.CONTEXT)
    total = targets.size * jax.lax.axis_size(everyone)
    head = jax.lax.all_gather(head, shards, axis=0, tiled=True) if shards else head
    columns = head.shape[1]
    first_column = jax.lax.axis_index(mesh.TENSOR) * columns

    def step(_, loss, tokens):
        hidden, targets = tokens
        logits = jnp.einsum("TD,DV->TV", hidden, head, preferred_element_type=jnp.float32)
        own_largest, own_partition = _partition(logits)
        largest = jax.lax.pmax(own_largest, mesh.TENSOR)
        partition = own_partition * jnp.exp(own_largest - largest)
        partition = jax.lax.psum(partition, mesh.TENSOR)
        # Picked, not summed: a sum is fused with the gradient, which is then not written where it
        # is stacked.
        column = (targets - first_column)[:, None]
        is_here = (column >= 0) & (column < columns)
        picked = jnp.take_along_axis(logits, jnp.clip(column, 0, columns - 1), axis=-1)
        target = jax.lax.psum(jnp.where(is_here, picked - largest, 0.0), mesh.TENSOR)
        loss += jnp.sum(jnp.log(partition) - target)
        if not gradients:
            return loss, None
        is_target = jnp.arange(columns) == column
        probability = jnp.exp(logits - largest) / partition
        d_logits = ((probability - is_target) / total).astype(hidden.dtype)
        return loss, d_logits

    chunk = largest_divisor(targets.size, CHUNK_TOKENS)
    chunks = hidden.reshape(-1, chunk, hidden.shape[-1]), targets.reshape(-1, chunk)
    loss, d_logits = scan(step, jnp.zeros(()), chunks)
    loss = jax.lax.psum(loss, everyone) / total
    if not gradients:
        return (loss,)
    d_hidden = jnp.einsum("CTV,DV->CTD", d_logits, head)
    d_head = jnp.einsum("CTD,CTV->DV", chunks[0], d_logits)
    if shards:
        d_head = jax.lax.psum_scatter(d_head, shards, scatter_dimension=0, tiled=True)
    return loss, d_hidden.reshape(hidden.shape), d_head


def _partition(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of each row `[T, V]` the largest logit and the sum of exp(logit - largest), each `[T, 1]`, in
    one pass over the logits (Milakov and Gimelshein 2018, algorithm 3)."""

    def join(a, b):
        (largest_a, sum_a), (largest_b, sum_b) = a, b
        smaller = jnp.exp(-jnp.abs(largest_a - largest_b))
        of_a = largest_a >= largest_b
        joined = jnp.where(of_a, sum_a + sum_b * smaller, sum_a * smaller + sum_b)
        return jnp.where(of_a, largest_a, largest_b), joined

    # Finite, since a compiler may join two of them.
    none = jnp.finfo(logits.dtype).min, jnp.zeros((), logits.dtype)
    found = jax.lax.reduce((logits, jnp.ones_like(logits)), none, join, (1,))
    return found[0][:, None], found[1][:, None]


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of `n` that is at most `limit`."""
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)
