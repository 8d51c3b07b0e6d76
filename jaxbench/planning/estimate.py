"""A guess of a step's time and memory without compiling: for the order of a search, for no report.

Closed forms: the model's products at the dense peak, products that remat repeats, other kernels by
their bytes, a pipeline's bubble, and what collectives send over the bandwidths of
`xla.collectives`. Left out are latencies, the embedding and the scan of Mamba-2. A search corrects
both figures by what compiled plans show (`search`).
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from jaxbench import mesh
from jaxbench.hardware import Gpu
from jaxbench.recipe import flops
from jaxbench.recipe.model import SSD_CHUNK, ModelConfig
from jaxbench.recipe.settings import AXES, Run
from jaxbench.xla.collectives import Collective

BF16, FP32 = 2, 4
"""Bytes of a number."""

STATE_BYTES = 3 * FP32
"""Of a parameter: the weight and AdamW's two moments."""

VISITS = 15
"""How often kernels other than products read or write the features of a layer and token, in bf16,
in a step: about what the plans of Llama rows with scanned layers have."""

VISITS_UNROLLED = 8
"""The same without remat (`ops.repeat`), where nothing is stacked and no activation made again: 6.5
in the plan of 8B in bf16, 9 in FP8."""

WORKSPACE = 3
"""Copies of a layer's gathered weights and features that are live at a time: the next layer's, this
one's, gradients."""

OPTIMIZER_BYTES = 2 * STATE_BYTES + 2 * FP32 + BF16
"""Read and written per parameter by the update: the state, the gradient (twice, for its norm), and
the weight in bf16."""

FP8_PRODUCTS = ("attention projections", "mlp", "experts", "mamba projections")
"""Components of `flops.model_flops` that an FP8 recipe multiplies in FP8."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, and bytes of one device at its peak."""

    seconds: float
    peak: float


@dataclass(frozen=True)
class Kept:
    """An activation that remat can keep, of one token in a layer with this letter: its features,
    and the FLOPs that make it again."""

    letter: str
    features: float
    flops: float


@cache
def activations(cfg: ModelConfig, length: int) -> dict[str, Kept]:
    """Those of a model by name (`settings.SAVEABLE`), in sequences of a length."""
    queries, keys = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    found = {
        "query": Kept("*", queries, 2 * cfg.embed * queries),
        "key": Kept("*", keys, 2 * cfg.embed * keys),
        "value": Kept("*", keys, 2 * cfg.embed * keys),
        "attention": Kept("*", queries, 4 * length * queries),
        "residual": Kept("*", cfg.embed, 2 * queries * cfg.embed),
    }
    letter, rows = ("E", _rows(cfg)) if "E" in cfg.pattern else ("-", 1.0)
    inner = Kept(letter, rows * cfg.ffn, 2 * rows * cfg.embed * cfg.ffn)
    if letter == "E":
        found["dispatched"] = Kept("E", rows * cfg.embed, 0)
    if cfg.activation != "relu2":
        found["gate"] = inner
    found["up"] = inner
    if (m := cfg.mamba) is not None:
        scan = flops.scan_flops(m, SSD_CHUNK, SSD_CHUNK) / SSD_CHUNK / 3
        found["mamba"] = Kept("M", m.groups * m.inner, scan)
    return found


def _rows(cfg: ModelConfig) -> float:
    """Rows that experts compute for each token."""
    return cfg.experts_per_token * (cfg.capacity_factor or 1.0)


parameters, model_flops = cache(flops.parameters), cache(flops.model_flops)


def estimate(run: Run, gpu: Gpu) -> Estimate:
    """`Estimate` of a run."""
    p, layers = run.parallelism, run.model.layers
    kernels = _product_seconds(run, gpu) + _recomputed_seconds(run, gpu) + _other_seconds(run, gpu)
    weights, tokens = _weight_seconds(run, gpu), _token_seconds(run, gpu)
    if p.pipeline == 1:
        total = max(kernels, weights) + tokens
    else:
        stages, duties = p.pipeline * p.virtual_stages, p.virtual_stages * run.accumulation
        padded = stages * -(-layers // stages) / layers
        kernels *= padded * (1 + (p.pipeline - 1) / duties)
        # Beside what tokens send stand the other direction's products, but in the ticks that go one
        # way (`train.timetable`). Weights move once per step, with nothing beside them.
        one_way = min(1.0, (stages + p.pipeline - 1) / duties)
        total = max(kernels, (1 - one_way) * tokens) + one_way * tokens + weights
    return Estimate(total + _replica_seconds(run, gpu), _peak_bytes(run))


def least_state(run: Run) -> float:
    """Bytes of train state and gradients that a device has at least: every weight is split over all
    ranks at most, and clipping needs all gradients at once."""
    return (
        parameters(run.model)["total"] / run.parallelism.ranks * (STATE_BYTES + run.gradient_bytes)
    )


def _peak(run: Run, gpu: Gpu, name: str) -> float:
    """FLOP/s of a component of the model."""
    dtype = "fp8" if run.precision.dtype == "fp8" and name in FP8_PRODUCTS else "bf16"
    return gpu.tflops[dtype] * 1e12


def _product_seconds(run: Run, gpu: Gpu) -> float:
    """The model's products on one device."""
    work = model_flops(run.model, run.batch.sequence_length)
    share = run.batch.global_batch / run.gpus
    parts = (value / _peak(run, gpu, name) for name, value in work.items() if name != "total")
    return share * sum(parts)


def _recomputed_seconds(run: Run, gpu: Gpu) -> float:
    """What remat computes again."""
    total = 0.0
    for name, kept in activations(run.model, run.batch.sequence_length).items():
        component = "attention scores" if name == "attention" else "mlp"
        flops_again = _missing(run, name) * run.model.letters.count(kept.letter) * kept.flops
        total += flops_again / _peak(run, gpu, component)
    return total * run.tokens_per_step / run.gpus


def _other_seconds(run: Run, gpu: Gpu) -> float:
    """Kernels that are no products: over activations, over the gradients that a pipeline's ranks
    add up in every pass, and the optimizer's."""
    cfg, p = run.model, run.parallelism
    kept = activations(cfg, run.batch.sequence_length).values()
    features = sum(cfg.letters.count(a.letter) * a.features for a in kept)
    share = run.tokens_per_step / run.gpus
    moved = (VISITS_UNROLLED if run.unrolled else VISITS) * BF16 * share * features
    if p.pipeline > 1:
        moved += (
            run.accumulation * sum(_weights(run)) / p.pipeline * (2 * run.gradient_bytes + BF16)
        )
    moved += parameters(cfg)["total"] / p.ranks * OPTIMIZER_BYTES
    return moved / (gpu.bandwidth * 1e9)


def _gathered_bytes(run: Run) -> int:
    """Bytes of a weight as it is gathered."""
    return 1 if run.precision.dtype == "fp8" and run.precision.gather == "fp8" else BF16


def _operand_bytes(run: Run) -> float:
    """Bytes that the products of all layers read of a token and that remat policies have no name
    for: norms' results, whole on each tensor rank, and hidden activations; in FP8, a byte each,
    attention's output as well."""
    cfg, fp8 = run.model, run.precision.dtype == "fp8"
    kept = activations(cfg, run.batch.sequence_length)
    read: float = len(cfg.letters) * cfg.embed * run.parallelism.tensor
    for name in ("up", "attention") if fp8 else ("up",):
        read += cfg.letters.count(kept[name].letter) * kept[name].features
    return read if fp8 else BF16 * read


def _missing(run: Run, name: str) -> float:
    """The share of the layers that compute an activation again."""
    saved = run.execution.saved(run.model.layers)
    return 0.0 if saved is None else 1 - saved.get(name, 0) / run.model.layers


def _weights(run: Run) -> tuple[float, float]:
    """Weights of products that a tensor rank uses, without experts; and those of its experts."""
    counts, p = parameters(run.model), run.parallelism
    experts = counts.get("experts", 0)
    rest = counts["total"] - counts["embedding"] - counts["norms"] - experts
    return rest / p.tensor, experts / (p.tensor * p.expert)


def _seconds(run: Run, gpu: Gpu, kind: str, size: float, *axes: str) -> float:
    """A collective over some axes, whose result on one device has `size` bytes."""
    sizes = run.mesh_shape
    if all(size == 1 or axis not in axes for axis, size in zip(AXES, sizes, strict=True)):
        return 0.0
    ids = np.arange(run.gpus).reshape(sizes)
    group = ids[tuple(slice(None) if axis in axes else 0 for axis in AXES)].ravel()
    return Collective(kind, "", round(size), tuple(group.tolist()), 1, "").seconds(gpu)


def _weight_seconds(run: Run, gpu: Gpu) -> float:
    """Gathers of weights, for the forward pass and, unless layers are unrolled, again for the
    backward pass, and scatters of their gradients, in every pass; in a pipeline once per step, of a
    rank's own layers."""
    p, width = run.parallelism, _gathered_bytes(run)
    gathers, passes = (1, 1) if p.pipeline > 1 else (1 if run.unrolled else 2, run.accumulation)
    total = 0.0
    for whole, axes in zip(_weights(run), (mesh.AT_REST, mesh.EXPERT_AT_REST), strict=True):
        ranks, weights = math.prod(getattr(p, axis) for axis in axes), whole / p.pipeline
        total += gathers * _seconds(run, gpu, "all-gather", weights * width, *axes)
        total += _seconds(run, gpu, "reduce-scatter", weights * BF16 / ranks, *axes)
    return passes * total


def _replica_seconds(run: Run, gpu: Gpu) -> float:
    """The sum of gradients over replicas, once per step."""
    shard = parameters(run.model)["total"] / run.parallelism.ranks
    return _seconds(run, gpu, "all-reduce", shard * run.gradient_bytes, *mesh.REPLICAS)


def _token_seconds(run: Run, gpu: Gpu) -> float:
    """What activations send: gathers and scatters of a tensor axis around every mixer (twice
    forward, twice backward, one gather again unless layers are unrolled), sequences for heads and
    back on a context axis, rows to experts and back."""
    cfg, p = run.model, run.parallelism
    tokens = run.microbatch * run.batch.sequence_length / p.context
    kept = activations(cfg, run.batch.sequence_length)
    whole = tokens * cfg.embed * BF16
    total = 0.0
    for letter in set(cfg.letters):
        each = 0.0
        if letter != "E":
            gathers = 2 if run.unrolled else 3
            each += gathers * _seconds(run, gpu, "all-gather", whole, mesh.TENSOR)
            each += 2 * _seconds(run, gpu, "reduce-scatter", whole / p.tensor, mesh.TENSOR)
        else:
            rows = tokens / p.tensor * kept["dispatched"].features * BF16
            times = 4 + _missing(run, "dispatched")
            each += times * _seconds(run, gpu, "all-to-all", rows, *mesh.EXPERTS)
        if letter == "*":
            for name in ("query", "key", "value", "attention"):
                size = tokens / p.tensor * kept[name].features * BF16
                times = 2 + _missing(run, name)
                each += times * _seconds(run, gpu, "all-to-all", size, mesh.CONTEXT)
        total += cfg.letters.count(letter) * each
    layers = 1 / p.pipeline  # those of a rank
    return total * run.accumulation * layers


def _peak_bytes(run: Run) -> float:
    """State, gradients, weights in use, the activations that wait for the backward pass, and a
    layer's workspace."""
    cfg, p = run.model, run.parallelism
    total, sums = parameters(cfg)["total"], run.gradient_bytes
    tokens = run.microbatch * run.batch.sequence_length / p.context / p.tensor
    per_layer = {
        name: cfg.letters.count(kept.letter) * kept.features
        for name, kept in activations(cfg, run.batch.sequence_length).items()
    }
    waiting = 1.0 * cfg.layers * cfg.embed  # a layer's input is always kept
    waiting += sum((1 - _missing(run, name)) * size for name, size in per_layer.items())
    held, share = (BF16 + sums) * total / p.ranks, 1.0
    workspace = WORKSPACE * BF16 * tokens * sum(per_layer.values()) / cfg.layers
    if p.pipeline > 1:
        slots = p.pipeline * (p.virtual_stages + 2) - 2
        slots = min(slots, p.virtual_stages * run.accumulation)
        share = slots / (p.pipeline * p.virtual_stages)
        held = (BF16 + sums) * sum(_weights(run)) / p.pipeline
    else:
        workspace += WORKSPACE * BF16 * sum(_weights(run)) / cfg.layers
    if run.unrolled:
        held += _gathered_bytes(run) * sum(_weights(run)) + tokens * _operand_bytes(run)
    return STATE_BYTES * total / p.ranks + held + share * BF16 * tokens * waiting + workspace
