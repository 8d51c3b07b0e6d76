"""The embedding lookup and its gradient, on every mesh."""

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
    table = RNG.normal(size=(24, 64))
    tokens = RNG.integers(0, 24, size=(8, 16))
    cotangent = RNG.normal(size=(8, 16, 64))

    def loss(table, tokens, cotangent):
        return jnp.sum(look_up(table, tokens, jnp.float32) * cotangent)

    with on(mesh_name):
        arrays = (
            put(table, "vocab embed", mesh.TABLE),
            put(tokens, "batch seq", dtype=jnp.int32),
            put(cotangent, "batch shard_seq embed"),
        )
        out = jax.jit(look_up, static_argnums=2)(*arrays[:2], jnp.float32)
        grad = jax.jit(jax.grad(loss))(*arrays)
    np.testing.assert_array_equal(out, table.astype(np.float32)[tokens])
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, cotangent)
    np.testing.assert_allclose(grad, expected, atol=20 * EPS32, rtol=0)
