"""The attention mixers."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxbench import mesh
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
from jaxbench.ops.attention.plain import Scores
from jaxbench.ops.remat import save
from jaxbench.recipe.attention_config import AttentionConfig, LatentAttentionConfig
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
        queries = (cfg.embed, kv_heads, mixer.heads // kv_heads, head_dim)
        keys_values = (cfg.embed, kv_heads, 2, head_dim)
        # MaxText folds 1/sqrt(head dim) into the initial query projection, on top of the scale of
        # the scores.
        query = normal(k_query, cfg, dims, queries, fan_in=cfg.embed, scale=head_dim**-0.5)
        key_value = normal(k_kv, cfg, dims, keys_values, fan_in=cfg.embed)
        self.scores = Scores(scale=mixer.score_scale, window=mixer.window)
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
        x = mesh.gather_seq(x)
        qkv = dense.dot("BSD,DKGH->BSKGH", x, self.qkv, "batch seq kv_heads group head_dim")
        if self.qkv_bias is not None:
            qkv = dense.biased(qkv, self.qkv_bias[...])
        batch, length, kv_heads, group, head_dim = qkv.shape
        query = qkv[..., :-2, :].reshape(batch, length, kv_heads * (group - 2), head_dim)
        query = _positioned(query, "query", self.query_norm, ctx.rotary)
        key = _positioned(qkv[..., -2, :], "key", self.key_norm, ctx.rotary)
        value = save(qkv[..., -1, :], "value")
        sinks = None if self.sinks is None else self.sinks[...]
        context = attention.attend(query, key, value, ctx.kernels.attention, self.scores, sinks)
        y = mesh.scatter_seq(dense.dot("BSNH,DNH->BSD", context, self.out, "batch seq embed"))
        # Added after the sum over tensor ranks, so that it is added once.
        return y if self.out_bias is None else dense.biased(y, self.out_bias[...]), ()


class LatentAttention(nnx.Module):
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.2).

    Queries are projected from one normed latent, keys and values from another. Queries and keys
    begin with features that carry no position. Behind them are features that rotary embedding
    turns. All heads share one key for these, which is taken from the hidden state.

    The projections of the hidden state are one weight: query latent, key and value latent, rotary
    key. They work on 1/tensor of the sequence, so tensor ranks exchange latents instead of the
    wider hidden state.

    Remat policies can save `latent`, the latents before their norms. They are small, and two
    matmuls compute queries, keys and values from them, which are as large as in ordinary attention.
    """

    def __init__(self, cfg: ModelConfig, mixer: LatentAttentionConfig, *, key):
        k_latent, k_query, k_kv, k_out = jax.random.split(key, 4)
        self.cfg, self.scores = mixer, Scores(scale=mixer.score_scale)
        latents = mixer.query_latent, mixer.kv_latent
        columns = sum(latents) + mixer.rope_dim
        self.latent = Weight(
            normal(k_latent, cfg, "embed latent", (cfg.embed, columns), fan_in=cfg.embed),
            quantized=True,
        )
        self.query_norm, self.kv_norm = (RMSNorm(cfg, "latent", size) for size in latents)

        def project(key, latent, width):
            shape, dims = (latent, mixer.heads, width), "from_latent heads head_dim"
            return Weight(normal(key, cfg, dims, shape, fan_in=latent), quantized=True)

        self.query = project(k_query, mixer.query_latent, mixer.head_dim + mixer.rope_dim)
        self.key_value = project(k_kv, mixer.kv_latent, mixer.head_dim + mixer.value_dim)
        shape, fan_in = (cfg.embed, mixer.heads, mixer.value_dim), mixer.heads * mixer.value_dim
        out = normal(k_out, cfg, "embed heads head_dim", shape, fan_in=fan_in, residual=True)
        self.out = Weight(out, quantized=True)

    def __call__(self, x: Hidden, ctx: Context) -> LayerOutput:
        cfg = self.cfg
        latent = save(dense.dot("BSD,DL->BSL", x, self.latent, "batch shard_seq latent"), "latent")
        ends = [cfg.query_latent, cfg.query_latent + cfg.kv_latent]
        for_query, for_kv, shared_key = jnp.split(latent, ends, axis=-1)
        normed = self.query_norm(for_query), self.kv_norm(for_kv), shared_key
        for_query, for_kv, shared_key = map(mesh.gather_seq, normed)
        heads = "batch seq heads head_dim"
        query = dense.dot("BSL,LNH->BSNH", for_query, self.query, heads)
        key_value = dense.dot("BSL,LNH->BSNH", for_kv, self.key_value, heads)
        still, turned = jnp.split(query, [cfg.head_dim], axis=-1)
        query = jnp.concatenate([still, rotate(turned, ctx.rotary)], axis=-1)
        still, value = jnp.split(key_value, [cfg.head_dim], axis=-1)
        shared_key = dense.broadcast_heads(shared_key, still)
        key = jnp.concatenate([still, rotate(shared_key, ctx.rotary)], axis=-1)
        query, key, value = save(query, "query"), save(key, "key"), save(value, "value")
        context = attention.attend(query, key, value, ctx.kernels.attention, self.scores)
        y = dense.dot("BSNH,DNH->BSD", context, self.out, "batch seq embed")
        return mesh.scatter_seq(y), ()


def _positioned(
    x: Float[Array, "B S N H"], name: str, norm: RMSNorm | None, rotary: Rotary | None
) -> Float[Array, "B S N H"]:
    """Queries or keys with their positions. If they have a norm, they are saved before it: the
    gradient of the norm needs its input, and norm and rotation are cheap to recompute from it."""
    if norm is None:
        return save(rotate(x, rotary), name)
    return rotate(norm(save(x, name)), rotary)
