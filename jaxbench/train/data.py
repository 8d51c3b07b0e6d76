"""Synthetic tokens: no tokenizer, no download, no account.

Tokens and targets are independent uniform integers, as in NeMo's mock data, and differ at every
step. The loss therefore stays near ln(vocabulary), instead of falling to zero on a memorised batch.
They depend only on seed and step, not on the mesh.
"""

import zlib

import jax

from jaxbench import mesh


def root_key(seed: int, purpose: str) -> jax.Array:
    """The key from which all keys of one purpose, such as `model`, are derived.

    JAX derives the same key from `split(key, n)[i]` as from `fold_in(key, i)`. With one root for
    everything, the tokens of step 1 would share a key with the layers.
    """
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(purpose.encode()))


def synthetic(
    seed: int, step: jax.Array, shape: tuple[int, int, int], vocabulary: int
) -> tuple[jax.Array, jax.Array]:
    """(tokens, targets) of a step, int32 `"microbatch batch seq"`, made on the devices that use
    them."""
    k_tokens, k_targets = jax.random.split(jax.random.fold_in(root_key(seed, "tokens"), step))
    sharding = mesh.spec("microbatch batch seq", mesh.ACTIVATION)
    tokens = jax.random.randint(k_tokens, shape, 0, vocabulary, out_sharding=sharding)
    return tokens, jax.random.randint(k_targets, shape, 0, vocabulary, out_sharding=sharding)
