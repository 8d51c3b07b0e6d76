"""Gated activations between the two products of an MLP or an expert."""

from collections.abc import Callable
from enum import IntEnum
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxbench.ops.duplicated import Duplicated, opaque_copy
from jaxbench.ops.remat import save

CLAMP = 7.0
"""Bound of the inputs of `swiglu_clamped`."""


def swiglu_clamped(gate: Array, up: Array) -> Array:
    """g sigmoid(1.702 g) (u + 1), with g at most 7 and u from -7 to 7 (GPT-OSS)."""
    gate = jnp.minimum(gate, CLAMP)
    return gate * jax.nn.sigmoid(1.702 * gate) * (jnp.clip(up, -CLAMP, CLAMP) + 1)


GATES: dict[str, Callable[[Array, Array], Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "swiglu_clamped": swiglu_clamped,
}
"""Activations of gate and up projection, by their names in recipes."""


class Copy(IntEnum):
    """Indices of `opaque_copy`: each is one recomputation from `gate` that XLA must not merge with
    another one, since it would write the merged result to memory. Each gradient has one copy to be
    cast and one for its amax."""

    HIDDEN_AMAX = 1
    GATE_CAST = 2
    UP_CAST = 3
    GATE_AMAX = 4
    UP_AMAX = 5
    WEIGHTS = 6


def gate(activation: Callable, gate: Array, up: Array, weights: Array | None = None) -> Array:
    """An activation of `GATES`, times one weight per token where given; computed in fp32, returned
    in the dtype of `gate`."""
    f32 = jnp.float32
    hidden = activation(gate.astype(f32), up.astype(f32))
    if weights is not None:
        hidden *= weights[..., None]
    return hidden.astype(gate.dtype)


def squared_relu(up: Float[Array, "*T F"], weights: Float[Array, "*T"]) -> Float[Array, "*T F"]:
    """relu(up)^2 times one weight per token; computed in fp32, returned in the dtype of `up`, which
    remat policies save."""
    wide = save(up, "up").astype(jnp.float32)
    return (jnp.square(jax.nn.relu(wide)) * weights[..., None]).astype(up.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated(
    activation: Callable, gate_up: Duplicated, weights: Float[Array, "*T"] | None = None
) -> Duplicated:
    """`gate` of the two halves of `[*T, 2, F]`, as `[*T, F]`, between two products.

    Its residuals are the halves, which remat policies save as `gate` and `up`; the backward pass
    recomputes the rest.
    """
    return _forward(activation, gate_up, weights)[0]


def _forward(activation, gate_up, weights):
    halves = save(gate_up.value[..., 0, :], "gate"), save(gate_up.value[..., 1, :], "up")
    first, up = halves
    hidden = gate(activation, first, up, weights)
    for_amax = gate(activation, opaque_copy(first, Copy.HIDDEN_AMAX), up, weights)
    return Duplicated(hidden, for_amax), (*halves, weights)


def _backward(activation, residuals, d_hidden):
    first, up, weights = residuals

    def gradient(copy: Copy, argument: int) -> Array:
        inputs = opaque_copy(first, copy), up, weights
        return jax.vjp(partial(gate, activation), *inputs)[1](d_hidden.value)[argument]

    def gradients(gate_copy: Copy, up_copy: Copy) -> Array:
        # Padded and added, not stacked: XLA fuses no concatenation with a reduction.
        return _half(gradient(gate_copy, 0), 0) + _half(gradient(up_copy, 1), 1)

    d_weights = None if weights is None else gradient(Copy.WEIGHTS, 2)
    to_cast = gradients(Copy.GATE_CAST, Copy.UP_CAST)
    return Duplicated(to_cast, gradients(Copy.GATE_AMAX, Copy.UP_AMAX)), d_weights


def _half(x: Array, index: int) -> Array:
    """`[*T, F]` as half `index` of `[*T, 2, F]`; the other half is zeros."""
    unchanged = [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x[..., None, :], [*unchanged, (index, 1 - index), (0, 0)])


gated.defvjp(_forward, _backward)
