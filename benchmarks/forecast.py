"""Forecasts next to published step times: every row of configs/published.csv, and other figures of
the same models (anchors.csv). Writes the tables of docs/forecast.md, and their picture.

    python benchmarks/forecast.py [--output docs/forecast.md]

Rows are planned in processes and kept in results/plan, where `plan --all` keeps them too.
"""

import argparse
import csv
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

from forecast_picture import picture
from tables import replace_table

from jaxbench.base import hardware
from jaxbench.base.files import write_whole
from jaxbench.base.versions import versions
from jaxbench.plan.absent import check_compiler
from jaxbench.plan.plan import Plan, parts
from jaxbench.plan.processes import plan_each
from jaxbench.plan.systems import Target
from jaxbench.recipe import published, recipes
from jaxbench.recipe.derived_rows import extend
from jaxbench.recipe.families import MODELS
from jaxbench.recipe.settings import BLOCKS, Run

ANCHORS = Path(__file__).with_name("anchors.csv")

GOAL, BLOCKS_GOAL = 0.95, 0.9
"""Forecast over published that rows aim at, in bf16 and FP8 and in block-scaled formats; rows above
it are listed by part."""

PARTS = (
    "products", "recompute", "bubble", "attention", "scan", "quantization", "other kernels",
    "launches", "slowed", "exposed",
)  # fmt: skip
"""Parts of a forecast that have columns (`plan.parts`); `exposed` is all waiting."""


@dataclass(frozen=True)
class Figure:
    """A published rate in tokens per second and GPU, with its parallelism and source. `whole`: the
    figure is of the whole model, even where the recipe's row has fewer layers. `settings` are those
    in which its work differs from the row's, and those of a mesh or remat that suit its batch, as
    for --set, with spaces between them."""

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
    names = {}
    for recipe in recipes.load_all():
        run = recipes.resolve(recipe, recipes.SMOKE)
        names[run.model.family, run.model.size, run.precision.dtype] = recipe.name
    return [
        Figure(
            names[r.workload, r.size, r.dtype], r.gpu_type, r.gpus,
            r.tokens_per_step / r.step_time_s / r.gpus, layout, r.source_file, r.gbs,
        )
        for r, layout in zip(published.rows(), layouts(), strict=True)
    ]  # fmt: skip


AXES = {"tp": "TP", "pp": "PP", "cp": "CP", "ep": "EP", "fsdp": "FSDP"}
"""Axes by column of published.csv, as anchors.csv spells them."""


def layouts() -> list[str]:
    """The published program's parallelism for each row: axes of more than one rank."""
    with (recipes.config_folder() / "published.csv").open() as file:
        lines = [*csv.DictReader(file)]
    ranks = [
        [f"{axis}{line[name]}" for name, axis in AXES.items() if line[name] not in ("", "1")]
        for line in lines
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


def make_plans(figures: list[Figure]) -> dict[Figure, Plan | str]:
    """The plan of each figure's row, or the reason for which there is none."""
    figures_of: dict[str, dict[Run, list[Figure]]] = defaultdict(lambda: defaultdict(list))
    plans: dict[Figure, Plan | str] = {}
    for figure in figures:
        figures_of[figure.gpu][figure.run()].append(figure)
    for gpu, runs in figures_of.items():
        for run, plan in plan_each(runs, Target(hardware.PLANNED[gpu], gpu)):
            print(f"{run.recipe} {run.row} on {gpu}", flush=True)
            plans |= dict.fromkeys(runs[run], plan)
    return plans


def ratio(figure: Figure, plan: Plan) -> float:
    """Forecast over published step time, for the same number of tokens."""
    return figure.rate / plan.rates["forecast"].tokens_per_s_per_gpu


def summary(plans: dict[Figure, Plan | str]) -> list[str]:
    """Median and extreme ratios in all, and by recipe and GPU."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for figure, plan in plans.items():
        if isinstance(plan, Plan):
            groups[figure.recipe, figure.gpu].append(ratio(figure, plan))
    whole = [r for ratios in groups.values() for r in ratios]
    lines = [
        f"{len(whole)} figures: the median of forecast over published is {median(whole):.2f}; "
        f"{sum(abs(r - 1) <= 0.1 for r in whole)} are within 10 %, "
        f"{sum(abs(r - 1) <= 0.15 for r in whole)} within 15 %; "
        f"{sum(r <= GOAL for r in whole)} are at most {GOAL}, "
        f"{sum(r <= BLOCKS_GOAL for r in whole)} at most {BLOCKS_GOAL}, "
        f"{sum(r > 1 for r in whole)} above 1.",
        "",
        "| recipe | GPU | rows | median | least | most |",
        "|---|---|---|---|---|---|",
    ]
    for (recipe, gpu), ratios in sorted(groups.items()):
        figures = (median(ratios), min(ratios), max(ratios))
        lines.append(
            f"| {recipe} | {gpu} | {len(ratios)} | "
            + " | ".join(f"{r:.2f}" for r in figures)
            + " |"
        )
    return lines


def table(plans: dict[Figure, Plan | str]) -> list[str]:
    """A line for each figure."""
    lines = [
        "| recipe | GPU | GPUs | published layout | tokens/s/GPU published | forecast | "
        "forecast / published in seconds | 90 % interval | bound | mesh here | source |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for figure, plan in plans.items():
        cells = [figure.recipe, figure.gpu, str(figure.gpus), figure.layout, f"{figure.rate:.0f}"]
        if isinstance(plan, str):
            cells += ["not planned", "", "", "", plan]
        else:
            rate, f = plan.rates["forecast"].tokens_per_s_per_gpu, plan.forecast
            i = f.interval
            slow, fast = (rate * f.step_s / seconds for seconds in (i.high_s, i.low_s))
            bound = plan.rates["bound"].tokens_per_s_per_gpu
            cells += [f"{rate:.0f}", f"{ratio(figure, plan):.2f}", f"{slow:.0f} to {fast:.0f}"]
            cells += [f"{bound:.0f}", plan.mesh + ("" if plan.fits else ", does not fit")]
        lines.append(f"| {' | '.join([*cells, figure.source])} |")
    return lines


def by_part(plans: dict[Figure, Plan | str], goal: float) -> list[str]:
    """A line for each figure above a goal, the furthest first: parts of the forecast as shares of
    the published step, which add up to the ratio, and the share of the kernels' time for which no
    table has the shape."""
    lines = [
        f"Above {goal}, by part, in % of the published step; the last column in % of all kernels' "
        "time:",
        "",
        f"| row | all | {' | '.join(PARTS)} | outside the tables |",
        "|---|" + "---|" * (len(PARTS) + 2),
    ]
    above = {
        figure: plan
        for figure, plan in plans.items()
        if isinstance(plan, Plan) and ratio(figure, plan) > goal
    }
    for figure, plan in sorted(above.items(), key=lambda item: -ratio(*item)):
        percent = 100 * ratio(figure, plan)
        shares = dict.fromkeys(PARTS, 0.0)
        for name, seconds in parts(plan).items():
            shares[name.partition(":")[0]] += percent * seconds / plan.forecast.step_s
        cells = [f"{figure.recipe}:{figure.gpus} {figure.gpu}", f"{percent:.1f}"]
        cells += [f"{share:.1f}" for share in shares.values()]
        lines.append(f"| {' | '.join(cells)} | {100 * plan.forecast.outside:.0f} |")
    return lines


def main() -> int:
    """Writes the tables; returns 1 if a row has no plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/forecast.md"))
    args = parser.parse_args()
    check_compiler()
    tables, later = table_figures(), later_figures()
    plans = make_plans([*tables, *later])
    blocks = [f for f in tables if f.recipe.endswith(tuple(BLOCKS))]
    whole = [f for f in tables if f not in blocks]

    def both(figures: list[Figure], goal: float) -> list[str]:
        chosen = {figure: plans[figure] for figure in figures}
        return [*summary(chosen), "", *by_part(chosen, goal), "", *table(chosen)]

    since = {f: plans[f] for f in later}
    packages = versions() | {"commit": None, "source": None}
    names = ", ".join(f"{name} {value}" for name, value in packages.items() if value)
    lines = [
        f"{time.strftime('%Y-%m-%d')}. {names}.", "",
        "### Published tables", "", *both(whole, GOAL), "",
        "### Published tables in MXFP8 and NVFP4", "", *both(blocks, BLOCKS_GOAL), "",
        "### Published since", "", *by_part(since, GOAL), "", *table(since),
    ]  # fmt: skip
    replace_table(args.output, "\n".join(lines))
    write_whole(args.output.with_suffix(".svg"), picture(lines))
    print("\n".join(lines))
    return int(any(isinstance(plan, str) for plan in plans.values()))


if __name__ == "__main__":
    sys.exit(main())
