"""The forecast's cost model, made of measured kernels and links. The bound's cost model is
`xla.schedule.Roofline`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from math import log, log2, prod

from jaxbench.base.hardware import PLANNED, Gpu
from jaxbench.forecast.interpolate import Grid, between
from jaxbench.forecast.tables import Sizes, Tables
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import GROUPED, Work
from jaxbench.xla.schedule import Roofline, peak, work_peak
from jaxbench.xla.timeline import Kernel

TILE = (128, 128, 64)
"""Tile of a matmul on Hopper's tensor cores, in elements along m, n and k. Sizes are padded to
it."""

MICRO = 1e-6

Width = tuple[int, ...]
"""The head dims of keys and of values."""

SCAN = "ssd_"
"""The names of the scan's kernels begin with this."""

START, RING_NVLINK, TREE_NVLINK = 8.4 * MICRO, 3.4 * MICRO, 4.0 * MICRO
"""Latencies of NCCL's protocol for large messages, in seconds: the start of a collective, and each
step of a ring and of a tree over NVLink. NCCL chooses its algorithms by these constants, and by
`Gpu.latency` (NVIDIA/nccl src/graph/tuning.cc)."""


TREE_SHARE = 0.92
"""The share of a ring's rate that NCCL expects of a tree (src/graph/tuning.cc)."""


@dataclass(frozen=True)
class Conditions:
    """Effects that tables of single kernels do not have.

    A forecast has the values here. `slowdown` is the factor on the time of a kernel that overlaps
    with a collective: the median of what was measured on H100s (`docs/design/forecast.md`, *Kernels
    next to collectives*). `sustained` says that clocks are under the power limit; otherwise they
    are as high as in bursts.
    """

    slowdown: float = 1.5
    sustained: bool = True


EXPECTED = Conditions()

WEIGHTS = 0.73
"""The rate of grouped gradients of weights relative to the other grouped matmuls of the same sizes,
for GPUs without a table of them. It is the geometric mean of our own kernels in four steps of an
H100, from 0.64 to 0.83."""


class Measured(Roofline):
    """The cost model of a forecast. Times are from tables, and scaled if the GPU's links are not
    the ones that were measured."""

    hides_copies = False

    def __init__(self, gpu: Gpu, tables: Tables, conditions: Conditions = EXPECTED):
        super().__init__(gpu, conditions.slowdown)
        self.tables, self.conditions = tables, conditions
        self._product = cache(self._product_s)
        self._grouped = cache(self._grouped_s)
        self._transfers = cache(self._measured_transfers)

    @cached_property
    def products(self) -> dict[str, Grid]:
        """Times of matmuls by format."""
        names = self.tables.names("product")
        return {name: Grid(self.tables.values["product", name]) for name in names}

    def kernel(self, kernel: Kernel) -> Mapping[str, float]:
        """Seconds of a kernel by part. A matmul or attention takes its measured time, and at least
        the time to move its bytes. Any other kernel takes the time to move its bytes."""
        if not kernel.works:
            start, moving = self._memory(kernel.bytes // kernel.launches, kernel.makes_fp8)
            seconds = {"launches": kernel.launches * start, kernel.part: kernel.launches * moving}
            return seconds if kernel.bytes else {}
        start, moving = self._memory(kernel.bytes, kernel.makes_fp8)
        computing = sum(self.work(work) for work in kernel.works)
        seconds = {kernel.part: max(computing, start + moving)}
        further = kernel.launches - 1
        return seconds | {"launches": further * start} if further else seconds

    def work(self, work: Work) -> float:
        """Seconds of a matmul, attention or Mamba-2's scan. Other work has no table: it takes the
        seconds of its FLOPs at the dtype's peak."""
        if work.kind == "product":
            return self._product(work)
        if work.kind in GROUPED:
            return self._grouped(work)
        if work.kind.startswith(SCAN):
            (rate,) = self.tables.values["scan", work.kind.removeprefix(SCAN)].values()
            return work.flops / (rate * 1e12) * self._peak_ratio(work)
        return self._attention(work) if work.kind == "attention" else self._least(work)

    def table(self, work: Work) -> str:
        """The kind of the table that work uses, and the format or the head dims in it."""
        if work.kind == "product":
            return f"product {self.format(work)}"
        if work.kind == "attention":
            return "attention {}x{}".format(*self.width(work))
        if work.kind in GROUPED:
            return f"{work.kind} {work.format}"
        return "scan" if work.kind.startswith(SCAN) else work.kind

    def format(self, work: Work) -> str:
        """The format whose table a matmul uses. A format without a table uses FP8's if its peak is
        above that of bf16, and bf16's otherwise. A GPU that does not multiply blocks with scales of
        their own casts them to bf16."""
        if work.format in self.products:
            return work.format
        if work.blocks and work.format not in self._measured.tflops:
            return "bf16"
        return "fp8" if peak(self._measured, work.dtype) > peak(self._measured, "bf16") else "bf16"

    @property
    def _measured(self) -> Gpu:
        """The GPU of the tables. A user may have changed the links and the memory of `gpu`."""
        return PLANNED[self.gpu.name.lower()]

    def _peak_ratio(self, work: Work) -> float:
        """The peak of the GPU that was measured over that of this one, which a user may have
        changed."""
        return work_peak(self._measured, work) / work_peak(self.gpu, work)

    def covers(self, work: Work) -> bool:
        """True if the tables cover the sizes of a kernel's work, on this GPU."""
        if work.flops and self._peak_ratio(work) != 1:
            return False
        if work.kind == "product":
            grid = self.products.get(work.format)
            return grid is not None and grid.covers(self._as_measured(work))
        if work.kind in GROUPED:
            times = self.tables.values.get((work.kind, work.format))
            # The number of groups has no influence.
            one_group = {sizes[1:]: time for sizes, time in (times or {}).items()}
            return bool(one_group) and Grid(one_group).covers(work.sizes[1:])
        if work.kind != "attention":
            return not work.flops
        times = self.tables.values["attention", direction(work)]
        return work.dtype == "bf16" and spans(times, work.sizes[3:], work.sizes[2])

    def _as_measured(self, work: Work) -> tuple[int, int, int]:
        """m, n and k of a matmul. They come with m and n swapped if only this way none is above the
        table, since the transposed matmul is the same work."""
        m, n, k = padded(work)
        grid = self.products[self.format(work)]
        swapped = grid.ends_below((m, n, k)) and not grid.ends_below((n, m, k))
        return (n, m, k) if swapped else (m, n, k)

    def _product_s(self, work: Work) -> float:
        measured = self.products[self.format(work)].at(self._as_measured(work)) * MICRO
        seconds = max(measured, self._sustained_s(work))
        if (slower := self._slower_than_table(work)) != 1:
            start, _ = self._memory(0)
            seconds = start + slower * max(0.0, seconds - start)
        return max(seconds, self._least(work))

    def _slower_than_table(self, work: Work) -> float:
        """The factor by which a matmul is slower than in the table. It follows from the peaks of
        its format and of the table's format, and of this GPU and of the one that was measured. In
        its own format a matmul is no faster than in the table's."""
        other = 1.0
        if work.format not in self.products:
            own = work_peak(self._measured, work)
            other = max(1.0, self._measured.tflops[self.format(work)] / own)
        return other * self._peak_ratio(work)

    def _grouped_s(self, work: Work) -> float:
        """Seconds of a grouped matmul. It is no faster than a plain one of the same size. Without a
        table of their own, gradients of weights follow from the other grouped matmuls."""
        kind, rate = work.kind, 1.0
        if kind == "grouped_weights" and (kind, work.format) not in self.tables.values:
            kind, rate = "grouped", WEIGHTS
        plain = self._product(replace(work, kind="product"))
        similar = self._by_similar_weight(kind, work)
        return plain if similar is None else max(plain, similar / rate)

    def _by_similar_weight(self, kind: str, work: Work) -> float | None:
        """Seconds of a grouped matmul at the measured rate of the most similar [k, n], by the
        logarithm of the rows of a group. The number of groups has no influence. The times of
        experts with gates are of matmuls that are n and 2 n wide. MXFP8 takes the table of FP8 if
        it has none of its own."""
        names = [work.format, "fp8"] if work.format == "mxfp8" else [work.format]
        times = next((t for name in names if (t := self.tables.values.get((kind, name)))), None)
        if times is None:
            return None
        _, rows, wide, deep = work.sizes

        def distance(n: int, k: int) -> float:
            return min(abs(log(n / wide)), abs(log(2 * n / wide))) + abs(log(k / deep))

        _, similar = min((distance(n, k), (n, k)) for _, _, n, k in times)
        points = sorted(
            (log(s[1]), 2 * prod(s) / (t * MICRO)) for s, t in times.items() if s[2:] == similar
        )
        rate = between(points, min(max(log(rows), points[0][0]), points[-1][0]))
        return work.flops / rate * self._peak_ratio(work)

    def _sustained_s(self, work: Work) -> float:
        """The least seconds of a matmul in a step, at the rate that the power limit leaves when
        matmuls follow each other. The tables have bursts, because the limit acts only after 50 ms
        or so. The limit holds the rate and not a share of the clocks: on an H100 bursts reach 650
        to 900 TFLOP/s, and all matmuls then keep 680 to 700."""
        if not self.conditions.sustained:
            return 0.0
        rates = self.tables.values["sustained", self.format(work)]
        return 2 * prod(padded(work)) / (rates[max(rates)] * 1e12)

    def _least(self, work: Work) -> float:
        return work.flops / (work_peak(self.gpu, work) * 1e12)

    def _attention(self, work: Work) -> float:
        """Seconds of causal attention by the table, at the share of its rate that attention keeps
        in a step."""
        width, length = self.width(work), work.sizes[2]
        times = self.tables.values["attention", direction(work)]
        reached = rate(times, width, length, backward=work.backward)
        kept = self.tables.values.get(("kept", direction(work)), {})
        share = next(iter(kept.values()), 1.0) if self.conditions.sustained else 1.0
        return half_scores(work) / reached / share * self._peak_ratio(work)

    def width(self, work: Work) -> Width:
        """The head dims of the table by which attention is forecast: its own ones, or else those
        whose sum is nearest in proportion."""
        known = {(k, v) for *_, k, v in self.tables.values["attention", direction(work)]}
        *_, k, v = work.sizes
        if (k, v) in known:
            return k, v
        return min(known, key=lambda width: (abs(log(sum(width) / (k + v))), width))

    def _memory(self, moved: int, makes_fp8: bool = False) -> tuple[float, float]:
        """The start of a kernel that moves `moved` bytes, and its seconds after the start. Kernels
        that make FP8 are slower. The seconds after the start are in proportion to the bandwidth, if
        it is not the one that was measured."""
        times = self.tables.values["memory", "fp8" if makes_fp8 else "any"]
        points = sorted((s[0], time) for s, time in times.items())
        start = max(0.0, between(points, 0)) * MICRO
        moving = max(0.0, between(points, moved) * MICRO - start)
        return start, moving * self._measured.bandwidth / self.gpu.bandwidth

    def collective(self, collective: Collective) -> float:
        """Seconds of one run without anything else."""
        if collective.crosses_domains(self.gpu):
            return self._between_domains(collective)
        if collective.counts_as == "collective-permute":
            share = self.tables.values["nvlink", "direct"][(2,)]
            seconds = collective.bytes / (share * self.gpu.nvlink * 1e9)
            return START + RING_NVLINK + seconds
        return self._inside(collective.counts_as, collective.group, buffer(collective))

    def _inside(self, kind: str, group: int, whole: int) -> float:
        """Seconds inside an NVLink domain, scaled from two measured groups: the largest that is no
        larger than this one and was measured at such a size, and the smallest that is no smaller.
        The shorter time counts, since NCCL takes the faster algorithm."""
        times = self.tables.values["collective", kind]
        groups = {n for n, _ in times}
        whole = max(whole, min(size for _, size in times))
        smaller = max((n for n, size in times if n <= group and size <= whole), default=min(groups))
        larger = min((n for n in groups if n >= group), default=smaller)
        return min(self._scaled(kind, n, group, whole) for n in (smaller, larger))

    def _scaled(self, kind: str, known: int, group: int, whole: int) -> float:
        """Seconds by the times of a measured group. Another group takes the same time per byte
        sent. In a ring each further GPU also adds the latency of a step. An all-to-all has no
        steps."""
        points = self._transfers(kind, known)
        measured = max(between(points, whole), points[0][1]) * MICRO
        share = (group - 1) / group / ((known - 1) / known)
        further = STEPS[kind] * max(0, group - known)
        return measured * share * self._slower + further * RING_NVLINK

    def _measured_transfers(self, kind: str, group: int) -> list[tuple[int, float]]:
        """Sizes and times of a group, in which none takes longer than a larger one."""
        times = self.tables.values["collective", kind]
        points = sorted((size, time) for (n, size), time in times.items() if n == group)
        least = [*accumulate((time for _, time in reversed(points)), min)][::-1]
        return [(size, time) for (size, _), time in zip(points, least, strict=True)]

    def _between_domains(self, collective: Collective) -> float:
        """Seconds between domains. A ring passes through all members of a domain before it leaves
        the domain. An all-reduce uses trees if they are faster. In a permute and an all-to-all each
        GPU sends directly to the receiver, over its own NIC."""
        group, members = collective.group, collective.domain_members(self.gpu)
        domains, leaving = -(-group // members), collective.adapter_bytes(self.gpu)
        nic, network = self.gpu.nic / collective.uplink_slowdown(self.gpu), self.gpu.latency * MICRO
        if collective.counts_as in ("collective-permute", "all-to-all"):
            direct = nic * self.tables.values["network", "direct"][(2,)] * 1e9
            return START + network + leaving / direct
        on_nvlink = collective.wire_bytes / collective.count / self._nvlink(collective.counts_as)
        share = share_of(self.tables.values["network", "ring"], domains)
        sending = max(on_nvlink, leaving / (nic * share * 1e9))
        ring = (group - domains) * RING_NVLINK + (domains - 1) * network
        if collective.counts_as != "all-reduce":
            return START + ring + sending
        tree = (members - 1) * TREE_NVLINK + log2(domains) * network
        passes = STEPS["all-reduce"]
        return START + min(passes * ring + sending, passes * tree + sending / TREE_SHARE)

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


def share_of(table: Mapping[Sizes, float], domains: int) -> float:
    """The share of the NICs' rate that a ring over domains reaches after its latencies,
    interpolated over the logarithm of their number. Beyond the table it is extrapolated from the
    last two points, but not below `LEAST_SHARE`."""
    points = sorted((log(sizes[0]), share) for sizes, share in table.items())
    x = log(domains)
    (x0, y0), (x1, y1) = points[-2:]
    if x <= x1:
        return between(points, max(x, points[0][0]))
    return max(y1 + (y1 - y0) * (x - x1) / (x1 - x0), LEAST_SHARE)


STEPS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 0}
"""How often each kind of collective passes around the ring."""

LEAST_SHARE = 0.1
"""The least share of a NIC's rate that an extrapolation gives."""

BASE = (128, 128)
"""The head dims that are measured at most lengths."""


def spans(times: Mapping[Sizes, float], width: Width, length: int) -> bool:
    """True if attention of a width was measured at this length, or at a shorter and a longer
    one."""
    lengths = [sizes[2] for sizes in times if sizes[3:] == width]
    return bool(lengths) and min(lengths) <= length <= max(lengths)


def direction(work: Work) -> str:
    """The name of attention's pass in the tables."""
    return "backward" if work.backward else "forward"


def rate(times: Mapping[Sizes, float], width: Width, length: int, *, backward: bool) -> float:
    """FLOP/s of attention with a width that is in a table, interpolated over the logarithm of the
    length. Beyond the lengths of this width, the rate changes as that of the base width does, and
    beyond those not at all."""
    points = sorted(
        (sizes[2], half_scores(Work("attention", "bf16", 0, sizes, backward)) / (time * MICRO))
        for sizes, time in times.items()
        if sizes[3:] == width
    )
    nearest = min(max(length, points[0][0]), points[-1][0])
    reached = between([(log(known), value) for known, value in points], log(nearest))
    if nearest == length or width == BASE or all(sizes[3:] != BASE for sizes in times):
        return reached
    at_length, at_nearest = (rate(times, BASE, at, backward=backward) for at in (length, nearest))
    return reached * at_length / at_nearest


def half_scores(work: Work) -> float:
    """FLOPs of the causal half of attention. For each score, the forward pass has a matmul over the
    head dim of keys and one over that of values. The backward pass has two of each, and computes
    the scores again."""
    batch, heads, length, key, value = work.sizes
    per_score = 2 * (3 * key + 2 * value) if work.backward else 2 * (key + value)
    return per_score * batch * heads * length * length / 2


def padded(work: Work) -> tuple[int, int, int]:
    """m, n and k of a matmul in whole tiles. The matmuls of a batch count as that many more
    rows."""
    batch, *sizes = work.sizes
    m, n, k = (-(-size // tile) * tile for size, tile in zip(sizes, TILE, strict=True))
    return batch * m, n, k


def buffer(collective: Collective) -> int:
    """Bytes of the whole gathered, scattered, reduced or exchanged array."""
    scattered = collective.counts_as == "reduce-scatter"
    return collective.bytes * (collective.group if scattered else 1)
