"""Multi-token prediction, except its block (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxbench import mesh
from jaxbench.models.context import Sequences
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
from jaxbench.ops import dense
from jaxbench.ops.loss import MASKED
from jaxbench.recipe.model import ModelConfig


class Prediction(nnx.Module):
    """Multi-token prediction without its block: it makes the block's input, W [norm(next
    embedding); norm(h)], and norms the block's output, which is the next h. The matmul with W is
    never quantized."""

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

    def further_losses(
        self,
        cfg: ModelConfig,
        embedding: Embedding,
        head: Float[Array, "D V"],
        hidden: Hidden,
        loss: Float[Array, ""],
        batch: Sequences,
        predict_block: Callable[[Hidden, int], LayerOutput],
    ) -> tuple[Float[Array, ""], list[LayerRouting]]:
        """(the `loss` of the next token, routing figures of each further token).

        The losses of further tokens contribute gradients to the loss, but are not part of its
        value. `hidden` is the normed output of the last layer. `predict_block` computes the block
        that predicts further tokens, and gets the number of times that it was applied before.
        """
        assert cfg.prediction
        tokens, targets, _ = batch
        all_figures = []
        further = jnp.zeros(())
        for depth in range(cfg.prediction.depth):
            tokens, targets = mesh.next_in_seq(tokens, 0), mesh.next_in_seq(targets, MASKED)
            hidden, loss, further = jax.lax.optimization_barrier((hidden, loss, further))
            embedded = embedding(tokens, hidden.dtype)
            x, figures = predict_block(self(embedded, hidden), depth)
            hidden = self.norm(x)
            further += head_loss(cfg, head, hidden, targets, masked=True)
            all_figures.append(figures)
        further *= cfg.prediction.loss / cfg.prediction.depth
        return loss + (further - jax.lax.stop_gradient(further)), all_figures
