"""Candidates of a search: the row with other settings, as far as `recipe.settings` allows it, and
estimates of their memory and of their step.

A candidate has three parts. Its *layout* is the mesh, virtual stages, microbatch and
`expert_parts`. Its *options* are compiler options, when replicas are summed, and the dtype of
gathered weights. Its *policy* is what it saves for the backward pass, on the device (`remat`) and
in host memory (`offload`).
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise, product
from typing import Any

from jaxbench.base.errors import RecipeError
from jaxbench.base.hardware import Gpu
from jaxbench.recipe import flops
from jaxbench.recipe.activations import BF16, Activation, activations, offloaded_features
from jaxbench.recipe.mixers import ExpertsConfig
from jaxbench.recipe.model import ModelConfig, repeating_blocks
from jaxbench.recipe.settings import (
    AXES,
    CHOSEN,
    INPUT,
    SAVEABLE,
    Execution,
    Parallelism,
    Run,
)
from jaxbench.xla import flags
from jaxbench.xla.collectives import Collective

POLICY = "execution.remat", "execution.offload"
"""The settings of a candidate's policy."""

KEYS = (
    *(f"parallelism.{name}" for name in (*CHOSEN, "virtual_stages")),
    "batch.microbatch",
    "execution.expert_parts",
    *POLICY,
    "execution.xla_flags",
    "execution.replica_sums",
    "precision.gather",
)
"""The settings in which candidates differ, by their `--set` keys."""

GROUPS = (("attention",), ("latent",), ("query", "key", "value"), ("residual",), ("dispatched",),
          ("gate", "up"), ("mamba",))  # fmt: skip
"""Activations that are saved together. Saving only a part of a group would spare no matmul."""

Groups = Sequence[tuple[str, ...]]

EIGHTHS = 8
"""A group may be saved in any number of eighths of the layers."""

WORKSPACE = 3
"""Copies of a layer's gathered weights and activations that are in memory at the same time: the
layer's own, the copy of the next layer, which is prefetched, and gradients."""

UNROLLED = 0.1
"""The largest share of a step that we assume unrolled layers save: they copy no stash, and gather
weights once."""

HIDDEN = (1 / 3, 2 / 3)
"""Shares of a step that can hide copies to the host (the forward pass) and back (the backward
pass)."""

HIDING = 0.5
"""We assume that another schedule (guided, or with few collectives in flight), sums in each layer,
or more `expert_parts` leave this share of the exposed communication. It decides only which
candidate is compiled first."""

IN_FLIGHT = {"tuned": (1, 2), "guided": (8,)}
"""Limits of collectives in flight to try for `tuned`, from each set of options. All collectives
share one queue, so with few in flight, small ones over NVLink wait less for large ones over the
network (docs/reference/xla_flags.md, *Collectives in flight*). Where a guided schedule, which
allows eight, is good, a tuned one with as many may be better."""

OVERLAPPED = "fsdp", "data"
"""Axes that carry weights and their gradients. These need not wait for the layer that runs."""

parameters, model_flops = cache(flops.parameters), cache(flops.model_flops)


def layout(run: Run) -> tuple[tuple[int, ...], int, int, int]:
    """Mesh, virtual stages, microbatch and `expert_parts`."""
    stages, parts = run.parallelism.virtual_stages, run.execution.expert_parts
    return run.mesh_shape, stages, run.microbatch, parts


def axes(run: Run) -> frozenset[str]:
    """The axes of the mesh that have several ranks."""
    return frozenset(name for name, size in zip(AXES, run.mesh_shape, strict=True) if size > 1)


def settings(run: Run) -> dict[str, int | str]:
    """The values of `KEYS`."""
    values = {"batch.microbatch": run.microbatch}
    for section in ("parallelism", "execution", "precision"):
        values |= {f"{section}.{k}": value for k, value in vars(getattr(run, section)).items()}
    return {key: values[key] for key in KEYS}


def options(run: Run) -> tuple[str, str, str]:
    """Compiler options, when replicas are summed, and the dtype of gathered FP8 weights."""
    return run.execution.xla_flags, run.execution.replica_sums, run.precision.gather


def with_values(run: Run, values: dict[str, int | str]) -> Run:
    """The candidate with other values of some `KEYS`. Raises RecipeError if it cannot run so."""
    changes: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in values.items():
        section, _, name = key.partition(".")
        changes[section][name] = value
    sections: dict[str, Any] = {
        section: replace(getattr(run, section), **names) for section, names in changes.items()
    }
    return replace(run, **sections)


def other_options(run: Run, fixed: frozenset[str] = frozenset()) -> Iterator[Run]:
    """The candidate with one of its options changed, except keys in `fixed`."""
    for key, value in _other_values(run):
        if key not in fixed:
            yield with_values(run, {key: value})


def _other_values(run: Run) -> Iterator[tuple[str, str]]:
    """Other values of a candidate's options, each with its key."""
    execution, precision = run.execution, run.precision
    base, *changes = execution.xla_flags.split(",")
    if other := {"tuned": "guided", "guided": "tuned"}.get(base):
        # The best limit of one schedule says nothing about the other one.
        kept = [change for change in changes if not change.startswith(flags.IN_FLIGHT)]
        yield "execution.xla_flags", ",".join([other, *kept])
    if run.data > 1 and run.parallelism.pipeline == 1:
        yield "execution.replica_sums", "layer" if execution.replica_sums == "step" else "step"
    if precision.dtype == "fp8":
        yield "precision.gather", "bf16" if precision.gather == "fp8" else "fp8"
    tuned = with_values(run, {"execution.xla_flags": "tuned"})
    for limit in IN_FLIGHT.get(execution.xla_flags, ()):
        if limit != flags.options(tuned, "gpu")[flags.IN_FLIGHT]:
            yield "execution.xla_flags", f"tuned,{flags.IN_FLIGHT}={limit}"


def merged(a: Run, b: Run, base: Run) -> Run | None:
    """What `a` and `b` change in the layout and the options of `base`, in one candidate. None if
    both change the same setting or the mesh, or if the result cannot run."""
    before = settings(base)
    of_a, of_b = (
        {key: new for key, new in settings(run).items() if new != before[key] and key not in POLICY}
        for run in (a, b)
    )
    if of_a.keys() & of_b.keys() or base.parallelism not in (a.parallelism, b.parallelism):
        return None
    changed = of_a | of_b | {"execution.remat": "full", "execution.offload": "none"}
    try:
        result = with_values(base, changed)
    except RecipeError:
        return None
    # Without replicas there is nothing to sum. A pipeline always sums after the step.
    useless = result.data == 1 and result.parallelism.pipeline == 1
    return None if useless and "execution.replica_sums" in changed else result


def changes(run: Run, row: Run) -> list[str]:
    """The `--set` entries that turn a row into a candidate. For another layout of a derived row
    these are all `KEYS` and the global batch, because anything that is not set would be derived
    anew."""
    before, after = settings(row), settings(run)
    if layout(run) != layout(row) and row.label == "derived":
        before, after["batch.global_batch"] = {}, run.batch.global_batch
    return [f"{key}={value}" for key, value in after.items() if value != before.get(key)]


def layouts(row: Run, fixed: frozenset[str] = frozenset()) -> list[Run]:
    """Every layout that can run, with full remat and the row's options. The keys in `fixed` keep
    the row's values, except those of the policy."""
    kept = {key: settings(row)[key] for key in fixed.difference(POLICY)}
    result = []
    for parallelism in _parallelisms(row):
        batch_ranks = row.gpus // parallelism.ranks * parallelism.fsdp * parallelism.expert
        shares = _divisors(row.batch.global_batch // batch_ranks)
        sums = "step" if parallelism.pipeline > 1 else row.execution.replica_sums
        for microbatch, parts in product(shares, _expert_parts(row, parallelism, fixed)):
            batch = replace(row.batch, microbatch=microbatch)
            execution = replace(
                row.execution, remat="full", offload="none", expert_parts=parts, replica_sums=sums
            )
            try:
                run = replace(row, parallelism=parallelism, batch=batch, execution=execution)
            except RecipeError:
                continue
            if kept.items() <= settings(run).items():
                result.append(run)
    return result


def _expert_parts(row: Run, p: Parallelism, fixed: frozenset[str]) -> set[int]:
    """The values of `expert_parts` to try: 1, 2 and the row's value if ranks exchange tokens, else
    1."""
    of_row = row.execution.expert_parts
    if "execution.expert_parts" in fixed:
        return {of_row}
    return {1, 2, of_row} if row.model.experts and p.expert * p.tensor > 1 else {1}


def _parallelisms(row: Run) -> Iterator[Parallelism]:
    """Every division of the GPUs among the axes. Virtual stages divide the blocks of a pipeline
    rank, so they add no padding. The largest number of stages has the shortest bubble and comes
    first."""
    _, blocks = repeating_blocks(row.model)[-1]
    for sizes in product(_divisors(row.gpus), repeat=len(CHOSEN)):
        if row.gpus % math.prod(sizes) == 0:
            p = Parallelism(**dict(zip(CHOSEN, sizes, strict=True)))
            of_rank = -(-blocks // p.pipeline)
            for virtual_stages in reversed(_divisors(of_rank)) if p.pipeline > 1 else (1,):
                yield replace(p, virtual_stages=virtual_stages)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def distance(a: Run, b: Run) -> int:
    """The number of changes between two layouts. Ranks that one axis gives to another one count as
    one change, however many they are. So does another microbatch, unless a device has as many
    tokens of it as before. Other virtual stages count one if the pipelines have equally many ranks.
    `expert_parts` counts only between layouts that are otherwise equal, since mesh and microbatch
    decide which numbers of parts are possible."""
    sizes = [*zip(a.mesh_shape, b.mesh_shape, strict=True)]
    moved = max(sum(x < y for x, y in sizes), sum(x > y for x, y in sizes))
    p, q = a.parallelism, b.parallelism
    stages = p.pipeline == q.pipeline and p.virtual_stages != q.virtual_stages
    microbatch = a.microbatch != b.microbatch and a.device_tokens != b.device_tokens
    differing = moved + microbatch + stages
    return differing or int(a.execution.expert_parts != b.execution.expert_parts)


@dataclass(frozen=True)
class Policy:
    """What a candidate saves for the backward pass. `device` and `host` are the features per token
    that all layers together save there. `spared` are the FLOPs that need no recomputation, as a
    share of the model's FLOPs; unrolled layers add `UNROLLED`."""

    remat: str
    offload: str
    device: float
    host: float
    spared: float


def policy_of(run: Run) -> Policy:
    """The policy of a candidate."""
    remat, offload = run.execution.remat, run.execution.offload
    return _policy(run.model, run.batch.sequence_length, remat, offload)


@cache
def _policy(cfg: ModelConfig, length: int, remat: str, offload: str) -> Policy:
    execution = Execution(remat=remat, offload=offload)
    saved, offloaded = execution.saved(cfg.layers), execution.offloaded(cfg.layers)
    device = flops_kept = 0.0
    for name, activation in activations(cfg, length).items():
        here = 1.0 if saved is None else saved.get(name, 0) / cfg.layers
        there = max(0.0, offloaded.get(name, 0) / cfg.layers - here)
        device += here * activation.features
        flops_kept += (here + there) * activation.flops
    # The input of a layer is always saved, on the device unless it is offloaded.
    inputs = offloaded.get(INPUT, 0)
    total = model_flops(cfg, length)["total"]
    return Policy(
        remat,
        offload,
        device + (cfg.layers - inputs) * cfg.embed,
        offloaded_features(cfg, length, execution),
        flops_kept * length / total + UNROLLED * (saved is None),
    )


def policies(run: Run, remat: str | None = None, offload: str | None = None) -> list[Policy]:
    """The policies to try for a layout, with this remat or this offload if they are not None. In a
    pipeline, policies count no layers and offload nothing."""
    if run.parallelism.pipeline > 1:
        offload = offload or "none"
    every = _policies(run.model, run.batch.sequence_length, remat, offload)
    if run.parallelism.pipeline == 1:
        return every
    return [each for each in every if each.remat != "none" and ":" not in each.remat]


@cache
def _policies(
    cfg: ModelConfig, length: int, remat: str | None, offload: str | None
) -> list[Policy]:
    """Every policy, with this remat or this offload if they are not None."""
    result = []
    for saved in [remat] if remat else _remats(cfg, length):
        offloads = [offload or "none"]
        if offload is None and saved != "none" and ":" not in saved:
            offloads += _offloads(cfg, length, saved)
        result += [_policy(cfg, length, saved, each) for each in offloads]
    return result


@cache
def _remats(cfg: ModelConfig, length: int) -> list[str]:
    """Remat policies to try: `full`; `none`; attention saved together with any subset of the other
    `GROUPS`; and the same with one more group in some eighths of the layers."""
    attention, *others = _groups(cfg, length)
    result = ["full", "none"]
    for size in range(len(others) + 1):
        for chosen in combinations(others, size):
            rest = [group for group in others if group not in chosen]
            result += [_text([attention, *chosen]), *_in_part([attention, *chosen], rest, cfg)]
    return result


@cache
def _offloads(cfg: ModelConfig, length: int, remat: str) -> list[str]:
    """What may be saved in host memory next to a remat policy: the `GROUPS` that it does not save,
    beginning with those that spare most FLOPs for their bytes, the last one perhaps in some eighths
    of the layers; and each of these together with the inputs of layers."""
    every, kept = activations(cfg, length), {"attention", *remat.split(",")}

    def value(group: tuple[str, ...]) -> float:
        return -sum(every[n].flops for n in group) / sum(every[n].features for n in group)

    free = sorted((g for g in _groups(cfg, length) if not kept.intersection(g)), key=value)
    result = [*_in_part([], [(INPUT,)], cfg), INPUT]
    for inputs in ([], [(INPUT,)]):
        for count, group in enumerate(free):
            result += _in_part([*inputs, *free[:count]], [group], cfg)
            result.append(_text([*inputs, *free[: count + 1]]))
    return result


def _groups(cfg: ModelConfig, length: int) -> list[tuple[str, ...]]:
    """The `GROUPS` of a model, with the names that it has."""
    names = activations(cfg, length)
    groups = (tuple(name for name in group if name in names) for group in GROUPS)
    return [*filter(None, groups)]


def _in_part(groups: Groups, others: Groups, cfg: ModelConfig) -> Iterator[str]:
    """Lists as in `execution.remat`: groups, and one of the others in eighths of the layers."""
    counts = sorted({cfg.layers * n // EIGHTHS for n in range(1, EIGHTHS)} - {0})
    return (_text(groups, other, count) for other, count in product(others, counts))


def _text(groups: Groups, some: tuple[str, ...] = (), count: int = 0) -> str:
    """A list as in `execution.remat`: groups, and `some` activations in `count` layers."""
    names = {name: name for group in groups for name in group}
    names |= {name: f"{name}:{count}" for name in some}
    return ",".join(names[name] for name in (INPUT, *SAVEABLE) if name in names)


def with_policy(run: Run, policy: Policy) -> Run | None:
    """The layout and options of a run with a policy; None if it cannot run so."""
    try:
        execution = replace(run.execution, remat=policy.remat, offload=policy.offload)
        return replace(run, execution=execution)
    except RecipeError:
        return None


def host_bytes(run: Run, policy: Policy) -> float:
    """Bytes of host memory that hold a device's offloaded activations. Microbatches share them."""
    return BF16 * policy.host * run.device_tokens


def policy_s(run: Run, policy: Policy, step_s: float, gpu: Gpu) -> float:
    """Seconds that a policy adds to a step of `step_s`: negative for what it need not recompute,
    and copies to the host and back as far as they outlast the passes that can hide them."""
    bytes_copied = host_bytes(run, policy) * run.accumulation
    seconds = bytes_copied / (gpu.host * 1e9) if gpu.host else 0.0
    return sum(max(0.0, seconds - share * step_s) for share in HIDDEN) - step_s * policy.spared


def layout_s(run: Run, base: Run, parts_s: dict[str, float], step_s: float, gpu: Gpu) -> float:
    """Seconds that we expect another layout and other options to add to the step of a compiled
    candidate, `base`, from the parts of its plan (`plan.parts`): the bubble, what is exposed on
    each axis, and what is sent over axes that the base does not have, since its plan does not show
    that. It is rough, and only orders candidates."""
    result = (run.bubble - base.bubble) * parts_s.get("products", step_s)
    of_run, of_base = _sent_s(run, gpu), _sent_s(base, gpu)
    sent_s = {axis: (of_run.get(axis, 0.0), of_base.get(axis, 0.0)) for axis in AXES}
    for name, seconds in parts_s.items():
        axes = name.removeprefix("exposed: ")
        if name == axes or axes == "host":
            continue
        scales = [new / old for axis, (new, old) in sent_s.items() if axis in axes and old]
        result += seconds * (max(scales, default=1.0) * _remaining(run, base, axes) - 1)
    for axis, (new, old) in sent_s.items():
        if not old:
            result += max(0.0, new - (step_s if axis in OVERLAPPED else 0.0))
    return result


def _sent_s(run: Run, gpu: Gpu) -> dict[str, float]:
    """The least seconds for which a rank sends over each axis in use in a step."""
    p, embed = run.parallelism, run.model.embed
    every = activations(run.model, run.batch.sequence_length)
    nothing = Activation(0, 0)
    keys_values = every.get("key", nothing).features + every.get("value", nothing).features
    experts = [m for m in run.model.mixers if isinstance(m, ExpertsConfig)]
    dispatched = sum(m.copies_per_token(p.expert * p.tensor) * (m.latent or embed) for m in experts)
    weights = parameters(run.model)["total"]
    tokens = BF16 * run.device_tokens * run.accumulation
    of_rank = tokens / p.pipeline
    bytes_of_rank = BF16 * weights * run.accumulation / (p.pipeline * p.expert * p.tensor)
    # The kind of the collectives, the bytes of their results, and how often each is sent.
    sent = {
        # Each chunk passes its result on, and gets a gradient back.
        "pipeline": ("collective-permute", tokens * embed * p.virtual_stages, 2),
        "data": ("all-reduce", run.gradient_bytes * weights / p.ranks, 1),
        # Both passes gather the weights, and the gradients are scattered.
        "fsdp": ("all-gather", bytes_of_rank, 3),
        # Each pass sends tokens to their experts and back.
        "expert": ("all-to-all", of_rank * dispatched, 4),
        # Both passes gather keys and values, and their gradients are scattered.
        "context": ("all-gather", of_rank * p.context * keys_values, 3),
        # Each pass gathers the input of a mixer and scatters its result.
        "tensor": ("all-gather", of_rank * p.tensor * embed * len(run.model.mixers), 4),
    }
    result, stride = {}, 1
    for axis, size in reversed([*zip(AXES, run.mesh_shape, strict=True)]):
        ranks = tuple(range(0, stride * size, stride))
        groups = tuple(pairwise(ranks)) if axis == "pipeline" else (ranks,)
        kind, size_bytes, times = sent[axis]
        if size > 1:
            result[axis] = times * Collective(kind, round(size_bytes), groups).seconds(gpu)
        stride *= size
    return result


def _remaining(run: Run, base: Run, axes: str) -> float:
    """What remains exposed on some axes if options or `expert_parts` differ."""

    def hiding(run: Run) -> int:
        in_layers = "data" in axes and run.execution.replica_sums == "layer"
        in_parts = "expert" in axes and run.execution.expert_parts > 1
        scheduled = flags.guided(run) or flags.IN_FLIGHT in run.execution.xla_flags
        return scheduled + in_layers + in_parts

    return HIDING ** (hiding(run) - hiding(base))


def least_state(run: Run) -> float:
    """A lower bound of the bytes of train state and gradients on a device. Both are split over all
    ranks of a model copy. Clipping needs all gradients at the same time."""
    per_parameter = run.optimizer.state_bytes + run.gradient_bytes
    return parameters(run.model)["total"] / run.parallelism.ranks * per_parameter


def estimated_peak(run: Run, policy: Policy | None = None) -> float:
    """Approximate bytes on a device at its peak: state, gradients, weights in use, saved
    activations, and the workspace of a layer. `policy` replaces the policy of the run."""
    policy = policy or policy_of(run)
    cfg, p, counts = run.model, run.parallelism, parameters(run.model)
    every = activations(cfg, run.batch.sequence_length)
    experts = counts.get("experts", 0)
    rest = counts["total"] - counts["embedding"] - counts["norms"] - experts
    weights = (rest + experts / p.expert) / p.tensor
    tokens, saved = run.device_tokens, policy.device
    workspace = tokens * sum(a.features for a in every.values())
    held: float = 0
    if p.pipeline > 1:
        held = (BF16 + run.gradient_bytes) * weights / p.pipeline
        # The activation stash of the pipeline schedule, as a share of all layers.
        stash = min(p.pipeline * (p.virtual_stages + 2) - 2, p.virtual_stages * run.accumulation)
        saved *= stash / (p.pipeline * p.virtual_stages)
    else:
        workspace += weights
    if policy.remat == "none":
        # Unrolled: gathered weights, and operands of matmuls that have no name.
        held = BF16 * weights
        saved += len(cfg.mixers) * cfg.embed * p.tensor + every.get("up", Activation(0, 0)).features
    return least_state(run) + held + BF16 * (tokens * saved + WORKSPACE * workspace / cfg.layers)
