"""How far are the package's tables of kernels from this GPU? Measures what forecasts need."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from math import prod
from statistics import median

import jax

from jaxbench import calibrate
from jaxbench.forecast import tables
from jaxbench.forecast.costs import CONDITIONS, Measured
from jaxbench.ops.attention import cudnn
from jaxbench.plan.absent import compile_only_devices
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import Work
from jaxbench.xla.schedule import Kernel
from one_gpu.place import MEASURED, OK, Finding, Place


def check(place: Place) -> Iterator[Finding]:
    """Measures all of it, beside the package's tables; the file is kept with the findings."""
    sample = calibrate.TINY_SAMPLE if place.rehearsal else calibrate.GPU_SAMPLE
    kernel = "xla" if place.rehearsal else "cudnn"
    costs = Measured(place.gpu, tables.load(place.gpu.name.lower()), CONDITIONS["fast"])
    lines, ratios = [], defaultdict(list)
    for probe in calibrate.probes(sample, kernel, jax.local_devices()):
        taken = calibrate.measure(probe)
        lines.append(calibrate.line(probe, taken))
        ratios[probe.kind, probe.name].append(taken / (1e6 * expected(costs, probe)))
    for (kind, name), found in ratios.items():
        figure = f"{median(found):.2f} of the package's table, {min(found):.2f} to {max(found):.2f}"
        yield Finding(f"{kind} {name}, {len(found)} sizes", MEASURED, figure)
    text = calibrate.table(place.gpu.name.lower(), jax.local_devices()[0].device_kind, lines)
    yield Finding("table for plan --kernels", MEASURED, f"{len(lines)} lines", data={"file": text})


def expected(costs: Measured, probe: calibrate.Probe) -> float:
    """Seconds of a probe by the package's tables."""
    kind, name, sizes = probe.kind, probe.name, probe.sizes
    if kind == "product":
        dtype = "bf16" if name == "bf16" else "f8e4m3fn"
        return costs.work(Work(kind, dtype, 2 * prod(sizes), (1, *sizes)))
    if kind == "attention":
        return costs.work(Work(kind, "bf16", 0, sizes, backward=name == "backward"))
    if kind == "memory":
        return sum(costs.kernel(Kernel((), *sizes, "")).values())
    group, whole = sizes
    result = whole // group if name == "reduce-scatter" else whole
    return costs.collective(Collective(name, "", result, tuple(range(group)), 1, ""))


def compiles(place: Place) -> Iterator[Finding]:
    """Compiles one of each kind for absent GPUs of a node."""
    gpus = compile_only_devices(place.gpu, place.gpu.node)
    first = {}
    for probe in calibrate.probes(calibrate.GPU_SAMPLE, "cudnn", gpus):
        first.setdefault((probe.kind, probe.name), probe)
    one = jax.make_mesh((1,), ("gpus",), devices=gpus[:1])
    for (kind, name), probe in first.items():
        with ExitStack() as stack:
            if kind == "attention":
                stack.enter_context(jax.set_mesh(one))
                stack.enter_context(cudnn.of_target())
            text = calibrate.compiled(probe, probe.function).as_text()
        yield Finding(f"{kind} {name}", OK, f"compiled, {len(text.splitlines())} lines")
