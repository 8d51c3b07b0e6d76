"""When a compiled program runs what: a walk along XLA's schedule, under any account of how long
things take.

Streams, as XLA:GPU has them. Kernels run one after another. A collective starts when the schedule
says so, waits for those before it on the same links (NVLink, or the network between nodes), and
runs beside the kernels until its `-done`; what is left of it there is *exposed*: the kernels wait.
`Roofline` is the account of the bound: the model and its assumptions are explained in docs/plan.md.
`forecast` has another.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from jaxbench.hardware import Gpu
from jaxbench.xla import collectives, hlo
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import SOURCE, Instruction, Program, Scope, Work

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "while", "conditional", "call", "domain", "add-dependency",
}  # fmt: skip
"""Opcodes that launch no kernel of their own."""

ALLOCATES = "AllocateBuffer"
"""The custom call of memory to which nothing is written."""

SLICES = ("dynamic-slice", "slice", "gather")

SCAN = "ssd.scan"
"""In the source of every kernel of the Mamba-2 scan."""


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel: what it computes, also inside a fusion, the bytes that it reads and
    writes, and the JAX operation that it stems from."""

    works: tuple[Work, ...]
    bytes: int
    source: str

    @property
    def part(self) -> str:
        """What it counts as: `products`, `attention`, `scan` or `other kernels`."""
        if SCAN in self.source:
            return "scan"
        kinds = {"product": "products", "attention": "attention"}
        return kinds.get(self.works[0].kind, "other kernels") if self.works else "other kernels"


@runtime_checkable
class Costs(Protocol):
    """How long things take, in seconds.

    A kernel's time may have several parts, by name. `slowdown` is by what a kernel's time is
    multiplied while a collective runs beside it; `gpu` says which links a collective takes.
    """

    @property
    def gpu(self) -> Gpu: ...

    @property
    def slowdown(self) -> float: ...

    def kernel(self, kernel: Kernel) -> Mapping[str, float]: ...

    def collective(self, collective: Collective) -> float: ...


@dataclass(frozen=True)
class Roofline:
    """Least times on a GPU and its links: every kernel at its peak or at the memory bandwidth,
    whichever is longer; no latency.

    Parts are `compute`, products and attention, and `memory`, all other kernels.
    """

    gpu: Gpu
    slowdown: float = 1.0

    def kernel(self, kernel: Kernel) -> Mapping[str, float]:
        memory = kernel.bytes / (self.gpu.bandwidth * 1e9)
        compute = sum(w.flops / (peak(self.gpu, w.dtype) * 1e12) for w in kernel.works)
        return {"compute": max(compute, memory)} if compute else {"memory": memory}

    def collective(self, collective: Collective) -> float:
        return collective.seconds(self.gpu)


@dataclass(frozen=True)
class Transfer:
    """A collective with its time. `seconds` and `exposed_s` are per step; `covered` says whether a
    matrix product or attention is scheduled beside it."""

    collective: Collective
    seconds: float
    exposed_s: float
    covered: bool

    def repeated(self, times: int) -> "Transfer":
        """The same collective in a loop that runs `times`."""
        collective = replace(self.collective, count=self.collective.count * times)
        return Transfer(collective, self.seconds * times, self.exposed_s * times, self.covered)


@dataclass
class Schedule:
    """Seconds of one step, kernel launches, and all collectives.

    `parts` are the seconds of kernels by what they are, `slowed_s` what collectives beside them
    add to that, `exposed_s` waiting for collectives. Their sum is `step_s`.
    """

    parts: Counter[str] = field(default_factory=Counter)
    slowed_s: float = 0.0
    exposed_s: float = 0.0
    kernels: int = 0
    transfers: list[Transfer] = field(default_factory=list)
    computes: bool = False

    @property
    def worked_s(self) -> float:
        """Seconds of kernels, each as if alone."""
        return sum(self.parts.values())

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.worked_s + self.slowed_s + self.exposed_s

    @property
    def uncovered_bytes(self) -> int:
        """Wire bytes of collectives with no matrix product or attention beside them."""
        return sum(t.collective.wire_bytes for t in self.transfers if not t.covered)

    def add(self, part: "Schedule", times: int) -> None:
        """Adds what a loop runs `times`."""
        for name, seconds in part.parts.items():
            self.parts[name] += seconds * times
        self.slowed_s += part.slowed_s * times
        self.exposed_s += part.exposed_s * times
        self.kernels += part.kernels * times
        self.transfers += [t.repeated(times) for t in part.transfers]


@dataclass(frozen=True)
class Event:
    """An instruction as the walk sees it: whether it launches something, the kernel if that is no
    collective, whose time is that of the links; the computations that it runs and how often, the
    collective that it starts, and the start that it completes."""

    name: str
    launches: bool
    kernel: Kernel | None
    bodies: tuple[tuple[str, int], ...]
    starts: Collective | None
    completes: str | None


class Walk:
    """A program as events in the order of its schedule, read once for any number of `Costs`."""

    def __init__(self, program: Program):
        self.program = program
        self.events = {name: _events(program, name) for name in _reached(program, program.entry)}

    def under(self, costs: Costs) -> Schedule:
        """The schedule of one step."""
        return self._run(self.program.entry, costs)

    def kernels(self, computation: str = "", runs: int = 1) -> Iterator[tuple[str, Kernel, int]]:
        """Every kernel that is no collective, by name, with its runs per step."""
        for event in self.events[computation or self.program.entry]:
            for callee, times in event.bodies:
                yield from self.kernels(callee, runs * times)
            if event.kernel is not None:
                yield event.name, event.kernel, runs

    def _run(self, name: str, costs: Costs) -> Schedule:
        total, free = Schedule(), {True: 0.0, False: 0.0}
        running: dict[str, tuple[Collective, float, float]] = {}
        uncovered: set[str] = set()
        for event in self.events[name]:
            began, worked, computes = total.step_s, total.worked_s, False
            total.kernels += event.launches
            if event.kernel is not None:
                total.parts.update(costs.kernel(event.kernel))
                computes = bool(event.kernel.works)
            for callee, times in event.bodies:
                inner = self._run(callee, costs)
                computes = computes or inner.computes
                total.add(inner, times)
            busy = max(free.values()) - began
            total.slowed_s += _slowed(total.worked_s - worked, busy, costs.slowdown)
            if computes:
                total.computes = True
                uncovered.clear()
            if event.starts is not None:
                seconds = costs.collective(event.starts)
                links = event.starts.crosses_domains(costs.gpu)
                free[links] = max(total.step_s, free[links]) + seconds
                running[event.name] = event.starts, seconds, free[links]
                uncovered.add(event.name)
            if event.completes in running:
                done, seconds, end = running.pop(event.completes)
                waited = max(0.0, end - total.step_s)
                total.exposed_s += waited
                covered = event.completes not in uncovered
                total.transfers.append(Transfer(done, seconds, waited, covered))
        return total


def _slowed(seconds: float, busy: float, slowdown: float) -> float:
    """What a collective that runs for `busy` more seconds adds to kernels of so many."""
    beside = min(max(busy, 0.0), seconds * slowdown)
    return beside * (1 - 1 / slowdown)


def _reached(program: Program, name: str) -> Iterator[str]:
    yield name
    for i in program.computations[name].values():
        for callee, _ in _bodies(i):
            yield from _reached(program, callee)


def _events(program: Program, name: str) -> list[Event]:
    scope = program.computations[name]
    starts = {
        _start_of(i): c
        for i in scope.values()
        if (c := collectives.completed(i, scope, 1)) is not None
    }
    return [
        Event(
            name=i.name,
            launches=_launches(i),
            kernel=_kernel(program, i, scope) if _launches(i) and not _is_collective(i) else None,
            bodies=tuple(_bodies(i)),
            starts=starts.get(i.name),
            completes=None if i.opcode.endswith("-start") else _start_of(i),
        )
        for i in scope.values()
    ]


def _kernel(program: Program, i: Instruction, scope: Scope) -> Kernel:
    works = tuple(_works(program, i, scope))
    return Kernel(works, traffic(program, i, scope), i.attribute(SOURCE) or "")


def _works(program: Program, i: Instruction, scope: Scope) -> Iterator[Work]:
    """What one kernel computes, also inside a fusion."""
    if work := program.work(i, scope):
        yield work
    for name, _ in i.callees:
        fused = program.computations[name]
        for inner in fused.values():
            yield from _works(program, inner, fused)


def peak(gpu: Gpu, dtype: str) -> float:
    """Tensor-core peak in TFLOP/s for an HLO dtype; fp32 runs as TF32, at half of bf16's."""
    if dtype == "f32":
        return gpu.tflops["bf16"] / 2
    return gpu.tflops["fp8" if dtype.startswith("f8") else "bf16"]


def traffic(program: Program, i: Instruction, scope: Scope) -> int:
    """Bytes that a kernel reads and writes.

    Each operand and result once. Of an operand that is only sliced, the slice; of an array that is
    updated in place, the update. Of a kernel whose rule knows better, what that says.
    """
    work = program.work(i, scope)
    if work is not None and work.bytes is not None:
        return work.bytes
    if not i.callees:
        read = sum(_read(name, scope, [i]) for name in set(i.operands))
        return read + _written(i, scope)
    body = program.computations[i.callees[0][0]]
    parameters = [j.name for j in body.values() if j.opcode == "parameter"]
    read = sum(_read(name, body, list(body.values())) for name in parameters)
    return read + _written(hlo.root(body), body)


def _read(name: str, body: Scope, users: list[Instruction]) -> int:
    """Bytes that these instructions read of an array."""
    if name not in body:
        return 0
    total = 0
    for user in users:
        if name not in user.operands:
            continue
        first = user.operands[0] == name
        if user.opcode == "bitcast":
            total += _read(user.name, body, users)
        elif user.opcode in SLICES and first:
            total += user.bytes
        elif not (user.opcode == "dynamic-update-slice" and first):
            return body[name].bytes
    return min(total, body[name].bytes)


def _written(root: Instruction, body: Scope) -> int:
    """Bytes that a computation writes as its result."""
    if root.opcode == "tuple":
        return sum(_written(body[name], body) for name in root.operands)
    if root.opcode == "bitcast":
        return _written(body[root.operands[0]], body)
    if root.opcode == "dynamic-update-slice":
        return body[root.operands[1]].bytes
    return root.bytes


def _bodies(i: Instruction) -> list[tuple[str, int]]:
    return i.callees if i.opcode in ("while", "conditional", "call") else []


def _launches(i: Instruction) -> bool:
    free = i.opcode in FREE or i.opcode.endswith(("-done", "-update"))
    return not free and i.target != ALLOCATES


def _is_collective(i: Instruction) -> bool:
    return i.opcode.removesuffix("-start") in collectives.KINDS


def _start_of(i: Instruction) -> str:
    """Name of the instruction that begins what `i` completes."""
    return i.operands[0] if i.opcode.endswith("-done") else i.name
