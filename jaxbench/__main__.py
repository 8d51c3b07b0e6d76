"""`python -m jaxbench list | train | plan | calibrate | report`: the commands, by name."""

import runpy
import signal
import sys
from collections.abc import Sequence

from jaxbench import hardware
from jaxbench.recipe import published, recipes

USAGE = """usage: python -m jaxbench COMMAND

  list    every recipe with its rows, meshes and published step times
  train   run a benchmark (python -m jaxbench.train --help)
  plan    compile one for GPUs that are not there (python -m jaxbench.plan --help)
  calibrate
          measure this GPU's kernels for plan's forecasts (python -m jaxbench.calibrate --help)
  report  results beside the published ones (python -m jaxbench.report --help)"""


def list_recipes() -> int:
    """Prints a table of all recipes and rows."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `list | head` ends quietly
    print(
        f"{'recipe':20} {'row':>6} {'label':6} {'layers':>6} {'mesh':42} {'batch':>6} "
        "published (MFU as its source prints it)"
    )
    for recipe in recipes.load_all():
        rows = [(hardware.H100, name) for name in recipe.rows]
        rows += [
            (hardware.PLANNED[gpu], row) for gpu, table in recipe.gpu_rows.items() for row in table
        ]
        for gpu, name in rows:
            run = recipes.resolve(recipe.on(gpu), name)
            row = published.lookup(run, gpu)
            nothing = "" if name == recipes.SMOKE else "nothing is published"
            print(
                f"{recipe.name:20} {run.row:>6} {run.label:6} {run.model.layers:6} "
                f"{run.mesh_text():42} {run.batch.global_batch:6} {row or nothing}"
            )
    return 0


def main(argv: Sequence[str]) -> int:
    """Runs a command, which exits by itself; the exit status of `list` and of a wrong use."""
    match argv:
        case ["list"]:
            return list_recipes()
        case ["train" | "plan" | "calibrate" | "report" as command, *rest]:
            sys.argv[1:] = rest
            runpy.run_module(f"jaxbench.{command}", run_name="__main__")
    print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
