"""Products with weights at rest and their gradients, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import EPS32, MESHES, on, put
from flax import nnx

from jaxbench import mesh
from jaxbench.ops import dense

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("split_sum", [False, True], ids=["column", "row"])
def test_dot_and_its_gradients(mesh_name, split_sum):
    """`dense.dot` with the weight's output or its sum split over tensor ranks."""
    x, w = RNG.normal(size=(8, 16, 32)), RNG.normal(size=(64, 32))
    x, equation = (x, "BSF,DF->BSD") if split_sum else (RNG.normal(size=(8, 16, 64)), "BSD,DF->BSF")
    out_dims = "batch seq embed" if split_sum else "batch seq ffn"
    expected = np.einsum(equation, x, w)
    cotangent = RNG.normal(size=expected.shape)

    def product(x, w):
        if not split_sum:
            return dense.dot(equation, mesh.gather_seq(x), nnx.Param(w), out_dims)
        return mesh.scatter_seq(dense.dot(equation, x, nnx.Param(w), out_dims))

    with on(mesh_name):
        arrays = (
            put(x, "batch seq ffn" if split_sum else "batch shard_seq embed"),
            put(w, "embed ffn", mesh.WEIGHT),
        )
        weight = put(cotangent, "batch shard_seq embed" if split_sum else out_dims)
        out = jax.jit(product)(*arrays)
        grads = jax.jit(
            jax.grad(lambda x, w, c: jnp.sum(product(x, w) * c), argnums=(0, 1))
        )(*arrays, weight)  # fmt: skip
    a, b, c = *(part for part in equation.split("->")[0].split(",")), equation.split("->")[1]
    # 64 (or 128 tokens') products of numbers around 1 in fp32.
    np.testing.assert_allclose(out, expected, atol=100 * EPS32, rtol=0)
    dx, dw = np.einsum(f"{c},{b}->{a}", cotangent, w), np.einsum(f"{a},{c}->{b}", x, cotangent)
    np.testing.assert_allclose(grads[0], dx, atol=100 * EPS32, rtol=0)
    np.testing.assert_allclose(grads[1], dw, atol=200 * EPS32, rtol=0)


def test_unknown_dimension_is_an_error():
    with on("one device"), pytest.raises(KeyError):
        mesh.spec("batch sequence", mesh.ACTIVATION)
