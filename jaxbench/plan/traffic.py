"""What a step sends, by kind of collective and mesh axes."""

import math
from dataclasses import dataclass

from jaxbench.hardware import Gpu
from jaxbench.recipe.settings import AXES, Run
from jaxbench.xla.collectives import Collective
from jaxbench.xla.schedule import Schedule

PART = "part of "


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one step of a kind over some mesh axes; `bytes` are sent by one device."""

    kind: str
    axes: str
    across_domains: bool
    count: int = 0
    bytes: int = 0
    least_s: float = 0.0
    exposed_s: float = 0.0


def traffic(run: Run, gpu: Gpu, timeline: Schedule) -> list[Traffic]:
    """Collectives of one step, summed by kind and mesh axes."""
    found: dict[tuple[str, str], Traffic] = {}
    for t in timeline.transfers:
        c = t.collective
        axes = axes_of(c, run)
        new = Traffic(kind=c.kind, axes=axes, across_domains=c.crosses_domains(gpu))
        sums = found.get((c.kind, axes), new)
        found[c.kind, axes] = Traffic(
            kind=sums.kind,
            axes=sums.axes,
            across_domains=sums.across_domains,
            count=sums.count + c.count,
            bytes=sums.bytes + c.wire_bytes,
            least_s=sums.least_s + t.seconds,
            exposed_s=sums.exposed_s + t.exposed_s,
        )
    return sorted(found.values(), key=lambda sums: -sums.bytes)


def axes_of(collective: Collective, run: Run) -> str:
    """`mesh_axes` of a collective of a run."""
    axes = mesh_axes(collective.devices, run.mesh_shape)
    permutes = collective.kind == "collective-permute"  # between neighbours, never among all
    return axes.removeprefix(PART) if permutes else axes


def mesh_axes(devices: tuple[int, ...], mesh_shape: tuple[int, ...]) -> str:
    """The mesh axes along which a group of devices lies, as in `fsdp x context`.

    Devices are numbered along the mesh, the last axis fastest. A group that is not the whole of its
    axes is `part of` them.
    """
    strides = [math.prod(mesh_shape[i + 1 :]) for i in range(len(AXES))]
    seen = [
        {device // stride % size for device in devices}
        for stride, size in zip(strides, mesh_shape, strict=True)
    ]
    along = [i for i, indices in enumerate(seen) if len(indices) > 1]
    whole = math.prod(mesh_shape[i] for i in along) == len(devices)
    return ("" if whole else PART) + " x ".join(AXES[i] for i in along)
