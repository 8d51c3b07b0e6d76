"""Remat policies: which activations are saved for the backward pass. The others are recomputed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxbench.ops.attention import IMPLEMENTATIONS

ALWAYS = "always"
"""The name of activations that every policy saves: routing decisions, which could differ if they
were recomputed with another rounding, and statistics with one number per token or tensor."""


def save(x: jax.Array, name: str) -> jax.Array:
    """Names an activation for remat policies. The name is one of `settings.SAVEABLE`, or
    `ALWAYS`."""
    return checkpoint_name(x, name)


@dataclass(frozen=True)
class Policy:
    """What the backward pass finds saved: the activations that are named in `saved`; None means
    all. Those that are also in `offloaded` wait in host memory."""

    saved: frozenset[str] | None
    offloaded: frozenset[str] = frozenset()

    def without_offload(self) -> "Policy":
        """This policy where the host's memory cannot be used: what would wait there is recomputed,
        except the input of a block, which then stays on the device."""
        return Policy(self.saved and self.saved - self.offloaded)


def checkpoint(
    apply: Callable, policy: Policy, *, in_order: bool = False, by_layer: bool = True
) -> Callable:
    """`jax.checkpoint` of `apply(x, weights, constants, common)`, which applies a block of layers.
    The first of the `weights` is the block.

    With `in_order` the recomputation waits for the cotangent of the output, and the gradient of x
    for the gradients of the weights. Without it XLA merges the forward pass and the recomputation
    if both are in one loop body. A block of more than two layers whose inputs are saved
    (`residual`) is recomputed layer by layer, unless `by_layer` is False.
    """
    if (saved := policy.saved) is None:
        return apply

    def whole(x: Array, weights: tuple, constants: Any, common: Any) -> tuple[Array, tuple]:
        if in_order:
            block, x = signal_gradients(weights[0], x)
            weights = block, *weights[1:]
        return apply(x, weights, constants, common)

    def checkpointed(x: Array, weights: tuple, *rest: Any) -> tuple[Array, tuple]:
        if by_layer and "residual" in saved and len(weights[0].layers) > 2:
            return _by_layer(apply, policy, x, weights, *rest)
        return _checkpointed(whole, policy, in_order)(x, weights, *rest)

    return checkpointed


def _by_layer(
    apply: Callable, policy: Policy, x: Array, weights: tuple, *rest: Any
) -> tuple[Array, tuple]:
    """Applies a block so that its layers are recomputed one by one, by calls of `apply` with
    `only=index`: Nemotron 3 Super in microbatches of 4 takes 59 GiB this way, and 123 GiB without.

    The recomputation of layer i waits for the weight gradients of layer i + 2, so that it can
    overlap with those of layer i + 1 and their reduce-scatter.
    """

    def layer(state: tuple[Array, Array], weights: tuple, constants: Any, common: Any, index: int):
        (x, signal), (block, *others) = state, weights
        block = jax.tree.map(lambda w: w, block)
        block.layers[index], signal = signal_gradients(block.layers[index], signal)
        x, aux = apply(x, (block, *others), constants, common, only=index)
        return await_gradients(x, signal), aux

    aux: tuple = ()
    signals = [jnp.zeros(()), jnp.zeros(())]
    for index in range(len(weights[0].layers)):
        compute = _checkpointed(partial(layer, index=index), policy, in_order=True)
        (x, signal), layer_aux = compute((x, signals[index]), weights, *rest)
        signals.append(signal)
        aux += layer_aux
    return x, aux


def _checkpointed(body: Callable, policy: Policy, in_order: bool) -> Callable:
    """`body(x, weights, constants, common)` under `jax.checkpoint`.

    With `in_order` `x` has an optimization barrier. The other arguments have none, so that weights
    can be gathered early.

    The name `attention` saves all results of a fused kernel's primitive
    (`attention.Implementation.saved_primitive`), because its backward kernel needs them.
    Activations that are offloaded get the type of an array in host memory; `ops.layer_stack` moves
    them there.
    """
    saved = policy.saved or frozenset()
    named = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[*(saved - policy.offloaded), ALWAYS],
        names_which_can_be_offloaded=[*policy.offloaded],
        offload_src="device",
        offload_dst="pinned_host",
    )
    attention_primitives = {kernel.saved_primitive for kernel in IMPLEMENTATIONS.values()}

    def save_named(primitive, *args, **params):
        if primitive.name in attention_primitives:
            return "attention" in saved
        return named(primitive, *args, **params)

    # For x, weights, constants and common.
    barriers = (True, False, False, False) if in_order else False
    return jax.checkpoint(body, policy=save_named, prevent_cse=barriers)


@jax.custom_vjp
def signal_gradients(weights: Any, x: Array) -> tuple[Any, Array]:
    """The identity. In the backward pass the gradient of `x`, which may be any array, is available
    only once the gradients of the weights are."""
    return weights, x


@jax.custom_vjp
def await_gradients(x: Array, signal: Array) -> tuple[Array, Array]:
    """The identity. In the backward pass the gradient of `x` waits for the gradient of `signal`, a
    scalar from `signal_gradients`. That gradient is zero, and we add it to the gradient of `x`. An
    optimization barrier would not work here, since XLA drops barrier operands whose results are
    unused."""
    return x, signal


signal_gradients.defvjp(
    lambda *operands: (operands, None),
    lambda _, cotangents: jax.lax.optimization_barrier(cotangents),
)
await_gradients.defvjp(
    lambda *operands: (operands, None), lambda _, ct: (ct[0] + ct[1].astype(ct[0].dtype), ct[1])
)
