"""Forecasts next to published step times. Writes the tables of docs/forecast.md and their picture:
every row of configs/published.csv, from the table of all plans, without compiling anything.

    python benchmarks/forecast.py [--anchors]

With `--anchors` it plans the other figures of the same models (anchors.csv) and writes their table
too. They are planned in processes and kept in results/plan.
"""

import argparse
import csv
import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

from forecast_picture import picture
from tables import replace_table, table

from jaxbench.base import hardware
from jaxbench.base.files import write_whole
from jaxbench.plan import systems
from jaxbench.plan.absent import check_compiler
from jaxbench.plan.processes import plan_each
from jaxbench.plan.sweep import cells
from jaxbench.recipe import planned, published, recipes
from jaxbench.recipe.derived_rows import extend
from jaxbench.recipe.families import MODELS
from jaxbench.recipe.settings import BLOCKS, Run

ANCHORS = Path(__file__).with_name("anchors.csv")
DOCUMENT = Path(__file__).parents[1] / "docs" / "forecast.md"
ANCHORS_MARK = "<!-- anchors -->"
"""The line of the document above the table of other figures."""


@dataclass(frozen=True)
class Figure:
    """A published rate in tokens per second and GPU, with its parallelism and source. If it is
    `whole`, it is for the whole model, even if the recipe's row has fewer layers. `settings`, as
    for --set and with spaces between them, say how its work differs from the row's, and which mesh
    or remat suits its batch."""

    recipe: str
    gpu: str
    gpus: int
    rate: float
    layout: str
    source: str
    batch: int | None = None
    whole: bool = False
    settings: str = ""

    def run(self) -> Run:
        """The row to compare with, at the figure's global batch. It is derived if the recipe has
        none for so many GPUs."""
        gpu = hardware.PLANNED[self.gpu]
        recipe = recipes.load(self.recipe).on(gpu)
        settings, layers = self.settings.split(), MODELS[recipe.model].layers
        recipe = extend(recipe, self.gpus, gpu, recipes.parse_overrides(settings))
        row = recipe.rows[self.gpus]
        if self.whole and row["layers"] != layers:
            settings.insert(0, f"model.layers={layers}")
        if self.batch not in (None, row["global_batch"]):
            settings.append(f"batch.global_batch={self.batch}")
        overrides = recipes.parse_overrides(settings)
        return recipes.resolve(recipe, self.gpus, overrides=overrides)


def table_figures() -> list[Figure]:
    """The figures of published.csv."""
    return [
        Figure(
            r.recipe, r.gpu_type, r.gpus,
            r.tokens_per_step / r.step_time_s / r.gpus, layout, r.source_file, r.gbs,
        )
        for r, layout in zip(published.rows(), layouts(), strict=True)
    ]  # fmt: skip


AXES = {"tp": "TP", "pp": "PP", "cp": "CP", "ep": "EP", "fsdp": "FSDP"}
"""Axes by column of published.csv, as anchors.csv spells them."""


def mesh_lines() -> list[dict[str, str]]:
    """The lines of published.csv, with the columns of meshes that `published.Row` leaves out."""
    with (recipes.config_folder() / "published.csv").open() as file:
        return [*csv.DictReader(file)]


def layouts() -> list[str]:
    """The published program's parallelism for each row: axes of more than one rank."""
    ranks = [
        [f"{axis}{line[name]}" for name, axis in AXES.items() if line[name] not in ("", "1")]
        for line in mesh_lines()
    ]
    return [" ".join(axes) or "data alone" for axes in ranks]


def later_figures() -> list[Figure]:
    """The figures of anchors.csv that are not in published.csv."""
    known = {(f.recipe, f.gpu, f.gpus, f.batch): f.rate for f in table_figures()}
    figures = []
    with ANCHORS.open() as file:
        for line in csv.DictReader(file):
            rate = float(line["tokens_per_s_per_gpu"])
            name = f"{line['model']}_{line['dtype']}"
            batch = int(line["global_batch"]) if line["global_batch"] else None
            published_rate = known.get((name, line["gpu"], int(line["gpus"]), batch), 0.0)
            if abs(published_rate / rate - 1) > 0.005:
                figures.append(
                    Figure(name, line["gpu"], int(line["gpus"]), rate, line["layout"],
                           line["source"], batch, whole=True, settings=line["settings"])
                )  # fmt: skip
    return figures


@dataclass(frozen=True)
class Forecast:
    """A forecast of a figure's work, in tokens per second and GPU: the rate, the slow and the fast
    end of its 90 % interval, and the bound; then the mesh and the date of the plan. Plans before
    2026-11-26 have neither interval nor date."""

    rate: float
    ends: tuple[float, float] | None
    bound: float
    mesh: str
    planned: str


Forecasts = dict[Figure, Forecast | None]
"""None for a figure that is not planned."""


def forecast_of(line: dict[str, str], tokens: float) -> Forecast:
    """The forecast of a line of the table of all plans, whose step has so many tokens per GPU."""

    def rate(column: str) -> float:
        return tokens / float(line[column])

    return Forecast(
        rate=rate("forecast s"),
        ends=(rate("high s"), rate("low s")) if line["low s"] else None,
        bound=rate("bound s"),
        mesh=line["mesh"] + ("" if line["fits"] == "yes" else ", does not fit"),
        planned=line["planned"],
    )


def in_table() -> Forecasts:
    """The figures of published.csv, with their forecasts in the table of all plans."""
    lines = {(line["recipe"], line["GPU"], int(line["GPUs"])): line for line in planned.read()[1]}
    found: Forecasts = {}
    for figure in table_figures():
        line = lines.get((figure.recipe, figure.gpu, figure.gpus))
        found[figure] = None
        if line and (seconds := line["published s"]):
            found[figure] = forecast_of(line, figure.rate * float(seconds))
    return found


def planned_now(figures: list[Figure]) -> Forecasts:
    """Forecasts from plans that are made here. Prints why a figure has none."""
    figures_of: dict[str, dict[Run, list[Figure]]] = defaultdict(lambda: defaultdict(list))
    for figure in figures:
        figures_of[figure.gpu][figure.run()].append(figure)
    found: Forecasts = {}
    for gpu, runs in figures_of.items():
        for run, plan in plan_each(runs, systems.find(gpu)):
            row, forecast = f"{run.recipe} {run.row} on {gpu}", None
            if isinstance(plan, str):
                print(f"{row}: {plan}", flush=True)
            else:
                print(row, flush=True)
                forecast = forecast_of(cells(plan, gpu), run.tokens_per_step / run.gpus)
            found |= dict.fromkeys(runs[run], forecast)
    return found


def summary(forecasts: Forecasts) -> list[str]:
    """Median and extreme ratios of forecast over published seconds, in all, and by recipe and
    GPU."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for figure, forecast in forecasts.items():
        if forecast:
            groups[figure.recipe, figure.gpu].append(figure.rate / forecast.rate)
    whole = [r for ratios in groups.values() for r in ratios]
    lines = [
        f"{len(whole)} figures: the median of forecast over published is {median(whole):.2f}, the "
        f"extremes are {min(whole):.2f} and {max(whole):.2f}; "
        f"{sum(abs(r - 1) <= 0.1 for r in whole)} are within 10 %, "
        f"{sum(abs(r - 1) <= 0.15 for r in whole)} within 15 %, "
        f"{sum(r > 1 for r in whole)} above 1.",
        "",
    ]
    rows = [
        [recipe, gpu, str(len(ratios)),
         *(f"{r:.2f}" for r in (median(ratios), min(ratios), max(ratios)))]
        for (recipe, gpu), ratios in sorted(groups.items())
    ]  # fmt: skip
    return [*lines, *table(("recipe", "GPU", "rows", "median", "least", "most"), rows)]


def details(forecasts: Forecasts) -> list[str]:
    """A table with a line for each figure."""
    columns = (
        "recipe", "GPU", "GPUs", "published layout", "tokens/s/GPU published", "forecast",
        "forecast / published in seconds", "90 % interval", "bound", "mesh here", "planned",
        "source",
    )  # fmt: skip
    rows = []
    for figure, forecast in forecasts.items():
        cells = [figure.recipe, figure.gpu, str(figure.gpus), figure.layout, f"{figure.rate:.0f}"]
        if forecast is None:
            cells += ["not planned", *[""] * 5]
        else:
            interval = "{:.0f} to {:.0f}".format(*forecast.ends) if forecast.ends else ""
            cells += [f"{forecast.rate:.0f}", f"{figure.rate / forecast.rate:.2f}"]
            cells += [interval, f"{forecast.bound:.0f}", forecast.mesh, forecast.planned]
        rows.append([*cells, figure.source])
    return table(columns, rows)


def tables(forecasts: Forecasts) -> list[str]:
    """The tables of published figures, block-scaled formats apart."""
    blocks = {f: forecasts[f] for f in forecasts if f.recipe.endswith(tuple(BLOCKS))}
    others = {f: forecasts[f] for f in forecasts if f not in blocks}
    return [
        "### In bf16 and FP8", "", *summary(others), *details(others),
        "### In MXFP8 and NVFP4", "", *summary(blocks), *details(blocks),
    ]  # fmt: skip


def main() -> int:
    """Writes the tables; returns 1 if a figure has no plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--anchors", action="store_true", help="plan the figures of anchors.csv")
    args = parser.parse_args()
    forecasts = in_table()
    replace_table(DOCUMENT, "\n".join(tables(forecasts)))
    if args.anchors:
        check_compiler()
        anchors = planned_now(later_figures())
        first, *_ = summary(anchors)
        replace_table(DOCUMENT, "\n".join([first, "", *details(anchors)]), ANCHORS_MARK)
        forecasts |= anchors
    write_whole(DOCUMENT.with_suffix(".svg"), picture(DOCUMENT.read_text().splitlines()))
    return int(None in forecasts.values())


if __name__ == "__main__":
    sys.exit(main())
