"""The command `jaxbench list`: rows of recipes, with forecast and published step times."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from rich.table import Table

from jaxbench.base import hardware
from jaxbench.base.errors import RecipeError, counted, meant
from jaxbench.base.terminal import Parser, command, completes, console
from jaxbench.recipe import planned, published, recipes

EXAMPLES = """
    jaxbench list                            every row
    jaxbench list llama --gpu gb200          rows of Llama that are for GB200
    jaxbench list 70b fp8 --gpus 64          one row: 70B in FP8 on 64 GPUs
"""

LEGEND = """
forecast: seconds per step as jaxbench plan expects them; not measured. In nine of ten cases the
measured step should lie in the 90 % interval, which rests on programs that others timed.
published: of another program that does the same work, on this GPU or the one that is named; MFU as
its source prints it.
Every recipe has a smoke row too, for a CPU."""

COLUMNS = ("recipe", "GPU", "GPUs", "mesh", "forecast s", "90 % interval", "published s", "ratio",
           "MFU %", "layers", "batch")  # fmt: skip
WIDE, FURTHER = 130, 3
"""Characters of a terminal that shows all columns, and the number of columns that a narrower one
leaves out at the end."""


def make_parser() -> Parser:
    """The parser of all options; `--help` documents them."""
    parser = Parser(
        prog="jaxbench list", examples=EXAMPLES,
        description="Every recipe with its rows: mesh, batch, forecast and published step time.",
    )  # fmt: skip
    add = parser.add_argument_group("which rows").add_argument
    completes(
        add("words", nargs="*", metavar="WORD", help="parts of a recipe's name: llama 70b fp8"),
        recipes.names,
    )
    add("--gpu", choices=list(hardware.PLANNED), help="rows that are for this GPU")
    add("--gpus", type=int, metavar="N", help="rows for so many GPUs")
    return parser


def rows() -> Iterator[dict[str, Any]]:
    """Every row of every recipe, except smoke rows. Rows for a GPU other than the H100 exist only
    if the recipe has a table for it."""
    forecast = forecasts()
    for recipe in recipes.load_all():
        tables = {"h100": recipe.rows, **recipe.gpu_rows}
        for gpu, row in ((hardware.PLANNED[name], row) for name in tables for row in tables[name]):
            if row == recipes.SMOKE:
                continue
            run = recipes.resolve(recipe.on(gpu), row)
            yield {
                "recipe": recipe.name,
                "gpu": gpu,
                "gpus": run.gpus,
                "layers": run.model.layers,
                "mesh": run.mesh_text(),
                "batch": run.batch.global_batch,
                "forecast": forecast.get((recipe.name, gpu.name.lower(), run.gpus)),
                "published": published.lookup(run, gpu),
            }


@cache
def forecasts() -> dict[tuple[str, str, int], tuple[float, str]]:
    """Forecast seconds and their interval by recipe, GPU and number of GPUs, from the table of all
    plans."""
    return {
        (line["recipe"], line["GPU"], int(line["GPUs"])): (
            float(line["forecast s"]),
            f"{line['low s']} to {line['high s']}" if line["low s"] else "",
        )
        for line in planned.read()[1]
    }


def chosen(
    lines: Sequence[dict[str, Any]], words: Sequence[str], gpu: str | None, gpus: int | None
) -> list[dict[str, Any]]:
    """The rows whose recipe has all of the words in its name, for one GPU and one number of GPUs if
    these are given. If there is none, raises RecipeError with the nearest name."""
    kept, wanted = [*lines], []
    for word in words:
        kept = [line for line in kept if word.lower() in line["recipe"]]
        wanted.append(repr(word))
        if not kept:
            parts = {part for line in lines for part in re.split("_", line["recipe"])}
            near = meant(word, sorted(parts))
            raise RecipeError(f"no recipe has {' and '.join(wanted)} in its name{near}")
    names = {line["gpu"].name.lower() for line in kept}
    if gpu and gpu not in names:
        raise RecipeError(f"--gpu {gpu}: these recipes have rows for {', '.join(sorted(names))}")
    kept = [line for line in kept if gpu in (None, line["gpu"].name.lower())]
    counts = sorted({line["gpus"] for line in kept})
    if gpus is not None and gpus not in counts:
        known = ", ".join(map(str, counts))
        raise RecipeError(
            f"--gpus {gpus}: these recipes have rows for {known} GPUs; jaxbench plan derives others"
        )
    return [line for line in kept if gpus in (None, line["gpus"])]


def table(lines: Sequence[dict[str, Any]], width: int) -> Table:
    """The rows as a table for a terminal of `width` characters."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    columns = COLUMNS if width >= WIDE else COLUMNS[:-FURTHER]
    for heading in columns:
        text = heading in ("recipe", "GPU", "mesh")
        grid.add_column(heading, justify="left" if text else "right", no_wrap=heading != "mesh")
    for line in lines:
        row, (forecast, interval) = line["published"], line["forecast"] or (None, "")
        other = f" ({row.gpu.name})" if row and row.gpu is not line["gpu"] else ""
        cells = (
            line["recipe"],
            line["gpu"].name,
            str(line["gpus"]),
            line["mesh"],
            f"{forecast:.3f}" if forecast else "",
            interval,
            f"{row.step_time_s:.3f}{other}" if row else "",
            f"{forecast / row.step_time_s:.2f}" if forecast and row and not other else "",
            str(row.mfu_pct) if row and row.mfu_pct else "",
            str(line["layers"]),
            str(line["batch"]),
        )
        grid.add_row(*cells[: len(columns)])
    return grid


@command
def main(argv: Sequence[str] | None) -> int:
    """Prints the table."""
    args = make_parser().parse_args(argv)
    lines = chosen([*rows()], args.words, args.gpu, args.gpus)
    output = console()
    output.print(table(lines, output.width))
    shown = len({line["recipe"] for line in lines})
    errors = [comment for comment in planned.read()[0] if comment.startswith(planned.ERRORS)]
    about = "\n".join([f"{counted(len(lines), 'row')} of {counted(shown, 'recipe')}.", *errors])
    output.print(f"\n{about}{LEGEND}")
    return 0
