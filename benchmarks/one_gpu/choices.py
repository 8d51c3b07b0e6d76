"""What to change: settings that were chosen from compiled programs alone, each against another in
one process, as a ratio of step times."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax

from jaxbench import mesh
from jaxbench.errors import RecipeError, RunFailed
from jaxbench.ops import fp8
from jaxbench.plan.absent import compile_only_devices
from jaxbench.recipe.settings import Precision, Run
from jaxbench.train.loop import run_steps
from jaxbench.train.program import compile_program
from one_gpu.place import MEASURED, NOT_RUN, WRONG, Finding, Place, row

STEPS, COUNTED = 8, 5
"""Steps of each turn, and the last of them that count."""


@dataclass(frozen=True)
class Choice:
    """What a row `1` could have otherwise."""

    recipe: str
    change: str
    implementation: str = "xla"


def flag(text: str) -> str:
    """A change of one compiler option."""
    return f"execution.xla_flags=tuned,{text}"


CHOICES = (
    Choice("llama31_8b_fp8", "precision.implementation=te", "te"),
    Choice("llama31_8b_fp8", "precision.dtype=bf16"),
    Choice("llama31_8b_fp8", "precision.scaling=current"),
    Choice("llama31_8b_fp8", flag("xla_gpu_enable_triton_gemm=true")),
    Choice("llama31_8b_fp8", flag("xla_gpu_autotune_level=0")),
    Choice("llama31_8b_fp8", flag("xla_gpu_enable_command_buffer=")),
    Choice("llama31_8b_fp8", "execution.remat=query,key,value,attention,gate,up"),
    Choice("llama2_70b_fp8", flag("xla_gpu_enable_while_loop_double_buffering=false")),
    Choice("nemotronh_56b_fp8", "execution.ssd=pallas"),
    Choice("nemotronh_56b_fp8", flag("xla_gpu_enable_command_buffer=")),
    Choice("nemotronh_56b_fp8", flag("xla_gpu_enable_triton_gemm=true")),
    Choice("llama31_8b_bf16", "execution.attention=xla"),
    Choice("llama2_70b_bf16", flag("xla_gpu_enable_dynamic_slice_fusion=true")),
    Choice("llama31_8b_bf16", "execution.remat=query,key,value,attention,residual,gate,up"),
    Choice("llama31_8b_bf16", "execution.remat=full"),
    Choice("llama31_8b_bf16", "execution.xla_flags=default"),
    Choice("grok1_314b_fp8", flag("xla_gpu_enable_triton_gemm=true")),
    Choice("grok1_314b_bf16", flag("xla_gpu_enable_triton_gemm=true")),
    Choice("nemotron4_340b_fp8", "execution.remat=full"),
)
"""Those first from which the most is expected."""


def chosen(choice: Choice, *changes: str) -> Run:
    """A choice's row, with changes."""
    return replace(row(choice.recipe, 1, *changes), steps=STEPS)


def check(place: Place) -> Iterator[Finding]:
    """Each choice: the row, the change, the row again."""
    for choice in CHOICES:
        what = f"{choice.recipe}: {choice.change}"
        reason = fp8.refusals(Precision(dtype="fp8"), "gpu").get(choice.implementation)
        if reason:
            yield Finding(what, NOT_RUN, reason)
            continue
        own, other = (chosen(choice, "precision.implementation=xla", *changes)
                      for changes in ((), (choice.change,)))  # fmt: skip
        try:
            times = [step_time(run) for run in (own, other, own)]
        except (RecipeError, RunFailed, jax.errors.JaxRuntimeError) as error:
            yield Finding(what, NOT_RUN, str(error).splitlines()[0])
            continue
        ours = statistics.fmean(times[::2])
        ratio, noise = times[1] / ours, abs(times[0] - times[2]) / ours
        yield Finding(
            what, MEASURED, f"{ratio:.3f} of the row's {1e3 * ours:.1f} ms",
            f"the row's two turns differ by {noise:.1%}", {"ratio": ratio, "seconds": times},
        )  # fmt: skip


def step_time(run: Run) -> float:
    """Median seconds of a step in one turn."""
    with jax.set_mesh(mesh.make_mesh(run.mesh_shape)):
        steps = list(run_steps(run, program(run)))
    return statistics.median(step["step_time_s"] for step in steps[-COUNTED:])


@cache
def program(run: Run) -> Any:
    """The program of a run: a row has many turns. It is not checked: another compiler's kernel does
    not tell its name."""
    return compile_program(run)[0]


def compiles(place: Place) -> Iterator[Finding]:
    """Compiles every other choice for an absent GPU."""
    for choice in CHOICES:
        what = f"{choice.recipe}: {choice.change}"
        if choice.implementation != "xla":
            continue
        run = chosen(choice, "precision.implementation=xla", choice.change)
        try:
            with jax.set_mesh(mesh.make_mesh(run.mesh_shape, compile_only_devices(place.gpu, 1))):
                compiled, _, took = compile_program(run)
        except (RecipeError, RunFailed, jax.errors.JaxRuntimeError) as error:
            yield Finding(what, WRONG, str(error).splitlines()[0])
            continue
        peak = compiled.memory_analysis().peak_memory_in_bytes / 2**30
        yield Finding(what, MEASURED, f"compiled in {took:.0f} s", f"peak {peak:.1f} GiB")
