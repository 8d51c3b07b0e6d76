"""The report in a terminal: what is wrong, then a table, or in a narrow window a block for each
run."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxbench.base.terminal import folded, plain_table
from jaxbench.pages.html import SYMBOLS
from jaxbench.report import formats
from jaxbench.report.named import NamedRun, headline, windows

FIGURES = (
    "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "published_s", "ratio",
    "joules_per_token", "forecast_s", "of_forecast",
)  # fmt: skip
"""Columns of the table. Those that no run has are left out."""

IN_BLOCK = {
    "tokens_per_s_per_gpu": "tokens/s/GPU", "mfu_pct": "% MFU", "joules_per_token": "J/token",
    "ratio": "of published", "of_forecast": "of forecast",
}  # fmt: skip
"""Figures in a block besides the step time, with their units."""

COLOURS = {"pass": "green", "slow": "yellow", "not comparable": ""}
"""Colours of verdicts. The others are red."""

UNLIMITED = 10_000

WHY_WIDTH = 30
"""The least width of a reason in the table. In a window without room for it each run is a block."""


def print_text(text: str, console: Console) -> None:
    """Prints a text whose bad words have the colours of verdicts. In a window its long lines break
    with a hanging indent."""
    coloured = Text(folded(text, console, label="").rstrip("\n"))
    coloured.highlight_regex(r"\bslow(er)?\b", COLOURS["slow"])
    coloured.highlight_regex(r"\b(failed|interrupted|incomplete)\b", "red")
    console.print(coloured, soft_wrap=True)


def print_report(runs: Sequence[NamedRun], convention: str, console: Console) -> None:
    """Prints the report, in colours if the console has any."""
    console.print(Text(headline(runs), "bold"))
    grid = _table(runs)
    unlimited = console.options.update(max_width=UNLIMITED)
    if console.measure(grid, options=unlimited).minimum > console.width:
        grid = _blocks(runs)
    elif bad := [run for run in runs if run.wrong]:
        lines = Table.grid(padding=(0, 2))
        for run in bad:
            lines.add_row(_verdict(run), Text(f"{run.name}: {run.wrong}"))
        console.print(lines)
    console.print()
    console.print(grid)
    if counted_steps := windows(runs):
        console.print(f"Step times are means over iterations {', '.join(counted_steps)}.")
    console.print(f"FLOPs and MFU follow the convention {convention}.")


def _verdict(run: NamedRun) -> Text:
    name = run.line["verdict"]
    return Text(f"{SYMBOLS[name]} {name}", COLOURS.get(name, "red"))


def _step(run: NamedRun) -> str:
    spread = f" ± {run.cell('std_s')}" if run.line["std_s"] else ""
    return run.cell("step_time_s") + spread


def _table(runs: Sequence[NamedRun]) -> Table:
    """The figures of all runs. The lines above the table say what is wrong with bad ones, so it has
    the reasons of the others."""
    grid = plain_table()
    keys = [key for key in FIGURES if any(run.line[key] for run in runs)]
    keys += ["window"] if len(windows(runs)) > 1 else []
    reasons = [run.line["reason"] if run.line["verdict"] == "not comparable" else ""
               for run in runs]  # fmt: skip
    figures = [formats.COLUMNS[key].heading for key in ("gpus", "step_time_s", *keys)]
    for heading in ("verdict", "run", *figures):
        left = heading in ("verdict", "run")
        grid.add_column(heading, justify="left" if left else "right", no_wrap=True)
    if any(reasons):
        grid.add_column("why", min_width=WHY_WIDTH)
    for run, reason in zip(runs, reasons, strict=True):
        cells = (run.name, run.cell("gpus"), _step(run), *map(run.cell, keys))
        grid.add_row(_verdict(run), *map(Text, cells), *([Text(reason)] if any(reasons) else []))
    return grid


def _blocks(runs: Sequence[NamedRun]) -> Table:
    """A block of lines for each run, bad ones first."""
    blocks = Table.grid(padding=(0, 2))
    for run in sorted(runs, key=lambda run: not run.wrong):
        figures = [f"{_step(run)} s"] if run.line["step_time_s"] else []
        figures += [f"{run.cell(key)} {unit}" for key, unit in IN_BLOCK.items() if run.cell(key)]
        reason = run.wrong or ("" if run.comparable else run.line["reason"])
        lines = (run.name, ", ".join(figures), reason)
        blocks.add_row(_verdict(run), Text("\n".join(filter(None, lines))))
    return blocks
