"""Candidates of a search: the row with another mesh, microbatch, `expert_parts` or remat policy, as
far as `recipe.settings` allows it. Estimates the memory of each.

The *layout* of a candidate is everything except its remat policy.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product

from jaxbench.base.errors import RecipeError
from jaxbench.recipe import flops
from jaxbench.recipe.activations import BF16, Activation, activations
from jaxbench.recipe.model import repeating_blocks
from jaxbench.recipe.settings import CHOSEN, Parallelism, Run

KEYS = (
    *(f"parallelism.{name}" for name in (*CHOSEN, "virtual_stages")),
    "batch.microbatch",
    "execution.expert_parts",
    "execution.remat",
    "execution.offload",
)
"""The settings in which candidates differ, by their `--set` keys."""

GROUPS = (("attention",), ("latent",), ("query", "key", "value"), ("residual",), ("dispatched",),
          ("gate", "up"), ("mamba",))  # fmt: skip
"""Activations that are saved together. Saving only a part of a group would spare no matmul."""

EIGHTHS = 8
"""A group may be saved in any number of eighths of the layers."""

WORKSPACE = 3
"""Copies of a layer's gathered weights and activations that are in memory at the same time: the
layer's own, the copy of the next layer, which is prefetched, and gradients."""

UNROLLED = 0.1
"""The largest share of a step that we assume unrolled layers save: they copy no stash, and gather
weights once."""


parameters = cache(flops.parameters)


def layout(run: Run) -> tuple[tuple[int, ...], int, int, int]:
    """Mesh, virtual stages, microbatch and `expert_parts`."""
    stages, parts = run.parallelism.virtual_stages, run.execution.expert_parts
    return run.mesh_shape, stages, run.microbatch, parts


def settings(run: Run) -> dict[str, int | str]:
    """The values of `KEYS`."""
    values = {f"parallelism.{name}": value for name, value in vars(run.parallelism).items()}
    values |= {"batch.microbatch": run.microbatch}
    execution = ("expert_parts", "remat", "offload")
    values |= {f"execution.{key}": getattr(run.execution, key) for key in execution}
    return {key: values[key] for key in KEYS}


def changes(run: Run, row: Run) -> list[str]:
    """The `--set` entries that turn a row into a candidate. For another layout of a derived row
    these are all `KEYS` and the global batch, because anything that is not set would be derived
    anew."""
    before, after = settings(row), settings(run)
    if layout(run) != layout(row) and row.label == "derived":
        before, after["batch.global_batch"] = {}, run.batch.global_batch
    return [f"{key}={value}" for key, value in after.items() if value != before.get(key)]


def layouts(row: Run, fixed: frozenset[str] = frozenset()) -> list[Run]:
    """Every layout that can run, with full remat. The keys in `fixed` keep the row's values."""
    result = []
    for parallelism in _parallelisms(row):
        batch_ranks = row.gpus // parallelism.ranks * parallelism.fsdp * parallelism.expert
        shares = _divisors(row.batch.global_batch // batch_ranks)
        for microbatch, parts in product(shares, _expert_parts(row, parallelism, fixed)):
            batch = replace(row.batch, microbatch=microbatch)
            offload = "none" if parallelism.pipeline > 1 else row.execution.offload
            execution = replace(row.execution, remat="full", offload=offload, expert_parts=parts)
            try:
                run = replace(row, parallelism=parallelism, batch=batch, execution=execution)
            except RecipeError:
                continue
            if all(settings(run)[key] == settings(row)[key] for key in fixed - {"execution.remat"}):
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
    """The number of changes between two layouts. Each prime factor of an axis size that moves to
    another axis counts one, and so does another microbatch. Other virtual stages count one if the
    pipelines have equally many ranks. `expert_parts` counts only between layouts that are otherwise
    equal, since mesh and microbatch decide which numbers of parts are possible."""
    sizes = zip(a.mesh_shape, b.mesh_shape, strict=True)
    moved = sum(_prime_factors(max(1, x // math.gcd(x, y))) for x, y in sizes)
    p, q = a.parallelism, b.parallelism
    stages = p.pipeline == q.pipeline and p.virtual_stages != q.virtual_stages
    differing = moved + (a.microbatch != b.microbatch) + stages
    return differing or int(a.execution.expert_parts != b.execution.expert_parts)


def _prime_factors(number: int) -> int:
    """The number of prime factors, with multiplicity."""
    for n in range(2, math.isqrt(number) + 1):
        if number % n == 0:
            return 1 + _prime_factors(number // n)
    return int(number > 1)


def with_policies(run: Run, fixed: str | None = None) -> list[Run]:
    """The layout with each remat policy that it can run with, or with the `fixed` policy."""
    result = []
    for remat in [fixed] if fixed else policies(run):
        try:
            offload = "none" if remat == "none" else run.execution.offload
            execution = replace(run.execution, remat=remat, offload=offload)
            result.append(replace(run, execution=execution))
        except RecipeError:
            continue
    return result


def policies(run: Run) -> Iterator[str]:
    """Remat policies to try: `full`; `none` outside a pipeline; attention saved together with any
    subset of the other `GROUPS`; and such a set with one more group saved in some eighths of the
    layers."""
    yield "full"
    if run.parallelism.pipeline == 1:
        yield "none"
    names = activations(run.model, run.batch.sequence_length)
    groups = [tuple(name for name in group if name in names) for group in GROUPS]
    attention, *others = filter(None, groups)
    counts = sorted({run.model.layers * n // EIGHTHS for n in range(1, EIGHTHS)} - {0})
    for size in range(len(others) + 1):
        for chosen in combinations(others, size):
            saved = {name: name for group in (attention, *chosen) for name in group}
            yield ",".join(saved[name] for name in names if name in saved)
            for group, count in product((g for g in others if g not in chosen), counts):
                some = saved | {name: f"{name}:{count}" for name in group}
                yield ",".join(some[name] for name in names if name in some)


def _saved(run: Run, name: str) -> float:
    """The share of the layers that save an activation on the device."""
    saved = run.execution.saved(run.model.layers)
    return 1.0 if saved is None else saved.get(name, 0) / run.model.layers


def spared(run: Run) -> float:
    """FLOPs that the remat policy need not recompute, as a share of the model's FLOPs. Unrolled
    layers add `UNROLLED`."""
    length = run.batch.sequence_length
    every = activations(run.model, length)
    offloaded = run.execution.offloaded(run.model.layers)
    kept = sum(
        max(_saved(run, name), offloaded.get(name, 0) / run.model.layers) * activation.flops
        for name, activation in every.items()
    )
    total = flops.model_flops(run.model, length)["total"]
    return kept * length / total + UNROLLED * run.unrolled


def least_state(run: Run) -> float:
    """A lower bound of the bytes of train state and gradients on a device. Both are split over all
    ranks of a model copy. Clipping needs all gradients at the same time."""
    per_parameter = run.optimizer.state_bytes + run.gradient_bytes
    return parameters(run.model)["total"] / run.parallelism.ranks * per_parameter


def memory(run: Run) -> float:
    """Approximate bytes on a device at its peak: state, gradients, weights in use, saved
    activations, and the workspace of a layer."""
    cfg, p, counts = run.model, run.parallelism, parameters(run.model)
    every = activations(cfg, run.batch.sequence_length)
    experts = counts.get("experts", 0)
    rest = counts["total"] - counts["embedding"] - counts["norms"] - experts
    weights = (rest + experts / p.expert) / p.tensor
    tokens = run.microbatch * run.batch.sequence_length / p.context / p.tensor
    # The input of a layer is always saved.
    saved = cfg.layers * cfg.embed + sum(_saved(run, n) * a.features for n, a in every.items())
    workspace = tokens * sum(a.features for a in every.values())
    held: float = 0
    if p.pipeline > 1:
        held = (BF16 + run.gradient_bytes) * weights / p.pipeline
        # The activation stash of the pipeline schedule, as a share of all layers.
        stash = min(p.pipeline * (p.virtual_stages + 2) - 2, p.virtual_stages * run.accumulation)
        saved *= stash / (p.pipeline * p.virtual_stages)
    else:
        workspace += weights
    if run.unrolled:  # gathered weights, and operands of matmuls that have no name
        held = BF16 * weights
        saved += len(cfg.mixers) * cfg.embed * p.tensor + every.get("up", Activation(0, 0)).features
    return least_state(run) + held + BF16 * (tokens * saved + WORKSPACE * workspace / cfg.layers)
