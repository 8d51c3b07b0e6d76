"""Attention against a loop in float64, on every mesh, and who computes it."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import EPS32, MESHES, attention_reference, on, put
from tiny import tiny_run

from jaxbench.errors import RecipeError
from jaxbench.ops.attention import KERNELS, attend, blocks, choose
from jaxbench.recipe.settings import Execution

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("cap", [None, 2.0], ids=["plain", "capped"])
def test_attention_and_its_gradient(mesh_name, cap, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 4)
    q, k, v = (RNG.normal(size=(8, 16, heads, 8)) for heads in (8, 4, 4))
    cotangent = RNG.normal(size=q.shape)
    kernel = "xla" if cap is None else "blocks"

    def loss(q, k, v, cotangent):
        return jnp.sum(attend(q, k, v, kernel, cap) * cotangent)

    with on(mesh_name):
        dims = "batch seq heads head_dim"
        arrays = [put(x, dims) for x in (q, k, v, cotangent)]
        out = jax.jit(attend, static_argnums=(3, 4))(*arrays[:3], kernel, cap)
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


def test_bf16_attention_rounds_no_more_than_its_dtype():
    q, k, v = (
        np.asarray(jnp.asarray(RNG.normal(size=(2, 16, h, 8)), jnp.bfloat16)) for h in (4, 2, 2)
    )
    with on("one device"):
        out = attend(*(jnp.asarray(x) for x in (q, k, v)), "xla")
    exact = attention_reference(*(x.astype(np.float64) for x in (q, k, v)))
    # Weights and result are rounded to 8 bits each; scores and sums are fp32.
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=3 * 2**-8 * np.abs(v).max())


def test_capped_attention_needs_memory_linear_in_the_sequence():
    """Temporaries of the compiled loss and gradients, at twice and four times the sequence."""
    sizes = []
    for length in (1024, 2048, 4096):
        shapes = [jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32) for heads in (2, 1, 1)]

        def loss(q, k, v):
            return jnp.sum(blocks.call(q, k, v, 30.0) ** 2)

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert 0 < sizes[2] - sizes[1] <= 2.1 * (sizes[1] - sizes[0])
    # One head's scores alone would be 64 MiB.
    assert sizes[2] < 16 * 2**20


def test_every_kernel_has_a_name_that_a_recipe_can_ask_for():
    asked = {name for name, kernel in KERNELS.items() if not kernel.capped}
    hints = typing.get_type_hints(Execution)
    assert asked == set(typing.get_args(hints["attention"])) - {"auto"}


@pytest.mark.parametrize(
    ("change", "platform", "message"),
    [
        ("execution.attention=cudnn", "cpu", "attention = cudnn does not run on a cpu"),
        (
            "model.attention.head_dim=100",
            "gpu",
            "model.attention.head_dim = 100: cuDNN attention takes multiples of 8",
        ),
        ("model.attention.head_dim=264", "gpu", "up to 256; or execution.attention=xla"),
        ("batch.sequence_length=33", "gpu", "takes even lengths"),
    ],
)
def test_what_no_kernel_can_do_is_a_mistake(change, platform, message):
    run = tiny_run(change)
    with pytest.raises(RecipeError, match=message):
        choose(run.execution, run.model, run.batch.sequence_length, platform)
