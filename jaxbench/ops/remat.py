"""Remat policies: activations that are saved for the backward pass; the others are recomputed."""

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxbench.ops.attention import KERNELS

SMALL = "small"
"""Name of activations that every policy saves: routing decisions, which could differ when they are
recomputed with another rounding, and statistics, one number per token or tensor."""


def save(x: jax.Array, name: str) -> jax.Array:
    """Names an activation for remat policies: one of `settings.SAVEABLE`, or `SMALL`."""
    return checkpoint_name(x, name)


def recomputed(body, saved: frozenset[str] | None):
    """`body` recomputed in the backward pass, except for the activations in `saved`; None saves
    everything.

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

    return jax.checkpoint(body, policy=policy, prevent_cse=False)
