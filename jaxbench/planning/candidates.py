"""What a search may choose: meshes, microbatches and remat policies of a row. What they do not
allow together is `recipe.settings`' to say.

A candidate is a `Run` that differs from the row's in nothing else. Its *shape* is all but remat.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from jaxbench.errors import RecipeError
from jaxbench.hardware import Gpu
from jaxbench.planning.estimate import activations, estimate
from jaxbench.recipe.settings import CHOSEN, Parallelism, Run

CHOICES = (
    *(f"parallelism.{name}" for name in (*CHOSEN, "virtual_stages")),
    "batch.microbatch",
    "execution.remat",
)
"""The settings that differ between candidates, as `--set` has them."""

TOGETHER = (("attention",), ("query", "key", "value"), ("residual",), ("dispatched",),
            ("gate", "up"), ("mamba",))  # fmt: skip
"""Activations that spare a product only together."""

EIGHTHS = 8
"""The parts of the layers that may keep an activation while the others do not."""

STEP = 0.01
"""Policies on a ladder differ by this share of a step at least."""

Shape = tuple[tuple[int, ...], int, int]


def shape(run: Run) -> Shape:
    """Mesh, virtual stages and microbatch."""
    return run.mesh_shape, run.parallelism.virtual_stages, run.microbatch


def settings(run: Run) -> dict[str, int | str]:
    """The values of `CHOICES`."""
    values = {f"parallelism.{name}": value for name, value in vars(run.parallelism).items()}
    values |= {"batch.microbatch": run.microbatch, "execution.remat": run.execution.remat}
    return {name: values[name] for name in CHOICES}


def changes(run: Run, row: Run) -> list[str]:
    """The `--set` entries that make the candidate of its row. Of a derived row all that a search
    chooses, and the batch: what is left open is derived anew from what is given."""
    before, after = settings(row), settings(run)
    if before != after and row.label == "derived":
        after["batch.global_batch"] = run.batch.global_batch
        return [f"{key}={value}" for key, value in after.items()]
    return [f"{key}={value}" for key, value in after.items() if value != before[key]]


def shapes(row: Run, fixed: frozenset[str] = frozenset()) -> list[Run]:
    """Every shape that can run, with full remat; settings that are `fixed` stay the row's."""
    found = []
    kept = settings(row)
    for parallelism in _parallelisms(row):
        ranks = row.gpus // parallelism.ranks * parallelism.fsdp * parallelism.expert
        for microbatch in _divisors(row.batch.global_batch // ranks):
            batch = replace(row.batch, microbatch=microbatch)
            execution = replace(row.execution, remat="full")
            try:
                run = replace(row, parallelism=parallelism, batch=batch, execution=execution)
            except RecipeError:
                continue
            chosen = settings(run)
            if all(chosen[key] == kept[key] for key in fixed - {"execution.remat"}):
                found.append(run)
    return found


def _parallelisms(row: Run) -> Iterator[Parallelism]:
    """Every division of the GPUs among the axes; of a pipeline, those chunks that leave no more
    layers of padding than one chunk per rank."""
    for sizes in _factors(row.gpus, len(CHOSEN)):
        sized = Parallelism(**dict(zip(CHOSEN, sizes, strict=True)))
        layers = -(-row.model.layers // sized.pipeline)
        for chunks in _divisors(layers) if sized.pipeline > 1 else (1,):
            yield replace(sized, virtual_stages=chunks)


def _factors(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every `count` of whole numbers whose product divides the total."""
    if count == 0:
        yield ()
        return
    for first in _divisors(total):
        for rest in _factors(total // first, count - 1):
            yield first, *rest


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def moves(a: Run, b: Run) -> int:
    """How many things differ between two candidates: prime factors of the mesh that lie on another
    axis, the microbatch, remat, and, in equal pipelines, the chunks of a rank."""
    sizes = zip(a.mesh_shape, b.mesh_shape, strict=True)
    moved = sum(_primes(max(1, x // math.gcd(x, y))) for x, y in sizes)
    equal = a.parallelism.pipeline == b.parallelism.pipeline
    chunks = equal and a.parallelism.virtual_stages != b.parallelism.virtual_stages
    return moved + (a.microbatch != b.microbatch) + (a.execution != b.execution) + chunks


def _primes(number: int) -> int:
    """Prime factors, each as often as it divides."""
    for n in range(2, math.isqrt(number) + 1):
        if number % n == 0:
            return 1 + _primes(number // n)
    return int(number > 1)


def with_remat(run: Run, remat: str) -> Run | None:
    """The shape with another policy; None where it cannot run with it."""
    try:
        return replace(run, execution=replace(run.execution, remat=remat))
    except RecipeError:
        return None


def policies(run: Run) -> Iterator[str]:
    """Remat policies of a model: `full`, outside a pipeline `none`, each choice of `TOGETHER` that
    keeps attention, and these with one part kept in some eighths of the layers only."""
    yield "full"
    if run.parallelism.pipeline == 1:
        yield "none"
    kept = activations(run.model, run.batch.sequence_length)
    groups = [group for group in TOGETHER if all(name in kept for name in group)]
    if "gate" not in kept and "up" in kept:
        groups.append(("up",))
    first, rest = ([("attention",)], groups[1:]) if "*" in run.model.pattern else ([], groups)
    counts = sorted({run.model.layers * n // EIGHTHS for n in range(1, EIGHTHS)} - {0})
    for size in range(len(rest) + 1):
        for more in combinations(rest, size):
            whole = [name for group in (*first, *more) for name in group]
            if whole:
                yield ",".join(whole)
            for last in (group for group in rest if group not in more):
                for count in counts:
                    yield ",".join([*whole, *(f"{name}:{count}" for name in last)])


def ladder(run: Run, gpu: Gpu) -> list[Run]:
    """The shape with the policies that are worth their memory: from least to most, each with a
    shorter estimate than all with less."""
    runs = [found for remat in policies(run) if (found := with_remat(run, remat)) is not None]
    estimates = {found: estimate(found, gpu) for found in runs}
    rungs: list[Run] = []
    for found in sorted(runs, key=lambda found: (estimates[found].peak, estimates[found].seconds)):
        shorter = estimates[found].seconds
        if not rungs or shorter < (1 - STEP) * estimates[rungs[-1]].seconds:
            rungs.append(found)
    return rungs
