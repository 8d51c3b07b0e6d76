"""Attention by cuDNN's fused kernels, through JAX."""

import jax

from jaxbench.ops import latency
from jaxbench.recipe.model import AttentionConfig
from jaxbench.xla.hlo import Instruction, Scope, Work

FORWARD = "dot_product_attention_fwd_wrapper"
"""JAX's primitive of the forward kernel. Its results are the attention output and the softmax
statistics: saved, the backward kernel needs no second forward pass."""

MAX_HEAD_DIM, HEAD_DIM_STEP = 256, 8
"""Supported head dims on Hopper and later: multiples of the second up to the first."""

PRODUCTS = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 4}
"""Targets of the compiled calls, with the products of each: QK^T and PV forward, and two gradients
of both backward. The scores that the backward kernel computes again are not counted."""


def call(query: jax.Array, key: jax.Array, value: jax.Array, cap: float | None) -> jax.Array:
    """Attention of one device's heads over whole sequences."""
    batch, length, heads, head_dim = query.shape
    with latency.of_product(4 * batch * heads * length * length * head_dim, "bf16"):
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation="cudnn"
        )


def refusal(cfg: AttentionConfig, length: int) -> str | None:
    """Why the kernels cannot compute an attention mixer; None if they can."""
    if cfg.head_dim % HEAD_DIM_STEP or cfg.head_dim > MAX_HEAD_DIM:
        return (
            f"model.attention.head_dim = {cfg.head_dim}: cuDNN attention takes multiples of "
            f"{HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        )
    if length % 2:
        return f"batch.sequence_length = {length}: cuDNN attention takes even lengths"
    return None


def work(i: Instruction, scope: Scope) -> Work:
    """Counted unmasked: 2 B N S^2 H for each product."""
    dtype, (batch, heads, length, head_dim) = i.arrays[0]
    key_length = scope[i.operands[1]].arrays[0][1][1]
    per_product = 2 * batch * heads * length * key_length * head_dim
    sizes = (batch, heads, length, head_dim)
    backward = i.target.endswith("Backward")
    return Work("attention", dtype, PRODUCTS[i.target] * per_product, sizes, backward)
