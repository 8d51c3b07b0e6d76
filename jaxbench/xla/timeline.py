"""The simulated schedule of a step: its kernels, collectives and copies, and their sums."""

from collections import Counter
from dataclasses import dataclass, field, replace

from jaxbench.base.scopes import QUANTIZED, SCAN
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import Work
from jaxbench.xla.host_copies import HostTraffic

FP8_SHARE = 0.22
"""The least share of FP8 in a kernel that makes it. Gradients of gated activations write a quarter
of their bytes in FP8, casts from bf16 a third, transposes of FP8 a half. Casts from fp32 write a
fifth, and are as fast as other kernels."""

KERNELS = "kernels"
LINKS = {True: "network", False: "NVLink"}
"""Streams of a schedule: kernels, and collectives by whether they cross domains. The streams of
copies from and to the host are in `host`."""


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel: its work (including fused work), the bytes that it reads and writes, its
    JAX operation, the target of a custom call whose work is unknown, the bytes of FP8 that it
    writes, and its launches, of which a sort and some custom calls have several."""

    works: tuple[Work, ...]
    bytes: int
    source: str
    unknown: str = ""
    fp8: int = 0
    launches: int = 1

    @property
    def makes_fp8(self) -> bool:
        """True if the kernel casts to FP8 or transposes it, by the share of its bytes that are FP8
        which it writes."""
        return bool(self.fp8) and self.fp8 >= FP8_SHARE * self.bytes

    @property
    def computes(self) -> bool:
        """True if a matmul or attention is part of the kernel."""
        return any(work.matmul or work.kind == "attention" for work in self.works)

    @property
    def part(self) -> str:
        """The part of the step time: `products`, `attention`, `scan`, `quantization` with what is
        fused into it, or `other kernels`."""
        if SCAN in self.source:
            return "scan"
        other = "quantization" if QUANTIZED in self.source else "other kernels"
        if not self.works:
            return other
        if self.works[0].matmul:
            return "products"
        return "attention" if self.works[0].kind == "attention" else other


@dataclass(frozen=True)
class Transfer:
    """A collective with its time. `seconds` and `exposed_s` are per step. `covered` is true if a
    matmul or attention overlaps with it."""

    collective: Collective
    seconds: float
    exposed_s: float
    covered: bool

    def repeated(self, times: int) -> "Transfer":
        """The transfer of a loop that runs it `times` times."""
        collective = replace(self.collective, count=self.collective.count * times)
        return Transfer(collective, self.seconds * times, self.exposed_s * times, self.covered)


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of a stream: the instruction that occupies it, the number of its launches, and
    the kernel or collective that it runs. `start_s` counts from the start of its computation."""

    stream: str
    name: str
    start_s: float
    seconds: float
    launches: int = 0
    cause: Kernel | Collective | None = None


@dataclass(frozen=True, slots=True)
class Repeated:
    """A computation in a loop: its start, the seconds of an iteration, the number of iterations,
    and its spans."""

    start_s: float
    seconds: float
    times: int
    spans: "list[Span | Repeated]"


@dataclass
class Schedule:
    """Simulated times of a step, kernel launches, all collectives, and `spans` along the step.

    `parts` are the seconds of kernels by part, without overlap. `slowed_s` is what overlapping
    collectives add to them. `exposed_s` is the wait for collectives and for copies from and to the
    host. Their sum is `step_s`. A bound also needs `moving_s`, the part of the step in which the
    memory bandwidth is in use. `computes` is true if a matmul or attention runs.
    """

    parts: Counter[str] = field(default_factory=Counter)
    slowed_s: float = 0.0
    exposed_s: float = 0.0
    moving_s: float = 0.0
    launches: int = 0
    transfers: list[Transfer] = field(default_factory=list)
    host: HostTraffic = field(default_factory=HostTraffic)
    computes: bool = False
    spans: list[Span | Repeated] = field(default_factory=list)

    @property
    def kernel_s(self) -> float:
        """Seconds of kernels, without overlap."""
        return sum(self.parts.values())

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.kernel_s + self.slowed_s + self.exposed_s

    @property
    def uncovered_bytes(self) -> int:
        """Wire bytes of collectives that no matmul or attention overlaps with."""
        return sum(t.collective.wire_bytes for t in self.transfers if not t.covered)

    def add(self, body: "Schedule", times: int) -> None:
        """Adds a computation that runs `times` times."""
        self.spans.append(Repeated(self.step_s, body.step_s, times, body.spans))
        for name, seconds in body.parts.items():
            self.parts[name] += seconds * times
        self.slowed_s += body.slowed_s * times
        self.exposed_s += body.exposed_s * times
        self.moving_s += body.moving_s * times
        self.launches += body.launches * times
        self.transfers += [t.repeated(times) for t in body.transfers]
        self.host.add(body.host, times)

    def occupy(
        self, stream: str, name: str, start_s: float, seconds: float, launches: int = 0,
        cause: Kernel | Collective | None = None,
    ) -> None:  # fmt: skip
        """Adds a span, unless it has no launch and takes no time."""
        if seconds > 0 or launches:
            self.spans.append(Span(stream, name, start_s, seconds, launches, cause))

    def slow(self, name: str, seconds: float) -> None:
        """Adds seconds by which collectives slow down the kernels of the last instruction."""
        last = self.spans[-1] if self.spans else None
        if isinstance(last, Span) and (last.stream, last.name) == (KERNELS, name):
            self.spans[-1] = replace(last, seconds=last.seconds + seconds)
        else:
            self.occupy(KERNELS, name, self.step_s, seconds)
        self.slowed_s += seconds
