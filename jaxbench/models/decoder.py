"""The decoder of all families: mixers with residuals, in repeating blocks over stacked weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise, zip_longest
from operator import itemgetter

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxbench import mesh
from jaxbench.models.attention import Attention, LatentAttention
from jaxbench.models.context import forward_context
from jaxbench.models.experts import Experts
from jaxbench.models.layers import (
    NORMS,
    Embedding,
    ForwardContext,
    Hidden,
    LayerOutput,
    RoutingFigures,
    Weight,
    embed,
    normal,
)
from jaxbench.models.mamba2 import Mamba2
from jaxbench.models.mlp import make_mlp
from jaxbench.models.output import Output, Prediction, output_loss
from jaxbench.ops import quantized, remat
from jaxbench.ops.layer_stack import Stash, apply_blocks, can_offload
from jaxbench.ops.moe import routing
from jaxbench.recipe.attention_config import AttentionConfig, LatentAttentionConfig
from jaxbench.recipe.execution import INPUT, Execution
from jaxbench.recipe.model import ExpertsConfig, MambaConfig, Mixer, MlpConfig, ModelConfig
from jaxbench.recipe.repeats import first_layers, repeating_blocks, stacks
from jaxbench.recipe.settings import Precision

MIXERS: dict[type, Callable[..., nnx.Module]] = {
    AttentionConfig: Attention,
    LatentAttentionConfig: LatentAttention,
    MlpConfig: make_mlp,
    ExpertsConfig: Experts,
    MambaConfig: Mamba2,
}
"""The mixer for each class that describes one. A mixer maps `"batch shard_seq embed"` and a
`ForwardContext` to an array of the same shape and its `RoutingFigures`."""


class Residual(nnx.Module):
    """x + mixer(norm(x)), or x + norm(mixer(norm(x))). Norms and the sum work on 1/tensor of the
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
    """The mixers of a layer pattern that repeats; in a transformer usually the two mixers of one
    layer."""

    def __init__(self, cfg: ModelConfig, pattern: str, *, key):
        layers = zip(pattern, jax.random.split(key, len(pattern)), strict=True)
        self.layers = nnx.List([Residual(cfg, cfg.mixer(letter), key=k) for letter, k in layers])

    def __call__(self, x: Hidden, ctx: ForwardContext) -> LayerOutput:
        figures: RoutingFigures = ()
        for index in range(len(self.layers)):
            x = remat.save(x, "residual") if index else x
            x, layer_figures = self.apply_layer(index, x, ctx)
            figures += layer_figures
        return x, figures

    def apply_layer(self, index: int, x: Hidden, ctx: ForwardContext) -> LayerOutput:
        """One layer of the block. `ctx.layer` is the number of the block's first layer."""
        number = None if ctx.layer is None else ctx.layer + index
        return self.layers[index](x, ctx._replace(layer=number))


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks of one stack that have the same settings.

    `stack` is the index of the stack, and `repeats` says which of its blocks. `saved` names the
    activations that are saved (None: all), and `offloaded` those of them that wait in the host's
    memory. `bf16` are the mixers of a block, by position, whose matmuls stay in bf16 in an FP8 run.
    """

    stack: int
    repeats: slice
    saved: frozenset[str] | None
    bf16: frozenset[int] = frozenset()
    offloaded: frozenset[str] = frozenset()


class Decoder(nnx.Module):
    """Embedding, stacks of repeating blocks with weights `[blocks, ..]`, final norm, and head. The
    head is a weight, or the embedding table. If the model predicts several tokens, the last stack
    is the block that does so."""

    def __init__(self, cfg: ModelConfig, *, key):
        k_embedding, k_blocks, k_head, k_prediction = jax.random.split(key, 4)
        self.cfg = cfg
        self.embedding = Embedding(cfg, key=k_embedding)
        blocks = stacks(cfg)
        keys = jax.random.split(k_blocks, sum(times for _, times in blocks))
        ends = accumulate(times for _, times in blocks)
        self.stacks = nnx.List(
            [
                stacked(cfg, pattern, keys[end - times : end])
                for (pattern, times), end in zip(blocks, ends, strict=True)
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
        """The compute dtype, which is the dtype of the weights."""
        leaves = jax.tree.leaves(self.stacks, is_leaf=lambda v: isinstance(v, Weight))
        return next(w for w in leaves if isinstance(w, Weight))[...].dtype

    def hidden(
        self,
        tokens: Int[Array, "B S"],
        execution: Execution,
        precision: Precision,
        scaled: Sequence[quantized.Scaled] = (),
        stashes: Sequence[Stash | None] = (),
        first_sequence: Int[Array, ""] | int = 0,
    ) -> tuple[Hidden, list[RoutingFigures], list[Stash]]:
        """(output of the last layer, routing figures of each segment, stash of each segment as
        written). In an FP8 run `scaled` has the FP8 weights and scales of each stack."""
        x = embed(self.cfg, self.embedding, tokens, self.dtype)
        ctx = forward_context(self.cfg, tokens.shape[1], execution, precision, first_sequence)
        all_figures, written = [], []
        for segment, stash in zip_longest(segments(self.cfg, execution, precision), stashes):
            x, figures, stash = self.apply(segment, x, ctx, scaled, stash)
            all_figures.append(figures)
            written.append(stash)
        return x, all_figures, written

    def apply(
        self,
        segment: Segment,
        x: Hidden,
        ctx: ForwardContext,
        scaled: Sequence[quantized.Scaled] = (),
        stash: Stash | None = None,
    ) -> tuple[Hidden, RoutingFigures, Stash]:
        """(output, routing figures, stash as written) of the blocks of a segment."""

        # XLA unrolls a loop over one block, and could merge its forward pass and recomputation.
        single = segment.repeats.stop - segment.repeats.start == 1
        saved = segment.saved
        host = segment.offloaded if can_offload() else frozenset()
        if saved is not None:
            saved -= segment.offloaded - host

        def apply(x, weights, constants, arrays, offloaded=frozenset()):
            (block, observed), (scales, layer) = weights, constants
            here = ctx.with_arrays(arrays)._replace(layer=layer)
            x, figures = apply_block(
                block, observed, scales, x, here, saved, segment.bf16,
                in_order=single, offloaded=offloaded,
            )  # fmt: skip
            return x, jax.tree.map(lambda figure: figure.astype(jnp.float32), figures)

        block = self.stacks[segment.stack]
        scales = scaled[segment.stack] if scaled and len(segment.bf16) < len(block.layers) else None
        layers = jax.tree.map(jnp.array, first_layers(self.cfg)[segment.stack])
        block, scales, layers = jax.tree.map(itemgetter(segment.repeats), (block, scales, layers))
        weights = block, None if scales is None else scales.observed
        return apply_blocks(
            apply, x, weights, (scales, layers), ctx.arrays, stash, unrolled=saved is None,
            offloading=partial(apply, offloaded=named) if (named := host - {INPUT}) else None,
            input_on_host=INPUT in host,
        )  # fmt: skip

    def loss(
        self,
        tokens: Int[Array, "B S"],
        targets: Int[Array, "B S"],
        execution: Execution,
        precision: Precision,
        scaled: Sequence[quantized.Scaled] = (),
        stashes: Sequence[Stash | None] = (),
        first_sequence: Int[Array, ""] | int = 0,
    ) -> tuple[Float[Array, ""], tuple[routing.Figures, list[Stash]]]:
        """(mean cross entropy over all tokens in nats, (routing figures, stashes as written)).
        `first_sequence` is the field of `ForwardContext`.

        The load-balance losses and the loss of multi-token prediction contribute gradients, but are
        not part of the value.
        """
        count = len(segments(self.cfg, execution, precision))
        main, further = stashes[:count], stashes[count:]
        hidden, layers, written = self.hidden(
            tokens, execution, precision, scaled, main, first_sequence
        )
        ctx = forward_context(self.cfg, tokens.shape[1], execution, precision, first_sequence)
        segment = prediction_segment(self.cfg, execution, precision)

        def apply(
            x: Hidden, depth: int, stash: Stash | None
        ) -> tuple[Hidden, RoutingFigures, Stash]:
            assert segment is not None
            return self.apply(segment, x, ctx._replace(depth=depth), scaled, stash)

        output = Output(self.norm, self.head_weight(), self.prediction)
        value, (figures, stashes) = output_loss(
            self.cfg, output, self.embedding, hidden, tokens, targets, apply, further
        )
        value, all_figures = routing.with_balance_loss(
            value, layers + figures, self.cfg.balance_loss
        )
        return value, (all_figures, written + stashes)

    def head_weight(self) -> Float[Array, "D V"]:
        """The head at rest, `"embed vocab"`, in the compute dtype."""
        if self.head is not None:
            return self.head[...]
        return mesh.as_weight(self.embedding.table[...].T.astype(self.dtype), "embed vocab")


def apply_block(
    block: Block,
    observed: Array | None,
    scales: quantized.Scaled | None,
    x: Hidden,
    ctx: ForwardContext,
    saved: frozenset[str] | None,
    bf16: frozenset[int] = frozenset(),
    *,
    in_order: bool = False,
    offloaded: frozenset[str] = frozenset(),
) -> LayerOutput:
    """One block under a remat policy.

    In a quantized run it comes with its scales and with `observed`: zeros whose gradients are the
    observed amax (`Scaled.observed`). The mixers in `bf16` are not quantized. `saved`, `in_order`
    and `offloaded` are arguments of `remat.recomputed`. With `in_order` the gradient of x is
    available only after the gradients of the block's weights.

    A block of more than two layers whose inputs are saved (`residual`) is recomputed layer by
    layer. The backward pass goes through the layers from the last to the first. The recomputation
    of layer i waits for the weight gradients of layer i + 2, so that it can overlap with the weight
    gradients of layer i + 1 and their reduce-scatter.
    """
    operands = block, observed, scales, ctx.arrays

    def attached(block, observed, scales, arrays) -> tuple[Block, ForwardContext]:
        here, plain = ctx.with_arrays(arrays), block
        if scales is not None:
            scales = replace(scales, observed=observed)
            block = quantized.attach(plain, scales, here.first_sequence, here.depth)
            for position in bf16:
                block.layers[position] = plain.layers[position]
        return block, here

    def whole(x: Hidden, operands: tuple) -> LayerOutput:
        weights, *rest = operands
        if in_order and saved is not None:
            weights, x = remat.signal_gradients(weights, x)
        block, ctx = attached(weights, *rest)
        return block(x, ctx)

    def one_layer(state: tuple[Hidden, Array], operands: tuple, index: int):
        (x, signal), (block, *rest) = state, operands
        block = jax.tree.map(lambda w: w, block)
        block.layers[index], signal = remat.signal_gradients(block.layers[index], signal)
        block, ctx = attached(block, *rest)
        x, figures = block.apply_layer(index, x, ctx)
        return remat.await_gradients(x, signal), figures

    count = len(block.layers)
    if saved is None or "residual" not in saved or count <= 2:
        return remat.recomputed(whole, saved, in_order=in_order, offloaded=offloaded)(x, operands)
    figures: RoutingFigures = ()
    signals = [jnp.zeros(()), jnp.zeros(())]
    for index in range(count):
        layer = partial(one_layer, index=index)
        compute = remat.recomputed(layer, saved, in_order=True, offloaded=offloaded)
        (x, signal), layer_figures = compute((x, signals[index]), operands)
        signals.append(signal)
        figures += layer_figures
    return x, figures


def stacked(cfg: ModelConfig, pattern: str, keys) -> Block:
    """One block per key, with weights stacked on axis 0."""
    return jax.vmap(lambda key: Block(cfg, pattern, key=key))(keys)


def segments(cfg: ModelConfig, execution: Execution, precision: Precision) -> list[Segment]:
    """All layers as segments, in order.

    Settings count layers as published: a layer of a transformer is attention and MLP. A block of
    several layers saves an activation if all of its layers do.
    """
    result, first = [], 0
    counts, mixers = execution.saved(cfg.layers), len(cfg.layer_patterns[0])
    fp8_layers = range(precision.first_bf16_layers, cfg.layers - precision.last_bf16_layers)
    for stack, (pattern, times) in enumerate(repeating_blocks(cfg)):
        size = len(pattern) // mixers

        def repeats(layers: int, first=first, times=times, size=size) -> int:
            return min(max((layers - first) // size, 0), times)

        in_bf16 = [
            frozenset(n for n in range(len(pattern)) if layer + n // mixers not in fp8_layers)
            for layer in range(first, first + times * size, size)
        ]
        changes = {n for n in range(1, times) if in_bf16[n] != in_bf16[n - 1]}
        saving, offloading = (
            {name: repeats(count) for name, count in (layers or {}).items()}
            for layers in (counts, execution.offloaded(cfg.layers))
        )
        ends = {0, times, *changes, *saving.values(), *offloading.values()}
        for start, stop in pairwise(sorted(ends)):
            on_device, named = (
                frozenset(n for n, count in layers.items() if count >= stop)
                for layers in (saving, offloading)
            )
            saved = None if counts is None else on_device | named
            blocks, bf16 = slice(start, stop), in_bf16[start]
            result.append(Segment(stack, blocks, saved, bf16, named - on_device))
        first += times * size
    return result


def prediction_segment(
    cfg: ModelConfig, execution: Execution, precision: Precision
) -> Segment | None:
    """The block of multi-token prediction, or None. It saves what all layers save on the device."""
    if cfg.prediction is None:
        return None
    counts = execution.saved(cfg.layers)
    saved = None if counts is None else frozenset(n for n, c in counts.items() if c == cfg.layers)
    bf16 = range(len(cfg.prediction.pattern)) if "prediction" in precision.in_bf16 else ()
    return Segment(len(repeating_blocks(cfg)), slice(0, 1), saved, frozenset(bf16))
