"""Judges what is slow or broken in a job, from measured rates and from what its hosts report. Needs
no JAX.

Each rate is compared with the rates of the same kind in the job, and the median of each kind with
the tables.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Any

from jaxbench.base.errors import listed
from jaxbench.base.outliers import DEVIATIONS, GPU_SPREAD, LINK_SPREAD, outliers, repeated_spread
from jaxbench.cluster import nvml

SUSTAINED = "sustained bf16 matmuls"
"""The kind of the rates of a long load."""

GPU_KINDS = "bf16 matmuls", "fp8 matmuls", "memory", SUSTAINED
"""Kinds of rates that depend on a single GPU."""

BELOW_TABLE = 0.25
"""Distance from a table at which we make a remark. Two independent benchmarks of the same large
matmuls on H100 differ by less in 99 of 100 cases (aiconfigurator-core 0.12.0, TensorRT-LLM's and
SGLang's in bf16)."""

SKEW_S, SLOW_FILE_S = 1.0, 1.0
"""Difference of hosts' clocks, and seconds to make a small file last, at which we make a remark.
With more skew the lines of two logs are in the wrong order. With slower files the write of a record
can delay a step."""

PATH = "both ends are fast with others, so look at the path between them: cable or switch ports"
EITHER = "either end may be bad, so leave one of the two out and check again"
"""What we say of a slow link: `PATH` if both of its ends have fast links, else `EITHER`."""

IN_NODE, BETWEEN_NODES = "exchange in a node", "exchange between nodes"
"""Kinds of the rates of links. The second kind is the network."""

COLLECTIVES = "all-gather in a node", "reduce-scatter in a node", "all-to-all in a node"
"""Kinds of the rates of all GPUs of a node together."""


@dataclass(frozen=True)
class Rate:
    """A measured rate: its kind and unit, where it was measured, and what the tables say. `ends`
    names a GPU or a node, or both ends of a link; a GPU is `NODE gpu N`. Links are compared with
    links between nodes that are as far apart in the job (`distance`). `noise` is the relative
    standard error of a rate that is the median of repeated samples."""

    kind: str
    unit: str
    ends: tuple[str, ...]
    value: float
    expected: float | None = None
    distance: int = 0
    noise: float | None = None


@dataclass(frozen=True)
class Finding:
    """A fault or a remark, and where it is: a GPU, a link or a node. `cause` is one of
    `base.errors.STATUS`; it is None for a remark, which fails no check. `nodes` are the nodes to
    leave out."""

    where: str
    what: str
    cause: str | None = None
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def node_of(where: str) -> str:
    """The node of a GPU, given the GPU's name."""
    return where.partition(" ")[0]


def by_kind(rates: Iterable[Rate]) -> dict[str, list[Rate]]:
    """Groups the rates by kind. Several GPUs measure the same link or node; the greatest of their
    rates counts, since GPUs that began earlier also waited for the others."""
    greatest: dict[tuple[str, tuple[str, ...]], Rate] = {}
    for rate in rates:
        key = rate.kind, rate.ends
        if key not in greatest or rate.value > greatest[key].value:
            greatest[key] = rate
    kinds: dict[str, list[Rate]] = defaultdict(list)
    for rate in greatest.values():
        kinds[rate.kind].append(rate)
    return kinds


def to_json(rates: Iterable[Rate]) -> dict[str, dict[str, Any]]:
    """Rates `by_kind` for check.json. The processes of a check send each other the same."""
    return {
        kind: {
            "unit": some[0].unit,
            "expected": some[0].expected,
            "median": median(rate.value for rate in some),
            "values": {" - ".join(rate.ends): rate.value for rate in some},
            "distances": {" - ".join(r.ends): r.distance for r in some if r.distance},
            "noise": {" - ".join(r.ends): r.noise for r in some if r.noise is not None},
        }
        for kind, some in by_kind(rates).items()
    }


def from_json(kinds: Mapping[str, Mapping[str, Any]]) -> Iterator[Rate]:
    """The rates that `to_json` wrote."""
    for kind, entry in kinds.items():
        for ends, value in entry["values"].items():
            where, far = tuple(ends.split(" - ")), entry.get("distances", {}).get(ends, 0)
            noise = entry.get("noise", {}).get(ends)
            yield Rate(kind, entry["unit"], where, value, entry["expected"], far, noise)


def slow(rates: Sequence[Rate]) -> dict[tuple[str, ...], tuple[float, str]]:
    """The slow GPUs, nodes or links of one kind, by their ends: (by what share they are below the
    median, how the message ends)."""
    if len(rates[0].ends) > 1:
        return slow_links(rates)
    spread = GPU_SPREAD if rates[0].kind in GPU_KINDS else LINK_SPREAD
    if len(noise := [rate.noise for rate in rates if rate.noise is not None]) == len(rates):
        spread = repeated_spread([rate.value for rate in rates], noise)
    found = outliers({rate.ends: rate.value for rate in rates}, spread, low=True)
    return {ends: (1 - ratio, "") for ends, ratio in found.items()}


def slow_links(rates: Sequence[Rate]) -> dict[tuple[str, ...], tuple[float, str]]:
    """Finds the ends of slow links that are at fault, and the slow links for which no end is at
    fault.

    An end is as fast as its fastest link, since one good link proves that the end is healthy. We
    compare the ends by this speed. A slow end is at fault if one of its partners is not slow, or if
    all its partners are in its own node. An end is also at fault if it is slow with most of its
    partners, at least two, which are fast with others.
    """
    links: dict[tuple[str, ...], float] = {}
    for distance in {rate.distance for rate in rates}:
        some = {rate.ends: rate.value for rate in rates if rate.distance == distance}
        usual = sorted(some.values())[3 * len(some) // 4]  # a node's half of four may be slow
        links |= {ends: value / usual for ends, value in some.items()}
    own: dict[str, dict[str, float]] = defaultdict(dict)
    for (a, b), value in links.items():
        own[a][b] = own[b][a] = value
    slow_ends = outliers({e: max(some.values()) for e, some in own.items()}, LINK_SPREAD, low=True)
    found: dict[tuple[str, ...], tuple[float, str]] = {}
    for end, ratio in slow_ends.items():
        inside = {*map(node_of, own[end])} == {node_of(end)}
        if inside or own[end].keys() - slow_ends.keys():
            each = f", with each of {len(own[end])} partners" if len(own[end]) > 1 else ""
            found[(end,)] = 1 - ratio, each
    rest = {ends: value for ends, value in links.items() if not any((e,) in found for e in ends)}
    other = outliers(rest, LINK_SPREAD, low=True)
    for end in own:
        mine = [ends for ends in other if end in ends and not slow_ends.keys() & {*ends}]
        if len(own[end]) / 2 < len(mine) > 1:
            share = 1 - max(other[ends] for ends in mine)
            found[(end,)] = share, f", with {len(mine)} of {len(own[end])} partners"
    for ends, ratio in other.items():
        if not any((end,) in found for end in ends):
            fast = min(max(own[end].values()) for end in ends) > 1 - DEVIATIONS * LINK_SPREAD
            found[ends] = 1 - ratio, f"; {PATH if fast else EITHER}"
    return found


def rate_findings(kind: str, rates: Sequence[Rate]) -> Iterator[Finding]:
    """Slow GPUs, links and nodes by the rates of a kind. If all GPUs of a node are slow, or all
    links between two nodes, the nodes are named instead."""
    found = slow(rates)
    gpus = Counter(map(node_of, {end for rate in rates for end in rate.ends}))
    of_nodes: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
    for ends in found:
        of_nodes[tuple(map(node_of, ends))].append(ends)
    for nodes, some in of_nodes.items():
        inside = len({*nodes}) < len(nodes)  # links between GPUs of one node
        if nodes not in some and not inside and 1 < gpus[nodes[0]] == len(some):
            found[nodes] = max(found.pop(ends) for ends in some)
    for ends, (share, how) in found.items():
        what = f"{kind} {100 * share:.0f} % below the median of {len(rates)}{how}"
        nodes = tuple(dict.fromkeys(map(node_of, ends)))
        cause = "network" if kind == BETWEEN_NODES else "gpu"
        yield Finding(" - ".join(ends), what, cause, nodes if len(nodes) == 1 else ())


def table_findings(kinds: Mapping[str, list[Rate]]) -> Iterator[Finding]:
    """Kinds whose median is far below the tables. These findings are about the job as a whole."""
    for kind, rates in kinds.items():
        middle, unit = median(rate.value for rate in rates), rates[0].unit
        if below := far_below(middle, rates[0].expected):
            where = "all" if len(rates) > 1 else rates[0].ends[0]
            yield Finding(where, f"{kind} {middle:.0f} {unit}, {below}")


def size_findings(sizes: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Collectives over all GPUs that are far below the forecast at their largest size, where rates
    of links count and latencies do not."""
    for line in largest(sizes).values():
        if below := far_below(line["busbw"], line["expected"]):
            what = f"{line['collective']} of {line['bytes'] / 1e9:.3g} GB"
            yield Finding("all", f"{what}: busbw {line['busbw']:.0f} GB/s, {below}")


def far_below(rate: float, expected: float | None) -> str:
    """How far a rate is below what is expected. Empty if it is not far below, or if nothing is
    expected."""
    if not expected or rate >= (1 - BELOW_TABLE) * expected:
        return ""
    return f"{100 * (1 - rate / expected):.0f} % below the expected {expected:.0f}"


def largest(sizes: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The line of the largest size of each collective."""
    return {line["collective"]: line for line in sizes}


def fall_findings(reports: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Remarks on the largest collectives over more and more nodes: the first number of nodes at
    which one is far slower than over fewer, although the forecast is not. No node is at fault.
    Without a forecast all-to-all is left out, since more of it leaves the nodes if they are more.
    """
    best: dict[str, tuple[float, Mapping[str, Any], int]] = {}
    fallen = set()
    for report in reports:
        nodes = report["nodes"]
        for kind, line in largest(report.get("sizes") or ()).items():
            share = line["busbw"] / (line["expected"] or 1.0)
            most, at, fewer = best.get(kind, (0.0, line, nodes))
            if share > most:
                best[kind] = share, line, nodes
            known = line["expected"] or kind != "all-to-all"
            if known and kind not in fallen and share < (1 - BELOW_TABLE) * most:
                fallen.add(kind)
                size, rates = f"{line['bytes'] / 1e9:.3g} GB", (line["busbw"], at["busbw"])
                yield Finding(
                    f"{nodes} nodes",
                    f"{kind} of {size}: busbw {rates[0]:.3g} GB/s, but {rates[1]:.3g} over {fewer} "
                    "nodes; look at the switches between them, their routing and SHARP",
                )


def gpu_findings(gpus: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Findings from the driver's facts and from samples under load, which are None if the driver
    does not report them. If all GPUs lack the same links or have the same low limit, the cluster is
    built that way, and it is at most a remark."""
    keys = "nvlinks_up", "pcie_lanes", "power_limit_w"
    most = {key: usual(gpu.get(key) for gpu in gpus.values()) for key in keys}
    cut_off = median([len(gpu.get("unreached") or ()) for gpu in gpus.values()] or [0])
    for where, facts in gpus.items():
        gpu: dict[str, Any] = defaultdict(lambda: None, facts)
        fewer = {key for key in keys if gpu[key] is not None and gpu[key] < most[key]}
        down = (gpu["nvlinks"] or 0) - (gpu["nvlinks_up"] or 0)
        unreached, xids = gpu["unreached"] or (), gpu["xids"] or ()
        held = [reason for reason in gpu["reasons"] or () if reason in nvml.reasons(nvml.HELD)]
        limit, default = gpu["power_limit_w"] or 0, gpu["power_default_w"] or 0
        power = f"power limit {limit:.0f} W instead of {default:.0f}"
        clocks = f"{gpu['sm_mhz']} of {gpu['sm_max_mhz']} MHz under load"
        faults = (
            ("nvlinks_up" in fewer, f"{down} of {gpu['nvlinks']} NVLinks are down"),
            (len(unreached) > cut_off, f"no NVLink to gpu {', '.join(map(str, unreached))}"),
            ("power_limit_w" in fewer, power),
            (held, f"{clocks}: {', '.join(held)}"),
            (gpu["ecc_uncorrected"], f"uncorrected ECC errors: {gpu['ecc_uncorrected']}"),
            (gpu["remap_pending"], "remapped memory rows need a reset of the GPU"),
            (gpu["remap_failed"], "memory rows could not be remapped"),
            (gpu["mig"], "MIG is on"),
            ("pcie_lanes" in fewer, f"{gpu['pcie_lanes']} of {gpu['pcie_max_lanes']} PCIe lanes"),
        )
        remarks = (
            (0 < limit < default and "power_limit_w" not in fewer, power),
            (xids, f"XIDs in the kernel's log: {', '.join(map(str, xids))}"),
            (gpu["ecc"] is False, "ECC is off"),
            (gpu["persistence"] is False, "persistence mode is off"),
        )
        yield from (
            Finding(where, what, "gpu", (node_of(where),)) for is_so, what in faults if is_so
        )
        yield from (Finding(where, what) for is_so, what in remarks if is_so)
    yield from unlike({w: {"VBIOS": gpu["vbios"]} for w, gpu in gpus.items() if gpu.get("vbios")})


HOT_MS = 1000
"""The least time under load in which heat held a clock down that is a fault."""

GREW = {
    "ecc_uncorrected": ("uncorrected ECC errors", "gpu"),
    "xids": ("XIDs", "gpu"),
    "hot_ms": ("ms with a clock that heat held down", "gpu"),
    "ecc_corrected": ("corrected ECC errors", None),
    "rows_remapped": ("rows of memory remapped", None),
    "nvlink_errors": ("errors on NVLinks", None),
    "pcie_replays": ("replays on PCIe", None),
    "link_downed": ("losses of the link", "network"),
    "link_error_recovery": ("recoveries of the link", None),
    "symbol_error": ("symbol errors", None),
    "port_rcv_errors": ("packets with errors", None),
}
"""What the counters that grew under a long load say, and the cause of a fault."""


def load_findings(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Findings from counters that grew under a long load, of GPUs and of adapters' ports, and from
    NVIDIA's own diagnosis after it."""
    for name, host in hosts.items():
        for where, counts in host.get("grew", {}).items():
            for key, count in counts.items():
                what, cause = GREW[key]
                if key != "hot_ms" or count > HOT_MS:
                    nodes = (name,) if cause else ()
                    yield Finding(where, f"{count} {what} under load", cause, nodes)
        for line in host.get("diagnosis") or ():
            yield Finding(name, f"dcgmi diag: {line}", "gpu", (name,))


def host_findings(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Findings about the hosts' files, clocks and settings, and about versions and settings that
    differ from the other hosts. If no host can write, the file system is at fault and no node."""
    problems = {n: p for n, host in hosts.items() if (p := host.get("files", {}).get("problem"))}
    shared = len(problems) == len(hosts) > 1  # then no node is to be left out
    for name, host in hosts.items():
        files = host.get("files", {})
        if name in problems:
            yield Finding(name, problems[name], "storage", () if shared else (name,))
        if files.get("latency_s", 0) > SLOW_FILE_S:
            yield Finding(name, f"writing a small file takes {files['latency_s']:.1f} s")
        if files.get("lock") is False:
            yield Finding(name, "the file system has no locks (flock)")
        if abs(host.get("skew_s", 0)) > SKEW_S:
            yield Finding(name, f"its clock differs from the others by {host['skew_s']:+.1f} s")
        if (governor := host.get("settings", {}).get("governor")) in ("powersave", "conservative"):
            yield Finding(name, f"the CPU governor is {governor}")
    yield from unlike({name: host.get("settings", {}) for name, host in hosts.items()})
    for port in dict.fromkeys(port for host in hosts.values() for port in host.get("ports", ())):
        rates = {name: host.get("ports", {}).get(port, 0.0) for name, host in hosts.items()}
        most = usual(rates.values())
        for name, rate in rates.items():
            if rate < most:
                has = f"{rate:g}" if rate else "no link"
                what = f"{port}: {has}, but {most:g} Gb/s elsewhere"
                yield Finding(name, what, "network", (name,))


def usual(values: Iterable[float | None]) -> float:
    """The most frequent value; the greatest if several are equally frequent; 0 without any
    values."""
    counts = Counter(value for value in values if value is not None)
    return max(counts, key=lambda value: (counts[value], value), default=0.0)


def unlike(settings: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Settings, by place, that differ from the setting of most places. If no setting is more
    frequent than the others, all are listed."""
    for key in dict.fromkeys(key for own in settings.values() for key in own):
        places: dict[str, list[str]] = defaultdict(list)
        for where, own in settings.items():
            if key in own:
                places[str(own[key])].append(where)
        first, *others = sorted(places, key=lambda value: -len(places[value]))
        if others and len(places[first]) == len(places[others[0]]):
            yield Finding("all", "; ".join(f"{key} {v}: {listed(places[v], 1)}" for v in places))
            continue
        for value in others:
            for where in places[value]:
                yield Finding(where, f"{key} {value}, but {first} elsewhere")


def judge(
    rates: Iterable[Rate], hosts: Mapping[str, Mapping[str, Any]], *, comparable: bool = True
) -> list[Finding]:
    """All findings: first the faults, one for each place, then the remarks, each with its places.
    If the devices are not `comparable`, because they share a CPU, their rates are not judged.

    Any slow GPU makes the collectives of its node slow. A node's collectives therefore count only
    if no GPU of the node is at fault.
    """
    kinds = by_kind(rates) if comparable else {}
    gpus = {where: gpu for host in hosts.values() for where, gpu in host.get("gpus", {}).items()}
    slow_by_kind = {kind: [*rate_findings(kind, some)] for kind, some in kinds.items()}
    found = [*chain(*slow_by_kind.values()), *gpu_findings(gpus)]
    with_bad_gpu = {node_of(f.where) for f in found if f.cause == "gpu" and f.where not in hosts}
    collectives = chain(*(slow_by_kind.get(kind, ()) for kind in COLLECTIVES))
    explained = {f for f in collectives if f.where in with_bad_gpu}
    found = [f for f in found if f not in explained]
    found += [*load_findings(hosts), *table_findings(kinds), *host_findings(hosts)]
    faults: dict[str, Finding] = {}
    remarks: dict[str, list[str]] = defaultdict(list)
    for f in found:
        if f.cause is None:
            remarks[f.what].append(f.where)
        elif first := faults.get(f.where):
            faults[f.where] = replace(first, what=f"{first.what}; {f.what}")
        else:
            faults[f.where] = f
    shared = [Finding(listed(places, 1), what) for what, places in remarks.items()]
    return [*faults.values(), *shared]
