"""What mixers and decoder are made of: weights, norms, embedding, rotary positions, and the loss of
the head.

Dimension letters as in `ops`. s is `shard_seq` (`mesh`): the global length S outside a `shard_map`,
and a device's part of it inside. The first dimension of a matmul's weight, usually `embed`, is the
one that is gathered for use. For experts see `mesh.expert_dims`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxbench import mesh
from jaxbench.ops import dense
from jaxbench.ops.loss import cross_entropy
from jaxbench.ops.moe.routing import RoutingFigures
from jaxbench.ops.remat import ALWAYS, save
from jaxbench.recipe.mixers import AnyAttentionConfig, Yarn
from jaxbench.recipe.model import ModelConfig
from jaxbench.recipe.settings import Precision

TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of a unit normal truncated at +-2."""

DTYPES = {"fp32": jnp.float32, **dict.fromkeys(("bf16", "fp8", "mxfp8", "nvfp4"), jnp.bfloat16)}
"""Dtypes by their names in recipes; of a quantized format the dtype of what is not quantized."""

Rotary = tuple[Float[Array, "S 1 h"], Float[Array, "S 1 h"]]

Hidden = Float[Array, "B s D"]
"""The hidden state, the input and output of every layer."""

LayerRouting = tuple[RoutingFigures, ...]
"""The routing figures of each layer with experts; other layers have none."""

LayerOutput = tuple[Hidden, LayerRouting]
"""What a layer, a block or a segment of blocks returns."""


class Weight(nnx.Param):
    """The matrix of a matmul, cast to the compute dtype once per step. With `quantized=True` the
    matmul runs in the quantized format of the recipe. With `experts=True` the first dimension
    counts experts."""


class Vector(nnx.Param):
    """A norm gain, a bias, or a scalar of each head, kept in fp32. The recipe says whether it is
    decayed."""


class LoadBias(nnx.Param):
    """The bias of each expert in the router's choice, in fp32. Its gradient is the load of the
    expert, and the optimizer moves it by that (`train.optimizer.balance`)."""


def with_values(kind: type[nnx.Variable], function: Callable[[Array], Array], tree: Any) -> Any:
    """The tree with a function applied to the value of each of its variables of a kind."""

    def replaced(variable: Any) -> Any:
        is_kind = isinstance(variable, kind)
        return variable.replace(function(variable[...])) if is_kind else variable

    return jax.tree.map(replaced, tree, is_leaf=dense.is_variable)


def sum_dtype(variable: Any, precision: Precision) -> Any:
    """The dtype in which gradients of a variable are summed over microbatches. The loads of experts
    are summed in fp32, since bf16 could not count them."""
    return jnp.float32 if isinstance(variable, LoadBias) else DTYPES[precision.accumulate]


def normal(
    key, cfg: ModelConfig, dims: str, shape, *, fan_in, residual=False, truncated=False, scale=1.0
) -> Array:
    """A weight drawn as the recipe's source draws it: fp32, sharded by its logical `dims`.

    Megatron draws from a normal distribution with `init_std`. Projections back into the residual
    stream divide that by the root of the number of mixers.

    MaxText (`init_std` is None) has a standard deviation of `scale`/sqrt(fan in). MLP and head are
    `truncated` at two standard deviations of the underlying normal distribution.
    """
    draw = jax.random.normal
    if cfg.init_std is not None:
        std = cfg.init_std / math.sqrt(len(cfg.mixers)) if residual else cfg.init_std
    elif truncated:
        std = scale / math.sqrt(fan_in) / TRUNCATED_STD
        draw = partial(jax.random.truncated_normal, lower=-2.0, upper=2.0)
    else:
        std = scale / math.sqrt(fan_in)
    return std * draw(key, shape=shape, out_sharding=mesh.spec(dims, mesh.WEIGHT))


def zero_bias(dims: str, shape: tuple[int, ...]) -> Vector:
    """A bias of logical dimensions `dims` that starts at zero."""
    return Vector(jnp.zeros(shape, out_sharding=mesh.spec(dims, mesh.VECTOR)))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * gain in fp32 (Zhang and Sennrich 2019). The gain starts at 1. It
    norms the hidden state, or another dimension of a given size."""

    def __init__(self, cfg: ModelConfig, dim: str = "embed", size: int | None = None):
        self.eps = cfg.norm_eps
        sharding = mesh.spec(dim, mesh.VECTOR)
        self.gain = Vector(jnp.ones(size or cfg.embed, out_sharding=sharding))

    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        y *= jax.lax.rsqrt(_mean(y * y) + self.eps)
        return (y * dense.broadcast_vector(self.gain[...], y)).astype(x.dtype)


class LayerNorm1P(nnx.Module):
    """(x - mean) / sqrt(variance + eps) * (1 + gain) + bias in fp32: a layer norm (Ba et al. 2016)
    whose gain is centred at zero. Gain and bias start at 0."""

    def __init__(self, cfg: ModelConfig):
        self.eps = cfg.norm_eps
        sharding = mesh.spec("embed", mesh.VECTOR)
        self.gain = Vector(jnp.zeros(cfg.embed, out_sharding=sharding))
        self.bias = Vector(jnp.zeros(cfg.embed, out_sharding=sharding))

    def __call__(self, x: Hidden) -> Hidden:
        y = x.astype(jnp.float32)
        y -= _mean(y)
        y *= jax.lax.rsqrt(_mean(y * y) + self.eps)
        y *= dense.broadcast_vector(1 + self.gain[...], y)
        return (y + dense.broadcast_vector(self.bias[...], y)).astype(x.dtype)


def _mean(x: Float[Array, "*B D"]) -> Float[Array, "*B 1"]:
    """The mean over features, saved for the backward pass by every remat policy."""
    return save(jnp.mean(x, axis=-1, keepdims=True), ALWAYS)


NORMS = {"rms": RMSNorm, "layer1p": LayerNorm1P}


class Embedding(nnx.Module):
    """The input of the first layer, plus learned positions if the model has them. The tables stay
    in fp32, sharded over `embed`; what is looked up is cast."""

    def __init__(self, cfg: ModelConfig, *, key):
        std = cfg.embed**-0.5 if cfg.init_std is None else cfg.init_std

        def table(key, dims: str, rows: int) -> nnx.Param:
            sharding = mesh.spec(dims, mesh.TABLE)
            return nnx.Param(std * jax.random.normal(key, (rows, cfg.embed), out_sharding=sharding))

        self.table = table(key, "vocab embed", cfg.vocabulary)
        self.positions = (
            table(jax.random.fold_in(key, 1), "position embed", cfg.learned_positions)
            if cfg.learned_positions
            else None
        )

    def __call__(self, tokens: Int[Array, "B S"], dtype) -> Hidden:
        positions = None if self.positions is None else self.positions[...]
        return look_up(self.table[...], tokens, dtype, positions)


def look_up(
    table: jax.Array, tokens: jax.Array, dtype, positions: jax.Array | None = None
) -> jax.Array:
    """The rows of `table` (`"vocab embed"`) for `tokens` (`"batch seq"`), plus the first rows of
    `positions` (`"position embed"`) if given, as `"batch shard_seq embed"` of `dtype`.

    The table is split over `embed`. Each rank looks up the tokens of all ranks in its own columns.
    An all-to-all then exchanges some columns of all tokens for all columns of the rank's own
    tokens. This moves activations instead of the table. Its transpose brings every token's gradient
    to the rank that holds the columns, so nothing is left to reduce.
    """
    seq, shard_seq = (mesh.axes(dim) for dim in ("seq", "shard_seq"))
    batch = mesh.used(*(axis for axis in mesh.TABLE_EMBED if axis in mesh.SEQUENCES))

    def local(table, tokens, positions):
        for dim, axes in ((0, batch), (1, seq)):
            if axes:
                tokens = jax.lax.all_gather(tokens, axes, axis=dim, tiled=True)
        x = table[tokens]
        if positions is not None:
            x += positions[: tokens.shape[1]]
        x = x.astype(dtype)
        for dim, axes in ((1, shard_seq), (0, batch)):
            if axes:
                x = jax.lax.all_to_all(x, axes, dim, 2, tiled=True)
        return x

    out = mesh.spec("batch shard_seq embed", mesh.ACTIVATION)
    return mesh.on_each_device(local, out)(table, tokens, positions)


def rotary_tables(cfg: AnyAttentionConfig, length: int) -> Rotary | None:
    """Cosine and sine of the rotary angles (Su et al. 2021) at positions 0 to length - 1, in fp32.
    h is half of the rotated features of a head. None for attention without position embedding.

    With `Rope.scaling` the frequencies are Llama 3.1's. A wavelength above original_context/low is
    stretched by `factor`, and one below original_context/high is kept. Between them the frequency
    is interpolated.

    With `Rope.yarn` the share that is kept falls linearly with the feature's index. It is 1 at the
    feature that turns `fast` times in the original context, and 0 at the one that turns `slow`
    times (Peng et al. 2023, section 3.2).
    """
    if (rope := cfg.rope) is None:
        return None
    half = cfg.rotated // 2
    feature = jnp.arange(half, dtype=jnp.float32)
    frequency = rope.base ** (-feature / half)
    if (scaling := rope.scaling) is not None:
        turns = scaling.original_context * frequency / (2 * math.pi)
        kept = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
        frequency *= kept + (1 - kept) / scaling.factor
    if (yarn := rope.yarn) is not None:
        first, last = _ramp(yarn, rope.base, half)
        kept = 1 - jnp.clip((feature - first) / (last - first), 0.0, 1.0)
        frequency *= kept + (1 - kept) / yarn.factor
    sharding = mesh.spec("seq group head_dim", mesh.ACTIVATION)
    angle = frequency * jax.lax.broadcasted_iota(
        jnp.float32, (length, 1, half), 0, out_sharding=sharding
    )
    return jnp.cos(angle), jnp.sin(angle)


def _ramp(yarn: Yarn, base: float, half: int) -> tuple[float, float]:
    """The features between which YaRN interpolates: they turn `fast` and `slow` times in the
    original context."""

    def feature(turns: float) -> float:
        return half * math.log(yarn.original_context / (turns * 2 * math.pi)) / math.log(base)

    first, last = feature(yarn.fast), feature(yarn.slow)
    if yarn.rounded:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    return first, max(last, first + 0.001)


def rotate(x: Float[Array, "B S N H"], rotary: Rotary | None) -> Float[Array, "B S N H"]:
    """Turns each feature pair (i, i + h) by its position's angle, in fp32. Features from 2 h on
    pass through."""
    if rotary is None:
        return x
    cos, sin = rotary
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = jnp.split(turned.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.size else turned


def head_loss(
    cfg: ModelConfig,
    head: Float[Array, "D V"],
    hidden: Hidden,
    targets: Int[Array, "B S"],
    masked: bool = False,
) -> Float[Array, ""]:
    """The mean cross entropy of a normed output, through the head."""
    hidden = mesh.gather_seq(hidden)
    # XLA is known to leave the head's gradient to the end of the step where the head is applied
    # several times, each with a stack of logit gradients, and behind a hybrid's long blocks.
    gradients_first = cfg.prediction is not None or cfg.mamba is not None
    return cross_entropy(hidden, head, targets, masked, gradients_first)
