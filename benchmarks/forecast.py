"""Forecasts beside what was published: every row of configs/published.csv, and the best figures
that were published since (anchors.csv). Writes the tables of docs/forecast.md.

    python benchmarks/forecast.py [--output docs/forecast.md]

Rows are planned in processes, and kept in results/plan: what `plan --all` planned is there.
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

from jaxbench import hardware
from jaxbench.errors import RecipeError
from jaxbench.files import write_whole
from jaxbench.plan.absent import check_compiler
from jaxbench.plan.plan import Plan
from jaxbench.planning.processes import Target, plan_each
from jaxbench.planning.sweep import MARK
from jaxbench.recipe import published, recipes
from jaxbench.recipe.families import MODELS
from jaxbench.recipe.settings import Run
from jaxbench.versions import versions

ANCHORS = Path(__file__).with_name("anchors.csv")


@dataclass(frozen=True)
class Figure:
    """A published rate, in tokens per second and GPU, of a recipe on GPUs; how its program was laid
    out, and where it is from. `whole` says that it is of the whole model, also where the recipe's
    row has fewer layers."""

    recipe: str
    gpu: str
    gpus: int
    rate: float
    layout: str
    source: str
    batch: int | None = None
    whole: bool = False

    def run(self) -> Run:
        """The row that stands beside it, with its global batch if the row's mesh can have it."""
        recipe = recipes.load(self.recipe).on(hardware.PLANNED[self.gpu])
        run = recipes.resolve(recipe, self.gpus)
        changes = []
        if self.whole and run.label == "proxy":
            changes.append(f"model.layers={MODELS[recipe.model].layers}")
        if self.batch not in (None, run.batch.global_batch):
            changes.append(f"batch.global_batch={self.batch}")
        try:
            overrides = recipes.parse_overrides(changes)
            return recipes.resolve(recipe, self.gpus, overrides=overrides)
        except RecipeError:
            return run


def of_tables() -> list[Figure]:
    """The rows of published.csv; one for each dtype of a model is a recipe."""
    names = {}
    for recipe in recipes.load_all():
        run = recipes.resolve(recipe, recipes.SMOKE)
        names[run.model.family, run.model.size, run.precision.dtype] = recipe.name
    return [
        Figure(
            names[r.workload, r.size, r.dtype], r.gpu_type, r.gpus,
            r.tokens_per_step / r.step_time_s / r.gpus, layout, r.source_file,
        )
        for r, layout in zip(published.rows(), layouts(), strict=True)
    ]  # fmt: skip


AXES = {"tp": "TP", "pp": "PP", "cp": "CP", "ep": "EP", "fsdp": "FSDP"}
"""Columns of published.csv, as anchors.csv writes them."""


def layouts() -> list[str]:
    """How the published program of each row was laid out: the axes of more than one rank."""
    with (recipes.config_folder() / "published.csv").open() as file:
        lines = [*csv.DictReader(file)]
    ranks = [
        [f"{axis}{line[name]}" for name, axis in AXES.items() if line[name] not in ("", "1")]
        for line in lines
    ]
    return [" ".join(each) or "data alone" for each in ranks]


def since() -> list[Figure]:
    """The rows of anchors.csv that are not rows of published.csv too."""
    known = {(f.recipe, f.gpu, f.gpus): f.rate for f in of_tables()}
    found = []
    with ANCHORS.open() as file:
        for line in csv.DictReader(file):
            rate = float(line["tokens_per_s_per_gpu"])
            name = f"{line['model']}_{line['dtype']}"
            same = known.get((name, line["gpu"], int(line["gpus"])), 0.0)
            if abs(same / rate - 1) > 0.005:
                batch = int(line["global_batch"]) if line["global_batch"] else None
                found.append(
                    Figure(name, line["gpu"], int(line["gpus"]), rate, line["layout"],
                           line["source"], batch, whole=True)
                )  # fmt: skip
    return found


def plans(figures: list[Figure]) -> dict[Figure, Plan | str]:
    """The plan of each figure's row, or why there is none."""
    wanted: dict[str, dict[Run, list[Figure]]] = defaultdict(lambda: defaultdict(list))
    found: dict[Figure, Plan | str] = {}
    for figure in figures:
        wanted[figure.gpu][figure.run()].append(figure)
    for gpu, runs in wanted.items():
        for run, plan in plan_each(runs, Target(hardware.PLANNED[gpu], gpu)):
            print(f"{run.recipe} {run.row} on {gpu}", flush=True)
            found |= dict.fromkeys(runs[run], plan)
    return found


def ratio(figure: Figure, plan: Plan) -> float:
    """Seconds forecast over seconds published, for as many tokens."""
    return figure.rate / plan.rates["forecast"].tokens_per_s_per_gpu


def summary(found: dict[Figure, Plan | str]) -> list[str]:
    """Median and worst ratio by model, dtype and GPU."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for figure, plan in found.items():
        if isinstance(plan, Plan):
            groups[figure.recipe, figure.gpu].append(ratio(figure, plan))
    whole = [r for ratios in groups.values() for r in ratios]
    lines = [
        f"{len(whole)} figures: the median of forecast over published is {median(whole):.2f}; "
        f"{sum(abs(r - 1) <= 0.1 for r in whole)} are within 10 %, "
        f"{sum(abs(r - 1) <= 0.15 for r in whole)} within 15 %.",
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


def table(found: dict[Figure, Plan | str]) -> list[str]:
    """A line for each figure."""
    lines = [
        "| recipe | GPU | GPUs | published layout | tokens/s/GPU published | forecast | "
        "forecast / published in seconds | slow to fast | bound | mesh here | source |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for figure, plan in found.items():
        cells = [figure.recipe, figure.gpu, str(figure.gpus), figure.layout, f"{figure.rate:.0f}"]
        if isinstance(plan, str):
            cells += ["not planned", "", "", "", plan]
        else:
            rate, f = plan.rates["forecast"].tokens_per_s_per_gpu, plan.forecast
            slow, fast = (rate * f.step_s / seconds for seconds in (f.slow_s, f.fast_s))
            bound = plan.rates["bound"].tokens_per_s_per_gpu
            cells += [f"{rate:.0f}", f"{ratio(figure, plan):.2f}", f"{slow:.0f} to {fast:.0f}"]
            cells += [f"{bound:.0f}", plan.mesh + ("" if plan.fits else ", does not fit")]
        lines.append(f"| {' | '.join([*cells, figure.source])} |")
    return lines


def main() -> int:
    """Writes the tables; 1 where a row has no plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/forecast.md"))
    args = parser.parse_args()
    check_compiler()
    tables, later = of_tables(), since()
    found = plans([*tables, *later])
    here = versions() | {"commit": None, "source": None}
    names = ", ".join(f"{name} {value}" for name, value in here.items() if value)
    lines = [
        f"{time.strftime('%Y-%m-%d')}. {names}.", "",
        "### Published tables", "", *summary({f: found[f] for f in tables}), "",
        *table({f: found[f] for f in tables}), "",
        "### Published since", "", *table({f: found[f] for f in later}),
    ]  # fmt: skip
    before = args.output.read_text().partition(MARK)[0]
    write_whole(args.output, f"{before}{MARK}\n\n" + "\n".join(lines) + "\n")
    print("\n".join(lines))
    return int(any(isinstance(plan, str) for plan in found.values()))


if __name__ == "__main__":
    sys.exit(main())
