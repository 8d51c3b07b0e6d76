"""`jaxbench plan --format html`: the page of a row, in the style of the report's page."""

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from jaxbench.base.errors import counted
from jaxbench.forecast.forecast import Forecast
from jaxbench.pages.charts import SECONDS, WAITING, Bar, waterfall
from jaxbench.pages.html import attached, render, settings
from jaxbench.plan import text
from jaxbench.plan.compiled_step import Step
from jaxbench.plan.plan import Plan, parts
from jaxbench.plan.text import gib
from jaxbench.recipe.published import ERRATA
from jaxbench.results.plans import MINIMUM_S, part_name
from jaxbench.xla.hlo import display_name
from jaxbench.xla.timeline import LINKS

PARTS = ("model", "parallelism", "precision", "batch", "optimizer", "execution")
UNSURE = ("in proportion", "nothing")
"""The bases of a forecast that are least sure."""

ASKED = ("recipe", "row", "gpus", "target", "settings.", "system.", "flags.", "versions.")
"""Beginnings of the names of values that somebody chose."""

UNITS = (
    (r"_s($|\.)|rests_on|\.unknown\.", "s", 1.0),
    (r"bytes|^host\.", "GiB", 2**30),
    (r"^flops\.(compiled|model)", "TFLOP", 1e12),
    (r"^parameters$", "billions", 1e9),
)
"""A pattern in the name of a plan's value, the unit in which we show it, and how many of the plan's
own units that is."""


def plan_page(plan: Plan) -> str:
    """The page of one row."""
    row = plan.published
    return render(
        "plan.html",
        title=f"Plan: {plan.recipe} on {gpus(plan)}",
        plan=plan,
        headline=headline(plan),
        facts=facts(plan),
        memory=memory(plan),
        pipeline=text.pipeline(plan),
        assumptions=[*assumptions(plan)],
        **step_content(plan, parts(plan), (row["step_time_s"], row["gpu_type"]) if row else None),
        errata={code: ERRATA[code] for code in (plan.published or {}).get("errata", ())},
        settings=settings(plan.settings, PARTS),
        flags=sorted(plan.flags.items()),
        file=f"{plan.recipe}-{plan.row}-{plan.target}.json.gz",
        href=attached(asdict(plan)),
    )


def difference_page(a: Plan, b: Plan) -> str:
    """The page of `--diff`: what was changed between two plans, and what moved as a result."""
    lines = [
        (shown(name, x, y), text.ratio(x, y), name.startswith(ASKED))
        for name, x, y in text.differences(a, b)
    ]
    ratio = b.forecast_step_s / a.forecast_step_s
    steps = ((f"{name}: {p.recipe} on {gpus(p)}", p) for name, p in (("A", a), ("B", b)))
    return render(
        "diff.html",
        title="Two plans",
        headline=f"A step of B is forecast to take {b.forecast_step_s:.3f} s, "
        f"{ratio:.3f} times A's {a.forecast_step_s:.3f} s.",
        asked=[line for line, _, asked in lines if asked],
        moved=[(*line, r) for line, r, asked in lines if not asked and r != text.ratio(1, 1)],
        steps=[(name, forecast(p.forecast, parts(p), None)) for name, p in steps],
        full=max(a.forecast.interval.high_s, b.forecast.interval.high_s),
    )


def shown(name: str, *values: Any) -> list[str]:
    """The name of a plan's value with its unit, and the values in this unit."""
    if not name.startswith(("rates.", *ASKED)):
        for pattern, unit, size in UNITS:
            if re.search(pattern, name):
                numbers = ("-" if value is None else f"{value / size:,.3f}" for value in values)
                return [f"{name}, {unit}", *numbers]
    return [name, *map(as_words, values)]


def as_words(value: Any) -> str:
    """A value without a unit, as people see it."""
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:,.1f}".removesuffix(".0") if abs(value) >= 1000 else f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def step_content(
    step: Step, seconds: dict[str, float], published: tuple[float, str] | None = None
) -> dict[str, Any]:
    """The content that the page of any step has: the seconds of its forecast by part, next to a
    published step and its GPU."""
    f, others = step.forecast, step.other_kernels
    return {
        "published": published,
        "full": max(step.bound_step_s, f.interval.high_s, *(published or ())[:1]),
        "bound": steps_of(step.bound_parts_s, "bound", step.bound_step_s, published),
        "forecast": forecast(f, seconds, published),
        "trust": text.trust(f),
        "links": LINKS,
        "kernels": text.kernels(step),
        "others": [
            Bar("part", k.source, 0, k.seconds, f"{k.seconds:.3f} s, {counted(k.launches, 'time')}")
            for k in others
        ],
        "full_others": max((k.seconds for k in others), default=0.0) or 1.0,
        "rests": [
            Bar("other" if name in UNSURE else "part", name, 0, s, f"{100 * s / f.step_s:.0f} %")
            for name, s in f.rests_on.items()
        ],
        "moves": [
            Bar("part", f"{s.what}: {s.change}", 0, s.percent, f"{s.percent:+.1f} %")
            for s in step.sensitivities
            if s.percent >= text.MOVES
        ],
    }


def in_gib(count: float) -> str:
    """Bytes in GiB, without the unit."""
    return gib(count).split()[0]


def gpus(plan: Plan) -> str:
    """`8 H100 GPUs`."""
    return counted(plan.gpus, f"{plan.target.upper()} GPU")


def headline(plan: Plan) -> str:
    """The page's conclusion: does it fit, and how long will it take?"""
    size, changes = plan.bytes_per_device, plan.settings["overrides"]
    where = " ".join([plan.recipe, *changes, "on", gpus(plan)])
    if size.peak > size.limit:
        return f"{where} does not fit: {gib(size.peak)} of {gib(size.limit)} per GPU."
    if not plan.fits:
        host = f"{gib(size.host)} of {gib(size.host_limit)}"
        return f"{where} does not fit the host's memory: {host} per GPU."
    of = ""
    if plan.published:
        ratio = plan.forecast_step_s / plan.published["step_time_s"]
        gpu = plan.published["gpu_type"]
        on = "" if gpu == plan.target else f" on {gpu.upper()}"
        of = f", {ratio:.2f} times the published step{on}"
    return f"{where} fits. A step is forecast to take {plan.forecast_step_s:.2f} s{of}."


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """The first lines: a figure, and what it is."""
    rates, size = plan.rates["forecast"], plan.bytes_per_device
    within = plan.forecast.interval
    yield f"{within.low_s:.2f} to {within.high_s:.2f} s", "90 % interval of the forecast"
    yield f"{plan.bound_step_s:.2f} s", "bound: no step can be faster"
    yield f"{rates.tokens_per_s_per_gpu:,.0f}", "tokens/s/GPU"
    if rates.mfu is not None:
        yield f"{100 * rates.mfu:.1f} %", "MFU"
    yield gib(abs(size.limit - size.peak)), "headroom" if size.peak <= size.limit else "too much"
    yield gib(plan.wire_bytes), "sent per GPU and step"


def memory(plan: Plan) -> dict[str, Any]:
    """Bars up to the limit for what is in memory at the peak; the largest buffers; and the host's
    part."""
    size, state = plan.bytes_per_device, plan.state_bytes
    held = {"parameters": state.parameters, "optimizer": state.optimizer}
    held |= {"gradients": state.gradients} if state.gradients else {}
    held["other temporaries" if state.gradients else "temporaries"] = size.peak - sum(held.values())
    largest = [
        Bar("part", f"{b.name} {b.shape}", 0, b.bytes, in_gib(b.bytes))
        for b in plan.largest_buffers
    ]
    return {
        "rows": [*waterfall(held, in_gib), whole("peak", size.peak, size.limit)],
        "full": max(size.peak, size.limit),
        "buffers": largest,
        "largest": max((bar.length for bar in largest), default=1),
        "host": [whole("activations", size.host, size.host_limit)] if size.host else [],
        "host_full": max(size.host, size.host_limit),
    }


def whole(name: str, size: int, limit: int) -> Bar:
    """The bar of all bytes. It has another class if they exceed the limit."""
    return Bar("ours" if size <= limit else "over", name, 0, size, in_gib(size))


def steps_of(
    seconds: dict[str, float], name: str, total_s: float, published: tuple[float, str] | None
) -> list[Bar]:
    """A step's parts one after the other, then the step, then the published step with its GPU."""
    shown = {part_name(part): s for part, s in in_order(seconds) if s >= MINIMUM_S}
    bars = [*waterfall(shown, SECONDS), Bar("ours", name, 0, total_s, SECONDS(total_s))]
    if published:
        step_s, gpu = published
        bars.append(Bar("total", f"published, {gpu.upper()}", 0, step_s, f"{step_s:.5g}"))
    return bars


def in_order(seconds: dict[str, float]) -> list[tuple[str, float]]:
    """The parts of a step: the longest first, and last the parts that wait or are slowed."""
    return sorted(seconds.items(), key=lambda part: (part[0].startswith(WAITING), -part[1]))


def forecast(
    f: Forecast, seconds: dict[str, float], published: tuple[float, str] | None
) -> list[Bar]:
    """The forecast's parts and its interval."""
    bars = steps_of(seconds, "forecast", f.step_s, published)
    low, high = f.interval.low_s, f.interval.high_s
    return [*bars, Bar("part", "90 % interval", low, high - low, f"{low:.3f} to {high:.3f}")]


def assumptions(plan: Plan) -> Iterator[tuple[str, str]]:
    """What a plan assumes, as pairs: the subject, and the assumption."""
    yield from system_assumptions(plan, plan.system, plan.bytes_per_device.limit)
    yield "Compiler", f"jax {plan.versions['jax']}, {plan.lower_s + plan.compile_s:.0f} s"


def system_assumptions(step: Step, gpu: dict[str, Any], limit: int) -> Iterator[tuple[str, str]]:
    """What a forecast assumes, as pairs: the subject, and the assumption. `gpu` is the system
    (`traffic.system`); a program has `limit` bytes of its memory."""
    f = step.forecast
    for source in dict.fromkeys(f.sources.values()):
        kinds = (
            display_name(kind.split()[0]) for kind, file in f.sources.items() if file == source
        )
        yield "Measured", f"{', '.join(dict.fromkeys(kinds))}: {source}"
    if f.beyond:
        yield "In proportion", "; ".join(f.beyond)
    yield from (("Assumed", assumed) for assumed in f.assumed)
    for target, seconds in f.unknown.items():
        yield "No rule", f"{target}: {seconds:.3f} s for its bytes alone"
    memory = f"{gpu['bandwidth']:g} GB/s"
    yield "Memory", f"{gib(gpu['memory'])} at {memory}, {gib(limit)} of it for a program"
    yield "NVLink", f"{gpu['nvlink']:g} GB/s from each GPU, among {counted(gpu['domain'])}"
    yield "Network", f"{gpu['nic']:g} GB/s from each GPU"
    yield "Host", f"{gpu['host']:g} GB/s between each GPU and its host's memory"
