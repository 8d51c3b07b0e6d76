"""The HTML page of a report or a history."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxbench.base.errors import counted
from jaxbench.pages.html import SYMBOLS, attached, render, settings
from jaxbench.recipe.published import ERRATA
from jaxbench.report import formats, history, sections
from jaxbench.report.compare import SECTIONS
from jaxbench.report.gpus import gpus, heat_maps
from jaxbench.report.runs import Result
from jaxbench.report.sections import PageRun
from jaxbench.results.verdict import PASS, SMOKE

COLUMNS = {
    "gpus": "GPUs", "step_time_s": "Step, s", "tokens_per_s_per_gpu": "Tokens/s/GPU",
    "tflops_per_gpu": "TFLOP/s/GPU", "mfu_pct": "MFU, %", "joules_per_token": "J/token",
    "tokens_per_kwh": "Tokens/kWh", "published_s": "Published, s",
    "ratio": "Of published", "of_forecast": "Of forecast",
}  # fmt: skip
"""Figures in the table of runs, and their headings there."""

FILTERS: dict[str, Callable[..., Any]] = {"figure": formats.cell}
"""What the report's templates use besides the common filters."""

MOST_RUNS = 100
"""The most runs whose charts and records are on the page: the last ones. The table has all runs."""

MOST_STEPS, MOST_RANKS = 1000, 64
"""Longer lists of step times and of ranks are left out of the JSON on the page."""


def page(results: Sequence[Result], convention: str) -> str:
    """The page of a report."""
    runs = page_runs(results, convention)
    dated = sorted(runs, key=lambda run: run.result.run.started or history.UNDATED)
    last = {run.number for run in dated[-MOST_RUNS:]}
    shown = [run for run in runs if run.number in last]
    ran = [run.line for run in runs if run.line["label"] != "published"]
    verdicts = Counter(line["verdict"] for line in ran)
    smoke = sum(run.smoke for run in runs)  # on a CPU's devices
    errata = {code for r in results for code in (r.run.published or {}).get("errata") or ()}
    return render(
        "report.html",
        FILTERS,
        title="Training benchmark report",
        runs=runs,
        shown=shown,
        headline=headline(runs),
        counts=[(name, verdicts[name]) for name in SYMBOLS if name in verdicts],
        columns=[(key, _of_devices(heading) if smoke == len(runs) else heading)
                 for key, heading in COLUMNS.items() if any(run.line[key] for run in runs)],
        smoke=smoke,
        smoke_text=SMOKE,
        convention=convention,
        windows=sorted({line["window"] for line in ran}),
        errata={code: text for code, text in ERRATA.items() if code in errata},
        scaling=[*sections.scaling(runs)],
        traces=[*filter(None, map(sections.trace, shown))],
        gaps=[*filter(None, map(sections.gap, shown))],
        heat=[(run, maps) for run in shown
              if (maps := heat_maps(gpus(run.result.run.record)))],
        memory=[run for run in shown if run.result.run.peak_memory],
        profiled=[(run, found) for run in shown if (found := run.result.run.profiles)],
        waterfalls=[*filter(None, map(sections.waterfall, shown))],
        details=details,
    )  # fmt: skip


def history_page(rows: Sequence[history.Series], threshold: float) -> str:
    """The page of a history."""
    changes = sum(len(row.changes) for row in rows)
    return render(
        "history.html",
        FILTERS,
        title="Training benchmark history",
        headline=f"{counted(changes, 'change') if changes else 'No change'} above "
        f"{100 * threshold:g} % in {counted(len(rows), 'row')}.",
        rows=[(row, history.chart(row, threshold)) for row in rows],
        nodes=history.nodes(rows),
        weeks=history.WEEKS,
        listed=history.LISTED,
        shown=history.SHOWN,
        short=history.short,
        threshold=f"{100 * threshold:g}",
        smoke=sum(len(row.points) for row in rows if row.smoke),
        count=sum(len(row.points) for row in rows),
        smoke_text=SMOKE,
    )


def page_runs(results: Sequence[Result], convention: str) -> list[PageRun]:
    """The runs, numbered and named, smoke runs last. If several runs have the same recipe, their
    names include the run's folder."""
    results = sorted(results, key=lambda result: result.run.label == "smoke")
    lines = [formats.line(result, convention) for result in results]
    names = [_name(line) for line in lines]
    repeats, runs = Counter(names), []
    for number, (result, line, name) in enumerate(zip(results, lines, names, strict=True), 1):
        path = Path(line["path"])
        if repeats[name] > 1:
            name += f" · {(path if result.run.path.is_dir() else path.parent).name}"
        runs.append(PageRun(number=number, result=result, line=line, name=name))
    return runs


def _of_devices(heading: str) -> str:
    """The heading of a column for CPU runs."""
    return "Devices" if heading == "GPUs" else heading.replace("GPU", "device")


def _name(line: dict[str, Any]) -> str:
    """A run by its recipe and row, or by its workload and GPUs."""
    gpus = "" if ":" in line["recipe"] or not line["gpus"] else f" on {line['gpus']}"
    return formats.title(line) + gpus


def headline(runs: Sequence[PageRun]) -> str:
    """The page's conclusion in a sentence: is this cluster as fast as it should be?"""
    compared = [run for run in runs if run.comparable]
    if runs and all(run.smoke for run in runs):
        return "Smoke runs only. Nothing on this page is a benchmark result."
    if runs and all(run.line["label"] == "published" for run in runs):
        return "The published figures. Nothing on this page was measured here."
    if not compared:
        return "No run here is comparable with a published figure."
    good = sum(run.line["verdict"] == "pass" for run in compared)
    return (
        f"{good} of {len(compared)} comparable runs reach {100 * PASS:.0f} % of the published "
        "throughput."
    )


def details(page_run: PageRun) -> dict[str, Any]:
    """The whole record: its sections as lines of text, and all of it as JSON."""
    run, line = page_run.result.run, page_run.line
    steps = sorted(run.steps.seconds.items())
    short = len(steps) <= MOST_STEPS
    content = {"report": line, "record": run.record,
               "step_times_s": dict(steps) if short else None,
               "plan": run.plan and asdict(run.plan)}  # fmt: skip
    ranks = run.record.get("ranks")
    if isinstance(ranks, list) and len(ranks) > MOST_RANKS:
        left_out = f"{len(ranks)} ranks are in the run's own run.json"
        content["record"] = run.record | {"ranks": left_out}
    name = re.sub(r"[^a-zA-Z0-9_.]+", "-", f"{page_run.number}-{line['recipe']}")
    command = run.record.get("command")
    return {
        "command": command if isinstance(command, str) else None,
        "started": run.started and f"{run.started:%Y-%m-%d %H:%M} UTC ({run.dated})",
        "sections": settings(run.record, SECTIONS),
        "steps": " ".join(f"{seconds:.4g}" for _, seconds in steps) if short else None,
        "file": f"{name}.json.gz",
        "href": attached(content),
    }
