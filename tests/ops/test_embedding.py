"""The lookup of embeddings and positions and its gradients, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import EPS32, MESHES, on, put

from jaxbench import mesh
from jaxbench.models.layers import look_up

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("mesh_name", MESHES)
def test_embedding_and_its_gradient(mesh_name):
    table, positions = RNG.normal(size=(24, 64)), RNG.normal(size=(20, 64))
    tokens = RNG.integers(0, 24, size=(8, 16))
    cotangent = RNG.normal(size=(8, 16, 64))

    def loss(table, positions, tokens, cotangent):
        return jnp.sum(look_up(table, tokens, jnp.float32, positions) * cotangent)

    with on(mesh_name):
        arrays = (
            put(table, "vocab embed", mesh.TABLE),
            put(positions, "position embed", mesh.TABLE),
            put(tokens, "batch seq", dtype=jnp.int32),
            put(cotangent, "batch shard_seq embed"),
        )
        looked_up = jax.jit(look_up, static_argnums=2)
        out = looked_up(arrays[0], arrays[2], jnp.float32)
        placed = looked_up(arrays[0], arrays[2], jnp.float32, arrays[1])
        grad, d_positions = jax.jit(jax.grad(loss, argnums=(0, 1)))(*arrays)
    exact = table.astype(np.float32)[tokens]
    np.testing.assert_array_equal(out, exact)
    np.testing.assert_array_equal(placed, exact + positions[:16].astype(np.float32))
    summed = np.concatenate([cotangent.sum(0), np.zeros((4, 64))])
    np.testing.assert_allclose(d_positions, summed, atol=20 * EPS32, rtol=0)
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, cotangent)
    np.testing.assert_allclose(grad, expected, atol=20 * EPS32, rtol=0)
