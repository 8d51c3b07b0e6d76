"""A profile for XLA's latency-hiding scheduler, with forecast times instead of measured ones."""

from jaxbench.base.hardware import Gpu, placed
from jaxbench.forecast.costs import Measured
from jaxbench.forecast.tables import load
from jaxbench.xla import host_copies
from jaxbench.xla.collectives import completed
from jaxbench.xla.hlo import Program
from jaxbench.xla.schedule import Walk

SCHEDULED = r'scheduling_name="([^"]*)"'
"""Pattern of the name that an instruction had before it was scheduled. The scheduler looks it up by
this name."""


def guide(program: Program, gpu: Gpu) -> str:
    """The profile with which the scheduler can schedule a program again: seconds of every kernel
    and copy, and of every collective under the name of its start. It is a text proto
    (`ProfiledInstructionsProto`)."""
    job = placed(gpu, program.devices)
    costs = Measured(job, load(gpu.name.lower()))
    kernels = {name: kernel for name, kernel, _ in Walk(program).kernels()}
    seconds: dict[str, float] = {}
    for i, scope, _ in program.walk():
        name = i.attribute(SCHEDULED) or i.name
        if (collective := completed(i, scope)) is not None:
            start = i.start(scope)
            seconds[start.attribute(SCHEDULED) or start.name] = costs.collective(collective)
        elif i.name in kernels:
            seconds[name] = sum(costs.kernel(kernels[i.name]).values())
        elif host_copies.copies(i, scope):
            _, size = host_copies.written(program, i, scope)
            seconds[name] = size / (gpu.host * 1e9)
    return "".join(
        f'costs {{ name: "{name}" cost_us: {1e6 * s:.3f} }}\n' for name, s in seconds.items()
    )
