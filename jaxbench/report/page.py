"""The page: all about a set of runs in one file that needs no network and no script.

What runs and logs say is not trusted: templates escape it, and the page forbids itself scripts and
requests (`templates/base.html`).
"""

import base64
import gzip
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from jaxbench.recipe.published import ERRATA
from jaxbench.recipe.verdict import PASS, SMOKE
from jaxbench.report import formats, history, sections
from jaxbench.report.compare import SECTIONS, flat
from jaxbench.report.found import Result
from jaxbench.report.sections import Shown

SYMBOLS = {"pass": "✓", "slow": "▼", "failed": "✕", "incomplete": "…", "not comparable": "–"}
"""Of verdicts, beside their names."""

COLUMNS = {
    "gpus": "GPUs", "step_time_s": "Step, s", "tokens_per_s_per_gpu": "Tokens/s/GPU",
    "tflops_per_gpu": "TFLOP/s/GPU", "mfu_pct": "MFU, %", "published_s": "Published, s",
    "ratio": "Of published", "of_forecast": "Of forecast",
}  # fmt: skip
"""Figures of the table of runs, and their headings there."""

UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that HTML does not have, or that turn the text around them."""

MOST_STEPS, MOST_RANKS = 1000, 64
"""Step times and ranks of a run that its JSON has on the page."""


def render(template: str, **content: Any) -> str:
    """A page from one of the templates."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"figure": formats.cell, "symbol": SYMBOLS.__getitem__}
    return UNPRINTABLE.sub("\ufffd", environment.get_template(template).render(**content))


def page(results: Sequence[Result], convention: str) -> str:
    """The page of a report."""
    runs = shown(results, convention)
    verdicts = Counter(run.line["verdict"] for run in runs)
    printed = {code for r in results for code in (r.found.published or {}).get("errata") or ()}
    waiting = [(run, found) for run in runs if (found := sections.ranks(run))]
    return render(
        "report.html",
        title="Training benchmark report",
        runs=runs,
        answer=answer(runs),
        counts=[(name, verdicts[name]) for name in SYMBOLS if name in verdicts],
        columns=[(key, heading) for key, heading in COLUMNS.items()
                 if key != "of_forecast" or any(run.line[key] for run in runs)],
        smoke=[run for run in runs if run.smoke],
        smoke_text=SMOKE,
        convention=convention,
        windows=sorted({run.line["window"] for run in runs}),
        errata={code: text for code, text in ERRATA.items() if code in printed},
        scaling=[*sections.scaling(runs)],
        mfu=sections.mfu(runs, convention),
        traces=[chart for run in runs if (chart := sections.trace(run))],
        waiting=waiting,
        memory=sections.memory(runs),
        waterfalls=[found for run in runs if (found := sections.waterfall(run))],
        details=details,
    )  # fmt: skip


def history_page(rows: Sequence[history.Row], threshold: float) -> str:
    """The page of a history."""
    changes = sum(len(row.changes) for row in rows)
    counted = f"{changes} change{'s' * (changes > 1)}" if changes else "No change"
    return render(
        "history.html",
        title="Training benchmark history",
        answer=f"{counted} above {100 * threshold:g} % in {len(rows)} row{'s' * (len(rows) > 1)}.",
        rows=[(row, history.chart(row, threshold)) for row in rows],
        named=history.NAMED,
        threshold=f"{100 * threshold:g}",
        smoke=sum(len(row.points) for row in rows if row.smoke),
        count=sum(len(row.points) for row in rows),
        smoke_text=SMOKE,
    )


def shown(results: Sequence[Result], convention: str) -> list[Shown]:
    """The runs with a number and a name each, the folder in it where a recipe comes again; those
    that are no results last."""
    results = sorted(results, key=lambda result: result.found.label == "smoke")
    lines = [formats.line(result, convention) for result in results]
    names = [_name(line) for line in lines]
    times, runs = Counter(names), []
    for number, (result, line, name) in enumerate(zip(results, lines, names, strict=True), 1):
        path = result.found.path
        place = Path(line["path"] if path.is_dir() else Path(line["path"]).parent).name
        again = f" · {place}" if times[name] > 1 else ""
        runs.append(Shown(number=number, result=result, line=line, name=name + again))
    return runs


def _name(line: dict[str, Any]) -> str:
    """A run by its recipe and row, or its work and GPUs."""
    gpus = "" if ":" in line["recipe"] or not line["gpus"] else f" on {line['gpus']}"
    return formats.name(line) + gpus


def answer(runs: Sequence[Shown]) -> str:
    """Whether this cluster is as fast as it should be, in a sentence."""
    compared = [run for run in runs if run.comparable]
    if runs and all(run.smoke for run in runs):
        return "Smoke runs only. Nothing on this page is a benchmark result."
    if runs and all(run.line["label"] == "published" for run in runs):
        return "The published figures. Nothing on this page was measured here."
    if not compared:
        return "No run here may stand beside a published figure."
    good = sum(run.line["verdict"] == "pass" for run in compared)
    return (
        f"{good} of {len(compared)} comparable runs reach {100 * PASS:.0f} % of the published "
        "throughput."
    )


def details(run: Shown) -> dict[str, Any]:
    """What ran, exactly: the sections of the record as lines of text, and all of it as JSON."""
    found = run.result.found
    steps = sorted(found.steps.seconds.items())
    every = dict(steps) if len(steps) <= MOST_STEPS else None
    content = {"report": run.line, "record": found.record, "step_times_s": every,
               "plan": found.plan and asdict(found.plan)}  # fmt: skip
    ranks = found.record.get("ranks")
    if isinstance(ranks, list) and len(ranks) > MOST_RANKS:
        left_out = f"{len(ranks)} ranks are in the run's own run.json"
        content["record"] = found.record | {"ranks": left_out}
    # NaN, which JSON does not have, is null in the file.
    whole = json.loads(json.dumps(content, default=str), parse_constant=lambda _: None)
    text = gzip.compress(json.dumps(whole, indent=1).encode(), mtime=0)
    name = re.sub(r"[^a-zA-Z0-9_.]+", "-", f"{run.number}-{run.line['recipe']}")
    command = found.record.get("command")
    return {
        "command": command if isinstance(command, str) else None,
        "started": found.started and f"{found.started:%Y-%m-%d %H:%M} UTC ({found.dated})",
        "sections": [
            (part, [(key.removeprefix(f"{part}."), value) for key, value in values])
            for part in SECTIONS
            if (values := [*flat(part, found.record.get(part))])
        ],
        "steps": " ".join(f"{seconds:.4g}" for _, seconds in steps) if every else None,
        "file": f"{name}.json.gz",
        "href": f"data:application/gzip;base64,{base64.b64encode(text).decode()}",
    }
