"""Remat policies: activations that are saved for the backward pass; the others are recomputed."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxbench.ops.attention import KERNELS

SMALL = "small"
"""Name of activations that every policy saves: routing decisions, which could differ when they are
recomputed with another rounding, and statistics, one number per token or tensor."""


def save(x: jax.Array, name: str) -> jax.Array:
    """Names an activation for remat policies: one of `execution.SAVEABLE`, or `SMALL`."""
    return checkpoint_name(x, name)


def recomputed(
    body: Callable,
    saved: frozenset[str] | None,
    *,
    in_order: bool = False,
    offloaded: frozenset[str] = frozenset(),
) -> Callable:
    """`body(x, operands)` under `jax.checkpoint`: the activations in `saved` are kept for the
    backward pass, the others recomputed; None keeps everything.

    With `in_order` an optimization barrier on `x` delays the recomputation until the cotangent of
    the output is known. Without it XLA merges forward pass and recomputation where both are in one
    loop body, or recomputes several bodies ahead of their backward passes; either keeps activations
    in memory. The `operands`, weights, have no barrier, so that they can be gathered early.

    `attention` saves all results of a fused kernel's primitive (`attention.Kernel.saved`), which
    its backward kernel needs. Those of `saved` that are `offloaded` have the type of an array in
    the host's memory; `ops.blocks` moves them there.
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
    """The identity. In the backward pass the gradient of `x`, any array, is available only once
    those of the weights are."""
    return weights, x


@jax.custom_vjp
def await_gradients(x: Array, signal: Array) -> tuple[Array, Array]:
    """The identity. In the backward pass the gradient of `x` waits for that of `signal`, a scalar
    from `signal_gradients`, which is zero and is added to it: an optimization barrier would not do,
    since XLA drops its operands whose results are unused."""
    return x, signal


signal_gradients.defvjp(
    lambda *operands: (operands, None),
    lambda _, cotangents: jax.lax.optimization_barrier(cotangents),
)
await_gradients.defvjp(
    lambda *operands: (operands, None), lambda _, ct: (ct[0] + ct[1].astype(ct[0].dtype), ct[1])
)
