"""Blocks over stacked weights with a stash, beside `jax.lax.scan` without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbench.ops import remat, stash
from jaxbench.ops.blocks import apply_blocks


def block(x, weights, constants, shared):
    return layer(x, (weights, constants, shared))


def layer(x, operands):
    (a, b), constants, shared = operands
    hidden = remat.save(jnp.tanh(x @ a), "hidden")
    y = x + (hidden * constants) @ b * shared
    return y, jnp.sum(hidden)


@pytest.fixture
def arguments():
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def draw(*shape):
        return jax.random.normal(next(keys), shape)

    return draw(4, 8), (draw(3, 8, 6), draw(3, 6, 8)), draw(3, 6), draw(8)


def of_scan(x, weights, constants, shared):
    def step(x, operands):
        return block(x, *operands, shared)

    y, aux = jax.lax.scan(step, x, (weights, constants))
    return jnp.sum(y**2) + jnp.sum(aux**2)


def recomputed(saved, in_order=False):
    body = remat.recomputed(layer, saved, in_order=in_order)
    return lambda x, *operands: body(x, operands)


@pytest.mark.parametrize(
    ("saved", "in_order"),
    [(None, False), (frozenset(), False), (frozenset(), True), (frozenset({"hidden"}), True)],
)
def test_value_and_gradients_are_those_of_a_scan(saved, in_order, arguments):
    def of_blocks(*arguments):
        body = recomputed(saved, in_order)
        y, aux, filled = apply_blocks(body, *arguments, unrolled=saved is None)
        return jnp.sum(y**2) + jnp.sum(aux**2), filled

    gradients = jax.jit(jax.value_and_grad(of_blocks, argnums=(0, 1), has_aux=True))
    (value, filled), grads = gradients(*arguments)
    again = gradients(*arguments, jax.tree.map(jnp.ones_like, filled))
    expected = jax.jit(jax.value_and_grad(of_scan, argnums=(0, 1)))(*arguments)
    # The same operations, which a compiler may fuse otherwise (jax 0.12 does): 50 roundings of the
    # largest entry, since entries are sums that cancel.
    for actual, exact in zip(
        jax.tree.leaves((value, grads)), jax.tree.leaves(expected), strict=True
    ):
        atol = 50 * np.finfo(np.float32).eps * np.abs(exact).max()
        np.testing.assert_allclose(actual, exact, rtol=0, atol=atol)
    # The earlier contents of the stash do not matter.
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), again[1], grads))


def test_a_stash_holds_what_is_saved_and_no_weights(arguments):
    _, _, filled = apply_blocks(recomputed(frozenset({"hidden"})), *arguments)
    assert [slot.shape for slot in filled] == [(3, 4, 8), (3, 4, 6)]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_in_allocated_memory_is_a_scan(reverse):
    def step(carry, x):
        carry = 2 * carry + x["a"]
        return carry, {"sum": carry, "other": x["a"] - x["b"]}

    xs = {"a": jnp.arange(5.0), "b": jnp.arange(10.0).reshape(5, 2)}
    result = stash.scan_allocated(lambda _, *operands: step(*operands), 1.0, xs, reverse=reverse)
    assert jax.tree.all(
        jax.tree.map(jnp.array_equal, result, jax.lax.scan(step, 1.0, xs, reverse=reverse))
    )
    _, indices = stash.scan_allocated(lambda index, *_: (None, index), None, xs, reverse=reverse)
    np.testing.assert_array_equal(indices, range(5))
