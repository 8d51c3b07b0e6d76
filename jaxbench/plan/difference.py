"""`jaxbench plan --diff`: what somebody changed between two plans, what followed from it, and which
parts of the step moved; as text and as a page."""

import math
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from jaxbench.base.errors import listed
from jaxbench.pages.charts import Bar
from jaxbench.pages.html import render
from jaxbench.plan.plan import Plan, parts
from jaxbench.plan.row_page import title
from jaxbench.plan.text import gib
from jaxbench.recipe.build import flat
from jaxbench.results.plans import part_name

IGNORED = (
    "lower_s", "compile_s", "largest_buffers", "published", "collectives", "other_kernels",
    "sensitivities", "recipe", "row", "gpus", "target", "versions",
)  # fmt: skip
"""Fields of a plan whose values are no lines of a difference. It has collectives by their sums."""

IGNORED_VALUES = re.compile(r"forecast\.step_s|settings\.(recipe|row|gpus|label|overrides)")
"""Values that another line has already."""

FOLLOWS = ("settings.", "system.", "flags.", "planned_flags.", "mesh")
"""Beginnings of the names of values that follow from what somebody changed."""

SHOWN, SHARE = 4, 0.001
"""The most parts that the conclusion names, and the least share of the step by which they move."""

UNITS = (
    (r"_s($|\.)|rests_on|\.unknown\.", "s", 1.0),
    (r"bytes|^host\.", "GiB", 2**30),
    (r"^flops\.(compiled|model)", "TFLOP", 1e12),
    (r"^parameters$", "billions", 1e9),
)
"""A pattern in the name of a plan's value, the unit in which we show it, and how many of the plan's
own units that is."""

NAMES = {
    "forecast_step_s": "forecast", "bound_step_s": "bound", "wire_bytes": "sent",
    "uncovered_wire_bytes": "sent without matmuls or attention next to it",
    "launches": "kernel launches", "quantization_bytes": "moved by quantization",
    "forecast.interval.low_s": "90 % interval, low", "forecast.outside": "outside of the tables",
    "forecast.interval.high_s": "90 % interval, high", "host.to_host": "copied to the host",
    "forecast.interval.calibrated_s": "calibrated", "host.from_host": "copied from the host",
    "host.exposed_s": "exposed copies to and from the host", "flops.compiled": "work",
    "flops.recompute_ratio": "work over the model's", "mesh": "mesh",
    "bytes_per_device.scheduled": "memory limit of XLA's scheduler",
    "bytes_per_device.host": "memory of the host", "kernels.attention": "attention kernels",
}  # fmt: skip
"""Names of values for people."""

PATTERNS = (
    (r"kernels\.gemm_(.*)", r"\1 matmuls"),
    (r"forecast\.rests_on\.(.*)", r"rests on \1"),
    (r"(?:bytes_per_device|state_bytes)\.(.*)", r"memory: \1"),
    (r"rates\.(.*)\.tokens_per_s_per_gpu", r"\1: tokens/s/GPU"),
    (r"rates\.(.*)\.mfu", r"\1: MFU"),
    (r"(.* over .*): bytes", r"\1: sent"),
    (r"(.* over .*): count", r"\1: runs"),
    (r"(.* over .*): exposed_s", r"\1: exposed"),
)
"""Patterns of the names of other values, and their names for people."""

Line = tuple[str, Any, Any]
"""The name of a value, and the value in both plans."""


def report(a: Plan, b: Plan) -> str:
    """The difference as text: the conclusion, and all values that differ."""
    followed, moved = [*follows(a, b)], [*moves(a, b)]
    if not (changed(a, b) or followed or moved):
        return "the plans are the same"
    lines = [(in_units(*line), "") for line in followed]
    lines += [(in_units(*line), percent(*line[1:])) for line in moved]
    table = [(*cells, more) for cells, more in lines]
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
        asked=[in_units(*line) for line in changed(a, b)],
        followed=[in_units(*line) for line in follows(a, b)],
        bars_of=[
            Bar(_class(name, s), name, before + min(0.0, s), abs(s), f"{s:+.3f}")
            for name, s in longer.items()
        ],
        before=before,
        full=full,
        moved=[[*in_units(*line), percent(*line[1:])] for line in moves(a, b)],
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
    asked = {name for name, *_ in changed(a, b)}
    for name, x, y in differences(a, b):
        if name.startswith(FOLLOWS) and not {name, name.removeprefix("settings.")} & asked:
            yield name, x, y


def moves(a: Plan, b: Plan) -> Iterator[Line]:
    """The other values that differ, numbers by 0.05 % or more."""
    for name, x, y in differences(a, b):
        if not name.startswith(FOLLOWS) and percent(x, y) not in ("+0.0 %", "-0.0 %"):
            yield name, x, y


def differences(a: Plan, b: Plan) -> list[Line]:
    """The name and both values of everything that differs."""
    left, right = _values(a), _values(b)
    return [
        (name, x, y) for name in left | right if (x := left.get(name)) != (y := right.get(name))
    ]


def _values(plan: Plan) -> dict[str, Any]:
    """The numbers and texts of a plan by dotted names. Collectives are named by kind and axes."""
    values = dict(flat({n: value for n, value in asdict(plan).items() if n not in IGNORED}))
    for c in plan.collectives:
        for name in ("count", "bytes", "exposed_s"):
            values[f"{c.kind} over {c.axes}: {name}"] = getattr(c, name)
    return {name: value for name, value in values.items() if not IGNORED_VALUES.fullmatch(name)}


def in_units(name: str, *values: Any) -> list[str]:
    """The name of a plan's value with its unit, and the values in this unit."""
    if not name.startswith(("rates.", *FOLLOWS)):
        for pattern, unit, size in UNITS:
            if re.search(pattern, name):
                numbers = ("-" if value is None else f"{value / size:,.3f}" for value in values)
                return [f"{value_name(name)}, {unit}", *numbers]
    return [value_name(name), *map(as_words, values)]


def value_name(name: str) -> str:
    """The name of a plan's value for people."""
    for prefix, kind in (("forecast.parts_s.", ""), ("bound_parts_s.", "bound: ")):
        if name.startswith(prefix):
            return kind + part_name(name.removeprefix(prefix))
    for pattern, words in PATTERNS:
        if name not in NAMES and re.fullmatch(pattern, name):
            return re.sub(pattern, words, name)
    return NAMES.get(name, name)


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
