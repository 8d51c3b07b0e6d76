"""The compiled step: for the devices of this job, or for GPUs that are not there."""

import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxbench import mesh
from jaxbench.base.errors import RecipeError
from jaxbench.base.hardware import Gpu, identify
from jaxbench.jax_internals import attention_for_mesh
from jaxbench.ops.pallas_call import ignoring_pallas_deprecation
from jaxbench.recipe.settings import Run
from jaxbench.train.step import abstract_state, make_program
from jaxbench.xla import custom_calls, flags
from jaxbench.xla.hlo import Program

Guide = Callable[[Program, Gpu], str]
"""Makes the profile by which XLA schedules a program again (`forecast.guide.guide`). All processes
of a job need the same profile: with different ones they may order collectives differently."""


class Compiled(NamedTuple):
    """The executable of a step, and the seconds that its lowering and its compilation took."""

    program: Any
    lower_s: float
    compile_s: float


def compile_program(
    run: Run,
    extra_options: dict[str, Any] | None = None,
    guide: Guide | None = None,
) -> Compiled:
    """Compiles a step for the current mesh.

    If the recipe wants a guided schedule, the program is compiled again with the profile that
    `guide` makes of the first one; without `guide`, XLA's own estimates stay.
    `extra_options` are compiler options beyond the recipe's. The devices of the mesh need not exist
    (`plan.absent`). Raises RecipeError for an option that the compiler does not know.
    """
    start = time.perf_counter()
    with attention_for_mesh(), ignoring_pallas_deprecation():
        lowered = make_program(run).lower(abstract_state(run))
    lowered_at = time.perf_counter()
    options = flags.options(run, mesh.platform()) | (extra_options or {})
    try:
        compiled = lowered.compile(compiler_options=options)
        guided = flags.guided(run) and flags.PGLE not in options
        if guide and guided and (gpu := forecast_gpu(run)):
            guiding = {
                "fdo_profile": guide(parse_program(compiled, run), gpu).encode(),
                # The forecast leaves out what takes no time; XLA would warn of each instruction.
                "xla_gpu_pgle_accuracy_checker": "PGLE_STRICTNESS_LEVEL_OFF",
            }
            compiled = lowered.compile(compiler_options=options | guiding)
    except jax.errors.JaxRuntimeError as error:
        if unknown := re.search(r"No such compile option: '(\w+)'", str(error)):
            raise RecipeError(flags.explain(unknown.group(1))) from error
        if unread := re.search(r"setting option (\w+), ('.*') is not a valid (\w+)", str(error)):
            name, value, kind = unread.groups()
            raise RecipeError(
                f"{name} cannot be {value}: expected a value of type {kind}"
            ) from error
        raise
    return Compiled(compiled, lowered_at - start, time.perf_counter() - lowered_at)


def forecast_gpu(run: Run) -> Gpu | None:
    """The GPU of the current mesh. None if there is no forecast for so many of it."""
    gpu = identify(device_kind()) if mesh.platform() == "gpu" else None
    return gpu if gpu and gpu.chip and gpu.spread(run.gpus) else None


def device_kind() -> str:
    """The kind of the devices of the current mesh, as JAX names it."""
    return jax.sharding.get_abstract_mesh().abstract_device.device_kind


def parse_program(compiled: Any, run: Run) -> Program:
    """The parsed program of a run's compiled step."""
    program = Program.parse(compiled.as_text(), custom_calls.RULES)
    program.concurrent = flags.concurrent(run)
    return program


def offloaded_bytes(compiled: Any) -> int:
    """Bytes of the host's memory in which activations of one device wait during a step."""
    return compiled.memory_analysis().host_temp_size_in_bytes
