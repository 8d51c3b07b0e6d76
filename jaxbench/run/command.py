"""The command `jaxbench train`: resolves the run, checks it, and starts the session."""

import os
import sys
from contextlib import ExitStack, suppress

import jax

from jaxbench.base.errors import RecipeError, RunFailed
from jaxbench.base.hardware import Gpu, identify
from jaxbench.cluster import devices, ending, job
from jaxbench.cluster.membership import membership
from jaxbench.jax_internals import READS_HOST
from jaxbench.recipe import derived_rows, recipes
from jaxbench.recipe.activations import host_bytes
from jaxbench.recipe.settings import STEPS, Run
from jaxbench.run import host_memory, profiling, session
from jaxbench.run.arguments import Options, check_arguments, check_profiled, parse_arguments
from jaxbench.run.prepare import prepare
from jaxbench.train.program_checks import check_run
from jaxbench.xla import flags


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns 0, the status of a failure (`base.errors.STATUS`), or 128 + a
    signal."""
    with ExitStack() as held:
        try:
            options = parse_arguments(argv)
            recipe = recipes.load(options.config)
            overrides = recipes.parse_overrides(options.set)
            check_arguments(options)
            found = membership(os.environ)
            if options.profile == "nsys" and (found.rank if found else 0) in options.profile_ranks:
                profiling.check_nsys()
            run, prepared = prepare(join_and_resolve(options, recipe, overrides), options, held)
        except (RecipeError, RunFailed, OSError, jax.errors.JaxRuntimeError) as error:
            # If all processes have an error, each exits in order. If only some have, as on a node
            # without GPUs, they must not wait for the others.
            return ending.refuse(error, wait=job.barrier("refused", 5))
        if prepared is None:
            print(f"nothing to do: the run in {options.output} is completed")
            return 0
        return session.benchmark(run, prepared)


def join_and_resolve(
    options: Options, recipe: recipes.Recipe, overrides: tuple[recipes.Override, ...]
) -> Run:
    """Joins the job and resolves the recipe's row for its devices. Raises RecipeError if the row
    cannot run on them."""
    devices.select_platform(options.cpu_devices)
    host_memory.limit_memory(expected_host_bytes(options, recipe, overrides))
    job.join(watched=options.watchdog is not None)
    count, platform = devices.find()
    check_profiled(options, jax.process_count())
    devices.check_local_devices(options.local_devices, cpu=options.cpu_devices is not None)
    gpu = identify(jax.devices()[0].device_kind)
    warnings = []
    if platform == "cpu" and options.cpu_devices is None and devices.has_nvidia_gpu():
        warnings.append("warning: JAX does not see this machine's GPU: pip install '.[gpu]'")
    if line := devices.other_gpu(gpu):
        warnings.append(f"warning: {line}")
    _warn(warnings)
    run = row_of_job(options, recipe, overrides, platform, count, gpu)
    check_run(run, platform, gpu)
    _warn(flags.overruled(run, platform))
    if options.pgle and platform != "gpu":
        raise RecipeError("--pgle needs GPUs: a CPU has no latencies to hide")
    if platform == "gpu" and READS_HOST:
        host_memory.check_host_memory(host_bytes(run), "before compiling")
    return run


def _warn(lines: list[str]) -> None:
    """Prints lines once for the job."""
    for line in lines if jax.process_index() == 0 else []:
        print(line, file=sys.stderr)


def row_of_job(
    options: Options,
    recipe: recipes.Recipe,
    overrides: tuple[recipes.Override, ...],
    platform: str,
    count: int,
    gpu: Gpu | None,
) -> Run:
    """The run for this many devices. Raises RecipeError if the recipe has none for them."""
    row = recipes.row_name(platform, count, options.gpus)
    if row != recipes.SMOKE:
        recipe = derived_rows.extend(recipe.on(gpu), row, gpu, overrides, whole_nodes=False)
    steps = options.steps
    if options.profile and steps is None:
        steps = STEPS  # the smoke row has fewer steps than a profile
    return recipes.resolve(
        recipe, row, devices=count, overrides=overrides, steps=steps, seed=options.seed
    )


def expected_host_bytes(
    options: Options, recipe: recipes.Recipe, overrides: tuple[recipes.Override, ...]
) -> float:
    """Bytes of host memory for the offloaded activations of one device, before JAX takes the
    devices. Returns 0 if nothing is offloaded, or if the devices are not known."""
    if options.cpu_devices is None and READS_HOST:
        with suppress(RecipeError):  # `join_and_resolve` reports a mistake
            count, gpu = host_memory.expected_devices()
            return host_bytes(row_of_job(options, recipe, overrides, "gpu", count, gpu))
    return 0
