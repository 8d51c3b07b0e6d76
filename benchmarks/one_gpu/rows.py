"""One-GPU rows: the time of a step, and of each kind of kernel in it, next to the forecast."""

import gzip
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxbench import mesh
from jaxbench.forecast import tables
from jaxbench.forecast.costs import Measured
from jaxbench.plan import compare_profile
from jaxbench.plan.absent import compile_only_devices
from jaxbench.plan.compare_profile import Expected
from jaxbench.plan.compiled_step import axes_of
from jaxbench.plan.plan import Memory
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Run
from jaxbench.results.throughput import throughput
from jaxbench.run import profiling
from jaxbench.train.loop import run_steps
from jaxbench.train.program import compile_program, parse_program
from jaxbench.train.program_checks import check_program
from jaxbench.xla import custom_calls
from jaxbench.xla.hlo import Program
from jaxbench.xla.schedule import Walk
from jaxbench.xla.timeline import Kernel
from one_gpu.context import MEASURED, OK, WRONG, Context, Finding, row, sampled

FIRST = (
    "deepseek_v3_fp8", "qwen3_235b_a22b_fp8", "gpt_oss_120b_fp8", "nemotron3_nano_30b_a3b_fp8",
    "nemotron3_super_120b_a12b_fp8", "llama31_405b_fp8", "qwen3_30b_a3b_fp8",
    "llama2_70b_bf16 execution.offload=gate,up", "gpt_oss_120b_bf16",
)  # fmt: skip
"""The rows that are measured first: those that no H100 has run yet, or whose kernels have changed
since. Then come all other recipes that this GPU can run. A change of a row follows its recipe."""

LANES = 5
"""Rows that are compiled at a time, before any of them is timed."""

WARM, TIMED, PROFILED = 4, 12, 3
"""Steps of a row: before others are timed, timed ones, and profiled ones."""

VISIBLE = {"xla_gpu_enable_command_buffer": ""}
"""The option of a program without CUDA graphs, which hide kernels from JAX's profiler. With graphs
the steps of five rows were 0.5 to 1.4 % shorter (H100, jax 0.11.2)."""


def names(ctx: Context) -> list[str]:
    """The recipes that were asked for, or all that this GPU can run, the most important first."""
    if ctx.rows:
        return [*ctx.rows]
    able = [name for name in recipes.names() if ctx.gpu.multiplies(name.rpartition("_")[2])]
    return [*FIRST, *(name for name in able if name not in FIRST)]


def run_of(name: str) -> Run:
    """Row `1` of a recipe, with the change that may follow its name."""
    recipe, *changes = name.split()
    return row(recipe, 1, *changes)


def label(name: str) -> str:
    """The folder of a row."""
    return name.replace(" ", "-")


def check(ctx: Context) -> Iterator[Finding]:
    """Compiles some rows together, times them one after another, then compares their kernels with
    the forecast; then the next rows."""
    every = names(ctx)
    for first in range(0, len(every), LANES):
        batch = every[first : first + LANES]
        with ctx.lanes(LANES) as pool:
            programs = {recipe: pool.submit(compiled, run_of(recipe)) for recipe in batch}
        for step in (timed, explained):
            for recipe in batch:
                try:
                    yield step(ctx, recipe, programs[recipe].result())
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                    yield Finding(f"{recipe}, row 1, {step.__name__}", WRONG, reason)


def compiled(run: Run) -> tuple[Any, float]:
    """The checked program of a row, and the seconds that its compilation took."""
    with jax.set_mesh(mesh.make_mesh(run.mesh_shape)):
        program, lower_s, compile_s = compile_program(run, VISIBLE)
        check_program(program, run)
    return program, lower_s + compile_s


def timed(ctx: Context, recipe: str, program: tuple[Any, float]) -> Finding:
    """Steps of a row, the last of them under the profiler."""
    executable, took = program
    run = replace(run_of(recipe), steps=WARM + TIMED + PROFILED)
    with jax.set_mesh(mesh.make_mesh(run.mesh_shape)):
        window = WARM + TIMED, run.steps
        pause = profiling.jax_window(window, ctx.folder / label(recipe), executable)
        with sampled(ctx) as sampler:
            steps = list(run_steps(run, executable, pauses=[pause]))
    seconds = [step["step_time_s"] for step in steps[WARM : WARM + TIMED]]
    step_s, peak = statistics.median(seconds), steps[-1]["peak_memory_bytes"]
    planned = Memory.of(executable, ctx.gpu).peak
    losses = [step["loss"] for step in steps]
    rates = throughput(run, step_s, ctx.gpu.tflops[run.precision.dtype])
    figure = f"{1e3 * step_s:.1f} ms, MFU {100 * rates['mfu']['causal']:.1f} %"
    text = (
        f"loss {losses[0]:.4f} to {losses[-1]:.4f}; peak of all rows so far "
        f"{peak / 2**30:.1f} GiB, planned {planned / 2**30:.1f}; compiled in {took:.0f} s"
    )
    data = {"seconds": seconds, "losses": losses, "planned_bytes": planned, "peak_bytes": peak}
    if sampler:
        data |= sampler.summaries[0]
    healthy = all(map(math.isfinite, losses))
    return Finding(f"{recipe}, row 1", OK if healthy else WRONG, figure, text, data)


def explained(ctx: Context, recipe: str, program: tuple[Any, float]) -> Finding:
    """Milliseconds of each kind of kernel in a profiled step, next to the forecast."""
    run, trace = run_of(recipe), ctx.folder / label(recipe) / "profile" / "rank-0"
    # The text has the names by which the profile calls asynchronous instructions.
    text = (trace / compare_profile.PROFILED).read_text()
    walk = Walk(Program.parse(text, custom_calls.RULES, strict=False))
    launched = compare_profile.read_profile(trace)
    kernels = tables.load(ctx.gpu.name.lower())
    expected = compare_profile.by_instruction(walk.under(Measured(ctx.gpu, kernels)))
    axes = partial(axes_of, mesh_shape=run.mesh_shape)
    found = compare_profile.compare(launched, walk, ctx.gpu, kernels, axes)
    profiled = {
        name: sum(s for _, s in launches) / found.steps
        for name, launches in launched.launches.items()
    }
    keep(ctx.output / label(recipe), text, profiled, expected)
    parts = ", ".join(
        f"{part.name} {1e3 * part.measured_s:.1f} ({1e3 * part.forecast_s:.1f})"
        for part in found.kernels
    )
    ratio = found.measured_s / found.forecast_s
    figure = f"{1e3 * found.measured_s:.1f} ms, {ratio:.3f} of the forecast"
    beside = f"ms by kind (forecast): {parts}; {100 * found.found:.0f} % of kernels' time found"
    verdict = MEASURED if found.found > FOUND else WRONG
    data = {"step_s": [found.measured_s, found.forecast_s], "kinds": by_kind(profiled, expected)}
    return Finding(f"{recipe}, row 1, profiled", verdict, figure, beside, data)


def by_kind(measured: dict[str, float], expected: dict[str, Expected]) -> dict[str, list[float]]:
    """Measured and forecast seconds of a step by kind of kernel, finer than in a plan."""
    seconds: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, line in expected.items():
        if isinstance(line.cause, Kernel):
            both = seconds[kind(name, line.cause)]
            both[0] += measured.get(name, 0.0)
            both[1] += line.seconds
    return dict(seconds)


def kind(name: str, kernel: Kernel) -> str:
    """The kind of a kernel."""
    work = kernel.works[0] if kernel.works else None
    if work and work.matmul:
        return f"{'matmuls' if work.kind == 'product' else 'grouped matmuls'}, {work.format}"
    if work and work.kind == "attention":
        return f"attention, {'backward' if work.backward else 'forward'}"
    if kernel.part == "other kernels" and "scatter" in name:
        return "scatters"
    return kernel.part


FOUND = 0.9
"""Smallest share of the forecast's kernel seconds whose instructions a profile has."""


def keep(
    folder: Path, program: str, measured: dict[str, float], expected: dict[str, Expected]
) -> None:
    """Writes the program, and the measured and the forecast time of each instruction in a step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.hlo.gz").write_bytes(gzip.compress(program.encode()))
    lines = ["instruction,measured_us,forecast_us"]
    for name in sorted(measured.keys() | expected.keys()):
        forecast = expected[name].seconds if name in expected else 0.0
        lines.append(f"{name},{1e6 * measured.get(name, 0.0):.3f},{1e6 * forecast:.3f}")
    (folder / "kernels.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def compiles(ctx: Context) -> Iterator[Finding]:
    """Compiles every row for an absent GPU, with the parts of its forecast."""
    for recipe in names(ctx):
        run = run_of(recipe)
        on = mesh.make_mesh(run.mesh_shape, compile_only_devices(ctx.gpu, 1))
        with jax.set_mesh(on):
            program, _, took = compile_program(run)
        walk, kernels = Walk(parse_program(program, run)), tables.load(ctx.gpu.name.lower())
        schedule = walk.under(Measured(ctx.gpu, kernels))
        parts = ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in schedule.parts.items())
        peak = Memory.of(program, ctx.gpu).peak / 2**30
        figure = f"forecast {1e3 * schedule.step_s:.1f} ms, {peak:.1f} GiB"
        yield Finding(f"{recipe}, row 1", MEASURED, figure, f"{parts}; compiled in {took:.0f} s")
