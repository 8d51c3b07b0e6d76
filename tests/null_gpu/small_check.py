"""One check of `benchmarks/gpu.py` on a GPU, at sizes that compile in seconds.

python tests/null_gpu/small_check.py --check NAME --output FOLDER --folder FOLDER
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
from one_gpu import choices, context, mixers, operators, rows, speed, survives, tiles, trains

from jaxbench.base import hardware
from jaxbench.calibrate import command as calibrate
from jaxbench.ops.grouped import pallas
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Run

FP8 = "llama31_8b_fp8"
SHORTER = ("--set=model.layers=1", "--set=batch.global_batch=1")


def smoke(recipe: str, name: int | str = 1, *changes: str) -> Run:
    """The recipe's `smoke` row in place of any other."""
    return context.row(recipe, recipes.SMOKE, *changes)


def train(recipe: str, folder: Path, *options: str, **variables: str) -> context.Trained:
    """The training command with the sizes of a shorter `smoke` row."""
    sizes = context.tiny(context.Context("gpu", folder, hardware.H100, folder), recipe)
    return context.train(recipe, folder, *sizes, *SHORTER, *options, **variables)


def shrink() -> None:
    """Makes all checks small: few cases of each kind, tiny models."""
    context.Context.recipes = [FP8]
    choices.row = rows.row = smoke
    operators.row = lambda recipe, name=1, *changes: smoke(recipe)
    survives.tiny = lambda ctx, recipe: (*context.tiny(ctx, recipe), *SHORTER)
    trains.train, trains.STEPS, trains.PAIRS = train, 12, trains.PAIRS[:2]
    rows.names = lambda ctx: [FP8, "qwen3_30b_a3b_bf16"]
    tiles.shapes = lambda ctx: iter([tiles.Shape("tiny", 4, 1024, 128, 128)])
    pallas.LAUNCHES = pallas.LAUNCHES[:1]
    survives.LONG, survives.EVERY = 50, 25
    speed.SQUARE, speed.SUSTAINED_S = 1024, 0.1
    operators.FAMILIES, operators.TOKENS = ("llama31_8b",), 64
    operators.product_shapes = lambda ctx: {(64, 64, 128)}
    mixers.CHANGES = dict(list(mixers.CHANGES.items())[:1])
    mixers.GROUPS = 1
    choices.CHOICES = choices.CHOICES[:2]
    calibrate.GPU_SAMPLE = calibrate.TINY_SAMPLE


if __name__ == "__main__":
    shrink()
    sys.exit(gpu.main())
