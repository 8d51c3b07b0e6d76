"""What the page shows of many runs beside each other: each section's charts and rows, as data for
its templates."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxbench.recipe import published
from jaxbench.recipe.verdict import percent
from jaxbench.report.charts import Chart, frame
from jaxbench.report.found import Result, figure

SIGMAS, LEAST = 3.0, 0.01
"""An outlier is that many robust standard deviations (1.4826 times the median distance from the
median) and this share above the median of its window."""

SPAN = 0.03
"""Of its mean, at least, on either side in the picture of a run: a quiet run looks quiet."""

LEAST_WAITING = 3
"""Ranks that are named."""

NO_RESULT = "smoke run: no result"


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A run on the page: its number there, its line in the table (`formats.line`), its name."""

    number: int
    result: Result
    line: dict[str, Any]
    name: str

    @property
    def smoke(self) -> bool:
        """Whether it is no benchmark at all."""
        return self.line["label"] == "smoke"

    @property
    def counts(self) -> bool:
        """Whether it has a step time that may be shown beside others."""
        whole = self.result.verdict.name not in ("failed", "incomplete")
        return whole and not self.smoke and self.line["label"] != "published"

    @property
    def comparable(self) -> bool:
        """Whether it may be shown beside the published figure."""
        return self.result.verdict.ratio is not None

    @property
    def percent(self) -> str:
        """Of the published throughput, rounded down, as in the verdict's reason."""
        ratio = self.result.verdict.ratio
        return "" if ratio is None else percent(ratio)

    @property
    def window_times(self) -> list[float]:
        """Seconds of the iterations that count."""
        return self.result.found.times(self.result.window)


def scaling(runs: Sequence[Shown]) -> Iterator[dict[str, Any]]:
    """Tokens/s/GPU against GPUs for each model and dtype: full models only, since a shortened one
    has another rate."""
    groups: dict[tuple[str, str], Rates] = {}
    for run in runs:
        f, rate = run.result.found, run.result.tokens_per_s_per_gpu
        if not f.model or not f.dtype or run.smoke:
            continue
        rows = _full_rows(f.model, f.dtype)
        published_rates = {r.gpus: [r.tokens_per_step / r.step_time_s / r.gpus] for r in rows}
        group = groups.setdefault((f.model, f.dtype), {"published": published_rates})
        if run.counts and f.gpus and rate and _full(run, rows):
            series = group.setdefault("ours" if run.comparable else "other", {})
            series.setdefault(f.gpus, []).append(rate)
    for (model, dtype), rates in groups.items():
        rates = {name: dict(sorted(each.items())) for name, each in rates.items() if each}
        if len({gpus for each in rates.values() for gpus in each}) > 1:
            yield _scaling(f"{model} {dtype}", rates)


Rates = dict[str, dict[int, list[float]]]
"""Tokens/s/GPU of each run by series and number of GPUs."""

NAMES = {"published": "published", "ours": "ours", "other": "not comparable"}
"""Series of runs, for people."""


def _scaling(title: str, series: Rates) -> dict[str, Any]:
    means = {n: {g: statistics.fmean(v) for g, v in each.items()} for n, each in series.items()}
    lead = next(means[name] for name in ("ours", "other", "published") if name in means)
    first, last = min(lead), max(lead)
    efficiency = {name: {g: rate / rates.get(first, next(iter(rates.values())))
                         for g, rate in rates.items()}
                  for name, rates in means.items()}  # fmt: skip
    said = {name: f"{NAMES[name]} {100 * shares[last]:.0f} %"
            if first < last and last in shares else NAMES[name]
            for name, shares in efficiency.items()}  # fmt: skip
    gpus = sorted({g for rates in means.values() for g in rates})
    values = [v for rates in series.values() for each in rates.values() for v in each]
    description = "; ".join(
        f"{NAMES[name]}: " + ", ".join(f"{rate:.0f} on {g} GPUs" for g, rate in rates.items())
        for name, rates in means.items()
    )
    chart = frame(
        title, f"tokens/s per GPU. {description}", gpus, [*values, 0.85 * max(values)],
        unit="tokens/s/GPU", across="GPUs", labels=said.values(), log=True,
        x_ticks=[(g, str(g)) for g in gpus],
    )  # fmt: skip
    for name, rates in means.items():
        chart.line(name, [*rates.items()])
        chart.dots(name, [*rates.items()])
        spread = [(g, v) for g, each in series[name].items() if len(each) > 1 for v in each]
        chart.dots(name, spread)
    chart.labels((name, [*rates.values()][-1], said[name]) for name, rates in means.items())
    table = [(g, [(means[n].get(g), efficiency[n].get(g)) for n in means]) for g in gpus]
    return {"chart": chart, "names": [NAMES[name] for name in means], "rows": table,
            "span": (first, last)}  # fmt: skip


def _full_rows(model: str, dtype: str) -> list[published.Row]:
    """The published rows of the whole model."""
    rows = [r for r in published.rows() if (r.title, r.dtype) == (model, dtype)]
    return [r for r in rows if r.layers == max(row.layers for row in rows)]


def _full(run: Shown, rows: list[published.Row]) -> bool:
    """Whether it ran the whole model, whose published rows these are."""
    layers = (run.result.found.published or {}).get("layers")
    return run.line["label"] != "proxy" and layers in (None, *(row.layers for row in rows))


def mfu(runs: Sequence[Shown], convention: str) -> dict[str, Any]:
    """MFU of each model, dtype and number of GPUs, repeats averaged, beside the published one."""
    groups = defaultdict(list)
    for run in runs:
        f = run.result.found
        if (run.counts or run.line["label"] == "published") and run.line["mfu_pct"]:
            label = run.line["label"]
            tag = "not comparable" if run.counts and not run.comparable else ""
            tag = label if label in ("proxy", "published") else tag
            groups[f"{f.model or run.name} {f.dtype}", f.gpus or 0, tag].append(run)
    rows: list[dict[str, Any]] = []
    for (name, gpus, tag), group in sorted(groups.items()):
        mean = statistics.fmean(run.line["mfu_pct"] for run in group)
        ratios = [run.line["mfu_pct"] / r for run in group if (r := run.result.verdict.ratio)]
        beside = statistics.fmean(ratios) if ratios else None
        both = (None, mean) if tag == "published" else (mean, beside)
        rows.append({"name": name, "gpus": gpus or None, "tag": tag, "count": len(group),
                     "ours": both[0], "published": both[1]})  # fmt: skip
    largest = max((row[name] or 0 for row in rows for name in ("ours", "published")), default=0)
    return {"rows": rows, "full": 10 * (largest // 10 + 1), "convention": convention}


def outliers(times: Sequence[float]) -> float:
    """Above what a step time is one."""
    median = statistics.median(times)
    distance = 1.4826 * statistics.median(abs(t - median) for t in times)
    return max(median + SIGMAS * distance, (1 + LEAST) * median)


def trace(run: Shown) -> Chart | None:
    """Step times of a run, the window and its outliers marked; None without two steps."""
    f, times = run.result.found, run.window_times
    points = sorted(f.steps.seconds.items())
    if len(points) < 2 or len(times) < 2 or f.steps.wrong or run.result.mean_s is None:
        return None
    mean, limit, (first, last) = run.result.mean_s, outliers(times), run.result.window
    beyond = [(n, s) for n, s in points if first <= n <= last and s > limit]
    rules = [("mean", mean, f"mean {mean:.4g}")]
    if f.published and run.comparable:
        seconds = f.published["step_time_s"]
        rules.append(("published", seconds, f"published {seconds:g}"))
    shown = [*times, *(value for _, value, _ in rules), (1 - SPAN) * mean, (1 + SPAN) * mean]
    named = ", ".join(f"{n} ({s:.4g} s)" for n, s in beyond[:5])
    more = f" and {len(beyond) - 5} more" if len(beyond) > 5 else ""
    chart = frame(
        run.name,
        f"step times, {min(times):.4g} to {max(times):.4g} s over iterations {first} to {last}, "
        f"mean {mean:.4g} s; outliers: {named + more or 'none'}",
        [n for n, _ in points], shown, unit="s per step", across="iteration",
        labels=[label for _, _, label in rules],
        watermark=NO_RESULT if run.smoke else "",
    )  # fmt: skip
    chart.band(first, last)
    for css, value, _ in rules:
        chart.rule(css, value)
    within = [(n, s) for n, s in points if s <= chart.y.high]
    chart.line("step", within)
    chart.dots("outlier", beyond)
    if off := len(points) - len(within):
        chart.above(f"▲ {off} of {len(points)} steps, up to {max(s for _, s in points):.4g}")
    chart.labels(rules)
    return chart


def ranks(run: Shown) -> dict[str, Any] | None:
    """How long each process waited for its device, in percent of its step; None where a record
    does not say it of two. A slow host waits least, since the others wait for it."""
    said = run.result.found.record.get("ranks")
    found = []
    for each in said if isinstance(said, list) else ():
        try:
            share = 100 * figure(each["wait_s"]) / figure(each["step_time_s"]["mean"])
            found.append((int(figure(each["rank"])), figure(share), str(each["host"])))
        except (LookupError, TypeError, ZeroDivisionError):
            continue
    if len(found) < 2:
        return None
    found.sort()
    least = sorted(found, key=lambda each: each[1])[:LEAST_WAITING]
    median = statistics.median(share for _, share, _ in found)
    labels = [("mean", median, f"median {median:.1f}"),
              ("outlier", least[0][1], f"rank {least[0][0]}: {least[0][1]:.1f}")]  # fmt: skip
    chart = frame(
        run.name,
        f"wait of {len(found)} processes in percent of the step, median {median:.1f}; least: "
        + ", ".join(f"rank {rank} on {host} {share:.1f}" for rank, share, host in least),
        [rank for rank, _, _ in found], [median - 5, median + 5, *(share for _, share, _ in found)],
        unit="wait, % of the step", across="rank", labels=[label for _, _, label in labels],
        watermark=NO_RESULT if run.smoke else "",
    )  # fmt: skip
    chart.rule("mean", median)
    chart.dots("rank", [(rank, share) for rank, share, _ in found])
    chart.dots("outlier", [(least[0][0], least[0][1])])
    chart.labels(labels)
    return {"chart": chart, "least": least, "median": median}


def memory(runs: Sequence[Shown]) -> list[dict[str, Any]]:
    """The peak on one GPU beside what there is, and what was planned."""
    rows = []
    for run in runs:
        f = run.result.found
        if f.peak_memory:
            planned = f.plan.peak_memory if f.plan else None
            rows.append({"run": run, "peak": f.peak_memory, "limit": f.memory_limit,
                         "planned": planned})  # fmt: skip
    return rows


def waterfall(run: Shown) -> dict[str, Any] | None:
    """The parts of a planned step, one after the other, beside the measured one; None without a
    plan or a measured step."""
    plan, mean = run.result.found.plan, run.result.mean_s
    if plan is None or mean is None:
        return None
    start, rows = 0.0, []
    for name, seconds in plan.parts.items():
        rows.append(("part", name, start, seconds))
        start += seconds
    rows += [
        ("total", f"{plan.kind} of the plan", 0.0, plan.step_s),
        ("ours", "measured", 0.0, mean),
    ]
    return {"run": run, "plan": plan, "rows": rows, "full": max(start, plan.step_s, mean),
            "ratio": mean / plan.step_s if plan.step_s else None}  # fmt: skip
