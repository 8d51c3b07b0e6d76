"""The HTML page of a report or a history."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from jaxbench.pages.charts import SHAPES
from jaxbench.pages.html import SYMBOLS, attached, render, settings
from jaxbench.recipe.published import ERRATA
from jaxbench.report import formats, history, sections
from jaxbench.report.compare import SECTIONS
from jaxbench.report.gpus import ecc_errors, gpus, heat_maps
from jaxbench.report.named import NamedRun, headline, named, windows
from jaxbench.report.runs import Result
from jaxbench.results.verdict import SMOKE

MOST_RUNS = 100
"""The most runs whose charts and records are on the page: the last ones. The table has all runs."""

MOST_STEPS, MOST_RANKS = 1000, 64
"""Longer lists of step times and of ranks are left out of the JSON on the page."""


def page(results: Sequence[Result], convention: str) -> str:
    """The page of a report."""
    runs = named(results, convention)
    last = {run.number for run in sorted(runs, key=lambda run: run.result.run.date)[-MOST_RUNS:]}
    shown = [run for run in runs if run.number in last]
    verdicts = Counter(run.line["verdict"] for run in runs)
    smoke = sum(run.smoke for run in runs)  # on a CPU's devices
    scaling = [*sections.scaling(runs)]
    return render(
        "report.html",
        title="Training benchmark report",
        runs=runs,
        shown=shown,
        headline=headline(runs),
        counts=[(name, verdicts[name]) for name in SYMBOLS if name in verdicts],
        columns=[(key, _of_devices(column.on_page) if smoke == len(runs) else column.on_page)
                 for key, column in formats.COLUMNS.items()
                 if column.on_page and any(run.line[key] for run in runs)],
        smoke=smoke,
        smoke_text=SMOKE,
        convention=convention,
        windows=windows(runs),
        bad=[run for run in runs if run.wrong],
        errata=errata(runs),
        scaling=scaling,
        shapes=SHAPES,
        series={name for chart in scaling for name in chart["series"]},
        traces=[*filter(None, map(sections.trace, shown))],
        loads=[*filter(None, map(sections.loads, shown))],
        gaps=[*filter(None, map(sections.gap, shown))],
        heat=[(run, *maps) for run in shown
              if any(maps := heat_maps(gpus(run.result.run.record)))],
        ecc=[(run, errors) for run in shown
             if (errors := ecc_errors(gpus(run.result.run.record)))],
        memory=[run for run in shown if run.result.run.peak_memory],
        profiled=[(run, found) for run in shown if (found := run.result.run.profiles)],
        waterfalls=[*filter(None, map(sections.waterfall, shown))],
        details=details,
    )  # fmt: skip


def errata(runs: Sequence[NamedRun]) -> dict[str, str]:
    """The errata of the runs' published figures, by code."""
    used = {code for run in runs for code in (run.result.run.published or {}).get("errata") or ()}
    return {code: text for code, text in ERRATA.items() if code in used}


def history_page(rows: Sequence[history.Series], threshold: float) -> str:
    """The page of a history."""
    return render(
        "history.html",
        {"in_words": history.faster_or_slower},
        title="Training benchmark history",
        headline=history.headline(rows, threshold),
        rows=[(row, history.chart(row, threshold)) for row in rows],
        nodes=history.worst_nodes(rows),
        weeks=history.WEEKS,
        shown=history.SHOWN,
        threshold=threshold,
        smoke=sum(len(row.points) for row in rows if row.smoke),
        count=sum(len(row.points) for row in rows),
        smoke_text=SMOKE,
    )


def _of_devices(heading: str) -> str:
    """The heading of a column for CPU runs."""
    return "Devices" if heading == "GPUs" else heading.replace("GPU", "device")


def details(named_run: NamedRun) -> dict[str, Any]:
    """The whole record: its sections as lines of text, and all of it as JSON."""
    run, line = named_run.result.run, named_run.line
    steps = sorted(run.steps.seconds.items())
    short = len(steps) <= MOST_STEPS
    content = {"report": line, "record": run.record,
               "step_times_s": dict(steps) if short else None,
               "plan": run.plan and asdict(run.plan)}  # fmt: skip
    ranks = run.record.get("ranks")
    if isinstance(ranks, list) and len(ranks) > MOST_RANKS:
        left_out = f"{len(ranks)} ranks are in the run's own run.json"
        content["record"] = run.record | {"ranks": left_out}
    name = re.sub(r"[^a-zA-Z0-9_.]+", "-", f"{named_run.number}-{line['recipe']}")
    command = run.record.get("command")
    return {
        "command": command if isinstance(command, str) else None,
        "started": run.started and f"{run.started:%Y-%m-%d %H:%M} UTC ({run.dated})",
        "sections": settings(run.record, SECTIONS),
        "steps": " ".join(f"{seconds:.4g}" for _, seconds in steps) if short else None,
        "file": f"{name}.json.gz",
        "href": attached(content),
    }
