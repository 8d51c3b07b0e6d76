"""The command `python -m jaxbench.train`: a run from its arguments, and every mistake that can be
found before slow work."""

import argparse
import os
import sys

import jax

from jaxbench.cluster import job
from jaxbench.cluster.causes import cause_of
from jaxbench.errors import STATUS, RecipeError, RunFailed
from jaxbench.hardware import MEMORY_FRACTION, identify
from jaxbench.recipe import derive, recipes
from jaxbench.recipe.settings import STEPS, Run
from jaxbench.run import devices, profiling, session
from jaxbench.run.arguments import check_arguments, parse_arguments
from jaxbench.run.start import prepare
from jaxbench.train.program import check_run
from jaxbench.xla import flags


def main(argv: list[str] | None = None) -> int:
    """The command; returns 0, the status of what went wrong (`errors.STATUS`), or 128 + a
    signal."""
    try:
        args = parse_arguments(argv)
        recipe = recipes.load(args.config)
        overrides = recipes.parse_overrides(args.set)
        check_arguments(args)
        if args.profile == "nsys":
            profiling.check_nsys()
        run, chosen = prepare(find_run(args, recipe, overrides), args)
    except (RecipeError, RunFailed, OSError, jax.errors.JaxRuntimeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        # What one alone sees, such as a node without GPUs; what all are told, all leave with.
        return session.leave(STATUS[cause_of(error)], alone=not job.all_arrive("refused", 5))
    if chosen is None:
        print(f"nothing to do: the run in {args.output} is completed")
        return 0
    return session.benchmark(run, chosen)


def find_run(
    args: argparse.Namespace, recipe: recipes.Recipe, overrides: tuple[recipes.Override, ...]
) -> Run:
    """Joins the job, and chooses the recipe's row for its devices. Raises RecipeError for what
    cannot run on them."""
    flags.check_environment(os.environ.get("XLA_FLAGS", ""))
    devices.select_platform(args.cpu_devices)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_FRACTION))
    job.join()
    count, platform = devices.find()
    if args.local_devices is not None:
        devices.check_local_devices(args.local_devices, cpu=args.cpu_devices is not None)
    if platform == "cpu" and args.cpu_devices is None and devices.has_nvidia_gpu():
        print("warning: JAX does not see this machine's GPU: pip install '.[gpu]'", file=sys.stderr)
    row = recipes.choose_row(platform, count, args.gpus)
    if row != recipes.SMOKE:
        gpu = identify(jax.devices()[0].device_kind)
        recipe = derive.extend(recipe.on(gpu), row, gpu, overrides, here=True)
    run = recipes.resolve(
        recipe, row, devices=count, overrides=overrides, steps=args.steps or STEPS, seed=args.seed
    )
    check_run(run, platform)
    if args.pgle and platform != "gpu":
        raise RecipeError("--pgle needs GPUs: a CPU has no latencies to hide")
    return run
