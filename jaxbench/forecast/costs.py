"""The forecast's cost model, made of measured kernels and links. The bound's cost model is
`xla.schedule.Roofline`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import log, log2, prod
from statistics import NormalDist

from jaxbench.forecast.interpolate import Grid, between
from jaxbench.forecast.tables import Tables
from jaxbench.hardware import PLANNED, Gpu
from jaxbench.outliers import GPU_SPREAD
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import Work
from jaxbench.xla.schedule import Roofline, peak
from jaxbench.xla.timeline import Kernel

TILE = (128, 128, 64)
"""Tile of a matmul on Hopper's tensor cores, in elements along m, n and k. Sizes are padded to
it."""

MICRO = 1e-6

SCAN = "ssd_"
"""The names of the scan's kernels begin with this."""

START, RING_NVLINK, TREE_NVLINK, NETWORK = 8.4 * MICRO, 3.4 * MICRO, 4.0 * MICRO, 14.0 * MICRO
"""Latencies of NCCL's protocol for large messages, in seconds: the start of a collective, each step
of a ring and of a tree over NVLink, each step between domains. NCCL chooses its algorithms by these
constants (NVIDIA/nccl src/graph/tuning.cc)."""


@dataclass(frozen=True)
class Conditions:
    """Effects that tables of single kernels do not have.

    `slowdown` is the factor on the time of a kernel that overlaps with a collective. `tuned` says
    that rings are as fast as in a tuned network. `sustained` says that clocks are under the power
    limit; otherwise they are as high as in bursts. `spread` is the standard deviation of the GPUs'
    speed. `scan` names the Mamba-2 kernels whose rate we assume for ours.
    """

    slowdown: float
    tuned: bool = True
    sustained: bool = True
    spread: float = 0.0
    scan: str = "fused"


CONDITIONS = {
    "expected": Conditions(slowdown=1.189),
    "fast": Conditions(slowdown=1.0, sustained=False),
    "slow": Conditions(slowdown=1.40, tuned=False, spread=GPU_SPREAD, scan="separate"),
}
"""Scenarios of a forecast. Kernels that overlap with a collective share cores, bandwidth and power
with it. They were 18.9 % slower on average, and 40 % at most, than the same kernels of the same
step without it, on H100 and other GPUs (arXiv 2507.03114). On an H100 clocks fell from 1980 to 1575
MHz (deepseek-ai/DeepGEMM issue 120)."""


class Measured(Roofline):
    """The cost model of a forecast. Times are from tables, and scaled if the GPU's links are not
    the ones that were measured. The job has `gpus` GPUs and waits for the slowest of them."""

    def __init__(self, gpu: Gpu, tables: Tables, conditions: Conditions, gpus: int = 1):
        super().__init__(gpu, conditions.slowdown)
        self.tables, self.conditions, self.gpus = tables, conditions, gpus
        self._product = cache(self._product_s)

    @cached_property
    def products(self) -> dict[str, Grid]:
        """Times of matmuls by format."""
        names = self.tables.names("product")
        return {name: Grid(self.tables.values["product", name]) for name in names}

    def kernel(self, kernel: Kernel) -> Mapping[str, float]:
        """Seconds of a kernel by part. A matmul or attention takes its measured time, and at least
        the time to move its bytes. Any other kernel takes the time to move its bytes."""
        start, moving = self._memory(kernel.bytes)
        if not kernel.works:
            return {"launches": start, kernel.part: moving} if kernel.bytes else {}
        computing = sum(self.work(work) for work in kernel.works)
        seconds = {kernel.part: max(computing, start + moving)}
        return seconds | {"launches": kernel.further * start} if kernel.further else seconds

    def work(self, work: Work) -> float:
        """Seconds of a matmul, attention or Mamba-2's scan. Other work has no table: it takes the
        seconds of its FLOPs at the dtype's peak."""
        if work.kind == "product":
            return self._product(work)
        if work.kind.startswith(SCAN):
            (rate,) = self.tables.values["scan", self.conditions.scan].values()
            return work.flops / (rate * 1e12)
        return self._attention(work) if work.kind == "attention" else self._least(work)

    def format(self, work: Work) -> str:
        """The format whose table a matmul uses. A format without a table uses FP8's if its peak is
        above that of bf16, and bf16's otherwise."""
        if work.format in self.products:
            return work.format
        return "fp8" if peak(self._measured, work.dtype) > peak(self._measured, "bf16") else "bf16"

    @property
    def _measured(self) -> Gpu:
        """The GPU of the tables. A user may have changed the links of `gpu`."""
        return PLANNED[self.gpu.name.lower()]

    def covers(self, work: Work) -> bool:
        """True if the tables cover the sizes of a kernel's work."""
        if work.kind == "product":
            if (grid := self.products.get(work.format)) is None:
                return False
            return self._profiled_s(work) is not None or grid.covers(self._as_measured(work))
        if work.kind != "attention":
            return not work.flops
        _, _, lengths, head_dims = zip(*self._attention_rates("forward"), strict=True)
        *_, length, head_dim = work.sizes
        return min(lengths) <= length <= max(lengths) and head_dim in head_dims

    def _as_measured(self, work: Work) -> tuple[int, int, int]:
        """m, n and k of a matmul. They come with m and n swapped if the table covers them only this
        way, since the transposed matmul is the same work."""
        m, n, k = padded(work)
        grid = self.products[self.format(work)]
        return (n, m, k) if grid.covers((n, m, k)) and not grid.covers((m, n, k)) else (m, n, k)

    def _profiled_s(self, work: Work) -> float | None:
        """Seconds of a matmul of exactly these sizes in a profiled step. None if no such step is in
        the tables."""
        times = self.tables.values.get(("profiled", work.format), {})
        time = times.get(padded(work))
        return None if time is None else time * MICRO

    def _product_s(self, work: Work) -> float:
        if (profiled := self._profiled_s(work)) is not None:
            return max(profiled, self._least(work))
        measured = self.products[self.format(work)].at(self._as_measured(work)) * MICRO
        seconds = max(measured, self._sustained_s(work))
        if (slower := self._slower_than_table(work)) > 1:
            start, _ = self._memory(0)
            seconds = start + slower * max(0.0, seconds - start)
        return max(seconds, self._least(work))

    def _slower_than_table(self, work: Work) -> float:
        """The factor by which a matmul is slower than one in the format of its table, by the peaks
        of the GPU that was measured. 1 for a format with a table."""
        if work.format in self.products:
            return 1.0
        return self._measured.tflops[self.format(work)] / peak(self.gpu, work.dtype)

    def _sustained_s(self, work: Work) -> float:
        """The least seconds of a matmul in a step, at the rate that the power limit leaves when
        matmuls follow each other. The tables have bursts, because the limit acts only after 50 ms
        or so. The limit holds the rate and not a share of the clocks: on an H100 bursts reach 650
        to 900 TFLOP/s, and all matmuls then keep 680 to 700."""
        if not self.conditions.sustained:
            return 0.0
        rates = self.tables.values["sustained", self.format(work)]
        rate = rates[max(rates)] * 1e12 * slowest(self.conditions.spread, self.gpus)
        return 2 * prod(padded(work)) / rate

    def _least(self, work: Work) -> float:
        return work.flops / (peak(self.gpu, work.dtype) * 1e12)

    def _attention_rates(self, direction: str) -> dict[tuple[int, ...], float]:
        """FLOP/s by sizes. Only the FLOPs of the causal half count."""
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

    def moving(self, kernel: Kernel) -> float:
        return self._memory(kernel.bytes)[1]

    def _memory(self, moved: int) -> tuple[float, float]:
        """The start of a kernel that moves `moved` bytes, and its seconds after the start."""
        points = sorted((s[0], time) for s, time in self.tables.values["memory", "any"].items())
        start = max(0.0, between(points, 0)) * MICRO
        return start, max(0.0, between(points, moved) * MICRO - start)

    def collective(self, collective: Collective) -> float:
        """Seconds of one run without anything else."""
        if collective.crosses_domains(self.gpu):
            return self._between_domains(collective)
        if collective.like == "collective-permute":
            share = self.tables.values["nvlink", "direct"][(2,)]
            seconds = collective.bytes / (share * self.gpu.nvlink * 1e9)
            return START + RING_NVLINK + seconds
        return self._inside(collective.like, collective.group, buffer(collective))

    def _inside(self, kind: str, group: int, whole: int) -> float:
        """Seconds inside an NVLink domain. They follow from the times of the largest measured group
        that is not larger than this one. A larger group takes the same time per byte sent; in a
        ring each further GPU also adds the latency of a step. An all-to-all has no steps."""
        times = self.tables.values["collective", kind]
        known = max((n for n, _ in times if n <= group), default=min(n for n, _ in times))
        points = sorted((b, time) for (n, b), time in times.items() if n == known)
        measured = max(between(points, whole), points[0][1]) * MICRO
        share = (group - 1) / group / ((known - 1) / known)
        further = STEPS[kind] * max(0, group - known)
        return measured * share * self._slower + further * RING_NVLINK

    def _between_domains(self, collective: Collective) -> float:
        """Seconds between domains. A ring passes through all members of a domain before it leaves
        the domain. A small all-reduce uses trees. In a permute and an all-to-all each GPU sends
        directly to the receiver, over its own NIC."""
        group, members = collective.group, collective.domain_members(self.gpu)
        domains = -(-group // members)
        sent = collective.wire_bytes / collective.count
        direct = self.gpu.nic * self.tables.values["network", "direct"][(2,)] * 1e9
        if collective.like == "collective-permute":
            return START + NETWORK + sent / direct
        if collective.like == "all-to-all":
            leaving = collective.bytes * (group - members) / group
            return START + NETWORK + leaving / direct
        latency = (group - domains) * RING_NVLINK + (domains - 1) * NETWORK
        if collective.like == "all-reduce":
            tree = (members - 1) * TREE_NVLINK + log2(domains) * NETWORK
            latency = STEPS["all-reduce"] * min(latency, tree)
        rate = self.gpu.nic * members * self._ring_share(domains) * 1e9
        return START + latency + sent / min(rate, self._nvlink(collective.like))

    def _nvlink(self, kind: str) -> float:
        """Bytes per second that a GPU sends in a ring over NVLink, from the largest transfer of the
        table."""
        times = self.tables.values["collective", kind]
        n, whole = max(times)
        return STEPS[kind] * whole * (n - 1) / n / (times[n, whole] * MICRO) / self._slower

    @property
    def _slower(self) -> float:
        """The factor by which NVLink is slower than on the GPU of the tables."""
        return self._measured.nvlink / self.gpu.nvlink

    def _ring_share(self, domains: int) -> float:
        """The share of the NICs' rate that a ring over domains reaches. It is interpolated in the
        table over the logarithm of the number of domains. Beyond the table it is extrapolated from
        the last two points, but not below `LEAST_SHARE`. An untuned network has at most the share
        that was measured in one."""
        table = self.tables.values["network", "ring"]
        points = sorted((log(sizes[0]), share) for sizes, share in table.items())
        x = log(domains)
        (x0, y0), (x1, y1) = points[-2:]
        share = max(y1 + (y1 - y0) * (x - x1) / (x1 - x0), LEAST_SHARE)
        if x <= x1:
            share = between(points, max(x, points[0][0]))
        untuned = self.tables.values["network", "untuned"].values()
        return share if self.conditions.tuned else min(share, *untuned)


STEPS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 0}
"""How often each kind of collective passes around the ring."""

LEAST_SHARE = 0.1
"""The least share of a NIC's rate that an extrapolation gives."""

FLOPS_PER_SCORE = {"forward": 4, "backward": 10}
"""FLOPs of attention for each score and each element of a head. The forward pass has two matmuls.
The backward pass has four, and computes the scores again."""


def slowest(spread: float, gpus: int) -> float:
    """The speed of the slowest of `gpus` GPUs relative to the median GPU. It is the median of the
    minimum of as many draws from a normal distribution."""
    return 1 - spread * NormalDist().inv_cdf(0.5 ** (1 / gpus))


def padded(work: Work) -> tuple[int, int, int]:
    """m, n and k of a matmul in whole tiles. The matmuls of a batch count as that many more
    rows."""
    batch, *sizes = work.sizes
    m, n, k = (-(-size // tile) * tile for size, tile in zip(sizes, TILE, strict=True))
    return batch * m, n, k


def buffer(collective: Collective) -> int:
    """Bytes of the whole gathered, scattered, reduced or exchanged array."""
    scattered = collective.like == "reduce-scatter"
    return collective.bytes * (collective.group if scattered else 1)
