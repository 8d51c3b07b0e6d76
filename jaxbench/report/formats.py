"""Results as a table in the terminal, CSV, JSON or Markdown: one line for each run, with the same
columns."""

import csv
import io
import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxbench.report.found import Result

COLUMNS = {
    "verdict": "verdict", "recipe": "recipe", "gpus": "GPUs", "dtype": "dtype", "label": "label",
    "step_time_s": "step s", "std_s": "std s", "window": "iterations",
    "tokens_per_s_per_gpu": "tokens/s/GPU", "tflops_per_gpu": "TFLOP/s/GPU", "mfu_pct": "MFU %",
    "convention": "FLOPs", "published_s": "published s", "ratio": "of published",
    "forecast_s": "forecast s", "of_forecast": "of forecast",
    "reason": "why", "path": "found in",
}  # fmt: skip
"""Keys of a line, and their headings. `ratio` is the throughput over the published one,
`of_forecast` over that of a plan's forecast."""

SHOWN = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "published_s", "ratio")
FORECAST = ("forecast_s", "of_forecast")
"""Columns that people are shown as they are; those of a forecast where there is one."""

PLAIN_WIDTH = 160
"""Characters of a table that is no terminal's, and of one for a terminal that is narrower."""

COLOURS = {"pass": "green", "slow": "yellow", "failed": "red", "incomplete": "red"}
NUMBERS = {
    "step_time_s": 3, "std_s": 3, "tokens_per_s_per_gpu": 1, "tflops_per_gpu": 1, "mfu_pct": 2,
    "published_s": 3, "ratio": 3, "forecast_s": 3, "of_forecast": 3,
}  # fmt: skip
"""Decimals for people, as in the published tables."""


def line(result: Result, convention: str) -> dict[str, Any]:
    """A run by the keys of `COLUMNS`; None where there is nothing to say."""
    f, mfu = result.found, result.mfu(convention)
    first, last = result.window
    forecast = f.plan.step_s if f.plan and f.plan.kind == "forecast" else None
    return {
        "verdict": result.verdict.name,
        "recipe": f.recipe.strip(),
        "gpus": f.gpus,
        "dtype": f.dtype,
        "label": f.label,
        "step_time_s": result.mean_s,
        "std_s": result.std_s,
        "window": f"{first}:{last}",
        "tokens_per_s_per_gpu": result.tokens_per_s_per_gpu,
        "tflops_per_gpu": result.tflops_per_gpu(convention),
        "mfu_pct": None if mfu is None else 100 * mfu,
        "convention": convention,
        "published_s": f.published["step_time_s"] if f.published else None,
        "ratio": result.verdict.ratio,
        "forecast_s": forecast,
        "of_forecast": forecast / result.mean_s if forecast and result.mean_s else None,
        "reason": result.verdict.reason,
        "path": str(f.path).encode(errors="backslashreplace").decode(),
    }


def cell(key: str, value: Any) -> str:
    """A value of a line for people, by its key."""
    if value is None:
        return ""
    return f"{value:.{NUMBERS[key]}f}" if key in NUMBERS else str(value)


def as_table(lines: list[dict[str, Any]]) -> str:
    """The table of the terminal as plain text."""
    text = io.StringIO()
    print_table(lines, Console(file=text, width=PLAIN_WIDTH))
    return text.getvalue()


def print_table(lines: list[dict[str, Any]], console: Console) -> None:
    """Prints the table for people, in colours where the console has any."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    figures = SHOWN + (FORECAST if any(each["forecast_s"] for each in lines) else ())
    for heading in ("verdict", "run", "GPUs", "step s", *(COLUMNS[key] for key in figures), "why"):
        left = heading in ("verdict", "run", "why")
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "why")
    for each in lines:
        spread = f" ± {cell('std_s', each['std_s'])}" if each["std_s"] else ""
        table.add_row(
            Text(each["verdict"], COLOURS.get(each["verdict"], "")),
            Text(name(each)),
            Text(cell("gpus", each["gpus"])),
            Text(cell("step_time_s", each["step_time_s"]) + spread),
            *(Text(cell(key, each[key])) for key in figures),
            Text(f"{each['reason']} (iterations {each['window']})"),
        )
    console.print(table)
    console.print(f"FLOPs and MFU by the convention {lines[0]['convention']}")


def name(each: dict[str, Any]) -> str:
    """A run by its recipe, with its dtype and label where the recipe does not say them."""
    dtype = "" if not each["dtype"] or each["dtype"] in each["recipe"] else f" {each['dtype']}"
    label = "" if each["label"] in ("full", "log", "published", "") else f" ({each['label']})"
    return f"{each['recipe']}{dtype}{label}"


def as_markdown(lines: list[dict[str, Any]]) -> str:
    """A table for a document."""

    def row(cells: list[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    body = [row([cell(key, each[key]) for key in COLUMNS]) for each in lines]
    heading = row(list(COLUMNS.values()))
    return "\n".join([heading, f"|{'---|' * len(COLUMNS)}", *body]) + "\n"


def as_csv(lines: list[dict[str, Any]]) -> str:
    """Full precision, by the keys of `COLUMNS`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def as_json(content: Any) -> str:
    """A list with one object for each run, by the keys of `COLUMNS`, or a comparison; numbers in
    full precision."""
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


TEXTS = {"table": as_table, "csv": as_csv, "json": as_json, "markdown": as_markdown}
