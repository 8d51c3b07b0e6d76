"""The settings of a run as validated, frozen dataclasses. Imports no JAX: a recipe is read and
checked on any laptop.

A `Run` holds everything that decides what is computed. What follows from it (data-parallel size,
accumulation steps, mesh shape) is a property, so that nothing is written down twice.
"""

from dataclasses import dataclass
from typing import Literal

AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
"""The mesh axes, slowest links first. All of them always exist; an unused one has size 1."""

ACTIVATIONS = ("query", "key", "value", "attention", "residual", "gate", "up")
"""The activations that a remat policy can save, in the order in which a layer computes them."""


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
class ModelConfig:
    """The architecture. A field exists only because two published models differ in it.

    `family` and `size` are spelled as in configs/published.csv. `pattern` is one published layer in
    letters: `*` attention, `-` MLP. `init_std` is the standard deviation of Megatron's
    initialisation; None means MaxText's fan-in scaling.
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
    rope_base: float
    rope_scaling: RopeScaling | None = None
    init_std: float | None = None
    pattern: str = "*-"

    @property
    def letters(self) -> str:
        """The whole stack, one letter for each residual layer."""
        return self.pattern * self.layers

    def __post_init__(self) -> None:
        for name in ("layers", "embed", "ffn", "heads", "kv_heads", "head_dim", "vocabulary"):
            positive(f"model.{name}", getattr(self, name))
        _divides("model.kv_heads", self.kv_heads, "model.heads", self.heads)
        _divides("2", 2, "model.head_dim", self.head_dim)


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Sizes of the mesh axes that a recipe chooses; `data` takes the devices that are left
    (`Run.data`)."""

    fsdp: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in ("fsdp", "context", "tensor"):
            positive(f"parallelism.{name}", getattr(self, name))

    @property
    def ranks(self) -> int:
        """Devices that together hold one copy of the model."""
        return self.fsdp * self.context * self.tensor


@dataclass(frozen=True, kw_only=True)
class Precision:
    """`dtype` of the matrix products; `accumulate` is the dtype in which microbatch gradients are
    summed."""

    dtype: Literal["bf16", "fp8", "fp32"] = "bf16"
    accumulate: Literal["fp32", "bf16"] = "fp32"


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
    `warmup` counts steps, or is a fraction of the run when below 1. `decay_vectors` extends weight
    decay to norm gains, as MaxText does.
    """

    schedule: Literal["maxtext", "megatron"]
    learning_rate: float
    final_learning_rate: float
    warmup: float
    eps: float
    decay_vectors: bool

    def warmup_steps(self, steps: int) -> int:
        """Length of the warm-up in a run of `steps`."""
        return int(self.warmup * steps) if self.warmup < 1 else int(self.warmup)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the model is computed: changes speed and memory, never the result.

    `remat` is `none` (keep every intermediate), `full` (keep only the input of each layer), or the
    activations to keep, as in `query,key,residual:40`: a count keeps one in that many first layers
    and recomputes it in the rest. `xla_flags` is `tuned` (`xla_flags.py`) or `default` (what the
    compiler does by itself).
    """

    remat: str = "full"
    attention: Literal["auto", "cudnn", "xla"] = "auto"
    xla_flags: Literal["tuned", "default"] = "tuned"

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
        return (1, self.data, p.fsdp, 1, p.context, p.tensor)

    @property
    def batch_ranks(self) -> int:
        """Data-parallel ranks: groups of devices that hold different sequences."""
        return self.data * self.parallelism.fsdp

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
        p, m, b = self.parallelism, self.model, self.batch
        _divides("fsdp x context x tensor", p.ranks, "the number of devices", self.gpus)
        # The embedding table is split over all of these axes, heads and tokens over the last two.
        _divides("fsdp x context x tensor", p.ranks, "model.embed", m.embed)
        inner = p.context * p.tensor
        _divides("context x tensor", inner, "model.kv_heads", m.kv_heads)
        _divides("context x tensor", inner, "batch.sequence_length", b.sequence_length)
        _divides("parallelism.tensor", p.tensor, "model.ffn", m.ffn)
        _divides("parallelism.tensor", p.tensor, "model.vocabulary", m.vocabulary)
        ranks = f"data-parallel ranks (data {self.data} x fsdp {p.fsdp})"
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
