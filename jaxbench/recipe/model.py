"""The architecture of a model: everything in which the families differ.

A *layer* is what the model's publication counts as one. In a hybrid it has one mixer, in a
transformer two: attention, then a feed-forward mixer. Each mixer has a dataclass with its
dimensions (`mixers`). Layers are computed in repeating blocks (`repeating_blocks`): each block is
compiled once, and the weights of its repeats are stacked.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, cycle, islice
from typing import Literal, TypeVar

from jaxbench.recipe.checks import positive, require
from jaxbench.recipe.mixers import (
    AnyAttentionConfig,
    AttentionConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    MambaConfig,
    Mixer,
    MlpConfig,
)

MAX_LAYERS = 1_000
"""The most layers of a model, far more than any model has. It bounds the search for repeating
blocks."""


Kind = TypeVar(
    "Kind", AttentionConfig, LatentAttentionConfig, MlpConfig, ExpertsConfig, MambaConfig
)

SYMBOLS = {
    "*": "attention", "W": "attention", "L": "latent_attention", "-": "mlp", "E": "experts",
    "M": "mamba",
}  # fmt: skip
"""The field of `ModelConfig` that describes a mixer, by the mixer's symbol in a layer pattern. The
symbols are Megatron's; W for sliding-window and L for latent attention are ours."""


def check_pattern(name: str, pattern: str) -> None:
    """Raises RecipeError unless a layer pattern has symbols and all of them are known."""
    unknown = "".join(sorted(set(pattern) - set(SYMBOLS)))[:1]
    require(not unknown, f"{name}: {unknown!r} is none of the letters {' '.join(SYMBOLS)}")
    require(bool(pattern), f"{name}: expected a letter for each mixer; it has none")


@dataclass(frozen=True, kw_only=True)
class PredictionConfig:
    """Multi-token prediction (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2): a block behind the
    model. From the final hidden state and the embedding of the next token it predicts the token
    after the next one. Applied again to its own output, it predicts the token after that."""

    pattern: str
    """layer pattern of the block, as `model.pattern`"""
    depth: int = 1
    """how many further tokens are predicted, each by the same block"""
    loss: float = 0.1
    """weight of these losses (their mean) in the gradient"""

    def __post_init__(self) -> None:
        positive("model.prediction.", self, "depth", "loss")
        check_pattern("model.prediction.pattern", self.pattern)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of a model, as data: one decoder computes all families."""

    family: str
    """model family, as in configs/published.csv"""
    size: str
    """model size, as in configs/published.csv"""
    layers: int
    """layers, counted as published: attention and a feed-forward mixer in a transformer, one mixer
    in a hybrid"""
    embed: int
    """width of the residual stream"""
    vocabulary: int
    """tokens of the vocabulary"""
    pattern: str = "*-"
    """mixers of the layers, repeated as often as `layers` asks for: `*` attention, `W` attention
    within `attention.window`, `L` latent attention, `-` MLP, `E` mixture of experts, `M` Mamba-2. A
    layer has two letters; in a hybrid (with `M`) it has one"""
    attention: AttentionConfig | None = None
    """dimensions of attention"""
    latent_attention: LatentAttentionConfig | None = None
    """dimensions of latent attention"""
    mlp: MlpConfig | None = None
    """dimensions of MLPs"""
    experts: ExpertsConfig | None = None
    """dimensions and routing of experts"""
    mamba: MambaConfig | None = None
    """dimensions of Mamba-2 mixers"""
    norm: Literal["rms", "layer1p"] = "rms"
    """RMSNorm, or LayerNorm with a gain of 1 + weight"""
    norm_eps: float = 1e-5
    """epsilon of norms, added to the variance"""
    init_std: float | None = None
    """standard deviation of Megatron's initialisation; `null` for MaxText's fan-in scaling"""
    prediction: PredictionConfig | None = None
    """multi-token prediction"""
    tied: bool = False
    """the embedding table is also the output head"""
    learned_positions: int | None = None
    """each of the first so many positions has a learned vector, which is added to the embedding
    (Radford et al. 2018); `null` for none. No sequence may be longer"""

    @property
    def architecture(self) -> "ModelConfig":
        """The model without the limits on the tokens of experts. Runs of the same model may differ
        in these limits."""
        if self.experts is None:
            return self
        tokens = ExpertsConfig.capacity_tokens
        experts = replace(self.experts, capacity_factor=None, capacity_tokens=tokens)
        return replace(self, experts=experts).without_slots

    @property
    def without_slots(self) -> "ModelConfig":
        """The model with default slots for dropless experts. Slots change speed and memory, but no
        result as long as no token is dropped, and a run that drops any is not comparable."""
        if self.experts is None or self.experts.capacity_factor is not None:
            return self
        factor, slots = ExpertsConfig.rank_capacity_factor, ExpertsConfig.slots
        experts = replace(self.experts, rank_capacity_factor=factor, slots=slots)
        return replace(self, experts=experts)

    @property
    def layer_patterns(self) -> tuple[str, ...]:
        """For each layer its part of the layer pattern: a symbol for each of its mixers."""
        size = 1 if "M" in self.pattern else 2
        layers = [self.pattern[i : i + size] for i in range(0, len(self.pattern), size)]
        return tuple(islice(cycle(layers), self.layers))

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The description of every mixer, in order."""
        return tuple(self.mixer(symbol) for symbol in "".join(self.layer_patterns))

    @property
    def predicting(self) -> tuple[Mixer, ...]:
        """The description of every mixer of the block that predicts further tokens."""
        return tuple(map(self.mixer, self.prediction.pattern)) if self.prediction else ()

    def mixer(self, symbol: str) -> Mixer:
        """The description of the mixers with a symbol."""
        mixer = getattr(self, SYMBOLS[symbol])
        return replace(mixer, window=None) if symbol == "*" and mixer.window else mixer

    def each(self, kind: type[Kind]) -> list[Kind]:
        """The descriptions of all mixers of a kind, in order."""
        return [mixer for mixer in self.mixers if isinstance(mixer, kind)]

    @property
    def attention_mixer(self) -> AnyAttentionConfig | None:
        """The description of attention, latent or not. None in a model without attention."""
        return self.attention or self.latent_attention

    @property
    def balance_loss(self) -> float:
        """Coefficient of the load-balance loss; 0 without experts."""
        return self.experts.balance_loss if self.experts else 0.0

    @property
    def bias_rate(self) -> float | None:
        """The step of the router's biases; None without them."""
        return self.experts.bias_rate if self.experts else None

    @property
    def dropless(self) -> bool:
        """True for experts without a capacity."""
        return self.experts is not None and self.experts.dropless

    def __post_init__(self) -> None:
        positive(
            "model.", self, "layers", "embed", "vocabulary", "norm_eps", "init_std",
            "learned_positions",
        )  # fmt: skip
        require(
            self.layers <= MAX_LAYERS, f"model.layers = {self.layers} must be at most {MAX_LAYERS}"
        )
        check_pattern("model.pattern", self.pattern)
        size = len(self.pattern)
        require(
            size <= MAX_LAYERS and (size % 2 == 0 or "M" in self.pattern),
            f"model.pattern: expected 1 to {MAX_LAYERS} letters, without M two for each layer; "
            f"it has {size}",
        )
        used = self.pattern + (self.prediction.pattern if self.prediction else "")
        for symbol, name in SYMBOLS.items():
            require(
                getattr(self, name) is not None or symbol not in used,
                f"model.pattern with {symbol} needs model.{name}",
            )
        require(
            self.attention is None or self.latent_attention is None,
            "model has both attention and latent_attention, whose positions differ; expected one",
        )
        for name in SYMBOLS.values():
            symbols = [symbol for symbol in SYMBOLS if SYMBOLS[symbol] == name]
            require(
                getattr(self, name) is None or set(symbols) & set(used),
                f"model.{name} needs {' or '.join(symbols)} in model.pattern; expected null",
            )
        window = self.attention and self.attention.window
        require(
            ("W" in used) == (window is not None),
            f"model.attention.window = {window}: expected a window with W in model.pattern, and "
            "null without",
        )


def repeating_blocks(cfg: ModelConfig) -> list[tuple[str, int]]:
    """Blocks as (layer pattern, number of repeats). In a pipeline the stages are made of the last
    one."""
    return cut(cfg.layer_patterns)


def stacks(cfg: ModelConfig) -> list[tuple[str, int]]:
    """The blocks of all stacks of weights: the repeating blocks, and the block of multi-token
    prediction."""
    further = [(cfg.prediction.pattern, 1)] if cfg.prediction else []
    return repeating_blocks(cfg) + further


def first_layers(cfg: ModelConfig) -> list[range] | list[None]:
    """For each of the `stacks`: the number of each block's first layer, by which routing draws its
    random numbers. Layers count through all stacks. None if routing is learned."""
    blocks = stacks(cfg)
    if cfg.experts is None or cfg.experts.routing == "learned":
        return [None] * len(blocks)
    ends = list(accumulate(len(pattern) * times for pattern, times in blocks))
    return [
        range(end - len(pattern) * times, end, len(pattern))
        for (pattern, times), end in zip(blocks, ends, strict=True)
    ]


@cache
def cut(layers: tuple[str, ...]) -> list[tuple[str, int]]:
    """Splits layer patterns into repeating blocks, (pattern, repeats).

    Each block is compiled once. So we choose a split with the fewest layers in all of its blocks,
    and among these one with the fewest blocks. For the 118 layers of Nemotron-H 56B this is
    `M-M-M-M*-M-` ten times, then `M-` four times.
    """
    pattern, size = "".join(layers), len(layers[0])
    best: dict[int, tuple[int, list[tuple[str, int]]]] = {len(pattern): (0, [])}
    for start in reversed(range(0, len(pattern), size)):
        cuts = []
        for length in range(size, len(pattern) - start + 1, size):
            block, stop = pattern[start : start + length], start
            while pattern.startswith(block, stop):
                stop += length
                compiled, rest = best[stop]
                cuts.append((compiled + length, [(block, (stop - start) // length), *rest]))
        best[start] = min(cuts, key=lambda cut: (cut[0], len(cut[1])))
    return best[0][1]
