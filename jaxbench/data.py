"""Synthetic tokens: no tokenizer, no download, no account.

Tokens and targets are independent uniform integers, as in NeMo's mock data, and different at every step: the loss stays
near ln(vocabulary) instead of falling to zero on a memorised batch. They depend on seed and step alone, not on the mesh.
"""

import jax

from jaxbench import mesh


def synthetic(seed: int, step: jax.Array, shape: tuple[int, int, int], vocabulary: int):
    """(tokens, targets) int32 `"microbatch batch seq"` of one step, generated where they are used."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    sharding = mesh.spec("microbatch batch seq", mesh.ACTIVATION)
    return tuple(
        jax.random.randint(k, shape, 0, vocabulary, out_sharding=sharding) for k in jax.random.split(key)
    )
