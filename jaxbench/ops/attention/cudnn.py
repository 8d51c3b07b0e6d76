"""Attention by cuDNN's fused kernels, called through JAX."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxbench import mesh
from jaxbench.jax_internals import (
    cudnn_attention,
    cudnn_attention_backward,
    cudnn_attention_forward,
)
from jaxbench.ops.implementations import Task, latency_hint

FORWARD_PRIMITIVE = "dot_product_attention_fwd_wrapper"
"""JAX's primitive of the forward kernel. Its results are the attention output and the softmax
statistics. If both are saved, the backward kernel needs no second forward pass."""

HEAD_DIM_STEP = 8
"""Head dims must be multiples of this."""

HEAD_DIMS = {9: 256, 10: 192}
"""The largest head dim for which there are forward and backward kernels, by major compute
capability; 128 for all others (cuDNN 9.28)."""

WIDE, NARROW = 192, 128
"""The head dim of queries and keys, and the head dim of values. On compute capability 10.x there is
no backward kernel for any other head dims above 128."""

CALLS = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
"""The targets of the custom calls, forward and backward."""


def call(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scale: float,
    window: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of one device's heads over whole sequences."""
    batch, length, heads, _ = query.shape
    # All pairs of positions count, also those above the diagonal, which the kernel skips: no kernel
    # reaches the peak that `latency_hint` assumes.
    flops_per_feature = 2 * batch * heads * length * min(length, window or length)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        with latency_hint(flops_per_feature * (key.shape[-1] + value.shape[-1]), "bf16"):
            if sinks is None:
                return cudnn_attention(query, key, value, scale, window)
            return _with_sinks(query, key, value, sinks, scale, window)

    if key.shape[-1] > NARROW and (mesh.capability() or (0, 0))[0] == 10:
        return by_parts(attend, query, key, value)
    return attend(query, key, value)


def by_parts(
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    query: Float[Array, "B S N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
) -> Float[Array, "B S N V"]:
    """Attention by several calls of `attend`, each with queries and keys of `WIDE` features and
    values of `NARROW` features.

    Each call gets all queries and keys, padded with zeros, and a part of the values' features. This
    is possible because output features do not depend on one another. The gradients of queries and
    keys from all calls add up.
    """
    width = value.shape[-1]
    query, key = (_padded(x, WIDE) for x in (query, key))
    parts = [_padded(value[..., i : i + NARROW], NARROW) for i in range(0, width, NARROW)]
    return jnp.concatenate([attend(query, key, part) for part in parts], axis=-1)[..., :width]


def _padded(x: Array, width: int) -> Array:
    return jnp.pad(x, [*[(0, 0)] * 3, (0, width - x.shape[-1])])


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _with_sinks(query, key, value, sinks, scale, window):
    """Attention with sinks. The kernels have no sinks, so we add them to their results.

    Let l be the log-sum-exp of a query's scores. Then a sink s scales the output by exp(l) /
    (exp(l) + exp(s)) = sigmoid(l - s). In place of the results of the forward kernel, the backward
    kernel gets log(exp(l) + exp(s)) and the scaled output.
    """
    return _forward_with_sinks(query, key, value, sinks, scale, window)[0]


def _forward_with_sinks(query, key, value, sinks, scale, window):
    out, statistics = cudnn_attention_forward(query, key, value, scale, window)
    scaled, with_sink = add_sinks(out, statistics, sinks)
    return scaled, ((query, key, value), (scaled, with_sink), sinks)


def _backward_with_sinks(scale, window, residuals, d_out):
    operands, results, sinks = residuals
    gradients = cudnn_attention_backward(operands, results, d_out, scale, window)
    return *gradients, gradient_of_sinks(*results, sinks, d_out)


_with_sinks.defvjp(_forward_with_sinks, _backward_with_sinks)


def add_sinks(
    out: Float[Array, "B S N H"], statistics: Float[Array, "B N S"], sinks: Float[Array, " N"]
) -> tuple[Float[Array, "B S N H"], Float[Array, "B N S"]]:
    """Adds a sink to a softmax without one. Takes the output and the log-sum-exp without sinks and
    returns (output, log-sum-exp) with the sink."""
    share = jax.nn.sigmoid(statistics - sinks[:, None]).swapaxes(1, 2)
    scaled = (out.astype(jnp.float32) * share[..., None]).astype(out.dtype)
    return scaled, jnp.logaddexp(statistics, sinks[:, None])


def gradient_of_sinks(
    out: Float[Array, "B S N H"],
    statistics: Float[Array, "B N S"],
    sinks: Float[Array, " N"],
    d_out: Float[Array, "B S N H"],
) -> Float[Array, " N"]:
    """The gradient of each sink: minus the sum over queries of the sink's softmax weight times
    (d_out . out). `out` and `statistics` are the results of `add_sinks`."""
    weight = jnp.exp(sinks[:, None] - statistics).swapaxes(1, 2)
    products = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    return -jnp.sum(weight * products, axis=(0, 1))


def refusal(task: Task) -> str | None:
    """Why the kernels cannot compute the attention of a model; None if they can."""
    cfg, capability = task.cfg.attention_mixer, task.capability
    assert cfg is not None
    most = HEAD_DIMS.get(capability[0], 128) if capability else max(HEAD_DIMS.values())
    on = f" on compute capability {capability[0]}.{capability[1]}" if capability else ""
    for width in cfg.score_widths:
        if width % HEAD_DIM_STEP or width > most:
            return (
                f"heads of {width} features: cuDNN attention takes multiples of {HEAD_DIM_STEP} "
                f"up to {most}{on}"
            )
    if capability and capability < (9, 0) and len(set(cfg.score_widths)) > 1:
        widths = " and ".join(map(str, cfg.score_widths))
        return f"keys and values of {widths} features: cuDNN attention takes one width{on}"
    if task.length % 2:
        return f"batch.sequence_length = {task.length}: cuDNN attention takes even lengths"
    return None
