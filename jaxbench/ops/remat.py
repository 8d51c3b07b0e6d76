"""Which activations the backward pass finds, and which it computes again."""

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxbench.ops.attention import KERNELS

SMALL = "small"
"""The name of what every policy keeps: routing decisions, which made again with another rounding
would differ, and statistics, a number for a token or a tensor that took all of it to make."""


def save(x: jax.Array, name: str) -> jax.Array:
    """Names an activation, so that a remat policy can keep it: one of `settings.SAVEABLE`, or
    `SMALL`."""
    return checkpoint_name(x, name)


def recomputed(body, saved: frozenset[str] | None):
    """`body` recomputed in the backward pass, except for the activations in `saved`; None keeps
    everything.

    A fused attention kernel's output is kept where the kernel makes it, together with what its
    backward kernel needs (`attention.Kernel.saved`).
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
