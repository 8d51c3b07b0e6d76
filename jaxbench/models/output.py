"""The output of a model: final norm, head, loss, and all of multi-token prediction except its block
(DeepSeek-AI 2024, "DeepSeek-V3", section 2.2)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxbench import mesh
from jaxbench.models.context import Batch
from jaxbench.models.layers import (
    NORMS,
    Embedding,
    Hidden,
    LayerOutput,
    RoutingFigures,
    Weight,
    normal,
)
from jaxbench.ops import dense
from jaxbench.ops.loss import MASKED, Options, cross_entropy
from jaxbench.recipe.model import ModelConfig


class Prediction(nnx.Module):
    """Multi-token prediction without its block: it makes the block's input, W [norm(next
    embedding); norm(h)], and norms the block's output, which is the next h. The matmul with W stays
    in bf16 in FP8 runs."""

    def __init__(self, cfg: ModelConfig, *, key):
        norm = NORMS[cfg.norm]
        self.embedding_norm, self.hidden_norm, self.norm = norm(cfg), norm(cfg), norm(cfg)
        shape = 2 * cfg.embed, cfg.embed
        self.project = Weight(normal(key, cfg, "embed latent", shape, fan_in=2 * cfg.embed))

    def __call__(self, embedded: Hidden, hidden: Hidden) -> Hidden:
        """The input of the block, from the embedding of the next tokens and the normed h."""
        both = self.embedding_norm(embedded), self.hidden_norm(hidden)
        x = jnp.concatenate(both, axis=-1)
        return dense.dot("BSD,DL->BSL", x, self.project, "batch shard_seq latent")


class Output(NamedTuple):
    """Weights after the last layer: final norm, head, and multi-token prediction without its
    block."""

    norm: nnx.Module
    head: Float[Array, "D V"]
    prediction: Prediction | None


def output_loss(
    cfg: ModelConfig,
    output: Output,
    embedding: Embedding,
    hidden: Hidden,
    batch: Batch,
    apply: Callable[[Hidden, int], LayerOutput],
) -> tuple[Float[Array, ""], list[RoutingFigures]]:
    """(mean cross entropy of the last layer's output, through final norm and head; routing figures
    of each further token).

    The loss of further tokens contributes gradients, but is not part of the value. `apply` computes
    the block that predicts them, and gets the number of times that it was applied before.
    """
    (norm, head, prediction), (tokens, targets, _) = output, batch
    hidden = norm(hidden)
    value = head_loss(cfg, head, hidden, targets)
    if prediction is None:
        return value, []
    assert cfg.prediction
    all_figures = []
    further = jnp.zeros(())
    for depth in range(cfg.prediction.depth):
        tokens, targets = mesh.next_in_seq(tokens, 0), mesh.next_in_seq(targets, MASKED)
        hidden, value, further = jax.lax.optimization_barrier((hidden, value, further))
        embedded = embedding(tokens, hidden.dtype)
        x, figures = apply(prediction(embedded, hidden), depth)
        hidden = prediction.norm(x)
        further += head_loss(cfg, head, hidden, targets, masked=True)
        all_figures.append(figures)
    further *= cfg.prediction.loss / cfg.prediction.depth
    return value + (further - jax.lax.stop_gradient(further)), all_figures


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
    in_order = cfg.prediction is not None or cfg.mamba is not None
    return cross_entropy(hidden, head, targets, Options(masked, in_order))
