"""Forecasts what skewed routing costs, on our mesh and on the mesh of a published run.

    python benchmarks/skewed_routing.py --output docs/design/experts.md

Megatron-Bridge's verification cards have steps with forced balance and with the router's own
choices. How skewed those choices were is not published, so each row is planned with several skews
next to balanced routing. Slots hold what the busiest rank gets.
"""

import argparse
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

from like_for_like import table
from tables import replace_table

from jaxbench.ops.moe.routing import busiest_share
from jaxbench.plan import processes, systems
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Run

SKEWS = (0.25, 0.5)
MARGIN = 1.1
"""Slots of a rank over what the busiest one gets on average."""


@dataclass(frozen=True)
class Case:
    """A row, the settings of a mesh, and the published ratio of natural to forced routing."""

    recipe: str
    gpu: str
    gpus: int
    mesh: str
    settings: tuple[str, ...]
    published: float


CASES = (
    Case("qwen3_30b_a3b_bf16", "h100", 16, "published",
         ("parallelism.fsdp=1", "parallelism.expert=16"), 1.50),
    Case("qwen3_30b_a3b_bf16", "h100", 16, "ours", (), 1.50),
    Case("qwen3_30b_a3b_mxfp8", "gb200", 8, "published",
         ("parallelism.fsdp=1", "parallelism.expert=8", "model.experts.slots=shared"), 1.90),
)  # fmt: skip
"""Published: Megatron-Bridge, verification cards at 067f987."""


def row(case: Case, skew: float, balanced_s: float) -> tuple[list[str], float]:
    """(cells, step in seconds) of a case. Without skew, routing is random."""
    target = systems.find(case.gpu)
    recipe = recipes.load(case.recipe).on(target.gpu)

    def run(*settings: str) -> Run:
        overrides = recipes.parse_overrides([*case.settings, *settings])
        return recipes.resolve(recipe, case.gpus, overrides=overrides)

    planned, share = run(), 1.0
    if skew:
        planned = run("model.experts.routing=skewed", f"model.experts.skew={skew}")
        cfg, p = planned.model.experts, planned.parallelism
        share = busiest_share(cfg, p.expert * p.tensor)
        factor = max(cfg.rank_capacity_factor, math.ceil(100 * MARGIN * share) / 100)
        planned = run(
            "model.experts.routing=skewed", f"model.experts.skew={skew}",
            f"model.experts.rank_capacity_factor={factor}",
        )  # fmt: skip
    cfg = planned.model.experts
    plan = processes.plan_run(planned, target, case.recipe)
    if isinstance(plan, str):
        sys.exit(f"{case}: {plan}")
    step_s = plan.forecast_step_s
    cells = [
        f"{case.recipe}, {case.gpus} {case.gpu.upper()}",
        f"{planned.mesh_text()} ({case.mesh})",
        f"{skew:g}" if skew else "balanced",
        f"{busiest_share(cfg, cfg.count):.2f}",
        f"{share:.2f}",
        f"{plan.bytes_per_device.peak / 2**30:.0f} of {plan.bytes_per_device.limit / 2**30:.0f}",
        f"{step_s:.2f}",
        f"{step_s / (balanced_s or step_s):.2f}",
        f"{case.published:.2f}",
    ]
    return cells, step_s


COLUMNS = (
    "row", "mesh", "skew", "load of the busiest expert", "of the busiest rank", "peak GiB",
    "forecast s", "over balanced", "published ratio",
)  # fmt: skip


def main() -> None:
    """Plans the cases one after another, and prints or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="document whose table is replaced")
    args = parser.parse_args()
    lines = []
    for case in CASES:
        balanced_s = 0.0
        for skew in (0.0, *SKEWS):
            cells, step_s = row(case, skew, balanced_s)
            balanced_s = balanced_s or step_s
            lines.append(cells)
            print(*cells, sep=" | ", flush=True)
    if args.output:
        replace_table(args.output, "\n".join(table(COLUMNS, lines)))


if __name__ == "__main__":
    main()
