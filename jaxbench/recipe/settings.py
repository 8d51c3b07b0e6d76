"""The settings of a run, as validated, frozen dataclasses.

A `Run` holds everything that decides what is computed. What follows from it (data-parallel size,
accumulation, mesh shape) is a property. The string below a field is its meaning in the table of
settings (docs/reference/settings.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Literal

from jaxbench.recipe.checks import divides, not_negative, positive, require
from jaxbench.recipe.mixers import SSD_CHUNK, ExpertsConfig
from jaxbench.recipe.model import ModelConfig, repeating_blocks

AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
"""The mesh axes, slowest links first. All of them always exist. An unused axis has size 1."""

CHOSEN = tuple(axis for axis in AXES if axis != "data")
"""The axes that a recipe sizes (`Parallelism`). `data` follows from the number of GPUs."""

STEPS = 50
"""Optimizer steps of a run, as published."""

SMOKE_STEPS = 15
"""Optimizer steps of the smoke row, which take half a minute on two cores."""

MAX_SEED = 2**32 - 1
"""The largest seed of a JAX key."""

PRODUCTS = (
    "qkv", "out", "latent", "query", "key_value", "gate_up", "up", "down", "into_latent",
    "out_of_latent", "in_proj",
)  # fmt: skip
"""Names of weights whose matmuls are quantized, by which `bf16_products` exempts them."""

BLOCKS = {"mxfp8": 32, "nvfp4": 16}
"""Elements that share a scale in the block-scaled formats."""

SAVEABLE = (
    "latent", "query", "key", "value", "attention", "residual", "dispatched", "gate", "up", "mamba",
)  # fmt: skip
"""The activations that a remat policy can save, in the order in which a layer computes them.
`latent` are the latents of latent attention, from which queries, keys and values are projected, and
the sum of experts in a latent space. `dispatched` are the tokens that the experts of a rank
receive. `mamba` is the input of a Mamba-2 mixer's output projection."""

INPUT = "input"
"""The input of each block of layers, which every remat policy saves. Only `offload` uses this
name."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Sizes of the mesh axes. Their product divides the number of GPUs; `data` takes the rest."""

    pipeline: int = 1
    """pipeline stages (1F1B)"""
    virtual_stages: int = 1
    """model chunks of each pipeline rank (interleaved 1F1B; Narayanan et al. 2021): more of them
    shorten the bubble. The number of microbatches must be a multiple of `pipeline`, and all layers
    must compute alike: no Mamba-2, no layer counts in `execution.remat`, no last layers in bf16.
    First layers that are unlike the others are computed with the embedding"""
    fsdp: int = 1
    """ranks over which weights and optimizer state are sharded (fully sharded data parallelism)"""
    expert: int = 1
    """expert parallelism; experts are split over expert x tensor"""
    context: int = 1
    """ranks over which a sequence is split; context x tensor divides the heads; 1 if the model has
    Mamba-2"""
    tensor: int = 1
    """tensor parallelism; divides the kv heads"""

    def __post_init__(self) -> None:
        positive("parallelism.", self, *(f.name for f in fields(self)))

    @property
    def ranks(self) -> int:
        """Devices that together hold one copy of the model."""
        return math.prod(getattr(self, axis) for axis in CHOSEN)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of matmuls and gradients."""

    dtype: Literal["bf16", "fp8", "mxfp8", "nvfp4", "fp32"] = "bf16"
    """dtype of matmuls. `fp8` has one scale for a tensor; `mxfp8` and `nvfp4` (Blackwell) have one
    for each block of 32 or 16 elements. In all three, head, embedding, attention scores and the
    Mamba-2 scan stay in bf16, norms in fp32, and the router in `model.experts.router_dtype`"""
    accumulate: Literal["fp32", "bf16"] = "fp32"
    """dtype in which gradients are summed over microbatches. In the same dtype, once per step,
    these sums are reduced over replicas, or in a pipeline over all ranks. With a single microbatch
    gradients of matrices stay in bf16; those of the embedding, routers and vectors are in fp32.
    Without a pipeline, a replica reduces the gradients of each microbatch in bf16"""
    scaling: Literal["delayed", "current"] = "delayed"
    """where the FP8 scale of a tensor comes from: the amax of the last `amax_history` steps
    (`delayed`), or the tensor itself (`current`)"""
    amax_history: int = 1024
    """steps whose amax `delayed` scaling considers"""
    last_bf16_layers: int = 0
    """last layers whose matmuls stay in bf16"""
    bf16_products: str = ""
    """matmuls that stay in bf16 in all layers, by their names in the guide to precision;
    `prediction` is the whole block of multi-token prediction: `qkv,out,prediction`"""
    gather: Literal["fp8", "bf16"] = "fp8"
    """dtype in which FP8 weights are all-gathered. `fp8` is half the bytes with the same result.
    Block-scaled weights are gathered as they are"""
    implementation: Literal["auto", "te", "xla"] = "auto"
    """who computes quantized matmuls: XLA, Transformer Engine (`te`), or `auto`, which is XLA on
    every machine"""
    stochastic_rounding: bool = True
    """NVFP4 gradients are rounded stochastically"""
    hadamard: bool = True
    """a random Hadamard transform before the weight gradients of NVFP4"""

    def __post_init__(self) -> None:
        positive("precision.", self, "amax_history")
        not_negative("precision.", self, "last_bf16_layers")
        unknown = sorted(self.in_bf16 - {*PRODUCTS, "prediction"})
        known = f"expected some of {', '.join(PRODUCTS)}, prediction"
        require(
            not unknown,
            f"precision.bf16_products: no matmul is named {', '.join(unknown)}; {known}",
        )

    @property
    def quantized(self) -> bool:
        """True if matmuls of layers are quantized."""
        return self.dtype == "fp8" or self.dtype in BLOCKS

    @property
    def in_bf16(self) -> frozenset[str]:
        """Names of the matmuls that stay in bf16."""
        return frozenset(filter(None, self.bf16_products.split(",")))

    @property
    def draws(self) -> bool:
        """True if gradients are rounded stochastically."""
        return self.dtype == "nvfp4" and self.stochastic_rounding


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW with betas 0.9 and 0.95 and clipping at global norm 1, as in every published benchmark.
    `train.optimizer` has the formulas of the schedules."""

    schedule: Literal["cosine", "megatron", "wsd"]
    """linear warm-up, then a decay. `cosine` is that of MaxText and Megatron Core. `megatron` is
    NeMo's, whose warm-up starts above 0. `wsd` is Nemotron 3 Super's, which decays with the root of
    the time"""
    learning_rate: float
    """peak learning rate"""
    final_learning_rate: float
    """learning rate at the end of the decay"""
    warmup: float
    """steps of warm-up, or a fraction of the run if below 1"""
    eps: float
    """epsilon of AdamW"""
    weight_decay: float = 0.1
    """weight decay; each step multiplies it by the learning rate"""
    decay_vectors: bool
    """norm gains, biases, sinks and the scalars of heads are decayed too, as in MaxText"""
    constant: int = 0
    """number of last steps that stay at the final learning rate"""
    moments: Literal["fp32", "bf16"] = "fp32"
    """dtype in which AdamW's moments are kept between steps; they are computed in fp32"""

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter of the weights, in fp32, and of the moments."""
        return 12 if self.moments == "fp32" else 8

    def __post_init__(self) -> None:
        positive("optimizer.", self, "eps")
        not_negative(
            "optimizer.", self, "learning_rate", "final_learning_rate", "warmup", "weight_decay",
            "constant",
        )  # fmt: skip
        require(
            self.schedule != "wsd" or not self.constant,
            f"optimizer.constant = {self.constant}: wsd has no constant tail; expected 0",
        )

    def warmup_steps(self, steps: int) -> int:
        """The length of the warm-up, in steps, in a run of `steps`."""
        # 0.29 * 100 is a little less than 29 in floating point.
        return int(self.warmup * steps + 1e-6) if self.warmup < 1 else int(self.warmup)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the model is computed. These settings change speed and memory, not the result, except for
    rounding and for the tokens that dropless experts drop."""

    remat: str = "full"
    """what is saved for the backward pass. `none` saves all activations, `full` only the input of
    each layer. A list saves the activations that it names: `query,key,value,attention,residual:24`
    saves `residual` in the first 24 layers (if a repeated block has several layers, in its repeats
    within the first 24). With `none`, outside a pipeline, layers are not scanned, and gathered
    weights are saved too: this is fastest if all of it fits, and slower to compile"""
    offload: str = "none"
    """activations to save in the host's memory, in layers where `remat` does not save them: `none`,
    or a list like `remat`'s, such as `gate,up:64`. `input` is the input of each repeated block,
    which every `remat` except `none` saves. Copies to the host and back run alongside the matmuls
    of the layers (docs/design/offload.md)"""
    attention: Literal["auto", "cudnn", "xla"] = "auto"
    """attention implementation; `auto` is cuDNN on GPUs, except in fp32"""
    ssd: Literal["auto", "pallas", "xla"] = "auto"
    """the part of Mamba-2 between its projections (docs/design/scan.md); `auto` is Pallas kernels
    on GPUs where they can compute the model's mixers"""
    grouped_matmul: Literal["auto", "pallas", "xla", "batched"] = "auto"
    """grouped matmuls of dropless experts: `xla` copies an expert's weights for each block of 128
    tokens; `batched` is one batched matmul, for `model.experts.slots` = `own`; `auto` is what the
    slots need, and with shared ones Pallas kernels on GPUs where they can multiply"""
    expert_parts: int = 1
    """parts of a microbatch that the experts of a layer compute one after the other. The exchanges
    of one part are then hidden behind the matmuls of another. Each part has its own slots of
    dropless experts, and its own FP8 scales of inputs and gradients"""
    replica_sums: Literal["step", "layer"] = "step"
    """when the gradients of layers are summed over the axis `data`: once per `step`, or in each
    `layer` as they arise, in every microbatch and in bf16, alongside the matmuls of other layers
    (docs/design/sharding.md). Not in a pipeline"""
    xla_flags: str = "tuned"
    """compiler options: `tuned`, `guided` or `default` (docs/reference/xla_flags.md),
    and changes: `tuned,xla_gpu_some_flag=false`"""

    def __post_init__(self) -> None:
        positive("execution.", self, "expert_parts")

    def saved(self, layers: int) -> dict[str, int] | None:
        """The number of layers that save each named activation; None without remat."""
        if self.remat in ("none", "full"):
            return None if self.remat == "none" else {}
        return _layer_counts("remat", self.remat, layers, "none, full, or ")

    def offloaded(self, layers: int) -> dict[str, int]:
        """The number of layers that save each named activation in host memory, unless they save it
        in the device's memory."""
        if self.offload == "none":
            return {}
        require(
            self.remat != "none", "execution.offload: remat = none saves everything on the device"
        )
        names = INPUT, *SAVEABLE
        counts = _layer_counts("offload", self.offload, layers, "none, or ", names)
        require(
            "attention" not in counts,
            "execution.offload: kernels keep attention on the device; name it in execution.remat",
        )
        return counts

    def kept(self, stop: int, layers: int) -> tuple[frozenset[str] | None, frozenset[str]]:
        """(what a block saves on the device, None without remat; what it saves in host memory).

        The block is the one whose last layer is number `stop` of `layers`. It saves an activation
        if all of its layers do.
        """

        def of_block(counts: dict[str, int]) -> frozenset[str]:
            return frozenset(name for name, saving in counts.items() if stop <= saving)

        saved, on_host = self.saved(layers), of_block(self.offloaded(layers))
        if saved is None:
            return None, on_host
        on_device = of_block(saved)
        return on_device, on_host - on_device


@cache
def _layer_counts(
    setting: str, text: str, layers: int, others: str, names: Sequence[str] = SAVEABLE
) -> dict[str, int]:
    """The number of layers for each activation of a list: `query,residual:40`."""
    counts = {}
    for entry in text.split(","):
        name, colon, count = entry.strip().partition(":")
        require(
            name in names and bool(colon) == count.isdecimal(),
            f"execution.{setting}: cannot read {entry.strip()!r}; expected {others}some of "
            f"{', '.join(names)}, each with an optional layer count: residual:40",
        )
        counts[name] = min(int(count or layers), layers)
    return counts


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The work of a step, and how it is divided."""

    sequence_length: int
    """tokens of a sequence"""
    global_batch: int
    """sequences of a step"""
    microbatch: int | None = None
    """sequences that a data-parallel rank computes at once; gradient accumulation follows from it.
    `null` is the whole share of the rank, in a pipeline that share over the number of stages"""
    tokens: Literal["uniform", "zipf"] = "uniform"
    """distribution of the synthetic tokens. `uniform` has nothing to learn. `zipf` makes few tokens
    frequent, as text does, and half of the targets follow from their tokens, so that a router
    learns preferences of its own"""

    def __post_init__(self) -> None:
        positive("batch.", self, "sequence_length", "global_batch", "microbatch")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One benchmark run on `gpus` devices (CPU devices for the smoke row).

    `label` is `full` (the published model), `proxy` (a changed or shortened model), `derived` (the
    recipe has no row for this number of GPUs) or `smoke` (tiny dims, no benchmark). `overrides` are
    the `--set` entries that were applied to the recipe's row.
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
        """Size of the data axis: replicas of the sharded model."""
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
        """Sequences of a microbatch on a data-parallel rank (`batch.microbatch` or its default)."""
        shares = self.batch_ranks * self.parallelism.pipeline
        return self.batch.microbatch or max(self.batch.global_batch // shares, 1)

    @property
    def device_tokens(self) -> float:
        """Tokens of a microbatch on a device."""
        p = self.parallelism
        return self.microbatch * self.batch.sequence_length / p.context / p.tensor

    @property
    def accumulation(self) -> int:
        """Microbatches per step. Their gradients are summed."""
        return self.batch.global_batch // (self.microbatch * self.batch_ranks)

    @property
    def bubble(self) -> float:
        """The time for which a pipeline rank is idle, over the time for which it works."""
        ranks, chunks = self.parallelism.pipeline, self.parallelism.virtual_stages
        return (ranks - 1) / (chunks * self.accumulation)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient. Several microbatches are summed in `precision.accumulate`. The
        gradient of a single microbatch stays in bf16, except the embedding's, a small part, which
        is in fp32."""
        return 4 if self.accumulation > 1 and self.precision.accumulate == "fp32" else 2

    def mesh_text(self) -> str:
        """The axes in use: `data 2 x fsdp 4`."""
        sizes = zip(AXES, self.mesh_shape, strict=True)
        return " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one device"

    @property
    def unrolled(self) -> bool:
        """True if layers are compiled one by one and not scanned (`ops.layer_stack`)."""
        return self.parallelism.pipeline == 1 and self.execution.saved(self.model.layers) is None

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step trains on."""
        return self.batch.global_batch * self.batch.sequence_length

    def __post_init__(self) -> None:
        positive("", self, "steps")
        require(0 <= self.seed <= MAX_SEED, f"seed = {self.seed} must be from 0 to {MAX_SEED}")
        # These two raise if they cannot read their setting.
        self.execution.saved(self.model.layers)
        self.execution.offloaded(self.model.layers)
        if prediction := self.model.prediction:
            depth, length = prediction.depth, self.batch.sequence_length
            name = f"model.prediction.depth = {depth}"
            require(
                depth < length, f"{name}: expected fewer than the {length} tokens of a sequence"
            )
            self._check_scaling(name, depth)
        parts = self.execution.expert_parts
        require(
            parts == 1 or self.model.experts is not None, "execution.expert_parts needs experts"
        )
        self._check_scaling(f"execution.expert_parts = {parts}", parts)
        self._check_mesh()
        self._check_batch()
        if self.parallelism.pipeline > 1:
            self._check_pipeline()
        else:
            count = self.parallelism.virtual_stages
            require(count == 1, f"parallelism.virtual_stages = {count} needs parallelism.pipeline")

    def _check_scaling(self, name: str, uses: int) -> None:
        """Requires that each matmul runs only once in a microbatch (`uses` is 1) if FP8 scaling is
        delayed, which takes one amax for each matmul of a microbatch."""
        delayed = self.precision.dtype == "fp8" and self.precision.scaling == "delayed"
        require(uses == 1 or not delayed, f"{name} in FP8 needs precision.scaling = current")

    def _check_mesh(self) -> None:
        p, m, b = self.parallelism, self.model, self.batch
        ranks = " x ".join(CHOSEN)
        require(
            m.learned_positions is None or b.sequence_length <= m.learned_positions,
            f"batch.sequence_length = {b.sequence_length} must be at most model.learned_positions "
            f"= {m.learned_positions}",
        )
        divides(ranks, p.ranks, "the number of devices", self.gpus)
        # The embedding table is split over all of these axes; heads and tokens over the last two.
        divides(ranks, p.ranks, "model.embed", m.embed)
        inner = p.context * p.tensor
        if m.attention:
            kv_heads, heads = m.attention.kv_heads, m.attention.heads
            divides("parallelism.tensor", p.tensor, "model.attention.kv_heads", kv_heads)
            divides("context x tensor", inner, "model.attention.heads", heads)
        if latent := m.latent_attention:
            prefix = "model.latent_attention."
            divides("context x tensor", inner, f"{prefix}heads", latent.heads)
            for name in ("query_latent", "kv_latent"):
                size = getattr(latent, name)
                at_rest = p.fsdp * p.context * p.pipeline
                divides("fsdp x context x pipeline", at_rest, f"{prefix}{name}", size)
        if m.mlp:
            divides("parallelism.tensor", p.tensor, "model.mlp.ffn", m.mlp.ffn)
        divides("context x tensor", inner, "batch.sequence_length", b.sequence_length)
        divides("parallelism.tensor", p.tensor, "model.vocabulary", m.vocabulary)
        if m.mamba:
            divides("parallelism.tensor", p.tensor, "model.mamba.groups", m.mamba.groups)
            chunk = min(SSD_CHUNK, b.sequence_length)
            divides("the Mamba chunk", chunk, "batch.sequence_length", b.sequence_length)
            require(
                p.context == 1,
                f"parallelism.context = {p.context}: {m.family} has Mamba-2 mixers, which take "
                "whole sequences; expected 1",
            )
        if m.experts:
            self._check_experts(m.experts)
        else:
            require(p.expert == 1, f"parallelism.expert = {p.expert} needs a model with experts")

    def _check_experts(self, experts: ExpertsConfig) -> None:
        p, length = self.parallelism, self.batch.sequence_length
        divides("expert x tensor", p.expert * p.tensor, "model.experts.count", experts.count)
        if latent := experts.latent:
            at_rest = p.fsdp * p.context * p.pipeline
            divides("fsdp x context x pipeline", at_rest, "model.experts.latent", latent)
        if shared := experts.shared_ffn:
            divides("parallelism.tensor", p.tensor, "model.experts.shared_ffn", shared)
        if experts.capacity_factor is not None:
            tokens, shard = "the tokens of a sequence on one rank", length // (p.context * p.tensor)
            divides("model.experts.capacity_tokens", experts.capacity_tokens, tokens, shard)

    def _check_batch(self) -> None:
        p, b = self.parallelism, self.batch
        ranks = f"data-parallel ranks (data {self.data} x fsdp {p.fsdp} x expert {p.expert})"
        divides(ranks, self.batch_ranks, "batch.global_batch", b.global_batch)
        at_once, name = self.microbatch * self.batch_ranks, f"batch.microbatch x {ranks}"
        divides(name, at_once, "batch.global_batch", b.global_batch)
        parts = self.execution.expert_parts
        divides("execution.expert_parts", parts, "the sequences of a microbatch", self.microbatch)

    def _check_pipeline(self) -> None:
        p, m = self.parallelism, self.model
        divides("parallelism.pipeline", p.pipeline, "the number of microbatches", self.accumulation)
        in_layers = self.execution.replica_sums == "layer"
        require(not in_layers, "execution.replica_sums = layer: a pipeline sums once per step")
        require(
            m.mamba is None,
            f"parallelism.pipeline: {m.family} has Mamba-2 mixers, which no pipeline can hold",
        )
        *before, (pattern, repeats) = repeating_blocks(m)
        blocks, most = f"{repeats} repeated blocks ({pattern})", -(-repeats // p.pipeline)
        require(
            p.virtual_stages <= most,
            f"parallelism.virtual_stages = {p.virtual_stages}: expected at most {most}, the "
            f"blocks of a rank, for {blocks} over pipeline = {p.pipeline}",
        )
        alike = "the stages of a pipeline compute alike"
        require(
            not any("E" in letters for letters, _ in before),
            f"parallelism.pipeline: {alike}; in front of the {blocks} no layer may have experts",
        )
        for name, count in (self.execution.saved(m.layers) or {}).items():
            require(count == m.layers, f"execution.remat: {alike}; no layer count for {name}")
        offload = self.execution.offload
        require(offload == "none", "execution.offload: a pipeline cannot offload")
        require(
            self.precision.last_bf16_layers == 0,
            f"precision.last_bf16_layers = {self.precision.last_bf16_layers}: {alike}; expected 0",
        )
