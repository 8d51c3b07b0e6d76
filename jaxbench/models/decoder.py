"""One decoder for all families: residual layers spelled in letters, the repeating unit scanned over
stacked weights."""

from itertools import pairwise
from operator import itemgetter

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxbench import fp8, loss, mesh, ops
from jaxbench.config import Execution, ModelConfig, Precision
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

MIXERS = {"*": Attention, "-": Mlp}


class Layer(nnx.Module):
    """x + mixer(norm(x)). Norm and sum work on 1/tensor of the sequence, the mixer on all of it."""

    def __init__(self, cfg: ModelConfig, letter: str, *, key):
        self.norm = RMSNorm(cfg)
        self.mixer = MIXERS[letter](cfg, key=key)

    def __call__(
        self, x: Float[Array, "B S D"], rotary: Rotary, execution: Execution
    ) -> Float[Array, "B S D"]:
        y = self.mixer(mesh.gather_seq(self.norm(x)), rotary, execution)
        return x + mesh.shard(y, "batch shard_seq embed")


class Unit(nnx.Module):
    """The layers that repeat: attention and MLP in a transformer."""

    def __init__(self, cfg: ModelConfig, *, key):
        keys = jax.random.split(key, len(cfg.pattern))
        self.layers = nnx.List(
            [Layer(cfg, letter, key=k) for letter, k in zip(cfg.pattern, keys, strict=True)]
        )

    def __call__(
        self, x: Float[Array, "B S D"], rotary: Rotary, execution: Execution
    ) -> Float[Array, "B S D"]:
        *inner, last = self.layers
        for layer in inner:
            x = ops.save(layer(x, rotary, execution), "residual")
        return last(x, rotary, execution)


class Decoder(nnx.Module):
    """Embedding, the units with their weights stacked on axis 0, final norm and untied head."""

    def __init__(self, cfg: ModelConfig, *, key):
        k_embedding, k_units, k_head = jax.random.split(key, 3)
        self.cfg = cfg
        self.embedding = Embedding(cfg, key=k_embedding)
        self.units = jax.vmap(lambda key: Unit(cfg, key=key))(jax.random.split(k_units, cfg.layers))
        self.norm = RMSNorm(cfg)
        shape = (cfg.embed, cfg.vocabulary)
        self.head = Weight(
            normal(k_head, cfg, "embed vocab", shape, fan_in=cfg.embed, truncated=True)
        )

    def __call__(
        self, tokens: Int[Array, "B S"], execution: Execution, precision: Precision
    ) -> Float[Array, "B S D"]:
        """The normalised last hidden state. The compute dtype is that of the weights."""
        x = self.embedding(tokens, self.head[...].dtype)
        rotary = rotary_tables(self.cfg, tokens.shape[1])

        def apply(x, unit):
            return unit(x, rotary, execution), None

        count = self.cfg.layers
        for layers, saved, in_bf16 in segments(execution.saved(count), precision, count):
            units = jax.tree.map(itemgetter(layers), self.units)
            units = fp8.detach(units) if in_bf16 else units
            x, _ = jax.lax.scan(ops.remat(apply, saved), x, units)
        return self.norm(x)

    def loss(
        self,
        tokens: Int[Array, "B S"],
        targets: Int[Array, "B S"],
        execution: Execution,
        precision: Precision,
    ) -> Float[Array, ""]:
        """Mean cross entropy over all tokens, in nats."""
        hidden = mesh.gather_seq(self(tokens, execution, precision))
        return loss.cross_entropy(hidden, self.head[...], targets)


def segments(
    saved: dict[str, int] | None, precision: Precision, layers: int
) -> list[tuple[slice, set[str] | None, bool]]:
    """Stretches of layers that are computed alike: the activations that each saves, and whether its
    products stay in bf16 in an FP8 run.

    `saved` maps activations to the number of first layers that keep them (`Execution.saved`).
    """
    first, last = precision.first_bf16_layers, layers - precision.last_bf16_layers
    counts = {} if saved is None else saved
    bounds = sorted({0, layers, min(first, layers), max(last, 0), *counts.values()})
    return [
        (
            slice(start, stop),
            None if saved is None else {name for name, n in saved.items() if n >= stop},
            start < first or stop > last,
        )
        for start, stop in pairwise(bounds)
    ]
