"""GPU systems as the planner sees them: memory, bandwidths, and what joins the GPUs."""

import math
from dataclasses import dataclass, replace
from typing import Any

from jaxbench.config import AXES, RecipeError
from jaxbench.hlo import Collective

MEMORY_FRACTION = 0.92
"""Share of GPU memory that XLA's allocator takes. The rest is for NCCL's buffers, cuDNN, cuBLAS and
the CUDA context."""

RESERVE_BYTES = 2 * 2**30
"""Kept free inside that share: fragmentation of the allocator, and the buffers that kernels take at
run time."""


@dataclass(frozen=True, kw_only=True)
class System:
    """One kind of GPU in its node. Bandwidths are in GB/s (1e9 bytes), links in one direction.

    `memory` is what the driver reports, in bytes. `nvlink` joins the `node` GPUs of a node, `nic`
    is each GPU's share of the network between nodes. `device` is the driver's name, by which
    `flops.peak_tflops` knows the peaks.
    """

    device: str
    memory: int
    bandwidth: float
    nvlink: float = 450.0
    nic: float = 50.0
    node: int = 8

    @property
    def memory_limit(self) -> int:
        """Bytes that a program may use."""
        return int(self.memory * MEMORY_FRACTION) - RESERVE_BYTES

    def crosses_nodes(self, collective: Collective) -> bool:
        """Whether the group lies in more than one NVLink domain."""
        return len({device // self.node for device in collective.devices}) > 1

    def seconds(self, collective: Collective) -> float:
        """Least time of one run of a collective: bytes over bandwidth, no latency.

        Rings pass through all members of a node before they leave it, and each member carries a
        share of the traffic on its own NIC; so the rate between nodes is NIC x members per node, up
        to NVLink's. An all-to-all sends every byte straight to its receiver: what leaves the node
        leaves through the sender's own NIC.
        """
        per_run = collective.wire_bytes / collective.count
        members = max(1, sum(d // self.node == 0 for d in collective.devices))
        if not self.crosses_nodes(collective):
            rate = self.nvlink
        elif collective.kind == "all-to-all":
            n = collective.group
            per_run, rate = collective.bytes * (n - members) / n, self.nic
        else:
            rate = min(self.nvlink, self.nic * members)
        return per_run / (rate * 1e9)


SYSTEMS = {
    "h100": System(device="NVIDIA H100 80GB HBM3", memory=84942979072, bandwidth=3352.32),
    "h200": System(device="NVIDIA H200", memory=151397597184, bandwidth=4800.0),
}
"""By the name a user gives. H100 and H200 SXM in DGX nodes: NVLink 4 with 900 GB/s in both
directions together, and one 400 Gb/s adapter per GPU (NVIDIA DGX H100 data sheet)."""


def with_settings(system: System, settings: list[str]) -> System:
    """The system with `key=value` settings applied, such as `nic=25`. Raises RecipeError."""
    for text in settings:
        key, _, value = text.partition("=")
        try:
            number = int(value) if key == "node" else float(value)
        except ValueError:
            number = 0
        if key not in ("nvlink", "nic", "node") or number <= 0:
            raise RecipeError(f"--system {text}: expected nvlink=N, nic=N or node=N, N above 0")
        changes: dict[str, Any] = {key: number}
        system = replace(system, **changes)
    return system


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
    return ("" if whole else "part of ") + " x ".join(AXES[i] for i in along)
