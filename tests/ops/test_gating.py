"""Gated activations next to the plain formula in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbench.ops.gating import GATES, gated


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


FORMULAS = {
    "silu": lambda g, u: g / (1 + jnp.exp(-g)) * u,
    "gelu_tanh": lambda g, u: (
        0.5 * g * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (g + 0.044715 * g**3))) * u
    ),
    "swiglu_clamped": lambda g, u: (
        jnp.where(g > 7, 7.0, g) / (1 + jnp.exp(-1.702 * jnp.where(g > 7, 7.0, g)))
        * (jnp.where(u > 7, 7.0, jnp.where(u < -7, -7.0, u)) + 1)
    ),
}  # fmt: skip


def plain(formula, gate_up, weights):
    hidden = formula(gate_up[..., 0, :], gate_up[..., 1, :])
    return hidden if weights is None else hidden * weights[..., None]


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_value_and_gradients_are_those_of_the_formula(name, weighted, blocks, float64):
    activation = GATES[name]
    k_x, k_weights, k_y = jax.random.split(jax.random.key(0), 3)
    # Beyond the bounds of `swiglu_clamped` too.
    scale = 4 if name == "swiglu_clamped" else 1
    gate_up = scale * jax.random.normal(k_x, (3, 5, 2, 7))
    weights = jax.random.uniform(k_weights, (3, 5)) if weighted else None
    dy = jax.random.normal(k_y, (3, 5, 7))
    expected, pull = jax.vjp(lambda *x: plain(FORMULAS[name], *x), gate_up, weights)
    d_gate_up, d_weights = pull(dy)

    def single(x):
        return jax.tree.map(lambda a: a.astype(jnp.float32), x)

    hidden, pull = jax.vjp(partial(gated, activation, blocks=blocks), *single((gate_up, weights)))
    d_single, d_single_weights = pull(single(dy))
    # Some roundings of fp32, of values below 10.
    close = {"atol": 20 * np.finfo(np.float32).eps * 10, "rtol": 0}
    np.testing.assert_allclose(hidden, expected, **close)
    np.testing.assert_allclose(d_single, d_gate_up, **close)
    if weighted:
        np.testing.assert_allclose(d_single_weights, d_weights, **close)
