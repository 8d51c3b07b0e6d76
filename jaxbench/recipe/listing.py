"""The command `jaxbench list`: models, and the rows of recipes with their forecast and published
throughput."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from rich.table import Table

from jaxbench.base import hardware
from jaxbench.base.errors import RecipeError, counted, meant
from jaxbench.base.terminal import Parser, command, console, plain_table
from jaxbench.recipe import planned, published, recipes
from jaxbench.recipe.settings import Run

EXAMPLES = """
    jaxbench list                            every model: its precisions, GPUs and numbers of GPUs
    jaxbench list llama --gpu gb200          rows of Llama for GB200
    jaxbench list 70b fp8 --gpus 64          one row: 70B in FP8 on 64 GPUs
    jaxbench list --all                      every row, also those of one GPU
"""

OVERVIEW = """
A recipe is a model and a precision, such as {recipe}.
`jaxbench list {model}` shows its rows, with mesh, forecast and published throughput."""

LEGEND = """
forecast: tokens/s per GPU that jaxbench plan expects, not measured; step s: the same as seconds.
published: another program's tokens/s per GPU for the same work, on this GPU or the one in brackets.
ratio: forecast over published; above 1, we expect to be faster.
90 % interval of the step: from the errors on programs that others timed."""

COLUMNS = ("recipe", "GPU", "GPUs", "forecast", "published", "ratio", "step s", "90 % interval",
           "mesh", "layers", "batch")  # fmt: skip
WIDTHS = {130: 11, 110: 9, 90: 8, 0: 7}
"""The number of columns that a terminal of at least so many characters shows."""


def make_parser() -> Parser:
    """The parser of all options; `--help` documents them."""
    parser = Parser(
        prog="jaxbench list", examples=EXAMPLES,
        description="Which benchmarks there are. Without options: a line for each model. With "
        "words or options: rows, with their forecast and published throughput.",
    )  # fmt: skip
    add = parser.add_argument_group("which rows").add_argument
    add("words", nargs="*", metavar="WORD", help="parts of a recipe's name: llama 70b fp8")
    add("--gpu", choices=list(hardware.PLANNED), help="rows for this GPU")
    add("--gpus", type=int, metavar="N", help="rows for this number of GPUs")
    add("--all", action="store_true", help="also rows for one GPU, with models cut to a few layers")
    return parser


@dataclass(frozen=True)
class Row:
    """A row of a recipe on a kind of GPU. `step_s` and `interval` are the forecast of its step and
    the 90 % interval, in seconds. Figures are None if there is no forecast, or nothing published
    for this work."""

    run: Run
    gpu: hardware.Gpu
    step_s: float | None
    interval: tuple[float, float] | None
    published: published.Row | None

    @property
    def recipe(self) -> str:
        """The name of the recipe."""
        return self.run.recipe

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.run.gpus

    @property
    def forecast(self) -> float | None:
        """Forecast tokens per second and GPU."""
        return self.run.tokens_per_step / self.step_s / self.gpus if self.step_s else None

    @property
    def ratio(self) -> float | None:
        """The forecast over the published figure of the same GPU."""
        if self.forecast and self.published and self.published.gpu is self.gpu:
            return self.forecast / self.published.rate
        return None


def rows() -> Iterator[Row]:
    """Every row of every recipe, except smoke rows. Rows for a GPU other than the H100 exist only
    if the recipe has a table for it. Rows for every GPU are listed for the H100, or for the first
    GPU with a table if the H100 does not multiply in their format."""
    for recipe in recipes.load_all():
        dtype = recipes.resolve(recipe, recipes.SMOKE).precision.dtype
        common = "h100" if hardware.H100.multiplies(dtype) else next(iter(recipe.gpu_rows))
        tables = (common, recipe.rows), *recipe.gpu_rows.items()
        names = [(gpu, row) for gpu, rows in tables for row in rows if row != recipes.SMOKE]
        for name, row in names:
            gpu = hardware.PLANNED[name]
            run = recipes.resolve(recipe.on(gpu), row)
            step_s, interval = forecasts().get((recipe.name, name, run.gpus), (None, None))
            yield Row(run, gpu, step_s, interval, published.lookup(run, gpu))


@cache
def forecasts() -> dict[tuple[str, str, int], tuple[float, tuple[float, float]]]:
    """Forecast seconds and their 90 % interval by recipe, GPU and number of GPUs, from the table of
    all plans."""
    return {
        (line["recipe"], line["GPU"], int(line["GPUs"])): (
            float(line["forecast s"]),
            (float(line["low s"]), float(line["high s"])),
        )
        for line in planned.read()[1]
    }


def select(
    lines: Sequence[Row], words: Sequence[str], gpu: str | None, gpus: int | None
) -> list[Row]:
    """The rows whose recipe has all of the words in its name, for one GPU and one number of GPUs if
    these are given. If there is none, raises RecipeError with the nearest name."""
    kept, wanted = [*lines], []
    for word in words:
        kept = [line for line in kept if word.lower() in line.recipe]
        wanted.append(repr(word))
        if not kept:
            parts = {part for line in lines for part in line.recipe.split("_")}
            near = meant(word, sorted(parts))
            raise RecipeError(f"no recipe has {' and '.join(wanted)} in its name{near}")
    names = {line.gpu.name.lower() for line in kept}
    if gpu and gpu not in names:
        raise RecipeError(f"--gpu {gpu}: these recipes have rows for {', '.join(sorted(names))}")
    kept = [line for line in kept if gpu in (None, line.gpu.name.lower())]
    counts = sorted({line.gpus for line in kept})
    if gpus is not None and gpus not in counts:
        known = ", ".join(map(str, counts))
        raise RecipeError(
            f"--gpus {gpus}: these recipes have rows for {known} GPUs; jaxbench plan derives others"
        )
    return [line for line in kept if gpus in (None, line.gpus)]


def overview(lines: Sequence[Row]) -> Table:
    """A line for each model: its precisions, and the numbers of GPUs of its rows."""
    grid = plain_table()
    for heading in ("model", "precisions", "GPUs"):
        grid.add_column(heading, no_wrap=heading == "model")
    models: dict[str, list[Row]] = {}
    for line in lines:
        models.setdefault(line.recipe.rpartition("_")[0], []).append(line)
    for model, its in models.items():
        precisions = dict.fromkeys(line.recipe.rpartition("_")[2] for line in its)
        counts: dict[str, set[int]] = {}
        for line in its:
            counts.setdefault(line.gpu.name, set()).add(line.gpus)
        ranges = (
            f"{gpu} {'-'.join(dict.fromkeys(map(str, (min(n), max(n)))))}"
            for gpu, n in counts.items()
        )
        grid.add_row(model, " ".join(precisions), ", ".join(ranges))
    return grid


def table(lines: Sequence[Row], width: int) -> tuple[Table, Sequence[str]]:
    """The rows as a table for a terminal of `width` characters, and the columns that it has no
    room for."""
    shown = next(count for least, count in WIDTHS.items() if width >= least)
    grid = plain_table()
    for heading in COLUMNS[:shown]:
        text = heading in ("recipe", "GPU", "mesh")
        grid.add_column(heading, justify="left" if text else "right", no_wrap=heading != "mesh")
    for line in lines:
        figure = line.published
        other = f" ({figure.gpu.name})" if figure and figure.gpu is not line.gpu else ""
        cells = (
            line.recipe,
            line.gpu.name,
            str(line.gpus),
            f"{line.forecast:,.0f}" if line.forecast else "",
            f"{figure.rate:,.0f}{other}" if figure else "",
            f"{line.ratio:.2f}" if line.ratio else "",
            f"{line.step_s:.3f}" if line.step_s else "",
            "{:.3g} to {:.3g}".format(*line.interval) if line.interval else "",
            line.run.mesh_text(),
            str(line.run.model.layers),
            str(line.run.batch.global_batch),
        )
        grid.add_row(*cells[:shown])
    return grid, COLUMNS[shown:]


@command
def main(argv: Sequence[str] | None) -> int:
    """Prints the models, or the rows that were asked for."""
    args = make_parser().parse_args(argv)
    every = [*rows()]
    output = console()
    if not (args.words or args.gpu or args.gpus is not None or args.all):
        output.print(overview([line for line in every if line.gpus > 1]))
        example = every[0].recipe
        output.print(OVERVIEW.format(recipe=example, model=example.rpartition("_")[0]))
        return 0
    lines = select(every, args.words, args.gpu, args.gpus)
    kept = [line for line in lines if line.gpus > 1 or args.all] or lines
    grid, left_out = table(kept, output.width)
    output.print(grid)
    shown = len({line.recipe for line in kept})
    errors = [comment for comment in planned.read()[0] if comment.startswith(planned.ERRORS)]
    about = "\n".join([f"{counted(len(kept), 'row')} of {counted(shown, 'recipe')}.", *errors])
    output.print(f"\n{about}{LEGEND}")
    if len(kept) < len(lines):
        output.print(f"{counted(len(lines) - len(kept), 'row')} for one GPU: --all")
    if left_out:
        output.print(f"A wider window also shows: {', '.join(left_out)}.")
    return 0
