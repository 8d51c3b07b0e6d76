"""The loop over layers against the plain loop of its docstring."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import mesh_of, tiny_run

from jaxbench.ops.layer_stack import LayerLoop
from jaxbench.ops.remat import Policy, checkpoint, save


def layer(x, weights, constants, common):
    """One layer with an activation that can be saved."""
    up = save(x @ weights[0], "up")
    return x + jnp.tanh(up) * constants * common, (up.mean(),)


def plain(x, weights, constants, common, policy):
    aux = []
    for index in range(len(constants)):
        here = jax.tree.map(lambda leaf, i=index: leaf[i], (weights, constants))
        x, of_layer = checkpoint(layer, policy)(x, *here, common)
        aux.append(of_layer)
    return x, jax.tree.map(lambda *layers: jnp.stack(layers), *aux)


@pytest.mark.parametrize("saved", [None, frozenset(), frozenset({"up"})], ids=str)
@pytest.mark.parametrize("blocks", [1, 3])
def test_the_loop_computes_what_a_plain_loop_does(saved, blocks):
    rng, policy = np.random.default_rng(0), Policy(saved)
    weights = (jnp.asarray(rng.normal(size=(blocks, 8, 8)), jnp.float32),)
    x, constants = jnp.asarray(rng.normal(size=(4, 8)), jnp.float32), jnp.arange(1.0, blocks + 1)

    def value(scan, x, weights):
        y, (means,) = scan(x, weights, constants, jnp.float32(0.5))
        return jnp.sum(y**2) + jnp.sum(means)

    def by_loop(x, weights, constants, common):
        loop = LayerLoop()
        result = loop.scan(layer, x, weights, constants, common, policy)
        assert [leaf.shape for stash in loop.written for leaf in stash][:1] == (
            [] if saved is None else [(blocks, 4, 8)]
        )
        return result

    with mesh_of(tiny_run()):
        actual, expected = (
            jax.jit(jax.value_and_grad(lambda *a, s=scan: value(s, *a), argnums=(0, 1)))(x, weights)
            for scan in (by_loop, partial(plain, policy=policy))
        )
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        # Sums of up to 32 terms in another order.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
