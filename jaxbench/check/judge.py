"""Judges what is slow or broken in a job, from what was measured and what its hosts tell. No JAX.

A rate is compared with those of the same kind in the job, the median of each kind with the tables.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, multimode
from typing import Any

from jaxbench.cluster import nvml
from jaxbench.forecast.costs import SPREAD
from jaxbench.recipe.window import robust_deviation

DEVIATIONS = 5.0
"""Standard deviations below the median from which a rate is slow. Of 256 nodes some 24000 rates are
compared: with normal noise a healthy job would have a finding once in 140 checks."""

LINK_SPREAD = 0.03
"""Least standard deviation of links, copies from the host and collectives, which share switches and
hosts with others; that of a GPU's own kernels is `forecast.costs.SPREAD`. With five of them a rate
is slow at 15 % (GPUs: 7.5 %) below the median."""

GPU_KINDS = "bf16 products", "fp8 products", "memory"
"""Kinds of the rates that are a GPU's alone."""

FEWEST = 4
"""Rates of one kind that can be compared with each other: of three, a slow one moves the median's
deviation with it."""

BELOW_TABLE = 0.25
"""Distance from a table that is remarked. Two independent benchmarks of the same large products on
H100 differ by less in 99 of 100 (`product` and `repeated` in `forecast/measured/h100.csv`)."""

SKEW_S, SLOW_FILE_S = 1.0, 1.0
"""Difference of hosts' clocks, and time to make a small file last, that are remarked: lines of two
logs are then in the wrong order, and a record's write can delay a step."""


IN_NODE, BETWEEN_NODES = "exchange in a node", "exchange between nodes"
"""Kinds of the rates of links; the latter are the network's."""


@dataclass(frozen=True)
class Rate:
    """A rate that was measured: of which kind, in which unit, at a GPU or a node, or at both ends
    of a link, named `NODE gpu N`; and what the tables say. Links are compared with those between
    nodes that are as far apart in the job."""

    kind: str
    unit: str
    ends: tuple[str, ...]
    value: float
    expected: float | None = None
    distance: int = 0


@dataclass(frozen=True)
class Finding:
    """A fault or remark, and where: a GPU, a link or a node. `cause` is one of `errors.STATUS`;
    None for a remark, which fails no check. `nodes` are those to leave out."""

    where: str
    what: str
    cause: str | None = None
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def node(where: str) -> str:
    """The node of a GPU."""
    return where.partition(" ")[0]


def by_kind(rates: Iterable[Rate]) -> dict[str, list[Rate]]:
    """The rates of each kind; of a link or a node, which several GPUs have measured, the greatest:
    those that began earlier have waited for the others too."""
    greatest: dict[tuple[str, tuple[str, ...]], Rate] = {}
    for rate in rates:
        key = rate.kind, rate.ends
        if key not in greatest or rate.value > greatest[key].value:
            greatest[key] = rate
    kinds: dict[str, list[Rate]] = defaultdict(list)
    for rate in greatest.values():
        kinds[rate.kind].append(rate)
    return kinds


def slow(rates: Sequence[Rate]) -> dict[tuple[str, ...], float]:
    """Slow ones among rates of one kind: how far below the median, as a share of it.

    The deviation is the robust one; at least that of healthy rates.
    """
    if len(rates) < FEWEST:
        return {}
    values = [rate.value for rate in rates]
    middle, deviation = median(values), robust_deviation(values)
    least = SPREAD if rates[0].kind in GPU_KINDS else LINK_SPREAD
    limit = middle - DEVIATIONS * max(deviation, least * middle)
    return {rate.ends: 1 - rate.value / middle for rate in rates if rate.value < limit}


def blamed(rates: Sequence[Rate]) -> Iterable[tuple[str, float, int]]:
    """(GPU, node or link, share below the median, partners) of each slow rate of one kind. A link
    is slow because of the end whose links are all slow, if that is true of one end only; it is the
    link itself if both have fast ones, or if there is no telling."""
    found: dict[tuple[str, ...], float] = {}
    for distance in {rate.distance for rate in rates}:
        found |= slow([rate for rate in rates if rate.distance == distance])
    links: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for rate in rates:
        for end in rate.ends:
            links[end].append(rate.ends)
    worst: dict[str, float] = {}
    suspects = {end for end, own in links.items() if all(link in found for link in own)}
    convicted = {
        next(end for end in ends if end in suspects)
        for ends in found
        if sum(end in suspects for end in ends) == 1
    }
    for ends, share in found.items():
        guilty = [end for end in ends if end in convicted] or [" - ".join(ends)]
        for where in guilty:
            worst[where] = max(share, worst.get(where, 0.0))
    for where, share in worst.items():
        yield where, share, len(links.get(where, ()))


def rate_findings(kinds: Mapping[str, list[Rate]], gpus: Mapping[str, int]) -> Iterable[Finding]:
    """Slow GPUs, links and nodes; `gpus` of each node, all of which make it the node's."""
    for kind, rates in kinds.items():
        single = len(rates[0].ends) == 1
        found = {where: (share, partners) for where, share, partners in blamed(rates)}
        for name, count in gpus.items():
            of_node = [w for w in found if " - " not in w and w != name == node(w)]
            if 1 < count == len(of_node):
                share = max(found.pop(where)[0] for where in of_node)
                found[name] = share, 1
        for where, (share, partners) in found.items():
            link = " - " in where
            what = f"{kind} {100 * share:.0f} % below the median of {len(rates)}"
            if not single and not link and partners > 1:
                what += f", with each of {partners} partners"
            nodes = tuple(dict.fromkeys(map(node, where.split(" - "))))
            if link and len(nodes) > 1:
                what, nodes = f"{what}; either end, which more nodes would tell", ()
            yield Finding(where, what, "network" if kind == BETWEEN_NODES else "gpu", nodes)


def table_findings(kinds: Mapping[str, list[Rate]]) -> Iterable[Finding]:
    """Kinds whose median is far below the tables': the job as a whole."""
    for kind, rates in kinds.items():
        expected, middle = rates[0].expected, median(rate.value for rate in rates)
        if expected and middle < (1 - BELOW_TABLE) * expected:
            yield Finding(
                "all" if len(rates) > 1 else rates[0].ends[0],
                f"{kind} {middle:.0f} {rates[0].unit}, {100 * (1 - middle / expected):.0f} % below "
                f"the tables' {expected:.0f}",
            )


def gpu_findings(gpus: Mapping[str, Mapping[str, Any]]) -> Iterable[Finding]:
    """Findings from the driver's facts and samples under load, which are None where it does not
    tell. Of links and limits what all GPUs share is how the cluster is, and at most a remark."""

    def most(key: str) -> float:
        return max((gpu.get(key) or 0 for gpu in gpus.values()), default=0)

    usual = {key: most(key) for key in ("nvlinks_up", "pcie_lanes", "power_limit_w")}
    cut_off = median([len(gpu.get("unreached") or ()) for gpu in gpus.values()] or [0])
    for where, gpu in gpus.items():
        known = {key: gpu.get(key) for key in usual}
        less = {key: n is not None and n < usual[key] for key, n in known.items()}
        held = [reason for reason in gpu.get("reasons") or () if reason in nvml.reasons(nvml.HELD)]
        unreached = gpu.get("unreached") or ()
        limit, default = gpu.get("power_limit_w"), gpu.get("power_default_w")
        down = (gpu.get("nvlinks") or 0) - (gpu.get("nvlinks_up") or 0)
        clocks = f"{gpu.get('sm_mhz')} of {gpu.get('sm_max_mhz')}"
        faults = {
            f"{down} of {gpu.get('nvlinks')} NVLinks are down": less["nvlinks_up"],
            f"no NVLink to gpu {', '.join(map(str, unreached))}": len(unreached) > cut_off,
            f"power limit {limit or 0:.0f} W of {default or 0:.0f}": less["power_limit_w"],
            f"{clocks} MHz under load: {', '.join(held)}": held,
            f"uncorrected ECC errors: {gpu.get('ecc_uncorrected')}": gpu.get("ecc_uncorrected"),
            "remapping of memory rows waits for a reset": gpu.get("remap_pending"),
            "remapping of memory rows failed": gpu.get("remap_failed"),
            "MIG is on": gpu.get("mig"),
            f"{gpu.get('pcie_lanes')} of {gpu.get('pcie_max_lanes')} PCIe lanes": less[
                "pcie_lanes"
            ],
        }
        capped = limit and default and limit < default and not less["power_limit_w"]
        remarks = {
            f"power limit {limit or 0:.0f} W of {default or 0:.0f}": capped,
            f"XIDs in the kernel's log: {', '.join(map(str, gpu.get('xids') or ()))}": gpu.get(
                "xids"
            ),
            "ECC is off": gpu.get("ecc") is False,
            "persistence mode is off": gpu.get("persistence") is False,
        }
        yield from (
            Finding(where, what, "gpu", (node(where),)) for what, is_so in faults.items() if is_so
        )
        yield from (Finding(where, what) for what, is_so in remarks.items() if is_so)


def host_findings(hosts: Mapping[str, Mapping[str, Any]]) -> Iterable[Finding]:
    """Hosts' files, clocks and settings; versions and settings that are not the other hosts'."""
    for name, host in hosts.items():
        files = host.get("files", {})
        if problem := files.get("problem"):
            yield Finding(name, problem, "storage", (name,))
        if files.get("latency_s", 0) > SLOW_FILE_S:
            yield Finding(name, f"a small file takes {files['latency_s']:.1f} s")
        if files.get("lock") is False:
            yield Finding(name, "the file system has no locks (flock)")
        if abs(host.get("skew_s", 0)) > SKEW_S:
            yield Finding(name, f"its clock differs by {host['skew_s']:+.1f} s")
        if (governor := host.get("settings", {}).get("governor")) in ("powersave", "conservative"):
            yield Finding(name, f"CPU governor {governor}")
    keys = dict.fromkeys(key for host in hosts.values() for key in host.get("settings", {}))
    for key in keys:
        values = {name: str(host.get("settings", {}).get(key)) for name, host in hosts.items()}
        usual = multimode(values.values())
        for name, value in values.items():
            if len(usual) == 1 and value != usual[0]:
                yield Finding(name, f"{key} {value}, elsewhere {usual[0]}")


def judge(
    rates: Iterable[Rate], hosts: Mapping[str, Mapping[str, Any]], *, comparable: bool = True
) -> list[Finding]:
    """All findings: faults, one for each place; then remarks, each with its places. Rates of
    devices that are not `comparable`, as they share a CPU, are not judged.

    A node's collectives are slow because of any of its GPUs: they are found where these are not.
    """
    kinds = by_kind(rates) if comparable else {}
    gpus = {name: len(host.get("gpus", {})) for name, host in hosts.items()}
    found = [*rate_findings(kinds, gpus)]
    every = {w: gpu for host in hosts.values() for w, gpu in host.get("gpus", {}).items()}
    found += gpu_findings(every)
    partly = {node(f.where) for f in found if f.cause == "gpu" and f.where not in hosts}
    found = [f for f in found if f.where not in partly]
    found += [*table_findings(kinds), *host_findings(hosts)]
    faults: dict[str, Finding] = {}
    remarks: dict[str, list[str]] = defaultdict(list)
    for f in found:
        if f.cause is None:
            remarks[f.what].append(f.where)
        elif first := faults.get(f.where):
            faults[f.where] = replace(first, what=f"{first.what}; {f.what}")
        else:
            faults[f.where] = f
    shared = {
        what: f"{where[0]} and {len(where) - 1} more" if where[1:] else where[0]
        for what, where in remarks.items()
    }
    return [*faults.values(), *(Finding(where, what) for what, where in shared.items())]
