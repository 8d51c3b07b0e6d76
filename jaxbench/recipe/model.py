"""The architecture of a model: everything in which the families differ."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxbench.recipe.checks import divides, not_negative, positive, require

SSD_CHUNK = 256
"""Tokens of a chunk in XLA's Mamba-2 scan. It decides the work and the rounding, not the result:
twice Megatron's default, so half as many states between chunks and larger products in them."""

MAX_SOFTCAP = 60
"""exp(60) and exp(-60), times any number of keys, are normal fp32 numbers, as the blockwise softmax
needs (`ops.attention.blocks`)."""

MAX_LAYERS, MAX_PATTERN = 10_000, 1_000
"""Limits far above any model's, which bound the search for repeating groups of layers."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's scaling of rotary frequencies; `models.layers.rotary_tables` has the formula."""

    factor: float
    """by which long wavelengths grow"""
    low: float
    """low-frequency factor: wavelengths above `original_context` / `low` grow by `factor`"""
    high: float
    """high-frequency factor: wavelengths below `original_context` / `high` stay"""
    original_context: int
    """sequence length before the extension, in tokens"""

    def __post_init__(self) -> None:
        positive("model.rope_scaling.", self, "factor", "low", "high", "original_context")
        require(
            self.low < self.high,
            f"model.rope_scaling.low = {self.low} must be below high = {self.high}",
        )


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """Dimensions of a Mamba-2 mixer."""

    heads: int
    """heads of a Mamba-2 mixer"""
    head_dim: int
    """features of a head"""
    state: int
    """state size per feature"""
    groups: int
    """groups of heads that share the state's input and output maps (B and C)"""

    @property
    def inner(self) -> int:
        """Features of one group."""
        return self.heads // self.groups * self.head_dim

    def __post_init__(self) -> None:
        positive("model.mamba.", self, "heads", "head_dim", "state", "groups")
        divides("model.mamba.groups", self.groups, "model.mamba.heads", self.heads)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture. A field exists only because two published models differ in it."""

    family: str
    """model family, as in configs/published.csv"""
    size: str
    """model size, as in configs/published.csv"""
    layers: int
    """published layers; in a hybrid each character of `pattern` is one"""
    embed: int
    """width of the residual stream"""
    ffn: int
    """width inside an MLP or an expert"""
    heads: int
    """attention heads"""
    kv_heads: int
    """key and value heads (grouped-query attention)"""
    head_dim: int
    """features of an attention head"""
    vocabulary: int
    """tokens of the vocabulary"""
    rope_base: float | None
    """base of the rotary position embedding; `null` for none"""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's scaling of rotary frequencies"""
    rope_fraction: float = 1.0
    """share of the head's features that is rotated"""
    norm: Literal["rms", "layer1p"] = "rms"
    """RMSNorm, or LayerNorm with a gain of 1 + weight"""
    mamba: Mamba | None = None
    """dimensions of Mamba-2 layers"""
    init_std: float | None = None
    """standard deviation of Megatron's initialisation; `null` for MaxText's fan-in scaling"""
    pattern: str = "*-"
    """kinds of the residual layers: `*` attention, `-` MLP, `E` mixture of experts, `M` Mamba-2; of
    one layer of a transformer, of the whole stack of a hybrid (with `M`)"""
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    """of the MLP, gated except for `relu2`, the squared ReLU"""
    post_norm: bool = False
    """a second norm, after each mixer"""
    tied: bool = False
    """the embedding table is the output head too"""
    embedding_scale: float = 1.0
    """factor of the embeddings"""
    logit_scale: float = 1.0
    """factor of the logits"""
    softcap: float | None = None
    """c bounds attention scores z to c tanh(z / c)"""
    experts: int = 0
    """experts of a layer"""
    experts_per_token: int = 0
    """experts that a token is sent to"""
    router: Literal["topk_softmax", "softmax_topk"] = "topk_softmax"
    """softmax over the chosen logits, or the largest of the softmax over all"""
    balance_loss: float = 0.0
    """coefficient of the load-balance loss"""
    capacity_factor: float | None = None
    """capacity of an expert over its fair share of every `capacity_tokens` tokens; beyond it those
    with the smallest gates are dropped. `null` drops none"""
    capacity_tokens: int = 1024
    """consecutive tokens of a sequence among which an expert's capacity is counted"""
    routing: Literal["learned", "balanced"] = "learned"
    """`balanced` assigns experts in turn, which leaves the router's choice out of a benchmark"""

    @property
    def layer_pattern(self) -> str:
        """The kinds of all residual layers: the pattern once per layer, of a hybrid its first
        `layers` characters."""
        return self.pattern[: self.layers] if "M" in self.pattern else self.pattern * self.layers

    def __post_init__(self) -> None:
        positive(
            "model.", self, "layers", "embed", "ffn", "heads", "kv_heads", "head_dim", "vocabulary",
            "rope_base", "init_std", "embedding_scale", "logit_scale",
        )  # fmt: skip
        divides("model.kv_heads", self.kv_heads, "model.heads", self.heads)
        divides("2", 2, "model.head_dim", self.head_dim)
        require(
            2 <= self.head_dim * self.rope_fraction <= self.head_dim,
            f"model.rope_fraction = {self.rope_fraction} must be at most 1 and leave a pair of "
            f"the {self.head_dim} features of a head",
        )
        require(
            self.softcap is None or 0 < self.softcap <= MAX_SOFTCAP,
            f"model.softcap = {self.softcap} must be above 0 and at most {MAX_SOFTCAP}",
        )
        self._check_pattern()
        if "E" in self.pattern:
            self._check_experts()

    def _check_pattern(self) -> None:
        unknown = "".join(sorted(set(self.pattern) - set("*-EM")))[:1]
        require(not unknown, f"model.pattern: {unknown!r} is none of the letters * - E M")
        size = len(self.pattern)
        require(0 < size <= MAX_PATTERN, f"model.pattern: expected 1 to {MAX_PATTERN} letters")
        require(
            "M" not in self.pattern or (self.mamba is not None and self.layers <= size),
            f"model.pattern with M needs model.mamba, and spells at least model.layers = "
            f"{self.layers} letters; it has {size}",
        )
        require(
            self.layers <= MAX_LAYERS, f"model.layers = {self.layers} must be at most {MAX_LAYERS}"
        )

    def _check_experts(self) -> None:
        positive("model.", self, "experts", "experts_per_token", "capacity_tokens")
        positive("model.", self, "capacity_factor")
        not_negative("model.", self, "balance_loss")
        require(
            self.experts_per_token <= self.experts,
            f"model.experts_per_token = {self.experts_per_token} must be at most "
            f"model.experts = {self.experts}",
        )
        require(
            self.activation != "relu2", "model.activation = relu2 has no gate, which experts need"
        )

    @property
    def expert_capacity(self) -> int | None:
        """Tokens that one expert takes of every `capacity_tokens`; None when nothing is dropped."""
        if self.capacity_factor is None:
            return None
        share = self.experts_per_token * self.capacity_tokens / self.experts
        return min(math.ceil(share * self.capacity_factor), self.capacity_tokens)
