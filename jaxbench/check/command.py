"""The command `jaxbench check`: measures, asks and judges, in one process or in the processes of a
job."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from statistics import median
from typing import Any

import jax
import numpy as np

from jaxbench.base.errors import STATUS, RecipeError, RunFailed, counted
from jaxbench.base.files import owned, write_json
from jaxbench.base.hardware import NULL, PLANNED, identify, is_null
from jaxbench.base.terminal import console, live, plain_table
from jaxbench.check import host_facts, measure
from jaxbench.check.arguments import FILE, Options, parse_options
from jaxbench.check.judge import Rate, by_kind, from_json, judge, size_findings, slow, to_json
from jaxbench.cluster import devices, ending, job, nvml
from jaxbench.forecast import tables


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or the exit status for what is slow or broken
    (`base.errors.STATUS`)."""
    began = time.perf_counter()
    with ExitStack() as held:
        try:
            options = parse_options(argv)
            devices.select_platform(options.cpu_devices)
            job.join()
            devices.find()
            on_cpu = options.cpu_devices is not None
            devices.check_local_devices(options.local_devices, cpu=on_cpu)

            def own_folder() -> None:
                with suppress(OSError):  # the check itself finds that it cannot be written
                    options.output.mkdir(parents=True, exist_ok=True)
                    held.enter_context(owned(options.output))

            job.broadcast("check's folder", own_folder)
            told, missing = ask_driver()
            cluster = find_cluster(told)
            everywhere = job.gather("check", found_here(cluster, told, options))

            def conclude() -> int:
                report = make_report(cluster, everywhere, options, missing)
                report["seconds"] = time.perf_counter() - began
                show(report)
                with suppress(OSError):  # a folder that cannot be written is a fault already
                    write_json(options.output / FILE, report)
                return report["status"]

            status = job.broadcast("check's status", conclude)
        except (RecipeError, RunFailed, OSError, jax.errors.JaxRuntimeError) as error:
            return ending.refuse(error, wait=job.barrier("check refused", 5))
        return ending.leave(status, wait=job.barrier("check ended", 60))


def ask_driver() -> tuple[dict[jax.Device, nvml.Gpu], str | None]:
    """`devices.known_to_nvml`, and if NVML cannot be asked, why."""
    try:
        return devices.known_to_nvml(), None
    except RecipeError as error:
        return {}, str(error)


def find_cluster(told: Mapping[jax.Device, nvml.Gpu]) -> measure.Cluster:
    """The devices of the job by node. `told` is the driver's view of this process's devices. Raises
    RecipeError if nodes have different numbers of devices."""
    local = jax.local_devices()
    here = {d.id: told[d].index if d in told else d.local_hardware_id or 0 for d in local}
    node_of: dict[int, str] = {}
    number_of: dict[int, int] = {}
    for node, numbers in job.all_gather("check of nodes", [job.node(), [*here.items()]]):
        for identity, number in numbers:
            node_of[identity], number_of[identity] = node, number
    nodes: dict[str, list[jax.Device]] = defaultdict(list)
    for device in sorted(jax.devices(), key=lambda d: (d.process_index, number_of[d.id])):
        nodes[node_of[device.id]].append(device)
    if len({len(found) for found in nodes.values()}) > 1:
        listed = ", ".join(f"{len(found)} on {node}" for node, found in nodes.items())
        raise RecipeError(f"nodes have different numbers of devices: {listed}")
    kind, sizes = ("gpu", measure.GPU_SIZES) if on_gpus() else ("device", measure.CPU_SIZES)
    names: dict[jax.Device, str] = {}
    for node, found in nodes.items():
        numbers = [number_of[d.id] for d in found]
        if len({*numbers}) < len(numbers):  # each process sees its own GPUs only
            numbers = [*range(len(found))]
        names |= {d: f"{node} {kind} {n}" for d, n in zip(found, numbers, strict=True)}
    model = jax.local_devices()[0].device_kind
    gpu = None if is_null(model) else identify(model)
    known = tables.load(gpu.name.lower()) if gpu and gpu.name.lower() in PLANNED else None
    return measure.Cluster(np.array([*nodes.values()]), names, sizes, gpu, known)


def found_here(
    cluster: measure.Cluster, told: Mapping[jax.Device, nvml.Gpu], options: Options
) -> dict[str, Any]:
    """The findings of this process: settings, files, the driver's facts, rates, and what
    `--minutes` and `--sizes` ask for: the counters that grew under a long load (`grew`), DCGM's
    `diagnosis`, and the `sizes` of collectives.

    If anything of a kind is slow, that kind is measured twice and the better rate counts. A
    disturbance by the host is no fault of the GPU.
    """
    job.barrier("check of clocks", 60)
    clock = time.time()
    named = {cluster.names[device]: gpu for device, gpu in told.items()}
    facts = host_facts.facts(told.values())
    found: dict[str, Any] = {
        "node": job.node(),
        "clock": clock,
        "settings": host_facts.settings(bool(told)),
        "gpus": dict(zip(named, facts, strict=True)),
        "ports": host_facts.ports(),
        "files": host_facts.files(options.output) if job.one_of_node("check of files") else {},
        "grew": {},
        "diagnosis": None,
    }
    with host_facts.under_load(told.values(), facts):
        rates = measure_kinds(cluster, measure.MATMULS)
    rates += measure_kinds(cluster, measure.OTHERS)
    first = job.gather("check first", to_json(rates))

    def doubtful() -> list[str]:
        kinds = by_kind(rate for here in first for rate in from_json(here))
        return [kind for kind, some in kinds.items() if on_gpus() and slow(some)]

    rates += measure_kinds(cluster, job.broadcast("check again", doubtful))
    if options.minutes:
        before = host_facts.counters(named)
        with host_facts.under_load(told.values(), facts), progress("loading") as say:
            say(f"loading all GPUs for {options.minutes} minutes")
            rates += measure.sustained(cluster, options.minutes)
        found["grew"] = host_facts.grew(before, host_facts.counters(named))
        if job.one_of_node("check of DCGM"):
            found["diagnosis"] = host_facts.diagnosis()
    sizes = measure.by_size(cluster) if options.sizes else []
    return found | {"rates": to_json(rates), "sizes": sizes}


def measure_kinds(cluster: measure.Cluster, kinds: Iterable[str]) -> list[Rate]:
    """The rates of some kinds at this process's devices."""
    rates = []
    with progress("measuring") as say:
        for kind in kinds:
            say(f"measuring {kind}")
            rates += measure.KINDS[kind](cluster, kind)
    return rates


def progress(what: str) -> AbstractContextManager[Callable[[str], None]]:
    """Shows what the first process does."""
    return live(what, shown=jax.process_index() == 0)


def on_gpus() -> bool:
    """False for CPU devices. Their rates are not judged, since they share a CPU."""
    return jax.default_backend() == "gpu"


def make_report(
    cluster: measure.Cluster, everywhere: Sequence[Mapping[str, Any]], options: Options,
    missing: str | None,
) -> dict[str, Any]:  # fmt: skip
    """The report, which becomes check.json, from what all processes have found."""
    device = jax.local_devices()[0].device_kind
    rates = [rate for here in everywhere for rate in from_json(here["rates"])]
    middle = median(here["clock"] for here in everywhere)
    hosts: dict[str, dict[str, Any]] = {}
    for here in everywhere:
        first = {name: here[name] for name in ("settings", "ports", "diagnosis")}
        first |= {"gpus": {}, "files": {}, "grew": {}, "skew_s": here["clock"] - middle}
        host = hosts.setdefault(here["node"], first)
        for name in ("gpus", "files", "grew"):
            host[name] |= here[name]
        host["diagnosis"] = host["diagnosis"] or here["diagnosis"]
    sizes = lines_by_size(cluster, [here["sizes"] for here in everywhere])
    found = judge(rates, hosts, comparable=on_gpus())
    found += size_findings(sizes)
    faults = [finding for finding in found if finding.cause]
    causes = {finding.cause for finding in faults}
    kinds = by_kind(rates)
    unknown = [*why_unknown(kinds, hosts, missing)]
    excluded = dict.fromkeys(node for finding in faults for node in finding.nodes)
    return {
        "status": next((STATUS[c] for c in ("gpu", "network", "storage") if c in causes), 0),
        "minutes": options.minutes,
        "device": device,
        "null": is_null(device),
        "nodes": len(hosts),
        "devices": int(cluster.devices.size),
        "faults": [str(finding) for finding in faults],
        "remarks": [str(finding) for finding in found if not finding.cause],
        "not_judged": [*unknown, *too_few(kinds, hosts, options.sizes)],
        "unknown": unknown,
        "exclude": ",".join(excluded),
        "rates": to_json(rates),
        "sizes": sizes,
        "hosts": hosts,
    }


def lines_by_size(
    cluster: measure.Cluster, everywhere: Sequence[Sequence[tuple[str, int, float]]]
) -> list[dict[str, Any]]:
    """Collectives by size in the columns of nccl-tests, by the slowest process of each: `time_us`,
    and `algbw` and `busbw` in GB/s; `expected` is the busbw of a forecast, or None."""
    n, lines = int(cluster.devices.size), []
    for some in zip(*everywhere, strict=True):
        kind, size, seconds = max(some, key=lambda line: line[2])
        algbw, factor, expected = size / 1e9 / seconds, measure.bus_factor(kind, n), None
        if cluster.gpu and cluster.tables:
            nodes, gpus = cluster.devices.shape
            numbers = [cluster.gpu.node * i + j for i in range(nodes) for j in range(gpus)]
            takes = measure.expected_seconds(
                kind, size, tuple(numbers), cluster.gpu, cluster.tables
            )
            expected = size / 1e9 / takes * factor
        lines.append({"collective": kind, "bytes": size, "time_us": 1e6 * seconds,
                      "algbw": algbw, "busbw": algbw * factor, "expected": expected})  # fmt: skip
    return lines


def why_unknown(
    kinds: Mapping[str, list[Rate]], hosts: Mapping[str, Any], missing: str | None
) -> Iterator[str]:
    """What this check could not judge because something here does not tell."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        yield "rates, since CPU devices share the host's cores; NVML, since there is no GPU"
    elif missing:
        yield missing
    if is_null(device.device_kind):
        yield f"rates against the tables, since these are {NULL}"
    elif device.platform == "gpu" and not any(rates[0].expected for rates in kinds.values()):
        yield f"rates against tables, since there are none for {device.device_kind}"
    if any(gpu["xids"] is None for host in hosts.values() for gpu in host["gpus"].values()):
        yield "XIDs, since the kernel's log cannot be read here"


def too_few(
    kinds: Mapping[str, list[Rate]], hosts: Mapping[str, Any], sizes: bool
) -> Iterator[str]:
    """What this check could not judge because there are too few devices or nodes."""
    if alone := [kind for kind, rates in kinds.items() if len(rates) == 1]:
        yield f"{', '.join(alone)}, since there is only one of each"
    if len(hosts) == 1:
        yield "the network, since there is only one node"
    if sizes and jax.device_count() == 1:
        nothing = "there is only one GPU, and nothing to measure between GPUs"
        yield f"collectives by size, since {nothing}"


def show(report: Mapping[str, Any]) -> None:
    """Prints the table and the verdict."""
    rates = plain_table("rate", figures=("number", "lowest", "median", "highest", "expected"))
    rates.add_column("")
    for kind, entry in report["rates"].items():
        values, expected = entry["values"].values(), entry["expected"]
        figures = min(values), entry["median"], max(values)
        texts = [f"{figure:.3g}" if figure < 100 else f"{figure:.0f}" for figure in figures]
        texts += [f"{expected:.0f}" if expected else "", entry["unit"]]
        rates.add_row(kind, str(len(values)), *texts)
    console().print(rates)
    if report["sizes"]:
        columns = "bytes", "time us", "algbw", "busbw", "expected"
        collectives = plain_table("collective", figures=columns)
        for line in report["sizes"]:
            found = (line[key] for key in ("time_us", "algbw", "busbw", "expected"))
            cells = ("" if value is None else f"{value:.4g}" for value in found)
            collectives.add_row(line["collective"], str(line["bytes"]), *cells)
        console().print(collectives)
    for name, key in (("fault", "faults"), ("remark", "remarks"), ("not judged", "not_judged")):
        for line in report[key]:
            print(f"{name}: {line}")
    where = f"{counted(report['devices'], 'device')} of {counted(report['nodes'], 'node')}"
    faults = counted(len(report["faults"]), "fault") if report["faults"] else "no fault"
    print(f"check: {faults} in {where}, {report['seconds']:.0f} s")
    if report["exclude"]:
        print(f"to leave these nodes out: --sbatch exclude={report['exclude']}")
