"""What moves a forecast, and by how much: the schedule is simulated again with one assumption
changed at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist

from jaxbench.base.outliers import GPU_SPREAD
from jaxbench.forecast.costs import EXPECTED, MICRO, Conditions, Measured
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import Work
from jaxbench.xla.schedule import Walk
from jaxbench.xla.timeline import Kernel


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """By how many percent a forecast step grows (`percent`) with this `change` of `what`."""

    what: str
    change: str
    percent: float


class Changed(Measured):
    """The cost model of a forecast, with one assumption changed.

    `work` is a factor on the seconds of a kernel's arithmetic, `memory` on the seconds of its
    bytes, `network` and `nvlink` on those of a collective between and inside NVLink domains, and
    `host` on those of a copy to or from the host. `start_s` is added to each launch.
    """

    def __init__(
        self, costs: Measured, work: Callable[[Work], float] = lambda work: 1.0,
        memory: float = 1.0, network: float = 1.0, nvlink: float = 1.0, host: float = 1.0,
        start_s: float = 0.0, conditions: Conditions | None = None,
    ):  # fmt: skip
        gpu = replace(costs.gpu, host=costs.gpu.host / host)
        super().__init__(gpu, costs.tables, conditions or costs.conditions)
        self.factor, self.memory, self.start_s = work, memory, start_s
        self.links = {True: network, False: nvlink}

    def kernel(self, kernel: Kernel) -> Mapping[str, float]:
        parts = super().kernel(kernel)
        starts = kernel.launches * self.start_s if parts else 0.0
        return {**parts, "launches": parts.get("launches", 0.0) + starts} if starts else parts

    def work(self, work: Work) -> float:
        return super().work(work) * self.factor(work)

    def _memory(self, moved: int, makes_fp8: bool = False) -> tuple[float, float]:
        start, seconds = super()._memory(moved, makes_fp8)
        return start, seconds * self.memory

    def collective(self, collective: Collective) -> float:
        links = self.links[collective.crosses_domains(self.gpu)]
        return super().collective(collective) * links


def _of(kind: str, factor: float) -> Callable[[Work], float]:
    """This factor for work whose kind begins with `kind`."""
    return lambda work: factor if work.kind.startswith(kind) else 1.0


def slowest(gpus: int) -> float:
    """The speed of the slowest of `gpus` GPUs relative to the median GPU. It is the median of the
    minimum of as many draws from a normal distribution."""
    return 1 - GPU_SPREAD * NormalDist().inv_cdf(0.5 ** (1 / gpus))


def waiting_for_slowest(gpus: int) -> Callable[[Measured], Measured]:
    """The cost model of a job of so many GPUs that waits for the slowest of them."""
    factor = 1 / slowest(gpus)
    return lambda costs: Changed(costs, lambda work: factor)


SLOWEST = "slowest GPU", f"all wait for it, with a spread of {100 * GPU_SPREAD:g} %"
"""What `waiting_for_slowest` changes, and how."""

CHANGES: Mapping[tuple[str, str], Callable[[Measured], Measured]] = {
    ("matmuls", "5 % slower"): lambda costs: Changed(costs, _of("product", 1.05)),
    ("grouped matmuls", "20 % slower"): lambda costs: Changed(costs, _of("grouped", 1.2)),
    ("attention", "10 % slower"): lambda costs: Changed(costs, _of("attention", 1.1)),
    ("memory bandwidth", "10 % lower"): lambda costs: Changed(costs, memory=1 / 0.9),
    (
        "kernels next to collectives",
        f"1.7 times as long as alone, not {EXPECTED.slowdown:g}",
    ): lambda costs: Changed(costs, conditions=replace(costs.conditions, slowdown=1.7)),
    ("collectives between NVLink domains", "25 % slower"): lambda costs: Changed(
        costs, network=1.25
    ),
    ("collectives inside NVLink domains", "25 % slower"): lambda costs: Changed(costs, nvlink=1.25),
    ("link to the host", "25 % slower"): lambda costs: Changed(costs, host=1.25),
    ("launches", "2 us more for each kernel"): lambda costs: Changed(costs, start_s=2 * MICRO),
}  # fmt: skip
"""The cost model with each change, by what is changed and how. The changes are about as large as
what we do not know."""


def sensitivities(walk: Walk, costs: Measured, step_s: float) -> list[Sensitivity]:
    """By how much each change makes a forecast step of `step_s` longer, the most first."""
    changes = {**CHANGES, SLOWEST: waiting_for_slowest(walk.program.devices)}
    found = [
        Sensitivity(
            what=what,
            change=change,
            percent=100 * (walk.under(changed(costs)).step_s / step_s - 1),
        )
        for (what, change), changed in changes.items()
    ]
    return sorted(found, key=lambda s: -s.percent)
