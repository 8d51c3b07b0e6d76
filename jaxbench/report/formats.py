"""Results as CSV, JSON or Markdown. There is one line for each run, with the same columns."""

import csv
import io
from typing import Any

from jaxbench.base.files import as_json
from jaxbench.base.quantity import figure
from jaxbench.base.untrusted import printable
from jaxbench.report.runs import Result

COLUMNS = {
    "verdict": "verdict", "recipe": "recipe", "gpus": "GPUs", "dtype": "dtype", "label": "label",
    "step_time_s": "step s", "std_s": "std s", "window": "iterations",
    "tokens_per_s_per_gpu": "tokens/s/GPU", "tflops_per_gpu": "TFLOP/s/GPU", "mfu_pct": "MFU %",
    "joules_per_token": "J/token", "tokens_per_kwh": "tokens/kWh",
    "convention": "FLOPs", "published_s": "published s", "ratio": "of published",
    "forecast_s": "forecast s", "of_forecast": "of forecast",
    "reason": "why", "path": "found in",
}  # fmt: skip
"""Keys of a line, and their headings. `ratio` is the throughput over the published throughput,
`of_forecast` the throughput over the throughput that a plan forecasts."""

DECIMALS = {
    "step_time_s": 3, "std_s": 3, "tokens_per_s_per_gpu": 1, "tflops_per_gpu": 1, "mfu_pct": 2,
    "published_s": 3, "ratio": 3, "forecast_s": 3, "of_forecast": 3, "joules_per_token": 3,
    "tokens_per_kwh": 0,
}  # fmt: skip
"""Decimals for people, as in the published tables."""


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
        "recipe": r.recipe.strip(),
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
    return f"{value:.{DECIMALS[key]}f}" if key in DECIMALS else str(value)


def as_markdown(lines: list[dict[str, Any]]) -> str:
    """A table for a document."""
    cells = [COLUMNS.values(), *([cell(key, line[key]) for key in COLUMNS] for line in lines)]
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
