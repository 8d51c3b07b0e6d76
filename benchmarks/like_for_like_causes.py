"""What explains the errors of `like_for_like.py`: one assumption of the forecast changes at a time,
for all programs, and the errors are shown by kind of program.

No value here is fitted to a step. Each comes from a measurement of kernels, from a publication, or
is a round number that shows how much an assumption matters.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace

from jaxbench.base.hardware import Gpu
from jaxbench.base.outliers import GPU_SPREAD
from jaxbench.forecast.costs import MICRO, Measured
from jaxbench.forecast.sensitivity import Changed, waiting_for_slowest
from jaxbench.forecast.tables import load
from jaxbench.xla.hlo import Work
from jaxbench.xla.schedule import Walk

MEMORY_SHARE = 0.80
"""The share of the memory bandwidth that the tables give to kernels without arithmetic."""


def under(**conditions: object) -> Callable[[Measured], Measured]:
    """The cost model under other conditions."""
    return lambda costs: Changed(costs, conditions=replace(costs.conditions, **conditions))


def slower_backward(factor: float) -> Callable[[Measured], Measured]:
    """The cost model with a slower backward pass of attention."""

    def of(work: Work) -> float:
        return factor if work.kind == "attention" and work.backward else 1.0

    return lambda costs: Changed(costs, of)


def sustaining(factor: float) -> Callable[[Measured], Measured]:
    """The cost model with other sustained rates of matmuls."""

    def changed(costs: Measured) -> Measured:
        values = dict(costs.tables.values)
        for key in values:
            if key[0] == "sustained":
                values[key] = {sizes: rate * factor for sizes, rate in values[key].items()}
        tables = replace(costs.tables, values=values)
        return Measured(costs.gpu, tables, costs.conditions)

    return changed


CHANGES: dict[str, Callable[[Measured], Measured]] = {
    "the forecast": lambda costs: costs,
    "bf16 and FP8 matmuls sustain 5 % less (as one H100)": sustaining(0.95),
    "no power limit: matmuls as in bursts": under(sustained=False),
    "collectives slow nothing down": under(slowdown=1.0),
    # The factor until 2026-11-28, and the least and the most that was measured on H100s.
    "kernels next to collectives take 1.19 times as long": under(slowdown=1.189),
    "kernels next to collectives take 1.35 times as long": under(slowdown=1.35),
    "kernels next to collectives take 1.7 times as long": under(slowdown=1.7),
    "attention backward 1.16 slower": slower_backward(1.16),
    "attention backward 1.4 slower": slower_backward(1.40),
    "other kernels at 70 % of the bandwidth": lambda costs: Changed(
        costs, memory=MEMORY_SHARE / 0.70
    ),
    "other kernels at 90 % of the bandwidth": lambda costs: Changed(
        costs, memory=MEMORY_SHARE / 0.90
    ),
    "2 us more per kernel": lambda costs: Changed(costs, start_s=2 * MICRO),
}
"""The cost model with each change."""

SLOWEST = f"the slowest of all GPUs ({100 * GPU_SPREAD:g} %)"
"""The last change, which depends on the number of GPUs."""


def seconds(walk: Walk, gpu: Gpu) -> list[float]:
    """The seconds of a step with each change."""
    costs = Measured(gpu, load(gpu.name.lower()))
    changes = [*CHANGES.values(), waiting_for_slowest(walk.program.devices)]
    return [walk.under(changed(costs)).step_s for changed in changes]


def table(
    programs: Iterable[tuple[str, Walk, Gpu, float]], percent: Callable[[float], str]
) -> tuple[list[str], list[list[str]]]:
    """The heading and the cells of a table: median error of each kind of program, for each change.
    Programs come with their kind, and with their published seconds. The last columns are the median
    size of the kinds' errors, and how far the kinds are apart."""
    errors: dict[str, list[list[float]]] = {}
    for name, walk, gpu, published_s in programs:
        own = [s / published_s - 1 for s in seconds(walk, gpu)]
        errors.setdefault(name, []).append(own)
    lines = []
    for n, change in enumerate([*CHANGES, SLOWEST]):
        medians = [statistics.median(own[n] for own in of) for of in errors.values()]
        size = statistics.median(abs(median) for median in medians)
        cells = [change, *map(percent, medians), f"{100 * size:.1f}",
                 f"{100 * (max(medians) - min(medians)):.1f}"]  # fmt: skip
        lines.append(cells)
    return ["changed", *errors, "median size", "far apart"], lines
