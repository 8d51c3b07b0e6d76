"""Times each GPU and link of the job, all at once if they do not disturb each other."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbench.base.hardware import Gpu
from jaxbench.base.outliers import robust_deviation
from jaxbench.check.judge import BETWEEN_NODES, COLLECTIVES, IN_NODE, SUSTAINED, Rate, node_of
from jaxbench.cluster import job
from jaxbench.cluster.timing import collective_kinds, device_seconds, repeated
from jaxbench.forecast.costs import Measured
from jaxbench.forecast.interpolate import Grid, between
from jaxbench.forecast.tables import Tables
from jaxbench.xla import flags
from jaxbench.xla.collectives import Collective

MATMULS = "bf16 matmuls", "fp8 matmuls"
"""Kinds of rates during which GPUs take the most power."""

Seconds = dict[jax.Device, float]

OF_MEDIAN = 1.253
"""By how much the standard error of a median is larger than that of a mean, with normal noise."""


@dataclass(frozen=True)
class Sizes:
    """Sizes and repetitions. `side` is the side of a square matmul, `moved` the bytes that a
    kernel moves, `sent` the bytes of an exchange or of a collective's whole buffer, and `most` the
    bytes of the largest collective by size. The others say how often something is repeated in a
    row: matmuls, copies in a GPU's memory, and transfers over a link."""

    side: int
    moved: int
    sent: int
    most: int
    matmuls: int
    copies: int
    transfers: int


GPU_SIZES = Sizes(
    side=8192, moved=2**30, sent=2**28, most=2**33, matmuls=300, copies=200, transfers=20
)
"""The matmuls take more than 200 ms in bf16, since the power limit acts only after about 50 ms, and
have a size that the tables have. Copies in memory take 80 ms on an H100, other kinds 14 to 110 ms.
A host may start the last of eight GPUs, or see its end, a millisecond late; at these durations that
does not make the GPU look slow."""

CPU_SIZES = Sizes(side=128, moved=2**16, sent=2**16, most=2**15, matmuls=2, copies=2, transfers=2)


@dataclass(frozen=True)
class Cluster:
    """The devices of a job by node, `[nodes, GPUs]`, and the name of each device. `gpu` and its
    `tables` say what rates to expect; they are None for devices that we do not know."""

    devices: np.ndarray
    names: Mapping[jax.Device, str]
    sizes: Sizes
    gpu: Gpu | None
    tables: Tables | None

    @cached_property
    def mesh(self) -> jax.sharding.Mesh:
        return jax.sharding.Mesh(self.devices, ("nodes", "gpus"))

    @property
    def split(self) -> jax.P:
        """Sharding of arrays whose first dimension is split over all devices."""
        return jax.P(("nodes", "gpus"))

    def place(self, device: jax.Device) -> tuple[int, int]:
        """The number of a device's node, and the number of the device in that node."""
        node, number = np.argwhere(self.devices == device)[0]
        return int(node), int(number)

    @property
    def as_one(self) -> "Cluster":
        """The same devices as if they were all in one node."""
        return replace(self, devices=self.devices.reshape(1, -1))

    def seconds(self, local: Callable[..., Any], times: int, *shapes: Any) -> Seconds:
        """Seconds of one run of a function of local arrays (shape, dtype) on each device of this
        process."""
        return self.prepared(local, times, *shapes)()

    def prepared(
        self, local: Callable[..., Any], times: int, *shapes: Any
    ) -> Callable[[], Seconds]:
        """A function that measures these seconds. The values are random, because others take less
        power: with rows of sines, which are all the same, an H100 ran at 584 of its 700 W."""

        def filled(shape: tuple[int, ...], dtype: Any) -> jax.Array:
            return jax.random.normal(jax.random.key(0), shape).astype(dtype)

        def make() -> tuple[jax.Array, ...]:
            return tuple(filled(*shape) for shape in shapes)

        gpu = jax.default_backend() == "gpu"
        options: Any = {**flags.TUNED, "xla_gpu_autotune_level": "0"} if gpu else {}
        shard = partial(jax.shard_map, mesh=self.mesh, out_specs=self.split, check_vma=False)
        arrays = jax.jit(shard(make, in_specs=()))()
        function = jax.jit(shard(repeated(local, times), in_specs=self.split))
        program = function.lower(*arrays).compile(options)
        return lambda: {d: s / times for d, s in self.timed(program, *arrays).items()}

    def timed(self, program: Callable[..., Any], *arrays: jax.Array) -> Seconds:
        """Seconds of a program on each device of this process. All processes begin together."""
        job.barrier(f"check {next(NUMBERS)}", 60)
        return device_seconds(program, *arrays)


NUMBERS = count()
"""Numbers of the barriers. Each barrier has its own number, which is the same in every process."""


def single(
    cluster: Cluster, kind: str, unit: str, work: float, times: Seconds, expected: float | None
) -> list[Rate]:
    """Rates of single devices: `work` divided by the seconds of each device. `work` is in the unit
    times seconds."""
    return [Rate(kind, unit, (cluster.names[d],), work / s, expected) for d, s in times.items()]


def matmuls(cluster: Cluster, kind: str) -> list[Rate]:
    """Matmuls in bf16 or FP8, at the rate that a GPU sustains under its power limit."""
    run, teraflop, expected = prepared_matmuls(cluster, kind.partition(" ")[0])
    return single(cluster, kind, "TFLOP/s", teraflop, run(), expected)


def prepared_matmuls(
    cluster: Cluster, dtype: str
) -> tuple[Callable[[], Seconds], float, float | None]:
    """A function that measures a matmul in bf16 or FP8, its TFLOPs, and the expected rate."""
    n = cluster.sizes.side
    teraflop, expected = 2 * n**3 / 1e12, None
    if cluster.tables:
        known = cluster.tables.values
        burst = teraflop / (Grid(known["product", dtype]).at((n, n, n)) / 1e6)
        expected = min(burst, *known["sustained", dtype].values())

    def product(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        if dtype == "fp8":
            x, w = (a.astype(jnp.bfloat16) * scale[0] for a in (x, w))
        return jnp.einsum("mk,nk->mn", x, w)

    values = jnp.float8_e4m3fn if dtype == "fp8" else jnp.bfloat16
    arrays = ((n, n), values), ((n, n), values), ((1,), jnp.bfloat16)
    return cluster.prepared(product, cluster.sizes.matmuls, *arrays), teraflop, expected


def sustained(cluster: Cluster, minutes: float) -> list[Rate]:
    """Loads all devices for some minutes: matmuls on each, then an all-reduce over all, again and
    again. The rate of a device is the median of its samples of matmuls."""
    run, teraflop, expected = prepared_matmuls(cluster, "bf16")
    reduce, _ = collective_kinds(cluster.devices.size)["all-reduce"]
    shape = (cluster.sizes.sent // 2,), jnp.bfloat16
    together = cluster.as_one.prepared(reduce, cluster.sizes.transfers, shape)
    samples: dict[jax.Device, list[float]] = defaultdict(list)
    end = time.monotonic() + 60 * minutes
    while job.broadcast(f"check of load {next(NUMBERS)}", lambda: time.monotonic() < end):
        for device, seconds in run().items():
            samples[device].append(seconds)
        if cluster.devices.size > 1:
            together()
    times = {device: median(some) for device, some in samples.items()}
    rates = single(cluster, SUSTAINED, "TFLOP/s", teraflop, times, expected)
    errors = (OF_MEDIAN * robust_deviation(s) / median(s) / len(s) ** 0.5 for s in samples.values())
    return [replace(rate, noise=error) for rate, error in zip(rates, errors, strict=True)]


def copies(cluster: Cluster, kind: str) -> list[Rate]:
    """A kernel that reads and writes memory."""
    moved, expected = cluster.sizes.moved, None
    if cluster.tables:
        known = cluster.tables.values["memory", "any"]
        line = sorted((size, us) for (size,), us in known.items())
        expected = moved / 1e3 / between(line, moved)
    shape = (moved // 4,), jnp.bfloat16
    times = cluster.seconds(jnp.negative, cluster.sizes.copies, shape)
    return single(cluster, kind, "GB/s", moved / 1e9, times, expected)


def from_host(cluster: Cluster, kind: str) -> list[Rate]:
    """Copies from the host's pinned memory, to all GPUs at once."""
    if jax.default_backend() != "gpu":
        return []
    size, times = cluster.sizes.sent, cluster.sizes.transfers
    on_device = jax.NamedSharding(cluster.mesh, cluster.split)
    pinned = on_device.with_memory_kind("pinned_host")

    def zeros() -> jax.Array:
        return jnp.zeros(cluster.devices.size * size, jnp.uint8)

    x = jax.jit(zeros, out_shardings=pinned)()
    program = jax.jit(lambda x: x, in_shardings=pinned, out_shardings=on_device).lower(x).compile()

    def copied(x: jax.Array) -> jax.Array:
        for _ in range(times - 1):
            program(x)
        return program(x)

    expected = (cluster.gpu and cluster.gpu.host) or None
    return single(cluster, kind, "GB/s", times * size / 1e9, cluster.timed(copied, x), expected)


def collectives(cluster: Cluster, kind: str) -> list[Rate]:
    """A collective inside each node, in all nodes at once. The rate counts the bytes that one GPU
    sends."""
    n, name = cluster.devices.shape[1], kind.partition(" ")[0]
    if n == 1:
        return []
    size = cluster.sizes.sent // (2 * n) * 2 * n  # whole elements for each of n GPUs
    function, buffers = collective_kinds(n)[name]
    work, expected = size * (n - 1) / n / 1e9, None
    if cluster.tables and (us := cluster.tables.values["collective", name].get((n, size))):
        expected = work / us * 1e6
    shape = (buffers * size // 2 // n,), jnp.bfloat16
    times = cluster.seconds(function, cluster.sizes.transfers, shape)
    return [
        Rate(kind, "GB/s", (node_of(cluster.names[d]),), work / s, expected)
        for d, s in times.items()
    ]


def pairs(number: int, distance: int) -> list[tuple[int, int]]:
    """Who sends to whom if each of `number` participants exchanges with the one whose number
    differs by the bits of `distance`. Participants without a partner rest."""
    return [(n, n ^ distance) for n in range(number) if n ^ distance < number]


def distances(kind: str, number: int) -> list[int]:
    """The distances of the rounds of exchanges of a kind.

    In a node all distances are used. Between nodes they are 1, 2, 4 .., and 3. Without 3 the nodes
    would form two groups whose members have partners only in the other group, and we could not tell
    which group is slow.
    """
    bits = (number - 1).bit_length()
    if kind == IN_NODE:
        return [*range(1, 1 << bits)]
    return sorted({1 << bit for bit in range(bits)} | ({3} if number > 2 else set()))


def exchanges(cluster: Cluster, kind: str) -> list[Rate]:
    """Exchanges of each GPU with others of its node, or with GPUs of the same number in other
    nodes, in rounds at the `distances`."""
    between, size = kind == BETWEEN_NODES, cluster.sizes.sent
    axis, link = ("nodes", "network") if between else ("gpus", "nvlink")
    number, expected = cluster.mesh.shape[axis], None
    if cluster.gpu and cluster.tables and (shares := cluster.tables.values[link, "direct"]):
        peak = cluster.gpu.nic if between else cluster.gpu.nvlink
        expected = max(shares.values()) * peak
    found = []
    for distance in distances(kind, number):
        perm = pairs(number, distance)
        send = partial(jax.lax.ppermute, axis_name=axis, perm=perm)
        times = cluster.seconds(send, cluster.sizes.transfers, ((size // 2,), jnp.bfloat16))
        partners = dict(perm)
        for device, seconds in times.items():
            row, column = cluster.place(device)
            partner = partners.get(row if between else column)
            if partner is not None:
                other = cluster.devices[(partner, column) if between else (row, partner)]
                a, b = sorted((cluster.names[device], cluster.names[other]))
                far = distance if between else 0
                found.append(Rate(kind, "GB/s", (a, b), size / 1e9 / seconds, expected, far))
    return found


def bus_factor(kind: str, n: int) -> float:
    """The busbw of nccl-tests over its algbw, among n GPUs: the part of the whole buffer that each
    GPU has to send (nccl-tests, doc/PERFORMANCE.md)."""
    return (2 if kind == "all-reduce" else 1) * (n - 1) / n


def by_size(cluster: Cluster) -> list[tuple[str, int, float]]:
    """Collectives over all devices, as (kind, bytes, seconds). The bytes are of the whole buffer,
    8 B and then eight times as many each time, as far as four buffers fit in memory. The seconds
    are those of the slowest device of this process."""
    one, n = cluster.as_one, cluster.devices.size
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = min(job.all_gather("check of memory", stats.get("bytes_limit", 2**40)))
    found = []
    for kind, (function, buffers) in collective_kinds(n).items() if n > 1 else ():
        size = 8
        while size <= min(cluster.sizes.most, limit // 4):
            shares = 1 if kind == "all-reduce" else n
            if elements := size // 2 // shares * shares:
                times = min(200, max(5, cluster.sizes.sent * cluster.sizes.transfers // size))
                if jax.default_backend() != "gpu":
                    times = 1  # XLA for CPUs takes a collective out of its loop
                operand = (buffers * elements // n,), jnp.bfloat16
                seconds = max(one.seconds(function, times, operand).values())
                found.append((kind, 2 * elements, seconds))
            size *= 8
    return found


def expected_seconds(
    kind: str, size: int, devices: tuple[int, ...], gpu: Gpu, tables: Tables
) -> float:
    """Seconds that a forecast gives to a collective over devices, which are numbered from the first
    GPU of the first NVLink domain. `size` is that of `by_size`."""
    n = len(devices)
    result = size // n if kind == "reduce-scatter" else size
    return Measured(gpu, tables).collective(Collective(kind, result, (devices,)))


KINDS: dict[str, Callable[[Cluster, str], list[Rate]]] = {
    **dict.fromkeys(MATMULS, matmuls),
    "memory": copies,
    "host to GPU": from_host,
    **dict.fromkeys(COLLECTIVES, collectives),
    IN_NODE: exchanges,
    BETWEEN_NODES: exchanges,
}
"""Functions that measure the rates of each kind at the devices of this process."""

OTHERS = [kind for kind in KINDS if kind not in MATMULS]
