"""The command `python -m jaxbench.train`: resolves the run, checks it, and starts the session."""

import argparse
import sys
from contextlib import ExitStack

import jax

from jaxbench.cluster import job
from jaxbench.errors import RecipeError, RunFailed
from jaxbench.hardware import identify
from jaxbench.recipe import derive, recipes
from jaxbench.recipe.settings import STEPS, Run
from jaxbench.run import devices, profiling, session
from jaxbench.run.arguments import check_arguments, check_profiled, parse_arguments
from jaxbench.run.start import prepare
from jaxbench.train.program import check_run
from jaxbench.xla import flags


def main(argv: list[str] | None = None) -> int:
    """The command; returns 0, the status of a failure (`errors.STATUS`), or 128 + a signal."""
    with ExitStack() as held:
        return _main(argv, held)


def _main(argv: list[str] | None, held: ExitStack) -> int:
    try:
        args = parse_arguments(argv)
        recipe = recipes.load(args.config)
        overrides = recipes.parse_overrides(args.set)
        check_arguments(args)
        if args.profile == "nsys":
            profiling.check_nsys()
        run, prepared = prepare(find_run(args, recipe, overrides), args, held)
    except (RecipeError, RunFailed, OSError, jax.errors.JaxRuntimeError) as error:
        # If all processes have an error, each exits in order. If only some have, as on a node
        # without GPUs, they must not wait for the others.
        return session.refuse(error, wait=job.barrier("refused", 5))
    if prepared is None:
        print(f"nothing to do: the run in {args.output} is completed")
        return 0
    return session.benchmark(run, prepared)


def find_run(
    args: argparse.Namespace, recipe: recipes.Recipe, overrides: tuple[recipes.Override, ...]
) -> Run:
    """Joins the job and resolves the recipe's row for its devices. Raises RecipeError if it cannot
    run on them."""
    devices.select_platform(args.cpu_devices)
    devices.limit_memory()
    job.join(watched=args.watchdog is not None)
    count, platform = devices.find()
    check_profiled(args, jax.process_count())
    if args.local_devices is not None:
        devices.check_local_devices(args.local_devices, cpu=args.cpu_devices is not None)
    if platform == "cpu" and args.cpu_devices is None and devices.has_nvidia_gpu():
        print("warning: JAX does not see this machine's GPU: pip install '.[gpu]'", file=sys.stderr)
    row = recipes.choose_row(platform, count, args.gpus)
    gpu = identify(jax.devices()[0].device_kind)
    if line := devices.other_gpu(gpu):
        print(f"warning: {line}", file=sys.stderr)
    if row != recipes.SMOKE:
        recipe = derive.extend(recipe.on(gpu), row, gpu, overrides, whole_nodes=False)
    steps = STEPS if args.profile and args.steps is None else args.steps  # 20 to 25 are profiled
    run = recipes.resolve(
        recipe, row, devices=count, overrides=overrides, steps=steps, seed=args.seed
    )
    check_run(run, platform, gpu)
    if jax.process_index() == 0:
        for line in flags.overruled(run, platform):
            print(line, file=sys.stderr)
    if args.pgle and platform != "gpu":
        raise RecipeError("--pgle needs GPUs: a CPU has no latencies to hide")
    return run
