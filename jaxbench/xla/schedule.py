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
from typing import ClassVar, NamedTuple

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
        return _Simulation(self, self.program.entry, costs).run()

    def kernels(self, computation: str = "", runs: int = 1) -> Iterator[tuple[str, Kernel, int]]:
        """Every kernel except collectives and copies to the host: name, kernel, runs per step."""
        computation = computation or self.program.entry
        for i in self.program.computations[computation].values():
            for callee, times in _bodies(i):
                yield from self.kernels(callee, runs * times)
            if (kernel := self.kernel(computation, i)) is not None:
                yield i.name, kernel, runs

    def kernel(self, computation: str, i: Instruction) -> Kernel | None:
        """The kernel that an instruction launches. None if it launches no kernel, a collective, or
        a copy from or to the host."""
        key = computation, i.name
        if key not in self._kernels:
            self._kernels[key] = _kernel(self.program, i, self.program.computations[computation])
        return self._kernels[key]


class _Simulation:
    """The simulation of one computation with a cost model, instruction by instruction."""

    def __init__(self, walk: Walk, name: str, costs: Roofline):
        self.walk, self.name, self.costs = walk, name, costs
        self.scope = walk.program.computations[name]
        self.total = Schedule()
        self.side, self.link = _SideStream(self.total), HostLink(costs.gpu, self.total.host)
        completed = ((i, collectives.completed(i, self.scope)) for i in self.scope.values())
        self.collectives = {i.start(self.scope).name: found for i, found in completed if found}
        self.running: dict[str, _Running] = {}
        self.free_at: dict[bool, float] = {}  # for links inside of NVLink domains, and between them
        self.uncovered: set[str] = set()

    def run(self) -> Schedule:
        """The schedule of the whole computation."""
        total = self.total
        for i in self.scope.values():
            start_s, kernel_s = total.step_s, total.kernel_s
            computes = self._execute(i)
            for callee, times in _bodies(i):
                body = _Simulation(self.walk, callee, self.costs).run()
                computes = computes or body.computes
                total.add(body, times)
            busy_s = max(self.free_at.values(), default=0.0) - start_s
            total.slow(i.name, _slowed(total.kernel_s - kernel_s, busy_s, self.costs.slowdown))
            if computes:
                total.computes = True
                self.uncovered.clear()
            if i.name in self.collectives:
                self._start(i, self.collectives[i.name])
            if not i.is_start and (start := i.start(self.scope).name) in self.running:
                self._finish(start)
        return self.side.finished()

    def _execute(self, i: Instruction) -> bool:
        """Runs the kernel or the copy of an instruction, or waits for one that it ends. Returns
        True for a matmul or attention."""
        total, kernel = self.total, self.walk.kernel(self.name, i)
        if kernel is not None:
            self._run_kernel(i, kernel)
            return kernel.computes
        total.launches += launches_kernel(i)
        if i.is_done:
            self.side.finish(i.operands[0])
            total.exposed_s += self.link.finish(i.operands[0], total.step_s)
        elif host_copies.copies(i, self.scope):
            direction, size = host_copies.written(self.walk.program, i, self.scope)
            begins, ends = self.link.start(i.name, total.step_s, direction, size)
            total.occupy(direction, i.name, begins, ends - begins, 1)
            if not i.is_start:
                total.exposed_s += self.link.finish(i.name, total.step_s)
        return False

    def _run_kernel(self, i: Instruction, kernel: Kernel) -> None:
        total = self.total
        total.launches += kernel.launches
        # An asynchronous kernel with arithmetic competes for the cores.
        if self.costs.hides_copies and i.is_start and not kernel.works:
            self.side.start(i.name, kernel, self.costs.kernel(kernel))
            return
        start_s, kernel_s = total.step_s, total.kernel_s
        total.parts.update(self.costs.kernel(kernel))
        total.moving_s += self.costs.moving(kernel)
        seconds = total.kernel_s - kernel_s
        total.occupy(KERNELS, i.name, start_s, seconds, kernel.launches, kernel)

    def _start(self, i: Instruction, collective: Collective) -> None:
        """Starts a collective on its links."""
        total, seconds = self.total, self.costs.collective(collective)
        links = collective.crosses_domains(self.costs.gpu)
        begins = max(total.step_s, self._free_at(i, links))
        self.free_at[links] = begins + seconds
        self.running[i.name] = _Running(collective, seconds, end_s=begins + seconds)
        total.occupy(LINKS[links], i.name, begins, seconds, int(launches_kernel(i)), collective)
        self.link.share(total.step_s, collective.adapter_bytes(self.costs.gpu))
        self.uncovered.add(i.name)

    def _free_at(self, i: Instruction, links: bool) -> float:
        """When a collective may begin: after all earlier ones, or only after those on its links."""
        concurrent = self.walk.program.concurrent
        if concurrent == "all" or (concurrent == "synchronous" and not i.is_start):
            return self.free_at.get(links, 0.0)
        return max(self.free_at.values(), default=0.0)

    def _finish(self, start: str) -> None:
        """Waits for the collective that began with the instruction `start`."""
        collective, seconds, end_s = self.running.pop(start)
        exposed_s = max(0.0, end_s - self.total.step_s)
        self.total.exposed_s += exposed_s
        covered = start not in self.uncovered
        self.total.transfers.append(Transfer(collective, seconds, exposed_s, covered))


class _Running(NamedTuple):
    """A collective that has started."""

    collective: Collective
    seconds: float
    end_s: float


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


def _slowed(kernel_s: float, busy_s: float, slowdown: float) -> float:
    """Seconds by which kernels that take `kernel_s` alone take longer, if collectives run for the
    first `busy_s` seconds and slow down what overlaps with them."""
    overlap = min(max(busy_s, 0.0), kernel_s * slowdown)
    return overlap * (1 - 1 / slowdown)


def _kernel(program: Program, i: Instruction, scope: Scope) -> Kernel | None:
    """`Walk.kernel` of an instruction."""
    if not launches_kernel(i) or i.kind in COLLECTIVES or host_copies.copies(i, scope):
        return None
    works = tuple(_works(program, i, scope))
    return Kernel(
        works,
        moved_bytes(program, i, scope),
        source=i.attribute(SOURCE) or "",
        unknown=program.unknown(i, scope),
        fp8=written_fp8(program, i, scope),
        launches=launches(program, i, scope) + sum(work.launches - 1 for work in works),
    )


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


def _bodies(i: Instruction) -> tuple[tuple[str, int], ...]:
    return i.callees if i.kind in ("while", "conditional", "call") else ()
