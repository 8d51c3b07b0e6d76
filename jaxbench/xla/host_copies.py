"""Copies between the memory of a device and the memory of its host, along the schedule of a
compiled program."""

import re
from dataclasses import dataclass

from jaxbench.base.hardware import Gpu
from jaxbench.xla.hlo import Program
from jaxbench.xla.instruction import ARRAY, Instruction, Scope, result_shape, root, shape_bytes
from jaxbench.xla.kernels import launches_kernel

MEMORY = "S(5)"
"""XLA's memory space for pinned host memory in a layout (`Layout::kHostMemorySpace`)."""

TO_HOST, FROM_HOST = "to host", "from host"

WITH_LAYOUT = re.compile(rf"({ARRAY})(?:\{{([^}}]*)\}})?")
"""Pattern of an array in a shape, and of its layout."""


@dataclass
class HostTraffic:
    """The bytes that a device copies in each direction, and the seconds for which kernels wait for
    copies."""

    to_host: int = 0
    from_host: int = 0
    exposed_s: float = 0.0

    def add(self, other: "HostTraffic", times: int) -> None:
        """Adds the traffic of a computation that runs `times` times."""
        self.to_host += other.to_host * times
        self.from_host += other.from_host * times
        self.exposed_s += other.exposed_s * times


def copies(i: Instruction, scope: Scope) -> bool:
    """True for an instruction that launches a kernel or copy which reads or writes host memory."""
    if not launches_kernel(i):
        return False
    operands = (scope[name] for name in i.operands if name in scope)
    return MEMORY in i.shape or any(MEMORY in operand.shape for operand in operands)


def located(shape: str) -> list[tuple[int, bool]]:
    """(bytes, True if in host memory) of each array in a shape; tuples are flattened."""
    return [(shape_bytes(array), MEMORY in layout) for array, layout in WITH_LAYOUT.findall(shape)]


def sizes(program: Program) -> set[int]:
    """The sizes in bytes of the arrays in host memory."""
    shapes = {i.shape for i, _, _ in program.walk() if MEMORY in i.shape}
    return {size for shape in shapes for size, on_host in located(shape) if on_host}


def written(program: Program, i: Instruction, scope: Scope) -> tuple[str, int]:
    """The direction of an instruction for which `copies` is true, and the bytes that it copies. If
    it updates an array, these are the bytes of the update."""
    if i.kind == "fusion":
        scope = i.body(program.computations)
        i = root(scope)
    result = result_shape(i)
    update = i.kind == "dynamic-update-slice"
    size = scope[i.operands[1]].bytes if update else shape_bytes(result)
    return TO_HOST if MEMORY in result else FROM_HOST, size


class HostLink:
    """The link to the host while a schedule runs. In each direction it makes one copy after
    another.

    On some GPUs the network adapter shares the GPU's lanes to the host (`Gpu.host_shared`). What
    the adapter sends and receives then delays the copies.
    """

    def __init__(self, gpu: Gpu, traffic: HostTraffic):
        self.gpu, self.traffic = gpu, traffic
        self._free_at: dict[str, float] = {}
        self._running: dict[str, float] = {}

    def start(self, name: str, now: float, direction: str, size: int) -> tuple[float, float]:
        """Starts a copy of `size` bytes. Returns when it begins to move, and when it ends."""
        if direction == TO_HOST:
            self.traffic.to_host += size
        else:
            self.traffic.from_host += size
        self._running[name] = end = self._queue(direction, now, size)
        return end - size / (self.gpu.host * 1e9), end

    def finish(self, name: str, now: float) -> float:
        """The seconds for which kernels wait for a copy; 0 for anything else."""
        waiting = max(0.0, self._running.pop(name, 0.0) - now)
        self.traffic.exposed_s += waiting
        return waiting

    def share(self, now: float, size: float) -> None:
        """Occupies the lanes for a collective that sends and receives `size` bytes over the network
        adapter, if the adapter shares them."""
        if self.gpu.host_shared:
            for direction in (TO_HOST, FROM_HOST):
                self._queue(direction, now, size)

    def _queue(self, direction: str, now: float, size: float) -> float:
        """The end of a transfer that begins when the link is free."""
        end = max(now, self._free_at.get(direction, 0.0)) + size / (self.gpu.host * 1e9)
        self._free_at[direction] = end
        return end
