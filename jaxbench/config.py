"""The settings of a run as validated, frozen dataclasses. Imports no JAX: a recipe is read and
checked on any laptop.

A `Run` holds everything that decides what is computed. What follows from it (data-parallel size,
accumulation steps, mesh shape) is a property, so that nothing is written down twice.
"""

import math
from dataclasses import dataclass
from typing import Literal

AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
"""The mesh axes, slowest links first. All of them always exist; an unused one has size 1."""

ACTIVATIONS = (
    "query", "key", "value", "attention", "residual", "dispatched", "gate", "up", "mamba",
)  # fmt: skip
"""The activations that a remat policy can save, in the order in which a layer computes them.
`dispatched` are the rows that the experts of a rank receive, `mamba` is what a Mamba-2 mixer's
output projection multiplies."""

SSD_CHUNK = 128
"""Tokens of a chunk in the Mamba-2 scan: changes the work and roundings, not the result. Megatron's
default, which the published runs left as it is."""

MAX_SOFTCAP = 60
"""e^60 and e^-60, times any number of keys, are normal fp32 numbers (`softcap.attention`)."""


class RecipeError(ValueError):
    """A user's mistake in a recipe or on the command line. Its text is one line: what is wrong,
    what is expected."""


class RunFailed(RuntimeError):
    """The run cannot give a valid result. Its text is one line for run.json and the terminal."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretches the rotary wavelengths as Llama 3.1 does; `models.layers.rotary_tables` has the
    formula."""

    factor: float
    low: float
    high: float
    original_context: int


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
        for name in ("heads", "head_dim", "state", "groups"):
            positive(f"model.mamba.{name}", getattr(self, name))
        _divides("model.mamba.groups", self.groups, "model.mamba.heads", self.heads)


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
        for name in ("layers", "embed", "ffn", "heads", "kv_heads", "head_dim", "vocabulary"):
            positive(f"model.{name}", getattr(self, name))
        _divides("model.kv_heads", self.kv_heads, "model.heads", self.heads)
        _divides("2", 2, "model.head_dim", self.head_dim)
        if unknown := set(self.pattern) - set("*-EM"):
            raise RecipeError(f"model.pattern: {min(unknown)!r} is none of the letters * - E M")
        if "M" in self.pattern and (self.mamba is None or self.layers > len(self.pattern)):
            raise RecipeError(
                f"model.pattern with M needs model.mamba, and spells at least model.layers = "
                f"{self.layers} letters; it has {len(self.pattern)}"
            )
        if self.softcap is not None and not 0 < self.softcap <= MAX_SOFTCAP:
            raise RecipeError(
                f"model.softcap = {self.softcap} must be above 0 and at most {MAX_SOFTCAP}"
            )
        if "E" in self.pattern:
            for name in ("experts", "experts_per_token", "capacity_tokens"):
                positive(f"model.{name}", getattr(self, name))
            if self.capacity_factor is not None:
                positive("model.capacity_factor", self.capacity_factor)
            if self.experts_per_token > self.experts:
                raise RecipeError(
                    f"model.experts_per_token = {self.experts_per_token} must be at most "
                    f"model.experts = {self.experts}"
                )

    @property
    def expert_capacity(self) -> int | None:
        """Slots of one expert for every `capacity_tokens` tokens; None when nothing is dropped."""
        if self.capacity_factor is None:
            return None
        share = self.experts_per_token * self.capacity_tokens / self.experts
        return min(math.ceil(share * self.capacity_factor), self.capacity_tokens)


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Sizes of the mesh axes that a recipe chooses; `data` takes the devices that are left
    (`Run.data`)."""

    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in ("fsdp", "expert", "context", "tensor"):
            positive(f"parallelism.{name}", getattr(self, name))

    @property
    def ranks(self) -> int:
        """Devices that together hold one copy of the model."""
        return self.fsdp * self.expert * self.context * self.tensor


@dataclass(frozen=True, kw_only=True)
class Precision:
    """`dtype` of the matrix products; `accumulate` is the dtype in which microbatch gradients are
    summed. The rest is for FP8.

    `scaling` takes each tensor's scale from the tensor itself (`current`), or from the largest
    magnitude of the last `amax_history` steps (`delayed`), and leaves `margin` powers of two of
    headroom. The products of the first and last layers can stay in bf16. `gather` is the dtype in
    which weights are all-gathered. `implementation` is Transformer Engine, XLA, or (`auto`)
    Transformer Engine where it can run.
    """

    dtype: Literal["bf16", "fp8", "fp32"] = "bf16"
    accumulate: Literal["fp32", "bf16"] = "fp32"
    scaling: Literal["delayed", "current"] = "delayed"
    amax_history: int = 1024
    margin: int = 0
    first_bf16_layers: int = 0
    last_bf16_layers: int = 0
    gather: Literal["fp8", "bf16"] = "fp8"
    implementation: Literal["auto", "te", "xla"] = "auto"

    def __post_init__(self) -> None:
        positive("precision.amax_history", self.amax_history)
        for name in ("margin", "first_bf16_layers", "last_bf16_layers"):
            if getattr(self, name) < 0:
                raise RecipeError(f"precision.{name} = {getattr(self, name)} must not be negative")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences per step (`global_batch`), and per pass of one data-parallel rank (`microbatch`).

    A microbatch of None is the whole share of a rank: one pass, no accumulation.
    """

    sequence_length: int
    global_batch: int
    microbatch: int | None = None

    def __post_init__(self) -> None:
        for name in ("sequence_length", "global_batch", "microbatch"):
            if getattr(self, name) is not None:
                positive(f"batch.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW with betas 0.9 and 0.95, weight decay 0.1 and clipping at global norm 1, as every
    source has them.

    `schedule` names the source of warm-up and cosine decay (`optimizer.schedule` has the formulas).
    `warmup` counts steps, or is a fraction of the run when below 1; `constant` are the last steps,
    at the final rate. `decay_vectors` extends weight decay to norm gains, as
    MaxText does.
    """

    schedule: Literal["maxtext", "megatron"]
    learning_rate: float
    final_learning_rate: float
    warmup: float
    eps: float
    decay_vectors: bool
    constant: int = 0

    def warmup_steps(self, steps: int) -> int:
        """Length of the warm-up in a run of `steps`."""
        return int(self.warmup * steps) if self.warmup < 1 else int(self.warmup)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the model is computed: changes speed and memory, never the result.

    `remat` is `none` (keep every intermediate), `full` (keep only the input of each layer), or the
    activations to keep, as in `query,key,residual:40`: a count keeps one in that many first layers
    and recomputes it in the rest (in a hybrid, whose letters are the layers, in those repeats of
    its scanned unit that lie among them). `xla_flags` is a named set of
    compiler options (`xla_flags.SETS`), and changes to it: `tuned,xla_gpu_some_flag=false`.
    """

    remat: str = "full"
    attention: Literal["auto", "cudnn", "xla"] = "auto"
    xla_flags: str = "tuned"

    def saved(self, layers: int) -> dict[str, int] | None:
        """For each saved activation the number of layers that keep it; None when remat is off."""
        if self.remat in ("none", "full"):
            return None if self.remat == "none" else {}
        saved = {}
        for entry in self.remat.split(","):
            name, colon, count = entry.strip().partition(":")
            if name not in ACTIVATIONS or bool(colon) != count.isdigit():
                raise RecipeError(
                    f"execution.remat: cannot read {entry.strip()!r}; expected none, full, or some "
                    f"of {', '.join(ACTIVATIONS)}, each with an optional layer count: residual:40"
                )
            saved[name] = min(int(count or layers), layers)
        return saved


@dataclass(frozen=True, kw_only=True)
class Run:
    """One benchmark run on `gpus` devices (CPU devices for the smoke row).

    `label` says what the figures are: `full` (the published model), `proxy` (a shortened one),
    `smoke` (tiny dims, no benchmark). `overrides` are the `--set` entries that were applied to the
    recipe's row.
    """

    recipe: str
    row: str
    label: Literal["full", "proxy", "smoke"]
    gpus: int
    model: ModelConfig
    parallelism: Parallelism
    precision: Precision
    batch: Batch
    optimizer: Optimizer
    execution: Execution
    steps: int = 50
    seed: int = 0
    overrides: tuple[str, ...] = ()

    @property
    def data(self) -> int:
        """Replicas of the sharded model: the devices that the other axes leave."""
        return self.gpus // self.parallelism.ranks

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of the mesh axes in the order of `AXES`."""
        p = self.parallelism
        return (1, self.data, p.fsdp, p.expert, p.context, p.tensor)

    @property
    def batch_ranks(self) -> int:
        """Data-parallel ranks: groups of devices that hold different sequences."""
        return self.data * self.parallelism.fsdp * self.parallelism.expert

    @property
    def microbatch(self) -> int:
        """Sequences per rank and pass."""
        return self.batch.microbatch or self.batch.global_batch // self.batch_ranks

    @property
    def accumulation(self) -> int:
        """Passes per step whose gradients are summed."""
        return self.batch.global_batch // (self.microbatch * self.batch_ranks)

    def mesh_text(self) -> str:
        """The axes in use, as in `data 2 x fsdp 4`."""
        sizes = zip(AXES, self.mesh_shape, strict=True)
        return " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one device"

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step trains on."""
        return self.batch.global_batch * self.batch.sequence_length

    def __post_init__(self) -> None:
        positive("steps", self.steps)
        self.execution.saved(self.model.layers)
        if self.model.softcap is not None and self.execution.attention != "auto":
            raise RecipeError(
                f"execution.attention = {self.execution.attention} has no soft cap, which "
                "model.softcap asks for; expected auto"
            )
        p, m, b = self.parallelism, self.model, self.batch
        _divides("fsdp x expert x context x tensor", p.ranks, "the number of devices", self.gpus)
        # The embedding table is split over all of these axes, heads and tokens over the last two.
        _divides("fsdp x expert x context x tensor", p.ranks, "model.embed", m.embed)
        inner = p.context * p.tensor
        _divides("context x tensor", inner, "model.kv_heads", m.kv_heads)
        _divides("context x tensor", inner, "batch.sequence_length", b.sequence_length)
        _divides("parallelism.tensor", p.tensor, "model.ffn", m.ffn)
        _divides("parallelism.tensor", p.tensor, "model.vocabulary", m.vocabulary)
        if m.mamba is not None:
            _divides("parallelism.tensor", p.tensor, "model.mamba.groups", m.mamba.groups)
            shard = b.sequence_length // p.context
            chunk = min(SSD_CHUNK, shard)
            _divides("the Mamba chunk", chunk, "batch.sequence_length / context", shard)
        if "E" in m.pattern:
            _divides("expert x tensor", p.expert * p.tensor, "model.experts", m.experts)
            if m.capacity_factor is None and self.precision.dtype == "fp8":
                raise RecipeError(
                    "experts without model.capacity_factor have no FP8 products; set one, or "
                    "precision.dtype=bf16"
                )
            if m.capacity_factor is not None:
                tokens = "the tokens of a sequence on one rank"
                length = b.sequence_length // inner
                _divides("model.capacity_tokens", m.capacity_tokens, tokens, length)
        elif p.expert > 1:
            raise RecipeError(f"parallelism.expert = {p.expert} needs a model with experts")
        ranks = f"data-parallel ranks (data {self.data} x fsdp {p.fsdp} x expert {p.expert})"
        _divides(ranks, self.batch_ranks, "batch.global_batch", b.global_batch)
        pass_size = self.microbatch * self.batch_ranks
        _divides(f"batch.microbatch x {ranks}", pass_size, "batch.global_batch", b.global_batch)


def positive(name: str, value: float) -> None:
    """Raises RecipeError unless a setting is above zero."""
    if not value > 0:
        raise RecipeError(f"{name} = {value} must be above 0")


def _divides(divisor: str, size: int, name: str, value: int) -> None:
    if value % size:
        raise RecipeError(f"{divisor} = {size} must divide {name} = {value}")
