"""Attention by cuDNN's fused kernels, through JAX."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxbench.jax_internals import (
    cudnn_attention,
    cudnn_attention_backward,
    cudnn_attention_forward,
)
from jaxbench.ops import latency
from jaxbench.ops.attention.scores import Scores
from jaxbench.recipe.attention import Attention
from jaxbench.xla.hlo import Work
from jaxbench.xla.instruction import Instruction, Scope

FORWARD = "dot_product_attention_fwd_wrapper"
"""JAX's primitive of the forward kernel. Its results are the attention output and the softmax
statistics: saved, the backward kernel needs no second forward pass."""

MAX_HEAD_DIM, HEAD_DIM_STEP = 256, 8
"""Supported head dims on Hopper and later: multiples of the second up to the first."""

PRODUCTS = {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 2}
"""Targets of the custom calls, and how many matrix products each has over the head dim of keys, and
again over that of values: forward QK^T and PV; backward dQ and dK, dP and dV. The scores that the
backward kernel recomputes are not counted."""


WINDOW = r'"sliding_window_length":\s*"?(\d+)'
"""Pattern of the sliding window in a call's attributes; 0 without one."""

TILE = 128
"""Keys, and queries, of a tile of the kernels: they compute a window in whole tiles."""


def call(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scores: Scores,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of one device's heads over whole sequences."""
    batch, length, heads, head_dim = query.shape
    per_feature = 2 * batch * heads * length * min(length, scores.window or length)
    with latency.of_product(per_feature * (head_dim + value.shape[-1]), "bf16"):
        if sinks is None:
            return cudnn_attention(query, key, value, scores.scale, scores.window)
        return _with_sinks(query, key, value, sinks, scores.scale, scores.window)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _with_sinks(query, key, value, sinks, scale, window):
    """Attention with sinks, which the kernels do not have.

    With l the log-sum-exp of a query's scores, a sink s scales the output by
    exp(l) / (exp(l) + exp(s)) = sigmoid(l - s). The backward kernel is given log(exp(l) + exp(s))
    and the scaled output in place of the results of the forward kernel.
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
    """(output, log-sum-exp) of a softmax over the scores and a sink, from those without sinks."""
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
    (d_out . out). `out` and `statistics` are results of `add_sinks`."""
    weight = jnp.exp(sinks[:, None] - statistics).swapaxes(1, 2)
    products = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    return -jnp.sum(weight * products, axis=(0, 1))


def refusal(cfg: Attention, length: int) -> str | None:
    """Reason why the kernels cannot compute an attention mixer; None if they can."""
    for width in cfg.score_widths:
        if width % HEAD_DIM_STEP or width > MAX_HEAD_DIM:
            return (
                f"heads of {width} features: cuDNN attention takes multiples of {HEAD_DIM_STEP} "
                f"up to {MAX_HEAD_DIM}"
            )
    if length % 2:
        return f"batch.sequence_length = {length}: cuDNN attention takes even lengths"
    return None


def work(i: Instruction, scope: Scope) -> Work:
    """Work of a call: 2 B N S^2 H FLOPs per product, without subtracting the causal mask.

    A sliding window counts as more, but shorter sequences with as many tokens in all, so short that
    under a causal mask a query sees on average as many keys as the tiles of its window have.
    """
    dtype, (batch, length, heads, head_dim) = scope[i.operands[0]].arrays[0]
    _, (_, key_length, _, value_dim) = scope[i.operands[2]].arrays[0]
    tokens = batch * length
    if window := int(i.attribute(WINDOW) or 0):
        # Under the causal mask a query sees half of a sequence's keys on average.
        length = key_length = min(length, 2 * TILE * (-(-window // TILE) + 1))
    flops = PRODUCTS[i.target] * 2 * tokens * heads * key_length * (head_dim + value_dim)
    backward = i.target.endswith("Backward")
    sizes = (-(-tokens // length), heads, length, (head_dim + value_dim) // 2)
    return Work("attention", dtype, flops, sizes, backward)
