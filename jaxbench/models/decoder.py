"""One decoder for all families: residual layers spelled in letters, the repeating unit scanned over
stacked weights."""

from itertools import pairwise
from operator import itemgetter

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxbench import loss, mesh, ops, routing
from jaxbench.config import Execution, ModelConfig
from jaxbench.models.layers import (
    Attention,
    Embedding,
    Mlp,
    RMSNorm,
    Rotary,
    Weight,
    normal,
    rotary_tables,
)
from jaxbench.models.moe import Experts

MIXERS = {"*": Attention, "-": Mlp, "E": Experts}

Routed = tuple[tuple[Array, Array, Array], ...]
"""What `Experts` says of its routing, for each such layer."""


class Layer(nnx.Module):
    """x + mixer(norm(x)), or x + norm(mixer(norm(x))). Norms and sum work on 1/tensor of the
    sequence, the mixer on all of it; experts take each token where it lies."""

    def __init__(self, cfg: ModelConfig, letter: str, *, key):
        self.norm = RMSNorm(cfg)
        self.mixer = MIXERS[letter](cfg, key=key)
        self.post_norm = RMSNorm(cfg) if cfg.post_norm else None

    def __call__(
        self, x: Float[Array, "B S D"], rotary: Rotary, execution: Execution
    ) -> tuple[Float[Array, "B S D"], Routed]:
        y = self.norm(x)
        routed: Routed = ()
        if isinstance(self.mixer, Experts):
            y, figures = self.mixer(y)
            routed = (figures,)
        else:
            y = mesh.shard(
                self.mixer(mesh.gather_seq(y), rotary, execution), "batch shard_seq embed"
            )
        if self.post_norm is not None:
            y = self.post_norm(y)
        return x + y, routed


class Unit(nnx.Module):
    """The layers that repeat: attention and MLP in a transformer."""

    def __init__(self, cfg: ModelConfig, *, key):
        keys = jax.random.split(key, len(cfg.pattern))
        self.layers = nnx.List(
            [Layer(cfg, letter, key=k) for letter, k in zip(cfg.pattern, keys, strict=True)]
        )

    def __call__(
        self, x: Float[Array, "B S D"], rotary: Rotary, execution: Execution
    ) -> tuple[Float[Array, "B S D"], Routed]:
        *inner, last = self.layers
        routed: Routed = ()
        for layer in inner:
            x, more = layer(x, rotary, execution)
            x, routed = ops.save(x, "residual"), routed + more
        x, more = last(x, rotary, execution)
        return x, routed + more


class Decoder(nnx.Module):
    """Embedding, the units with their weights stacked on axis 0, final norm, and the head: a matrix
    of its own or the embedding's."""

    def __init__(self, cfg: ModelConfig, *, key):
        k_embedding, k_units, k_head = jax.random.split(key, 3)
        self.cfg = cfg
        self.embedding = Embedding(cfg, key=k_embedding)
        self.units = jax.vmap(lambda key: Unit(cfg, key=key))(jax.random.split(k_units, cfg.layers))
        self.norm = RMSNorm(cfg)
        shape, dims = (cfg.embed, cfg.vocabulary), "embed vocab"
        self.head = (
            None
            if cfg.tied
            else Weight(normal(k_head, cfg, dims, shape, fan_in=cfg.embed, truncated=True))
        )

    def __call__(self, tokens: Int[Array, "B S"], execution: Execution) -> Float[Array, "B S D"]:
        """The normalised last hidden state."""
        return self._hidden(tokens, execution)[0]

    @property
    def dtype(self):
        """The compute dtype: that of the weights."""
        leaves = jax.tree.leaves(self.units, is_leaf=lambda v: isinstance(v, Weight))
        return next(w[...].dtype for w in leaves if isinstance(w, Weight))

    def _hidden(self, tokens, execution) -> tuple[Float[Array, "B S D"], list[Routed]]:
        """(last hidden state, routing of each stretch of layers)."""
        x = scaled(self.embedding(tokens, self.dtype), self.cfg.embedding_scale)
        rotary = rotary_tables(self.cfg, tokens.shape[1])

        def apply(x, unit):
            return unit(x, rotary, execution)

        stretches = []
        for layers, saved in remat_segments(execution.saved(self.cfg.layers), self.cfg.layers):
            units = jax.tree.map(itemgetter(layers), self.units)
            x, routed = jax.lax.scan(ops.remat(apply, saved), x, units)
            stretches.append(routed)
        return self.norm(x), stretches

    def loss(
        self, tokens: Int[Array, "B S"], targets: Int[Array, "B S"], execution: Execution
    ) -> tuple[Float[Array, ""], routing.Figures]:
        """(mean cross entropy over all tokens in nats, figures of the routing).

        The load-balance loss of all layers adds its gradient, but not its value.
        """
        hidden, stretches = self._hidden(tokens, execution)
        hidden = mesh.gather_seq(scaled(hidden, self.cfg.logit_scale))
        if self.head is None:
            head = mesh.as_weight(self.embedding.table[...].T.astype(hidden.dtype), "embed vocab")
        else:
            head = self.head[...]
        value = loss.cross_entropy(hidden, head, targets)
        return routing.balanced(value, stretches, self.cfg.balance_loss)


def scaled(x: Array, factor: float) -> Array:
    """`x` times a constant that its dtype may not hold exactly."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def remat_segments(
    saved: dict[str, int] | None, layers: int
) -> list[tuple[slice, set[str] | None]]:
    """Stretches of layers with one remat policy, and the activations that each saves.

    `saved` maps activations to the number of first layers that keep them (`Execution.saved`).
    """
    if saved is None:
        return [(slice(0, layers), None)]
    bounds = sorted({0, layers, *saved.values()})
    return [
        (slice(start, stop), {name for name, count in saved.items() if count >= stop})
        for start, stop in pairwise(bounds)
    ]
