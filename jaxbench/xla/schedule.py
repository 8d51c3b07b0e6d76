"""When a compiled program runs what: a roofline walk along XLA's schedule.

Two streams, as XLA:GPU has them. Kernels run one after another. A collective starts when the
schedule says so, waits for the collectives before it, and runs beside the kernels until its
`-done`; what is left of it there is *exposed*: the kernels wait. The model and its assumptions are
explained in docs/plan.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jaxbench.hardware import Gpu
from jaxbench.xla import collectives, hlo
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import Instruction, Program, Scope, Work

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "while", "conditional", "call", "domain", "add-dependency",
}  # fmt: skip
"""Opcodes that launch no kernel of their own."""

SLICES = ("dynamic-slice", "slice", "gather")


@dataclass(frozen=True)
class Transfer:
    """A collective with its time. `seconds` and `exposed_s` are per step, at the GPU's
    bandwidths; `covered` says whether a matrix product or attention is scheduled beside it."""

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
    """Seconds of one step by what bounds them, kernel launches, and all collectives.

    `compute_s` is of matrix products and attention, `memory_s` of all other kernels, `exposed_s` of
    waiting for collectives. Their sum is `bound_s`.
    """

    compute_s: float = 0.0
    memory_s: float = 0.0
    exposed_s: float = 0.0
    kernels: int = 0
    transfers: list[Transfer] = field(default_factory=list)

    @property
    def bound_s(self) -> float:
        """Least step time."""
        return self.compute_s + self.memory_s + self.exposed_s

    @property
    def uncovered_bytes(self) -> int:
        """Wire bytes of collectives with no matrix product or attention beside them."""
        return sum(t.collective.wire_bytes for t in self.transfers if not t.covered)

    def add(self, part: "Schedule", times: int) -> None:
        """Adds what a loop runs `times`."""
        self.compute_s += part.compute_s * times
        self.memory_s += part.memory_s * times
        self.exposed_s += part.exposed_s * times
        self.kernels += part.kernels * times
        self.transfers += [t.repeated(times) for t in part.transfers]


def analyse(program: Program, gpu: Gpu) -> Schedule:
    """The schedule of one step on this GPU and its links."""
    return _Walk(program, gpu).run(program.entry)


def kernels(
    program: Program, gpu: Gpu, computation: str = "", runs: int = 1
) -> Iterator[tuple[Instruction, str | None, float, int]]:
    """Every kernel that is no collective, with the kind of its `Work`, the least seconds of a run,
    and its runs per step."""
    walk, scope = _Walk(program, gpu), program.computations[computation or program.entry]
    for i in scope.values():
        for callee, times in _bodies(i):
            yield from kernels(program, gpu, callee, runs * times)
        if _launches(i) and not _is_collective(i):
            kind = next((work.kind for work in walk.work(i, scope)), None)
            yield i, kind, sum(walk.kernel_seconds(i, scope)), runs


class _Walk:
    def __init__(self, program: Program, gpu: Gpu):
        self.program, self.gpu = program, gpu

    def run(self, name: str) -> Schedule:
        """One run of a computation, loops inside it included."""
        scope = self.program.computations[name]
        transfers = {
            _start_of(i): c
            for i in scope.values()
            if (c := collectives.completed(i, scope, 1)) is not None
        }
        total = Schedule()
        network_free = 0.0
        ends: dict[str, float] = {}
        uncovered: set[str] = set()
        for i in scope.values():
            product, memory = self.kernel_seconds(i, scope)
            total.compute_s += product
            total.memory_s += memory
            total.kernels += int(_launches(i))
            for callee, times in _bodies(i):
                inner = self.run(callee)
                product += inner.compute_s
                total.add(inner, times)
            if product:
                uncovered.clear()
            if started := transfers.get(i.name):
                network_free = max(total.bound_s, network_free) + started.seconds(self.gpu)
                ends[i.name] = network_free
                uncovered.add(i.name)
            if not i.opcode.endswith("-start") and (start := _start_of(i)) in ends:
                waited = max(0.0, ends.pop(start) - total.bound_s)
                total.exposed_s += waited
                done = transfers[start]
                seconds = done.seconds(self.gpu)
                total.transfers.append(Transfer(done, seconds, waited, start not in uncovered))
        return total

    def kernel_seconds(self, i: Instruction, scope: Scope) -> tuple[float, float]:
        """(seconds of a product or attention, seconds of any other kernel); one of them is 0."""
        if not _launches(i) or _is_collective(i):
            return 0.0, 0.0
        memory = traffic(self.program, i, scope) / (self.gpu.bandwidth * 1e9)
        compute = sum(
            work.flops / (peak(self.gpu, work.dtype) * 1e12) for work in self.work(i, scope)
        )
        return (max(compute, memory), 0.0) if compute else (0.0, memory)

    def work(self, i: Instruction, scope: Scope) -> Iterator[Work]:
        """What one kernel computes, also inside a fusion."""
        if work := self.program.work(i, scope):
            yield work
        for name, _ in i.callees:
            fused = self.program.computations[name]
            for inner in fused.values():
                yield from self.work(inner, fused)


def peak(gpu: Gpu, dtype: str) -> float:
    """Tensor-core peak in TFLOP/s for an HLO dtype; fp32 runs as TF32, at half of bf16's."""
    if dtype == "f32":
        return gpu.tflops["bf16"] / 2
    return gpu.tflops["fp8" if dtype.startswith("f8") else "bf16"]


def traffic(program: Program, i: Instruction, scope: Scope) -> int:
    """Bytes that a kernel reads and writes.

    Each operand and result once. Of an operand that is only sliced, the slice; of an array that is
    updated in place, the update.
    """
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
    return i.opcode not in FREE and not i.opcode.endswith(("-done", "-update"))


def _is_collective(i: Instruction) -> bool:
    return i.opcode.removesuffix("-start") in collectives.KINDS


def _start_of(i: Instruction) -> str:
    """Name of the instruction that begins what `i` completes."""
    return i.operands[0] if i.opcode.endswith("-done") else i.name
