"""The ends of a pipeline, outside its stages. In front of the stages are the embedding and layers
that are unlike the others. Behind them are final norm, head, loss and multi-token prediction.

Each rank computes the ends for one microbatch of every group, so that all ranks have equal work.
All ranks gather their weights. No residuals are stashed: the backward pass recomputes what is in
front of the stages.

Arrays are local to a device, inside a `shard_map` (`mesh`).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxbench.models.context import Context, Sequences
from jaxbench.models.decoder import apply_block
from jaxbench.models.layers import Embedding, LayerOutput, LayerRouting, head_loss
from jaxbench.models.prediction import Prediction
from jaxbench.ops import quantized
from jaxbench.ops.remat import Policy, checkpoint
from jaxbench.ops.stash import add, read
from jaxbench.recipe.model import ModelConfig, first_layers


class Output(NamedTuple):
    """Weights after the last layer: final norm, head, and multi-token prediction without its
    block."""

    norm: nnx.Module
    head: Float[Array, "D V"]
    prediction: Prediction | None


class EndWeights(NamedTuple):
    """Gathered weights of both ends: embedding, blocks before the stages, output layers behind
    them, and the block of multi-token prediction."""

    embedding: Embedding
    before: list[Any]
    output: Output
    behind: list[Any]

    def plus(self, gradients: dict[str, Any]) -> "EndWeights":
        """These sums of gradients, with `gradients` added to the fields that it names."""
        sums = {name: add(getattr(self, name), g) for name, g in gradients.items()}
        return self._replace(**sums)


@dataclass(frozen=True)
class Ends:
    """The computation outside the stages, for this rank's microbatches.

    The stages have the same `ctx` and `policy`. `before_scaled` and `behind_scaled` have an entry
    for each block of the `weights`, None in bf16. `prediction_bf16` are the mixers of the block of
    multi-token prediction, by position, whose matmuls stay in bf16. The arrays of `batch` are
    `[groups, ..]`.
    """

    cfg: ModelConfig
    dtype: Any
    ctx: Context
    policy: Policy
    weights: EndWeights
    before_scaled: list[quantized.Scaled | None]
    behind_scaled: list[quantized.Scaled | None]
    prediction_bf16: frozenset[int]
    batch: Sequences

    @property
    def observed(self) -> tuple[list, list]:
        """Zeros whose gradients are the amax that FP8 observes in the blocks before and behind."""

        def of(all_scaled: list[quantized.Scaled | None]) -> list:
            return [None if scaled is None else scaled.observed for scaled in all_scaled]

        return of(self.before_scaled), of(self.behind_scaled)

    def enter(self, group: Any) -> tuple[jax.Array, Callable]:
        """(input of the first stage, VJP) of a group. The VJP returns gradients of weights, by
        field of `EndWeights`, and the observed amax."""

        def function(weights: dict[str, Any], all_observed: list) -> jax.Array:
            batch: Sequences = read(self.batch, group)
            ctx = self.ctx.with_counters(sequence=batch.first_sequence)
            x = weights["embedding"](batch.tokens, self.dtype)
            blocks = zip(weights["before"], all_observed, self.before_scaled, strict=True)
            for block, observed, scaled in blocks:
                x, _ = self._apply(x, (block, observed), (scaled, None), ctx)
            return x

        return jax.vjp(function, self._fields("embedding", "before"), self.observed[0])

    def leave(self, hidden: jax.Array, group: Any) -> tuple[Any, Callable, Any]:
        """((loss, sum of balance losses), VJP, routing figures summed over sequences) of a group,
        from the output of the last stage. The VJP also returns the gradient of that output."""
        names = ("output", "behind", *(("embedding",) if self.weights.behind else ()))

        def function(weights: dict[str, Any], all_observed: list, hidden: jax.Array) -> Any:
            batch: Sequences = read(self.batch, group)
            numbers = first_layers(self.cfg)[-1]

            def predict_block(x: jax.Array, depth: int) -> LayerOutput:
                (block,), (observed,) = weights["behind"], all_observed
                constants = self.behind_scaled[0], numbers and numbers[0]
                ctx = self.ctx.with_counters(sequence=batch.first_sequence, depth=depth)
                return self._apply(x, (block, observed), constants, ctx, self.prediction_bf16)

            embedding = weights.get("embedding", self.weights.embedding)
            norm, head, prediction = weights["output"]
            further: list[LayerRouting] = []
            hidden = norm(hidden)
            loss = head_loss(self.cfg, head, hidden, batch.targets)
            if prediction is not None:
                loss, further = prediction.further_losses(
                    self.cfg, embedding, head, hidden, loss, batch, predict_block
                )
            figures = [figures for layers in further for figures in layers]
            balance = sum((jnp.sum(layer.balance_loss) for layer in figures), jnp.zeros(()))
            return (loss, balance), jax.tree.map(
                lambda figure: jnp.sum(figure, axis=0).astype(jnp.float32), figures
            )

        weights = self._fields(*names)
        return jax.vjp(function, weights, self.observed[1], hidden, has_aux=True)

    def _fields(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self.weights, name) for name in names}

    def _apply(
        self, x: jax.Array, weights: Any, constants: Any, ctx: Context, bf16: Collection[int] = ()
    ) -> LayerOutput:
        block = partial(apply_block, bf16=frozenset(bf16))
        return checkpoint(block, self.policy, in_order=True)(x, weights, constants, ctx)
