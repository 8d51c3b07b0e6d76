"""One decoder for all families: residual layers spelled in letters, repeating units scanned over
stacked weights."""

from functools import cache
from itertools import accumulate, pairwise
from operator import itemgetter

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxbench import fp8, loss, mesh, ops
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


def make_mixer(cfg: ModelConfig, letter: str, *, key) -> nnx.Module:
    """The mixer that a letter of the pattern stands for."""
    mixers = {"*": Attention, "-": MLPS[cfg.mlp], "M": Mamba2}
    return mixers[letter](cfg, key=key)


class Layer(nnx.Module):
    """x + mixer(norm(x)). Norm and sum work on 1/tensor of the sequence, the mixer on all of it."""

    def __init__(self, cfg: ModelConfig, letter: str, *, key):
        self.norm = NORMS[cfg.norm](cfg)
        self.mixer = make_mixer(cfg, letter, key=key)

    def __call__(
        self, x: Float[Array, "B S D"], rotary: Rotary | None, execution: Execution
    ) -> Float[Array, "B S D"]:
        y = self.mixer(mesh.gather_seq(self.norm(x)), rotary, execution)
        return x + mesh.shard(y, "batch shard_seq embed")


class Unit(nnx.Module):
    """The layers that repeat: attention and MLP in a transformer."""

    def __init__(self, cfg: ModelConfig, letters: str, *, key):
        keys = jax.random.split(key, len(letters))
        self.layers = nnx.List(
            [Layer(cfg, letter, key=k) for letter, k in zip(letters, keys, strict=True)]
        )

    def __call__(
        self, x: Float[Array, "B S D"], rotary: Rotary | None, execution: Execution
    ) -> Float[Array, "B S D"]:
        *inner, last = self.layers
        for layer in inner:
            x = ops.save(layer(x, rotary, execution), "residual")
        return last(x, rotary, execution)


class Decoder(nnx.Module):
    """Embedding, the repeating units with their weights stacked on axis 0, final norm and untied
    head."""

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
        shape = (cfg.embed, cfg.vocabulary)
        self.head = Weight(
            normal(k_head, cfg, "embed vocab", shape, fan_in=cfg.embed, truncated=True)
        )

    def __call__(
        self, tokens: Int[Array, "B S"], execution: Execution, precision: Precision
    ) -> Float[Array, "B S D"]:
        """The normalised last hidden state. The compute dtype is that of the weights."""
        cfg = self.cfg
        x = self.embedding(tokens, self.head[...].dtype)
        rotary = rotary_tables(cfg, tokens.shape[1])

        def apply(x, unit):
            return unit(x, rotary, execution), None

        for stack, repeats, saved, in_bf16 in stretches(cfg, execution, precision):
            units = jax.tree.map(itemgetter(repeats), self.units[stack])
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
