"""Multi-head latent attention."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbench import mesh
from jaxbench.models.context import Context
from jaxbench.models.layers import Hidden, LayerOutput, RMSNorm, Weight, normal, rotate
from jaxbench.ops import attention, dense
from jaxbench.ops.remat import save
from jaxbench.recipe.mixers import LatentAttentionConfig
from jaxbench.recipe.model import ModelConfig


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
        self.cfg = mixer
        columns = mixer.query_latent + mixer.kv_latent + mixer.rope_dim
        self.latent = Weight(
            normal(k_latent, cfg, "embed latent", (cfg.embed, columns), fan_in=cfg.embed),
            quantized=True,
        )
        self.query_norm = RMSNorm(cfg, "latent", mixer.query_latent)
        self.kv_norm = RMSNorm(cfg, "latent", mixer.kv_latent)

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
        for_query, for_kv = self.query_norm(for_query), self.kv_norm(for_kv)
        heads = "batch seq heads head_dim"
        query = dense.dot("BSL,LNH->BSNH", for_query, self.query, heads, "gather")
        key_value = dense.dot("BSL,LNH->BSNH", for_kv, self.key_value, heads, "gather")
        still, turned = jnp.split(query, [cfg.head_dim], axis=-1)
        query = jnp.concatenate([still, rotate(turned, ctx.rotary)], axis=-1)
        still, value = jnp.split(key_value, [cfg.head_dim], axis=-1)
        shared_key = dense.broadcast_heads(mesh.gather_seq(shared_key), still)
        key = jnp.concatenate([still, rotate(shared_key, ctx.rotary)], axis=-1)
        query, key, value = save(query, "query"), save(key, "key"), save(value, "value")
        attended = attention.attend(query, key, value, ctx.kernels.attention, cfg.score_scale)
        return dense.dot("BSNH,DNH->BSD", attended, self.out, "batch seq embed", "scatter"), ()
