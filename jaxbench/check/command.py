"""The command `jaxbench check`: measures, asks and judges, in one process or in the processes of a
job."""

import argparse
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from rich.table import Table

from jaxbench.base.errors import STATUS, RecipeError, RunFailed, counted
from jaxbench.base.files import owned, write_json
from jaxbench.base.hardware import NULL, PLANNED, Gpu, identify, is_null
from jaxbench.base.terminal import console, live
from jaxbench.check import host_facts, measure
from jaxbench.check.arguments import FILE, make_parser
from jaxbench.check.judge import Rate, by_kind, judge, size_findings, slow
from jaxbench.cluster import devices, ending, job
from jaxbench.cluster.nvml import Gpu as Told
from jaxbench.forecast import tables
from jaxbench.recipe.checks import positive


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or the exit status for what is slow or broken
    (`base.errors.STATUS`)."""
    with ExitStack() as held:
        return _main(argv, held)


def own(folder: Path, held: ExitStack) -> None:
    """Makes this check the only writer of the results' folder. Raises RecipeError if another
    process is. A folder that cannot be written raises nothing here: it is a fault, which the check
    finds later."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(owned(folder))


def _main(argv: Sequence[str] | None, held: ExitStack) -> int:
    began = time.perf_counter()
    try:
        args = make_parser().parse_args(argv)
        positive("--", args, "cpu_devices", "local_devices", "minutes")
        devices.select_platform(args.cpu_devices)
        job.join()
        devices.find()
        if args.local_devices is not None:
            devices.check_local_devices(args.local_devices, cpu=args.cpu_devices is not None)
        job.broadcast("check's folder", lambda: own(args.output, held))
        cluster, told, missing = find_cluster()
        everywhere = job.gather("check", found_here(cluster, told, args))

        def conclude() -> int:
            report = judged(cluster, everywhere, missing) | {"minutes": args.minutes}
            if args.sizes and cluster.devices.size == 1:
                nothing = "there is only one GPU, and nothing to measure between GPUs"
                report["not_judged"].append(f"collectives by size, since {nothing}")
            report["seconds"]["all"] = time.perf_counter() - began
            show(report)
            with suppress(OSError):  # a folder that cannot be written is a fault already
                write_json(args.output / FILE, report)
            return report["status"]

        status = job.broadcast("check's status", conclude)
    except (RecipeError, RunFailed, OSError, jax.errors.JaxRuntimeError) as error:
        return ending.refuse(error, wait=job.barrier("check refused", 5))
    return ending.leave(status, wait=job.barrier("check ended", 60))


def find_cluster() -> tuple[measure.Cluster, dict[jax.Device, Told], str | None]:
    """Finds the devices of the job. Returns (cluster, the driver's view of this process's devices,
    why there is no such view or None). Raises RecipeError if nodes have different numbers of
    devices."""
    told, missing = host_facts.gpus() if jax.default_backend() == "gpu" else ([], "no GPU")
    local = {d: told[d.local_hardware_id or 0] for d in jax.local_devices() if told}
    here = [
        (d.id, local[d].index if d in local else d.local_hardware_id or 0)
        for d in jax.local_devices()
    ]
    of_processes = job.all_gather("check of nodes", [job.node(), here])
    names: dict[int, tuple[str, int]] = {}
    for node, found in of_processes:
        names |= {identity: (node, number) for identity, number in found}
    nodes: dict[str, list[jax.Device]] = {}
    for device in sorted(jax.devices(), key=lambda d: (d.process_index, names[d.id][1])):
        nodes.setdefault(names[device.id][0], []).append(device)
    if len({len(found) for found in nodes.values()}) > 1:
        listed = ", ".join(f"{len(found)} on {node}" for node, found in nodes.items())
        raise RecipeError(f"nodes have different numbers of devices: {listed}")
    kind = "gpu" if jax.default_backend() == "gpu" else "device"
    labels: dict[jax.Device, str] = {}
    for node, found in nodes.items():
        numbers = [names[d.id][1] for d in found]
        if len({*numbers}) < len(numbers):  # each process sees its own GPUs only
            numbers = [*range(len(found))]
        labels |= {d: f"{node} {kind} {n}" for d, n in zip(found, numbers, strict=True)}
    sample = measure.GPU_SAMPLE if kind == "gpu" else measure.CPU_SAMPLE
    return measure.Cluster(np.array(list(nodes.values())), labels, sample), local, missing


def found_here(
    cluster: measure.Cluster, told: Mapping[jax.Device, Told], args: argparse.Namespace
) -> dict[str, Any]:
    """The findings of this process: settings, files, the driver's facts, rates, the seconds that
    each part took, and what `--minutes` and `--sizes` ask for.

    If anything of a kind is slow, that kind is measured twice and the better rate counts. A
    disturbance by the host is no fault of the GPU.
    """
    job.barrier("check of clocks", 60)
    clock, began = time.time(), time.perf_counter()
    facts = host_facts.facts(told.values())
    gpus = {cluster.names[d]: known for d, known in zip(told, facts, strict=True)}
    here = {
        "node": job.node(),
        "clock": clock,
        "settings": host_facts.settings(bool(told)),
        "gpus": gpus,
        "ports": host_facts.ports(),
        "files": host_facts.files(args.output) if job.one_of_node("check of files") else {},
    }
    seconds = {"host": time.perf_counter() - began}
    with sampled(cluster, told, gpus):
        rates = timed(cluster, measure.MATMULS, seconds)
    rates += timed(cluster, measure.OTHERS, seconds)
    first = job.gather("check first", rates)

    def doubtful() -> list[str]:
        kinds = by_kind(made(rate) for some in first for rate in some)
        return [kind for kind, some in kinds.items() if comparable() and slow(some)]

    rates += timed(cluster, job.broadcast("check again", doubtful), seconds)
    if args.minutes:
        rates += loaded_for(cluster, told, args.minutes, here)
    sizes = measure.by_size(cluster) if args.sizes else []
    return here | {"rates": rates, "seconds": seconds, "sizes": sizes}


@contextmanager
def sampled(
    cluster: measure.Cluster, told: Mapping[jax.Device, Told], gpus: dict[str, dict[str, Any]]
) -> Iterator[None]:
    """Samples this process's GPUs as long as the context lasts. Adds what it saw to their facts."""
    ended = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        loaded = thread.submit(host_facts.under_load, told.values(), ended)
        try:
            yield
        finally:
            ended.set()
    for device, sample in zip(told, loaded.result(), strict=True):
        gpus[cluster.names[device]] |= sample


def loaded_for(
    cluster: measure.Cluster, told: Mapping[jax.Device, Told], minutes: int, here: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rates of a long load. Adds to `here` the counters that grew (`grew`), the samples under
    load, and DCGM's `diagnosis`."""
    named = {cluster.names[device]: gpu for device, gpu in told.items()}
    before = host_facts.counters(named)
    with (
        sampled(cluster, told, here["gpus"]),
        live("loading", shown=jax.process_index() == 0) as say,
    ):
        say(f"loading all GPUs for {minutes} minutes")
        rates = [asdict(rate) for rate in measure.sustained(cluster, minutes, *reference())]
    here["grew"] = host_facts.grew(before, host_facts.counters(named))
    if job.one_of_node("check of DCGM"):
        here["diagnosis"] = host_facts.diagnosis()
    return rates


def reference() -> tuple[Gpu | None, tables.Tables | None]:
    """This process's GPU and its tables, as far as we have them."""
    device = jax.local_devices()[0].device_kind
    gpu = None if is_null(device) else identify(device)
    return gpu, tables.load(gpu.name.lower()) if gpu and gpu.name.lower() in PLANNED else None


def timed(
    cluster: measure.Cluster, kinds: Collection[str], seconds: dict[str, float]
) -> list[dict[str, Any]]:
    """The rates of some kinds at this process's devices. Adds the seconds that each kind took to
    `seconds`."""
    (gpu, known), rates = reference(), []
    with live("measuring", shown=jax.process_index() == 0) as say:
        for kind, measured in measure.KINDS.items():
            if kind in kinds:
                say(f"measuring {kind}")
                began = time.perf_counter()
                rates += [asdict(rate) for rate in measured(cluster, kind, gpu, known)]
                seconds[kind] = seconds.get(kind, 0.0) + time.perf_counter() - began
    return rates


def made(rate: Mapping[str, Any]) -> Rate:
    """Restores a rate that was sent as JSON."""
    return Rate(**{**rate, "ends": tuple(rate["ends"])})


def comparable() -> bool:
    """False for CPU devices, which share a CPU."""
    return jax.default_backend() == "gpu"


def judged(
    cluster: measure.Cluster, everywhere: Sequence[Mapping[str, Any]], missing: str | None
) -> dict[str, Any]:
    """The report, which becomes check.json, from what all processes have found."""
    device = jax.local_devices()[0]
    rates = [made(rate) for here in everywhere for rate in here["rates"]]
    middle = median(here["clock"] for here in everywhere)
    hosts: dict[str, dict[str, Any]] = {}
    for here in everywhere:
        first = {name: here[name] for name in ("settings", "ports")} | {"files": {}, "gpus": {}}
        first |= {"grew": {}, "diagnosis": None}
        node = hosts.setdefault(here["node"], {**first, "skew_s": here["clock"] - middle})
        node["gpus"] |= here["gpus"]
        node["files"] |= here["files"]
        node["grew"] |= here.get("grew", {})
        node["diagnosis"] = node["diagnosis"] or here.get("diagnosis")
    sizes = slowest(cluster, [here["sizes"] for here in everywhere])
    found = judge(rates, hosts, comparable=comparable())
    found += size_findings(sizes)
    faults = [finding for finding in found if finding.cause]
    causes = {finding.cause for finding in faults}
    kinds = by_kind(rates)
    excluded = dict.fromkeys(node for finding in faults for node in finding.nodes)
    return {
        "status": next((STATUS[c] for c in ("gpu", "network", "storage") if c in causes), 0),
        "device": device.device_kind,
        "null": is_null(device.device_kind),
        "nodes": len(hosts),
        "devices": int(cluster.devices.size),
        "faults": [str(finding) for finding in faults],
        "remarks": [str(finding) for finding in found if not finding.cause],
        "not_judged": [*unjudged(kinds, hosts, missing)],
        "exclude": ",".join(excluded),
        "seconds": dict(everywhere[0]["seconds"]),
        "rates": {
            kind: {
                "unit": some[0].unit,
                "expected": some[0].expected,
                "median": median(rate.value for rate in some),
                "values": {" - ".join(rate.ends): rate.value for rate in some},
                "distances": {" - ".join(r.ends): r.distance for r in some if r.distance},
                "noise": {" - ".join(r.ends): r.noise for r in some if r.noise is not None},
            }
            for kind, some in kinds.items()
        },
        "sizes": sizes,
        "hosts": hosts,
    }


def slowest(
    cluster: measure.Cluster, everywhere: Sequence[Sequence[tuple[str, int, float]]]
) -> list[dict[str, Any]]:
    """Collectives by size in the columns of nccl-tests, by the slowest process of each: `time_us`,
    and `algbw` and `busbw` in GB/s; `expected` is the busbw of a forecast, or None."""
    (gpu, known), n = reference(), int(cluster.devices.size)
    devices = [
        node * gpu.node + number if gpu else 0
        for node, found in enumerate(cluster.devices) for number in range(len(found))
    ]  # fmt: skip
    lines = []
    for some in zip(*everywhere, strict=True):
        kind, size, seconds = max(some, key=lambda line: line[2])
        factor, expected = measure.bus_factor(kind, n), None
        if gpu and known:
            takes = measure.expected_seconds(kind, size, tuple(devices), gpu, known)
            expected = size / 1e9 / takes * factor
        algbw = size / 1e9 / seconds
        lines.append({"collective": kind, "bytes": size, "time_us": 1e6 * seconds,
                      "algbw": algbw, "busbw": algbw * factor, "expected": expected})  # fmt: skip
    return lines


def unjudged(
    kinds: Mapping[str, list[Rate]], hosts: Mapping[str, Any], missing: str | None
) -> Iterator[str]:
    """The reasons why this check could not judge some things."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        yield "rates, since CPU devices share the host's cores; NVML, since there is no GPU"
    elif missing:
        yield missing
    if is_null(device.device_kind):
        yield f"rates against the tables, since these are {NULL}"
    elif device.platform == "gpu" and not any(rates[0].expected for rates in kinds.values()):
        yield f"rates against tables, since there are none for {device.device_kind}"
    if alone := [kind for kind, rates in kinds.items() if len(rates) == 1]:
        yield f"{', '.join(alone)}, since there is only one of each"
    if len(hosts) == 1:
        yield "the network, since there is only one node"
    if any(gpu["xids"] is None for host in hosts.values() for gpu in host["gpus"].values()):
        yield "XIDs, since the kernel's log cannot be read here"


def show(report: Mapping[str, Any]) -> None:
    """Prints the table and the verdict."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("rate")
    for heading in ("number", "lowest", "median", "highest", "expected", ""):
        grid.add_column(heading, justify="right" if heading else "left")
    for kind, entry in report["rates"].items():
        values, expected = entry["values"].values(), entry["expected"]
        figures = min(values), entry["median"], max(values)
        texts = [f"{figure:.3g}" if figure < 100 else f"{figure:.0f}" for figure in figures]
        grid.add_row(kind, str(len(values)), *texts, f"{expected:.0f}" if expected else "",
                     entry["unit"])  # fmt: skip
    output = console()
    output.print(grid)
    if report["sizes"]:
        table = Table("collective", box=None, pad_edge=False, header_style="bold")
        for heading in ("bytes", "time us", "algbw", "busbw", "expected"):
            table.add_column(heading, justify="right")
        for line in report["sizes"]:
            columns = (line[key] for key in ("time_us", "algbw", "busbw", "expected"))
            cells = ("" if value is None else f"{value:.4g}" for value in columns)
            table.add_row(line["collective"], str(line["bytes"]), *cells)
        output.print(table)
    for heading in ("faults", "remarks", "not_judged"):
        for line in report[heading]:
            print(f"{'not judged' if heading == 'not_judged' else heading[:-1]}: {line}")
    where = f"{counted(report['devices'], 'device')} of {counted(report['nodes'], 'node')}"
    faults = counted(len(report["faults"]), "fault") if report["faults"] else "no fault"
    print(f"check: {faults} in {where}, {report['seconds']['all']:.0f} s")
    if report["exclude"]:
        print(f"to leave these nodes out: --sbatch exclude={report['exclude']}")
