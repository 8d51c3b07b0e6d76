"""The decoder of all families: mixers with residuals, in repeating blocks over stacked weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxbench import mesh
from jaxbench.models.attention import Attention
from jaxbench.models.context import Context, Sequences, make_context
from jaxbench.models.experts import Experts
from jaxbench.models.latent_attention import LatentAttention
from jaxbench.models.layers import (
    NORMS,
    Embedding,
    Hidden,
    LayerOutput,
    LayerRouting,
    Weight,
    head_loss,
    normal,
)
from jaxbench.models.mamba2 import Mamba2
from jaxbench.models.mlp import make_mlp
from jaxbench.models.prediction import Prediction
from jaxbench.ops import quantized
from jaxbench.ops.layer_stack import LayerLoop
from jaxbench.ops.moe import routing
from jaxbench.ops.remat import Policy, save
from jaxbench.recipe.mixers import (
    AttentionConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    MambaConfig,
    Mixer,
    MlpConfig,
)
from jaxbench.recipe.model import ModelConfig, first_layers, repeating_blocks, stacks
from jaxbench.recipe.settings import Execution, Precision

MIXERS: dict[type, Callable[..., nnx.Module]] = {
    AttentionConfig: Attention,
    LatentAttentionConfig: LatentAttention,
    MlpConfig: make_mlp,
    ExpertsConfig: Experts,
    MambaConfig: Mamba2,
}
"""The mixer for each class that describes one. A mixer maps `"batch shard_seq embed"` and a
`Context` to an array of the same shape and its `LayerRouting`."""


class Residual(nnx.Module):
    """x + mixer(norm(x)). The norm and the sum work on 1/tensor of the sequence."""

    def __init__(self, cfg: ModelConfig, mixer: Mixer, *, key):
        self.norm = NORMS[cfg.norm](cfg)
        self.mixer = MIXERS[type(mixer)](cfg, mixer, key=key)

    def __call__(self, x: Hidden, ctx: Context) -> LayerOutput:
        y, figures = self.mixer(self.norm(x), ctx)
        return x + y, figures


class Block(nnx.Module):
    """The mixers of a layer pattern that repeats; in a transformer usually the two mixers of one
    layer."""

    def __init__(self, cfg: ModelConfig, pattern: str, *, key):
        layers = zip(pattern, jax.random.split(key, len(pattern)), strict=True)
        self.layers = nnx.List([Residual(cfg, cfg.mixer(letter), key=k) for letter, k in layers])

    def __call__(self, x: Hidden, ctx: Context) -> LayerOutput:
        figures: LayerRouting = ()
        for index in range(len(self.layers)):
            x = save(x, "residual") if index else x
            x, layer_figures = self.apply_layer(index, x, ctx)
            figures += layer_figures
        return x, figures

    def apply_layer(self, index: int, x: Hidden, ctx: Context) -> LayerOutput:
        """One layer of the block."""
        return self.layers[index](x, ctx.at_layer(index))


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks of one stack that have the same settings.

    `stack` is the index of the stack, and `repeats` says which of its blocks. `bf16` are the mixers
    of a block, by position, whose matmuls stay in bf16 in a quantized run.
    """

    stack: int
    repeats: slice
    policy: Policy
    bf16: frozenset[int] = frozenset()


class Decoder(nnx.Module):
    """Embedding, stacks of repeating blocks with weights `[blocks, ..]`, final norm, and head. The
    head is a weight, or the embedding table. If the model predicts several tokens, the last stack
    is the block that does so."""

    def __init__(self, cfg: ModelConfig, *, key):
        k_embedding, k_blocks, k_head, k_prediction = jax.random.split(key, 4)
        self.cfg = cfg
        self.embedding = Embedding(cfg, key=k_embedding)
        patterns = stacks(cfg)
        keys = jax.random.split(k_blocks, sum(times for _, times in patterns))
        ends = accumulate(times for _, times in patterns)

        def stacked(pattern: str, keys) -> Block:
            return jax.vmap(lambda key: Block(cfg, pattern, key=key))(keys)

        self.stacks = nnx.List(
            [
                stacked(pattern, keys[end - times : end])
                for (pattern, times), end in zip(patterns, ends, strict=True)
            ]
        )
        self.norm = NORMS[cfg.norm](cfg)
        self.prediction = Prediction(cfg, key=k_prediction) if cfg.prediction else None
        shape, dims = (cfg.embed, cfg.vocabulary), "embed vocab"
        self.head = (
            None
            if cfg.tied
            else Weight(normal(k_head, cfg, dims, shape, fan_in=cfg.embed, truncated=True))
        )

    @property
    def dtype(self):
        """The dtype of the `Weight`s; after `train.step.compute_weights` the compute dtype."""
        leaves = jax.tree.leaves(self.stacks, is_leaf=lambda v: isinstance(v, Weight))
        return next(w for w in leaves if isinstance(w, Weight))[...].dtype

    def loss(
        self,
        batch: Sequences,
        execution: Execution,
        precision: Precision,
        all_scaled: Sequence[quantized.Scaled] = (),
        loop: LayerLoop | None = None,
    ) -> tuple[Float[Array, ""], routing.RoutingSummary]:
        """(mean cross entropy over all tokens in nats, summary of routing). In a quantized run
        `all_scaled` has the quantized weights and scales of each stack.

        The load-balance losses and the loss of multi-token prediction contribute gradients, but are
        not part of the value.
        """
        cfg, loop = self.cfg, loop or LayerLoop()
        x = self.embedding(batch.tokens, self.dtype)
        ctx = make_context(cfg, batch.tokens.shape[1], execution, precision)
        ctx = ctx.with_counters(sequence=batch.first_sequence)
        all_figures: list[LayerRouting] = []
        for segment in segments(cfg, execution, precision):
            x, figures = self.run_segment(segment, x, ctx, all_scaled, loop)
            all_figures.append(figures)
        head, hidden = self.head_weight(), self.norm(x)
        value = head_loss(cfg, head, hidden, batch.targets)
        if self.prediction is not None:

            def predict_block(x: Hidden, depth: int) -> LayerOutput:
                segment = prediction_segment(cfg, execution, precision)
                at_depth = ctx.with_counters(depth=depth)
                return self.run_segment(segment, x, at_depth, all_scaled, loop)

            value, further = self.prediction.further_losses(
                cfg, self.embedding, head, hidden, value, batch, predict_block
            )
            all_figures += further
        return routing.with_balance_loss(value, all_figures, cfg.balance_loss)

    def run_segment(
        self,
        segment: Segment,
        x: Hidden,
        ctx: Context,
        all_scaled: Sequence[quantized.Scaled],
        loop: LayerLoop,
    ) -> LayerOutput:
        """(output, routing figures) of the blocks of a segment, one after the other."""
        block = self.stacks[segment.stack]
        any_quantized = all_scaled and len(segment.bf16) < len(block.layers)
        scaled = all_scaled[segment.stack] if any_quantized else None
        first = jax.tree.map(jnp.array, first_layers(self.cfg)[segment.stack])
        block, scaled, first = jax.tree.map(itemgetter(segment.repeats), (block, scaled, first))
        weights = block, None if scaled is None else scaled.observed
        one_block = partial(apply_block, bf16=segment.bf16)
        return loop.scan(one_block, x, weights, (scaled, first), ctx, segment.policy)

    def head_weight(self) -> Float[Array, "D V"]:
        """The head at rest, `"embed vocab"`, in the compute dtype."""
        if self.head is not None:
            return self.head[...]
        return mesh.as_head(self.embedding.table[...].T.astype(self.dtype))


def apply_block(
    x: Hidden,
    weights: tuple[Block, Array | None],
    constants: tuple[quantized.Scaled | None, Any],
    ctx: Context,
    *,
    bf16: frozenset[int] = frozenset(),
    only: int | None = None,
) -> LayerOutput:
    """Applies one block, or `only` one of its layers.

    `weights` is (the block, its `Scaled.observed`): FP8 differentiates by both. `constants` is (the
    block's `Scaled`, the number of its first layer). A part that the run does not need is None:
    only quantized matmuls need a `Scaled`, and learned routing does not need the number. The mixers
    in `bf16` are not quantized.
    """
    (block, observed), (scaled, layer) = weights, constants
    ctx = ctx.with_counters(layer=layer)
    if scaled is not None:
        block = quantized.attach(block, replace(scaled, observed=observed), ctx.counters, bf16)
    return block(x, ctx) if only is None else block.apply_layer(only, x, ctx)


def segments(cfg: ModelConfig, execution: Execution, precision: Precision) -> list[Segment]:
    """All layers as segments, in order.

    Settings count layers as published: a layer of a transformer is attention and MLP.
    """
    mixers = len(cfg.layer_patterns[0])

    def choices(pattern: str, first: int) -> tuple[Policy, frozenset[int]]:
        """What the block whose first layer is `first` saves, and its mixers in bf16."""
        on_device, on_host = execution.kept(first + len(pattern) // mixers, cfg.layers)
        policy = Policy(None if on_device is None else on_device | on_host, on_host)
        quantized_layers = cfg.layers - precision.last_bf16_layers
        in_bf16 = (n for n in range(len(pattern)) if first + n // mixers >= quantized_layers)
        return policy, frozenset(in_bf16)

    result, layer = [], 0
    for stack, (pattern, times) in enumerate(repeating_blocks(cfg)):
        size = len(pattern) // mixers
        of_blocks = [choices(pattern, layer + block * size) for block in range(times)]
        start = 0
        for (policy, in_bf16), alike in groupby(of_blocks):
            stop = start + len(list(alike))
            result.append(Segment(stack, slice(start, stop), policy, in_bf16))
            start = stop
        layer += times * size
    return result


def prediction_segment(cfg: ModelConfig, execution: Execution, precision: Precision) -> Segment:
    """The block of multi-token prediction. It saves what all layers save on the device."""
    assert cfg.prediction is not None
    counts = execution.saved(cfg.layers)
    saved = None if counts is None else frozenset(n for n, c in counts.items() if c == cfg.layers)
    bf16 = range(len(cfg.prediction.pattern)) if "prediction" in precision.in_bf16 else ()
    return Segment(len(repeating_blocks(cfg)), slice(0, 1), Policy(saved), frozenset(bf16))
