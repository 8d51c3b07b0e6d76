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
    """Names an activation for remat policies: one of `settings.SAVEABLE`, or `SMALL`."""
    return checkpoint_name(x, name)


def recomputed(body: Callable, saved: frozenset[str] | None, *, in_order: bool = False) -> Callable:
    """`body(x, operands)` recomputed in the backward pass, except for the activations in `saved`;
    None saves everything.

    With `in_order` its recomputation starts when the cotangent of its output has come: XLA would
    otherwise take it for the computation of the forward pass, where both are in one loop body, or
    recompute several bodies before it goes back through the last. Operands, the weights, wait for
    nothing: they may be gathered before.

    `attention` saves all results of a fused kernel's primitive (`attention.Kernel.saved`), which
    its backward kernel needs.
    """
    if saved is None:
        return body
    named = jax.checkpoint_policies.save_only_these_names(*saved, SMALL)
    attention = {kernel.saved for kernel in KERNELS.values()}

    def policy(primitive, *args, **params):
        if primitive.name in attention:
            return "attention" in saved
        return named(primitive, *args, **params)

    return jax.checkpoint(body, policy=policy, prevent_cse=in_order and (True, False))


@jax.custom_vjp
def signal_gradients(weights: Any, x: Array) -> tuple[Any, Array]:
    """The arguments; the gradient of `x`, any array, comes after those of the weights."""
    return weights, x


@jax.custom_vjp
def await_gradients(x: Array, signal: Array) -> tuple[Array, Array]:
    """The arguments; the gradient of `x` comes after that of `signal`, a zero, which is added to it
    since XLA removes from an optimization barrier what is not used behind it."""
    return x, signal


signal_gradients.defvjp(
    lambda *operands: (operands, None),
    lambda _, cotangents: jax.lax.optimization_barrier(cotangents),
)
await_gradients.defvjp(
    lambda *operands: (operands, None), lambda _, ct: (ct[0] + ct[1].astype(ct[0].dtype), ct[1])
)
