"""A forecast: the compiled schedule with measured times. `docs/design/forecast.md` explains it, and
`docs/forecast.md` compares it with published steps."""

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from jaxbench.base.hardware import Gpu
from jaxbench.forecast.costs import Measured
from jaxbench.forecast.interval import Interval, interval, timed_programs
from jaxbench.forecast.tables import FORMATS, Tables, within
from jaxbench.xla.collectives import Collective
from jaxbench.xla.hlo import Work, display_name
from jaxbench.xla.schedule import Walk

SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The forecast of a step, in seconds.

    `step_s` is what we expect, and `interval` says how far to trust it.

    `parts_s` add up to `step_s`. They are the kernels by what they are, the `launches`, what
    overlapping collectives add to kernels (`slowed`), and the waits for collectives by mesh axes
    (`exposed: fsdp`) and for copies to and from the host (`exposed: host`).

    `rests_on` divides the seconds of the step by what they rest on, the most first:

    - `measured shapes`
    - `in proportion` to measured shapes; `beyond` has the largest of these shapes
    - `bytes`: kernels without arithmetic
    - `links`: waits for collectives and copies, and being slowed by collectives
    - `nothing`: calls without a rule

    `outside` is the share of the kernels' seconds that are in proportion or rest on nothing.
    `unknown` has the seconds of calls without a rule by their names, from their bytes alone. Such a
    call may compute for any time, so with one of them there is no forecast.
    `sources` says where each kind of table is from. `assumed` says what stands in for tables that
    the program needs, and for which share of the step.
    """

    step_s: float
    interval: Interval
    parts_s: dict[str, float]
    rests_on: dict[str, float]
    outside: float
    beyond: list[str]
    sources: dict[str, str]
    unknown: dict[str, float] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)


def forecast(walk: Walk, gpu: Gpu, tables: Tables, axes: Callable[[Collective], str]) -> Forecast:
    """The forecast of a program's walk on a GPU. `axes` names the mesh axes of a collective."""
    costs = Measured(gpu, tables)
    expected = walk.under(costs)
    parts: defaultdict[str, float] = defaultdict(float, expected.parts)
    parts["slowed"] = expected.slowed_s
    for transfer in expected.transfers:
        parts[f"exposed: {axes(transfer.collective)}"] += transfer.exposed_s
    parts["exposed: host"] = expected.host.exposed_s
    bases = _bases(walk, costs)
    assumed = {name: s for name in tables.assumed if (s := bases.seconds_by([name]))}
    share = bases.seconds_by(assumed) / (expected.step_s or 1.0)
    rates = dict.fromkeys(map(in_words, assumed))
    largest = sorted(bases.beyond, key=lambda work: -bases.beyond[work])
    beyond_s, unknown_s = sum(bases.beyond.values()), sum(bases.unknown.values())
    rests_on = {
        "measured shapes": bases.measured_s,
        "in proportion": beyond_s,
        "nothing": unknown_s,
        "links": expected.slowed_s + expected.exposed_s,
    }
    rests_on["bytes"] = max(0.0, expected.step_s - sum(rests_on.values()))
    by_size = sorted(rests_on.items(), key=lambda base: -base[1])
    used = {name for names in bases.used for name in names}
    return Forecast(
        step_s=expected.step_s,
        interval=interval(expected.step_s, share, [*rates], timed_programs()),
        parts_s={name: seconds for name, seconds in parts.items() if seconds > 0},
        rests_on={name: s for name, s in by_size if s > 0},
        outside=(beyond_s + unknown_s) / (expected.kernel_s or 1.0),  # 0 without kernels
        beyond=[_named(work) for work in largest[:SHOWN]],
        sources={kind: source for kind, source in tables.sources.items() if _used(kind, used)},
        unknown=dict(bases.unknown),
        assumed=[
            f"{display_name(name)}: {tables.assumed[name]} "
            f"({100 * s / expected.step_s:.1f} % of the step)"
            for name, s in assumed.items()
        ],
    )


@dataclass
class _Bases:
    """What the seconds of a step's kernels rest on.

    `measured_s` are the seconds of work whose sizes the tables cover. `beyond` has the seconds of
    each work beyond the tables, and `unknown` those of each custom call without a rule, from the
    bytes that it moves. `used` has the seconds of all kernels by the tables that they use.
    """

    measured_s: float = 0.0
    beyond: defaultdict[Work, float] = field(default_factory=lambda: defaultdict(float))
    unknown: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    used: defaultdict[tuple[str, ...], float] = field(default_factory=lambda: defaultdict(float))

    def seconds_by(self, tables: Collection[str]) -> float:
        """Seconds of kernels that use one of these tables."""
        return sum(
            seconds
            for names, seconds in self.used.items()
            if any(within(name, table) for name in names for table in tables)
        )


def _bases(walk: Walk, costs: Measured) -> _Bases:
    """What the seconds of a program's walk rest on."""
    bases = _Bases()
    for _, kernel, runs in walk.kernels():
        for work in kernel.works:
            seconds = costs.work(work) * runs
            # A gradient of grouped weights uses the table of grouped matmuls too.
            also = [f"grouped {work.format}"] if work.kind == "grouped_weights" else []
            bases.used[costs.table(work), *also] += seconds
            if costs.covers(work):
                bases.measured_s += seconds
            else:
                bases.beyond[work] += seconds
        kernel_s = sum(costs.kernel(kernel).values()) * runs
        if not kernel.works:
            bases.used["memory",] += kernel_s
        if kernel.unknown:
            bases.unknown[kernel.unknown] += kernel_s
    return bases


def _used(kind: str, used: Collection[str]) -> bool:
    """False for a table of kernels that the program does not run. `kind` includes the name."""
    word = kind.split()[0]
    if word in ("attention", "kept", "scan"):
        runs = "attention" if word == "kept" else word
        return any(name.split()[0] == runs for name in used)
    return word not in ("product", "grouped", "grouped_weights") or kind in used


def in_words(name: str) -> str:
    """The name of a table of `Tables.assumed` for people: `grouped matmuls in MXFP8`."""
    kind, _, of = name.partition(" ")
    words = {
        "product": "matmuls", "grouped": "grouped matmuls", "scan": "Mamba-2's scan",
        "grouped_weights": "gradients of grouped weights", "memory": "kernels that move bytes",
    }.get(kind, kind)  # fmt: skip
    return f"{words} in {of if of == 'bf16' else of.upper()}" if of in FORMATS else words


def _named(work: Work) -> str:
    sizes = " x ".join(map(str, work.sizes))
    return f"{display_name(work.kind)} {work.dtype} {sizes}".rstrip()
