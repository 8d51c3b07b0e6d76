"""`jaxbench plan --format html`: the page of a row, in the style of the report's page."""

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from jaxbench.base.errors import counted
from jaxbench.forecast.forecast import Forecast
from jaxbench.pages.charts import SECONDS, WAITING, Bar, three_digits, waterfall
from jaxbench.pages.html import attached, render, settings
from jaxbench.plan import text
from jaxbench.plan.compiled_step import Step
from jaxbench.plan.plan import Memory, Plan, parts
from jaxbench.plan.text import gib, in_gib
from jaxbench.recipe import recipes
from jaxbench.recipe.families import MODELS
from jaxbench.recipe.flops import days_per_1t_tokens
from jaxbench.recipe.names import gpus_name, work_name
from jaxbench.recipe.published import ERRATA, Row
from jaxbench.results.plans import MINIMUM_S, part_name
from jaxbench.xla.hlo import display_name
from jaxbench.xla.memory import Buffer
from jaxbench.xla.timeline import LINKS

UNSURE = ("in proportion", "nothing")
"""The bases of a forecast that are least sure."""

NEAR = 0.02
"""A forecast that is as near to the published step needs no reason."""

ARITHMETIC = ("products", "recompute", "attention")
"""Parts of a step that are matmuls and attention."""

SAVED = re.compile(r"forward .*, \d+ times")
"""The name of a stack that the forward pass leaves for the backward pass."""

MOMENTS = {"mu": "first moment", "nu": "second moment"}


class Box(NamedTuple):
    """A figure of the first screen, what it is, and a CSS class for a verdict."""

    figure: str
    what: str
    css: str = ""


def plan_page(plan: Plan, remedy: str = "") -> str:
    """The page of one row. `remedy` says how to make it fit."""
    row = plan.published
    how = [("How to make it fit:", remedy)] if remedy else []
    return render(
        "plan.html",
        title=f"{title(plan)}: plan",
        plan=plan,
        jax=plan.versions["jax"],
        headline=headline(plan),
        summary=" ".join(summary(plan)),
        boxes=[*boxes(plan)],
        reasons=[*how, *questions(plan)],
        memory=memory_content(plan),
        pipeline=text.pipeline(plan),
        assumptions=[*assumptions(plan)],
        **step_content(plan, parts(plan), row),
        errata={code: ERRATA[code] for code in (row.errata if row else ())},
        settings=settings(plan.settings, [*recipes.SECTIONS]),
        flags=sorted(plan.flags.items()),
        file=f"{plan.recipe}-{plan.row}-{plan.target}.json.gz",
        href=attached(asdict(plan)),
    )


def title(plan: Plan) -> str:
    """The work of a plan and its GPUs, with what its user changed."""
    changes = ", ".join(plan.settings["overrides"])
    work = f"{work_name(plan.settings)} on {gpus_name(plan.gpus, plan.target)}"
    return f"{work}, {changes}" if changes else work


def headline(plan: Plan) -> str:
    """The page's conclusion: how long does a step take, or does it not fit?"""
    if not plan.fits:
        return f"{title(plan)}: does not fit"
    if plan.forecast.unknown:
        return f"{title(plan)}: no forecast"
    return f"{title(plan)}: {three_digits(plan.forecast_step_s)} s per step"


def summary(plan: Plan) -> Iterator[str]:
    """Whether a row fits and what dominates its step, in sentences."""
    layers = plan.settings["model"]["layers"]
    if plan.fits:
        yield "It fits."
    if plan.settings["label"] == "proxy":
        yield f"It is a proxy: a changed model, with {layers} layers."
    if plan.settings["label"] == "derived":
        batch = plan.settings["batch"]["global_batch"]
        yield f"Its row is derived, with {layers} layers and a batch of {batch}."
    if not plan.forecast.unknown:
        yield dominating(parts(plan), plan.forecast_step_s)


def dominating(seconds: dict[str, float], step_s: float) -> str:
    """What takes most of a step, and how much of it is traffic."""
    arithmetic = sum(s for name, s in seconds.items() if name in ARITHMETIC) / step_s
    again = ", some of them repeated" if seconds.get("recompute") else ""
    traffic = sum(s for name, s in seconds.items() if name.startswith(WAITING)) / step_s
    waits = "less than 1 %" if traffic < 0.01 else f"{100 * traffic:.0f} %"
    return (
        f"{100 * arithmetic:.0f} % of the step is matmuls and attention{again}; {waits} is waiting "
        "for collectives and copies or being slowed by them."
    )


def boxes(plan: Plan) -> Iterator[Box]:
    """The four figures of the first screen. The rate and the days are missing if there is no
    forecast, the days if the model is a changed one."""
    rates, size = plan.rates["forecast"], plan.bytes_per_device
    if plan.forecast.unknown:
        yield Box("no forecast", f"bound: no step can be faster than {plan.bound_step_s:.3g} s")
    else:
        yield step_box(plan.forecast)
        mfu = "MFU unknown" if rates.mfu is None else f"{100 * rates.mfu:.1f} % MFU"
        yield Box(f"{rates.tokens_per_s_per_gpu:,.0f}", f"tokens/s per GPU; {mfu}")
        if whole_model(plan.settings):
            days = days_per_1t_tokens(rates.tokens_per_s_per_gpu * plan.gpus)
            hours = three_digits(24 * days * plan.gpus)
            what = f"for 1 trillion tokens on {gpus_name(plan.gpus, plan.target)}"
            yield Box(f"{three_digits(days)} days", f"{what}; {hours} GPU hours")
    yield memory_box(size)


def whole_model(settings: dict[str, Any]) -> bool:
    """False for a model that was shortened or changed."""
    model = settings["model"]
    name = model["family"], model["size"]
    published = (m.layers for m in MODELS.values() if (m.family, m.size) == name)
    changed = any(change.startswith("model.") for change in settings["overrides"])
    return settings["label"] != "proxy" and not changed and model["layers"] in published


def step_box(f: Forecast) -> Box:
    """The seconds of a step, with the interval of the forecast."""
    low, high = three_digits(f.interval.low_s), three_digits(f.interval.high_s)
    return Box(f"{three_digits(f.step_s)} s", f"per step; 90 % interval {low} to {high} s")


def memory_box(size: Memory) -> Box:
    """The memory that is free on a GPU, or that a step has too much of on GPU or host."""
    of = f"{in_gib(size.peak)} of {gib(size.limit)} per GPU"
    if size.peak > size.limit:
        return Box("✕ does not fit", f"{of}, {gib(size.peak - size.limit)} too much", "bad")
    if not size.fits:
        host = f"{in_gib(size.host)} of {gib(size.host_limit)} of host memory per GPU"
        return Box("✕ does not fit", f"{host}; on the GPU {of}", "bad")
    return Box(f"✓ {gib(size.limit - size.peak)} free", f"fits: {of}", "good")


def questions(plan: Plan) -> Iterator[tuple[str, str]]:
    """Questions and answers: why does the forecast differ from the published step, and how far can
    one trust it?"""
    f, row = plan.forecast, plan.published
    if f.unknown:
        yield no_forecast(f)
        return
    yield _why_it_differs(plan, row) if row else ("Nothing is published for this work.", "")
    unsure = f.rests_on.get("in proportion", 0.0) / f.step_s
    more = f"; {100 * unsure:.0f} % of it is in proportion to other shapes" if unsure else ""
    yield "How far to trust it:", f"{text.trust(f)}{more}."


def no_forecast(f: Forecast) -> tuple[str, str]:
    """The question why there is no forecast, and its answer."""
    calls = ", ".join(f.unknown)
    return "Why is there no forecast?", f"We do not know what these calls compute: {calls}."


def _why_it_differs(plan: Plan, row: Row) -> tuple[str, str]:
    published_s = row.step_time_s
    step = f"The published step, {three_digits(published_s)} s, is of another program"
    if row.gpu_type != plan.target:
        return "Why does it differ from the published step?", f"{step} on {row.gpu.name}."
    change, within = plan.forecast_step_s / published_s - 1, plan.forecast.interval
    question = "How near is it to the published step?"
    if abs(change) >= NEAR:
        where = f"{100 * abs(change):.0f} % {'below' if change < 0 else 'above'}"
        question = f"Why {where} the published step?"
    lies = "outside of the interval"
    if within.low_s <= published_s <= within.high_s:
        lies = "in the interval, so the difference may be an error of the forecast"
    differs = "docs/forecast.md says how the programs of each model differ"
    return question, f"{step}; {differs}. The published step lies {lies}."


def step_content(
    step: Step, seconds: dict[str, float], published: Row | None = None
) -> dict[str, Any]:
    """The content that the page of any step has: the seconds of its forecast by part, next to a
    published step and its GPU."""
    f, others = step.forecast, step.other_kernels
    shown, bound = named_parts(seconds), named_parts(step.bound_parts_s)
    return {
        "steps": bars_of_steps(step, seconds, published),
        "full": max(
            step.bound_step_s, f.interval.high_s, published.step_time_s if published else 0.0
        ),
        "parts": [
            bar._replace(text=f"{bar.length:.3f} s, {100 * bar.length / f.step_s:.1f} %")
            for bar in waterfall({} if f.unknown else shown, SECONDS)
        ],
        "bound": ", ".join(f"{name} {s:.3f} s" for name, s in bound.items()),
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


def memory_content(plan: Plan) -> dict[str, Any]:
    """A stacked bar of what is in memory at the peak, with its limit; the same for the host; and
    the largest buffers."""
    size, state = plan.bytes_per_device, plan.state_bytes
    held = {"parameters": state.parameters, "optimizer": state.optimizer}
    held |= {"gradients": state.gradients} if state.gradients else {}
    left = size.peak - sum(held.values())
    saved = sum(b.bytes for b in plan.largest_buffers if SAVED.fullmatch(b.name))
    if left / 2 <= saved <= left:
        held |= {"saved activations": saved, "other temporaries": left - saved}
    else:  # XLA does not list enough of them
        held["activations and other temporaries"] = left
    return {
        "rows": [total_bar("peak", size.peak, size.limit)._replace(pieces=waterfall(held, in_gib))],
        "full": max(size.peak, size.limit),
        "buffers": [
            Bar("part", f"{buffer_name(b)} {b.shape}", 0, b.bytes, in_gib(b.bytes))
            for b in plan.largest_buffers
        ],
        "largest": max((b.bytes for b in plan.largest_buffers), default=1),
        "host": [total_bar("saved activations", size.host, size.host_limit)] if size.host else [],
        "host_full": max(size.host, size.host_limit),
    }


def buffer_name(buffer: Buffer) -> str:
    """The name of a buffer; arrays of the train state by what they are:
    `optimizer, first moment: mixer.gate_up` for `state.optimizer[1][0].mu...gate_up.value`."""
    path = re.sub(r"(stacks|layers)\[\d+\]\.|\.value$", "", buffer.name)
    found = re.fullmatch(r"state\.(model|optimizer)(?:\[\d+\])*\.(?:(mu|nu)\.)?(\S+)", path)
    if found is None:
        return buffer.name
    kind, moment, name = found.groups()
    if kind == "model":
        return f"parameters: {name}"
    return f"optimizer, {MOMENTS[moment]}: {name}" if moment else f"optimizer: {name}"


def total_bar(name: str, size: int, limit: int) -> Bar:
    """The bar of all bytes. It has another class if they exceed the limit."""
    return Bar("ours" if size <= limit else "over", name, 0, size, in_gib(size))


def bars_of_steps(step: Step, seconds: dict[str, float], published: Row | None) -> list[Bar]:
    """Bound, forecast and published step with its GPU. The forecast has its parts and interval."""
    f, bound_s = step.forecast, step.bound_step_s
    bars = [Bar("bound", "bound: no step can be faster", 0, bound_s, f"{three_digits(bound_s)} s")]
    if not f.unknown:
        figure = f"{three_digits(f.step_s)} s"
        pieces = waterfall(named_parts(seconds), three_digits)
        interval = f.interval.low_s, f.interval.high_s
        bars.append(Bar("ours", "forecast", 0, f.step_s, figure, pieces, interval))
    if published:
        name = f"published on {published.gpu.name}: another program"
        published_s = published.step_time_s
        bars.append(Bar("total", name, 0, published_s, f"{three_digits(published_s)} s"))
    return bars


def named_parts(seconds: dict[str, float]) -> dict[str, float]:
    """The parts of a step that are long enough to show, by their names: the longest first, and last
    the parts that wait or are slowed."""
    named = [(part_name(name), s) for name, s in seconds.items() if s >= MINIMUM_S]
    return dict(sorted(named, key=lambda part: (part[0].startswith(WAITING), -part[1])))


def assumptions(plan: Plan) -> Iterator[tuple[str, str]]:
    """What a plan assumes, as pairs: the subject, and the assumption."""
    yield from system_assumptions(plan, plan.system, plan.bytes_per_device.limit)
    yield "Compiler", f"jax {plan.versions['jax']}, {plan.lower_s + plan.compile_s:.0f} s"


def system_assumptions(step: Step, gpu: dict[str, Any], limit: int) -> Iterator[tuple[str, str]]:
    """What a forecast assumes, as pairs: the subject, and the assumption. `gpu` is the system
    (`systems.system`); a program has `limit` bytes of its memory."""
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
    leaf = f", {gpu['leaf']} domains below a leaf switch" if gpu.get("leaf") else ""
    over = f", {gpu['oversubscription']:g} to 1 oversubscribed" if leaf else ""
    yield "Network", f"{gpu['nic']:g} GB/s from each GPU{leaf}{over}"
    yield "Host", f"{gpu['host']:g} GB/s between each GPU and its host's memory"
