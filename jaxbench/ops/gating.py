"""Gated activations between the two matmuls of an MLP or an expert."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxbench.ops.remat import save

CLAMP = 7.0
"""Bound on the inputs of `swiglu_clamped`."""


def swiglu_clamped(gate: Array, up: Array) -> Array:
    """g sigmoid(1.702 g) (u + 1), with g clamped to at most 7 and u to the range -7 to 7
    (GPT-OSS)."""
    gate = jnp.minimum(gate, CLAMP)
    return gate * jax.nn.sigmoid(1.702 * gate) * (jnp.clip(up, -CLAMP, CLAMP) + 1)


GATES: dict[str, Callable[[Array, Array], Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "swiglu_clamped": swiglu_clamped,
}
"""Activations of the gate and up projections, by their names in recipes."""


def gate(activation: Callable, gate: Array, up: Array, weights: Array | None = None) -> Array:
    """Applies an activation of `GATES` and multiplies by one weight per token, if `weights` are
    given. It computes in fp32 and returns the dtype of `gate`."""
    f32 = jnp.float32
    hidden = activation(gate.astype(f32), up.astype(f32))
    if weights is not None:
        hidden *= weights[..., None]
    return hidden.astype(gate.dtype)


def squared_relu(up: Float[Array, "*T F"], weights: Float[Array, "*T"]) -> Float[Array, "*T F"]:
    """relu(up)^2 times one weight per token, for experts. It computes in fp32 and returns the dtype
    of `up`. Remat policies can save `up`."""
    wide = save(up, "up").astype(jnp.float32)
    return (jnp.square(jax.nn.relu(wide)) * weights[..., None]).astype(up.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def gated(
    activation: Callable,
    gate_up: Float[Array, "*T 2 F"],
    weights: Float[Array, "*T"] | None = None,
    blocks: bool = False,
) -> Float[Array, "*T F"]:
    """Applies `gate` to the two halves of `gate_up`. `blocks` is true if a block-scaled matmul made
    them.

    Its residuals are the two halves, which remat policies save as `gate` and `up`. The backward
    pass recomputes the rest.
    """
    return _forward(activation, gate_up, weights, blocks)[0]


def _forward(activation, gate_up, weights, blocks):
    halves = save(gate_up[..., 0, :], "gate"), save(gate_up[..., 1, :], "up")
    return gate(activation, *halves, weights), (*halves, weights)


def _backward(activation, blocks, residuals, d_hidden):
    if blocks:
        return _separate_gradients(activation, residuals, d_hidden)
    d_gate, d_up, d_weights = jax.vjp(partial(gate, activation), *residuals)[1](d_hidden)
    # We pad and add instead of stacking: XLA does not fuse a concatenation with a reduction.
    return _half(d_gate, 0) + _half(d_up, 1), d_weights


def _separate_gradients(activation, residuals, d_hidden):
    """The gradients for a kernel that quantizes blocks, which reads `d_gate_up` from memory.

    Each computes its own exponential. If they shared one, XLA would compute it in the forward pass
    already, and keep it in fp32: 47 GiB in Llama 3.1 8B with four sequences on a GPU. In a stack
    each element is computed once, in a sum of padded halves twice.
    """
    first, *others = residuals

    def gradient(argument: int) -> Array:
        inputs = _opaque_copy(first, 1 + argument), *others
        return jax.vjp(partial(gate, activation), *inputs)[1](d_hidden)[argument]

    d_weights = None if residuals[2] is None else gradient(2)
    return jnp.stack([gradient(0), gradient(1)], axis=-2), d_weights


def _opaque_copy(x: Array, index: int) -> Array:
    """`x`, exact unless it overflows. XLA cannot merge it with a copy of another `index`."""
    factor = jax.lax.optimization_barrier(jnp.array(2.0**index, x.dtype))
    return x * factor * jnp.array(2.0**-index, x.dtype)


def _half(x: Array, index: int) -> Array:
    """Puts `[*T, F]` into half `index` of `[*T, 2, F]`; the other half is zero."""
    unchanged = [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x[..., None, :], [*unchanged, (index, 1 - index), (0, 0)])


gated.defvjp(_forward, _backward)
