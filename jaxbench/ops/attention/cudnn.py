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
"""Targets of the compiled calls, with how many products each has of the width of keys, and as many
of that of values: QK^T and PV forward, and two gradients of both backward. The scores that the
backward kernel computes again are not counted."""


WINDOW = r'"sliding_window_length":\s*"?(\d+)'
"""Pattern of a compiled call's attribute: its window, 0 without."""

TILE = 128
"""Keys and queries of a tile of the kernels' work: a window is in whole tiles."""


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
    """Attention with sinks, which the kernels lack.

    A sink s beside scores of the logarithmic sum l scales the output by exp(l) / (exp(l) + exp(s))
    = sigmoid(l - s). The backward kernel takes log(exp(l) + exp(s)) and the scaled output for the
    results of its forward kernel.
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
    """(output, logarithm of the denominators) of a softmax that has sinks beside the scores."""
    share = jax.nn.sigmoid(statistics - sinks[:, None]).swapaxes(1, 2)
    scaled = (out.astype(jnp.float32) * share[..., None]).astype(out.dtype)
    return scaled, jnp.logaddexp(statistics, sinks[:, None])


def gradient_of_sinks(
    out: Float[Array, "B S N H"],
    statistics: Float[Array, "B N S"],
    sinks: Float[Array, " N"],
    d_out: Float[Array, "B S N H"],
) -> Float[Array, " N"]:
    """Minus the sum over queries of a sink's weight times d_out . out, with results of
    `add_sinks`."""
    weight = jnp.exp(sinks[:, None] - statistics).swapaxes(1, 2)
    products = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    return -jnp.sum(weight * products, axis=(0, 1))


def refusal(cfg: Attention, length: int) -> str | None:
    """Why the kernels cannot compute an attention mixer; None if they can."""
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
    """Counted unmasked: 2 B N S^2 H for each product. A window counts as so many sequences, of so
    many tokens, that a query sees as many keys as the tiles of its window have."""
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
