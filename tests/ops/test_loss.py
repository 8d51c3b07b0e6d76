"""Cross entropy against its closed form in float64, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import EPS32, MESHES, on, put

from jaxbench import mesh
from jaxbench.ops import loss


def reference(hidden, head, targets):
    """Mean loss of tokens with a target, and gradients: d logits = (softmax - one hot) / tokens."""
    logits = hidden @ head
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    p = exp / exp.sum(-1, keepdims=True)
    picked = np.take_along_axis(p, targets[..., None], -1)[..., 0]
    counts = targets != loss.MASKED
    d_logits = (p - np.eye(head.shape[1])[targets]) * counts[..., None] / counts.sum()
    return (
        -np.log(picked)[counts].mean(),
        d_logits @ head.T,
        np.einsum("bsd,bsv->dv", hidden, d_logits),
    )


ONE, PARTS = 2**33, 512
"""Bytes of a stack of logit gradients: all chunks in one, or in parts."""

CASES = [
    *((name, 16, *case) for name in MESHES
      for case in ((4, ONE, True), (2048, ONE, False), (4, PARTS, False))),
    # A prime number of tokens: chunks of 24 or 32 with a padded last one.
    *((name, 37, 32, stack, masked) for name in ("one device", "fsdp")
      for stack in (ONE, PARTS) for masked in (False, True)),
]  # fmt: skip


@pytest.mark.parametrize(("mesh_name", "length", "chunk", "stack", "masked"), CASES)
def test_loss_and_gradients(mesh_name, length, chunk, stack, masked, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_TOKENS", chunk)
    monkeypatch.setattr(loss, "STACK_BYTES", stack)
    rng = np.random.default_rng(1)
    hidden, head = rng.normal(size=(8, length, 64)), rng.normal(size=(64, 24))
    targets = rng.integers(0, 24, size=(8, length))
    if masked:
        targets[rng.random((8, length)) < 0.3] = loss.MASKED

    def mean_loss(hidden, head, targets, scale=1.0):
        hidden, head = mesh.gather_seq(hidden), mesh.accumulating(head)
        return scale * loss.cross_entropy(hidden, head, targets, masked)

    with on(mesh_name):
        arrays = (
            put(hidden, "batch shard_seq embed"),
            put(head, "embed vocab", mesh.WEIGHT),
            put(targets, "batch seq", dtype=jnp.int32),
        )
        value = jax.jit(mean_loss)(*arrays)
        tripled, grads = jax.jit(jax.value_and_grad(mean_loss, argnums=(0, 1)))(*arrays, 3.0)
    expected, d_hidden, d_head = reference(hidden, head, targets)
    np.testing.assert_allclose(value, expected, rtol=10 * EPS32)
    np.testing.assert_allclose(tripled, 3 * expected, rtol=10 * EPS32)
    # Logits reach 30, so their exponentials carry an error of 30 eps; gradients are sums of these.
    for actual, exact in zip(grads, (d_hidden, d_head), strict=True):
        np.testing.assert_allclose(actual, 3 * exact, atol=300 * EPS32 * np.abs(exact).max())


@pytest.mark.parametrize("tokens", [1, 2047, 2048, 2049, 4096, 4099, 6144, 8198, 100003, 2**17 + 1])
def test_chunks_are_never_small(tokens):
    chunk = loss.chunk_tokens(tokens)
    count = -(-tokens // chunk)
    assert min(tokens, 1024) <= chunk <= 2048
    assert 0 <= count * chunk - tokens < 8 * count
    assert (count - 1) * chunk < tokens


@pytest.mark.parametrize("microbatches", [1, 2, 3, 6])
def test_a_share_of_the_loss_scales_bf16_gradients_without_bias(microbatches):
    """The cotangent 1/microbatches is no bf16 number: rounded to one, as 1/3 to 0.334, all
    gradients are 1.002 times too large."""
    draw = np.random.default_rng(0).normal
    with on("one device"):
        hidden, head = (jnp.asarray(draw(size=s), jnp.bfloat16) for s in ((2, 16, 64), (64, 24)))
        _, residuals = loss._forward(hidden, head, jnp.zeros((2, 16), jnp.int32), False, False)
        *scaled, _ = loss._backward(False, False, residuals, jnp.float32(1 / microbatches))
    for gradient, whole in zip(scaled, residuals, strict=True):
        exact = np.asarray(whole).astype(np.float64) / microbatches
        ratio = np.vdot(np.asarray(gradient).astype(np.float64), exact) / np.vdot(exact, exact)
        # Entries are rounded by up to 2^-9 each, with either sign. In a sum over 1,500 of them that
        # leaves a standard deviation of 2^-9 / 40 at most: this is four of them.
        assert ratio == pytest.approx(1, abs=2**-9 / 10)


def test_parts_of_a_stack_divide_its_chunks():
    gib = 2**30
    assert [loss._parts(20, size * gib) for size in (1, 8, 9, 17, 33, 500)] == [1, 1, 2, 4, 5, 20]


def test_large_logits_do_not_overflow():
    with on("one device"):
        hidden = jnp.full((1, 4, 8), 1e3)
        head = jnp.eye(8) * 1e3
        value = loss.cross_entropy(hidden, head, jnp.zeros((1, 4), jnp.int32))
    np.testing.assert_allclose(value, np.log(8), rtol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_largest_logit_and_partition_in_one_pass(scale):
    logits = scale * np.random.default_rng(0).normal(size=(64, 1000)).astype(np.float32)
    largest, partition = jax.jit(loss._largest_and_sum)(logits)
    np.testing.assert_array_equal(largest, logits.max(-1, keepdims=True))
    exact = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True)).sum(-1)
    # 1000 terms are added up in some order, each rescaled where a larger logit is found.
    np.testing.assert_allclose(partition[:, 0], exact, rtol=100 * EPS32)


def test_a_logit_that_is_no_number_is_seen():
    for place in (0, 7, 99):
        logits = np.zeros((1, 100), np.float32)
        logits[0, place] = np.nan
        assert np.isnan(loss._largest_and_sum(jnp.asarray(logits))[1]).all()
