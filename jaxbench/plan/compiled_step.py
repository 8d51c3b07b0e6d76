"""The step of a compiled program, from this project or another: launches, collectives, bound and
forecast."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from jaxbench.base.hardware import Gpu
from jaxbench.forecast.costs import Measured
from jaxbench.forecast.forecast import Forecast, forecast
from jaxbench.forecast.sensitivity import Sensitivity, sensitivities
from jaxbench.forecast.tables import FORMATS, Tables
from jaxbench.recipe.settings import AXES
from jaxbench.xla import memory
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import Program
from jaxbench.xla.host_copies import HostTraffic
from jaxbench.xla.schedule import Roofline, Walk
from jaxbench.xla.timeline import Schedule

SHOWN_KERNELS = 10
PART_OF = "part of "


@dataclass(kw_only=True)
class Traffic:
    """Collectives of one kind over the same mesh axes, per step. `bytes` are what one device
    sends."""

    kind: str
    axes: str
    across_domains: bool
    count: int = 0
    bytes: int = 0
    least_s: float = 0.0
    exposed_s: float = 0.0


@dataclass(kw_only=True)
class OtherKernels:
    """Kernels that come from one JAX operation, except matmuls and attention: their seconds in the
    forecast, next to no collective, and their launches, per step."""

    source: str
    seconds: float = 0.0
    launches: int = 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step on one device.

    `kernels` counts the launches of matmuls by format (`gemm_bf16`) and of fused `attention`,
    forward and backward. `bound_parts_s` are `compute` (matmuls and attention), `memory` (other
    kernels) and `exposed` (collectives, and copies from and to the host). `quantization_bytes` are
    the bytes that kernels read and write to make operands of quantized matmuls. `sensitivities` say
    what moves the forecast.
    """

    collectives: list[Traffic]
    wire_bytes: int
    uncovered_wire_bytes: int
    kernels: dict[str, int]
    launches: int
    other_kernels: list[OtherKernels]
    quantization_bytes: int
    host: HostTraffic
    bound_parts_s: dict[str, float]
    bound_step_s: float
    forecast_step_s: float
    forecast: Forecast
    sensitivities: list[Sensitivity]


def step_of(program: Program, gpu: Gpu, tables: Tables, axes: Callable[[Collective], str]) -> Step:
    """The step of a program on a GPU; `axes` names what a collective crosses."""
    walk, costs = Walk(program), Measured(gpu, tables)
    bound, expected = walk.under(Roofline(gpu)), forecast(walk, gpu, tables, axes)
    return Step(
        collectives=traffic_by_axes(bound, gpu, axes),
        wire_bytes=sum(t.collective.wire_bytes for t in bound.transfers),
        uncovered_wire_bytes=bound.uncovered_bytes,
        kernels=kernel_launches(program),
        launches=bound.launches,
        host=bound.host,
        other_kernels=other_kernels(walk, costs),
        quantization_bytes=sum(
            kernel.bytes * runs
            for _, kernel, runs in walk.kernels()
            if kernel.part == "quantization"
        ),
        bound_parts_s={**bound.parts, "exposed": bound.exposed_s},
        bound_step_s=bound.step_s,
        forecast_step_s=expected.step_s,
        forecast=expected,
        sensitivities=[] if expected.unknown else sensitivities(walk, costs, expected.step_s),
    )


def traffic_by_axes(bound: Schedule, gpu: Gpu, axes: Callable[[Collective], str]) -> list[Traffic]:
    """Sums the collectives of a step by kind, by what `axes` says they cross, and by their links.
    Those that send most come first."""
    sums: dict[tuple[str, str, bool], Traffic] = {}
    for t in bound.transfers:
        key = t.collective.kind, axes(t.collective), t.collective.crosses_domains(gpu)
        new = Traffic(kind=key[0], axes=key[1], across_domains=key[2])
        line = sums.setdefault(key, new)
        line.count += t.collective.count
        line.bytes += t.collective.wire_bytes
        line.least_s += t.seconds
        line.exposed_s += t.exposed_s
    return sorted(sums.values(), key=lambda line: -line.bytes)


def axes_of(collective: Collective, mesh_shape: tuple[int, ...]) -> str:
    """The mesh axes that a collective of a run crosses."""
    axes = mesh_axes(collective.devices, mesh_shape)
    # A permute exchanges only with a neighbour, and still goes along the whole axis.
    return axes.removeprefix(PART_OF) if collective.kind == "collective-permute" else axes


def mesh_axes(devices: tuple[int, ...], mesh_shape: tuple[int, ...]) -> str:
    """The mesh axes that a group of devices spans, as in `fsdp x context`. It is a `part of` them
    if other devices are in between.

    Devices are numbered along the mesh, the last axis fastest.
    """
    strides = [math.prod(mesh_shape[i + 1 :]) for i in range(len(AXES))]
    spanned = [
        i
        for i, (stride, size) in enumerate(zip(strides, mesh_shape, strict=True))
        if len({device // stride % size for device in devices}) > 1
    ]
    whole = math.prod(mesh_shape[i] for i in spanned) == len(devices)
    return ("" if whole else PART_OF) + " x ".join(AXES[i] for i in spanned)


def kernel_launches(program: Program) -> dict[str, int]:
    """`Step.kernels` of a program."""
    launches: Counter[str] = Counter()
    for work, times, _ in program.works():
        launches[work.format if work.matmul else work.kind] += times
    products = {f"gemm_{name}": launches[name] for name in FORMATS}
    return products | {"attention": launches["attention"]}


def other_kernels(walk: Walk, costs: Measured) -> list[OtherKernels]:
    """The JAX operations whose kernels take longest, matmuls and attention aside."""
    sums: dict[str, OtherKernels] = {}
    for _, kernel, runs in walk.kernels():
        if not kernel.computes:
            source = memory.readable(kernel.source, "without a name")
            line = sums.setdefault(source, OtherKernels(source=source))
            line.seconds += sum(costs.kernel(kernel).values()) * runs
            line.launches += runs * kernel.launches
    return sorted(sums.values(), key=lambda line: -line.seconds)[:SHOWN_KERNELS]
