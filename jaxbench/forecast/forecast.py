"""A forecast: the compiled schedule under measured times (`docs/design/forecast.md`; compared with
published steps in `docs/forecast.md`)."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxbench.forecast.costs import CONDITIONS, Measured
from jaxbench.forecast.tables import Tables
from jaxbench.hardware import Gpu
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import Work
from jaxbench.xla.schedule import Walk

SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast seconds of a step: `step_s` is expected; `fast_s` is the least and `slow_s` the most
    of all independent tables of products, under the other scenarios of `costs.CONDITIONS`.

    `parts_s` add up to `step_s`: kernels by what they are, `launches`, what overlapping
    collectives add to them (`slowed`), and waiting for collectives by mesh axes (`exposed: fsdp`)
    and for copies to and from the host (`exposed: host`).
    `outside` is the share of the kernels' seconds for which a shape lies outside the tables, whose
    largest are `beyond`; `unknown` are the seconds, by bytes alone, of custom calls without a rule,
    by target, and part of `outside`; `sources` says where each kind of table is from.
    """

    step_s: float
    fast_s: float
    slow_s: float
    parts_s: dict[str, float]
    outside: float
    beyond: list[str]
    sources: dict[str, str]
    unknown: dict[str, float] = field(default_factory=dict)


def forecast(walk: Walk, gpu: Gpu, tables: Tables, axes: Callable[[Collective], str]) -> Forecast:
    """The forecast of a program's walk on a GPU; `axes` names the mesh axes of a collective."""

    def costs(conditions: str, tables: Tables = tables) -> Measured:
        return Measured(gpu, tables, CONDITIONS[conditions], walk.program.devices)

    def steps(conditions: str) -> list[float]:
        return [walk.under(costs(conditions, t)).step_s for t in tables.independent()]

    expected_costs = costs("expected")
    expected = walk.under(expected_costs)
    parts: defaultdict[str, float] = defaultdict(float, expected.parts)
    parts["slowed"] = expected.slowed_s
    for transfer in expected.transfers:
        parts[f"exposed: {axes(transfer.collective)}"] += transfer.exposed_s
    parts["exposed: host"] = expected.host.exposed_s
    beyond, unknown = _outside(walk, expected_costs)
    largest = sorted(beyond, key=lambda work: -beyond[work])
    outside = sum(beyond.values()) + sum(unknown.values())
    return Forecast(
        step_s=expected.step_s,
        fast_s=min(steps("fast")),
        slow_s=max(steps("slow")),
        parts_s={name: seconds for name, seconds in parts.items() if seconds > 0},
        outside=outside / expected.kernel_s,
        beyond=[_named(work) for work in largest[:SHOWN]],
        sources=dict(tables.sources),
        unknown=unknown,
    )


def _outside(walk: Walk, costs: Measured) -> tuple[dict[Work, float], dict[str, float]]:
    """Seconds per step of the work that the tables do not reach, and of custom calls without a
    rule, those of the bytes that they move."""
    beyond: defaultdict[Work, float] = defaultdict(float)
    unknown: defaultdict[str, float] = defaultdict(float)
    for _, kernel, runs in walk.kernels():
        for work in kernel.works:
            if not costs.covers(work):
                beyond[work] += costs.work(work) * runs
        if kernel.unknown:
            unknown[kernel.unknown] += sum(costs.kernel(kernel).values()) * runs
    return beyond, dict(unknown)


def _named(work: Work) -> str:
    return f"{work.kind} {work.dtype} {' x '.join(map(str, work.sizes))}"
