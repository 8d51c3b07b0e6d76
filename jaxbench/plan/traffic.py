"""Collectives of a step, by kind and mesh axes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxbench.base.hardware import Gpu
from jaxbench.recipe.settings import AXES
from jaxbench.xla.collectives import Collective
from jaxbench.xla.timeline import Schedule

PART = "part of "


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


def system(gpu: Gpu) -> dict[str, Any]:
    """The properties and links of the GPU that decide a plan."""
    names = ("device", "memory", "bandwidth", "nvlink", "nic", "host", "node", "domain", "leaf",
             "oversubscription", "latency")  # fmt: skip
    peaks = {f"{dtype} TFLOP/s": peak for dtype, peak in gpu.tflops.items()}
    return {name: getattr(gpu, name) for name in names} | peaks


def traffic(axes: Callable[[Collective], str], gpu: Gpu, timeline: Schedule) -> list[Traffic]:
    """Sums the collectives of a step by kind and by what `axes` says they cross. Those that send
    most come first."""
    sums: dict[tuple[str, str], Traffic] = {}
    for t in timeline.transfers:
        kind, crossed = t.collective.kind, axes(t.collective)
        new = Traffic(kind=kind, axes=crossed, across_domains=t.collective.crosses_domains(gpu))
        line = sums.setdefault((kind, crossed), new)
        line.count += t.collective.count
        line.bytes += t.collective.wire_bytes
        line.least_s += t.seconds
        line.exposed_s += t.exposed_s
    return sorted(sums.values(), key=lambda line: -line.bytes)


def axes_of(collective: Collective, mesh_shape: tuple[int, ...]) -> str:
    """The mesh axes that a collective of a run crosses."""
    axes = mesh_axes(collective.devices, mesh_shape)
    # A permute exchanges only with a neighbour, and still goes along the whole axis.
    return axes.removeprefix(PART) if collective.kind == "collective-permute" else axes


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
    return ("" if whole else PART) + " x ".join(AXES[i] for i in spanned)
