"""Remat policies: which activations are saved for the backward pass. The others are recomputed."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxbench.ops.attention import KERNELS

SMALL = "small"
"""Name of activations that every policy saves: routing decisions, which could differ if they were
recomputed with another rounding, and statistics with one number per token or tensor."""


def save(x: jax.Array, name: str) -> jax.Array:
    """Names an activation for remat policies. The name is one of `execution.SAVEABLE`, or
    `SMALL`."""
    return checkpoint_name(x, name)


def recomputed(
    body: Callable,
    saved: frozenset[str] | None,
    *,
    in_order: bool = False,
    offloaded: frozenset[str] = frozenset(),
) -> Callable:
    """`body(x, operands)` under `jax.checkpoint`. The activations in `saved` are kept for the
    backward pass and the others are recomputed; None keeps everything.

    With `in_order` an optimization barrier on `x` delays the recomputation until the cotangent of
    the output is known. Without it XLA merges the forward pass and the recomputation if both are in
    one loop body, or it recomputes several bodies ahead of their backward passes. Either keeps
    activations in memory. The `operands`, which are weights, have no barrier, so that they can be
    gathered early.

    The name `attention` saves all results of a fused kernel's primitive (`attention.Kernel.saved`),
    because its backward kernel needs them. Activations that are in both `saved` and `offloaded` get
    the type of an array in host memory; `ops.layer_stack` moves them there.
    """
    if saved is None:
        return body
    named = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[*(saved - offloaded), SMALL],
        names_which_can_be_offloaded=[*offloaded],
        offload_src="device",
        offload_dst="pinned_host",
    )
    attention = {kernel.saved for kernel in KERNELS.values()}

    def policy(primitive, *args, **params):
        if primitive.name in attention:
            return "attention" in saved
        return named(primitive, *args, **params)

    return jax.checkpoint(body, policy=policy, prevent_cse=in_order and (True, False))


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
