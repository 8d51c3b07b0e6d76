"""What explains the errors of `like_for_like.py`: one assumption of the forecast changes at a time,
for all programs, and the errors are shown by kind of program.

No value here is fitted to a step. Each comes from a measurement of kernels, from a publication, or
is a round number that shows how much an assumption matters.
"""

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from jaxbench.base.hardware import Gpu
from jaxbench.base.outliers import GPU_SPREAD
from jaxbench.forecast.costs import CONDITIONS, Conditions, Measured
from jaxbench.forecast.tables import Tables, load
from jaxbench.xla.schedule import Walk
from jaxbench.xla.timeline import Kernel

MEMORY_SHARE = 0.80
"""The share of the memory bandwidth that the tables give to kernels without arithmetic."""


@dataclass(frozen=True)
class Change:
    """A change to the forecast's assumptions.

    `conditions` are values of `Conditions`. `sustained` is a factor on the sustained rates of
    matmuls. `memory` is the share of the memory bandwidth. `launch_us` is added to each kernel.
    `factors` multiply the seconds of kernels by their kind (`kind`).
    """

    name: str
    conditions: Mapping[str, object] = field(default_factory=dict)
    sustained: float = 1.0
    memory: float = MEMORY_SHARE
    launch_us: float = 0.0
    factors: Mapping[str, float] = field(default_factory=dict)


MEASURED = {
    "matmul bf16": 0.97, "matmul fp8": 0.84, "attention forward": 0.99, "attention backward": 1.16,
    "quantization": 1.72, "other": 0.95,
}  # fmt: skip
"""Measured over forecast by kind of kernel, in ten steps on one H100 (docs/measured.md). No other
GPU was near it, so collectives slowed nothing down."""

CHANGES = (
    Change("the forecast"),
    Change("bf16 and FP8 matmuls sustain 5 % less (as one H100)", sustained=0.95),
    Change("no power limit: matmuls as in bursts", conditions={"sustained": False}),
    Change("collectives slow nothing down", conditions={"slowdown": 1.0}),
    Change("kernels next to collectives 1.30 slower", conditions={"slowdown": 1.30}),
    Change("kernels next to collectives 1.40 slower", conditions={"slowdown": 1.40}),
    # A matmul of one wave on an H100 (NVIDIA forum 337991), GPT on A100s (nccl issue 1428).
    Change("kernels next to collectives 1.70 slower", conditions={"slowdown": 1.70}),
    Change("attention backward 1.16 slower", factors={"attention backward": 1.16}),
    Change("attention backward 1.4 slower", factors={"attention backward": 1.40}),
    Change("other kernels at 70 % of the bandwidth", memory=0.70),
    Change("other kernels at 90 % of the bandwidth", memory=0.90),
    Change("2 us more per kernel", launch_us=2.0),
    Change("the slowest of all GPUs (1.5 %)", conditions={"spread": GPU_SPREAD}),
    Change("network untuned", conditions={"tuned": False}),
    Change("FP8 matmuls 0.84 (quantization counted once)", factors={"matmul fp8": 0.84}),
    Change("every kind as on one H100", factors=MEASURED),
    Change("as on one H100, and the slowest of all GPUs", {"spread": GPU_SPREAD}, factors=MEASURED),
    Change(
        "as on one H100, the slowest of all GPUs, and 1.30 slower next to collectives",
        {"spread": GPU_SPREAD, "slowdown": 1.30},
        factors=MEASURED,
    ),
)


def quantizing(walk: Walk) -> set[Kernel]:
    """The kernels without arithmetic that write FP8."""
    scopes = walk.program.computations.values()
    shapes = {i.name: i.shape for scope in scopes for i in scope.values()}
    return {
        kernel for name, kernel, _ in walk.kernels() if not kernel.works and "f8e" in shapes[name]
    }


def kind(kernel: Kernel, quantizing: Collection[Kernel]) -> str:
    """The kind of a kernel, as in `MEASURED`."""
    if not kernel.works:
        return "quantization" if kernel in quantizing else "other"
    work = kernel.works[0]
    if work.kind == "attention":
        return f"attention {'backward' if work.backward else 'forward'}"
    return f"matmul {work.format}" if work.kind == "product" else "other"


class Varied(Measured):
    """The forecast's cost model with a change."""

    def __init__(
        self,
        gpu: Gpu,
        tables: Tables,
        change: Change,
        gpus: int,
        quantizing: Collection[Kernel] = (),
    ):
        conditions: Conditions = replace(CONDITIONS["expected"], **change.conditions)
        super().__init__(gpu, _changed(tables, change), conditions, gpus)
        self.change, self.quantizing = change, quantizing

    def kernel(self, kernel: Kernel) -> Mapping[str, float]:
        factor = self.change.factors.get(kind(kernel, self.quantizing), 1.0)
        parts = {part: seconds * factor for part, seconds in super().kernel(kernel).items()}
        more = 1e-6 * self.change.launch_us * (1 + kernel.further) if parts else 0.0
        return parts | ({"launches": parts.get("launches", 0.0) + more} if more else {})


def _changed(tables: Tables, change: Change) -> Tables:
    """The tables with another sustained rate and another share of the memory bandwidth."""
    values = dict(tables.values)
    for key, of in values.items():
        if key[0] == "sustained":
            values[key] = {sizes: rate * change.sustained for sizes, rate in of.items()}
        if key[0] == "memory":
            start = of.get((0,), 0.0)
            scale = MEMORY_SHARE / change.memory
            values[key] = {sizes: start + (us - start) * scale for sizes, us in of.items()}
    return replace(tables, values=values)


def seconds(walk: Walk, gpu: Gpu) -> list[float]:
    """The seconds of a step with each change."""
    tables, quantized = load(gpu.name.lower()), quantizing(walk)
    return [
        walk.under(Varied(gpu, tables, change, walk.program.devices, quantized)).step_s
        for change in CHANGES
    ]


def table(
    programs: Iterable[tuple[str, Walk, Gpu, float]], percent: Callable[[float], str]
) -> tuple[list[str], list[str]]:
    """The heading and the lines of a table: median error of each kind of program, for each change.
    Programs come with their kind, and with their published seconds. The last columns are the median
    size of the kinds' errors, and how far the kinds are apart."""
    errors: dict[str, list[list[float]]] = {}
    for name, walk, gpu, published_s in programs:
        own = [s / published_s - 1 for s in seconds(walk, gpu)]
        errors.setdefault(name, []).append(own)
    lines = []
    for n, change in enumerate(CHANGES):
        medians = [statistics.median(own[n] for own in of) for of in errors.values()]
        size = statistics.median(abs(median) for median in medians)
        cells = [change.name, *map(percent, medians), f"{100 * size:.1f}",
                 f"{100 * (max(medians) - min(medians)):.1f}"]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return ["changed", *errors, "median size", "far apart"], lines
