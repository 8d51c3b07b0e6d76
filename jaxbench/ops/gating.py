"""Gated activations: what a feed-forward layer has between its two products."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxbench.ops.remat import save
from jaxbench.ops.twice import Twice, apart


def gate(activation: Callable, gate: Array, up: Array, weights: Array | None = None) -> Array:
    """act(gate) * up in fp32, in the dtype of `gate`; times a weight for each row, if there are
    any."""
    f32 = jnp.float32
    hidden = activation(gate.astype(f32)) * up.astype(f32)
    if weights is not None:
        hidden *= weights[..., None]
    return hidden.astype(gate.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated(
    activation: Callable, gate_up: Twice, weights: Float[Array, "*rows"] | None = None
) -> Twice:
    """`gate` of the halves of `[*rows, 2, F]`, as `[*rows, F]`, for a product and from one.

    Keeps the halves (`gate`, `up`), and makes all else again from them.
    """
    return _forward(activation, gate_up, weights)[0]


def _forward(activation, gate_up, weights):
    halves = save(gate_up.value[..., 0, :], "gate"), save(gate_up.value[..., 1, :], "up")
    first, up = halves
    hidden = Twice(
        gate(activation, first, up, weights), gate(activation, apart(first, 1), up, weights)
    )
    return hidden, (*halves, weights)


def _backward(activation, residuals, d_hidden):
    first, up, weights = residuals

    def gradient(way: int, argument: int) -> Array:
        made = apart(first, way), up, weights
        return jax.vjp(partial(gate, activation), *made)[1](d_hidden.value)[argument]

    def gradients(way: int) -> Array:
        # Not stacked: XLA fuses a concatenation with no reduction.
        return _half(gradient(way, 0), 0) + _half(gradient(way + 1, 1), 1)

    d_weights = None if weights is None else gradient(6, 2)
    return Twice(gradients(2), gradients(4)), d_weights


def _half(x: Array, which: int) -> Array:
    """`[*rows, F]` as one of the halves of `[*rows, 2, F]`, whose other one is zeros."""
    around = [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x[..., None, :], [*around, (which, 1 - which), (0, 0)])


gated.defvjp(_forward, _backward)
