"""One decoder for all families: residual layers spelled in letters, repeating units scanned over
stacked weights."""

from functools import cache
from itertools import accumulate, pairwise
from operator import itemgetter

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxbench import fp8, loss, mesh, ops, routing
from jaxbench.config import Execution, ModelConfig, Precision
from jaxbench.models.layers import (
    MLPS,
    NORMS,
    Attention,
    Embedding,
    Rotary,
    Weight,
    normal,
    rotary_tables,
)
from jaxbench.models.mamba2 import Mamba2
from jaxbench.models.moe import Experts

Routed = tuple[tuple[Array, Array, Array], ...]
"""What `Experts` says of its routing, for each such layer."""


def make_mixer(cfg: ModelConfig, letter: str, *, key) -> nnx.Module:
    """The mixer that a letter of the pattern stands for."""
    mixers = {"*": Attention, "-": MLPS[cfg.activation], "E": Experts, "M": Mamba2}
    return mixers[letter](cfg, key=key)


class Layer(nnx.Module):
    """x + mixer(norm(x)), or x + norm(mixer(norm(x))). Norms and sum work on 1/tensor of the
    sequence, the mixer on all of it; experts take each token where it lies."""

    def __init__(self, cfg: ModelConfig, letter: str, *, key):
        self.norm = NORMS[cfg.norm](cfg)
        self.mixer = make_mixer(cfg, letter, key=key)
        self.post_norm = NORMS[cfg.norm](cfg) if cfg.post_norm else None

    def __call__(
        self, x: Float[Array, "B S D"], rotary: Rotary | None, execution: Execution
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

    def __init__(self, cfg: ModelConfig, letters: str, *, key):
        keys = jax.random.split(key, len(letters))
        self.layers = nnx.List(
            [Layer(cfg, letter, key=k) for letter, k in zip(letters, keys, strict=True)]
        )

    def __call__(
        self, x: Float[Array, "B S D"], rotary: Rotary | None, execution: Execution
    ) -> tuple[Float[Array, "B S D"], Routed]:
        *inner, last = self.layers
        routed: Routed = ()
        for layer in inner:
            x, more = layer(x, rotary, execution)
            x, routed = ops.save(x, "residual"), routed + more
        x, more = last(x, rotary, execution)
        return x, routed + more


class Decoder(nnx.Module):
    """Embedding, the repeating units with their weights stacked on axis 0, final norm, and the
    head: a matrix of its own or the embedding's."""

    def __init__(self, cfg: ModelConfig, *, key):
        k_embedding, k_units, k_head = jax.random.split(key, 3)
        self.cfg = cfg
        self.embedding = Embedding(cfg, key=k_embedding)
        units = repeating_units(cfg.letters)
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

    def __call__(
        self, tokens: Int[Array, "B S"], execution: Execution, precision: Precision
    ) -> Float[Array, "B S D"]:
        """The normalised last hidden state."""
        return self._hidden(tokens, execution, precision)[0]

    @property
    def dtype(self):
        """The compute dtype: that of the weights."""
        kinds = Weight, fp8.Operand
        leaves = jax.tree.leaves(self.units, is_leaf=lambda v: isinstance(v, kinds))
        weight = next(w for w in leaves if isinstance(w, kinds))
        return (weight.kernel if isinstance(weight, fp8.Operand) else weight[...]).dtype

    def _hidden(self, tokens, execution, precision) -> tuple[Float[Array, "B S D"], list[Routed]]:
        """(last hidden state, routing of each stretch of layers)."""
        x = scaled(self.embedding(tokens, self.dtype), self.cfg.embedding_scale)
        rotary = rotary_tables(self.cfg, tokens.shape[1])

        def apply(x, unit):
            return unit(x, rotary, execution)

        figures = []
        for stack, repeats, saved, in_bf16 in stretches(self.cfg, execution, precision):
            units = jax.tree.map(itemgetter(repeats), self.units[stack])
            units = fp8.detach(units) if in_bf16 else units
            x, routed = jax.lax.scan(ops.remat(apply, saved), x, units)
            figures.append(routed)
        return self.norm(x), figures

    def loss(
        self,
        tokens: Int[Array, "B S"],
        targets: Int[Array, "B S"],
        execution: Execution,
        precision: Precision,
    ) -> tuple[Float[Array, ""], routing.Figures]:
        """(mean cross entropy over all tokens in nats, figures of the routing).

        The load-balance loss of all layers adds its gradient, but not its value.
        """
        hidden, figures = self._hidden(tokens, execution, precision)
        hidden = mesh.gather_seq(scaled(hidden, self.cfg.logit_scale))
        if self.head is None:
            head = mesh.as_weight(self.embedding.table[...].T.astype(hidden.dtype), "embed vocab")
        else:
            head = self.head[...]
        value = loss.cross_entropy(hidden, head, targets)
        return routing.balanced(value, figures, self.cfg.balance_loss)


def scaled(x: Array, factor: float) -> Array:
    """`x` times a constant that its dtype may not hold exactly."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def stacked(cfg: ModelConfig, letters: str, keys) -> Unit:
    """A unit for each key, their weights stacked on axis 0."""
    return jax.vmap(lambda key: Unit(cfg, letters, key=key))(keys)


@cache
def repeating_units(letters: str) -> list[tuple[str, int]]:
    """The stack as units, each with the number of times that it repeats.

    Of all ways to cut it, one with the fewest letters in its units, since these are what is
    compiled, and then with the fewest units: `*-` for a transformer; `M-M-M-M*-M-` ten times and
    `M-` four times for the 118 letters of Nemotron-H 56B.
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


def stretches(
    cfg: ModelConfig, execution: Execution, precision: Precision
) -> list[tuple[int, slice, set[str] | None, bool]]:
    """The repeats of each unit that are computed alike: the index of the unit, the repeats, the
    activations that they save (None: all), and whether their products stay in bf16 in an FP8 run.

    Settings count published layers. A unit of several layers saves an activation when all of its
    layers do, and stays in bf16 when any of them does.
    """
    found, first = [], 0
    kept = execution.saved(cfg.layers)
    for stack, (letters, times) in enumerate(repeating_units(cfg.letters)):
        size = len(letters) * cfg.layers // len(cfg.letters)

        def repeats(layers: int, first=first, times=times, size=size) -> int:
            return min(max((layers - first) // size, 0), times)

        saving = {name: repeats(count) for name, count in (kept or {}).items()}
        start_fp8 = repeats(precision.first_bf16_layers + size - 1)
        stop_fp8 = repeats(cfg.layers - precision.last_bf16_layers)
        for start, stop in pairwise(sorted({0, times, start_fp8, stop_fp8, *saving.values()})):
            saved = None if kept is None else {n for n, count in saving.items() if count >= stop}
            in_bf16 = start < start_fp8 or stop > stop_fp8
            found.append((stack, slice(start, stop), saved, in_bf16))
        first += times * size
    return found
