"""Results as CSV, JSON or Markdown. There is one line for each run, with the same columns."""

import csv
import io
from dataclasses import replace
from typing import Any

from jaxbench.base.files import as_json
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
    whose step time does not count."""
    if not result.complete:
        result = replace(result, mean_s=None, std_s=None)
    r, mfu = result.run, result.mfu(convention)
    first, last = result.window
    forecast = r.plan.step_s if r.plan else None
    joules = result.joules_per_token if result.complete else None
    return {
        "verdict": result.verdict.name,
        "recipe": r.recipe.strip(),
        "gpus": r.gpus,
        "dtype": r.dtype,
        "label": r.label,
        "step_time_s": result.mean_s,
        "std_s": result.std_s,
        "window": f"{first}:{last}",
        "tokens_per_s_per_gpu": result.tokens_per_s_per_gpu,
        "tflops_per_gpu": result.tflops_per_gpu(convention),
        "mfu_pct": None if mfu is None else 100 * mfu,
        "joules_per_token": joules,
        "tokens_per_kwh": 3.6e6 / joules if joules else None,
        "convention": convention,
        "published_s": r.published["step_time_s"] if r.published else None,
        "ratio": result.verdict.ratio,
        "forecast_s": forecast,
        "of_forecast": forecast / result.mean_s if forecast and result.mean_s else None,
        "reason": result.verdict.reason,
        "path": str(r.path).encode(errors="backslashreplace").decode(),
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
