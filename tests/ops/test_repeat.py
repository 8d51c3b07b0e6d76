"""Units over stacked weights with slots, beside a scan without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbench.ops import remat
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
    def of_repeat(x, weights, constants, shared, slots=None):
        y, said, slots = repeat(unit, saved, x, weights, constants, shared, slots)
        return jnp.sum(y**2) + jnp.sum(said**2), slots

    gradients = jax.jit(jax.value_and_grad(of_repeat, argnums=(0, 1), has_aux=True))
    (value, slots), found = gradients(*arguments)
    again = gradients(*arguments, jax.tree.map(jnp.ones_like, slots))
    expected = jax.jit(jax.value_and_grad(of_scan, argnums=(0, 1)))(*arguments)
    # The same operations, which a compiler may fuse otherwise.
    for ours, theirs in zip(
        jax.tree.leaves((value, found)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)
    # What was in the slots before does not matter.
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), again[1], found))


def test_slots_hold_what_is_saved_and_no_weights(arguments):
    _, _, slots = repeat(unit, frozenset({"hidden"}), *arguments)
    assert [slot.shape for slot in slots] == [(3, 4, 8), (3, 4, 6)]
