"""The attention mixer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxbench import mesh
from jaxbench.models.layers import (
    ForwardContext,
    Hidden,
    LayerOutput,
    RMSNorm,
    Rotary,
    Weight,
    normal,
    rotate,
)
from jaxbench.ops import attention, dense
from jaxbench.ops.remat import save
from jaxbench.recipe.model import AttentionConfig, ModelConfig


class Attention(nnx.Module):
    """Causal grouped-query attention (Ainslie et al. 2023), with optional norms of queries and
    keys, and rotary positions.

    The input projections are one weight, ordered by kv head: the query heads of its group, its key,
    its value. So a tensor rank holds whole groups.
    """

    def __init__(self, cfg: ModelConfig, mixer: AttentionConfig, *, key):
        k_query, k_kv, k_out = jax.random.split(key, 3)
        dims = "embed kv_heads group head_dim"
        kv_heads, head_dim = mixer.kv_heads, mixer.head_dim
        queries = (cfg.embed, kv_heads, mixer.heads // kv_heads, head_dim)
        keys_values = (cfg.embed, kv_heads, 2, head_dim)
        # MaxText folds 1/sqrt(head dim) into the initial query projection, on top of the scale of
        # the scores.
        query = normal(k_query, cfg, dims, queries, fan_in=cfg.embed, scale=head_dim**-0.5)
        key_value = normal(k_kv, cfg, dims, keys_values, fan_in=cfg.embed)
        self.softcap = mixer.softcap
        self.qkv = Weight(jnp.concatenate([query, key_value], axis=2), fp8=True)
        shape, fan_in = (cfg.embed, mixer.heads, head_dim), mixer.heads * head_dim
        out = normal(k_out, cfg, "embed heads head_dim", shape, fan_in=fan_in, residual=True)
        self.out = Weight(out, fp8=True)
        self.query_norm = RMSNorm(cfg, head_dim) if mixer.qk_norm else None
        self.key_norm = RMSNorm(cfg, head_dim) if mixer.qk_norm else None

    def __call__(self, x: Hidden, ctx: ForwardContext) -> LayerOutput:
        x = mesh.gather_seq(x)
        qkv = dense.dot("BSD,DKGH->BSKGH", x, self.qkv, "batch seq kv_heads group head_dim")
        batch, length, kv_heads, group, head_dim = qkv.shape
        query = qkv[..., :-2, :].reshape(batch, length, kv_heads * (group - 2), head_dim)
        query = _positioned(query, "query", self.query_norm, ctx.rotary)
        key = _positioned(qkv[..., -2, :], "key", self.key_norm, ctx.rotary)
        value = save(qkv[..., -1, :], "value")
        context = attention.attend(query, key, value, ctx.kernel, self.softcap)
        y = dense.dot("BSNH,DNH->BSD", context, self.out, "batch seq embed")
        return mesh.scatter_seq(y), ()


def _positioned(
    x: Float[Array, "B S N H"], name: str, norm: RMSNorm | None, rotary: Rotary | None
) -> Float[Array, "B S N H"]:
    """Queries or keys with their positions. Those with a norm are saved before it: its gradient
    needs its input, from which norm and rotation are cheap to compute again."""
    if norm is None:
        return save(rotate(x, rotary), name)
    return rotate(norm(save(x, name)), rotary)
