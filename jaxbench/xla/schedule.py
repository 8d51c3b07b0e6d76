"""Simulates a compiled program along XLA's schedule with a cost model.

The streams are XLA:GPU's. Kernels run one after another. A collective starts at its `-start` in the
schedule, waits until all earlier collectives are done (but see `Program.concurrent`), and overlaps
with kernels until its `-done`. The time for which kernels then wait for it is *exposed*. In the
bound, an asynchronous kernel that only moves bytes gets the memory bandwidth that others leave
until its `-done`, and then all of it. In a forecast it takes its turn like any other, because
kernels on two streams take turns where each of them fills the GPU. `Roofline` is the cost model of
the bound, which docs/design/plan.md explains; `forecast.costs.Measured` extends it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxbench.base.errors import RunFailed
from jaxbench.base.hardware import Gpu
from jaxbench.xla import collectives, host_copies
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import Program, Work
from jaxbench.xla.host_copies import HostLink
from jaxbench.xla.instruction import DTYPE_BITS, SOURCE, Instruction, Scope
from jaxbench.xla.kernels import launches, launches_kernel, moved_bytes, written_fp8
from jaxbench.xla.rewrites import COLLECTIVES
from jaxbench.xla.timeline import KERNELS, LINKS, Kernel, Schedule, Transfer


@dataclass
class Roofline:
    """The least times on a GPU and its links. Every kernel runs at its peak or at the memory
    bandwidth, whichever takes longer, without latency. `slowdown` is the factor on a kernel's time
    while a collective overlaps with it."""

    gpu: Gpu
    slowdown: float = 1.0
    hides_copies: ClassVar[bool] = True
    """Whether asynchronous kernels that only move bytes run at the same time as others."""

    def kernel(self, kernel: Kernel) -> Mapping[str, float]:
        """Seconds of a kernel by part: `compute` for matmuls and attention, else `memory`."""
        memory = self.moving(kernel)
        compute = sum(w.flops / (work_peak(self.gpu, w) * 1e12) for w in kernel.works)
        return {"compute": max(compute, memory)} if compute else {"memory": memory}

    def moving(self, kernel: Kernel) -> float:
        """Seconds for which a kernel needs the memory bandwidth."""
        return kernel.bytes / (self.gpu.bandwidth * 1e9)

    def collective(self, collective: Collective) -> float:
        """Seconds of one run without anything else."""
        return collective.seconds(self.gpu)


class Walk:
    """A program along its schedule. It reads the kernels once, and can be simulated with any number
    of cost models."""

    def __init__(self, program: Program):
        self.program = program
        self._kernels: dict[tuple[str, str], Kernel | None] = {}

    def under(self, costs: Roofline) -> Schedule:
        """The simulated schedule of one step with a cost model."""
        return self._simulate(self.program.entry, costs)

    def kernels(self, computation: str = "", runs: int = 1) -> Iterator[tuple[str, Kernel, int]]:
        """Every kernel except collectives and copies to the host: name, kernel, runs per step."""
        computation = computation or self.program.entry
        for i in self.program.computations[computation].values():
            for callee, times in _bodies(i):
                yield from self.kernels(callee, runs * times)
            if (kernel := self._kernel(computation, i)) is not None:
                yield i.name, kernel, runs

    def _kernel(self, computation: str, i: Instruction) -> Kernel | None:
        """The kernel that an instruction launches. None if it launches no kernel, a collective, or
        a copy from or to the host."""
        key = computation, i.name
        if key not in self._kernels:
            kernel, scope = None, self.program.computations[computation]
            collective = i.kind in COLLECTIVES
            if launches_kernel(i) and not collective and not host_copies.copies(i, scope):
                works = tuple(_works(self.program, i, scope))
                moved = moved_bytes(self.program, i, scope)
                unknown = self.program.unknown(i, scope)
                fp8 = written_fp8(self.program, i, scope)
                count = launches(self.program, i, scope) + sum(w.launches - 1 for w in works)
                kernel = Kernel(works, moved, i.attribute(SOURCE) or "", unknown, fp8, count)
            self._kernels[key] = kernel
        return self._kernels[key]

    def _launched(self, computation: str, i: Instruction) -> int:
        """The number of kernels, copies and fills that an instruction launches."""
        kernel = self._kernel(computation, i)
        return kernel.launches if kernel else int(launches_kernel(i))

    def _simulate(self, name: str, costs: Roofline) -> Schedule:
        total, scope = Schedule(), self.program.computations[name]
        completed = ((i, collectives.completed(i, scope)) for i in scope.values())
        starts = {i.start(scope).name: collective for i, collective in completed if collective}
        free_at: dict[bool, float] = {}  # for links inside of NVLink domains, and between them
        side, link = _SideStream(total), HostLink(costs.gpu, total.host)
        running: dict[str, tuple[Collective, float, float]] = {}  # with its seconds and end
        uncovered: set[str] = set()
        for i in scope.values():
            start_s, kernel_s, waited_s, computes = total.step_s, total.kernel_s, 0.0, False
            kernel, launched = self._kernel(name, i), self._launched(name, i)
            total.launches += launched
            if kernel is not None and costs.hides_copies and _only_moves_bytes(i, kernel):
                side.start(i.name, kernel, costs.kernel(kernel))
            elif kernel is not None:
                total.parts.update(costs.kernel(kernel))
                total.moving_s += costs.moving(kernel)
                total.occupy(KERNELS, i.name, start_s, total.kernel_s - kernel_s, launched, kernel)
                computes = any(w.matmul or w.kind == "attention" for w in kernel.works)
            elif i.is_done:
                side.finish(i.operands[0])
                waited_s = link.finish(i.operands[0], total.step_s)
            elif launches_kernel(i) and host_copies.copies(i, scope):
                direction, size = host_copies.written(self.program, i, scope)
                begins, ends = link.start(i.name, total.step_s, direction, size)
                total.occupy(direction, i.name, begins, ends - begins, launched)
                if not i.is_start:
                    waited_s = link.finish(i.name, total.step_s)
            total.exposed_s += waited_s
            for callee, times in _bodies(i):
                body = self._simulate(callee, costs)
                computes = computes or body.computes
                total.add(body, times)
            busy_s = max(free_at.values(), default=0.0) - start_s
            total.slow(i.name, _slowed(total.kernel_s - kernel_s, busy_s, costs.slowdown))
            if computes:
                total.computes = True
                uncovered.clear()
            if (collective := starts.get(i.name)) is not None:
                seconds = costs.collective(collective)
                links = collective.crosses_domains(costs.gpu)
                begins = max(total.step_s, self._free_at(i, links, free_at))
                free_at[links] = begins + seconds
                running[i.name] = collective, seconds, free_at[links]
                total.occupy(LINKS[links], i.name, begins, seconds, launched, collective)
                link.share(total.step_s, collective.adapter_bytes(costs.gpu))
                uncovered.add(i.name)
            if not i.is_start and (start := i.start(scope).name) in running:
                collective, seconds, end = running.pop(start)
                exposed_s = max(0.0, end - total.step_s)
                total.exposed_s += exposed_s
                total.transfers.append(
                    Transfer(collective, seconds, exposed_s, start not in uncovered)
                )
        return side.finished()

    def _free_at(self, i: Instruction, links: bool, free_at: Mapping[bool, float]) -> float:
        """When a collective may begin: after all earlier ones, or only after those on its links."""
        concurrent, synchronous = self.program.concurrent, not i.is_start
        if concurrent == "all" or (concurrent == "synchronous" and synchronous):
            return free_at.get(links, 0.0)
        return max(free_at.values(), default=0.0)


class _SideStream:
    """Asynchronous kernels that move bytes next to the kernels of a schedule. They run one after
    another, in the time in which the other kernels leave the memory bandwidth unused."""

    def __init__(self, schedule: Schedule):
        self.schedule, self.free_at = schedule, 0.0
        self.running: dict[str, tuple[Kernel, Mapping[str, float], float]] = {}
        self.moved_s = 0.0

    def start(self, name: str, kernel: Kernel, parts: Mapping[str, float]) -> None:
        seconds = sum(parts.values())
        self.free_at = max(self._unused_s, self.free_at) + seconds
        self.moved_s += seconds
        self.running[name] = kernel, parts, self.free_at

    def finish(self, name: str) -> None:
        """Makes the schedule wait for what is left of a kernel."""
        if name in self.running:
            kernel, parts, end = self.running.pop(name)
            now, seconds = self.schedule.step_s, sum(parts.values())
            left = max(0.0, end - self._unused_s) / (seconds or 1.0)
            self.schedule.parts.update({part: s * left for part, s in parts.items()})
            self.schedule.occupy(KERNELS, name, now, seconds * left, 1, kernel)

    def finished(self) -> Schedule:
        """The schedule, after all kernels."""
        for name in list(self.running):
            self.finish(name)
        self.schedule.moving_s += self.moved_s
        return self.schedule

    @property
    def _unused_s(self) -> float:
        return self.schedule.step_s - self.schedule.moving_s


def _only_moves_bytes(i: Instruction, kernel: Kernel) -> bool:
    """True for an asynchronous kernel without arithmetic. A kernel with arithmetic competes for the
    cores."""
    return i.is_start and not kernel.works


def _slowed(kernel_s: float, busy_s: float, slowdown: float) -> float:
    """Seconds by which kernels that take `kernel_s` alone take longer, if collectives run for the
    first `busy_s` seconds and slow down what overlaps with them."""
    overlap = min(max(busy_s, 0.0), kernel_s * slowdown)
    return overlap * (1 - 1 / slowdown)


def _works(program: Program, i: Instruction, scope: Scope) -> Iterator[Work]:
    """The work of one kernel, including fused work."""
    if work := program.work(i, scope):
        yield work
    for name, _ in i.callees:
        fused = program.computations[name]
        for inner in fused.values():
            yield from _works(program, inner, fused)


def work_peak(gpu: Gpu, work: Work) -> float:
    """The peak in TFLOP/s at which a GPU multiplies in the format of some work (`peak`)."""
    return gpu.tflops.get(work.format) or peak(gpu, work.dtype)


def peak(gpu: Gpu, dtype: str) -> float:
    """The peak in TFLOP/s at which a GPU multiplies in an HLO dtype or in `tf32`. Tensor cores
    multiply in TF32 at half of bf16's peak. fp32, and integers of more than 8 bits, run on the CUDA
    cores. Raises RunFailed if we know no peak of the GPU for this dtype."""
    if dtype == "tf32":
        return gpu.tflops["bf16"] / 2
    if dtype == "f64":
        return gpu.fp64
    if dtype[0] in "su":
        return gpu.int8 if DTYPE_BITS[dtype] <= 8 else gpu.fp32
    if dtype in ("f32", "pred"):
        return gpu.fp32
    name = {"f8": "fp8", "f6": "fp6", "f4": "nvfp4"}.get(dtype[:2], "bf16")
    if name not in gpu.tflops:
        raise RunFailed(f"no bound for matmuls in {dtype}: the peak of {gpu.name} is not known")
    return gpu.tflops[name]


def _bodies(i: Instruction) -> list[tuple[str, int]]:
    return i.callees if i.opcode in ("while", "conditional", "call") else []
