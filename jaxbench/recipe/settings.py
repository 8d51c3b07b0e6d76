"""The settings of a run as validated, frozen dataclasses.

A `Run` holds everything that decides what is computed. What follows from it (data-parallel size,
accumulation steps, mesh shape) is a property, so that nothing is written down twice.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal

from jaxbench.errors import RecipeError
from jaxbench.recipe.checks import divides, not_negative, positive
from jaxbench.recipe.model import SSD_CHUNK, ModelConfig

AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
"""The mesh axes, slowest links first. All of them always exist; an unused one has size 1."""

CHOSEN = tuple(axis for axis in AXES if axis != "data")
"""Those that a recipe sizes (`Parallelism`)."""

SAVEABLE = (
    "query", "key", "value", "attention", "residual", "dispatched", "gate", "up", "mamba",
)  # fmt: skip
"""The activations that a remat policy can save, in the order in which a layer computes them.
`dispatched` are the rows that the experts of a rank receive, `mamba` is what a Mamba-2 mixer's
output projection multiplies."""

STEPS = 50
"""Optimizer steps of a run, as published."""

MAX_SEED = 2**32 - 1
"""Of JAX's keys."""

MAX_MARGIN = 16
"""e4m3 has normal numbers over 15 powers of two: a larger headroom would leave nothing."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Sizes of the mesh axes that a recipe chooses; `data` takes the devices that are left
    (`Run.data`).

    With `virtual_stages` each rank of a pipeline has that many chunks of layers instead of one, and
    microbatches pass all ranks as often (interleaving; Narayanan et al. 2021): the pipeline is idle
    for a shorter part of a step.
    """

    pipeline: int = 1
    virtual_stages: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        positive("parallelism.", self, *(f.name for f in fields(self)))

    @property
    def ranks(self) -> int:
        """Devices that together hold one copy of the model."""
        return math.prod(getattr(self, axis) for axis in CHOSEN)


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
        positive("precision.", self, "amax_history")
        not_negative("precision.", self, "margin", "first_bf16_layers", "last_bf16_layers")
        if self.margin > MAX_MARGIN:
            raise RecipeError(f"precision.margin = {self.margin} must be at most {MAX_MARGIN}")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences per step (`global_batch`), and per pass of one data-parallel rank (`microbatch`).

    A microbatch of None is the whole share of a rank: one pass, no accumulation; in a pipeline as
    many as it has ranks.
    """

    sequence_length: int
    global_batch: int
    microbatch: int | None = None

    def __post_init__(self) -> None:
        positive("batch.", self, "sequence_length", "global_batch", "microbatch")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW with betas 0.9 and 0.95, weight decay 0.1 and clipping at global norm 1, as every
    source has them.

    `schedule` names the source of warm-up and cosine decay (`train.optimizer` has the formulas).
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

    def __post_init__(self) -> None:
        positive("optimizer.", self, "eps")
        not_negative(
            "optimizer.", self, "learning_rate", "final_learning_rate", "warmup", "constant"
        )

    def warmup_steps(self, steps: int) -> int:
        """Length of the warm-up in a run of `steps`."""
        return int(self.warmup * steps) if self.warmup < 1 else int(self.warmup)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the model is computed: changes speed and memory, never the result.

    `remat` is `none` (keep every intermediate), `full` (keep only the input of each layer), or the
    activations to keep, as in `query,key,residual:40`: a count keeps one in that many first layers
    and recomputes it in the rest (in a hybrid, whose letters are the layers, in those repeats of
    its scanned unit that lie among them). With `none`, outside a pipeline, layers are not scanned:
    each stands in the program by itself, and gathered weights are kept for the backward pass too.
    That copies nothing, and takes longer to compile. `xla_flags` is a named set of compiler
    options (`xla.flags.SETS`), and changes to it: `tuned,xla_gpu_some_flag=false`.
    """

    remat: str = "full"
    attention: Literal["auto", "cudnn", "xla"] = "auto"
    ssd: Literal["auto", "pallas", "xla"] = "auto"
    xla_flags: str = "tuned"

    def saved(self, layers: int) -> dict[str, int] | None:
        """For each saved activation the number of layers that keep it; None when remat is off."""
        if self.remat in ("none", "full"):
            return None if self.remat == "none" else {}
        saved = {}
        for entry in self.remat.split(","):
            name, colon, count = entry.strip().partition(":")
            if name not in SAVEABLE or bool(colon) != count.isdecimal():
                raise RecipeError(
                    f"execution.remat: cannot read {entry.strip()!r}; expected none, full, or some "
                    f"of {', '.join(SAVEABLE)}, each with an optional layer count: residual:40"
                )
            saved[name] = min(int(count or layers), layers)
        return saved


@dataclass(frozen=True, kw_only=True)
class Run:
    """One benchmark run on `gpus` devices (CPU devices for the smoke row).

    `label` says what the figures are: `full` (the published model), `proxy` (a shortened one),
    `derived` (a row that no recipe has, of either), `smoke` (tiny dims, no benchmark). `overrides`
    are the `--set` entries that were applied to the recipe's row.
    """

    recipe: str
    row: str
    label: Literal["full", "proxy", "derived", "smoke"]
    gpus: int
    model: ModelConfig
    parallelism: Parallelism
    precision: Precision
    batch: Batch
    optimizer: Optimizer
    execution: Execution
    steps: int = STEPS
    seed: int = 0
    overrides: tuple[str, ...] = ()

    @property
    def data(self) -> int:
        """Replicas of the sharded model: the devices that the other axes leave."""
        return self.gpus // self.parallelism.ranks

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of the mesh axes in the order of `AXES`."""
        sizes = {"data": self.data, **vars(self.parallelism)}
        return tuple(sizes[axis] for axis in AXES)

    @property
    def batch_ranks(self) -> int:
        """Data-parallel ranks: groups of devices that hold different sequences."""
        return self.data * self.parallelism.fsdp * self.parallelism.expert

    @property
    def microbatch(self) -> int:
        """Sequences per rank and pass."""
        passes = self.batch_ranks * self.parallelism.pipeline
        return self.batch.microbatch or max(self.batch.global_batch // passes, 1)

    @property
    def accumulation(self) -> int:
        """Passes per step whose gradients are summed."""
        return self.batch.global_batch // (self.microbatch * self.batch_ranks)

    @property
    def gradient_bytes(self) -> int:
        """Of one gradient: those of several passes are added up in `precision.accumulate`, that of
        a single one stays in bf16 (the embedding's, a small part, in fp32)."""
        return 4 if self.accumulation > 1 and self.precision.accumulate == "fp32" else 2

    def mesh_text(self) -> str:
        """The axes in use, as in `data 2 x fsdp 4`."""
        sizes = zip(AXES, self.mesh_shape, strict=True)
        return " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one device"

    @property
    def unrolled(self) -> bool:
        """Whether layers stand one after another in the program (`ops.repeat`)."""
        return self.parallelism.pipeline == 1 and self.execution.saved(self.model.layers) is None

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step trains on."""
        return self.batch.global_batch * self.batch.sequence_length

    def __post_init__(self) -> None:
        positive("", self, "steps")
        if not 0 <= self.seed <= MAX_SEED:
            raise RecipeError(f"seed = {self.seed} must be from 0 to {MAX_SEED}")
        self.execution.saved(self.model.layers)
        if self.model.softcap is not None and self.execution.attention != "auto":
            raise RecipeError(
                f"execution.attention = {self.execution.attention} has no soft cap, which "
                "model.softcap asks for; expected auto"
            )
        self._check_mesh()
        self._check_batch()
        self._check_pipeline()

    def _check_mesh(self) -> None:
        p, m, b = self.parallelism, self.model, self.batch
        ranks = " x ".join(CHOSEN)
        divides(ranks, p.ranks, "the number of devices", self.gpus)
        # The embedding table is split over all of these axes, heads and tokens over the last two.
        divides(ranks, p.ranks, "model.embed", m.embed)
        inner = p.context * p.tensor
        divides("context x tensor", inner, "model.kv_heads", m.kv_heads)
        divides("context x tensor", inner, "batch.sequence_length", b.sequence_length)
        divides("parallelism.tensor", p.tensor, "model.ffn", m.ffn)
        divides("parallelism.tensor", p.tensor, "model.vocabulary", m.vocabulary)
        if m.mamba is not None:
            divides("parallelism.tensor", p.tensor, "model.mamba.groups", m.mamba.groups)
            shard = b.sequence_length // p.context
            chunk = min(SSD_CHUNK, shard)
            divides("the Mamba chunk", chunk, "batch.sequence_length / context", shard)
        if "E" in m.pattern:
            divides("expert x tensor", p.expert * p.tensor, "model.experts", m.experts)
            if m.capacity_factor is None and self.precision.dtype == "fp8":
                raise RecipeError(
                    "experts without model.capacity_factor have no FP8 products; set one, or "
                    "precision.dtype=bf16"
                )
            if m.capacity_factor is not None:
                tokens = "the tokens of a sequence on one rank"
                length = b.sequence_length // inner
                divides("model.capacity_tokens", m.capacity_tokens, tokens, length)
        elif p.expert > 1:
            raise RecipeError(f"parallelism.expert = {p.expert} needs a model with experts")

    def _check_batch(self) -> None:
        p, b = self.parallelism, self.batch
        ranks = f"data-parallel ranks (data {self.data} x fsdp {p.fsdp} x expert {p.expert})"
        divides(ranks, self.batch_ranks, "batch.global_batch", b.global_batch)
        pass_size = self.microbatch * self.batch_ranks
        divides(f"batch.microbatch x {ranks}", pass_size, "batch.global_batch", b.global_batch)

    def _check_pipeline(self) -> None:
        p, m = self.parallelism, self.model
        if p.pipeline == 1:
            if p.virtual_stages > 1:
                raise RecipeError(
                    f"parallelism.virtual_stages = {p.virtual_stages} needs parallelism.pipeline"
                )
            return
        divides("parallelism.pipeline", p.pipeline, "the number of microbatches", self.accumulation)
        most = -(-m.layers // p.pipeline)
        if p.virtual_stages > most:
            raise RecipeError(
                f"parallelism.virtual_stages = {p.virtual_stages}: expected at most {most}, the "
                f"layers of a rank, for model.layers = {m.layers} over pipeline = {p.pipeline}"
            )
        saved = self.execution.saved(m.layers) or {}
        counted = [name for name, count in saved.items() if count < m.layers]
        alike = "the stages of a pipeline compute alike"
        if "M" in m.pattern:
            raise RecipeError(f"parallelism.pipeline: {alike}, but {m.family} is a hybrid")
        if counted:
            raise RecipeError(f"execution.remat: {alike}; no layer count for {counted[0]}")
        if self.precision.first_bf16_layers or self.precision.last_bf16_layers:
            raise RecipeError(f"precision: {alike}; no first_bf16_layers and last_bf16_layers")
        if "E" in m.pattern and m.capacity_factor is None:
            raise RecipeError(
                "parallelism.pipeline: experts need a model.capacity_factor, since their weights "
                "are gathered once per step"
            )
