"""A forecast: the compiled schedule under measured times (`docs/design/forecast.md`; compared with
published steps in `docs/forecast.md`)."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxbench.forecast.costs import CONDITIONS, SCAN, Measured
from jaxbench.forecast.tables import Tables
from jaxbench.hardware import Gpu
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import Work
from jaxbench.xla.schedule import Walk
from jaxbench.xla.timeline import Schedule

SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast seconds of a step: `step_s` is expected; `fast_s` is the least and `slow_s` the most
    of all independent tables of products, under the other scenarios of `costs.CONDITIONS`.

    `parts_s` add up to `step_s`: kernels by what they are, `launches`, what overlapping
    collectives add to them (`slowed`), and waiting for collectives by mesh axes (`exposed: fsdp`)
    and for copies to and from the host (`exposed: host`).
    `rests_on` are seconds of the step by what they rest on, the most first: `measured shapes`;
    shapes `in proportion` to measured ones, the largest of which are `beyond`; `bytes` of kernels
    without arithmetic; `links`, what collectives and copies are waited for and slow down; and
    `nothing`, custom calls without a rule. `outside` is the share of the kernels' seconds in
    proportion or on nothing; `unknown` are the seconds, by bytes alone, of custom calls without a
    rule, by target; `sources` says where each kind of table is from, `assumed` what stands in for
    tables that the program needs.
    """

    step_s: float
    fast_s: float
    slow_s: float
    parts_s: dict[str, float]
    rests_on: dict[str, float]
    outside: float
    beyond: list[str]
    sources: dict[str, str]
    unknown: dict[str, float] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)


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
    measured_s, beyond, unknown, used = _bases(walk, expected_costs)
    largest = sorted(beyond, key=lambda work: -beyond[work])
    beyond_s, unknown_s = sum(beyond.values()), sum(unknown.values())
    rests_on = {"measured shapes": measured_s, "in proportion": beyond_s, "nothing": unknown_s}
    rests_on["links"] = expected.slowed_s + expected.exposed_s
    rests_on["bytes"] = max(0.0, expected.step_s - sum(rests_on.values()))
    by_size = sorted(rests_on.items(), key=lambda base: -base[1])
    return Forecast(
        step_s=expected.step_s,
        fast_s=min(steps("fast")),
        slow_s=max(steps("slow")),
        parts_s={name: seconds for name, seconds in parts.items() if seconds > 0},
        rests_on={name: s for name, s in by_size if s > 0},
        outside=(beyond_s + unknown_s) / expected.kernel_s,
        beyond=[_named(work) for work in largest[:SHOWN]],
        sources={
            kind: source
            for kind, source in tables.sources.items()
            if not kind.startswith("repeated ") or kind.removeprefix("repeated ") in used
        },
        unknown=unknown,
        assumed=[
            f"{kind}: {instead}"
            for kind, instead in tables.assumed.items()
            if kind.removeprefix("product ") in used
        ],
    )


def expected_schedule(walk: Walk, gpu: Gpu, tables: Tables) -> Schedule:
    """The schedule whose seconds a forecast expects."""
    return walk.under(Measured(gpu, tables, CONDITIONS["expected"], walk.program.devices))


def _bases(
    walk: Walk, costs: Measured
) -> tuple[float, dict[Work, float], dict[str, float], set[str]]:
    """Seconds per step of work whose sizes the tables cover, of work that they do not reach, and of
    custom calls without a rule, those of the bytes that they move; and the tables that are used:
    formats of products, and kinds of other work."""
    measured_s, used = 0.0, set()
    beyond: defaultdict[Work, float] = defaultdict(float)
    unknown: defaultdict[str, float] = defaultdict(float)
    for _, kernel, runs in walk.kernels():
        for work in kernel.works:
            kind = "scan" if work.kind.startswith(SCAN) else work.kind
            used.add(costs.format(work) if kind == "product" else kind)
            if costs.covers(work):
                measured_s += costs.work(work) * runs
            else:
                beyond[work] += costs.work(work) * runs
        if kernel.unknown:
            unknown[kernel.unknown] += sum(costs.kernel(kernel).values()) * runs
    return measured_s, dict(beyond), dict(unknown), used


def _named(work: Work) -> str:
    return f"{work.kind} {work.dtype} {' x '.join(map(str, work.sizes))}".rstrip()
