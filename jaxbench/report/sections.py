"""Data for the page's sections: charts and table lines for its templates."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from jaxbench.base.errors import counted, listed
from jaxbench.base.outliers import STEP_SPREAD, outliers
from jaxbench.pages.charts import SECONDS, Bar, Chart, Label, Point, chart_over_gpus, empty_chart
from jaxbench.pages.charts import waterfall as stacked
from jaxbench.recipe import published
from jaxbench.report.gap import explain
from jaxbench.report.named import NamedRun

SPAN = 0.03
"""Half the least height of a step-time chart, as a share of the mean. Small variations then look
small."""

SLOW = 0.01
"""A gap is not explained if it is a smaller share of the step, since runs differ by as much."""

NAMED_OUTLIERS = 5

NAMES = {"published": "published", "ours": "this report", "other": "not comparable"}
"""Display names of the series."""


class Rates(NamedTuple):
    """Tokens/s/GPU by the number of GPUs, and those of the other runs, through which no line
    goes."""

    line: dict[int, float]
    others: list[Point]


def scaling(runs: Sequence[NamedRun]) -> Iterator[dict[str, Any]]:
    """Tokens/s/GPU over GPUs for each model and dtype. Only full models count, since a shortened
    model has another rate."""
    groups: dict[tuple[str, str], list[NamedRun]] = defaultdict(list)
    for run in runs:
        if run.result.run.model and run.result.run.dtype and not run.smoke:
            groups[run.result.run.model, run.result.run.dtype].append(run)
    for (model, dtype), group in groups.items():
        rows = _full_rows(model, dtype)
        rates = {row.gpus: row.rate for row in sorted(rows, key=lambda row: row.gpus)}
        series = {"published": Rates(rates, [])} if rates else {}
        full = [
            run for run in group
            if run.measured and run.line["gpus"] and run.line["tokens_per_s_per_gpu"]
            and run.line["label"] != "proxy"
            and (run.result.run.published or {}).get("layers") in (None, *(r.layers for r in rows))
        ]  # fmt: skip
        for name, is_comparable in (("ours", True), ("other", False)):
            if some := [run for run in full if run.comparable == is_comparable]:
                series[name] = _rates(some)
        if len({gpus for found in series.values() for gpus in found.line}) > 1:
            yield _scaling(f"{model} {dtype}", series)


def _full_rows(model: str, dtype: str) -> list[published.Row]:
    """The published rows of the whole model that have the same batch per GPU as the row on the
    fewest GPUs."""
    rows = [r for r in published.rows() if (r.title, r.dtype) == (model, dtype)]
    rows = [r for r in rows if r.layers == max(row.layers for row in rows)]
    least = min(rows, key=lambda row: row.gpus, default=None)
    return [r for r in rows if least and r.gbs * least.gpus == least.gbs * r.gpus]


def _rates(runs: Sequence[NamedRun]) -> Rates:
    """The line goes through the latest run on each number of GPUs. If some runs pass, it leaves out
    the slow ones: a slow run on few GPUs would make the scaling look better."""
    passing = [run for run in runs if run.line["verdict"] == "pass"]
    by_date = sorted(passing or runs, key=lambda run: run.result.run.date)
    chosen = {run.line["gpus"]: run for run in by_date}
    rates = {run.number: run.line["tokens_per_s_per_gpu"] for run in runs}
    line = {gpus: rates[run.number] for gpus, run in sorted(chosen.items())}
    kept = {run.number for run in chosen.values()}
    return Rates(line, [(r.line["gpus"], rates[r.number]) for r in runs if r.number not in kept])


def _scaling(title: str, series: dict[str, Rates]) -> dict[str, Any]:
    """The chart of a model, its conclusion, and a table of rates and efficiencies (the rate over
    the first rate)."""
    lines = {name: rates.line for name, rates in series.items()}
    reference = next(lines[name] for name in ("ours", "other", "published") if name in lines)
    first, last = min(reference), max(reference)

    def over_first(rates: dict[int, float]) -> dict[int, float]:
        base = rates.get(first, next(iter(rates.values())))
        return {gpus: rate / base for gpus, rate in rates.items()}

    efficiency = {name: over_first(rates) for name, rates in lines.items()}
    labels = [(name, [*rates.values()][-1], NAMES[name]) for name, rates in lines.items()]
    gpus = sorted({g for rates in lines.values() for g in rates})
    values = [rate for found in series.values() for rate in found.line.values()]
    values += [rate for found in series.values() for _, rate in found.others]
    description = "; ".join(
        f"{NAMES[name]}: " + ", ".join(f"{rate:.0f} on {counted(g)}" for g, rate in rates.items())
        for name, rates in lines.items()
    )
    chart = chart_over_gpus(
        title, f"tokens/s per GPU. {description}", "tokens/s/GPU", lines, values, labels
    )
    marks = {name: "repeat" if name == "ours" else name for name in series if series[name].others}
    for name, css in marks.items():
        chart.dots(css, series[name].others)
    shares = [f"{NAMES[name]} {100 * rates[last]:.1f}\xa0%" for name, rates in efficiency.items()
              if first < last and {first, last} <= {*rates}]  # fmt: skip
    table = [(g, [(lines[name].get(g), efficiency[name].get(g)) for name in lines]) for g in gpus]
    return {"chart": chart, "names": [NAMES[name] for name in lines], "rows": table,
            "says": f"{first} → {counted(last)}: {', '.join(shares)}" if shares else "",
            "series": {*lines, *marks.values()},
            "span": (first, last)}  # fmt: skip


def trace(run: NamedRun) -> Chart | None:
    """The step times of a run with its window and outliers. None if there are fewer than two
    steps."""
    r, mean, (first, last) = run.result.run, run.result.mean_s, run.result.window
    times, points = r.times(run.result.window), sorted(r.steps.seconds.items())
    if len(times) < 2 or r.steps.invalid or mean is None:
        return None
    late = outliers({n: s for n, s in points if first <= n <= last}, STEP_SPREAD)
    slow = [(n, s) for n, s in points if n in late]
    labels: list[Label] = [("mean", mean, f"mean {mean:.3f}")] if run.result.complete else []
    if r.published and run.comparable:
        seconds = r.published["step_time_s"]
        labels.append(("published", seconds, f"published {seconds:.3f}"))
    named = listed((f"{n} ({s:.3f} s)" for n, s in slow), NAMED_OUTLIERS)
    chart = empty_chart(
        run.name,
        f"step times, {min(times):.3f} to {max(times):.3f} s over iterations {first} to {last}, "
        f"mean {mean:.3f} s; outliers: {named or 'none'}",
        [n for n, _ in points],
        [*times, min(s for _, s in points), *(value for _, value, _ in labels),
         (1 - SPAN) * mean, (1 + SPAN) * mean],
        unit="s per step", x_title="iteration", labels=labels, watermark=run.watermark,
    )  # fmt: skip
    chart.band(first, last)
    for css, value, _ in labels:
        chart.rule(css, value)
    inside = [(n, s) for n, s in points if s <= chart.y.high]
    chart.line("step", inside)
    chart.dots("outlier", slow)
    if above := len(points) - len(inside):
        chart.note(f"▲ {above} of {len(points)} steps, up to {max(s for _, s in points):.3f}")
    return chart


def loads(run: NamedRun) -> Chart | None:
    """The busiest expert of each layer, in the first step and in the last one. None without
    experts."""
    steps = run.result.run.layer_loads
    if not steps:
        return None
    series = {("other" if n == min(steps) else "ours"): n for n in (min(steps), max(steps))}
    points = {css: [*enumerate(steps[n], 1)] for css, n in series.items()}
    said = "; ".join(
        f"step {n}: {max(steps[n]):.2f} at most, {sum(steps[n]) / len(steps[n]):.2f} on average"
        for n in series.values()
    )
    values = [load for line in points.values() for _, load in line]
    longest = max(len(line) for line in points.values())
    chart = empty_chart(
        run.name, f"times the load of an even share. {said}", [1, longest], [1.0, *values],
        unit="times an even share", x_title="layer with experts", from_zero=True,
        labels=[(css, steps[n][-1], f"step {n}") for css, n in series.items()],
        watermark=run.watermark,
    )  # fmt: skip
    for css, line in points.items():
        chart.line(css, line)
    return chart


def gap(run: NamedRun) -> dict[str, Any] | None:
    """The parts of a slow run's gap, one after the other from the reference on, and the reason for
    each. None if there is no gap, or if no part of it is explained."""
    found = explain(run.result)
    if found is None or len(found.parts) < 2 or found.seconds < SLOW * found.reference_s:
        return None
    rest = found.parts[-1].seconds
    parts = found.parts if rest > 0 else found.parts[:-1]
    ends = [0.0, *accumulate(part.seconds for part in parts)]
    low, full = min(ends), max(*ends, found.seconds) - min(ends) or 1.0
    rows = [
        Bar("part", part.name, min(a, b) - low, abs(b - a), f"{b - a:+.3f}")
        for part, (a, b) in zip(parts, pairwise(ends), strict=True)
    ]
    rows.append(Bar("ours", "in all", -low, found.seconds, f"{found.seconds:+.3f}"))
    return {"run": run, "gap": found, "parts": parts, "rows": rows, "full": full, "rest": rest}


def waterfall(run: NamedRun) -> dict[str, Any] | None:
    """The parts of a planned step, one after the other, and the measured step. None if there is no
    plan or no measured step that counts."""
    plan, mean = run.result.run.plan, run.line["step_time_s"]
    if plan is None or mean is None:
        return None
    rows = stacked(plan.parts, SECONDS)
    full = max(sum(plan.parts.values()), plan.step_s, mean)
    rows.append(Bar("total", "forecast of the plan", 0.0, plan.step_s, SECONDS(plan.step_s)))
    rows.append(Bar("ours", "measured", 0.0, mean, SECONDS(mean)))
    return {"run": run, "rows": rows, "full": full,
            "ratio": mean / plan.step_s if plan.step_s else None}  # fmt: skip
