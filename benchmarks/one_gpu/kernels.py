"""Compares this GPU's kernels with the package's tables, from which we make forecasts."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from math import prod
from statistics import median

import jax

from jaxbench.calibrate import command as calibrate
from jaxbench.forecast import tables
from jaxbench.forecast.costs import Conditions, Measured
from jaxbench.jax_internals import attention_for_mesh
from jaxbench.plan.absent import compile_only_devices
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import Work
from jaxbench.xla.timeline import Kernel
from one_gpu.context import MEASURED, OK, Context, Finding

BURSTS = Conditions(slowdown=1.0, sustained=False)
"""Conditions of a probe: kernels run alone, and too briefly for the power limit."""


def check(ctx: Context) -> Iterator[Finding]:
    """Measures every probe; the findings keep the table for `plan --kernels`."""
    sample = calibrate.TINY_SAMPLE if ctx.rehearsal else calibrate.GPU_SAMPLE
    kernel = "xla" if ctx.rehearsal else "cudnn"
    costs = Measured(ctx.gpu, tables.load(ctx.gpu.name.lower()), BURSTS)
    lines, ratios = [], defaultdict(list)
    probes = list(calibrate.probes(sample, kernel, jax.local_devices()))
    for probe, measured in zip(probes, calibrate.measure(probes), strict=True):
        lines.append(tables.line(probe.kind, probe.name, probe.sizes, measured))
        ratios[probe.kind, probe.name].append(measured / (1e6 * expected(costs, probe)))
    for (kind, name), values in ratios.items():
        extremes = f"{min(values):.2f} to {max(values):.2f}"
        figure = f"{median(values):.2f} of the package's table, {extremes}"
        yield Finding(f"{kind} {name}, {len(values)} sizes", MEASURED, figure)
    text = calibrate.table(ctx.gpu.name.lower(), jax.local_devices()[0].device_kind, lines)
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
        (moved,) = sizes
        return sum(costs.kernel(Kernel((), moved, "")).values())
    group, whole = sizes
    result = whole // group if name == "reduce-scatter" else whole
    return costs.collective(Collective(name, result, (tuple(range(group)),)))


def compiles(ctx: Context) -> Iterator[Finding]:
    """Compiles one probe of each kind for the absent GPUs of a node."""
    gpus = compile_only_devices(ctx.gpu, ctx.gpu.node)
    first = {}
    for probe in calibrate.probes(calibrate.GPU_SAMPLE, "cudnn", gpus):
        first.setdefault((probe.kind, probe.name), probe)
    one = jax.make_mesh((1,), ("gpus",), devices=gpus[:1])
    for (kind, name), probe in first.items():
        with ExitStack() as stack:
            if kind == "attention":
                stack.enter_context(jax.set_mesh(one))
                stack.enter_context(attention_for_mesh())
            text = calibrate.compiled(probe.function, probe.arguments).as_text()
        yield Finding(f"{kind} {name}", OK, f"compiled, {len(text.splitlines())} lines")
