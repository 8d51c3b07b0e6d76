"""Compares balanced routing with routing by preference, in two tables of docs/design/experts.md.

    python benchmarks/natural_routing.py --loads       # trains three small models on the CPU
    python benchmarks/natural_routing.py --forecasts   # plans rows with skewed routing

The first table has the loads of a router that learns from Zipf tokens. The second one has forecasts
with `routing: skewed`, next to what Megatron-Bridge's verification cards measured with forced
balance and with the router's own choices. How skewed those choices were is not published, so each
row is planned with two skews. The slots of a rank hold what the busiest one gets.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
from tables import replace_table, table

from jaxbench.ops.moe.routing import busiest_share, loads_of_ranks
from jaxbench.plan import processes, systems
from jaxbench.plan.absent import check_compiler
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Run

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "design" / "experts.md"
LOADS_MARK, FORECASTS_MARK = "<!-- loads -->", "<!-- skewed routing -->"

STEPS = 150
SMALL = (
    "precision.dtype=fp32", "batch.global_batch=16", "batch.sequence_length=256",
    "batch.tokens=zipf", "model.layers=4", "model.embed=128",
    "model.experts.count=128", "model.experts.top_k=8", "model.experts.ffn=32",
)  # fmt: skip
"""A small model with as many experts as Qwen3 30B, on one device, which drops nothing."""
ROUTERS = {
    "random": ("routing=random",),
    "learned, balance loss of 0.001 (Qwen3)": ("routing=learned",),
    "learned, biases of 0.001 a step (as in DeepSeek-V3)": (
        "routing=learned", "router=sigmoid", "bias_rate=0.001", "balance_loss=0.0001",
    ),
}  # fmt: skip


def loads_of(settings: tuple[str, ...]) -> list[str]:
    """Cells about the busiest expert of each layer, averaged over layers, and of the busiest layer,
    in the first step and on average over the last ten."""
    words = [w for s in (*SMALL, *(f"model.experts.{s}" for s in settings)) for w in ("--set", s)]
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        subprocess.run(
            [sys.executable, "-m", "jaxbench.train", "--config", "qwen3_30b_a3b_bf16",
             "--cpu-devices", "1", "--steps", str(STEPS), "--output", str(run), *words],
            check=True, cwd=ROOT, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    loads = [step["layer_load_max"] for step in steps]
    last = [mean(layer) for layer in zip(*loads[-10:], strict=True)]
    return [f"{figure(step):.1f}" for step in (loads[0], last) for figure in (mean, max)]


@dataclass(frozen=True)
class Case:
    """A row, the settings of a mesh, and the published ratio of natural to forced routing."""

    recipe: str
    gpu: str
    gpus: int
    mesh: str
    settings: tuple[str, ...]
    published: float


SHARED = "model.experts.slots=shared"
CASES = (
    Case("qwen3_30b_a3b_bf16", "h100", 16, "published",
         ("parallelism.fsdp=1", "parallelism.expert=16", SHARED), 1.50),
    Case("qwen3_30b_a3b_bf16", "h100", 16, "ours", (SHARED,), 1.50),
    Case("qwen3_30b_a3b_mxfp8", "gb200", 8, "published",
         ("parallelism.fsdp=1", "parallelism.expert=8", SHARED), 1.90),
)  # fmt: skip
"""Published: Megatron-Bridge, verification cards at 067f987. Slots of each expert would need room
for the busiest one, so the experts of Qwen3 share them."""

SKEWS = (0.25, 0.5)
MARGIN = 1.1
"""Slots of a rank over what the busiest one gets on average."""


def planned_run(case: Case, skew: float) -> tuple[Run, float, float]:
    """The run of a case, the load of its busiest rank, and the share of assignments that would be
    dropped with the slots of the row. Without skew, routing is random."""
    target = systems.find(case.gpu)
    recipe = recipes.load(case.recipe).on(target.gpu)

    def run(*settings: str) -> Run:
        overrides = recipes.parse_overrides([*case.settings, *settings])
        return recipes.resolve(recipe, case.gpus, overrides=overrides)

    balanced = run()
    if not skew:
        return balanced, 1.0, 0.0
    skewed = "model.experts.routing=skewed", f"model.experts.skew={skew}"
    cfg, p = balanced.model.experts, balanced.parallelism
    ranks, tokens = p.expert * p.tensor, int(balanced.device_tokens)
    of_row = cfg.rank_slots(tokens, ranks) * ranks / (cfg.top_k * tokens)
    cfg = replace(cfg, routing="skewed", skew=skew)
    share, loads = busiest_share(cfg, ranks), loads_of_ranks(cfg, ranks)
    dropped = float(np.maximum(loads - of_row, 0).mean())
    slots = max(of_row, math.ceil(100 * MARGIN * share) / 100)
    return run(*skewed, f"model.experts.rank_capacity_factor={slots}"), share, dropped


def forecasts() -> list[list[str]]:
    """Plans the cases one after another; a row of cells for each."""
    rows = []
    for case in CASES:
        balanced_s = 0.0
        for skew in (0.0, *SKEWS):
            run, share, dropped = planned_run(case, skew)
            plan = processes.plan_run(run, systems.find(case.gpu), case.recipe)
            if isinstance(plan, str):
                sys.exit(f"{case}, skew {skew}: {plan}")
            step_s, memory = plan.forecast_step_s, plan.bytes_per_device
            balanced_s = balanced_s or step_s
            cfg = run.model.experts
            rows.append([
                f"{case.recipe}, {case.gpus} {case.gpu.upper()}",
                f"{run.mesh_text()} ({case.mesh})",
                f"{skew:g}" if skew else "balanced",
                f"{busiest_share(cfg, cfg.count):.1f}",
                f"{share:.2f}",
                f"{100 * dropped:.1f}",
                f"{memory.peak / 2**30:.0f} of {memory.limit / 2**30:.0f}",
                f"{step_s:.2f}",
                f"{step_s / balanced_s:.2f}",
                f"{case.published:.2f}",
            ])  # fmt: skip
            print(*rows[-1], sep=" | ", flush=True)
    return rows


def main() -> None:
    """Writes the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", action="store_true", help="train small models: half an hour")
    parser.add_argument("--forecasts", action="store_true", help="plan rows: half an hour")
    args = parser.parse_args()
    if args.loads:
        columns = ("routing", "first step, mean of layers", "worst layer",
                   "last 10 steps, mean of layers", "worst layer")  # fmt: skip
        rows = [[name, *loads_of(settings)] for name, settings in ROUTERS.items()]
        replace_table(DOCUMENT, "\n".join(table(columns, rows)), LOADS_MARK)
    if args.forecasts:
        check_compiler()
        columns = (
            "row", "mesh", "skew", "busiest expert", "busiest rank",
            "dropped with the row's slots %", "peak GiB", "step s", "over balanced",
            "published ratio",
        )  # fmt: skip
        replace_table(DOCUMENT, "\n".join(table(columns, forecasts())), FORECASTS_MARK)


if __name__ == "__main__":
    main()
