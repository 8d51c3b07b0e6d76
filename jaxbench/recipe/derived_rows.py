"""Derives rows for numbers of GPUs that a recipe has no row for.

A row is derived from the nearest smaller row, or else from the smallest. It has the same model and
sequence length. Its global batch is in proportion to the GPUs (weak scaling, as in the published
rows), and its mesh is as close to the other row's mesh as the number of GPUs allows. Its runs are
labelled `derived` and are not compared with published figures.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from jaxbench.base.errors import RecipeError, counted
from jaxbench.base.hardware import Gpu
from jaxbench.recipe import flops, recipes
from jaxbench.recipe.recipes import SMOKE, Override, Recipe
from jaxbench.recipe.settings import CHOSEN, Run

MOST_GPUS = 2**20
"""The largest number of GPUs that we derive a row for."""

SEARCHED = 256
"""How many numbers of GPUs we try below and above one for which no row can be derived."""

OTHERS = tuple(axis for axis in CHOSEN if axis != "fsdp")
"""The axes that a row sizes, except fsdp, which takes what the number of GPUs needs."""


def extend(
    recipe: Recipe,
    gpus: int | str,
    gpu: Gpu | None,
    overrides: tuple[Override, ...] = (),
    *,
    whole_nodes: bool = True,
) -> Recipe:
    """The recipe with a row for `gpus`, which is derived if the recipe has none. Axes that are
    overridden keep their size. `whole_nodes` requires that the GPUs fill nodes.

    Raises RecipeError with the nearest numbers of GPUs that work if the GPUs fill no nodes, or if
    the train state alone fits on no mesh of them.
    """
    if gpus == SMOKE or gpus in recipe.rows:
        return recipe
    assert isinstance(gpus, int)
    if not 0 < gpus <= MOST_GPUS:
        raise RecipeError(f"--gpus {gpus}: expected a whole number from 1 to {MOST_GPUS}")
    fixed = {o.name: o.value for o in overrides if o.section == "parallelism"}

    def fills(count: int) -> bool:
        return not whole_nodes or gpu is None or gpu.spread(count) is not None

    def row(count: int) -> dict[str, Any] | None:
        return _derived(recipe, count, gpu, fixed, overrides) if fills(count) else None

    if (settings := row(gpus)) is not None:
        return replace(recipe, rows=recipe.rows | {gpus: settings}, derived=recipe.derived | {gpus})
    counts = [n for n in recipe.rows if isinstance(n, int) and n > 1]
    below = range(gpus - 1, max(1, gpus - SEARCHED), -1)
    above = range(gpus + 1, max([*counts, gpus + SEARCHED - 1]) + 1)
    near = [
        next((n for n in numbers if (n in counts and not fixed) or row(n) is not None), None)
        for numbers in (below, above)
    ]
    if gpu and not fills(gpus):
        domains = f" in NVLink domains of {gpu.domain}" if gpu.domain > gpu.node else ""
        why = f"they do not fill nodes of {gpu.node}{domains}"
    else:
        sizes = ", ".join(f"{name}={size}" for name, size in fixed.items())
        mesh = f"no mesh of {'it' if gpus == 1 else 'them'}{f' with {sizes}' if sizes else ''}"
        why = f"{mesh} has room for the train state"
    raise RecipeError(
        f"recipe {recipe.name} on {counted(gpus, gpu.name if gpu else 'GPU')}: {why}; the nearest "
        f"counts that work: {' and '.join(str(n) for n in near if n) or 'none'}; its rows are "
        f"{recipe.row_names()}"
    )


def base(recipe: Recipe, gpus: int) -> int:
    """The row to derive from: the largest with fewer GPUs, else the smallest. The row of one GPU
    has fewer layers, so we take it only if there is no other. Raises RecipeError for a recipe
    without rows."""
    counts = sorted(n for n in recipe.rows if isinstance(n, int) and n not in recipe.derived)
    counts = [n for n in counts if n > 1] or counts
    if not counts:
        raise RecipeError(f"recipe {recipe.name}: its rows are {recipe.row_names()}")
    return max((n for n in counts if n < gpus), default=counts[0])


def _derived(
    recipe: Recipe,
    gpus: int,
    gpu: Gpu | None,
    fixed: dict[str, Any],
    overrides: tuple[Override, ...],
) -> dict[str, Any] | None:
    """The settings of a row in which axes have the sizes in `fixed`. None if the train state of the
    overridden model fits on no mesh of `gpus`."""
    count = base(recipe, gpus)
    run = recipes.resolve(recipe, count)
    room = gpu.memory_limit if gpu and gpu.memory else math.inf
    gradient = 2  # bytes, in bf16 at least
    model = run.model
    with suppress(RecipeError):  # a derived row may have a mesh for them
        changes = tuple(o for o in overrides if o.section in ("model", "parallelism"))
        model = recipes.resolve(recipe, count, overrides=changes).model
    state = (run.optimizer.state_bytes + gradient) * flops.parameters(model)["total"]
    for mesh in _meshes(run, gpus, fixed):
        if state / math.prod(mesh[axis] for axis in CHOSEN) > room:
            continue
        row = recipe.rows[count] | mesh | _batch(run, gpus, mesh)
        with suppress(RecipeError):
            recipes.resolve(replace(recipe, rows={gpus: row}), gpus)
            return row
    return None


def _meshes(run: Run, gpus: int, fixed: dict[str, Any]) -> Iterator[dict[str, int]]:
    """Meshes for `gpus`, the closest to the run's mesh first. Three criteria sort them: the least
    change of axes other than fsdp; no fewer devices per copy of the model; a number of devices per
    copy that is nearest to the run's."""
    p, embed = run.parallelism, run.model.embed
    most = {**{axis: getattr(p, axis) for axis in OTHERS}, "fsdp": math.gcd(gpus, embed)}
    possible: list[tuple[tuple[float, bool, float], dict[str, int]]] = []
    for sizes in product(*(_sizes(size, fixed.get(axis)) for axis, size in most.items())):
        mesh, ranks = dict(zip(most, sizes, strict=True)), math.prod(sizes)
        if gpus % ranks == embed % ranks == 0:
            change = sum(abs(math.log2(getattr(p, axis) / mesh[axis])) for axis in OTHERS)
            order = (change, ranks < p.ranks, abs(math.log2(ranks / p.ranks)))
            possible.append((order, mesh))
    for _, mesh in sorted(possible, key=lambda entry: entry[0]):
        chunks = max(p.pipeline * p.virtual_stages // mesh["pipeline"], 1)
        yield mesh | {"virtual_stages": chunks if mesh["pipeline"] > 1 else 1}


def _sizes(most: int, fixed: Any) -> list[int]:
    """The sizes that an axis can have: the fixed one, or all that divide `most`."""
    if fixed is not None:
        return [fixed] if isinstance(fixed, int) and fixed > 0 else []
    return [n for n in range(1, most + 1) if most % n == 0]


def _batch(run: Run, gpus: int, mesh: dict[str, int]) -> dict[str, int | None]:
    """The run's microbatch, and the global batch that is nearest to a proportional one."""
    ranks = gpus // math.prod(mesh[axis] for axis in ("pipeline", "context", "tensor"))
    one_pass = (run.batch.microbatch or 1) * ranks * mesh["pipeline"]
    passes = max(1, round(run.batch.global_batch * gpus / run.gpus / one_pass))
    return {"global_batch": passes * one_pass, "microbatch": run.batch.microbatch}
