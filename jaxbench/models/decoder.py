"""The decoder of all families: mixers with residuals, in repeating blocks over stacked weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise, zip_longest
from operator import itemgetter

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxbench import mesh, ssd
from jaxbench.experts import routing
from jaxbench.models.attention import Attention
from jaxbench.models.experts import Experts
from jaxbench.models.layers import (
    NORMS,
    Embedding,
    ForwardContext,
    Hidden,
    LayerOutput,
    RoutingFigures,
    Weight,
    normal,
    rotary_tables,
)
from jaxbench.models.mamba2 import Mamba2
from jaxbench.models.mlp import make_mlp
from jaxbench.ops import attention, fp8, grouped, remat
from jaxbench.ops.blocks import Stash, apply_blocks
from jaxbench.ops.loss import cross_entropy
from jaxbench.recipe.model import (
    AttentionConfig,
    ExpertsConfig,
    MambaConfig,
    Mixer,
    MlpConfig,
    ModelConfig,
)
from jaxbench.recipe.settings import Execution, Precision

MIXERS: dict[type, Callable[..., nnx.Module]] = {
    AttentionConfig: Attention,
    MlpConfig: make_mlp,
    ExpertsConfig: Experts,
    MambaConfig: Mamba2,
}
"""Mixers by the class that describes them. A mixer maps `"batch shard_seq embed"` and a
`ForwardContext` to an array of the same shape and its `RoutingFigures`."""


class Residual(nnx.Module):
    """x + mixer(norm(x)), or x + norm(mixer(norm(x))). Norms and sum work on 1/tensor of the
    sequence."""

    def __init__(self, cfg: ModelConfig, mixer: Mixer, *, key):
        self.norm = NORMS[cfg.norm](cfg)
        self.mixer = MIXERS[type(mixer)](cfg, mixer, key=key)
        self.post_norm = NORMS[cfg.norm](cfg) if cfg.post_norm else None

    def __call__(self, x: Hidden, ctx: ForwardContext) -> LayerOutput:
        y, figures = self.mixer(self.norm(x), ctx)
        if self.post_norm is not None:
            y = self.post_norm(y)
        return x + y, figures


class Block(nnx.Module):
    """The mixers of the layers that repeat together; of a transformer usually one layer's two."""

    def __init__(self, cfg: ModelConfig, pattern: str, *, key):
        keys = jax.random.split(key, len(pattern))
        self.layers = nnx.List(
            [
                Residual(cfg, cfg.mixer(letter), key=k)
                for letter, k in zip(pattern, keys, strict=True)
            ]
        )

    def __call__(self, x: Hidden, ctx: ForwardContext) -> LayerOutput:
        figures: RoutingFigures = ()
        for index, layer in enumerate(self.layers):
            x = remat.save(x, "residual") if index else x
            x, layer_figures = layer(x, ctx)
            figures += layer_figures
        return x, figures


class Decoder(nnx.Module):
    """Embedding, stacks of repeating blocks with weights `[blocks, ..]`, final norm, and the head:
    a weight, or the embedding table."""

    def __init__(self, cfg: ModelConfig, *, key):
        k_embedding, k_blocks, k_head = jax.random.split(key, 3)
        self.cfg = cfg
        self.embedding = Embedding(cfg, key=k_embedding)
        blocks = repeating_blocks(cfg)
        keys = jax.random.split(k_blocks, sum(times for _, times in blocks))
        ends = accumulate(times for _, times in blocks)
        self.stacks = nnx.List(
            [
                stacked(cfg, pattern, keys[end - times : end])
                for (pattern, times), end in zip(blocks, ends, strict=True)
            ]
        )
        self.norm = NORMS[cfg.norm](cfg)
        shape, dims = (cfg.embed, cfg.vocabulary), "embed vocab"
        self.head = (
            None
            if cfg.tied
            else Weight(normal(k_head, cfg, dims, shape, fan_in=cfg.embed, truncated=True))
        )

    @property
    def dtype(self):
        """The compute dtype: that of the weights."""
        leaves = jax.tree.leaves(self.stacks, is_leaf=lambda v: isinstance(v, Weight))
        return next(w for w in leaves if isinstance(w, Weight))[...].dtype

    def hidden(
        self,
        tokens: Int[Array, "B S"],
        execution: Execution,
        precision: Precision,
        scaled: Sequence[fp8.Scaled] = (),
        stashes: Sequence[Stash | None] = (),
    ) -> tuple[Hidden, list[RoutingFigures], list[Stash]]:
        """(output of the last layer, routing figures of each segment, stash of each segment as
        written); `scaled` has the FP8 weights and scales of each stack in an FP8 run."""
        cfg = self.cfg
        x = embed(cfg, self.embedding, tokens, self.dtype)
        ctx = forward_context(cfg, tokens.shape[1], execution, precision)

        def apply(x, weights, scales, rotary):
            x, figures = apply_block(*weights, scales, x, ctx._replace(rotary=rotary))
            return x, jax.tree.map(lambda figure: figure.astype(jnp.float32), figures)

        all_figures, written = [], []
        for segment, stash in zip_longest(segments(cfg, execution, precision), stashes):
            scales = scaled[segment.stack] if scaled and not segment.bf16 else None
            block, scales = jax.tree.map(
                itemgetter(segment.repeats), (self.stacks[segment.stack], scales)
            )
            weights = block, None if scales is None else scales.observed
            x, figures, stash = apply_blocks(
                apply, segment.saved, x, weights, scales, ctx.rotary, stash
            )
            all_figures.append(figures)
            written.append(stash)
        return x, all_figures, written

    def loss(
        self,
        tokens: Int[Array, "B S"],
        targets: Int[Array, "B S"],
        execution: Execution,
        precision: Precision,
        scaled: Sequence[fp8.Scaled] = (),
        stashes: Sequence[Stash | None] = (),
    ) -> tuple[Float[Array, ""], tuple[routing.Figures, list[Stash]]]:
        """(mean cross entropy over all tokens in nats, (routing figures, stashes as written)).

        The load-balance losses of all layers add their gradient, but not their value.
        """
        hidden, layers, stashes = self.hidden(tokens, execution, precision, scaled, stashes)
        value = head_loss(self.cfg, self.norm, self.head_weight(), hidden, targets)
        value, figures = routing.with_balance_loss(value, layers, self.cfg.balance_loss)
        return value, (figures, stashes)

    def head_weight(self) -> Float[Array, "D V"]:
        """The head at rest, `"embed vocab"`, in the compute dtype."""
        if self.head is not None:
            return self.head[...]
        return mesh.as_weight(self.embedding.table[...].T.astype(self.dtype), "embed vocab")


def forward_context(
    cfg: ModelConfig, length: int, execution: Execution, precision: Precision
) -> ForwardContext:
    """The context of a forward pass over sequences of a length, on the current mesh."""
    platform, shard = mesh.platform(), length // mesh.ranks("seq")
    return ForwardContext(
        rotary=rotary_tables(cfg.attention, length) if cfg.attention else None,
        kernel=attention.choose(execution, cfg, length, platform),
        ssd=ssd.choose(execution, cfg, precision.dtype, shard, platform),
        grouped_matmul=grouped.choose(execution, cfg, precision.dtype, platform),
    )


def embed(
    cfg: ModelConfig, embedding: Embedding, tokens: Int[Array, "B S"], dtype
) -> Float[Array, "B s D"]:
    """The input of the first layer."""
    return times_constant(embedding(tokens, dtype), cfg.embedding_scale)


def apply_block(
    block: Block,
    observed: Array | None,
    scales: fp8.Scaled | None,
    x: Hidden,
    ctx: ForwardContext,
) -> LayerOutput:
    """One block; in an FP8 run with its scales, and the zeros `observed` whose gradients are the
    observed amax (`fp8.Scaled.observed`)."""
    if scales is None:
        return block(x, ctx)
    return fp8.attach(block, replace(scales, observed=observed))(x, ctx)


def head_loss(
    cfg: ModelConfig,
    norm: nnx.Module,
    head: Float[Array, "D V"],
    hidden: Float[Array, "B s D"],
    targets: Int[Array, "B S"],
) -> Float[Array, ""]:
    """The mean cross entropy of the last layer's output, through final norm and head."""
    hidden = mesh.gather_seq(times_constant(norm(hidden), cfg.logit_scale))
    return cross_entropy(hidden, head, targets)


def times_constant(x: Array, factor: float) -> Array:
    """`x` times a constant that its dtype may not hold exactly."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def stacked(cfg: ModelConfig, pattern: str, keys) -> Block:
    """One block per key, their weights stacked on axis 0."""
    return jax.vmap(lambda key: Block(cfg, pattern, key=key))(keys)


def repeating_blocks(cfg: ModelConfig) -> list[tuple[str, int]]:
    """Blocks as (layer pattern, number of repeats)."""
    return cut(cfg.layer_patterns)


@cache
def cut(layers: tuple[str, ...]) -> list[tuple[str, int]]:
    """The patterns of layers as repeating blocks.

    Of all ways, one with the fewest layers in its blocks, since each is compiled once, and then
    with the fewest blocks: `M-M-M-M*-M-` ten times and `M-` four times for the 118 layers of
    Nemotron-H 56B.
    """
    letters, size = "".join(layers), len(layers[0])
    best: dict[int, tuple[int, list[tuple[str, int]]]] = {len(letters): (0, [])}
    for start in reversed(range(0, len(letters), size)):
        cuts = []
        for length in range(size, len(letters) - start + 1, size):
            block, stop = letters[start : start + length], start
            while letters.startswith(block, stop):
                stop += length
                compiled, rest = best[stop]
                cuts.append((compiled + length, [(block, (stop - start) // length), *rest]))
        best[start] = min(cuts, key=lambda cut: (cut[0], len(cut[1])))
    return best[0][1]


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks of a stack that are computed alike: index of the stack, the blocks,
    activations saved (None: all), and whether their products stay in bf16 in an FP8 run."""

    stack: int
    repeats: slice
    saved: frozenset[str] | None
    bf16: bool


def segments(cfg: ModelConfig, execution: Execution, precision: Precision) -> list[Segment]:
    """All layers as segments, in order.

    Settings count layers as published: one of a transformer is attention and MLP. A block of
    several layers saves an activation if all of its layers do, and stays in bf16 if any does.
    """
    result, first = [], 0
    counts = execution.saved(cfg.layers)
    for stack, (pattern, times) in enumerate(repeating_blocks(cfg)):
        size = len(pattern) // len(cfg.layer_patterns[0])

        def repeats(layers: int, first=first, times=times, size=size) -> int:
            return min(max((layers - first) // size, 0), times)

        saving = {name: repeats(count) for name, count in (counts or {}).items()}
        start_fp8 = repeats(precision.first_bf16_layers + size - 1)
        stop_fp8 = repeats(cfg.layers - precision.last_bf16_layers)
        for start, stop in pairwise(sorted({0, times, start_fp8, stop_fp8, *saving.values()})):
            saved = (
                None
                if counts is None
                else frozenset(n for n, count in saving.items() if count >= stop)
            )
            in_bf16 = start < start_fp8 or stop > stop_fp8
            result.append(Segment(stack, slice(start, stop), saved, in_bf16))
        first += times * size
    return result
