"""The architecture of a model, as data: what the families differ in."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxbench.errors import RecipeError
from jaxbench.recipe.checks import divides, not_negative, positive

SSD_CHUNK = 256
"""Tokens of a chunk in XLA's Mamba-2 scan: changes the work and roundings, not the result. Twice
those of Megatron's default make half of the states, for more products."""

MAX_SOFTCAP = 60
"""e^60 and e^-60, times any number of keys, are normal fp32 numbers (`ops.attention.blocks`)."""

MAX_LAYERS, MAX_PATTERN = 10_000, 1_000
"""Far above any model's, and few enough to spell and to cut into repeating units."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretches the rotary wavelengths as Llama 3.1 does; `models.layers.rotary_tables` has the
    formula."""

    factor: float
    low: float
    high: float
    original_context: int

    def __post_init__(self) -> None:
        positive("model.rope_scaling.", self, "factor", "low", "high", "original_context")
        if not self.low < self.high:
            raise RecipeError(
                f"model.rope_scaling.low = {self.low} must be below high = {self.high}"
            )


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """Dimensions of a Mamba-2 mixer: `heads` of `head_dim` features in `groups` that share the
    input and output maps of a `state` per feature."""

    heads: int
    head_dim: int
    state: int
    groups: int

    @property
    def inner(self) -> int:
        """Features of one group."""
        return self.heads // self.groups * self.head_dim

    def __post_init__(self) -> None:
        positive("model.mamba.", self, "heads", "head_dim", "state", "groups")
        divides("model.mamba.groups", self.groups, "model.mamba.heads", self.heads)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture. A field exists only because two published models differ in it.

    `family` and `size` are spelled as in configs/published.csv. `pattern` spells residual layers in
    letters: `*` attention, `-` MLP, `E` mixture of experts, `M` Mamba-2. A transformer's pattern is
    one published layer. In a hybrid (a pattern with `M`) each letter is a published layer, and all
    of them are spelled. `rope_base` is None without position embedding; `rope_fraction` of the head
    dim is rotated. `init_std` is the standard deviation of Megatron's initialisation; None means
    MaxText's fan-in scaling. MLPs are gated, but for `relu2`, the squared ReLU.

    `post_norm` adds a norm after each mixer. `tied` takes the embedding table as the head;
    `embedding_scale` and `logit_scale` multiply its two uses. `softcap` bounds attention scores z
    to c tanh(z/c).

    Experts: the router keeps `experts_per_token` logits and takes their softmax (`topk_softmax`),
    or the softmax of all and keeps the largest (`softmax_topk`). `balance_loss` is the coefficient
    of the load-balance loss. With a `capacity_factor` f an expert takes, of every `capacity_tokens`
    consecutive tokens of a sequence, the f x (its fair share) with the largest gates; None drops
    nothing. `routing: balanced` assigns experts in turn, for benchmarks that leave the router out.
    """

    family: str
    size: str
    layers: int
    embed: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rope_base: float | None
    rope_scaling: RopeScaling | None = None
    rope_fraction: float = 1.0
    norm: Literal["rms", "layer1p"] = "rms"
    mamba: Mamba | None = None
    init_std: float | None = None
    pattern: str = "*-"
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    post_norm: bool = False
    tied: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    experts: int = 0
    experts_per_token: int = 0
    router: Literal["topk_softmax", "softmax_topk"] = "topk_softmax"
    balance_loss: float = 0.0
    capacity_factor: float | None = None
    capacity_tokens: int = 1024
    routing: Literal["learned", "balanced"] = "learned"

    @property
    def letters(self) -> str:
        """The whole stack, one letter for each residual layer: the pattern for each layer, of a
        hybrid the first `layers` letters."""
        return self.pattern[: self.layers] if "M" in self.pattern else self.pattern * self.layers

    def __post_init__(self) -> None:
        positive(
            "model.", self, "layers", "embed", "ffn", "heads", "kv_heads", "head_dim", "vocabulary",
            "rope_base", "init_std", "embedding_scale", "logit_scale",
        )  # fmt: skip
        divides("model.kv_heads", self.kv_heads, "model.heads", self.heads)
        divides("2", 2, "model.head_dim", self.head_dim)
        if not 2 <= self.head_dim * self.rope_fraction <= self.head_dim:
            raise RecipeError(
                f"model.rope_fraction = {self.rope_fraction} must be at most 1 and leave a pair of "
                f"the {self.head_dim} features of a head"
            )
        if self.softcap is not None and not 0 < self.softcap <= MAX_SOFTCAP:
            raise RecipeError(
                f"model.softcap = {self.softcap} must be above 0 and at most {MAX_SOFTCAP}"
            )
        self._check_pattern()
        if "E" in self.pattern:
            self._check_experts()

    def _check_pattern(self) -> None:
        if unknown := set(self.pattern) - set("*-EM"):
            raise RecipeError(f"model.pattern: {min(unknown)!r} is none of the letters * - E M")
        if not 0 < len(self.pattern) <= MAX_PATTERN:
            raise RecipeError(f"model.pattern: expected 1 to {MAX_PATTERN} letters")
        if "M" in self.pattern and (self.mamba is None or self.layers > len(self.pattern)):
            raise RecipeError(
                f"model.pattern with M needs model.mamba, and spells at least model.layers = "
                f"{self.layers} letters; it has {len(self.pattern)}"
            )
        if self.layers > MAX_LAYERS:
            raise RecipeError(f"model.layers = {self.layers} must be at most {MAX_LAYERS}")

    def _check_experts(self) -> None:
        positive("model.", self, "experts", "experts_per_token", "capacity_tokens")
        positive("model.", self, "capacity_factor")
        not_negative("model.", self, "balance_loss")
        if self.experts_per_token > self.experts:
            raise RecipeError(
                f"model.experts_per_token = {self.experts_per_token} must be at most "
                f"model.experts = {self.experts}"
            )
        if self.activation == "relu2":
            raise RecipeError("model.activation = relu2 has no gate, which experts need")

    @property
    def expert_capacity(self) -> int | None:
        """Slots of one expert for every `capacity_tokens` tokens; None when nothing is dropped."""
        if self.capacity_factor is None:
            return None
        share = self.experts_per_token * self.capacity_tokens / self.experts
        return min(math.ceil(share * self.capacity_factor), self.capacity_tokens)
