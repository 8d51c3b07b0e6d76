"""Attention of a model: dimensions, rotary positions, and other differences between families."""

import math
from dataclasses import dataclass

from jaxbench.recipe.checks import divides, positive, require


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's scaling of rotary frequencies; `models.layers.rotary_tables` has the formula."""

    factor: float
    """factor by which long wavelengths grow"""
    low: float
    """low-frequency factor: wavelengths above `original_context` / `low` grow by `factor`"""
    high: float
    """high-frequency factor: wavelengths below `original_context` / `high` stay"""
    original_context: int
    """sequence length before the extension, in tokens"""

    def __post_init__(self) -> None:
        positive("model.attention.rope.scaling.", self, "factor", "low", "high", "original_context")
        require(
            self.low < self.high,
            f"model.attention.rope.scaling.low = {self.low} must be below high = {self.high}",
        )


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN (Peng et al. 2023): rotary frequencies for a longer context, and larger attention
    scores; `models.layers.rotary_tables` has the formula."""

    factor: float
    """factor by which the wavelengths of slow features grow"""
    original_context: int
    """sequence length before the extension, in tokens"""
    fast: float = 32.0
    """features that turn more often than this in the original context keep their frequency"""
    slow: float = 1.0
    """features that turn less often than this in the original context are stretched by the whole
    factor"""
    rounded: bool = True
    """the ramp between the two begins and ends at whole features"""

    def __post_init__(self) -> None:
        prefix = "model.attention.rope.yarn."
        positive(prefix, self, "factor", "original_context", "fast", "slow")
        require(
            self.slow < self.fast,
            f"{prefix}slow = {self.slow} must be below fast = {self.fast}",
        )


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al. 2021)."""

    base: float
    """base of the frequencies"""
    fraction: float = 1.0
    """share of the head's features that is rotated"""
    scaling: RopeScaling | None = None
    """Llama 3.1's scaling of the frequencies"""
    yarn: Yarn | None = None
    """YaRN's scaling of the frequencies, and of the scores"""

    def __post_init__(self) -> None:
        positive("model.attention.rope.", self, "base")
        require(
            self.yarn is None or self.base > 1,
            f"model.attention.rope.base = {self.base}: expected more than 1 with yarn",
        )
        require(
            self.scaling is None or self.yarn is None,
            "model.attention.rope has both scaling and yarn; expected one",
        )


def yarn_scale(rope: Rope | None) -> float:
    """YaRN's factor of the scores, (0.1 ln(factor) + 1)^2. Publications apply its root to cosines
    and sines. Returns 1 without YaRN."""
    return (0.1 * math.log(max(rope.yarn.factor, 1.0)) + 1) ** 2 if rope and rope.yarn else 1.0


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Causal grouped-query attention."""

    heads: int
    """attention heads"""
    kv_heads: int
    """key and value heads"""
    head_dim: int
    """features of a head"""
    rope: Rope | None = None
    """rotary position embedding; `null` for no position embedding"""
    qk_norm: bool = False
    """RMSNorm of each head's query and key, before the rotary embedding (Henry et al. 2020), with
    one gain for all query heads and one for all keys"""
    window: int | None = None
    """in mixers `W` of the pattern: positions that a query sees, its own included (sliding window;
    Beltagy et al. 2020)"""
    sinks: bool = False
    """each head has one more learned logit in its softmax, which attends to nothing (attention
    sinks; OpenAI 2025, "gpt-oss")"""
    biases: bool = False
    """biases of queries, keys, values and the output projection"""

    @property
    def rotated(self) -> int:
        """Features of a head that the rotary embedding turns."""
        return round(self.head_dim * self.rope.fraction) if self.rope else 0

    @property
    def score_scale(self) -> float:
        """The factor of the scores, which are the dot products of queries and keys."""
        return self.head_dim**-0.5 * yarn_scale(self.rope)

    @property
    def score_widths(self) -> tuple[int, int]:
        """Features of a head's query and key, and of its value."""
        return self.head_dim, self.head_dim

    def __post_init__(self) -> None:
        positive("model.attention.", self, "heads", "kv_heads", "head_dim", "window")
        divides("model.attention.kv_heads", self.kv_heads, "model.attention.heads", self.heads)
        require(self.head_dim % 2 == 0, f"model.attention.head_dim = {self.head_dim} must be even")
        fraction = self.rope.fraction if self.rope else 1
        require(
            2 <= self.head_dim * fraction <= self.head_dim,
            f"model.attention.rope.fraction = {fraction} must be at most 1 and leave a pair of "
            f"the {self.head_dim} features of a head",
        )


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1)."""

    heads: int
    """attention heads"""
    query_latent: int
    """width of the latent from which queries are projected"""
    kv_latent: int
    """width of the latent from which keys and values are projected"""
    head_dim: int
    """features of a head's query and key that carry no position"""
    rope_dim: int
    """features of a head's query that rotary embedding turns; all heads share one key of this
    width"""
    value_dim: int
    """features of a head's value"""
    rope: Rope
    """rotary position embedding"""

    def __post_init__(self) -> None:
        prefix = "model.latent_attention."
        positive(
            prefix, self, "heads", "query_latent", "kv_latent", "head_dim", "rope_dim", "value_dim"
        )
        require(self.rope_dim % 2 == 0, f"{prefix}rope_dim = {self.rope_dim} must be even")
        width = self.head_dim + self.rope_dim
        require(
            self.value_dim <= width,
            f"{prefix}value_dim = {self.value_dim} must be at most head_dim + rope_dim = {width}",
        )
        require(
            self.rope.fraction == 1,
            f"{prefix}rope.fraction = {self.rope.fraction}: expected 1, since rope_dim says what "
            "is turned",
        )

    @property
    def window(self) -> None:
        """None, since there is no sliding window."""

    @property
    def rotated(self) -> int:
        """Features of a head that the rotary embedding turns."""
        return self.rope_dim

    @property
    def score_scale(self) -> float:
        """The factor of the scores, which are the dot products of queries and keys."""
        return (self.head_dim + self.rope_dim) ** -0.5 * yarn_scale(self.rope)

    @property
    def score_widths(self) -> tuple[int, int]:
        """Features of a head's query and key, and of its value."""
        return self.head_dim + self.rope_dim, self.value_dim


Attention = AttentionConfig | LatentAttentionConfig
