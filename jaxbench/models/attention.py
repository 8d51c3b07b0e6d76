"""The attention mixer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxbench.models.context import Context
from jaxbench.models.layers import (
    Hidden,
    LayerOutput,
    RMSNorm,
    Rotary,
    Vector,
    Weight,
    normal,
    rotate,
    zero_bias,
)
from jaxbench.ops import attention, dense
from jaxbench.ops.remat import save
from jaxbench.recipe.mixers import AttentionConfig
from jaxbench.recipe.model import ModelConfig


class Attention(nnx.Module):
    """Causal grouped-query attention (Ainslie et al. 2023). Norms of queries and keys, rotary
    positions, window, sinks and biases are optional.

    The input projections are one weight, ordered by kv head: the query heads of its group, its key,
    its value. A tensor rank therefore holds whole groups.
    """

    def __init__(self, cfg: ModelConfig, mixer: AttentionConfig, *, key):
        k_query, k_kv, k_out, k_sinks = jax.random.split(key, 4)
        dims = "embed kv_heads group head_dim"
        kv_heads, head_dim = mixer.kv_heads, mixer.head_dim
        query_shape = (cfg.embed, kv_heads, mixer.heads // kv_heads, head_dim)
        kv_shape = (cfg.embed, kv_heads, 2, head_dim)
        # MaxText folds 1/sqrt(head dim) into the initial query projection, on top of the scale of
        # the scores.
        query = normal(k_query, cfg, dims, query_shape, fan_in=cfg.embed, scale=head_dim**-0.5)
        key_value = normal(k_kv, cfg, dims, kv_shape, fan_in=cfg.embed)
        self.scale, self.window = mixer.score_scale, mixer.window
        self.qkv = Weight(jnp.concatenate([query, key_value], axis=2), quantized=True)
        shape, fan_in = (cfg.embed, mixer.heads, head_dim), mixer.heads * head_dim
        out = normal(k_out, cfg, "embed heads head_dim", shape, fan_in=fan_in, residual=True)
        self.out = Weight(out, quantized=True)
        self.query_norm = RMSNorm(cfg, "head_dim", head_dim) if mixer.qk_norm else None
        self.key_norm = RMSNorm(cfg, "head_dim", head_dim) if mixer.qk_norm else None
        self.sinks = (
            Vector(normal(k_sinks, cfg, "heads", (mixer.heads,), fan_in=cfg.embed))
            if mixer.sinks
            else None
        )
        of_heads = "kv_heads group head_dim"
        self.qkv_bias = zero_bias(of_heads, self.qkv.shape[1:]) if mixer.biases else None
        self.out_bias = zero_bias("embed", (cfg.embed,)) if mixer.biases else None

    def __call__(self, x: Hidden, ctx: Context) -> LayerOutput:
        dims = "batch seq kv_heads group head_dim"
        qkv = dense.dot("BSD,DKGH->BSKGH", x, self.qkv, dims, "gather")
        if self.qkv_bias is not None:
            qkv = dense.biased(qkv, self.qkv_bias[...])
        batch, length, kv_heads, group, head_dim = qkv.shape
        query = qkv[..., :-2, :].reshape(batch, length, kv_heads * (group - 2), head_dim)
        query = _normed_and_rotated(query, "query", self.query_norm, ctx.rotary)
        key = _normed_and_rotated(qkv[..., -2, :], "key", self.key_norm, ctx.rotary)
        value = save(qkv[..., -1, :], "value")
        sinks = None if self.sinks is None else self.sinks[...]
        attended = attention.attend(
            query, key, value, ctx.kernels.attention, self.scale, self.window, sinks
        )
        y = dense.dot("BSNH,DNH->BSD", attended, self.out, "batch seq embed", "scatter")
        if self.out_bias is not None:  # added once, after the sum over tensor ranks
            y = dense.biased(y, self.out_bias[...])
        return y, ()


def _normed_and_rotated(
    x: Float[Array, "B S N H"], name: str, norm: RMSNorm | None, rotary: Rotary | None
) -> Float[Array, "B S N H"]:
    """Queries or keys with their positions. If they have a norm, they are saved before it: the
    gradient of the norm needs its input, and norm and rotation are cheap to recompute from it."""
    if norm is None:
        return save(rotate(x, rotary), name)
    return rotate(norm(save(x, name)), rotary)
