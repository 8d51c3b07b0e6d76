"""Units over stacked weights with slots, beside a scan without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbench.ops import remat, slots
from jaxbench.ops.repeat import repeat


def unit(x, weights, constants, shared):
    a, b = weights
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
        return unit(x, *operands, shared)

    y, said = jax.lax.scan(step, x, (weights, constants))
    return jnp.sum(y**2) + jnp.sum(said**2)


@pytest.mark.parametrize("saved", [None, frozenset(), frozenset({"hidden"})])
def test_value_and_gradients_are_those_of_a_scan(saved, arguments):
    def of_repeat(x, weights, constants, shared, held=None):
        y, said, held = repeat(unit, saved, x, weights, constants, shared, held)
        return jnp.sum(y**2) + jnp.sum(said**2), held

    gradients = jax.jit(jax.value_and_grad(of_repeat, argnums=(0, 1), has_aux=True))
    (value, held), found = gradients(*arguments)
    again = gradients(*arguments, jax.tree.map(jnp.ones_like, held))
    expected = jax.jit(jax.value_and_grad(of_scan, argnums=(0, 1)))(*arguments)
    # The same operations, which a compiler may fuse otherwise.
    for ours, theirs in zip(
        jax.tree.leaves((value, found)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)
    # What was in the slots before does not matter.
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), again[1], found))


def test_slots_hold_what_is_saved_and_no_weights(arguments):
    _, _, held = repeat(unit, frozenset({"hidden"}), *arguments)
    assert [slot.shape for slot in held] == [(3, 4, 8), (3, 4, 6)]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_in_allocated_memory_is_a_scan(reverse):
    def step(carry, x):
        carry = 2 * carry + x["a"]
        return carry, {"sum": carry, "other": x["a"] - x["b"]}

    xs = {"a": jnp.arange(5.0), "b": jnp.arange(10.0).reshape(5, 2)}
    seen = slots.scan(lambda _, *now: step(*now), 1.0, xs, reverse=reverse)
    assert jax.tree.all(
        jax.tree.map(jnp.array_equal, seen, jax.lax.scan(step, 1.0, xs, reverse=reverse))
    )
    _, indices = slots.scan(lambda index, *_: (None, index), None, xs, reverse=reverse)
    np.testing.assert_array_equal(indices, range(5))
