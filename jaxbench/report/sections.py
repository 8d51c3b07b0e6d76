"""Data for the page's sections: charts and table lines for its templates."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from jaxbench.base.errors import counted, listed
from jaxbench.base.hardware import NULL
from jaxbench.base.outliers import STEP_SPREAD, outliers
from jaxbench.pages.charts import SECONDS, Bar, Chart, Label, chart_over_gpus, empty_chart
from jaxbench.pages.charts import waterfall as stacked
from jaxbench.recipe import published
from jaxbench.report.gap import REMAINS, explain
from jaxbench.report.runs import Result
from jaxbench.results.verdict import percent

SPAN = 0.03
"""Half the least height of a step-time chart, as a share of the mean. Small variations then look
small."""

SLOW = 0.01
"""A gap is not explained if it is a smaller share of the step, since runs differ by as much."""

NAMED_OUTLIERS = 5

NO_RESULT = "smoke run: no result"


@dataclass(frozen=True, kw_only=True)
class PageRun:
    """A run on the page: its number there, its line in the table (`formats.line`), and its name."""

    number: int
    result: Result
    line: dict[str, Any]
    name: str

    @property
    def smoke(self) -> bool:
        """True for a smoke run, which is no benchmark at all."""
        return self.line["label"] == "smoke"

    @property
    def watermark(self) -> str:
        """The text across the charts of a run that is no benchmark."""
        return NO_RESULT if self.smoke else NULL if self.result.run.null else ""

    @property
    def measured(self) -> bool:
        """True if the step time is from a benchmark that ran here."""
        return self.result.complete and not self.watermark and self.line["label"] != "published"

    @property
    def comparable(self) -> bool:
        """True if the step time may be compared with the published one."""
        return self.result.verdict.ratio is not None

    @property
    def percent(self) -> str:
        """Percentage of the published throughput, rounded down as in the verdict's reason."""
        ratio = self.result.verdict.ratio
        return "" if ratio is None else percent(ratio)


Rates = dict[str, dict[int, list[float]]]
"""Tokens/s/GPU of each run, by series and number of GPUs."""

NAMES = {"published": "published", "ours": "ours", "other": "not comparable"}
"""Display names of the series."""


def scaling(runs: Sequence[PageRun]) -> Iterator[dict[str, Any]]:
    """Tokens/s/GPU over GPUs for each model and dtype. Only full models count, since a shortened
    model has another rate."""
    groups: dict[tuple[str, str], Rates] = {}
    for run in runs:
        r, rate = run.result.run, run.result.tokens_per_s_per_gpu
        if not r.model or not r.dtype or run.smoke:
            continue
        rows = _full_rows(r.model, r.dtype)
        published_rates = {r.gpus: [r.tokens_per_step / r.step_time_s / r.gpus] for r in rows}
        group = groups.setdefault((r.model, r.dtype), {"published": published_rates})
        layers = (r.published or {}).get("layers")
        full = run.line["label"] != "proxy" and layers in (None, *(row.layers for row in rows))
        if run.measured and r.gpus and rate and full:
            series = group.setdefault("ours" if run.comparable else "other", {})
            series.setdefault(r.gpus, []).append(rate)
    for (model, dtype), rates in groups.items():
        rates = {name: dict(sorted(by_gpus.items())) for name, by_gpus in rates.items() if by_gpus}
        if len({gpus for by_gpus in rates.values() for gpus in by_gpus}) > 1:
            yield _scaling(f"{model} {dtype}", rates)


def _full_rows(model: str, dtype: str) -> list[published.Row]:
    """The published rows of the whole model that have the same batch per GPU as the row on the
    fewest GPUs."""
    rows = [r for r in published.rows() if (r.title, r.dtype) == (model, dtype)]
    rows = [r for r in rows if r.layers == max(row.layers for row in rows)]
    least = min(rows, key=lambda row: row.gpus, default=None)
    return [r for r in rows if least and r.gbs * least.gpus == least.gbs * r.gpus]


def _scaling(title: str, series: Rates) -> dict[str, Any]:
    """The chart of a model, and a table of rates and efficiencies (the rate over the first
    rate)."""
    means = {name: {gpus: statistics.fmean(rates) for gpus, rates in by_gpus.items()}
             for name, by_gpus in series.items()}  # fmt: skip
    reference = next(means[name] for name in ("ours", "other", "published") if name in means)
    first, last = min(reference), max(reference)
    efficiency = {name: {g: rate / rates.get(first, next(iter(rates.values())))
                         for g, rate in rates.items()}
                  for name, rates in means.items()}  # fmt: skip
    labels: list[Label] = []
    for name, rates in means.items():
        show = first < last and last in rates
        share = f" {100 * efficiency[name][last]:.0f} %" if show else ""
        labels.append((name, [*rates.values()][-1], NAMES[name] + share))
    gpus = sorted({g for rates in means.values() for g in rates})
    values = [v for by_gpus in series.values() for rates in by_gpus.values() for v in rates]
    description = "; ".join(
        f"{NAMES[name]}: " + ", ".join(f"{rate:.0f} on {counted(g)}" for g, rate in rates.items())
        for name, rates in means.items()
    )
    chart = chart_over_gpus(
        title, f"tokens/s per GPU. {description}", "tokens/s/GPU", means,
        [*values, 0.85 * max(values)], labels,
    )  # fmt: skip
    for name in means:
        repeats = [(g, v) for g, runs in series[name].items() if len(runs) > 1 for v in runs]
        chart.dots(name, repeats)
    table = [(g, [(means[name].get(g), efficiency[name].get(g)) for name in means]) for g in gpus]
    return {"chart": chart, "names": [NAMES[name] for name in means], "rows": table,
            "span": (first, last)}  # fmt: skip


def trace(run: PageRun) -> Chart | None:
    """The step times of a run with its window and outliers. None if there are fewer than two
    steps."""
    r, mean, (first, last) = run.result.run, run.result.mean_s, run.result.window
    times, points = r.times(run.result.window), sorted(r.steps.seconds.items())
    if len(points) < 2 or len(times) < 2 or r.steps.invalid or mean is None:
        return None
    late = outliers({n: s for n, s in points if first <= n <= last}, STEP_SPREAD)
    slow = [(n, s) for n, s in points if n in late]
    labels: list[Label] = [("mean", mean, f"mean {mean:.4g}")]
    if r.published and run.comparable:
        seconds = r.published["step_time_s"]
        labels.append(("published", seconds, f"published {seconds:g}"))
    named = listed((f"{n} ({s:.4g} s)" for n, s in slow), NAMED_OUTLIERS)
    chart = empty_chart(
        run.name,
        f"step times, {min(times):.4g} to {max(times):.4g} s over iterations {first} to {last}, "
        f"mean {mean:.4g} s; outliers: {named or 'none'}",
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
        chart.note(f"▲ {above} of {len(points)} steps, up to {max(s for _, s in points):.4g}")
    return chart


def gap(run: PageRun) -> dict[str, Any] | None:
    """The parts of a slow run's gap, one after the other from the reference on, and the reason for
    each. None if there is no gap, or if no part of it is explained."""
    found = explain(run.result)
    if found is None or len(found.parts) < 2 or found.seconds < SLOW * found.reference_s:
        return None
    ends = [0.0, *accumulate(seconds for _, seconds, _ in found.parts)]
    low, full = min(ends), max(ends) - min(ends) or 1.0
    rows = [
        Bar("other" if name == REMAINS else "part", name, min(a, b) - low, abs(b - a),
            f"{b - a:+.3f}")
        for (name, _, _), (a, b) in zip(found.parts, pairwise(ends), strict=True)
    ]  # fmt: skip
    rows.append(Bar("ours", "in all", min(0.0, found.seconds) - low, abs(found.seconds),
                    f"{found.seconds:+.3f}"))  # fmt: skip
    return {"run": run, "gap": found, "rows": rows, "full": full}


def waterfall(run: PageRun) -> dict[str, Any] | None:
    """The parts of a planned step, one after the other, and the measured step. None if there is no
    plan or no measured step."""
    plan, mean = run.result.run.plan, run.result.mean_s
    if plan is None or mean is None:
        return None
    rows = stacked(plan.parts, SECONDS)
    full = max(sum(plan.parts.values()), plan.step_s, mean)
    rows.append(Bar("total", "forecast of the plan", 0.0, plan.step_s, SECONDS(plan.step_s)))
    rows.append(Bar("ours", "measured", 0.0, mean, SECONDS(mean)))
    return {"run": run, "plan": plan, "rows": rows, "full": full,
            "ratio": mean / plan.step_s if plan.step_s else None}  # fmt: skip
