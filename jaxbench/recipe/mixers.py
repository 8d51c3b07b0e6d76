"""The mixers of a model: attention, feed-forward layers, experts and Mamba-2. Each has a dataclass
with its dimensions and with the differences between families."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxbench.recipe.checks import divides, not_negative, positive, require
from jaxbench.recipe.slots import enough, reach, variance


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
            self.slow <= self.fast,
            f"{prefix}slow = {self.slow} must be at most fast = {self.fast}",
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
        require(
            self.rotated % 2 == 0,
            f"model.attention.rope.fraction = {fraction}: {self.rotated} of the {self.head_dim} "
            "features of a head would be rotated; expected an even number",
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


AnyAttentionConfig = AttentionConfig | LatentAttentionConfig

SSD_CHUNK = 256
"""The chunk length of XLA's Mamba-2 scan in tokens. It affects only speed and rounding. It is twice
Megatron's default, so there are half as many states between chunks, and larger matmuls."""

Nonlinearity = Literal["silu", "gelu_tanh", "swiglu_clamped", "relu2"]


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """A feed-forward mixer."""

    ffn: int
    """width inside"""
    activation: Literal[Nonlinearity, "gelu_ungated"] = "silu"
    """gated except for `relu2`, the squared ReLU, and `gelu_ungated`, the GELU of GPT-3 in its tanh
    form"""
    biases: bool = False
    """biases of both matrices, without a gate only"""

    def __post_init__(self) -> None:
        positive("model.mlp.", self, "ffn")
        require(
            not self.biases or not self.gated,
            f"model.mlp.biases needs an activation without a gate; {self.activation} has one",
        )

    @property
    def gated(self) -> bool:
        """True for an activation with a gate."""
        return self.activation not in ("relu2", "gelu_ungated")

    @property
    def matrices(self) -> int:
        """Weight matrices, each of `embed x ffn`."""
        return 3 if self.gated else 2


SLOTS = 128
"""The slots of an expert are a multiple of this, so that all tiles of its matmuls are full. It is
large enough for an efficient matmul and small enough that little is padded."""

TOKEN_TILE = 64
"""The tokens that arrive on a rank are a multiple of this, so that all tiles of the kernels that
quantize them are full."""

LEARNED = 1.5
"""`rank_capacity_factor` for a router that learns, unless it is set."""

TYPICAL_TOKENS = 16_384
"""About how many tokens a device sends at a time, for estimates."""

TYPICAL = 1.1
"""About the factor that rows with random routing need, for estimates."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: feed-forward mixers. Each token uses a few of them."""

    count: int
    """experts of a layer"""
    top_k: int
    """experts that a token is sent to"""
    ffn: int
    """width inside an expert"""
    activation: Nonlinearity = "silu"
    """activation of an expert; gated except for `relu2`, the squared ReLU. `swiglu_clamped` bounds
    the gate and up projections (OpenAI 2025, "gpt-oss")"""
    biases: bool = False
    """biases of the router and of the experts' matrices"""
    latent: int | None = None
    """width of the tokens that experts see: one projection before them, one after their sum; `null`
    for `model.embed`"""
    shared_ffn: int | None = None
    """width of an expert that every token passes through, in addition to its chosen ones"""
    router: Literal["topk_softmax", "sigmoid"] = "topk_softmax"
    """how the gates of the chosen experts are computed: `topk_softmax` is the softmax over the
    chosen logits, and `sigmoid` divides the sigmoid of each by their sum (DeepSeek-AI 2024,
    "DeepSeek-V3")"""
    router_dtype: Literal["fp32", "bf16"] = "fp32"
    """dtype of the router's matmul; `bf16` is the dtype of the hidden state. Everything after that
    matmul is in fp32"""
    gate_scale: float = 1.0
    """factor of the gates"""
    groups: int = 1
    """experts form this many groups. A token chooses from its `top_groups` best ones: those with
    the largest sum of their best `top_k / top_groups` scores"""
    top_groups: int = 1
    """groups that a token chooses from"""
    bias_rate: float | None = None
    """with router `sigmoid`: each expert has a bias that decides the choice of a `learned` routing,
    but not the gates. In each step it grows by this much if the load of the expert is below the
    mean, and falls if it is above (Wang et al. 2024, auxiliary-loss-free load balancing)"""
    balance_loss: float = 0.0
    """coefficient of the load-balance loss"""
    balance: Literal["sequence", "microbatch"] = "sequence"
    """what the load-balance loss is taken over: a sequence, or the sequences that a data-parallel
    rank computes at once (Megatron's `seq_aux_loss` and `aux_loss`)"""
    capacity_factor: float | None = None
    """capacity of an expert: this factor times its fair share of every `capacity_tokens` tokens.
    Tokens beyond it are dropped, those with the smallest gates first. With `null` no expert has a
    limit (dropless), only what a rank sends to another (`rank_capacity_factor`)"""
    capacity_tokens: int = 1024
    """consecutive tokens of a sequence over which the capacity of an expert is counted"""
    rank_capacity_factor: float | None = None
    """without a `capacity_factor`: a rank has this factor times a fair share of slots for the
    tokens that another rank sends it, and for their assignments to its experts (Megatron's
    `moe_expert_rank_capacity_factor` counts assignments of all senders together). What exceeds the
    slots is dropped and counted; a factor of `expert` x `tensor` drops none. `null` stands for as
    many slots as routing `random` needs to drop none, and for a factor of 1.5 with any other
    routing"""
    slots: Literal["shared", "own"] = "shared"
    """without a `capacity_factor`: whether the experts of a rank share its slots. With `own` each
    expert has slots of its own where tokens arrive, by the same factor, and one batched matmul,
    padding included, takes the place of grouped ones. A factor of `count` / `top_k` then drops
    none"""
    routing: Literal["learned", "random", "skewed"] = "learned"
    """`random` replaces the logits by standard normal numbers (what Megatron calls forced load
    balancing). It takes the router's choice out of a benchmark. `skewed` draws experts whose
    popularity follows a power law, in another order in each layer; biases do not balance it"""
    skew: float = 1.0
    """with routing `skewed`: an expert's popularity is its rank to the power of minus this"""

    def __post_init__(self) -> None:
        prefix = "model.experts."
        positive(
            prefix, self, "count", "top_k", "ffn", "latent", "shared_ffn", "gate_scale", "groups",
            "top_groups", "bias_rate", "capacity_factor", "capacity_tokens",
            "rank_capacity_factor", "skew",
        )  # fmt: skip
        not_negative(prefix, self, "balance_loss")
        require(
            self.top_k <= self.count,
            f"model.experts.top_k = {self.top_k} must be at most model.experts.count = "
            f"{self.count}",
        )
        require(
            self.slots == "shared" or self.capacity_factor is None,
            "model.experts.slots = own has no effect with a model.experts.capacity_factor",
        )
        divides("model.experts.groups", self.groups, "model.experts.count", self.count)
        divides("model.experts.top_groups", self.top_groups, "model.experts.top_k", self.top_k)
        reach = self.top_groups * self.count // self.groups
        require(
            self.top_groups <= self.groups and self.top_k <= reach,
            f"model.experts.top_groups = {self.top_groups} of groups = {self.groups} must hold the "
            f"top_k = {self.top_k} experts of a token",
        )
        require(
            self.bias_rate is None or self.router == "sigmoid",
            f"model.experts.bias_rate = {self.bias_rate} needs model.experts.router = sigmoid",
        )

    @property
    def shared(self) -> MlpConfig | None:
        """The shared expert."""
        return (
            MlpConfig(ffn=self.shared_ffn, activation=self.activation) if self.shared_ffn else None
        )

    @property
    def gated(self) -> bool:
        """True for an activation with a gate."""
        return self.activation != "relu2"

    @property
    def matrices(self) -> int:
        """Weight matrices of an expert, each of `embed x ffn` or `latent x ffn`."""
        return 3 if self.gated else 2

    @property
    def dropless(self) -> bool:
        """True without a capacity."""
        return self.capacity_factor is None

    @property
    def slots_per_token(self) -> float:
        """About how many slots there are for each token."""
        usual = TYPICAL if self.routing == "random" else LEARNED
        return self.top_k * (self.capacity_factor or self.rank_capacity_factor or usual)

    def capacity(self, tokens: int) -> int:
        """Slots of one expert for so many tokens. Without a `capacity_factor` they are whole blocks
        of `SLOTS`. With one they are for every `capacity_tokens` of a device."""
        if self.capacity_factor is None:
            return math.ceil(min(self._slots(tokens, self.count), tokens) / SLOTS) * SLOTS
        share = self.top_k * tokens / self.count
        return min(math.ceil(share * self.capacity_factor), tokens)

    def rank_slots(self, tokens: int, ranks: int) -> int:
        """The slots that a device with so many tokens has for each rank, but at most what any
        choice of experts can need. A single rank has a slot for every assignment."""
        most = tokens * min(self.top_k, self.count // ranks)
        return most if ranks == 1 else min(self._slots(tokens, ranks), most)

    def token_slots(self, tokens: int, ranks: int) -> int:
        """The slots that a device with so many tokens has for those that it sends to each rank. A
        token is sent once to each rank that has any of its experts. What arrives from all ranks is
        a multiple of `TOKEN_TILE`, unless a device sends all that it has."""
        of_token = reach(self.count, self.top_k, self.groups, self.top_groups, ranks)
        needed = self._enough(tokens, of_token, of_token * (1 - of_token))
        multiple = TOKEN_TILE // math.gcd(TOKEN_TILE, ranks)
        return min(math.ceil(needed / multiple) * multiple, tokens)

    def copies_per_token(self, ranks: int) -> float:
        """About how many slots there are for each token on its way to the ranks of its experts."""
        if not self.dropless:
            return self.slots_per_token
        return ranks * self.token_slots(TYPICAL_TOKENS, ranks) / TYPICAL_TOKENS

    def _slots(self, tokens: int, places: int) -> int:
        """Slots for those of so many tokens that choose one of `places`: experts, or ranks."""
        of_token = variance(self.count, self.top_k, self.groups, self.top_groups, places)
        return self._enough(tokens, self.top_k / places, of_token)

    def _enough(self, tokens: int, mean: float, variance: float) -> int:
        """Slots for so many tokens, if one needs `mean` slots, with this variance if routing is
        random."""
        factor = self.rank_capacity_factor
        if factor is None and self.routing == "random":
            return enough(tokens, mean, variance)
        return math.ceil(tokens * mean * (factor or LEARNED))


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Dimensions of a Mamba-2 mixer."""

    heads: int
    """heads"""
    head_dim: int
    """features of a head"""
    state: int
    """state size per feature"""
    groups: int
    """groups of heads that share the state's input and output maps (B and C)"""

    def __post_init__(self) -> None:
        positive("model.mamba.", self, "heads", "head_dim", "state", "groups")
        divides("model.mamba.groups", self.groups, "model.mamba.heads", self.heads)

    @property
    def inner(self) -> int:
        """Features of one group."""
        return self.heads // self.groups * self.head_dim


Mixer = AnyAttentionConfig | MlpConfig | ExpertsConfig | MambaConfig
