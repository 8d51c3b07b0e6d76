"""Forecasts our program on the mesh of the published one.

The mesh of most of our rows was chosen by the shortest forecast, so the forecast on it is biased
low. The published mesh was not. Next to each other, the two ratios to the published step show how
much of a row's gain comes from the mesh.

    python benchmarks/published_mesh.py [ROW ..]     # plans what is missing, for instance grok1
    python benchmarks/published_mesh.py --again ROW  # plans it although it is there
    python benchmarks/published_mesh.py --document   # writes the table of docs/forecast.md

Tensor, pipeline, context and expert axes, virtual stages and microbatch are those of
configs/published.csv. FSDP takes the GPUs that are left. Megatron's distributed optimizer does so
too, but it gathers weights once per step, and FSDP for each microbatch unless there is a pipeline.
What is saved for the backward pass is not in that table, so a search chooses it (`CANDIDATES`).
It begins with what the same layout saved before, on another number of GPUs or in another
precision, if that is known.
Results are kept in published_mesh.csv, and plans in results/plan.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

from forecast import layouts, mesh_lines
from tables import Key, keep, kept, key, replace_table, table

from jaxbench.base.errors import RecipeError, counted
from jaxbench.plan import candidates, search, systems
from jaxbench.plan.plan import Plan
from jaxbench.recipe import planned, published, recipes
from jaxbench.recipe.settings import Run

KEPT = Path(__file__).with_suffix(".csv")
DOCUMENT = Path(__file__).parents[1] / "docs" / "forecast.md"
MARK = "<!-- published mesh -->"

CANDIDATES = 4
"""Programs that are compiled for each row, at most."""

FROM_NEIGHBOUR = 2
"""The same for a row whose search begins with what a neighbour saves. If that is everything, one
program is enough."""

IN_HOST = ", in host memory "
"""Between what is saved and what of it is offloaded, in the table."""

CHOSEN = frozenset({*candidates.POLICY, "execution.xla_flags"})
"""The settings that the search may change."""

AXES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
"""Our axes by the columns of published.csv."""


@dataclass(frozen=True)
class Published:
    """A row of published.csv that names a mesh of several axes, and its line there."""

    row: published.Row
    layout: str
    line: dict[str, str]

    @property
    def key(self) -> Key:
        return self.row.recipe, self.row.gpu_type, str(self.row.gpus)

    @property
    def recipe(self) -> recipes.Recipe:
        return recipes.load(self.row.recipe).on(self.row.gpu)

    @property
    def target(self) -> systems.Target:
        return systems.find(self.row.gpu_type)

    def settings(self, saved: str = "full") -> list[str]:
        """The `--set` entries of the published mesh, and what is saved for the backward pass.
        Megatron's expert ranks may span the tensor ranks of attention; ours do not, so they are at
        most the rest of the GPUs. Megatron may also split an expert among tensor ranks; on ours
        each has whole experts, so there are at most as many ranks as experts."""
        axes = {axis: int(self.line[column] or 1) for column, axis in AXES.items()}
        left = self.row.gpus // (axes["tensor"] * axes["pipeline"] * axes["context"])
        experts = recipes.resolve(self.recipe, self.row.gpus).model.experts
        most = experts.count // axes["tensor"] if experts else 1
        axes["expert"] = min(axes["expert"], left, most)
        axes["fsdp"] = left // axes["expert"]
        pipelined = axes["pipeline"] > 1
        remat, _, offload = saved.partition(IN_HOST)
        axes["virtual_stages"] = int(self.line["vp"] or 1) if pipelined else 1
        return [
            *(f"parallelism.{axis}={size}" for axis, size in axes.items()),
            f"batch.microbatch={self.line['mbs'] or 1}",
            "execution.xla_flags=tuned",
            "execution.replica_sums=step",
            "execution.expert_parts=1",
            f"execution.remat={remat}",
            f"execution.offload={offload or 'none'}",
        ]

    def run(self, saved: str = "full") -> Run:
        """Our row on the published mesh. Raises RecipeError if it cannot run."""
        overrides = recipes.parse_overrides(self.settings(saved))
        return recipes.resolve(self.recipe, self.row.gpus, overrides=overrides)


def rows() -> list[Published]:
    """The rows whose published mesh has another axis than FSDP and data."""
    return [
        Published(row, layout, line)
        for row, layout, line in zip(published.rows(), layouts(), mesh_lines(), strict=True)
        if any(int(line[column] or 1) > 1 for column in AXES)
    ]


def saved_by_neighbour(found: Published) -> str | None:
    """What the same layout saves in the table on this number of GPUs or the nearest one, or else in
    another precision."""
    recipe, gpu, gpus = found.key
    near = {
        (other != recipe, abs(int(number) - int(gpus))): line["saved"]
        for (other, on, number), line in kept(KEPT).items()
        if (model_of(other), on) == (model_of(recipe), gpu)
        and line["published layout"] == found.layout
        and line["saved"]
    }
    return near[min(near)] if near else None


def model_of(recipe: str) -> str:
    """The name of a recipe without its precision."""
    return recipe.rpartition("_")[0]


def best_plan(found: Published) -> Plan | str:
    """The fastest plan that fits, or the reason why there is none."""
    saved = saved_by_neighbour(found)
    starts = [(saved, 1 if saved == "none" else FROM_NEIGHBOUR)] if saved else []
    for policy, limit in [*starts, ("full", CANDIDATES)]:
        try:
            run = found.run(policy)
        except RecipeError as error:
            return str(error)
        state = search.run(found.recipe, run, found.row.recipe, limit, found.target, free=CHOSEN)
        best = state.best()
        if best and (plan := state.tried[best].plan):
            return plan
    tried = [outcome for outcome in state.tried.values() if outcome.plan]
    if not tried:
        return next(outcome.error for outcome in state.tried.values())
    size = min(tried, key=lambda outcome: outcome.peak).peak / 2**30
    return f"does not fit: {size:.1f} GiB"


def cells(found: Published, plan: Plan | str) -> dict[str, str]:
    """The line of a row in published_mesh.csv."""
    recipe, gpu, gpus = found.key
    line = {"recipe": recipe, "GPU": gpu, "GPUs": gpus, "published layout": found.layout}
    line |= dict.fromkeys(("mesh", "saved", "forecast s", "low s", "high s", "peak GiB"), "")
    line |= {"planned": time.strftime("%Y-%m-%d"), "failed": ""}
    if isinstance(plan, str):
        return line | {"failed": plan}
    execution, interval = plan.settings["execution"], plan.forecast.interval
    host = f"{IN_HOST}{execution['offload']}" if execution["offload"] != "none" else ""
    return line | {
        "mesh": plan.mesh,
        "saved": f"{execution['remat']}{host}",
        "forecast s": f"{plan.forecast_step_s:.3f}",
        "low s": f"{interval.low_s:.3f}",
        "high s": f"{interval.high_s:.3f}",
        "peak GiB": f"{plan.bytes_per_device.peak / 2**30:.1f}",
    }


def document() -> str:
    """The table of the document: the forecast on both meshes over the published step."""
    lines, chosen = kept(KEPT), {key(line): line for line in planned.read()[1]}
    every = rows()
    known = [found for found in every if found.key in lines]
    planned_there = [found for found in known if not lines[found.key]["failed"]]
    there, ours = (
        [float(of[found.key]["forecast s"]) / found.row.step_time_s for found in planned_there]
        for of in (lines, chosen)
    )
    return "\n".join([
        f"{len(planned_there)} of {len(every)} rows that name a mesh are planned on it so far. "
        "Cannot run there, for the reason in the table: "
        f"{counted(len(known) - len(planned_there), 'row')}. "
        f"Over the published step, forecasts there are {spread(there)}; those of the same rows on "
        f"our meshes are {spread(ours)}.", "",
        *table(
            ["recipe", "GPU", "GPUs", "published layout", "published s", "forecast there s",
             "90 % interval", "over published", "forecast on our mesh s", "over published",
             "our mesh", "saved there"],
            (shown(found, lines[found.key], chosen[found.key]) for found in known),
        ),
    ])  # fmt: skip


def spread(ratios: list[float]) -> str:
    """The median and the extremes of some ratios."""
    middle = statistics.median(ratios)
    return f"{middle:.2f} at the median ({min(ratios):.2f} to {max(ratios):.2f})"


def shown(found: Published, line: dict[str, str], chosen: dict[str, str]) -> Iterator[str]:
    """The cells of a row in the document."""
    step_s = found.row.step_time_s
    yield from (*found.key, found.layout, f"{step_s:.3f}")
    if line["failed"]:
        yield from (line["failed"], "", "")
    else:
        yield from (line["forecast s"], f"{line['low s']} to {line['high s']}")
        yield f"{float(line['forecast s']) / step_s:.2f}"
    yield from (chosen["forecast s"], f"{float(chosen['forecast s']) / step_s:.2f}")
    yield from (chosen["mesh"], line["saved"])


def main() -> None:
    """Plans what is missing, or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", help="beginnings of names, as llama31_70b_bf16-h100")
    parser.add_argument("--again", action="store_true", help="plan also rows that are in the table")
    parser.add_argument("--document", action="store_true", help="write the table, plan nothing")
    args = parser.parse_args()
    if args.document:
        replace_table(DOCUMENT, document(), MARK)
        return
    for found in rows():
        name = "-".join(found.key)
        wanted = not args.rows or name.startswith(tuple(args.rows))
        if not wanted or (found.key in kept(KEPT) and not args.again):
            continue
        line = cells(found, best_plan(found))
        keep(KEPT, line)
        print(f"{name}, {found.layout}: {line['failed'] or line['forecast s'] + ' s'}", flush=True)


if __name__ == "__main__":
    main()
