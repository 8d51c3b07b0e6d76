"""`python -m jaxbench list | train | plan | report`: the commands, by name."""

import signal
import sys
from collections.abc import Sequence

from jaxbench.recipe import published, recipes

USAGE = """usage: python -m jaxbench COMMAND

  list    every recipe with its rows, meshes and published step times
  train   run a benchmark (python -m jaxbench.train --help)
  plan    compile one for GPUs that are not there (python -m jaxbench.plan --help)
  report  results beside the published ones (python -m jaxbench.report --help)"""


def list_recipes() -> int:
    """Prints a table of all recipes and rows."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `list | head` ends quietly
    print(
        f"{'recipe':20} {'row':>6} {'label':6} {'layers':>6} {'mesh':42} {'batch':>6} "
        "published (MFU as its source prints it)"
    )
    for recipe in recipes.load_all():
        for name in recipe.rows:
            run = recipes.resolve(recipe, name)
            row = published.lookup(run)
            nothing = "" if name == recipes.SMOKE else "nothing is published"
            step = f"{row.step_time_s} s, {row.mfu_pct} % MFU" if row else nothing
            print(
                f"{recipe.name:20} {run.row:>6} {run.label:6} {run.model.layers:6} "
                f"{run.mesh_text():42} {run.batch.global_batch:6} {step}"
            )
    return 0


def main(argv: Sequence[str]) -> int:
    """Dispatches to a command; returns its exit status."""
    match argv:
        case ["list"]:
            return list_recipes()
        case ["train", *rest]:
            from jaxbench.run import command as train

            return train.main(rest)
        case ["plan", *rest]:
            from jaxbench.plan import command as plan

            return plan.main(rest)
        case ["report", *rest]:
            from jaxbench.report import command as report

            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            return report.main(rest)
    print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
