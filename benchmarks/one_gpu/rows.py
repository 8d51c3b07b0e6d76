"""One-GPU rows: the time of a step, and of each kind of kernel in it, next to the forecast."""

import gzip
import statistics
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxbench import mesh
from jaxbench.forecast import tables
from jaxbench.forecast.forecast import expected_schedule
from jaxbench.hardware import RESERVE_BYTES
from jaxbench.plan import profile
from jaxbench.plan.absent import compile_only_devices
from jaxbench.plan.plan import Memory
from jaxbench.plan.traffic import axes_of
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Run
from jaxbench.recipe.throughput import throughput
from jaxbench.run import profiling
from jaxbench.train.loop import run_steps
from jaxbench.train.program import check_program, compile_program, read
from jaxbench.xla.schedule import Walk
from one_gpu.context import MEASURED, OK, WRONG, Context, Finding, row

FIRST = (
    "llama31_8b_bf16", "llama31_8b_fp8", "qwen3_30b_a3b_bf16", "nemotronh_56b_fp8",
    "gpt_oss_120b_bf16", "deepseek_v3_fp8", "llama2_70b_bf16", "llama2_70b_fp8",
)  # fmt: skip
"""The rows that are measured first; then come all other recipes that this GPU can run."""

LANES = 6
"""Rows that are compiled at a time, before any of them is timed."""

WARM, TIMED, PROFILED = 4, 16, 3
"""Steps of a row: before others are timed or profiled, timed ones, and profiled ones."""

VISIBLE = {"xla_gpu_enable_command_buffer": ""}
"""The option of a program without CUDA graphs, which hide kernels from JAX's profiler."""


def names(ctx: Context) -> list[str]:
    """The recipes that this GPU can run, the most important first."""
    able = [name for name in recipes.names() if ctx.gpu.multiplies(name.rpartition("_")[2])]
    return [*FIRST, *(name for name in able if name not in FIRST)]


def steps_of(recipe: str) -> Run:
    """Row `1` with as many steps as are measured."""
    return replace(row(recipe), steps=WARM + TIMED)


def check(ctx: Context) -> Iterator[Finding]:
    """Compiles some rows together, then times them one after another; then the next ones."""
    every = names(ctx)
    for first in range(0, len(every), LANES):
        batch = every[first : first + LANES]
        with ctx.lanes(2 * LANES) as pool:
            programs = {
                recipe: [pool.submit(compiled, steps_of(recipe), o) for o in ({}, VISIBLE)]
                for recipe in batch
            }
        for recipe in batch:
            yield measured(ctx, recipe, programs.pop(recipe))


def compiled(run: Run, options: dict[str, Any]) -> tuple[Any, float]:
    """The checked program of a row, and the seconds that its compilation took."""
    with jax.set_mesh(mesh.make_mesh(run.mesh_shape)):
        program, lower_s, compile_s = compile_program(run, options)
        check_program(program, run)
    return program, lower_s + compile_s


def measured(ctx: Context, recipe: str, programs: list[Future]) -> Finding:
    """The finding of a row: steps of its program, then profiled ones of the program without
    graphs."""
    run, what = steps_of(recipe), f"{recipe}, row 1"
    try:
        (executable, took), (visible, _) = (program.result() for program in programs)
        folder = ctx.output / recipe
        trace = ctx.folder / recipe / "profile" / "rank-0"
        with jax.set_mesh(mesh.make_mesh(run.mesh_shape)):
            steps = list(run_steps(run, executable))
            again = replace(run, steps=WARM + PROFILED)
            pause = profiling.window("jax", (WARM, again.steps), trace.parents[1], visible)
            for _ in run_steps(again, visible, pauses=[pause]):
                pass
        figures = timed(run, steps, executable, ctx)
        walk, profiled = Walk(read(visible)), profile.read_profile(trace)
        kernels = tables.load(ctx.gpu.name.lower())
        axes = partial(axes_of, mesh_shape=run.mesh_shape)
        forecast = expected_schedule(walk, ctx.gpu, kernels)
        found = profile.compare(profiled, walk, ctx.gpu, kernels, axes)
        keep(folder, trace / profile.PROFILED, profiled, profile.planned(forecast), found.steps)
    except Exception as error:
        return Finding(what, WRONG, f"{type(error).__name__}: {error}".splitlines()[0][:300])
    step_s = figures["step_s"]
    parts = "; ".join(
        f"{part.name} {1e3 * part.measured_s:.1f} ({1e3 * part.forecast_s:.1f})"
        for part in found.kernels
    )
    figure = (
        f"{1e3 * step_s:.1f} ms, {step_s / forecast.step_s:.3f} of the forecast, "
        f"MFU {100 * figures['mfu']:.1f} %"
    )
    text = (
        f"ms by kind, forecast in brackets: {parts}; profiled step {1e3 * found.measured_s:.1f}; "
        f"{100 * found.found:.0f} % of the kernels' time found; peak so far "
        f"{figures['peak_bytes'] / 2**30:.1f} GiB, planned {figures['planned_bytes'] / 2**30:.1f}; "
        f"compiled in {took:.0f} s, loss {figures['losses'][0]:.4f} to {figures['losses'][-1]:.4f}"
    )
    data = figures | {"forecast_s": forecast.step_s, "compared": asdict(found), "compile_s": took}
    fits = figures["planned_bytes"] <= ctx.gpu.memory_limit + RESERVE_BYTES
    return Finding(what, OK if fits and found.found > 0.9 else WRONG, figure, text, data)


def timed(run: Run, steps: list[dict], executable: Any, ctx: Context) -> dict[str, Any]:
    """Figures of the steps without a profiler."""
    seconds = [step["step_time_s"] for step in steps[WARM:]]
    step_s = statistics.median(seconds)
    return {
        "step_s": step_s,
        "seconds": seconds,
        "mfu": throughput(run, step_s, ctx.gpu.tflops[run.precision.dtype])["mfu"]["causal"],
        "losses": [step["loss"] for step in steps],
        "peak_bytes": steps[-1]["peak_memory_bytes"],
        "planned_bytes": Memory.of(executable, ctx.gpu).peak,
    }


def keep(folder: Path, program: Path, profiled: Any, expected: dict, steps: int) -> None:
    """Writes the program, and the measured and the expected time of each instruction."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.hlo.gz").write_bytes(gzip.compress(program.read_bytes()))
    lines = ["instruction,runs,measured_us,forecast_us"]
    for name in sorted(profiled.launches.keys() | expected.keys()):
        launches = [1e6 * s for _, s in profiled.launches.get(name, ())]
        line = expected.get(name)
        runs = len(launches) / steps
        lines.append(
            f"{name},{runs:g},{sum(launches) / steps:.3f},{1e6 * line.seconds if line else 0:.3f}"
        )
    (folder / "kernels.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def compiles(ctx: Context) -> Iterator[Finding]:
    """Compiles every row for an absent GPU, with the parts of its forecast."""
    for recipe in names(ctx):
        run = steps_of(recipe)
        on = mesh.make_mesh(run.mesh_shape, compile_only_devices(ctx.gpu, 1))
        with jax.set_mesh(on):
            program, _, took = compile_program(run)
        walk, kernels = Walk(read(program)), tables.load(ctx.gpu.name.lower())
        schedule = expected_schedule(walk, ctx.gpu, kernels)
        parts = ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in schedule.parts.items())
        peak = Memory.of(program, ctx.gpu).peak / 2**30
        figure = f"forecast {1e3 * schedule.step_s:.1f} ms, {peak:.1f} GiB"
        yield Finding(f"{recipe}, row 1", MEASURED, figure, f"{parts}; compiled in {took:.0f} s")
