"""Layers shared by the model families, as NNX modules used as plain pytrees.

Dimension letters as in `ops`. Weights keep `embed` as their first dimension and are sharded over it
at rest.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxbench import mesh, ops
from jaxbench.config import Execution, ModelConfig

NORM_EPS = 1e-5
TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of a unit normal truncated at +-2."""

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
"""Gates of feed-forward layers by `ModelConfig.activation`."""

Rotary = tuple[Float[Array, "S 1 h"], Float[Array, "S 1 h"]]


class Weight(nnx.Param):
    """A matrix that `ops.dot` multiplies with: cast to the compute dtype once per step."""


class Vector(nnx.Param):
    """A norm gain or bias, or a scalar of each head: used in fp32; weight decay is the recipe's
    choice."""


def normal(
    key, cfg: ModelConfig, dims: str, shape, *, fan_in, residual=False, truncated=False, scale=1.0
) -> Array:
    """A weight drawn as the recipe's source draws it: fp32, sharded by its logical `dims`.

    Megatron: normal with `init_std`, divided by the root of the number of residual layers for
    projections back into the residual stream. MaxText (`init_std` is None): standard deviation
    `scale`/sqrt(fan in); `truncated` at two standard deviations of the underlying normal for MLP
    and head.
    """
    sharding = mesh.spec(dims, mesh.WEIGHT)
    if cfg.init_std is not None:
        std = cfg.init_std / math.sqrt(len(cfg.letters)) if residual else cfg.init_std
        return std * jax.random.normal(key, shape, out_sharding=sharding)
    std = scale / math.sqrt(fan_in)
    if truncated:
        return (
            std
            / TRUNCATED_STD
            * jax.random.truncated_normal(key, -2.0, 2.0, shape, out_sharding=sharding)
        )
    return std * jax.random.normal(key, shape, out_sharding=sharding)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + 1e-5) * gain in fp32 (Zhang and Sennrich 2019); the gain starts at 1."""

    def __init__(self, cfg: ModelConfig):
        self.gain = Vector(jnp.ones(cfg.embed, out_sharding=mesh.spec("embed", mesh.VECTOR)))

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + NORM_EPS)
        return ops.scale(y, self.gain[...]).astype(x.dtype)


class LayerNorm1P(nnx.Module):
    """(x - mean) / sqrt(variance + 1e-5) * (1 + gain) + bias in fp32: a layer norm (Ba et al. 2016)
    whose gain is centred at zero; gain and bias start at 0."""

    def __init__(self, cfg: ModelConfig):
        sharding = mesh.spec("embed", mesh.VECTOR)
        self.gain = Vector(jnp.zeros(cfg.embed, out_sharding=sharding))
        self.bias = Vector(jnp.zeros(cfg.embed, out_sharding=sharding))

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        y = x.astype(jnp.float32)
        y -= jnp.mean(y, axis=-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + NORM_EPS)
        return ops.shift(ops.scale(y, 1 + self.gain[...]), self.bias[...]).astype(x.dtype)


NORMS = {"rms": RMSNorm, "layer1p": LayerNorm1P}


class Embedding(nnx.Module):
    """Token embedding. The table is used in fp32, sharded over `embed`."""

    def __init__(self, cfg: ModelConfig, *, key):
        std = cfg.embed**-0.5 if cfg.init_std is None else cfg.init_std
        sharding = mesh.spec("vocab embed", mesh.TABLE)
        self.table = nnx.Param(
            std * jax.random.normal(key, (cfg.vocabulary, cfg.embed), out_sharding=sharding)
        )

    def __call__(self, tokens: Int[Array, "B S"], dtype) -> Float[Array, "B S D"]:
        return ops.embedding(self.table[...], tokens, dtype)


def rotary_tables(cfg: ModelConfig, length: int) -> Rotary | None:
    """Cosine and sine of the rotary angles (Su et al. 2021) at positions 0 to length - 1, fp32; h
    is half of the rotated features of a head. None for a model without position embedding.

    With `rope_scaling`, Llama 3.1's frequencies: a wavelength above original_context/low is
    stretched by `factor`, one below original_context/high is kept, and between them the frequency
    is interpolated.
    """
    if cfg.rope_base is None:
        return None
    half = round(cfg.head_dim * cfg.rope_fraction) // 2
    frequency = cfg.rope_base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if (scaling := cfg.rope_scaling) is not None:
        turns = scaling.original_context * frequency / (2 * math.pi)
        kept = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
        frequency *= kept + (1 - kept) / scaling.factor
    sharding = mesh.spec("seq group head_dim", mesh.ACTIVATION)
    angle = frequency * jax.lax.broadcasted_iota(
        jnp.float32, (length, 1, half), 0, out_sharding=sharding
    )
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "B S N H"], rotary: Rotary | None) -> Float[Array, "B S N H"]:
    """Turns each feature pair (i, i + h) by its position's angle, in fp32; features from 2 h on
    pass through."""
    if rotary is None:
        return x
    cos, sin = rotary
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = jnp.split(turned.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.size else turned


class Attention(nnx.Module):
    """Causal grouped-query attention (Ainslie et al. 2023), with rotary positions if the model has
    any.

    One fused input projection. Its columns are ordered by kv head: the query heads of the group,
    its key, its value, so that a tensor rank holds whole groups.
    """

    def __init__(self, cfg: ModelConfig, *, key):
        k_query, k_kv, k_out = jax.random.split(key, 3)
        dims = "embed kv_heads group head_dim"
        queries = (cfg.embed, cfg.kv_heads, cfg.heads // cfg.kv_heads, cfg.head_dim)
        keys_values = (cfg.embed, cfg.kv_heads, 2, cfg.head_dim)
        # MaxText folds 1/sqrt(head dim) into the initial query projection, on top of the scale of
        # the scores.
        query = normal(k_query, cfg, dims, queries, fan_in=cfg.embed, scale=cfg.head_dim**-0.5)
        key_value = normal(k_kv, cfg, dims, keys_values, fan_in=cfg.embed)
        self.softcap = cfg.softcap
        self.qkv = Weight(jnp.concatenate([query, key_value], axis=2))
        shape, fan_in = (cfg.embed, cfg.heads, cfg.head_dim), cfg.heads * cfg.head_dim
        self.out = Weight(
            normal(k_out, cfg, "embed heads head_dim", shape, fan_in=fan_in, residual=True)
        )

    def __call__(
        self, x: Float[Array, "B S D"], rotary: Rotary | None, execution: Execution
    ) -> Float[Array, "B S D"]:
        qkv = ops.dot("BSD,DKGH->BSKGH", x, self.qkv, "batch seq kv_heads group head_dim")
        batch, length, kv_heads, group, head_dim = qkv.shape
        query = qkv[..., :-2, :].reshape(batch, length, kv_heads * (group - 2), head_dim)
        query = ops.save(rotate(query, rotary), "query")
        key = ops.save(rotate(qkv[..., -2, :], rotary), "key")
        value = ops.save(qkv[..., -1, :], "value")
        context = ops.attention(query, key, value, execution, self.softcap)
        return ops.dot("BSNH,DNH->BSD", context, self.out, "batch seq embed")


class Mlp(nnx.Module):
    """Gated feed-forward layer, down(act(gate x) * up x), without biases (Shazeer 2020).

    The two input projections are one product.
    """

    def __init__(self, cfg: ModelConfig, *, key):
        k_gate_up, k_down = jax.random.split(key)
        self.activation = ACTIVATIONS[cfg.activation]
        dims, inner = "embed part ffn", (cfg.embed, 2, cfg.ffn)
        self.gate_up = Weight(normal(k_gate_up, cfg, dims, inner, fan_in=cfg.embed, truncated=True))
        dims, outer = "embed ffn", (cfg.embed, cfg.ffn)
        self.down = Weight(
            normal(k_down, cfg, dims, outer, fan_in=cfg.ffn, truncated=True, residual=True)
        )

    def __call__(
        self, x: Float[Array, "B S D"], rotary: Rotary | None, execution: Execution
    ) -> Float[Array, "B S D"]:
        gate_up = ops.dot("BSD,DPF->BSPF", x, self.gate_up, "batch seq part ffn")
        gate = ops.save(gate_up[..., 0, :], "gate")
        up = ops.save(gate_up[..., 1, :], "up")
        return ops.dot("BSF,DF->BSD", self.activation(gate) * up, self.down, "batch seq embed")


class SquaredReluMlp(nnx.Module):
    """Feed-forward layer down(relu(up x)^2), without gate and biases (So et al. 2021)."""

    def __init__(self, cfg: ModelConfig, *, key):
        k_up, k_down = jax.random.split(key)
        dims, shape = "embed ffn", (cfg.embed, cfg.ffn)
        self.up = Weight(normal(k_up, cfg, dims, shape, fan_in=cfg.embed))
        self.down = Weight(normal(k_down, cfg, dims, shape, fan_in=cfg.ffn, residual=True))

    def __call__(
        self, x: Float[Array, "B S D"], rotary: Rotary | None, execution: Execution
    ) -> Float[Array, "B S D"]:
        up = ops.save(ops.dot("BSD,DF->BSF", x, self.up, "batch seq ffn"), "up")
        return ops.dot("BSF,DF->BSD", jnp.square(jax.nn.relu(up)), self.down, "batch seq embed")


MLPS = {"silu": Mlp, "gelu_tanh": Mlp, "relu2": SquaredReluMlp}
