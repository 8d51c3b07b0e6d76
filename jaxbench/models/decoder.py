"""One decoder for all families: residual layers spelled in letters, repeating units applied over
stacked weights."""

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
from jaxbench.models.layers import NORMS, Embedding, Pass, Routed, Weight, normal, rotary_tables
from jaxbench.models.mamba2 import Mamba2
from jaxbench.models.mlp import make_mlp
from jaxbench.ops import attention, fp8, remat
from jaxbench.ops.loss import cross_entropy
from jaxbench.ops.repeat import Slots, repeat
from jaxbench.recipe.model import ModelConfig
from jaxbench.recipe.settings import Execution, Precision

MIXERS: dict[str, Callable[..., nnx.Module]] = {
    "*": Attention,
    "-": make_mlp,
    "E": Experts,
    "M": Mamba2,
}
"""What the letters of a pattern stand for. A mixer takes `"batch shard_seq embed"` and a `Pass`,
and returns the like and what it `Routed`."""


class Layer(nnx.Module):
    """x + mixer(norm(x)), or x + norm(mixer(norm(x))). Norms and sum work on 1/tensor of the
    sequence."""

    def __init__(self, cfg: ModelConfig, letter: str, *, key):
        self.norm = NORMS[cfg.norm](cfg)
        self.mixer = MIXERS[letter](cfg, key=key)
        self.post_norm = NORMS[cfg.norm](cfg) if cfg.post_norm else None

    def __call__(
        self, x: Float[Array, "B S D"], shared: Pass
    ) -> tuple[Float[Array, "B S D"], Routed]:
        y, routed = self.mixer(self.norm(x), shared)
        if self.post_norm is not None:
            y = self.post_norm(y)
        return x + y, routed


class Unit(nnx.Module):
    """The layers that repeat: attention and MLP in a transformer."""

    def __init__(self, cfg: ModelConfig, letters: str, *, key):
        keys = jax.random.split(key, len(letters))
        self.layers = nnx.List(
            [Layer(cfg, letter, key=k) for letter, k in zip(letters, keys, strict=True)]
        )

    def __call__(
        self, x: Float[Array, "B S D"], shared: Pass
    ) -> tuple[Float[Array, "B S D"], Routed]:
        *inner, last = self.layers
        routed: Routed = ()
        for layer in inner:
            x, more = layer(x, shared)
            x, routed = remat.save(x, "residual"), routed + more
        x, more = last(x, shared)
        return x, routed + more


class Decoder(nnx.Module):
    """Embedding, the repeating units with their weights stacked on axis 0, final norm, and the
    head: a matrix of its own or the embedding's."""

    def __init__(self, cfg: ModelConfig, *, key):
        k_embedding, k_units, k_head = jax.random.split(key, 3)
        self.cfg = cfg
        self.embedding = Embedding(cfg, key=k_embedding)
        units = repeating_units(cfg)
        keys = jax.random.split(k_units, sum(times for _, times in units))
        ends = accumulate(times for _, times in units)
        self.units = nnx.List(
            [
                stacked(cfg, letters, keys[end - times : end])
                for (letters, times), end in zip(units, ends, strict=True)
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
        leaves = jax.tree.leaves(self.units, is_leaf=lambda v: isinstance(v, Weight))
        return next(w for w in leaves if isinstance(w, Weight))[...].dtype

    def hidden(
        self,
        tokens: Int[Array, "B S"],
        execution: Execution,
        precision: Precision,
        scaled: Sequence[fp8.Scaled] = (),
        slots: Sequence[Slots | None] = (),
    ) -> tuple[Float[Array, "B S D"], list[Routed], list[Slots]]:
        """(what the last layer gives, routing of each stretch of layers, slots of each stretch as
        they are now); `scaled` are the scales of an FP8 run, for each stack of units."""
        cfg = self.cfg
        x = embed(cfg, self.embedding, tokens, self.dtype)
        shared = make_pass(cfg, tokens.shape[1], execution, precision)

        def apply(x, weights, scales, rotary):
            x, routed = apply_unit(*weights, scales, x, shared._replace(rotary=rotary))
            return x, jax.tree.map(lambda figure: figure.astype(jnp.float32), routed)

        routed, filled = [], []
        for stretch, own in zip_longest(stretches(cfg, execution, precision), slots):
            scales = scaled[stretch.stack] if scaled and not stretch.bf16 else None
            unit, scales = jax.tree.map(
                itemgetter(stretch.repeats), (self.units[stretch.stack], scales)
            )
            weights = unit, None if scales is None else scales.observed
            x, figures, own = repeat(apply, stretch.saved, x, weights, scales, shared.rotary, own)
            routed.append(figures)
            filled.append(own)
        return x, routed, filled

    def loss(
        self,
        tokens: Int[Array, "B S"],
        targets: Int[Array, "B S"],
        execution: Execution,
        precision: Precision,
        scaled: Sequence[fp8.Scaled] = (),
        slots: Sequence[Slots | None] = (),
    ) -> tuple[Float[Array, ""], tuple[routing.Figures, list[Slots]]]:
        """(mean cross entropy over all tokens in nats, (figures of the routing, slots as they are
        now)).

        The load-balance loss of all layers adds its gradient, but not its value.
        """
        hidden, routed, slots = self.hidden(tokens, execution, precision, scaled, slots)
        value = head_loss(self.cfg, self.norm, self.head_weight(), hidden, targets)
        value, figures = routing.with_balance_loss(value, routed, self.cfg.balance_loss)
        return value, (figures, slots)

    def head_weight(self) -> Float[Array, "D V"]:
        """The head at rest, `"embed vocab"`, in the compute dtype."""
        if self.head is not None:
            return self.head[...]
        return mesh.as_weight(self.embedding.table[...].T.astype(self.dtype), "embed vocab")


def make_pass(cfg: ModelConfig, length: int, execution: Execution, precision: Precision) -> Pass:
    """What the layers share in a pass over sequences of a length, on the current mesh."""
    platform, shard = mesh.platform(), length // mesh.ranks("seq")
    return Pass(
        rotary=rotary_tables(cfg, length),
        kernel=attention.choose(execution, cfg, length, platform),
        ssd=ssd.choose(execution, cfg, precision.dtype, shard, platform),
    )


def embed(
    cfg: ModelConfig, embedding: Embedding, tokens: Int[Array, "B S"], dtype
) -> Float[Array, "B s D"]:
    """What the first layer is given."""
    return times_constant(embedding(tokens, dtype), cfg.embedding_scale)


def apply_unit(
    unit: Unit,
    observed: Array | None,
    scales: fp8.Scaled | None,
    x: Float[Array, "B S D"],
    shared: Pass,
) -> tuple[Float[Array, "B S D"], Routed]:
    """One unit, with the scales of its products in an FP8 run, and what they observe
    (`fp8.Scaled.observed`), which has gradients as the unit has."""
    if scales is None:
        return unit(x, shared)
    return fp8.attach(unit, replace(scales, observed=observed))(x, shared)


def head_loss(
    cfg: ModelConfig,
    norm: nnx.Module,
    head: Float[Array, "D V"],
    hidden: Float[Array, "B s D"],
    targets: Int[Array, "B S"],
) -> Float[Array, ""]:
    """The mean cross entropy of what the last layer gives, through final norm and head."""
    hidden = mesh.gather_seq(times_constant(norm(hidden), cfg.logit_scale))
    return cross_entropy(hidden, head, targets)


def times_constant(x: Array, factor: float) -> Array:
    """`x` times a constant that its dtype may not hold exactly."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def stacked(cfg: ModelConfig, letters: str, keys) -> Unit:
    """A unit for each key, their weights stacked on axis 0."""
    return jax.vmap(lambda key: Unit(cfg, letters, key=key))(keys)


def repeating_units(cfg: ModelConfig) -> list[tuple[str, int]]:
    """The stack as units, each with the number of times that it repeats: the pattern of a
    transformer, `cut` letters of a hybrid."""
    return cut(cfg.letters) if "M" in cfg.pattern else [(cfg.pattern, cfg.layers)]


@cache
def cut(letters: str) -> list[tuple[str, int]]:
    """Letters as repeating units.

    Of all ways to cut them, one with the fewest letters in its units, since these are what is
    compiled, and then with the fewest units: `M-M-M-M*-M-` ten times and `M-` four times for the
    118 letters of Nemotron-H 56B.
    """
    best: dict[int, tuple[int, list[tuple[str, int]]]] = {len(letters): (0, [])}
    for start in reversed(range(len(letters))):
        cuts = []
        for length in range(1, len(letters) - start + 1):
            unit, stop = letters[start : start + length], start
            while letters.startswith(unit, stop):
                stop += length
                compiled, rest = best[stop]
                cuts.append((compiled + length, [(unit, (stop - start) // length), *rest]))
        best[start] = min(cuts, key=lambda cut: (cut[0], len(cut[1])))
    return best[0][1]


@dataclass(frozen=True)
class Stretch:
    """Repeats of a unit that are computed alike: the number of its stack, the repeats, the
    activations that they save (None: all), and whether their products stay in bf16 in an FP8
    run."""

    stack: int
    repeats: slice
    saved: frozenset[str] | None
    bf16: bool


def stretches(cfg: ModelConfig, execution: Execution, precision: Precision) -> list[Stretch]:
    """The whole stack of layers as stretches, in order.

    Settings count published layers. A unit of several layers saves an activation when all of its
    layers do, and stays in bf16 when any of them does.
    """
    found, first = [], 0
    kept = execution.saved(cfg.layers)
    for stack, (letters, times) in enumerate(repeating_units(cfg)):
        size = len(letters) * cfg.layers // len(cfg.letters)

        def repeats(layers: int, first=first, times=times, size=size) -> int:
            return min(max((layers - first) // size, 0), times)

        saving = {name: repeats(count) for name, count in (kept or {}).items()}
        start_fp8 = repeats(precision.first_bf16_layers + size - 1)
        stop_fp8 = repeats(cfg.layers - precision.last_bf16_layers)
        for start, stop in pairwise(sorted({0, times, start_fp8, stop_fp8, *saving.values()})):
            saved = (
                None
                if kept is None
                else frozenset(n for n, count in saving.items() if count >= stop)
            )
            in_bf16 = start < start_fp8 or stop > stop_fp8
            found.append(Stretch(stack, slice(start, stop), saved, in_bf16))
        first += times * size
    return found
