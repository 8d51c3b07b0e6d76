"""Measured times, as the walk along the schedule asks for them (`xla.schedule.Costs`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import log

from jaxbench.forecast.interpolate import Grid, between
from jaxbench.forecast.tables import Tables
from jaxbench.hardware import PLANNED, Gpu
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import Work
from jaxbench.xla.schedule import Kernel, peak

TILE = (128, 128, 64)
"""Of a product on Hopper's tensor cores, in elements along m, n and k: sizes are padded to it."""

MICRO = 1e-6

RING_START, RING_NVLINK, RING_NETWORK = 8.4 * MICRO, 3.4 * MICRO, 14.0 * MICRO
"""Latency of a ring with the protocol for large messages, and of each of its steps inside and
between nodes: the constants by which NCCL itself chooses (NVIDIA/nccl src/graph/tuning.cc)."""


@dataclass(frozen=True)
class Conditions:
    """What no table of single kernels says: by what a kernel is slower beside a collective, and
    which line of the network's table rings follow."""

    slowdown: float
    network: str = "ring"


CONDITIONS = {
    "expected": Conditions(slowdown=1.189),
    "fast": Conditions(slowdown=1.0),
    "slow": Conditions(slowdown=1.40, network="untuned"),
}
"""By name. Kernels beside a collective were 18.9 % slower on average and 40 % at most, on H100 and
other GPUs (arXiv 2507.03114): they share cores, bandwidth and power. On an H100 clocks fell from
1980 to 1575 MHz (deepseek-ai/DeepGEMM issue 120)."""


class Measured:
    """Times by tables, on a GPU whose links may be others than those that were measured."""

    def __init__(self, gpu: Gpu, tables: Tables, conditions: Conditions):
        self.gpu, self.tables, self.conditions = gpu, tables, conditions
        self.slowdown = conditions.slowdown
        self._product = cache(self._product_s)

    @cached_property
    def products(self) -> dict[str, Grid]:
        """Products by dtype."""
        names = self.tables.names("product")
        return {name: Grid(self.tables.values["product", name]) for name in names}

    def kernel(self, kernel: Kernel) -> Mapping[str, float]:
        """A product or attention as measured, and never faster than the bytes that it moves;
        others by their bytes."""
        start, moving = self._memory(kernel.bytes)
        if not kernel.works:
            return {"launches": start, kernel.part: moving} if kernel.bytes else {}
        computing = sum(self.work(work) for work in kernel.works)
        return {kernel.part: max(computing, start + moving)}

    def work(self, work: Work) -> float:
        """Seconds of a product or of attention."""
        return self._product(work) if work.kind == "product" else self._attention(work)

    def dtype(self, work: Work) -> str:
        """The table of a product: fp32 products take twice the time of bf16's."""
        return "fp8" if work.dtype.startswith("f8") else "bf16"

    def covers(self, work: Work) -> bool:
        """Whether the tables reach as far as a product or attention."""
        if work.kind == "product":
            return self.products[self.dtype(work)].covers(padded(work))
        lengths = [sizes[2] for sizes in self._attention_rates("forward")]
        return min(lengths) <= work.sizes[2] <= max(lengths)

    def _product_s(self, work: Work) -> float:
        measured = self.products[self.dtype(work)].at(padded(work)) * MICRO
        wide = 2.0 if work.dtype == "f32" else 1.0
        least = work.flops / (peak(self.gpu, work.dtype) * 1e12)
        return max(measured * wide, least)

    def _attention_rates(self, direction: str) -> dict[tuple[int, ...], float]:
        """FLOP/s of the causal half by sizes."""
        times = self.tables.values["attention", direction]
        per_score = FLOPS_PER_SCORE[direction]
        return {
            (b, n, s, h): per_score * b * n * s * s * h / 2 / (time * MICRO)
            for (b, n, s, h), time in times.items()
        }

    def _attention(self, work: Work) -> float:
        direction = "backward" if work.backward else "forward"
        points = sorted((log(s[2]), rate) for s, rate in self._attention_rates(direction).items())
        length = min(max(log(work.sizes[2]), points[0][0]), points[-1][0])
        batch, heads, tokens, head_dim = work.sizes
        flops = FLOPS_PER_SCORE[direction] * batch * heads * tokens * tokens * head_dim / 2
        return flops / between(points, length)

    def _memory(self, moved: int) -> tuple[float, float]:
        """(start, seconds beyond it) of a kernel that moves so many bytes."""
        points = sorted((s[0], time) for s, time in self.tables.values["memory", "any"].items())
        start = between(points, 0) * MICRO
        return start, max(0.0, between(points, moved) * MICRO - start)

    def collective(self, collective: Collective) -> float:
        """Seconds of one run, alone."""
        if collective.crosses_nodes(self.gpu):
            return self._between_nodes(collective)
        if collective.kind == "collective-permute":
            share = self.tables.values["nvlink", "direct"][(2,)]
            seconds = collective.bytes / (share * self.gpu.nvlink * 1e9)
            return RING_START + RING_NVLINK + seconds
        return self._inside(collective.kind, collective.group, buffer(collective))

    def _inside(self, kind: str, group: int, whole: int) -> float:
        """Inside an NVLink domain: by the table of the largest group up to this one. In a larger
        ring each byte takes as long, and each further GPU adds a step."""
        times = self.tables.values["collective", kind]
        known = max((n for n, _ in times if n <= group), default=min(n for n, _ in times))
        points = sorted((b, time) for (n, b), time in times.items() if n == known)
        measured = max(between(points, whole), points[0][1]) * MICRO
        share = (group - 1) / group / ((known - 1) / known)
        slower = PLANNED[self.gpu.name.lower()].nvlink / self.gpu.nvlink
        return measured * share * slower + (group - known) * RING_NVLINK

    def _between_nodes(self, collective: Collective) -> float:
        """Rings that pass through all members of a node before they leave it; an all-to-all sends
        each byte to its receiver, and what leaves the node does so over one adapter."""
        group, members = collective.group, collective.members(self.gpu)
        nodes = -(-group // members)
        sent = collective.wire_bytes / collective.count
        direct = self.gpu.nic * self.tables.values["network", "direct"][(2,)] * 1e9
        if collective.kind == "collective-permute":
            return RING_START + RING_NETWORK + sent / direct
        if collective.kind == "all-to-all":
            leaving = collective.bytes * (group - members) / group
            return RING_START + RING_NETWORK + leaving / direct
        rounds = 2 if collective.kind == "all-reduce" else 1
        latency = (group - nodes) * RING_NVLINK + (nodes - 1) * RING_NETWORK
        rate = self.gpu.nic * members * self._ring_share(nodes) * 1e9
        return RING_START + rounds * latency + sent / min(rate, self._nvlink(collective.kind))

    def _nvlink(self, kind: str) -> float:
        """Bytes per second that a GPU sends in a ring over NVLink: those of the largest transfer of
        the table."""
        times = self.tables.values["collective", kind]
        n, whole = max(times)
        rounds = 2 if kind == "all-reduce" else 1
        slower = PLANNED[self.gpu.name.lower()].nvlink / self.gpu.nvlink
        return rounds * whole * (n - 1) / n / (times[n, whole] * MICRO) / slower

    def _ring_share(self, nodes: int) -> float:
        """The share of the adapters' rate that a ring over nodes reaches: on the line of the
        table's logarithms, and on that of its last two points beyond them."""
        table = self.tables.values["network", self.conditions.network]
        points = sorted((log(sizes[0]), share) for sizes, share in table.items())
        if len(points) == 1:
            return points[0][1]
        x = log(nodes)
        if x <= points[-1][0]:
            return between(points, max(x, points[0][0]))
        (x0, y0), (x1, y1) = points[-2:]
        return max(y1 + (y1 - y0) * (x - x1) / (x1 - x0), 0.1)


FLOPS_PER_SCORE = {"forward": 4, "backward": 10}
"""FLOPs of attention for each score and element of a head: two products forward; four backward,
and the scores again."""


def padded(work: Work) -> tuple[int, int, int]:
    """m, n and k of a product, in whole tiles; the products of a batch are as many more rows."""
    batch, *sizes = work.sizes
    m, n, k = (-(-size // tile) * tile for size, tile in zip(sizes, TILE, strict=True))
    return batch * m, n, k


def buffer(collective: Collective) -> int:
    """Bytes of the whole gathered, scattered, reduced or exchanged array."""
    scattered = collective.kind == "reduce-scatter"
    return collective.bytes * (collective.group if scattered else 1)
