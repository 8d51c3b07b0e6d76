"""`jaxbench plan --diff`: what somebody changed between two plans, what followed from it, and which
parts of the step moved; as text and as a page."""

import math
from collections.abc import Iterator
from typing import Any

from jaxbench.base.errors import listed
from jaxbench.pages.charts import Bar
from jaxbench.pages.html import render
from jaxbench.plan.plan import Plan, parts
from jaxbench.plan.row_page import title
from jaxbench.plan.text import gib
from jaxbench.recipe.build import flat
from jaxbench.results.plans import part_name

FOLLOWS = ("mesh", "settings", "system", "planned_flags", "flags")
"""Fields of a plan that follow from what somebody changed."""

ELSEWHERE = {f"settings.{name}" for name in ("recipe", "row", "gpus", "label", "overrides")}
"""Settings that another line has already."""

GIB = 2**30

SHOWN, SHARE = 4, 0.001
"""The most parts that the conclusion names, and the least share of the step by which they move."""

Line = tuple[str, Any, Any]
"""The name of a value, and the value in both plans."""


def report(a: Plan, b: Plan) -> str:
    """The difference as text: the conclusion, and all values that differ."""
    followed, moved = [*follows(a, b)], [*moves(a, b)]
    if not (changed(a, b) or followed or moved):
        return "the plans are the same"
    table = [*([*texts(line), ""] for line in followed), *moved]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)] if table else []
    return "\n".join(
        [
            *(" ".join(filter(None, pair)) for pair in conclusion(a, b)),
            f"A: {title(a)}",
            f"B: {title(b)}",
            *([""] if table else []),
            *("  ".join(map(str.ljust, line, widths)).rstrip() for line in table),
        ]
    )


def page(a: Plan, b: Plan) -> str:
    """The difference as a page."""
    (_, headline), *others = conclusion(a, b)
    moved = longer_parts(a, b)
    longer = moved | {"step": b.forecast_step_s - a.forecast_step_s} if moved else {}
    before = max((-s for s in longer.values() if s < 0), default=0.0)
    full = before + max((s for s in longer.values() if s > 0), default=0.0) or 1.0
    return render(
        "diff.html",
        title=headline,
        headline=headline,
        jax=a.versions["jax"] if a.versions["jax"] == b.versions["jax"] else None,
        conclusion=others,
        plans=[("A:", title(a)), ("B:", title(b))],
        asked=[*map(texts, changed(a, b))],
        followed=[*map(texts, follows(a, b))],
        bars_of=[
            Bar(_class(name, s), name, before + min(0.0, s), abs(s), f"{s:+.3f}")
            for name, s in longer.items()
        ],
        before=before,
        full=full,
        moved=[*moves(a, b)],
    )


def _class(name: str, seconds: float) -> str:
    """The CSS class of a part that became longer or shorter, and of the step."""
    return "ours" if name == "step" else "other" if seconds > 0 else "good"


def conclusion(a: Plan, b: Plan) -> Iterator[tuple[str, str]]:
    """The answer as pairs of a heading and a line; the first has no heading."""
    asked, followed = changed(a, b), [*follows(a, b)]
    yield "", slower(a, b)
    what = (f"{name} {as_words(x)} -> {as_words(y)}" for name, x, y in asked)
    follow = f" ({len(followed)} more {'follows' if len(followed) == 1 else 'follow'})"
    yield "changed:", (listed(what, SHOWN) or "nothing that somebody set") + follow * bool(followed)
    longer = longer_parts(a, b)
    if longer and not a.forecast.unknown and not b.forecast.unknown:
        yield (
            "why:",
            listed((f"{s:+.{_decimals(a)}f} s {name}" for name, s in longer.items()), SHOWN),
        )
    yield "memory:", _memory(a, b)


def slower(a: Plan, b: Plan) -> str:
    """How a step of B compares with one of A. If they train other numbers of tokens per GPU, we
    compare their rates."""
    for name, plan in (("A", a), ("B", b)):
        if plan.forecast.unknown:
            return f"There is no forecast of {name}."
    before_s, after_s = a.forecast_step_s, b.forecast_step_s
    if not math.isclose(_tokens(a), _tokens(b)):
        rates = [plan.rates["forecast"].tokens_per_s_per_gpu for plan in (a, b)]
        more = 100 * (rates[1] / rates[0] - 1)
        return (
            f"B trains {abs(more):.1f} % {'more' if more > 0 else 'fewer'} tokens/s per GPU: "
            f"{rates[1]:,.0f} instead of {rates[0]:,.0f}."
        )
    digits = _decimals(a)
    figures = f"{after_s:.{digits}f} s instead of {before_s:.{digits}f} s"
    longer = 100 * (after_s / before_s - 1)
    if abs(longer) < 0.05:
        return f"B is as fast as A: {figures}."
    if longer > 0:
        return f"B is {longer:.1f} % slower: {figures}."
    return f"B takes {-longer:.1f} % less time: {figures}."


def _tokens(plan: Plan) -> float:
    """Tokens that one GPU trains on in a step."""
    batch: dict[str, int] = plan.settings["batch"]
    return batch["global_batch"] * batch["sequence_length"] / plan.gpus


def _decimals(plan: Plan) -> int:
    """The decimals with which the step has four digits."""
    return max(0, 3 - math.floor(math.log10(plan.forecast_step_s)))


def _memory(a: Plan, b: Plan) -> str:
    """The peaks of both, and which of them does not fit."""
    before, after = a.bytes_per_device.peak, b.bytes_per_device.peak
    text = f"{gib(after)} instead of {gib(before)} per GPU"
    too_big = " and ".join(name for name, plan in (("A", a), ("B", b)) if not plan.fits)
    verb = "do" if len(too_big) > 1 else "does"
    return f"{text}; {too_big} {verb} not fit" if too_big else f"{text}; both fit"


def longer_parts(a: Plan, b: Plan) -> dict[str, float]:
    """By how many seconds the parts of B are longer than those of A, the most first; parts that
    move by less than `SHARE` of the step are left out."""
    before, after = parts(a), parts(b)
    longer = {n: after.get(n, 0.0) - before.get(n, 0.0) for n in dict.fromkeys([*before, *after])}
    least = SHARE * a.forecast_step_s
    moved = sorted(longer.items(), key=lambda part: -abs(part[1]))
    return {part_name(name): s for name, s in moved if abs(s) >= least}


def changed(a: Plan, b: Plan) -> list[Line]:
    """What somebody chose, as far as it differs: recipe, GPUs, `--set` and `--system` settings, and
    versions."""
    lines: list[Line] = [
        ("recipe", a.recipe, b.recipe), ("GPUs", a.gpus, b.gpus),
        ("GPU", a.target.upper(), b.target.upper()),
    ]  # fmt: skip
    lines += [(key, _setting(a, key), _setting(b, key)) for key in _set(a) | _set(b)]
    if (a.target, a.gpus) == (b.target, b.gpus):
        lines += [(f"system.{n}", value, b.system.get(n)) for n, value in a.system.items()]
    versions = dict.fromkeys([*a.versions, *b.versions])
    lines += [
        (n, a.versions.get(n), b.versions.get(n)) for n in versions if n not in ("commit", "source")
    ]
    if a.versions.get("source") != b.versions.get("source"):
        lines.append(("code of jaxbench", _commit(a), _commit(b)))
    return [line for line in lines if line[1] != line[2]]


def _commit(plan: Plan) -> str:
    """The commit that made a plan, and `changed` if its files differed from it."""
    commit = plan.versions.get("commit") or "unknown"
    return f"{commit[:7]} changed" if commit.endswith("+") else commit[:7]


def _set(plan: Plan) -> dict[str, None]:
    """The settings that a user `--set`, in their order."""
    return dict.fromkeys(text.partition("=")[0] for text in plan.settings["overrides"])


def _setting(plan: Plan, key: str) -> Any:
    """The value of a setting, None if the plan has none of this name."""
    return dict(flat(plan.settings)).get(key)


def follows(a: Plan, b: Plan) -> Iterator[Line]:
    """Settings and flags that differ without somebody having changed them."""
    asked = {name for name, *_ in changed(a, b)} | ELSEWHERE
    left, right = (dict(flat({n: getattr(plan, n) for n in FOLLOWS})) for plan in (a, b))
    for name in left | right:
        x, y = left.get(name), right.get(name)
        if x != y and not {name, name.removeprefix("settings.")} & asked:
            yield name, x, y


def moves(a: Plan, b: Plan) -> Iterator[list[str]]:
    """Lines of the figures that differ, numbers by 0.05 % or more: the name with its unit, both
    figures, and by how many percent the second one differs."""
    left, right = ({(n, unit): value for n, unit, value in figures(plan)} for plan in (a, b))
    for name, unit in left | right:
        x, y = left.get((name, unit)), right.get((name, unit))
        if x == y or (more := percent(x, y)) in ("+0.0 %", "-0.0 %"):
            continue
        if unit:
            numbers = ("-" if value is None else f"{value:,.3f}" for value in (x, y))
            yield [f"{name}, {unit}", *numbers, more]
        else:
            yield [*texts((name, x, y)), more]


def figures(plan: Plan) -> Iterator[tuple[str, str, Any]]:
    """What the plans are compared by: name, unit and value. Counts, ratios and texts have no
    unit."""
    f, size, state, work = plan.forecast, plan.bytes_per_device, plan.state_bytes, plan.flops
    yield "sent", "GiB", plan.wire_bytes / GIB
    yield (
        "sent without matmuls or attention next to it", "GiB", plan.uncovered_wire_bytes / GIB
    )  # fmt: skip
    for kind, launches in plan.kernels.items():
        name = f"{kind.removeprefix('gemm_')} matmuls" if kind != "attention" else f"{kind} kernels"
        yield name, "", launches
    yield "kernel launches", "", plan.launches
    yield "moved by quantization", "GiB", plan.quantization_bytes / GIB
    yield "copied to the host", "GiB", plan.host.to_host / GIB
    yield "copied from the host", "GiB", plan.host.from_host / GIB
    yield "exposed copies to and from the host", "s", plan.host.exposed_s
    for part, seconds in plan.bound_parts_s.items():
        yield f"bound: {part_name(part)}", "s", seconds
    yield "bound", "s", plan.bound_step_s
    yield "forecast", "s", plan.forecast_step_s
    yield "90 % interval, low", "s", f.interval.low_s
    yield "90 % interval, high", "s", f.interval.high_s
    yield "calibrated", "s", f.interval.calibrated_s
    for part, seconds in f.parts_s.items():
        yield part_name(part), "s", seconds
    for basis, seconds in f.rests_on.items():
        yield f"rests on {basis}", "s", seconds
    yield "outside of the tables", "", f.outside
    for kind, source in f.sources.items():
        yield f"table of {kind}", "", source
    yield "calls without a rule", "", [*f.unknown]
    yield "assumed", "", f.assumed
    yield "fits", "", plan.fits
    yield "parameters", "billions", plan.parameters / 1e9
    for name in ("arguments", "temporaries", "peak", "limit"):
        yield f"memory: {name}", "GiB", getattr(size, name) / GIB
    yield "memory of the host", "GiB", size.host / GIB
    yield "memory limit of XLA's scheduler", "GiB", size.scheduled / GIB
    yield "memory: parameters", "GiB", state.parameters / GIB
    yield "memory: optimizer", "GiB", state.optimizer / GIB
    if state.gradients is not None:
        yield "memory: gradients", "GiB", state.gradients / GIB
    yield "work", "TFLOP", work.compiled / 1e12
    yield "work of the model", "TFLOP", work.model_full / 1e12
    yield "work over the model's", "", work.recompute_ratio
    if plan.stages:
        yield "idle time of the pipeline over its busy time", "", plan.stages.bubble
    for source, rates in plan.rates.items():
        yield f"{source}: tokens/s/GPU", "", rates.tokens_per_s_per_gpu
        yield f"{source}: MFU", "", rates.mfu
    for c in plan.collectives:
        yield f"{c.kind} over {c.axes}: runs", "", c.count
        yield f"{c.kind} over {c.axes}: sent", "GiB", c.bytes / GIB
        yield f"{c.kind} over {c.axes}: exposed", "s", c.exposed_s


def texts(line: Line) -> list[str]:
    """A line as texts for people."""
    name, *values = line
    return [name, *map(as_words, values)]


def as_words(value: Any) -> str:
    """A value without a unit, as text for people."""
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:,.1f}".removesuffix(".0") if abs(value) >= 1000 else f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def percent(a: Any, b: Any) -> str:
    """By how many percent the second number differs from the first, if both are numbers. Empty if
    it is more than a hundredfold."""
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (a, b))
    return f"{100 * (b / a - 1):+,.1f} %" if numbers and abs(b) < 100 * abs(a) else ""
