"""Settings that were chosen from compiled programs alone, each timed against an alternative in one
process."""

import statistics
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxbench import mesh
from jaxbench.base.errors import RecipeError, RunFailed
from jaxbench.ops import quantized
from jaxbench.plan.absent import compile_only_devices
from jaxbench.plan.plan import Memory
from jaxbench.recipe.settings import Run
from jaxbench.train.loop import run_steps
from jaxbench.train.program import compile_program
from one_gpu.context import MEASURED, NOT_RUN, WRONG, Context, Finding, row

LANES = 8
"""Programs that are compiled at a time."""

XLA = "precision.implementation=xla"

STEPS, COUNTED = 8, 5
"""Steps of each measurement, and the last of them that count."""


@dataclass(frozen=True)
class Choice:
    """An alternative setting of a row `1`, and the FP8 implementation that it needs."""

    recipe: str
    change: str
    implementation: str = "xla"


def flag(text: str) -> str:
    """The setting that changes one compiler option."""
    return f"execution.xla_flags=tuned,{text}"


CHOICES = (
    Choice("llama31_8b_fp8", "precision.implementation=te", "te"),
    Choice("llama31_8b_fp8", "execution.remat=query,key,value,attention,gate,up"),
    Choice("llama31_8b_fp8", "precision.scaling=current"),
    Choice("llama31_8b_fp8", flag("xla_gpu_enable_triton_gemm=true")),
    Choice("llama31_8b_bf16", "execution.remat=query,key,value,attention,residual,gate,up"),
    Choice("llama31_8b_bf16", flag("xla_gpu_enable_dynamic_slice_fusion=true")),
    Choice("llama31_8b_bf16", flag("xla_gpu_enable_triton_gemm=true")),
    Choice("deepseek_v3_fp8", flag("xla_gpu_enable_triton_gemm=true")),
    Choice("deepseek_v3_fp8", "precision.scaling=current"),
    Choice("nemotronh_56b_fp8", flag("xla_gpu_enable_triton_gemm=true")),
    Choice("nemotronh_56b_fp8", "execution.ssd=xla"),
    Choice("llama2_70b_fp8", flag("xla_gpu_enable_while_loop_double_buffering=false")),
    Choice("grok1_314b_fp8", flag("xla_gpu_enable_triton_gemm=true")),
    Choice("nemotron4_340b_fp8", "execution.remat=full"),
)
"""The largest expected effects first."""


def chosen(choice: Choice, *changes: str) -> Run:
    """The row of a choice with changes."""
    return replace(row(choice.recipe, 1, *changes), steps=STEPS)


def check(ctx: Context) -> Iterator[Finding]:
    """Times the choices of each row, one after another, between two measurements of the unchanged
    row. All programs of a row are compiled before."""
    for recipe in dict.fromkeys(choice.recipe for choice in CHOICES):
        runs: dict[str, Run] = {}
        for choice in CHOICES:
            if choice.recipe != recipe:
                continue
            what = f"{recipe}: {choice.change}"
            if reason := quantized.IMPLEMENTATIONS[choice.implementation].refusal("gpu"):
                yield Finding(what, NOT_RUN, reason)
                continue
            runs |= {recipe: chosen(choice, XLA), what: chosen(choice, XLA, choice.change)}
        with ctx.lanes(LANES) as pool:
            programs = {what: pool.submit(program, run) for what, run in runs.items()}
        before, *changed, after = (
            step_time(runs[what], programs[what]) for what in (*runs, recipe)
        )
        yield from compared(recipe, before, dict(zip([*runs][1:], changed, strict=True)), after)


def compared(
    recipe: str, before: float | str, changed: dict[str, float | str], after: float | str
) -> Iterator[Finding]:
    """The step of each changed row over the unchanged one's, or why there is none."""
    if isinstance(before, str) or isinstance(after, str):
        yield Finding(recipe, NOT_RUN, f"{before}; {after}")
        return
    base_s, noise = (before + after) / 2, abs(before - after) / ((before + after) / 2)
    for what, took in changed.items():
        if isinstance(took, str):
            yield Finding(what, NOT_RUN, took)
            continue
        yield Finding(
            what, MEASURED, f"{took / base_s:.3f} of the row's {1e3 * base_s:.1f} ms",
            f"the row's two turns differ by {noise:.1%}",
            {"ratio": took / base_s, "seconds": [before, took, after]},
        )  # fmt: skip


def step_time(run: Run, compiled: Future) -> float | str:
    """Median seconds of a step in one measurement; the error of a row that does not run."""
    try:
        with jax.set_mesh(mesh.make_mesh(run.mesh_shape)):
            steps = list(run_steps(run, compiled.result()))
    except (RecipeError, RunFailed, jax.errors.JaxRuntimeError) as error:
        return str(error).splitlines()[0][:200]
    return statistics.median(step["step_time_s"] for step in steps[-COUNTED:])


def program(run: Run) -> Any:
    """The compiled program of a run, without `check_program`, which does not recognise FP8 in
    Triton matmuls."""
    with jax.set_mesh(mesh.make_mesh(run.mesh_shape)):
        return compile_program(run).program


def compiles(ctx: Context) -> Iterator[Finding]:
    """Compiles every alternative by XLA for an absent GPU."""
    for choice in CHOICES:
        what = f"{choice.recipe}: {choice.change}"
        if choice.implementation != "xla":
            continue
        run = chosen(choice, XLA, choice.change)
        try:
            with jax.set_mesh(mesh.make_mesh(run.mesh_shape, compile_only_devices(ctx.gpu, 1))):
                compiled, _, took = compile_program(run)
        except (RecipeError, RunFailed, jax.errors.JaxRuntimeError) as error:
            yield Finding(what, WRONG, str(error).splitlines()[0])
            continue
        peak = Memory.of(compiled, ctx.gpu).peak / 2**30
        yield Finding(what, MEASURED, f"compiled in {took:.0f} s", f"peak {peak:.1f} GiB")
