"""Results as CSV, JSON or Markdown. There is one line for each run, with the same columns."""

import csv
import io
from typing import Any, NamedTuple

from jaxbench.base.files import as_json
from jaxbench.base.quantity import figure
from jaxbench.base.untrusted import printable
from jaxbench.report.runs import Result


class Column(NamedTuple):
    """How people see a key of a line: its heading, its decimals as in the published tables (None
    for a text or a count), and its heading on the page, where only some columns are."""

    heading: str
    decimals: int | None = None
    on_page: str = ""


COLUMNS = {
    "verdict": Column("verdict"),
    "recipe": Column("recipe"),
    "gpus": Column("GPUs", on_page="GPUs"),
    "dtype": Column("dtype"),
    "label": Column("label"),
    "step_time_s": Column("step s", 3, "Step, s"),
    "std_s": Column("std s", 3),
    "window": Column("iterations"),
    "tokens_per_s_per_gpu": Column("tokens/s/GPU", 1, "Tokens/s/GPU"),
    "tflops_per_gpu": Column("TFLOP/s/GPU", 1, "TFLOP/s/GPU"),
    "mfu_pct": Column("MFU %", 2, "MFU, %"),
    "joules_per_token": Column("J/token", 3, "J/token"),
    "tokens_per_kwh": Column("tokens/kWh", 0, "Tokens/kWh"),
    "convention": Column("FLOPs"),
    "published_s": Column("published s", 3, "Published, s"),
    "ratio": Column("of published", 3, "Of published"),
    "forecast_s": Column("forecast s", 3),
    "of_forecast": Column("of forecast", 3, "Of forecast"),
    "reason": Column("why"),
    "path": Column("found in"),
}
"""The keys of a line, in the order of columns. `ratio` is the throughput over the published
throughput, `of_forecast` the throughput over the throughput that a plan forecasts."""


def line(result: Result, convention: str) -> dict[str, Any]:
    """A run by the keys of `COLUMNS`. Unknown values are None, and so are the figures of a run
    whose step time does not count. `convention` is one of `flops.CONVENTIONS`."""
    r, (first, last) = result.run, result.window
    mean_s, std_s, joules = None, None, None
    if result.complete:
        mean_s, std_s = result.mean_s, result.std_s
        joules = figure(r.record, "summary", "joules_per_token") or None
    count, forecast = r.flops.get(convention), r.plan.step_s if r.plan else None
    tflops = count / mean_s / 1e12 if count and mean_s else None
    mfu = tflops / r.peak_tflops if tflops and r.peak_tflops else None
    rate = r.tokens / mean_s / r.gpus if r.tokens and r.gpus and mean_s else None
    return {
        "verdict": result.verdict.name,
        "recipe": r.recipe,
        "gpus": r.gpus,
        "dtype": r.dtype,
        "label": r.label,
        "step_time_s": mean_s,
        "std_s": std_s,
        "window": f"{first}:{last}",
        "tokens_per_s_per_gpu": rate,
        "tflops_per_gpu": tflops,
        "mfu_pct": None if mfu is None else 100 * mfu,
        "joules_per_token": joules,
        "tokens_per_kwh": 3.6e6 / joules if joules else None,
        "convention": convention,
        "published_s": r.published["step_time_s"] if r.published else None,
        "ratio": result.verdict.ratio,
        "forecast_s": forecast,
        "of_forecast": forecast / mean_s if forecast and mean_s else None,
        "reason": result.verdict.reason,
        "path": printable(str(r.path)),
    }


def cell(key: str, value: Any) -> str:
    """A value of a line, formatted for people by its key."""
    if value is None:
        return ""
    decimals = COLUMNS[key].decimals
    return str(value) if decimals is None else f"{value:.{decimals}f}"


def as_markdown(lines: list[dict[str, Any]]) -> str:
    """A table for a document."""
    headings = [column.heading for column in COLUMNS.values()]
    cells = [headings, *([cell(key, line[key]) for key in COLUMNS] for line in lines)]
    heading, *body = (
        f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |\n" for texts in cells
    )
    return "".join([heading, f"|{'---|' * len(COLUMNS)}\n", *body])


def as_csv(lines: list[dict[str, Any]]) -> str:
    """CSV with full precision. Columns are the keys of `COLUMNS`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


TEXTS = {"csv": as_csv, "json": as_json, "markdown": as_markdown}
