"""Collectives of a compiled program: their devices, the bytes that they send, and their least
time."""

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise

import numpy as np

from jaxbench.base.hardware import Gpu
from jaxbench.xla.instruction import SOURCE, Instruction, Numbering, Scope, ints, shape_bytes
from jaxbench.xla.rewrites import COLLECTIVES

COUNTS_AS = {"ragged-all-to-all": "all-to-all", "collective-broadcast": "all-gather"}
"""Kinds of collectives that send as much as another kind. A ragged all-to-all sends what its result
can hold. A broadcast in a ring sends as much as an all-gather of its result."""


MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
"""Pattern of replica groups along axes of a mesh: its axes, the order of its devices, and the axes
that a group joins."""


@dataclass(frozen=True)
class Collective:
    """A collective instruction. `bytes` is the size of its result on one device. `groups` are the
    devices of each of its largest replica groups. `count` is how often it runs per step. `source`
    is its JAX operation."""

    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...]
    count: int = 1
    source: str = ""

    @property
    def counts_as(self) -> str:
        """The kind by whose rules we count its bytes and time."""
        return COUNTS_AS.get(self.kind, self.kind)

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of the first group."""
        return self.groups[0]

    @property
    def group(self) -> int:
        """The number of devices in a group."""
        return len(self.devices)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends per step with ring algorithms."""
        n = self.group
        per_run = {
            "all-gather": self.bytes * (n - 1) / n,
            "all-to-all": self.bytes * (n - 1) / n,
            "reduce-scatter": self.bytes * (n - 1),
            "all-reduce": 2 * self.bytes * (n - 1) / n,
            "collective-permute": self.bytes,
        }[self.counts_as]
        return round(per_run * self.count)

    def crosses_domains(self, gpu: Gpu) -> bool:
        """True if a group spans more than one NVLink domain."""
        return self.domain_members(gpu) < self.group

    def domain_members(self, gpu: Gpu) -> int:
        """The number of devices that a group has in one NVLink domain. It is the least over all
        groups and domains, since a step waits for the slowest group."""
        return _domain_members(self.groups, gpu.domain)

    def adapter_bytes(self, gpu: Gpu) -> float:
        """The bytes that one run sends over the network adapter of each GPU; 0 inside a domain.

        A ring passes through all members of a domain before it leaves the domain, and each member
        carries a share of the traffic on its adapter. An all-to-all sends every byte directly to
        its receiver, and bytes for other domains leave through the sender's adapter.
        """
        if not self.crosses_domains(gpu):
            return 0.0
        members = self.domain_members(gpu)
        if self.counts_as == "all-to-all":
            return self.bytes * (self.group - members) / self.group
        return self.wire_bytes / self.count / members

    def uplink_slowdown(self, gpu: Gpu) -> float:
        """The factor by which oversubscribed uplinks slow down what leaves a domain, if all groups
        send at the same time. A ring passes through all its domains below a leaf switch, and only
        one of them sends over the uplinks. In an all-to-all, bytes use the uplinks if their
        receiver is below another leaf. In a permute, pairs use them if they are below different
        leaves."""
        if not gpu.leaf:
            return 1.0
        leaf = gpu.leaf * gpu.domain
        if self.counts_as == "collective-permute":
            pairs = self.groups
            leaving = Counter(pair[0] // leaf for pair in pairs if _apart(pair, gpu.domain))
            rising = Counter(pair[0] // leaf for pair in pairs if _apart(pair, leaf))
            share = max((rising[n] / leaving[n] for n in rising), default=0.0)
            return max(1.0, share * gpu.oversubscription)
        below, members = _domain_members(self.groups, leaf), self.domain_members(gpu)
        if below == self.group:
            return 1.0
        share = members / below
        if self.counts_as == "all-to-all":
            share = (self.group - below) / (self.group - members)
        return max(1.0, share * gpu.oversubscription)

    def seconds(self, gpu: Gpu) -> float:
        """The least time of one run: bytes over bandwidth, without latency. A ring between domains
        is no faster than NVLink, over which it passes inside each domain. Inside a domain the
        switches can sum, so each GPU sends only its own part of an all-reduce."""
        crosses, on_nvlink = self.crosses_domains(gpu), 0.0
        if self.counts_as == "all-reduce" and not crosses:
            on_nvlink = self.bytes / (gpu.nvlink * 1e9)
        elif self.counts_as != "all-to-all" or not crosses:
            on_nvlink = self.wire_bytes / self.count / (gpu.nvlink * 1e9)
        return max(on_nvlink, self.adapter_bytes(gpu) / (gpu.nic * 1e9))


def _apart(pair: tuple[int, ...], size: int) -> bool:
    """True if two devices are in different blocks of so many."""
    return len({device // size for device in pair}) > 1


@cache
def _domain_members(groups: tuple[tuple[int, ...], ...], domain: int) -> int:
    return min(min(Counter(d // domain for d in group).values()) for group in groups)


def completed(i: Instruction, scope: Scope, runs: int = 1) -> Collective | None:
    """The collective whose result this instruction returns: a synchronous collective, or the
    `-done` of an asynchronous one. None for other instructions, and for a single device."""
    kind = i.opcode.removesuffix("-done")
    if kind not in COLLECTIVES:
        return None
    start = i.start(scope)
    every = groups(start.attributes, start.numbering)
    largest = max(map(len, every))
    if largest < 2:
        return None
    of_largest = tuple(group for group in every if len(group) == largest)
    source = start.attribute(SOURCE) or ""
    size = shape_bytes(start.fused or i.shape)
    return Collective(kind, size, of_largest, runs, source)


@cache
def groups(attributes: str, numbering: Numbering | None = None) -> tuple[tuple[int, ...], ...]:
    """Devices of each replica group. `{}` is one group of all. Without a numbering the ids number
    devices. Pairs of `source_target_pairs` are sorted by decreasing distance."""
    ids = _ids(attributes)
    if "source_target_pairs={}" in attributes:
        return ((0,),)
    if numbering is None:
        return ids or ((0,),)
    of, replicas, partitions = numbering.of, numbering.replicas, numbering.partitions
    count = {"partitions": partitions, "devices": replicas * partitions}.get(of, replicas)
    ids = ids or (tuple(range(count)),)
    if of == "devices" or max(map(max, ids)) >= count:  # the latter only in hand-written programs
        return ids
    if of == "partitions":
        return tuple(tuple(r * partitions + p for p in g) for r in range(replicas) for g in ids)
    if of == "replicas":
        return tuple(tuple(r * partitions + p for r in g) for p in range(partitions) for g in ids)
    return tuple(tuple(r * partitions + p for r in g for p in range(partitions)) for g in ids)


def _ids(attributes: str) -> tuple[tuple[int, ...], ...]:
    """The ids of each replica group, from any of XLA's notations: `{{0,1},{2,3}}`, `[2,2]<=[4]`
    with or without `T(..)`, `mesh['a'=2,'b'=2] {'b'}`, or with a part of an axis:
    `mesh['a'=8] {'a':(2)4}`. Empty for `{}`."""
    if mesh := MESH.search(attributes):
        return _mesh_groups(*mesh.groups())
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        dims = ints(iota.group(2))
        order = ints(iota.group(3)) or list(range(len(dims)))
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(order)
        return _tuples(ids.reshape(-1, int(iota.group(1))))
    if pairs := re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", attributes):
        ends = [(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", pairs.group(1))]
        return tuple(sorted(ends, key=lambda pair: -abs(pair[0] - pair[1])))
    listed = re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", attributes)
    return tuple(tuple(ints(g)) for g in re.findall(r"\{([\d, ]+)\}", listed[1] if listed else ""))


def _mesh_groups(mesh: str, order: str | None, joined: str) -> tuple[tuple[int, ...], ...]:
    """The groups along axes of a mesh. `'a':(2)4` is the part of the axis `a` that has 4 members
    and lies below a part of 2 (XLA's sub-axes). `order` has the ids if they are not ascending."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", mesh)}
    parts: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, below, size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?", joined):
        first = int(below or 1)
        parts[name].append((first, first * int(size or sizes[name])))
    dims: list[int] = []
    reduced: list[bool] = []
    for axis, axis_size in sizes.items():
        cuts = {1, axis_size, *chain.from_iterable(parts[axis])}
        for low, high in pairwise(sorted(cuts)):
            dims.append(high // low)
            reduced.append(any(first <= low and high <= last for first, last in parts[axis]))
    ids = np.arange(math.prod(dims))
    if order and (iota := re.fullmatch(r"(?:.*<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?", order)):
        ids = ids.reshape(ints(iota[1])).transpose(ints(iota[2]) or None)  # [2,32]T(1,0)
    elif order:
        ids = np.array(ints(order))
    last = sorted(range(len(dims)), key=reduced.__getitem__)
    group = math.prod(size for size, joins in zip(dims, reduced, strict=True) if joins)
    return _tuples(ids.reshape(dims).transpose(last).reshape(-1, group))


def _tuples(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, ids.tolist()))
