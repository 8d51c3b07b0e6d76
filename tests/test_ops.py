"""Operators against references in numpy and float64, and each mesh against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import mesh_of, tiny_run

from jaxbench import mesh, ops, softcap
from jaxbench.config import Execution

EPS32 = np.finfo(np.float32).eps
RNG = np.random.default_rng(0)
MESHES = {
    "one device": (),
    "data": ("batch.microbatch=1",),
    "fsdp": ("parallelism.fsdp=8",),
    "tensor": ("parallelism.tensor=4",),
    "context": ("parallelism.context=4",),
    "all": ("parallelism.fsdp=2", "parallelism.context=2", "parallelism.tensor=2"),
}


def on(mesh_name: str):
    return mesh_of(tiny_run(*MESHES[mesh_name], devices=1 if mesh_name == "one device" else 8))


def put(x, dims: str, rules=mesh.ACTIVATION, dtype=jnp.float32):
    return jax.device_put(jnp.asarray(x, dtype), mesh.spec(dims, rules))


def attention_reference(q, k, v, cap=None):
    """Causal grouped-query attention in float64, one query position at a time."""
    batch, length, heads, dim = q.shape
    out = np.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            group = h // (heads // k.shape[2])
            for t in range(length):
                scores = k[b, : t + 1, group] @ q[b, t, h] / np.sqrt(dim)
                if cap is not None:
                    scores = cap * np.tanh(scores / cap)
                weights = np.exp(scores - scores.max())
                out[b, t, h] = weights / weights.sum() @ v[b, : t + 1, group]
    return out


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("cap", [None, 2.0], ids=["plain", "capped"])
def test_attention_and_its_gradient(mesh_name, cap, monkeypatch):
    monkeypatch.setattr(softcap, "BLOCK", 4)
    q, k, v = (RNG.normal(size=(8, 16, heads, 8)) for heads in (8, 4, 4))
    cotangent = RNG.normal(size=q.shape)

    def loss(q, k, v, cotangent):
        return jnp.sum(ops.attention(q, k, v, Execution(), cap) * cotangent)

    with on(mesh_name):
        dims = "batch seq heads head_dim"
        arrays = [put(x, dims) for x in (q, k, v, cotangent)]
        out = jax.jit(ops.attention, static_argnums=(3, 4))(*arrays[:3], Execution(), cap)
        grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)
    # Sums of at most 16 products of numbers around 1, and a softmax: a few dozen roundings.
    np.testing.assert_allclose(out, attention_reference(q, k, v, cap), atol=50 * EPS32, rtol=0)
    # The gradient along a random direction against central differences of the float64 reference.
    directions = [RNG.normal(size=x.shape) for x in (q, k, v)]
    step = 1e-5
    ends = [
        np.sum(
            attention_reference(
                *(x + s * d for x, d in zip((q, k, v), directions, strict=True)), cap
            )
            * cotangent
        )
        for s in (step, -step)
    ]
    terms = [np.asarray(g, np.float64) * d for g, d in zip(grads, directions, strict=True)]
    along, size = (sum(f(t).sum() for t in terms) for f in (np.asarray, np.abs))
    # One rounding of each term; the differences themselves are exact to 1e-9.
    np.testing.assert_allclose(along, (ends[0] - ends[1]) / (2 * step), atol=EPS32 * size, rtol=0)


@pytest.mark.parametrize("mesh_name", MESHES)
def test_embedding_and_its_gradient(mesh_name):
    table = RNG.normal(size=(24, 64))
    tokens = RNG.integers(0, 24, size=(8, 16))
    cotangent = RNG.normal(size=(8, 16, 64))

    def loss(table, tokens, cotangent):
        return jnp.sum(ops.embedding(table, tokens, jnp.float32) * cotangent)

    with on(mesh_name):
        arrays = (
            put(table, "vocab embed", mesh.TABLE),
            put(tokens, "batch seq", dtype=jnp.int32),
            put(cotangent, "batch shard_seq embed"),
        )
        out = jax.jit(ops.embedding, static_argnums=2)(*arrays[:2], jnp.float32)
        grad = jax.jit(jax.grad(loss))(*arrays)
    np.testing.assert_array_equal(out, table.astype(np.float32)[tokens])
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, cotangent)
    np.testing.assert_allclose(grad, expected, atol=20 * EPS32, rtol=0)


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("split_sum", [False, True], ids=["column", "row"])
def test_dot_and_its_gradients(mesh_name, split_sum):
    """`ops.dot` with the weight's output or its sum split over tensor ranks."""
    x, w = RNG.normal(size=(8, 16, 32)), RNG.normal(size=(64, 32))
    x, equation = (x, "BSF,DF->BSD") if split_sum else (RNG.normal(size=(8, 16, 64)), "BSD,DF->BSF")
    out_dims = "batch seq embed" if split_sum else "batch seq ffn"
    expected = np.einsum(equation, x, w)
    cotangent = RNG.normal(size=expected.shape)

    def product(x, w):
        if not split_sum:
            return ops.dot(equation, mesh.gather_seq(x), nnx.Param(w), out_dims)
        return mesh.shard(ops.dot(equation, x, nnx.Param(w), out_dims), "batch shard_seq embed")

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


def test_bf16_attention_rounds_no_more_than_its_dtype():
    q, k, v = (
        np.asarray(jnp.asarray(RNG.normal(size=(2, 16, h, 8)), jnp.bfloat16)) for h in (4, 2, 2)
    )
    with on("one device"):
        out = ops.attention(*(jnp.asarray(x) for x in (q, k, v)), Execution())
    exact = attention_reference(*(x.astype(np.float64) for x in (q, k, v)))
    # Weights and result are rounded to 8 bits each; scores and sums are fp32.
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=3 * 2**-8 * np.abs(v).max())


def test_capped_attention_needs_memory_linear_in_the_sequence():
    """Temporaries of the compiled loss and gradients, at twice and four times the sequence."""
    sizes = []
    for length in (1024, 2048, 4096):
        shapes = [jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32) for heads in (2, 1, 1)]

        def loss(q, k, v):
            return jnp.sum(softcap.attention(q, k, v, 30.0) ** 2)

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert 0 < sizes[2] - sizes[1] <= 2.1 * (sizes[1] - sizes[0])
    # One head's scores alone would be 64 MiB.
    assert sizes[2] < 16 * 2**20


def test_unknown_dimension_is_an_error():
    with on("one device"), pytest.raises(KeyError):
        mesh.spec("batch sequence", mesh.ACTIVATION)
